"""Cases in processes and on Ray: the same table, whatever is killed meanwhile."""

import os
import signal
import time

import pytest

from decodebench.study import sweep
from decodebench.study.grid import SweepError, cases
from decodebench.study.spread import RUNNERS, processes, runner_of

GRID = {
    "model": ["tiny-llama", "tiny-nemotron-h"],
    "measure": "coverage",
    "block_size": [16, 32],
    "context": ["100", "200", "2x50+1x300"],
    "fault": [None, "A1", "A3"],
}


def comparable(table):
    return table.drop(columns=["seconds", "run", "node"])


def test_processes_make_the_same_table_and_go_on_where_another_runner_stopped(tmp_path):
    here = sweep.run(GRID, progress=False)
    sweep.run(GRID | {"block_size": 16}, tmp_path, progress=False)
    there = sweep.run(GRID, tmp_path, progress=False, runner="processes", workers=2)
    assert len(here) == len(sweep.read(tmp_path)) == 36 and comparable(here).equals(comparable(there))


def test_a_killed_worker_loses_no_row():
    """Its cases run again, each alone."""
    wanted = {case.case_id(): case for case in cases(GRID)}
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


def test_timed_cases_are_not_put_beside_each_other():
    with pytest.raises(SweepError, match="runner 'local'"):
        sweep.run({"model": "tiny-llama", "measure": "decode"}, runner="processes", progress=False)


def test_unknown_runners_are_refused():
    with pytest.raises(SweepError, match=", ".join(RUNNERS)):
        runner_of("slurm")


@pytest.mark.skipif(
    os.environ.get("DECODEBENCH_RAY") != "1", reason="starts a Ray cluster: set DECODEBENCH_RAY=1"
)
def test_a_ray_node_killed_half_way_loses_no_row():
    """2,000 coverage cases on two nodes, one of which dies: every row, and the table of an uninterrupted run."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

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
    assert len(found) == 2000
