"""Published figures, their floors and held-out estimates as tables: what notebooks show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from decodebench.forecast.bound import Bound
from decodebench.forecast.efficiency import errors, held_out, step_of, stored
from decodebench.forecast.judge import judge
from decodebench.forecast.published import for_fit, published
from decodebench.forecast.results import Measured

if TYPE_CHECKING:
    import pandas as pd

#: what is held out → in words
HELD_OUT = {"random": "three figures in ten", "machine": "a whole machine", "model": "a whole model"}


def measured_over_floor(every: int = 1) -> pd.DataFrame:
    """Every published figure (or every n-th) beside its floor: ``times`` is measured over floor."""
    import pandas as pd

    rows = []
    for figure in published()[::every]:
        floor = figure.bound().seconds if figure.has_floor else None
        rows.append(
            {
                "model": figure.model,
                "machine": figure.machine,
                "engine": figure.engine,
                "kind": figure.kind,
                "concurrency": figure.concurrency,
                "context": figure.context,
                "measured_s": figure.seconds,
                "floor_s": floor,
                "times": figure.seconds / floor if floor else None,
                "left_out": figure.left_out,
                "source": figure.source,
            }
        )
    return pd.DataFrame(rows)


def impossible(every: int = 1) -> pd.DataFrame:
    """Published figures below their floor, with what is known of them and what would explain them."""
    import pandas as pd

    rows = []
    for figure in published()[::every]:
        if not figure.has_floor or figure.seconds >= figure.bound().seconds:
            continue
        found = judge(Measured(figure.seconds, source=figure.source), figure.bound())
        rows.append(
            {
                "model": figure.model,
                "machine": figure.machine,
                "engine": figure.engine,
                "concurrency": figure.concurrency,
                "chips": figure.deployment().chips,
                "measured_s": figure.seconds,
                "floor_s": found.bound.seconds,
                "faster": found.share,
                "known": figure.left_out or "nothing unusual",
                "would be true if": "; ".join(found.explanations[1:]) or found.explanations[0],
            }
        )
    names = ["model", "machine", "engine", "concurrency", "chips", "measured_s", "floor_s", "faster", "known"]
    return pd.DataFrame(rows, columns=[*names, "would be true if"])


def predictions(ways: Sequence[str] = ("machine", "model"), every: int = 1) -> pd.DataFrame:
    """Every figure's estimate by a model that was fitted without its machine, or without its model."""
    import pandas as pd

    figures = for_fit()[::every]
    steps, measured = [step_of(f) for f in figures], [f.seconds for f in figures]
    rows = []
    for way in ways:
        for row in held_out(steps, measured, way):
            figure = figures[row["figure"]]
            rows.append(row | {"model": figure.model, "machine": figure.machine, "engine": figure.engine})
    return pd.DataFrame(rows)


def error_table(found: pd.DataFrame) -> pd.DataFrame:
    """Errors of held-out estimates, beside those that ``predict`` quotes (of all figures)."""
    import pandas as pd

    rows = []
    for way, part in found.groupby("held_out", sort=False):
        now, quoted = errors(part.to_dict("records")), stored()["errors"][way]
        rows.append(
            {
                "held out": HELD_OUT[way],
                "figures": now["figures"],
                "median_error_share": now["median"],
                "p90_error_share": now["p90"],
                "quoted_median_share": quoted["median"],
                "quoted_p90_share": quoted["p90"],
            }
        )
    return pd.DataFrame(rows)


def parts_table(bounds: Sequence[Bound]) -> pd.DataFrame:
    """Milliseconds of weights, experts, cache and messages of several floors, a row each."""
    import pandas as pd

    rows = []
    for bound in bounds:
        spent = bound.parts
        experts = spent.get("experts", 0.0)
        messages = sum(value for part, value in spent.items() if part.startswith("all-"))
        rows.append(
            {
                "case": f"{bound.model}, {bound.batch:g} × {bound.context}",
                "weights_ms": 1e3 * (bound.weight_seconds - experts),
                "experts_ms": 1e3 * experts,
                "cache_ms": 1e3 * bound.cache_seconds,
                "messages_ms": 1e3 * messages,
            }
        )
    return pd.DataFrame(rows)
