"""A grid of cases → a table, one row a case: resumable, and honest about the cases that failed.

    db.sweep.run({"model": "jamba-v0.1", "block_size": [16, 32, 64], "grouping": ["hybrid", "per_layer"]})

An axis is a value or a list of values; ``Case`` (in ``grid.py``) lists them all, ``COLUMNS`` what a row
tells, with units. Rows are written the moment they are finished (``journal.py``); a case is recognised by its
content, so a sweep that was killed, extended or reordered computes only what is missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from decodebench.measure.journal import Journal
from decodebench.measure.provenance import provenance
from decodebench.study.compare import compare
from decodebench.study.grid import AXES, Case, SweepError, cases, load_grid
from decodebench.study.plans import forget
from decodebench.study.runners import evaluate
from decodebench.study.table import COLUMNS, DTYPES, read, schema, table

__all__ = ["AXES", "COLUMNS", "Case", "SweepError", "compare", "read", "run", "schema"]


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
    those that failed or were refused where ``retry_failed``. Without it nothing is stored.
    ``progress``: a bar with the time left; by default where stderr is a terminal.
    ``.attrs["provenance"]`` of the result lists the runs that its ``run`` column names.
    """
    forget()
    wanted = cases(load_grid(grid) if isinstance(grid, str | Path) else grid)
    by_id = {case.case_id(): case for case in wanted}
    if out is None:
        rows = {case_id: row | {"run": 0} for case_id, row in _rows(by_id, progress)}
        return table(rows, list(by_id), [{"run": 0} | _provenance(grid, wanted)])
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
        return table(journal.rows, list(by_id), journal.runs)


def _provenance(grid, wanted: Sequence[Case]) -> dict:
    used = {case.device for case in wanted if case.measure in ("audit", "decode")}
    settings = {"grid": Path(grid).name if isinstance(grid, str | Path) else grid, "cases": len(wanted)}
    return provenance(settings, device=sorted(used) or "cpu")


def _rows(pending: Mapping[str, Case], progress: bool | None, done: int = 0):
    """(case id, row) of each case as it is finished."""
    from tqdm import tqdm

    hidden = None if progress is None else not progress  # None: tqdm looks whether stderr is a terminal
    with tqdm(total=done + len(pending), initial=done, unit="case", disable=hidden, leave=False) as bar:
        for case_id, case in pending.items():
            bar.set_postfix_str(f"{case.model} {case.grouping} {case.context}", refresh=False)
            yield case_id, {"case_id": case_id} | asdict(case) | evaluate(case)
            bar.update()


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
    result = run(
        arguments.grid,
        arguments.out,
        retry_failed=arguments.retry_failed,
        progress=False if arguments.quiet else None,
    )
    counts = ", ".join(f"{n} {status}" for status, n in result["status"].value_counts().items())
    print(f"{len(result)} case{'s' * (len(result) != 1)} of this grid ({counts}) in {arguments.out}")
    for reason, n in result["reason"].dropna().value_counts().head(5).items():
        print(f"  {n} × {reason}")
    if arguments.against:
        print(compare(arguments.against, result).to_string(index=False))
    if not (result["status"] == "ok").any():
        raise SweepError("no case of this grid could be measured; the reasons stand in the table and above")
    return 0
