"""Where pages lie: groups, numbers of blocks and an order of dimensions → tensors in one allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from decodebench.errors import DecodebenchError
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.models.engines import NEWEST, holds
from decodebench.models.specs import KVCacheSpec, cdiv

#: every pool starts at a multiple of this, so that any dtype is aligned in it
POOL_ALIGNMENT = 256


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


def block_stride(spec: KVCacheSpec, engine: str = NEWEST) -> int:
    """Bytes between two blocks of a layer in layer-outermost memory."""
    if not holds("layers_aligned", engine):
        return spec.page_size_bytes
    alignment = spec.stride_alignment_bytes
    return cdiv(spec.page_size_bytes, alignment) * alignment


def bytes_per_block(groups: Sequence[KVCacheGroupSpec], memory_order: str, engine: str = NEWEST) -> int:
    """Bytes that one block id stands for: the pages of the widest group, strides aligned."""
    if not memory_order.startswith("B") and holds("layers_aligned", engine):
        return max(sum(block_stride(spec) for spec in _placed_specs(group)) for group in groups)
    widest = max(group.bytes_per_block for group in groups)
    alignment = lcm(*(spec.stride_alignment_bytes for group in groups for spec in _placed_specs(group)))
    return cdiv(widest, alignment) * alignment


def _placed_specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    return [spec for spec, names in group.layers_by_spec() for _ in names]


def place(
    groups: Sequence[KVCacheGroupSpec], counts: Sequence[int], memory_order: str, engine: str = NEWEST
) -> tuple[tuple[KVCacheTensor, ...], int]:
    """Tensors of all groups and the bytes they take together; pools lie one behind the other."""
    tensors, start, end = [], 0, 0
    for pool, num_blocks in enumerate(counts):
        members = [group for group in groups if group.pool == pool]
        block = bytes_per_block(members, memory_order, engine)
        for group in members:
            offset = start
            for spec, names in group.layers_by_spec():
                if memory_order.startswith("B"):
                    layer, stride, used = spec.page_size_bytes, block, len(names) * spec.page_size_bytes
                else:
                    stride = block_stride(spec, engine)
                    layer = stride * num_blocks
                    used = len(names) * layer
                tensors.append(KVCacheTensor(names, offset, layer, stride, block * num_blocks))
                offset += used
        end = start + block * num_blocks
        start = cdiv(end, POOL_ALIGNMENT) * POOL_ALIGNMENT
    return tuple(tensors), end


def check_memory_order(groups: Sequence[KVCacheGroupSpec], memory_order: str, engine: str = NEWEST) -> None:
    """Raises ``LayoutRefused`` where this order of dimensions cannot hold pages of these sizes."""
    for pool in {group.pool for group in groups}:
        members = [group for group in groups if group.pool == pool]
        pages = {spec.page_size_bytes for group in members for spec in group.layer_specs}
        if set(memory_order[:2]) != {"L", "B"}:
            raise LayoutRefused(
                f"memory order {memory_order}: a page is not one run of bytes there, so pages can be neither "
                f"padded nor placed whole ({_sizes(pages)}): use LBNHC or BLHNC"
            )
        if len(pages) > 1 and len(members) > 1 and memory_order.startswith("L"):
            raise LayoutRefused(
                f"memory order {memory_order}: pages of different sizes ({_sizes(pages)}) in several "
                "groups need block-outermost memory: use BLHNC"
            )
        strides = {block_stride(spec, engine) for group in members for spec in group.layer_specs}
        if len(strides) > 1 and len(members) > 1 and memory_order.startswith("L"):
            raise LayoutRefused(
                f"memory order {memory_order}: kernels that want their blocks aligned put blocks "
                f"{' and '.join(map(str, sorted(strides)))} bytes apart, so blocks of different groups "
                "would overlap: use BLHNC"
            )


def _sizes(pages: set[int]) -> str:
    return ", ".join(map(str, sorted(pages))) + " bytes"


def needs_zeroing(groups: Sequence[KVCacheGroupSpec]) -> bool:
    """Whether new blocks must be zeroed: states are read before they are written, and a block that
    changes between precisions would be read as nonsense."""
    specs = {spec for group in groups for spec in group.layer_specs}
    precisions = {spec.precision for spec in specs} - {None}
    return len(precisions) > 1 or any(spec.holds_state for spec in specs)
