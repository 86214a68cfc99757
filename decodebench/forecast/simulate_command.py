"""``decodebench simulate``: a model's layout under traffic, as text or JSON, or several layouts side by side."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from decodebench.forecast.simulate import POLICIES, Settings, Simulation, compare_simulations, simulate
from decodebench.forecast.step_costs import step_floor
from decodebench.forecast.traces import list_traces, read_traffic
from decodebench.forecast.traffic import ARRIVALS, Traffic, synthetic_traffic
from decodebench.layout.plan import DEFAULT_MEMORY, plan
from decodebench.models.load import load_model
from decodebench.models.options import KV_CACHE_DTYPES, STATE_DTYPES


@dataclass(frozen=True)
class Served:
    """One layout's simulation and what it is called beside others."""

    name: str
    simulation: Simulation


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``simulate``: vLLM's own names where it has one."""
    add = parser.add_argument
    add("model", help="name of a known model, path of a config.json or of its folder")
    add("--machine", required=True, help="h100, h200, … or the path of a TOML file; bound --help lists them")
    add(
        "--trace",
        help=f"{', '.join(list_traces())}, the path of a trace, or synthetic (with --requests, --rate …)",
        required=True,
    )
    add("--requests", type=int, metavar="N", help="only the first N; of synthetic traffic: how many")
    add("--rate", type=float, metavar="R", help="requests a second: times are stretched to it")
    add("--arrivals", default="poisson", choices=ARRIVALS, help="of synthetic traffic")
    add("--prompt", type=_lengths, default=(1000, 1.0), metavar="TOKENS[,SIGMA]", help="of synthetic traffic")
    add("--output", type=_lengths, default=(200, 0.8), metavar="TOKENS[,SIGMA]", help="likewise")
    add("--memory", default=DEFAULT_MEMORY, metavar="BYTES", help="of the cache: bytes or 8GiB")
    add("--block-size", type=int, metavar="TOKENS")
    add("--grouping", action="append", help="auto (vLLM's choice), fixed(4), …; repeat to compare")
    add("--kv-cache-dtype", default="auto", choices=list(KV_CACHE_DTYPES))
    add("--mamba-ssm-cache-dtype", default="auto", choices=STATE_DTYPES)
    add("--tensor-parallel-size", "-tp", type=int, default=1, metavar="RANKS")
    add("--max-model-len", type=_length, default="auto", metavar="TOKENS", help="default: what fits")
    add("--max-num-seqs", type=int, default=256, metavar="N")
    add("--max-num-batched-tokens", type=int, default=8192, metavar="TOKENS")
    add("--scheduling-policy", default="fcfs", choices=list(POLICIES))
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add(
        "--skip-prefill",
        action="store_true",
        help="a connector stands in for prompts, as in a decode benchmark",
    )
    add(
        "--efficiency",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of the machine's floor that steps reach (1: no engine is faster)",
    )
    add("--launch", type=float, default=0.0, metavar="SECONDS", help="that a step takes beside its work")
    add("--ttft", type=float, default=float("inf"), metavar="SECONDS", help="limit for goodput: first token")
    add(
        "--tpot",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="limit for goodput: further tokens",
    )
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="all numbers, for machines")
    add("--quiet", action="store_true", help="no progress bar")


def _lengths(text: str) -> int | tuple[float, float]:
    """``512`` or ``1000,0.8`` (median and sigma)."""
    parts = text.split(",")
    return int(parts[0]) if len(parts) == 1 else (float(parts[0]), float(parts[1]))


def _length(text: str) -> int | str:
    return "auto" if text in ("auto", "-1") else int(text)


def _traffic(arguments: argparse.Namespace) -> Traffic:
    if arguments.trace == "synthetic":
        return synthetic_traffic(
            arguments.requests or 10_000,
            arguments.rate or 4.0,
            arguments.prompt,
            arguments.output,
            arguments.arrivals,
            seed=arguments.seed,
        )
    found = read_traffic(arguments.trace, rate=arguments.rate, seed=arguments.seed)
    return found.first(arguments.requests) if arguments.requests is not None else found


def simulate_command(arguments: argparse.Namespace) -> int:
    """Print what becomes of the traffic; of the first layout and the others, side by side."""
    traffic = _traffic(arguments)
    model = load_model(arguments.model)
    steps = step_floor(
        model,
        arguments.machine,
        arguments.efficiency,
        arguments.launch,
        tensor_parallel_size=arguments.tensor_parallel_size,
        kv_cache_dtype=arguments.kv_cache_dtype,
        mamba_ssm_cache_dtype=arguments.mamba_ssm_cache_dtype,
    )
    settings = Settings(
        arguments.max_num_seqs,
        arguments.max_num_batched_tokens,
        arguments.scheduling_policy,
        prefill=not arguments.skip_prefill,
    )
    served = []
    for grouping in arguments.grouping or ["auto"]:
        layout = plan(
            model,
            arguments.memory,
            arguments.block_size,
            grouping,
            kv_cache_dtype=arguments.kv_cache_dtype,
            mamba_ssm_cache_dtype=arguments.mamba_ssm_cache_dtype,
            tensor_parallel_size=arguments.tensor_parallel_size,
            max_model_len=arguments.max_model_len,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            enable_prefix_caching=arguments.enable_prefix_caching,
        )
        found = simulate(
            layout,
            traffic,
            steps,
            settings,
            progress=False if arguments.quiet else None,
            prefix_caching=False if arguments.skip_prefill or not arguments.enable_prefix_caching else None,
        )
        served.append(Served(grouping, found))
        if found.interrupted:
            break
    limits = (arguments.ttft, arguments.tpot)
    if arguments.json:
        rows = [
            {"grouping": one.name} | one.simulation.facts(*limits) | {"refusals": one.simulation.refused}
            for one in served
        ]
        print(json.dumps({"traffic": traffic.name, "dropped": traffic.dropped, "rows": rows}, indent=1))
        return 0
    print(traffic)
    for one in served:
        print(f"\n{one.simulation}")
        if limits != (float("inf"),) * 2:
            print(
                f"  goodput within the limits: {one.simulation.facts(*limits)['goodput']:.2f} requests a second"
            )
    print(
        f"\nStep times: floor of {arguments.machine} divided by an efficiency of {arguments.efficiency:g}"
        + (f", and {arguments.launch:g} s a step" if arguments.launch else "")
        + "."
    )
    for other in served[1:]:
        print(f"\n{other.name} less {served[0].name}, request by request:")
        print(compare_simulations(served[0].simulation, other.simulation, *limits).to_string(index=False))
    return 0
