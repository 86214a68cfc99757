"""Values and how they are written: encodings, noise, runs of rows, and reading them back.

A fill writes every byte once: sorted block ids become runs, and a run is written for all layers
of a group through one strided view. Values are encoded in each part's own dtype and moved as
bits. Everything is checked before the first byte is written.

**Noise.** Normal values cost what a copy costs. One periodic sequence a dtype is drawn once (the
*bank*); element i of the row of (layer index l, block b, part p) is

    noise[(b * BLOCK_STRIDE + l * LAYER_STRIDE + p * PART_STRIDE + i) mod period]

so the content depends on layer, block and part alone and can be verified exactly later. Rows are
shifted windows of one sequence, not independent draws: the rows of neighbouring blocks overlap,
shifted by an odd number of elements. Up to 132 layers, two rows of one part have the same content
only if their blocks are at least ``31 * (period // BLOCK_STRIDE)`` apart (more than 47,000 blocks
with the default bank in bfloat16, 23,000 in float32); with more layers, 7 times instead of 31.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache as memoize
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from types import ModuleType

import torch

from decodebench.cache import BITS, POISON, Cache, Span, torch_dtype
from decodebench.layout import KVCacheConfig
from decodebench.specs import DecodebenchError, PagePart, cdiv

#: states of a row as read back from its bytes
FILLED, ZEROED, UNTOUCHED, WRONG = 0, 1, 2, 3
STATE_NAMES = ("filled", "zeroed", "untouched", "wrong")

#: elements between the windows of neighbouring blocks: small, so that they overlap in the CPU's caches
BLOCK_STRIDE = 4099
LAYER_STRIDE = 31
PART_STRIDE = 1_299_709

#: bytes of all noise banks of one ``Normal`` together, at most
MAX_BANK_BYTES = 64 << 20


class FillRefused(DecodebenchError):
    """A fill that would write wrong rows or wrong values; nothing was written."""


class FillFailed(DecodebenchError):
    """A fill that broke on its way; ``report`` says what was written until then."""

    def __init__(self, message: str, report: FillReport) -> None:
        super().__init__(message)
        self.report = report


@dataclass
class FillReport:
    """What a fill wrote.

    ``rows[g]``: rows written in group g (one row = one block of all the group's layers);
    ``block_ids[g]``: which.
    ``bytes_needed``: bytes of the parts of all rows asked for, each once; ``bytes_zeroed`` of them
    hold no plain numbers and were zeroed. ``seconds`` includes waiting for the device,
    ``prepare_seconds`` is checking and drawing the noise bank (once per ``Values``).
    """

    rows: list[int] = field(default_factory=list)
    block_ids: list[tuple[int, ...]] = field(default_factory=list, repr=False)
    bytes_needed: int = 0
    bytes_written: int = 0
    bytes_zeroed: int = 0
    writes: int = 0
    seconds: float = 0.0
    prepare_seconds: float = 0.0

    def count(self, nbytes: int, zeroed: bool) -> None:
        """One write of so many bytes."""
        self.writes += 1
        self.bytes_written += nbytes
        self.bytes_zeroed += nbytes if zeroed else 0


# -- values -------------------------------------------------------------------------------------


@memoize
def encode(value: float, dtype: str) -> int:
    """The bits of a number in a dtype, clamped to its finite range, as an integer of the same width."""
    type_ = torch_dtype(dtype)
    if not type_.is_floating_point:
        raise FillRefused(f"value {value} for dtype {dtype}: only floating dtypes hold plain numbers")
    if not isfinite(value):
        raise FillRefused(f"fill value {value}: must be finite, or decode computes NaN")
    finite = torch.finfo(type_)
    number = torch.tensor(min(max(value, finite.min), finite.max), dtype=torch.float64)
    if type_.itemsize < 4:
        number = number.to(torch.float32)
    return number.to(type_).view(BITS[type_.itemsize]).item()


def _poison_number(itemsize: int) -> int:
    """The poison of a whole element as an integer of ``BITS[itemsize]`` (only bytes are unsigned)."""
    return POISON if itemsize == 1 else -1


class Values:
    """What rows are filled with. Subclasses yield the content of rows as bits.

    ``sources(target, dtype, layer, block, step, part)``: for a target ``[L, n, numel]`` of bits,
    whose rows are layers ``layer + j`` and blocks ``block + k * step``, yields (first row k, piece
    of the target ``[L, k', ...]``, its content: an int, or a tensor that broadcasts to the piece).
    """

    #: whether packed formats and circular buffers take these values too (they are zeroed otherwise)
    raw_bytes = False

    def number(self, dtype: str) -> int | None:
        """The bits that every element holds, or None where elements differ."""
        return None

    def prepare(self, dtypes: Iterable[str], device: torch.device) -> None:
        """Everything that can be refused or takes time, before the first byte is written."""

    def sources(
        self, target: torch.Tensor, dtype: str, layer: int, block: int, step: int, part: int
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | int]]:
        yield 0, target, self.number(dtype)

    def expected(
        self, part: PagePart, layer_index: int, block: int, part_index: int = 0, device: str = "cpu"
    ) -> torch.Tensor:
        """The content of one row, typed ``[numel]``."""
        values = ZEROS if part.zeros_only and not self.raw_bytes else self
        values.prepare([part.dtype], torch.device(device))
        type_ = torch_dtype(part.dtype)
        row = torch.empty((1, 1, part.numel), dtype=BITS[type_.itemsize], device=device)
        for _, piece, content in values.sources(row, part.dtype, layer_index, block, 1, part_index):
            _write(piece, content)
        return row[0, 0].view(type_)


@dataclass(frozen=True)
class Constant(Values):
    """One number everywhere."""

    mean: float = 0.015

    def __post_init__(self) -> None:
        if not isfinite(self.mean):
            raise FillRefused(f"fill value {self.mean}: must be finite, or decode computes NaN")

    def prepare(self, dtypes, device):
        for dtype in dtypes:
            encode(self.mean, dtype)

    def number(self, dtype):
        return encode(self.mean, dtype)


@dataclass(frozen=True)
class Zeros(Values):
    """Zero bytes."""

    raw_bytes = True

    def number(self, dtype):
        return 0


ZEROS = Zeros()


@dataclass(frozen=True)
class Poison(Values):
    """The pattern of unfilled memory: NaN in every floating dtype."""

    raw_bytes = True

    def number(self, dtype):
        return _poison_number(torch_dtype(dtype).itemsize)


@dataclass(frozen=True)
class Normal(Values):
    """Normally distributed numbers, reproducible from the seed (see the module's text).

    ``bank_bytes`` is the size of the bank of each dtype; all banks of the dtypes of a cache
    together may take ``MAX_BANK_BYTES``.
    """

    mean: float = 0.015
    std: float = 0.02
    seed: int = 0
    bank_bytes: int = 16 << 20
    _banks: dict = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isfinite(self.mean) or not isfinite(self.std):
            raise FillRefused(f"normal values with mean {self.mean} and std {self.std}: both must be finite")
        if self.std < 0:
            raise FillRefused(f"normal values with std {self.std}: a spread cannot be negative")
        if not 1 << 20 <= self.bank_bytes <= MAX_BANK_BYTES:
            raise FillRefused(
                f"a noise bank of {self.bank_bytes} bytes: allowed are 1 MiB to {MAX_BANK_BYTES >> 20} MiB"
            )

    def period(self, dtype: str) -> int:
        """Elements after which the noise of a dtype repeats."""
        elements = self.bank_bytes // torch_dtype(dtype).itemsize
        # one more than a multiple of BLOCK_STRIDE: each time around, windows lie one element further
        return elements * 3 // 4 // BLOCK_STRIDE * BLOCK_STRIDE + 1

    def prepare(self, dtypes, device):
        device = torch.device(device)
        wanted = {(dtype, device) for dtype in dtypes}
        if len(wanted) * self.bank_bytes > MAX_BANK_BYTES:
            raise FillRefused(
                f"noise banks of {self.bank_bytes >> 20} MiB for {len(wanted)} dtypes exceed "
                f"{MAX_BANK_BYTES >> 20} MiB: give a smaller bank_bytes"
            )
        for dtype, _ in wanted:
            self.bank(dtype, device)

    def bank(self, dtype: str, device: torch.device) -> torch.Tensor:
        """One period of noise and the beginning of the next, as bits, so that windows need no wrapping."""
        key = (dtype, device.type, device.index)
        if key not in self._banks:
            encode(self.mean, dtype)  # refuses dtypes that hold no numbers
            type_, period = torch_dtype(dtype), self.period(dtype)
            bank = torch.empty(self.bank_bytes // type_.itemsize, dtype=type_)
            generator = torch.Generator().manual_seed(self.seed)
            finite = torch.finfo(type_)
            for chunk in bank[:period].split(1 << 20):  # drawn in float32, in pieces: no second bank
                draw = torch.randn(chunk.numel(), generator=generator).mul_(self.std).add_(self.mean)
                chunk.copy_(draw.clamp_(finite.min, finite.max))
            bits = bank.view(BITS[type_.itemsize])
            bits[period:] = bits[:bits.numel() - period]
            self._banks[key] = bits.to(device)
        return self._banks[key]

    def shift(self, dtype: str, layer: int, block: int, part: int = 0) -> int:
        """Where in the noise the row of (layer index, block, part) starts."""
        return (block * BLOCK_STRIDE + layer * LAYER_STRIDE + part * PART_STRIDE) % self.period(dtype)

    def window(self, span: Span) -> dict[str, object]:
        """The rule of the module's text for the rows of a span, as the Triton kernel takes it."""
        dtype = span.part.dtype
        return {
            "bank": self.bank(dtype, span.bits.device), "period": self.period(dtype),
            "shift": span.first_layer * LAYER_STRIDE + span.part_index * PART_STRIDE,
            "shift_of_layer": LAYER_STRIDE, "shift_of_block": BLOCK_STRIDE,
        }  # fmt: skip

    def sources(self, target, dtype, layer, block, step, part):
        bank, (layers, rows, columns) = self.bank(dtype, target.device), target.shape
        spread = (layers - 1) * LAYER_STRIDE
        width = bank.numel() - self.period(dtype) - spread  # fits behind every start
        if width < 1:
            raise FillRefused(f"a noise bank of {self.bank_bytes} bytes is too small for {layers} layers")
        for column in range(0, columns, width):
            part_width, row = min(width, columns - column), 0
            while row < rows:
                start = (self.shift(dtype, layer, block + row * step, part) + column) % self.period(dtype)
                room = bank.numel() - start - spread - part_width
                count = min(rows - row, room // (BLOCK_STRIDE * step) + 1)
                shape = (layers, count, part_width)
                window = bank.as_strided(shape, (LAYER_STRIDE, BLOCK_STRIDE * step, 1), start)
                yield row, target[:, row:row + count, column:column + part_width], window
                row += count


@dataclass(frozen=True)
class Tags(Values):
    """Numbers that say exactly which layer, block and part a row was written for.

    Every 16 elements spell, in digits of base 8 that each floating dtype holds exactly: 8 digits
    of the block, 4 of the layer index, 1 of the part, 3 fixed; digit d is the number (d + 1) / 64.
    """

    def prepare(self, dtypes, device):
        for dtype in dtypes:
            encode(0.0, dtype)

    def sources(self, target, dtype, layer, block, step, part):
        layers, rows, columns = target.shape
        digits = torch.zeros((layers, rows, 16), dtype=torch.int64, device=target.device)
        blocks = torch.arange(rows, device=target.device) * step + block
        indices = torch.arange(layers, device=target.device) + layer
        for i in range(8):
            digits[:, :, i] = blocks >> 3 * i & 7
        for i in range(4):
            digits[:, :, 8 + i] = (indices >> 3 * i & 7)[:, None]
        digits[:, :, 12] = part & 7
        digits[:, :, 13:] = torch.tensor([1, 6, 3], device=target.device)
        bits = ((digits + 1).to(torch.float32) / 64).to(torch_dtype(dtype)).view(target.dtype)
        width = min(cdiv(columns, 16), 64) * 16  # moved in larger pieces than one tag
        bits, whole = bits.repeat(1, 1, width // 16), columns // width * width
        if whole:
            yield 0, target[:, :, :whole].unflatten(2, (-1, width)), bits[:, :, None]
        if whole < columns:
            yield 0, target[:, :, whole:], bits[:, :, :columns - whole]


# -- rows ---------------------------------------------------------------------------------------


def merge_rows(tables: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The block ids of many requests as sorted unique rows.

    Equal tables are looked at once: requests that share their rows cost a hash each.
    """
    merged: set[int] = set()
    for table in {tuple(table) for table in tables}:
        merged.update(table)
    return tuple(sorted(merged))


def runs(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Sorted unique rows as (start, count, step): equally spaced rows are written at once."""
    found, i = [], 0
    while i < len(rows):
        step = rows[i + 1] - rows[i] if i + 1 < len(rows) else 1
        j = i + 1
        while j < len(rows) and rows[j] - rows[j - 1] == step:
            j += 1
        found.append((rows[i], j - i, step))
        i = j
    return found


def check_rows(
    layout: KVCacheConfig, rows_by_group: Sequence[Sequence[int]], allow_null_block: bool = False
) -> None:
    """Refuse rows that do not exist, are the null block, repeat, or are out of order."""
    if len(rows_by_group) != len(layout.groups):
        raise FillRefused(f"rows for {len(rows_by_group)} groups, but the layout has {len(layout.groups)}")
    for group, rows in enumerate(rows_by_group):
        limit = layout.num_blocks_of(group)
        name = f"group {group} ({layout.groups[group].kind}, first layer {layout.groups[group].layer_names[0]!r})"
        previous = -1
        for row in rows:
            if not 0 <= row < limit:
                raise FillRefused(f"{name}: block id {row} is out of range, valid ids are 1 to {limit - 1}")
            if row <= previous:
                raise FillRefused(f"{name}: block id {row} after {previous}: rows must be sorted and unique (merge_rows)")
            previous = row
        if len(rows) and rows[0] == 0 and not allow_null_block:
            raise FillRefused(f"{name}: block id 0 is the null block, a placeholder that holds no data: leave it out")


def fill_rows(
    cache: Cache,
    rows_by_group: Sequence[Sequence[int]],
    values: Values | None = None,
    *,
    allow_null_block: bool = False,
) -> FillReport:
    """Write the rows of a step: ``rows_by_group[g]`` are sorted unique block ids of group g.

    All layers of a group are written. Parts that hold no plain numbers (packed formats, circular
    buffers) are zeroed. Raises ``FillRefused`` before anything is written, ``FillFailed`` (with
    the report so far) if a write breaks.
    """
    values = Constant() if values is None else values
    began = time.perf_counter()
    rows_by_group = [list(rows) for rows in rows_by_group]
    check_rows(cache.layout, rows_by_group, allow_null_block)
    spans = [cache.spans(group) if rows else [] for group, rows in enumerate(rows_by_group)]
    values.prepare(_value_dtypes(spans, values), cache.device)
    report = FillReport(rows=[0] * len(rows_by_group), block_ids=[()] * len(rows_by_group))
    for group_spans, rows in zip(spans, rows_by_group):
        report.bytes_needed += len(rows) * sum(s.view.shape[0] * s.part.nbytes for s in group_spans)
    started = time.perf_counter()
    report.prepare_seconds = started - began
    try:
        for group, (group_spans, rows) in enumerate(zip(spans, rows_by_group)):
            group_runs = runs(rows)
            for span in group_spans:
                _fill_span(span, group_runs, values, report)
            report.rows[group], report.block_ids[group] = len(rows), tuple(rows)
    except RuntimeError as error:
        raise FillFailed(f"the fill broke after {report.bytes_written} bytes: {error}", report) from error
    finally:
        if cache.device.type == "cuda":
            torch.cuda.synchronize(cache.device)
        report.seconds = time.perf_counter() - started
    return report


def _value_dtypes(spans: Iterable[Iterable[Span]], values: Values) -> set[str]:
    """The dtypes that plain numbers are written in."""
    if values.raw_bytes:
        return set()
    return {s.part.dtype for group in spans for s in group if not s.part.zeros_only}


def _fill_span(span: Span, group_runs: list[tuple[int, int, int]], values: Values, report: FillReport) -> None:
    """Write one part of some layers of a group, run after run."""
    source = ZEROS if span.part.zeros_only and not values.raw_bytes else values
    number = source.number(span.part.dtype)
    zeroed = span.part.zeros_only and number == 0
    rows = sum(count for _, count, _ in group_runs)
    ids = [start + i * step for start, count, step in group_runs for i in range(count)]
    kernel = _kernel(span.bits.device)
    if kernel is not None and (number is not None or isinstance(source, Normal)):
        noise = source.window(span) if number is None else {}
        kernel.write(span.bits, ids, number, **noise)
        report.count(rows * span.bits.shape[0] * span.part.nbytes, zeroed)
        return
    if number is not None and _indexed_is_faster(span, rows, len(group_runs)):
        span.bits.index_fill_(1, torch.tensor(ids, device=span.bits.device), number)
        report.count(rows * span.bits.shape[0] * span.part.nbytes, zeroed)
        return
    for start, count, step in group_runs:
        target = span.bits[:, start:start + (count - 1) * step + 1:step]
        for _, piece, content in source.sources(
            target, span.part.dtype, span.first_layer, start, step, span.part_index
        ):
            _write(piece, content)
            report.count(piece.numel() * piece.itemsize, zeroed)


@memoize
def _kernel(device: torch.device) -> ModuleType | None:
    """The Triton kernel's module where it can be used: one launch a view, whatever the rows."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    return import_module("decodebench.kernels.rows")


def _indexed_is_faster(span: Span, rows: int, num_runs: int) -> bool:
    """Whether one indexed write beats many small ones.

    An indexed write reaches about 0.6 of what a strided one does on a CPU, but costs one call; a
    call costs a few microseconds, in which a CPU writes some 100 KiB and a GPU some 10 MiB.
    """
    small = (96 << 10) if span.bits.device.type == "cpu" else (8 << 20)
    return num_runs > 1 and rows * span.bits.shape[0] * span.part.nbytes < num_runs * small


def _write(piece: torch.Tensor, content: torch.Tensor | int) -> None:
    if isinstance(content, int):
        piece.fill_(content)
    else:
        piece.copy_(content)


# -- reading back -------------------------------------------------------------------------------


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


def inspect_rows(cache: Cache, group: int, values: Values | None = None) -> RowStates:
    """Compare every row of a group, byte for byte, with what ``values`` would have written.

    FILLED wins where values are zeros themselves; a row of parts that are only ever zeroed
    (packed formats, circular buffers) is ZEROED. Every byte is read from memory about once, a
    MiB at a time; nothing of the size of the cache is allocated.
    """
    values = Constant() if values is None else values
    layers = cache.layout.groups[group].layer_names
    first = cache.layout.layer_index[layers[0]]
    shape = (len(layers), cache.layout.num_blocks_of(group))
    filled, zero, poison, plain = (torch.ones(shape, dtype=torch.bool) for _ in range(4))
    spans = cache.spans(group)
    values.prepare(_value_dtypes([spans], values), cache.device)
    for span in spans:
        index = slice(span.first_layer - first, span.first_layer - first + span.view.shape[0])
        source = ZEROS if span.part.zeros_only and not values.raw_bytes else values
        for states, found in zip((filled, zero, poison), _inspect_span(span, source)):
            states[index] &= found
        plain[index] &= not span.part.zeros_only
    padding = _inspect_padding(cache, layers, shape)
    states = torch.full(shape, WRONG, dtype=torch.int8)
    states[poison & (padding == UNTOUCHED)] = UNTOUCHED
    states[zero] = ZEROED
    states[filled & plain] = FILLED
    return RowStates(states, padding)


#: bytes looked at together: on a CPU they stay in its caches between two looks
CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}


def _inspect_span(span: Span, values: Values) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bool [L, num_blocks] each: rows that hold exactly the values, only zeros, only poison."""
    bits, number, poison = span.bits, values.number(span.part.dtype), _poison_number(span.bits.itemsize)
    uniform = [0, poison] if number is None else [0, poison, number]
    # a row that begins with none of these numbers does not consist of one of them
    first = bits[:, :, 0]
    low, high = _extremes(bits, torch.isin(first, torch.tensor(uniform, dtype=first.dtype, device=first.device)))
    zero, poisoned = ((low == n) & (high == n) for n in (0, poison))
    if number is not None:
        filled = (low == number) & (high == number)
    else:
        filled = _equal(span, values, ~(zero | poisoned))
    return filled.cpu(), zero.cpu(), poisoned.cpu()


def _chunks(rows: torch.Tensor, row_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Pieces of ``[L, num_blocks]`` of about ``CHUNK_BYTES`` that contain all of the given rows (bool)."""
    layers, blocks = rows.shape
    chunk_bytes = CHUNK_BYTES.get(rows.device.type, CHUNK_BYTES["cuda"])
    height = max(1, min(layers, chunk_bytes // row_bytes))
    count = max(1, chunk_bytes // (height * row_bytes))
    for top in range(0, layers, height):
        wanted = rows[top:top + height].any(0).nonzero()[:, 0] // count
        for i in wanted.unique().tolist():
            yield slice(top, min(layers, top + height)), slice(i * count, min(blocks, (i + 1) * count))


def _extremes(bits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest element of the given rows of ``[L, num_blocks, numel]``; of others, 1 and 2."""
    low = torch.full(bits.shape[:2], 1, dtype=bits.dtype, device=bits.device)
    high = torch.full_like(low, 2)
    for chunk in _chunks(rows, bits.shape[2] * bits.itemsize):
        torch.amin(bits[chunk], 2, out=low[chunk])
        torch.amax(bits[chunk], 2, out=high[chunk])
    return low, high


def _equal(span: Span, values: Values, rows: torch.Tensor) -> torch.Tensor:
    """bool [L, num_blocks]: which of the given rows hold exactly the values."""
    bits = span.bits
    largest = torch.full(bits.shape[:2], 1, dtype=torch.uint8, device=bits.device)
    scratch = torch.empty(0, dtype=bits.dtype, device=bits.device)
    for layers, blocks in _chunks(rows, span.part.nbytes):
        largest[layers, blocks] = 0
        for row, piece, content in values.sources(
            bits[layers, blocks], span.part.dtype, span.first_layer + layers.start, blocks.start, 1, span.part_index
        ):
            difference = scratch.resize_(piece.shape)
            torch.bitwise_xor(piece, content, out=difference)
            # bytes are unsigned: the largest is 0 only if all are
            found = difference.view(torch.uint8).flatten(2).amax(2)
            seen = largest[layers, blocks.start + row:blocks.start + row + piece.shape[1]]
            torch.maximum(seen, found, out=seen)
    return largest == 0


def _inspect_padding(cache: Cache, layers: Sequence[str], shape: tuple[int, int]) -> torch.Tensor:
    """int8 [L, num_blocks]: what the bytes between and behind the parts of each page hold."""
    states = torch.full(shape, UNTOUCHED, dtype=torch.int8)
    for i, layer in enumerate(layers):
        if cache.page_places[layer] is None:
            continue
        page, end, gaps = cache.pages(layer), 0, []
        for part in sorted(cache.parts(layer), key=lambda part: part.offset):
            gaps.append(page[:, end:part.offset])
            end = part.offset + part.nbytes
        gaps = [gap for gap in (*gaps, page[:, end:]) if gap.shape[1]]
        if not gaps:
            continue
        lows, highs = (torch.stack(side) for side in zip(*((gap.amin(1), gap.amax(1)) for gap in gaps)))
        low, high = lows.amin(0).cpu(), highs.amax(0).cpu()
        states[i, (low != POISON)] = WRONG
        states[i, high == 0] = ZEROED
    return states


def identify_row(
    cache: Cache, group: int, layer: int, block: int, values: Values
) -> tuple[int, int] | None:
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
