"""Readers of models that only attend: full, windows, chunks, shared caches, encoder and decoder."""

from __future__ import annotations

from decodebench.models.fields import Fields
from decodebench.models.layers import AttentionLayer, Layer

FULL = {"full_attention", "attention", "global_attention", "global"}
SLIDING = {"sliding_attention", "local_attention", "local"}
CHUNKED = {"chunked_attention"}


def heads(f: Fields) -> tuple[int, int, int]:
    """Query heads, KV heads and head size."""
    count = f.integer("num_attention_heads")
    kv_heads = f.integer("num_key_value_heads", default=count)
    if count % kv_heads:
        raise f.wrong(("num_key_value_heads",), kv_heads, f"it does not divide num_attention_heads = {count}")
    size = f.optional("head_dim", least=0)
    return count, kv_heads, size or max(1, f.integer("hidden_size") // count)


def window(f: Fields) -> int | None:
    """The sliding window in tokens; 0 and null say there is none."""
    return f.optional("sliding_window", least=0) or None


def periodic(length: int, period: int, full_at: int) -> list[str]:
    """Layer types where every ``period``-th layer attends to everything, the others to a window."""
    return ["full_attention" if i % period == full_at else "sliding_attention" for i in range(length)]


def read_attention(f: Fields, root: str, path: str = "self_attn.attn", widen: int = 0) -> list[Layer]:
    """One attention layer per decoder layer; ``layer_types`` says which have the window or the chunks.

    Without ``layer_types`` a window holds for every layer. ``widen``: tokens that the window counts
    more than its field says.
    """
    count, kv_heads, size = heads(f)
    length = f.layer_count()
    types = f.listing("layer_types", length=length, choices=FULL | SLIDING | CHUNKED)
    span, chunk = window(f), f.optional("attention_chunk_size")
    layers: list[Layer] = []
    for i in range(length):
        kind = types[i] if types else "sliding_attention" if span else "full_attention"
        if kind in SLIDING and span is None:
            raise f.missing("sliding_window")
        if kind in CHUNKED and chunk is None:
            raise f.missing("attention_chunk_size")
        layers.append(
            AttentionLayer(
                f"{root}.{i}.{path}", count, kv_heads, size,
                sliding_window=span + widen if kind in SLIDING else None,
                attention_chunk_size=chunk if kind in CHUNKED else None,
            )  # fmt: skip
        )
    return layers
