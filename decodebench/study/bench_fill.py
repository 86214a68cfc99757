"""``python -m decodebench bench fill``: what a fill costs next to a plain memset of the same bytes.

Side by side in one process, repeats interleaved, because the memory bus of a shared machine drifts
by a factor of two between runs: only ratios mean something. Every fill of ours is read back byte
for byte before it is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace

import torch

from decodebench.cache.connector import ConnectorMetadata, ConnectorWorker, RequestFill
from decodebench.cache.readback import FILLED, UNTOUCHED, inspect_pages
from decodebench.cache.tensors import Cache, allocate, torch_dtype
from decodebench.cache.values import Constant, Normal, Values
from decodebench.cache.write import fill_blocks, merge_blocks
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.layout import Layout
from decodebench.layout.plan import from_groups, plan
from decodebench.measure.provenance import provenance
from decodebench.models.specs import FullAttentionSpec

CONSTANT, NORMAL = Constant(0.015), Normal(0.015, 0.02)

#: rows of one request: block ids per group
RequestBlocks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """Requests whose rows are filled in one step.

    ``naive_normal``: whether the naive loop is timed with normal values (some would take minutes a repeat).
    """

    name: str
    requests: tuple[RequestBlocks, ...]
    naive_normal: bool = True

    def rows(self, group: int) -> tuple[int, ...]:
        return merge_blocks(request[group] for request in self.requests)


# -- cases --------------------------------------------------------------------------------------


def attention_layout(num_blocks: int, num_layers: int = 32) -> Layout:
    """Pages of 64 KiB: 16 tokens, 8 KV heads of 128, bfloat16 (Llama-3.1-8B's)."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    names = tuple(f"layers.{i}.attn" for i in range(num_layers))
    return from_groups((KVCacheGroupSpec(names, (spec,) * num_layers, spec),), num_blocks + 1)


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}"


def attention_cases(num_blocks: int, seed: int) -> list[Case]:
    """Block tables over the blocks 1 to ``num_blocks`` of a one-group layout."""
    draw = random.Random(seed)
    ids = range(1, num_blocks + 1)

    def deal(blocks: Sequence[int], requests: int) -> tuple[RequestBlocks, ...]:
        size = len(blocks) // requests
        return tuple((tuple(blocks[i * size : (i + 1) * size]),) for i in range(requests))

    quarter = num_blocks // 4
    shared = (tuple(draw.sample(ids, num_blocks // 64)),)
    return [
        Case("contiguous", deal(ids, 8)),
        Case("half scattered", deal(draw.sample(ids, num_blocks // 2), 8)),
        Case("16 requests x 4 scattered", deal(draw.sample(ids, 64), 16)),
        Case(f"{quarter} requests x 4", deal(draw.sample(ids, num_blocks), quarter)),
        Case(f"256 requests share {_blocks(len(shared[0]))}", (shared,) * 256, naive_normal=False),
    ]


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
            their_spec = interface.MambaSpec(
                block_size=spec.block_size,
                shapes=spec.shapes,
                dtypes=tuple(torch_dtype(dtype) for dtype in spec.dtypes),
                page_size_padded=spec.page_size_padded,
            )
        else:
            their_spec = interface.FullAttentionSpec(
                block_size=spec.block_size,
                num_kv_heads=spec.num_kv_heads,
                head_size=spec.head_size,
                dtype=torch_dtype(spec.dtype),
            )
        groups.append(SimpleNamespace(layer_names=list(group.layer_names), kv_cache_spec=their_spec))
        for layer in group.layer_names:
            # vLLM hands state layers to connectors as raw int8 pages
            state = spec.holds_state
            content = cache.pages(layer)[:, None, None, : spec.unpadded_page_size_bytes]
            tensors[layer] = content.view(torch.int8) if state else cache.view(layer)
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


def interleaved(
    methods: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of each method; every repeat runs all of them, after one run that is not counted."""
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(repeats + 1):
        for name, method in methods.items():
            began = time.perf_counter()
            method()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat:
                samples[name].append(time.perf_counter() - began)
    return {name: median(times) for name, times in samples.items()}


def measure_case(
    cache: Cache, case: Case, values: Constant | Normal, repeats: int, full: bool
) -> dict[str, object]:
    """One row of the table: seconds of each way, and ratios."""
    groups = cache.layout.groups
    nbytes = sum(
        len(case.rows(g)) * sum(part.nbytes for spec in group.layer_specs for part in spec.parts())
        for g, group in enumerate(groups)
    )
    ours = our_fill(cache, case, values)
    check(cache, case, values, ours)
    memory = cache.storage[: min(nbytes, cache.storage.numel())]
    half = memory.numel() // 2
    methods = {
        "memset": lambda: memory.fill_(7),
        # half onto half, twice: as many bytes written, no second cache
        "copy": lambda: (
            memory[:half].copy_(memory[half : 2 * half]),
            memory[half : 2 * half].copy_(memory[:half]),
        ),
        "ours": ours,
    }
    if isinstance(values, Constant) or (full and case.naive_normal):
        methods["naive"] = naive_fill(cache, case, values)
        theirs = vllm_fill(cache, case, values)
        if theirs is not None:
            methods["vllm"] = theirs
    seconds = interleaved(methods, repeats, cache.device)
    row: dict[str, object] = {"case": case.name, "values": type(values).__name__.lower(), "bytes": nbytes}
    row |= {f"{name}_s": seconds.get(name) for name in ("memset", "copy", "ours", "naive", "vllm")}
    row["of_memset"] = seconds["memset"] / seconds["ours"]
    row["of_copy"] = seconds["copy"] / seconds["ours"]
    row["vs_naive"] = seconds["naive"] / seconds["ours"] if "naive" in seconds else None
    row["vs_vllm"] = seconds["vllm"] / seconds["ours"] if "vllm" in seconds else None
    return row


def check(cache: Cache, case: Case, values: Values, ours: Callable[[], object]) -> None:
    """Our fill, read back: every block of the case filled, no other touched."""
    cache.poison()
    ours()
    groups = range(len(cache.layout.groups))
    others = sorted(set(range(cache.layout.num_blocks)).difference(*(case.rows(group) for group in groups)))
    for group in groups:
        states = inspect_pages(cache, group, values).states
        if (states[:, list(case.rows(group))] != FILLED).any() or (states[:, others] != UNTOUCHED).any():
            raise AssertionError(f"{case.name}: group {group} does not hold what was asked for")


def measure_sharing(cache: Cache, values: Constant | Normal, repeats: int) -> dict[str, object]:
    """The same half of the blocks, asked for by one request and by 256 that share them."""
    blocks = range(1, cache.layout.num_blocks // 2 + 1)
    one = Case("one", ((tuple(blocks),),))
    many = Case("256", tuple((tuple(blocks),) for _ in range(256)))
    methods = {"one": our_fill(cache, one, values), "many": our_fill(cache, many, values)}
    seconds = interleaved(methods, repeats, cache.device)
    return {
        "values": type(values).__name__.lower(),
        "blocks": len(blocks),
        "one_s": seconds["one"],
        "many_s": seconds["many"],
        "one_of_many": seconds["one"] / seconds["many"],
    }


def measure_audit(cache: Cache, values: Values, repeats: int) -> dict[str, object]:
    """Reading a filled cache back, next to a plain read of the same bytes."""
    layout = cache.layout
    fill_blocks(cache, [range(1, layout.num_blocks), *([[]] * (len(layout.groups) - 1))], values)
    words = cache.storage[: cache.storage.numel() // 8 * 8].view(torch.int64)
    methods = {"read": lambda: words.amax(), "audit": lambda: inspect_pages(cache, 0, values)}
    seconds = interleaved(methods, repeats, cache.device)
    return {
        "values": type(values).__name__.lower(),
        "bytes": layout.size,
        "read_s": seconds["read"],
        "audit_s": seconds["audit"],
        "of_read": seconds["read"] / seconds["audit"],
    }


def run(quick: bool = False, device: str = "cpu", seed: int = 0) -> dict[str, object]:
    """All cases: ``{"fill": rows, "sharing": rows, "audit": rows, "floors": rows, "provenance": ...}``."""
    num_blocks, repeats = (128, 3) if quick else (1024, 7)
    settings = {"num_blocks": num_blocks, "repeats": repeats, "quick": quick}
    rows, sharing, audits = [], [], []
    cache = allocate(attention_layout(num_blocks), device)
    for values in (CONSTANT, NORMAL):
        for case in attention_cases(num_blocks, seed):
            _progress(f"{case.name}, {type(values).__name__.lower()}")
            rows.append(
                measure_case(cache, case, values, repeats, full=not quick or case.name == "contiguous")
            )
        sharing.append(measure_sharing(cache, values, repeats))
        audits.append(measure_audit(cache, values, repeats))
    del cache
    gc.collect()  # the next cache must not lie beside this one
    layout = plan("nemotron-h-8b", memory="40GiB").with_num_blocks(num_blocks // 8)
    cache, case = allocate(layout, device), hybrid_case(layout, num_blocks // 128)
    for values in (CONSTANT, NORMAL):
        _progress(f"{case.name}, {type(values).__name__.lower()}")
        rows.append(measure_case(cache, case, values, repeats, full=not quick))
    return {
        "fill": rows,
        "sharing": sharing,
        "audit": audits,
        "floors": floors(rows, sharing, audits),
        "provenance": provenance(settings, seed=seed, device=device),
    }


def floors(rows: Sequence[dict], sharing: Sequence[dict], audits: Sequence[dict]) -> list[dict[str, object]]:
    """What a fill must reach (ratios on a CPU), and what it did."""
    by_name = {(row["case"], row["values"]): row for row in rows}
    found = []

    def add(name: str, reached: float | None, floor: float) -> None:
        if reached is not None:
            found.append({"floor": name, "at_least": floor, "reached": reached, "met": reached >= floor})

    for case in ("contiguous", "half scattered", "16 requests x 4 scattered"):
        add(f"constant, {case}: share of memset", by_name[case, "constant"]["of_memset"], 0.85)
        add(f"normal, {case}: share of memset", by_name[case, "normal"]["of_memset"], 0.7)
    add("constant, contiguous: times naive", by_name["contiguous", "constant"]["vs_naive"], 2.2)
    for row in rows:
        if row["values"] == "constant" and row["case"].endswith("requests x 4"):
            add(f"constant, {row['case']}: times naive", row["vs_naive"], 3)
        if row["values"] == "constant" and "share" in row["case"]:
            add(f"constant, {row['case']}: times naive", row["vs_naive"], 25)
    add("normal, contiguous: times naive", by_name["contiguous", "normal"]["vs_naive"], 40)
    for row in sharing:
        add(f"{row['values']}, time for one request over 256 that share", row["one_of_many"], 0.9)
    for audit in audits:
        add(f"audit of {audit['values']} values: share of read", audit["of_read"], 0.5)
    return found


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text} …", end="", file=sys.stderr, flush=True)


# -- the command --------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="an eighth of the bytes, 3 repeats, under a minute"
    )
    parser.add_argument("--json", action="store_true", help="all medians and the provenance, for machines")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")


def bench_fill_command(arguments: argparse.Namespace) -> int:
    result = run(arguments.quick, arguments.device)
    _progress("")
    print(json.dumps(result, indent=1) if arguments.json else table(result))
    return 0


def table(result: dict) -> str:
    """The result as text: GB/s of each way, ratios, floors."""

    def speed(row: dict, name: str) -> str:
        return f"{row['bytes'] / row[f'{name}_s'] / 1e9:.2f}" if row[f"{name}_s"] else "-"

    def ratio(number: float | None) -> str:
        return "-" if number is None else f"{number:.2f}" if number < 10 else f"{number:.0f}"

    head = (
        "case",
        "values",
        "GiB",
        "memset",
        "copy",
        "ours",
        "naive",
        "vLLM",
        "of memset",
        "x naive",
        "x vLLM",
    )
    lines = [
        (
            row["case"],
            row["values"],
            f"{row['bytes'] / 2**30:.2f}",
            *(speed(row, name) for name in ("memset", "copy", "ours", "naive", "vllm")),
            *(ratio(row[name]) for name in ("of_memset", "vs_naive", "vs_vllm")),
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
        text.append(
            f"audit, {audit['values']} values: {audit['bytes'] / audit['audit_s'] / 1e9:.1f} GB/s, "
            f"{audit['of_read']:.2f} of a plain read"
        )
    text += [""] + [
        f"{'met   ' if floor['met'] else 'MISSED'}  {floor['floor']}: {floor['reached']:.2f} "
        f"(floor {floor['at_least']})"
        for floor in result["floors"]
    ]
    return "\n".join(text)
