"""Reading pages back: what their bytes say, and whose content a wrong page holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from decodebench.cache import compiled_rows
from decodebench.cache.tensors import BITS, POISON, Cache, Span, torch_dtype
from decodebench.cache.values import (
    BLOCK_STRIDE,
    LAYER_STRIDE,
    PART_STRIDE,
    Normal,
    Tags,
    Values,
    default_values,
    poison_number,
    source_of,
    value_dtypes,
)
from decodebench.models.specs import PagePart

#: states of a page as read back from its bytes
FILLED, ZEROED, UNTOUCHED, WRONG = 0, 1, 2, 3
STATE_NAMES = ("filled", "zeroed", "untouched", "wrong")


@dataclass(frozen=True, eq=False)
class PageStates:
    """What the bytes of a group's pages say: int8 ``[layers, num_blocks]`` each, on the CPU.

    ``states``: FILLED, ZEROED, UNTOUCHED (every byte of the page still poison) or WRONG.
    ``padding``: UNTOUCHED where the bytes behind the content are still poison (or there are
    none), ZEROED where all are zero, WRONG otherwise.
    """

    states: torch.Tensor
    padding: torch.Tensor

    @property
    def padding_written(self) -> torch.Tensor:
        """bool ``[layers, num_blocks]``: bytes behind the content are no longer poison."""
        return self.padding != UNTOUCHED


def inspect_pages(
    cache: Cache, group: int, values: Values | None = None, blocks: torch.Tensor | None = None
) -> PageStates:
    """Compare every page of a group, byte for byte, with what ``values`` would have written.

    ``blocks`` (bool [num_blocks]) limits the look to some blocks, so that groups that alias the
    same bytes need not read all of them again; the others are reported as UNTOUCHED.

    FILLED wins where values are zeros themselves; a page of parts that are only ever zeroed
    (packed formats, circular buffers) is ZEROED. Every byte is read from memory about once, some
    MiB at a time; nothing of the size of the cache is allocated.
    """
    values = default_values() if values is None else values
    layers = cache.layout.groups[group].layer_names
    first = cache.layout.layer_index[layers[0]]
    shape = (len(layers), cache.layout.num_blocks_of(group))
    filled, zero, poison = (torch.ones(shape, dtype=torch.bool) for _ in range(3))
    plain = torch.zeros(shape, dtype=torch.bool)  # pages with at least one part of plain numbers
    spans = cache.spans(group)
    values.prepare(value_dtypes([spans], values), cache.device)
    look = torch.as_tensor([True] * shape[1] if blocks is None else blocks, dtype=torch.bool)
    compiled = cache.device.type == "cpu" and compiled_rows.why_not() is None
    inspect_spans, inspect_gaps = (_judge_spans, _judge_gaps) if compiled else (_inspect_spans, _inspect_gaps)
    for span, seen in zip(spans, inspect_spans(spans, values, look)):
        index = slice(span.first_layer - first, span.first_layer - first + span.view.shape[0])
        for states, found in zip((filled, zero, poison), seen):
            states[index] &= found
        plain[index] |= not span.part.zeros_only
    padding = torch.full(shape, UNTOUCHED, dtype=torch.int8)
    gaps = [list(_gaps(cache, layer)) for layer in layers]
    if any(gaps):
        zeros, poisoned = inspect_gaps(gaps, shape, look)
        padding[~poisoned] = WRONG
        padding[zeros & ~poisoned] = ZEROED
    states = torch.full(shape, WRONG, dtype=torch.int8)
    states[poison & (padding == UNTOUCHED)] = UNTOUCHED
    states[zero] = ZEROED
    states[filled & plain] = FILLED
    states[:, ~look], padding[:, ~look] = UNTOUCHED, UNTOUCHED
    return PageStates(states, padding)


# -- by C++: every byte once, compared with its content as it streams by -------------------------


def _judge_spans(
    spans: Sequence[Span], values: Values, look: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each span bool [L, num_blocks]: pages that hold exactly the values, only zeros, only poison."""
    ids = look.nonzero()[:, 0].contiguous()
    pages = []
    for span in spans:
        source = source_of(span, values)
        content: int | compiled_rows.Noise | None = source.number(span.part.dtype)
        if isinstance(source, Normal):
            content = compiled_rows.Noise(**source.window(span))
        pages.append(compiled_rows.Rows(span.bits, ids, content))
    for span, r, judged in zip(spans, pages, compiled_rows.judge(pages)):
        found = torch.zeros((span.bits.shape[0], len(look)), dtype=torch.uint8)
        found[:, ids] = judged
        zero, poison, equal = (
            (found & bit) != 0 for bit in (compiled_rows.ZERO, compiled_rows.POISON, compiled_rows.EQUAL)
        )
        if r.content is None:
            equal = _equal(span, source_of(span, values), ~(zero | poison) & look)
        yield equal, zero, poison


def _judge_gaps(
    gaps: Sequence[Sequence[torch.Tensor]], shape: tuple[int, int], look: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [L, num_blocks] each: pages whose gaps are all zero, all poison."""
    ids = look.nonzero()[:, 0].contiguous()
    pages = [(i, compiled_rows.Rows(gap[None], ids, None)) for i, layer in enumerate(gaps) for gap in layer]
    found = torch.full(shape, compiled_rows.ZERO | compiled_rows.POISON, dtype=torch.uint8)
    for (i, _), judged in zip(pages, compiled_rows.judge([r for _, r in pages])):
        found[i, ids] &= judged[0]
    return (found & compiled_rows.ZERO) != 0, (found & compiled_rows.POISON) != 0


# -- by torch: on other devices, and where no compiler is -----------------------------------------

#: bytes a thread looks at together: twice for a page's smallest and largest number, which must stay in
#: the CPU's second-level cache between the looks; once against a content, where fewer calls count for more
LOOK_BYTES = {"cpu": 512 << 10, "cuda": 64 << 20}
COMPARE_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}


def _inspect_spans(
    spans: Sequence[Span], values: Values, look: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """As ``_judge_spans``."""
    for span in spans:
        yield _inspect_span(span, source_of(span, values), look)


def _inspect_span(
    span: Span, values: Values, look: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bool [L, num_blocks] each: pages that hold exactly the values, only zeros, only poison."""
    look = look.to(span.bits.device)
    bits, number, poison = span.bits, values.number(span.part.dtype), poison_number(span.bits.itemsize)
    uniform = [0, poison] if number is None else [0, poison, number]
    # a page that begins with none of these numbers does not consist of one of them
    first = bits[:, :, 0]
    one_number = torch.isin(first, torch.tensor(uniform, dtype=first.dtype, device=first.device))
    low, high = _extremes(bits, one_number & look)
    zero, poisoned = ((low == n) & (high == n) for n in (0, poison))
    if number is not None:
        filled = (low == number) & (high == number)
    else:
        filled = _equal(span, values, ~(zero | poisoned) & look)
    return filled.cpu(), zero.cpu(), poisoned.cpu()


def _chunks(pages: torch.Tensor, row_bytes: int, sizes: dict[str, int]) -> Iterator[tuple[slice, slice]]:
    """Pieces of ``[L, num_blocks]`` of about ``sizes`` bytes that contain all of the given pages (bool)."""
    layers, blocks = pages.shape
    chunk_bytes = sizes.get(pages.device.type, sizes["cuda"])
    if pages.device.type == "cpu":
        chunk_bytes *= min(8, torch.get_num_threads())
    height = max(1, min(layers, chunk_bytes // row_bytes))
    count = max(1, chunk_bytes // (height * row_bytes))
    for top in range(0, layers, height):
        wanted = pages[top : top + height].any(0).nonzero()[:, 0] // count
        for i in wanted.unique().tolist():
            yield slice(top, min(layers, top + height)), slice(i * count, min(blocks, (i + 1) * count))


def _extremes(bits: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest element of the given pages of ``[L, num_blocks, numel]``; of others, 1 and 2."""
    low = torch.full(bits.shape[:2], 1, dtype=bits.dtype, device=bits.device)
    high = torch.full_like(low, 2)
    for chunk in _chunks(pages, bits.shape[2] * bits.itemsize, LOOK_BYTES):
        torch.amin(bits[chunk], 2, out=low[chunk])
        torch.amax(bits[chunk], 2, out=high[chunk])
    return low, high


def _equal(span: Span, values: Values, pages: torch.Tensor) -> torch.Tensor:
    """bool [L, num_blocks]: which of the given pages hold exactly the values."""
    bits = span.bits
    largest = torch.full(bits.shape[:2], 1, dtype=torch.uint8, device=bits.device)
    scratch = torch.empty(0, dtype=bits.dtype, device=bits.device)
    for layers, blocks in _chunks(pages, span.part.nbytes, COMPARE_BYTES):
        largest[layers, blocks] = 0
        for page, piece, content in values.sources(
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
            seen = largest[layers, blocks.start + page : blocks.start + page + piece.shape[1]]
            torch.maximum(seen, found, out=seen)
    return largest == 0


def _inspect_gaps(
    gaps: Sequence[Sequence[torch.Tensor]], shape: tuple[int, int], look: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``_judge_gaps``."""
    zero, poison = torch.ones(shape, dtype=torch.bool), torch.ones(shape, dtype=torch.bool)
    for i, layer in enumerate(gaps):
        for gap in layer:
            zero[i] &= (gap.amax(1) == 0).cpu()
            poison[i] &= (gap.amin(1) == POISON).cpu()
    return zero, poison


def _gaps(cache: Cache, layer: str) -> Iterator[torch.Tensor]:
    """The bytes between and behind the parts of each page: uint8 ``[num_blocks, length]`` each."""
    place = cache.page_places[layer]
    if place is None or place.pieces > 1:  # nothing between or behind the pieces of a page
        return
    page, end = cache.pages(layer), 0
    for part in sorted(cache.parts(layer), key=lambda part: part.offset):
        if part.offset > end:
            yield page[:, end : part.offset]
        end = part.offset + part.nbytes
    if page.shape[1] > end:
        yield page[:, end:]


def identify_page(cache: Cache, group: int, layer: int, block: int, values: Values) -> tuple[int, int] | None:
    """Whose content a page holds: (layer index, block) that ``values`` would have written it for.

    ``layer`` counts the group's layers from 0. None where the page holds no such content. The
    answer is the first of the cache's layers and blocks that fits, the page itself before others.
    Constants tell nothing apart: use ``Normal`` or ``Tags``.
    """
    layout = cache.layout
    name = layout.groups[group].layer_names[layer]
    part_index = next((i for i, p in enumerate(cache.parts(name)) if not p.zeros_only), None)
    if part_index is None:
        return None
    part = cache.parts(name)[part_index]
    page = cache.flat(name, part_index)[block].view(BITS[torch_dtype(part.dtype).itemsize]).cpu()
    for index, other in _candidates(cache, page, part, part_index, values, layout.layer_index[name], block):
        expected = values.expected(part, index, other, part_index).view(page.dtype)
        if torch.equal(expected, page):
            return index, other
    return None


def _candidates(
    cache: Cache, page: torch.Tensor, part: PagePart, part_index: int, values: Values, layer: int, block: int
) -> Iterator[tuple[int, int]]:
    """(layer index, block) pairs whose content may be this page, most likely first."""
    yield layer, block
    layers, blocks = len(cache.layout.layer_names), max(cache.layout.pool_num_blocks)
    if isinstance(values, Tags) and page.numel() >= 16:
        numbers = (page[:12].view(torch_dtype(part.dtype)).to(torch.float32) * 64).tolist()
        if all(1 <= number <= 8 for number in numbers):
            digits = [int(number) - 1 for number in numbers]
            other = sum(d << 3 * i for i, d in enumerate(digits[:8]))
            index = sum(d << 3 * i for i, d in enumerate(digits[8:]))
            yield index, other
    if isinstance(values, Normal):
        values.prepare([part.dtype], torch.device("cpu"))
        period = values.period(part.dtype)
        bank = values.bank(part.dtype, torch.device("cpu"))
        starts = (bank[:period] == page[0]).nonzero()[:, 0]
        for i in range(1, min(page.numel(), 64)):
            starts = starts[bank[starts + i] == page[i]]
        inverse = pow(BLOCK_STRIDE, -1, period)
        for start in starts.tolist():
            for index in range(layers):
                shift = start - index * LAYER_STRIDE - part_index * PART_STRIDE
                for other in range(shift * inverse % period, blocks, period):
                    yield index, other
