"""What decode reads, who owns it, and what may have been written: from specs and block tables alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from decodebench.cache.connector import describe
from decodebench.errors import DecodebenchError
from decodebench.layout.layout import Layout
from decodebench.layout.pool import NULL_BLOCK, Batch, RequestBlocks


class CoverageError(DecodebenchError):
    """A batch that cannot be audited: its tables do not cover what its requests read."""


@dataclass(frozen=True)
class RequiredPages:
    """Pages that the next decode step of one request reads in layers of one group with equal needs.

    ``layers`` count the group's layers from 0; ``positions`` are those of the block table that
    ``block_ids`` come from. ``shared[i]``: the page holds tokens of a prefix hit, which somebody
    else filled and nobody may write.
    """

    request: int
    group: int
    layers: tuple[int, ...]
    positions: np.ndarray
    block_ids: np.ndarray
    shared: np.ndarray


def required_pages(layout: Layout, batch: Batch) -> list[RequiredPages]:
    """Required pages of every request and group; layers of one group that read alike share an entry.

    Raises ``CoverageError`` where a table has no block at a position that the step reads.
    """
    return [
        pages
        for request, blocks in enumerate(batch.requests)
        for group in range(len(layout.groups))
        for pages in _required_in_group(layout, blocks, request, group)
    ]


def _required_in_group(
    layout: Layout, blocks: RequestBlocks, request: int, group: int
) -> Iterator[RequiredPages]:
    if blocks.num_tokens == 1:
        return  # the step computes the first token: whatever it reads, it writes itself
    table, per_block = np.asarray(blocks.block_ids[group], dtype=np.int64), layout.tokens_per_block(group)
    by_range: dict[range, list[int]] = {}
    for layer, spec in enumerate(layout.groups[group].layer_specs):
        by_range.setdefault(blocks.required_blocks(spec, group, per_block), []).append(layer)
    for positions, layers in by_range.items():
        block_ids = table[positions.start : positions.stop]
        if len(block_ids) < len(positions) or (block_ids == NULL_BLOCK).any():
            raise CoverageError(
                f"request {blocks.request_id!r}, {describe(layout, group)}: decode reads positions "
                f"{positions.start} to {positions.stop - 1} of its block table, which holds "
                f"{table.tolist() if len(table) < 20 else f'{len(table)} entries with null blocks there'}"
            )
        where = np.arange(positions.start, positions.stop)
        yield RequiredPages(
            request, group, tuple(layers), where, block_ids, where < hit_blocks(layout, blocks, group)
        )


def kept_pages(layout: Layout, batch: Batch) -> list[RequiredPages]:
    """Pages of a fill that the next step does not read, but a later prefix hit on the same tokens would.

    The state that a running state was copied from, where prefix caching keeps it.
    """
    kept = []
    for request, blocks in enumerate(batch.requests):
        for group, spec in enumerate(layout.groups):
            per_block, table = layout.tokens_per_block(group), blocks.block_ids[group]
            wanted = spec.kv_cache_spec.blocks_for_later_hits(blocks.num_tokens, per_block, len(table))
            hit = hit_blocks(layout, blocks, group)
            positions = [p for p in wanted if p >= hit and table[p] != NULL_BLOCK]
            if positions:
                where, ids = np.asarray(positions), np.asarray([table[p] for p in positions])
                layers = tuple(range(len(spec.layer_names)))
                kept.append(RequiredPages(request, group, layers, where, ids, np.zeros(len(ids), dtype=bool)))
    return kept


def hit_blocks(layout: Layout, blocks: RequestBlocks, group: int) -> int:
    """Whole blocks at the start of a request's table that its prefix hit brought."""
    if layout.groups[group].kv_cache_spec.filled_whole:
        return 0
    return blocks.num_computed // layout.tokens_per_block(group)


def holding_blocks(layout: Layout, batch: Batch) -> list[np.ndarray]:
    """Per group: bool [num_blocks], blocks that hold something of what the requests stand in for.

    More than what decode reads where a window layer is allocated as full attention, or where a
    running state was copied from another; never the block in which a step only writes.
    """
    return _rows_held(layout, batch, hits=True)


def written_blocks(layout: Layout, batch: Batch) -> list[np.ndarray]:
    """Per group: bool [num_blocks], blocks that this batch's own fill writes: all of those but prefix hits."""
    return _rows_held(layout, batch, hits=False)


def _rows_held(layout: Layout, batch: Batch, hits: bool) -> list[np.ndarray]:
    held = [np.zeros(layout.num_blocks_of(g), dtype=bool) for g in range(len(layout.groups))]
    for blocks in batch.requests:
        for group, spec in enumerate(layout.groups):
            table = np.asarray(blocks.block_ids[group], dtype=np.int64)
            merged, per_block = spec.kv_cache_spec, layout.tokens_per_block(group)
            positions = merged.held_blocks(blocks.num_tokens, per_block, len(table))
            start = positions.start if hits else max(positions.start, hit_blocks(layout, blocks, group))
            held[group][existing(table[start : positions.stop], len(held[group]))] = True
    return held


def owners(layout: Layout, batch: Batch) -> list[np.ndarray]:
    """Per pool: block id → the group that owns it in this batch, -1 where none does."""
    owner = [np.full(n, -1, dtype=np.int64) for n in layout.pool_num_blocks]
    for group, spec in enumerate(layout.groups):
        for table in batch.block_table(group):
            owner[spec.pool][existing(np.asarray(table, dtype=np.int64), len(owner[spec.pool]))] = group
    return owner


def existing(block_ids: np.ndarray, num_blocks: int) -> np.ndarray:
    """The ids that the pool has and that may hold data."""
    return block_ids[(block_ids > NULL_BLOCK) & (block_ids < num_blocks)]


@dataclass(frozen=True)
class Steps:
    """What decode steps wrote between the fill of a batch and a later state of it.

    ``written[g]``: bool [num_blocks], blocks that hold a token (or state) of those steps, whatever
    lay there before. ``left[pool]``: blocks that were somebody's when the batch was filled and are
    nobody's now (windows moved on).
    """

    ran: bool
    before: dict[str, RequestBlocks]
    written: list[np.ndarray]
    left: list[np.ndarray]

    def only_steps(self, layout: Layout, pages: RequiredPages, now: RequestBlocks) -> np.ndarray:
        """bool [pages]: pages in which everything was written by steps, and nothing by the fill."""
        before = self.before.get(now.request_id)
        spec = layout.groups[pages.group].kv_cache_spec
        if before is None or before.num_tokens == now.num_tokens or spec.filled_whole:
            return np.zeros(len(pages.block_ids), dtype=bool)
        if spec.holds_state:
            return np.ones(len(pages.block_ids), dtype=bool)
        return pages.positions * layout.tokens_per_block(pages.group) >= before.num_tokens - 1


def steps_between(layout: Layout, admitted: Batch | None, now: Batch) -> Steps:
    """``admitted`` is the batch as it was filled; without it no step was run."""
    written = [np.zeros(layout.num_blocks_of(g), dtype=bool) for g in range(len(layout.groups))]
    if admitted is None:
        return Steps(False, {}, written, [np.zeros(n, dtype=bool) for n in layout.pool_num_blocks])
    before = {blocks.request_id: blocks for blocks in admitted.requests}
    for blocks in now.requests:
        old = before.get(blocks.request_id)
        if old is None or old.num_tokens == blocks.num_tokens:
            continue
        for group, spec in enumerate(layout.groups):
            table = np.asarray(blocks.block_ids[group], dtype=np.int64)
            if not spec.kv_cache_spec.written_by_steps:
                continue
            if not spec.kv_cache_spec.own_blocks:
                table = table[(old.num_tokens - 1) // layout.tokens_per_block(group) :]
            written[group][existing(table, len(written[group]))] = True
    left = [(then >= 0) & (today < 0) for then, today in zip(owners(layout, admitted), owners(layout, now))]
    return Steps(True, before, written, left)
