"""What a case measures under traffic: the layout simulated, its figures as columns."""

from __future__ import annotations

from functools import lru_cache

from decodebench.forecast.simulate import Settings, simulate
from decodebench.forecast.step_costs import step_floor
from decodebench.forecast.traces import read_traffic
from decodebench.forecast.traffic import Traffic
from decodebench.study.grid import Case, SweepError
from decodebench.study.plans import model_of

#: figure of a simulation → its column
COLUMNS_OF = {
    "finished": "finished",
    "refused": "refused_requests",
    "seconds": "traffic_seconds",
    "steps": "traffic_steps",
    "running": "running",
    "waiting": "waiting",
    "preemptions": "preemptions",
    "recomputed_tokens": "recomputed_tokens",
    "prefix_hit_rate": "prefix_hit_rate",
    "output_tokens_per_second": "output_tokens_per_second",
    "goodput": "goodput",
    "queue_p95_s": "queue_p95_s",
    "ttft_p50_s": "ttft_p50_s",
    "ttft_p95_s": "ttft_p95_s",
    "ttft_p99_s": "ttft_p99_s",
    "tpot_p50_s": "tpot_p50_s",
    "tpot_p95_s": "tpot_p95_s",
    "tpot_p99_s": "tpot_p99_s",
    "latency_p95_s": "latency_p95_s",
}


@lru_cache(maxsize=2)
def traffic_of(trace: str, rate: float | None, requests: int | None, seed: int) -> Traffic:
    """A trace, kept for the cases that follow on the same one."""
    traffic = read_traffic(trace, rate=rate, seed=seed)
    return traffic if requests is None else traffic.first(requests)


def traffic_stage(case: Case, made: dict) -> dict:
    if case.trace is None:
        raise SweepError('measure "traffic" needs a trace: trace = "azure-conversation-2023", or a path')
    found = simulate(
        made["layout"],
        traffic_of(case.trace, case.rate, case.requests, case.seed),
        step_floor(
            model_of(case.model, case.hf_overrides),
            case.machine,
            case.efficiency,
            tensor_parallel_size=case.tensor_parallel_size,
            decode_context_parallel_size=case.decode_context_parallel_size,
            kv_cache_dtype=case.kv_cache_dtype,
            mamba_ssm_cache_dtype=case.mamba_ssm_cache_dtype,
        ),
        Settings(case.max_num_seqs, max(8192, case.max_num_seqs)),
        progress=False,
    )
    if found.interrupted:
        raise KeyboardInterrupt
    limits = (float("inf") if limit is None else limit for limit in (case.ttft_limit, case.tpot_limit))
    facts = found.facts(*limits)
    return {column: facts[name] for name, column in COLUMNS_OF.items()}
