"""What a case measures beyond its layout: coverage from block ids, an audit of bytes, a decode step."""

from __future__ import annotations

import gc

from decodebench.cache.connector import ConnectorScheduler, ConnectorWorker
from decodebench.cache.faults import fault_of, faulty_halves
from decodebench.cache.run import fill_cache, schedule
from decodebench.cache.tensors import allocate
from decodebench.cache.values import Constant, Normal, Zeros
from decodebench.coverage.from_bytes import audit
from decodebench.coverage.from_plan import plan_audit
from decodebench.coverage.required import required_pages
from decodebench.layout.pool import Batch
from decodebench.layout.shrink import blocks_named, shrink
from decodebench.measure.bandwidth import bandwidth
from decodebench.measure.latency import measure_decode
from decodebench.study.grid import Case
from decodebench.study.plans import batch_of, shape_of


def coverage_stage(case: Case, made: dict) -> dict:
    """From block ids: who would be filled. The connector's scheduler half runs, and nothing is allocated."""
    layout = made["layout"]
    batch = made["batch"] = batch_of(shape_of(case))
    if case.values == "unfilled":
        return _columns(plan_audit(layout, batch, [()] * len(layout.groups)))
    if case.fault and not fault_of(case.fault).shows_in_block_ids:
        required = sum(len(rows.block_ids) * len(rows.layers) for rows in required_pages(layout, batch))
        return {"required_pages": required, "verdict": _not_judged(case.fault)}
    return _columns(plan_audit(layout, batch, _planned_blocks(layout, batch, case.fault)))


def _not_judged(fault: str) -> str:
    found = fault_of(fault)
    return (
        f"Not judged by block ids: {found.id} {found.name} leaves other bytes at the same ids. "
        'measure = "audit" reads the bytes back.'
    )


def _planned_blocks(layout, batch, fault: str | None):
    """What the connector would write: the scheduler half's plan, or rows per
    group where the worker half changes it.
    """
    scheduler, worker = (
        faulty_halves(layout, fault) if fault else (ConnectorScheduler(layout), ConnectorWorker(layout))
    )
    meta = schedule(scheduler, batch)
    return meta if type(worker) is ConnectorWorker else worker.merge(meta)


def _columns(found) -> dict:
    groups = found.groups
    return {
        "required_pages": found.required,
        "coverage": found.coverage,
        "worst_group_coverage": float(groups["coverage"].min()),
        "verdict": found.verdict,
        "stray_pages": int(groups["stray"].sum()),
        "clobbered_pages": int(groups["clobbered"].sum()),
    }


def audit_stage(case: Case, made: dict) -> dict:
    """From bytes: a cache just large enough is filled and read back."""
    gc.collect()  # the cache of the case before must not lie beside this one
    batch = made["batch"]
    layout = made["layout"].with_num_blocks(blocks_named(batch))
    if case.layers_per_group:
        layout = shrink(layout, layers=case.layers_per_group)
    batch = made["batch"] = Batch(layout, batch.requests)
    if case.measure == "decode" and case.device.startswith("cuda"):
        bandwidth(case.device)  # kept for the process; a full card has no room to measure it
    cache = made["cache"] = allocate(layout, case.device)
    if case.values == "unfilled":
        return {}
    values = {"constant": Constant(), "normal": Normal(seed=case.seed), "zeros": Zeros()}[case.values]
    report = fill_cache(cache, batch, values, case.fault)
    filled = {"fill_seconds": report.seconds, "fill_bytes": report.bytes_written}
    if case.measure == "decode" and case.values != "normal":
        return filled  # only values that tell layer and block apart can be audited
    found = audit(cache, batch, values, report)
    states = found.groups
    return (
        filled
        | _columns(found)
        | {"wrong_pages": int(states["wrong"].sum()), "zeroed_pages": int(states["zeroed"].sum())}
    )


def decode_stage(case: Case, made: dict) -> dict:
    """One decode step on the cache that the audit left, next to what the machine allows."""
    measured = measure_decode(
        made["cache"],
        made["batch"],
        case.backend,
        cold=case.cold,
        seed=case.seed,
        min_seconds=case.min_seconds,
    )
    timing = measured.timing.to_dict()
    kept = ("median_s", "q1_s", "q3_s", "p10_s", "p90_s", "steps", "clock")
    return {name: timing[name] for name in kept} | {
        "bytes_moved": measured.bytes_read + measured.bytes_written,
        "gb_per_s": measured.gbps,
        "limit_s": measured.limit,
        "limit_share": measured.share,
        "layers_timed": len(measured.work),
        "backend_used": measured.backend,
        "notes": "; ".join((*measured.fallbacks, *measured.notes)) or None,
    }
