"""One page of what an engine was measured to do: rows, three figures, the audit, the layout, the provenance."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING

from decodebench.show.cells import Provenance, Table
from decodebench.show.charts import PlotRefused, lines
from decodebench.show.look import Chart
from decodebench.show.notebooks import ReportError
from decodebench.show.report import TEMPLATES, _anonymous_write, _css, _picture
from decodebench.words import counted, seconds_text, share_text, short, some

if TYPE_CHECKING:
    import pandas as pd

#: section → the columns that it shows, where they are filled
TABLES = {
    "rows": "median_s q1_s q3_s tokens_per_second admit_s fill_seconds fill_bytes floor_s floor_share floor_verdict",
    "audit": "required_pages coverage worst_group_coverage stray_pages clobbered_pages verdict",
    "layout": "groups layers group_kinds group_block_sizes bytes_per_block num_blocks plan_equal plan_difference",
}
HEADINGS = {"rows": "Steps", "audit": "Audit", "layout": "Layout"}
CAPTIONS = {
    "rows": "Resident steps alone: every request decodes a token. Admission (filling, computing prompts) is apart.",
    "audit": "Pages that the first decode step reads, and what became of them before it.",
    "layout": "The engine's own layout, and whether the plan made without it says the same.",
}


def engine_page(table: pd.DataFrame, out: str | Path) -> Path:
    """Write ``out``/index.html, its figures as SVG and PNG and the whole table as CSV; the page's path.

    ``table``: what a sweep of ``measure = "engine"`` gave. Raises ``ReportError`` where it holds no such row,
    or the folder cannot be written.
    """
    import jinja2

    rows = table[table["measure"] == "engine"]
    if rows.empty:
        raise ReportError("no row of this table was measured in an engine: decodebench run makes them")
    ok, bad = rows[rows["status"] == "ok"], rows[rows["status"] != "ok"]
    out = Path(out)
    figures, notes = charts(ok) if len(ok) else ([], [])
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        for figure in figures:
            (out / "figures" / f"{figure.name}.png").write_bytes(figure.png())
            _anonymous_write(out / "figures" / f"{figure.name}.svg", figure.svg())
        _anonymous_write(out / "rows.csv", rows.to_csv(index=False))
    except OSError as error:
        raise ReportError(f"{out}: cannot write a page there ({error.strerror or error})") from error
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True)
    runs = table.attrs.get("provenance") or [{}]
    text = environment.get_template("engine.html.j2").render(
        title=f"Decode in an engine: {some(dict.fromkeys(map(short, rows['model'])))}",
        verdicts=verdicts(rows),
        figures=[(_picture(figure.svg(), figure.alt), figure.caption) for figure in figures],
        notes=notes,
        tables=[
            (HEADINGS[name], section(ok, name).html()) for name in TABLES if filled(ok, TABLES[name].split())
        ],
        refused=Table(bad[[*varying(rows), "status", "reason"]], "refused").html() if len(bad) else "",
        provenance=Provenance({k: v for k, v in runs[-1].items() if k != "run"})._repr_mimebundle_()[0][
            "text/html"
        ],
        css=_css(),
    )
    _anonymous_write(out / "index.html", text)
    return out / "index.html"


def varying(rows: pd.DataFrame) -> list[str]:
    """The settings that differ between rows, the model always among them."""
    settings = list(rows.columns[1 : rows.columns.get_loc("status")])
    return [axis for axis in settings if axis == "model" or rows[axis].nunique(dropna=False) > 1]


def filled(rows: pd.DataFrame, columns: list[str]) -> list[str]:
    """Those of the columns in which some row has a value."""
    return [column for column in columns if column in rows and rows[column].notna().any()]


def section(rows: pd.DataFrame, name: str) -> Table:
    """One of the page's tables: the settings that vary, and what ``TABLES`` names."""
    shown = rows[[*varying(rows), *filled(rows, TABLES[name].split())]].copy()
    shown["model"] = shown["model"].map(short)
    for column in shown.select_dtypes("boolean"):
        shown[column] = shown[column].map({True: "yes", False: "no"})
    shown.attrs = rows.attrs
    return Table(shown, name, CAPTIONS[name])


def verdicts(rows: pd.DataFrame) -> list[tuple[str, bool | None]]:
    """What the rows say, in sentences computed from them; each with whether it is good news, or None."""
    ok = rows[rows["status"] == "ok"]
    said: list[tuple[str, bool | None]] = []
    if len(ok) < len(rows):
        said.append(
            (f"{len(rows) - len(ok)} of {counted(len(rows), 'case')} gave no figure; each says why.", False)
        )
    if ok.empty:
        return said
    low, high = ok["median_s"].min(), ok["median_s"].max()
    said.append(
        (f"A resident decode step takes {seconds_text(low)} to {seconds_text(high)} in the median.", None)
    )
    audited = ok[ok["coverage"].notna()]
    if len(audited):
        whole = int(
            (
                (audited["coverage"] == 1) & (audited["stray_pages"] == 0) & (audited["clobbered_pages"] == 0)
            ).sum()
        )
        text = f"Decode read what was asked for, and nothing else was touched, in {whole} of "
        text += f"{counted(len(audited), 'audited case')}."
        said.append((text, whole == len(audited)))
    equal = ok["plan_equal"].dropna()
    if len(equal):
        same = int(equal.sum())
        said.append(
            (
                f"The plan is the engine's own layout in {same} of {counted(len(equal), 'case')}.",
                same == len(equal),
            )
        )
    judged = ok[ok["floor_share"].notna()]
    if len(judged):
        impossible = int((judged["floor_verdict"] == "impossible").sum())
        ends = (share_text(judged["floor_share"].min()), share_text(judged["floor_share"].max()))
        shares = " to ".join(dict.fromkeys(ends))
        text = f"The floor of {some(dict.fromkeys(judged['floor_machine']))} is {shares} of the step"
        text += f"; {impossible} of {counted(len(judged), 'figure')} cannot be true." if impossible else "."
        said.append((text, not impossible))
    return said


def charts(rows: pd.DataFrame) -> tuple[list[Chart], list[str]]:
    """Step by context, step by batch, and the floor's share of the step; a line for every other setting.

    Then sentences about those that cannot be drawn.
    """
    kept = rows.copy()
    for column in ("median_s", "q1_s", "q3_s"):
        kept[column.replace("_s", "_ms")] = 1e3 * kept[column].astype(float)
    found, notes = [], []
    for name, x, label, y, words in (
        (
            "step-by-context",
            "longest_context",
            "tokens of each request",
            "median_ms",
            "median of a resident step (ms)",
        ),
        ("step-by-batch", "batch", "requests", "median_ms", "median of a resident step (ms)"),
        (
            "share-of-floor",
            "longest_context",
            "tokens of each request",
            "floor_share",
            "floor's share of the step",
        ),
    ):
        there = kept[kept[y].notna() & kept[x].notna()].copy()
        axes = [axis for axis in varying(there) if axis not in ("context", x)] if len(there) else []
        if there.empty:
            continue
        there["line"] = [", ".join(_label(axis, row[axis]) for axis in axes) for _, row in there.iterrows()]
        if x == "batch":
            there["line"] += [f", context {context}" for context in there["context"]]
        try:
            figure = lines(
                there,
                x,
                y,
                "line",
                name=name,
                title={
                    "step-by-context": "A decode step by the length of its requests",
                    "step-by-batch": "A decode step by the number of its requests",
                    "share-of-floor": "How much of the step physics asks for",
                }[name],
                subtitle=_subtitle(there),
                x_label=label,
                y_label=words,
                percent=y == "floor_share",
                spread=("q1_ms", "q3_ms") if y == "median_ms" else None,
            )
        except PlotRefused as refused:
            notes.append(f"The figure {name} is left out: {refused}.")
            continue
        figure.caption = (
            "The band holds the middle half of the steps."
            if y == "median_ms"
            else (f"Floor: {some(dict.fromkeys(there['floor_machine']))}.")
        )
        found.append(figure)
    return found, notes


def _label(axis: str, value: object) -> str:
    return short(str(value)) if axis in ("model", "admission") else f"{axis.replace('_', ' ')} {value}"


def _subtitle(rows: pd.DataFrame) -> str:
    """What all rows have in common: the engine and the machine."""
    facts = [rows[column].dropna() for column in ("engine_used", "node")]
    return "; ".join(some(dict.fromkeys(map(html.unescape, values))) for values in facts if len(values))
