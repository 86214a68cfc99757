"""Coverage: whole layouts without a gap, every single wrong page found, plan and bytes in agreement."""

import html
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import (
    KINDS,
    NOISE,
    chunk,
    cross,
    full,
    managers,
    on_tables,
    ring,
    small_layout,
    small_layouts,
    state,
    window,
)

from decodebench import plan
from decodebench.cache.connector import ConnectorMetadata, ConnectorScheduler, ConnectorWorker, RequestFill
from decodebench.cache.run import fill_cache, run_connector
from decodebench.cache.tensors import allocate
from decodebench.cache.values import Constant, Normal, Tags, Zeros
from decodebench.cache.write import fill_blocks
from decodebench.coverage.from_bytes import audit
from decodebench.coverage.from_plan import plan_audit
from decodebench.coverage.required import CoverageError, holding_blocks, owners, required_pages
from decodebench.layout.plan import from_groups
from decodebench.layout.pool import NULL_BLOCK, Batch, KVCacheManager, Request, admit
from decodebench.models.specs import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def read_positions(spec, tokens, per_block, table, hit):
    """Block-table positions that a step reads, token by token, straight from the meaning of each kind."""
    computed = tokens - 1
    if computed == 0:
        return set()
    if isinstance(spec, CircularBufferSpec | CrossAttentionSpec):
        return set(range(len(table)))
    if isinstance(spec, MambaSpec):
        # at boundaries the engine copies the state on: before the fill, unless a hit brought all of it
        copied = spec.mamba_cache_mode == "align" and hit < computed
        return {(computed if copied else computed - 1) // per_block}
    seen = range(computed)
    if isinstance(spec, SlidingWindowSpec) or getattr(spec, "sliding_window", None):
        seen = [t for t in seen if computed - t < spec.sliding_window]
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        seen = [t for t in seen if t // spec.attention_chunk_size == computed // spec.attention_chunk_size]
    return {t // per_block for t in seen}


# -- what decode reads --------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(managers())
def test_required_rows_are_what_the_kinds_mean(manager):
    layout, batch = manager.layout, manager.batch()
    required = {}
    for rows in required_pages(layout, batch):
        for layer in rows.layers:
            required[rows.request, rows.group, layer] = dict(
                zip(rows.block_ids.tolist(), rows.shared.tolist())
            )
    for r, blocks in enumerate(batch.requests):
        for g, group in enumerate(layout.groups):
            table, per_block = blocks.block_ids[g], layout.tokens_per_block(g)
            for j, spec in enumerate(group.layer_specs):
                wanted = read_positions(spec, blocks.num_tokens, per_block, table, blocks.num_computed)
                own_kind = isinstance(spec, CircularBufferSpec | CrossAttentionSpec)
                assert required.get((r, g, j), {}) == {
                    table[p]: not own_kind and (p + 1) * per_block <= blocks.num_computed for p in wanted
                }


def test_layers_of_one_group_may_read_differently():
    # a window layer kept as full attention beside one that reads everything
    layout = small_layout([[full(sliding_window=20), full()]], 16)
    layers = {
        rows.layers: rows.block_ids.tolist()
        for rows in required_pages(layout, on_tables(layout, (65, 0, [[1, 2, 3, 4, 5]])))
    }
    assert layers == {(0,): [3, 4], (1,): [1, 2, 3, 4]}


@pytest.mark.parametrize("tables", [[[1, 2]], [[1, 0, 3]]])
def test_a_table_that_does_not_cover_what_is_read_cannot_be_audited(tables):
    layout = small_layout([full()], 8)
    batch = on_tables(layout, (48, 0, tables))
    with pytest.raises(CoverageError, match="'request-0', group 0.*positions 0 to 2"):
        plan_audit(layout, batch, [()])
    with pytest.raises(CoverageError):
        audit(allocate(layout), batch)


def test_the_first_token_needs_nothing_from_before():
    layout = small_layout([full(), ring(), cross(), state()], 16)
    batch = admit(layout, requests=2, context=1)
    found = audit(allocate(layout), batch, NOISE)
    assert found.required == 0 and found.ok and found.coverage == 1


def test_owners_and_rows_that_hold_something():
    layout = small_layout([full(), window(17)], 16)
    batch = on_tables(layout, (65, 0, [[1, 2, 3, 4, 5], [0, 0, 0, 6, 7]]))
    assert owners(layout, batch)[0].tolist() == [-1, 0, 0, 0, 0, 0, 1, 1] + [-1] * 8
    assert [np.nonzero(h)[0].tolist() for h in holding_blocks(layout, batch)] == [[1, 2, 3, 4], [6]]


# -- no fault: everything, and nothing else -----------------------------------------------------


def only_these_bytes(cache, batch):
    """Every byte of the allocation outside the rows that the connector may write is still poison."""
    layout, may = cache.layout, torch.zeros(cache.layout.size, dtype=torch.bool)
    for blocks in batch.requests:
        for group, table in zip(layout.groups, blocks.block_ids):
            for layer, spec in zip(group.layer_names, group.layer_specs):
                offset, stride = layout.placement[layer]
                for block in set(table) - {NULL_BLOCK}:
                    start = offset + block * stride
                    may[start : start + spec.unpadded_page_size_bytes] = True
    return bool((cache.storage[~may] == 255).all())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(managers(), st.sampled_from([NOISE, Tags()]))
def test_without_a_fault_all_is_filled_and_nothing_else(manager, values):
    layout, batch = manager.layout, manager.batch()
    cache = allocate(layout)
    report = fill_cache(cache, batch, values)
    found = audit(cache, batch, values, report)
    assert found.ok, found
    assert found.coverage == 1 and found.rows.empty and not found.suspects and not found.disagreements
    assert "100 %" in found.verdict and "nothing else touched" in found.verdict
    assert only_these_bytes(cache, batch)
    planned = plan_audit(layout, batch, report)
    assert planned.ok
    assert planned.counts[..., :2].sum() == found.counts[..., :2].sum() == found.required
    assert np.array_equal(planned.counts.sum(axis=2), found.counts.sum(axis=2))  # row for row the same


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(managers(small_layouts(kinds=set(KINDS) - {"ring", "packed"}, num_blocks=900)), st.data())
def test_plan_and_bytes_agree_on_any_rows(manager, data):
    """Whatever rows are written, plan and bytes count the same rows as covered and see the same damage.

    Not where zeros are what is asked for: bytes cannot tell whose zeros they are.
    """
    layout, batch = manager.layout, manager.batch()
    cache, taken, rows = allocate(layout), set(), []
    owner = owners(layout, batch)[0]
    for g in range(len(layout.groups)):
        mine = [int(b) for b in np.nonzero(owner == g)[0]]
        other = st.sets(st.integers(1, layout.num_blocks - 1), max_size=3)
        chosen = data.draw(st.sets(st.sampled_from(mine)) if mine else st.just(set())) | data.draw(other)
        rows.append(sorted(chosen - taken))
        taken |= chosen
    report = fill_blocks(cache, rows, NOISE)
    found, planned = audit(cache, batch, NOISE, report), plan_audit(layout, batch, report)
    # hits whose first owner is in the batch count by what is there, in the bytes
    computed = np.zeros((len(layout.groups), layout.num_blocks), dtype=bool)
    for r in required_pages(layout, batch):
        computed[r.group][r.block_ids[~r.shared]] = True
    if all(
        computed[r.group][r.block_ids[r.shared]].all() and not r.shared.any()
        for r in required_pages(layout, batch)
    ):
        assert np.array_equal(planned.counts[..., :2].sum(axis=2), found.counts[..., :2].sum(axis=2))
        assert planned.ok == found.ok
    assert not found.disagreements, (found, rows)


def test_a_whole_jamba_every_group_of_every_request():
    layout = plan("jamba-v0.1", memory="8GiB").with_num_blocks(200)
    assert layout.size < 600 << 20
    batch = admit(layout, context=[700, 81, 1600])
    cache = allocate(layout)
    report = fill_cache(cache, batch)
    found = audit(cache, batch, report=report)
    assert found.ok, found
    groups = found.groups
    assert (
        list(groups.kind) == ["full_attention"] + ["mamba"] * 7
        or sorted(groups.kind) == ["full_attention"] + ["mamba"] * 7
    )
    # 4 layers a group; states: one row a request and layer; attention: ceil((n - 1) / 80) rows
    for row in groups.itertuples():
        assert row.required == 4 * (9 + 1 + 20 if row.kind == "full_attention" else 3)
        assert row.filled == row.required and row.coverage == 1 and row.stray == row.clobbered == 0
    assert (found.requests.coverage == 1).all() and len(found.requests) == 3 * 8
    assert (found.layers.coverage == 1).all() and len(found.layers) == 32
    assert only_these_bytes(cache, batch)


def test_a_whole_gemma_with_windows():
    layout = plan("gemma-3-1b", memory="2GiB").with_num_blocks(900)
    assert layout.size < 600 << 20
    batch = admit(layout, context=[1100, 300, 17])
    cache = allocate(layout)
    report = fill_cache(cache, batch)
    found = audit(cache, batch, report=report)
    assert found.ok, found
    for row in found.groups.itertuples():
        if row.kind == "full_attention":
            blocks = 69 + 19 + 1
        else:  # tokens 588 to 1098: blocks 36 to 68
            blocks = 33 + 19 + 1
        assert row.required == row.filled == row.layers * blocks
    assert only_these_bytes(cache, batch)


@pytest.mark.parametrize("shared", [64, 50, 96])
def test_states_windows_and_prefix_hits_together(shared):
    layout = small_layout(
        [[full(), full()], [window(40), window(40)], [state(16, mamba_cache_mode="align")] * 2], 120
    )
    batch = admit(layout, context=[130, 97, 200], shared_prefix=shared)
    assert any(blocks.num_computed for blocks in batch.requests)
    cache = allocate(layout)
    report = fill_cache(cache, batch, NOISE)
    found = audit(cache, batch, NOISE, report)
    assert found.ok, found
    assert (
        found.required > sum(report.blocks) * 2 - 1
    )  # shared rows are required of each request, and written once


def test_a_hit_of_what_an_earlier_request_filled():
    layout = small_layout([full(), state()], 40)
    manager, cache = KVCacheManager(layout), allocate(layout)
    scheduler, worker = ConnectorScheduler(layout), ConnectorWorker(layout, NOISE)
    worker.register_kv_caches(cache)
    manager.allocate(Request("first", 70, "p", 64))
    run_connector(scheduler, worker, manager.batch())
    second = manager.allocate(Request("second", 100, "p", 64))
    assert second.num_computed == 64
    report = run_connector(scheduler, worker, Batch(layout, (second,)))
    assert not set(report.block_ids[0]) & set(second.block_ids[0][:4])
    assert audit(cache, manager.batch(), NOISE).ok
    # seen alone, the first request's rows are somebody else's
    alone = audit(cache, Batch(layout, (second,)), NOISE, report, resident=NOISE)
    assert alone.coverage == 1


# -- every single wrong page --------------------------------------------------------------------


def sound(values=NOISE, **facts):
    """(layout, cache, batch, report) of a batch on a layout of all kinds, filled as it should be."""
    layout = small_layout([[full(), full()], [window(40)], [state()], [ring()], [cross(32)]], 60, **facts)
    batch = admit(layout, context=[70, 90])
    cache = allocate(layout)
    return layout, cache, batch, fill_cache(cache, batch, values)


def spoil(cache, layer, block, how):
    page = cache.pages(layer)[block][: cache.layout.layer_specs[layer].unpadded_page_size_bytes]
    if how == "poison":
        page.fill_(255)
    elif how == "zeros":
        page.zero_()
    else:
        page[how] ^= 1


@pytest.mark.parametrize("order", ["LBNHC", "BLHNC"])
@pytest.mark.parametrize(
    ("how", "state", "detail"),
    [
        ("poison", "uncovered", "still poison"),
        ("zeros", "uncovered", "zeros that nobody asked for"),
        (0, "wrong", "other bytes"),
        (-1, "wrong", "other bytes"),  # behind the first part of a state, too
    ],
)
def test_any_wrong_page_is_found_where_it_lies(order, how, state, detail):
    layout, cache, batch, report = sound(memory_order=order)
    for layer, block, request in (
        ("g0.1", batch.requests[1].block_ids[0][2], "request-1"),
        ("g1.0", batch.requests[0].block_ids[1][3], "request-0"),
        ("g2.0", batch.requests[0].block_ids[2][0], "request-0"),
    ):
        kept = cache.pages(layer)[block].clone()
        spoil(cache, layer, block, how)
        found = audit(cache, batch, NOISE, report)
        (row,) = found.rows.to_dict("records")
        assert (row["layer"], row["block"], row["request"], row["state"]) == (layer, block, request, state)
        assert detail in row["detail"]
        assert row["group"] == layout.group_of[layer]
        assert not found.ok and found.covered == found.required - 1
        table = found.layers.set_index("layer")
        assert table.loc[layer, state] == 1 and table[state].sum() == 1
        # the fill said that it wrote this row
        assert "that the fill says it wrote hold something else" in found.disagreements[0]
        assert f"layer '{layer}', block {block}" in found.disagreements[0]
        cache.pages(layer)[block] = kept
    assert audit(cache, batch, NOISE, report).ok


def test_a_ring_holds_zeros_and_nothing_else():
    layout, cache, batch, report = sound()
    block = batch.requests[0].block_ids[3][0]
    cache.pages("g3.0")[block, 5] = 1
    (row,) = audit(cache, batch, NOISE, report).rows.to_dict("records")
    assert (row["layer"], row["block"], row["state"]) == ("g3.0", block, "wrong")


@pytest.mark.parametrize(("block", "words"), [(0, "the null block"), (59, "owned by no request")])
def test_writes_outside_are_stray(block, words):
    layout, cache, batch, report = sound()
    cache.pages("g0.0")[block, 3] = 7
    (row,) = audit(cache, batch, NOISE, report).rows.to_dict("records")
    assert (row["layer"], row["block"], row["request"], row["state"]) == ("g0.0", block, None, "stray")
    assert words in row["detail"] and "unknown origin" in row["detail"]


def test_the_slot_of_the_token_being_computed_is_not_the_fills():
    layout = small_layout([full()], 8)
    batch = on_tables(layout, (33, 0, [[1, 2, 3]]))
    cache = allocate(layout)
    fill_blocks(cache, [(1, 2, 3)], NOISE)
    (row,) = audit(cache, batch, NOISE).rows.to_dict("records")
    assert (row["block"], row["state"]) == (3, "stray") and "the step writes it itself" in row["detail"]
    assert plan_audit(layout, batch, [(1, 2, 3)]).groups.stray.tolist() == [1]


def test_written_padding_is_stray():
    layout, cache, batch, report = sound()
    block = batch.requests[0].block_ids[2][0]
    spec = layout.layer_specs["g2.0"]
    assert spec.unpadded_page_size_bytes < spec.page_size_bytes
    cache.pages("g2.0")[block, -1] = 7
    (row,) = audit(cache, batch, NOISE, report).rows.to_dict("records")
    assert (row["layer"], row["block"], row["state"], row["detail"]) == (
        "g2.0",
        block,
        "stray",
        "padding bytes were written",
    )


@pytest.mark.parametrize("values", [NOISE, Tags()])
def test_a_stray_write_into_an_aliased_page_is_traced_to_its_writer(values):
    layout = small_layout([[full(), full()], [full(num_kv_heads=2), full()], [state()]], 40)
    batch = admit(layout, context=[40, 50])
    cache = allocate(layout)
    report = fill_cache(cache, batch, values)
    block = batch.requests[0].block_ids[0][1]
    fill_blocks(cache, [(), (block,), ()], values)  # group 1's layers over a block of group 0
    found = audit(cache, batch, values, report)
    rows = found.rows.set_index("layer")
    for j in (0, 1):
        assert rows.loc[f"g0.{j}"].to_dict() == {
            "group": 0,
            "block": block,
            "request": "request-0",
            "state": "clobbered",
            "detail": f"values of group 1, layer 'g1.{j}'",
        }
    assert found.groups.clobbered.tolist() == [2, 0, 0]


def test_a_row_with_another_rows_content_says_whose():
    layout = small_layout([[full(), full()]], 40)
    batch = admit(layout, context=[40, 50])
    cache = allocate(layout)
    report = fill_cache(cache, batch, NOISE)
    here, there = batch.requests[0].block_ids[0][0], batch.requests[1].block_ids[0][2]
    cache.pages("g0.0")[here] = cache.pages("g0.1")[there]
    (row,) = audit(cache, batch, NOISE, report).rows.to_dict("records")
    assert row["state"] == "wrong" and row["detail"] == f"values of group 0, layer 'g0.1', block {there}"


def test_zeros_count_only_where_they_were_asked_for():
    layout, cache, batch, report = sound(Zeros())
    assert audit(cache, batch, Zeros(), report).ok
    cache.storage.zero_()  # an engine that zeroes everything
    found = audit(cache, batch, NOISE)
    assert found.groups.coverage.tolist() == [0, 0, 0, 1, 0]
    assert set(found.rows[found.rows.state == "uncovered"].detail) == {"zeros that nobody asked for"}


def test_an_engine_that_zeroes_new_blocks_is_not_blamed():
    layout = small_layout([full(), state()], 20)
    assert layout.needs_kv_cache_zeroing
    manager, cache = KVCacheManager(layout), allocate(layout)
    batch = admit(layout, context=[33], manager=manager)
    fill_blocks(cache, [list(ids) for ids in manager.take_zeroed()], Zeros())
    report = fill_cache(cache, batch, NOISE)
    assert audit(cache, batch, NOISE, report).ok


def test_a_constant_hides_in_aliased_pages_and_bytes_that_differ_do_not():
    layout = small_layout([[full()], [full()]], 20)
    batch = on_tables(layout, (17, 0, [[1, 2], [5, 6]]))
    for values, seen in ((Constant(), False), (NOISE, True)):
        cache = allocate(layout)
        fill_blocks(cache, [(1,), (1, 5)], values)  # group 1 writes over group 0's block 1
        assert audit(cache, batch, values).ok != seen


# -- later steps --------------------------------------------------------------------------------


def decode(manager, cache, batch, steps):
    """Writes of decode steps: each token's slot, each state, as zeros and ones that no fill wrote."""
    layout = manager.layout
    for _ in range(steps):
        for blocks in manager.batch().requests:
            token = blocks.num_tokens - 1
            for g, group in enumerate(layout.groups):
                position = token // layout.tokens_per_block(g)
                spec = group.kv_cache_spec
                if isinstance(spec, CrossAttentionSpec):
                    continue
                block = blocks.block_ids[g][0 if isinstance(spec, CircularBufferSpec) else position]
                for layer in group.layer_names:
                    cache.pages(layer)[block, token % 7] = 1
            manager.append(blocks.request_id)


@pytest.mark.parametrize("steps", [0, 1, 15, 40])
@pytest.mark.parametrize("prefix", [0, 50])
def test_later_steps_count_what_steps_before_wrote(steps, prefix):
    layout = small_layout(
        [
            [full(), full()],
            [window(40)],
            [chunk(48)],
            [state(16, mamba_cache_mode="align")],
            [ring()],
            [cross(32)],
        ],
        200,
    )
    manager = KVCacheManager(layout)
    admitted = admit(layout, context=[70, 95, 60], shared_prefix=prefix, manager=manager)
    cache = allocate(layout)
    report = fill_cache(cache, admitted, NOISE)
    decode(manager, cache, admitted, steps)
    now = manager.batch()
    found = audit(cache, now, NOISE, report, admitted=admitted)
    assert found.ok, (found, found.rows)
    assert plan_audit(layout, now, report, admitted).ok
    if steps > 1:
        assert not audit(cache, now, NOISE, report).ok  # seen as a fresh batch, rows are missing


def test_a_later_step_that_reads_what_nobody_wrote():
    layout = small_layout([full()], 40)
    manager = KVCacheManager(layout)
    admitted = admit(layout, context=[33], manager=manager)
    cache = allocate(layout)
    report = fill_cache(cache, admitted, NOISE)
    manager.append("request-0", 20)  # no step ran
    found = audit(cache, manager.batch(), NOISE, report, admitted=admitted)
    table = manager.batch().requests[0].block_ids[0]
    assert found.rows.block.tolist() == [table[2], table[3]]
    assert set(found.rows.state) == {"uncovered"}
    assert "hold something else" not in found.verdict


def test_a_hole_in_the_fill_stays_a_hole_later():
    layout = small_layout([full()], 40)
    manager = KVCacheManager(layout)
    admitted = admit(layout, context=[33], manager=manager)
    manager.append("request-0", 20)
    table = manager.batch().requests[0].block_ids[0]
    found = plan_audit(layout, manager.batch(), [table[1:2]], admitted)
    assert found.rows.block.tolist() == [table[0]]


# -- plan and bytes -----------------------------------------------------------------------------


def test_a_fill_that_says_less_than_it_wrote():
    layout, cache, batch, report = sound()
    silent = fill_blocks(allocate(layout), [(), *report.block_ids[1:]], NOISE)
    found = audit(cache, batch, NOISE, silent)
    assert not found.ok and found.coverage == 1
    assert "group 0 (full_attention, first layer 'g0.0')" in found.disagreements[0]
    assert "hold the values although no fill reports them" in found.verdict


def test_a_write_that_no_report_mentions():
    layout, cache, batch, report = sound()
    cache.pages("g0.0")[59].zero_()
    found = audit(cache, batch, NOISE, report)
    assert (
        "were written although no fill reports them (first: layer 'g0.0', block 59)" in found.disagreements[0]
    )


def test_who_asked_for_a_shared_row_shows_in_the_metadata():
    layout = small_layout([full()], 40)
    batch = admit(layout, context=[70, 70], shared_prefix=64)
    scheduler = ConnectorScheduler(layout)
    for blocks in batch.requests:
        scheduler.update_state_after_alloc(blocks, blocks.block_ids, blocks.num_external_tokens)
    meta = scheduler.build_connector_meta()
    assert plan_audit(layout, batch, meta).ok
    first, second = meta.requests
    again = RequestFill(
        second.request_id, (first.block_ids[0][:1] + second.block_ids[0],), second.num_external_tokens
    )
    found = plan_audit(layout, batch, ConnectorMetadata((first, again)))
    (row,) = found.rows.to_dict("records")
    assert (row["request"], row["block"], row["state"]) == ("request-1", first.block_ids[0][0], "clobbered")


def test_ids_that_do_not_exist_are_named():
    layout = small_layout([full()], 8)
    batch = on_tables(layout, (33, 0, [[1, 2, 3]]))
    found = plan_audit(layout, batch, [(1, 2, 9, -4)])
    assert sorted(found.rows.block) == [-4, 9] and set(found.rows.state) == {"stray"}
    assert found.rows.detail[0] == "no such block: the pool's ids are 1 to 7"


# -- the result ---------------------------------------------------------------------------------


def test_a_verdict_is_one_line_and_says_what_matters():
    layout, cache, batch, report = sound()
    found = audit(cache, batch, NOISE, report)
    # 2 layers x (5 + 6) blocks, windows of 40: (3 + 4 blocks), 2 states, 2 rings, 2 x 2 encoder blocks
    assert (
        found.verdict == "100 % of 37 required pages covered in 5 groups, 2 of them zeroed on purpose "
        "(circular buffer: no plain numbers to fill); nothing else touched."
    )
    nothing = audit(allocate(layout), batch, NOISE)
    assert nothing.verdict.startswith(
        "0.0 % of 37 required pages covered in 5 groups: group 0 (full_attention) 0 %, "
        "group 1 (sliding_window) 0 %"
    )
    assert "and 1 more" in nothing.verdict and "\n" not in nothing.verdict
    spoil(cache, "g0.1", batch.requests[1].block_ids[0][2], "poison")
    assert "97.3 % of 37" in audit(cache, batch, NOISE).verdict


def test_almost_all_is_not_all():
    layout = small_layout([full(1)], 3200)
    batch = admit(layout, context=[3001])
    found = plan_audit(layout, batch, [batch.requests[0].block_ids[0][1:3000]])
    assert found.verdict.startswith(
        "99.9 % of 3,000 required pages written, by block ids, in 1 group: group 0 (full_attention) 99.9 %"
    )


def test_tables_are_tidy():
    layout, cache, batch, report = sound()
    spoil(cache, "g0.1", batch.requests[1].block_ids[0][2], "poison")
    found = audit(cache, batch, NOISE, report)
    counts = ["required", "filled", "zeroed", "wrong", "uncovered", "coverage"]
    assert list(found.groups) == ["group", "kind", "layers", "block_size", *counts, "stray", "clobbered"]
    assert list(found.layers) == ["group", "layer", *counts]
    assert list(found.requests) == ["request", "group", *counts]
    assert list(found.rows) == ["group", "layer", "block", "request", "state", "detail"]
    for table in (found.groups, found.layers, found.requests):
        assert table.required.sum() == found.required == 37
        assert (table[["filled", "zeroed", "wrong", "uncovered"]].sum(axis=1) == table.required).all()
        assert table.uncovered.sum() == 1
    asked = found.requests.set_index(["request", "group"])
    assert asked.loc[("request-1", 0), "uncovered"] == 1
    assert found.groups.set_index("group").loc[0, "coverage"] == 21 / 22
    clean = audit(*sound()[1:3], NOISE)
    assert list(clean.rows) == list(found.rows) and clean.rows.empty


def test_it_shows_itself():
    layout, cache, batch, report = sound()
    found = audit(cache, batch, NOISE, report)
    assert repr(found).splitlines()[0] == found.verdict and "sliding_window" in repr(found)
    page = found._repr_html_()
    assert f"<strong>{html.escape(found.verdict)}</strong>" in page and "<table" in page


def test_pools_are_judged_apart():
    groups = small_layout([full(), window(17)], 4).groups
    layout = from_groups((groups[0], replace(groups[1], pool=1)), (12, 8))
    batch = admit(layout, context=[65, 40])
    cache = allocate(layout)
    report = fill_cache(cache, batch, NOISE)
    found = audit(cache, batch, NOISE, report)
    assert found.ok, found
    cache.pages("g1.0")[7].zero_()
    (row,) = audit(cache, batch, NOISE).rows.to_dict("records")
    assert (row["layer"], row["block"], row["state"]) == ("g1.0", 7, "stray")


def test_nothing_of_a_large_batch_takes_long_to_say():
    """200,000 missing rows are counted, listed and summed without a loop over rows."""
    layout = small_layout([[full(1, num_kv_heads=1, head_size=1)] * 8], 30_000)
    batch = admit(layout, requests=64, context=400)
    found = plan_audit(layout, batch, [()])
    assert found.required == 64 * 399 * 8 == len(found.rows) == found.groups.uncovered[0]
    assert len(found.findings) == 64 * 8


# -- states at block boundaries, hits of zeros ---------------------------------------------------


def test_a_state_kept_for_later_hits_is_asked_for_though_no_step_reads_it():
    layout = small_layout([full(), state(16, mamba_cache_mode="align")], 12)
    batch = on_tables(layout, (33, 0, [[1, 2, 3], [0, 4, 5]]))
    for written, bad in (([4, 5], None), ([5], "uncovered"), ([4], "required")):
        rows = [[1, 2], written]
        cache = allocate(layout)
        report = fill_blocks(cache, rows, NOISE)
        by_bytes, by_plan = audit(cache, batch, NOISE, report), plan_audit(layout, batch, rows)
        for found in (by_bytes, by_plan):
            assert found.required == 3 and found.ok == (bad is None), found
            assert found.coverage == (2 / 3 if bad == "required" else 1)
        if bad == "uncovered":
            assert by_bytes.rows.block.tolist() == by_plan.rows.block.tolist() == [4]
            assert set(by_bytes.rows.detail) == set(by_plan.rows.detail)


def test_a_prefix_hit_of_zeros_was_filled_by_nobody():
    layout = small_layout([full()], 8)
    batch = on_tables(layout, (50, 32, [[1, 2, 3, 4]]))
    cache = allocate(layout)
    fill_blocks(cache, [[1]], Normal(seed=1, bank_bytes=1 << 20))
    fill_blocks(cache, [[2]], Zeros())
    fill_blocks(cache, [[3, 4]], NOISE)
    for resident in (None, Normal(seed=1, bank_bytes=1 << 20)):
        found = audit(cache, batch, NOISE, resident=resident)
        assert found.rows[["block", "state"]].values.tolist() == [[2, "uncovered"]]
    assert audit(cache, batch, NOISE, resident=Zeros()).groups.filled[0] < 4
