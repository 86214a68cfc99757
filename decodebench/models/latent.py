"""Readers of models with latent attention (MLA), with and without indexers, beside delta attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decodebench.models.fields import Fields
from decodebench.models.layers import AttentionLayer, IndexerLayer, LatentLayer, Layer, StateLayer


def latent(f: Fields, name: str, qk_rope_head_dim: int | None = None, **facts) -> LatentLayer:
    """One latent attention; its row is the latent and the rotary part, ``kv_lora_rank + qk_rope_head_dim``."""
    rope = f.integer("qk_rope_head_dim") if qk_rope_head_dim is None else qk_rope_head_dim
    return LatentLayer(name, f.integer("num_attention_heads"), f.integer("kv_lora_rank"), rope, **facts)


def read_latent(f: Fields, root: str, per_layer: int = 1) -> list[Layer]:
    """One latent attention per decoder layer, or ``per_layer`` of them."""
    count = f.layer_count("num_layers", "num_hidden_layers") if per_layer > 1 else f.layer_count()
    if per_layer > 1:
        return [latent(f, f"{root}.{i}.self_attn.{j}.attn") for i in range(count) for j in range(per_layer)]
    return [latent(f, f"{root}.{i}.self_attn.attn") for i in range(count)]


def read_indexed(f: Fields, root: str) -> list[Layer]:
    """Latent attention that reads what an indexer chooses; some layers reuse the choice of one before.

    ``index_topk_pattern`` has an S for a layer that shares, or every ``index_topk_freq``-th layer has
    an indexer, after the first ``index_skip_topk_offset`` ones.
    """
    frequency = f.integer("index_topk_freq", default=1)
    offset = f.integer("index_skip_topk_offset", default=2, least=0)
    pattern = f.get("index_topk_pattern")
    layers: list[Layer] = []
    for i in range(f.layer_count()):
        if pattern is None:
            shares = max(i - offset + 1, 0) % frequency != 0
        else:
            shares = i < len(pattern) and pattern[i] == "S"
        if not shares:
            name = f"{root}.{i}.self_attn.indexer.k_cache"
            layers.append(IndexerLayer(name, f.integer("index_n_heads"), f.integer("index_head_dim")))
        layers.append(latent(f, f"{root}.{i}.self_attn.attn", sparse=True, indexer=not shares))
    return layers


def read_kimi(f: Fields, root: str) -> list[Layer]:
    """Kimi delta attention, and latent attention in the other layers (layers are counted from 1)."""
    given = f.get("linear_attn_config")
    config = Fields(given if isinstance(given, Mapping) else {}, f"{f.source}, linear_attn_config")
    delta = set(config.layer_numbers("kda_layers"))
    layers: list[Layer] = []
    for i in range(f.layer_count()):
        name = f"{root}.{i}.self_attn"
        if i + 1 in delta:
            heads, size = config.integer("num_heads"), config.integer("head_dim")
            layers.append(
                StateLayer(
                    name,
                    "kda",
                    config.integer("short_conv_kernel_size", default=4),
                    num_heads=heads,
                    head_dim=size,
                    num_key_heads=heads,
                    state_size=size,
                )
            )
        else:
            layers.append(latent(f, name))
    return layers


def read_bailing_hybrid(f: Fields, root: str) -> list[Layer]:
    """Linear attention, every ``layer_group_size``-th layer latent.

    Ling 3 (an architecture of that name, or a short convolution) keeps Kimi delta states instead of linear
    ones, and attends in the layers behind the last whole group.
    """
    length, period = f.layer_count(), f.integer("layer_group_size", default=1)
    delta = f.has("short_conv_kernel_size") or "V3" in str(f.get("architectures"))
    count = f.integer("num_attention_heads")
    size = f.optional("head_dim") or f.integer("hidden_size") // count
    layers: list[Layer] = []
    for i in range(length):
        name = f"{root}.{i}.self_attn"
        if (i + 1) % period == 0 or (delta and i >= length // period * period):
            layers.append(latent(f, f"{name}.attn"))
        elif delta:
            kernel = f.integer("short_conv_kernel_size", default=4)
            state: dict[str, Any] = {
                "num_heads": count,
                "head_dim": size,
                "num_key_heads": count,
                "state_size": size,
            }
            layers.append(StateLayer(name, "kda", kernel, **state))
        else:
            layers.append(StateLayer(name, "linear", num_heads=count, head_dim=size, state_size=size))
    return layers


def read_deepseek(f: Fields, root: str) -> list[Layer]:
    """Latent attention where the config has a latent rank; an indexer where it has index_topk."""
    if f.has("index_topk"):
        return read_indexed(f, root)
    return read_latent(f, root)


def read_unabsorbed(f: Fields, root: str) -> list[Layer]:
    """Latent projections, but keys and values of every head in the cache, padded to the wider of the two."""
    count = f.integer("num_attention_heads")
    size = f.integer("qk_nope_head_dim") + f.integer("qk_rope_head_dim")
    return [AttentionLayer(f"{root}.{i}.self_attn.attn", count, count, size) for i in range(f.layer_count())]
