"""``decodebench plan``: the layout of a model's cache, as text or JSON, or groupings side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise

from decodebench.errors import DecodebenchError
from decodebench.layout import dump, text
from decodebench.layout.card_memory import CardMemory
from decodebench.layout.compare import compare_rows, facts
from decodebench.layout.placement import LayoutRefused
from decodebench.layout.plan import DEFAULT_MEMORY, auto_fit, layout_for, parse_memories, prepare
from decodebench.layout.records import Grouped
from decodebench.models.devices import DEFAULT_DEVICE, DEVICES
from decodebench.models.engines import ENGINES, NEWEST
from decodebench.models.load import load_model
from decodebench.models.model import Model
from decodebench.models.options import (
    KV_CACHE_DTYPES,
    MEMORY_ORDERS,
    MODEL_DTYPES,
    STATE_DTYPES,
    CacheOptions,
)
from decodebench.words import columns


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``plan``: vLLM's own names where it has one."""
    add = parser.add_argument
    add(
        "model", help="name of a known model, path of a config.json or of its folder, or - for standard input"
    )
    add(
        "--memory",
        action="append",
        metavar="BYTES",
        help="bytes or a number with a unit (8GiB) of a rank's cache; may be repeated for several plans; "
        "8GiB,7GiB: of several ranks, whose smallest pool counts",
    )
    add(
        "--block-size", type=int, metavar="TOKENS", help="tokens a block; the grain where states make it grow"
    )
    add("--dtype", default="auto", choices=MODEL_DTYPES)
    add("--kv-cache-dtype", default="auto", choices=list(KV_CACHE_DTYPES))
    add("--tensor-parallel-size", "-tp", type=int, default=1, metavar="RANKS")
    add("--decode-context-parallel-size", "-dcp", type=int, default=1, metavar="RANKS")
    add("--max-model-len", type=_length, metavar="TOKENS", help="a number, or auto for the longest that fits")
    add("--max-num-batched-tokens", type=int, metavar="TOKENS", help="default: the card's")
    add("--async-scheduling", action=argparse.BooleanOptionalAction, default=True)
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="default: on where the model attends",
    )
    add("--mamba-cache-dtype", default="auto", choices=STATE_DTYPES)
    add("--mamba-ssm-cache-dtype", default="auto", choices=STATE_DTYPES)
    add(
        "--disable-hybrid-kv-cache-manager",
        action="store_true",
        help="allocate windows and chunks as full attention",
    )
    add(
        "--device",
        default=DEFAULT_DEVICE,
        choices=list(DEVICES),
        help=f"whose kernels and defaults apply (default: {DEFAULT_DEVICE})",
    )
    add("--num-speculative-tokens", type=int, default=0, metavar="TOKENS")
    add(
        "--draft-layers", type=int, default=0, metavar="LAYERS", help="full-attention layers of a draft model"
    )
    add(
        "--draft-config",
        metavar="CONFIG",
        help="the drafter: name, path or fields (JSON) of its config, or mtp for the model's own layers",
    )
    add("--pipeline-parallel-size", "-pp", type=int, default=1, metavar="STAGES")
    add("--pp-layer-partition", metavar="N,N…", help="decoder layers of each stage (VLLM_PP_LAYER_PARTITION)")
    add(
        "--kv-cache-layout",
        choices=MEMORY_ORDERS,
        help="dimensions from the outermost in; default: vLLM's choice",
    )
    add(
        "--kernel-block-size",
        type=int,
        metavar="TOKENS",
        help="tokens the kernels work on (default: the card's). An engine on CPU: 32, with --block-size 128",
    )
    add(
        "--grouping",
        default="auto",
        help="auto (vLLM's choice), hybrid, packed, promoted, separate, fixed(k), per_layer",
    )
    add(
        "--length",
        type=int,
        metavar="TOKENS",
        help="tokens a request, for --compare (default: the maximum length)",
    )
    add("--json", action="store_true", help="print one case in the form of an engine's dump")
    add("--compare", action="store_true", help="print the groupings side by side")
    add("--engine", default=NEWEST, choices=ENGINES, help="the release whose layouts are planned")
    add("--compare-engines", action="store_true", help="print the known releases side by side")


def _length(text: str) -> int | str:
    # vLLM says -1 for auto
    return "auto" if text in ("auto", "-1") else int(text)


def options_of(arguments: argparse.Namespace) -> dict:
    """The arguments that are options of ``plan``, by their names."""
    return {
        name: getattr(arguments, name)
        for name in (
            "dtype",
            "kv_cache_dtype",
            "tensor_parallel_size",
            "decode_context_parallel_size",
            "max_model_len",
            "max_num_batched_tokens",
            "async_scheduling",
            "enable_prefix_caching",
            "mamba_cache_dtype",
            "mamba_ssm_cache_dtype",
            "num_speculative_tokens",
            "draft_layers",
            "draft_config",
            "pipeline_parallel_size",
            "pp_layer_partition",
            "kernel_block_size",
            "device",
            "engine",
        )
    } | {
        "hybrid_kv_cache_manager": not arguments.disable_hybrid_kv_cache_manager,
        "memory_order": arguments.kv_cache_layout,
    }


def plan_command(arguments: argparse.Namespace, cards: Sequence[CardMemory] = ()) -> int:
    """Print the layout of a model's cache; 0, or 2 where a layout to be shown is refused.

    ``cards``: what the memory was made of, where it was not given as such.
    """
    options = options_of(arguments)
    memories = arguments.memory or [DEFAULT_MEMORY]
    budgets = [parse_memories(memory) for memory in memories]
    CacheOptions.of(options | {"block_size": arguments.block_size})
    model = load_model(arguments.model)
    if not arguments.json and (arguments.compare or arguments.compare_engines):
        _tell(cards)
    if arguments.compare:
        for budget in budgets:
            rows = compare_rows(
                model, budget, length=arguments.length, block_size=arguments.block_size, **options
            )
            if not arguments.json and all(row["status"] == "refused" for row in rows):
                raise LayoutRefused(f"every strategy is refused; {rows[0]['strategy']}: {rows[0]['reason']}")
            print(json.dumps(rows, indent=1) if arguments.json else text.comparison(model.name, budget, rows))
        return 0
    if arguments.compare_engines:
        for budget in budgets:
            engines = engine_rows(model, budget, arguments.block_size, arguments.grouping, options)
            print(json.dumps(engines, indent=1) if arguments.json else _side_by_side(engines))
        return 0
    if arguments.json:
        found = _json_case(model, budgets, arguments, options)
        if cards:
            found["card_memory"] = [asdict(rank) | {"cache": rank.cache} for rank in cards]
        print(json.dumps(found, indent=1))
        return 0
    grouped = prepare(model, arguments.block_size, arguments.grouping, **options)
    _tell(cards)
    for budget in budgets:
        print(layout_for(grouped, budget))
    return 0


def _tell(cards: Sequence[CardMemory]) -> None:
    """The arithmetic of each rank's memory, once where all are alike."""
    alike = len(set(cards)) == 1
    for number, rank in enumerate(cards[:1] if alike else cards):
        print(f"{'' if alike else f'rank {number}: '}{rank}")


def engine_rows(
    model: Model, memory: Sequence[int], block_size: int | None, grouping: str, options: dict
) -> list[dict]:
    """One row of numbers a known release, for the same model, memory and options.

    A release whose layout of the model is not known, or that refuses it, has its reason. Raises what the
    newest release raises.
    """
    rows: list[dict] = []
    for engine in ENGINES:
        try:
            grouped = prepare(model, block_size, grouping, **options | {"engine": engine})
            layout = layout_for(grouped, memory)
        except DecodebenchError as error:
            if engine == NEWEST:
                raise
            rows.append({"engine": engine, "status": "refused", "reason": str(error)})
            continue
        sizes = {"block_size": [group.block_size for group in layout.groups]}
        rows.append({"engine": engine, "status": "ok", "reason": None} | sizes | facts(layout))
    return rows


#: column of ``engine_rows`` → its heading
ENGINE_COLUMNS = {
    "groups": "groups",
    "block_size": "tokens/block",
    "num_blocks": "blocks",
    "bytes_per_block": "bytes/block",
    "blocks_per_request": "blocks/request",
    "concurrency": "requests",
    "tokens": "tokens",
}


def _side_by_side(rows: list[dict]) -> str:
    """The rows as a table, and a line for each release that changes something."""
    headings = ["engine", *ENGINE_COLUMNS.values()]
    planned = [row for row in rows if row["status"] == "ok"]
    cells = [[row["engine"], *(_cell(row[name]) for name in ENGINE_COLUMNS)] for row in planned]
    lines = columns([headings, *cells])
    lines += [f"{row['engine']}: {row['reason']}" for row in rows if row["status"] != "ok"]
    changes = []
    for before, after in pairwise(cells):
        pairs = zip(headings[1:], before[1:], after[1:])
        changed = [f"{heading} {old} → {new}" for heading, old, new in pairs if old != new]
        changes += [f"{after[0]} changes {', '.join(changed)}"] if changed else []
    return "\n".join([*lines, *(changes or ["nothing changes between these releases"])])


def _cell(value: object) -> str:
    """A number, or the block sizes of all groups, each once."""
    numbers = sorted(set(value)) if isinstance(value, list) else [value]
    return " and ".join(f"{number:,.10g}" for number in numbers)


def _json_case(
    model: Model, budgets: list[tuple[int, ...]], arguments: argparse.Namespace, options: dict
) -> dict:
    """The case of an engine's dump; what an engine would refuse is an entry of it."""
    try:
        grouped = prepare(model, arguments.block_size, arguments.grouping, **options)
    except DecodebenchError as error:
        return {"model": model.name, "options": options, "resolved": {}, "refused": dump.refusal(error)}
    return planned_case(grouped, budgets)


def planned_case(grouped: Grouped, budgets: Iterable[int | tuple[int, ...]]) -> dict:
    """Grouped layers in each of the budgets, in the form of an engine's dump: a layout, or why there is none."""
    layouts: dict = {}
    for budget in budgets:
        try:
            layouts[budget] = layout_for(grouped, budget)
        except LayoutRefused as error:
            fits = auto_fit(grouped, budget) if error.max_model_len else None
            layouts[budget] = {"refused": str(error), "auto_fit": fits}
    return dump.case(layouts, grouped)
