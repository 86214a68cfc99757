"""All rows of a step written, or read back and judged, by one call of ``compiled_rows.cpp``.

A call is a list of ``Rows``: one part of some layers, the blocks of it, and the content that they get or
are compared with. Where no compiler is (``why_not``), ``write`` and ``readback`` go on in torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from decodebench.cache import compiled

SOURCE = Path(__file__).with_name("compiled_rows.cpp")

#: what ``judge`` may find of a row: every byte zero, every byte poison, every byte as asked for
ZERO, POISON, EQUAL = 1, 2, 4


@dataclass(frozen=True)
class Noise:
    """Windows of a bank: element e of layer j, block b is ``bank[(shift + j*layer + b*block + e) % period]``.

    Behind ``period`` the bank repeats its beginning.
    """

    bank: torch.Tensor
    period: int
    shift: int
    shift_of_layer: int
    shift_of_block: int


@dataclass(frozen=True)
class Rows:
    """Blocks ``ids`` (int64, contiguous) of ``bits`` [L, num_blocks, numel], contiguous inside a row.

    ``content``: the bits of every element, or ``Noise``; None where nothing can equal it.
    """

    bits: torch.Tensor
    ids: torch.Tensor
    content: int | Noise | None


def why_not() -> str | None:
    """Why these kernels cannot run here, or None where they can."""
    return compiled.why_not(SOURCE)


def write(rows: Sequence[Rows]) -> None:
    """Write the content of all rows, past the caches, on torch's number of threads."""
    compiled.library(SOURCE).write_rows(_described(rows, [None] * len(rows)), ctypes.c_int64(len(rows)))


def judge(rows: Sequence[Rows]) -> list[torch.Tensor]:
    """uint8 ``[L, len(ids)]`` for each of ``rows``: which of ``ZERO``, ``POISON``, ``EQUAL`` every byte is.

    Every byte is read once at most; nothing of the size of the cache is allocated.
    """
    found = []
    for r in rows:
        possible = ZERO | POISON | (0 if r.content is None else EQUAL)
        found.append(torch.full((r.bits.shape[0], len(r.ids)), possible, dtype=torch.uint8))
    compiled.library(SOURCE).judge_rows(_described(rows, found), ctypes.c_int64(len(rows)))
    return found


class _Rows(ctypes.Structure):
    """``Rows`` of ``compiled_rows.cpp``, field by field."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("layers", ctypes.c_int64),
        ("layer_stride", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("num_ids", ctypes.c_int64),
        ("itemsize", ctypes.c_int64),
        ("pattern", ctypes.c_uint64),
        ("bank", ctypes.c_void_p),
        ("bank_elements", ctypes.c_int64),
        ("period", ctypes.c_int64),
        ("shift", ctypes.c_int64),
        ("layer_shift", ctypes.c_int64),
        ("block_shift", ctypes.c_int64),
        ("found", ctypes.c_void_p),
    )


def _described(rows: Sequence[Rows], found: Sequence[torch.Tensor | None]) -> ctypes.Array[_Rows]:
    described = (_Rows * len(rows))()
    for facts, r, judged in zip(described, rows, found):
        size = r.bits.itemsize
        if r.bits.device.type != "cpu" or r.bits.stride(2) != 1 or r.ids.dtype != torch.int64:
            raise ValueError(f"rows of {r.bits.dtype} {tuple(r.bits.shape)}: not for the compiled kernels")
        facts.base = r.bits.data_ptr()
        facts.layers, facts.bytes, facts.itemsize = r.bits.shape[0], r.bits.shape[2] * size, size
        facts.layer_stride, facts.block_stride = r.bits.stride(0) * size, r.bits.stride(1) * size
        facts.ids, facts.num_ids = r.ids.data_ptr(), len(r.ids)
        facts.period = 1
        if isinstance(r.content, int):
            facts.pattern = _repeated(r.content, size)
        elif r.content is not None:
            facts.bank, facts.bank_elements = r.content.bank.data_ptr(), len(r.content.bank)
            facts.period, facts.shift = r.content.period, r.content.shift
            facts.layer_shift, facts.block_shift = r.content.shift_of_layer, r.content.shift_of_block
        if judged is not None:
            facts.found = judged.data_ptr()
    return described


def _repeated(number: int, size: int) -> int:
    """The bits of an element side by side in 8 bytes."""
    element = number % (1 << 8 * size)
    return sum(element << 8 * size * i for i in range(8 // size))
