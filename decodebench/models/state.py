"""Readers of models with recurrent states: Mamba-1, Mamba-2, gated delta net, short convolution."""

from __future__ import annotations

from collections.abc import Callable

from decodebench.models.attention import heads
from decodebench.models.fields import MAX_LAYERS, Fields
from decodebench.models.layers import AttentionLayer, Layer, StateLayer

ATTENTION = {"attention", "full_attention"}
STATE = {"mamba", "linear_attention", "conv", "mamba2"}


def attention_layer(f: Fields, name: str) -> AttentionLayer:
    """Full attention with the config's heads."""
    return AttentionLayer(name, *heads(f))


def interleaved(
    f: Fields,
    types: list[str],
    root: str,
    attention: str,
    state: Callable[[str], StateLayer],
    state_path: str,
) -> list[Layer]:
    """A layer per entry of ``types``, either attention or a state."""
    return [
        attention_layer(f, f"{root}.{i}.{attention}")
        if kind in ATTENTION
        else state(f"{root}.{i}.{state_path}")
        for i, kind in enumerate(types)
    ]


def read_jamba(f: Fields, root: str) -> list[Layer]:
    """Mamba-1 layers, every ``attn_layer_period``-th an attention layer."""
    length = f.layer_count()
    period, offset = f.integer("attn_layer_period"), f.integer("attn_layer_offset", least=0)
    types = f.listing("layers_block_type", length=length, choices=ATTENTION | STATE)
    types = types or ["attention" if i % period == offset else "mamba" for i in range(length)]
    channels = f.integer("mamba_expand") * f.integer("hidden_size")

    def state(name: str) -> StateLayer:
        return StateLayer(
            name,
            "mamba1",
            f.integer("mamba_d_conv"),
            channels=channels,
            state_size=f.integer("mamba_d_state"),
        )

    return interleaved(f, types, root, "attn", state, "mixer")


def read_mamba(f: Fields, root: str) -> list[Layer]:
    """Mamba-1 throughout."""
    channels = f.optional("intermediate_size") or int(f.number("expand") * f.integer("hidden_size"))
    return [
        StateLayer(
            f"{root}.{i}.mixer",
            "mamba1",
            f.integer("conv_kernel"),
            channels=channels,
            state_size=f.integer("state_size"),
        )
        for i in range(f.layer_count())
    ]


def read_mamba2(f: Fields, root: str) -> list[Layer]:
    """Mamba-2 throughout."""
    return [
        StateLayer(
            f"{root}.{i}.mixer",
            "mamba2",
            f.integer("conv_kernel"),
            channels=int(f.number("expand") * f.integer("hidden_size")),
            num_heads=f.integer("num_heads"),
            head_dim=f.integer("head_dim"),
            state_size=f.integer("state_size"),
            num_groups=f.integer("n_groups"),
        )
        for i in range(f.layer_count())
    ]


def mamba2(f: Fields, name: str, channels: int, heads: int, head_dim: int, groups: int) -> StateLayer:
    """A Mamba-2 layer under the field names of Granite, Falcon-H1 and Zamba2."""
    return StateLayer(
        name,
        "mamba2",
        f.integer("mamba_d_conv"),
        channels=channels,
        num_heads=heads,
        head_dim=head_dim,
        state_size=f.integer("mamba_d_state"),
        num_groups=groups,
    )


def inner_size(f: Fields) -> int:
    """Channels of a Mamba layer: ``mamba_expand`` times the hidden size."""
    return int(f.number("mamba_expand") * f.integer("hidden_size"))


def read_granite(f: Fields, root: str) -> list[Layer]:
    """Mamba-2 and attention in the order of ``layer_types``; some Granite hybrids have no states at all."""
    length = f.layer_count()
    types = f.listing("layer_types", "layers_block_type", length=length, choices=ATTENTION | STATE)
    types = types or ["mamba"] * length
    channels = inner_size(f)
    return interleaved(
        f, types, root, "self_attn.attn", lambda name: granite_state(f, name, channels), "mixer"
    )


def granite_state(f: Fields, name: str, channels: int) -> StateLayer:
    """A Mamba-2 layer whose head size may be left to the config class ("auto")."""
    heads, given = f.integer("mamba_n_heads"), f.get("mamba_d_head")
    size = channels // heads if given in (None, "auto") else f.integer("mamba_d_head")
    return mamba2(f, name, channels, heads, size, f.integer("mamba_n_groups"))


def read_falcon_h1(f: Fields, root: str) -> list[Layer]:
    """Attention and Mamba-2 side by side in every layer; the states are
    numbered behind the attention layers.
    """
    length = f.layer_count()
    channels = f.optional("mamba_d_ssm") or inner_size(f)
    layers: list[Layer] = []
    for i in range(length):
        layers.append(attention_layer(f, f"{root}.{i}.attn"))
        layers.append(granite_state(f, f"{root.removesuffix('.layers')}.{length + i}.mixer", channels))
    return layers


def read_zamba2(f: Fields, root: str) -> list[Layer]:
    """Mamba-2 in every layer, and in the hybrid ones an attention whose weights take turns."""
    types = f.listing("layers_block_type", choices={"mamba", "hybrid", "linear_attention"})
    length = f.layer_count()
    if types is None:
        if not f.has("hybrid_layer_ids"):
            raise f.missing("layers_block_type", "hybrid_layer_ids")
        given = f.layer_numbers("hybrid_layer_ids")
        types = ["hybrid" if i in given else "mamba" for i in range(length)]
    hybrids, turns = types.count("hybrid"), f.integer("num_mem_blocks")
    count = f.integer("num_attention_heads")
    size = f.optional("attention_head_dim") or 2 * f.integer("hidden_size") // count
    prefix = root.removesuffix(".layers")
    layers: list[Layer] = []
    for turn in range(turns):
        number = turn * (hybrids + turns - 1) // turns
        for _block in range(turn, hybrids, turns):
            layers.append(AttentionLayer(f"{prefix}.attn.{number}", count, count, size))
            number += 1
    heads, channels = f.integer("n_mamba_heads"), inner_size(f)
    head_dim = f.optional("mamba_headdim") or channels // heads
    for i in range(len(types)):
        layers.append(
            mamba2(f, f"{hybrids + i}.mixer", channels, heads, head_dim, f.integer("mamba_ngroups"))
        )
    return layers


def read_nemotron_h(f: Fields, root: str) -> list[Layer]:
    """A letter a layer: M(amba-2), * (attention); - and E (MLP, experts) store nothing."""
    letters = {
        "mamba": "M",
        "linear_attention": "M",
        "attention": "*",
        "full_attention": "*",
        "moe": "E",
        "mlp": "-",
    }
    pattern = f.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        types = f.listing("layers_block_type", "layer_types", choices=letters)
        if types is None:
            raise f.missing("hybrid_override_pattern", "layers_block_type")
        pattern = "".join(letters[kind] for kind in types)
    if bad := set(pattern) - set("M*-E"):
        raise f.wrong(("hybrid_override_pattern",), pattern, f"{bad.pop()!r} is none of M * - E")
    if len(pattern) > MAX_LAYERS:
        raise f.wrong(("hybrid_override_pattern",), pattern, f"at most {MAX_LAYERS} layers are sensible")
    layers: list[Layer] = []
    for i, letter in enumerate(pattern):
        if letter == "*":
            layers.append(attention_layer(f, f"{root}.{i}.mixer.attn"))
        elif letter == "M":
            heads, size = f.integer("mamba_num_heads"), f.integer("mamba_head_dim")
            layers.append(
                StateLayer(
                    f"{root}.{i}.mixer",
                    "mamba2",
                    f.integer("conv_kernel"),
                    channels=heads * size,
                    num_heads=heads,
                    head_dim=size,
                    state_size=f.integer("ssm_state_size"),
                    num_groups=f.integer("n_groups"),
                )
            )
    return layers


def read_delta_net(f: Fields, root: str) -> list[Layer]:
    """Gated delta nets, every ``full_attention_interval``-th layer full attention."""
    length = f.layer_count()
    types = f.listing("layer_types", length=length, choices=ATTENTION | STATE)
    if types is None:
        period = f.integer("full_attention_interval", default=4)
        types = ["linear_attention" if (i + 1) % period else "full_attention" for i in range(length)]

    return interleaved(f, types, root, "self_attn.attn", lambda name: delta_net(f, name), "linear_attn")


def delta_net(f: Fields, name: str) -> StateLayer:
    """A gated delta net, by the ``linear_*`` fields of Qwen3-Next and its kin."""
    return StateLayer(
        name,
        "gdn",
        f.integer("linear_conv_kernel_dim"),
        num_heads=f.integer("linear_num_value_heads"),
        head_dim=f.integer("linear_value_head_dim"),
        num_key_heads=f.integer("linear_num_key_heads"),
        state_size=f.integer("linear_key_head_dim"),
    )


def read_lfm2(f: Fields, root: str, width: str = "conv_dim") -> list[Layer]:
    """Short convolutions, and attention in the layers that ``layer_types`` names."""
    length = f.layer_count()
    types = f.listing("layer_types", length=length, choices=ATTENTION | STATE)
    if types is None:
        declared = f.has("full_attn_idxs")
        attending = f.layer_numbers("full_attn_idxs") if declared else list(range(length))
        types = ["full_attention" if i in attending else "conv" for i in range(length)]
    channels = f.integer(width, "hidden_size")

    def state(name: str) -> StateLayer:
        return StateLayer(name, "short_conv", f.integer("conv_L_cache"), channels=channels)

    return interleaved(f, types, root, "self_attn.attn", state, "short_conv")
