"""A layout on a device: one allocation, or an engine's tensors, seen as typed views per layer.

A layer's page holds one or more *parts* (``PagePart``): keys and values of attention, the
convolution and recurrent tensors of a state layer. Whatever tensors a cache is made of, every
part is reached the same way: ``flat(layer, part)`` is ``[num_blocks, numel]`` in the part's own
dtype, contiguous inside a row, one row a block.

A fresh cache is poisoned: every byte is ``0xFF``, which is NaN in float32, bfloat16, float16,
float8_e4m3fn and float8_e5m2 alike, so that a decode step that reads an unfilled value shows it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from decodebench.errors import DecodebenchError
from decodebench.layout.layout import Layout
from decodebench.models.specs import KVCacheSpec, PagePart
from decodebench.words import bytes_text, counted, short, some

#: the byte that unfilled memory consists of: NaN in every floating dtype a cache may hold
POISON = 0xFF

#: integer dtype of the same width: values are moved and compared as bits
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class AllocationRefused(DecodebenchError):
    """A cache that the device cannot hold."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a dtype name (``specs.DTYPE_BYTES``)."""
    return getattr(torch, name)


@dataclass(frozen=True, eq=False)
class Place:
    """Where one part of one layer lies: block ``b`` starts at byte ``offset + b * block_stride``.

    A page whose heads lie apart is ``pieces`` pieces of the part's size, ``piece_stride`` bytes apart.
    """

    part: PagePart
    storage: torch.UntypedStorage
    offset: int
    block_stride: int
    num_blocks: int
    pieces: int = 1
    piece_stride: int = 0

    def view(self, layers: int = 1, layer_stride: int = 0) -> torch.Tensor:
        """Typed ``[layers, num_blocks, numel]``; ``layer_stride`` in bytes."""
        return strided(
            self.storage,
            self.part.dtype,
            self.offset,
            (layers, self.num_blocks, self.part.numel),
            (layer_stride, self.block_stride),
            self.part.name,
        )

    def raw(self) -> torch.Tensor:
        """Bytes: uint8 ``[num_blocks, nbytes]``, or ``[num_blocks, pieces, nbytes]`` where they lie apart."""
        shape: tuple[int, ...] = (self.num_blocks, self.part.nbytes)
        strides: tuple[int, ...] = (self.block_stride,)
        if self.pieces > 1:
            shape, strides = (shape[0], self.pieces, shape[1]), (self.block_stride, self.piece_stride)
        return strided(self.storage, "uint8", self.offset, shape, strides, self.part.name)


@dataclass(frozen=True, eq=False)
class Span:
    """Equally spaced layers of a group, one part of each, as one typed view ``[L, num_blocks, numel]``.

    The view's j-th entry is the layer with index ``first_layer + j`` (``layout.layer_index``).
    """

    first_layer: int
    part_index: int
    part: PagePart
    view: torch.Tensor

    @cached_property
    def bits(self) -> torch.Tensor:
        """The same view as integers of the same width."""
        return self.view.view(BITS[self.view.itemsize])


def strided(
    storage: torch.UntypedStorage,
    dtype: str,
    offset: int,
    shape: tuple[int, ...],
    byte_strides: tuple[int, ...],
    what: str,
) -> torch.Tensor:
    """A typed view of a storage; the last dimension is contiguous, offset and strides are in bytes."""
    type_ = torch_dtype(dtype)
    if any(number % type_.itemsize for number in (offset, *byte_strides)):
        raise CacheMismatch(
            f"{what}: byte offset {offset} and strides {byte_strides} are not multiples of the "
            f"{type_.itemsize} bytes of {dtype}: pad the page so that its parts are aligned"
        )
    strides = (*tuple(number // type_.itemsize for number in byte_strides), 1)
    view = torch.empty(0, dtype=type_, device=storage.device)
    return view.set_(storage, offset // type_.itemsize, shape, strides)


@dataclass(frozen=True, eq=False)
class Cache:
    """The tensors of a layout on a device. Made by ``allocate`` or ``bind``.

    ``storage`` is the whole allocation (uint8, 1-D), or None where an engine owns the memory.
    ``places[layer]`` lists the layer's parts; ``logical[layer]`` is an engine's own tensor where
    it says how heads and tokens lie inside a block.
    """

    layout: Layout
    device: torch.device
    storage: torch.Tensor | None
    places: Mapping[str, tuple[Place, ...]]
    page_places: Mapping[str, Place | None]
    logical: Mapping[str, torch.Tensor]
    #: what ``allocate`` wrote into every byte; None where it wrote nothing, and for an engine's memory
    initial: str | None = None
    #: what the last fill wrote, under ``values``: what an audit expects where nothing else is asked for
    filled_with: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _spans: dict[int, list[Span]] = field(default_factory=dict, init=False, repr=False)

    def __repr__(self) -> str:
        layout = self.layout
        name = short(layout.model.name) if layout.model else "a layout by hand"
        memory = bytes_text(layout.size) if self.storage is not None else "an engine's memory"
        made = {"poison": ", poisoned", "zeros": ", made of zeros"}.get(self.initial or "", "")
        filled = f", filled with {self.filled_with['values']}" if self.filled_with else ""
        return (
            f"Cache of {name}: {sum(layout.pool_num_blocks):,} blocks, {memory} on {self.device}, "
            f"{counted(len(self.places), 'layer')}{made}{filled}"
        )

    def parts(self, layer: str) -> tuple[PagePart, ...]:
        """The layer's parts as they lie here (keys and values apart where an engine keeps them so)."""
        return tuple(place.part for place in self._places(layer))

    def flat(self, layer: str, part: int | str = 0) -> torch.Tensor:
        """One part of every block: typed ``[num_blocks, numel]``, contiguous inside a row."""
        return self._places(layer)[self._part_index(layer, part)].view()[0]

    def pages(self, layer: str) -> torch.Tensor:
        """Raw pages, padding included: uint8 ``[num_blocks, page_size_bytes]``.

        Where an engine keeps heads (or keys and values) outside of blocks a page lies in equal
        pieces: ``[num_blocks, pieces, bytes of a piece]``. Raises ``CacheMismatch`` where the layer's
        parts are tensors of their own.
        """
        self._places(layer)
        page = self.page_places[layer]
        if page is None:
            raise CacheMismatch(
                f"layer {layer!r}: its parts lie apart, there is no page; use flat(layer, part)"
            )
        return page.raw()

    def view(self, layer: str, part: int | str | None = None) -> torch.Tensor | dict[str, torch.Tensor]:
        """The logical tensor of a part, one row a block.

        Attention: ``[num_blocks, num_kv_heads, entries_per_block, head_size + head_size_v]``,
        strided as it lies in memory. States: ``[num_blocks, *shape]``. ``part=None``: the only
        part, or a dictionary by name where there are several.
        """
        places = self._places(layer)
        if part is None and layer in self.logical:
            return self.logical[layer]
        if part is None and len(places) > 1:
            return {p.part.name: cast(torch.Tensor, self.view(layer, i)) for i, p in enumerate(places)}
        index = self._part_index(layer, part or 0)
        if len(places) == 1 and layer in self.logical:
            return self.logical[layer]
        place = places[index]
        rows = place.view()[0]
        spec = self.layout.layer_specs[layer]
        if spec.holds_state or place.part.zeros_only:
            return rows.unflatten(1, place.part.shape)
        entries, heads, width = place.part.shape
        if self.layout.memory_order.index("H") < self.layout.memory_order.index("N"):
            return rows.unflatten(1, (heads, entries, width))
        return rows.unflatten(1, (entries, heads, width)).transpose(1, 2)

    def group_flat(self, group: int, part: int = 0) -> list[tuple[int, torch.Tensor]]:
        """``(first layer index, typed [L, num_blocks, numel])`` in as few views as the layout allows."""
        return [(span.first_layer, span.view) for span in self.spans(group) if span.part_index == part]

    def spans(self, group: int) -> list[Span]:
        """All parts of all layers of a group, in as few strided views as their places allow."""
        if group not in self._spans:
            self._spans[group] = self._find_spans(group)
        return self._spans[group]

    def _find_spans(self, group: int) -> list[Span]:
        layers = self.layout.groups[group].layer_names
        first = self.layout.layer_index[layers[0]]
        spans = []
        for part_index in range(max(len(self._places(layer)) for layer in layers)):
            places = [self._places(layer)[part_index : part_index + 1] for layer in layers]
            for start, count, step in _equally_spaced([p[0] if p else None for p in places]):
                place = places[start][0]
                spans.append(Span(first + start, part_index, place.part, place.view(count, step)))
        return spans

    def poison(self) -> None:
        """Poison every byte this cache can reach: the allocation, or all pages of an engine's tensors."""
        if self.storage is not None:
            self.storage.fill_(POISON)
            return
        for layer, places in self.places.items():
            page = self.page_places[layer]
            for place in places if page is None else (page,):
                place.raw().fill_(POISON)

    def _places(self, layer: str) -> tuple[Place, ...]:
        if layer not in self.places:
            raise CacheMismatch(f"no layer {layer!r} in this cache; it has {some(map(repr, self.places))}")
        return self.places[layer]

    def _part_index(self, layer: str, part: int | str) -> int:
        names = [place.part.name for place in self.places[layer]]
        if part in names:
            return names.index(part)
        if isinstance(part, int) and 0 <= part < len(names):
            return part
        raise CacheMismatch(f"layer {layer!r} has no part {part!r}; it has {', '.join(names)}")


def _equally_spaced(places: Sequence[Place | None]) -> Iterator[tuple[int, int, int]]:
    """(start, count, byte step) of the runs of places that one strided view covers."""
    start = 0
    while start < len(places):
        first, count, step = places[start], 1, 0
        while first is not None and start + count < len(places):
            other = places[start + count]
            same = other is not None and (
                (
                    first.part.dtype,
                    first.part.numel,
                    first.part.zeros_only,
                    first.block_stride,
                    first.num_blocks,
                )
                == (
                    other.part.dtype,
                    other.part.numel,
                    other.part.zeros_only,
                    other.block_stride,
                    other.num_blocks,
                )
                and first.storage.data_ptr() == other.storage.data_ptr()
            )
            distance = other.offset - first.offset if other is not None and same else 0
            # torch views know no negative strides
            if distance <= 0 or (count > 1 and distance != step * count):
                break
            if distance % torch_dtype(first.part.dtype).itemsize:
                break
            step = distance if count == 1 else step
            count += 1
        if first is not None:
            yield start, count, step
        start += count


# -- our own allocation -------------------------------------------------------------------------


def allocate(layout: Layout, device: str | torch.device = "cpu", initial: str | None = "poison") -> Cache:
    """One allocation of ``layout.size`` bytes with a typed view per layer.

    ``initial``: ``poison`` (every byte ``0xFF``), ``zeros``, or None (whatever the memory held).
    Raises ``AllocationRefused`` where the device has less free memory.
    """
    if not isinstance(layout, Layout):
        raise AllocationRefused(
            f"allocate({type(layout).__name__}, …): a layout is allocated; db.plan(model, memory=…) makes one"
        )
    try:
        device = torch.device(device)
    except RuntimeError:
        raise AllocationRefused(f"device {device!r} is not known to torch: use 'cpu' or 'cuda'") from None
    if initial not in ("poison", "zeros", None):
        raise DecodebenchError(f"initial={initial!r}: known are 'poison', 'zeros' and None")
    free = free_memory(device)
    if layout.size > free:
        raise AllocationRefused(
            f"a cache of {layout.size / 2**30:.2f} GiB does not fit into the {free / 2**30:.2f} GiB that "
            f"{device} has free: plan a smaller memory, or use layout.with_num_blocks for a small cache"
        )
    try:
        storage = torch.empty(layout.size, dtype=torch.uint8, device=device)
    except torch.cuda.OutOfMemoryError:  # free, but in pieces
        raise AllocationRefused(
            f"a cache of {layout.size / 2**30:.2f} GiB finds no room in one piece on {device}, which has "
            f"{free / 2**30:.2f} GiB free: plan a smaller memory, or start in a fresh process"
        ) from None
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AllocationRefused(
            f"device {str(device)!r}: torch cannot allocate there ({why}); use 'cpu' or 'cuda'"
        ) from None
    if initial is not None:
        storage.fill_(POISON if initial == "poison" else 0)
    raw = storage.untyped_storage()
    places, pages = {}, {}
    for layer, spec in layout.layer_specs.items():
        offset, block_stride = layout.placement[layer]
        num_blocks = layout.num_blocks_of(layout.group_of[layer])
        page = Place(_page_part(spec), raw, offset, block_stride, num_blocks)
        if offset + (num_blocks - 1) * block_stride + spec.page_size_bytes > layout.size:
            raise CacheMismatch(
                f"layer {layer!r}: its pages end behind the {layout.size} bytes of the layout"
            )
        pages[layer] = page
        places[layer] = tuple(replace(page, part=p, offset=offset + p.offset) for p in spec.parts())
    return Cache(layout, storage.device, storage, places, pages, {}, initial)


def free_memory(device: torch.device) -> int:
    """Bytes that an allocation on this device may take."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise AllocationRefused(f"device {device}: no CUDA device is usable here; use device='cpu'")
        # what torch keeps for its next allocation is free as well; it gives it back before it refuses
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type != "cpu":
        return 2**62
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in lines:
            return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _page_part(spec: KVCacheSpec) -> PagePart:
    return PagePart("page", (spec.page_size_bytes,), "uint8")


# -- an engine's tensors ------------------------------------------------------------------------


class CacheMismatch(DecodebenchError):
    """A tensor that does not hold what its layer's spec says."""
