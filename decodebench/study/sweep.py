"""A grid of cases → a table, one row a case: resumable, and honest about the cases that failed.

    db.sweep.run({"model": "jamba-v0.1", "block_size": [16, 32, 64], "grouping": ["hybrid", "per_layer"]})

An axis is a value or a list of values; ``Case`` (in ``grid.py``) lists them all, ``COLUMNS`` what a row
tells, with units. Rows are written the moment they are finished (``journal.py``); a case is recognised by its
content, so a sweep that was killed, extended or reordered computes only what is missing.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from decodebench.measure.journal import Journal
from decodebench.measure.provenance import provenance
from decodebench.study.compare import compare, summary
from decodebench.study.grid import AXES, Case, SweepError, cases, load_grid
from decodebench.study.plans import forget
from decodebench.study.spread import RUNNERS, Finished, runner_of
from decodebench.study.table import COLUMNS, DTYPES, axes_text, read, schema, table
from decodebench.words import columns, counted, plain_number

__all__ = ["AXES", "COLUMNS", "Case", "CasesRefused", "SweepError", "compare", "read", "run", "schema"]


def __dir__() -> list[str]:
    return __all__


class CasesRefused(UserWarning):
    """Some cases of a sweep are rows without values: the warning counts them and says why."""


def run(
    grid: Mapping | Sequence[Mapping] | str | Path,
    out: str | Path | None = None,
    *,
    retry_failed: bool = False,
    progress: bool | None = None,
    runner: str = "local",
    workers: int | None = None,
    address: str | None = None,
):
    """Every case of the grid as a DataFrame with the columns of ``COLUMNS``, in the grid's order.

    ``grid``: axes (see ``Case``), several such grids, or the path of a TOML file. ``out``: a folder
    for the rows and their provenance; cases that it already holds are not computed again, except
    those that failed or were refused where ``retry_failed``. Without it nothing is stored. ``progress``: a
    bar with the time left; by default where stderr is a terminal. ``.attrs["provenance"]`` of the result
    lists the runs that its ``run`` column names. ``runner``: ``local`` (one case after another, here),
    ``processes`` (``workers`` of them; layout, coverage and traffic cases) or ``ray`` (a cluster at
    ``address``, else this machine; extra ``ray``): see ``spread``. The rows are the same.
    """
    run_cases = runner_of(runner)
    forget()
    wanted = cases(load_grid(grid) if isinstance(grid, str | Path) else grid)
    by_id = {case.case_id(): case for case in wanted}
    if out is None:
        rows = {
            case_id: row | {"run": 0}
            for case_id, row in _rows(by_id, run_cases(by_id, workers, address), progress)
        }
        return _counted(table(rows, list(by_id), [{"run": 0} | _provenance(grid, wanted)]))
    with Journal(out) as journal:
        missing = {
            case_id: case
            for case_id, case in by_id.items()
            if case_id not in journal.rows or (retry_failed and journal.rows[case_id]["status"] != "ok")
        }
        if missing:
            journal.begin_run(_provenance(grid, wanted))
            finished = run_cases(missing, workers, address)
            for _, row in _rows(missing, finished, progress, done=len(by_id) - len(missing)):
                journal.append(row)
        journal.compact(list(by_id), DTYPES)
        return _counted(table(journal.rows, list(by_id), journal.runs))


def _counted(result):
    """The result; a warning counts the cases that were refused or failed, with their reasons."""
    if any(result["status"] != "ok"):
        warnings.warn(refusals(result), CasesRefused, stacklevel=3)
    return result


def refusals(result) -> str:
    """How many cases of a table were refused or failed, and why, in one line."""
    bad = result[result["status"] != "ok"]
    told = (
        f"{n} × {reason if len(reason) <= 160 else reason[:157] + '…'}"
        for reason, n in (bad["reason"].value_counts().head(3).items())
    )
    reasons = "; ".join(told)
    return f"{len(bad)} of {counted(len(result), 'case')} not measured (status, reason): {reasons}"


def _provenance(grid, wanted: Sequence[Case]) -> dict:
    used = {case.device for case in wanted if case.measure in ("audit", "decode")}
    settings = {"grid": Path(grid).name if isinstance(grid, str | Path) else grid, "cases": len(wanted)}
    return provenance(settings, device=sorted(used) or "cpu")


def _rows(pending: Mapping[str, Case], finished: Finished, progress: bool | None, done: int = 0):
    """(case id, row) of each case as its runner finishes it."""
    from tqdm.auto import tqdm  # a bar in a terminal, a widget in a notebook

    # None: tqdm looks whether stderr is a terminal; exports of notebooks ask for no bars at all
    hidden = os.environ.get("TQDM_DISABLE") == "1" or (None if progress is None else not progress)
    with tqdm(total=done + len(pending), initial=done, unit="case", disable=hidden, leave=False) as bar:
        for case_id, columns in finished:
            case = pending[case_id]
            yield case_id, {"case_id": case_id} | asdict(case) | columns
            bar.set_postfix_str(f"{case.model} {case.grouping} {case.context}", refresh=False)
            bar.update()


# -- command -------------------------------------------------------------------------------------


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "A grid is a TOML file of axes, each a value or a list of values; what is left out has its default.\n\n"
        + axes_text()
    )
    parser.add_argument("grid", type=Path, help="TOML file of axes: see below")
    parser.add_argument("--out", type=Path, help="folder for the rows; an unfinished sweep goes on there")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table as CSV (- prints it)")
    parser.add_argument("--retry-failed", action="store_true", help="compute failed and refused cases again")
    parser.add_argument(
        "--against", type=Path, metavar="FOLDER", help="a stored sweep to compare with afterwards"
    )
    parser.add_argument(
        "--again",
        type=Path,
        metavar="FOLDER",
        help="that sweep measured a second time: without it no difference of times is called one",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--runner", default="local", help=f"where cases run: {', '.join(RUNNERS)}")
    parser.add_argument("--workers", type=int, metavar="N", help="processes, or cores of a local Ray")
    parser.add_argument("--address", help="of a Ray cluster: auto, or ray://host:10001")


def sweep_command(arguments: argparse.Namespace) -> int:
    if arguments.out is None and arguments.csv is None:
        raise SweepError("nowhere to put the rows: give --out FOLDER, --csv FILE, or both")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CasesRefused)  # counted below
            result = run(
                arguments.grid,
                arguments.out,
                retry_failed=arguments.retry_failed,
                progress=False if arguments.quiet else None,
                runner=arguments.runner,
                workers=arguments.workers,
                address=arguments.address,
            )
    except KeyboardInterrupt:
        kept = f"finished rows are in {arguments.out}, and the same command goes on there"
        raise KeyboardInterrupt(kept if arguments.out else "nothing was kept: --out keeps rows") from None
    if arguments.csv is not None and str(arguments.csv) == "-":
        print(result.to_csv(index=False), end="")
        return 0
    counts = ", ".join(f"{n} {status}" for status, n in result["status"].value_counts().items())
    print(
        f"{counted(len(result), 'case')} of this grid ({counts})"
        + (f" in {arguments.out}" if arguments.out else "")
    )
    for reason, n in result["reason"].dropna().value_counts().head(5).items():
        print(f"  {n} × {reason}")
    print("\n".join(glance(result)))
    if arguments.csv is not None:
        try:
            result.to_csv(arguments.csv, index=False)
        except OSError as error:
            raise SweepError(f"{arguments.csv}: cannot be written ({error.strerror or error})") from error
        print(f"all {len(result.columns)} columns in {arguments.csv}")
    if arguments.out:
        print(f"a figure: python -m decodebench plot {arguments.out}")
    if arguments.against:
        print(summary(compare(arguments.against, result, again=arguments.again)))
    if not (result["status"] == "ok").any():
        raise SweepError("no case of this grid could be measured; the reasons stand in the table and above")
    return 0


#: what a terminal shows of a table, where it is filled
GLANCE = ("groups", "num_blocks", "concurrency", "coverage", "median_s", "q1_s", "q3_s", "limit_share")


def glance(result, rows: int = 20) -> list[str]:
    """The first rows of a table as lines: the axes that vary, and its main results."""
    ok = result[result["status"] == "ok"].head(rows)
    if ok.empty:
        return []
    varying = [axis for axis in AXES if axis == "model" or result[axis].nunique(dropna=False) > 1]
    shown = [*varying, *(column for column in GLANCE if ok[column].notna().any())]
    text = ok[shown].astype(object).where(ok[shown].notna(), "–")
    cells = [[plain_number(v, c) for c, v in row.items()] for row in text.to_dict("records")]
    more = [f"… and {len(result) - len(ok)} more rows"] if len(result) > len(ok) else []
    return ["", *columns([shown, *cells], left=range(len(varying))), *more]
