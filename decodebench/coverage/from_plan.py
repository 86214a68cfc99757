"""Coverage from block ids alone: the blocks a fill says it wrote, and which historic fault would have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from decodebench.cache.connector import ConnectorMetadata, ConnectorScheduler, ConnectorWorker, startup_groups
from decodebench.cache.faults import FAULTS
from decodebench.cache.run import schedule
from decodebench.cache.values import Values
from decodebench.cache.write import FillReport, merge_blocks
from decodebench.coverage.required import (
    RequiredPages,
    existing,
    hit_blocks,
    holding_blocks,
    kept_pages,
    owners,
    required_pages,
    steps_between,
    written_blocks,
)
from decodebench.coverage.result import (
    FILLED_PAGE,
    FOR_LATER_HITS,
    NOTHING_TO_HOLD,
    SHARED,
    UNCOVERED_PAGE,
    WRONG_PAGE,
    Audit,
    Tally,
    place_of,
)
from decodebench.errors import DecodebenchError
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.layout import Layout
from decodebench.layout.pool import NULL_BLOCK, Batch


def plan_audit(
    layout: Layout,
    batch: Batch,
    written: FillReport | ConnectorMetadata | Sequence[Sequence[int]],
    admitted: Batch | None = None,
    startup_fill: bool = False,
    required: Sequence[RequiredPages] | None = None,
    values: Values | None = None,
) -> Audit:
    """Coverage from block ids alone.

    ``written``: what a fill reported, the scheduler half's metadata (which also tells who asked
    for a shared page), or block ids per group. ``admitted``: the batch as it was filled, where
    ``batch`` is a later state of it: what the steps in between wrote counts as written.
    ``startup_fill``: ``values`` (default: a constant) were written once before, wherever they keep;
    only what is required is judged.
    ``required``: what the step reads, where its own metadata tells; else what the specs say.
    """
    tally, groups = Tally(layout, batch, "plan"), range(len(layout.groups))
    by_request = (
        {f.request_id: f.block_ids for f in written.requests}
        if isinstance(written, ConnectorMetadata)
        else {}
    )
    ids = blocks_of(layout, written)
    table = [np.zeros(layout.num_blocks_of(g), dtype=bool) for g in groups]
    for group in groups:
        table[group][existing(ids[group], len(table[group]))] = True
    at_startup = startup_groups(layout, values) if startup_fill else frozenset()
    required = required_pages(layout, batch) if required is None else required
    steps, over = steps_between(layout, admitted, batch), _later_writers(layout)
    own = written_blocks(layout, batch)
    for pages in required:
        exists = (pages.block_ids > NULL_BLOCK) & (pages.block_ids < len(table[pages.group]))
        block_ids = np.where(exists, pages.block_ids, NULL_BLOCK)
        elsewhere = pages.shared & ~own[pages.group][block_ids]  # filled by a request outside this batch
        covered = exists & (table[pages.group][block_ids] | elsewhere | (pages.group in at_startup))
        covered |= exists & steps.only_steps(layout, pages, batch.requests[pages.request])
        foreign = elsewhere & table[pages.group][block_ids]
        for layer in pages.layers:
            lost = np.zeros(len(block_ids), dtype=bool)
            for writer in over[pages.group][layer]:
                here = exists & ~elsewhere & table[writer][block_ids] & ~lost
                tally.find(
                    pages.group, layer, block_ids[here], "wrong", overwritten_by(writer), pages.request
                )
                lost |= here
            page_states = np.where(lost, WRONG_PAGE, np.where(covered, FILLED_PAGE, UNCOVERED_PAGE))
            tally.count(pages, layer, page_states)
            tally.find(
                pages.group,
                layer,
                pages.block_ids[~covered & exists & ~lost],
                "uncovered",
                "not in the plan",
                pages.request,
            )
            tally.find(
                pages.group,
                layer,
                pages.block_ids[~exists],
                "uncovered",
                missing(layout, pages.group),
                pages.request,
            )
            tally.find(pages.group, layer, block_ids[foreign], "clobbered", SHARED, pages.request)
    for pages in () if steps.ran else kept_pages(layout, batch):
        left_out = pages.block_ids[~table[pages.group][pages.block_ids] & (pages.group not in at_startup)]
        tally.find(pages.group, None, left_out, "uncovered", FOR_LATER_HITS, pages.request)
    if not startup_fill:
        _find_touched(tally, ids, steps)
    for request, blocks in enumerate(batch.requests):
        for group, mine in enumerate(by_request.get(blocks.request_id, ())):
            hit = set(blocks.block_ids[group][: hit_blocks(layout, blocks, group)]) - {NULL_BLOCK}
            both = sorted(b for b in hit.intersection(mine) if own[group][b])
            tally.find(group, None, both, "clobbered", SHARED, request)
    suspects = plan_suspects(layout, batch, ids) if tally.findings else ()
    return tally.result(suspects)


def blocks_of(
    layout: Layout, written: FillReport | ConnectorMetadata | Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Sorted unique block ids per group, int64, from whatever tells them."""
    if isinstance(written, ConnectorMetadata):
        written = [
            merge_blocks(fill.block_ids[g] for fill in written.requests) for g in range(len(layout.groups))
        ]
    elif isinstance(written, FillReport):
        written = written.block_ids or [()] * len(layout.groups)
    return [np.unique(np.asarray(list(pages), dtype=np.int64)) for pages in written]


def missing(layout: Layout, group: int) -> str:
    """Words for an id that the pool does not have."""
    return f"no such block: the pool's ids are 1 to {layout.num_blocks_of(group) - 1}"


def overwritten_by(group: int) -> str:
    """Words for a page that another group's fill took."""
    return f"group {group} was filled over it"


def _later_writers(layout: Layout) -> list[list[list[int]]]:
    """Per group and layer: the groups that a fill writes afterwards and whose pages lie in the same bytes."""
    ends = {
        name: (offset, offset + layout.layer_specs[name].page_size_bytes)
        for name, (offset, _) in layout.placement.items()
    }

    def meets(name: str, group: KVCacheGroupSpec) -> bool:
        start, stop = ends[name]
        return any(ends[other][0] < stop and start < ends[other][1] for other in group.layer_names)

    return [
        [
            [
                later
                for later, other in enumerate(layout.groups)
                if later > g and other.pool == group.pool and meets(name, other)
            ]
            for name in group.layer_names
        ]
        for g, group in enumerate(layout.groups)
    ]


def _find_touched(tally: Tally, ids: Sequence[np.ndarray], steps) -> None:
    """Blocks that were written and that their group does not own, or in which nothing is stood in for."""
    layout = tally.layout
    owner, holding = owners(layout, tally.batch), holding_blocks(layout, tally.batch)
    for group, written in enumerate(ids):
        pool, limit = layout.groups[group].pool, layout.num_blocks_of(group)
        exists = (written >= 0) & (written < limit)
        tally.find(group, None, written[~exists], "stray", missing(layout, group))
        written = written[exists]
        holder = owner[pool][written]
        outside = (holder != group) & ~steps.left[pool][written]
        for held_by in np.unique(holder[outside]).tolist():
            blocks, state = written[outside & (holder == held_by)], "clobbered" if held_by >= 0 else "stray"
            for null in (True, False):
                some = blocks[(blocks == NULL_BLOCK) == null]
                tally.find(group, None, some, state, place_of(NULL_BLOCK if null else -1, held_by))
        idle = (holder == group) & ~holding[group][written] & ~steps.written[group][written]
        tally.find(group, None, written[idle], "stray", NOTHING_TO_HOLD)


def sound_blocks(layout: Layout, batch: Batch) -> list[np.ndarray]:
    """Blocks that the connector without faults writes for this batch."""
    return blocks_of(layout, schedule(ConnectorScheduler(layout), batch))


def equal_blocks(planned: Sequence[Sequence[int]], written: Sequence[np.ndarray]) -> bool:
    """Whether a plan and what was written name the same blocks in every group."""
    return all(np.array_equal(np.asarray(p, dtype=np.int64), w) for p, w in zip(planned, written))


def plan_suspects(
    layout: Layout, batch: Batch, written: Sequence[np.ndarray], explains: Callable = equal_blocks
) -> tuple[str, ...]:
    """Historic faults whose plan for this batch explains what was written; none where the right plan does."""
    plans: dict[type, ConnectorMetadata | None] = {}

    def plan(half: type[ConnectorScheduler]) -> ConnectorMetadata | None:
        if half not in plans:
            try:
                plans[half] = schedule(half(layout), batch)
            except DecodebenchError:
                plans[half] = None  # this connector would have refused the batch
        return plans[half]

    sound = plan(ConnectorScheduler)
    if sound is not None and explains(ConnectorWorker(layout).merge(sound), written):
        return ()
    return tuple(
        fault.id
        for fault in FAULTS.values()
        if fault.leaves == "wrong bytes"
        and not fault.startup_fill
        and (meta := plan(fault.scheduler)) is not None
        and explains(fault.worker(layout).merge(meta), written)
    )
