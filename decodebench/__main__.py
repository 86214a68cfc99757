"""The commands: ``plan``, ``sweep``, ``report``, ``bench``.

Each command is a pair of functions in the room it belongs to: one adds its arguments, one
runs it and returns the exit code. Rooms are imported only when their command is asked for,
so that ``plan`` needs neither torch nor pandas.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from decodebench.specs import DecodebenchError

#: command → (module, function that adds arguments, function that runs it, one line of help)
COMMANDS = {
    "plan": (__name__, "add_plan_arguments", "plan_command", "the layout of a model's cache"),
    "sweep": ("decodebench.sweep", "add_sweep_arguments", "sweep_command", "a grid of cases to a table"),
    "report": ("decodebench.report", "add_report_arguments", "report_command", "notebooks to HTML"),
    "bench fill": (
        "decodebench.bench.fill",
        "add_arguments",
        "bench_fill_command",
        "fill speed against memset",
    ),
    "bench decode": (
        "decodebench.bench.decode",
        "add_arguments",
        "bench_decode_command",
        "decode step against the bandwidth limit",
    ),
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line."""

    def error(self, message: str):
        print(
            f"decodebench: {message} ({self.prog} --help lists all options)".replace("\n", " "),
            file=sys.stderr,
        )
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 with one line on stderr where the input is bad."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name = " ".join(argv[:2]) if argv[:1] == ["bench"] else "".join(argv[:1])
    if name not in COMMANDS:
        listing = "\n".join(f"  {command:14s} {spec[3]}" for command, spec in COMMANDS.items())
        print(f"usage: python -m decodebench COMMAND …\n\n{listing}\n\nCOMMAND --help tells more.")
        return 0 if name in ("-h", "--help") else 2
    module_name, add_arguments, run, help_line = COMMANDS[name]
    module = import_module(module_name)
    parser = Parser(prog=f"python -m decodebench {name}", description=help_line)
    getattr(module, add_arguments)(parser)
    arguments = parser.parse_args(argv[len(name.split()) :])
    try:
        return getattr(module, run)(arguments) or 0
    except DecodebenchError as error:
        print(f"decodebench: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 0


# -- plan ------------------------------------------------------------------------------------------


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``plan``: vLLM's own names where it has one."""
    from decodebench.models.options import KV_CACHE_DTYPES, MEMORY_ORDERS, MODEL_DTYPES, STATE_DTYPES

    add = parser.add_argument
    add(
        "model", help="name of a known model, path of a config.json or of its folder, or - for standard input"
    )
    add(
        "--memory",
        action="append",
        metavar="BYTES",
        help="bytes or a number with a unit (8GiB); may be repeated",
    )
    add(
        "--block-size", type=int, metavar="TOKENS", help="tokens a block; the grain where states make it grow"
    )
    add("--dtype", default="auto", choices=MODEL_DTYPES)
    add("--kv-cache-dtype", default="auto", choices=list(KV_CACHE_DTYPES))
    add("--tensor-parallel-size", "-tp", type=int, default=1, metavar="RANKS")
    add("--decode-context-parallel-size", "-dcp", type=int, default=1, metavar="RANKS")
    add("--max-model-len", type=_length, metavar="TOKENS", help="a number, or auto for the longest that fits")
    add("--max-num-batched-tokens", type=int, default=8192, metavar="TOKENS")
    add("--async-scheduling", action=argparse.BooleanOptionalAction, default=True)
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--mamba-cache-dtype", default="auto", choices=STATE_DTYPES)
    add("--mamba-ssm-cache-dtype", default="auto", choices=STATE_DTYPES)
    add(
        "--disable-hybrid-kv-cache-manager",
        action="store_true",
        help="allocate windows and chunks as full attention",
    )
    add("--num-speculative-tokens", type=int, default=0, metavar="TOKENS")
    add(
        "--draft-layers", type=int, default=0, metavar="LAYERS", help="full-attention layers of a draft model"
    )
    add(
        "--kv-cache-layout",
        choices=MEMORY_ORDERS,
        help="dimensions from the outermost in; default: vLLM's choice",
    )
    add(
        "--kernel-block-size",
        type=int,
        metavar="TOKENS",
        help="tokens the kernels work on (16; 64 for latent attention). An engine on CPU: 32, with --block-size 128",
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


def _length(text: str) -> int | str:
    # vLLM says -1 for auto
    return "auto" if text in ("auto", "-1") else int(text)


def plan_command(arguments: argparse.Namespace) -> int:
    """Print the layout of a model's cache; 0, or 2 where a layout to be shown is refused."""
    import json

    from decodebench import layout, listing
    from decodebench.models import CacheOptions, load_model

    options = {
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
            "kernel_block_size",
        )
    } | {
        "hybrid_kv_cache_manager": not arguments.disable_hybrid_kv_cache_manager,
        "memory_order": arguments.kv_cache_layout,
    }
    memories = arguments.memory or [layout.DEFAULT_MEMORY]
    budgets = [layout.parse_memory(memory) for memory in memories]
    CacheOptions.of(options | {"block_size": arguments.block_size})
    model = load_model(arguments.model)
    if arguments.compare:
        for budget in budgets:
            rows = layout.compare_rows(
                model, budget, length=arguments.length, block_size=arguments.block_size, **options
            )
            if not arguments.json and all(row["status"] == "refused" for row in rows):
                raise layout.LayoutRefused(
                    f"every strategy is refused; {rows[0]['strategy']}: {rows[0]['reason']}"
                )
            print(
                json.dumps(rows, indent=1) if arguments.json else listing.comparison(model.name, budget, rows)
            )
        return 0
    if arguments.json:
        print(json.dumps(_json_case(model, budgets, arguments, options), indent=1))
        return 0
    grouped = layout.prepare(model, arguments.block_size, arguments.grouping, **options)
    for budget in budgets:
        print(layout.layout_for(grouped, budget))
    return 0


def _json_case(model, budgets: list[int], arguments: argparse.Namespace, options: dict) -> dict:
    """The case of an engine's dump; what an engine would refuse is an entry of it."""
    from decodebench import layout, listing

    try:
        grouped = layout.prepare(model, arguments.block_size, arguments.grouping, **options)
    except DecodebenchError as error:
        return {"model": model.name, "options": options, "resolved": {}, "refused": listing.refusal(error)}
    layouts: dict = {}
    for budget in budgets:
        try:
            layouts[budget] = layout.layout_for(grouped, budget)
        except layout.LayoutRefused as error:
            fits = layout.auto_fit(grouped, budget) if error.max_model_len else None
            layouts[budget] = {"refused": str(error), "auto_fit": fits}
    return listing.case(layouts, grouped)


if __name__ == "__main__":
    sys.exit(main())
