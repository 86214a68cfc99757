"""Families whose tensors are like no other's: what they hold beside, or instead of, the common blocks."""

from __future__ import annotations

from collections.abc import Callable

from decodebench.forecast import parts as blocks
from decodebench.forecast.parts import Part, linear, mlp
from decodebench.models.attention import read_pangu_sink, read_step3p5
from decodebench.models.fields import Fields
from decodebench.models.layers import AttentionLayer, LatentLayer

#: the smallest number of tokens that DeepSeek-V4 compresses into one entry, with overlapping windows
OVERLAPPING = 4


def learned_positions(f: Fields) -> list[Part]:
    """A table with a row a position (GPT-2, OPT, Whisper's decoder)."""
    kind = f.get("model_kind")
    width = f.integer("hidden_size", "n_embd", "d_model")
    rows = f.integer("n_positions", "max_target_positions", "max_position_embeddings")
    rows += 2 if kind == "opt" else 0  # OPT's positions begin at 2
    return [Part("embedding", rows * width, rows=rows)]


def bloom(f: Fields) -> list[Part]:
    """A norm behind the embedding."""
    return [Part("norm", 2 * f.integer("hidden_size", "n_embed"), shards=1)]


def apertus(f: Fields) -> list[Part]:
    """The two numbers of every layer's activation."""
    return [Part("norm", 2 * f.layer_count(), shards=1)]


def opt_projections(f: Fields) -> list[Part]:
    """Positions, and the maps to and from embeddings that are narrower than the model."""
    width, narrow = f.integer("hidden_size"), f.optional("word_embed_proj_dim")
    found = learned_positions(f)
    if narrow and narrow != width:
        found.append(Part("mlp", 2 * width * narrow, shards=1))
    return found


def whisper_encoder(f: Fields) -> list[Part]:
    """The encoder, which a decode step does not touch, and the decoder's positions."""
    width, inner = f.integer("d_model"), f.integer("encoder_ffn_dim")
    layer = 4 * linear(width, width, True) + mlp(width, inner, 2, True).params + 4 * width
    count = f.integer("encoder_layers") * layer + f.integer("max_source_positions") * width + 2 * width
    count += linear(3 * f.integer("num_mel_bins"), width, True) + linear(3 * width, width, True)
    return [*learned_positions(f), Part("encoder", count)]


def per_layer_embeddings(f: Fields) -> list[Part]:
    """A second, narrow embedding for every layer, with its gate and projections (Gemma 3n, Gemma 4)."""
    narrow = f.optional("hidden_size_per_layer_input", least=0)
    if not narrow:
        return []
    width, depth = f.integer("hidden_size"), f.layer_count()
    rows = f.integer("vocab_size_per_layer_input", "vocab_size")
    return [
        Part("embedding", rows * depth * narrow, rows=rows),
        Part("mlp", width * depth * narrow),
        Part("mlp", 2 * depth * width * narrow, shards=1),
        Part("norm", narrow + depth * width, shards=1),
    ]


def gemma3n(f: Fields) -> list[Part]:
    """Alternating updates of several residual streams, and a low-rank block beside attention."""
    width, depth, streams = f.integer("hidden_size"), f.layer_count(), f.integer("altup_num_inputs")
    rank = f.integer("laurel_rank")
    return [
        *per_layer_embeddings(f),
        Part("mlp", depth * 2 * width * rank),
        Part("mlp", depth * (streams**2 + streams**3 + width * streams), shards=1),
        Part("mlp", 2 * (streams - 1) * width * width),
        Part("norm", depth * 3 * width, shards=1),
    ]


def gemma4(f: Fields) -> list[Part]:
    """Narrow embeddings, and where there are experts the three norms and two scales around them."""
    found = per_layer_embeddings(f)
    if f.has("num_experts"):
        width, depth = f.integer("hidden_size"), f.layer_count()
        found.append(Part("norm", depth * 3 * width, shards=1))
        found.append(Part("router", depth * (width + f.integer("num_experts")), shards=1))
    return found


def zamba2(f: Fields) -> list[Part]:
    """Attention and MLP blocks that hybrid layers take turns in, twice as wide as the model at their entry.

    A step reads a block's tensors once and uses them in each of its layers; low-rank adapters and the
    map back into the model are each layer's own.
    """
    width, inner = f.integer("hidden_size"), f.integer("intermediate_size")
    wide = 2 * width
    kinds = f.listing("layers_block_type")
    hybrids = kinds.count("hybrid") if kinds else len(f.listing("hybrid_layer_ids") or ())
    turns, rank = f.integer("num_mem_blocks"), f.integer("adapter_rank", default=128)
    uses = hybrids / turns
    bias = 2 * inner + width if f.get("add_bias_linear", default=False) else 0
    found = [
        Part("attention", turns * (3 * wide * wide + wide * width), uses=uses),
        Part("mlp", turns * (mlp(width, inner).params + bias), uses=uses),
        Part("norm", turns * (wide + width), shards=1),
        Part("mlp", hybrids * width * width, hybrids, shards=1),
        Part("mlp", hybrids * rank * (width + 2 * inner), hybrids),
    ]
    if f.get("use_shared_attention_adapter", default=False):
        found.append(Part("attention", hybrids * 3 * rank * 2 * wide, hybrids))
    return found


def longcat(f: Fields) -> list[Part]:
    """Two dense blocks a layer beside the experts, of which some do nothing at all."""
    width, depth = f.integer("hidden_size"), f.layer_count("num_layers", "num_hidden_layers")
    idle = f.integer("zero_expert_num", default=0, least=0)
    return [
        mlp(width, f.integer("ffn_hidden_size")).times(2 * depth),
        Part("router", depth * idle * (width + 1), shards=1),
    ]


def minicpm3(f: Fields) -> list[Part]:
    """Latent projections whose keys and values are cached per head."""
    width, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    layer = LatentLayer("", heads, f.integer("kv_lora_rank"), f.integer("qk_rope_head_dim"))
    value = f.with_defaults({**f.defaults, "v_head_dim": width // heads})
    return [part.times(f.layer_count()) for part in blocks.latent(layer, width, value)]


def deepseek_v4(f: Fields) -> list[Part]:
    """Latent attention with a grouped low-rank way out, compressors, indexers, and several residual streams."""
    width, depth, size = f.integer("hidden_size"), f.layer_count(), f.integer("head_dim")
    heads, rank = f.integer("num_attention_heads"), f.integer("q_lora_rank")
    groups, out = f.integer("o_groups"), f.integer("o_lora_rank")
    streams = f.integer("hc_mult")
    found = [
        Part("latent", depth * width * (rank + size), depth, shards=1),
        Part(
            "latent", depth * (rank * heads * size + heads * size * out + groups * out * width + heads), depth
        ),
        Part("norm", depth * (rank + size), shards=1),
    ]
    for ratio in f.listing("compress_ratios", length=depth) or ():
        if ratio > 1:
            found += compressor(width, size, ratio)
        if ratio == OVERLAPPING:
            index_heads, index = f.integer("index_n_heads"), f.integer("index_head_dim")
            found.append(Part("latent", rank * index_heads * index + width * index_heads, shards=1))
            found += compressor(width, index, ratio)
    mixes = (2 + streams) * streams
    wide = streams * width
    found.append(
        Part("router", 2 * depth * (mixes * wide + mixes + 3) + streams * wide + streams + 1, shards=1)
    )
    hashed = f.integer("num_hash_layers", default=0, least=0)
    if (
        hashed
    ):  # these layers choose experts by the token itself: a table with a row a token, and no correction
        vocabulary, top_k = f.integer("vocab_size"), f.integer("num_experts_per_tok")
        found.append(Part("embedding", hashed * vocabulary * top_k, rows=vocabulary))
        if f.get("topk_method") == "noaux_tc":
            found.append(Part("router", -hashed * f.integer("n_routed_experts"), shards=1))
    return found


def compressor(width: int, size: int, ratio: int) -> list[Part]:
    """Keys and scores of the tokens of one entry, positions within it, and a norm."""
    wide = (2 if ratio == OVERLAPPING else 1) * size
    return [Part("latent", 2 * width * wide + ratio * wide, shards=1), Part("norm", size, shards=1)]


def hyperclovax(f: Fields) -> list[Part]:
    """Two more norms a layer, where the config asks for them."""
    if not f.get("use_post_norm", default=False):
        return []
    return [Part("norm", 2 * f.layer_count() * f.integer("hidden_size"), shards=1)]


def telechat(f: Fields) -> list[Part]:
    """A bias on the way out of the dense block, and on none of its ways in."""
    return [Part("mlp", f.layer_count("n_layer", "num_hidden_layers") * f.integer("hidden_size"), shards=1)]


def step3p5(f: Fields) -> list[Part]:
    """An output gate of one number a head, where the config asks for it; layers may differ in heads."""
    if not f.get("use_head_wise_attn_gate", default=False):
        return []
    heads = sum(layer.query_heads() for layer in read_step3p5(f, ""))
    return [Part("attention", heads * f.integer("hidden_size"))]


def pangu_sinks(f: Fields) -> list[Part]:
    """Learned keys and values that every request reads, and a norm of the keys alone."""
    layers = [layer for layer in read_pangu_sink(f, "") if isinstance(layer, AttentionLayer)]
    size, values = layers[0].head_size, layers[0].head_size_v or layers[0].head_size
    wide = size + (values if f.get("param_sink_with_value", default=False) else 0)
    sinks = f.integer("param_sink_number", default=0, least=0) * layers[0].num_kv_heads * wide
    return [Part("attention", len(layers) * sinks), Part("norm", len(layers) * size, shards=1)]


#: model_type → what the family holds beside the common blocks
UNUSUAL: dict[str, Callable[[Fields], list[Part]]] = {
    "gpt2": learned_positions,
    "gpt_bigcode": learned_positions,
    "opt": opt_projections,
    "bloom": bloom,
    "apertus": apertus,
    "whisper": whisper_encoder,
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4,
    "zamba2": zamba2,
    "longcat_flash": longcat,
    "longcat_flash_ngram": longcat,
    "hyperclovax": hyperclovax,
    "telechat": telechat,
    "step3p5": step3p5,
    "PanguProMoE": pangu_sinks,
    "minicpm3": minicpm3,
    "deepseek_v4": deepseek_v4,
}
#: families whose attention is counted above, not layer by layer
OWN_ATTENTION = {"zamba2", "minicpm3", "deepseek_v4"}
#: families whose dense blocks are counted above
OWN_FEED_FORWARD = {"zamba2"}
