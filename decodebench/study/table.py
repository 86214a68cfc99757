"""The columns of a result table: name, dtype, unit, meaning, and the measure that first fills them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from decodebench.measure.journal import JournalError, columns_of, read_folder, to_frame
from decodebench.study.grid import AXES, Case
from decodebench.words import columns

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Column:
    """What a column of the result means. ``dtype`` is pandas' name; ``since``: first measure that fills it."""

    dtype: str
    unit: str
    meaning: str
    since: str = "layout"


_AXIS_MEANINGS = {
    "model": "a known name (decodebench models lists them) or the path of a config.json",
    "hf_overrides": "fields of the config.json to change, as a table or JSON",
    "measure": "how far the case goes: layout (arithmetic), coverage (block ids), audit (bytes), decode (latency)",
    "memory": "KV cache planned for, without weights: bytes, or a number with a unit",
    "block_size": "tokens a block; empty: vLLM's choice",
    "grouping": "auto, hybrid, packed, promoted, separate, fixed(k), per_layer",
    "memory_order": "LBNHC (layers outermost), BLHNC (blocks outermost) …; empty: vLLM's choice",
    "context": "tokens a request, or a mix such as 3x1024+1x8192, which also sets the batch",
    "batch": "requests of a batch",
    "shared_prefix": "leading tokens that all requests share as a prefix-cache hit",
    "kv_cache_dtype": "auto, fp8, fp8_e5m2 …",
    "mamba_ssm_cache_dtype": "type of recurrent states: auto (the checkpoint's), float32, bfloat16, float16",
    "tensor_parallel_size": "ranks that share the heads",
    "decode_context_parallel_size": "ranks that share the tokens",
    "enable_prefix_caching": "states are kept at block boundaries, for hits",
    "max_model_len": 'longest request the layout must hold; empty: the config\'s; "auto": what fits',
    "fault": "a historic defect of the connector (A1 …); empty: the connector as it should be",
    "values": "what is written: normal, constant, zeros, or unfilled",
    "layers_per_group": "layers of each group that are allocated, for audit and decode; empty: all",
    "backend": "decode implementation; empty: the fastest that runs on the device",
    "device": "cpu or cuda",
    "cold": "caches flushed before every step",
    "min_seconds": "decode steps are timed for at least this long",
    "seed": "of values, block tables and queries",
    "trace": "traffic simulated",
    "rate": "requests a second asked for; empty: the trace's",
    "requests": "first requests of the trace; empty: all",
    "machine": "whose floor steps take",
    "efficiency": "of the floor that steps reach",
    "max_num_seqs": "requests that run at most",
    "ttft_limit": "limit of goodput: first token",
    "tpot_limit": "limit of goodput: each further token",
}


_AXIS_DTYPES = {
    "block_size": "Int64",
    "batch": "Int64",
    "shared_prefix": "Int64",
    "tensor_parallel_size": "Int64",
    "decode_context_parallel_size": "Int64",
    "enable_prefix_caching": "boolean",
    "cold": "boolean",
    "seed": "Int64",
    "min_seconds": "Float64",
    "layers_per_group": "Int64",
    "rate": "Float64",
    "requests": "Int64",
    "efficiency": "Float64",
    "max_num_seqs": "Int64",
    "ttft_limit": "Float64",
    "tpot_limit": "Float64",
}


_AXIS_UNITS = {
    "block_size": "tokens",
    "batch": "requests",
    "shared_prefix": "tokens",
    "context": "tokens",
    "min_seconds": "s",
    "rate": "requests/s",
    "requests": "requests",
    "efficiency": "share",
    "max_num_seqs": "requests",
    "ttft_limit": "s",
    "tpot_limit": "s",
}


#: the documented schema of a result table: its columns, in order
COLUMNS: dict[str, Column] = {
    "case_id": Column("string", "", "hash of the case's content"),
    **{
        axis: Column(_AXIS_DTYPES.get(axis, "string"), _AXIS_UNITS.get(axis, ""), _AXIS_MEANINGS[axis])
        for axis in AXES
    },
    "status": Column("string", "", "ok, refused (an input that vLLM or this library refuses) or failed"),
    "reason": Column("string", "", "why a case was refused or failed"),
    "seconds": Column("Float64", "s", "wall time of the whole case"),
    "run": Column("Int64", "", "which run of the folder's provenance made the row"),
    "node": Column("string", "", "machine that ran the case, where a cluster did; empty: the run's"),
    # layout
    "reading": Column("string", "", "how an unknown family was read; empty where a reader knows it"),
    "longest_context": Column("Int64", "tokens", "the longest request: context as a number to sort by"),
    "groups": Column("Int64", "", "KV cache groups"),
    "layers": Column("Int64", "", "layers with a cache"),
    "group_block_sizes": Column("string", "tokens", "block size of each group, in order"),
    "group_kinds": Column("string", "", "kind of each group, in order"),
    "block_in_use": Column("Int64", "tokens", "largest block size of the groups"),
    "block_size_ratio": Column("Float64", "", "largest over smallest block size of the groups"),
    "bytes_per_block": Column("Int64", "bytes", "what one block id costs: pages of the widest group"),
    "num_blocks": Column("Int64", "blocks", "blocks that the budget gives, null blocks included"),
    "blocks_per_request": Column("Float64", "blocks", "blocks reserved for a request, mean of the batch"),
    "concurrency": Column("Float64", "requests", "requests of the longest context that fit at once"),
    "tokens": Column("Int64", "tokens", "concurrency × longest context, as vLLM logs it"),
    "start_bytes": Column("Int64", "bytes", "KV cache that a request of one token reserves"),
    "request_bytes": Column("Int64", "bytes", "KV cache that a request of the longest context reserves"),
    "slope_bytes": Column("Float64", "bytes/token", "KV cache of a further token around that length"),
    "waste_padding_layers": Column("Float64", "share", "memory lost to groups narrower than the widest"),
    "waste_padded_pages": Column("Float64", "share", "memory lost to pages padded to a common size"),
    "waste_unread": Column("Float64", "share", "memory of tokens kept that no step reads: windows left them"),
    "waste_last_block": Column("Float64", "share", "memory lost to partly filled last blocks"),
    "waste_reserve": Column(
        "Float64", "share", "memory reserved for tokens in flight (max_num_batched_tokens), not lost"
    ),
    "waste_null_block": Column("Float64", "share", "memory of the null blocks"),
    "waste_tail": Column("Float64", "share", "memory left over after the last whole block"),
    # coverage: from block ids, and for "audit" from bytes as well
    "required_pages": Column("Int64", "pages", "(layer, block) pages that the next step reads", "coverage"),
    "coverage": Column(
        "Float64",
        "share",
        "required pages that were filled or zeroed on purpose: by block ids, from audit on by bytes; empty: "
        "not judged at this level",
        "coverage",
    ),
    "worst_group_coverage": Column("Float64", "share", "the same for the group that got least", "coverage"),
    "stray_pages": Column("Int64", "pages", "pages written that no request owned", "coverage"),
    "clobbered_pages": Column("Int64", "pages", "pages written that belonged to somebody else", "coverage"),
    "wrong_pages": Column("Int64", "pages", "right page, wrong bytes", "audit"),
    "zeroed_pages": Column("Int64", "pages", "zeroed on purpose (packed formats, ring buffers)", "audit"),
    "verdict": Column("string", "", "coverage in one line", "coverage"),
    "fill_seconds": Column("Float64", "s", "time the fill took", "audit"),
    "fill_bytes": Column("Int64", "bytes", "bytes the fill wrote", "audit"),
    # decode
    "median_s": Column("Float64", "s", "median of one decode step, attention and state work only", "decode"),
    "q1_s": Column("Float64", "s", "first quartile", "decode"),
    "q3_s": Column("Float64", "s", "third quartile", "decode"),
    "p10_s": Column("Float64", "s", "10th percentile", "decode"),
    "p90_s": Column("Float64", "s", "90th percentile", "decode"),
    "steps": Column("Int64", "", "steps measured", "decode"),
    "bytes_moved": Column("Int64", "bytes", "bytes a step must read and write", "decode"),
    "gb_per_s": Column("Float64", "GB/s", "bytes moved over the median", "decode"),
    "limit_s": Column(
        "Float64", "s", "what the memory needs for these bytes, measured in this process", "decode"
    ),
    "limit_share": Column("Float64", "share", "of the bandwidth measured in the same process", "decode"),
    "layers_timed": Column("Int64", "layers", "layers that the timed step holds, of layers", "decode"),
    "backend_used": Column("string", "", "implementation that ran", "decode"),
    "clock": Column("string", "", "how time was taken", "decode"),
    "notes": Column("string", "", "fallbacks taken, and what limits the measurement", "decode"),
    # traffic
    "finished": Column("Int64", "requests", "requests served to their end", "traffic"),
    "refused_requests": Column("Int64", "requests", "requests the layout never serves", "traffic"),
    "traffic_seconds": Column("Float64", "s", "simulated time, first arrival to last token", "traffic"),
    "traffic_steps": Column("Int64", "", "steps simulated", "traffic"),
    "running": Column("Float64", "requests", "requests that run at once, mean of the busy time", "traffic"),
    "waiting": Column("Float64", "requests", "requests that wait, mean of the busy time", "traffic"),
    "preemptions": Column("Int64", "", "requests that gave way and were computed again", "traffic"),
    "recomputed_tokens": Column("Int64", "tokens", "tokens computed again after preemptions", "traffic"),
    "prefix_hit_rate": Column("Float64", "share", "tokens of prompts found in the prefix cache", "traffic"),
    "output_tokens_per_second": Column("Float64", "tokens/s", "tokens that came out", "traffic"),
    "goodput": Column("Float64", "requests/s", "requests finished within the limits", "traffic"),
    "queue_p95_s": Column("Float64", "s", "wait to be admitted, 95th percentile", "traffic"),
    **{
        f"{name}_p{q}_s": Column("Float64", "s", f"{title}, {q}th percentile", "traffic")
        for name, title in (("ttft", "time to the first token"), ("tpot", "time per further token"))
        for q in (50, 95, 99)
    },
    "latency_p95_s": Column("Float64", "s", "whole request, 95th percentile", "traffic"),
}


def axes_text() -> str:
    """Every axis of a grid with its default, unit and meaning, as lines of a table."""
    lines = [("axis", "default", "unit", "meaning")]
    for field in fields(Case):
        default = "" if field.default is MISSING or field.default is None else str(field.default)
        lines.append((field.name, default, _AXIS_UNITS.get(field.name, ""), _AXIS_MEANINGS[field.name]))
    return "\n".join(columns(lines, left=(0, 1, 2, 3)))


DTYPES = {name: column.dtype for name, column in COLUMNS.items()}


def schema() -> pd.DataFrame:
    """The columns of a result table as a DataFrame: name, dtype, unit,
    meaning, first measure that fills it.
    """
    import pandas as pd

    return pd.DataFrame([{"column": name} | asdict(column) for name, column in COLUMNS.items()])


def read(folder: str | Path) -> pd.DataFrame:
    """Every finished row of a result folder, while it is written or after: of a sweep, a bench, an engine's study.

    ``.attrs["provenance"]`` holds the runs that its ``run`` column names, ``.attrs["axes"]`` the columns that
    say what was measured. Raises ``JournalError`` where the folder holds no results.
    """
    rows, runs = read_folder(folder)
    try:
        return table(rows, list(rows), runs)
    except JournalError as error:
        raise JournalError(f"{folder}: {error}") from None


def table(rows: Mapping[str, dict], order: Iterable[str], runs: list[dict]) -> pd.DataFrame:
    """Rows by case id as a DataFrame in this order; its ``attrs`` are those of ``read``."""
    frame = to_frame([rows[case_id] for case_id in order], columns_of(runs) or DTYPES)
    frame.attrs["provenance"] = runs
    frame.attrs["meanings"] = {name: column.meaning for name, column in COLUMNS.items()}
    frame.attrs["axes"] = next((list(run["axes"]) for run in reversed(runs) if run.get("axes")), list(AXES))
    return frame
