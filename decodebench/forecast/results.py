"""Result files of benchmark tools as decode figures: vLLM, GuideLLM, genai-perf and AIPerf, or plain numbers."""

from __future__ import annotations

import json
import os.path
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from decodebench.errors import DecodebenchError

MAX_FILE_BYTES = 512 * 2**20


class ResultError(DecodebenchError):
    """A result that cannot be read as a decode figure: names the file and the field, and what is expected."""


@dataclass(frozen=True)
class Measured:
    """One decode figure. ``seconds``: of an output token of one request (after the first).

    ``batch``: requests that decode together on average, ``output tokens a second`` times ``seconds``
    where the tool says no better. ``tokens_per_step``: more than one where the engine speculates.
    ``notes``: what the figure holds besides decoding.
    """

    seconds: float
    batch: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    tokens_per_step: float = 1.0
    source: str = "a plain number"
    notes: tuple[str, ...] = field(default=())

    @property
    def context(self) -> int | None:
        """The middle length of a request while it decodes."""
        if self.input_tokens is None or self.output_tokens is None:
            return None
        return max(1, round(self.input_tokens + self.output_tokens / 2))


def read_results(source: float | Mapping | str | Path) -> tuple[Measured, ...]:
    """The decode figures of a number of seconds, of fields, of a file, or of a folder of files.

    Raises ``ResultError`` where there is none.
    """
    if isinstance(source, bool):
        raise ResultError(f"measured = {source!r}: seconds of an output token, or a result, are expected")
    if isinstance(source, int | float):
        return (Measured(_positive(source, "measured", "a plain number")),)
    if isinstance(source, Mapping):
        return read_fields(source, "the fields given")
    path = Path(source).expanduser()
    if os.path.isdir(path):
        return read_folder(path)
    if not os.path.isfile(path):
        raise ResultError(
            f"{path}: no such file: give the JSON that the benchmark saved, or seconds of a token"
        )
    return read_fields(read_json(path), str(path))


def read_json(path: Path) -> Mapping:
    """A file's JSON object; of JSON lines, as vLLM appends them, the last."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ResultError(f"{path}: {path.stat().st_size} bytes are too many for a result")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path}: cannot be read as text ({type(error).__name__})") from None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        try:
            values = json.loads(text.strip().splitlines()[-1])
        except (ValueError, IndexError, RecursionError):
            raise ResultError(f"{path}: not JSON: the file that the benchmark saved is expected") from None
    if isinstance(values, list) and values and isinstance(values[-1], Mapping):
        values = values[-1]
    if not isinstance(values, Mapping):
        raise ResultError(f"{path}: JSON, but {type(values).__name__} instead of an object with fields")
    return values


def read_folder(path: Path) -> tuple[Measured, ...]:
    """Every result below a folder, such as ``vllm bench sweep`` leaves: its runs, or summaries where no runs are."""
    found: list[Measured] = []
    for file in sorted(path.rglob("*.json")):
        if file.name in ("summary.json", "warmup.json") or "failure" in file.name:
            continue
        try:
            found += read_fields(read_json(file), str(file))
        except ResultError:
            continue  # settings and plots lie beside the results
    if not found:
        raise ResultError(
            f"{path}: no result below this folder: files of vllm bench, GuideLLM or AIPerf are expected"
        )
    return tuple(found)


def read_fields(values: Mapping, source: str) -> tuple[Measured, ...]:
    """The figures of one parsed result, by the fields that are there."""
    if isinstance(values.get("benchmarks"), list):
        return read_guidellm(values["benchmarks"], source)
    if "inter_token_latency" in values:
        return (read_aiperf(values, source),)
    if any(name in values for name in ("mean_tpot_ms", "median_tpot_ms", "output_throughput")):
        return (read_vllm(values, source),)
    if "tpot_ms" in values or "seconds" in values:
        return (read_plain(values, source),)
    raise ResultError(
        f"{source}: no decode figure: mean_tpot_ms (vllm bench serve), benchmarks (GuideLLM), inter_token_latency "
        "(genai-perf, AIPerf), or tpot_ms are expected"
    )


def read_plain(values: Mapping, source: str) -> Measured:
    """``tpot_ms`` or ``seconds``, and what is known of batch and lengths."""
    known = ("tpot_ms", "seconds", "batch", "input_tokens", "output_tokens", "tokens_per_step")
    if unknown := sorted(set(values) - set(known)):
        raise ResultError(f"{source}: no field {unknown[0]!r}: known are {', '.join(known)}")
    seconds = values["tpot_ms"] / 1e3 if _number(values.get("tpot_ms")) else values.get("seconds")
    more: dict[str, Any] = {
        name: _positive(values[name], name, source) for name in known[2:] if values.get(name) is not None
    }
    return Measured(_positive(seconds, "tpot_ms or seconds", source), source=source, **more)


def read_vllm(values: Mapping, source: str) -> Measured:
    """What ``vllm bench serve --save-result`` writes."""
    name = next((n for n in ("mean_tpot_ms", "median_tpot_ms", "mean_itl_ms") if n in values), None)
    if name is None:
        raise ResultError(
            f"{source}: output_throughput, but no mean_tpot_ms: a throughput holds the prompts' time as well and is "
            "no decode figure; run vllm bench serve with an endpoint that streams"
        )
    seconds = _positive(values[name], name, source) / 1e3
    completed = _positive(values.get("completed"), "completed", source)
    inputs = _positive(values.get("total_input_tokens"), "total_input_tokens", source) / completed
    outputs = _positive(values.get("total_output_tokens"), "total_output_tokens", source) / completed
    notes = []
    if values.get("failed"):
        notes.append(f"{values['failed']} requests failed")
    accepted = values.get("spec_decode_acceptance_length")
    speculates = any(str(key).startswith("spec_decode") for key in values)
    if speculates and not _number(accepted):
        raise ResultError(
            f"{source}: speculative decoding without spec_decode_acceptance_length: how many tokens a step gives is "
            "unknown, and with it the time of a step"
        )
    throughput = values.get("output_throughput")
    batch: Any = throughput * seconds if _number(throughput) else values.get("max_concurrency")
    limit = values.get("max_concurrency")
    if _number(batch) and _number(limit) and limit > 0:
        batch = min(batch, limit)
    return Measured(
        seconds,
        float(batch) if _number(batch) and batch > 0 else None,
        inputs,
        outputs,
        float(accepted) if speculates and _number(accepted) else 1.0,
        f"vllm bench serve ({source}, {name})",
        (*notes, *mixed(inputs, outputs, _milliseconds(values.get("mean_ttft_ms")), seconds)),
    )


def read_guidellm(benchmarks: list, source: str) -> tuple[Measured, ...]:
    """The benchmarks of a GuideLLM report, one for each rate or concurrency."""
    found = []
    for i, benchmark in enumerate(benchmarks):
        metrics = benchmark.get("metrics") if isinstance(benchmark, Mapping) else None
        if not isinstance(metrics, Mapping):
            raise ResultError(f"{source}: benchmarks[{i}] has no metrics: a GuideLLM report is expected")
        seconds = guidellm_mean(metrics, "inter_token_latency_ms") or guidellm_mean(
            metrics, "time_per_output_token_ms"
        )
        where = f"GuideLLM ({source}, benchmarks[{i}])"
        if not seconds:
            raise ResultError(
                f"{where}: no inter_token_latency_ms of successful requests: were tokens streamed?"
            )
        inputs, outputs = (
            guidellm_mean(metrics, "prompt_token_count"),
            guidellm_mean(metrics, "output_token_count"),
        )
        rate = guidellm_mean(metrics, "output_tokens_per_second")
        batch = rate * seconds / 1e3 if rate else guidellm_mean(metrics, "request_concurrency")
        first = _milliseconds(guidellm_mean(metrics, "time_to_first_token_ms"))
        notes = mixed(inputs, outputs, first, seconds / 1e3) if inputs and outputs else ()
        found.append(Measured(seconds / 1e3, batch, inputs, outputs, source=where, notes=notes))
    if not found:
        raise ResultError(f"{source}: benchmarks is empty: the run measured nothing")
    return tuple(found)


def guidellm_mean(metrics: Mapping, name: str) -> float | None:
    """The mean of successful requests."""
    part = metrics.get(name)
    part = part.get("successful", part) if isinstance(part, Mapping) else None
    value = part.get("mean") if isinstance(part, Mapping) else None
    return float(value) if _number(value) and value > 0 else None


def read_aiperf(values: Mapping, source: str) -> Measured:
    """What genai-perf and AIPerf export: a statistic a metric, with its unit."""

    def average(name: str, needed: bool = False) -> float | None:
        part = values.get(name)
        part = part if isinstance(part, Mapping) else {}
        value = part.get("avg")
        if not _number(value):
            if needed:
                raise ResultError(
                    f"{source}: {name}.avg is missing: an export of genai-perf or AIPerf is expected"
                )
            return None
        unit = str(part.get("unit", "")).lower()
        return value * {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}.get(unit, 1.0)

    seconds = _positive(average("inter_token_latency", needed=True), "inter_token_latency.avg", source)
    inputs, outputs = average("input_sequence_length"), average("output_sequence_length")
    rate = average("output_token_throughput")
    notes = mixed(inputs, outputs, average("time_to_first_token"), seconds) if inputs and outputs else ()
    return Measured(
        seconds, rate * seconds if rate else None, inputs, outputs, source=f"AIPerf ({source})", notes=notes
    )


def mixed(inputs: float, outputs: float, first: float | None, seconds: float) -> tuple[str, ...]:
    """What a serving figure holds besides decoding."""
    notes = [
        f"steps also computed prompts ({inputs / outputs:.2g} prompt tokens for an output token), unless prefill ran "
        "elsewhere or prefixes were cached: the share of a step that only decodes is higher"
    ]
    if first and first > 0.5 * seconds * outputs:
        notes.append(
            "requests waited for their first token longer than half of their decoding: the engine was saturated"
        )
    return tuple(notes)


def _milliseconds(value) -> float | None:
    return value / 1e3 if _number(value) else None


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _positive(value, name: str, source: str) -> float:
    if not _number(value) or not 0 < value < 1e15:
        raise ResultError(f"{source}: {name} = {value!r}: a positive number is expected")
    return float(value)
