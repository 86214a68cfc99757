"""Faults: every historic defect on the smallest case it was reported with, caught, named and located.

Every layer has a tensor of its own here, so that no write hides behind another group's. Each
fault's test runs the connector without it too: the right rows, and an audit that finds nothing.
"""

from types import SimpleNamespace

import pytest
import torch
from small import NOISE, apart, full, latent, on_tables, ring, small_layout, state, window

from decodebench.cache.bind import bind
from decodebench.cache.connector import ConnectorError, ConnectorMetadata, ConnectorScheduler, ConnectorWorker
from decodebench.cache.faults import FAULTS, faulty_halves
from decodebench.cache.readback import FILLED, ZEROED, inspect_pages
from decodebench.cache.run import fill_cache, run_connector
from decodebench.cache.tensors import CacheMismatch, allocate
from decodebench.cache.values import Constant, Normal, encode
from decodebench.cache.write import fill_blocks
from decodebench.coverage.from_bytes import audit
from decodebench.coverage.from_counters import cost_findings
from decodebench.coverage.from_plan import plan_audit
from decodebench.errors import DecodebenchError
from decodebench.layout.pool import admit
from decodebench.models.specs import MambaSpec, MLAAttentionSpec

#: what a prefix hit's blocks held before
RESIDENT = Normal(seed=1, bank_bytes=1 << 20)

#: fault → its tests, filled by the decorator below
TESTS: dict[str, list[str]] = {}


def catches(*faults):
    def mark(test):
        for fault in faults:
            TESTS.setdefault(fault, []).append(test.__name__)
        return test

    return mark


def run(layout, batch, fault=None, values=NOISE, resident=(), cache=None):
    """(cache, audit) after both halves filled the batch."""
    cache = cache or apart(layout)
    if resident:
        fill_blocks(cache, resident, RESIDENT)
    report = fill_cache(cache, batch, values, fault)
    return cache, audit(cache, batch, values, report, RESIDENT if resident else None)


def written(cache, layer):
    """Rows of a layer in which any byte is no longer poison."""
    return (cache.pages(layer) != 255).any(dim=1).nonzero().flatten().tolist()


def holding(cache, group, values=NOISE):
    """Rows of a group's first layer that hold exactly the values."""
    return (inspect_pages(cache, group, values).states[0] == FILLED).nonzero().flatten().tolist()


def found(audit, state=None):
    """{(group, layer, block, request, state)} of an audit's findings."""
    rows = audit.rows if state is None else audit.rows[audit.rows.state == state]
    return {(r.group, r.layer, r.block, r.request, r.state) for r in rows.itertuples()}


def right(layout, batch, rows, values=NOISE, resident=()):
    """Without a fault exactly these rows are written, and the audit finds nothing."""
    cache, clean = run(layout, batch, None, values, resident)
    for group, wanted in enumerate(rows):
        for layer in layout.groups[group].layer_names:
            before = list(resident[group]) if resident else []
            assert written(cache, layer) == sorted({*before, *wanted})
    assert clean.ok, clean
    assert clean.coverage == 1 and clean.rows.empty and not clean.suspects
    return cache


# -- A1 to A6: the right rows -------------------------------------------------------------------


@catches("A1")
def test_a1_every_layer_at_group_0s_ids():
    layout = small_layout([full(), full()], 8)
    batch = on_tables(layout, (17, 0, [[1, 2], [5, 6]]))
    right(layout, batch, [[1], [5]])
    cache, bad = run(layout, batch, "A1")
    assert (written(cache, "g0.0"), written(cache, "g1.0")) == ([1], [1])
    assert found(bad) == {(1, "g1.0", 5, "request-0", "uncovered"), (1, "g1.0", 1, None, "stray")}
    assert bad.groups.coverage.tolist() == [1, 0]
    assert (
        bad.suspects == ("A1",)
        and "A1 group-0 map" in bad.verdict
        and "group 1 (full_attention) 0 %" in bad.verdict
    )


@catches("A1")
def test_a1_in_aliased_memory_says_who_wrote_over_whom():
    layout = small_layout([[full(), full()], [state(), state()]], 8)
    batch = on_tables(layout, (17, 0, [[1, 2], [5]]))
    _, bad = run(layout, batch, "A1", cache=allocate(layout))
    assert found(bad, "clobbered") == {
        (0, "g0.0", 1, "request-0", "clobbered"),
        (0, "g0.1", 1, "request-0", "clobbered"),
    }
    details = set(bad.rows[bad.rows.state == "clobbered"].detail)
    assert details == {"values of group 1, layer 'g1.0'", "values of group 1, layer 'g1.1'"}
    assert bad.suspects == ("A1",)
    assert not bad.disagreements  # the plan says the same


@catches("A2")
@pytest.mark.parametrize(("sizes", "wrong"), [((16, 32), 3), ((32, 16), 2)])
def test_a2_one_block_size_for_all_groups(sizes, wrong):
    layout = small_layout([full(size) for size in sizes], 8)
    tables = {16: [1, 2, 3], 32: [4, 5, 6]}
    batch = on_tables(layout, (34, 0, [tables[size] for size in sizes]))
    right(layout, batch, [tables[size][: {16: 3, 32: 2}[size]] for size in sizes])
    cache, bad = run(layout, batch, "A2")
    assert [len(written(cache, f"g{g}.0")) for g in (0, 1)] == [wrong, wrong]
    # too few rows of 16 tokens, or one too many of 32
    place = (1, "g1.0", 3, "request-0", "uncovered") if wrong == 2 else (1, "g1.0", 6, None, "stray")
    assert found(bad) == {place}
    assert "A2" in bad.suspects


@catches("A3")
def test_a3_prefix_ignored():
    layout = small_layout([full()], 8)
    batch = on_tables(layout, (50, 32, [[1, 2, 3, 4]]))
    right(layout, batch, [[3, 4]], resident=[(1, 2)])
    cache, bad = run(layout, batch, "A3", resident=[(1, 2)])
    assert written(cache, "g0.0") == holding(cache, 0) == [1, 2]
    assert found(bad) == {(0, "g0.0", b, "request-0", "clobbered") for b in (1, 2)} | {
        (0, "g0.0", b, "request-0", "uncovered") for b in (3, 4)
    }
    assert bad.suspects == ("A3",)


@catches("A3")
def test_a3_shows_even_where_the_same_values_were_there_before():
    layout = small_layout([full()], 8)
    batch = on_tables(layout, (50, 32, [[1, 2, 3, 4]]))
    cache = apart(layout)
    fill_blocks(cache, [(1, 2)], NOISE)
    _, bad = run(layout, batch, "A3", cache=cache)
    assert found(bad, "clobbered") == {(0, "g0.0", b, "request-0", "clobbered") for b in (1, 2)}


@catches("A4")
def test_a4_unaligned_prefix_end():
    layout = small_layout([full(32)], 8)
    batch = on_tables(layout, (41, 23, [[1, 2]]))
    right(layout, batch, [[1, 2]])
    cache, bad = run(layout, batch, "A4")
    assert written(cache, "g0.0") == [2]
    assert found(bad) == {(0, "g0.0", 1, "request-0", "uncovered")}
    assert bad.suspects == ("A4",)


@catches("A5")
def test_a5_null_padding_filled():
    layout = small_layout([window(33)], 8)
    batch = on_tables(layout, (65, 0, [[0, 0, 1, 2, 3]]))
    right(layout, batch, [[1, 2]])
    cache, bad = run(layout, batch, "A5")
    assert written(cache, "g0.0") == [0, 1, 2]
    assert found(bad) == {(0, "g0.0", 0, None, "stray")}
    assert "null block" in bad.rows.detail[0]
    assert bad.suspects == ("A5",)


@catches("A6")
def test_a6_context_parallelism_ignored():
    layout = small_layout([full(16), state()], 8, decode_context_parallel_size=2)
    batch = on_tables(layout, (34, 0, [[1, 2, 3], [4]]))
    right(layout, batch, [[1, 2], [4]])
    cache, bad = run(layout, batch, "A6")
    assert (written(cache, "g0.0"), written(cache, "g1.0")) == ([1, 2, 3], [4])
    assert found(bad) == {(0, "g0.0", 3, None, "stray")}
    # A2 with the first group's tokens a block counts otherwise
    assert "A6" in bad.suspects


# -- A7 to A12: the right bytes -----------------------------------------------------------------


@catches("A7")
@pytest.mark.parametrize("padded", [False, True])
def test_a7_state_filled_whole(padded):
    # in conv and ssm both, and in padded pages
    specs = [state().padded_to(512)] if padded else [state()]
    layout = small_layout(specs, 4)
    batch = on_tables(layout, (17, 0, [[2]]))
    cache = right(layout, batch, [[2]])
    for part, dtype in ((0, torch.bfloat16), (1, torch.float32)):
        assert cache.flat("g0.0", part).dtype == dtype
        assert (cache.flat("g0.0", part).isnan().all(dim=1)).tolist() == [True, True, False, True]
    cache, bad = run(layout, batch, "A7")
    assert written(cache, "g0.0") == [0, 1, 2, 3]
    assert found(bad) == {(0, "g0.0", b, None, "stray") for b in (0, 1, 3)}
    assert bad.suspects == ("A7",)


@catches("A7")
def test_a7_another_requests_attention_lies_in_the_same_bytes():
    layout = small_layout([full(), state()], 8)
    batch = on_tables(layout, (17, 0, [[1, 2], [3]]), (17, 0, [[4, 5], [6]]))
    _, bad = run(layout, batch, "A7", cache=allocate(layout))
    assert {(0, "g0.0", 1, "request-0", "clobbered"), (0, "g0.0", 4, "request-1", "clobbered")} <= found(bad)
    assert bad.suspects == ("A7",)


@catches("A8")
def test_a8_state_as_raw_bytes():
    # tiny Nemotron-H: conv (3, 288) in bfloat16, ssm (8, 32, 16) in float32, 18,112 of 20,480 bytes
    spec = MambaSpec(
        block_size=4096,
        shapes=((3, 288), (8, 32, 16)),
        dtypes=("bfloat16", "float32"),
        page_size_padded=20_480,
    )
    layout = small_layout([spec], 4)
    batch = on_tables(layout, (17, 0, [[2]]))
    pages = torch.full((4, 20_480), -1, dtype=torch.int8)
    cache = bind(layout, {"g0.0": pages})
    fill_cache(cache, batch, Constant())
    row = pages[2].view(torch.uint8)
    assert (row[:1728].view(torch.int16) == encode(0.015, "bfloat16")).all()
    assert (row[1728:18_112].view(torch.int32) == encode(0.015, "float32")).all()
    assert (row[18_112:] == 255).all()  # padding
    assert (pages[[0, 1, 3]] == -1).all()
    assert audit(cache, batch, Constant()).ok
    pages.fill_(-1)
    report = fill_cache(cache, batch, Constant(), "A8")
    assert (pages[2, :18_112] == 0).all()
    bad = audit(cache, batch, Constant(), report)
    assert found(bad) == {(0, "g0.0", 2, "request-0", "uncovered")}
    assert "zeros" in bad.rows.detail[0] and bad.suspects == ("A8",)


@catches("A9")
def test_a9_circular_buffer_filled():
    layout = small_layout([ring()], 8)
    batch = on_tables(layout, (100, 0, [[5]]))
    cache = right(layout, batch, [[5]])
    assert (cache.pages("g0.0")[5] == 0).all()
    cache, bad = run(layout, batch, "A9")
    assert written(cache, "g0.0") == [5] and (cache.pages("g0.0")[5] != 0).any()
    assert found(bad) == {(0, "g0.0", 5, "request-0", "wrong")}
    assert bad.suspects == ("A9",)


@catches("A10")
@pytest.mark.parametrize(("dtype", "byte"), [("float8_e4m3fn", 0x08), ("float8_e5m2", 0x24)])
def test_a10_fp8_cast_to_uint8(dtype, byte):
    layout = small_layout([full(dtype=dtype)], 8)
    batch = on_tables(layout, (17, 0, [[1, 2]]))
    pages = torch.full((8, layout.layer_specs["g0.0"].page_size_bytes), 255, dtype=torch.uint8)
    cache = bind(layout, {"g0.0": pages})
    fill_cache(cache, batch, Constant())
    assert (pages[1] == byte).all() and audit(cache, batch, Constant()).ok
    pages.fill_(255)
    report = fill_cache(cache, batch, Constant(), "A10")
    assert (pages[1] == 0).all()
    bad = audit(cache, batch, Constant(), report)
    assert found(bad) == {(0, "g0.0", 1, "request-0", "uncovered")}
    assert bad.suspects == ("A10",)


@catches("A11")
@pytest.mark.parametrize(
    "spec",
    [
        full(packed="nvfp4", state_content_bytes=18),
        MLAAttentionSpec(
            block_size=16,
            num_kv_heads=1,
            head_size=576,
            dtype="uint8",
            packed="fp8_ds_mla",
            state_content_bytes=656,
        ),
    ],
)
def test_a11_packed_format_filled(spec):
    layout = small_layout([spec], 8)
    batch = on_tables(layout, (17, 0, [[1, 2]]))
    cache = right(layout, batch, [[1]])
    assert (cache.pages("g0.0")[1] == 0).all()
    _, clean = run(layout, batch)
    assert "1 of them zeroed on purpose" in clean.verdict
    assert (clean.groups.zeroed[0], clean.groups.filled[0]) == (1, 0)  # zeroed, never filled
    cache, bad = run(layout, batch, "A11")
    assert found(bad) == {(0, "g0.0", 1, "request-0", "wrong")}
    assert bad.suspects == ("A11",)


@catches("A12")
def test_a12_ids_taken_for_rows_of_kernel_blocks():
    layout = small_layout([full(128)], 8)
    batch = on_tables(layout, (257, 0, [[1, 2, 3]]))
    heads, width = 2, 16
    kernel = torch.full((32, heads, 32, width), float("nan"), dtype=torch.bfloat16)  # 4 kernel blocks a block
    cache = bind(layout, {"g0.0": kernel})
    cache.poison()
    fill_cache(cache, batch, NOISE)
    assert (~kernel.isnan().flatten(1).any(1)).nonzero().flatten().tolist() == list(range(4, 12))
    assert audit(cache, batch, NOISE).ok
    cache.poison()
    report = fill_cache(cache, batch, NOISE, "A12")
    assert (~kernel.isnan().flatten(1).any(1)).nonzero().flatten().tolist() == [1, 2]
    bad = audit(cache, batch, NOISE, report)
    assert found(bad) == {(0, "g0.0", b, "request-0", "uncovered") for b in (1, 2)} | {
        (0, "g0.0", 0, None, "stray")
    }
    assert bad.suspects == ("A12",)
    assert "that the fill says it wrote hold something else" in bad.verdict  # the plan looked right


# -- A13 to A18: errors, costs, startup ---------------------------------------------------------


@catches("A13")
def test_a13_preemption_forgotten():
    layout = small_layout([full()], 8)
    for fault, again, refilled in ((None, 32, 1), ("A13", 0, 0)):
        scheduler = faulty_halves(layout, fault)[0] if fault else ConnectorScheduler(layout)
        request = SimpleNamespace(request_id="r", num_tokens=33)
        scheduler.update_state_after_alloc(request, [[1, 2, 3]], 32)
        scheduler.build_connector_meta()
        scheduler.request_preempted("r")
        external, _ = scheduler.get_num_new_matched_tokens(request, 0)
        assert external == again  # 0: a real prefill runs inside the benchmark
        scheduler.update_state_after_alloc(request, [[4, 5, 6]], external)
        assert scheduler.counters["requests_refilled"] == refilled
        told = cost_findings(scheduler, resumed=1)
        assert (told == ()) if fault is None else told[0].startswith("A13 preemption forgotten: 1 preempted")


@catches("A14")
def test_a14_an_id_out_of_range_is_skipped():
    layout = small_layout([full(), full()], 8)
    batch = on_tables(layout, (33, 0, [[1, 2, 3], [4, 9, 5]]))
    with pytest.raises(ConnectorError, match="'request-0', group 1 .*g1.0.*block id 9 .*1 to 7"):
        run(layout, batch)
    cache, bad = run(layout, batch, "A14")
    assert written(cache, "g1.0") == [4]
    assert found(bad) == {(1, "g1.0", 9, "request-0", "uncovered")}
    assert "no such block: the pool's ids are 1 to 7" in bad.rows.detail[0]
    assert bad.suspects == ("A14",)


@catches("A14")
def test_a14_a_layer_without_a_cache_is_skipped():
    layout = small_layout([[full(), full()]], 8)
    batch = on_tables(layout, (17, 0, [[1, 2]]))
    tensors = {
        n: torch.full((8, s.page_size_bytes), 255, dtype=torch.uint8) for n, s in layout.layer_specs.items()
    }
    given = {"g0.0": tensors["g0.0"]}
    with pytest.raises(CacheMismatch, match="'g0.1' of group 0"):
        ConnectorWorker(layout, NOISE).register_kv_caches(given)
    scheduler, worker = faulty_halves(layout, "A14", NOISE)
    worker.register_kv_caches(given)
    report = run_connector(scheduler, worker, batch)
    bad = audit(bind(layout, tensors), batch, NOISE, report)
    assert found(bad) == {(0, "g0.1", 1, "request-0", "uncovered")}
    assert "'g0.1', block 1" in bad.disagreements[0]  # the fill says that it wrote it


@catches("A14")
def test_a14_a_table_too_short():
    layout = small_layout([full()], 8)
    with pytest.raises(ConnectorError, match="group 0.*block 2.*2 entries"):
        ConnectorScheduler(layout).update_state_after_alloc(
            SimpleNamespace(request_id="r", num_tokens=34), [[1, 2]], 33
        )
    scheduler, _ = faulty_halves(layout, "A14")
    scheduler.update_state_after_alloc(SimpleNamespace(request_id="r", num_tokens=34), [[1, 2]], 33)
    assert scheduler.build_connector_meta().requests[0].block_ids == ((1, 2),)


@catches("A15")
def test_a15_repeated_fills():
    layout = small_layout([full()], 8)
    batch = on_tables(layout, *[(33, 0, [[1, 2, 3]])] * 256)
    for fault, times in ((None, 1), ("A15", 256)):
        scheduler, worker = (
            faulty_halves(layout, fault, NOISE)
            if fault
            else (ConnectorScheduler(layout), ConnectorWorker(layout, NOISE))
        )
        worker.register_kv_caches(allocate(layout))
        report = run_connector(scheduler, worker, batch)
        assert report.block_ids == [(1, 2)]
        assert worker.counters["bytes_needed"] == 2 * layout.bytes_per_block()
        assert worker.counters["bytes_written"] == times * worker.counters["bytes_needed"]
        assert worker.counters["blocks_asked"] == 512
        told = cost_findings(scheduler, worker)
        assert (told == ()) if fault is None else told[0].startswith("A15 repeated fills")


@catches("A16")
def test_a16_startup_fill_wiped():
    layout = small_layout([full(), state()], 8)
    batch = on_tables(layout, (33, 0, [[1, 2, 3], [4]]))
    cache = apart(layout)
    fill_cache(cache, batch, Constant(), startup_fill=True)
    clean = audit(cache, batch, Constant(), startup_fill=True)
    assert clean.ok and clean.required == 3, clean
    cache = apart(layout)
    report = fill_cache(cache, batch, Constant(), "A16")
    assert (inspect_pages(cache, 0, Constant()).states[0, 1:4] == ZEROED).all()
    bad = audit(cache, batch, Constant(), report, startup_fill=True)
    assert found(bad) == {(0, "g0.0", b, "request-0", "uncovered") for b in (1, 2)}
    assert bad.suspects == ("A16",)


@catches("A17")
def test_a17_fill_inside_the_measurement():
    layout = small_layout([full()], 8)
    batch = on_tables(layout, (33, 0, [[1, 2, 3]]))
    for fault in (None, "A17"):
        cache = apart(layout)
        scheduler, worker = (
            faulty_halves(layout, fault, NOISE)
            if fault
            else (ConnectorScheduler(layout), ConnectorWorker(layout, NOISE))
        )
        worker.register_kv_caches(cache)
        run_connector(scheduler, worker, batch)
        assert written(cache, "g0.0") == ([1, 2] if fault is None else [])
        for layer in layout.layer_names:  # the step asks for its layers
            worker.wait_for_layer_load(layer)
        assert written(cache, "g0.0") == [1, 2]
        assert audit(cache, batch, NOISE).ok  # right bytes
        assert (worker.counters["seconds_in_step"] > 0) == (fault is not None)
        told = cost_findings(scheduler, worker)
        assert (told == ()) if fault is None else told[0].startswith("A17 fill inside the measurement")


@catches("A18")
def test_a18_the_state_that_the_running_one_was_copied_from():
    layout = small_layout([full(), state(16, mamba_cache_mode="align")], 12)
    batch = on_tables(layout, (33, 0, [[1, 2, 3], [0, 4, 5]]), (34, 0, [[6, 7, 8], [0, 0, 9]]))
    right(layout, batch, [[1, 2, 6, 7, 8], [4, 5, 9]])
    cache, bad = run(layout, batch, "A18")
    assert written(cache, "g1.0") == [4, 9]
    assert found(bad) == {(1, "g1.0", 5, "request-0", "uncovered")}
    assert bad.suspects == ("A18",) and "A18 state before the copy" in bad.verdict


@catches("A18")
@pytest.mark.parametrize("cached", [0, 16])
def test_a18_with_drafted_tokens_and_prefix_hits(cached):
    # 31 tokens and two drafted ones: the running state has moved on to the third block
    layout = small_layout([full(), state(16, mamba_cache_mode="align", num_speculative_blocks=2)], 12)
    batch = on_tables(layout, (31, cached, [[1, 2, 3], [0, 4, 5, 6, 7]]))
    resident = [[1], []] if cached else ()
    right(layout, batch, [[2] if cached else [1, 2], [4, 5]], resident=resident)
    _, bad = run(layout, batch, "A18", resident=resident)
    assert found(bad) == {(1, "g1.0", 5, "request-0", "uncovered")} and bad.suspects == ("A18",)


# -- all of them --------------------------------------------------------------------------------


def test_every_switch_has_a_test_that_catches_it():
    assert set(TESTS) == set(FAULTS) == {f"A{i}" for i in range(1, 19)}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda f: f.id)
def test_a_switch_is_described_and_found_by_id_and_name(fault):
    assert fault.name and fault.what and fault.half in ("scheduler", "worker", "both")
    assert "\n" not in fault.what and len(fault.what) < 100
    layout = small_layout([full()], 8)
    for key in (fault.id, fault.name):
        scheduler, worker = faulty_halves(layout, key)
        assert type(scheduler) is fault.scheduler and type(worker) is fault.worker
    assert (type(scheduler), type(worker)) != (ConnectorScheduler, ConnectorWorker)


@pytest.mark.parametrize("fault", ["A13", "A15", "A17"])
def test_faults_of_cost_leave_the_right_bytes(fault):
    layout = small_layout([[full(), full()], [state()]], 40)
    assert FAULTS[fault].leaves == "right bytes at a wrong cost"
    batch = admit(layout, context=[60, 60, 40], shared_prefix=32)
    _, fine = run(layout, batch, fault, cache=allocate(layout))
    assert fine.ok, fine


def test_kernel_rows_are_told_beside_states_too():
    layout = small_layout([[full(), full()], [state(), state()]], 40)
    _, bad = run(layout, admit(layout, requests=3, context=60), "A12", cache=allocate(layout))
    assert bad.suspects == ("A12",), bad


def test_an_unknown_fault_is_refused_with_those_there_are():
    with pytest.raises(DecodebenchError, match="'A99'.*A1 .group-0 map."):
        faulty_halves(small_layout([full()], 8), "A99")


def test_faults_change_nothing_where_their_case_does_not_occur():
    """One attention layer, one request, no hit: most of history's connectors were right."""
    layout = small_layout([full()], 8)
    batch = on_tables(layout, (33, 0, [[1, 2, 3]]))
    for fault in ("A1", "A2", "A3", "A4", "A5", "A6", "A7", "A8", "A9", "A10", "A11", "A14", "A18"):
        assert run(layout, batch, fault)[1].ok


@pytest.mark.parametrize("fault", ["A1", "A7", "A8", "A12"])
def test_the_plan_alone_sees_what_ids_tell(fault):
    layout = small_layout([[full(), full()], [state()]], 40)
    batch = admit(layout, requests=3, context=60)
    cache = allocate(layout)
    scheduler, worker = faulty_halves(layout, fault, NOISE)
    worker.register_kv_caches(cache)
    report = run_connector(scheduler, worker, batch)
    by_plan = plan_audit(layout, batch, report)
    assert by_plan.ok == (fault in ("A8", "A12"))
    assert not audit(cache, batch, NOISE, report).ok
    assert plan_audit(layout, batch, ConnectorMetadata()).coverage == 0


@pytest.mark.parametrize("fault", ["A1", "A2", "A3", "A4", "A5", "A7"])
def test_bytes_alone_tell_the_fault_too(fault):
    """Without a report the audit reads from the bytes which rows were written."""
    layout = small_layout([full(32, num_kv_heads=1), full(16), window(33), state()], 60)
    batch = admit(layout, context=[100, 110], shared_prefix=50)
    cache = allocate(layout)
    fill_cache(cache, batch, NOISE, fault)
    bad = audit(cache, batch, NOISE)
    assert not bad.ok
    assert fault in bad.suspects


def test_latent_attention_is_filled_like_any_other():
    layout = small_layout([latent()], 8)
    right(layout, on_tables(layout, (33, 0, [[1, 2, 3]])), [[1, 2]])
