"""A layout as text, as HTML and as the JSON of one case, in the form of an engine's dump."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from decodebench.capacity import capacity, log_lines, waste
from decodebench.grouping import KVCacheGroupSpec
from decodebench.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from decodebench.layout import KVCacheConfig

COLUMNS = ("group", "kind", "layers", "block", "page", "padding", "blocks/request", "first layer")


def rows(layout: KVCacheConfig) -> list[tuple[str, ...]]:
    """A row a group, by ``COLUMNS``."""
    blocks = capacity(layout).blocks_per_request
    return [
        (
            str(g),
            describe(group.kv_cache_spec),
            str(len(group.layer_names)),
            f"{layout.tokens_per_block(g):,}",
            pages(group),
            padding(group),
            f"{blocks[g]:,}",
            group.layer_names[0],
        )
        for g, group in enumerate(layout.groups)
    ]


def describe(spec: KVCacheSpec) -> str:
    """A kind with the number that matters to it."""
    words = {
        FullAttentionSpec: "full",
        MLAAttentionSpec: "latent",
        SlidingWindowSpec: "window",
        SlidingWindowMLASpec: "latent window",
        ChunkedLocalAttentionSpec: "chunk",
        CrossAttentionSpec: "cross",
        CircularBufferSpec: "ring",
    }
    if isinstance(spec, MambaSpec):
        return spec.mamba_type.lower().removesuffix("_attn").replace("_", " ")
    number = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return words.get(type(spec), spec.kind) + (f" {number:,}" if number else "")


def pages(group: KVCacheGroupSpec) -> str:
    sizes = list(dict.fromkeys(spec.page_size_bytes for spec in group.layer_specs))
    return " + ".join(f"{size:,}" for size in sizes[:3]) + (" …" if len(sizes) > 3 else "")


def padding(group: KVCacheGroupSpec) -> str:
    content = sum(spec.unpadded_page_size_bytes for spec in group.layer_specs)
    return f"{group.bytes_per_block / content - 1:.2%}" if group.bytes_per_block > content else "–"


def text(layout: KVCacheConfig) -> str:
    """Summary, table of groups, vLLM's log lines and the waste."""
    table = [COLUMNS, *rows(layout)]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    lines = [summary(layout), ""]
    for n, row in enumerate(table):
        cells = (
            cell.ljust(w) if i in (1, 7) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))
        )
        lines.append("  ".join(cells).rstrip())
        if n == 0:
            lines.append("  ".join("-" * w for w in widths))
    c, w = capacity(layout), waste(layout)
    lines += ["", *notes(layout), *log_lines(layout)]
    lines.append(
        f"a request costs {c.intercept_bytes:,.0f} bytes and {c.slope_bytes:,.0f} bytes for each token; "
        f"old token label {c.tokens_old:,}"
    )
    lines.append(f"full memory: {w}")
    return "\n".join(lines)


def notes(layout: KVCacheConfig) -> list[str]:
    """What an engine would stumble over only when it starts its kernels."""
    r = layout.resolved
    if r is None or r.block_size % r.kernel_block_size == 0:
        return []
    return [
        f"note: attention kernels work on {r.kernel_block_size} tokens at once; a block of {r.block_size} "
        "is no multiple of that, and an engine may refuse it when it starts"
    ]


def summary(layout: KVCacheConfig) -> str:
    """One line: model, blocks, bytes a block."""
    name = layout.model.name if layout.model else "layout by hand"
    generic = " (read generically)" if layout.model and layout.model.generic else ""
    blocks = " + ".join(f"{n:,}" for n in layout.pool_num_blocks)
    size = " + ".join(f"{layout.bytes_per_block(p):,}" for p in range(len(layout.pool_num_blocks)))
    return (
        f"{name}{generic}: {blocks} blocks of {size} bytes in {layout.budget / 2**30:.2f} GiB, "
        f"{layout.memory_order}, grouping {layout.grouping}, length {layout.max_model_len:,}"
    )


def html_table(layout: KVCacheConfig) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        inner = "".join(
            f'<{tag} style="text-align:{"left" if i in (1, 7) else "right"}">{html.escape(cell)}</{tag}>'
            for i, cell in enumerate(cells)
        )
        return f"<tr>{inner}</tr>"

    notes = "<br>".join(html.escape(line) for line in [*log_lines(layout), f"full memory: {waste(layout)}"])
    body = "".join(row(cells, "td") for cells in rows(layout))
    return (
        f"<p><b>{html.escape(summary(layout))}</b></p><table><thead>{row(COLUMNS, 'th')}</thead>"
        f"<tbody>{body}</tbody></table><p>{notes}</p>"
    )


COMPARISON = {
    "strategy": "strategy",
    "groups": "groups",
    "num_blocks": "blocks",
    "bytes_per_block": "bytes/block",
    "blocks_per_request": "blocks/request",
    "concurrency": "requests",
    "tokens": "tokens",
    "intercept_bytes": "bytes/request",
    "slope_bytes": "bytes/token",
    "waste_padding_layers": "padding layers",
    "waste_padded_pages": "padded pages",
    "waste_last_block": "last block",
    "waste_reserve": "reserve",
}


def comparison(name: str, budget: int, compared: list[dict]) -> str:
    """Strategies side by side, and below them why some are refused."""
    table = [list(COMPARISON.values())]
    for row in compared:
        if row["status"] == "ok":
            table.append([_cell(column, row[column]) for column in COMPARISON])
    length = next((row["length"] for row in compared if row["status"] == "ok"), 0)
    widths = [max(len(row[i]) for row in table) for i in range(len(COMPARISON))]
    lines = [f"{name} in {budget / 2**30:.2f} GiB, requests of {length:,} tokens", ""]
    for n, cells in enumerate(table):
        aligned = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths))
        )
        lines.append("  ".join(aligned).rstrip())
        if n == 0:
            lines.append("  ".join("-" * w for w in widths))
    refused = [row for row in compared if row["status"] != "ok"]
    return "\n".join(
        lines + [""] * bool(refused) + [f"{row['strategy']}: refused: {row['reason']}" for row in refused]
    )


def _cell(column: str, value) -> str:
    if column.startswith("waste_"):
        return f"{value:.2%}"
    return (
        value if isinstance(value, str) else f"{value:,.2f}" if column == "concurrency" else f"{value:,.0f}"
    )


def refusal(error: Exception) -> dict:
    """Why there is no layout at all, as in an engine's dump."""
    return {"type": type(error).__name__, "message": str(error)}


# -- JSON, in the form of an engine's dump ---------------------------------------------------------


def case(layouts: Mapping[int, KVCacheConfig | dict], grouped) -> dict:
    """One case: options, resolved sizes, groups, and for each budget the layout or why it was refused.

    ``grouped``: what was planned (``layout.Prepared``); ``layouts``: budget → layout or refusal.
    """
    return {
        "model": grouped.model.name if grouped.model else None,
        "options": options_dict(grouped),
        "resolved": resolved_dict(grouped),
        "groups": [
            group_dict(group, count, grouped)
            for group, count in zip(grouped.groups, grouped.blocks_per_request())
        ],
        "bytes_per_block": grouped.bytes_per_block(),
        "memory": {str(b): memory_dict(x) if not isinstance(x, dict) else x for b, x in layouts.items()},
    }


def options_dict(grouped) -> dict:
    """What the case was planned with: an engine's options by its names, resolved where they are."""
    options = asdict(grouped.options)
    r = grouped.resolved
    resolved = (
        {}
        if r is None
        else {"dtype": r.dtype, "mamba_cache_mode": r.mamba_cache_mode, "mamba_ssm_cache_dtype": r.ssm_dtype}
    )
    del options["memory_order"]
    return (
        options
        | resolved
        | {
            "max_model_len": grouped.max_model_len,
            "max_in_flight_tokens": grouped.options.max_in_flight_tokens,
            "kernel_block_size": r.kernel_block_size if r else options["kernel_block_size"],
            "kv_cache_layout": grouped.memory_order,
            "grouping": grouped.grouping,
        }
    )


def resolved_dict(grouped) -> dict:
    r = grouped.resolved
    if r is None:
        return {}
    return {
        "block_size": r.block_size,
        "mamba_block_size": r.mamba_block_size,
        "mamba_page_size_padded": r.mamba_page_size_padded,
        "mamba_cache_mode": r.mamba_cache_mode,
    }


def memory_dict(layout: KVCacheConfig) -> dict:
    c = capacity(layout)
    return {
        "num_blocks": layout.num_blocks if len(layout.pool_num_blocks) == 1 else list(layout.pool_num_blocks),
        "max_concurrency": c.concurrency,
        "capacity_tokens": c.tokens,
        "needs_kv_cache_zeroing": layout.needs_kv_cache_zeroing,
        "tensors": [asdict(tensor) | {"layers": list(tensor.layers)} for tensor in layout.tensors],
    }


def group_dict(group: KVCacheGroupSpec, blocks: int, grouped) -> dict:
    cache_dtype = grouped.resolved.kv_cache_dtype if grouped.resolved else "auto"
    if group.mixed:
        spec = {
            "class": "UniformTypeKVCacheSpecs",
            "block_size": group.block_size,
            "dcp_sharded": group.kv_cache_spec.dcp_sharded,
            "page_size_bytes": group.bytes_per_block,
            "prefix_cacheable": not isinstance(group.kv_cache_spec, CircularBufferSpec),
            "layers_by_spec": [
                {"spec": spec_dict(s, cache_dtype), "layers": list(names)}
                for s, names in group.layers_by_spec()
            ],
        }
        page = group.bytes_per_block
    else:
        spec, page = spec_dict(group.kv_cache_spec, cache_dtype), group.kv_cache_spec.page_size_bytes
    return {
        "layers": list(group.layer_names),
        "block_size": group.block_size,
        "page_size_bytes": page,
        "blocks_per_request": blocks,
        "spec": spec,
    }


def spec_dict(spec: KVCacheSpec, cache_dtype: str = "auto") -> dict:
    """A spec by vLLM's names; fields that are None are left out, fp8 values are declared uint8 as there."""
    out = {
        "class": type(spec).__name__,
        "block_size": spec.block_size,
        "dcp_sharded": spec.dcp_sharded,
        "page_size_bytes": spec.page_size_bytes,
        "unpadded_page_size_bytes": spec.unpadded_page_size_bytes,
        "page_size_padded": spec.page_size_padded,
        "prefix_cacheable": not isinstance(spec, CircularBufferSpec),
    }
    if isinstance(spec, MambaSpec):
        out |= {
            "shapes": [list(shape) for shape in spec.shapes],
            "dtypes": list(spec.dtypes),
            "mamba_type": spec.mamba_type,
            "mamba_cache_mode": spec.mamba_cache_mode,
            "num_speculative_blocks": spec.num_speculative_blocks,
            "num_prefill_checkpoint_blocks": spec.num_prefill_checkpoint_blocks,
            "tokens_per_state": -1,
        }
    if isinstance(spec, AttentionSpec):
        out |= {
            "num_kv_heads": spec.num_kv_heads,
            "head_size": spec.head_size,
            "head_size_v": spec.head_size_v,
            "dtype": "uint8" if spec.dtype.startswith("float8") else spec.dtype,
            "kv_quant_mode": quant_mode(spec),
            "tokens_per_state": spec.tokens_per_state,
            "state_content_bytes": spec.state_content_bytes,
            "sliding_window": getattr(spec, "sliding_window", None),
            "alignment": getattr(spec, "alignment", None),
            "attention_chunk_size": getattr(spec, "attention_chunk_size", None),
        }
    if isinstance(spec, SlidingWindowSpec):
        out["extra_retained_tokens"] = 0
    if isinstance(spec, SlidingWindowMLASpec):
        out["bounded_replay"] = False
    if isinstance(spec, MLAAttentionSpec):
        out["cache_role"] = spec.cache_role
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec) and holds_latent(spec):
        out["cache_dtype_str"] = cache_dtype
        if spec.alignment is not None:
            out["model_version"] = "deepseek_v4"
    return {name: value for name, value in out.items() if value is not None}


def holds_latent(spec: AttentionSpec) -> bool:
    return spec.packed != "fp8_indexer" and spec.dtype != "float32"


def quant_mode(spec: AttentionSpec) -> str:
    """vLLM's name for how the values are quantized."""
    if spec.packed in (None, "fp8_ds_mla"):
        return "FP8_PER_TENSOR" if spec.dtype.startswith("float8") or spec.packed else "NONE"
    return "NONE" if spec.packed == "fp8_indexer" else spec.packed.upper()
