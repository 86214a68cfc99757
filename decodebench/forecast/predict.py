"""An estimate of a step's time in an engine, with the error it had on figures that were held out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decodebench.forecast.bound import Bound, BoundError, prepare, requests
from decodebench.forecast.efficiency import ENGINES, efficiency, step, stored
from decodebench.forecast.machines import Machine
from decodebench.forecast.machines import machine as find_machine
from decodebench.models.model import Model
from decodebench.words import seconds_text, share_text


@dataclass(frozen=True)
class Prediction:
    """The estimated seconds of an output token of each request, and the floor beside it.

    ``terms``: seconds by what takes them, the correction by figures like it among them. ``error``: the
    median and the 90th percentile of the relative error on figures held out in the way named by
    ``held_out``: as if the model, the machine or only this figure had not been seen.
    """

    bound: Bound
    engine: str
    seconds: float
    terms: Mapping[str, float]
    error: Mapping[str, float]
    held_out: str
    notes: tuple[str, ...] = ()

    @property
    def low(self) -> float:
        """Nine in ten held-out figures were no faster than this, relative to their estimate."""
        return max(self.bound.seconds, self.seconds / (1 + self.error["p90"]))

    @property
    def high(self) -> float:
        """Nine in ten held-out figures were no slower than this, relative to their estimate."""
        return self.seconds / max(0.05, 1 - self.error["p90"])

    @property
    def share(self) -> float:
        """The floor's share of the estimate."""
        return self.bound.seconds / self.seconds

    def __str__(self) -> str:
        large = {name: value for name, value in self.terms.items() if abs(value) >= 0.02 * self.seconds}
        terms = [
            f"{name} {seconds_text(value)}"
            for name, value in sorted(large.items(), key=lambda item: -item[1])
            if name != "correction"
        ]
        if missed := large.get("correction"):
            terms.append(
                f"{'more' if missed > 0 else 'less'} in figures like it: {seconds_text(abs(missed))}"
            )
        span = f"{seconds_text(self.low)} to {seconds_text(self.high)}"
        return (
            f"{self.bound.model} on {self.bound.machine.title} × {self.bound.ranks}, {self.engine}: "
            f"about {seconds_text(self.seconds)} an output token ({span})\n"
            f"floor {seconds_text(self.bound.seconds)}, {share_text(self.share)} of the estimate\n"
            f"{', '.join(terms)}\n"
            f"error on {HELD_OUT[self.held_out]}: median {share_text(self.error['median'])}, nine in ten within "
            f"{share_text(self.error['p90'])}"
            + "".join(f"\nnote: {note}" for note in (*self.notes, self.bound.guess) if note)
        )

    def to_dict(self) -> dict:
        """The estimate as JSON takes it; times in seconds."""
        return {
            "seconds": self.seconds,
            "low": self.low,
            "high": self.high,
            "floor": self.bound.seconds,
            "terms": dict(self.terms),
            "error": dict(self.error),
            "held_out": self.held_out,
            "reading": self.bound.guess,
        }


#: how figures were held out → in words
HELD_OUT = {
    "random": "figures of the same models and machines that were held out",
    "machine": "machines that were held out",
    "model": "models that were held out",
}


def predict(
    model: Model | str | Mapping,
    machine: Machine | str,
    *,
    engine: str = "vllm",
    batch: float = 1,
    context: int | None = None,
    input_tokens: int = 0,
    output_tokens: int = 0,
    year: float = 2026.3,
    **deployment: Any,
) -> Prediction:
    """The time of an output token in an engine, estimated from published figures, beside its floor.

    With ``input_tokens`` and ``output_tokens`` the engine serves: requests that end are replaced, and
    their prompts are computed in the same steps; ``context`` is then the middle length unless given.
    With ``context`` alone it only decodes. ``year``: engines get faster (2026.25 is April 2026).
    ``deployment``: what ``bound`` takes beside the requests.

    Raises ``BoundError`` for an engine without figures, and what ``bound`` raises.
    """
    if engine not in ENGINES:
        raise BoundError(f"engine = {engine!r}: figures are of {', '.join(ENGINES)}")
    serving = input_tokens > 0 and output_tokens > 0
    if context is None:
        if not serving:
            raise BoundError("context is missing: give it, or input_tokens and output_tokens")
        context = round(input_tokens + output_tokens / 2)
    prepared = prepare(model, machine, **deployment)
    if len(requests(batch, context)) != 1:
        raise BoundError(f"context = {context!r}: an estimate is for requests of one length")
    bound = prepared.at(batch, context)
    one = step(
        prepared,
        batch,
        context,
        engine=engine,
        year=year,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        serving=serving,
    )
    known = efficiency()
    one = replace(one, model=short_name(one.model))
    seen = {"model": {s.model for s in known.steps}, "machine": {s.machine for s in known.steps}}
    held_out = next((by for by in ("model", "machine") if getattr(one, by) not in seen[by]), "random")
    generations = {find_machine(name).generation for name in seen["machine"]}
    notes = []
    if prepared.machine.generation not in generations:
        kind = prepared.machine.generation
        notes.append(
            f"no figure is of a {kind} chip ({', '.join(sorted(generations))} alone): the error may be larger"
        )
    found = known.terms(one)
    total = max(sum(found.values()), bound.seconds)
    return Prediction(bound, engine, total, found, stored()["errors"][held_out], held_out, tuple(notes))


def short_name(model: str) -> str:
    """A model's name without the folders and the ending of its path."""
    path = Path(model)
    name = path.name.removesuffix(".json")
    return path.parent.name if name == "config" and path.parent.name else name
