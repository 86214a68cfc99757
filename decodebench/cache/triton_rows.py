"""Triton: all rows of a step in one launch a strided view, a constant or windows of the noise bank.

A CPU writes run after run; on a GPU a launch a run would cost more than its bytes. Import this only
where Triton is installed. With ``TRITON_INTERPRET=1`` set before the import it runs on the CPU.
"""

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl

from decodebench.cache.triton_launch import Launch
from decodebench.cache.values import Window

#: elements one program writes
TILE = 4096


@triton.jit
def fill_constant(
    target_ptr, ids_ptr, number, columns, tiles, layer_stride, block_stride, TILE: tl.constexpr
):
    """Program (row × tile, layer): a tile of a row of a layer gets a number."""
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    layer = tl.program_id(1).to(tl.int64)
    block = tl.load(ids_ptr + row).to(tl.int64)
    column = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    target = target_ptr + layer * layer_stride + block * block_stride + column
    tl.store(target, tl.full((TILE,), number, target_ptr.dtype.element_ty), mask=column < columns)


# alignment is kept from the compiler: it would give a lane 16 bytes of the row and gather them from the
# bank in pieces; unaware, neighbouring lanes take neighbouring words, on both sides
@triton.jit(do_not_specialize_on_alignment=["target_ptr", "layer_stride", "block_stride"])
def fill_noise(
    target_ptr,
    ids_ptr,
    bank_ptr,
    columns,
    tiles,
    layer_stride,
    block_stride,
    shift,
    shift_of_layer,
    shift_of_block,
    period,
    EACH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row × tile, layer): a tile of a row of a layer gets a window of the bank.

    Bank and target are words of ``EACH`` elements; ``columns`` and strides count words, everything
    about the noise counts elements. A window that begins inside a word is put together from two.
    """
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    layer = tl.program_id(1).to(tl.int64)
    block = tl.load(ids_ptr + row).to(tl.int64)
    column = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    # the bank repeats its beginning behind the period: one remainder a tile, not one an element
    start = shift + layer * shift_of_layer + block * shift_of_block + tile.to(tl.int64) * (TILE * EACH)
    start = start % period
    word = bank_ptr + start // EACH + tl.arange(0, TILE)
    content = tl.load(word)
    if EACH > 1:
        bits: tl.constexpr = 32 // EACH
        inside = (start % EACH).to(tl.int32) * bits
        after = tl.load(word + 1)
        low = (content.to(tl.uint32, bitcast=True) >> inside).to(tl.int32, bitcast=True)
        high = tl.where(inside > 0, after << (32 - inside), 0)
        content = low | high
    target = target_ptr + layer * layer_stride + block * block_stride + column
    tl.store(target, content, mask=column < columns)


def launch(bits: torch.Tensor, ids: torch.Tensor, number: int | None, window: Window | None = None) -> Launch:
    """The launch that writes rows ``ids`` (integers on the device) of ``[L, num_blocks, numel]`` bits.

    ``number`` everywhere, or the ``window`` of a noise bank (``Normal.window``), which must be longer
    than its period by a tile and a word that repeat its beginning.
    """
    layers, _, columns = bits.shape
    if number is not None:
        tiles = triton.cdiv(columns, TILE)
        arguments = {
            "target_ptr": bits,
            "ids_ptr": ids,
            "number": number,
            "columns": columns,
            "tiles": tiles,
            "layer_stride": bits.stride(0),
            "block_stride": bits.stride(1),
        }
        return Launch(fill_constant, (len(ids) * tiles, layers), arguments, {"TILE": TILE})
    assert window is not None
    bank = window["bank"]
    each = _elements_a_word(bits)
    target = _as_words(bits, each)
    tiles = triton.cdiv(target.shape[2], TILE)
    arguments = {
        "target_ptr": target,
        "ids_ptr": ids,
        "bank_ptr": bank.view(target.dtype),
        "columns": target.shape[2],
        "tiles": tiles,
        "layer_stride": target.stride(0),
        "block_stride": target.stride(1),
        "shift": window["shift"],
        "shift_of_layer": window["shift_of_layer"],
        "shift_of_block": window["shift_of_block"],
        "period": window["period"],
    }
    return Launch(fill_noise, (len(ids) * tiles, layers), arguments, {"EACH": each, "TILE": TILE})


def _elements_a_word(bits: torch.Tensor) -> int:
    """Elements of four bytes, where the rows begin, lie and end at multiples of them; else one."""
    each = 4 // bits.itemsize
    at = (bits.storage_offset(), bits.stride(0), bits.stride(1), bits.shape[2])
    return each if each > 1 and not any(number % each for number in at) else 1


def _as_words(bits: torch.Tensor, each: int) -> torch.Tensor:
    """``[L, num_blocks, words]`` over the same bytes."""
    if each == 1:
        return bits
    words = torch.empty(0, dtype=torch.int32, device=bits.device)
    shape = (*bits.shape[:2], bits.shape[2] // each)
    strides = (bits.stride(0) // each, bits.stride(1) // each, 1)
    if bits.device.type == "meta":
        return torch.empty_strided(shape, strides, dtype=torch.int32, device="meta")
    return words.set_(bits.untyped_storage(), bits.storage_offset() // each, shape, strides)


def device_rows(rows: list[int], device: torch.device) -> torch.Tensor:
    """Block ids on the device, through pinned memory where it has its own."""
    ids = torch.tensor(rows, dtype=torch.int64)
    return ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids.to(device)


def write(bits: torch.Tensor, ids: list[int] | torch.Tensor, number: int | None, **window: object) -> None:
    """Write rows of ``[L, num_blocks, numel]`` bits in one launch; see ``launch``."""
    ids = ids if isinstance(ids, torch.Tensor) else device_rows(ids, bits.device)
    launch(bits, ids, number, cast(Window, window) if window else None).run()
