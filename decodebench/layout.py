"""Groups and a memory budget → ``KVCacheConfig``: where every page lies, what fits, what is wasted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from decodebench.grouping import KVCacheGroupSpec
from decodebench.specs import DecodebenchError, KVCacheSpec


class LayoutRefused(DecodebenchError):
    """A layout that vLLM would not build; ``max_model_len`` is the length that would fit, where one does."""

    def __init__(self, message: str, max_model_len: int | None = None) -> None:
        super().__init__(message)
        self.max_model_len = max_model_len


@dataclass(frozen=True)
class KVCacheTensor:
    """Where a set of equally spaced layers lies in the one allocation (all in bytes).

    The page of ``layers[j]``, block ``b``, starts at
    ``offset + j * layer_stride + b * block_stride``. Tensors of different groups overlap on
    purpose: groups alias the same bytes, and a block id belongs to one group at a time.
    """

    layers: tuple[str, ...]
    offset: int
    layer_stride: int
    block_stride: int
    size: int


@dataclass(frozen=True)
class KVCacheConfig:
    """A layout: groups, number of blocks, and where each layer's pages lie.

    ``pool_num_blocks[p]`` counts the blocks of pool ``p``, its null block (id 0) included;
    vLLM has a single pool. ``size`` is the allocation in bytes.
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
