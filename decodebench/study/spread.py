"""Cases run one after another, in processes of this machine, or as tasks of a Ray cluster.

A runner takes cases by id and yields (id, columns) of each as it is finished, in any order. Only the process
that asked writes the journal, so whatever dies elsewhere, no finished row is lost; what a dead worker was at
is run again, on another one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from decodebench.errors import MissingExtra
from decodebench.measure.provenance import machine
from decodebench.study.grid import Case, SweepError
from decodebench.study.runners import evaluate

#: measures whose rows are the same whatever runs beside them
UNDISTURBED = ("layout", "coverage", "traffic")

#: times that a case is tried whose worker dies
TRIES = 3

#: cases that a worker takes at a time, so that those of one layout stay together
AT_ONCE = 16

Finished = Iterator[tuple[str, dict]]


def local(cases: Mapping[str, Case], workers: int | None = None, address: str | None = None) -> Finished:
    """One after another, in this process."""
    for case_id, case in cases.items():
        yield case_id, evaluate(case)


def processes(cases: Mapping[str, Case], workers: int | None = None, address: str | None = None) -> Finished:
    """In ``workers`` processes (default: one a core). Raises ``SweepError`` for cases that time or fill memory."""
    for case in cases.values():
        if case.measure not in UNDISTURBED:
            raise SweepError(
                f"measure {case.measure!r} with runner 'processes': its times and memory would be disturbed by "
                f"its neighbours; processes run {', '.join(UNDISTURBED)}, use runner 'local'"
            )
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pending = deque(_batches(cases, workers))
    suspects: list[tuple[str, Case]] = []
    while pending:
        try:
            yield from _pooled(pending, workers, suspects)
        except BrokenProcessPool:  # one of the suspects is to blame: each alone tells which
            yield from _one_by_one(deque(suspects))
            suspects.clear()


def _pooled(pending: deque, workers: int, flying: list) -> Finished:
    """Batches through a pool; ``flying`` holds the cases not yet finished when the pool breaks."""
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        running: dict = {}
        try:
            while pending or running:
                while pending and len(running) < 2 * workers:
                    batch = pending.popleft()
                    flying.extend(batch)
                    running[pool.submit(_evaluate_all, [case for _, case in batch])] = batch
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    rows = done.result()
                    batch = running.pop(done)
                    for entry in batch:
                        flying.remove(entry)
                    yield from zip([case_id for case_id, _ in batch], rows)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _one_by_one(suspects: deque[tuple[str, Case]]) -> Finished:
    """Each in turn in a process of its own; a row that says so for one that kills it every time."""
    tries = 0
    while suspects:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            try:
                while suspects:
                    case_id, case = suspects[0]
                    row = pool.submit(evaluate, case).result()
                    suspects.popleft()
                    tries = 0
                    yield case_id, row
            except BrokenProcessPool:
                tries += 1
                if tries == TRIES:
                    yield suspects.popleft()[0], _died(f"its process was killed {TRIES} times")
                    tries = 0


def _died(reason: str) -> dict:
    return {"status": "failed", "reason": f"{reason} (out of memory?)", "seconds": None}


def _evaluate_all(cases: Sequence[Case]) -> list[dict]:
    return [evaluate(case) for case in cases]


def _batches(cases: Mapping[str, Case], workers: int) -> Iterator[list[tuple[str, Case]]]:
    """Cases in their order, a few at a time: enough batches for all workers."""
    entries = list(cases.items())
    if any(case.measure not in UNDISTURBED for case in cases.values()):
        size = 1
    else:
        size = max(1, min(AT_ONCE, len(entries) // (4 * workers)))
    for start in range(0, len(entries), size):
        yield entries[start : start + size]


# -- Ray ------------------------------------------------------------------------------------------


def on_ray(cases: Mapping[str, Case], workers: int | None = None, address: str | None = None) -> Finished:
    """As Ray tasks, on a running cluster (``address``, ``auto``, ``ray://host:10001``) or on this machine.

    A case on ``cuda`` takes a GPU, one that is timed or fills memory all cores of a node, so that nothing runs
    beside it. Tasks of a node that dies run elsewhere. Rows name the machine they ran on (``node``). The
    package and the files that cases name are there on every node.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtra.of(error, "runner 'ray'") or error from None
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=address, num_cpus=None if address else workers, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise SweepError(f"Ray cluster {address or 'on this machine'}: {error}") from error
    task = ray.remote(_evaluate_there)
    try:
        yield from _tasks(ray, task, deque(_batches(cases, _slots(ray))), workers)
    finally:
        if started:
            ray.shutdown()


def _slots(ray) -> int:
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _whole_node(ray) -> int:
    """Cores that a case takes which must run alone: all of the smallest node's."""
    cores = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    return max(1, int(min((c for c in cores if c), default=1)))


def _tasks(ray, task, pending: deque, workers: int | None) -> Finished:
    """Keep every core of the cluster busy; what fails with its node is asked for again."""
    running: dict = {}
    tries: dict[str, int] = {}
    while pending or running:
        while pending and len(running) < 2 * (workers or _slots(ray)):
            batch = pending.popleft()
            gpus = int(any(case.device.startswith("cuda") for _, case in batch))
            timed = any(case.measure not in UNDISTURBED for _, case in batch)
            asked = task.options(num_cpus=_whole_node(ray) if timed else 1, num_gpus=gpus, max_retries=0)
            running[asked.remote([case for _, case in batch])] = batch
        done, _ = ray.wait(list(running), num_returns=1, timeout=5)
        for future in done:
            batch = running.pop(future)
            try:
                rows = ray.get(future)
            except ray.exceptions.RayError as error:
                for case_id, case in batch:
                    tries[case_id] = tries.get(case_id, 0) + 1
                    if tries[case_id] < TRIES:
                        pending.append([(case_id, case)])  # alone, so that no neighbour's death is shared
                    else:
                        yield case_id, _died(f"its worker died {TRIES} times ({type(error).__name__})")
                continue
            yield from zip([case_id for case_id, _ in batch], rows)


def _evaluate_there(cases: Sequence[Case]) -> list[dict]:
    """On a worker: the rows, with the machine they ran on."""
    facts = machine("cuda" if any(case.device.startswith("cuda") for case in cases) else "cpu")
    here = f"{facts['device']}, {facts['cores']} cores"
    return [evaluate(case) | {"node": here} for case in cases]


RUNNERS: dict[str, Callable[..., Finished]] = {"local": local, "processes": processes, "ray": on_ray}


def runner_of(name: str) -> Callable[..., Finished]:
    """A runner by its name; raises ``SweepError`` naming those that there are."""
    if name not in RUNNERS:
        raise SweepError(f"runner {name!r}: choose {', '.join(RUNNERS)}")
    return RUNNERS[name]
