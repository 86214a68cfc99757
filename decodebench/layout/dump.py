"""A layout as JSON: one case in the form of an engine's dump, by vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from decodebench.layout.capacity import capacity, ceilings
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.records import Grouped, Placed
from decodebench.models.options import CacheOptions
from decodebench.models.specs import KVCacheSpec


def refusal(error: Exception) -> dict:
    """Why there is no layout at all, as in an engine's dump."""
    return {"type": type(error).__name__, "message": str(error)}


def case(layouts: Mapping[int | tuple[int, ...], Placed | dict], grouped: Grouped) -> dict:
    """One case: options, resolved sizes, groups, and for each budget the layout or why it was refused.

    ``grouped``: what was planned ; ``layouts``: budget → layout or refusal.
    """
    return {
        "model": grouped.model.name if grouped.model else None,
        "reading": reading_dict(grouped),
        "drafter": drafter_dict(grouped),
        "options": options_dict(grouped),
        "resolved": resolved_dict(grouped),
        "groups": [
            group_dict(group, count, grouped)
            for group, count in zip(grouped.groups, grouped.blocks_per_request())
        ],
        "bytes_per_block": grouped.bytes_per_block(),
        "memory": {_key(b): memory_dict(x) if not isinstance(x, dict) else x for b, x in layouts.items()},
        "ceilings": {_key(b): asdict(ceilings(x)) for b, x in layouts.items() if not isinstance(x, dict)},
    }


def _key(budget: int | tuple[int, ...]) -> str:
    """Bytes as a key; those of several ranks with commas between them."""
    return str(budget) if isinstance(budget, int) else ",".join(map(str, budget))


def reading_dict(grouped: Grouped) -> dict | None:
    """How the config was read: by a reader of its family, or generically and what was left unread."""
    model = grouped.model
    if model is None:
        return None
    return {
        "model_type": model.model_type,
        "generic": model.generic,
        "unread_fields": list(model.unread_fields),
        "note": model.reading,
    }


def drafter_dict(grouped: Grouped) -> dict | None:
    """What drafts: its name and its layers; None where nothing does, or copies of the model's own."""
    model = grouped.model
    if model is None or not model.drafter:
        return None
    return {"name": model.drafter_name, "layers": [layer.name for layer in model.drafter]}


def options_dict(grouped: Grouped) -> dict:
    """What the case was planned with: an engine's options by its names, resolved where they are."""
    options = asdict(grouped.options or CacheOptions())
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
            "max_in_flight_tokens": grouped.max_in_flight_tokens,
            "kernel_block_size": r.kernel_block_size if r else options["kernel_block_size"],
            "kv_cache_layout": grouped.memory_order,
            "grouping": grouped.grouping,
        }
    )


def resolved_dict(grouped: Grouped) -> dict:
    """Block sizes and modes that the engine derives from the options; empty for a layout by hand."""
    r = grouped.resolved
    if r is None:
        return {}
    return {
        "block_size": r.block_size,
        "mamba_block_size": r.mamba_block_size,
        "mamba_page_size_padded": r.mamba_page_size_padded,
        "mamba_cache_mode": r.mamba_cache_mode,
    }


def memory_dict(layout: Placed) -> dict:
    """What one budget gives: blocks, concurrency, tokens, and where each tensor lies."""
    c = capacity(layout)
    found = {
        "num_blocks": layout.num_blocks if len(layout.pool_num_blocks) == 1 else list(layout.pool_num_blocks),
        "max_concurrency": c.concurrency,
        "capacity_tokens": c.tokens,
        "needs_kv_cache_zeroing": layout.needs_kv_cache_zeroing,
        "tensors": [asdict(tensor) | {"layers": list(tensor.layers)} for tensor in layout.tensors],
    }
    if layout.stages:
        found["stages"] = [
            {
                "stage": stage.stage,
                "groups": [list(group.layer_names) for group in stage.groups],
                "bytes_per_block": stage.bytes_per_block(),
                "memory": stage.budget,
                "tensors": [asdict(tensor) | {"layers": list(tensor.layers)} for tensor in stage.tensors],
            }
            for stage in layout.stages
        ]
    return found


def group_dict(group: KVCacheGroupSpec, blocks: int, grouped: Grouped) -> dict:
    """One group: layers, block size, page, blocks a request of the maximum length, and its merged spec."""
    cache_dtype = grouped.resolved.kv_cache_dtype if grouped.resolved else "auto"
    if group.mixed:
        spec = {
            "class": "UniformTypeKVCacheSpecs",
            "block_size": group.block_size,
            "dcp_sharded": group.kv_cache_spec.dcp_sharded,
            "page_size_bytes": group.bytes_per_block,
            "prefix_cacheable": not group.kv_cache_spec.bookkeeping,
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
    out = {"class": type(spec).__name__} | spec.engine_fields()
    if spec.latent and spec.holds_vectors:
        out["cache_dtype_str"] = cache_dtype
        if out["alignment"] is not None:
            out["model_version"] = "deepseek_v4"
    return {name: value for name, value in out.items() if value is not None}
