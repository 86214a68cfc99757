"""config.json → the model's parameters by role, as many as an engine would hold.

Of multimodal models the language model is counted: a decode step reads nothing else. Draft layers
(multi-token prediction) are left out, as engines leave them out unless they speculate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from decodebench.errors import DecodebenchError
from decodebench.forecast import parts as blocks
from decodebench.forecast.architectures import (
    ARCHITECTURES,
    COMMON,
    EXPERT_COUNTS,
    EXPERTS_PER_TOKEN,
    Architecture,
    Flag,
)
from decodebench.forecast.parts import ROLES, Attending, Part, mlp
from decodebench.forecast.quantization import Format, formats
from decodebench.forecast.unusual import OWN_ATTENTION, OWN_FEED_FORWARD, UNUSUAL
from decodebench.models.families import FAMILIES
from decodebench.models.fields import Fields
from decodebench.models.layers import STATE_SHAPES, StateLayer
from decodebench.models.load import TEXT_TYPES, load_model, text_config
from decodebench.models.model import Model
from decodebench.models.options import CacheOptions
from decodebench.words import bytes_text

#: families whose configs may leave the inner size to be four times the width
FOUR_TIMES = {"gpt2", "bloom", "falcon", "gpt_neox", "gptj", "gpt_bigcode"}
#: families with two attentions and dense blocks a layer, whose configs may count both (LongCat)
TWO_A_LAYER = {"longcat_flash", "longcat_flash_ngram"}
#: names of a model's width
WIDTHS = ("hidden_size", "n_embd", "d_model")


def weights(model: Model | str | Path | Mapping) -> tuple[Part, ...]:
    """Every tensor of the model by role, tensors of one role and shape added up.

    ``model`` is what ``load_model`` takes. Raises ``ConfigError`` where config.json leaves out a size
    that tensors need (``vocab_size``, ``hidden_size``, ``intermediate_size``).
    """
    model = load_model(model)
    return tensors(model, *fields_of(model))


def tensors(model: Model, f: Fields, has: Architecture) -> tuple[Part, ...]:
    """``weights`` of fields that are at hand: ``f.used`` tells which of them counted."""
    found = [*mixers(model, f, has), *feed_forward(model, f, has), *norms(model, f, has), *ends(f, has)]
    found += UNUSUAL.get(f.get("model_kind"), lambda f: [])(f)
    return add_up(found)


def parameters(model: Model | str | Path | Mapping) -> dict[str, int]:
    """Parameters by role, in the order of ``ROLES``; roles that a model lacks are left out."""
    counts: dict[str, int] = {}
    for part in weights(model):
        counts[part.role] = counts.get(part.role, 0) + part.params
    return {role: counts[role] for role in ROLES if role in counts}


def weight_bytes(model: Model | str | Path | Mapping, tensor_parallel_size: int = 1) -> float:
    """Bytes of weights that one rank holds, in the checkpoint's own formats; draft layers are left out.

    ``model`` is what ``load_model`` takes. Raises ``ConfigError`` where config.json leaves out a size that
    tensors need, ``QuantizationError`` where it names a quantization that is not known.
    """
    model = load_model(model)
    sizes = formats(model.config, model.resolve(CacheOptions()).dtype)
    return sum(resident(part, sizes, tensor_parallel_size) for part in weights(model))


def weights_text(model: Model | str | Path | Mapping, tensor_parallel_size: int = 1) -> str:
    """``weight_bytes`` in words: what lies beside a cache, an estimate where it is one, or why it is not known."""
    try:
        known = load_model(model)
        size = bytes_text(weight_bytes(known, tensor_parallel_size))
        return f"about {size}, an estimate" if not_exact(known) else size
    except DecodebenchError as error:
        return f"not known ({error})"


def resident(part: Part, sizes: Mapping[str, Format], ranks: int, replicas: int = 1) -> float:
    """Bytes of a part's weights on one of ``ranks`` tensor parallel ranks, all pipeline stages together.

    Data parallel ``replicas`` share their experts: each holds a part of them.
    """
    size = sizes[part.role].bits / 8
    if part.role == "experts":
        return part.params * size / (ranks * replicas)
    return part.per_rank(ranks) * size


def add_up(found: list[Part]) -> tuple[Part, ...]:
    """Parts that differ in their size alone as one."""
    together: dict[tuple, Part] = {}
    for part in found:
        key = (part.role, part.experts, part.top_k, part.shards, part.rows, part.uses)
        before = together.get(key)
        together[key] = (
            replace(before, params=before.params + part.params, layers=before.layers + part.layers)
            if before
            else part
        )
    return tuple(sorted(together.values(), key=lambda part: ROLES.index(part.role)))


def fields_of(model: Model) -> tuple[Fields, Architecture]:
    """The language model's fields with its family's defaults behind them, and its architecture."""
    outer = Fields(model.config, model.name)
    f, _ = text_config(outer)
    kind = TEXT_TYPES.get(model.model_type, model.model_type)
    kind = kind if kind in FAMILIES else f"{kind}_text"
    has = ARCHITECTURES.get(kind, COMMON)
    family = FAMILIES.get(kind)
    defaults = dict(family.defaults if family else {}) | dict(has.defaults)
    tied = outer.get("tie_word_embeddings")
    if tied is not None:
        defaults["tie_word_embeddings"] = tied
    return f.with_defaults({"model_kind": kind} | defaults), has


def not_exact(model: Model) -> str | None:
    """Why a model's parameters are an estimate, in one sentence; None where its family's tensors are known."""
    kind = fields_of(model)[0].get("model_kind")
    if kind in ARCHITECTURES:
        return None
    return f"weights are an estimate: of {model.model_type} the tensors beside its cache are not known"


def on(f: Fields, flag: Flag) -> bool:
    """What a flag of an architecture says of this config."""
    if isinstance(flag, tuple):
        return f.get(flag[0]) == flag[1]
    return bool(f.get(flag, default=False)) if isinstance(flag, str) else flag


def width_of(f: Fields) -> int:
    """Numbers in a token's hidden state."""
    return f.integer(*WIDTHS)


def depth_of(f: Fields) -> int:
    """Decoder layers."""
    if f.get("model_kind") == "nemotron_h":
        return len(nemotron_letters(f))
    if f.get("model_kind") in TWO_A_LAYER:
        return f.layer_count("num_layers", "num_hidden_layers")
    return f.layer_count("num_hidden_layers", "n_layer", "decoder_layers", "num_layers")


def nemotron_letters(f: Fields) -> str:
    """A letter a layer: M(amba-2), * (attention), - (MLP), E(xperts)."""
    pattern = f.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return pattern
    letters = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "moe": "E"}
    return "".join(letters.get(kind, "-") for kind in f.listing("layers_block_type", "layer_types") or ())


# -- what mixes tokens -----------------------------------------------------------------------------


def attending(f: Fields, has: Architecture) -> Attending:
    """The architecture's attention with this config's flags."""
    norm = has.query_key_norm
    if has.query_key_norm_if is not None and not on(f, has.query_key_norm_if):
        norm = None
    return Attending(
        qkv_bias=on(f, has.qkv_bias),
        out_bias=on(f, has.out_bias),
        query_key_norm=norm,
        norm_bias=has.norm_bias,
        gate=has.gate,
        sinks=has.sinks,
    )


def mixers(model: Model, f: Fields, has: Architecture) -> list[Part]:
    """Attention and states, layer by layer as ``models`` reads them."""
    width, attention = width_of(f), attending(f, has)
    found: list[Part] = []
    layers: list[Any] = list(model.layer.values())  # of many kinds, told apart by their mixer
    for layer in layers:
        if layer.mixer == "attention":
            if f.get("model_kind") not in OWN_ATTENTION:
                shared = layer.name in model.shared_layers
                found += blocks.attention(layer, width, replace(attention, queries_only=shared))
        elif layer.mixer == "mla":
            found += blocks.latent(layer, width, f)
        elif layer.mixer == "indexer":
            found += blocks.indexer(layer, width, f)
        elif layer.mixer in STATE_SHAPES:
            found += states(layer, width, f)
    return found


def states(layer: StateLayer, width: int, f: Fields) -> list[Part]:
    """One recurrent layer's tensors."""
    conv_bias = bool(f.get("mamba_conv_bias", "use_conv_bias", default=True))
    bias = bool(f.get("mamba_proj_bias", "use_bias", "add_bias_linear", default=False))
    if layer.mixer == "mamba1":
        rank = f.get("time_step_rank", "mamba_dt_rank", default="auto")
        rank = -(-width // 16) if rank == "auto" else f.integer("time_step_rank", "mamba_dt_rank")
        return [blocks.mamba1(layer, width, rank, conv_bias, bias, f.get("model_kind") == "jamba")]
    if layer.mixer == "mamba2":
        norm = f.get("model_kind") != "falcon_h1" or bool(f.get("mamba_rms_norm", default=False))
        return blocks.mamba2(layer, width, conv_bias, bias, norm)
    if layer.mixer == "gdn":
        return [blocks.delta_net(layer, width)]
    if layer.mixer == "kda":
        return blocks.kimi_delta(layer, width)
    return [blocks.short_conv(layer, width, bool(f.get("conv_bias", default=False)))]


# -- feed-forward blocks -----------------------------------------------------------------------------


def feed_forward(model: Model, f: Fields, has: Architecture) -> list[Part]:
    """Dense blocks, and routed and shared experts with their router."""
    kind = f.get("model_kind")
    if kind in ("mamba", "falcon_mamba", "mamba2") or kind in OWN_FEED_FORWARD:
        return []
    width, depth = width_of(f), depth_of(f)
    if kind == "nemotron_h":
        letters = nemotron_letters(f)
        plain = letters.count("-") * dense(f, has, width, 0) if "-" in letters else []
        return plain + (letters.count("E") * experts(f, has, width) if "E" in letters else [])
    if kind in TWO_A_LAYER:
        return depth * experts(f, has, width)
    sparse = sparse_layers(f, depth)
    found: list[Part] = []
    for i in range(depth):
        if sparse[i]:
            found += experts(f, has, width, i)
        if not sparse[i] or kind == "gemma4_text":  # Gemma 4 has experts beside its dense block
            found += dense(f, has, width, i)
    return found


def dense(f: Fields, has: Architecture, width: int, layer: int) -> list[Part]:
    """The dense block of one layer."""
    if f.get("model_kind") == "granitemoehybrid":  # without experts it has its shared block alone
        return [mlp(width, f.integer("shared_intermediate_size"), has.matrices)]
    sizes = f.get("intermediate_size")
    if isinstance(sizes, list):
        inner = item(f, ("intermediate_size",), layer)
    else:
        inner = f.integer(*has.dense_size, default=default_inner(f, width))
    if f.get("use_double_wide_mlp", default=False):
        first = depth_of(f) - f.integer("num_kv_shared_layers", default=0, least=0)
        inner *= 2 if layer >= first > 0 else 1
    if f.get("model_kind") == "lfm2" and f.get("block_auto_adjust_ff_dim", default=True):
        grain = f.integer("block_multiple_of", default=256)
        factor = f.number("block_ffn_dim_multiplier") if f.has("block_ffn_dim_multiplier") else 1
        inner = int(factor * int(2 * inner / 3))
        inner = grain * -(-inner // grain)
    return [mlp(width, inner, has.matrices, on(f, has.mlp_bias))]


def item(f: Fields, names: tuple[str, ...], layer: int) -> int:
    """A layer's own number in a list with one for each."""
    given = f.listing(*names, length=layer + 1) or ()
    return Fields(dict.fromkeys(names, given[layer]), f"{f.source}, layer {layer}").integer(*names)


def default_inner(f: Fields, width: int) -> int | None:
    """The inner size of families whose configs may leave it to be four times the width."""
    return 4 * width if f.get("model_kind") in FOUR_TIMES else None


def experts(f: Fields, has: Architecture, width: int, layer: int = 0) -> list[Part]:
    """One layer's routed experts, its router, and the experts that all tokens share."""

    def number(names: tuple[str, ...], **limits) -> int:
        value = f.get(*names)
        if isinstance(value, list):  # a number for every layer (Hunyuan)
            return item(f, names, layer)
        return f.integer(*names, **limits)

    count, top_k = number(EXPERT_COUNTS), number(EXPERTS_PER_TOKEN)
    inner, latent = number(has.expert_size), f.optional("moe_latent_size")
    one = has.matrices * (latent or width) * inner
    one += (has.matrices - 1) * inner + width if has.expert_bias else 0
    router = linear_router(width, count, has, f)
    found = [Part("experts", count * one, 1, count, top_k), Part("router", router, shards=1)]
    if latent:  # experts work in a narrower space, with a map into it and back
        found.append(Part("shared_experts", 2 * width * latent, shards=1))
    shared = number(has.shared_size, default=0, least=0) if has.shared_size else inner
    if has.shared_count or not has.shared_size:
        shared *= number(has.shared_count, default=0, least=0) if has.shared_count else 0
    if shared:
        found.append(mlp(width, shared, has.matrices, role="shared_experts"))
        if has.shared_gate:
            found.append(Part("router", width, shards=1))
    return found


def linear_router(width: int, count: int, has: Architecture, f: Fields) -> int:
    """Numbers of a router of ``count`` experts: its matrix, its bias and its correction where there are."""
    return blocks.linear(width, count, has.router_bias) + (count if on(f, has.correction) else 0)


def sparse_layers(f: Fields, depth: int) -> list[bool]:
    """Which layers have routed experts; every field that says so under the names that configs use."""
    if not f.has(*EXPERT_COUNTS) or f.integer(*EXPERT_COUNTS, least=0) < 2:
        return [False] * depth
    if isinstance(enumerated := f.get("moe_layers_enum"), str):
        chosen = {part.strip() for part in enumerated.split(",")}
        return [str(i) in chosen for i in range(depth)]
    rules: list[Callable[[int], bool]] = []
    kinds = f.listing("mlp_layer_types", length=depth)
    frequency = f.get("moe_layer_freq")
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    if isinstance(frequency, list):
        return [bool(x) for x in f.listing("moe_layer_freq", length=depth) or ()]
    if f.get("interleave_moe_layer_step") and not f.has("moe_layers"):
        step = f.integer("interleave_moe_layer_step")
        return [(i + 1) % step == 0 for i in range(depth)]
    if f.has("moe_layers"):
        chosen = set(f.listing("moe_layers") or ())
        return [i in chosen for i in range(depth)]
    if f.has("expert_layer_period"):
        period, offset = f.integer("expert_layer_period"), f.integer("expert_layer_offset", least=0)
        return [i % period == offset for i in range(depth)]
    if f.has("moe_layer_start_index"):
        first, last = f.integer("moe_layer_start_index", least=0), f.optional("moe_layer_end_index", least=-1)
        step = f.integer("moe_layer_interval", default=1)
        last = depth - 1 if last in (None, -1) else last
        return [first <= i <= last and (i + 1) % step == 0 for i in range(depth)]
    first = f.integer("first_k_dense_replace", "num_dense_layers", default=0, least=0)
    rules.append(lambda i: i >= first)
    if isinstance(frequency, int):
        rules.append(lambda i: i % frequency == 0)
    step = f.integer("decoder_sparse_step", default=1)
    dense_ones = set(f.listing("mlp_only_layers") or ())
    rules.append(lambda i: i not in dense_ones and (i + 1) % step == 0)
    return [all(rule(i) for rule in rules) for i in range(depth)]


# -- norms and both ends -----------------------------------------------------------------------------


def norms(model: Model, f: Fields, has: Architecture) -> list[Part]:
    """All normalization layers as one part."""
    if has.bare_norms:
        return []
    each = has.norms
    if f.get("model_kind") == "falcon" and f.get("parallel_attn", default=True):
        each = 2 if f.get("new_decoder_architecture", default=False) else 1
    last = has.final_norm and f.get("do_layer_norm_before", default=True)
    count = each * depth_of(f) + bool(last)
    return [Part("norm", count * width_of(f) * (2 if has.layer_norm else 1), shards=1)]


def is_tied(f: Fields, has: Architecture) -> bool:
    """Whether the head is the embedding itself."""
    if isinstance(has.tied, str):
        return has.tied == "shared"
    return bool(f.get("tie_word_embeddings", default=has.tied))


def embedding_size(f: Fields) -> int:
    """Parameters of the table of tokens."""
    return f.integer("vocab_size") * (f.optional("word_embed_proj_dim") or width_of(f))


def tied_head(f: Fields, has: Architecture) -> int:
    """Parameters of the embedding that the head reads again; 0 where the head has its own."""
    return embedding_size(f) if is_tied(f, has) else 0


def ends(f: Fields, has: Architecture) -> list[Part]:
    """The embedding, and the head where it is not the embedding itself."""
    vocabulary, size = f.integer("vocab_size"), embedding_size(f)
    found = [Part("embedding", size, rows=vocabulary)]
    if not is_tied(f, has):
        found.append(Part("head", size))
    if on(f, has.head_bias):
        found.append(Part("head", vocabulary))
    return found
