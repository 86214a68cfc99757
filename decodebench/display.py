"""What a notebook shows: charts with alt text, tables with CSV, a verdict, provenance; and their one look.

Each of the four shows itself in JupyterLab and carries what an export needs besides (a name for its
file, alt text, the raw numbers) in its output's metadata, under the key ``decodebench``.
"""

from __future__ import annotations

import html
import io
from collections.abc import Mapping
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


class Table:
    """A DataFrame as people read it; the export keeps the raw numbers as CSV."""

    def __init__(self, frame, name: str, caption: str = "", formats: Mapping[str, str] | None = None) -> None:
        self.frame, self.name, self.caption, self.formats = frame, name, caption, dict(formats or {})

    def _repr_mimebundle_(self, include=None, exclude=None):
        data = {
            "text/html": self.html(),
            "text/plain": self.frame.to_string(),
            "text/csv": self.frame.to_csv(index=False),
        }
        return data, {"decodebench": {"role": "table", "name": self.name, "caption": self.caption}}

    def html(self) -> str:
        import pandas as pd

        numeric = [
            pd.api.types.is_numeric_dtype(d) and not pd.api.types.is_bool_dtype(d) for d in self.frame.dtypes
        ]
        head = "".join(
            f"<th{_align(n)}>{html.escape(_heading(str(c)))}</th>"
            for c, n in zip(self.frame.columns, numeric)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f"<td{_align(n)}>{html.escape(self._cell(str(c), v))}</td>"
                for c, v, n in zip(self.frame.columns, row, numeric)
            )
            + "</tr>"
            for row in self.frame.itertuples(index=False)
        )
        caption = f"<caption>{html.escape(self.caption)}</caption>" if self.caption else ""
        return f'<table class="db-table">{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'

    def _cell(self, column: str, value) -> str:
        import pandas as pd

        if value is None or (not isinstance(value, str | list | tuple) and pd.isna(value)):
            return "–"
        if column in self.formats:
            return self.formats[column].format(value)
        if column.endswith(("kind", "kinds", "group_block_sizes")):
            return _runs(str(value).replace("_", " "))
        return plain_number(value, column)


def table(frame, name: str, caption: str = "", formats: Mapping[str, str] | None = None) -> Table:
    """Show a DataFrame. ``name`` names its CSV; ``formats``: column → format string such as ``"{:.1%}"``."""
    return Table(frame, name, caption, formats)


#: endings of column names that say how a number is read
_SHARES = ("coverage", "share", "waste", "_loss")


def plain_number(value, column: str = "") -> str:
    """A number as people read it: thousands apart, three digits, shares in percent, bytes and seconds with
    units.
    """
    if isinstance(value, bool) or not hasattr(value, "__float__") or isinstance(value, str):
        return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    if column.startswith("waste_") or column.endswith(_SHARES):
        return share_text(float(value))
    if column.endswith(("_bytes", "bytes_per_block")) or column in ("bytes", "bytes_moved"):
        return bytes_text(float(value))
    if column.endswith("_s") or column.endswith("seconds"):
        return seconds_text(float(value))
    number = float(value)
    if number == int(number) and abs(number) < 1e15:
        return f"{int(number):,}"
    return f"{number:,.2f}" if abs(number) >= 10 else f"{number:.3g}"


def share_text(share: float) -> str:
    """A share in percent that says 100 % only where nothing is missing, and 0 % only where nothing is
    there.
    """
    if share in (0, 1):
        return f"{share:.0%}"
    return f"{min(max(share, 0.001), 0.999):.1%}" if 0 < share < 1 else f"{share:.1%}"


def seconds_text(seconds: float) -> str:
    """A duration with a readable unit: 0.00123 → ``1.23 ms``."""
    from decodebench.timing import format_seconds

    return format_seconds(seconds)


def bytes_text(count: float) -> str:
    """Bytes with a binary unit: 1536 → ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:,.0f} {unit}" if count == int(count) else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def _runs(text: str) -> str:
    """``16,32,32,32`` as ``16, 3 × 32``."""
    from itertools import groupby

    counted = [(item, len(list(same))) for item, same in groupby(text.split(","))]
    return ", ".join(item if n == 1 else f"{n} × {item}" for item, n in counted)


def default_device(asked: str = "auto") -> str:
    """``cuda`` where there is one, else ``cpu``; any other device as asked for."""
    if asked != "auto":
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _heading(column: str) -> str:
    name = column if column.endswith("per_s") else column.removesuffix("_bytes").removesuffix("_s")
    return name.replace("gb_per_s", "GB/s").replace("_", " ")


def _align(numeric: bool) -> str:
    return ' class="number" style="text-align:right"' if numeric else ' style="text-align:left"'


class Verdict:
    """The answer in one line; an export lifts it to the top of its page and into the index."""

    def __init__(self, text: str, ok: bool | None) -> None:
        self.text, self.ok = text, ok

    def _repr_mimebundle_(self, include=None, exclude=None):
        colour = {True: GREEN, False: VERMILLION, None: BLUE}[self.ok]
        box = f"border-left:5px solid {colour};padding:.6em 1em;font-size:1.05em;margin:.4em 0"
        data = {
            "text/html": f'<div class="db-verdict" style="{box}"><b>{html.escape(self.text)}</b></div>',
            "text/plain": self.text,
        }
        return data, {"decodebench": {"role": "verdict", "text": self.text, "ok": self.ok}}


def verdict(text: object, ok: bool | None = None) -> Verdict:
    """Show the notebook's answer. ``ok``: green, or red where False; None for an answer that is neither."""
    return Verdict(" ".join(str(text).split()), ok)


class Provenance:
    """Versions, device and settings, as the last cell of every notebook shows them."""

    def __init__(self, facts: Mapping[str, object]) -> None:
        self.facts = dict(facts)

    def _repr_mimebundle_(self, include=None, exclude=None):
        flat = {k: v for k, v in self.facts.items() if v not in (None, {}, [])}
        rows = "".join(
            f'<tr><th style="text-align:left">{html.escape(key.replace("_", " "))}</th>'
            f'<td style="text-align:left">{html.escape(_flat(value))}</td></tr>'
            for key, value in flat.items()
        )
        data = {
            "text/html": f'<table class="db-table db-provenance"><tbody>{rows}</tbody></table>',
            "text/plain": "\n".join(f"{key}: {_flat(value)}" for key, value in flat.items()),
        }
        return data, {"decodebench": {"role": "provenance", "facts": {k: _flat(v) for k, v in flat.items()}}}


def provenance(stored=None, **settings) -> Provenance:
    """Show what made the figures: this machine and ``settings``, or what a ``stored`` sweep was made with."""
    if stored is None:
        from decodebench import timing

        return Provenance(timing.provenance(settings))
    runs = stored.attrs.get("provenance", stored) if hasattr(stored, "attrs") else stored
    newest = dict(runs[-1]) if isinstance(runs, list) else dict(runs)
    return Provenance({k: v for k, v in newest.items() if k != "run"})


def _flat(value) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} = {_flat(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_flat, value))
    return str(value)
