"""An engine's tensors taken as a layout's cache: checked, and seen through one typed view a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch

from decodebench.cache.tensors import Cache, CacheMismatch, Place, _page_part, torch_dtype
from decodebench.layout.layout import Layout
from decodebench.models.specs import AttentionSpec, KVCacheSpec, PagePart
from decodebench.words import some


def bind(layout: Layout, kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> Cache:
    """An engine's tensors as a cache; every tensor is checked against its layer's spec.

    A layer's entry is one tensor whose rows are blocks (typed or raw bytes, any order of heads
    and tokens inside a block, blocks any stride apart; ``num_blocks * r`` rows where the kernel's
    blocks are r times smaller), keys and values in an outermost dimension of 2, ``[B, H, N, C]`` with
    heads outside of blocks, or a list of one tensor a part (states). Raises ``CacheMismatch`` naming
    layer, what came, what was expected.
    """
    missing = [name for name in layout.layer_names if name not in kv_caches]
    if missing:
        raise CacheMismatch(
            f"no KV cache was registered for {some(map(repr, missing))} of group {layout.group_of[missing[0]]}: "
            f"the engine gave {some(map(repr, kv_caches))}; plan the layout from the same model and options"
        )
    unknown = [name for name in kv_caches if name not in layout.layer_index]
    if unknown:
        raise CacheMismatch(
            f"KV caches for {some(map(repr, unknown))}, which no group of the layout contains: "
            "plan the layout from the same model and options, or leave these tensors out"
        )
    places, pages, logical = {}, {}, {}
    for layer, spec in layout.layer_specs.items():
        num_blocks = layout.num_blocks_of(layout.group_of[layer])
        given = kv_caches[layer]
        tensors = [given] if isinstance(given, torch.Tensor) else list(given)
        if not tensors or not all(isinstance(t, torch.Tensor) for t in tensors):
            raise CacheMismatch(
                f"layer {layer!r}: got {type(given).__name__}, expected a tensor or a list of them"
            )
        if len(tensors) == 1:
            places[layer] = _bind_tensor(layer, spec, num_blocks, tensors[0])
        else:
            places[layer] = _bind_parts(layer, spec, num_blocks, tensors)
        pages[layer] = _page_of(spec, places[layer])
        if _is_logical(spec, tensors, num_blocks):
            logical[layer] = tensors[0].view(torch_dtype(spec.parts()[0].dtype))
    device = next(iter(places.values()))[0].storage.device
    return Cache(layout, device, None, places, pages, logical)


def _bind_tensor(layer: str, spec: KVCacheSpec, num_blocks: int, tensor: torch.Tensor) -> tuple[Place, ...]:
    """One tensor that holds the whole page of every block."""
    parts = spec.parts()
    raw = tensor.dtype in (torch.uint8, torch.int8)
    if (
        not raw
        and (len(parts) > 1 or tensor.dtype != torch_dtype(parts[0].dtype))
        and not parts[0].zeros_only
    ):
        types = " + ".join(f"{p.name} {p.dtype}" for p in parts)
        raise _mismatch(layer, tensor, f"dtype {types} (or raw int8/uint8 pages)")
    if tensor.ndim > 1 and tensor.shape[0] != num_blocks and tensor.shape[0] == 2 and len(parts) == 1:
        return _bind_sides(layer, spec, num_blocks, tensor, dict(zip("kv", tensor)))
    if tensor.ndim == 4 and len(parts) == 1 and _has_heads_outside(tensor):
        heads = {f"{parts[0].name}.head{h}": tensor[:, h] for h in range(tensor.shape[1])}
        return _bind_sides(layer, spec, num_blocks, tensor, heads)
    rows, row_bytes, stride = _rows(layer, tensor)
    wanted = {spec.unpadded_page_size_bytes, spec.page_size_bytes}
    ratio, rest = divmod(rows, num_blocks)
    if rest or not ratio:
        raise _mismatch(layer, tensor, f"{num_blocks} rows (blocks), or a multiple of it (kernel blocks)")
    if ratio * row_bytes not in wanted:
        sizes = " or ".join(str(size) for size in sorted(wanted))
        raise _mismatch(
            layer, tensor, f"{sizes} bytes a block in {num_blocks} blocks, got {ratio * row_bytes}"
        )
    if ratio > 1 and stride != row_bytes:
        raise _mismatch(
            layer, tensor, f"the {ratio} kernel blocks of a block side by side, {row_bytes} bytes apart"
        )
    place = Place(
        _page_part(spec), tensor.untyped_storage(), _byte_offset(tensor), stride * ratio, num_blocks
    )
    return tuple(replace(place, part=p, offset=place.offset + p.offset) for p in parts)


def _has_heads_outside(tensor: torch.Tensor) -> bool:
    """Whether ``[B, H, N, C]`` keeps other blocks or layers between two heads of a block."""
    _, heads, entries, width = tensor.shape
    return heads > 1 and tensor.stride()[2:] == (width, 1) and tensor.stride(1) > entries * width


def _bind_sides(
    layer: str, spec: KVCacheSpec, num_blocks: int, tensor: torch.Tensor, sides: dict[str, torch.Tensor]
) -> tuple[Place, ...]:
    """A tensor whose keys and values (or heads) lie apart: a part a side, each ``[num_blocks, ...]``."""
    part = _side(spec, len(sides), heads=len(sides) > 1 and "k" not in sides)
    if part is None:
        raise _mismatch(layer, tensor, f"{num_blocks} rows (blocks), or keys and values of equal size apart")
    places = []
    for name, side in sides.items():
        rows, row_bytes, stride = _rows(layer, side)
        ratio, rest = divmod(rows, num_blocks)
        if rest or not ratio or ratio * row_bytes != part.nbytes or (ratio > 1 and stride != row_bytes):
            raise _mismatch(layer, tensor, f"{num_blocks} blocks of {part.nbytes} bytes in each {name}")
        named = replace(part, name=name)
        places.append(Place(named, side.untyped_storage(), _byte_offset(side), stride * ratio, num_blocks))
    return tuple(places)


def _side(spec: KVCacheSpec, count: int, heads: bool) -> PagePart | None:
    """One of ``count`` equal sides of an attention page; None where the page has no such sides."""
    whole = spec.parts()[0]
    if spec.holds_state:
        return None
    spec = cast(AttentionSpec, spec)  # no state: vectors a token
    if heads and count != spec.head_slots:
        return None
    if whole.zeros_only:
        size, rest = divmod(whole.nbytes, count)
        return None if rest else replace(whole, shape=(size,))
    entries, slots, width = whole.shape
    if heads:
        return replace(whole, shape=(entries, 1, width))
    equal = spec.head_size == spec.head_size_v and width == spec.head_size + spec.head_size_v
    return replace(whole, shape=(entries, slots, spec.head_size)) if equal else None


def _bind_parts(
    layer: str, spec: KVCacheSpec, num_blocks: int, tensors: Sequence[torch.Tensor]
) -> tuple[Place, ...]:
    """One tensor a part, each ``[num_blocks, ...]``."""
    parts = spec.parts()
    if len(tensors) != len(parts):
        names = ", ".join(p.name for p in parts)
        raise CacheMismatch(f"layer {layer!r}: got {len(tensors)} tensors, expected {len(parts)} ({names})")
    places = []
    for part, tensor in zip(parts, tensors):
        name = f"{layer}.{part.name}"
        rows, row_bytes, stride = _rows(name, tensor)
        if tensor.dtype != torch_dtype(part.dtype) and tensor.dtype not in (torch.uint8, torch.int8):
            raise _mismatch(name, tensor, f"dtype {part.dtype}")
        if rows != num_blocks or row_bytes != part.nbytes:
            raise _mismatch(
                name, tensor, f"{num_blocks} rows of {part.nbytes} bytes, {part.dtype} {part.shape}"
            )
        places.append(Place(part, tensor.untyped_storage(), _byte_offset(tensor), stride, num_blocks))
    return tuple(places)


def _rows(name: str, tensor: torch.Tensor) -> tuple[int, int, int]:
    """(rows, bytes of a row, bytes between two rows); a row must be dense in some order of its dimensions."""
    if tensor.ndim < 1 or not tensor.numel():
        raise _mismatch(name, tensor, "a tensor with one row a block")
    inner = sorted((s, n) for s, n in zip(tensor.stride()[1:], tensor.shape[1:]) if n > 1)
    width = 1
    for stride, size in inner:
        if stride != width:
            raise _mismatch(
                name, tensor, "blocks that are dense inside (only the distance between them is free)"
            )
        width *= size
    row_bytes = width * tensor.itemsize
    stride = tensor.stride(0) * tensor.itemsize if tensor.shape[0] > 1 else row_bytes
    if stride < row_bytes:
        raise _mismatch(name, tensor, "blocks that do not overlap")
    return tensor.shape[0], row_bytes, stride


def _page_of(spec: KVCacheSpec, places: Sequence[Place]) -> Place | None:
    """The page that the parts lie in, padding included where the storage has it; None if they lie apart.

    Equal parts at equal distances (heads, or keys and values) are a page in pieces.
    """
    first = places[0]
    together = all(
        place.storage.data_ptr() == first.storage.data_ptr() and place.block_stride == first.block_stride
        for place in places
    )
    if not together or sum(p.part.nbytes for p in places) != spec.unpadded_page_size_bytes:
        return None
    if len({place.part.offset for place in places}) < len(places):
        return _pieces_of(places)
    start = first.offset - first.part.offset
    if any(place.offset - place.part.offset != start for place in places):
        return None
    end = start + (first.num_blocks - 1) * first.block_stride + spec.page_size_bytes
    fits = end <= first.storage.nbytes() and spec.page_size_bytes <= max(
        first.block_stride, first.part.nbytes
    )
    size = spec.page_size_bytes if fits else spec.unpadded_page_size_bytes
    return replace(first, part=PagePart("page", (size,), "uint8"), offset=start)


def _pieces_of(places: Sequence[Place]) -> Place | None:
    """A page whose pieces lie apart, equally spaced; None where they are not."""
    first, step = places[0], places[1].offset - places[0].offset
    spaced = all(place.offset == first.offset + i * step for i, place in enumerate(places))
    if not spaced or step <= 0 or len({place.part.nbytes for place in places}) > 1:
        return None
    piece = PagePart("page", (first.part.nbytes,), "uint8")
    return replace(first, part=piece, pieces=len(places), piece_stride=step)


def _is_logical(spec: KVCacheSpec, tensors: Sequence[torch.Tensor], num_blocks: int) -> bool:
    """Whether the engine's tensor already is [blocks, heads, entries, width] of plain numbers."""
    if spec.holds_state or len(tensors) != 1 or spec.parts()[0].zeros_only:
        return False
    entries, heads, width = spec.parts()[0].shape
    if tensors[0].itemsize != torch_dtype(spec.parts()[0].dtype).itemsize:
        return False
    return tuple(tensors[0].shape) == (num_blocks, heads, entries, width)


def _byte_offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


def _mismatch(name: str, tensor: torch.Tensor, expected: str) -> CacheMismatch:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return CacheMismatch(
        f"layer {name!r}: got {dtype} {tuple(tensor.shape)} with strides {tensor.stride()}, expected "
        f"{expected}; the layout must be planned with the engine's own model, dtype and block size"
    )
