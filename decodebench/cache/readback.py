"""Reading rows back: what their bytes say, and whose content a wrong row holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from decodebench.cache.tensors import BITS, POISON, Cache, Span, torch_dtype
from decodebench.cache.values import (
    BLOCK_STRIDE,
    LAYER_STRIDE,
    PART_STRIDE,
    ZEROS,
    Constant,
    Normal,
    Tags,
    Values,
    poison_number,
    value_dtypes,
)
from decodebench.models.specs import PagePart

#: states of a row as read back from its bytes
FILLED, ZEROED, UNTOUCHED, WRONG = 0, 1, 2, 3
STATE_NAMES = ("filled", "zeroed", "untouched", "wrong")


@dataclass(frozen=True, eq=False)
class RowStates:
    """What the bytes of a group's rows say: int8 ``[layers, num_blocks]`` each, on the CPU.

    ``states``: FILLED, ZEROED, UNTOUCHED (every byte of the page still poison) or WRONG.
    ``padding``: UNTOUCHED where the bytes behind the content are still poison (or there are
    none), ZEROED where all are zero, WRONG otherwise.
    """

    states: torch.Tensor
    padding: torch.Tensor

    @property
    def padding_written(self) -> torch.Tensor:
        return self.padding != UNTOUCHED


def inspect_rows(
    cache: Cache, group: int, values: Values | None = None, blocks: torch.Tensor | None = None
) -> RowStates:
    """Compare every row of a group, byte for byte, with what ``values`` would have written.

    ``blocks`` (bool [num_blocks]) limits the look to some blocks, so that groups that alias the
    same bytes need not read all of them again; the others are reported as UNTOUCHED.

    FILLED wins where values are zeros themselves; a row of parts that are only ever zeroed
    (packed formats, circular buffers) is ZEROED. Every byte is read from memory about once, some
    MiB at a time; nothing of the size of the cache is allocated.
    """
    values = Constant() if values is None else values
    layers = cache.layout.groups[group].layer_names
    first = cache.layout.layer_index[layers[0]]
    shape = (len(layers), cache.layout.num_blocks_of(group))
    filled, zero, poison = (torch.ones(shape, dtype=torch.bool) for _ in range(3))
    plain = torch.zeros(shape, dtype=torch.bool)  # rows with at least one part of plain numbers
    spans = cache.spans(group)
    values.prepare(value_dtypes([spans], values), cache.device)
    look = torch.as_tensor([True] * shape[1] if blocks is None else blocks, dtype=torch.bool)
    for span in spans:
        index = slice(span.first_layer - first, span.first_layer - first + span.view.shape[0])
        source = ZEROS if span.part.zeros_only and not values.raw_bytes else values
        for states, found in zip((filled, zero, poison), _inspect_span(span, source, look)):
            states[index] &= found
        plain[index] |= not span.part.zeros_only
    padding = _inspect_padding(cache, layers, shape)
    states = torch.full(shape, WRONG, dtype=torch.int8)
    states[poison & (padding == UNTOUCHED)] = UNTOUCHED
    states[zero] = ZEROED
    states[filled & plain] = FILLED
    states[:, ~look], padding[:, ~look] = UNTOUCHED, UNTOUCHED
    return RowStates(states, padding)


#: bytes a thread looks at together: twice for a row's smallest and largest number, which must stay in
#: the CPU's second-level cache between the looks; once against a content, where fewer calls count for more
LOOK_BYTES = {"cpu": 512 << 10, "cuda": 64 << 20}
COMPARE_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}


def _inspect_span(
    span: Span, values: Values, look: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bool [L, num_blocks] each: rows that hold exactly the values, only zeros, only poison."""
    look = look.to(span.bits.device)
    bits, number, poison = span.bits, values.number(span.part.dtype), poison_number(span.bits.itemsize)
    uniform = [0, poison] if number is None else [0, poison, number]
    # a row that begins with none of these numbers does not consist of one of them
    first = bits[:, :, 0]
    one_number = torch.isin(first, torch.tensor(uniform, dtype=first.dtype, device=first.device))
    low, high = _extremes(bits, one_number & look)
    zero, poisoned = ((low == n) & (high == n) for n in (0, poison))
    if number is not None:
        filled = (low == number) & (high == number)
    else:
        filled = _equal(span, values, ~(zero | poisoned) & look)
    return filled.cpu(), zero.cpu(), poisoned.cpu()


def _chunks(rows: torch.Tensor, row_bytes: int, sizes: dict[str, int]) -> Iterator[tuple[slice, slice]]:
    """Pieces of ``[L, num_blocks]`` of about ``sizes`` bytes that contain all of the given rows (bool)."""
    layers, blocks = rows.shape
    chunk_bytes = sizes.get(rows.device.type, sizes["cuda"])
    if rows.device.type == "cpu":
        chunk_bytes *= min(8, torch.get_num_threads())
    height = max(1, min(layers, chunk_bytes // row_bytes))
    count = max(1, chunk_bytes // (height * row_bytes))
    for top in range(0, layers, height):
        wanted = rows[top : top + height].any(0).nonzero()[:, 0] // count
        for i in wanted.unique().tolist():
            yield slice(top, min(layers, top + height)), slice(i * count, min(blocks, (i + 1) * count))


def _extremes(bits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest element of the given rows of ``[L, num_blocks, numel]``; of others, 1 and 2."""
    low = torch.full(bits.shape[:2], 1, dtype=bits.dtype, device=bits.device)
    high = torch.full_like(low, 2)
    for chunk in _chunks(rows, bits.shape[2] * bits.itemsize, LOOK_BYTES):
        torch.amin(bits[chunk], 2, out=low[chunk])
        torch.amax(bits[chunk], 2, out=high[chunk])
    return low, high


def _equal(span: Span, values: Values, rows: torch.Tensor) -> torch.Tensor:
    """bool [L, num_blocks]: which of the given rows hold exactly the values."""
    bits = span.bits
    largest = torch.full(bits.shape[:2], 1, dtype=torch.uint8, device=bits.device)
    scratch = torch.empty(0, dtype=bits.dtype, device=bits.device)
    for layers, blocks in _chunks(rows, span.part.nbytes, COMPARE_BYTES):
        largest[layers, blocks] = 0
        for row, piece, content in values.sources(
            bits[layers, blocks],
            span.part.dtype,
            span.first_layer + layers.start,
            blocks.start,
            1,
            span.part_index,
        ):
            difference = scratch.resize_(piece.shape)
            torch.bitwise_xor(piece, content, out=difference)
            # bytes are unsigned: the largest is 0 only if all are
            found = difference.view(torch.uint8).flatten(2).amax(2)
            seen = largest[layers, blocks.start + row : blocks.start + row + piece.shape[1]]
            torch.maximum(seen, found, out=seen)
    return largest == 0


def _inspect_padding(cache: Cache, layers: Sequence[str], shape: tuple[int, int]) -> torch.Tensor:
    """int8 [L, num_blocks]: what the bytes between and behind the parts of each page hold."""
    states = torch.full(shape, UNTOUCHED, dtype=torch.int8)
    for i, layer in enumerate(layers):
        place = cache.page_places[layer]
        if place is None or place.pieces > 1:  # no padding between or behind pieces
            continue
        page, end, gaps = cache.pages(layer), 0, []
        for part in sorted(cache.parts(layer), key=lambda part: part.offset):
            gaps.append(page[:, end : part.offset])
            end = part.offset + part.nbytes
        gaps = [gap for gap in (*gaps, page[:, end:]) if gap.shape[1]]
        if not gaps:
            continue
        lows, highs = (torch.stack(side) for side in zip(*((gap.amin(1), gap.amax(1)) for gap in gaps)))
        low, high = lows.amin(0).cpu(), highs.amax(0).cpu()
        states[i, (low != POISON)] = WRONG
        states[i, high == 0] = ZEROED
    return states


def identify_row(cache: Cache, group: int, layer: int, block: int, values: Values) -> tuple[int, int] | None:
    """Whose content a row holds: (layer index, block) that ``values`` would have written it for.

    ``layer`` counts the group's layers from 0. None where the row holds no such content. The
    answer is the first of the cache's layers and blocks that fits, the row itself before others.
    Constants tell nothing apart: use ``Normal`` or ``Tags``.
    """
    layout = cache.layout
    name = layout.groups[group].layer_names[layer]
    part_index = next((i for i, p in enumerate(cache.parts(name)) if not p.zeros_only), None)
    if part_index is None:
        return None
    part = cache.parts(name)[part_index]
    row = cache.flat(name, part_index)[block].view(BITS[torch_dtype(part.dtype).itemsize]).cpu()
    for index, other in _candidates(cache, row, part, part_index, values, layout.layer_index[name], block):
        expected = values.expected(part, index, other, part_index).view(row.dtype)
        if torch.equal(expected, row):
            return index, other
    return None


def _candidates(
    cache: Cache, row: torch.Tensor, part: PagePart, part_index: int, values: Values, layer: int, block: int
) -> Iterator[tuple[int, int]]:
    """(layer index, block) pairs whose content may be this row, most likely first."""
    yield layer, block
    layers, blocks = len(cache.layout.layer_names), max(cache.layout.pool_num_blocks)
    if isinstance(values, Tags) and row.numel() >= 16:
        numbers = (row[:12].view(torch_dtype(part.dtype)).to(torch.float32) * 64).tolist()
        if all(1 <= number <= 8 for number in numbers):
            digits = [int(number) - 1 for number in numbers]
            other = sum(d << 3 * i for i, d in enumerate(digits[:8]))
            index = sum(d << 3 * i for i, d in enumerate(digits[8:]))
            yield index, other
    if isinstance(values, Normal):
        values.prepare([part.dtype], torch.device("cpu"))
        period = values.period(part.dtype)
        bank = values.bank(part.dtype, torch.device("cpu"))
        starts = (bank[:period] == row[0]).nonzero()[:, 0]
        for i in range(1, min(row.numel(), 64)):
            starts = starts[bank[starts + i] == row[i]]
        inverse = pow(BLOCK_STRIDE, -1, period)
        for start in starts.tolist():
            for index in range(layers):
                shift = start - index * LAYER_STRIDE - part_index * PART_STRIDE
                for other in range(shift * inverse % period, blocks, period):
                    yield index, other
