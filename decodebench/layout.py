"""Groups and a memory budget → ``KVCacheConfig``: where every page lies, what fits, what is wasted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from decodebench import capacity as sizes
from decodebench import listing
from decodebench.grouping import KVCacheGroupSpec, auto, strategy
from decodebench.models import CacheOptions, Model, load_model
from decodebench.models.layers import Resolved
from decodebench.placement import (
    POOL_ALIGNMENT,
    KVCacheTensor,
    LayoutRefused,
    bytes_per_block,
    check_memory_order,
    needs_zeroing,
    place,
)
from decodebench.specs import AttentionSpec, DecodebenchError, KVCacheSpec

if TYPE_CHECKING:
    import pandas as pd

    from decodebench.cache import Cache

DEFAULT_MEMORY = "8GiB"


@dataclass(frozen=True)
class KVCacheConfig:
    """A layout: groups, number of blocks, and where each layer's pages lie.

    ``pool_num_blocks[p]`` counts the blocks of pool ``p``, its null block (id 0) included;
    vLLM has a single pool. ``size`` is the allocation in bytes, ``budget`` what was to be used.
    """

    groups: tuple[KVCacheGroupSpec, ...]
    tensors: tuple[KVCacheTensor, ...]
    pool_num_blocks: tuple[int, ...]
    size: int
    #: LBNHC (a layer's region holds all its blocks) or BLHNC (a block holds all layers' pages)
    memory_order: str = "LBNHC"
    max_model_len: int = 0
    #: tokens scheduled but not settled: batched tokens, twice that with asynchronous scheduling
    max_in_flight_tokens: int = 0
    decode_context_parallel_size: int = 1
    #: whether the engine zeroes the blocks it hands out (state layers, mixed precision)
    needs_kv_cache_zeroing: bool = False
    budget: int = 0
    #: the strategy that made the groups
    grouping: str = "auto"
    #: what it was planned from; None where it was made by hand
    model: Model | None = None
    options: CacheOptions | None = None
    resolved: Resolved | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, null block included (the first pool's, where there are several)."""
        return self.pool_num_blocks[0]

    def num_blocks_of(self, group: int) -> int:
        """Blocks that ids of this group may name: valid ids are 1 to this number minus 1."""
        return self.pool_num_blocks[self.groups[group].pool]

    def tokens_per_block(self, group: int) -> int:
        """Tokens that one block of the group covers: its block size, times dcp where sharded."""
        spec = self.groups[group].kv_cache_spec
        return spec.block_size * (self.decode_context_parallel_size if spec.dcp_sharded else 1)

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """All layers, group after group. A layer's position here is its *layer index*."""
        return tuple(name for group in self.groups for name in group.layer_names)

    @cached_property
    def layer_index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.layer_names)}

    @cached_property
    def group_of(self) -> dict[str, int]:
        return {name: g for g, group in enumerate(self.groups) for name in group.layer_names}

    @cached_property
    def layer_specs(self) -> dict[str, KVCacheSpec]:
        return {n: s for group in self.groups for n, s in zip(group.layer_names, group.layer_specs)}

    @cached_property
    def placement(self) -> dict[str, tuple[int, int]]:
        """layer → (byte offset of its block 0, bytes between two of its blocks)."""
        return {
            name: (tensor.offset + j * tensor.layer_stride, tensor.block_stride)
            for tensor in self.tensors
            for j, name in enumerate(tensor.layers)
        }

    @property
    def tensor_parallel_size(self) -> int:
        return self.options.tensor_parallel_size if self.options else 1

    def bytes_per_block(self, pool: int = 0) -> int:
        """Bytes that one block id of a pool stands for: those of its widest group."""
        return bytes_per_block([g for g in self.groups if g.pool == pool], self.memory_order)

    def with_num_blocks(self, num_blocks: int | Sequence[int]) -> KVCacheConfig:
        """The same layout with this many blocks (a number a pool, where several), strides recomputed.

        For small caches of big models: no request of the maximum length has to fit.
        """
        pools = len(self.pool_num_blocks)
        counts = (num_blocks,) * pools if isinstance(num_blocks, int) else tuple(num_blocks)
        if len(counts) != pools or min(counts) < 2:
            raise LayoutRefused(
                f"{num_blocks} blocks for {pools} pool(s): every pool needs at least 2, the null block "
                "and one to use"
            )
        tensors, size = place(self.groups, counts, self.memory_order)
        return replace(self, tensors=tensors, pool_num_blocks=counts, size=size, budget=size)

    def capacity(self, length: int | None = None) -> sizes.Capacity:
        """What fits for requests of ``length`` tokens (default: the maximum length)."""
        return sizes.capacity(self, length)

    def waste(self, length: int | None = None) -> sizes.Waste:
        """Bytes by cause when the memory is full of requests of ``length`` tokens."""
        return sizes.waste(self, length)

    def log_lines(self) -> list[str]:
        """What vLLM's log says about such a layout."""
        return sizes.log_lines(self)

    def to_dict(self) -> dict:
        """This layout as one case of an engine's dump."""
        return listing.case({self.budget: self}, self)

    def blocks_per_request(self, length: int | None = None) -> list[int]:
        """Blocks that each group reserves for a request of ``length`` tokens (default: the maximum)."""
        return sizes.request_blocks(self, self.max_model_len if length is None else length)

    def __str__(self) -> str:
        return listing.text(self)

    def _repr_html_(self) -> str:
        return listing.html_table(self)

    def allocate(self, device: str = "cpu", initial: str | None = "poison") -> Cache:
        """This layout on a device; see ``cache.allocate``."""
        from decodebench import cache

        return cache.allocate(self, device, initial)


# -- making one ------------------------------------------------------------------------------------


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
                f"memory {memory!r}: bytes, or a number with a unit such as 8GiB, is expected"
            )
        number = float(match[1])
        factor = decimal.get(unit) or (1 if units[unit] in (0, 1) else 2 ** units[unit])
        exact = int(match[1]) * factor if match[1].isdigit() else int(number * factor)
    if not 0 < exact < 2**60:
        raise LayoutRefused(f"memory {memory!r}: a positive number of bytes is expected")
    return exact


def plan(
    model: Model | str | Mapping,
    memory: int | str = DEFAULT_MEMORY,
    block_size: int | None = None,
    grouping: str = "auto",
    **options,
) -> KVCacheConfig:
    """The cache layout that vLLM 0.32 would make of this model and memory, or that of another grouping.

    ``model``: a name, a path of a config.json, its fields, a ``Model``, or specs by hand
    (layer → ``KVCacheSpec``, in registration order). ``grouping``: ``auto`` (vLLM's own choice)
    or a strategy of ``grouping.STRATEGIES``. ``options``: see ``CacheOptions``.

    Raises ``LayoutRefused`` where no request of the maximum length fits (with the length that
    does), and other ``DecodebenchError`` where model or options are bad.
    """
    budget = parse_memory(memory)
    return layout_for(prepare(model, block_size, grouping, **options), budget)


@dataclass(frozen=True)
class Prepared:
    """A model grouped under some options: everything but the memory."""

    groups: tuple[KVCacheGroupSpec, ...]
    memory_order: str
    grouping: str
    options: CacheOptions
    max_model_len: int
    model: Model | None = None
    resolved: Resolved | None = None

    def blocks_per_request(self, max_model_len: int | None = None) -> list[int]:
        """Blocks that each group reserves for a request of this length."""
        o = self.options
        length = self.max_model_len if max_model_len is None else max_model_len
        return [
            g.blocks_per_request(length, o.max_in_flight_tokens, o.decode_context_parallel_size)
            for g in self.groups
        ]

    @property
    def pools(self) -> range:
        return range(max(g.pool for g in self.groups) + 1)

    def bytes_per_block(self, pool: int = 0) -> int:
        return bytes_per_block([g for g in self.groups if g.pool == pool], self.memory_order)


def prepare(
    model: Model | str | Mapping, block_size: int | None = None, grouping: str = "auto", **options
) -> Prepared:
    """A model's layers as groups under these options; see ``plan``."""
    opts = CacheOptions.of(options | {"block_size": block_size})
    how = None if grouping == "auto" else strategy(grouping)
    if _are_specs(model):
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
    return Prepared(tuple(groups), order, grouping, opts, length, known, resolved)


def _are_specs(model: object) -> bool:
    return (
        isinstance(model, Mapping) and bool(model) and all(isinstance(s, KVCacheSpec) for s in model.values())
    )


def layout_for(prepared: Prepared, budget: int) -> KVCacheConfig:
    """The layout of grouped layers in a budget of bytes; raises ``LayoutRefused`` as ``plan`` does."""
    for group in prepared.groups:
        for name, spec in zip(group.layer_names, group.layer_specs):
            if isinstance(spec, AttentionSpec) and spec.block_size % spec.tokens_per_state:
                raise LayoutRefused(
                    f"layer {name}: a block of {spec.block_size} tokens does not hold whole entries of "
                    f"{spec.tokens_per_state} tokens: give a block size that is a multiple of it"
                )
    prepared = _fitted(prepared, budget)
    counts = split_memory(prepared, budget)
    return build(
        prepared.groups,
        counts,
        memory_order=prepared.memory_order,
        max_model_len=prepared.max_model_len,
        max_in_flight_tokens=prepared.options.max_in_flight_tokens,
        decode_context_parallel_size=prepared.options.decode_context_parallel_size,
        budget=budget,
        grouping=prepared.grouping,
        model=prepared.model,
        options=prepared.options,
        resolved=prepared.resolved,
    )


def _fitted(prepared: Prepared, budget: int) -> Prepared:
    """With the length that fits, where it was to be found; raises where the length asked for does not fit."""
    usable = _usable(prepared, budget)

    def needed(length: int) -> int:
        return sum(pool_bytes(prepared, length))

    if usable <= 0:
        raise LayoutRefused(
            f"a memory of {_gib(budget)} holds no block beside the null block (a block takes "
            f"{_gib(sum(map(prepared.bytes_per_block, prepared.pools)))}): give more memory"
        )
    length = prepared.max_model_len
    if needed(length) <= usable:
        return prepared
    fits = longest_fitting(needed, usable, length)
    if prepared.options.max_model_len == "auto" and fits:
        return replace(prepared, max_model_len=fits)
    advice = f"max_model_len = {fits} would fit" if fits else "not even one token fits"
    raise LayoutRefused(
        f"one request of {length} tokens needs {_gib(needed(length))} beside the null block, and "
        f"{_gib(usable)} are there: {advice}; give more memory or a shorter max_model_len",
        fits or None,
    )


def _usable(prepared: Prepared, budget: int) -> int:
    """Bytes for requests: all but each pool's null block, and what aligns several pools."""
    null = sum(map(prepared.bytes_per_block, prepared.pools))
    return budget - null - POOL_ALIGNMENT * (len(prepared.pools) - 1)


def pool_bytes(prepared: Prepared, length: int) -> list[int]:
    """Bytes of each pool that one request of this length takes."""
    blocks = prepared.blocks_per_request(length)
    return [
        prepared.bytes_per_block(pool) * sum(b for g, b in zip(prepared.groups, blocks) if g.pool == pool)
        for pool in prepared.pools
    ]


def auto_fit(prepared: Prepared, budget: int) -> dict:
    """The length that fits where the one asked for does not, and the blocks it is served with."""
    longest = replace(prepared, options=replace(prepared.options, max_model_len="auto"))
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


def split_memory(prepared: Prepared, budget: int) -> tuple[int, ...]:
    """Blocks of each pool, so that requests of the maximum length use all pools up at the same time.

    Each pool's share of the memory is its share of what such a request takes.
    """
    if len(prepared.pools) == 1:
        return (budget // prepared.bytes_per_block(),)
    needs, usable = pool_bytes(prepared, prepared.max_model_len), _usable(prepared, budget)
    return tuple(
        1 + usable * need // sum(needs) // prepared.bytes_per_block(pool)
        for pool, need in zip(prepared.pools, needs)
    )


def from_groups(
    groups: Sequence[KVCacheGroupSpec], num_blocks: int | Sequence[int], memory_order: str = "LBNHC", **facts
) -> KVCacheConfig:
    """A layout from groups made by hand, with this many blocks (null block included), whatever fits.

    ``facts``: further fields of ``KVCacheConfig`` (``max_model_len``, ``max_in_flight_tokens`` …).
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
) -> KVCacheConfig:
    tensors, size = place(groups, counts, memory_order)
    return KVCacheConfig(
        tuple(groups),
        tensors,
        counts,
        size,
        memory_order=memory_order,
        budget=budget or size,
        needs_kv_cache_zeroing=needs_zeroing(groups),
        **facts,
    )


def _gib(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**27 else f"{number:,} bytes"


# -- strategies side by side -----------------------------------------------------------------------

#: what ``compare`` shows where nothing else is asked for
COMPARED = ("hybrid", "packed", "promoted", "separate", "fixed(2)", "fixed(4)", "fixed(8)", "per_layer")


def compare(
    model: Model | str | Mapping,
    memory: int | str = DEFAULT_MEMORY,
    strategies: Sequence[str] = COMPARED,
    length: int | None = None,
    block_size: int | None = None,
    **options,
) -> pd.DataFrame:
    """A row a strategy: groups, blocks, what fits, what is wasted; a refused one with its reason.

    ``length``: tokens a request, for concurrency, cost and waste (default: the maximum length).
    Sizes in bytes, waste as shares of the memory. See ``plan`` for the other arguments.
    """
    import pandas as pd

    return pd.DataFrame(compare_rows(model, memory, strategies, length, block_size, **options))


def compare_rows(
    model: Model | str | Mapping,
    memory: int | str = DEFAULT_MEMORY,
    strategies: Sequence[str] = COMPARED,
    length: int | None = None,
    block_size: int | None = None,
    **options,
) -> list[dict]:
    """``compare`` without pandas; raises where the model itself is bad, not where a strategy refuses it."""
    parse_memory(memory)
    CacheOptions.of(options | {"block_size": block_size})
    model = model if _are_specs(model) else load_model(model)
    if length is not None and length < 1:
        raise LayoutRefused(f"length {length}: a request has at least one token")
    rows = []
    for name in strategies:
        strategy(name)
        try:
            layout = plan(model, memory, block_size, grouping=name, **options)
        except DecodebenchError as error:
            rows.append({"strategy": name, "status": "refused", "reason": str(error)})
            continue
        rows.append({"strategy": name, "status": "ok", "reason": None} | facts(layout, length))
    return rows


def facts(layout: KVCacheConfig, length: int | None = None) -> dict:
    """A layout as one row of numbers; waste as shares of the memory."""
    c = layout.capacity(length)
    return {
        "memory_order": layout.memory_order,
        "groups": len(layout.groups),
        "pools": len(layout.pool_num_blocks),
        "num_blocks": sum(layout.pool_num_blocks),
        "bytes_per_block": max(layout.bytes_per_block(pool) for pool in range(len(layout.pool_num_blocks))),
        "length": c.length,
        "blocks_per_request": sum(c.blocks_per_request),
        "concurrency": c.concurrency,
        "tokens": c.tokens,
        "tokens_old": c.tokens_old,
        "intercept_bytes": c.intercept_bytes,
        "slope_bytes": c.slope_bytes,
    } | {
        f"waste_{cause}": share
        for cause, share in layout.waste(length).shares().items()
        if cause != "content"
    }
