"""The plan of a running engine's own settings, and the first thing in which its layout is another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import vllm
from vllm.platforms import current_platform

from decodebench.layout.layout import Layout
from decodebench.layout.plan import plan
from decodebench.models.engines import ENGINES
from decodebench.vllm import compat

if TYPE_CHECKING:
    from vllm import LLM

#: tokens that CPU attention takes at once, and the order in which it keeps its cache
CPU = {"kernel_block_size": 32, "memory_order": "LBHNC"}

#: what a plan must have in common with an engine's layout to be called equal to it
FACTS = (
    "groups",
    "tensors",
    "pool_num_blocks",
    "size",
    "memory_order",
    "max_model_len",
    "max_in_flight_tokens",
    "needs_kv_cache_zeroing",
)


def plan_of_engine(llm: LLM, model: str | Path | Mapping, memory: int | None = None) -> Layout:
    """What ``plan`` says of ``model`` under the settings of an ``LLM`` in this process.

    ``memory``: bytes of its KV cache where the engine was not told them (``kv_cache_memory_bytes``).
    Raises ``DecodebenchError`` where the model cannot be planned so.
    """
    config = llm.llm_engine.vllm_config
    cache, parallel = config.cache_config, config.parallel_config
    release = f"vllm-{compat.release(vllm.__version__)}"
    return plan(
        model,
        memory=cache.kv_cache_memory_bytes or memory,
        block_size=cache.block_size,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        kv_cache_dtype=cache.cache_dtype,
        mamba_ssm_cache_dtype=cache.mamba_ssm_cache_dtype,
        max_model_len=config.model_config.max_model_len,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        async_scheduling=config.scheduler_config.async_scheduling,
        enable_prefix_caching=cache.enable_prefix_caching,
        tensor_parallel_size=parallel.tensor_parallel_size,
        decode_context_parallel_size=parallel.decode_context_parallel_size,
        **({"engine": release} if release in ENGINES else {}),
        **(CPU if current_platform.is_cpu() else {}),
    )


def first_difference(ours: Layout, theirs: Layout) -> str | None:
    """The first of ``FACTS`` in which a plan differs from an engine's layout, in words; None where none does."""
    if len(ours.groups) != len(theirs.groups):
        return f"{len(ours.groups)} groups planned, {len(theirs.groups)} in the engine"
    for number, (one, other) in enumerate(zip(ours.groups, theirs.groups)):
        for what in ("layer_names", "kind", "block_size", "bytes_per_block"):
            if getattr(one, what) != getattr(other, what):
                return f"group {number}: {what} {getattr(one, what)} planned, {getattr(other, what)} in the engine"
        for layer, a, b in zip(one.layer_names, one.layer_specs, other.layer_specs):
            for field in fields(a):
                x, y = getattr(a, field.name), getattr(b, field.name, None)
                if x != y:
                    return f"layer {layer}: {field.name} {x} planned, {y} in the engine"
    for fact in FACTS:
        a, b = getattr(ours, fact), getattr(theirs, fact)
        if a != b:
            shown = f" {a} planned, {b} in the engine" if isinstance(a, int | str | bool) else ""
            return f"{fact.replace('_', ' ')} differ{shown}"
    return None
