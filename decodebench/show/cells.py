"""What a notebook's cells show: a table, a verdict, the provenance of what was measured."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from pkgutil import resolve_name

from decodebench.errors import DecodebenchError
from decodebench.measure.provenance import provenance as measured_on
from decodebench.models.load import KnownModels, list_models
from decodebench.show.look import BLUE, GREEN, VERMILLION
from decodebench.words import plain_number, runs


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
            f'<th scope="col"{_align(n)}{self._tooltip(str(c))}>{html.escape(_heading(str(c)))}</th>'
            for c, n in zip(self.frame.columns, numeric)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f"<td{_align(n, cell)}>{html.escape(cell)}</td>"
                for cell, n in zip(map(self._cell, map(str, self.frame.columns), row), numeric)
            )
            + "</tr>"
            for row in self.frame.itertuples(index=False)
        )
        caption = f"<caption>{html.escape(self.caption)}</caption>" if self.caption else ""
        return f'<table class="db-table">{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'

    def _tooltip(self, column: str) -> str:
        meaning = MEANINGS.get(column) or self.frame.attrs.get("meanings", {}).get(column)
        return f' title="{html.escape(meaning, quote=True)}"' if meaning else ""

    def _cell(self, column: str, value) -> str:
        import pandas as pd

        if value is None or (not isinstance(value, str | list | tuple) and pd.isna(value)):
            return "–"
        if column in self.formats:
            return self.formats[column].format(value)
        if column.endswith(("kind", "kinds", "group_block_sizes")):
            return runs(str(value).replace("_", " "))
        return plain_number(value, column)


def table(frame, name: str, caption: str = "", formats: Mapping[str, str] | None = None) -> Table:
    """Show a DataFrame. ``name`` names its CSV; ``formats``: column → format string such as ``"{:.1%}"``."""
    return Table(frame, name, caption, formats)


def default_device(asked: str = "auto") -> str:
    """``cuda`` where there is one, else ``cpu``; any other device as asked for.

    Raises ``CardUnusable`` where there is a card that torch cannot use.
    """
    return resolve_name("decodebench.measure.card:default_device")(asked)


#: columns whose own name says too little → their heading
HEADINGS = {
    "concurrency": "requests that fit",
    "start_bytes": "one token reserves",
    "request_bytes": "a request reserves",
    "slope_bytes": "a further token",
    "required": "pages read",
    "filled": "of them filled",
    "zeroed": "zeroed on purpose",
    "wrong": "wrong bytes",
    "uncovered": "never filled",
    "stray": "written, nobody's",
    "clobbered": "written, another's",
    "waste_tail": "left over",
    "waste_reserve": "reserved in flight",
    "waste_unread": "no step reads",
    "median_s": "median step",
    "q1_s": "first quartile",
    "q3_s": "third quartile",
    "fill_bytes": "bytes written",
    "fill_seconds": "time of the fill",
}
#: what the columns of an audit's tables mean; a sweep's table brings its own
MEANINGS = {
    "required": "pages (one block of one layer) that the next decode step reads",
    "filled": "of these, pages that hold the values asked for",
    "zeroed": "of these, pages zeroed on purpose: packed formats, rings",
    "wrong": "of these, pages that hold other bytes",
    "uncovered": "of these, pages that nobody filled",
    "stray": "pages written that no request owns, or in which nothing is stood in for",
    "clobbered": "pages written that belong to somebody else",
    "coverage": "pages filled or zeroed on purpose, of those that are read",
}


def _heading(column: str) -> str:
    if column in HEADINGS:
        return HEADINGS[column]
    name = column if column.endswith("per_s") else column.removesuffix("_bytes").removesuffix("_s")
    return name.replace("gb_per_s", "GB/s").replace("_", " ")


def _align(numeric: bool, text: str = "") -> str:
    """Numbers right; short words in one piece wherever the table stands, on paper too."""
    if numeric:
        return ' class="number" style="text-align:right"'
    return ' class="word" style="text-align:left"' if 0 < len(text) <= 12 else ' style="text-align:left"'


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


class Note:
    """A sentence in place of a cell that cannot apply to what was asked for."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _repr_mimebundle_(self, include=None, exclude=None):
        data = {"text/html": f'<p class="db-note">{html.escape(self.text)}</p>', "text/plain": self.text}
        return data, {"decodebench": {"role": "note", "text": self.text}}


def note(text: str) -> Note:
    """Show a sentence where a figure or a number cannot be."""
    return Note(" ".join(str(text).split()))


def attempt(what: str, function: Callable, *args, **kwargs):
    """What the function returns; where this library refuses it, a sentence that says so: the page goes on."""
    try:
        return function(*args, **kwargs)
    except DecodebenchError as error:
        return note(f"{what} is left out: {error}")


class Provenance:
    """Versions, device and settings, as the last cell of every notebook shows them."""

    def __init__(self, facts: Mapping[str, object]) -> None:
        self.facts = dict(facts)

    def _repr_mimebundle_(self, include=None, exclude=None):
        flat = {k: v for k, v in self.facts.items() if v not in (None, {}, [])}
        rows = "".join(
            f'<tr><th scope="row" style="text-align:left">{html.escape(key.replace("_", " "))}</th>'
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
        facts = measured_on(settings, device=str(settings.get("device") or "cpu"))
        return Provenance(facts | {"configs": config_sources(settings)})
    runs = stored.attrs.get("provenance", stored) if hasattr(stored, "attrs") else stored
    newest = dict(runs[-1]) if isinstance(runs, list) else dict(runs)
    return Provenance({k: v for k, v in newest.items() if k != "run"})


def config_sources(settings: Mapping[str, object]) -> dict[str, str]:
    """Where the values of every known model among a notebook's settings come from."""
    named: list[str] = []
    for value in settings.values():
        named += [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, str)]
    known = KnownModels(name for name in list_models() if name in named)
    return {name: source for name, _, source in known.facts()}


def _flat(value) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} = {_flat(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_flat, value))
    return str(value)
