"""A filled cache just large enough for a batch: a few layers of every group stand for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decodebench.cache.run import fill_cache
from decodebench.cache.tensors import Cache, allocate
from decodebench.cache.values import Normal
from decodebench.layout.plan import plan
from decodebench.layout.pool import Batch, admit
from decodebench.layout.reads import DecodeError
from decodebench.layout.shrink import shrink

MAX_CACHE_BYTES = 2 << 30


def small_cache(
    model: str,
    *,
    requests: int = 8,
    context: int | Sequence[int] = 4096,
    layers: int = 2,
    values: Any = "normal",
    device: str = "cpu",
    max_bytes: int = MAX_CACHE_BYTES,
    **options: Any,
) -> tuple[Cache, Batch]:
    """A filled cache just large enough for a batch, with ``layers`` layers a group, and the batch.

    ``context``: tokens of every request, or a list with each request's. ``values``: as in
    ``fill_cache``; "normal" is ``Normal()``; None leaves the poison unfilled.
    ``options`` go to ``plan`` (block_size, grouping, memory_order, kv_cache_dtype …). Raises
    ``DecodeError`` where the cache would take more than ``max_bytes``.
    """
    layout = shrink(plan(model, memory="16TiB", **options), layers=layers)
    lengths = [context] * requests if isinstance(context, int) else list(context)
    if max(lengths) > layout.max_model_len:
        raise DecodeError(
            f"context {max(lengths)}: {model} takes requests of at most {layout.max_model_len} tokens"
        )
    per_pool = [1] * len(layout.pool_num_blocks)
    for length in lengths:
        for group, blocks in zip(layout.groups, layout.blocks_per_request(length)):
            per_pool[group.pool] += blocks
    layout = layout.with_num_blocks([max(2, n) for n in per_pool])
    if layout.size > max_bytes:
        raise DecodeError(
            f"{model}: {len(lengths)} requests of up to {max(lengths)} tokens and {layers} layers a group "
            f"take {layout.size / 2**30:.1f} GiB, more than {max_bytes / 2**30:.1f}: ask for fewer requests, "
            "a shorter context or fewer layers, or allow more (max_bytes, --max-cache)"
        )
    batch = admit(layout, requests=len(lengths), context=lengths)
    cache = allocate(layout, device, initial="poison")
    if values is not None:
        fill_cache(cache, batch, Normal() if values == "normal" else values)
    return cache, batch
