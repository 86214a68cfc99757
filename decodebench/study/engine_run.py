"""``decodebench run``: a model's decode steps in the engine that is installed, or on a running server.

    decodebench run tiny-llama --batch 1,8 --context 256,1024 --report out/

The short way to a sweep of ``measure = "engine"``: the same rows in the same journal, so that a run that was
killed goes on, and ``sweep``, ``plot`` and ``compare`` read them.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from decodebench.layout.plan import parse_memory
from decodebench.study.grid import ADMISSIONS, ENGINE_AUDITS, Case, SweepError
from decodebench.study.sweep import CasesRefused, refusals, run
from decodebench.words import columns, plain_number

if TYPE_CHECKING:
    import pandas as pd

#: what a terminal shows of each row
SHOWN = (
    "median_s",
    "q1_s",
    "q3_s",
    "tokens_per_second",
    "admit_s",
    "coverage",
    "plan_equal",
    "floor_s",
    "floor_share",
)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``decodebench run``."""
    plain = Case("any")
    parser.add_argument("model", help="a known name, a config.json, or a folder with a model")
    parser.add_argument("--batch", default="1", help="requests that decode together: 1,8,64")
    parser.add_argument(
        "--context", default="1024", help="tokens of each: 1024,8192, or mixes: 3x1024+1x8192"
    )
    parser.add_argument(
        "--admission", default=plain.admission, help=f"one or more of: {', '.join(ADMISSIONS)}"
    )
    parser.add_argument("--audit", default=plain.engine_audit, help=" or ".join(ENGINE_AUDITS))
    parser.add_argument("--steps", type=int, default=plain.decode_steps, help="steps timed in each case")
    parser.add_argument("--memory", default="1GiB", help="KV cache of the engine (default 1GiB)")
    parser.add_argument("--block-size", help="tokens a block: 16,32")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto,fp8 …")
    parser.add_argument("--kernel-block", type=int, help="tokens that CPU attention takes at once")
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("-pp", "--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("-dp", "--data-parallel-size", type=int, default=1)
    parser.add_argument("--load-format", default=plain.load_format, help="dummy (random weights), auto …")
    parser.add_argument(
        "--machine", default=plain.machine, help="whose floor, on a GPU; on a CPU it is this one"
    )
    parser.add_argument(
        "--engine", metavar="JSON", help="further engine arguments: '{\"enforce_eager\": true}'"
    )
    parser.add_argument(
        "--server", metavar="URL", help="measure a running server instead, with vllm bench serve"
    )
    parser.add_argument(
        "--time-limit", type=float, default=plain.time_limit, help="seconds until an engine is killed"
    )
    parser.add_argument("--report", type=Path, help="folder for the rows and one page about them")
    parser.add_argument("--retry-failed", action="store_true", help="run refused and failed cases again")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def grid_of(arguments: argparse.Namespace) -> dict:
    """The grid that a command line asks for."""
    parse_memory(arguments.memory)
    return {
        "model": arguments.model,
        "measure": "engine",
        "admission": _listed(arguments.admission),
        "batch": _numbers("--batch", arguments.batch),
        "context": _listed(arguments.context),
        "engine_audit": arguments.audit,
        "decode_steps": arguments.steps,
        "memory": arguments.memory,
        "block_size": _numbers("--block-size", arguments.block_size) if arguments.block_size else None,
        "kv_cache_dtype": _listed(arguments.kv_cache_dtype),
        "kernel_block": arguments.kernel_block,
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "pipeline_parallel_size": arguments.pipeline_parallel_size,
        "data_parallel_size": arguments.data_parallel_size,
        "load_format": arguments.load_format,
        "machine": arguments.machine,
        "engine": arguments.engine,
        "server": arguments.server,
        "time_limit": arguments.time_limit,
    }


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in _listed(text)]
    except ValueError:
        raise SweepError(f"{name} {text!r}: whole numbers with commas between them are expected") from None


def run_command(arguments: argparse.Namespace) -> int:
    """Measure the cases, print a line on each, and write the page; 2 where none could be measured."""
    out = arguments.report
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CasesRefused)  # counted below
            table = run(
                grid_of(arguments),
                None if out is None else out / "rows",
                retry_failed=arguments.retry_failed,
                progress=False if arguments.quiet else None,
            )
    except KeyboardInterrupt:
        kept = f"finished rows are in {out / 'rows'}, and the same command goes on there" if out else ""
        raise KeyboardInterrupt(kept or "nothing was kept: --report keeps rows") from None
    print("\n".join(told(table)))
    if any(table["status"] != "ok"):
        print(refusals(table))
    if out is not None:
        # the page is made two rooms further, where figures are: asked for by name, as stages are
        print(resolve_name("decodebench.show.engine_page:engine_page")(table, out))
    if not any(table["status"] == "ok"):
        raise SweepError("no case could be measured; the reasons stand above")
    return 0


def told(table: pd.DataFrame) -> list[str]:
    """A line a measured case: what varies, and ``SHOWN``; then whose floor it is."""
    ok = table[table["status"] == "ok"]
    if ok.empty:
        return []
    axes = ("model", "admission", "context", "batch", "block_size", "kv_cache_dtype")
    varying = [axis for axis in axes if axis in ("context", "batch") or table[axis].nunique(dropna=False) > 1]
    shown = [*varying, *(column for column in SHOWN if ok[column].notna().any())]
    text = ok[shown].astype(object).where(ok[shown].notna(), "–")
    cells = [
        [plain_number(value, column) for column, value in row.items()] for row in text.to_dict("records")
    ]
    floors = dict.fromkeys(ok["floor_machine"].dropna())
    return [*columns([shown, *cells], left=range(len(varying))), *(f"floor of {name}" for name in floors)]
