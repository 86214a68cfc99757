"""A sweep's table as a figure, chosen by what was measured and which axis varies.

table = db.sweep.run({"model": ["jamba-v0.1", "gemma-3-1b"], "context": [512, 4096], "max_model_len": "auto"})
db.plot(table)
"""

from __future__ import annotations

import argparse
import os.path
from collections.abc import Mapping
from pathlib import Path

from decodebench.show.charts import PlotRefused, bar_panels, lines, refuse_mixed
from decodebench.show.figures import each_layout_once, measured
from decodebench.show.look import Chart
from decodebench.words import plain_number, seconds_text, short, some

#: what a figure shows where nothing else is asked for, the deepest measure first: column → words
RESULTS = {
    "median_s": "one decode step",
    "coverage": "pages read that were filled",
    "concurrency": "requests that fit at once",
}
#: axes that are numbers, and the column that holds them as numbers
NUMBERS = {"context": "longest_context", "block_size": "block_in_use", "batch": "batch"}


def plot(
    table,
    y: str | None = None,
    x: str | None = None,
    series: str | None = None,
    where: Mapping[str, object] | None = None,
) -> Chart:
    """A figure of a sweep's table: lines over an axis of numbers, bars over one of names.

    ``y``: a column (default: the step's time, else coverage, else the requests that fit). ``x`` and
    ``series``: axes (default: those that vary, numbers first). ``where``: column → value to keep. Raises
    ``PlotRefused`` where rows that differ in another axis would be mixed, and names it.
    """
    for column, value in (where or {}).items():
        table = _kept(table, column, value)
    rows = each_layout_once(measured(table))
    if rows.empty:
        raise PlotRefused(f"no row was measured: {some(dict.fromkeys(table['reason'].dropna()))}")
    y = y or next((column for column in RESULTS if rows[column].notna().any()), "concurrency")
    for column in filter(None, (x, y, series)):
        _known(rows, column)
    settings = list(rows.columns[1 : rows.columns.get_loc("status")])
    varying = [axis for axis in settings if axis != "measure" and rows[axis].nunique(dropna=False) > 1]
    by_number = [axis for axis in varying if axis in NUMBERS]
    x = x or next(iter(by_number or [axis for axis in varying if axis != "model"]), "model")
    series = series or ("model" if x != "model" else next((a for a in varying if a != x), "measure"))
    subtitle = "; ".join(
        f"{axis.replace('_', ' ')} {plain_number(rows[axis].iloc[0])}"
        for axis in ("measure", "memory", "context", "batch", "device")
        if axis not in (x, series) and rows[axis].nunique(dropna=False) == 1
    )
    words = RESULTS.get(y, y.replace("_", " "))
    facts = {
        "name": "sweep",
        "title": f"{words[0].upper()}{words[1:]}, by {x.replace('_', ' ')}",
        "subtitle": subtitle,
        "percent": y.endswith(("coverage", "share")) or y.startswith("waste_"),
    }
    seconds, at = y.endswith("_s"), NUMBERS.get(x, x)
    rows[series] = rows[series].astype("string").fillna("none").map(short)
    if at in NUMBERS.values():
        if seconds:
            rows[y] = 1e3 * rows[y].astype(float)
        y_label = f"{words} (ms)" if seconds else words
        return lines(rows, at, y, series, x_label=at.replace("_", " "), y_label=y_label, **facts)
    rows[x] = rows[x].astype("string").fillna("none")
    refuse_mixed(rows, x, series, y)
    return bar_panels(rows, x, y, series, x_label=words, as_text=seconds_text if seconds else None, **facts)


def _kept(table, column: str, value: object):
    """The rows whose column says ``value``."""
    _known(table, column)
    text = table[column].astype("string").fillna("")
    if not (text == str(value)).any():
        there = some(dict.fromkeys(text.replace("", "(empty)")))
        raise PlotRefused(f"no row has {column} = {value}: there are {there}")
    return table[text == str(value)]


def _known(table, column: str) -> None:
    if column not in table:
        raise PlotRefused(f"no column {column!r}: there are {', '.join(table.columns)}")


def add_plot_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, help="folder that a sweep wrote, or a CSV of its table")
    parser.add_argument("--out", type=Path, help=".png or .svg to write (default: sweep.png beside the rows)")
    parser.add_argument(
        "--y", help="column to show (default: the step's time, else coverage, else what fits)"
    )
    parser.add_argument("--x", help="axis along the figure (default: one that varies)")
    parser.add_argument("--series", help="axis with a line or a panel each (default: model)")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="COLUMN=VALUE",
        help="keep these rows only; repeatable",
    )


def plot_command(arguments: argparse.Namespace) -> int:
    """Draw a stored sweep; prints what the figure shows in words, and its file."""
    import pandas as pd

    path = arguments.results
    source = path / "rows.parquet" if os.path.isdir(path) else path
    try:
        table = pd.read_csv(source) if source.suffix == ".csv" else pd.read_parquet(source)
    except (OSError, ValueError) as error:
        raise PlotRefused(f"{source}: not a sweep's table ({str(error).splitlines()[0]})") from None
    if "status" not in table:
        raise PlotRefused(f"{source}: not a sweep's table (it has no column status)")
    where = dict(pair.partition("=")[::2] for pair in arguments.where)
    figure = plot(table, arguments.y, arguments.x, arguments.series, where)
    out = arguments.out or (path if os.path.isdir(path) else path.parent) / "sweep.png"
    if out.suffix not in (".png", ".svg"):
        raise PlotRefused(f"{out}: write a .png or a .svg")
    try:
        out.write_bytes(figure.png() if out.suffix == ".png" else figure.svg().encode())
    except OSError as error:
        raise PlotRefused(f"{out}: cannot be written ({error.strerror or error})") from error
    print(f"{figure.alt}\n{out}")
    return 0
