"""Traffic as figures, tables and sentences: layouts under load, memory over time, what is recommended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from decodebench.forecast.recommend import Recommendation, recommend
from decodebench.forecast.simulate import Simulation, compare_simulations, simulate
from decodebench.forecast.step_costs import step_floor
from decodebench.forecast.traces import read_traffic
from decodebench.layout.plan import plan
from decodebench.show.charts import bars, lines
from decodebench.show.look import BLUE, FAINT, GREEN, ORANGE, SKY, VERMILLION, Chart, chart, styled
from decodebench.words import bytes_text, seconds_text, share_text

if TYPE_CHECKING:
    import pandas as pd

#: causes of memory in the order in which they are stacked: column of ``over_time``, name, colour
CAUSES = (
    ("content_bytes", "tokens and states that steps read", BLUE),
    ("last_block_bytes", "unused slots of held blocks", ORANGE),
    ("padding_bytes", "padding of pages and groups", VERMILLION),
    ("free_bytes", "free", FAINT),
)


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
    figure, (above, below) = chart(
        "traffic-over-time", title, subtitle=subtitle, rows=2, size=(8.2, 5.4), sharex=True
    )
    table = found.over_time()
    minutes = table["time"] / 60
    gib = [table[column] / 2**30 for column, _, _ in CAUSES]
    above.stackplot(
        minutes,
        gib,
        labels=[name for _, name, _ in CAUSES],
        colors=[c for *_, c in CAUSES],
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
    whole = sum(float(table[column].mean()) for column, _, _ in CAUSES)
    shares = ", ".join(
        f"{name} {share_text(float(table[column].mean()) / whole)}" for column, name, _ in CAUSES
    )
    figure.alt = (
        f"{title}. Stacked areas of cache memory over {minutes.iloc[-1]:.0f} minutes, means: {shares} of "
        f"{bytes_text(round(whole))}. Below, requests running (up to {table['running'].max():.0f}) and waiting "
        f"(up to {table['waiting'].max():.0f})."
    )
    return figure


def served(
    model: str, machine: str, trace: str, memory: str, groupings: Sequence[str], rate: float, **settings
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


def paired(a: Simulation, b: Simulation, ttft: float, tpot: float) -> pd.DataFrame:
    """``compare_simulations`` with readable names."""
    table = compare_simulations(a, b, ttft, tpot)
    return table.rename(columns={"a": a.layout.grouping, "b": b.layout.grouping})


def traffic_verdict(first: Simulation, other: Simulation, ttft: float, tpot: float) -> str:
    """What another grouping would do to the same traffic, in one line."""
    a, b = first.facts(ttft, tpot), other.facts(ttft, tpot)
    row = compare_simulations(first, other, ttft, tpot).set_index("metric").loc["latency_s"]
    told = (
        f"a request takes {seconds_text(abs(row['difference']))} {'longer' if row['difference'] > 0 else 'less'}"
        if row["distinguishable"]
        else "requests take the same time within noise"
    )
    return (
        f"{first.traffic.name} on {first.layout.model.name}: vLLM's layout keeps {a['goodput']:.2f} requests a "
        f"second within the limits with {a['preemptions']:,} preemptions, {other.layout.grouping} "
        f"{b['goodput']:.2f} with {b['preemptions']:,}; {told}."
    )


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


def recommendation_verdict(found: Sequence[Recommendation]) -> str:
    """The largest gain, and how often the defaults stand, in one line."""
    best = max(found, key=lambda one: one.best.facts["goodput"] / max(one.start.facts["goodput"], 1e-9))
    stand = sum(not one.steps for one in found)
    changed = best.steps[0].split(":")[0] if best.steps else "nothing"
    return (
        f"Defaults stand in {stand} of {len(found)} cases; most is gained by {best.model} under {best.traffic}: "
        f"{best.start.facts['goodput']:.2f} → {best.best.facts['goodput']:.2f} requests a second within the "
        f"limits, first by {changed}."
    )
