"""Groupings side by side: one model and memory under several strategies, a row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from decodebench.errors import DecodebenchError, MissingExtra
from decodebench.layout.grouping import strategy
from decodebench.layout.layout import Layout
from decodebench.layout.placement import LayoutRefused
from decodebench.layout.plan import DEFAULT_MEMORY, are_specs, parse_memory, plan
from decodebench.models.load import load_model
from decodebench.models.model import Model
from decodebench.models.options import CacheOptions, with_options

if TYPE_CHECKING:
    import pandas as pd

#: what ``compare`` shows where nothing else is asked for
COMPARED = ("hybrid", "packed", "promoted", "separate", "fixed(2)", "fixed(4)", "fixed(8)", "per_layer")


@with_options
def compare(
    model: Model | str | Mapping,
    memory: int | str = DEFAULT_MEMORY,
    strategies: Sequence[str] = COMPARED,
    length: int | None = None,
    block_size: int | None = None,
    **options,
) -> pd.DataFrame:
    """A row a strategy: groups, blocks, what fits, what is wasted; a refused one with its reason.

    ``length``: tokens a request, for concurrency, cost and waste (default: the maximum length).
    Sizes in bytes, waste as shares of the memory. See ``plan`` for the other arguments.
    """
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise MissingExtra.of(error, "compare's table (compare_rows gives a list)") or error from None

    return pd.DataFrame(compare_rows(model, memory, strategies, length, block_size, **options))


def compare_rows(
    model: Model | str | Mapping,
    memory: int | str = DEFAULT_MEMORY,
    strategies: Sequence[str] = COMPARED,
    length: int | None = None,
    block_size: int | None = None,
    **options,
) -> list[dict]:
    """``compare`` without pandas; raises where the model itself is bad, not where a strategy refuses it."""
    parse_memory(memory)
    CacheOptions.of(options | {"block_size": block_size})
    model = model if are_specs(model) else load_model(model)
    if length is not None and length < 1:
        raise LayoutRefused(f"length {length}: a request has at least one token")
    rows: list[dict] = []
    for name in strategies:
        strategy(name)
        try:
            layout = plan(model, memory, block_size, grouping=name, **options)
        except DecodebenchError as error:
            rows.append({"strategy": name, "status": "refused", "reason": str(error)})
            continue
        rows.append({"strategy": name, "status": "ok", "reason": None} | facts(layout, length))
    return rows


def facts(layout: Layout, length: int | None = None) -> dict:
    """A layout as one row of numbers; waste as shares of the memory."""
    c = layout.capacity(length)
    return {
        "memory_order": layout.memory_order,
        "reading": layout.model.reading if layout.model else None,
        "groups": len(layout.groups),
        "pools": len(layout.pool_num_blocks),
        "num_blocks": sum(layout.pool_num_blocks),
        "bytes_per_block": layout.bytes_per_block(),
        "length": c.length,
        "blocks_per_request": sum(c.blocks_per_request),
        "concurrency": c.concurrency,
        "tokens": c.tokens,
        "tokens_old": c.tokens_old,
        "start_bytes": c.start_bytes,
        "request_bytes": c.request_bytes,
        "slope_bytes": c.slope_bytes,
    } | {
        f"waste_{cause}": share
        for cause, share in layout.waste(length).shares().items()
        if cause != "content"
    }
