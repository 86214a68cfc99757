"""Tables → charts. Every function takes a DataFrame and returns a ``Chart``: titled, with units and alt
text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.legend_handler import HandlerBase
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline
from matplotlib.transforms import Transform

from decodebench.cache.faults import FAULTS
from decodebench.show.cells import Note, note
from decodebench.show.charts import bar_panels, bars, lines, says_guesses, value_of
from decodebench.show.look import (
    BLUE,
    EMPTY,
    FAINT,
    GREEN,
    GREY,
    GROUND,
    INK,
    MUTED,
    ORANGE,
    SKY,
    VERMILLION,
    VIOLET,
    Chart,
    chart,
    dot_style,
    legend,
    line_style,
    panels,
    styled,
)
from decodebench.words import bytes_text, counted, share_text, short, some

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["bar_panels", "bars", "lines"]

#: state of a (layer, block) page → colour and what it means; drawn in this order
PAGE_STATES = {
    "null": (FAINT, "null block, never data"),
    "free": (EMPTY, "free"),
    "owned": (GREY, "owned, not read by this step"),
    "filled": (GREEN, "read and filled"),
    "zeroed": (SKY, "read, zeroed on purpose"),
    "wrong": (ORANGE, "read, wrong bytes"),
    "uncovered": (VERMILLION, "read, never filled"),
    "stray": (VIOLET, "written, nobody's"),
    "clobbered": (INK, "written, somebody else's"),
}


#: outlines of a cell about its middle; an inner one that runs the other way is a hole. Shapes tell apart, on
#: grey paper too, what colours tell apart
SQUARE = (((-0.46, -0.44), (0.46, -0.44), (0.46, 0.44), (-0.46, 0.44)),)
SHAPES = {
    "uncovered": (*SQUARE, ((-0.2, -0.2), (-0.2, 0.2), (0.2, 0.2), (0.2, -0.2))),
    "wrong": (((-0.46, -0.44), (0.46, -0.44), (-0.46, 0.44)),),
    "stray": (((0, -0.46), (0.48, 0), (0, 0.46), (-0.48, 0)),),
    "zeroed": (((-0.46, -0.22), (0.46, -0.22), (0.46, 0.22), (-0.46, 0.22)),),
}


# -- pages -----------------------------------------------------------------------------------------


def draw_pages(axes: Axes, states: Mapping[str, Sequence[tuple[int, int]]]) -> list[str]:
    """Cells of a grid by state: state → (row, column) pairs. One shape a state keeps the drawing light.

    Returns the states drawn, for a legend.
    """
    drawn = []
    for state in PAGE_STATES:
        cells = states.get(state) or ()
        if not cells:
            continue
        corners, codes = [], []
        for row, column in cells:
            for shape in SHAPES.get(state, SQUARE):
                corners += [(column + x, row + y) for x, y in (*shape, shape[0])]
                codes += [Outline.MOVETO, *[Outline.LINETO] * (len(shape) - 1), Outline.CLOSEPOLY]
        axes.add_patch(PathPatch(Outline(corners, codes), facecolor=PAGE_STATES[state][0], linewidth=0))
        drawn.append(state)
    return drawn


def page_legend(figure: Figure, states: Sequence[str], columns: int = 4) -> None:
    """The legend of a page map, with each state in words."""
    named = [s for s in PAGE_STATES if s in states]
    handles: list[Any] = [PageKey(s) for s in named]
    figure.legend(
        handles,
        [PAGE_STATES[s][1] for s in named],
        loc="outside lower left",
        ncols=columns,
        handlelength=1.1,
        handleheight=1.0,
        handler_map={PageKey: PageKeyHandler()},
    )


class PageKey:
    """A state, for the legend to draw in its cell's own shape."""

    def __init__(self, state: str) -> None:
        self.state = state


class PageKeyHandler(HandlerBase):
    """Draws a ``PageKey`` as ``draw_pages`` draws its cells."""

    def create_artists(
        self,
        legend: Legend,
        key: Any,
        x: float,
        y: float,
        width: float,
        height: float,
        fontsize: float,
        transform: Transform,
    ) -> list[PathPatch]:
        corners, codes = [], []
        for shape in SHAPES.get(key.state, SQUARE):
            # a cell's rows run downwards, a legend's upwards
            corners += [(x + width * (0.5 + a), y + height * (0.5 - b)) for a, b in (*shape, shape[0])]
            codes += [Outline.MOVETO, *[Outline.LINETO] * (len(shape) - 1), Outline.CLOSEPOLY]
        patch = PathPatch(Outline(corners, codes), facecolor=PAGE_STATES[key.state][0], linewidth=0)
        patch.set_transform(transform)
        return [patch]


@styled
def page_maps(
    frames: Mapping[str, pd.DataFrame],
    *,
    name: str,
    title: str,
    subtitle: str = "",
    num_blocks: int | None = None,
    size: tuple[float, float] | None = None,
) -> Chart:
    """Layers by blocks, one panel a table, side by side: what decode reads and what was written there.

    Each table is one of ``pages``: a row a page with group, kind, layer, block, state (a key of
    ``PAGE_STATES``).
    Groups share one pool: a block id belongs to one group, so its pages in other groups' rows stay blank.
    """
    first = next(iter(frames.values()))
    order = first.drop_duplicates("layer")[["group", "layer"]].sort_values("group", kind="stable")
    row_of = {layer: row for row, layer in enumerate(order["layer"])}
    edges = (
        order.reset_index(drop=True)
        .groupby("group")
        .apply(lambda g: (g.index[0], g.index[-1]), include_groups=False)
    )
    num_blocks = num_blocks or int(max(frame["block"].max() for frame in frames.values())) + 1
    height = min(7.5, 1.9 + 0.105 * max(len(row_of), 14))
    figure, axes = chart(
        name,
        title,
        columns=len(frames),
        subtitle=subtitle,
        size=size or (8.6, height),
        sharey=True,
        squeeze=False,
    )
    drawn: set[str] = set()
    said = []
    for axis, (label, frame) in zip(axes[0], frames.items()):
        cells: dict[str, list[tuple[int, int]]] = {}
        for layer, block, state in zip(frame["layer"], frame["block"], frame["state"]):
            cells.setdefault(state, []).append((row_of[layer], int(block)))
        drawn |= set(draw_pages(axis, cells))
        axis.set_title(label)
        axis.set_xlim(-0.8, num_blocks - 0.2)
        axis.set_ylim(len(row_of) - 0.4, -0.6)
        axis.grid(visible=False)
        for start, _ in edges.tolist()[1:]:
            axis.axhline(start - 0.5, color=MUTED, linewidth=0.6)
        axis.set_xlabel("block id in the pool")
        counts = frame["state"].value_counts()
        said.append(
            f"{label}: "
            + ", ".join(f"{counts[s]} pages {PAGE_STATES[s][1]}" for s in PAGE_STATES if s in counts)
        )
    shown, last = [], -99.0
    for g, (a, b) in zip(edges.index, edges.tolist()):  # labels that do not print over each other
        if (a + b) / 2 - last >= 0.17 * len(row_of) / (height - 1.7):
            last = (a + b) / 2
            shown.append((last, _group_label(first, g)))
    axes[0][0].set_yticks([place for place, _ in shown], [label for _, label in shown])
    for axis in axes[0]:
        axis.tick_params(axis="y", length=0)
    axes[0][0].set_ylabel("groups, a line a layer")
    page_legend(figure, sorted(drawn), columns=3)
    figure.alt = f"{title}. Map of {len(row_of)} layers by {num_blocks} blocks. " + "; ".join(said) + "."
    return figure


def _group_label(frame: pd.DataFrame, group: int) -> str:
    if "kind" not in frame:
        return f"group {group}"
    row = frame[frame["group"] == group].iloc[0]
    return f"{group} · {str(row['kind']).replace('_', ' ')}"


# -- the notebooks' charts -------------------------------------------------------------------------

#: column of a sweep → what becomes of the memory that a step does not read
WASTE = {
    "waste_padding_layers": "padding layers",
    "waste_padded_pages": "padded pages",
    "waste_unread": "tokens no step reads",
    "waste_last_block": "behind the last token",
    "waste_reserve": "reserved for tokens in flight",
    "waste_null_block": "null block",
    "waste_tail": "left over",
}
#: every cause has one look on all pages
WASTE_STYLE = {
    "waste_padding_layers": {"color": BLUE, "hatch": ""},
    "waste_padded_pages": {"color": ORANGE, "hatch": "////"},
    "waste_unread": {"color": VIOLET, "hatch": "----"},
    "waste_last_block": {"color": GREEN, "hatch": ""},
    "waste_reserve": {"color": SKY, "hatch": "\\\\\\\\"},
    "waste_null_block": {"color": GREY, "hatch": ""},
    "waste_tail": {"color": VERMILLION, "hatch": "xxxx"},
}


def measured(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that were measured."""
    return table[table["status"] == "ok"].copy()


def each_layout_once(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of one layout asked for in several ways (blocks of 8 and of 16 that both become 16) kept once."""
    settings = list(table.columns[: table.columns.get_loc("status")])
    same = [c for c in settings if c not in ("case_id", "block_size")] + ["group_block_sizes"]
    return table.drop_duplicates(same) if set(same) <= set(table.columns) else table


P = ParamSpec("P")
Drawing = Callable[Concatenate["pd.DataFrame", P], Chart | Note]


def or_a_sentence(function: Drawing[P]) -> Drawing[P]:
    """A figure of measured rows; where there are none, a sentence that says so and why."""
    figure_of = says_guesses(function)

    @wraps(function)
    def wrapper(table: pd.DataFrame, *args: P.args, **kwargs: P.kwargs) -> Chart | Note:
        if "status" in table and not (table["status"] == "ok").any():
            reasons = some(dict.fromkeys(table["reason"].dropna()), none="no reason given")
            return note(
                f"No figure here: none of {counted(len(table), 'case')} could be measured ({reasons})."
            )
        if not len(table):
            return note("No figure here: no case was asked for.")
        return figure_of(table, *args, **kwargs)

    return wrapper


@or_a_sentence
def coverage_by_block_ratio(table: pd.DataFrame, title: str, subtitle: str = "") -> Chart:
    """Coverage against the ratio of the groups' block sizes: with the fault, without it, and its worst
    group; of several cases with one ratio the worst.
    """
    import pandas as pd

    table = measured(table)
    good, bad = table[table["fault"].isna()], table[table["fault"].notna()]
    frame = pd.concat(
        [
            good.assign(share=good["coverage"], connector="each group's own block size"),
            bad.assign(share=bad["coverage"], connector="one block size for all: all groups"),
            bad.assign(
                share=bad["worst_group_coverage"], connector="one block size for all: the worst group"
            ),
        ]
    )
    frame = frame.groupby(["connector", "block_size_ratio"], sort=False)["share"].min().reset_index()
    return lines(
        frame,
        "block_size_ratio",
        "share",
        "connector",
        name="coverage-by-block-ratio",
        title=title,
        subtitle=subtitle,
        x_label="largest block size of a group over the smallest",
        y_label="pages read that were filled",
        percent=True,
    )


@or_a_sentence
@styled
def waste_panels(
    table: pd.DataFrame, by: str, title: str, subtitle: str = "", panel: str = "model", name: str = "waste"
) -> Chart:
    """What no step reads by cause, a panel a model, a bar a value of ``by``; each cause in its own look."""
    categories = list(dict.fromkeys(table[by].astype(str)))
    labels = list(dict.fromkeys(table[panel].astype(str)))
    used = [c for c in WASTE if (table[c].fillna(0) > 0.0005).any()] or ["waste_tail"]
    figure, axes = panels(
        name, title, labels, subtitle=subtitle, height=1.1 + 0.34 * len(categories), sharex=True
    )
    said = []
    for axis, label in zip(axes, labels):
        rows = {str(row[by]): row for row in table[table[panel].astype(str) == label].to_dict("records")}
        totals = []
        for place, category in enumerate(categories):
            left = 0.0
            for column in used:
                share = value_of(rows.get(category), column) or 0.0
                style: dict[str, Any] = {"edgecolor": GROUND, "linewidth": 0, **WASTE_STYLE[column]}
                axis.barh(place, share, 0.72, left=left, **style)
                left += share
            ok = value_of(rows.get(category), "waste_tail") is not None
            text = share_text(left) if ok else ("refused" if category in rows else "")
            axis.annotate(
                text,
                (left, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=INK if ok else MUTED,
            )
            row = rows.get(category)
            causes = [f"{WASTE[c]} {share_text(v)}" for c in used if (v := value_of(row, c))]
            totals.append(f"{category} {text}" + (f" ({', '.join(causes)})" if causes else ""))
        axis.set_xlim(0, 1.3)
        axis.set_xticks([0, 0.5, 1], ["0%", "50%", "100%"])
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="y", visible=False)
        said.append(f"{label}: {', '.join(totals)}")
    axes[0].set_yticks(range(len(categories)), [short(c, 24) for c in categories])
    axes[0].set_ylim(len(categories) - 0.4, -0.6)
    keys = [Patch(edgecolor=GROUND, linewidth=0, **_patch(WASTE_STYLE[column])) for column in used]
    legend(figure, keys, [WASTE[column] for column in used])
    figure.alt = f"{title}. Stacked bars, share of the memory. " + "; ".join(said) + "."
    return figure


def _patch(style: Mapping[str, str]) -> dict[str, Any]:
    return {"facecolor": style["color"], "hatch": style["hatch"]}


@or_a_sentence
def waste_by_block_size(table: pd.DataFrame, title: str, subtitle: str = "") -> Chart:
    """What no step reads, the reserve for tokens in flight left out, against the block size in use."""
    frame = measured(table)
    frame["waste"] = frame[[column for column in WASTE if column != "waste_reserve"]].sum(axis=1)
    frame = frame.drop_duplicates(["model", "block_in_use"])
    return lines(
        frame,
        "block_in_use",
        "waste",
        "model",
        name="waste-by-block-size",
        title=title,
        subtitle=subtitle,
        x_label="block size in use (tokens)",
        y_label="share of the memory",
        percent=True,
    )


@or_a_sentence
def capacity(table: pd.DataFrame, title: str, subtitle: str = "", series: str = "model") -> Chart:
    """Requests that fit against their length, a line a value of ``series``; both axes logarithmic."""
    return lines(
        measured(table),
        "longest_context",
        "concurrency",
        series,
        name="capacity",
        title=title,
        subtitle=subtitle,
        x_label="tokens of each request",
        y_label="requests that fit at once",
        log_y=True,
    )


@or_a_sentence
def dtype_gain(table: pd.DataFrame, title: str, subtitle: str = "", small: str = "fp8") -> Chart | Note:
    """Requests that fit with another KV cache type over those with the model's own, against their length."""
    frame = measured(table)
    wide = frame.pivot_table(
        index=["model", "longest_context"], columns="kv_cache_dtype", values="concurrency", sort=False
    )
    if not {small, "auto"} <= set(wide):
        return note(f"No figure here: no model was measured both with {small} and with its own type.")
    gain = (wide[small] / wide["auto"]).rename("gain").reset_index()
    return lines(
        gain,
        "longest_context",
        "gain",
        "model",
        name="dtype-gain",
        title=title,
        subtitle=subtitle,
        x_label="tokens of each request",
        y_label=f"requests with {small} / without",
        limit=(2.0, "2: half the bytes"),
    )


@or_a_sentence
def latency(
    table: pd.DataFrame, x: str, title: str, subtitle: str = "", series: str = "model", name: str = "latency"
) -> Chart | Note:
    """Median decode step against ``x`` with its quartiles, and thin what the memory needs, a line a
    ``series``.
    """
    frame = each_layout_once(measured(table))
    if frame["median_s"].isna().all():
        return note("No figure here: no step of these cases was timed (measure = decode times them).")
    for column in ("median_s", "q1_s", "q3_s", "limit_s"):
        frame[column.replace("_s", "_ms")] = 1e3 * frame[column]
    figure = lines(
        frame,
        x,
        "median_ms",
        series,
        name=name,
        title=title,
        subtitle=subtitle,
        y_label="one decode step (ms)",
        x_label="block size in use (tokens)" if x == "block_in_use" else x.replace("_", " "),
        spread=("q1_ms", "q3_ms"),
    )
    for i, (_, part) in enumerate(frame.groupby(series, sort=False)):
        part = part.dropna(subset=["limit_ms"]).sort_values(x)
        figure.axes[0].plot(
            part[x].astype(float),
            part["limit_ms"].astype(float),
            linestyle=(0, (2, 2)),
            color=line_style(i)["color"],
            linewidth=1,
        )
    return figure


@or_a_sentence
def limit_share(
    table: pd.DataFrame,
    x: str,
    title: str,
    subtitle: str = "",
    series: str = "model",
    name: str = "limit-share",
) -> Chart | Note:
    """Share of the memory's speed that a step reaches, against ``x``."""
    frame = each_layout_once(measured(table))
    return lines(
        frame,
        x,
        "limit_share",
        series,
        name=name,
        title=title,
        subtitle=subtitle,
        y_label="of this machine's measured limit",
        x_label="block size in use (tokens)" if x == "block_in_use" else x.replace("_", " "),
        percent=True,
    )


@or_a_sentence
def block_growth(table: pd.DataFrame, title: str, subtitle: str = "") -> Chart | Note:
    """Block size in use by the types of cache and state, a bar a combination (a sweep's table)."""
    own = {"auto": "the model's own"}
    label = (
        table["kv_cache_dtype"].replace(own)
        + " cache, "
        + table["mamba_ssm_cache_dtype"].replace(own)
        + " states"
    )
    return bars(
        table.assign(label=label),
        "label",
        {"block_in_use": "block size"},
        name="block-growth",
        title=title,
        subtitle=subtitle,
        x_label="tokens that one block covers",
    )


# -- fill and decode -------------------------------------------------------------------------------


def fill_costs(costs: pd.DataFrame, title: str, subtitle: str = "") -> Chart:
    """Speed of our fill and of the naive loop next to memset, by case (rows of
    ``bench_fill.measure_case``).
    """
    frame = costs.assign(
        label=costs["case"] + ", " + costs["values"],
        ours=costs["memset_s"] / costs["ours_s"],
        naive=costs["memset_s"] / costs["naive_s"].astype(float),
    )
    shown = {"ours": "one pass (ours)", "naive": "naive loop"}
    if costs["vllm_s"].notna().any():
        frame["vllm"] = costs["memset_s"] / costs["vllm_s"].astype(float)
        shown["vllm"] = "vLLM's own worker"
    return bars(
        frame,
        "label",
        shown,
        name="fill-costs",
        title=title,
        subtitle=subtitle,
        x_label="speed, memset's is 100%",
        percent=True,
    )


def growth(rows: pd.DataFrame | None, title: str) -> Chart | Note:
    """Share of plain bytes by the size of the cache (rows of ``bench_growth``): a level line is a linear time.

    Its subtitle says where and when the rows were made, and how many of them beside other work. ``rows``
    None: nobody has stored any.
    """
    if rows is None:
        return note(
            "No figure here: no rows are stored. python -m decodebench bench growth --out data/results/growth "
            "makes them, on a machine where nothing else runs."
        )
    frame = rows[rows["varies"] == "bytes"].copy()
    made = rows.attrs["provenance"][-1]
    busy = int(frame["disturbed"].notna().sum())
    beside = f"{busy} of {len(frame)} points made beside other work" if busy else "nothing else at work"
    subtitle = (
        f"stored rows: {made['device']}, {made['cores']} cores, {str(made['date'])[:10]}, "
        f"commit {str(made['commit'])[:10]}; {beside}"
    )
    frame["label"] = frame["work"] + ", " + frame["values"] + " values"
    frame["mib"] = frame["bytes"] / 2**20
    return lines(
        frame,
        "mib",
        "share",
        "label",
        name="growth",
        title=title,
        subtitle=subtitle,
        x_label="bytes filled or audited (MiB)",
        y_label="speed next to plain bytes",
        percent=True,
    )


@or_a_sentence
def by_fault(
    table: pd.DataFrame,
    column: str,
    *,
    name: str,
    title: str,
    subtitle: str = "",
    x_label: str = "",
    percent: bool = False,
) -> Chart:
    """A bar a fault (a sweep's table), the connector as it should be first."""

    label = [f"{f} {FAULTS[f].name}" if isinstance(f, str) else "no fault" for f in table["fault"]]
    return bars(
        table.assign(label=label),
        "label",
        {column: x_label or column},
        name=name,
        title=title,
        subtitle=subtitle,
        x_label=x_label,
        percent=percent,
        as_text=bytes_text if column.endswith("bytes") else None,
    )


@or_a_sentence
def fill_and_step(table: pd.DataFrame, title: str, subtitle: str = "") -> Chart:
    """One resident step, and beside it the sum of step and fill (rows of a sweep at decode level)."""
    import pandas as pd

    row = measured(table).iloc[0]
    frame = pd.DataFrame(
        {
            "what": ["the resident step, measured", "step and fill, added up"],
            "step": [1e3 * row["median_s"]] * 2,
            "fill": [0.0, 1e3 * row["fill_seconds"]],
        }
    )
    return bars(
        frame,
        "what",
        {"step": "decode step (median)", "fill": "fill (once)"},
        name="fill-and-step",
        title=title,
        subtitle=subtitle,
        x_label="time (ms)",
        stacked=True,
        as_text=lambda v: f"{v:.3g}",
    )


def by_kind(table: pd.DataFrame, title: str, subtitle: str = "") -> Chart | Note:
    """Cost of one layer of each kind (rows of ``latency_table``), next to its limit and what makes that."""
    failed = table["failed"].dropna() if "failed" in table else ()
    if "median_s" not in table or table["median_s"].isna().all():
        return note(f"No figure here: no kind of layer could be timed ({some(dict.fromkeys(failed))}).")
    frame = table[(table["kind"] != "step") & table["median_s"].notna()].copy()
    frame["label"] = frame["model"].map(short) + " · " + frame["kind"].str.replace("_", " ")
    if "bound_by" in frame:
        frame["label"] += " (" + frame["bound_by"] + ")"
    frame["measured"] = 1e3 * frame["median_s"] / frame["layers"]
    frame["needed"] = 1e3 * frame["limit_s"] / frame["layers"]
    figure = bars(
        frame,
        "label",
        {"measured": "measured", "needed": "this machine's limit"},
        name="by-kind",
        title=title,
        subtitle=subtitle,
        x_label="one layer of one decode step (ms)",
        as_text=lambda v: f"{v:.3g}",
    )
    figure.caption = f"Left out: {some(dict.fromkeys(failed))}" if len(failed) else ""
    return figure


# -- the real engine -------------------------------------------------------------------------------


def engine_coverage(table: pd.DataFrame, title: str, subtitle: str = "") -> Chart:
    """Coverage by setting and model for each connector (a stored study), every setting that was run."""
    frame = table.groupby(["setting", "model", "connector"], sort=False)[["required", "filled", "zeroed"]]
    frame = frame.sum().reset_index()
    frame["coverage"] = (frame["filled"] + frame["zeroed"]) / frame["required"]
    wide = frame.pivot_table(
        index=["setting", "model"], columns="connector", values="coverage", sort=False
    ).reset_index()
    wide["label"] = wide["setting"] + " · " + wide["model"].map(short)
    shown = {name: name for name in dict.fromkeys(table["connector"])}
    return bars(
        wide,
        "label",
        shown,
        name="engine-coverage",
        title=title,
        subtitle=subtitle,
        percent=True,
        x_label="of the pages that the first decode step reads",
    )


# -- floors and published figures --------------------------------------------------------------------


def floor_by_context(table: pd.DataFrame, title: str, subtitle: str = "") -> Chart:
    """The floor of a step against the length of its requests, a line a model; both axes logarithmic."""
    return lines(
        table.assign(floor_ms=1e3 * table["floor_s"]),
        "context",
        "floor_ms",
        "model",
        name="floor-by-context",
        title=title,
        subtitle=subtitle,
        x_label="tokens of each request",
        y_label="floor of a step (ms)",
        log_y=True,
    )


def floor_parts(table: pd.DataFrame, title: str, subtitle: str = "") -> Chart:
    """What a step's floor is made of, a stacked bar a case."""
    kinds = {
        "weights_ms": "weights",
        "experts_ms": "routed experts",
        "cache_ms": "cache",
        "messages_ms": "messages",
    }
    return bars(
        table,
        "case",
        {column: label for column, label in kinds.items() if (table[column] > 0).any()},
        name="floor-parts",
        title=title,
        subtitle=subtitle,
        x_label="least time of the parts, one after another (ms)",
        stacked=True,
    )


@styled
def times_floor(table: pd.DataFrame, title: str, subtitle: str = "") -> Chart:
    """Measured over floor of published figures: a row a model, a dot a figure, a stroke at the median."""
    order = table.groupby("model")["times"].median().sort_values().index.tolist()
    figure, axes = chart("times-floor", title, subtitle=subtitle, size=(8.2, 1.5 + 0.34 * len(order)))
    for i, (kind, label) in enumerate(
        (("serving", "serving: prompts in the same steps"), ("decode only", "decode alone"))
    ):
        part = table[table["kind"] == kind]
        rows = [
            order.index(model) + 0.3 * (((7 * n) % 11) / 10 - 0.5) for n, model in enumerate(part["model"])
        ]
        axes.scatter(part["times"], rows, label=label, zorder=2 + i, **dot_style(i))
    medians = [float(table[table["model"] == model]["times"].median()) for model in order]
    axes.scatter(
        medians, range(len(order)), marker="|", s=220, color=INK, linewidths=2, label="median", zorder=5
    )
    axes.axvline(1, color=VERMILLION, linewidth=1.5, label="the floor: nothing is faster")
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 3, 5, 10, 20], ["0.5", "1", "2", "3", "5", "10", "20"])
    axes.minorticks_off()
    axes.set_yticks(range(len(order)), order)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("measured time of an output token, times its floor")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=2, markerscale=1.6)
    said = "; ".join(f"{model} {median:.1f}" for model, median in zip(order, medians))
    below = int((table["times"] < 1).sum())
    figure.alt = (
        f"{title}. A dot a published figure by model, {len(table)} in all, {below} below 1. Medians: {said}."
    )
    return figure


@styled
def held_out(table: pd.DataFrame, title: str, subtitle: str = "") -> Chart:
    """Estimates of figures that were held out against what was measured, a panel a way of holding out."""
    ways = list(dict.fromkeys(table["held_out"]))
    figure, panels = chart(
        "held-out", title, columns=len(ways), subtitle=subtitle, size=(8.2, 4.6), squeeze=False
    )
    said = []
    low, high = 1e3 * table["measured_s"].min(), 1e3 * table["measured_s"].max()
    for axes, way in zip(panels[0], ways):
        part = table[table["held_out"] == way]
        for i, (engine, dots) in enumerate(part.groupby("engine")):
            axes.scatter(1e3 * dots["measured_s"], 1e3 * dots["predicted_s"], label=engine, **dot_style(i))
        axes.plot([low, high], [low, high], color=INK, linewidth=1)
        axes.fill_between(
            [low, high], [low / 1.3, high / 1.3], [1.3 * low, 1.3 * high], color=MUTED, alpha=0.12, lw=0
        )
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks = [value for value in (1, 2, 5, 10, 20, 50, 100, 200, 500) if low <= value <= high]
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.set_yticks(ticks, list(map(str, ticks)))
        axes.minorticks_off()
        error = (part["predicted_s"] / part["measured_s"] - 1).abs()
        axes.set_title(f"its {way} held out")
        axes.set_xlabel("measured (ms an output token)")
        middle, most = share_text(error.median()), share_text(error.quantile(0.9))
        said.append(f"{way} held out: median error {middle}, nine in ten within {most}")
    panels[0][0].set_ylabel("estimated (ms)")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower left", ncols=3, markerscale=2)
    figure.alt = f"{title}. Estimated against measured milliseconds an output token. " + "; ".join(said) + "."
    return figure
