"""A small layout that stands for a big one: fewer layers, fewer blocks, or pages of a few bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decodebench.layout.layout import Layout
from decodebench.layout.plan import from_groups
from decodebench.layout.pool import Batch, admit


def shrink(
    layout: Layout,
    *,
    layers: int | None = None,
    miniature: bool = False,
    num_blocks: int | Sequence[int] | None = None,
) -> Layout:
    """The layout with the same groups, block sizes and block tables, and less of everything else.

    ``layers``: at most so many layers a group; what a layer moves does not depend on how many there are.
    ``miniature``: pages of a few bytes a token, so that a fill takes no time; such a layout has no model.
    ``num_blocks``: blocks of the pool, or of each pool (``blocks_named``); default: as many as before.
    """
    groups = [
        replace(group, layer_names=group.layer_names[:layers], layer_specs=group.layer_specs[:layers])
        for group in layout.groups
    ]
    if miniature:
        small = [[spec.miniature() for spec in group.layer_specs] for group in groups]
        page = max(spec.page_size_bytes for specs in small for spec in specs)
        groups = [
            replace(
                group,
                layer_specs=tuple(spec.padded_to(page) for spec in specs),
                kv_cache_spec=group.kv_cache_spec.miniature().padded_to(page),
            )
            for group, specs in zip(groups, small)
        ]
    return from_groups(
        groups,
        layout.pool_num_blocks if num_blocks is None else num_blocks,
        layout.memory_order,
        max_model_len=layout.max_model_len,
        max_in_flight_tokens=layout.max_in_flight_tokens,
        decode_context_parallel_size=layout.decode_context_parallel_size,
        model=None if miniature else layout.model,
        options=None if miniature else layout.options,
    )


def blocks_named(batch: Batch) -> list[int]:
    """The fewest blocks of each pool that hold every id in the batch's tables, two at least."""
    counts = [2] * len(batch.layout.pool_num_blocks)
    for g, group in enumerate(batch.layout.groups):
        named = (block for ids in batch.block_table(g) for block in ids)
        counts[group.pool] = max(counts[group.pool], 1 + max(named, default=0))
    return counts


def small_pool(layout: Layout, requests: int, context: int, blocks: int | None = None) -> Layout:
    """The layout with ``blocks`` blocks, or as many as these requests take and one more: few enough to draw."""
    if blocks is None:
        blocks = 1 + max(blocks_named(admit(layout, requests=requests, context=context)))
    return layout.with_num_blocks(blocks)
