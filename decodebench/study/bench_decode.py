"""``python -m decodebench bench decode``: a decode step against this machine's limit, kind by kind.

A few layers of each group of a model stand for all of them (a row says how many): the bytes a layer
moves do not depend on how many there are. On a CPU each turn measures the step and the machine, one after
the other, because a shared machine drifts: reads, in-place updates, matrix products, vectors. The limit of
a turn is the time for the bytes or for the operations, whichever is longer. Ratios to ``reference``
(float64, one layer, one step), to the plain way (gather, then ``scaled_dot_product_attention``) and, where
vLLM is installed, to its own CPU kernel over the same block table are each of the same shapes.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from decodebench.cache.small import MAX_CACHE_BYTES, small_cache
from decodebench.cache.tensors import Cache
from decodebench.errors import DecodebenchError
from decodebench.layout.plan import parse_memory
from decodebench.layout.pool import Batch
from decodebench.measure.bandwidth import Bandwidth, bandwidth, from_probes, probes
from decodebench.measure.clock import busy, require_device
from decodebench.measure.in_turn import ROUNDS, InTurn, in_turn
from decodebench.measure.journal import store
from decodebench.measure.latency import DecodeMeasurement, measure_decode
from decodebench.measure.limits import limit_of
from decodebench.measure.provenance import provenance
from decodebench.measure.step import DecodeStep, prepare_step
from decodebench.study.cpu_rivals import multiply, plain, vllm
from decodebench.study.floors import Floor, exit_status, verdict
from decodebench.words import seconds_text

#: share of its limit that a kind of layer must reach: states, and what attends
STATE_FLOOR, ATTENTION_FLOOR = 0.75, 0.70
#: what is measured in turn with a step: bytes of the buffers that it reads and updates, fewer than a bare
#: measurement takes, and still four times the last cache of a core
PROBE_BYTES = 128 << 20


@dataclass(frozen=True)
class Case:
    """One model, cut to ``layers`` layers a group. ``quick``: among the five of ``--quick``.

    ``times``: requests for each that is asked for, where a layer keeps little of each; ``context``: its own.
    """

    about: str
    model: str
    layers: int = 2
    quick: bool = True
    times: int = 1
    context: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


CASES = (
    Case("attention only", "llama-3.1-8b", options={"block_size": 64}),
    Case(
        "attention only, fp8",
        "llama-3.1-8b",
        quick=False,
        options={"block_size": 64, "kv_cache_dtype": "fp8"},
    ),
    Case(
        "attention only, fp32", "llama-3.1-8b", 1, quick=False, options={"block_size": 64, "dtype": "float32"}
    ),
    Case("sliding windows", "gpt-oss-20b", layers=1, times=8, options={"block_size": 64}),
    Case("MLA, 128 heads", "deepseek-v3", layers=1, options={"block_size": 64}),
    Case("Mamba-2 hybrid", "nemotron-h-8b"),
    Case("Mamba-2, bf16", "nemotron-h-8b", quick=False, options={"mamba_ssm_cache_dtype": "bfloat16"}),
    Case("Mamba-1 hybrid", "jamba-v0.1", quick=False),
    Case("Mamba-1, fp32", "jamba-v0.1", quick=False, options={"mamba_ssm_cache_dtype": "float32"}),
    Case("delta-net hybrid", "qwen3-next-80b-a3b"),
    Case("delta net, fp32", "qwen3-next-80b-a3b", quick=False, options={"mamba_ssm_cache_dtype": "float32"}),
    Case("Kimi delta hybrid, MLA, 32 heads", "kimi-linear-48b-a3b", layers=1, quick=False),
    Case("short convolutions", "lfm2-1.2b", quick=False, times=256, context=16),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``decodebench bench decode``."""
    parser.add_argument("--quick", action="store_true", help="five models, shorter contexts, under a minute")
    parser.add_argument("--json", action="store_true", help="rows, floors and provenance as JSON on stdout")
    parser.add_argument("--requests", type=int, help="batch size (8; quick 4)")
    parser.add_argument("--context", type=int, help="tokens a request (4096; quick 1024)")
    parser.add_argument("--backend", help="reference, torch, cpp or triton (default: the fastest here)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these models")
    parser.add_argument("--out", metavar="FOLDER", help="store the rows there too, as a sweep does")
    parser.add_argument(
        "--max-cache",
        type=parse_memory,
        default=MAX_CACHE_BYTES,
        metavar="BYTES",
        help="that a model's cache may take: bytes or 80GiB (2GiB)",
    )


def bench_decode_command(arguments: argparse.Namespace) -> int:
    """Measure, print a line a kind of layer as it is done; ``--json`` prints everything at the end.

    0 where every floor is met, 1 where one is missed, 3 where other work on the machine hides one.
    """
    require_device(arguments.device)
    quick = arguments.quick
    requests = arguments.requests or (4 if quick else 8)
    context = arguments.context or (1024 if quick else 4096)
    cases = [c for c in CASES if c.quick or not quick]
    if arguments.models:
        cases = [c for c in CASES if c.model in arguments.models and (c.quick or not quick)]
        named = {c.model for c in cases}
        cases += [Case("", name) for name in arguments.models if name not in named]
    settings: dict[str, object] = {"requests": requests, "context": context, "quick": quick}
    settings["backend"] = arguments.backend
    facts = provenance(settings, seed=0, device=arguments.device)
    rows: list[dict[str, Any]] = []
    if not arguments.json:
        print(
            f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}; {requests} requests "
            f"of {context} tokens; attention and state work only, medians\n"
        )
        print(HEADER)
    if torch.device(arguments.device).type == "cuda":
        bandwidth(arguments.device)  # kept for the process; a card full of caches has no room to measure it
    for case in cases:
        try:
            cache, batch = small_cache(
                case.model,
                requests=requests * (1 if arguments.models and arguments.requests else case.times),
                context=case.context or context,
                layers=case.layers,
                device=arguments.device,
                **case.options,
                max_bytes=arguments.max_cache,
            )
            new = measure_kinds(case, cache, batch, arguments.backend, quick)
            del cache
            gc.collect()
        except DecodebenchError as error:
            if arguments.models:
                raise
            new = [{"about": case.about, "model": case.model, "failed": str(error)}]
        rows += new
        for row in new if not arguments.json else ():
            print(line(row), flush=True)
    found = floors(rows) if arguments.device == "cpu" else []
    if arguments.out:
        kept = [{k: v for k, v in row.items() if k != "bandwidth"} | row.get("bandwidth", {}) for row in rows]
        store(arguments.out, kept, ("model", "kind", "dtype", "block_size", "requests", "context"), facts)
    if arguments.json:
        result = {
            "provenance": facts,
            "rows": rows,
            "floors": [f.to_dict() for f in found],
            "warning": busy(arguments.device),
        }
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        print(
            "\n".join([LEGEND, *footnotes(rows), "", *map(str, found), "", verdict(found) if found else ""])
        )
    return exit_status(found)


def floors(rows: Sequence[Mapping[str, Any]]) -> list[Floor]:
    """What each kind of layer must reach, and what it did."""
    found = []
    for row in rows:
        if "failed" in row:
            continue
        name = f"{row['model']}, {row['kind']}, {row['dtype']}"
        at_least = STATE_FLOOR if row["holds_state"] else ATTENTION_FLOOR
        reason = row["disturbed"]
        share = None if reason else row["limit_share"]
        found.append(Floor(f"{name}: share of its limit ({row['bound_by']})", at_least, share, reason))
        if row.get("x_vllm") is not None:
            reason = row["vllm_disturbed"]
            found.append(Floor(f"{name}: speed over vLLM's", 1.0, None if reason else row["x_vllm"], reason))
    return found


def footnotes(rows: list[dict]) -> list[str]:
    """What the table's lines do not say of their figures, once each: model, then the note."""
    told = dict.fromkeys((row["model"], note) for row in rows for note in row.get("notes", ()))
    return [f"{model}: {note}" for model, note in told]


LEGEND = """
spread: from quartile to quartile, over the median; share: the time this machine needs, over the median, and
what makes that time; x: how many times longer another way takes (reference: float64; plain: gather and
torch's attention; multiply: torch's in-place multiply of the same states)"""
HEADER = (
    f"{'model':20s} {'kind':18s} {'layers':>6s} {'block':>5s} {'dtype':>5s} {'latency':>9s} "
    f"{'spread':>6s} {'GB/s':>5s} {'share':>6s} {'bound by':>10s} "
    f"{'x reference':>11s} {'x plain':>7s} {'x vLLM':>6s} {'x multiply':>10s}  backend"
)


def line(row: Mapping[str, Any]) -> str:
    """A row as a line of the table that is printed while the bench runs."""
    if "failed" in row:
        return f"{row['model']:20s} {row['failed']}"

    def times(name: str, width: int) -> str:
        return f"{row[name]:{width}.1f}" if row.get(name) else " " * (width - 1) + "–"

    share = "     ?" if row["disturbed"] else f"{row['limit_share']:6.0%}"
    return (
        f"{row['model']:20s} {row['kind']:18s} {row['layers']:6d} {row['block_size']:5d} "
        f"{row['dtype']:>5s} {seconds_text(row['median_s']):>9s} {row['spread']:6.0%} "
        f"{row['gb_per_s']:5.1f} {share} {row['bound_by']:>10s} "
        f"{times('x_reference', 11)} {times('x_plain', 7)} {times('x_vllm', 6)} {times('x_multiply', 10)}"
        f"  {row['backend']}{' (' + row['fallback'] + ')' if row['fallback'] else ''}"
    )


def measure_kinds(
    case: Case, cache: Cache, batch: Batch, backend: str | None, quick: bool
) -> list[dict[str, Any]]:
    """A row for each kind of layer."""
    device, rounds = cache.device, 2 if quick else ROUNDS
    seconds = 0.3 if quick else 1.0
    speed = bandwidth(device, max_age=120)
    step = prepare_step(cache, batch, backend)
    timed = None
    if device.type != "cpu":
        timed = measure_decode(cache, batch, backend, by_kind=True, min_seconds=seconds, limit=speed)
    rows = []
    for kind in dict.fromkeys(x.work.kind for x in step.layers):
        part = replace(step, layers=tuple(x for x in step.layers if x.work.kind == kind))
        first = part.layers[0].work.layer
        spec = cache.layout.layer_specs[first]
        disturbed: str | None = None
        if timed is None:
            facts, disturbed = _in_turn(part, kind, batch, speed, seconds, rounds)
        else:
            facts = next(row for row in timed.kind_rows() if row["kind"] == kind) | {
                "bandwidth": asdict(speed)
            }
        row: dict[str, Any] = {"about": case.about, "model": case.model, **facts}
        row |= {"block_size": spec.block_size, "dtype": _short(spec.parts()[-1].dtype)}
        row |= {"requests": len(batch.requests), "context": batch.requests[0].request.num_tokens}
        row |= {"fallback": part.layers[0].fallback or "", "backend": step.backend, "disturbed": disturbed}
        if timed is not None:
            row["notes"] = timed.notes
        row |= {
            "spread": (facts["q3_s"] - facts["q1_s"]) / facts["median_s"],
            "holds_state": spec.holds_state,
        }
        row["x_reference"] = _reference_seconds(cache, batch, first) / (facts["median_s"] / len(part.layers))
        rows.append(row | _rivals(cache, batch, part, kind, rounds))
    step.restore()
    return rows


def _in_turn(
    part: DecodeStep, kind: str, batch: Batch, speed: Bandwidth, seconds: float, rounds: int
) -> tuple[dict[str, Any], str | None]:
    """``kind_rows`` of one kind whose limit is measured in turn with it, and why that says nothing."""
    work = tuple(x.work for x in part.layers)
    operations = tuple(x.operations for x in part.layers)
    kernels = {name: each for name, each in probes(PROBE_BYTES).items() if name not in ("copy", "memset")}
    ways = {"step": part} | {f"{n} {i}": k.run for n, each in kernels.items() for i, k in enumerate(each)}
    bound = limit_of(work, operations, speed).bound_by
    compare = ("step", "read 0" if bound == "memory" else "products 0")
    found = in_turn(ways, turns=5, seconds=seconds, rounds=rounds, compare=compare)

    def speed_of(seconds_of) -> Bandwidth:
        taken = {n: [seconds_of(f"{n} {i}") for i in range(len(each))] for n, each in kernels.items()}
        return from_probes(taken, kernels, "cpu", PROBE_BYTES)

    turns = range(len(found.samples["step"]))
    limits = tuple(
        limit_of(work, operations, speed_of(lambda way, i=i: found.samples[way][i])).seconds for i in turns
    )
    both = InTurn({**found.samples, "limit": limits}, "cpu", found.others)
    timing, now = found.timing("step"), speed_of(found.median)
    tokens = [blocks.request.num_tokens for blocks in batch.requests]
    measured = DecodeMeasurement(
        timing,
        part.backend,
        now,
        work,
        len(tokens),
        (min(tokens), max(tokens)),
        0,
        operations={kind: operations},
        kind_timings={kind: timing},
    )
    row = measured.kind_rows()[0] | {"limit_share": both.ratio("step", "limit"), "bandwidth": asdict(now)}
    return row, both.disturbed("step", "limit")


def _rivals(cache: Cache, batch: Batch, part: DecodeStep, kind: str, rounds: int) -> dict[str, Any]:
    """``x_plain``, ``x_multiply`` and ``x_vllm``, each in turn with ours, or why vLLM has none."""
    layers = [x.work.layer for x in part.layers]
    one = replace(part, layers=part.layers[:1])
    row: dict[str, Any] = {}
    if cache.layout.layer_specs[layers[0]].holds_state:
        found = in_turn({"ours": part, "multiply": multiply(cache, batch, layers)}, turns=5, rounds=1)
        row["x_multiply"] = found.ratio("ours", "multiply")
    else:
        way = plain(cache, batch, layers[0])
        if not isinstance(way, str):
            row["x_plain"] = in_turn({"ours": one, "plain": way}, turns=3, rounds=1).ratio("ours", "plain")
    theirs = vllm(cache, batch, layers[0], kind)
    if isinstance(theirs, str):
        return row | {"why_no_vllm": theirs}
    found = in_turn({"ours": one, "vllm": theirs}, turns=9, rounds=rounds)
    row["x_vllm"], row["vllm_disturbed"] = found.ratio("ours", "vllm"), found.disturbed("ours", "vllm")
    return row


def _short(dtype: str) -> str:
    return dtype.replace("float", "fp").replace("bfp", "bf")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reference_seconds(cache: Cache, batch: Batch, layer: str) -> float:
    step = prepare_step(cache, batch, "reference", layers=[layer])
    _wait(cache.device)
    start = time.perf_counter()
    step()
    _wait(cache.device)  # a GPU's work is only queued when the call returns
    seconds = time.perf_counter() - start
    step.restore()
    return seconds
