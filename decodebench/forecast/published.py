"""Decode figures that others published, next to the floor of each.

``data/published/decode.csv`` has a row a figure: model, machine, engine, parallel sizes, concurrency,
lengths, the time of a token and of the first one, its source, and why it is left out of the fit where it
is. ``data/published/README.md`` says where rows come from and how they were chosen.
"""

from __future__ import annotations

import csv
import datetime
from dataclasses import dataclass, replace
from functools import cache

from decodebench.forecast.bound import Bound, Prepared, prepare
from decodebench.models.load import load_model
from decodebench.models.model import Model
from decodebench.shipped import shipped

FOLDER = "data/published"
#: why a figure is left out whose parallel sizes contradict each other
AMBIGUOUS = "ranks are ambiguous"


@dataclass(frozen=True)
class Figure:
    """One published figure. ``seconds``: of an output token; ``date`` in years (2026.25 is April 2026)."""

    model: str
    machine: str
    engine: str
    version: str
    date: float | None
    tensor_parallel_size: int
    data_parallel_size: int
    expert_parallel: bool
    concurrency: int
    input_tokens: int
    output_tokens: int
    context: int
    weights: str
    kv_cache_dtype: str
    seconds: float
    kind: str
    source: str
    left_out: str
    note: str

    @property
    def quantization(self) -> str | dict[str, str] | None:
        """The scheme in the form that ``bound`` takes."""
        if self.weights == "none":
            return None
        pairs = [piece.partition(":") for piece in self.weights.split()]
        return {role: name for role, _, name in pairs} if pairs[0][1] else self.weights

    @property
    def has_floor(self) -> bool:
        """Whether its requests and its ranks are known."""
        return self.concurrency > 0 and self.left_out != AMBIGUOUS

    def deployment(self) -> Prepared:
        """The model on the machine under the figure's parallel sizes and formats."""
        return deployment(
            self.model,
            self.machine,
            self.tensor_parallel_size,
            self.data_parallel_size,
            self.expert_parallel,
            self.weights,
            self.kv_cache_dtype,
        )

    def bound(self) -> Bound:
        """The floor of a step that decodes for all concurrent requests at their middle length."""
        return self.deployment().at(self.concurrency, self.context)


@cache
def published_model(name: str) -> Model:
    """A model of a published figure: from data/published/models, or one that ``load_model`` knows."""
    path = shipped(f"{FOLDER}/models/{name}.json")
    return replace(load_model(path if path.is_file() else name), name=name)


@cache
def deployment(
    model: str, machine: str, tp: int, dp: int, experts: bool, weights: str, kv_cache_dtype: str
) -> Prepared:
    """What a figure was measured on, ready to be bounded; a checkpoint that names its cache's dtype keeps it."""
    figure = Figure(
        model, machine, "", "", None, tp, dp, experts, 1, 1, 1, 1, weights, kv_cache_dtype, 1, "", "", "", ""
    )
    known = published_model(model)
    if kv_cache_dtype != "auto" and known.kv_cache_dtype != "auto":
        kv_cache_dtype = "auto"
    return prepare(
        known,
        machine,
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        enable_expert_parallel=experts,
        quantization=figure.quantization,
        kv_cache_dtype=kv_cache_dtype,
    )


@cache
def published() -> tuple[Figure, ...]:
    """All figures of data/published/decode.csv, in the file's order."""
    with shipped(f"{FOLDER}/decode.csv").open(newline="", encoding="utf-8") as file:
        return tuple(figure(row) for row in csv.DictReader(file))


def figure(row: dict[str, str]) -> Figure:
    """A row of the table as a figure."""
    return Figure(
        model=row["model"],
        machine=row["machine"],
        engine=row["engine"],
        version=row["version"],
        date=years(row["date"]),
        tensor_parallel_size=int(row["tensor_parallel_size"]),
        data_parallel_size=int(row["data_parallel_size"]),
        expert_parallel=row["expert_parallel"] == "1",
        concurrency=int(row["concurrency"]),
        input_tokens=int(row["input_tokens"]),
        output_tokens=int(row["output_tokens"]),
        context=int(row["context"]),
        weights=row["weights"],
        kv_cache_dtype=row["kv_cache_dtype"],
        seconds=float(row["tpot_ms"]) / 1e3,
        kind=row["kind"],
        source=row["source"],
        left_out=row["left_out"],
        note=row["note"],
    )


def years(date: str) -> float | None:
    """``2026-04-01`` as 2026.25."""
    if not date:
        return None
    day = datetime.date.fromisoformat(date)
    return day.year + (day.timetuple().tm_yday - 1) / 365


def for_fit() -> tuple[Figure, ...]:
    """Figures that the efficiency model is fitted to: not left out, and not faster than the floor."""
    return tuple(f for f in published() if not f.left_out and f.seconds > f.bound().seconds)
