"""A sweep of running engines: twelve rows, killed and resumed, engines that die, and a server as a client sees it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from decodebench.study import sweep
from decodebench.study.engine_run import told
from decodebench.study.sweep import CasesRefused

#: nine that are measured, of every admission and kind of cache; one refused by us, one by vLLM, one too small
GRID = """
measure = "engine"
memory = "32MiB"
decode_steps = 6
time_limit = 300

[[grid]]
model = ["tiny-nemotron-h", "tiny-llama"]
context = 300
batch = [1, 3]

[[grid]]
model = "tiny-gemma3"
context = "2x200+1x600"
engine_audit = "bytes"

[[grid]]
model = "tiny-granite-hybrid"
context = 300
batch = 2
enable_prefix_caching = false
admission = ["built-in fill", "real prefill"]

[[grid]]
model = "tiny-llama"
context = 300
batch = 2
kv_cache_dtype = "fp8"
block_size = 64
kernel_block = 32

[[grid]]
model = "tiny-llama"
context = 300
batch = 2
engine = {no_such_argument = 1}

[[grid]]
model = "tiny-llama"
context = 300
batch = 2
engine = {dtype = "float12"}

[[grid]]
model = "tiny-llama"
context = 20000
batch = 2
memory = "1MiB"

[[grid]]
model = "tiny-llama"
context = 301
batch = 2
"""


def children(pid):
    """Processes that a process started."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The folder of a sweep whose process was killed in its second case, and whose third engine was killed."""
    folder = tmp_path_factory.mktemp("engines")
    grid, out = folder / "grid.toml", folder / "out"
    grid.write_text(GRID)
    command = [sys.executable, "-m", "decodebench", "sweep", str(grid), "--out", str(out), "--quiet"]
    journal = out / "journal.jsonl"

    def rows():
        return journal.read_text().count("\n") if journal.exists() else 0

    def until(true, seconds=280):
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end
            time.sleep(0.02)

    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: rows() == 1 and children(first.pid))
    (engine,) = children(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    until(lambda: not alive(engine), 30)
    assert rows() == 1
    second = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(lambda: rows() == 2 and children(second.pid))
    (engine,) = children(second.pid)
    os.kill(engine, signal.SIGKILL)
    said, _ = second.communicate(timeout=600)
    return out, said


def test_twelve_rows_after_two_kills(swept):
    out, said = swept
    table = sweep.read(out)
    assert len(table) == 12 and list(table["run"]) == [0] + [1] * 11
    ok, bad = table[table["status"] == "ok"], table[table["status"] != "ok"]
    assert len(ok) == 8, dict(zip(bad["engine"], bad["reason"]))
    assert "12 cases of this grid (8 ok, 3 refused, 1 failed)" in said
    killed, unknown, refused, small = bad["reason"]
    assert "was killed by signal 9" in killed
    assert "vLLM has no argument 'no_such_argument'" in unknown
    assert "float12" in refused and list(bad["status"][1:3]) == ["refused", "refused"]
    assert "KV cache" in small or "max_model_len" in small


def test_each_row_tells_steps_admission_coverage_layout_and_floor(swept):
    table = sweep.read(swept[0])
    ok = table[table["status"] == "ok"]
    assert (
        (ok["steps"] == 6).all()
        and (ok["q1_s"] <= ok["median_s"]).all()
        and (ok["median_s"] <= ok["q3_s"]).all()
    )
    assert (ok["tokens_per_second"] * ok["median_s"] - ok["batch"]).abs().max() < 1e-6
    assert (ok["admit_s"] > 0).all() and (ok["admit_s"] != ok["median_s"]).all()
    usual = ok[ok["kernel_block"].isna()]  # what a plan leaves out is told in words
    assert usual["plan_equal"].all(), dict(zip(usual["model"], usual["plan_difference"]))
    assert (ok["plan_equal"] | ok["plan_difference"].notna()).all()
    assert (ok["floor_s"] < ok["median_s"]).all() and ok["floor_machine"].str.startswith("this machine").all()
    assert ok["engine_used"].str.startswith("vllm ").all() and ok["node"].notna().all()
    ours = ok[ok["admission"] == "grouped fill"]
    assert (
        (ours["coverage"] == 1).all()
        and (ours["fill_bytes"] > 0).all()
        and ours["fill_seconds"].notna().all()
    )
    builtin = ok[ok["admission"] == "built-in fill"].iloc[0]
    assert builtin["worst_group_coverage"] == 0 and "mamba" in builtin["verdict"]
    prefill = ok[ok["admission"] == "real prefill"].iloc[0]
    assert (
        prefill["required_pages"] is None
        or prefill[["required_pages", "coverage", "fill_bytes"]].isna().all()
    )
    assert "computed" in prefill["verdict"]
    assert "floor of this machine" in "\n".join(told(table))


def test_a_dead_engine_runs_again_where_that_is_asked_for(swept):
    out, _ = swept
    dead = sweep.read(out).query("reason.str.contains('signal 9')", engine="python").iloc[0]
    case = {"model": dead["model"], "measure": "engine", "memory": "32MiB", "decode_steps": 6}
    case |= {"time_limit": 300, "context": int(dead["context"]), "batch": int(dead["batch"])}
    table = sweep.run(case, out, retry_failed=True)
    assert list(table["status"]) == ["ok"] and table["case_id"][0] == dead["case_id"]


def test_nobody_at_the_address_is_a_row_with_its_reason():
    case = {"model": "tiny-llama", "measure": "engine", "server": "http://127.0.0.1:9", "machine": "this"}
    with pytest.warns(CasesRefused, match="no OpenAI-compatible server answers there"):
        assert list(sweep.run(case)["status"]) == ["refused"]
