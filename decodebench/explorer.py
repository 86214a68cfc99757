"""The explorer: choose a layout, a batch and a fault, and see every page of a small pool.

    from decodebench.explorer import explore
    explore("jamba-v0.1", fault="A1")

In JupyterLab it is a panel of ipywidgets; an export shows the same picture as a still figure.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, replace

from decodebench import plots
from decodebench.blocks import Batch, PoolExhausted, admit
from decodebench.connector import fill_cache
from decodebench.coverage import Audit, audit
from decodebench.display import bytes_text, plain_number
from decodebench.faults import FAULTS
from decodebench.fill import Tags
from decodebench.layout import KVCacheConfig, from_groups, plan
from decodebench.models import list_models
from decodebench.specs import AttentionSpec, DecodebenchError, KVCacheSpec, MambaSpec

GROUPINGS = ("auto", "hybrid", "packed", "promoted", "separate", "fixed(2)", "per_layer")
BLOCK_SIZES = (None, 16, 32, 64, 128)
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
    layout: KVCacheConfig
    batch: Batch
    audit: Audit

    @property
    def pages(self):
        return plots.pages(self.audit, self.batch)

    @property
    def title(self) -> str:
        fault = FAULTS[self.choice.fault].name if self.choice.fault else "none"
        choice = self.choice
        return f"{choice.model}, {choice.requests} requests of {choice.context:,} tokens, fault: {fault}"


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
    small = miniature(layout, choice.blocks)
    choice, batch = _admitted(small, choice)
    cache = small.allocate("cpu")
    values = Tags()
    report = fill_cache(cache, batch, values=values, fault=choice.fault)
    return View(choice, layout, batch, audit(cache, batch, values=values, report=report))


def _admitted(layout: KVCacheConfig, choice: Choice) -> tuple[Choice, Batch]:
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


def miniature(layout: KVCacheConfig, num_blocks: int) -> KVCacheConfig:
    """The same groups and block sizes with pages of a few bytes a token: block tables are the layout's
    own.
    """
    small = [[_small(spec) for spec in group.layer_specs] for group in layout.groups]
    page = max(spec.page_size_bytes for specs in small for spec in specs)
    groups = [
        replace(
            group,
            layer_specs=tuple(s.padded_to(page) for s in specs),
            kv_cache_spec=_small(group.kv_cache_spec).padded_to(page),
        )
        for group, specs in zip(layout.groups, small)
    ]
    return from_groups(
        groups,
        num_blocks,
        layout.memory_order,
        max_model_len=layout.max_model_len,
        max_in_flight_tokens=layout.max_in_flight_tokens,
        decode_context_parallel_size=layout.decode_context_parallel_size,
    )


def _small(spec: KVCacheSpec) -> KVCacheSpec:
    plain = {"page_size_padded": None, "block_stride_alignment": 1}
    if isinstance(spec, MambaSpec):
        return replace(spec, shapes=tuple(tuple(min(d, 4) for d in shape) for shape in spec.shapes), **plain)
    if isinstance(spec, AttentionSpec):
        # a handful of entries a block stand for its tokens, however many those are
        few = {
            "num_kv_heads": 1,
            "tokens_per_state": max(spec.tokens_per_state, spec.block_size // 16),
            **plain,
        }
        if spec.packed is None:
            return replace(spec, head_size=1, head_size_v=min(1, spec.head_size_v or 0), **few)
        return replace(spec, state_content_bytes=8, **few)
    return replace(spec, **plain)


# -- the picture -----------------------------------------------------------------------------------

CELL, LINE, MARGIN = 9, 7, 190


def picture(view: View) -> str:
    """Layers by blocks as SVG, in colours that read on JupyterLab's light and dark themes."""
    pages = view.pages
    row_of = {layer: row for row, layer in enumerate(dict.fromkeys(pages["layer"]))}
    paths: dict[str, list[str]] = {}
    for layer, block, state in zip(pages["layer"], pages["block"], pages["state"]):
        x, y = MARGIN + block * CELL, 4 + row_of[layer] * LINE
        paths.setdefault(state, []).append(f"M{x} {y}h{CELL - 1}v{LINE - 1}h{1 - CELL}z")
    shapes = [
        f'<path d="{"".join(outline)}" fill="{_fill(state)}"><title>{plots.PAGE_STATES[state][1]}</title></path>'
        for state, outline in paths.items()
    ]
    labels, start = [], 0
    for g, group in enumerate(view.audit.layout.groups):
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
        f'fill="currentColor" role="img" aria-label="{html.escape(view.audit.verdict)}">'
        f"{''.join(shapes)}{''.join(labels)}</svg>"
    )


def _fill(state: str) -> str:
    return {"clobbered": "currentColor", "null": "#8884"}.get(state, plots.PAGE_STATES[state][0])


def panel(view: View, asked: Choice | None = None) -> str:
    """The panel's HTML: verdict, picture, legend, and the layout's capacity beside them."""
    counts = view.pages["state"].value_counts()
    legend = "".join(
        f'<span style="white-space:nowrap;margin-right:1.2em">'
        f'<span style="display:inline-block;width:.8em;height:.8em;background:{_fill(state)}"></span> '
        f"{counts[state]:,} {text}</span>"
        for state, (_, text) in plots.PAGE_STATES.items()
        if state in counts
    )
    capacity = view.layout.capacity(view.choice.context)
    facts = {
        "blocks in " + view.choice.memory: f"{sum(view.layout.pool_num_blocks):,}",
        "a block": bytes_text(view.layout.bytes_per_block()),
        "blocks a request": f"{sum(capacity.blocks_per_request):,}",
        f"requests of {view.choice.context:,}": plain_number(capacity.concurrency),
        "a request costs": bytes_text(capacity.intercept_bytes),
        "and each token": bytes_text(capacity.slope_bytes),
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
    if view.choice.fault and view.audit.ok:
        note += f"<p>{view.choice.fault} leaves no wrong byte on this layout and batch.</p>"
    answer = _short(view.audit.verdict)
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
        faults = [("none", None), *((f"{fault.id} {fault.name}", fault.id) for fault in FAULTS.values())]
        sizes = [("the model's own", None), *((f"{size} tokens", size) for size in BLOCK_SIZES if size)]
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
            control.value = getattr(choice, name)
            control.observe(self._changed, names="value")
        box = ipywidgets.Layout(flex_flow="row wrap")
        self.widget = ipywidgets.VBox([ipywidgets.Box(list(self.controls.values()), layout=box), self.output])
        self._changed()

    def _changed(self, change: Mapping | None = None) -> None:
        asked = replace(self.choice, **{name: control.value for name, control in self.controls.items()})
        try:
            self.view = look(asked)
            self.output.value = panel(self.view, asked)
        except DecodebenchError as error:
            self.view = None
            text = f"<b>Refused.</b> {html.escape(str(error))}"
            self.output.value = f'<div class="db-explorer"><p class="db-answer">{text}</p></div>'

    def still(self) -> plots.Chart:
        """The picture as a figure, for exports."""
        assert self.view is not None
        chart = plots.page_maps(
            {self.view.title: self.view.pages},
            name="explorer",
            title="What the explorer shows",
            num_blocks=self.view.choice.blocks,
        )
        chart.caption = _short(self.view.audit.verdict)
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
