"""Decode latency of a model under many settings, on caches small enough to hold: tables for notebooks.

A few layers of every group stand for all of them: what a layer moves does not depend on how many
there are. ``latency_table`` measures a list of settings, one by one, and says which failed and why.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodebench.cache.small import small_cache
from decodebench.errors import DecodebenchError
from decodebench.measure.journal import store
from decodebench.measure.latency import measure_decode
from decodebench.measure.provenance import provenance

if TYPE_CHECKING:
    import pandas as pd


def latency_table(
    settings: Iterable[Mapping[str, Any]],
    *,
    backend: str | None = None,
    cold: bool = False,
    min_seconds: float = 0.3,
    by_kind: bool = True,
    out: str | Path | None = None,
    **common: Any,
) -> pd.DataFrame:
    """Measure every setting: rows of kind "step" (all layers) and, with ``by_kind``, one a kind of layer.

    A setting is a dictionary of ``small_cache``'s arguments, its own over ``common``; its other entries
    (say ``label``) are carried into the rows. A setting that fails is a row with its reason in ``failed``.
    Columns: the settings, then kind, layers, blocks (of the kind, in tokens), median_s, q1_s, q3_s, p10_s,
    p90_s, steps, bytes_moved, gb_per_s, limit_s, limit_share, bound_by, backend, device,
    cache_state, fallbacks, notes.
    ``out``: a folder to store the rows in, for ``db.sweep.read`` and ``compare``.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
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
        same = {k: shared[k] for k in _SHARED}
        same |= {"groups": len(cache.layout.groups)}
        sizes = {w.kind: cache.layout.layer_specs[w.layer].block_size for w in found.work}
        whole = {k: shared[k] for k in _MEASURED} | {"layers": len(found.work)}
        rows.append(label | {"kind": "step"} | whole | same)
        for facts in found.kind_rows() if by_kind else ():
            part = {k: facts[k] for k in ("kind", "layers", *_MEASURED)}
            rows.append(label | part | same | {"block_tokens": sizes[str(facts["kind"])]})
        del cache, batch
        gc.collect()
    if out is not None:
        axes = list(dict.fromkeys(name for row in rows for name in row if name not in FOUND))
        store(
            out,
            rows,
            axes,
            provenance({"settings": axes, "cold": cold}, device=rows[0].get("device") or "cpu"),
        )
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
    "bound_by",
)

_SHARED = ("backend", "device", "cache_state", "fallbacks", "notes", "num_requests")

#: columns that say what was found; the others, the setting's own, say what was measured
FOUND = {*_MEASURED, *_SHARED, "layers", "groups", "block_tokens", "failed"} - {"backend", "device"}
