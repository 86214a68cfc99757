"""Layers and a memory budget → ``Layout``: what vLLM's allocator would make of them, or another grouping."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from decodebench.layout.grouping import KVCacheGroupSpec, auto, strategy
from decodebench.layout.layout import Layout
from decodebench.layout.placement import (
    POOL_ALIGNMENT,
    LayoutRefused,
    check_memory_order,
    needs_zeroing,
    place,
)
from decodebench.layout.records import Grouped
from decodebench.models.load import load_model
from decodebench.models.model import Model
from decodebench.models.options import CacheOptions, with_options
from decodebench.models.specs import KVCacheSpec
from decodebench.words import shown

DEFAULT_MEMORY = "8GiB"


def parse_memory(memory: int | str) -> int:
    """Bytes from a number or a text such as ``8GiB``, ``40 GB``, ``512M``; raises ``LayoutRefused``."""
    units = {"": 1, "b": 1, "k": 10, "kib": 10, "m": 20, "mib": 20, "g": 30, "gib": 30, "t": 40, "tib": 40}
    decimal = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    if isinstance(memory, int) and not isinstance(memory, bool):
        number, unit = float(memory), ""
        exact = memory
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]*)\s*", str(memory))
        unit = match[2].lower() if match else "?"
        if match is None or unit not in units | decimal:
            raise LayoutRefused(
                f"memory {shown(memory)}: bytes, or a number with a unit such as 8GiB, is expected"
            )
        number = float(match[1])
        factor = decimal.get(unit) or (1 if units[unit] in (0, 1) else 2 ** units[unit])
        exact = int(match[1]) * factor if match[1].isdigit() else int(number * factor)
    if not 0 < exact < 2**60:
        raise LayoutRefused(f"memory {shown(memory)}: a positive number of bytes is expected")
    return exact


@with_options
def plan(
    model: Model | str | Mapping,
    memory: int | str = DEFAULT_MEMORY,
    block_size: int | None = None,
    grouping: str = "auto",
    **options,
) -> Layout:
    """The cache layout that vLLM 0.32 would make of this model and memory, or that of another grouping.

    ``model``: a name, a path of a config.json, its fields, a ``Model``, or specs by hand
    (layer → ``KVCacheSpec``, in registration order). ``grouping``: ``auto`` (vLLM's own choice)
    or a strategy of ``grouping.STRATEGIES``. ``options``: see ``CacheOptions``.

    Raises ``LayoutRefused`` where no request of the maximum length fits (with the length that
    does), and other ``DecodebenchError`` where model or options are bad.
    """
    budget = parse_memory(memory)
    return layout_for(prepare(model, block_size, grouping, **options), budget)


def prepare(
    model: Model | str | Mapping, block_size: int | None = None, grouping: str = "auto", **options
) -> Grouped:
    """A model's layers as groups under these options; see ``plan``."""
    opts = CacheOptions.of(options | {"block_size": block_size})
    how = None if grouping == "auto" else strategy(grouping)
    if are_specs(model):
        assert isinstance(model, Mapping)
        specs, known, resolved, length = dict(model), None, None, opts.max_model_len
        if not isinstance(length, int):
            raise LayoutRefused("specs by hand say nothing about lengths: give max_model_len as a number")
        order = opts.memory_order or (how[0].memory_order if how else None) or "LBNHC"
    else:
        known = load_model(model)
        resolved = known.resolve(opts, aligned=how is None or how[0].aligned)
        specs = known.specs(resolved, opts)
        length = resolved.max_model_len
        order = opts.memory_order or (how[0].memory_order if how else None) or known.memory_order
    if not specs:
        raise LayoutRefused("no layer stores anything: there is no cache to plan")
    if how is None:
        groups = auto(
            specs, block_outermost=order.startswith("B"), hybrid_manager=opts.hybrid_kv_cache_manager
        )
    else:
        groups = how[1](specs)
    check_memory_order(groups, order)
    return Grouped(
        groups=tuple(groups),
        memory_order=order,
        max_model_len=length,
        max_in_flight_tokens=opts.max_in_flight_tokens,
        decode_context_parallel_size=opts.decode_context_parallel_size,
        grouping=grouping,
        model=known,
        options=opts,
        resolved=resolved,
    )


def are_specs(model: object) -> bool:
    """Whether this is a layout's layers by hand: layer → ``KVCacheSpec``."""
    return (
        isinstance(model, Mapping) and bool(model) and all(isinstance(s, KVCacheSpec) for s in model.values())
    )


def layout_for(grouped: Grouped, budget: int) -> Layout:
    """The layout of grouped layers in a budget of bytes; raises ``LayoutRefused`` as ``plan`` does."""
    for group in grouped.groups:
        for name, spec in zip(group.layer_names, group.layer_specs):
            if spec.block_size % spec.tokens_per_state:
                raise LayoutRefused(
                    f"layer {name}: a block of {spec.block_size} tokens does not hold whole entries of "
                    f"{spec.tokens_per_state} tokens: give a block size that is a multiple of it"
                )
    grouped = _fitted(grouped, budget)
    counts = split_memory(grouped, budget)
    return build(
        grouped.groups,
        counts,
        memory_order=grouped.memory_order,
        max_model_len=grouped.max_model_len,
        max_in_flight_tokens=grouped.max_in_flight_tokens,
        decode_context_parallel_size=grouped.decode_context_parallel_size,
        budget=budget,
        grouping=grouped.grouping,
        model=grouped.model,
        options=grouped.options,
        resolved=grouped.resolved,
    )


def _fitted(grouped: Grouped, budget: int) -> Grouped:
    """With the length that fits, where it was to be found; raises where the length asked for does not fit."""
    usable = _usable(grouped, budget)

    def needed(length: int) -> int:
        return sum(pool_bytes(grouped, length))

    if usable <= 0:
        raise LayoutRefused(
            f"a memory of {_gib(budget)} holds no block beside the null block (a block takes "
            f"{_gib(sum(map(grouped.bytes_per_block, grouped.pools)))}): give more memory"
        )
    length = grouped.max_model_len
    if needed(length) <= usable:
        return grouped
    fits = longest_fitting(needed, usable, length)
    if grouped.options is not None and grouped.options.max_model_len == "auto" and fits:
        return replace(grouped, max_model_len=fits)
    advice = f'max_model_len = {fits} would fit, and "auto" finds it' if fits else "not even one token fits"
    raise LayoutRefused(
        f"one request of {length} tokens needs {_gib(needed(length))} beside the null block, and "
        f"{_gib(usable)} are there: {advice}; give more memory or a shorter max_model_len",
        fits or None,
    )


def _usable(grouped: Grouped, budget: int) -> int:
    """Bytes for requests: all but each pool's null block, and what aligns several pools."""
    null = sum(map(grouped.bytes_per_block, grouped.pools))
    return budget - null - POOL_ALIGNMENT * (len(grouped.pools) - 1)


def pool_bytes(grouped: Grouped, length: int) -> list[int]:
    """Bytes of each pool that one request of this length takes."""
    blocks = grouped.blocks_per_request(length)
    return [
        grouped.bytes_per_block(pool) * sum(b for g, b in zip(grouped.groups, blocks) if g.pool == pool)
        for pool in grouped.pools
    ]


def auto_fit(grouped: Grouped, budget: int) -> dict:
    """The length that fits where the one asked for does not, and the blocks it is served with."""
    options = grouped.options or CacheOptions()
    longest = replace(grouped, options=replace(options, max_model_len="auto"))
    layout = layout_for(longest, budget)
    return {"max_model_len": layout.max_model_len, "num_blocks": layout.num_blocks}


def longest_fitting(needed: Callable[[int], int], usable: int, longest: int) -> int:
    """The largest length up to ``longest`` whose bytes fit, 0 where none does."""
    if needed(1) > usable:
        return 0
    low, high = 1, longest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= usable else (low, middle - 1)
    return low


def split_memory(grouped: Grouped, budget: int) -> tuple[int, ...]:
    """Blocks of each pool, so that requests of the maximum length use all pools up at the same time.

    Each pool's share of the memory is its share of what such a request takes.
    """
    if len(grouped.pools) == 1:
        return (budget // grouped.bytes_per_block(),)
    needs, usable = pool_bytes(grouped, grouped.max_model_len), _usable(grouped, budget)
    return tuple(
        1 + usable * need // sum(needs) // grouped.bytes_per_block(pool)
        for pool, need in zip(grouped.pools, needs)
    )


def from_groups(
    groups: Sequence[KVCacheGroupSpec], num_blocks: int | Sequence[int], memory_order: str = "LBNHC", **facts
) -> Layout:
    """A layout from groups made by hand, with this many blocks (null block included), whatever fits.

    ``facts``: further fields of ``Layout`` (``max_model_len``, ``max_in_flight_tokens`` …).
    """
    counts = (num_blocks,) if isinstance(num_blocks, int) else tuple(num_blocks)
    if len(counts) == 1:
        counts *= max(g.pool for g in groups) + 1
    if min(counts) < 1:
        raise LayoutRefused(f"{num_blocks} blocks: there is at least the null block")
    check_memory_order(groups, memory_order)
    return build(groups, counts, memory_order=memory_order, **facts)


def build(
    groups: Sequence[KVCacheGroupSpec], counts: tuple[int, ...], memory_order: str, budget: int = 0, **facts
) -> Layout:
    """A layout of these groups with ``counts`` blocks a pool; ``facts``: further fields of ``Layout``."""
    tensors, size = place(groups, counts, memory_order)
    return Layout(
        groups=tuple(groups),
        tensors=tensors,
        pool_num_blocks=counts,
        size=size,
        memory_order=memory_order,
        budget=budget or size,
        needs_kv_cache_zeroing=needs_zeroing(groups),
        **facts,
    )


def _gib(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**27 else f"{number:,} bytes"
