"""What decode will read against what was written, from block ids and from bytes.

Two sources, which must agree: the *plan* (which rows a fill says it wrote) and the *bytes*
(poison the cache, fill, read every byte back). What decode reads is derived here from each layer's
own spec and the block tables, on another way than the connector takes.

A row is one page: a block of one layer. Required rows end up in one of four states: ``filled``
(exactly the values asked for), ``zeroed`` (on purpose: packed formats and circular buffers, which
hold no plain numbers), ``wrong`` (other bytes), ``uncovered`` (nobody wrote it, or zeros that
nobody asked for). Coverage counts the first two. Beside them, rows that should not have been
touched: ``stray`` (written, owned by nobody in this batch, the null block among them) and ``clobbered``
(written over what another layer, request or a shared prefix owns). Groups alias the same bytes, so
ownership is per (pool, block id), and every byte is judged through the group that owns its block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from decodebench.blocks import NULL_BLOCK, Batch, RequestBlocks
from decodebench.cache import Cache
from decodebench.connector import ConnectorMetadata, ConnectorScheduler, describe
from decodebench.faults import FAULTS
from decodebench.fill import (
    FILLED,
    UNTOUCHED,
    WRONG,
    ZEROED,
    FillReport,
    Normal,
    Values,
    Zeros,
    identify_row,
    inspect_rows,
    merge_rows,
)
from decodebench.layout import KVCacheConfig
from decodebench.specs import CircularBufferSpec, CrossAttentionSpec, DecodebenchError, MambaSpec

if TYPE_CHECKING:
    import pandas as pd

#: states of a required row, in the order of the tables' columns
STATES = ("filled", "zeroed", "wrong", "uncovered")
FILLED_ROW, ZEROED_ROW, WRONG_ROW, UNCOVERED_ROW = range(4)

#: rows of other content whose origin is looked up, a group (a lookup searches the noise bank)
LOOKUPS = 32


class CoverageError(DecodebenchError):
    """A batch that cannot be audited: its tables do not cover what its requests read."""


# -- what decode reads --------------------------------------------------------------------------


@dataclass(frozen=True)
class RequiredRows:
    """Rows that the next decode step of one request reads in layers of one group with equal needs.

    ``shared[i]``: the row holds tokens of a prefix hit, which somebody else filled and nobody may write.
    """

    request: int
    group: int
    layers: tuple[int, ...]
    block_ids: np.ndarray
    shared: np.ndarray


def required_rows(layout: KVCacheConfig, batch: Batch) -> list[RequiredRows]:
    """Required rows of every request and group; layers of one group that read alike share an entry.

    Raises ``CoverageError`` where a table has no block at a position that the step reads.
    """
    return [
        rows
        for request, blocks in enumerate(batch.requests)
        for group in range(len(layout.groups))
        for rows in _required_in_group(layout, blocks, request, group)
    ]


def _required_in_group(
    layout: KVCacheConfig, blocks: RequestBlocks, request: int, group: int
) -> Iterator[RequiredRows]:
    table, per_block = np.asarray(blocks.block_ids[group], dtype=np.int64), layout.tokens_per_block(group)
    by_range: dict[range, list[int]] = {}
    for layer, spec in enumerate(layout.groups[group].layer_specs):
        by_range.setdefault(spec.required_blocks(blocks.num_tokens, per_block, len(table)), []).append(layer)
    for positions, layers in by_range.items():
        block_ids = table[positions.start:positions.stop]
        if len(block_ids) < len(positions) or (block_ids == NULL_BLOCK).any():
            raise CoverageError(
                f"request {blocks.request_id!r}, {describe(layout, group)}: decode reads positions "
                f"{positions.start} to {positions.stop - 1} of its block table, which holds "
                f"{table.tolist() if len(table) < 20 else f'{len(table)} entries with null blocks there'}"
            )
        spec = layout.groups[group].kv_cache_spec
        whole = 0 if isinstance(spec, CircularBufferSpec | CrossAttentionSpec) else blocks.num_computed // per_block
        shared = np.arange(positions.start, positions.stop) < whole
        yield RequiredRows(request, group, tuple(layers), block_ids, shared)


def holding_rows(layout: KVCacheConfig, batch: Batch) -> list[np.ndarray]:
    """Per group: bool [num_blocks], rows that hold something of what the requests stand in for.

    More than what decode reads where a window layer is allocated as full attention; never the
    blocks in which a step will write its own token or its next state.
    """
    holding = [np.zeros(layout.num_blocks_of(g), dtype=bool) for g in range(len(layout.groups))]
    for blocks in batch.requests:
        for group, spec in enumerate(layout.groups):
            table = np.asarray(blocks.block_ids[group], dtype=np.int64)
            merged, per_block = spec.kv_cache_spec, layout.tokens_per_block(group)
            positions = merged.required_blocks(blocks.num_tokens, per_block, len(table))
            if not isinstance(merged, MambaSpec | CircularBufferSpec | CrossAttentionSpec):
                positions = range(0, positions.stop)
            ids = table[positions.start:positions.stop]
            holding[group][ids[(ids != NULL_BLOCK) & (ids < len(holding[group]))]] = True
    return holding


# -- the result ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found. ``ok``: every required row filled or zeroed on purpose, nothing else touched.

    Tables (pandas): ``groups``, ``layers``, ``requests`` count rows by state; ``rows`` lists every
    row that is not as it should be, with what its bytes are.
    """

    layout: KVCacheConfig
    source: str
    counts: dict[tuple[int, int, int], np.ndarray]  # (request, group, layer) → rows by state
    findings: tuple[dict, ...]
    suspects: tuple[str, ...] = ()
    disagreements: tuple[str, ...] = ()
    request_ids: tuple[str, ...] = field(default=())

    @property
    def required(self) -> int:
        """Required rows of all groups."""
        return int(sum(c.sum() for c in self.counts.values()))

    @property
    def covered(self) -> int:
        """Required rows filled, or zeroed on purpose."""
        return int(sum(c[:2].sum() for c in self.counts.values()))

    @property
    def coverage(self) -> float:
        """Share of the required rows that are covered, 0 to 1."""
        return self.covered / self.required if self.required else 1.0

    @property
    def ok(self) -> bool:
        return self.covered == self.required and not self.findings and not self.disagreements

    @cached_property
    def groups(self) -> pd.DataFrame:
        """One row a group: rows by state, coverage, stray and clobbered rows."""
        import pandas as pd

        rows = []
        for g, group in enumerate(self.layout.groups):
            counts = self._sum(lambda key, g=g: key[1] == g)
            facts = {"group": g, "kind": group.kind, "layers": len(group.layer_names), "block_size": group.block_size}
            touched = {kind: sum(f["group"] == g and f["state"] == kind for f in self.findings)
                       for kind in ("stray", "clobbered")}  # fmt: skip
            rows.append(facts | _row(counts) | touched)
        return pd.DataFrame(rows)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """One row a layer."""
        import pandas as pd

        return pd.DataFrame(
            {"group": g, "layer": name} | _row(self._sum(lambda key, g=g, j=j: key[1:] == (g, j)))
            for g, group in enumerate(self.layout.groups)
            for j, name in enumerate(group.layer_names)
        )

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row a request and group."""
        import pandas as pd

        return pd.DataFrame(
            {"request": name, "group": g} | _row(self._sum(lambda key, r=r, g=g: key[:2] == (r, g)))
            for r, name in enumerate(self.request_ids)
            for g in range(len(self.layout.groups))
        )

    @cached_property
    def rows(self) -> pd.DataFrame:
        """One row for every page that is not as it should be."""
        import pandas as pd

        columns = ["group", "layer", "block", "request", "state", "detail"]
        return pd.DataFrame(list(self.findings), columns=columns)

    @property
    def verdict(self) -> str:
        """One line for a reader in a hurry."""
        share = "100 %" if self.covered == self.required else f"{min(99.9, 100 * self.coverage):.1f} %"
        line = f"{share} of {self.required:,} required rows covered in {len(self.layout.groups)} groups"
        zeroed = int(sum(c[ZEROED_ROW] for c in self.counts.values()))
        if zeroed:
            line += f", {zeroed:,} of them zeroed on purpose"
        bad = [
            f"group {row.group} ({row.kind}) {100 * row.coverage:.0f} %"
            for row in self.groups.itertuples()
            if row.coverage < 1
        ]
        if bad:
            line += ": " + ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
        touched = [f for f in self.findings if f["state"] in ("stray", "clobbered")]
        if touched:
            line += "; " + ", ".join(
                f"{sum(f['state'] == kind for f in touched):,} rows {kind}"
                for kind in ("stray", "clobbered")
                if any(f["state"] == kind for f in touched)
            )
        elif not bad:
            line += "; nothing else touched"
        if self.suspects:
            line += f". Looks like {' or '.join(f'{s} {FAULTS[s].name}' for s in self.suspects)}"
        if self.disagreements:
            line += f". Plan and bytes disagree: {self.disagreements[0]}"
        return line + "."

    def __repr__(self) -> str:
        table = self.groups.to_string(index=False, formatters={"coverage": "{:.1%}".format})
        return f"{self.verdict}\n{table}"

    def _repr_html_(self) -> str:
        table = self.groups.style.hide(axis="index").format({"coverage": "{:.1%}"}).to_html()
        return f"<p><strong>{self.verdict}</strong></p>{table}"

    def _sum(self, wanted) -> np.ndarray:
        return sum((c for key, c in self.counts.items() if wanted(key)), np.zeros(4, dtype=np.int64))


def _row(counts: np.ndarray) -> dict[str, int | float]:
    total = int(counts.sum())
    coverage = float(counts[:2].sum() / total) if total else 1.0
    return {"required": total, **{s: int(n) for s, n in zip(STATES, counts)}, "coverage": coverage}


# -- from block ids -----------------------------------------------------------------------------


def plan_audit(
    layout: KVCacheConfig,
    batch: Batch,
    written: FillReport | ConnectorMetadata | Sequence[Sequence[int]],
    admitted: Batch | None = None,
) -> Audit:
    """Coverage from block ids alone.

    ``written``: what a fill reported, the scheduler half's metadata (which also tells who asked
    for a shared row), or rows per group. ``admitted``: the batch as it was filled, where
    ``batch`` is a later state of it: what the steps in between wrote counts as written.
    """
    by_request = {}
    if isinstance(written, ConnectorMetadata):
        by_request = {fill.request_id: fill.rows for fill in written.requests}
        written = [merge_rows(f.rows[g] for f in written.requests) for g in range(len(layout.groups))]
    elif isinstance(written, FillReport):
        written = written.block_ids
    rows_written = [np.asarray(sorted(set(rows)), dtype=np.int64) for rows in written]
    before = {b.request_id: b for b in admitted.requests} if admitted else {}
    counts, findings = {}, []
    for rows in required_rows(layout, batch):
        blocks = batch.requests[rows.request]
        covered = np.isin(rows.block_ids, rows_written[rows.group]) | rows.shared
        if blocks.request_id in before:
            covered |= _written_by_steps(layout, rows, before[blocks.request_id], blocks)
        _count(layout, counts, rows, np.where(covered, FILLED_ROW, UNCOVERED_ROW))
        for block_id in rows.block_ids[~covered].tolist():
            findings += _findings(layout, rows, block_id, blocks.request_id, "uncovered", "not in the plan")
    owner, holding = owners(layout, batch), holding_rows(layout, batch)
    for group, ids in enumerate(rows_written):
        holder = owner[layout.groups[group].pool][ids]
        for block_id, held_by in zip(ids[(holder != group)].tolist(), holder[holder != group].tolist()):
            state = "clobbered" if held_by >= 0 else "stray"
            findings.append(_finding(group, None, block_id, None, state, _where(block_id, held_by)))
        for block_id in ids[(holder == group) & ~holding[group][ids]].tolist():
            findings.append(_finding(group, None, block_id, None, "stray", NOTHING_TO_HOLD))
    for blocks in batch.requests:
        for group, ids in enumerate(by_request.get(blocks.request_id, ())):
            hits = blocks.num_computed // layout.tokens_per_block(group)
            for block_id in sorted(set(ids) & set(blocks.block_ids[group][:hits]) - {NULL_BLOCK}):
                detail = "a prefix hit's shared block"
                findings.append(_finding(group, None, block_id, blocks.request_id, "clobbered", detail))
    suspects = _suspects(layout, batch, rows_written) if findings else ()
    return Audit(layout, "plan", counts, tuple(findings), suspects, (), tuple(b.request_id for b in batch.requests))


def _written_by_steps(
    layout: KVCacheConfig, rows: RequiredRows, before: RequestBlocks, now: RequestBlocks
) -> np.ndarray:
    """Rows that hold only what decode steps wrote since the request was filled."""
    spec = layout.groups[rows.group].kv_cache_spec
    if isinstance(spec, CircularBufferSpec | CrossAttentionSpec) or before.num_tokens == now.num_tokens:
        return np.zeros(len(rows.block_ids), dtype=bool)
    if isinstance(spec, MambaSpec):
        return np.ones(len(rows.block_ids), dtype=bool)
    per_block = layout.tokens_per_block(rows.group)
    first_new = -(-(before.num_tokens - 1) // per_block)
    new = np.asarray(now.block_ids[rows.group][first_new:], dtype=np.int64)
    return np.isin(rows.block_ids, new)


def owners(layout: KVCacheConfig, batch: Batch) -> list[np.ndarray]:
    """Per pool: block id → the group that owns it in this batch, -1 where none does."""
    owner = [np.full(n, -1, dtype=np.int64) for n in layout.pool_num_blocks]
    for group, spec in enumerate(layout.groups):
        for blocks in batch.requests:
            ids = np.asarray(blocks.block_ids[group], dtype=np.int64)
            ids = ids[(ids != NULL_BLOCK) & (ids < len(owner[spec.pool]))]
            owner[spec.pool][ids] = group
    return owner


def _suspects(layout: KVCacheConfig, batch: Batch, written: Sequence[np.ndarray]) -> tuple[str, ...]:
    """Historic faults whose plan for this batch is the plan that was carried out."""
    suspects = []
    for fault in FAULTS.values():
        if fault.startup_fill or fault.leaves != "wrong bytes":
            continue
        try:
            scheduler, worker = fault.scheduler(layout), fault.worker(layout)
            for blocks in batch.requests:
                external, _ = scheduler.get_num_new_matched_tokens(blocks, blocks.num_computed)
                scheduler.update_state_after_alloc(blocks, blocks.block_ids, external)
            planned = worker.merge(scheduler.build_connector_meta())
        except DecodebenchError:
            continue
        if all(list(p) == w.tolist() for p, w in zip(planned, written)):
            suspects.append(fault.id)
    sound = ConnectorScheduler(layout)
    for blocks in batch.requests:
        external, _ = sound.get_num_new_matched_tokens(blocks, blocks.num_computed)
        sound.update_state_after_alloc(blocks, blocks.block_ids, external)
    planned = sound.build_connector_meta()
    right = [merge_rows(f.rows[g] for f in planned.requests) for g in range(len(layout.groups))]
    if all(list(p) == w.tolist() for p, w in zip(right, written)):
        return ()  # the plan is right: whatever is wrong, no fault of the plan explains it
    return tuple(suspects)


# -- from bytes ---------------------------------------------------------------------------------


def audit(
    cache: Cache,
    batch: Batch,
    values: Values | None = None,
    report: FillReport | None = None,
    resident: Values | None = None,
) -> Audit:
    """Coverage from every byte of the cache, which must have been poisoned before it was filled.

    ``values``: what the fill wrote (default: ``fill_cache``'s default). ``report``: what the fill
    says it wrote; the plan's verdict is then compared with the bytes'. ``resident``: what a prefix
    hit's blocks held before (filled by a request outside this batch); without it they count as
    covered where they hold anything but poison.
    """
    values = Normal() if values is None else values
    layout = cache.layout
    required = required_rows(layout, batch)
    owner = owners(layout, batch)
    judged = _judged_rows(cache, owner)
    seen = [inspect_rows(cache, g, values, torch.from_numpy(rows.any(axis=0))) for g, rows in enumerate(judged)]
    states = [s.states.numpy() for s in seen]
    before = {g: inspect_rows(cache, g, resident).states.numpy() for g in _hit_groups(required)} if resident else {}
    names = tuple(b.request_id for b in batch.requests)
    by_whom = _Origins(cache, values)
    computed_here = _filled_in_batch(required)
    counts: dict[tuple[int, int, int], np.ndarray] = {}
    findings: list[dict] = []
    expected = [np.zeros(s.shape, dtype=bool) for s in states]
    for rows in required:
        group, spec = rows.group, layout.groups[rows.group]
        on_purpose = isinstance(values, Zeros)
        foreign = rows.shared & ~np.isin(rows.block_ids, computed_here[group])
        for layer in rows.layers:
            found = states[group][layer, rows.block_ids]
            zeros_only = all(part.zeros_only for part in spec.layer_specs[layer].parts())
            row_states = np.select(
                [found == FILLED, found == UNTOUCHED, found == ZEROED],
                [FILLED_ROW, UNCOVERED_ROW, ZEROED_ROW if zeros_only or on_purpose else UNCOVERED_ROW],
                WRONG_ROW,
            )
            if foreign.any():
                row_states = np.where(foreign, _resident_states(before.get(group), found, layer, rows), row_states)
            _count_layer(counts, rows, layer, row_states)
            expected[group][layer, rows.block_ids] = True
            for i in np.nonzero(row_states > ZEROED_ROW)[0].tolist():
                block_id = int(rows.block_ids[i])
                if foreign[i] and row_states[i] == WRONG_ROW:
                    state, detail = "clobbered", "a prefix hit's shared block"
                else:
                    state, detail = _judge(found[i], row_states[i], by_whom, group, layer, block_id)
                findings.append(_finding(group, spec.layer_names[layer], block_id, names[rows.request], state, detail))
    findings += _strays(layout, owner, judged, states, holding_rows(layout, batch), expected, by_whom)
    findings += _padding(layout, seen, owner)
    plan = plan_audit(layout, batch, report) if report is not None else None
    disagreements = _disagreements(layout, plan, report, states, owner, findings) if plan else ()
    suspects = (plan.suspects if plan else ()) or (_byte_suspects(layout, states, findings) if findings else ())
    return Audit(layout, "bytes", counts, tuple(findings), suspects, disagreements, names)


def _hit_groups(required: Sequence[RequiredRows]) -> set[int]:
    return {rows.group for rows in required if rows.shared.any()}


def _filled_in_batch(required: Sequence[RequiredRows]) -> dict[int, np.ndarray]:
    """Per group: rows that some request of the batch needs for itself, so that this batch's fill writes them."""
    own: dict[int, list[np.ndarray]] = {}
    for rows in required:
        own.setdefault(rows.group, []).append(rows.block_ids[~rows.shared])
    return {group: np.unique(np.concatenate(ids)) for group, ids in own.items()}


def _resident_states(
    before: np.ndarray | None, found: np.ndarray, layer: int, rows: RequiredRows
) -> np.ndarray:
    """States of rows that a request outside the batch filled."""
    if before is None:
        return np.where(found == UNTOUCHED, UNCOVERED_ROW, FILLED_ROW)
    held = before[layer, rows.block_ids]
    return np.select([held == FILLED, held == UNTOUCHED], [FILLED_ROW, UNCOVERED_ROW], WRONG_ROW)


class _Origins:
    """Looks up whose content a row holds, a limited number of times a group."""

    def __init__(self, cache: Cache, values: Values) -> None:
        self.cache, self.values, self.left = cache, values, {}

    def of(self, group: int, layer: int, block_id: int) -> tuple[int, str, int] | None:
        """(group, layer name, block) that the row was written for, where that can be told."""
        self.left[group] = self.left.get(group, LOOKUPS) - 1
        if self.left[group] < 0:
            return None
        found = identify_row(self.cache, group, layer, block_id, self.values)
        if found is None:
            return None
        name = self.cache.layout.layer_names[found[0]]
        return self.cache.layout.group_of[name], name, found[1]


def _judge(
    found: int, state: int, by_whom: _Origins, group: int, layer: int, block_id: int
) -> tuple[str, str]:
    """A required row that is not covered, in words: (state, detail)."""
    if found == UNTOUCHED:
        return "uncovered", "still poison: decode reads NaN"
    if found == ZEROED:
        return "uncovered", "zeros that nobody asked for"
    origin = by_whom.of(group, layer, block_id)
    if origin is None:
        return STATES[state], "other bytes than asked for"
    detail = f"values of group {origin[0]}, layer {origin[1]!r}, block {origin[2]}"
    return ("clobbered" if origin[0] != group else STATES[state]), detail


def _judged_rows(cache: Cache, owner: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Per group: bool [layers, num_blocks], the pages that are judged through this group.

    Groups alias the same bytes. A page is judged through the group that owns its block; through
    another group only where that group's page lies apart from every page of the owner; and where
    nobody owns the block, through the first layer that lies there.
    """
    layout = cache.layout
    extents = [[_extent(cache, name) for name in group.layer_names] for group in layout.groups]
    claimed: set[tuple[int, int, int, int]] = set()
    judged = []
    for g, group in enumerate(layout.groups):
        holder = owner[group.pool]
        others = set(holder[holder >= 0].tolist()) - {g}
        rows = np.zeros((len(extents[g]), len(holder)), dtype=bool)
        for j, extent in enumerate(extents[g]):
            rows[j] = holder == g
            for other in others:
                if not any(_overlap(extent, e) for e in extents[other]):
                    rows[j] |= holder == other
            if extent not in claimed:
                rows[j] |= holder < 0
                claimed.add(extent)
        judged.append(rows)
    return judged


def _strays(
    layout: KVCacheConfig,
    owner: Sequence[np.ndarray],
    judged: Sequence[np.ndarray],
    states: Sequence[np.ndarray],
    holding: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    by_whom: _Origins,
) -> list[dict]:
    """Rows that were written and hold nothing that the batch's requests stand in for."""
    findings, zeroing = [], layout.needs_kv_cache_zeroing
    for g, group in enumerate(layout.groups):
        holder = owner[group.pool]
        mine = holder == g
        for j, name in enumerate(group.layer_names):
            found = states[g][j]
            bad = judged[g][j] & (found != UNTOUCHED) & ~expected[g][j]
            # its own, beyond what this layer reads; or its own, zeroed by an engine that zeroes new blocks
            bad &= ~(mine & (holding[g] & np.isin(found, (FILLED, ZEROED)) | zeroing & (found == ZEROED)))
            for block_id in np.nonzero(bad)[0].tolist():
                origin = by_whom.of(g, j, block_id)
                source = origin[0] if origin else g
                what = f"values of group {origin[0]}, layer {origin[1]!r}, block {origin[2]}" if origin else (
                    "zeros" if found[block_id] == ZEROED else "bytes of unknown origin")  # fmt: skip
                if mine[block_id]:
                    state, where = ("stray", NOTHING_TO_HOLD) if source == g else ("clobbered", f"owned by group {g}")
                else:
                    state, where = "stray", _where(block_id, holder[block_id])
                findings.append(_finding(source, name, block_id, None, state, f"{what}: {where}"))
    return findings


#: a request's own row that was filled although no token before the computed one lies in it
NOTHING_TO_HOLD = "holds nothing to stand in for: the step writes it itself"


def _where(block_id: int, holder: int) -> str:
    if block_id == NULL_BLOCK:
        return "the null block"
    return f"owned by group {holder}" if holder >= 0 else "owned by no request"


def _extent(cache: Cache, layer: str) -> tuple[int, int, int, int]:
    """Where block 0 of a layer lies: (storage, first byte, bytes, bytes between blocks)."""
    place = cache.page_places[layer] or cache.places[layer][0]
    return place.storage.data_ptr(), place.offset, place.part.nbytes, place.block_stride


def _overlap(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> bool:
    """Whether pages of the same block share bytes; where blocks are spaced unequally, yes unless storages differ."""
    if a[0] != b[0]:
        return False
    return a[3] != b[3] or (a[1] < b[1] + b[2] and b[1] < a[1] + a[2])


def _padding(layout: KVCacheConfig, seen, owner: Sequence[np.ndarray]) -> list[dict]:
    """Padding bytes that were written in pages of the group that owns the block."""
    findings = []
    for g, group in enumerate(layout.groups):
        written = seen[g].padding_written.numpy() & (owner[group.pool] == g) & (seen[g].states.numpy() == FILLED)
        zeroed = seen[g].padding.numpy() == ZEROED
        for j, block_id in zip(*(side.tolist() for side in np.nonzero(written & ~zeroed))):
            findings.append(_finding(g, group.layer_names[j], block_id, None, "stray", "padding bytes were written"))
    return findings


def _disagreements(
    layout: KVCacheConfig,
    plan: Audit,
    report: FillReport,
    states: Sequence[np.ndarray],
    owner: Sequence[np.ndarray],
    findings: Sequence[dict],
) -> tuple[str, ...]:
    """Where the bytes say something else than the plan: rows said to be written that do not hold the values."""
    told = []
    for g, group in enumerate(layout.groups):
        ids = np.asarray(report.block_ids[g], dtype=np.int64)
        ids = ids[owner[group.pool][ids] == g]
        missing = ids[(~np.isin(states[g][:, ids], (FILLED, ZEROED))).any(axis=0)]
        if len(missing):
            told.append(
                f"{describe(layout, g)}: {len(missing)} of {len(ids)} rows that the fill says it wrote hold "
                f"something else (first: block {missing[0]})"
            )
    return tuple(told)


def _byte_suspects(layout: KVCacheConfig, states: Sequence[np.ndarray], findings: Sequence[dict]) -> tuple[str, ...]:
    """Faults that leave the plan right and the bytes wrong, told by which groups they hit and what is there."""
    hit = {f["group"] for f in findings if f["state"] in ("wrong", "uncovered")}
    zeros = {f["group"] for f in findings if f["detail"].startswith("zeros")}
    specs = {g: layout.groups[g].layer_specs[0] for g in hit}
    if not hit:
        return ()
    if all(isinstance(spec, MambaSpec) for spec in specs.values()):
        return ("A8",) if zeros == hit else ()
    if all(isinstance(spec, CircularBufferSpec) for spec in specs.values()):
        return ("A9",)
    if all(getattr(spec, "packed", None) for spec in specs.values()):
        return ("A11",)
    if zeros == hit and layout.needs_kv_cache_zeroing:
        return ("A16",)
    if zeros == hit and all(getattr(spec, "dtype", "").startswith("float8") for spec in specs.values()):
        return ("A10",)
    if any((states[g] == WRONG).any() for g in hit):
        return ("A12",)
    return ()


# -- counting -----------------------------------------------------------------------------------


def _count(layout: KVCacheConfig, counts: dict, rows: RequiredRows, row_states: np.ndarray) -> None:
    for layer in rows.layers:
        _count_layer(counts, rows, layer, row_states)


def _count_layer(counts: dict, rows: RequiredRows, layer: int, row_states: np.ndarray) -> None:
    key = rows.request, rows.group, layer
    counts[key] = counts.get(key, 0) + np.bincount(row_states, minlength=4)[:4]


def _finding(
    group: int, layer: str | None, block: int, request: str | None, state: str, detail: str
) -> dict[str, object]:
    return {"group": group, "layer": layer, "block": block, "request": request, "state": state, "detail": detail}


def _findings(
    layout: KVCacheConfig, rows: RequiredRows, block: int, request: str, state: str, detail: str
) -> list[dict]:
    names = layout.groups[rows.group].layer_names
    return [_finding(rows.group, names[layer], block, request, state, detail) for layer in rows.layers]
