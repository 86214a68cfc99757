"""A measured decode figure against its floor: impossible, near the limit, or the share that was reached.

A figure below the floor was not measured under the assumptions that the floor was made with. Each of the
known mistakes changes one of them; those that would lift the figure above the floor are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodebench.errors import DecodebenchError
from decodebench.forecast.bound import Bound, BoundError, Prepared, prepare
from decodebench.forecast.quantization import FORMATS
from decodebench.forecast.results import Measured, read_results
from decodebench.words import seconds_text, share_text, some

if TYPE_CHECKING:
    from decodebench.forecast.machines import Machine
    from decodebench.models.model import Model

#: share of the floor from which a figure is near the limit: what the best kernels reach of a data sheet's bandwidth
NEAR = 0.8
IMPOSSIBLE, NEAR_LIMIT, POSSIBLE = "impossible", "near the limit", "possible"


@dataclass(frozen=True)
class Judgement:
    """``verdict``: impossible, near the limit or possible; ``share``: the floor's share of the measured step.

    ``explanations``: assumptions of the floor that would have to change for an impossible figure to be true.
    """

    measured: Measured
    bound: Bound
    verdict: str
    explanations: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float:
        """The measured time of a step: of as many tokens as a step gives."""
        return self.measured.seconds * self.measured.tokens_per_step

    @property
    def share(self) -> float:
        """The floor over the measured step: above 1 it is impossible."""
        return self.bound.seconds / self.step_seconds

    def __str__(self) -> str:
        step, floor = seconds_text(self.step_seconds), seconds_text(self.bound.seconds)
        b = self.bound
        where = f"{b.model} on {b.machine.title} × {b.ranks}"
        of = f"{b.requests_text}, {where}"
        if self.verdict == IMPOSSIBLE:
            text = f"{step} a step is {self.share:.2f} times faster than the floor of {floor}"
        else:
            text = f"{step} a step, floor {floor}: {share_text(self.share)} of what physics allows"
        text = f"{self.verdict}: {text} ({of})"
        lines = [text, f"measured by {self.measured.source}"]
        if self.verdict == IMPOSSIBLE:
            lines += [f"it would be true if {why}" for why in self.explanations] or [
                "no single known mistake explains it: check the model, the machine and the unit"
            ]
        if self.measured.tokens_per_step > 1:
            lines.append(f"a step gives {self.measured.tokens_per_step:.2f} tokens (speculative decoding)")
        notes = [*self.measured.notes, *([b.guess] if b.guess else [])]
        return "\n".join([*lines, *(f"note: {note}" for note in notes)])

    def to_dict(self) -> dict:
        """The verdict as JSON takes it; seconds a step, the share from 0 to 1 (above: impossible)."""
        return {
            "verdict": self.verdict,
            "share": self.share,
            "step_seconds": self.step_seconds,
            "floor_seconds": self.bound.seconds,
            "explanations": list(self.explanations),
            "notes": list(self.measured.notes),
            "source": self.measured.source,
            "bound": self.bound.to_dict(),
        }


def judge(measured: Measured | float | Mapping | str | Path, bound: Bound) -> Judgement:
    """A figure against a floor for the same requests.

    ``measured``: seconds of an output token, a result file of vLLM, GuideLLM, genai-perf or AIPerf, or
    its fields. Raises ``ResultError`` where it holds no decode figure, ``BoundError`` where it holds
    several (``judge_all`` takes those).
    """
    if not isinstance(measured, Measured):
        found = read_results(measured)
        if len(found) != 1:
            raise BoundError(
                f"{measured}: {len(found)} figures, and one floor: judge_all makes a floor for each"
            )
        measured = found[0]
    step = measured.seconds * measured.tokens_per_step
    share = bound.seconds / step
    if share > 1:
        return Judgement(measured, bound, IMPOSSIBLE, tuple(explanations(step, bound)))
    return Judgement(measured, bound, NEAR_LIMIT if share >= NEAR else POSSIBLE)


def judge_all(
    source: float | Mapping | str | Path,
    model: Model | str | Mapping,
    machine: Machine | str,
    *,
    batch: float | None = None,
    context: int | None = None,
    **deployment: Any,
) -> tuple[Judgement, ...]:
    """Every figure of a result against a floor for its own requests.

    ``batch`` and ``context`` replace what the result says; ``deployment``: what ``bound`` takes beside
    the requests. Raises ``BoundError`` where neither says it.
    """
    prepared = prepare(model, machine, **deployment)
    return tuple(judge(one, floor_for(prepared, one, batch, context)) for one in read_results(source))


def floor_for(prepared: Prepared, one: Measured, batch: float | None, context: int | None) -> Bound:
    """The floor of the requests that a figure was measured with."""
    batch, context = batch or one.batch, context or one.context
    if batch is None or context is None:
        name = "batch" if batch is None else "context"
        raise BoundError(f"{one.source} does not say the {name}: give it (--{name})")
    positions = max(1.0, one.tokens_per_step)
    return prepared.at(batch, context, tokens_per_step=positions)


def explanations(step: float, bound: Bound) -> list[str]:
    """Assumptions that would have to change for a step of ``step`` seconds to be possible, one at a time."""
    prepared = bound.deployment
    if prepared is None:
        return []
    lengths = bound.lengths
    tokens = bound.tokens_per_step

    def possible(other: Prepared, requests: Mapping[int, float] | None = None) -> bool:
        return other.at(context=requests or lengths, tokens_per_step=tokens).seconds <= step

    found = [
        f"a step gave {bound.seconds / step:.2g} tokens for each that was counted (speculative decoding), or the "
        "clock took a part of a step for a step (the first scheduled pass, asynchronous calls)"
    ]
    if bound.experts and possible(replace(prepared, routing="same")):
        found.append("all tokens chose the same experts (identical or dummy prompts)")
    if possible(prepared, {1: sum(lengths.values())}):
        longest = _longest(prepared, lengths, step, tokens)
        found.append(
            f"the cache was not read as believed (never filled, or one prefix for all): {longest:,} tokens a request"
        )
    total = sum(lengths.values())
    together = _most(prepared, lengths, step, tokens)
    if together:
        found.append(
            f"no more than {together:,} of the {total:,.0f} requests decoded together: the others waited, or ran on "
            "other replicas (the concurrency is a cluster's)"
        )
    lighter = [
        name for name in ("fp8", "nvfp4") if _heavier(prepared, name) and possible(quantized(prepared, name))
    ]
    if lighter:
        found.append(f"weights were {some(lighter[:1])}")
    if (smaller := changed(prepared, kv_cache_dtype="fp8")) and possible(smaller):
        found.append("the cache was fp8")
    ranks = prepared.tensor_parallel_size
    if ranks > 1 and prepared.data_parallel_size == 1:
        apart = changed(
            prepared, tensor_parallel_size=1, data_parallel_size=ranks, enable_expert_parallel=True
        )
        if apart and possible(apart):
            found.append(
                f"attention was data parallel: each of the {ranks} ranks kept the cache of its own requests alone"
            )
    return found


def _longest(prepared: Prepared, lengths: Mapping[int, float], step: float, tokens: float) -> int:
    """The length of every request at which the step would be possible."""
    low, high, count = 1, max(lengths), sum(lengths.values())
    while high - low > 1:
        middle = (low + high) // 2
        fits = prepared.at(context={middle: count}, tokens_per_step=tokens).seconds <= step
        low, high = (middle, high) if fits else (low, middle)
    return low


def _most(prepared: Prepared, lengths: Mapping[int, float], step: float, tokens: float) -> int:
    """How many of the requests may decode together for the step to be possible; 0 where not one."""
    total = sum(lengths.values())

    def possible(count: int) -> bool:
        fewer = {length: number * count / total for length, number in lengths.items()}
        return prepared.at(context=fewer, tokens_per_step=tokens).seconds <= step

    low, high = 0, max(1, int(total))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low


def _heavier(prepared: Prepared, name: str) -> bool:
    role = "experts" if any(part.role == "experts" for part in prepared.parts) else "mlp"
    return prepared.formats[role].bits > FORMATS[name].bits


def quantized(prepared: Prepared, name: str) -> Prepared:
    """The same deployment with all projections and experts in another format."""
    changed = {
        role: FORMATS[name]
        if role in ("attention", "latent", "mixer", "mlp", "experts", "shared_experts")
        else old
        for role, old in prepared.formats.items()
    }
    return replace(prepared, formats=changed)


def changed(prepared: Prepared, **options: Any) -> Prepared | None:
    """The same deployment with other options; None where they do not go with the model."""
    same: dict[str, Any] = {
        "tensor_parallel_size": prepared.tensor_parallel_size,
        "pipeline_parallel_size": prepared.pipeline_parallel_size,
        "data_parallel_size": prepared.data_parallel_size,
        "enable_expert_parallel": prepared.expert_parallel_size > 1,
        "routing": prepared.routing,
        "quantization": None,
    }
    try:
        other = prepare(prepared.model, prepared.machine, **same | options)
    except DecodebenchError:
        return None
    return replace(other, formats=prepared.formats)
