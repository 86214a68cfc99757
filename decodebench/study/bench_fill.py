"""``python -m decodebench bench fill``: what a fill costs next to a plain memset of the same bytes.

Side by side in one process, repeats interleaved, because the memory bus of a shared machine drifts
by a factor of two between runs: only ratios mean something. Every fill of ours is read back byte
for byte before it is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from decodebench.cache.connector import ConnectorMetadata, ConnectorWorker, RequestFill
from decodebench.cache.readback import FILLED, UNTOUCHED, inspect_pages
from decodebench.cache.tensors import Cache, allocate, torch_dtype
from decodebench.cache.values import Constant, Normal, Values
from decodebench.cache.write import fill_blocks, merge_blocks
from decodebench.errors import DecodebenchError
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.layout import Layout
from decodebench.layout.plan import from_groups, plan
from decodebench.measure.clock import require_device
from decodebench.measure.in_turn import ROUNDS, in_turn
from decodebench.measure.journal import store
from decodebench.measure.provenance import provenance
from decodebench.models.specs import AttentionSpec, FullAttentionSpec, MambaSpec
from decodebench.study.floors import Floor, exit_status, floors_from, verdict
from decodebench.words import bytes_text

CONSTANT, NORMAL = Constant(0.015), Normal(0.015, 0.02)
#: bytes of a page in most cases, and in the cases that vary it
PAGE, PAGES = 64 << 10, (16 << 10, 512 << 10, 4 << 20)
#: memory that an audit may take at its peak, whatever the cache's size
EXTRA = 64 << 20
#: bytes from which a fill is compared with a memset: fewer may stay in the processor's caches
LARGE = 64 << 20

#: one request's block ids, by group
RequestBlocks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """Requests whose blocks are filled in one step.

    ``naive_normal``: whether the naive loop is timed with normal values (some would take minutes a repeat).
    """

    name: str
    requests: tuple[RequestBlocks, ...]
    naive_normal: bool = True

    def blocks(self, group: int) -> tuple[int, ...]:
        """Sorted block ids that a group's layers are filled at."""
        return merge_blocks(request[group] for request in self.requests)


# -- cases --------------------------------------------------------------------------------------


def attention_layout(num_blocks: int, num_layers: int = 32, page_bytes: int = PAGE) -> Layout:
    """8 KV heads of 128, bfloat16 (Llama-3.1-8B's), 4 KiB a token: pages of 64 KiB hold 16."""
    tokens = page_bytes // 4096
    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=8, head_size=128, dtype="bfloat16")
    names = tuple(f"layers.{i}.attn" for i in range(num_layers))
    return from_groups((KVCacheGroupSpec(names, (spec,) * num_layers, spec),), num_blocks + 1)


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}"


def attention_cases(num_blocks: int, seed: int) -> list[Case]:
    """Block tables over the blocks 1 to ``num_blocks`` of a one-group layout.

    Raises ``DecodebenchError`` where they are too few for sixteen requests of four.
    """
    if num_blocks < 64:
        raise DecodebenchError(f"num_blocks = {num_blocks}: the cases need at least 64 blocks")
    draw = random.Random(seed)
    ids = range(1, num_blocks + 1)

    def deal(blocks: Sequence[int], requests: int) -> tuple[RequestBlocks, ...]:
        size = len(blocks) // requests
        return tuple((tuple(blocks[i * size : (i + 1) * size]),) for i in range(requests))

    quarter = num_blocks // 4
    shared = (tuple(draw.sample(ids, num_blocks // 64)),)
    return [
        Case("contiguous", deal(ids, 8)),
        half_scattered(num_blocks, seed),
        Case("16 requests x 4 scattered", deal(draw.sample(ids, 64), 16)),
        Case(f"{quarter} requests x 4", deal(draw.sample(ids, num_blocks), quarter)),
        Case(f"256 requests share {_blocks(len(shared[0]))}", (shared,) * 256, naive_normal=False),
    ]


def half_scattered(num_blocks: int, seed: int, name: str = "half scattered") -> Case:
    """Half of the blocks 1 to ``num_blocks`` in any order, dealt to eight requests or to as many as blocks."""
    chosen = random.Random(seed).sample(range(1, num_blocks + 1), max(1, num_blocks // 2))
    requests = min(8, len(chosen))
    return Case(name, tuple((tuple(chosen[i::requests]),) for i in range(requests)))


def hybrid_case(layout: Layout, requests: int) -> Case:
    """Requests of the model's full length: attention blocks and one state row a request and group."""
    free = iter(range(1, layout.num_blocks))
    tables = []
    for _ in range(requests):
        blocks = [
            len(group.kv_cache_spec.required_blocks(layout.max_model_len, group.block_size, 1 << 30))
            if not group.kv_cache_spec.holds_state
            else 1
            for group in layout.groups
        ]
        tables.append(tuple(tuple(next(free) for _ in range(count)) for count in blocks))
    return Case(f"hybrid, {requests} requests", tuple(tables))


# -- the ways to fill ---------------------------------------------------------------------------


def our_fill(cache: Cache, case: Case, values: Values) -> Callable[[], object]:
    """The connector's worker half: the path that users take."""
    worker = ConnectorWorker(cache.layout, values)
    worker.register_kv_caches(cache)
    fills = tuple(RequestFill(f"r{i}", rows, 0) for i, rows in enumerate(case.requests))
    metadata = ConnectorMetadata(fills)
    return lambda: worker.start_load_kv(metadata)


def naive_fill(cache: Cache, case: Case, values: Constant | Normal) -> Callable[[], object]:
    """What engines do: request by request and layer by layer, a temporary and an indexed store.

    The loop of vLLM's connector in our words, for any layout; like it, it drops what is out of range.
    """
    tensors = [
        [[cache.flat(layer, i) for i in range(len(cache.parts(layer)))] for layer in group.layer_names]
        for group in cache.layout.groups
    ]

    def fill() -> None:
        for request in case.requests:
            for group, rows in enumerate(request):
                for layer in tensors[group]:
                    ids = torch.tensor(rows, dtype=torch.long, device=cache.device)
                    ids = ids[ids < layer[0].shape[0]]  # out of range: dropped without a word
                    for tensor in layer:
                        size = (len(ids), tensor.shape[1])
                        if isinstance(values, Normal):
                            content = torch.normal(
                                values.mean, values.std, size=size, dtype=tensor.dtype, device=cache.device
                            )
                        else:
                            content = torch.full(size, values.mean, dtype=tensor.dtype, device=cache.device)
                        tensor[ids] = content

    return fill


def vllm_fill(cache: Cache, case: Case, values: Constant | Normal) -> Callable[[], object] | None:
    """vLLM's own decode benchmark connector (worker half) on the same memory; None without vLLM."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as theirs
        from vllm.v1 import kv_cache_interface as interface
    except ImportError:
        return None
    groups, tensors = [], {}
    for group in cache.layout.groups:
        spec = group.kv_cache_spec
        if spec.holds_state:
            state = cast(MambaSpec, spec)
            their_spec = interface.MambaSpec(
                block_size=state.block_size,
                shapes=state.shapes,
                dtypes=tuple(torch_dtype(dtype) for dtype in state.dtypes),
                page_size_padded=state.page_size_padded,
            )
        else:
            attention = cast(AttentionSpec, spec)
            their_spec = interface.FullAttentionSpec(
                block_size=attention.block_size,
                num_kv_heads=attention.num_kv_heads,
                head_size=attention.head_size,
                dtype=torch_dtype(attention.dtype),
            )
        groups.append(SimpleNamespace(layer_names=list(group.layer_names), kv_cache_spec=their_spec))
        for layer in group.layer_names:
            # vLLM hands state layers to connectors as raw int8 pages
            content = cache.pages(layer)[:, None, None, : spec.unpadded_page_size_bytes]
            tensors[layer] = content.view(torch.int8) if spec.holds_state else cache.view(layer)
    settings = {"fill_mean": values.mean, "fill_std": getattr(values, "std", 0.0)}
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            get_from_extra_config=lambda key, default: settings.get(key, default)
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    worker = theirs.DecodeBenchConnectorWorker(config, SimpleNamespace(kv_cache_groups=groups))
    worker.register_kv_caches(tensors)
    requests = {f"r{i}": (tuple(map(list, rows)), 0) for i, rows in enumerate(case.requests)}
    metadata = theirs.DecodeBenchConnectorMetadata(reqs_to_fill=requests)
    return lambda: worker.start_fill_kv(metadata)


# -- measuring ----------------------------------------------------------------------------------


def measure_case(
    cache: Cache, case: Case, values: Constant | Normal, repeats: int, full: bool, rounds: int = ROUNDS
) -> dict[str, Any]:
    """One row of the table: seconds of each way, ratios, and ``disturbed``, why they say nothing.

    ``full``: the naive loop is timed for normal values too. Its two turns come after the others', for they
    would make a turn too long to mean one moment.
    """
    groups = cache.layout.groups
    nbytes = sum(
        len(case.blocks(g)) * sum(part.nbytes for spec in group.layer_specs for part in spec.parts())
        for g, group in enumerate(groups)
    )
    ours = our_fill(cache, case, values)
    check(cache, case, values, ours)
    memory = storage_of(cache)[:nbytes]
    half = memory.numel() // 2
    methods = {
        "ours": ours,
        "memset": lambda: memory.fill_(7),
        # half onto half, twice: as many bytes written, no second cache
        "copy": lambda: (
            memory[:half].copy_(memory[half : 2 * half]),
            memory[half : 2 * half].copy_(memory[:half]),
        ),
    }
    found = in_turn(methods, turns=repeats, device=cache.device, rounds=rounds)
    seconds: dict[str, float] = {name: found.median(name) for name in methods}
    times: dict[str, float] = {}
    if isinstance(values, Constant) or (full and case.naive_normal):
        others = {"naive": naive_fill(cache, case, values)}
        theirs = vllm_fill(cache, case, values)
        if theirs is not None:
            others["vllm"] = theirs
        slow = in_turn({"ours": ours} | others, turns=2, device=cache.device, rounds=1)
        seconds |= {name: slow.median(name) for name in others}
        times = {name: slow.ratio("ours", name) for name in others}
    row: dict[str, Any] = {"case": case.name, "values": type(values).__name__.lower(), "bytes": nbytes}
    row |= {"page_bytes": groups[0].kv_cache_spec.page_size_bytes, "layers": len(cache.layout.layer_names)}
    row |= {f"{name}_s": seconds.get(name) for name in ("memset", "copy", "ours", "naive", "vllm")}
    row["of_memset"] = found.ratio("ours", "memset")
    row["of_copy"] = found.ratio("ours", "copy")
    row["vs_naive"], row["vs_vllm"] = times.get("naive"), times.get("vllm")
    return row | {"disturbed": found.disturbed("ours", "memset")}


def storage_of(cache: Cache) -> torch.Tensor:
    """All bytes of a cache that was allocated here; an engine's has no such tensor."""
    if cache.storage is None:
        raise DecodebenchError("a bench needs a cache of one piece: allocate(layout)")
    return cache.storage


def check(cache: Cache, case: Case, values: Values, ours: Callable[[], object]) -> None:
    """Our fill, read back: every page of the case filled, no other touched."""
    cache.poison()
    ours()
    groups = range(len(cache.layout.groups))
    others = sorted(set(range(cache.layout.num_blocks)).difference(*(case.blocks(group) for group in groups)))
    for group in groups:
        states = inspect_pages(cache, group, values).states
        if (states[:, list(case.blocks(group))] != FILLED).any() or (states[:, others] != UNTOUCHED).any():
            raise AssertionError(f"{case.name}: group {group} does not hold what was asked for")


def measure_sharing(cache: Cache, values: Constant | Normal, repeats: int, rounds: int) -> dict[str, Any]:
    """The same half of the blocks, asked for by one request and by 256 that share them."""
    blocks = range(1, cache.layout.num_blocks // 2 + 1)
    one = Case("one", ((tuple(blocks),),))
    many = Case("256", tuple((tuple(blocks),) for _ in range(256)))
    memory = storage_of(cache)[: len(blocks) * cache.layout.groups[0].bytes_per_block]
    methods = {
        "many": our_fill(cache, many, values),
        "one": our_fill(cache, one, values),
        "memset": lambda: memory.fill_(7),
    }
    found = in_turn(methods, turns=repeats, device=cache.device, rounds=rounds)
    return {
        "values": type(values).__name__.lower(),
        "blocks": len(blocks),
        "one_s": found.median("one"),
        "many_s": found.median("many"),
        "one_of_many": found.ratio("many", "one"),
        "of_memset": found.ratio("many", "memset"),
        "disturbed": found.disturbed("many", "one"),
    }


def measure_audit(cache: Cache, values: Values, repeats: int, rounds: int) -> dict[str, Any]:
    """Reading a filled cache back, next to a plain read of the same bytes; and what memory that takes."""
    layout = cache.layout
    fill_blocks(cache, [range(1, layout.num_blocks), *([[]] * (len(layout.groups) - 1))], values)
    words = storage_of(cache)[: layout.size // 8 * 8].view(torch.int64)

    def audit() -> object:
        return inspect_pages(cache, 0, values)

    found = in_turn(
        {"audit": audit, "read": lambda: words.amax()}, turns=repeats, device=cache.device, rounds=rounds
    )
    return {
        "values": type(values).__name__.lower(),
        "bytes": layout.size,
        "read_s": found.median("read"),
        "audit_s": found.median("audit"),
        "of_read": found.ratio("audit", "read"),
        "extra_bytes": extra_bytes(audit),
        "disturbed": found.disturbed("audit", "read"),
    }


def extra_bytes(work: Callable[[], object]) -> int | None:
    """Resident memory at the peak of some work over that before it; None where Linux does not tell."""

    def resident(field: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1]) << 10

    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew from here
        before = resident("VmRSS")
        work()
        return max(0, resident("VmHWM") - before)
    except (OSError, StopIteration):
        return None


def measure_beside_others(
    cache: Cache, case: Case, values: Constant | Normal, seconds: float
) -> dict[str, Any]:
    """The fill and a memset in turn while as many processes as there are cores keep them busy.

    ``of_memset`` compares all turns together: one turn is a matter of who was given the next time slice.
    """
    ours, memory = our_fill(cache, case, values), storage_of(cache)
    memory = memory[: len(case.blocks(0)) * cache.layout.groups[0].bytes_per_block]
    count = os.cpu_count() or 1
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3)  # until they have started to spin
        found = in_turn(
            {"ours": ours, "memset": lambda: memory.fill_(7)},
            seconds=seconds,
            device=cache.device,
            rounds=1,
            own=[process.pid for process in spinning],
        )
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    taken = {name: sum(times) for name, times in found.samples.items()}
    return {
        "values": type(values).__name__.lower(),
        "processes": count,
        "bytes": memory.numel(),
        "turns": len(found.samples["ours"]),
        "ours_s": found.median("ours"),
        "memset_s": found.median("memset"),
        "of_memset": taken["memset"] / taken["ours"],
        "disturbed": found.crowded(),
    }


def run(quick: bool = False, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """All cases: ``{"fill": rows, "sharing": rows, "audit": rows, "beside": rows, "floors": …, "provenance": …}``."""
    num_blocks, repeats, rounds = (128, 5, 2) if quick else (1024, 9, ROUNDS)
    settings: dict[str, object] = {"num_blocks": num_blocks, "repeats": repeats, "quick": quick}
    rows, sharing, audits, beside = [], [], [], []
    cache = allocate(attention_layout(num_blocks), device)
    cases = attention_cases(num_blocks, seed)
    for values in (CONSTANT, NORMAL):
        for case in cases:
            _progress(f"{case.name}, {type(values).__name__.lower()}")
            full = not quick or case.name == "contiguous"
            rows.append(measure_case(cache, case, values, repeats, full=full, rounds=rounds))
        sharing.append(measure_sharing(cache, values, repeats, rounds))
        audits.append(measure_audit(cache, values, repeats, rounds))
        if cache.device.type == "cpu":
            _progress("beside busy processes")
            beside.append(measure_beside_others(cache, cases[0], values, 2.0 if quick else 6.0))
    del cache
    gc.collect()  # the next cache must not lie beside this one
    for page in PAGES:
        cache = allocate(attention_layout(num_blocks * PAGE // page, page_bytes=page), device)
        case = half_scattered(
            cache.layout.num_blocks - 1, seed, f"half scattered, pages of {bytes_text(page)}"
        )
        for values in (CONSTANT, NORMAL):
            _progress(case.name)
            rows.append(measure_case(cache, case, values, repeats, full=False, rounds=rounds))
        del cache
        gc.collect()
    layout = plan("nemotron-h-8b", memory="40GiB").with_num_blocks(num_blocks // 8)
    cache, case = allocate(layout, device), hybrid_case(layout, num_blocks // 128)
    for values in (CONSTANT, NORMAL):
        _progress(f"{case.name}, {type(values).__name__.lower()}")
        rows.append(measure_case(cache, case, values, repeats, full=not quick, rounds=rounds))
    return {
        "fill": rows,
        "sharing": sharing,
        "audit": audits,
        "beside": beside,
        "floors": [floor.to_dict() for floor in floors(rows, sharing, audits, beside)],
        "provenance": provenance(settings, seed=seed, device=device),
    }


def floors(
    rows: Sequence[dict], sharing: Sequence[dict], audits: Sequence[dict], beside: Sequence[dict] = ()
) -> list[Floor]:
    """What a fill and an audit must reach (ratios on a CPU), and what they did."""
    found: list[Floor] = []

    def add(name: str, at_least: float, row: dict, column: str) -> None:
        if row[column] is not None:
            reason = row["disturbed"]
            found.append(Floor(name, at_least, None if reason else row[column], reason))

    for row in rows:
        if row["bytes"] >= LARGE:
            add(f"{row['values']}, {row['case']}: share of memset", 0.9, row, "of_memset")
    for row in rows:
        least = 40.0 if row["values"] == "normal" else 2.2
        if row["case"] == "contiguous":
            add(f"{row['values']}, {row['case']}: times naive", least, row, "vs_naive")
        elif row["values"] == "constant" and row["case"].endswith("requests x 4"):
            add(f"constant, {row['case']}: times naive", 3.0, row, "vs_naive")
        elif row["values"] == "constant" and "share" in row["case"]:
            add(f"constant, {row['case']}: times naive", 25.0, row, "vs_naive")
    for row in sharing:
        add(f"{row['values']}, 256 requests share half the blocks: share of memset", 0.9, row, "of_memset")
        add(f"{row['values']}, time for one request over 256 that share", 0.9, row, "one_of_many")
    for audit in audits:
        add(f"audit of {audit['values']} values: share of read", 0.75, audit, "of_read")
    for audit in audits:
        if audit.get("extra_bytes") is not None:
            spare = EXTRA / max(1, audit["extra_bytes"])
            name = f"audit of {audit['values']} values: {bytes_text(EXTRA)} over what it takes at its peak"
            found.append(Floor(name, 1.0, min(spare, 1000.0)))
    for row in beside:
        name = f"{row['values']}, beside {row['processes']} busy processes: share of memset beside them"
        add(name, 0.7, row, "of_memset")
    return found


def table_rows(result: dict) -> list[dict[str, Any]]:
    """Every figure of a run as a row of one table, for ``journal.store``: what, case, values, then what was found."""
    rows: list[dict[str, Any]] = [{"what": "fill"} | row for row in result["fill"]]
    for what in ("sharing", "audit", "beside"):
        rows += [{"what": what, "case": what} | row for row in result[what]]
    rows += [{"what": "floor", "case": f["floor"], "values": ""} | f for f in result["floors"]]
    return rows


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text} …" if text else "\r\033[K", end="", file=sys.stderr, flush=True)


# -- the command --------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``decodebench bench fill``."""
    parser.add_argument(
        "--quick", action="store_true", help="an eighth of the bytes, 5 repeats, under a minute"
    )
    parser.add_argument("--json", action="store_true", help="all medians and the provenance, for machines")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--out", metavar="FOLDER", help="store the rows there too, as a sweep does")


def bench_fill_command(arguments: argparse.Namespace) -> int:
    """0 where every floor is met, 1 where one is missed, 3 where other work on the machine hides one."""
    require_device(arguments.device)
    result = run(arguments.quick, arguments.device)
    _progress("")
    if arguments.out:
        store(arguments.out, table_rows(result), ("what", "case", "values"), result["provenance"])
    print(json.dumps(result, indent=1) if arguments.json else table(result))
    return exit_status(floors_from(result["floors"]))


def table(result: dict) -> str:
    """The result as text: GB/s of each way, ratios, floors."""

    def speed(row: dict, name: str) -> str:
        return f"{row['bytes'] / row[f'{name}_s'] / 1e9:.2f}" if row[f"{name}_s"] else "-"

    def ratio(row: dict, name: str) -> str:
        number = row[name]
        if number is None:
            return "-"
        return "?" if row["disturbed"] else f"{number:.2f}" if number < 10 else f"{number:.0f}"

    ways = ("memset", "copy", "ours", "naive", "vllm")
    head = ("case", "values", "GiB", *ways, "of memset", "x naive", "x vllm")
    lines = [
        (
            row["case"],
            row["values"],
            f"{row['bytes'] / 2**30:.2f}",
            *(speed(row, name) for name in ways),
            *(ratio(row, name) for name in ("of_memset", "vs_naive", "vs_vllm")),
        )
        for row in result["fill"]
    ]
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    text = [
        "  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        for line in (head, *lines)
    ]
    facts = result["provenance"]
    text = [
        "Fill speed in GB/s (distinct bytes over the median time of "
        f"{facts['settings']['repeats']} interleaved repeats)",
        f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}: compare ratios, not speeds",
        "",
        *text,
        "",
    ]
    for audit in result["audit"]:
        extra = audit["extra_bytes"]
        text.append(
            f"audit, {audit['values']} values: {audit['bytes'] / audit['audit_s'] / 1e9:.1f} GB/s, "
            f"{ratio(audit, 'of_read')} of a plain read"
            + ("" if extra is None else f", {bytes_text(extra)} more memory at its peak")
        )
    for row in result["beside"]:
        text.append(
            f"beside {row['processes']} busy processes, {row['values']}: {ratio(row, 'of_memset')} of memset "
            f"beside them, {row['turns']} turns"
        )
    found = floors_from(result["floors"])
    return "\n".join([*text, "", *map(str, found), "", verdict(found)])
