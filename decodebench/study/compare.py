"""Two result tables side by side: a row a case and metric, with the ratio and its spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from decodebench.study.grid import AXES, SweepError
from decodebench.study.table import COLUMNS, read
from decodebench.words import columns, plain_number, some

if TYPE_CHECKING:
    import pandas as pd

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
    "start_bytes",
    "request_bytes",
    "slope_bytes",
)


#: metrics of a clock: they differ from run to run, the other columns of a sweep are exact; of columns of other
#: harnesses nobody knows, so they are taken for measured
TIMED = ("median_s", "gb_per_s", "limit_share", "fill_seconds")


def compare(
    a: str | Path | pd.DataFrame,
    b: str | Path | pd.DataFrame,
    *,
    again: str | Path | pd.DataFrame | None = None,
    across: Sequence[str] = (),
    partial: bool = False,
    metrics: Sequence[str] = METRICS,
) -> pd.DataFrame:
    """Two sweeps side by side: one row a case and metric, with the ratio b / a and its spread.

    ``a``, ``b``: result folders or tables of ``run`` and ``read``. Cases are matched by every
    setting except those in ``across``: ``across=("device",)`` compares a CPU's rows with a GPU's.
    ``partial`` compares the cases that both have and leaves out the others. The spread of a latency ratio
    goes from quartile to quartile. ``again``: the first sweep measured a second time.

    ``distinguishable``: True where exact values differ, and where a time's quartiles leave out 1 against
    ``a`` and against ``again``; False where they do not; empty where nobody can tell, because there is one
    sample only or no repeated run. ``why`` says which.
    Raises ``SweepError`` where settings differ, cases are missing, or latencies come from different
    machines (allowed by ``across=("machine",)``), and names what differs.
    """
    import pandas as pd

    a, b = (read(side) if isinstance(side, str | Path) else side for side in (a, b))
    again = read(again) if isinstance(again, str | Path) else again
    axes = list(dict.fromkeys([*a.attrs.get("axes", AXES), *b.attrs.get("axes", AXES)]))
    unknown = set(across) - set(axes) - {"machine"}
    if unknown:
        raise SweepError(
            f"across: unknown setting {sorted(unknown)[0]!r}; known are machine, {', '.join(axes)}"
        )
    keys = [axis for axis in axes if axis not in across]
    sides = [_by_key(side, keys, name) for side, name in ((a, "first"), (b, "second"))]
    repeated = {} if again is None else _by_key(again, keys, "repeated")
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
            if x is None or y is None or pd.isna(x) or pd.isna(y):
                continue
            low, high = _ratio_spread(before, after, metric)
            told, why = _told_apart(before, repeated.get(key), after, metric)
            rows.append(
                {keys[i]: key[i] for i in varying}
                | {
                    "metric": metric,
                    "unit": COLUMNS[metric].unit if metric in COLUMNS else "",
                    "a": float(x),
                    "b": float(y),
                }
                | {"ratio": y / x if x else float("nan"), "ratio_low": low, "ratio_high": high}
                | {"distinguishable": told, "why": why}
            )
    result = pd.DataFrame(rows)
    if rows:
        result["distinguishable"] = result["distinguishable"].astype("boolean")
    result.attrs["provenance"] = [a.attrs.get("provenance", []), b.attrs.get("provenance", [])]
    return result


def summary(result: pd.DataFrame, rows: int = 20) -> str:
    """What a comparison found, for a terminal: the differences first, and how much is the same or unclear."""
    told = result["distinguishable"]
    changed = result[told.fillna(False)]
    unclear = result[told.isna() & (result["ratio"] != 1)]
    lines = [
        f"{len(result)} values compared: {len(changed)} differ, {int((told == False).sum())} do not, "  # noqa: E712
        f"{int(told.isna().sum())} cannot be told apart from chance"
    ]
    for part in (changed, unclear):
        if len(part):
            shown = part.head(rows).drop(columns=["ratio_low", "ratio_high", "distinguishable"])
            cells = [
                [plain_number(v, row["metric"] if c in ("a", "b") else c) for c, v in row.items()]
                for row in shown.drop(columns="unit").to_dict("records")
            ]
            shown = shown.drop(columns="unit")
            lines += ["", *columns([list(shown.columns), *cells], left=range(len(shown.columns)))]
            if len(part) > rows:
                lines.append(f"… and {len(part) - rows} more: --csv writes them all")
    return "\n".join(lines)


def _told_apart(before: dict, again: dict | None, after: dict, metric: str) -> tuple[bool | None, str]:
    """Whether two values differ for a reason, and why that can or cannot be said."""
    if metric in COLUMNS and metric not in TIMED:
        return bool(before[metric] != after[metric]), "exact"
    if metric == "fill_seconds" or not (before.get("q1_s") and after.get("q1_s")):
        return None, "one sample, no spread"
    low, high = _ratio_spread(before, after, metric)
    if low <= 1 <= high:
        return False, "quartiles overlap"
    if again is None or not again.get("q1_s") or not again.get(metric):
        return None, "no repeated run to tell drift from difference"
    low_again, high_again = _ratio_spread(again, after, metric)
    if low_again <= 1 <= high_again or (high < 1) != (high_again < 1):
        return False, "the repeated run overlaps"
    return True, "quartiles of both runs leave out 1"


def _by_key(frame, keys: Sequence[str], name: str) -> dict[tuple, dict]:
    found: dict[tuple, dict] = {}
    for row in frame.astype(object).where(frame.notna(), None).to_dict("records"):
        key = tuple(row.get(axis) for axis in keys)
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
    machines = [_machines(frame) for frame in (a, b)]
    if all(machines) and (machines[0] != machines[1] or len(machines[0]) > 1):
        raise SweepError(
            f"latencies of different machines: {_few(machines[0])} and {_few(machines[1])}. "
            "compare(…, across=('machine',)) compares them all the same"
        )


def _machines(frame) -> set[str]:
    """Machines that rows with a latency ran on: the row's own where a cluster ran it, else its run's."""
    if "median_s" not in frame:
        return set()
    timed = frame[frame["median_s"].notna()]
    nodes = timed["node"] if "node" in timed else timed["run"].isna()
    of_run = {
        r.get("run"): f"{r.get('device')}, {r.get('cores')} cores" for r in frame.attrs.get("provenance", [])
    }
    return {
        node if isinstance(node, str) else of_run[run]
        for node, run in zip(nodes, timed["run"])
        if isinstance(node, str) or run in of_run
    }


def _ratio_spread(before: dict, after: dict, metric: str) -> tuple[float, float]:
    """Smallest and largest ratio that the quartiles of a latency allow; exact values have no spread."""
    if metric in ("median_s", "gb_per_s", "limit_share") and before.get("q1_s") and after.get("q1_s"):
        low, high = after["q1_s"] / before["q3_s"], after["q3_s"] / before["q1_s"]
        if metric == "median_s":
            return low, high
        scale = (after[metric] / before[metric]) * (after["median_s"] / before["median_s"])
        return scale / high, scale / low
    ratio = after[metric] / before[metric] if before[metric] else float("nan")
    return ratio, ratio


def _few(values: set) -> str:
    return some(sorted(map(str, values)), none="nothing")
