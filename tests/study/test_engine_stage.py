"""What stands around an engine, with a stand-in for it: rows with reasons, and nothing left running."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from decodebench.__main__ import main
from decodebench.study import engine_stage, sweep
from decodebench.study.engine_stage import EngineDied
from decodebench.study.grid import Case, SweepError, cases
from decodebench.study.sweep import CasesRefused

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(engine_stage, "RUN_CASE", "stand_in_engine")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


def case(**more):
    engine = {name: more.pop(name) for name in ("do", "pids") if name in more}
    return Case("tiny-llama", measure="engine", engine=json.dumps(engine), **more)


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(true, seconds=20):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    assert true()


@pytest.mark.parametrize(
    ("do", "error", "says"),
    [
        ("refuse", SweepError, "no option x"),
        ("fail", EngineDied, "OSError: no room"),
        ("exit", EngineDied, "ended with code 3: torch.OutOfMemoryError: 8 GiB are not there"),
        ("kill", EngineDied, r"was killed by signal 9 \(out of memory\?\)"),
        ("hang", EngineDied, "time_limit = 1 s: killed"),
    ],
)
def test_whatever_an_engine_does_is_told_and_its_processes_are_gone(tmp_path, do, error, says):
    pids = tmp_path / "pids"
    with pytest.raises(error, match=says):
        engine_stage.engine_stage(case(do=do, pids=str(pids), time_limit=1.0 if do == "hang" else 60.0), {})
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 2
    wait_for(lambda: not any(map(alive, left)))


def test_a_sweep_goes_on_after_engines_that_die_and_comes_back_to_them(tmp_path):
    grid = [
        {"model": "tiny-llama", "measure": "engine", "engine": {"do": do}, "batch": batch}
        for do in ("answer", "exit", "refuse", "kill")
        for batch in (1, 2)
    ]
    with pytest.warns(CasesRefused, match="6 of 8 cases not measured"):
        table = sweep.run(grid, tmp_path)
    assert list(table["status"]) == ["ok"] * 2 + ["failed"] * 2 + ["refused"] * 2 + ["failed"] * 2
    assert table["median_s"].notna().sum() == 2 and "OutOfMemoryError" in table["reason"][2]
    with pytest.warns(CasesRefused):
        again = sweep.run(grid, tmp_path, retry_failed=True)
    assert list(again["run"]) == [0, 0, 1, 1, 1, 1, 1, 1]
    assert list(sweep.read(tmp_path)["case_id"]) == list(table["case_id"])


def test_an_engine_does_not_outlive_a_sweep_that_was_killed(tmp_path):
    """The real runner watches its standard input, which ends with the process that holds the other end."""
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'from decodebench.vllm.run_case import *;"
        'import subprocess, time; die_with_the_sweep(); p = subprocess.Popen(["sleep", "600"]);'
        "print(os.getpid(), p.pid, flush=True); time.sleep(600)'],"
        " stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(600)"
    )
    env = os.environ | {"PYTHONPATH": str(SUPPORT.parents[1])}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env, text=True)
    assert parent.stdout is not None
    engine, worker = map(int, parent.stdout.readline().split())
    assert alive(engine) and alive(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not alive(engine) and not alive(worker))


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"admission": "magic"}, "admission 'magic': choose grouped fill, built-in fill, real prefill"),
        ({"engine_audit": "all"}, "engine_audit 'all': choose plan, bytes"),
        ({"engine": "[1]"}, "engine '\\[1\\]': a table, or JSON of an object, is expected"),
        ({"decode_steps": 0}, "'decode_steps': 0 is too small"),
    ],
)
def test_a_bad_axis_is_refused_before_anything_runs(axes, says):
    with pytest.raises(SweepError, match=says):
        cases({"model": "tiny-llama", "measure": "engine", **axes})


def test_axes_of_engines_are_nothing_to_other_measures():
    """A stored row keeps its name, whatever axes came later; an engine's differs by them and by its machine."""
    plain = Case("tiny-llama")
    assert plain.case_id() == Case("tiny-llama", admission="real prefill", time_limit=5.0).case_id()
    assert plain.case_id() != Case("tiny-llama", measure="engine").case_id()
    names = {
        Case("tiny-llama", measure="engine", **more).case_id()
        for more in (
            {},
            {"admission": "real prefill"},
            {"machine": "a100-80gb"},
            {"engine": "{}"},
            {"rate": 2.0},
        )
    }
    assert len(names) == 4, "the rate of a trace is nothing to an engine"


def test_run_prints_rows_and_writes_them_with_a_page(tmp_path, capsys):
    pytest.importorskip("jinja2")
    asked = [
        "run",
        "tiny-llama",
        "--batch",
        "1,2",
        "--context",
        "64,128",
        "--report",
        str(tmp_path),
        "--quiet",
    ]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "tokens_per_second" in said and "floor of a test" in said and "index.html" in said
    assert len(sweep.read(tmp_path / "rows")) == 4
    page = (tmp_path / "index.html").read_text()
    assert page.count("<figure>") == 3 and "Provenance" in page and "4 audited cases" in page
    assert main([*asked[:-1], "--quiet", "--engine", '{"do": "exit"}', "--report", str(tmp_path / "b")]) == 2
    assert "OutOfMemoryError" in (tmp_path / "b" / "index.html").read_text()
