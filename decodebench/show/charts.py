"""Building blocks of every figure: lines, bars, bars in panels. One look, numbers in words, alt text made
from data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log2

from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MultipleLocator, NullLocator

from decodebench.show.look import INK, MARKERS, MUTED, PALETTE, SKY, Chart, chart, styled
from decodebench.words import bytes_text, plain_number, share_text


@styled
def lines(
    frame,
    x: str,
    y: str,
    series: str,
    *,
    name: str,
    title: str,
    subtitle: str = "",
    x_label: str = "",
    y_label: str = "",
    log_x: bool = True,
    log_y: bool = False,
    percent: bool = False,
    spread: tuple[str, str] = (),
    limit: tuple[float, str] | None = None,
    size=(8.2, 4.0),
) -> Chart:
    """One line a value of ``series``, labelled at its end; ``spread`` names columns of a band, ``limit``
    draws a level.
    """
    figure, axes = chart(name, title, subtitle=subtitle, size=size)
    said = []
    for i, (label, part) in enumerate(frame.groupby(series, sort=False, dropna=False)):
        part = part.dropna(subset=[y]).sort_values(x)
        if part.empty:
            continue
        xs, ys = part[x].astype(float).tolist(), part[y].astype(float).tolist()
        colour, marker = PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]
        axes.plot(xs, ys, color=colour, marker=marker, label=str(label))
        if spread:
            axes.fill_between(
                xs, *(part[s].astype(float).tolist() for s in spread), color=colour, alpha=0.18, lw=0
            )
        said.append(
            f"{label}: {_number(ys[0], percent)} at {plain_number(xs[0])} to {_number(ys[-1], percent)} at "
            f"{plain_number(xs[-1])}"
        )
    if limit:
        axes.axhline(limit[0], color=MUTED, linestyle="--", linewidth=1.2)
        axes.annotate(
            limit[1],
            (1, limit[0]),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            color=MUTED,
            fontsize=9,
        )
    _scales(axes, sorted(set(frame[x].astype(float))), log_x, log_y, percent)
    axes.set_xlabel(x_label or x)
    axes.set_ylabel(y_label or y)
    axes.margins(y=0.08)
    if len(said) > 1:
        handles, labels = axes.get_legend_handles_labels()
        columns = max(1, min(len(labels), 82 // (max(map(len, labels)) + 8)))
        figure.legend(handles, labels, loc="outside lower left", ncols=columns)
    figure.alt = f"{title}. Line chart of {y_label or y} against {x_label or x}. " + "; ".join(said) + "."
    return figure


@styled
def bars(
    frame,
    category: str,
    values: Mapping[str, str],
    *,
    name: str,
    title: str,
    subtitle: str = "",
    x_label: str = "",
    stacked: bool = False,
    percent: bool = False,
    log: bool = False,
    colours: Sequence[str] = PALETTE,
    as_text=None,
    size: tuple[float, float] | None = None,
) -> Chart:
    """Horizontal bars, a row a ``category``; ``values``: column → label. Numbers stand at the bars' ends."""
    on_axis = as_text or (lambda v: f"{100 * v:.3g}%" if percent else plain_number(v))
    as_text = as_text or (lambda v: _number(v, percent))
    names = frame[category].astype(str).tolist()
    thickness = 0.72 if stacked or len(values) == 1 else 0.84 / len(values)
    height = 1.45 + len(names) * (0.36 if stacked else max(0.36, 0.24 * len(values)))
    figure, axes = chart(name, title, subtitle=subtitle, size=size or (8.2, height))
    left = [0.0] * len(names)
    for i, (column, label) in enumerate(values.items()):
        numbers = frame[column].astype("Float64").fillna(0).astype(float).tolist()
        if stacked:
            places = list(range(len(names)))
            axes.barh(places, numbers, thickness, left=left, color=colours[i % len(colours)], label=label)
            left = [a + b for a, b in zip(left, numbers)]
        else:
            shift = (i - (len(values) - 1) / 2) * thickness
            places = [j + shift for j in range(len(names))]
            drawn = axes.barh(places, numbers, thickness * 0.92, color=colours[i % len(colours)], label=label)
            missing = frame[column].isna().tolist()
            texts = ["" if m else as_text(v) for v, m in zip(numbers, missing)]
            axes.bar_label(drawn, texts, padding=3, fontsize=8.5, color=INK)
    if stacked:
        for place, total in enumerate(left):
            axes.annotate(
                as_text(total),
                (total, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
            )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
    if log:
        axes.set_xscale("log")
    elif as_text is bytes_text:  # round numbers of bytes are powers of two
        axes.xaxis.set_major_locator(MultipleLocator(2.0 ** floor(log2(max(axes.get_xlim()[1], 4) / 4))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: on_axis(v)))
    if percent:
        axes.set_xlim(0, max(axes.get_xlim()[1], 0.01))
    axes.set_xlabel(x_label)
    if len(values) > 1:
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(values))
        )
    rows = (
        f"{label} "
        f"{', '.join(f'{text} {_number(v, percent)}' for v, text in zip(row, values.values()) if v == v)}"
        for label, row in zip(
            names, frame[list(values)].astype("Float64").astype(float).itertuples(index=False)
        )
    )
    figure.alt = f"{title}. Bar chart of {x_label}. " + "; ".join(rows) + "."
    return figure


@styled
def bar_panels(
    table,
    category: str,
    column: str,
    panel: str,
    *,
    name: str,
    title: str,
    subtitle: str = "",
    x_label: str = "",
    percent: bool = False,
    as_text=None,
    highlight: Sequence[str] = (),
    size: tuple[float, float] | None = None,
) -> Chart:
    """A panel a value of ``panel``, a bar a ``category``, each panel with its own scale; a refused case says
    so.

    ``highlight`` names categories drawn in the first colour, the others in the second.
    """
    as_text = as_text or (lambda v: _number(v, percent))
    categories = list(dict.fromkeys(table[category].astype(str)))
    panels = list(dict.fromkeys(table[panel].astype(str)))
    figure, axes = chart(
        name,
        title,
        columns=len(panels),
        subtitle=subtitle,
        sharey=True,
        squeeze=False,
        size=size or (8.6, 1.6 + 0.36 * len(categories)),
    )
    said = []
    for axis, label in zip(axes[0], panels):
        rows = {
            str(row[category]): row for row in table[table[panel].astype(str) == label].to_dict("records")
        }
        values = {c: value_of(rows.get(c), column) for c in categories}
        largest = max((v for v in values.values() if v is not None), default=1.0) or 1.0
        for place, c in enumerate(categories):
            value, colour = values[c], PALETTE[0] if not highlight or c in highlight else SKY
            if value is not None:
                axis.barh(place, value, 0.72, color=colour)
            text = as_text(value) if value is not None else ("refused" if c in rows else "")
            axis.annotate(
                text,
                (value or 0, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=INK if value is not None else MUTED,
            )
        axis.set_title(label)
        axis.set_xlim(0, 1.32 * (1 if percent and largest > 0.9 else largest))
        axis.xaxis.set_major_formatter(
            FuncFormatter(lambda v, _: f"{100 * v:.3g}%" if percent else plain_number(v))
        )
        axis.locator_params(axis="x", nbins=4)
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(x_label)
        shown = ", ".join(
            f"{c} {as_text(v) if v is not None else 'refused'}" for c, v in values.items() if c in rows
        )
        said.append(f"{label}: {shown}")
    axes[0][0].set_yticks(range(len(categories)), categories)
    axes[0][0].set_ylim(len(categories) - 0.4, -0.6)
    figure.alt = f"{title}. Bars of {x_label}. " + "; ".join(said) + "."
    return figure


def value_of(row: Mapping | None, column: str) -> float | None:
    value = None if row is None else row[column]
    return None if value is None or value != value or not hasattr(value, "__float__") else float(value)


def _scales(axes, xs: Sequence[float], log_x: bool, log_y: bool, percent: bool) -> None:
    if log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(_apart(xs)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: plain_number(round(v))))
    if log_y:
        axes.set_yscale("log")
    elif not percent:
        axes.set_ylim(bottom=0)
    if percent:
        axes.set_ylim(0, max(1.04, 1.04 * axes.dataLim.y1))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
    elif log_y:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: plain_number(v)))


def _apart(values: Sequence[float], count: int = 9) -> list[float]:
    """Those of the values that a logarithmic axis has room to label."""
    kept: list[float] = []
    for value in values:
        if not kept or value / kept[-1] >= 0.98 * (values[-1] / values[0]) ** (1 / count):
            kept.append(value)
    return kept


def _number(value: float, percent: bool = False) -> str:
    return share_text(value) if percent else plain_number(value)
