"""``python -m decodebench bench growth``: whether fills and audits are linear in bytes, and in nothing else.

Each is timed in turn with as many plain bytes (a memset, a read): what grows is the cache, from 64 MiB to
as much as fits, and at one size the number of layers, of requests and the size of a page. A share of the
plain bytes that stays the same is a time that is linear in them.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from decodebench.cache.readback import inspect_pages
from decodebench.cache.tensors import allocate, free_memory
from decodebench.cache.values import Constant, Normal
from decodebench.errors import DecodebenchError
from decodebench.measure.in_turn import in_turn
from decodebench.measure.journal import store
from decodebench.measure.provenance import provenance
from decodebench.shipped import shipped
from decodebench.study.bench_fill import CONSTANT, NORMAL, PAGE, Case, attention_layout, our_fill, storage_of
from decodebench.study.floors import Floor, exit_status, verdict
from decodebench.study.table import read
from decodebench.words import bytes_text, plain_number, seconds_text

if TYPE_CHECKING:
    import pandas as pd

SMALLEST, LARGEST = 64 << 20, 8 << 30
#: the size at which everything but the size varies, and what it varies between
FIXED, LAYERS, REQUESTS, PAGES = 512 << 20, (2, 8, 32, 64), (1, 16, 256), (16 << 10, 64 << 10, 1 << 20)
#: columns that say what was measured
SETTINGS = ("varies", "work", "values", "bytes", "layers", "requests", "page_bytes")
#: the smallest share of a line over its largest
FLOOR = 0.9


def shapes(largest: int) -> Iterator[tuple[str, int, int, int, int]]:
    """(what varies, bytes, layers, requests, bytes a page)."""
    nbytes = SMALLEST
    while nbytes <= largest:
        yield "bytes", nbytes, 32, 8, PAGE
        nbytes *= 2
    size = min(FIXED, largest)
    yield from (("layers", size, layers, 8, PAGE) for layers in LAYERS)
    yield from (("requests", size, 32, requests, PAGE) for requests in REQUESTS)
    yield from (("page_bytes", size, 32, 8, page) for page in PAGES)


def measure_shape(
    varies: str, nbytes: int, layers: int, requests: int, page_bytes: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """A row each for the fill and the audit of constant and of normal values."""
    count = nbytes // (layers * page_bytes)
    cache = allocate(attention_layout(count, layers, page_bytes))
    blocks = list(range(1, count + 1))
    case = Case("growth", tuple((tuple(blocks[i::requests]),) for i in range(min(requests, count))))
    memory = storage_of(cache)[: count * layers * page_bytes]
    words = memory.view(torch.int64)
    shared: dict[str, Any] = {"varies": varies, "bytes": len(memory), "layers": layers, "requests": requests}
    shared |= {"page_bytes": page_bytes}
    values: Constant | Normal
    for values in (CONSTANT, NORMAL):
        fill = our_fill(cache, case, values)
        pairs: dict[str, dict[str, Callable[[], object]]] = {
            "fill": {"work": fill, "plain": lambda: memory.fill_(7)},
            "audit": {"work": partial(inspect_pages, cache, 0, values), "plain": words.amax},
        }
        for work, ways in pairs.items():
            fill()  # the audit of what a memset left would stop early
            found = in_turn(ways, turns=3, seconds=seconds)
            row: dict[str, Any] = shared | {"work": work, "values": type(values).__name__.lower()}
            row |= {"seconds": found.median("work"), "plain_seconds": found.median("plain")}
            row |= {"share": found.ratio("work", "plain"), "disturbed": found.disturbed("work", "plain")}
            yield row | {"gb_per_s": len(memory) / row["seconds"] / 1e9, "turns": len(found.samples["work"])}


def floors(rows: Sequence[dict[str, Any]]) -> list[Floor]:
    """For each line of the figure its smallest share over its largest."""
    found = []
    for varies in dict.fromkeys(row["varies"] for row in rows):
        for work in ("fill", "audit"):
            for values in ("constant", "normal"):
                line = [r for r in rows if (r["varies"], r["work"], r["values"]) == (varies, work, values)]
                reason = next((row["disturbed"] for row in line if row["disturbed"]), None)
                shares = [row["share"] for row in line]
                reached = None if reason else min(shares) / max(shares)
                name = f"{work}, {values}: smallest share over largest by {varies.replace('_', ' ')}"
                found.append(Floor(name, FLOOR, reached, reason))
    return found


def stored() -> pd.DataFrame | None:
    """The rows that ``--out data/results/growth`` left in this checkout or package, None where there are none."""
    folder = shipped("data/results/growth")
    return read(folder) if folder.exists() else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``decodebench bench growth``."""
    parser.add_argument("--most", type=float, metavar="GIB", help="largest cache in GiB (8, or what fits)")
    parser.add_argument("--json", action="store_true", help="rows, floors and provenance")
    parser.add_argument("--out", metavar="FOLDER", help="store the rows there, as a sweep does")


def bench_growth_command(arguments: argparse.Namespace) -> int:
    """0 where every floor is met, 1 where one is missed, 3 where other work on the machine hides one."""
    free = free_memory(torch.device("cpu"))
    if not Path("/proc/meminfo").exists():  # then it is all of the memory, and others hold a part of it
        free //= 2
    most = int(arguments.most * 2**30) if arguments.most else min(LARGEST, free // 2)
    if not SMALLEST <= most <= free:
        raise DecodebenchError(
            f"--most {bytes_text(most)}: between {bytes_text(SMALLEST)} and the "
            f"{bytes_text(free)} that this machine has free"
        )
    rows: list[dict[str, Any]] = []
    for shape in shapes(most):
        for row in measure_shape(*shape, seconds=0.5):
            rows.append(row)
            if not arguments.json:
                print(line_of(row), flush=True)
        gc.collect()  # the next cache must not lie beside this one
    facts = provenance({"most": most}, seed=0)
    found = floors(rows)
    if arguments.out:
        store(arguments.out, rows, SETTINGS, facts)
    if arguments.json:
        result = {"rows": rows, "floors": [floor.to_dict() for floor in found], "provenance": facts}
        print(json.dumps(result, indent=1))
    else:
        print("\n".join(["", *map(str, found), "", verdict(found)]))
    return exit_status(found)


def line_of(row: dict[str, Any]) -> str:
    """A row as a line of the table that is printed while the bench runs."""
    cells = (
        f"{row['work']}, {row['values']}",
        bytes_text(row["bytes"]),
        f"{row['layers']} layers, {row['requests']} requests, pages of {bytes_text(row['page_bytes'])}:",
        seconds_text(row["seconds"]),
        f"{plain_number(row['gb_per_s'])} GB/s,",
        "?" if row["disturbed"] else f"{row['share']:.2f} of plain bytes",
    )
    return "  ".join(cells)
