"""Cases in processes and on Ray: the same table, whatever is killed meanwhile."""

import os
import signal
import subprocess
import sys
import time

import pytest

from decodebench.study import sweep
from decodebench.study.grid import SweepError, cases
from decodebench.study.plans import cached
from decodebench.study.spread import RUNNERS, missing, needs, processes, runner_of

GRID = {
    "model": ["tiny-llama", "tiny-nemotron-h"],
    "measure": "coverage",
    "block_size": [16, 32],
    "context": ["100", "200", "2x50+1x300"],
    "fault": [None, "A1", "A3"],
}


BIG = {
    "model": ["tiny-llama"],
    "measure": "layout",
    "block_size": [16],
    "context": [str(n) for n in range(20, 620)],
}

ON_RAY = pytest.mark.skipif(
    os.environ.get("DECODEBENCH_RAY") != "1", reason="starts a Ray cluster: set DECODEBENCH_RAY=1"
)


def comparable(table):
    return table.drop(columns=["seconds", "run", "node"])


def test_processes_make_the_same_table_and_go_on_where_another_runner_stopped(tmp_path):
    here = sweep.run(GRID, progress=False)
    sweep.run(GRID | {"block_size": 16}, tmp_path, progress=False)
    there = sweep.run(GRID, tmp_path, progress=False, runner="processes", workers=2)
    assert len(here) == len(sweep.read(tmp_path)) == 36 and comparable(here).equals(comparable(there))


def test_a_killed_worker_loses_no_row():
    """Its cases run again, each alone."""
    wanted = {case.case_id(): case for case in cases(BIG)}
    killed, rows = [], {}
    for case_id, row in processes(wanted, workers=2):
        rows[case_id] = row
        if not killed:
            children = [
                int(c) for c in open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()
            ]
            workers = [c for c in children if b"spawn_main" in open(f"/proc/{c}/cmdline", "rb").read()]
            os.kill(workers[0], signal.SIGKILL)
            killed.append(workers[0])
    assert killed and rows.keys() == wanted.keys()
    assert {row["status"] for row in rows.values()} == {"ok"}


SWEPT = """
import sys
from decodebench.study import sweep
if __name__ == "__main__":
    sweep.run(sys.argv[1], sys.argv[2], progress=False, runner=sys.argv[3], workers=2)
"""


def killed_half_way(folder, runner, rows, timeout=120):
    """A sweep in a process of its own, killed once its journal holds so many rows; how many it held then."""
    grid = folder / "grid.toml"
    grid.write_text(
        "\n".join(
            f"{k} = {[v for v in vs if v] if isinstance(vs, list) else repr(vs)}" for k, vs in BIG.items()
        )
    )
    (folder / "driver.py").write_text(SWEPT)
    driver = subprocess.Popen(
        [sys.executable, folder / "driver.py", grid, folder / "out", runner],
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    end = time.time() + timeout
    journal = folder / "out" / "journal.jsonl"
    while time.time() < end and (not journal.exists() or journal.read_bytes().count(b"\n") < rows):
        time.sleep(0.02)
    held = journal.read_bytes().count(b"\n")
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    return held


@pytest.mark.parametrize("runner", ["processes", pytest.param("ray", marks=ON_RAY)])
def test_a_killed_driver_loses_no_finished_row(runner, tmp_path):
    held = killed_half_way(tmp_path, runner, 100)
    assert 100 <= held < 600, "killed before it was done"
    stored = sweep.read(tmp_path / "out")
    assert len(stored) >= held - 1  # the last line may be half written
    resumed = sweep.run(tmp_path / "grid.toml", tmp_path / "out", progress=False)
    again = sweep.read(tmp_path / "out")
    assert set(stored["case_id"]) <= set(again["case_id"]) and len(again) == len(resumed) == 600
    kept = again.set_index("case_id").loc[stored["case_id"], "seconds"].tolist()
    assert kept == stored["seconds"].tolist(), "what was finished is not computed again"
    assert comparable(resumed).equals(comparable(sweep.run(BIG, progress=False)))


def test_timed_cases_are_not_put_beside_each_other():
    with pytest.raises(SweepError, match="runner 'local'"):
        sweep.run({"model": "tiny-llama", "measure": "decode"}, runner="processes", progress=False)


def test_unknown_runners_are_refused():
    with pytest.raises(SweepError, match=", ".join(RUNNERS)):
        runner_of("slurm")


def test_a_case_asks_its_node_for_what_it_holds():
    (plan,) = cases({"model": "tiny-llama", "measure": "coverage"})
    assert needs(plan, cores=8) == {"num_cpus": 1, "num_gpus": 0, "memory": 0}
    (bytes_read,) = cases(
        {"model": "llama-3.1-8b", "measure": "audit", "batch": 2, "context": 1000, "max_model_len": "auto"}
    )
    size = cached(bytes_read).layout.size
    assert size > 2 * 1000 * 131072  # two requests of 1,000 tokens of 128 KiB
    assert needs(bytes_read, cores=8) == {"num_cpus": 8, "num_gpus": 0, "memory": size + size // 2}
    (timed,) = cases(
        {"model": "llama-3.1-8b", "measure": "decode", "device": "cuda", "tensor_parallel_size": 4}
    )
    assert needs(timed, cores=8) == {"num_cpus": 8, "num_gpus": 1, "memory": 0}
    (bad,) = cases({"model": "no-such-model", "measure": "audit"})
    assert needs(bad)["memory"] == 0  # evaluated, it is a row with the reason


@pytest.mark.parametrize(
    ("asked", "nodes", "says"),
    [
        ({"num_cpus": 1, "num_gpus": 0, "memory": 0}, [{"CPU": 1.0}], None),
        ({"num_cpus": 1, "num_gpus": 1, "memory": 0}, [{"CPU": 4.0}], "GPU"),
        ({"num_cpus": 1, "num_gpus": 0, "memory": 9 << 30}, [{"CPU": 4.0, "memory": 8 << 30}], "9 GiB"),
        ({"num_cpus": 2, "num_gpus": 1, "memory": 0}, [{"CPU": 4.0}, {"CPU": 1.0, "GPU": 1.0}], "at once"),
        ({"num_cpus": 1, "num_gpus": 1, "memory": 0}, [{"CPU": 4.0}, {"CPU": 1.0, "GPU": 1.0}], None),
    ],
)
def test_a_case_that_no_node_could_serve_is_told_before_it_waits_for_ever(asked, nodes, says):
    reason = missing(asked, nodes)
    assert (reason is None) if says is None else says in reason


@ON_RAY
def test_a_ray_node_killed_half_way_loses_no_row():
    """2,000 coverage cases on two nodes, one of which dies: every row, and the table of an uninterrupted run."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # a busy machine takes its time
    grid = GRID | {"context": [str(length) for length in range(10, 511)], "fault": None}
    grid["block_size"] = 16
    grid = [grid, grid | {"block_size": 32}]
    wanted = cases(grid)[:2000]
    assert len(wanted) == 2000
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        by_id = {case.case_id(): case for case in wanted}
        found, began = {}, time.time()
        for case_id, row in RUNNERS["ray"](by_id):
            found[case_id] = row
            if len(found) >= 1000 and second is not None:
                cluster.remove_node(second, allow_graceful=False)
                second = None
        took = time.time() - began
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert second is None and found.keys() == by_id.keys(), took
    local = dict(RUNNERS["local"](by_id))
    for case_id, row in found.items():
        assert row.pop("node")
        row.pop("seconds"), local[case_id].pop("seconds")
        assert row == local[case_id]
    print(f"\n2,000 coverage cases on two nodes of one core, one killed at 1,000: {took:.1f} s")
