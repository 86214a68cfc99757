"""``decodebench bench simulate``: requests simulated a second on one core, and how that grows with their number.

Lengths are drawn from Azure's conversation trace, arrivals are a Poisson process at which a pool is well
used. Layouts have one to four groups. Floors are those of the toolkit: a million requests in 20 seconds,
memory below 2 GiB, time linear in requests.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from itertools import pairwise

from decodebench.forecast import scheduler
from decodebench.forecast.simulate import OneSecond, Settings, simulate
from decodebench.forecast.step_costs import Fitted
from decodebench.forecast.traces import read_traffic
from decodebench.layout.layout import Layout
from decodebench.layout.plan import plan
from decodebench.measure.provenance import provenance

#: model, memory of its cache: one group; two (windows and full attention); four (states and attention)
LAYOUTS = {
    "one group": ("llama-3.1-8b", "20GiB", {"max_model_len": 16384}),
    "two groups": ("gpt-oss-20b", "4GiB", {"max_model_len": 16384}),
    "four groups": ("qwen3-next-80b-a3b", "16GiB", {"max_model_len": 16384}),
}

#: a step of some card: 4 ms, 10 µs a sequence, 20 ns a cached token, 25 µs a token of a prompt
STEP = Fitted(4e-3, 1e-5, 2e-8, 2.5e-5)

SECONDS_PER_MILLION, GIBIBYTES, GROWTH = 20.0, 2.0, 1.1


def layout_of(name: str) -> Layout:
    """One of ``LAYOUTS``, planned."""
    model, memory, options = LAYOUTS[name]
    return plan(model, memory, **options)


def measure(name: str, requests: int, rate: float) -> dict[str, float | int | str]:
    """One row: seconds of the simulation (traffic is made before the clock starts), steps, peak memory."""
    layout = layout_of(name)
    traffic = read_traffic("azure-conversation-2023").resample(requests, rate)
    began = time.perf_counter()
    found = simulate(layout, traffic, STEP, Settings(), progress=False)
    seconds = time.perf_counter() - began
    return {
        "layout": name,
        "groups": len(layout.groups),
        "requests": requests,
        "rate": rate,
        "seconds": seconds,
        "requests_per_second": requests / seconds,
        "steps": found.count(scheduler.N_STEP),
        "in_order": found.count(scheduler.N_IN_ORDER),
        "preemptions": found.count(scheduler.N_PREEMPTIONS),
        "finished": found.finished,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def run(quick: bool = False, rate: float = 20.0, largest: int = 1_000_000) -> dict[str, object]:
    """All cases: ``{"simulate": rows, "growth": exponents, "floors": rows, "provenance": …}``."""
    layout = layout_of("one group")
    traffic = read_traffic("azure-conversation-2023").first(50)
    began = time.perf_counter()
    simulate(layout, traffic, OneSecond(), progress=False)  # compiles, where that was not done before
    ready = time.perf_counter() - began
    largest = min(largest, 100_000) if quick else largest
    sizes = [10**k for k in range(4, 8) if 10**k <= largest]
    rows = []
    for name in LAYOUTS:
        for requests in sizes if name == "two groups" else sizes[-1:]:
            _progress(f"{name}, {requests:,} requests")
            rows.append(measure(name, requests, rate))
    settings = {"quick": quick, "rate": rate, "compiled": scheduler.compiled().fast, "ready_seconds": ready}
    return {
        "simulate": rows,
        "growth": growth(rows),
        "floors": floors(rows),
        "provenance": provenance(settings),
    }


def growth(rows: list[dict]) -> list[dict]:
    """Between sizes of one layout: by which power of the requests the seconds grow (1 is linear)."""
    found = []
    for a, b in pairwise(rows):
        if a["layout"] == b["layout"]:
            power = math.log(b["seconds"] / a["seconds"]) / math.log(b["requests"] / a["requests"])
            found.append({"layout": a["layout"], "from": a["requests"], "to": b["requests"], "power": power})
    return found


def floors(rows: list[dict]) -> list[dict]:
    """What simulation must reach on one core, and what it did."""
    found = []
    largest = max(row["requests"] for row in rows)
    for row in rows:
        if row["requests"] != largest:
            continue
        million = row["seconds"] / row["requests"] * 1e6
        found.append(
            {
                "floor": f"{row['layout']}: seconds for a million requests",
                "at_most": SECONDS_PER_MILLION,
                "reached": million,
                "met": million <= SECONDS_PER_MILLION,
            }
        )
    million = [row["peak_gib"] for row in rows if row["requests"] <= 1_000_000]
    found.append(
        {
            "floor": "memory for up to a million requests, GiB",
            "at_most": GIBIBYTES,
            "reached": max(million),
            "met": max(million) < GIBIBYTES,
        }
    )
    powers = growth(rows)
    if powers:
        power = powers[-1]["power"]
        found.append(
            {
                "floor": "growth with requests, power",
                "at_most": GROWTH,
                "reached": power,
                "met": power <= GROWTH,
            }
        )
    return found


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text} …" if text else "\r\033[K", end="", file=sys.stderr, flush=True)


# -- the command --------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="100,000 requests at most")
    parser.add_argument(
        "--largest", type=int, default=1_000_000, metavar="N", help="requests, up to 10,000,000"
    )
    parser.add_argument("--rate", type=float, default=20.0, metavar="R", help="requests a second")
    parser.add_argument("--json", action="store_true", help="all numbers and the provenance, for machines")


def bench_simulate_command(arguments: argparse.Namespace) -> int:
    """Print the table, or the numbers."""
    result = run(arguments.quick, arguments.rate, arguments.largest)
    _progress("")
    print(json.dumps(result, indent=1) if arguments.json else table(result))
    return 0


def table(result: dict) -> str:
    """The result as text: requests a second, steps, growth, floors."""
    facts = result["provenance"]
    settings = facts["settings"]
    lines = [
        f"Requests simulated on one core, Azure's conversation lengths at {settings['rate']:g} a second",
        f"{facts['device']}; loops {'compiled by numba' if settings['compiled'] else 'plain Python: install numba'}, "
        f"ready after {settings['ready_seconds']:.1f} s",
        "",
        f"{'layout':14s}{'requests':>12s}{'seconds':>10s}{'requests/s':>13s}{'steps':>12s}{'one by one':>12s}"
        f"{'preemptions':>13s}{'peak GiB':>10s}",
    ]
    for row in result["simulate"]:
        lines.append(
            f"{row['layout']:14s}{row['requests']:12,}{row['seconds']:10.2f}{row['requests_per_second']:13,.0f}"
            f"{row['steps']:12,}{row['in_order']:12,}{row['preemptions']:13,}{row['peak_gib']:10.2f}"
        )
    lines.append("")
    for step in result["growth"]:
        lines.append(
            f"{step['from']:,} → {step['to']:,} requests: seconds grow with power {step['power']:.2f}"
        )
    lines.append("")
    for floor in result["floors"]:
        lines.append(
            f"{'met   ' if floor['met'] else 'MISSED'}  {floor['floor']}: {floor['reached']:.2f} "
            f"(at most {floor['at_most']:g})"
        )
    return "\n".join(lines)
