"""Coverage from bytes: every page of a poisoned and filled cache, judged through the group that owns it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from decodebench.cache.connector import describe, startup_groups
from decodebench.cache.readback import FILLED, UNTOUCHED, WRONG, ZEROED, inspect_pages
from decodebench.cache.run import check_cache_and_batch, check_values
from decodebench.cache.tensors import Cache
from decodebench.cache.values import Values, Zeros, default_values
from decodebench.cache.write import FillReport
from decodebench.coverage.from_plan import blocks_of, missing, plan_audit, plan_suspects, sound_blocks
from decodebench.coverage.origins import Origins, extent, overlap
from decodebench.coverage.required import (
    CoverageError,
    RequiredPages,
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
    TOUCHED,
    UNCOVERED_PAGE,
    WRONG_PAGE,
    ZEROED_PAGE,
    Audit,
    Tally,
    place_of,
)
from decodebench.errors import DecodebenchError
from decodebench.layout.layout import Layout
from decodebench.layout.pool import NULL_BLOCK, Batch
from decodebench.models.specs import KVCacheSpec

STILL_POISON = "still poison: decode reads NaN"
UNASKED_ZEROS = "zeros that nobody asked for"


def audit(
    cache: Cache,
    batch: Batch,
    values: Values | None = None,
    report: FillReport | None = None,
    resident: Values | None = None,
    admitted: Batch | None = None,
    startup_fill: bool = False,
) -> Audit:
    """Coverage from every byte of the cache, which must have been poisoned before it was filled.

    ``values``: what the fill wrote (default: what ``fill_cache`` last wrote here). ``report``: what the fill
    says it wrote (``connector.together`` joins those of several fills); the plan's verdict is then
    compared with the bytes'. ``resident``: what a prefix hit's blocks held before (filled by a
    request outside this batch); without it they count as covered where they hold anything but
    poison or zeros that nobody asked for. ``admitted``: the batch as it was filled, where ``batch``
    is a later state of it: pages that decode steps wrote into are covered unless they are still
    poison. ``startup_fill``: everything was written once before, so that only what is required is
    judged.

    Raises ``CoverageError`` where a table does not cover what its request reads, and for a cache
    that was allocated without poison. Whoever binds an engine's tensors has to poison them.
    """
    check_cache_and_batch("audit", cache, batch)
    check_values(values)
    if cache.initial not in ("poison", None):
        raise CoverageError(
            f"this cache was made with initial={cache.initial!r}: what nobody filled cannot be told from what "
            "somebody did. Make it with allocate(layout, device), which poisons it, and fill it again"
        )
    if values is None:
        values = cache.filled_with.get("values") or default_values(startup_fill)
    layout, tally = cache.layout, Tally(cache.layout, batch, "bytes")
    required, steps = required_pages(layout, batch), steps_between(layout, admitted, batch)
    owner, own = owners(layout, batch), written_blocks(layout, batch)
    judged = _judged_pages(cache, owner)
    seen = [
        inspect_pages(cache, g, values, torch.from_numpy(pages.any(axis=0))) for g, pages in enumerate(judged)
    ]
    states = [s.states.numpy() for s in seen]
    held = _resident_states(cache, required, resident)
    kept = () if steps.ran else kept_pages(layout, batch)

    covered = [np.zeros(s.shape, dtype=bool) for s in states]
    expected = [np.zeros(s.shape, dtype=bool) for s in states]
    by_fill = [np.zeros(s.shape, dtype=bool) for s in states]  # expected, and this batch's fill's to write
    short: list[tuple[RequiredPages, int, np.ndarray, np.ndarray]] = []
    for pages in required:
        group, limit = pages.group, layout.num_blocks_of(pages.group)
        exists = (pages.block_ids > NULL_BLOCK) & (pages.block_ids < limit)
        ids = np.where(exists, pages.block_ids, NULL_BLOCK)
        foreign = exists & pages.shared & ~own[group][ids]
        stepped = exists & steps.written[group][ids]
        for layer in pages.layers:
            found = states[group][layer, ids]
            spec = layout.groups[group].layer_specs[layer]
            page_states = states_of_fill(found, spec, values)
            if foreign.any():
                if resident is not None and group in held:
                    of_hit = states_of_fill(held[group][layer, ids], spec, resident)
                else:
                    of_hit = states_of_hit(found, spec)
                page_states = np.where(foreign, of_hit, page_states)
            if stepped.any():
                page_states = np.where(stepped & (found != UNTOUCHED), FILLED_PAGE, page_states)
            page_states[~exists] = UNCOVERED_PAGE
            tally.count(pages, layer, page_states)
            expected[group][layer, ids[exists]] = True
            by_fill[group][layer, ids[exists & ~foreign & ~stepped]] = True
            covered[group][layer, ids[exists & (page_states < WRONG_PAGE)]] = True
            if (page_states >= WRONG_PAGE).any():
                tally.find(
                    group, layer, pages.block_ids[~exists], "uncovered", missing(layout, group), pages.request
                )
                short.append(
                    (
                        pages,
                        layer,
                        (page_states >= WRONG_PAGE) & exists,
                        foreign & (page_states == WRONG_PAGE),
                    )
                )

    for pages in kept:
        for layer in pages.layers:
            spec = layout.groups[pages.group].layer_specs[layer]
            found = states[pages.group][layer, pages.block_ids]
            bad = states_of_fill(found, spec, values) >= WRONG_PAGE
            expected[pages.group][layer, pages.block_ids] = True
            tally.find(
                pages.group, layer, pages.block_ids[bad & (found != WRONG)], "uncovered", FOR_LATER_HITS
            )
            tally.find(pages.group, layer, pages.block_ids[bad & (found == WRONG)], "wrong", FOR_LATER_HITS)

    touched = [
        (
            np.zeros_like(e)
            if startup_fill
            else _touched(layout, g, judged[g], states[g], expected[g], owner, steps, holding)
        )
        for g, (e, holding) in enumerate(zip(expected, holding_blocks(layout, batch)))
    ]
    unexplained = [np.zeros_like(t) for t in touched]
    for g, t in enumerate(touched):
        unexplained[g] |= t & (states[g] == WRONG)
    for pages, layer, bad, hit in short:
        ids = pages.block_ids[bad & ~hit]
        unexplained[pages.group][layer, ids] |= states[pages.group][layer, ids] == WRONG
    origins = Origins.of(cache, values, unexplained)
    if steps.ran:
        _drop_passed_on(layout, states, touched, owner, origins)
    for pages, layer, bad, hit in short:
        tally.find(pages.group, layer, pages.block_ids[hit], "clobbered", SHARED, pages.request)
        for blocks, state, detail in explained(origins, states, pages, layer, pages.block_ids[bad & ~hit]):
            tally.find(pages.group, layer, blocks, state, detail, pages.request)
    _find_touched(tally, origins, states, touched, owner)
    _find_padding(tally, seen, owner)
    if report is None:
        found = _written_blocks(layout, states, origins, expected, touched)
        suspects = plan_suspects(layout, batch, found, _explains(layout)) if tally.findings else ()
        return tally.result(suspects or _byte_suspects(tally, states, None))
    plan = plan_audit(layout, batch, report, admitted, startup_fill, values=values)
    _adopt_touched(tally, plan)
    at_startup = startup_groups(layout, values) if startup_fill else frozenset()
    told = _disagreements(layout, plan, report, by_fill, covered, touched, at_startup)
    return tally.result(plan.suspects or _byte_suspects(tally, states, report), told)


# -- required pages ------------------------------------------------------------------------------


def states_of_fill(found: np.ndarray, spec: KVCacheSpec, values: Values) -> np.ndarray:
    """What required pages count as, from what their bytes say beside the values that were asked for."""
    on_purpose = isinstance(values, Zeros) or all(part.zeros_only for part in spec.parts())
    zeros = ZEROED_PAGE if on_purpose else UNCOVERED_PAGE
    return np.select(
        [found == FILLED, found == UNTOUCHED, found == ZEROED],
        [FILLED_PAGE, UNCOVERED_PAGE, zeros],
        WRONG_PAGE,
    )


def states_of_hit(found: np.ndarray, spec: KVCacheSpec) -> np.ndarray:
    """What pages count as that somebody else filled, or decoded into since: anything but nothing is filled."""
    zeros = ZEROED_PAGE if all(part.zeros_only for part in spec.parts()) else UNCOVERED_PAGE
    return np.select([found == UNTOUCHED, found == ZEROED], [UNCOVERED_PAGE, zeros], FILLED_PAGE)


def _resident_states(
    cache: Cache, required: Sequence[RequiredPages], resident: Values | None
) -> dict[int, np.ndarray]:
    """Per group with prefix hits: its pages compared with what a request outside the batch filled in."""
    if resident is None:
        return {}
    groups = {pages.group for pages in required if pages.shared.any()}
    return {group: inspect_pages(cache, group, resident).states.numpy() for group in groups}


def explained(
    origins: Origins, states: Sequence[np.ndarray], pages: RequiredPages, layer: int, ids: np.ndarray
) -> Iterator[tuple[np.ndarray, str, str]]:
    """(blocks, state, detail) of required pages that are not covered."""
    found = states[pages.group][layer, ids]
    yield ids[found == UNTOUCHED], "uncovered", STILL_POISON
    yield ids[found == ZEROED], "uncovered", UNASKED_ZEROS
    yield ids[found == FILLED], "wrong", "this fill's values instead of those that were there"
    for writer, text, blocks in origins.by_writer(pages.group, layer, ids[found == WRONG]):
        foreign = writer is not None and origins.group_of(writer) != pages.group
        yield blocks, "clobbered" if foreign else "wrong", text or "other bytes than asked for"


# -- pages that should not have been touched -----------------------------------------------------


def _judged_pages(cache: Cache, owner: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Per group: bool [layers, num_blocks], the pages that are judged through this group.

    Groups alias the same bytes. A page is judged through the group that owns its block; through
    another group only where that group's page lies apart from every page of the owner; and where
    nobody owns the block, through the first layer that lies there.
    """
    layout = cache.layout
    extents = [[extent(cache, name) for name in group.layer_names] for group in layout.groups]
    claimed: set[tuple[int, int, int, int]] = set()
    judged = []
    for g, group in enumerate(layout.groups):
        holder = owner[group.pool]
        others = [
            other
            for other in set(holder[holder >= 0].tolist()) - {g}
            if layout.groups[other].pool == group.pool
        ]
        pages = np.zeros((len(extents[g]), len(holder)), dtype=bool)
        for j, place in enumerate(extents[g]):
            pages[j] = holder == g
            for other in others:
                if not any(overlap(place, e) for e in extents[other]):
                    pages[j] |= holder == other
            if place not in claimed:
                pages[j] |= holder < 0
                claimed.add(place)
        judged.append(pages)
    return judged


def _touched(
    layout: Layout,
    group: int,
    judged: np.ndarray,
    states: np.ndarray,
    expected: np.ndarray,
    owner: Sequence[np.ndarray],
    steps,
    holding: np.ndarray,
) -> np.ndarray:
    """bool [layers, num_blocks]: pages that were written and hold nothing that is stood in for."""
    pool = layout.groups[group].pool
    mine = owner[pool] == group
    # its own, beyond what this layer reads; or its own, zeroed by an engine that zeroes new blocks
    fine = mine & (
        holding & np.isin(states, (FILLED, ZEROED)) | layout.needs_kv_cache_zeroing & (states == ZEROED)
    )
    fine |= mine & steps.written[group] | steps.left[pool]
    return judged & (states != UNTOUCHED) & ~expected & ~fine


def _drop_passed_on(
    layout: Layout,
    states: Sequence[np.ndarray],
    touched: Sequence[np.ndarray],
    owner: Sequence[np.ndarray],
    origins: Origins,
) -> None:
    """Steps may have taken blocks, written and left them: only this fill's own values are stray there."""
    for g, group in enumerate(layout.groups):
        unknown = (states[g] == ZEROED) | (states[g] == WRONG) & (origins.writer[g] < 0)
        touched[g][unknown & (owner[group.pool] < 0)] = False


def _find_touched(
    tally: Tally,
    origins: Origins,
    states: Sequence[np.ndarray],
    touched: Sequence[np.ndarray],
    owner: Sequence[np.ndarray],
) -> None:
    layout = tally.layout
    for g, group in enumerate(layout.groups):
        for j in range(len(group.layer_names)):
            ids = np.nonzero(touched[g][j])[0]
            holder = owner[group.pool][ids]
            for held_by in np.unique(holder).tolist():
                for null in (True, False):
                    some = ids[(holder == held_by) & ((ids == NULL_BLOCK) == null)]
                    if len(some):
                        where = place_of(NULL_BLOCK if null else -1, held_by)
                        _find_in_place(tally, origins, states, g, j, some, held_by == g, where)


def _find_in_place(
    tally: Tally,
    origins: Origins,
    states: Sequence[np.ndarray],
    g: int,
    j: int,
    ids: np.ndarray,
    mine: bool,
    where: str,
) -> None:
    """Touched pages of one layer whose blocks have one kind of owner."""
    found = states[g][j, ids]
    here = f"values of group {g}, layer {tally.layout.groups[g].layer_names[j]!r}"
    tally.find(g, j, ids[found == FILLED], "stray", NOTHING_TO_HOLD if mine else f"{here}: {where}")
    tally.find(g, j, ids[found == ZEROED], "stray", f"zeros: {NOTHING_TO_HOLD if mine else where}")
    for writer, text, blocks in origins.by_writer(g, j, ids[found == WRONG]):
        group, layer = (g, j) if writer is None else origins.place(writer)
        if mine:  # the place is the owner's
            state = "clobbered" if group != g else "stray"
            tally.find(g, j, blocks, state, f"{text or 'bytes of unknown origin'}: {where}")
        else:  # nobody's page: named after whoever wrote it
            tally.find(group, layer, blocks, "stray", f"{text or 'bytes of unknown origin'}: {where}")


def _find_padding(tally: Tally, seen, owner: Sequence[np.ndarray]) -> None:
    """Padding bytes that were written in pages of the group that owns the block."""
    for g, group in enumerate(tally.layout.groups):
        written = (
            seen[g].padding_written.numpy() & (owner[group.pool] == g) & (seen[g].states.numpy() == FILLED)
        )
        written &= seen[g].padding.numpy() != ZEROED
        for j in np.nonzero(written.any(axis=1))[0].tolist():
            tally.find(g, j, np.nonzero(written[j])[0], "stray", "padding bytes were written")


# -- plan and bytes -----------------------------------------------------------------------------


def _adopt_touched(tally: Tally, plan: Audit) -> None:
    """Writes beside the required pages show in the plan where they left the same bytes behind."""
    layout = tally.layout
    seen = {
        (layout.groups[f.group].pool, b)
        for f in tally.findings
        if f.state in TOUCHED
        for b in f.blocks.tolist()
    }
    requests = {blocks.request_id: i for i, blocks in enumerate(tally.batch.requests)}
    for f in plan.findings:
        blocks = [b for b in f.blocks.tolist() if (layout.groups[f.group].pool, b) not in seen]
        if f.state in TOUCHED and blocks:
            layer = None if f.layer is None else layout.groups[f.group].layer_names.index(f.layer)
            request = None if f.request is None else requests.get(f.request)
            tally.find(f.group, layer, blocks, f.state, f.detail, request)


def _disagreements(
    layout: Layout,
    plan: Audit,
    report: FillReport,
    by_fill: Sequence[np.ndarray],
    covered: Sequence[np.ndarray],
    touched: Sequence[np.ndarray],
    at_startup: frozenset[int],
) -> tuple[str, ...]:
    """Where the bytes say something else than the plan; what the plan says was overwritten is no surprise."""
    ids = blocks_of(layout, report)
    overwritten = [np.zeros(n, dtype=bool) for n in layout.pool_num_blocks]
    written = [np.zeros(n, dtype=bool) for n in layout.pool_num_blocks]
    for number, pages in enumerate(ids):
        written[layout.groups[number].pool][pages] = True
    for finding in plan.findings:
        if finding.state == "clobbered":
            overwritten[layout.groups[finding.group].pool][finding.blocks] = True
    told = []
    for g, group in enumerate(layout.groups):
        said = np.zeros(layout.num_blocks_of(g), dtype=bool)
        said[ids[g]] = True
        lost = by_fill[g] & said & ~covered[g] & ~overwritten[group.pool]
        silent = by_fill[g] & covered[g] & ~said & (g not in at_startup)
        beside = touched[g] & ~written[group.pool]
        for pages, words in (
            (lost, "that the fill says it wrote hold something else"),
            (silent, "hold the values although no fill reports them"),
            (beside, "were written although no fill reports them"),
        ):
            if pages.any():
                j, block = np.argwhere(pages)[0].tolist()
                told.append(
                    f"plan and bytes disagree: {describe(layout, g)}: {int(pages.sum()):,} pages {words} "
                    f"(first: layer {group.layer_names[j]!r}, block {block})"
                )
    return tuple(told)


def _written_blocks(layout: Layout, states, origins: Origins, expected, touched) -> list[np.ndarray]:
    """Blocks per group at which the group's own values were found, wherever they lie."""
    pages = [np.zeros(layout.num_blocks_of(g), dtype=bool) for g in range(len(layout.groups))]
    for g in range(len(layout.groups)):
        pages[g] |= ((expected[g] | touched[g]) & np.isin(states[g], (FILLED, ZEROED))).any(axis=0)
        for j, b in np.argwhere(origins.writer[g] >= 0).tolist():
            source = origins.group_of(int(origins.writer[g][j, b]))
            if layout.groups[source].pool == layout.groups[g].pool:
                pages[source][origins.block[g][j, b]] = True
    return [np.nonzero(r)[0] for r in pages]


def _explains(layout: Layout) -> Callable[[Sequence, Sequence[np.ndarray]], bool]:
    """Whether a plan left what was found: missing values may have been overwritten by another group's."""

    def explains(planned: Sequence[Sequence[int]], found: Sequence[np.ndarray]) -> bool:
        if not all(set(f.tolist()) <= set(p) for p, f in zip(planned, found)):
            return False
        for pool in range(len(layout.pool_num_blocks)):
            groups = [g for g, group in enumerate(layout.groups) if group.pool == pool]
            if set().union(*(planned[g] for g in groups)) != set().union(
                *(found[g].tolist() for g in groups)
            ):
                return False
        return True

    return explains


def _byte_suspects(tally: Tally, states: Sequence[np.ndarray], report: FillReport | None) -> tuple[str, ...]:
    """Faults that leave the plan right and the bytes wrong, told by the groups they hit and what is there."""
    layout = tally.layout
    short = [f for f in tally.findings if f.state in ("wrong", "uncovered")]
    hit = {f.group for f in short}
    if not hit:
        return ()
    specs = [layout.groups[g].kv_cache_spec for g in sorted(hit)]
    only_zeros = all(f.detail == UNASKED_ZEROS for f in short)
    no_poison = all(f.detail != STILL_POISON for f in short)
    if all(spec.holds_state for spec in specs):
        return ("A8",) if only_zeros else ()
    if no_poison and all(spec.bookkeeping for spec in specs):
        return ("A9",)
    if no_poison and all(spec.packed for spec in specs):
        return ("A11",)
    if only_zeros and layout.needs_kv_cache_zeroing:
        return ("A16",)
    if only_zeros and all((spec.precision or ("", None))[0].startswith("float8") for spec in specs):
        return ("A10",)
    return ("A12",) if _at_kernel_blocks(tally, states, report) else ()


def _at_kernel_blocks(tally: Tally, states: Sequence[np.ndarray], report: FillReport | None) -> bool:
    """Whether exactly the blocks i // r were written in part, for attention's ids i and one r."""
    layout = tally.layout
    attention = [g for g, group in enumerate(layout.groups) if not group.kv_cache_spec.holds_state]
    try:
        pages = blocks_of(layout, report) if report is not None else sound_blocks(layout, tally.batch)
    except DecodebenchError:
        return False
    ids = {int(i) for g in attention for i in pages[g]}
    partly = {int(b) for s in states for b in np.nonzero((s == WRONG).any(axis=0))[0]}
    return any(partly == {i // r for i in ids} for r in (2, 4, 8, 16, 32))
