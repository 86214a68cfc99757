"""What a notebook shows: charts with alt text, tables with CSV, a verdict, provenance; and their one look.

Each of the four shows itself in JupyterLab and carries what an export needs besides (a name for its
file, alt text, the raw numbers) in its output's metadata, under the key ``decodebench``.
"""

from __future__ import annotations

import io
from functools import wraps

import matplotlib
from matplotlib.figure import Figure

# Inks are chosen to read on a light page, and are told apart by value: an export swaps each for
# its counterpart to make the same drawing readable on a dark one.
INK, MUTED, FAINT, EMPTY = "#1f2429", "#5b6570", "#d3d8de", "#eceff2"
DARK_INKS = {INK: "#e8eaed", MUTED: "#a4adb7", FAINT: "#434b55", EMPTY: "#2a3038", "#0072b2": "#2f8fe0"}

#: Okabe and Ito's palette without its yellow, which no light page can show; ordered so that
#: neighbours differ in lightness as well
BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
)
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION)
#: a second channel for those who cannot tell the first
MARKERS = ("o", "s", "^", "D", "v", "P")

STYLE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
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
        """The drawing as SVG with a transparent ground, in the inks of a light or of a dark page."""
        buffer = io.StringIO()
        self.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        text = buffer.getvalue()
        return darkened(text) if dark else text

    @styled
    def png(self, dpi: int = 144) -> bytes:
        """The drawing as PNG on white."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=dpi, facecolor="white")
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


def darkened(svg: str) -> str:
    """The same SVG in the inks of a dark page."""
    for light, dark in DARK_INKS.items():
        svg = svg.replace(light, dark)
    return svg


def chart(
    name: str, title: str, *, rows: int = 1, columns: int = 1, size=(8.2, 4.0), subtitle: str = "", **grid
):
    """An empty ``Chart`` with its title, and its axes as ``Figure.subplots`` gives them. Call under
    ``styled``.
    """
    figure = Chart(figsize=size, name=name)
    axes = figure.subplots(rows, columns, **grid)
    heading = figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, fontweight="bold", wrap=True)
    if subtitle:
        heading.set_text(title + "\n")
        figure.text(
            0.012, heading.get_position()[1] - 0.30 / size[1], subtitle, color=MUTED, va="top", fontsize=9.5
        )
    return figure, axes


# -- tables, verdicts, provenance -----------------------------------------------------------------
