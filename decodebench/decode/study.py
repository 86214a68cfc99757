"""Decode latency of a model under many settings, on caches small enough to hold: tables for notebooks.

A few layers of every group stand for all of them: what a layer moves does not depend on how many
there are. ``latency_table`` measures a list of settings, one by one, and says which failed and why.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from decodebench.blocks import Batch, admit
from decodebench.cache import Cache, allocate
from decodebench.connector import fill_cache
from decodebench.decode.measure import measure_decode
from decodebench.decode.work import DecodeError
from decodebench.fill import Normal
from decodebench.layout import KVCacheConfig, from_groups, plan
from decodebench.specs import DecodebenchError

if TYPE_CHECKING:
    import pandas as pd

MAX_CACHE_BYTES = 2 << 30


def first_layers(layout: KVCacheConfig, count: int) -> KVCacheConfig:
    """The layout with at most ``count`` layers in each group, everything else as it is."""
    groups = [
        replace(group, layer_names=group.layer_names[:count], layer_specs=group.layer_specs[:count])
        for group in layout.groups
    ]
    return from_groups(
        groups,
        layout.pool_num_blocks,
        layout.memory_order,
        max_model_len=layout.max_model_len,
        max_in_flight_tokens=layout.max_in_flight_tokens,
        model=layout.model,
        options=layout.options,
        decode_context_parallel_size=layout.decode_context_parallel_size,
    )


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
    ``fill_cache``; "normal" is mean 0, standard deviation 0.5; None leaves the poison unfilled.
    ``options`` go to ``plan`` (block_size, grouping, memory_order, kv_cache_dtype …). Raises
    ``DecodeError`` where the cache would take more than ``max_bytes``.
    """
    layout = first_layers(plan(model, memory="16TiB", **options), layers)
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
            "a shorter context or fewer layers"
        )
    batch = admit(layout, requests=len(lengths), context=lengths)
    cache = allocate(layout, device, initial="poison")
    if values is not None:
        fill_cache(cache, batch, Normal(0.0, 0.5) if values == "normal" else values)
    return cache, batch


def latency_table(
    settings: Iterable[Mapping[str, Any]],
    *,
    backend: str | None = None,
    cold: bool = False,
    min_seconds: float = 0.3,
    by_kind: bool = True,
    **common: Any,
) -> pd.DataFrame:
    """Measure every setting: rows of kind "step" (all layers) and, with ``by_kind``, one a kind of layer.

    A setting is a dictionary of ``small_cache``'s arguments, its own over ``common``; its other entries
    (say ``label``) are carried into the rows. A setting that fails is a row with its reason in ``failed``.
    Columns: the settings, then kind, layers, blocks (of the kind, in tokens), median_s, q1_s, q3_s, p10_s,
    p90_s, steps, bytes_moved, gb_per_s, limit_s, limit_share, backend, device, cache_state, fallbacks.
    """
    import pandas as pd

    rows = []
    for setting in settings:
        given = common | dict(setting)
        label = {k: v for k, v in given.items() if isinstance(v, str | int | float | bool | type(None))}
        arguments = {k: v for k, v in given.items() if k != "label"}
        try:
            cache, batch = small_cache(**arguments)
            found = measure_decode(cache, batch, backend, cold=cold, by_kind=by_kind, min_seconds=min_seconds)
        except DecodebenchError as error:
            rows.append(label | {"kind": "step", "failed": str(error)})
            continue
        shared = found.to_dict()
        same = {k: shared[k] for k in ("backend", "device", "cache_state", "fallbacks", "num_requests")}
        same |= {"groups": len(cache.layout.groups)}
        sizes = {w.kind: cache.layout.layer_specs[w.layer].block_size for w in found.work}
        whole = {k: shared[k] for k in _MEASURED} | {"layers": len(found.work)}
        rows.append(label | {"kind": "step"} | whole | same)
        for facts in found.kind_rows() if by_kind else ():
            part = {k: facts[k] for k in ("kind", "layers", *_MEASURED)}
            rows.append(label | part | same | {"block_tokens": sizes[facts["kind"]]})
        del cache, batch
        gc.collect()
    return pd.DataFrame(rows)


_MEASURED = (
    "median_s",
    "q1_s",
    "q3_s",
    "p10_s",
    "p90_s",
    "steps",
    "bytes_moved",
    "gb_per_s",
    "limit_s",
    "limit_share",
)
