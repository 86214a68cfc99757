"""Traffic as figures, tables and sentences: layouts under load, memory over time, what is recommended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from decodebench.forecast.recommend import Recommendation, recommend
from decodebench.forecast.simulate import Simulation, compare_simulations, simulate
from decodebench.forecast.step_costs import step_floor
from decodebench.forecast.traces import read_traffic
from decodebench.layout.plan import plan
from decodebench.show.cells import Note, Table, note
from decodebench.show.cells import table as cell_table
from decodebench.show.charts import bars, lines
from decodebench.show.figures import or_a_sentence
from decodebench.show.look import BLUE, FAINT, GREEN, GROUND, ORANGE, SKY, VERMILLION, Chart, chart, styled
from decodebench.show.verdicts import Answer
from decodebench.words import bytes_text, counted, seconds_text, share_text, short

if TYPE_CHECKING:
    import pandas as pd

#: causes of memory in the order in which they are stacked: column of ``over_time``, name, colour, pattern
CAUSES = (
    ("content_bytes", "tokens and states that steps read", BLUE, ""),
    ("last_block_bytes", "unused slots of held blocks", ORANGE, "////"),
    ("padding_bytes", "padding of pages and groups", VERMILLION, "xxxx"),
    ("free_bytes", "free", FAINT, ""),
)


@or_a_sentence
def rates(table: pd.DataFrame, title: str, subtitle: str = "") -> Chart:
    """Requests within the limits by the rate of a sweep's traffic, a line a grouping."""
    return lines(
        table[table["status"] == "ok"],
        "rate",
        "goodput",
        "grouping",
        name="traffic-rates",
        title=title,
        subtitle=subtitle,
        x_label="requests a second that arrive",
        y_label="requests a second within the limits",
        log_x=False,
    )


@styled
def over_time(found: Simulation, title: str, subtitle: str = "") -> Chart:
    """Memory of the cache by cause, and requests that run and wait, over the simulated time."""
    model = found.layout.model
    subtitle = "; ".join(filter(None, [subtitle, model.reading if model else None]))
    figure, (above, below) = chart(
        "traffic-over-time", title, subtitle=subtitle, rows=2, size=(8.2, 5.4), sharex=True
    )
    table = found.over_time()
    minutes = table["time"] / 60
    gib = [table[column] / 2**30 for column, *_ in CAUSES]
    above.stackplot(
        minutes,
        gib,
        labels=[name for _, name, *_ in CAUSES],
        colors=[colour for _, _, colour, _ in CAUSES],
        hatch=[pattern for *_, pattern in CAUSES],
        edgecolor=GROUND,
        linewidth=0,
        step="post",
    )
    above.set_ylabel("cache (GiB)")
    below.plot(minutes, table["running"], color=GREEN, label="running", linewidth=1.2, drawstyle="steps-post")
    below.plot(
        minutes,
        table["waiting"],
        color=SKY,
        label="waiting",
        linewidth=1.2,
        linestyle="--",
        drawstyle="steps-post",
    )
    below.set_ylabel("requests")
    below.set_xlabel("time since the first request (minutes)")
    for axes in (above, below):
        axes.margins(x=0)
        axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower left", ncols=3)
    whole = sum(float(table[column].mean()) for column, *_ in CAUSES)
    shares = ", ".join(
        f"{name} {share_text(float(table[column].mean()) / whole)}" for column, name, *_ in CAUSES
    )
    figure.alt = (
        f"{title}. Stacked areas of cache memory over {minutes.iloc[-1]:.0f} minutes, means: {shares} of "
        f"{bytes_text(round(whole))}. Below, requests running (up to {table['running'].max():.0f}) and waiting "
        f"(up to {table['waiting'].max():.0f})."
    )
    return figure


def served(
    model: str, machine: str, trace: str, memory: str, groupings: Sequence[str], rate: float, **settings: Any
) -> list[Simulation]:
    """The same traffic on several groupings of a model. ``settings``: requests, efficiency, max_model_len."""
    traffic = read_traffic(trace, rate=rate)
    traffic = traffic.first(settings.get("requests") or len(traffic))
    steps = step_floor(model, machine, settings.get("efficiency", 1.0))
    return [
        simulate(
            plan(model, memory, grouping=grouping, max_model_len=settings.get("max_model_len", "auto")),
            traffic,
            steps,
            progress=False,
        )
        for grouping in groupings
    ]


def paired(found: Sequence[Simulation], ttft: float, tpot: float) -> Table | Note:
    """The second simulation less the first, request by request; a sentence where there is no second."""
    if len(found) < 2:
        return note("No comparison here: one layout alone was asked for.")
    a, b = found[0], found[1]
    first, second = a.layout.grouping, b.layout.grouping
    if first == second:  # two names of one grouping
        second = f"{second} (again)"
    return cell_table(
        compare_simulations(a, b, ttft, tpot).rename(columns={"a": first, "b": second}),
        "paired",
        caption=f"{second} less {first}: seconds, preemptions a request, and the share within the limits",
    )


def best_rate(table: pd.DataFrame) -> str:
    """A title: up to which of the rates shown more requests a second mean more good answers."""
    rows = table[(table["status"] == "ok") & table["goodput"].notna()]
    rates = sorted(rows["rate"].dropna().astype(float).unique())
    if len(rates) < 2:
        return "Requests within the limits, by layout"
    best = rows.loc[rows.groupby("grouping", sort=False)["goodput"].idxmax()]
    tops = sorted({float(rate) for rate in best["rate"]})
    if tops == [rates[-1]]:
        return f"Good answers rise with the rate, up to {rates[-1]:g} requests a second"
    at = f"{tops[0]:g}" if len(tops) == 1 else f"{tops[0]:g} to {tops[-1]:g}, by layout"
    return f"Most good answers come at {at} requests a second that arrive"


def fullest(found: Simulation) -> str:
    """A title: how full the cache gets, and how many requests wait."""
    table = found.over_time()
    held = 1 - float((table["free_bytes"] / table[[column for column, *_ in CAUSES]].sum(axis=1)).min())
    waiting = int(table["waiting"].max())
    told = f"up to {counted(waiting, 'request')} wait" if waiting else "no request waits"
    return f"At most {share_text(held)} of the cache is held, and {told}"


def traffic_verdict(found: Sequence[Simulation], ttft: float, tpot: float) -> Answer:
    """What the second grouping does to the same traffic that the first one saw, in one line."""
    first = found[0]
    assert first.layout.model is not None, "planned from a config"
    facts = first.facts(ttft, tpot)
    text = (
        f"{first.traffic.name} on {short(first.layout.model.name)}: the grouping {first.layout.grouping} keeps "
        f"{facts['goodput']:.2f} requests a second within the limits with {facts['preemptions']:,} preemptions"
    )
    if len(found) == 1:
        return f"{text}; no other layout was asked for.", None
    other = found[1]
    facts = other.facts(ttft, tpot)
    row = compare_simulations(first, other, ttft, tpot).set_index("metric").loc["latency_s"]
    longer = "longer" if row["difference"] > 0 else "less"
    told = (
        f"a request takes {seconds_text(abs(row['difference']))} {longer}, beyond noise"
        if row["distinguishable"]
        else "requests take the same time within noise"
    )
    return (
        f"{text}, {other.layout.grouping} {facts['goodput']:.2f} with {facts['preemptions']:,}; {told}."
    ), None


# -- recommendations ------------------------------------------------------------------------------


def recommendations(
    machine: str,
    deployments: Sequence[tuple[str, str, str, float]],
    ttft: float,
    tpot: float,
    efficiency: float,
    requests: int | None = None,
) -> list[Recommendation]:
    """One search for each (model, memory, trace, requests a second)."""
    found = []
    for model, memory, trace, rate in deployments:
        traffic = read_traffic(trace, rate=rate)
        traffic = traffic.first(requests or len(traffic))
        found.append(
            recommend(
                model, machine, traffic, memory, ttft=ttft, tpot=tpot, efficiency=efficiency, progress=False
            )
        )
    return found


def recommendation_table(found: Sequence[Recommendation]) -> pd.DataFrame:
    """One row a search: goodput and preemptions by default and as recommended, and what was changed."""
    import pandas as pd

    return pd.DataFrame(
        [
            {
                "model": one.model,
                "traffic": one.traffic,
                "default goodput": one.start.facts["goodput"],
                "recommended goodput": one.best.facts["goodput"],
                "default latency_s": one.start.facts["latency_mean_s"],
                "recommended latency_s": one.best.facts["latency_mean_s"],
                "tried": len(one.tried),
                "changes": "; ".join(one.steps) or "none beyond noise",
                "flags": one.flags,
            }
            for one in found
        ]
    )


def recommendation_bars(found: Sequence[Recommendation], title: str, subtitle: str = "") -> Chart:
    """Requests a second within the limits, by default and as recommended."""
    table = recommendation_table(found)
    table["case"] = table["model"] + ", " + table["traffic"].str.replace("-2023", "")
    return bars(
        table,
        "case",
        {"default goodput": "vLLM's defaults", "recommended goodput": "recommended"},
        name="recommendation",
        title=title,
        subtitle=subtitle,
        x_label="requests a second within the limits",
    )


def recommendation_verdict(found: Sequence[Recommendation]) -> Answer:
    """How often the defaults stand, and the largest gain, in one line."""
    if not found:
        return "No deployment was asked for.", None
    changed = [one for one in found if one.steps]
    stand = f"Defaults stand in {len(found) - len(changed)} of {counted(len(found), 'case')}"
    more = [one for one in changed if one.best.facts["goodput"] > one.start.facts["goodput"]]
    if not more:
        return f"{stand}; no change keeps more requests within the limits beyond noise.", None
    best = max(more, key=lambda one: one.best.facts["goodput"] / max(one.start.facts["goodput"], 1e-9))
    return (
        f"{stand}; most is gained by {short(best.model)} under {best.traffic}: "
        f"{best.start.facts['goodput']:.2f} → {best.best.facts['goodput']:.2f} requests a second within the "
        f"limits, first by {best.steps[0].split(':')[0]}."
    ), None
