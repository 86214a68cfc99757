"""``decodebench gpu``: ten minutes on a card, from refusal to a folder of figures.

The order is fixed: refuse what would give wrong figures; record what the card is; check that the
kernels are right there; measure what the card can do; then the grid, most useful first, so that a run
that is cut short is worth keeping; fills and audits; floors. Rows go to a folder in the journal's
format as they are finished. Nothing on the machine is ever set, locked or reset.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from decodebench.cache.run import fill_cache
from decodebench.cache.small import small_cache
from decodebench.cache.tensors import Cache, free_memory
from decodebench.cache.values import Constant, Normal
from decodebench.coverage.from_bytes import audit
from decodebench.errors import DecodebenchError
from decodebench.layout.plan import plan
from decodebench.layout.pool import Batch, admit
from decodebench.layout.reads import decode_work
from decodebench.layout.shrink import shrink
from decodebench.measure import card
from decodebench.measure.bandwidth import Bandwidth, bandwidth, launch_seconds
from decodebench.measure.journal import Journal
from decodebench.measure.latency import measure_decode
from decodebench.measure.provenance import provenance
from decodebench.study.gpu_gate import GateFailed, checks
from decodebench.study.gpu_rivals import rivals
from decodebench.study.table import DTYPES
from decodebench.words import seconds_text

#: free memory without which the run makes no sense
NEEDED_BYTES = 8 << 30
MODELS = (
    "llama-3.1-8b",
    "deepseek-v3",
    "nemotron-h-8b",
    "qwen3-next-80b-a3b",
    "gpt-oss-20b",
    "gemma-3-1b",
    "jamba-v0.1",
    "kimi-linear-48b-a3b",
)

#: columns of this command's rows beyond a sweep's: pandas dtype by name
EXTRA = {
    "what": "string",  # decode, fill or audit
    "kind": "string",
    "layers": "Int64",
    "share_of_read": "Float64",
    "device_seconds": "Float64",
    "of_memset": "Float64",
    "x_flashinfer": "Float64",
    "x_flash_attn": "Float64",
    "x_vllm_triton": "Float64",
    "x_sdpa": "Float64",
    "why_no_flashinfer": "string",
    "why_no_flash_attn": "string",
    "why_no_vllm_triton": "string",
    "why_no_sdpa": "string",
    "sm_mhz": "Float64",
    "memory_mhz": "Float64",
    "power_w": "Float64",
    "temperature_c": "Float64",
    "throttles": "string",
    "simulated": "boolean",
}


@dataclass(frozen=True)
class Target:
    """Where it runs and how much of it: a card, or a rehearsal of the whole run on the CPU."""

    device: str
    backend: str | None
    simulated: bool
    models: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    fill_bytes: tuple[int, ...]
    min_seconds: float


def the_card(device: str = "cuda") -> Target:
    """A card, with the grid that the README describes."""
    sizes = (1 << 30, 16 << 30, 64 << 30)
    return Target(device, None, False, MODELS, (8, 1, 32, 128), (8192, 1024, 65536), sizes, 0.04)


def rehearsal() -> Target:
    """The same run on the CPU, tiny: its figures say that they are no card's."""
    models = ("tiny-llama", "tiny-nemotron-h")
    return Target("cpu", "torch", True, models, (2, 1), (128, 64), (4 << 20, 16 << 20), 0.002)


def run(target: Target, out: Path | None, minutes: float, say: Callable[[str], object] = print) -> Path:
    """The whole run; the folder with its rows. Raises ``CardUnusable`` or ``GateFailed`` in one line.

    ``say`` takes a line of text at a time.
    """
    end = time.monotonic() + 60 * minutes
    facts = _refuse_or_describe(target)
    say(f"{facts['device']}: {', '.join(f'{k} {v}' for k, v in facts.items() if v and k != 'device')}")
    say("checking kernels, fill and audit before anything is timed …")
    passed = _pass_gate(target)
    say(f"{passed} checks hold")
    say("what the card can do …")
    limit = bandwidth(target.device)
    eager = 0.0 if target.simulated else launch_seconds(target.device, in_graph=False)
    say(
        f"{limit}; products {limit.products or 0:.0f} TFLOP/s; a launch {seconds_text(limit.launch_seconds)} in a "
        f"graph, {seconds_text(eager)} by itself"
    )
    out = out or _folder(str(facts["device"]), target.simulated)
    settings = {"minutes": minutes, "simulated": target.simulated, "ceilings": asdict(limit)}
    settings |= {"eager_launch_s": eager, "card": facts, "checks": passed}
    with Journal(out) as journal:
        journal.begin_run(provenance(settings, seed=0, device=target.device))
        done = 0
        with _watch(target) as watch:
            for row in _rows(target, limit, end, watch, set(journal.rows)):
                journal.append(row)
                done += 1
                say(line(row))
        rows = list(journal.rows.values())
        try:
            journal.compact(list(journal.rows), DTYPES | EXTRA)
        except ImportError:
            say("pyarrow is not installed: the rows stay in journal.jsonl, which reads as well")
    floors = judge(rows, limit)
    _summarise(out, facts, rows, floors, target)
    for text in floors:
        say(text)
    say(f"{done} rows in {out}; `decodebench report` shows the folder if it lies in data/results/gpu")
    return out


def _refuse_or_describe(target: Target) -> dict[str, object]:
    if target.simulated:
        host = provenance({}, device="cpu")
        return {"device": f"rehearsal on {host['device']}", "threads": host["threads"]}
    reason = card.why_unusable()
    if reason:
        raise card.CardUnusable(reason)
    if not torch.cuda.is_available():
        raise card.CardUnusable(
            "no CUDA device here: run this on a GPU machine, or rehearse it with --rehearse"
        )
    index = torch.device(target.device).index or 0
    if index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise card.CardUnusable(f"device {target.device}: this machine has cuda:0 to cuda:{last}")
    reasons = card.reasons_to_refuse(target.device, NEEDED_BYTES)
    if reasons:
        raise card.CardUnusable("; ".join(reasons))
    return card.facts(target.device)


def _pass_gate(target: Target) -> int:
    count = 0
    for name, check in checks(target.device, target.backend):
        if target.simulated and re.search(
            "deepseek|jamba|qwen|kimi|llama-3|gemma|float8|blocks of (7|256)", name
        ):
            continue  # a rehearsal tries the way, a card all of it
        try:
            check()
        except GateFailed:
            raise
        except Exception as error:
            raise GateFailed(
                f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            ) from error
        count += 1
    return count


class _NoWatch:
    """For a rehearsal: a card's sensors that say nothing."""

    def __enter__(self) -> _NoWatch:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def since(self, start: float) -> card.Reading:
        return card.Reading(None, None, None, None, ())


def _watch(target: Target) -> card.Watch | _NoWatch:
    return _NoWatch() if target.simulated else card.Watch(target.device)


def points(target: Target) -> Iterator[dict[str, object]]:
    """Settings of the grid, most useful first: every model once, then fp8, then batch, context, blocks."""
    batch, context = target.batches[0], target.contexts[0]
    seen = set()
    order = [(batch, context, 16, "auto"), (batch, context, 16, "fp8")]
    order += [(b, context, 16, "auto") for b in target.batches[1:]]
    order += [(batch, c, 16, "auto") for c in target.contexts[1:]]
    order += [(batch, context, size, "auto") for size in (64, 256)]
    order += [
        (b, c, size, dtype)
        for dtype in ("auto", "fp8")
        for size in (16, 64, 256)
        for c in target.contexts
        for b in target.batches
    ]
    for b, c, size, dtype in order:
        for model in target.models:
            key = (model, b, c, size, dtype)
            if key not in seen:
                seen.add(key)
                yield {"model": model, "batch": b, "context": c, "block_size": size, "kv_cache_dtype": dtype}


def _rows(target: Target, limit: Bandwidth, end: float, watch, stored: set[str]) -> Iterator[dict]:
    """Finished rows until the time is up: the first points, fills and audits, then the rest of the grid."""
    grid = list(points(target))
    first = len(target.models) * 2
    for point in grid[:first]:
        yield from _point(target, point, limit, watch, stored)
    for size in target.fill_bytes:
        if time.monotonic() < end:
            yield from _fill(target, size, limit, watch, stored)
    for point in grid[first:]:
        if time.monotonic() > end:
            return
        yield from _point(target, point, limit, watch, stored)


def _case_id(facts: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _common(target: Target, watch, start: float) -> dict[str, object]:
    reading = watch.since(start)
    sensors = {n: getattr(reading, n) for n in ("sm_mhz", "memory_mhz", "power_w", "temperature_c")}
    throttles = ", ".join(reading.throttles) or None
    return sensors | {"throttles": throttles, "device": target.device, "simulated": target.simulated}


def _layers_for(point: dict, target: Target) -> int:
    """Layers a group so that a step moves four times the L2, at most 16."""
    if target.simulated:
        return 1
    options = {k: point[k] for k in ("block_size", "kv_cache_dtype")}
    one = shrink(plan(point["model"], memory="16TiB", **options), layers=1)
    batch = admit(one, requests=point["batch"], context=[point["context"]] * point["batch"])
    moved = sum(w.bytes_read for w in decode_work(one, batch, _plain(one)))
    l2 = torch.cuda.get_device_properties(target.device).L2_cache_size
    return max(1, min(16, -(-4 * l2 // max(1, moved))))


def _plain(layout) -> list[str]:
    """Layers that a backend can step: pages of plain numbers."""
    return [name for name in layout.layer_names if not layout.layer_specs[name].parts()[0].zeros_only]


def _point(target: Target, point: dict, limit: Bandwidth, watch, stored: set[str]) -> Iterator[dict]:
    """One setting, cold and warm: a row for the step and one a kind of layer; a row with its reason where refused."""
    base = {"what": "decode"} | point | {"measure": "decode", "device": target.device}
    ids = {cold: _case_id(base | {"cold": cold}) for cold in (True, False)}
    if all(f"{i}-step" in stored for i in ids.values()):
        return
    options = {k: point[k] for k in ("block_size", "kv_cache_dtype")}
    began = time.perf_counter()
    cache: Cache | None
    batch: Batch | None
    try:
        cache, batch = small_cache(
            point["model"],
            requests=point["batch"],
            context=point["context"],
            layers=_layers_for(point, target),
            device=target.device,
            max_bytes=int(0.7 * free_memory(torch.device(target.device))),
            **options,
        )
        for cold, case_id in ids.items():
            start = time.monotonic()
            found = measure_decode(
                cache,
                batch,
                target.backend,
                cold=cold,
                by_kind=True,
                min_seconds=target.min_seconds,
                layers=_plain(cache.layout),
                limit=limit,
            )
            common = _common(target, watch, start)
            notes = "; ".join((*found.fallbacks, *found.notes)) or None
            shared = (
                base | common | {"cold": cold, "status": "ok", "backend_used": found.backend, "notes": notes}
            )
            shared |= {"seconds": time.perf_counter() - began}
            whole = found.to_dict() | {"kind": "step", "layers": len(found.work)}
            for facts in (whole, *found.kind_rows()):
                row: dict[str, Any] = shared | {k: v for k, v in facts.items() if k in DTYPES or k in EXTRA}
                row["device"], row["case_id"] = target.device, f"{case_id}-{facts['kind']}"
                row["share_of_read"] = row["gb_per_s"] / limit.read
                if not cold and facts["kind"] != "step":
                    layers = [w.layer for w in found.work if w.kind == facts["kind"]]
                    each = facts["median_s"] / len(layers)
                    row |= _compared(cache, batch, layers, each, target)
                yield row
    except DecodebenchError as error:
        yield base | {
            "case_id": f"{ids[True]}-step",
            "status": "refused",
            "reason": str(error),
            "kind": "step",
        }
    except Exception as error:
        if card.broke(error, target.device):
            raise card.CardUnusable(
                f"the card broke at {point['model']}, batch {point['batch']}, context {point['context']}: "
                f"{' '.join(str(error).split())[:200]}; rows until here are stored, a fresh process goes on"
            ) from error
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield base | {"case_id": f"{ids[True]}-step", "status": "failed", "reason": text, "kind": "step"}
    finally:
        cache = batch = None  # two caches must not lie beside each other
        gc.collect()


def _compared(cache, batch, layers: list[str], each: float, target: Target) -> dict[str, object]:
    spec = cache.layout.layer_specs[layers[0]]
    if spec.holds_state or not getattr(spec, "head_size_v", 0):
        return {}
    return rivals(cache, batch, layers[:4], each, target.min_seconds, False)


def _fill(target: Target, size: int, limit: Bandwidth, watch, stored: set[str]) -> Iterator[dict]:
    """A fill of about ``size`` bytes with a constant and with noise, and the noise read back."""
    if size > 0.8 * free_memory(torch.device(target.device)):
        return
    model = target.models[0]
    context = 512
    one = plan(model, memory="16TiB")
    per_request = sum(one.blocks_per_request(context)) * one.bytes_per_block()
    requests = max(1, size // per_request)
    base = {
        "model": model,
        "batch": requests,
        "context": context,
        "device": target.device,
        "measure": "audit",
    }
    if _case_id(base | {"what": "audit"}) in stored:
        return
    options = {"requests": requests, "context": context, "layers": 1 << 10, "values": None}
    cache, batch = small_cache(model, device=target.device, max_bytes=1 << 62, **options)
    for name, values in (("constant", Constant()), ("normal", Normal())):
        start = time.monotonic()
        fill_cache(cache, batch, values)  # draws the bank, compiles
        report = fill_cache(cache, batch, values)
        took = report.device_seconds or report.seconds
        row = (
            base
            | _common(target, watch, start)
            | {"what": "fill", "kind": name, "values": name, "status": "ok"}
        )
        row |= {"fill_seconds": report.seconds, "device_seconds": report.device_seconds}
        row |= {"fill_bytes": report.bytes_written, "gb_per_s": report.bytes_written / took / 1e9}
        row |= {"of_memset": report.bytes_written / took / 1e9 / limit.memset}
        yield row | {"case_id": _case_id(base | {"what": "fill", "values": name})}
    start = time.monotonic()
    began = time.perf_counter()
    found = audit(cache, batch, values, report)
    took = time.perf_counter() - began
    row = base | _common(target, watch, start) | {"what": "audit", "kind": "normal", "status": "ok"}
    row |= {"seconds": took, "gb_per_s": report.bytes_written / took / 1e9, "verdict": found.verdict}
    row |= {"coverage": found.coverage, "share_of_read": report.bytes_written / took / 1e9 / limit.read}
    yield row | {"case_id": _case_id(base | {"what": "audit"})}
    del cache, batch
    gc.collect()


def line(row: dict) -> str:
    """A finished row in one line."""
    if row["status"] != "ok":
        return f"{row['model']:20s} {row['status']}: {row['reason']}"
    if row["what"] != "decode":
        share = row.get("of_memset") or row.get("share_of_read")
        of = "memset" if row.get("of_memset") else "a read"
        return f"{row['what']:6s} {row['kind']:10s} {row['gb_per_s']:8.1f} GB/s, {share:.0%} of {of}"
    state = "cold" if row["cold"] else "warm"
    return (
        f"{row['model']:20s} {row['kind']:24s} {row['batch']:4d} × {row['context']!s:6s} blocks of "
        f"{row['block_size']:<4d} {row['kv_cache_dtype']:5s} {state} {seconds_text(row['median_s']):>9s} "
        f"{row['share_of_read']:5.0%} of read {row['limit_share']:5.0%} of limit"
        f"{' [' + row['throttles'] + ']' if row['throttles'] else ''}"
    )


def judge(rows: list[dict], limit: Bandwidth) -> list[str]:
    """Floors met or MISSED, each with the number and, where there was no such row, the reason."""
    ok = [row for row in rows if row["status"] == "ok"]
    cold = [row for row in ok if row["what"] == "decode" and row["cold"]]

    def best(wanted, column: str) -> float | None:
        return max((row[column] for row in ok if wanted(row) and row.get(column)), default=None)

    def attention(row: dict) -> bool:
        big = (row.get("bytes_moved") or 0) / (row.get("layers") or 1) >= 0.5e9
        return row["kind"] == "full_attention" and row["kv_cache_dtype"] == "auto" and big

    halves = []
    for row in cold:
        if row["kind"] == "full_attention" and row["kv_cache_dtype"] == "fp8":
            same = ("model", "batch", "context", "block_size", "layers")
            other = [r for r in cold if r["kv_cache_dtype"] == "auto" and r["kind"] == row["kind"]]
            halves += [row["median_s"] / r["median_s"] for r in other if all(r[k] == row[k] for k in same)]
    states = {"mamba1", "mamba2", "gdn", "kda"}
    floors = [
        ("two-byte attention from 0.5 GB a layer, of a read", best(attention, "share_of_read"), 0.80),
        ("fp8 step over the two-byte one", min(halves, default=None), -0.65),
        ("latent attention, of its limit", best(lambda r: r["kind"] == "mla_attention", "limit_share"), 0.50),
        (
            "states from 64 MB, of their limit",
            best(lambda r: r["kind"] in states and (r.get("bytes_moved") or 0) >= 64e6, "limit_share"),
            0.85,
        ),
        (
            "constant fill from 1 GiB, of memset",
            best(
                lambda r: r["kind"] == "constant" and (r.get("fill_bytes") or 0) >= 0.9 * 2**30, "of_memset"
            ),
            0.90,
        ),
        (
            "noise fill from 1 GiB, of memset",
            best(
                lambda r: (
                    r["what"] == "fill"
                    and r["kind"] == "normal"
                    and (r.get("fill_bytes") or 0) >= 0.9 * 2**30
                ),
                "of_memset",
            ),
            0.70,
        ),
        ("audit, of a read", best(lambda r: r["what"] == "audit", "share_of_read"), 0.30),
    ]
    lines = []
    for name, reached, floor in floors:
        if reached is None:
            lines.append(f"not measured  {name}: the run ended before such a row, or the card cannot hold it")
            continue
        met = reached >= floor if floor > 0 else reached <= -floor
        bound = "at least" if floor > 0 else "at most"
        lines.append(f"{'met   ' if met else 'MISSED'}  {name}: {reached:.2f} ({bound} {abs(floor):.2f})")
    return lines


def _folder(name: str, simulated: bool) -> Path:
    """data/results/gpu/<card>-<date>; a rehearsal lies elsewhere, so that no report takes it for a card's."""
    card_name = re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")
    day = datetime.now(UTC).date().isoformat()
    top = Path("rehearsal") if simulated else Path("data/results/gpu")
    return top / f"{card_name[:40]}-{day}"


def _summarise(out: Path, facts: dict, rows: list[dict], floors: list[str], target: Target) -> None:
    """summary.md and rows.csv beside the journal's files."""
    head = f"# {facts['device']}\n\n" + (
        "A rehearsal on a CPU: no figure here is a card's.\n\n" if target.simulated else ""
    )
    told = "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in facts.items() if value)
    table = "\n".join(f"    {line(row)}" for row in rows)
    floors_text = "\n".join(f"- {text}" for text in floors)
    (out / "summary.md").write_text(f"{head}{told}\n\n## Floors\n\n{floors_text}\n\n## Rows\n\n{table}\n")
    names = list(dict.fromkeys(name for row in rows for name in row))

    def cell(value: object) -> str:
        text = "" if value is None else str(value)
        return f'"{text.replace(chr(34), chr(39))}"' if "," in text else text

    lines = [",".join(names), *(",".join(cell(row.get(name)) for name in names) for row in rows)]
    (out / "rows.csv").write_text("\n".join(lines) + "\n")


def add_gpu_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``decodebench gpu``."""
    parser.add_argument(
        "--out", type=Path, help="folder (data/results/gpu/<card>-<date>); a cut run goes on there"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all of it (10)")
    parser.add_argument("--device", default="cuda", help="cuda, or cuda:1 for the second card")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="the same run on the CPU, tiny: tries the way, measures nothing",
    )


def gpu_command(arguments: argparse.Namespace) -> int:
    """Run; 0, or 3 where a check failed (nothing was timed then)."""
    if arguments.minutes <= 0:
        raise DecodebenchError(f"--minutes {arguments.minutes}: ask for more than none")
    target = rehearsal() if arguments.rehearse else the_card(arguments.device)
    try:
        run(target, arguments.out, arguments.minutes, lambda text: print(text, flush=True))
    except GateFailed as error:
        print(f"decodebench: {error}; nothing was timed".replace("\n", " "), file=sys.stderr)
        return 3
    return 0
