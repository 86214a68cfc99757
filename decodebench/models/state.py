"""Readers of models with recurrent states: Mamba-1, Mamba-2, gated delta net, short convolution."""

from __future__ import annotations

from collections.abc import Callable

from decodebench.models.attention import heads
from decodebench.models.fields import Fields
from decodebench.models.layers import AttentionLayer, Layer, StateLayer

ATTENTION = {"attention", "full_attention"}
STATE = {"mamba", "linear_attention", "conv", "mamba2"}


def attention_layer(f: Fields, name: str) -> AttentionLayer:
    return AttentionLayer(name, *heads(f))


def interleaved(
    f: Fields, types: list[str], root: str, attention: str, state: Callable[[str], StateLayer], state_path: str
) -> list[Layer]:
    """A layer per entry of ``types``, either attention or a state."""
    return [
        attention_layer(f, f"{root}.{i}.{attention}") if kind in ATTENTION else state(f"{root}.{i}.{state_path}")
        for i, kind in enumerate(types)
    ]


def mamba1(f: Fields, name: str, channels: int, state: str, conv: str) -> StateLayer:
    return StateLayer(name, "mamba1", f.integer(conv), channels=channels, state_size=f.integer(state))


def read_jamba(f: Fields, root: str) -> list[Layer]:
    """Mamba-1 layers, every ``attn_layer_period``-th an attention layer."""
    period, offset = f.integer("attn_layer_period"), f.integer("attn_layer_offset", least=0)
    types = ["attention" if i % period == offset else "mamba" for i in range(f.layer_count())]
    channels = f.integer("mamba_expand") * f.integer("hidden_size")
    return interleaved(
        f, types, root, "attn", lambda name: mamba1(f, name, channels, "mamba_d_state", "mamba_d_conv"), "mixer"
    )


def granite_state(f: Fields, name: str) -> StateLayer:
    return StateLayer(
        name, "mamba2", f.integer("mamba_d_conv"), channels=f.integer("mamba_expand") * f.integer("hidden_size"),
        num_heads=f.integer("mamba_n_heads"), head_dim=f.integer("mamba_d_head"),
        state_size=f.integer("mamba_d_state"), num_groups=f.integer("mamba_n_groups"),
    )  # fmt: skip


def read_granite(f: Fields, root: str) -> list[Layer]:
    length = f.layer_count()
    types = f.listing("layer_types", "layers_block_type", length=length, choices=ATTENTION | STATE)
    types = types or ["mamba"] * length
    return interleaved(f, types, root, "self_attn.attn", lambda name: granite_state(f, name), "mixer")


def read_nemotron_h(f: Fields, root: str) -> list[Layer]:
    """A letter a layer: M(amba-2), * (attention); - and E (MLP, experts) store nothing."""
    pattern = f.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        raise f.missing("hybrid_override_pattern")
    if bad := set(pattern) - set("M*-E|"):
        raise f.wrong(("hybrid_override_pattern",), pattern, f"{bad.pop()!r} is none of M * - E")
    mixers = f.integer("mamba_num_heads") * f.integer("mamba_head_dim")
    layers: list[Layer] = []
    for i, letter in enumerate(pattern):
        if letter == "*":
            layers.append(attention_layer(f, f"{root}.{i}.mixer.attn"))
        elif letter == "M":
            layers.append(
                StateLayer(
                    f"{root}.{i}.mixer", "mamba2", f.integer("conv_kernel"), channels=mixers,
                    num_heads=f.integer("mamba_num_heads"), head_dim=f.integer("mamba_head_dim"),
                    state_size=f.integer("ssm_state_size"), num_groups=f.integer("n_groups"),
                )  # fmt: skip
            )
    return layers


def delta_net(f: Fields, name: str) -> StateLayer:
    return StateLayer(
        name, "gdn", f.integer("linear_conv_kernel_dim"),
        num_heads=f.integer("linear_num_value_heads"), head_dim=f.integer("linear_value_head_dim"),
        num_key_heads=f.integer("linear_num_key_heads"), state_size=f.integer("linear_key_head_dim"),
    )  # fmt: skip


def read_delta_net(f: Fields, root: str) -> list[Layer]:
    """Gated delta nets, every ``full_attention_interval``-th layer full attention."""
    length = f.layer_count()
    types = f.listing("layer_types", length=length, choices=ATTENTION | STATE)
    if types is None:
        every = f.integer("full_attention_interval", default=4)
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(length)]
    return interleaved(f, types, root, "self_attn.attn", lambda name: delta_net(f, name), "linear_attn")
