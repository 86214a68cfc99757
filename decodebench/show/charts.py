"""Building blocks of every figure: lines, bars, bars in panels. One look, numbers in words, alt text made
from data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log2

from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    MultipleLocator,
    NullLocator,
)

from decodebench.errors import DecodebenchError
from decodebench.show.look import (
    INK,
    MUTED,
    PALETTE,
    SKY,
    Chart,
    bar_style,
    chart,
    legend,
    line_style,
    panels,
    styled,
)
from decodebench.words import bytes_text, plain_number, seconds_text, share_text, short


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
    refuse_mixed(frame, x, series, y)
    figure, axes = chart(name, title, subtitle=subtitle, size=size)
    said = []
    for i, (label, part) in enumerate(frame.groupby(series, sort=False, dropna=False)):
        part = part.dropna(subset=[y]).sort_values(x)
        if part.empty:
            continue
        xs, ys = part[x].astype(float).tolist(), part[y].astype(float).tolist()
        style = line_style(i)
        axes.plot(xs, ys, label=short(label, 46), **style)
        if spread:
            axes.fill_between(
                xs, *(part[s].astype(float).tolist() for s in spread), color=style["color"], alpha=0.18, lw=0
            )
        ends = f"{_number(ys[0], percent)} at {plain_number(xs[0])}"
        if len(xs) > 1:
            ends += f" to {_number(ys[-1], percent)} at {plain_number(xs[-1])}"
        said.append(f"{label}: {ends}")
    if limit:
        axes.axhline(limit[0], color=MUTED, linestyle="--", linewidth=1.2)
        axes.annotate(
            limit[1],
            (0, limit[0]),
            xycoords=("axes fraction", "data"),
            xytext=(6, -6),
            textcoords="offset points",
            ha="left",
            va="top",
            color=MUTED,
            fontsize=9,
        )
    _scales(axes, sorted(set(frame[x].astype(float))), log_x, log_y, percent)
    axes.set_xlabel(x_label or x)
    axes.set_ylabel(y_label or y)
    axes.margins(y=0.08)
    if len(said) > 1:
        legend(figure, *axes.get_legend_handles_labels())
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
    names = [short(label, 44) for label in frame[category].astype(str)]
    thickness = 0.72 if stacked or len(values) == 1 else 0.84 / len(values)
    height = 1.45 + len(names) * (0.36 if stacked else max(0.36, 0.24 * len(values)))
    figure, axes = chart(name, title, subtitle=subtitle, size=size or (8.2, height))
    left = [0.0] * len(names)
    for i, (column, label) in enumerate(values.items()):
        numbers = frame[column].astype("Float64").fillna(0).astype(float).tolist()
        if stacked:
            places = list(range(len(names)))
            axes.barh(places, numbers, thickness, left=left, label=label, **bar_style(i, colours))
            left = [a + b for a, b in zip(left, numbers)]
        else:
            shift = (i - (len(values) - 1) / 2) * thickness
            places = [j + shift for j in range(len(names))]
            drawn = axes.barh(places, numbers, thickness * 0.92, label=label, **bar_style(i, colours))
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
        legend(figure, *axes.get_legend_handles_labels())
    numbers = frame[list(values)].astype("Float64").astype(float).itertuples(index=False)
    rows = (
        f"{label} " + ", ".join(f"{text} {as_text(v)}" for v, text in zip(row, values.values()) if v == v)
        for label, row in zip(names, numbers)
    )
    figure.alt = f"{title}. Bars: {x_label}. " + "; ".join(rows) + "."
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
    """A panel a value of ``panel``, a bar a ``category``; a refused case says so.

    Shares have one axis for all panels; other numbers too where they are of one size, else each panel
    has its own scale and the figure says so. ``highlight`` names categories drawn in the first colour, the
    others in a paler one. Seconds get the unit that suits them.
    """
    scale, unit = unit_of(table[column]) if as_text is seconds_text else (1.0, "")
    as_text = as_text or (lambda v: _number(v, percent))
    categories = list(dict.fromkeys(table[category].astype(str)))
    labels = list(dict.fromkeys(table[panel].astype(str)))
    rows_of = {
        label: {str(r[category]): r for r in table[table[panel].astype(str) == label].to_dict("records")}
        for label in labels
    }
    largest = {
        label: max((v for r in rows.values() if (v := value_of(r, column)) is not None), default=0.0)
        for label, rows in rows_of.items()
    }
    common = shared_limit(list(largest.values()), percent)
    x_label += f" ({unit})" if unit else ""
    figure, axes = panels(
        name,
        title,
        labels,
        subtitle=subtitle if common or len(labels) == 1 else f"{subtitle}; each panel has its own scale",
        height=size[1] if size else 1.25 + 0.34 * len(categories),
    )
    said = []
    for axis, label in zip(axes, labels):
        values = {c: value_of(rows_of[label].get(c), column) for c in categories}
        for place, c in enumerate(categories):
            value = values[c]
            style = bar_style(0) if not highlight or c in highlight else bar_style(0, (SKY,))
            if value is not None:
                axis.barh(place, value / scale, 0.72, **style)
            text = as_text(value) if value is not None else ("refused" if c in rows_of[label] else "")
            axis.annotate(
                text,
                ((value or 0) / scale, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=INK if value is not None else MUTED,
            )
        axis.set_xlim(0, 1.36 * ((common or largest[label] or 1.0) / scale))
        axis.xaxis.set_major_locator(
            FixedLocator([0, 0.5, 1]) if percent else MaxNLocator(nbins=4, prune="upper")
        )
        axis.xaxis.set_major_formatter(
            FuncFormatter(lambda v, _: f"{100 * v:.3g}%" if percent else plain_number(v))
        )
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="y", visible=False)
        shown = ", ".join(
            f"{c} {as_text(v) if v is not None else 'refused'}"
            for c, v in values.items()
            if c in rows_of[label]
        )
        said.append(f"{label}: {shown}")
    if len(axes) == 1:
        axes[0].set_xlabel(x_label)
    else:  # once for all panels: side by side the words would run into each other
        figure.supxlabel(x_label, fontsize=10)
    axes[0].set_yticks(range(len(categories)), [short(c, 24) for c in categories])
    axes[0].set_ylim(len(categories) - 0.4, -0.6)
    figure.alt = f"{title}. Bars: {x_label}. " + "; ".join(said) + "."
    return figure


def shared_limit(largest: Sequence[float], percent: bool) -> float | None:
    """The end of an axis that all panels share; None where their numbers are of too different a size."""
    there = [value for value in largest if value > 0]
    if percent:
        return max(1.0, *there) if there else 1.0
    if not there or max(there) > 8 * min(there):
        return None
    return max(there)


def unit_of(seconds) -> tuple[float, str]:
    """The unit that suits durations, as a factor and its name."""
    largest = max((float(v) for v in seconds.dropna()), default=1.0)
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if largest >= factor:
            return factor, unit
    return 1e-9, "ns"


def refuse_mixed(frame, x: str, series: str, y: str) -> None:
    """Raises ``PlotRefused`` where a line would have several points at one place: names what to filter by."""
    there = frame[frame[y].notna()]
    twice = there[there.duplicated([series, x], keep=False)]
    if twice.empty:
        return
    one = twice[(twice[series] == twice[series].iloc[0]) & (twice[x] == twice[x].iloc[0])]
    mixed = next(
        (c for c in one.columns if c not in (x, y, series, *CHANCE) and one[c].nunique(dropna=False) > 1),
        None,
    )
    if mixed is None:
        raise PlotRefused(
            f"{len(one)} rows have {series} {one[series].iloc[0]} at {x} {one[x].iloc[0]}: keep one"
        )
    values = ", ".join(map(str, list(dict.fromkeys(one[mixed]))[:3]))
    raise PlotRefused(
        f"the table mixes several {mixed} ({values}): filter it to one, or draw a line each with series={mixed!r}"
    )


class PlotRefused(DecodebenchError):
    """A table that this figure cannot show without misleading: names the column to filter by."""


#: columns that differ from run to run: no setting by which to filter
CHANCE = ("case_id", "run", "seconds", "verdict", "status", "reason")


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
