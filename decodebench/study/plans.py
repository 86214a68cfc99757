"""A case's model, layout and batch, each kept for the cases that follow on the same one; its layout's columns.

Loads neither torch nor pandas: a sweep over layouts needs none.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache

from decodebench.layout.layout import Layout
from decodebench.layout.plan import plan
from decodebench.layout.pool import Batch, admit
from decodebench.models.fields import read_config
from decodebench.models.load import DATA, load_model, read_model
from decodebench.models.model import Model
from decodebench.study.grid import TRAFFIC_AXES, Case, SweepError


def forget() -> None:
    """Read every config.json anew: one may have been edited since the last sweep."""
    for kept in (model_of, layout_of, batch_of):
        kept.cache_clear()


@lru_cache(maxsize=64)
def model_of(name: str, overrides: str | None) -> Model:
    """A model, its config's fields replaced where asked for; read once a sweep."""
    if overrides is None:
        return load_model(name)
    try:
        changes = json.loads(overrides)
        fields = read_config(name, DATA)[0] | changes
    except (ValueError, TypeError) as error:
        raise SweepError(
            f"hf_overrides {overrides!r}: a JSON object of config.json fields is expected"
        ) from error
    return read_model(fields, name)


def shape_of(case: Case) -> Case:
    """The case without what neither its layout nor its block tables depend on."""
    changed = {name: getattr(Case("any"), name) for name in _SHAPELESS}
    return replace(case, **changed)


_SHAPELESS = (
    "measure",
    "fault",
    "values",
    "layers_per_group",
    "backend",
    "device",
    "cold",
    "min_seconds",
    "seed",
    *TRAFFIC_AXES,
)


@lru_cache(maxsize=2)
def layout_of(shape: Case) -> Layout:
    """A layout, kept for the cases that follow on the same one: faults, values and backends share it."""
    return plan(
        model_of(shape.model, shape.hf_overrides),
        memory=shape.memory,
        block_size=shape.block_size,
        grouping=shape.grouping,
        memory_order=shape.memory_order,
        kv_cache_dtype=shape.kv_cache_dtype,
        mamba_ssm_cache_dtype=shape.mamba_ssm_cache_dtype,
        tensor_parallel_size=shape.tensor_parallel_size,
        decode_context_parallel_size=shape.decode_context_parallel_size,
        max_model_len=shape.max_model_len,
        enable_prefix_caching=shape.enable_prefix_caching,
    )


@lru_cache(maxsize=1)
def batch_of(shape: Case) -> Batch:
    """The batch on that layout, kept likewise."""
    return admit(layout_of(shape), context=list(shape.contexts), shared_prefix=shape.shared_prefix)


def layout_stage(case: Case, made: dict) -> dict:
    """Columns of the layout; leaves it in ``made`` for the stages behind."""
    layout = made["layout"] = layout_of(shape_of(case))
    contexts = case.contexts
    if max(contexts) > layout.max_model_len:
        raise SweepError(
            f"context {max(contexts)}: this layout holds requests of at most {layout.max_model_len} tokens"
        )
    sizes = [layout.tokens_per_block(g) for g in range(len(layout.groups))]
    held = [layout.capacity(length) for length in set(contexts)]
    mean = sum(contexts.count(c.length) * sum(c.blocks_per_request) for c in held) / len(contexts)
    longest = layout.capacity(max(contexts))
    waste = layout.waste(max(contexts)).shares()
    return {
        "reading": layout.model.reading if layout.model else None,
        "groups": len(layout.groups),
        "layers": len(layout.layer_names),
        "group_block_sizes": ",".join(map(str, sizes)),
        "block_in_use": max(sizes),
        "block_size_ratio": max(sizes) / min(sizes),
        "group_kinds": ",".join(group.kind for group in layout.groups),
        "bytes_per_block": layout.bytes_per_block(),
        "num_blocks": sum(layout.pool_num_blocks),
        "blocks_per_request": mean,
        "concurrency": longest.concurrency,
        "tokens": longest.tokens,
        "longest_context": longest.length,
        "start_bytes": longest.start_bytes,
        "request_bytes": longest.request_bytes,
        "slope_bytes": longest.slope_bytes,
        **{f"waste_{cause}": share for cause, share in waste.items() if cause != "content"},
    }
