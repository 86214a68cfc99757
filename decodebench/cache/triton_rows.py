"""Triton: all rows of a step in one launch a strided view, a constant or windows of the noise bank.

A CPU writes run after run; on a GPU a launch a run would cost more than its bytes. Import this only
where Triton is installed. With ``TRITON_INTERPRET=1`` set before the import it runs on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: elements one program writes
TILE = 4096


@triton.jit
def fill_kernel(
    target_ptr,
    ids_ptr,
    bank_ptr,
    number,
    columns,
    tiles,
    layer_stride,
    block_stride,
    shift,
    shift_of_layer,
    shift_of_block,
    period,
    NOISE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row × tile, layer): a tile of a row of a layer gets a number, or a window of the bank."""
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    layer = tl.program_id(1).to(tl.int64)
    block = tl.load(ids_ptr + row)
    column = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    target = target_ptr + layer * layer_stride + block * block_stride + column
    if NOISE:
        # the bank repeats its beginning behind the period: one remainder a tile, not one an element
        start = (shift + layer * shift_of_layer + block * shift_of_block + tile.to(tl.int64) * TILE) % period
        content = tl.load(bank_ptr + start + tl.arange(0, TILE))
    else:
        content = tl.full((TILE,), number, target_ptr.dtype.element_ty)
    tl.store(target, content, mask=column < columns)


def write(
    bits: torch.Tensor,
    ids: Sequence[int],
    number: int | None,
    *,
    bank: torch.Tensor | None = None,
    period: int = 1,
    shift: int = 0,
    shift_of_layer: int = 0,
    shift_of_block: int = 0,
) -> None:
    """Write rows ``ids`` of ``[L, num_blocks, numel]`` bits: ``number``, or windows of the bank.

    The bank must be longer than ``period`` by at least ``TILE`` elements that repeat its beginning.
    """
    layers, _, columns = bits.shape
    tiles = triton.cdiv(columns, TILE)
    rows = torch.tensor(ids, dtype=torch.int64, device=bits.device)
    noise = number is None
    fill_kernel[(len(ids) * tiles, layers)](
        bits,
        rows,
        bank if noise else bits,
        0 if noise else number,
        columns,
        tiles,
        bits.stride(0),
        bits.stride(1),
        shift,
        shift_of_layer,
        shift_of_block,
        period,
        NOISE=noise,
        TILE=TILE,
    )
