"""Right bytes at a wrong cost: what the connector's counters give away."""

from __future__ import annotations

from decodebench.cache.connector import ConnectorScheduler, ConnectorWorker
from decodebench.cache.faults import FAULTS


def cost_findings(
    scheduler: ConnectorScheduler | None = None, worker: ConnectorWorker | None = None, resumed: int = 0
) -> tuple[str, ...]:
    """One line a fault that costs time instead of bytes; none where the counters are as they should be.

    ``resumed``: requests that were preempted and scheduled again, which must all have been filled again.
    """
    found = []
    if scheduler is not None and (refilled := scheduler.counters["requests_refilled"]) < resumed:
        found.append(
            f"{_named('A13')}: {resumed} preempted requests came back, {refilled} were filled "
            "again; the rest ran a real prefill inside the benchmark"
        )
    if worker is None:
        return tuple(found)
    counters = worker.counters
    if counters["bytes_written"] > counters["bytes_needed"]:
        written, needed, asked = (
            counters[name] for name in ("bytes_written", "bytes_needed", "blocks_asked")
        )
        found.append(
            f"{_named('A15')}: {written:,} bytes written, {needed:,} needed ({asked:,} blocks asked for)"
        )
    if counters["seconds_in_step"] > 0:
        found.append(
            f"{_named('A17')}: {counters['seconds_in_step']:.6f} s of {counters['seconds']:.6f} s "
            "of filling lie inside a decode step"
        )
    return tuple(found)


def _named(fault: str) -> str:
    return f"{fault} {FAULTS[fault].name}"
