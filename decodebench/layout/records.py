"""What a layout is made of: grouped layers, and where their pages lie once a memory is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.placement import KVCacheTensor, LayoutRefused, bytes_per_block, place
from decodebench.models.layers import Resolved
from decodebench.models.model import Model
from decodebench.models.options import CacheOptions
from decodebench.models.specs import KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """A model's layers in groups under some options: everything but the memory."""

    groups: tuple[KVCacheGroupSpec, ...]
    #: LBNHC (a layer's region holds all its blocks) or BLHNC (a block holds all layers' pages)
    memory_order: str = "LBNHC"
    max_model_len: int = 0
    #: tokens scheduled but not settled: batched tokens, twice that with asynchronous scheduling
    max_in_flight_tokens: int = 0
    decode_context_parallel_size: int = 1
    #: the strategy that made the groups
    grouping: str = "auto"
    #: what it was planned from; None where it was made by hand
    model: Model | None = None
    options: CacheOptions | None = None
    resolved: Resolved | None = None

    @property
    def pools(self) -> range:
        """Numbers of the pools that the groups draw their blocks from; vLLM has a single one."""
        return range(max(g.pool for g in self.groups) + 1)

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that the layers' heads are divided between; 1 for groups made by hand."""
        return self.options.tensor_parallel_size if self.options else 1

    def tokens_per_block(self, group: int) -> int:
        """Tokens that one block of the group covers: its block size, times dcp where sharded."""
        spec = self.groups[group].kv_cache_spec
        return spec.block_size * (self.decode_context_parallel_size if spec.dcp_sharded else 1)

    def bytes_per_block(self, pool: int | None = None) -> int:
        """Bytes that one block id of a pool stands for: those of its widest group.

        None: of the pool whose blocks are widest, which is the one number to show where there are several.
        """
        if pool is None:
            return max(map(self.bytes_per_block, self.pools))
        return bytes_per_block([g for g in self.groups if g.pool == pool], self.memory_order)

    def blocks_per_request(self, length: int | None = None) -> list[int]:
        """Blocks that each group reserves for a request of ``length`` tokens (default: the maximum)."""
        length = self.max_model_len if length is None else length
        in_flight, dcp = self.max_in_flight_tokens, self.decode_context_parallel_size
        return [group.blocks_per_request(length, in_flight, dcp) for group in self.groups]

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """All layers, group after group. A layer's position here is its *layer index*."""
        return tuple(name for group in self.groups for name in group.layer_names)

    @cached_property
    def layer_index(self) -> dict[str, int]:
        """layer → its position in ``layer_names``."""
        return {name: i for i, name in enumerate(self.layer_names)}

    @cached_property
    def group_of(self) -> dict[str, int]:
        """layer → the number of its group."""
        return {name: g for g, group in enumerate(self.groups) for name in group.layer_names}

    @cached_property
    def layer_specs(self) -> dict[str, KVCacheSpec]:
        """layer → its spec as placed in its group, in the order of ``layer_names``."""
        return {n: s for group in self.groups for n, s in zip(group.layer_names, group.layer_specs)}


@dataclass(frozen=True, kw_only=True)
class Placed(Grouped):
    """Grouped layers in a memory: the number of blocks, and where each layer's pages lie.

    ``pool_num_blocks[p]`` counts the blocks of pool ``p``, its null block (id 0) included;
    vLLM has a single pool. ``size`` is the allocation in bytes, ``budget`` what was to be used.
    """

    tensors: tuple[KVCacheTensor, ...]
    pool_num_blocks: tuple[int, ...]
    size: int
    budget: int = 0
    #: whether the engine zeroes the blocks it hands out (state layers, mixed precision)
    needs_kv_cache_zeroing: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, null block included (the first pool's, where there are several)."""
        return self.pool_num_blocks[0]

    def num_blocks_of(self, group: int) -> int:
        """Blocks that ids of this group may name: valid ids are 1 to this number minus 1."""
        return self.pool_num_blocks[self.groups[group].pool]

    @cached_property
    def placement(self) -> dict[str, tuple[int, int]]:
        """layer → (byte offset of its block 0, bytes between two of its blocks)."""
        return {
            name: (tensor.offset + j * tensor.layer_stride, tensor.block_stride)
            for tensor in self.tensors
            for j, name in enumerate(tensor.layers)
        }

    def with_num_blocks(self, num_blocks: int | Sequence[int]) -> Self:
        """The same layout with this many blocks (a number a pool, where several), strides recomputed.

        For small caches of big models: no request of the maximum length has to fit. Raises
        ``LayoutRefused`` for fewer than 2 blocks in a pool.
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
