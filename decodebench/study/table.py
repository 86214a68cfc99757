"""The columns of a result table: name, dtype, unit, meaning, and the measure that first fills them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from decodebench.measure.journal import columns_of, read_folder, to_frame
from decodebench.study.grid import AXES

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
    "model": "model name or config path",
    "hf_overrides": "fields of the config changed",
    "measure": "how far the case goes",
    "memory": "budget planned for",
    "block_size": "block size asked for; empty: vLLM's choice",
    "grouping": "strategy that made the groups",
    "memory_order": "order asked for; empty: vLLM's choice",
    "context": "tokens a request, or a mix",
    "batch": "requests",
    "shared_prefix": "tokens hit in the prefix cache",
    "kv_cache_dtype": "KV cache type asked for",
    "mamba_ssm_cache_dtype": "type of recurrent states asked for",
    "tensor_parallel_size": "TP",
    "decode_context_parallel_size": "DCP",
    "enable_prefix_caching": "states kept at block boundaries",
    "max_model_len": "length asked for",
    "fault": "historic defect switched on; empty: none",
    "values": "what was written",
    "layers_per_group": "layers of a group that were allocated; empty: all",
    "backend": "decode implementation",
    "device": "where",
    "cold": "caches flushed before every step",
    "min_seconds": "time for the clock",
    "seed": "of values, block tables and queries",
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
}


_AXIS_UNITS = {
    "block_size": "tokens",
    "batch": "requests",
    "shared_prefix": "tokens",
    "context": "tokens",
    "min_seconds": "s",
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
    # layout
    "reading": Column("string", "", "how an unknown family was read; empty where a reader knows it"),
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
    "intercept_bytes": Column("Float64", "bytes", "what a request costs whatever its length"),
    "slope_bytes": Column("Float64", "bytes/token", "what a further token costs"),
    "waste_padding_layers": Column("Float64", "share", "memory lost to groups narrower than the widest"),
    "waste_padded_pages": Column("Float64", "share", "memory lost to pages padded to a common size"),
    "waste_last_block": Column("Float64", "share", "memory lost to partly filled last blocks"),
    "waste_reserve": Column("Float64", "share", "memory of blocks kept for tokens in flight"),
    "waste_null_block": Column("Float64", "share", "memory of the null blocks"),
    "waste_tail": Column("Float64", "share", "memory left over after the last whole block"),
    # coverage: from block ids, and for "audit" from bytes as well
    "required_pages": Column("Int64", "pages", "(layer, block) pages that the next step reads", "coverage"),
    "coverage": Column(
        "Float64", "share", "required pages that were filled or zeroed on purpose", "coverage"
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
    "backend_used": Column("string", "", "implementation that ran", "decode"),
    "clock": Column("string", "", "how time was taken", "decode"),
    "notes": Column("string", "", "fallbacks taken, and what limits the measurement", "decode"),
}


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
    return table(rows, list(rows), runs)


def table(rows: Mapping[str, dict], order: Iterable[str], runs: list[dict]) -> pd.DataFrame:
    """Rows by case id as a DataFrame in this order; its ``attrs`` are those of ``read``."""
    frame = to_frame([rows[case_id] for case_id in order], columns_of(runs) or DTYPES)
    frame.attrs["provenance"] = runs
    frame.attrs["axes"] = next((list(run["axes"]) for run in reversed(runs) if run.get("axes")), list(AXES))
    return frame
