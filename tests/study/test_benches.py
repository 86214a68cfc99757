"""bench fill: cases that are what their names say, and three ways to fill that leave the same bytes."""

import argparse
import json
import os

import pytest
import torch

from decodebench.__main__ import main
from decodebench.cache.tensors import allocate
from decodebench.cache.values import Constant, Normal
from decodebench.errors import DecodebenchError
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.plan import from_groups, plan
from decodebench.measure.journal import store
from decodebench.models.specs import FullAttentionSpec, MambaSpec
from decodebench.study import bench_decode, compare, floors, sweep
from decodebench.study import bench_fill as bench


def small_layout(num_blocks, num_layers=2, page_bytes=None):
    """One group of small pages, in place of 64 KiB ones."""
    spec = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=16, dtype="bfloat16")
    names = tuple(f"layers.{i}.attn" for i in range(num_layers))
    return from_groups((KVCacheGroupSpec(names, (spec,) * num_layers, spec),), num_blocks + 1)


def small_hybrid(num_blocks=20):
    state = MambaSpec(
        block_size=4096, shapes=((3, 8), (16, 4)), dtypes=("bfloat16", "float32"), page_size_padded=512
    )
    attention = FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=16, dtype="bfloat16")
    groups = tuple(
        KVCacheGroupSpec((f"{name}0", f"{name}1"), (spec, spec), spec)
        for name, spec in (("mamba", state), ("attn", attention))
    )
    return from_groups(groups, num_blocks, max_model_len=33)


def test_pages_are_64_kib_and_the_cache_is_2_gib():
    layout = bench.attention_layout(1024)
    assert len(layout.layer_names) == 32 and layout.num_blocks == 1025
    assert layout.groups[0].layer_specs[0].page_size_bytes == 64 << 10
    assert (layout.num_blocks - 1) * layout.groups[0].bytes_per_block == 2 << 30


def test_cases_are_what_their_names_say():
    cases = {case.name: case for case in bench.attention_cases(1024, seed=3)}
    rows = {name: [request[0] for request in case.requests] for name, case in cases.items()}
    assert cases["contiguous"].blocks(0) == tuple(range(1, 1025))
    assert all(table == tuple(range(table[0], table[0] + 128)) for table in rows["contiguous"])
    assert len(cases["half scattered"].blocks(0)) == 512
    assert [len(t) for t in rows["16 requests x 4 scattered"]] == [4] * 16
    assert len(cases["16 requests x 4 scattered"].blocks(0)) == 64
    assert [len(t) for t in rows["256 requests x 4"]] == [4] * 256
    assert cases["256 requests x 4"].blocks(0) == tuple(range(1, 1025))
    assert (
        len(rows["256 requests share 16 blocks"]) == 256
        and len(set(rows["256 requests share 16 blocks"])) == 1
    )


def test_the_hybrid_case_is_nemotron_h_at_its_full_length():
    layout = plan("nemotron-h-8b", memory="40GiB").with_num_blocks(128)
    case = bench.hybrid_case(layout, 8)
    attention = next(g for g, group in enumerate(layout.groups) if group.kind == "full_attention")
    # 8,192 tokens: 8,191 stood in for, in blocks of 1,040
    assert len(case.blocks(attention)) == 8 * 8
    assert all(len(case.blocks(g)) == 8 for g in range(len(layout.groups)) if g != attention)
    ids = [row for request in case.requests for table in request for row in table]
    assert len(ids) == len(set(ids)) and min(ids) == 1 and max(ids) < layout.num_blocks


@pytest.mark.parametrize("layout", [small_layout(64), small_hybrid()], ids=["attention", "hybrid"])
def test_the_naive_loop_leaves_the_bytes_that_ours_leaves(layout):
    cases = bench.attention_cases(64, 0) if len(layout.groups) == 1 else [bench.hybrid_case(layout, 3)]
    for case in cases:
        ours, naive = allocate(layout), allocate(layout)
        bench.our_fill(ours, case, Constant(0.5))()
        bench.naive_fill(naive, case, Constant(0.5))()
        assert torch.equal(ours.storage, naive.storage)
        bench.check(ours, case, Constant(0.5), bench.our_fill(ours, case, Constant(0.5)))


def test_the_naive_normal_loop_writes_the_same_rows():
    layout = small_hybrid()
    case = bench.hybrid_case(layout, 3)
    naive = allocate(layout)
    bench.naive_fill(naive, case, Normal())()
    for group, part in ((0, 0), (0, 1), (1, 0)):
        [(_, view)] = naive.group_flat(group, part)
        assert view[:, list(case.blocks(group))].isfinite().all()


def test_a_fill_that_misses_a_row_stops_the_benchmark():
    layout = small_layout(64)
    case, cache = bench.attention_cases(64, 0)[0], allocate(layout)
    short = bench.Case("short", case.requests[:-1])
    with pytest.raises(AssertionError, match="contiguous"):
        bench.check(cache, case, Constant(), bench.our_fill(cache, short, Constant()))
    with pytest.raises(AssertionError, match="short"):
        bench.check(cache, short, Constant(), bench.our_fill(cache, case, Constant()))


@pytest.fixture(scope="module")
def small_run():
    """The whole benchmark on small pages (its figures mean nothing)."""
    patch = pytest.MonkeyPatch()
    patch.setattr(bench, "attention_layout", small_layout)
    patch.setattr(bench, "plan", lambda *_, **__: small_hybrid())
    patch.setattr(bench, "vllm_fill", lambda *_: None)
    patch.setattr(
        bench, "measure_beside_others", lambda *a, beside=bench.measure_beside_others: beside(*a[:3], 0.1)
    )
    yield bench.run(quick=True)
    patch.undo()


def test_every_case_has_its_row_with_ratios(small_run):
    names = {(row["case"], row["values"]) for row in small_run["fill"]}
    assert len(names) == len(small_run["fill"]) == 2 * 9
    for row in small_run["fill"]:
        assert row["bytes"] > 0 and row["of_memset"] > 0 and row["vs_vllm"] is None
    naive = {(row["case"], row["values"]) for row in small_run["fill"] if row["naive_s"]}
    assert ("contiguous", "normal") in naive and ("256 requests share 2 blocks", "constant") in naive
    assert {floor["floor"].split(",")[0] for floor in small_run["floors"]} >= {"constant", "normal"}
    assert small_run["provenance"]["settings"] == {"num_blocks": 128, "repeats": 5, "quick": True}
    assert [row["processes"] for row in small_run["beside"]] == [os.cpu_count()] * 2
    json.dumps(small_run)


def test_the_table_names_every_case_and_floor(small_run):
    text = bench.table(small_run)
    for row in small_run["fill"]:
        assert row["case"] in text
    found = floors.floors_from(small_run["floors"])
    assert all(str(floor) in text.splitlines() for floor in found)
    assert text.splitlines()[-1] == floors.verdict(found)


def test_stored_rows_are_read_as_a_sweeps(small_run, tmp_path):
    rows = bench.table_rows(small_run)
    store(tmp_path, rows, ("what", "case", "values"), small_run["provenance"])
    back = sweep.read(tmp_path)
    assert len(back) == len(rows) and set(back["what"]) == {"fill", "sharing", "audit", "beside", "floor"}
    contiguous = back[(back["case"] == "contiguous") & (back["values"] == "normal")].iloc[0]
    assert contiguous["of_memset"] == small_run["fill"][5]["of_memset"]
    same = compare.compare(tmp_path, tmp_path, metrics=("of_memset",))
    assert len(same) == back["of_memset"].notna().sum() and (same["ratio"] == 1).all()


def judged(small_run, disturbed=None, **reached):
    """Floors of a run whose every ratio is the one named."""

    def rows(kind):
        return [
            {**row, "bytes": 1 << 30, "extra_bytes": 1, **reached, "disturbed": disturbed}
            for row in small_run[kind]
        ]

    return bench.floors(rows("fill"), rows("sharing"), rows("audit"), rows("beside"))


def test_floors_are_judged_by_ratios(small_run):
    good = {"of_memset": 0.95, "vs_naive": 50.0, "one_of_many": 0.95, "of_read": 0.8}
    every = judged(small_run, **good)
    assert all(floor.met for floor in every) and floors.exit_status(every) == 0
    for column, word in (
        ("of_memset", "share of memset"),
        ("vs_naive", "times naive"),
        ("one_of_many", "time for one request"),
        ("of_read", "share of read"),
    ):
        found = judged(small_run, **(good | {column: 0.5}))
        missed = {floor.floor for floor in found if not floor.met}
        assert missed == {floor.floor for floor in every if word in floor.floor} and missed, column
        assert floors.exit_status(found) == 1


def test_what_other_work_disturbed_is_not_judged(small_run):
    """A ratio of 200 beside other processes neither meets a floor nor misses it."""
    found = judged(small_run, "other processes took 60% of the cores", of_memset=200.0, of_read=0.01)
    hidden = [floor for floor in found if floor.met is None]
    assert len(hidden) == sum("peak" not in floor.floor for floor in found)
    assert all(floor.reached is None for floor in hidden) and floors.exit_status(found) == 3
    assert "other processes took 60% of the cores" in floors.verdict(found)
    assert floors.exit_status([*found, floors.Floor("another", 1.0, 0.5)]) == 1, "a miss is a miss"
    assert floors.floors_from([floor.to_dict() for floor in found]) == found


@pytest.mark.parametrize(("status", "reached"), [(0, 0.95), (1, 0.5), (3, None)])
def test_the_commands_exit_status(small_run, status, reached, monkeypatch, capsys, tmp_path):
    judged = [{"floor": "one", "at_least": 0.9, "reached": reached, "met": None}]
    monkeypatch.setattr(bench, "run", lambda *_: small_run | {"floors": judged})
    assert main(["bench", "fill", "--json", "--out", str(tmp_path)]) == status
    assert json.loads(capsys.readouterr().out)["floors"] == judged
    assert main(["bench", "fill"]) == status
    assert ("MISSED  one" in capsys.readouterr().out) == (status == 1)


def test_decode_bench_tells_each_note_once_and_takes_larger_caches_where_allowed(capsys):
    parser = argparse.ArgumentParser()
    bench_decode.add_arguments(parser)
    rows = [
        {"model": "a", "notes": ("in L2: small",)},
        {"model": "a", "notes": ("in L2: small",)},
        {"model": "b", "failed": "no"},
    ]
    assert bench_decode.footnotes(rows) == ["a: in L2: small"]
    asked = ["--models", "tiny-llama", "--requests", "2", "--context", "64"]
    with pytest.raises(DecodebenchError, match="--max-cache"):
        bench_decode.bench_decode_command(parser.parse_args([*asked, "--max-cache", "1KiB"]))
    assert parser.parse_args([*asked, "--max-cache", "80GiB"]).max_cache == 80 << 30
