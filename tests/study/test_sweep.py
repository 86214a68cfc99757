"""Sweeps: grids that say what is wrong with them, rows that survive kill -9, comparisons that refuse."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest

from decodebench.cache.faults import FAULTS
from decodebench.measure import journal as journals
from decodebench.measure.journal import JOURNAL, PARQUET, PROVENANCE, Journal, JournalError, read_folder
from decodebench.study import compare, plans, runners, spread, sweep
from decodebench.study import table as table_
from decodebench.study.grid import Case, SweepError, cases, load_grid, parse_context

ROOT = Path(__file__).parents[2]
TYPES = {"case_id": "string", "value": "Int64", "run": "Int64"}


# -- grids -----------------------------------------------------------------------------------------


def test_a_grid_is_the_product_of_its_axes_in_order_and_each_case_once():
    found = cases({"model": ["a", "b"], "block_size": [16, 32, 16], "batch": 4})
    assert [(c.model, c.block_size) for c in found] == [("a", 16), ("a", 32), ("b", 16), ("b", 32)]
    assert {c.batch for c in found} == {4}


def test_several_grids_are_joined():
    found = cases([{"model": "a", "fault": [None, "A1"]}, {"model": "b"}, {"model": "a"}])
    assert [(c.model, c.fault) for c in found] == [("a", None), ("a", "A1"), ("b", None)]


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        ({"model": "a", "blocksize": 16}, "did you mean 'block_size'"),
        ({"model": "a", "block_size": []}, "'block_size' is empty"),
        ({"block_size": 16}, "without a model"),
        ([], "empty grid"),
        ({"model": "a", "block_size": "16"}, "is not int"),
        ({"model": "a", "batch": True}, "is not int"),
        ({"model": "a", "batch": 0}, "too small"),
        ({"model": "a", "measure": "speed"}, "measure 'speed'"),
        ({"model": "a", "values": "ones"}, "values 'ones'"),
        ({"model": "a", "context": "63*4096"}, "a mix such as"),
        ({"model": "a", "context": 0}, "a mix such as"),
        ({"model": 7}, "is not str"),
    ],
)
def test_a_bad_grid_names_the_key_and_the_remedy(grid, says):
    with pytest.raises(SweepError, match="(?s)" + says.replace("*", r"\*")):
        cases(grid)


def test_contexts_may_be_mixed():
    assert parse_context("63x4096+1x262144") == (4096,) * 63 + (262144,)
    assert parse_context(" 2×10 + 7") == (10, 10, 7)
    (case,) = cases({"model": "a", "context": "63 x 4096 + 1 x 262_144", "batch": [1, 8]})
    assert case.batch == 64 and case.contexts == (4096,) * 63 + (262144,)
    (case,) = cases({"model": "a", "context": 100, "batch": 3})
    assert case.contexts == (100, 100, 100)


def test_a_case_is_known_by_its_content(tmp_path):
    assert Case("a", block_size=16).case_id() == Case("a", block_size=16).case_id()
    ids = {
        Case("a", **{k: v}).case_id()
        for k, v in [("block_size", 16), ("seed", 1), ("fault", "A1"), ("batch", 9)]
    }
    assert len(ids) == 4
    config = tmp_path / "config.json"
    config.write_text("{}")
    before = Case(str(config)).case_id()
    copy = tmp_path / "copy.json"
    copy.write_text("{}")
    assert Case(str(copy)).case_id() == before, "the same file under another name is the same model"
    config.write_text('{"a": 1}')
    assert Case(str(config)).case_id() != before, "an edited config is another model"


def test_a_grid_file(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(
        'model = "a"\nblock_size = [16, 32]\n[[grid]]\nfault = ["", "A1"]\n[[grid]]\ncontext = 10\n'
    )
    found = cases(load_grid(path))
    assert len(found) == 6 and found[0].fault is None and found[1].fault == "A1" and found[-1].context == "10"
    path.write_text("model = ")
    with pytest.raises(SweepError, match="grid.toml: not TOML"):
        load_grid(path)
    with pytest.raises(SweepError, match="No such file"):
        load_grid(tmp_path / "absent.toml")
    path.write_text("grid = 3")
    with pytest.raises(SweepError, match="double brackets"):
        load_grid(path)


# -- the journal -----------------------------------------------------------------------------------

WRITER = """
import sys
from decodebench.measure.journal import Journal
folder, total = sys.argv[1], int(sys.argv[2])
with Journal(folder) as journal:
    missing = [i for i in range(total) if f"case-{i}" not in journal.rows]
    if missing:
        journal.begin_run({"device": "test"})
    print("start", flush=True)
    for i in missing:
        journal.append({"case_id": f"case-{i}", "value": i * i, "padding": "x" * 3000})
        print(i, flush=True)  # on the disk before anybody hears of it
    journal.compact([f"case-{i}" for i in range(total)], {"case_id": "string", "value": "Int64", "run": "Int64"})
"""


def test_kill_9_loses_no_finished_row(tmp_path):
    """A real process, killed at random moments until the sweep is through: nothing lost, nothing twice."""
    chance, total, kills, announced = random.Random(0), 1500, 0, set()
    folder = tmp_path / "out"
    while not (folder / PARQUET).exists():
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(total)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        heard = process.stdout.readline()
        time.sleep(chance.uniform(0, 0.02) if kills < 40 else 3)
        process.send_signal(signal.SIGKILL)
        heard += process.stdout.read()
        process.wait()
        kills += 1
        # a last line cut off by the kill may be half a number
        announced |= {int(line) for line in heard.split("\n")[:-1] if line.isdigit()}
        rows, _ = read_folder(folder)
        assert announced <= {row["value"] ** 0.5 for row in rows.values()}
        assert kills < 60, "the sweep does not come to its end"
    assert kills >= 20
    rows, runs = read_folder(folder)
    assert [row["value"] for row in rows.values()] == [i * i for i in range(total)]
    assert {row["run"] for row in rows.values()} <= {run["run"] for run in runs}


def test_a_kill_at_any_byte_is_recovered(tmp_path):
    """Whatever length the file is cut to, whole rows stay and the rest is computed again."""
    with Journal(tmp_path) as journal:
        journal.begin_run({})
        for i in range(3):
            journal.append({"case_id": f"c{i}", "value": i})
    whole = (tmp_path / JOURNAL).read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole) + 1):
        (tmp_path / JOURNAL).write_bytes(whole[:cut])
        with Journal(tmp_path) as journal:
            assert len(journal.rows) == sum(end <= cut for end in ends)
            journal.begin_run({})
            journal.append({"case_id": "again", "value": 9})
        assert list(read_folder(tmp_path)[0])[-1] == "again"
    # a crash of the machine can leave a tail of zeros instead
    (tmp_path / JOURNAL).write_bytes(whole[: ends[1]] + b"\0" * 50)
    with Journal(tmp_path) as journal:
        assert list(journal.rows) == ["c0", "c1"]


def test_a_kill_while_compacting_is_recovered(tmp_path, monkeypatch):
    def fill():
        with Journal(tmp_path) as journal:
            journal.begin_run({})
            journal.append({"case_id": "a", "value": 1})
            journal.compact(["a"], TYPES)

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patched:
            if name == "replace":
                patched.setattr(journals.os, "replace", _only_provenance(os.replace))
            else:
                patched.setattr(Path, "unlink", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                fill()
        assert read_folder(tmp_path)[0]["a"]["value"] == 1
    fill()
    assert sorted(p.name for p in tmp_path.iterdir()) == [PROVENANCE, PARQUET]
    assert list(read_folder(tmp_path)[0]) == ["a"]


def _only_provenance(replace):
    def replaced(source, target):
        if Path(target).name != PROVENANCE:
            raise KeyboardInterrupt
        replace(source, target)

    return replaced


def test_a_damaged_line_before_the_last_is_named(tmp_path):
    with Journal(tmp_path) as journal:
        journal.begin_run({})
        for i in range(3):
            journal.append({"case_id": f"c{i}"})
    lines = (tmp_path / JOURNAL).read_text().splitlines(True)
    (tmp_path / JOURNAL).write_text(lines[0] + lines[1][:10] + "\n" + lines[2])
    with pytest.raises(JournalError, match="line 2: not a row"):
        Journal(tmp_path)


def test_a_full_disk_loses_nothing(tmp_path):
    """A file-size limit stands in for a full disk: the write fails half way, the rows before it are whole."""
    script = (
        "import resource, sys\nfrom decodebench.measure.journal import Journal, JournalError\n"
        "journal = Journal(sys.argv[1]); journal.begin_run({})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "for i in range(100):\n"
        "    try: journal.append({'case_id': f'c{i}', 'text': 'x' * 90})\n"
        "    except JournalError as error: print(error); break\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert "rows finished before it are safe" in done.stdout, done.stderr
    data = (tmp_path / JOURNAL).read_bytes()
    assert 0 < len(data) <= 1000 and data.endswith(b"\n")
    with Journal(tmp_path) as journal:
        count = len(journal.rows)
        assert count == len(data.splitlines())
        journal.begin_run({})
        journal.append({"case_id": "more"})
    assert len(read_folder(tmp_path)[0]) == count + 1


def test_two_writers_are_kept_apart(tmp_path):
    with Journal(tmp_path), pytest.raises(JournalError, match="another sweep is writing"):
        Journal(tmp_path)
    Journal(tmp_path).__exit__()


def test_folders_of_another_kind_are_refused(tmp_path):
    with pytest.raises(JournalError, match="not a folder that a sweep has written"):
        read_folder(tmp_path)
    with Journal(tmp_path) as journal:
        journal.begin_run({})
        journal.append({"case_id": "a"})
    stored = json.loads((tmp_path / PROVENANCE).read_text())
    (tmp_path / PROVENANCE).write_text(json.dumps(stored | {"schema": 0}))
    for attempt in (lambda: read_folder(tmp_path), lambda: Journal(tmp_path)):
        with pytest.raises(JournalError, match="schema 0, this version reads and writes schema 2"):
            attempt()
    (tmp_path / PROVENANCE).write_text("nothing")
    with pytest.raises(JournalError, match="not the provenance of a sweep"):
        read_folder(tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(JournalError, match="cannot write results there"):
        Journal(blocked)


def test_reading_while_writing_sees_whole_rows(tmp_path):
    with Journal(tmp_path) as journal:
        journal.begin_run({})
        journal.append({"case_id": "a", "value": 1})
        with open(tmp_path / JOURNAL, "ab") as other:
            other.write(b'{"case_id": "b", "val')
        assert list(read_folder(tmp_path)[0]) == ["a"]


# -- running ---------------------------------------------------------------------------------------

GRID = {"model": ["tiny-llama", "tiny-gemma3"], "block_size": [16, 32], "measure": "layout"}
#: what differs between two runs of the same sweep
CHANGING = ["seconds", "run"]


def same(a, b):
    pd.testing.assert_frame_equal(a.drop(columns=CHANGING), b.drop(columns=CHANGING))


@pytest.fixture
def evaluated(monkeypatch):
    """Case ids in the order in which they are computed."""
    seen = []
    real = runners.evaluate
    monkeypatch.setattr(spread, "evaluate", lambda case: seen.append(case.case_id()) or real(case))
    return seen


def test_a_table_has_the_documented_columns(tmp_path):
    table = sweep.run(GRID)
    assert list(table.columns) == list(table_.COLUMNS)
    assert {c: str(d) for c, d in table.dtypes.items()} == {c: str(d) for c, d in table_.DTYPES.items()}
    assert list(table_.schema()["column"]) == list(table.columns)
    assert set(table[["model", "slope_bytes"]].attrs["meanings"]) == set(table.columns), (
        "tooltips travel along"
    )
    stored = sweep.run(GRID, tmp_path / "a")
    same(stored, table)
    same(sweep.read(tmp_path / "a"), table)
    assert dict(sweep.read(tmp_path / "a").dtypes) == dict(table.dtypes), "Parquet keeps the types"
    (run,) = sweep.read(tmp_path / "a").attrs["provenance"]
    assert {"device", "cores", "torch", "commit", "uncommitted_changes", "date", "settings", "python"} <= set(
        run
    )
    assert run["settings"]["grid"]["block_size"] == [16, 32]


def test_a_finished_case_is_not_computed_again_wherever_it_stands(tmp_path, evaluated):
    sweep.run({**GRID, "block_size": 32}, tmp_path)
    assert len(evaluated) == 2
    table = sweep.run({**GRID, "block_size": [16, 32, 64]}, tmp_path)
    assert len(evaluated) == 6 and len(set(evaluated)) == 6
    assert list(table["block_size"]) == [16, 32, 64] * 2, "in the order of the grid asked for"
    assert len(sweep.run({**GRID, "block_size": [64, 32]}, tmp_path)) == 4
    assert len(evaluated) == 6
    assert len(sweep.read(tmp_path)) == 6, "rows of other grids stay"
    assert len(sweep.read(tmp_path).attrs["provenance"]) == 2, "a run that computed nothing leaves no trace"


def test_a_refused_and_a_failing_case_are_rows_with_their_reason(tmp_path, monkeypatch, evaluated):
    grid = {"model": ["llama-3.1-8b", "tiny-llama", "no-such-model"], "measure": "layout", "block_size": [16]}
    real = plans.layout_stage

    def stage(case, made):
        if case.model == "tiny-llama":
            raise MemoryError("no room")
        return real(case, made)

    monkeypatch.setattr(plans, "layout_stage", stage)
    table = sweep.run(grid, tmp_path)
    assert list(table["status"]) == ["refused", "failed", "refused"]
    assert "max_model_len" in table["reason"][0] and table["reason"][1] == "MemoryError: no room"
    assert "no-such-model" in table["reason"][2]
    monkeypatch.setattr(plans, "layout_stage", real)
    assert list(sweep.run(grid, tmp_path)["status"]) == ["refused", "failed", "refused"]
    assert len(evaluated) == 3
    assert list(sweep.run(grid, tmp_path, retry_failed=True)["status"]) == ["refused", "ok", "refused"]
    assert len(evaluated) == 6


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path, monkeypatch):
    whole = sweep.run(GRID)
    real, count = runners.evaluate, iter(range(100))

    def interrupted(case):
        if next(count) == 2:
            raise KeyboardInterrupt
        return real(case)

    monkeypatch.setattr(spread, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(GRID, tmp_path)
    assert len(sweep.read(tmp_path)) == 2, "readable in between"
    monkeypatch.setattr(spread, "evaluate", real)
    same(sweep.run(GRID, tmp_path), whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == [PROVENANCE, PARQUET]


def test_the_command_survives_kill_9_and_equals_an_uninterrupted_run(tmp_path):
    """The whole command as a process, killed three times; what it gives equals a run that was left alone."""
    grid = tmp_path / "grid.toml"
    grid.write_text(
        'model = ["jamba-v0.1", "gemma-3-1b", "llama-3.1-8b"]\nmeasure = "layout"\nmax_model_len = "auto"\n'
        f"block_size = {list(range(16, 16 * 200, 16))}\n"
    )
    command = [sys.executable, "-m", "decodebench", "sweep", str(grid), "--quiet", "--out"]
    out, journal = tmp_path / "out", tmp_path / "out" / JOURNAL
    finished = 0
    for _ in range(3):
        process = subprocess.Popen([*command, str(out)], cwd=ROOT, stdout=subprocess.DEVNULL)
        while process.poll() is None and (
            not journal.exists() or journal.stat().st_size < (finished + 60) * 800
        ):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        rows = len(sweep.read(out))
        assert rows >= finished
        finished = rows
    assert 0 < finished < 597
    done = subprocess.run([*command, str(out)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("597 cases of this grid (")
    alone = sweep.run(grid, tmp_path / "alone", progress=False)
    same(sweep.read(out), alone)
    assert len(sweep.read(out).attrs["provenance"]) == 4


def test_the_command_refuses_in_one_line(tmp_path, capsys):
    from decodebench.__main__ import main

    grid = tmp_path / "grid.toml"
    grid.write_text('model = "a"\nbatchsize = 3\n')
    assert main(["sweep", str(grid), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "unknown key 'batchsize'" in error
    assert not (tmp_path / "out").exists(), "a bad grid leaves nothing behind"


def test_overrides_change_the_config_and_nothing_else():
    plain, changed = sweep.run(
        {"model": "tiny-llama", "measure": "layout", "hf_overrides": [None, {"num_hidden_layers": 2}]}
    ).to_dict("records")
    assert changed["layers"] == 2 < plain["layers"]
    table = sweep.run({"model": "tiny-llama", "measure": "layout", "hf_overrides": "not json"})
    assert table["status"][0] == "refused" and "JSON object" in table["reason"][0]


def test_an_edited_config_is_read_again(tmp_path):
    config = tmp_path / "config.json"
    original = json.loads((ROOT / "data/models/tiny-llama/config.json").read_text())
    layers = []
    for count in (2, 4):
        config.write_text(json.dumps(original | {"num_hidden_layers": count}))
        layers.append(sweep.run({"model": str(config), "measure": "layout"})["layers"][0])
    assert layers == [2, 4]


def test_coverage_of_faults_and_of_the_connector_as_it_should_be():
    table = sweep.run(
        {
            "model": "tiny-nemotron-h",
            "fault": [None, "A1", "A3"],
            "context": 400,
            "batch": 2,
            "shared_prefix": 160,
        }
    )
    sound, group_0, prefix = table.to_dict("records")
    assert sound["coverage"] == 1 and sound["clobbered_pages"] == 0 and sound["required_pages"] > 0
    assert group_0["worst_group_coverage"] == 0 and "A1" in group_0["verdict"]
    assert prefix["clobbered_pages"] > 0, "the shared blocks of the prefix hit"


@pytest.mark.parametrize("model", ["tiny-nemotron-h", "tiny-gemma3", "tiny-llama"])
def test_block_ids_certify_nothing_that_bytes_deny(model):
    """Whatever the coverage level says of a fault, the audit of the bytes says too, or the level is silent."""
    table = sweep.run(
        {
            "model": model,
            "fault": [None, *FAULTS],
            "context": 200,
            "batch": 2,
            "memory": "64MiB",
            "max_model_len": 1024,
            "measure": ["coverage", "audit"],
        }
    )
    assert set(table["status"]) == {"ok"}
    sides = {measure: part.set_index(part["fault"].fillna("")) for measure, part in table.groupby("measure")}
    for fault, row in sides["coverage"].iterrows():
        if pd.isna(row["coverage"]):
            assert "Not judged by block ids" in row["verdict"] and "audit" in row["verdict"]
            assert row["required_pages"] == sides["audit"]["required_pages"][fault]
        else:
            assert row["coverage"] == pytest.approx(sides["audit"]["coverage"][fault]), fault
            assert "by block ids" in row["verdict"]
    silent = set(sides["coverage"].index[sides["coverage"]["coverage"].isna()])
    assert {"A7", "A8", "A12", "A16"} <= silent and not silent & {"", "A1", "A2", "A3", "A4", "A6"}


def test_audit_and_decode_levels_measure():
    table = sweep.run(
        [
            {"model": "tiny-nemotron-h", "context": "1x300+1x100", "measure": "audit", "fault": [None, "A8"]},
            {
                "model": "tiny-llama",
                "context": 200,
                "batch": 2,
                "measure": "decode",
                "min_seconds": 0.01,
                "layers_per_group": 1,
                "values": ["normal", "unfilled"],
            },
        ]
    )
    assert list(table["status"]) == ["ok"] * 4, list(table["reason"])
    assert list(table["coverage"]) == [1.0, pytest.approx(table["coverage"][1]), 1.0, 0.0]
    assert table["worst_group_coverage"][1] == 0
    assert (table["fill_bytes"][:3] > 0).all() and pd.isna(table["fill_bytes"][3])
    timed = table[2:]
    assert (timed["q1_s"] <= timed["median_s"]).all() and (timed["median_s"] <= timed["q3_s"]).all()
    assert (timed["bytes_moved"] > 0).all() and timed["backend_used"].notna().all()


# -- comparing -------------------------------------------------------------------------------------


def measured(**changes):
    """A table of two latencies, as a sweep would give them."""
    rows = [
        asdict(Case("a", block_size=size, **changes))
        | {
            "case_id": f"{size}",
            "status": "ok",
            "run": 0,
            "median_s": size / 1e4,
            "q1_s": size / 1.1e4,
            "q3_s": size / 0.9e4,
        }
        for size in (16, 32)
    ]
    table = journals.to_frame(rows, table_.DTYPES)
    table.attrs["provenance"] = [{"run": 0, "device": "machine one", "cores": 2}]
    return table


def test_a_comparison_gives_ratios_with_their_spread():
    a, b = measured(), measured()
    for column in ("median_s", "q1_s", "q3_s"):
        b.loc[0, column] = a.loc[0, column] * 2
    result = compare.compare(a, b, metrics=["median_s"])
    assert list(result["block_size"]) == [16, 32] and list(result["ratio"]) == pytest.approx([2.0, 1.0])
    assert result["ratio_low"][0] == pytest.approx(2 * 0.9 / 1.1) and result["ratio_high"][
        0
    ] == pytest.approx(2 * 1.1 / 0.9)
    assert list(result["distinguishable"].isna()) == [True, False], "without a repeated run nobody can tell"


def test_a_comparison_refuses_what_differs_unless_told():
    with pytest.raises(SweepError, match="differ in device: cpu only in the first, cuda only in the second"):
        compare.compare(measured(), measured(device="cuda"))
    assert list(compare.compare(measured(), measured(device="cuda"), across=["device"])["ratio"]) == [
        1.0,
        1.0,
    ]
    with pytest.raises(
        SweepError, match="differ in block_size: 32 only in the first, nothing only in the second"
    ):
        compare.compare(measured(), _with(measured().iloc[:1], measured()))
    assert len(compare.compare(measured(), _with(measured().iloc[:1], measured()), partial=True)) == 1
    other = measured()
    other.attrs["provenance"] = [{"run": 0, "device": "machine two", "cores": 2}]
    with pytest.raises(SweepError, match="latencies of different machines"):
        compare.compare(measured(), other)
    assert len(compare.compare(measured(), other, across=["machine"])) == 2
    with pytest.raises(SweepError, match="unknown setting 'speed'"):
        compare.compare(measured(), measured(), across=["speed"])
    with pytest.raises(SweepError, match="differ only in what is compared across"):
        compare.compare(measured(), measured(), across=["block_size"])


def _with(frame, like):
    frame.attrs["provenance"] = like.attrs["provenance"]
    return frame.reset_index(drop=True)


def test_two_stored_sweeps_are_compared(tmp_path):
    sweep.run(GRID, tmp_path / "a")
    sweep.run({**GRID, "kv_cache_dtype": "fp8"}, tmp_path / "b")
    with pytest.raises(SweepError, match="differ in kv_cache_dtype"):
        compare.compare(tmp_path / "a", tmp_path / "b")
    result = compare.compare(tmp_path / "a", tmp_path / "b", across=["kv_cache_dtype"])
    fits = result[(result["metric"] == "num_blocks") & (result["model"] == "tiny-llama")]
    assert set(fits["ratio"].round(2)) == {2.0}


def test_a_difference_of_times_needs_quartiles_and_a_repeated_run():
    """Identical reruns differ in every clock: that is no difference."""
    a, b, again = measured(), measured(), measured()
    for column in ("median_s", "q1_s", "q3_s"):
        b.loc[0, column] = a.loc[0, column] * 2
    for frame, seconds in ((a, 1.0), (b, 1.1), (again, 1.2)):
        frame["fill_seconds"] = seconds
        frame["coverage"] = 1.0
    b["coverage"] = [0.5, 1.0]

    def told(**more):
        result = compare.compare(a, b, metrics=["median_s", "fill_seconds", "coverage"], **more)
        return {(r.block_size, r.metric): (r.distinguishable, r.why) for r in result.itertuples()}

    alone, twice = told(), told(again=again)
    assert alone[16, "median_s"] == (pd.NA, "no repeated run to tell drift from difference")
    assert alone[32, "median_s"] == (False, "quartiles overlap")
    assert alone[16, "fill_seconds"] == (pd.NA, "one sample, no spread") == twice[16, "fill_seconds"]
    assert alone[16, "coverage"] == (True, "exact") and alone[32, "coverage"] == (False, "exact")
    assert twice[16, "median_s"] == (True, "quartiles of both runs leave out 1")
    for column in ("median_s", "q1_s", "q3_s"):
        again.loc[0, column] = b.loc[0, column] * 1.01
    assert told(again=again)[16, "median_s"] == (False, "the repeated run overlaps")
    text = compare.summary(compare.compare(a, b, metrics=["median_s", "fill_seconds", "coverage"]))
    assert text.startswith("6 values compared: 1 differ, 2 do not, 3 cannot be told apart from chance")
    assert "50.0%" in text and "e+0" not in text


def test_the_command_names_every_axis_and_gives_a_table(tmp_path, capsys):
    from decodebench.__main__ import main

    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    help_text = capsys.readouterr().out
    for axis in sweep.AXES:
        assert re.search(rf"^{axis}\s.*\w", help_text, re.M), axis
    grid = tmp_path / "grid.toml"
    grid.write_text('model = ["tiny-llama", "nobody"]\nmeasure = "layout"\ncontext = [100, 2048, 512]\n')
    assert main(["sweep", str(grid), "--quiet", "--csv", str(tmp_path / "rows.csv")]) == 0
    said = capsys.readouterr().out
    assert "(3 ok, 3 refused)" in said and "concurrency" in said
    rows = pd.read_csv(tmp_path / "rows.csv")
    assert len(rows) == 6 and list(rows.sort_values("longest_context")["longest_context"].dropna()) == [
        100,
        512,
        2048,
    ]
    assert main(["sweep", str(grid), "--quiet"]) == 2
    assert "--out FOLDER, --csv FILE" in capsys.readouterr().err


def test_the_api_counts_what_was_refused():
    with pytest.warns(sweep.CasesRefused, match="1 of 2 cases not measured .*1 × nobody"):
        table = sweep.run({"model": ["tiny-llama", "nobody"], "measure": "layout"})
    assert list(table["longest_context"].notna()) == [True, False]


def test_an_interrupt_ends_in_a_line_that_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    from decodebench.__main__ import main

    def interrupted(case):
        raise KeyboardInterrupt

    monkeypatch.setattr(spread, "evaluate", interrupted)
    grid = tmp_path / "grid.toml"
    grid.write_text('model = "tiny-llama"\n')
    assert main(["sweep", str(grid), "--quiet", "--out", str(tmp_path / "out")]) == 130
    said = capsys.readouterr().err.strip()
    assert "the same command goes on there" in said and "\n" not in said
