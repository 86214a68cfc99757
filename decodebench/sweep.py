"""A grid of cases → a table, one row a case: resumable, and honest about the cases that failed.

    db.sweep.run({"model": "jamba-v0.1", "block_size": [16, 32, 64], "grouping": ["hybrid", "per_layer"]})

An axis is a value or a list of values; ``Case`` (in ``grid.py``) lists them all, ``COLUMNS`` what a row
tells, with units. Rows are written the moment they are finished (``journal.py``); a case is recognised by its
content, so a sweep that was killed, extended or reordered computes only what is missing.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from decodebench.grid import AXES, MEASURES, Case, SweepError, cases, load_grid
from decodebench.journal import Journal, read_folder, to_frame
from decodebench.specs import DecodebenchError


@dataclass(frozen=True)
class Column:
    """What a column of the result means. ``dtype`` is pandas' name; ``since``: first measure that fills
    it.
    """

    dtype: str
    unit: str
    meaning: str
    since: str = "layout"


_AXIS_MEANINGS = {
    "model": "model name or config path",
    "hf_overrides": "fields of the config changed",
    "measure": "how far the case goes",
    "memory": "budget planned for",
    "block_size": "block size asked for; empty: vLLM's choice",
    "grouping": "strategy that made the groups",
    "memory_order": "order asked for; empty: vLLM's choice",
    "context": "tokens a request, or a mix",
    "batch": "requests",
    "shared_prefix": "tokens hit in the prefix cache",
    "kv_cache_dtype": "KV cache type asked for",
    "mamba_ssm_cache_dtype": "type of recurrent states asked for",
    "tensor_parallel_size": "TP",
    "decode_context_parallel_size": "DCP",
    "enable_prefix_caching": "states kept at block boundaries",
    "max_model_len": "length asked for",
    "fault": "historic defect switched on; empty: none",
    "values": "what was written",
    "layers_per_group": "layers of a group that were allocated; empty: all",
    "backend": "decode implementation",
    "device": "where",
    "cold": "caches flushed before every step",
    "min_seconds": "time for the clock",
    "seed": "of values, block tables and queries",
}
_AXIS_DTYPES = {
    "block_size": "Int64",
    "batch": "Int64",
    "shared_prefix": "Int64",
    "tensor_parallel_size": "Int64",
    "decode_context_parallel_size": "Int64",
    "enable_prefix_caching": "boolean",
    "cold": "boolean",
    "seed": "Int64",
    "min_seconds": "Float64",
    "layers_per_group": "Int64",
}
_AXIS_UNITS = {
    "block_size": "tokens",
    "batch": "requests",
    "shared_prefix": "tokens",
    "context": "tokens",
    "min_seconds": "s",
}

#: the documented schema of a result table: its columns, in order
COLUMNS: dict[str, Column] = {
    "case_id": Column("string", "", "hash of the case's content"),
    **{
        axis: Column(_AXIS_DTYPES.get(axis, "string"), _AXIS_UNITS.get(axis, ""), _AXIS_MEANINGS[axis])
        for axis in AXES
    },
    "status": Column("string", "", "ok, refused (an input that vLLM or this library refuses) or failed"),
    "reason": Column("string", "", "why a case was refused or failed"),
    "seconds": Column("Float64", "s", "wall time of the whole case"),
    "run": Column("Int64", "", "which run of the folder's provenance made the row"),
    # layout
    "groups": Column("Int64", "", "KV cache groups"),
    "layers": Column("Int64", "", "layers with a cache"),
    "group_block_sizes": Column("string", "tokens", "block size of each group, in order"),
    "group_kinds": Column("string", "", "kind of each group, in order"),
    "block_in_use": Column("Int64", "tokens", "largest block size of the groups"),
    "block_size_ratio": Column("Float64", "", "largest over smallest block size of the groups"),
    "bytes_per_block": Column("Int64", "bytes", "what one block id costs: pages of the widest group"),
    "num_blocks": Column("Int64", "blocks", "blocks that the budget gives, null blocks included"),
    "blocks_per_request": Column("Float64", "blocks", "blocks reserved for a request, mean of the batch"),
    "concurrency": Column("Float64", "requests", "requests of the longest context that fit at once"),
    "tokens": Column("Int64", "tokens", "concurrency × longest context, as vLLM logs it"),
    "intercept_bytes": Column("Float64", "bytes", "what a request costs whatever its length"),
    "slope_bytes": Column("Float64", "bytes/token", "what a further token costs"),
    "waste_padding_layers": Column("Float64", "share", "memory lost to groups narrower than the widest"),
    "waste_padded_pages": Column("Float64", "share", "memory lost to pages padded to a common size"),
    "waste_last_block": Column("Float64", "share", "memory lost to partly filled last blocks"),
    "waste_reserve": Column("Float64", "share", "memory of blocks kept for tokens in flight"),
    "waste_null_block": Column("Float64", "share", "memory of the null blocks"),
    "waste_tail": Column("Float64", "share", "memory left over after the last whole block"),
    # coverage: from block ids, and for "audit" from bytes as well
    "required_pages": Column("Int64", "pages", "(layer, block) pages that the next step reads", "coverage"),
    "coverage": Column(
        "Float64", "share", "required pages that were filled or zeroed on purpose", "coverage"
    ),
    "worst_group_coverage": Column("Float64", "share", "the same for the group that got least", "coverage"),
    "stray_pages": Column("Int64", "pages", "pages written that no request owned", "coverage"),
    "clobbered_pages": Column("Int64", "pages", "pages written that belonged to somebody else", "coverage"),
    "wrong_pages": Column("Int64", "pages", "right page, wrong bytes", "audit"),
    "zeroed_pages": Column("Int64", "pages", "zeroed on purpose (packed formats, ring buffers)", "audit"),
    "verdict": Column("string", "", "coverage in one line", "coverage"),
    "fill_seconds": Column("Float64", "s", "time the fill took", "audit"),
    "fill_bytes": Column("Int64", "bytes", "bytes the fill wrote", "audit"),
    # decode
    "median_s": Column("Float64", "s", "median of one decode step, attention and state work only", "decode"),
    "q1_s": Column("Float64", "s", "first quartile", "decode"),
    "q3_s": Column("Float64", "s", "third quartile", "decode"),
    "p10_s": Column("Float64", "s", "10th percentile", "decode"),
    "p90_s": Column("Float64", "s", "90th percentile", "decode"),
    "steps": Column("Int64", "", "steps measured", "decode"),
    "bytes_moved": Column("Int64", "bytes", "bytes a step must read and write", "decode"),
    "gb_per_s": Column("Float64", "GB/s", "bytes moved over the median", "decode"),
    "limit_s": Column(
        "Float64", "s", "what the memory needs for these bytes, measured in this process", "decode"
    ),
    "limit_share": Column("Float64", "share", "of the bandwidth measured in the same process", "decode"),
    "backend_used": Column("string", "", "implementation that ran", "decode"),
    "clock": Column("string", "", "how time was taken", "decode"),
    "notes": Column("string", "", "fallbacks taken, and what limits the measurement", "decode"),
}

DTYPES = {name: column.dtype for name, column in COLUMNS.items()}


def schema():
    """The columns of a result table as a DataFrame: name, dtype, unit, meaning, first measure that fills
    it.
    """
    import pandas as pd

    return pd.DataFrame([{"column": name} | asdict(column) for name, column in COLUMNS.items()])


# -- running -------------------------------------------------------------------------------------


def run(
    grid: Mapping | Sequence[Mapping] | str | Path,
    out: str | Path | None = None,
    *,
    retry_failed: bool = False,
    progress: bool | None = None,
):
    """Every case of the grid as a DataFrame with the columns of ``COLUMNS``, in the grid's order.

    ``grid``: axes (see ``Case``), several such grids, or the path of a TOML file. ``out``: a folder
    for the rows and their provenance; cases that it already holds are not computed again, except
    those that failed or were refused where ``retry_failed``. Without it nothing is stored. ``progress``: a
    bar with
    the time left; by default where stderr is a terminal. ``.attrs["provenance"]`` of the result
    lists the runs that its ``run`` column names.
    """
    for kept in (_model, _plan, _batch):
        kept.cache_clear()  # a config.json may have been edited since the last sweep
    wanted = cases(load_grid(grid) if isinstance(grid, str | Path) else grid)
    by_id = {case.case_id(): case for case in wanted}
    if out is None:
        rows = {case_id: row | {"run": 0} for case_id, row in _rows(by_id, progress)}
        return _table(rows, list(by_id), [{"run": 0} | _provenance(grid, wanted)])
    with Journal(out) as journal:
        missing = {
            case_id: case
            for case_id, case in by_id.items()
            if case_id not in journal.rows or (retry_failed and journal.rows[case_id]["status"] != "ok")
        }
        if missing:
            journal.begin_run(_provenance(grid, wanted))
            for _, row in _rows(missing, progress, done=len(by_id) - len(missing)):
                journal.append(row)
        journal.compact(list(by_id), DTYPES)
        return _table(journal.rows, list(by_id), journal.runs)


def read(folder: str | Path):
    """Every finished row of a result folder, while a sweep is writing there or after; see ``run``."""
    rows, runs = read_folder(folder)
    return _table(rows, list(rows), runs)


def _table(rows: Mapping[str, dict], order: Iterable[str], runs: list[dict]):
    frame = to_frame([rows[case_id] for case_id in order], DTYPES)
    frame.attrs["provenance"] = runs
    return frame


def _provenance(grid, wanted: Sequence[Case]) -> dict:
    from decodebench import timing

    devices = {case.device for case in wanted if case.measure == "decode"}
    settings = {"grid": Path(grid).name if isinstance(grid, str | Path) else grid, "cases": len(wanted)}
    return timing.provenance(settings, device=devices.pop() if len(devices) == 1 else "cpu")


def _rows(pending: Mapping[str, Case], progress: bool | None, done: int = 0):
    """(case id, row) of each case as it is finished."""
    from tqdm import tqdm

    hidden = None if progress is None else not progress  # None: tqdm looks whether stderr is a terminal
    with tqdm(total=done + len(pending), initial=done, unit="case", disable=hidden, leave=False) as bar:
        for case_id, case in pending.items():
            bar.set_postfix_str(f"{case.model} {case.grouping} {case.context}", refresh=False)
            yield case_id, {"case_id": case_id} | asdict(case) | evaluate(case)
            bar.update()


def evaluate(case: Case) -> dict:
    """The measured columns of one case; never raises for a bad case: that is a row with its reason."""
    start = time.perf_counter()
    row: dict = {"status": "ok", "reason": None}
    made: dict = {}  # what a stage leaves for the next: layout, batch, cache
    try:
        for measure in MEASURES[: MEASURES.index(case.measure) + 1]:
            row |= STAGES[measure](case, made)
    except DecodebenchError as error:
        row |= {"status": "refused", "reason": _one_line(error)}
    except Exception as error:  # out of memory, a backend's own error: the sweep goes on
        row |= {"status": "failed", "reason": f"{type(error).__name__}: {_one_line(error)}"}
    return row | {"seconds": time.perf_counter() - start}


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:500]


# -- what a case measures ------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _model(name: str, overrides: str | None):
    """A model, its config's fields replaced where asked for; read once a sweep."""
    from decodebench import models

    if overrides is None:
        return models.load_model(name)
    try:
        changes = json.loads(overrides)
        fields = models.read_config(name, models.DATA)[0] | changes
    except (ValueError, TypeError) as error:
        raise SweepError(
            f"hf_overrides {overrides!r}: a JSON object of config.json fields is expected"
        ) from error
    return models.read_model(fields, name)


def _shape(case: Case) -> Case:
    """The case without what neither its layout nor its block tables depend on."""
    changed = {name: getattr(Case("any"), name) for name in _SHAPELESS}
    return replace(case, **changed)


_SHAPELESS = (
    "measure",
    "fault",
    "values",
    "layers_per_group",
    "backend",
    "device",
    "cold",
    "min_seconds",
    "seed",
)


@lru_cache(maxsize=2)
def _plan(shape: Case):
    """A layout, kept for the cases that follow on the same one: faults, values and backends share it."""
    from decodebench import layout as layouts

    return layouts.plan(
        _model(shape.model, shape.hf_overrides),
        memory=shape.memory,
        block_size=shape.block_size,
        grouping=shape.grouping,
        memory_order=shape.memory_order,
        kv_cache_dtype=shape.kv_cache_dtype,
        mamba_ssm_cache_dtype=shape.mamba_ssm_cache_dtype,
        tensor_parallel_size=shape.tensor_parallel_size,
        decode_context_parallel_size=shape.decode_context_parallel_size,
        max_model_len=shape.max_model_len,
        enable_prefix_caching=shape.enable_prefix_caching,
    )


@lru_cache(maxsize=1)
def _batch(shape: Case):
    """The batch on that layout, kept likewise."""
    from decodebench import blocks

    return blocks.admit(_plan(shape), context=list(shape.contexts), shared_prefix=shape.shared_prefix)


def _layout(case: Case, made: dict) -> dict:
    layout = made["layout"] = _plan(_shape(case))
    contexts = case.contexts
    if max(contexts) > layout.max_model_len:
        raise SweepError(
            f"context {max(contexts)}: this layout holds requests of at most {layout.max_model_len} tokens"
        )
    sizes = [layout.tokens_per_block(g) for g in range(len(layout.groups))]
    held = [layout.capacity(length) for length in set(contexts)]
    mean = sum(contexts.count(c.length) * sum(c.blocks_per_request) for c in held) / len(contexts)
    longest = layout.capacity(max(contexts))
    waste = layout.waste(max(contexts)).shares()
    return {
        "groups": len(layout.groups),
        "layers": len(layout.layer_names),
        "group_block_sizes": ",".join(map(str, sizes)),
        "block_in_use": max(sizes),
        "block_size_ratio": max(sizes) / min(sizes),
        "group_kinds": ",".join(group.kind for group in layout.groups),
        "bytes_per_block": layout.bytes_per_block(),
        "num_blocks": sum(layout.pool_num_blocks),
        "blocks_per_request": mean,
        "concurrency": longest.concurrency,
        "tokens": longest.tokens,
        "intercept_bytes": longest.intercept_bytes,
        "slope_bytes": longest.slope_bytes,
        **{f"waste_{cause}": share for cause, share in waste.items() if cause != "content"},
    }


def _coverage(case: Case, made: dict) -> dict:
    """From block ids: who would be filled. The connector's scheduler half runs, and nothing is allocated."""
    from decodebench import coverage

    layout = made["layout"]
    batch = made["batch"] = _batch(_shape(case))
    if case.values == "unfilled":
        return _columns(coverage.plan_audit(layout, batch, [()] * len(layout.groups)))
    return _columns(coverage.plan_audit(layout, batch, _planned_rows(layout, batch, case.fault)))


def _planned_rows(layout, batch, fault: str | None):
    """What the connector would write: the scheduler half's plan, or rows per group where the worker half
    changes it.
    """
    from decodebench import connector, faults

    scheduler, worker = (
        faults.faulty_halves(layout, fault)
        if fault
        else (connector.ConnectorScheduler(layout), connector.ConnectorWorker(layout))
    )
    meta = connector.schedule(scheduler, batch)
    return meta if type(worker) is connector.ConnectorWorker else worker.merge(meta)


def _columns(audit) -> dict:
    groups = audit.groups
    return {
        "required_pages": audit.required,
        "coverage": audit.coverage,
        "worst_group_coverage": float(groups["coverage"].min()),
        "verdict": audit.verdict,
        "stray_pages": int(groups["stray"].sum()),
        "clobbered_pages": int(groups["clobbered"].sum()),
    }


def _audit(case: Case, made: dict) -> dict:
    """From bytes: a cache just large enough is filled and read back."""
    import gc

    from decodebench import connector, coverage, decode
    from decodebench.blocks import Batch
    from decodebench.fill import Constant, Normal, Zeros

    gc.collect()  # the cache of the case before must not lie beside this one
    batch = made["batch"]
    last = [1] * len(made["layout"].pool_num_blocks)
    for group, spec in enumerate(made["layout"].groups):
        last[spec.pool] = max([last[spec.pool], *(max(ids, default=1) for ids in batch.block_table(group))])
    layout = made["layout"].with_num_blocks([n + 1 for n in last])
    if case.layers_per_group:
        layout = decode.first_layers(layout, case.layers_per_group)
    batch = made["batch"] = Batch(layout, batch.requests)
    cache = made["cache"] = layout.allocate(case.device)
    if case.values == "unfilled":
        return {}
    values = {"constant": Constant(), "normal": Normal(seed=case.seed), "zeros": Zeros()}[case.values]
    report = connector.fill_cache(cache, batch, values, case.fault)
    filled = {"fill_seconds": report.seconds, "fill_bytes": report.bytes_written}
    if case.measure == "decode" and case.values != "normal":
        return filled  # only values that tell layer and block apart can be audited
    found = coverage.audit(cache, batch, values, report)
    states = found.groups
    return (
        filled
        | _columns(found)
        | {"wrong_pages": int(states["wrong"].sum()), "zeroed_pages": int(states["zeroed"].sum())}
    )


def _decode(case: Case, made: dict) -> dict:
    from decodebench import decode

    measured = decode.measure_decode(
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
        "backend_used": measured.backend,
        "notes": "; ".join((*measured.fallbacks, *measured.notes)) or None,
    }


STAGES = {"layout": _layout, "coverage": _coverage, "audit": _audit, "decode": _decode}


# -- comparing -----------------------------------------------------------------------------------

#: what two sweeps are compared by, where both have it
METRICS = (
    "median_s",
    "gb_per_s",
    "limit_share",
    "fill_seconds",
    "coverage",
    "worst_group_coverage",
    "num_blocks",
    "blocks_per_request",
    "concurrency",
    "intercept_bytes",
    "slope_bytes",
)


def compare(a, b, *, across: Sequence[str] = (), partial: bool = False, metrics: Sequence[str] = METRICS):
    """Two sweeps side by side: one row a case and metric, with the ratio b / a and its spread.

    ``a``, ``b``: result folders or tables of ``run`` and ``read``. Cases are matched by every
    setting except those in ``across``: ``across=("device",)`` compares a CPU's rows with a GPU's.
    ``partial`` compares the cases that both have and leaves out the others. The spread of a latency ratio
    goes from quartile to quartile; ``distinguishable`` says whether it leaves out 1.
    Raises ``SweepError`` where settings differ, cases are missing, or latencies come from different
    machines (allowed by ``across=("machine",)``), and names what differs.
    """
    import pandas as pd

    a, b = (read(side) if isinstance(side, str | Path) else side for side in (a, b))
    unknown = set(across) - set(AXES) - {"machine"}
    if unknown:
        raise SweepError(
            f"across: unknown setting {sorted(unknown)[0]!r}; known are machine, {', '.join(AXES)}"
        )
    keys = [axis for axis in AXES if axis not in across]
    sides = [_by_key(side, keys, name) for side, name in ((a, "first"), (b, "second"))]
    common = [key for key in sides[0] if key in sides[1]]
    if not partial or not common:
        _refuse_different(sides, keys)
    if "machine" not in across:
        _refuse_different_machines(a, b)
    varying = [i for i, axis in enumerate(keys) if axis == "model" or len({key[i] for key in common}) > 1]
    rows = []
    for key in common:
        before, after = sides[0][key], sides[1][key]
        for metric in metrics:
            x, y = before.get(metric), after.get(metric)
            if pd.isna(x) or pd.isna(y):
                continue
            low, high = _ratio_spread(before, after, metric)
            rows.append(
                {keys[i]: key[i] for i in varying}
                | {"metric": metric, "unit": COLUMNS[metric].unit, "a": float(x), "b": float(y)}
                | {"ratio": y / x if x else float("nan"), "ratio_low": low, "ratio_high": high}
                | {"distinguishable": bool(x != y) and not low <= 1 <= high}
            )
    result = pd.DataFrame(rows)
    result.attrs["provenance"] = [a.attrs.get("provenance", []), b.attrs.get("provenance", [])]
    return result


def _by_key(frame, keys: Sequence[str], name: str) -> dict[tuple, dict]:
    found: dict[tuple, dict] = {}
    for row in frame.astype(object).where(frame.notna(), None).to_dict("records"):
        key = tuple(row[axis] for axis in keys)
        if key in found:
            raise SweepError(
                f"the {name} sweep has several rows that differ only in what is compared across: keep one "
                f"value "
                f"of it in each sweep (two of them: {found[key]['case_id']} and {row['case_id']})"
            )
        found[key] = row
    return found


def _refuse_different(sides: Sequence[dict[tuple, dict]], keys: Sequence[str]) -> None:
    if set(sides[0]) == set(sides[1]):
        return
    for i, axis in enumerate(keys):
        first, second = ({key[i] for key in side} for side in sides)
        if first != second:
            raise SweepError(
                f"the sweeps differ in {axis}: {_few(first - second)} only in the first, "
                f"{_few(second - first)} only "
                f"in the second. compare(…, across=({axis!r},)) compares them across it, partial=True only "
                f"what both have"
            )
    raise SweepError(
        f"{len(set(sides[0]) ^ set(sides[1]))} cases are in one sweep only; partial=True compares what both "
        f"have"
    )


def _refuse_different_machines(a, b) -> None:
    machines = []
    for frame in (a, b):
        used = set(frame.loc[frame["median_s"].notna(), "run"])
        machines.append(
            {
                (r.get("device"), r.get("cores"))
                for r in frame.attrs.get("provenance", [])
                if r.get("run") in used
            }
        )
    if all(machines) and machines[0] != machines[1]:
        raise SweepError(
            f"latencies of different machines: {_few(machines[0])} and {_few(machines[1])}. "
            "compare(…, across=('machine',)) compares them all the same"
        )


def _few(values: set) -> str:
    shown = sorted(map(str, values))
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "") or "nothing"


def _ratio_spread(before: dict, after: dict, metric: str) -> tuple[float, float]:
    """Smallest and largest ratio that the quartiles of a latency allow; exact values have no spread."""
    if metric in ("median_s", "gb_per_s", "limit_share") and before["q1_s"] and after["q1_s"]:
        low, high = after["q1_s"] / before["q3_s"], after["q3_s"] / before["q1_s"]
        if metric == "median_s":
            return low, high
        scale = (after[metric] / before[metric]) * (after["median_s"] / before["median_s"])
        return scale / high, scale / low
    ratio = after[metric] / before[metric] if before[metric] else float("nan")
    return ratio, ratio


# -- command -------------------------------------------------------------------------------------


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "grid", type=Path, help="TOML file: axes, each a value or a list; decodebench.sweep.Case lists them"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the rows; an unfinished sweep goes on there"
    )
    parser.add_argument("--retry-failed", action="store_true", help="compute failed and refused cases again")
    parser.add_argument("--against", type=Path, help="a stored sweep to compare with afterwards")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def sweep_command(arguments: argparse.Namespace) -> int:
    table = run(
        arguments.grid,
        arguments.out,
        retry_failed=arguments.retry_failed,
        progress=False if arguments.quiet else None,
    )
    counts = ", ".join(f"{n} {status}" for status, n in table["status"].value_counts().items())
    print(f"{len(table)} case{'s' * (len(table) != 1)} of this grid ({counts}) in {arguments.out}")
    for reason, n in table["reason"].dropna().value_counts().head(5).items():
        print(f"  {n} × {reason}")
    if arguments.against:
        print(compare(arguments.against, table).to_string(index=False))
    if not (table["status"] == "ok").any():
        raise SweepError("no case of this grid could be measured; the reasons stand in the table and above")
    return 0
