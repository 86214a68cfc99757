"""What rows are filled with: numbers encoded in each part's own dtype, and noise that costs a copy.

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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache as memoize
from math import isfinite
from typing import TypedDict

import torch

from decodebench.cache.tensors import BITS, POISON, Span, torch_dtype
from decodebench.errors import DecodebenchError
from decodebench.models.specs import PagePart, cdiv

#: elements between the windows of neighbouring blocks: small, so that they overlap in the CPU's caches
BLOCK_STRIDE = 4099
LAYER_STRIDE = 31
PART_STRIDE = 1_299_709

#: bytes of all noise banks of one ``Normal`` together, at most
MAX_BANK_BYTES = 64 << 20


class FillRefused(DecodebenchError):
    """A fill that would write wrong rows or wrong values; nothing was written."""


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
    return int(number.to(type_).view(BITS[type_.itemsize]).item())


def poison_number(itemsize: int) -> int:
    """The poison of a whole element as an integer of ``BITS[itemsize]`` (only bytes are unsigned)."""
    return POISON if itemsize == 1 else -1


def put(piece: torch.Tensor, content: torch.Tensor | int) -> None:
    """Write one piece that ``Values.sources`` yields."""
    if isinstance(content, int):
        piece.fill_(content)
    else:
        piece.copy_(content)


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
        """The content of rows as bits, piece by piece (see the class)."""
        number = self.number(dtype)
        assert number is not None  # values that differ bring sources of their own
        yield 0, target, number

    def expected(
        self,
        part: PagePart,
        layer_index: int,
        block: int,
        part_index: int = 0,
        device: str | torch.device = "cpu",
    ) -> torch.Tensor:
        """The content of one row, typed ``[numel]``."""
        values = ZEROS if part.zeros_only and not self.raw_bytes else self
        values.prepare([part.dtype], torch.device(device))
        type_ = torch_dtype(part.dtype)
        row = torch.empty((1, 1, part.numel), dtype=BITS[type_.itemsize], device=device)
        for _, piece, content in values.sources(row, part.dtype, layer_index, block, 1, part_index):
            put(piece, content)
        return row[0, 0].view(type_)


@dataclass(frozen=True)
class Constant(Values):
    """One number everywhere."""

    mean: float = 0.015

    def __post_init__(self) -> None:
        if not isfinite(self.mean):
            raise FillRefused(f"fill value {self.mean}: must be finite, or decode computes NaN")

    def prepare(self, dtypes: Iterable[str], device: torch.device) -> None:
        for dtype in dtypes:
            if self.mean and not encode(self.mean, dtype):
                raise FillRefused(
                    f"fill value {self.mean} becomes 0 in {dtype}: take a larger one, or Zeros() if zeros are meant"
                )

    def number(self, dtype: str) -> int:
        return encode(self.mean, dtype)


@dataclass(frozen=True)
class Zeros(Values):
    """Zero bytes."""

    raw_bytes = True

    def number(self, dtype: str) -> int:
        return 0


ZEROS = Zeros()


@dataclass(frozen=True)
class Poison(Values):
    """The pattern of unfilled memory: NaN in every floating dtype."""

    raw_bytes = True

    def number(self, dtype: str) -> int:
        return poison_number(torch_dtype(dtype).itemsize)


class Window(TypedDict):
    """Where in a noise bank the rows of a span begin: element e of layer j, block b is
    ``bank[(shift + j * shift_of_layer + b * shift_of_block + e) % period]``.
    """

    bank: torch.Tensor
    period: int
    shift: int
    shift_of_layer: int
    shift_of_block: int


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

    def prepare(self, dtypes: Iterable[str], device: torch.device) -> None:
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
            bits[period:] = bits[: bits.numel() - period]
            self._banks[key] = bits.to(device)
        return self._banks[key]

    def shift(self, dtype: str, layer: int, block: int, part: int = 0) -> int:
        """Where in the noise the row of (layer index, block, part) starts."""
        return (block * BLOCK_STRIDE + layer * LAYER_STRIDE + part * PART_STRIDE) % self.period(dtype)

    def window(self, span: Span) -> Window:
        """The rule of the module's text for the rows of a span, as the kernels take it."""
        dtype = span.part.dtype
        return {
            "bank": self.bank(dtype, span.bits.device),
            "period": self.period(dtype),
            "shift": span.first_layer * LAYER_STRIDE + span.part_index * PART_STRIDE,
            "shift_of_layer": LAYER_STRIDE,
            "shift_of_block": BLOCK_STRIDE,
        }

    def sources(
        self, target: torch.Tensor, dtype: str, layer: int, block: int, step: int, part: int
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | int]]:
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
                yield row, target[:, row : row + count, column : column + part_width], window
                row += count


@dataclass(frozen=True)
class Tags(Values):
    """Numbers that say exactly which layer, block and part a row was written for.

    Every 16 elements spell, in digits of base 8 that each floating dtype holds exactly: 8 digits
    of the block, 4 of the layer index, 1 of the part, 3 fixed; digit d is the number (d + 1) / 64.
    """

    def prepare(self, dtypes: Iterable[str], device: torch.device) -> None:
        for dtype in dtypes:
            encode(0.0, dtype)

    def sources(
        self, target: torch.Tensor, dtype: str, layer: int, block: int, step: int, part: int
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | int]]:
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
            yield 0, target[:, :, whole:], bits[:, :, : columns - whole]


def source_of(span: Span, values: Values) -> Values:
    """What a span is filled with: packed formats and circular buffers hold no plain numbers and get zeros."""
    return ZEROS if span.part.zeros_only and not values.raw_bytes else values


def value_dtypes(spans: Iterable[Iterable[Span]], values: Values) -> set[str]:
    """The dtypes that plain numbers are written in."""
    if values.raw_bytes:
        return set()
    return {s.part.dtype for group in spans for s in group if not s.part.zeros_only}


def default_values(startup_fill: bool = False) -> Values:
    """What every function fills with, and looks for, where nothing is said: normal values.

    Their content tells every layer and block apart. At startup groups are written over each other, so
    that only a constant is found again in all of them.
    """
    return Constant() if startup_fill else Normal()
