"""``python -m decodebench bench decode``: a decode step against the memory's speed, kind by kind.

A few layers of each group of a model stand for all of them (a row says how many): the bytes a layer
moves do not depend on how many there are. The speed of memory is measured anew for every model,
because a shared machine drifts. Ratios to ``reference`` (float64, one layer, one step), to the plain
way (gather, then ``scaled_dot_product_attention``) and, where vLLM is installed, to its CPU attention
kernel over the same block table are each of the same shapes.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from decodebench.cache.small import MAX_CACHE_BYTES, small_cache
from decodebench.cache.tensors import Cache, torch_dtype
from decodebench.errors import DecodebenchError
from decodebench.layout.plan import parse_memory
from decodebench.layout.pool import Batch
from decodebench.measure.bandwidth import bandwidth
from decodebench.measure.clock import busy, measure, require_device
from decodebench.measure.latency import measure_decode
from decodebench.measure.provenance import provenance
from decodebench.measure.step import prepare_step
from decodebench.words import seconds_text


@dataclass(frozen=True)
class Case:
    """One model, cut to ``layers`` layers a group. ``quick``: among the five of ``--quick``."""

    about: str
    model: str
    block_size: int | None = None
    dtype: str = "auto"
    layers: int = 2
    quick: bool = True


CASES = (
    Case("attention only", "llama-3.1-8b", 64),
    Case("attention only, fp32", "llama-3.1-8b", 64, "float32", 1, quick=False),
    Case("sliding windows", "gpt-oss-20b", 64),
    Case("MLA", "deepseek-v3", 64, layers=1),
    Case("Mamba-2 hybrid", "nemotron-h-8b", layers=2),
    Case("Mamba-1 hybrid", "jamba-v0.1", layers=2, quick=False),
    Case("delta-net hybrid", "qwen3-next-80b-a3b", layers=2),
    Case("Kimi delta hybrid", "kimi-linear-48b-a3b", layers=1, quick=False),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="five models, shorter contexts, under a minute")
    parser.add_argument("--json", action="store_true", help="rows and provenance as JSON on stdout")
    parser.add_argument("--requests", type=int, help="batch size (8; quick 4)")
    parser.add_argument("--context", type=int, help="tokens a request (4096; quick 1024)")
    parser.add_argument("--backend", help="reference, torch, cpp or triton (default: the fastest here)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these models")
    parser.add_argument(
        "--max-cache",
        type=parse_memory,
        default=MAX_CACHE_BYTES,
        metavar="BYTES",
        help="that a model's cache may take: bytes or 80GiB (2GiB)",
    )


def bench_decode_command(arguments: argparse.Namespace) -> int:
    """Measure, print a line a kind of layer as it is done; ``--json`` prints everything at the end."""
    require_device(arguments.device)
    quick = arguments.quick
    requests = arguments.requests or (4 if quick else 8)
    context = arguments.context or (1024 if quick else 4096)
    cases = [c for c in CASES if c.quick or not quick]
    if arguments.models:
        known = {c.model: c for c in reversed(CASES)}
        cases = [known.get(name, Case("", name)) for name in arguments.models]
    settings = {"requests": requests, "context": context, "quick": quick, "backend": arguments.backend}
    facts = provenance(settings, seed=0, device=arguments.device)
    rows: list[dict] = []
    if not arguments.json:
        print(
            f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}; {requests} requests "
            f"of {context} tokens; attention and state work only, warm, medians\n"
        )
        print(HEADER)
    if torch.device(arguments.device).type == "cuda":
        bandwidth(arguments.device)  # kept for the process; a card full of caches has no room to measure it
    for case in cases:
        try:
            options: dict[str, Any] = {} if case.dtype == "auto" else {"dtype": case.dtype}
            cache, batch = small_cache(
                case.model,
                requests=requests,
                context=context,
                layers=case.layers,
                device=arguments.device,
                block_size=case.block_size,
                max_bytes=arguments.max_cache,
                **options,
            )
            new = measure_kinds(case, cache, batch, arguments.backend, 0.1 if quick else 0.5)
            del cache
            gc.collect()
        except DecodebenchError as error:
            if arguments.models:
                raise
            new = [{"about": case.about, "model": case.model, "failed": str(error)}]
        rows += new
        for row in new if not arguments.json else ():
            print(line(row), flush=True)
    warning = busy(arguments.device)
    if arguments.json:
        json.dump({"provenance": facts, "rows": rows, "warning": warning}, sys.stdout, indent=1)
        print()
    else:
        print("\n".join([LEGEND, *footnotes(rows), *([warning] if warning else [])]))
    return 0


def footnotes(rows: list[dict]) -> list[str]:
    """What the table's lines do not say of their figures, once each: model, then the note."""
    told = dict.fromkeys((row["model"], note) for row in rows for note in row.get("notes", ()))
    return [f"{model}: {note}" for model, note in told]


LEGEND = """
spread: from quartile to quartile, over the median; share: the time the memory needs, over the median;
x: how many times longer another way takes (reference: float64; plain: gather and torch's attention;
multiply: torch's in-place multiply of the same states)"""
HEADER = (
    f"{'model':20s} {'kind':24s} {'layers':>6s} {'block':>6s} {'dtype':>8s} {'latency':>9s} "
    f"{'spread':>6s} {'GB/s':>6s} {'share':>6s} {'of limit':>9s} "
    f"{'x reference':>11s} {'x plain':>8s} {'x vLLM':>7s} {'x multiply':>10s}  backend"
)


def line(row: dict) -> str:
    if "failed" in row:
        return f"{row['model']:20s} {row['failed']}"

    def times(name: str, width: int) -> str:
        return f"{row[name]:{width}.1f}" if row.get(name) else " " * (width - 1) + "–"

    return (
        f"{row['model']:20s} {row['kind']:24s} {row['layers']:6d} {row['block_size']:6d} {row['dtype']:>8s} "
        f"{seconds_text(row['median_s']):>9s} {row['spread']:6.0%} "
        f"{row['gb_per_s']:6.1f} {row['limit_share']:6.0%} {row['limit_gbps']:5.0f} GB/s "
        f"{times('x_reference', 11)} {times('x_plain', 8)} {times('x_vllm', 7)} {times('x_multiply', 10)}"
        f"  {row['backend']}{' (' + row['fallback'] + ')' if row['fallback'] else ''}"
    )


def measure_kinds(case: Case, cache: Cache, batch: Batch, backend: str | None, seconds: float) -> list[dict]:
    """A row for each kind of layer."""
    device = cache.device
    limit = bandwidth(device, max_age=0 if device.type == "cpu" else 120)
    found = measure_decode(cache, batch, backend, by_kind=True, min_seconds=seconds, limit=limit)
    step = prepare_step(cache, batch, backend)
    rows = []
    for facts in found.kind_rows():
        layers = [x for x in step.layers if x.work.kind == facts["kind"]]
        first = layers[0].work.layer
        spec = cache.layout.layer_specs[first]
        each = facts["median_s"] / len(layers)
        moved = facts["bytes_moved"]
        row = {"about": case.about, "model": case.model, **facts, "block_size": spec.block_size}
        row |= {"dtype": _short(spec.parts()[-1].dtype), "limit_gbps": moved / facts["limit_s"] / 1e9}
        row |= {"fallback": layers[0].fallback or "", "backend": found.backend, "bandwidth": asdict(limit)}
        row["notes"] = found.notes
        row["spread"] = (facts["q3_s"] - facts["q1_s"]) / facts["median_s"]
        row["x_reference"] = _reference_seconds(cache, batch, first) / each
        if not spec.holds_state and getattr(spec, "head_size_v", None) and spec.written_by_steps:
            row["x_plain"] = _plain_seconds(cache, batch, first, seconds) / each
            if device.type == "cpu":
                theirs = _vllm_seconds(cache, batch, first, seconds)
                row["x_vllm"] = theirs and theirs / each
        if spec.holds_state:
            states = [x.work.layer for x in layers]
            row["x_multiply"] = _multiply_seconds(cache, batch, states, seconds) / facts["median_s"]
        rows.append(row)
    return rows


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


def _multiply_seconds(cache: Cache, batch: Batch, layers: list[str], seconds: float) -> float:
    """An in-place multiply of as many bytes in the states' own dtypes: each read and written once."""
    parts = [part for layer in layers for part in cache.layout.layer_specs[layer].parts()]
    shape = (len(batch.requests),)
    states = [torch.ones(shape + p.shape, dtype=torch_dtype(p.dtype), device=cache.device) for p in parts]

    def step() -> None:
        for state in states:
            state.mul_(0.999)

    return measure(step, device=cache.device, min_seconds=seconds, min_steps=3).median


def _geometry(cache: Cache, batch: Batch, layer: str) -> dict:
    """Shapes of an attention layer's step for the kernels it is compared with."""
    layout, spec = cache.layout, cache.layout.layer_specs[layer]
    assert layout.model is not None  # ``small_cache`` plans from a model
    heads = layout.model.query_heads(layer, layout.tensor_parallel_size)
    tables = [blocks.block_ids[layout.group_of[layer]] for blocks in batch.requests]
    return {
        "spec": spec,
        "heads": heads,
        "view": cache.view(layer),
        "tables": torch.tensor(tables),
        "tokens": batch.requests[0].request.num_tokens,
        "window": getattr(spec, "sliding_window", None),
    }


def _plain_seconds(cache: Cache, batch: Batch, layer: str, seconds: float) -> float:
    """Gather the visible blocks, then torch's attention with ``enable_gqa``: what one writes first."""
    g = _geometry(cache, batch, layer)
    spec, view, n = g["spec"], g["view"], g["tokens"]
    first = max(0, n - g["window"]) // view.shape[2] if g["window"] else 0
    last = -(-n // view.shape[2])
    table = g["tables"][:, first:last].to(cache.device)
    dtype = view.dtype if view.element_size() > 1 else torch.bfloat16
    q = torch.randn(len(table), g["heads"], 1, spec.head_size, device=cache.device).to(dtype)
    start = max(0, n - g["window"]) - first * view.shape[2] if g["window"] else 0
    stop = n - first * view.shape[2]

    def step() -> torch.Tensor:
        blocks = view[table].to(dtype)  # [B, blocks, heads, entries, width]
        kv = blocks.transpose(1, 2).flatten(2, 3)[:, :, start:stop]
        k, v = kv[..., : spec.head_size], kv[..., spec.head_size :]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return measure(step, device=cache.device, min_seconds=seconds, min_steps=3).median


def _vllm_seconds(cache: Cache, batch: Batch, layer: str, seconds: float) -> float | None:
    """vLLM's CPU attention over the same block table; None where vLLM or the shape is not to be had.

    Its pages are head-major with a packing of its own, so it gets memory of its own, the same size.
    """
    try:
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        return None
    g = _geometry(cache, batch, layer)
    spec, view = g["spec"], g["view"]
    batch_size, entries, size = len(g["tables"]), view.shape[2], spec.head_size
    if view.element_size() == 1 or entries % 16 or spec.head_size_v != size:
        return None
    dtype, window = view.dtype, g["window"] or -1
    pages = torch.randn(len(view), spec.num_kv_heads, 2 * entries, size).to(dtype)
    keys, values = pages.chunk(2, dim=2)
    isa = _get_attn_isa(dtype, entries, size, "auto")
    starts = torch.arange(batch_size + 1, dtype=torch.int32)
    lengths = torch.full((batch_size,), g["tokens"], dtype=torch.int32)
    shapes = {"num_heads": g["heads"], "num_kv_heads": spec.num_kv_heads, "head_dim": size}
    plan_ = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch_size,
        seq_lens=lengths,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=window,
        isa=isa,
        enable_kv_split=True,
        **shapes,
    )
    q = torch.randn(batch_size, g["heads"], size).to(dtype)
    out, table = torch.empty_like(q), g["tables"].to(torch.int32)

    def step() -> None:
        ops.cpu_attention_with_kv_cache(
            query=q,
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=window,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=plan_,
            s_aux=None,
        )

    return measure(step, min_seconds=seconds, min_steps=3).median
