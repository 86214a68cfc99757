"""Two result tables side by side: a row a case and metric, with the ratio and its spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from decodebench.study.grid import AXES, SweepError
from decodebench.study.table import COLUMNS, read
from decodebench.words import some

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
                f"the {name} sweep has several rows that differ only in what is compared across: keep "
                f"one value of it in each sweep (two of them: {found[key]['case_id']} and "
                f"{row['case_id']})"
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
                f"{_few(second - first)} only in the second. compare(…, across=({axis!r},)) compares "
                "them across it, partial=True only what both have"
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


def _few(values: set) -> str:
    return some(sorted(map(str, values)), none="nothing")
