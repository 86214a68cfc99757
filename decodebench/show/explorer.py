"""The explorer: choose a layout, a batch and a fault, and see every page of a small pool.

    from decodebench.explorer import explore
    explore("jamba-v0.1", fault="A1")

In JupyterLab it is a panel of ipywidgets; an export shows the same picture as a still figure.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, replace

from decodebench.cache.faults import FAULTS
from decodebench.cache.values import Tags
from decodebench.coverage.trial import Trial, trial
from decodebench.errors import DecodebenchError
from decodebench.layout.layout import Layout
from decodebench.layout.plan import plan
from decodebench.layout.pool import Batch, PoolExhausted, admit
from decodebench.layout.shrink import blocks_named, shrink
from decodebench.models.load import list_models
from decodebench.show import figures
from decodebench.show import look as look_
from decodebench.words import bytes_text, counted, plain_number, short

GROUPINGS = ("auto", "hybrid", "packed", "promoted", "separate", "fixed(2)", "per_layer")
BLOCK_SIZES = (None, 16, 32, 64, 128)
#: stands for None in a drop-down: ipywidgets take None for "nothing chosen" and show a blank
NONE = "none"
CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Choice:
    """What the panel's controls say. ``block_size`` None: the model's own; ``fault`` None: no fault."""

    model: str = "jamba-v0.1"
    block_size: int | None = None
    grouping: str = "auto"
    context: int = 256
    requests: int = 2
    fault: str | None = None
    blocks: int = 64
    memory: str = "8GiB"


@dataclass(frozen=True)
class View:
    """One state of the panel: the layout as planned, and an audited batch on its small pool."""

    choice: Choice
    layout: Layout
    trial: Trial

    @property
    def title(self) -> str:
        fault = FAULTS[self.choice.fault].name if self.choice.fault else "none"
        choice = self.choice
        asked = f"{counted(choice.requests, 'request')} of {counted(choice.context, 'token')}"
        return f"{short(choice.model)}, {asked}, fault: {fault}"


def look(choice: Choice) -> View:
    """Plan the layout, fill a miniature of it and audit the fill; raises ``DecodebenchError`` where that is
    refused.

    The miniature has the layout's groups, block sizes and block tables; only its pages are small,
    so that the picture follows a click at once.
    """
    layout = plan(
        choice.model,
        memory=choice.memory,
        block_size=choice.block_size,
        grouping=choice.grouping,
        max_model_len="auto",
    )
    small = shrink(layout, miniature=True, num_blocks=choice.blocks)
    try:
        choice, batch = _admitted(small, choice)
    except PoolExhausted:  # not even one token: a pool as large as one request of this model takes
        enough = 1 + max(
            blocks_named(admit(layout, requests=1, context=min(choice.context, layout.max_model_len)))
        )
        choice = replace(choice, blocks=enough)
        small = shrink(layout, miniature=True, num_blocks=enough)
        choice, batch = _admitted(small, choice)
    return View(choice, layout, trial(small, batch, Tags(), choice.fault))


def _admitted(layout: Layout, choice: Choice) -> tuple[Choice, Batch]:
    """As many requests, then as many tokens, as the small pool holds."""
    context = min(choice.context, layout.max_model_len)
    for requests, tokens in [(r, context) for r in range(choice.requests, 0, -1)] + [
        (1, context >> shift) for shift in range(1, context.bit_length())
    ]:
        try:
            return replace(choice, requests=requests, context=tokens), admit(
                layout, requests=requests, context=tokens
            )
        except PoolExhausted as error:
            reason = error
    raise reason


# -- the picture -----------------------------------------------------------------------------------

CELL, LINE, MARGIN = 9, 7, 190


def picture(view: View) -> str:
    """Layers by blocks as SVG, in colours that read on JupyterLab's light and dark themes."""
    pages = view.trial.pages
    row_of = {layer: row for row, layer in enumerate(dict.fromkeys(pages["layer"]))}
    paths: dict[str, list[str]] = {}
    for layer, block, state in zip(pages["layer"], pages["block"], pages["state"]):
        x, y = MARGIN + block * CELL, 4 + row_of[layer] * LINE
        paths.setdefault(state, []).append(f"M{x} {y}h{CELL - 1}v{LINE - 1}h{1 - CELL}z")
    shapes = [
        f'<path d="{"".join(outline)}" fill="{_fill(state)}"><title>{figures.PAGE_STATES[state][1]}</title></path>'
        for state, outline in paths.items()
    ]
    labels, start = [], 0
    for g, group in enumerate(view.trial.audit.layout.groups):
        middle = 4 + (start + len(group.layer_names) / 2) * LINE + 4
        text = f"{g} · {group.kind.replace('_', ' ')} · {group.block_size}"
        if len(group.layer_names) * LINE >= 11 or g % 2 == 0:
            labels.append(
                f'<text x="{MARGIN - 8}" y="{middle:.0f}" text-anchor="end">{html.escape(text)}</text>'
            )
        start += len(group.layer_names)
        labels.append(
            f'<path d="M8 {4 + start * LINE - 0.5}h{MARGIN + view.choice.blocks * CELL}" stroke="#8884"/>'
        )
    width, height = MARGIN + view.choice.blocks * CELL + 8, start * LINE + 10
    return (
        f'<svg viewBox="0 0 {width} {height}" style="width:100%;max-width:{width}px" font-size="10" '
        f'fill="currentColor" role="img" aria-label="{html.escape(view.trial.audit.verdict)}">'
        f"{''.join(shapes)}{''.join(labels)}</svg>"
    )


def _fill(state: str) -> str:
    return {"clobbered": "currentColor", "null": "#8884"}.get(state, figures.PAGE_STATES[state][0])


def panel(view: View, asked: Choice | None = None) -> str:
    """The panel's HTML: verdict, picture, legend, and the layout's capacity beside them."""
    counts = view.trial.pages["state"].value_counts()
    legend = "".join(
        f'<span style="white-space:nowrap;margin-right:1.2em">'
        f'<span style="display:inline-block;width:.8em;height:.8em;background:{_fill(state)}"></span> '
        f"{counts[state]:,} {text}</span>"
        for state, (_, text) in figures.PAGE_STATES.items()
        if state in counts
    )
    capacity = view.layout.capacity(view.choice.context)
    facts = {
        f"blocks in {view.choice.memory} of KV cache": f"{sum(view.layout.pool_num_blocks):,}",
        "a block": bytes_text(view.layout.bytes_per_block()),
        "blocks a request": f"{sum(capacity.blocks_per_request):,}",
        f"requests of {view.choice.context:,}": plain_number(capacity.concurrency),
        "one token reserves": bytes_text(capacity.start_bytes),
        f"{view.choice.context:,} tokens reserve": bytes_text(capacity.request_bytes),
        "a further token": bytes_text(capacity.slope_bytes),
    }
    rows = "".join(
        f'<tr><td style="text-align:left">{k}</td><td><b>{v}</b></td></tr>' for k, v in facts.items()
    )
    note = ""
    if asked and (asked.requests, asked.context) != (view.choice.requests, view.choice.context):
        note = (
            f"<p>The pool of {view.choice.blocks} blocks holds {view.choice.requests} of {asked.requests} "
            f"requests, of {view.choice.context:,} tokens.</p>"
        )
    if view.choice.fault and view.trial.audit.ok:
        note += f"<p>{view.choice.fault} leaves no wrong byte on this layout and batch.</p>"
    answer = _short(view.trial.audit.verdict)
    return (
        f'<div class="db-explorer"><p class="db-answer"><b>{html.escape(answer)}</b></p>{note}'
        f'<div style="display:flex;gap:1.5em;flex-wrap:wrap"><div style="flex:1 1 36em">{picture(view)}</div>'
        f"<table>{rows}</table></div><p>{legend}</p></div>"
    )


def _short(verdict: str) -> str:
    """A verdict without the part that compares its two sources, which agree in what is drawn."""
    return verdict.split(" Plan and bytes disagree")[0]


# -- the widget ------------------------------------------------------------------------------------


class Explorer:
    """A panel of controls over ``look``; ``view`` is what it shows, ``None`` after a refusal."""

    def __init__(self, choice: Choice) -> None:
        import ipywidgets

        self.choice, self.view = choice, None
        names = list_models()
        models = names if choice.model in names else (choice.model, *names)
        wide = {"layout": ipywidgets.Layout(width="19em"), "style": {"description_width": "5.5em"}}
        faults = [("none", NONE), *((f"{fault.id} {fault.name}", fault.id) for fault in FAULTS.values())]
        sizes = [("the model's own", NONE), *((f"{size} tokens", size) for size in BLOCK_SIZES if size)]
        contexts = sorted({*CONTEXTS, choice.context})
        self.controls = {
            "model": ipywidgets.Dropdown(options=models, description="model", **wide),
            "grouping": ipywidgets.Dropdown(options=GROUPINGS, description="grouping", **wide),
            "block_size": ipywidgets.Dropdown(options=sizes, description="block size", **wide),
            "context": ipywidgets.SelectionSlider(options=contexts, description="context", **wide),
            "requests": ipywidgets.IntSlider(min=1, max=4, description="requests", **wide),
            "fault": ipywidgets.Dropdown(options=faults, description="fault", **wide),
        }
        self.output = ipywidgets.HTML()
        for name, control in self.controls.items():
            value = getattr(choice, name)
            control.value = NONE if value is None else value
            control.observe(self._changed, names="value")
        box = ipywidgets.Layout(flex_flow="row wrap")
        self.widget = ipywidgets.VBox([ipywidgets.Box(list(self.controls.values()), layout=box), self.output])
        self._changed()

    def _changed(self, change: Mapping | None = None) -> None:
        chosen = {name: control.value for name, control in self.controls.items()}
        asked = replace(self.choice, **{k: None if v == NONE else v for k, v in chosen.items()})
        try:
            self.view = look(asked)
            self.output.value = panel(self.view, asked)
        except DecodebenchError as error:
            self.view = None
            text = f"<b>Refused.</b> {html.escape(str(error))}"
            self.output.value = f'<div class="db-explorer"><p class="db-answer">{text}</p></div>'

    def still(self) -> look_.Chart:
        """The picture as a figure, for exports."""
        assert self.view is not None
        chart = figures.page_maps(
            {self.view.title: self.view.trial.pages},
            name="explorer",
            title="What the explorer shows",
            num_blocks=self.view.choice.blocks,
        )
        chart.caption = _short(self.view.trial.audit.verdict)
        return chart

    def _repr_mimebundle_(self, include=None, exclude=None):
        shown = self.widget._repr_mimebundle_()
        data, metadata = shown if isinstance(shown, tuple) else (shown, {})
        if self.view is None:
            return data, metadata
        still, facts = self.still()._repr_mimebundle_()
        return still | data, metadata | facts


def explore(model: str = "jamba-v0.1", **choice) -> Explorer:
    """The explorer with these choices to start from: see ``Choice``."""
    return Explorer(Choice(model=model, **choice))
