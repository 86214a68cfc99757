"""Sweeps: grids that say what is wrong with them, rows that survive kill -9, comparisons that refuse."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from decodebench import journal as journals
from decodebench import sweep
from decodebench.grid import Case, SweepError, cases, load_grid, parse_context
from decodebench.journal import JOURNAL, PARQUET, PROVENANCE, Journal, JournalError, read_folder

ROOT = Path(__file__).parents[1]
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
    ids = {Case("a", **{k: v}).case_id() for k, v in [("block_size", 16), ("seed", 1), ("fault", "A1"), ("batch", 9)]}
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
    path.write_text('model = "a"\nblock_size = [16, 32]\n[[grid]]\nfault = ["", "A1"]\n[[grid]]\ncontext = 10\n')
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
from decodebench.journal import Journal
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
            [sys.executable, "-c", WRITER, str(folder), str(total)], stdout=subprocess.PIPE, text=True, cwd=ROOT
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
        "import resource, sys\nfrom decodebench.journal import Journal, JournalError\n"
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
    with Journal(tmp_path):
        with pytest.raises(JournalError, match="another sweep is writing"):
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
        with pytest.raises(JournalError, match="schema 0, this version reads and writes schema 1"):
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
