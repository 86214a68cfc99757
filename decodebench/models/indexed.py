"""Readers of models whose attention reads what index keys choose: keys, rings of open groups, states beside them."""

from __future__ import annotations

from collections.abc import Mapping

from decodebench.models.attention import SLIDING, heads
from decodebench.models.fields import Fields
from decodebench.models.latent import latent
from decodebench.models.layers import (
    AttentionLayer,
    ConvolutionWindowLayer,
    IndexerLayer,
    LatentLayer,
    Layer,
    RingLayer,
    StateLayer,
)
from decodebench.models.state import delta_net

LINEAR = {"linear_attention"}
INDEXED = {"indexed_attention", "qwen_sparse_attention", "full_attention"}
#: tokens that kernels of block-sparse attention take at once
SPARSE_BLOCK = 128


def read_minimax_m3(f: Fields, root: str) -> list[Layer]:
    """Full attention; beside the layers marked in ``sparse_attention_freq`` index keys, one a token."""
    length = f.layer_count()
    given = f.get("sparse_attention_config")
    config = Fields(given if isinstance(given, Mapping) else {}, f"{f.source}, sparse_attention_config")
    used = config.get("use_sparse_attention", default=bool(given))
    marks = config.listing("sparse_attention_freq", length=length) if used else None
    layers: list[Layer] = []
    for i in range(length):
        name = f"{root}.{i}.self_attn.attn"
        sparse = bool(marks and marks[i])
        if sparse:
            count = config.integer("sparse_num_index_heads", default=1)
            width = config.integer("sparse_index_dim")
            layers.append(
                IndexerLayer(f"{name}.index_cache", count, width, quantized=False, kernel_tokens=SPARSE_BLOCK)
            )
        layers.append(AttentionLayer(name, *heads(f), kernel_tokens=SPARSE_BLOCK if sparse else None))
    return layers


def read_qwen4_exp(f: Fields, root: str) -> list[Layer]:
    """Gated delta nets; full attention with a ring of raw keys and one key for each group of tokens.

    Layers in ``ple_layer_ids`` (counted from 1) keep a convolution's state of all residual streams as well.
    """
    length = f.layer_count()
    types = f.listing("layer_types", length=length, choices=LINEAR | INDEXED)
    types = types or ["linear_attention" if (i + 1) % 4 else "indexed_attention" for i in range(length)]
    embedded = f.layer_numbers("ple_layer_ids")
    layers: list[Layer] = []
    for i, kind in enumerate(types):
        if i + 1 in embedded:
            rows = (f.integer("ple_conv_kernel_size") - 1) * f.integer("ngram_size")
            streams = f.integer("hc_count") * f.integer("hidden_size")
            layers.append(StateLayer(f"{root}.{i}.ple", "short_conv", rows + 1, streams, replicated=True))
        if kind in LINEAR:
            layers.append(delta_net(f, f"{root}.{i}.linear_attn"))
            continue
        name = f"{root}.{i}.self_attn"
        if f.has("indexer_n_heads"):
            ratio, width = f.integer("indexer_compress_ratio"), f.integer("indexer_head_dim")
            layers.append(RingLayer(f"{name}.indexer.raw_key_cache", ratio, width))
            layers.append(
                IndexerLayer(
                    f"{name}.indexer.compressed_key_cache",
                    f.integer("indexer_n_heads"),
                    width,
                    ratio,
                    quantized=False,
                    kernel_tokens=None,
                    role="SPARSE",
                )
            )
        layers.append(AttentionLayer(f"{name}.attn", *heads(f)))
    return layers


def read_glm5_next(f: Fields, root: str) -> list[Layer]:
    """Kimi delta attention; latent attention with keys for groups of tokens and the ring of the open group."""
    length = f.layer_count()
    types = f.listing("layer_types", length=length, choices=LINEAR | INDEXED)
    types = types or ["linear_attention" if i % 4 != 3 else "indexed_attention" for i in range(length)]
    given = f.get("linear_attn_config")
    linear = Fields(given if isinstance(given, Mapping) else {}, f"{f.source}, linear_attn_config")
    count = linear.integer("num_heads", default=f.integer("linear_num_heads"))
    size = linear.integer("head_dim", default=f.integer("linear_head_dim"))
    kernel = linear.integer("short_conv_kernel_size", default=f.integer("linear_conv_kernel_dim"))
    ratio = f.integer("index_kpool")
    layers: list[Layer] = []
    for i, kind in enumerate(types):
        name = f"{root}.{i}.self_attn"
        if kind in LINEAR:
            layers.append(
                StateLayer(
                    name,
                    "kda",
                    kernel,
                    num_heads=count,
                    head_dim=size,
                    num_key_heads=count,
                    state_size=size,
                    exported=size == 128,
                )
            )
            continue
        index, width = f.integer("index_n_heads"), f.integer("index_head_dim")
        layers.append(
            IndexerLayer(
                f"{name}.indexer.k_cache", index, width, ratio, kernel_tokens=64 * ratio, grain=32 * ratio
            )
        )
        layers.append(
            RingLayer(
                f"{name}.indexer.tail_cache", ratio, width, slots=2, doubles=True, split_by_context=False
            )
        )
        layers.append(
            latent(
                f,
                f"{name}.attn",
                qk_rope_head_dim=f.integer("qk_rope_head_dim", least=0),
                sparse=True,
                indexer=True,
            )
        )
    return layers


def read_hy_v4(f: Fields, root: str) -> list[Layer]:
    """Sparse latent attention; ``indexer_types`` says which layers have keys of their own."""
    length = f.layer_count()
    types = f.listing("indexer_types", length=length, choices={"full", "shared"})
    types = types or ["full" if i == 0 or (i - 1) % 4 == 0 else "shared" for i in range(length)]
    layers: list[Layer] = []
    for i, kind in enumerate(types):
        name, own = f"{root}.{i}.self_attn", kind == "full"
        if own:
            layers.append(
                IndexerLayer(
                    f"{name}.indexer.k_cache", f.integer("index_n_heads"), f.integer("index_head_dim")
                )
            )
        layers.append(latent(f, f"{name}.attn", sparse=True, indexer=own))
    return layers


def read_dots3_note(f: Fields, root: str) -> list[Layer]:
    """Sparse latent attention with index keys, its rows as wide as those of the windows beside it."""
    length = f.layer_count()
    types = f.listing("layer_types", length=length, choices=SLIDING | INDEXED)
    if types is None:
        raise f.missing("layer_types")
    rank, rope = f.integer("swa_kv_lora_rank"), f.integer("swa_qk_rope_head_dim")
    layers: list[Layer] = []
    for i, kind in enumerate(types):
        name = f"{root}.{i}.self_attn"
        if kind in SLIDING:
            layers.append(
                LatentLayer(
                    f"{name}.attn",
                    f.integer("swa_num_attention_heads"),
                    rank,
                    rope,
                    sliding_window=f.integer("sliding_window_size", "sliding_window"),
                )
            )
            continue
        layers.append(
            IndexerLayer(f"{name}.indexer.k_cache", f.integer("index_n_heads"), f.integer("index_head_dim"))
        )
        layers.append(latent(f, f"{name}.attn", sparse=True, indexer=True, row=rank + rope))
    return layers


def read_inkling(f: Fields, root: str) -> list[Layer]:
    """Windows in ``local_layer_ids``, full attention elsewhere; beside each the inputs of its convolutions."""
    length = f.layer_count()
    local = f.layer_numbers("local_layer_ids")
    kernel = f.integer("sconv_kernel_size", "conv_kernel_size")
    hidden = f.integer("hidden_size")
    count, kv_heads, size = heads(f)
    small = (
        f.integer("swa_num_attention_heads", default=count),
        f.integer("swa_num_key_value_heads", default=kv_heads),
        f.integer("swa_head_dim", default=size),
    )
    layers: list[Layer] = []
    for i in range(length):
        shape = small if i in local else (count, kv_heads, size)
        # keys, values and the outputs of attention and experts, rounded up to a power of two a head
        width = 2 * shape[2] + 2 * (hidden // shape[1])
        padded = 1 << (width - 1).bit_length()
        layers.append(ConvolutionWindowLayer(f"{root}.{i}.conv_state", shape[1], padded, kernel))
        span = f.integer("sliding_window_size") if i in local else None
        layers.append(AttentionLayer(f"{root}.{i}.attn", *shape, sliding_window=span))
    return layers
