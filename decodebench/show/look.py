"""What a notebook shows: charts with alt text, tables with CSV, a verdict, provenance; and their one look.

Each of the four shows itself in JupyterLab and carries what an export needs besides (a name for its
file, alt text, the raw numbers) in its output's metadata, under the key ``decodebench``.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from functools import wraps

import matplotlib
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from decodebench.words import short

# Inks are chosen to read on a light page, and are told apart by value: an export swaps each for
# its counterpart to make the same drawing readable on a dark one. Every mark keeps a contrast of 3 on
# its ground, text 4.5 (WCAG 2), and neighbours stay apart for eyes without red or green cones.
GROUND, INK, MUTED, FAINT, EMPTY = "#ffffff", "#1f2429", "#5b6570", "#d3d8de", "#eceff2"

#: after Okabe and Ito, darkened for a light page; ordered so that neighbours differ in lightness as well
BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE = (
    "#005f9e",
    "#c98000",
    "#009e73",
    "#b03a00",
    "#3d9bd1",
    "#b5659a",
)
VIOLET, GREY = "#8b3fbf", "#77828e"
DARK_INKS = {
    GROUND: "#16191d",
    INK: "#e8eaed",
    MUTED: "#a4adb7",
    FAINT: "#434b55",
    EMPTY: "#2a3038",
    BLUE: "#2f8fe0",
    ORANGE: "#f2b33d",
    VERMILLION: "#e8602a",
    SKY: "#9ad6f7",
    PURPLE: "#cc79a7",
    VIOLET: "#b07be0",
}
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION)
#: a second channel for those who cannot tell the first
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)))
#: patterns of bars, beside their colours
HATCHES = ("", "////", "----", "\\\\\\\\", "xxxx", "||||")


def line_style(i: int) -> dict:
    """Colour, marker and dash of the i-th line: no two lines of a figure share all three, or two of them."""
    turn = i // len(PALETTE)
    return {
        "color": PALETTE[i % len(PALETTE)],
        "marker": MARKERS[(i + turn) % len(MARKERS)],
        "linestyle": DASHES[turn % len(DASHES)],
    }


def bar_style(i: int, colours: Sequence[str] = PALETTE) -> dict:
    """Colour and pattern of the i-th of several bars."""
    turn = i // len(colours)
    return {
        "color": colours[i % len(colours)],
        "hatch": HATCHES[(i + turn) % len(HATCHES)],
        "edgecolor": GROUND,
        "linewidth": 0,
    }


STYLE = {
    "figure.facecolor": GROUND,
    "axes.facecolor": "none",
    "savefig.facecolor": GROUND,
    "hatch.linewidth": 0.7,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": matplotlib.cycler(color=PALETTE),
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "svg.hashsalt": "decodebench",
    "figure.constrained_layout.h_pad": 0.06,
}


def styled(function):
    """Run a plotting function under the one look."""

    @wraps(function)
    def wrapper(*args, **kwargs):
        with matplotlib.rc_context(STYLE):
            return function(*args, **kwargs)

    return wrapper


class Chart(Figure):
    """A matplotlib Figure that knows its name, its alt text and its caption.

    ``name`` names its files in an export, ``alt`` says in words what the picture shows.
    """

    def __init__(self, *args, name: str = "figure", alt: str = "", caption: str = "", **kwargs) -> None:
        super().__init__(*args, layout=kwargs.pop("layout", "constrained"), **kwargs)
        self.name, self.alt, self.caption = name, alt, caption

    @styled
    def svg(self, dark: bool = False) -> str:
        """The drawing as SVG on an opaque ground, in the inks of a light or of a dark page."""
        buffer = io.StringIO()
        self.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        text = slim(buffer.getvalue())
        return darkened(text) if dark else text

    @styled
    def png(self, dpi: int = 144) -> bytes:
        """The drawing as PNG on white."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=dpi, facecolor=GROUND)
        return buffer.getvalue()

    def _repr_mimebundle_(self, include=None, exclude=None):
        import base64

        data = {
            "image/png": base64.b64encode(self.png()).decode(),
            "image/svg+xml": self.svg(),
            "text/plain": self.alt or f"chart {self.name}",
        }
        facts = {"role": "chart", "name": self.name, "alt": self.alt, "caption": self.caption}
        return data, {"decodebench": facts}


def slim(svg: str) -> str:
    """The same SVG with its coordinates to a hundredth of a point, and without the metadata."""
    rounded = re.sub(
        r'\bd="[^"]*"', lambda path: re.sub(r"\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}", path[0]), svg
    )
    return re.sub(r"\s*<metadata>.*?</metadata>", "", rounded, flags=re.S)


def darkened(svg: str) -> str:
    """The same SVG in the inks of a dark page."""
    return re.sub(r"#[0-9a-f]{6}\b", lambda ink: DARK_INKS.get(ink[0], ink[0]), svg)


def chart(
    name: str, title: str, *, rows: int = 1, columns: int = 1, size=(8.2, 4.0), subtitle: str = "", **grid
):
    """An empty ``Chart`` with its title, and its axes as ``Figure.subplots`` gives them. Call under
    ``styled``. Title and subtitle wrap, and the figure grows by their further lines.
    """
    width = size[0]
    heads = textwrap.wrap(title, int(8.3 * width)) or [""]
    below = textwrap.wrap(subtitle, int(14 * width))
    further = LINE * (len(heads) - 1 + max(0, len(below) - 1))
    height = size[1] + further
    figure = Chart(figsize=(width, height), name=name)
    axes = figure.subplots(rows, columns, **grid)
    text = "\n".join(heads + [""] * len(below))
    figure.suptitle(text, x=0.012, ha="left", fontsize=12.5, fontweight="bold", linespacing=1.4)
    if below:
        # inches below the top, whatever a legend adds to the height afterwards
        down = ScaledTranslation(0, -(0.34 + LINE * (len(heads) - 1)), figure.dpi_scale_trans)
        figure.text(
            0.012,
            1,
            "\n".join(below),
            color=MUTED,
            va="top",
            fontsize=9.5,
            linespacing=1.5,
            transform=figure.transFigure + down,
        )
    return figure, axes


def panels(name: str, title: str, labels: Sequence[str], *, height: float, subtitle: str = "", **grid):
    """A chart with a panel a label, three in a row at most; ``height`` in inches of one row of panels.

    Returns the chart and the panels' axes; those of one row share their categories.
    """
    columns = min(3, len(labels)) or 1
    rows = -(-len(labels) // columns) or 1
    figure, axes = chart(
        name,
        title,
        rows=rows,
        columns=columns,
        subtitle=subtitle,
        size=(8.6, height * rows + 0.5),
        sharey=True,
        squeeze=False,
        **grid,
    )
    flat = list(axes.flat)
    for axis in flat[len(labels) :]:
        axis.set_visible(False)
    for axis, label in zip(flat, labels):
        axis.set_title("\n".join(textwrap.wrap(short(label, 50), 26 if columns > 1 else 80)))
    return figure, flat[: len(labels)]


def legend(figure, handles: Sequence, labels: Sequence[str]) -> None:
    """A legend under a figure, in as many columns as its width holds, the figure made taller for its rows."""
    widest = max(map(len, labels), default=1)
    columns = max(1, min(len(labels), int(10.3 * figure.get_figwidth()) // (widest + 7)))
    figure.legend(handles, labels, loc="outside lower left", ncols=columns)
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.21 * max(0, rows - 1))


#: inches of one further line of a title
LINE = 0.243
