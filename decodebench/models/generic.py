"""Reader of models that no other reader knows, by the names that fields commonly have."""

from __future__ import annotations

import re

from decodebench.models import state
from decodebench.models.attention import CHUNKED, FULL, KV_HEADS, SLIDING, heads, window
from decodebench.models.families import Family
from decodebench.models.fields import Fields
from decodebench.models.layers import AttentionLayer, Layer, StateLayer

MAMBA = {"mamba", "mamba2"}
LINEAR = {"linear_attention"}
CONVOLUTION = {"conv", "short_conv"}
NOTHING = {"mlp", "moe"}


def read_generic(f: Fields, root: str) -> list[Layer]:
    """A layer per entry of ``layer_types``, or attention throughout; what a
    type stores is told by its fields.

    Raises ``ConfigError`` for a layer type that is not known, or one whose fields are missing.
    """
    length = f.layer_count()
    known = FULL | SLIDING | CHUNKED | MAMBA | LINEAR | CONVOLUTION | NOTHING
    types = f.listing("layer_types", "layers_block_type", length=length, choices=known)
    if types is None and state_fields(f):
        raise f.missing("layer_types", "layers_block_type")
    span = window(f)
    types = types or ["sliding_attention" if span else "full_attention"] * length
    layers: list[Layer] = []
    for i, kind in enumerate(types):
        if kind not in NOTHING:
            layers.append(generic_layer(f, f"{root}.{i}", kind, span))
    return layers


def generic_layer(f: Fields, path: str, kind: str, span: int | None) -> Layer:
    """The layer that a type named ``kind`` is in most models.

    ``span``: tokens of its window or chunk. Raises ``ConfigError`` where the fields do not settle its cache.
    """
    if kind in MAMBA | LINEAR | CONVOLUTION:
        return generic_state(f, path, kind)
    if f.has("kv_lora_rank"):
        raise f.wrong(
            ("kv_lora_rank",),
            f.get("kv_lora_rank"),
            "vLLM keeps latent rows only for the model types it lists, and this is none of them",
        )
    spelled = [name for name in KV_HEADS if name in f.values]
    if spelled and f.values[spelled[0]] is None:
        raise f.wrong(spelled[:1], None, "vLLM takes the KV heads from this field, and null is no number")
    if kind in SLIDING and span is None:
        raise f.missing("sliding_window")
    return AttentionLayer(
        f"{path}.self_attn.attn",
        *heads(f, *(spelled[:1] or KV_HEADS)),
        sliding_window=span if kind in SLIDING else None,
        attention_chunk_size=f.integer("attention_chunk_size") if kind in CHUNKED else None,
    )


def generic_state(f: Fields, path: str, kind: str) -> StateLayer:
    """Which recurrence it is, by which fields are there."""
    if kind in CONVOLUTION:
        channels = f.integer("conv_dim", "hidden_size")
        return StateLayer(
            f"{path}.short_conv", "short_conv", f.integer("conv_L_cache", "conv_kernel"), channels
        )
    if f.has("linear_num_value_heads"):
        return state.delta_net(f, f"{path}.linear_attn")
    if f.has("mamba_n_heads"):
        return state.granite_state(f, f"{path}.mixer", state.inner_size(f))
    if f.has("mamba_d_state"):
        return StateLayer(
            f"{path}.mixer",
            "mamba1",
            f.integer("mamba_d_conv"),
            channels=state.inner_size(f),
            state_size=f.integer("mamba_d_state"),
        )
    raise f.missing("linear_num_value_heads", "mamba_n_heads", "mamba_d_state")


def state_fields(f: Fields) -> bool:
    """Whether the config speaks of states at all."""
    return any(name.startswith(("mamba_", "linear_num_", "ssm_", "conv_L")) for name in f.values)


#: words in a field's name that speak of what a cache holds
TELLING = re.compile(
    r"kv|head|group|block|ratio|index|window|chunk|conv|ssm|mamba|state|lora|rank|compress|loop|cycle|recur"
    r"|shar|cache|pattern|sink|latent|memor|linear|attn|attention|layer|encoder|audio|retention|sparse|interval"
    r"|period|stack|draft|mtp|nextn"
)
#: fields with such words that no cache depends on
HARMLESS = re.compile(
    r"layer_?norm|norm_eps|num_layers_to|initializer|dropout|bias|tie_|head_dtype|lm_head|expert|moe|router|rope"
    r"|^n_group$|^topk_group$|topk_method|vision|image|token_id|output_|use_cache|gradient|quant|dtype|scal|_pdrop"
    r"|attn_implementation|_name_or_path|position|pretraining|chunk_size_feed_forward|pruned_heads|cross_attention"
    r"|add_cross|is_encoder_decoder|max_window_layers|use_sliding_window|layer_scale|clip_qkv|softcap|logit|norm_type"
    r"|multiplier|first_k_dense|mlp|activation|gate"
)


def unread_fields(f: Fields) -> tuple[str, ...]:
    """Fields that nobody read and whose names speak of a cache, sorted; empty values say nothing."""
    return tuple(
        sorted(
            name
            for name, value in f.values.items()
            if name not in f.used
            and value not in (None, False, "", [], {})
            and TELLING.search(name.lower())
            and not HARMLESS.search(name.lower())
        )
    )


GENERIC = Family(read_generic, kernel_block_size=16)
