"""The ``triton`` backend: split-KV paged attention and state updates, any block size and strides.

Import this only where Triton is installed. On a GPU the kernels run; with ``TRITON_INTERPRET=1`` set
before the import they run in Triton's interpreter on the CPU, which is how they are tested without a
device. Everything that decides which machine code runs is a ``Launch``, made by the same functions
for a GPU's step and for ``compile_ahead``, which builds them for GPUs that are not here.

What bites (Triton 3.7 to 3.9): the interpreter multiplies bfloat16 operands of ``tl.dot`` as raw
bits, so it gets float32 ones; a float32 ``tl.dot`` is TF32 on the device unless told ``ieee``. Loads
whose address comes from another load of the same iteration are never two iterations ahead of their
use, so block ids are loaded an iteration before the entries they lead to.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from decodebench.cache.triton_launch import Launch
from decodebench.layout.reads import DecodeError
from decodebench.measure.kernels.splits import Card, best_chunk, items

NAME = "triton"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def why_not(device: str | torch.device) -> str | None:
    """Why this backend cannot run on the device, or None where it can."""
    if torch.device(device).type == "cuda" or INTERPRETED:
        return None
    return f"Triton compiles for GPUs and the cache is on {device}: use backend='torch' or 'cpp'"


def architecture(device: torch.device) -> int:
    """Compute capability as Triton counts it, 90 for 9.0; in the interpreter that of the oldest card."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


# --- float8 ------------------------------------------------------------------------------------------

#: e4m3 and e5m2 on cards without float8 instructions: four bytes → two pairs of float16, as bits.
#: e5m2 is a float16's upper byte; e4m3 shifted right once has an exponent 8 too small (the factor of 256
#: goes into the scale and the output), and its one NaN code becomes one.
E5M2_PAIRS = """{
    prmt.b32 $0, 0, $2, 0x5040;
    prmt.b32 $1, 0, $2, 0x7060;
}"""
E4M3_PAIRS = """{
    .reg .b32 a, b, t, m;
    and.b32 t, $2, 0x7f7f7f7f;
    add.u32 t, t, 0x01010101;
    prmt.b32 a, 0, $2, 0x5040;
    prmt.b32 b, 0, $2, 0x7060;
    prmt.b32 m, t, 0, 0x9988;
    shr.u32 t, t, 16;
    lop3.b32 $0, a, 0x80008000, m, 0xEA;
    shr.u32 a, a, 1;
    and.b32 a, a, 0x3fff3fff;
    or.b32 $0, $0, a;
    prmt.b32 m, t, 0, 0x9988;
    lop3.b32 $1, b, 0x80008000, m, 0xEA;
    shr.u32 b, b, 1;
    and.b32 b, b, 0x3fff3fff;
    or.b32 $1, $1, b;
}"""
#: what decoded e4m3 must be multiplied by, where it was decoded by shifts
E4M3_FACTOR = 256.0

_E5M2_PAIRS, _E4M3_PAIRS = tl.constexpr(E5M2_PAIRS), tl.constexpr(E4M3_PAIRS)


@triton.jit
def _decode_tile(x, DECODE: tl.constexpr, TO: tl.constexpr):
    """A tile of the cache as ``TO``. e4m3 by shifts comes out ``E4M3_FACTOR`` too small."""
    if DECODE == "e4m3 native":
        return x.to(tl.float8e4nv, bitcast=True).to(TO)
    if DECODE == "e5m2 pairs":
        return tl.inline_asm_elementwise(_E5M2_PAIRS, "=r,=r,r", [x], tl.float16, is_pure=True, pack=4).to(TO)
    if DECODE == "e4m3 pairs":
        return tl.inline_asm_elementwise(_E4M3_PAIRS, "=r,=r,r", [x], tl.float16, is_pure=True, pack=4).to(TO)
    if DECODE == "e5m2":
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(TO)
    if DECODE == "e4m3":
        wide = x.to(tl.uint16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), half).to(TO)
    return x.to(TO)


@triton.jit
def _encode_tile(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, TINY: tl.constexpr, LIMIT: tl.constexpr):
    """float32 → float8 bytes with ``MANTISSA`` bits, rounded to nearest even, clamped to ± ``LIMIT``.

    Below the smallest normal number, adding ``TINY`` (whose last place is float8's smallest step)
    rounds; above, the dropped bits are rounded up by half of what they count, ties to even.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), LIMIT)
    DROPPED: tl.constexpr = 23 - MANTISSA
    at = size.to(tl.uint32, bitcast=True)
    normal = ((at + ((1 << (DROPPED - 1)) - 1) + ((at >> DROPPED) & 1)) >> DROPPED) - (
        (127 - BIAS) << MANTISSA
    )
    small = (size + TINY).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where((at >> 23) < 128 - BIAS, small, normal)
    return (tl.where(x != x, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def write_entries(
    target_ptr,
    blocks_ptr,
    entries_ptr,
    new_ptr,
    block_stride,
    head_stride,
    entry_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    FP8: tl.constexpr,
):
    """One (request, KV head): the new token's keys and values into its slot, in the cache's type."""
    request, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    block, entry = tl.load(blocks_ptr + request), tl.load(entries_ptr + request)
    column = tl.arange(0, TILE)
    x = tl.load(new_ptr + (request * HEADS + head) * WIDTH + column, mask=column < WIDTH, other=0.0)
    target = target_ptr + block.to(tl.int64) * block_stride + head.to(tl.int64) * head_stride
    target += entry * entry_stride + column
    if FP8 == "e4m3":
        code = _encode_tile(x.to(tl.float32), 3, 7, 16384.0, 448.0)
        tl.store(target, code, mask=column < WIDTH)
    elif FP8 == "e5m2":
        code = _encode_tile(x.to(tl.float32), 2, 15, 128.0, 57344.0)
        tl.store(target, code, mask=column < WIDTH)
    else:
        tl.store(target, x.to(target_ptr.dtype.element_ty), mask=column < WIDTH)


# --- attention ---------------------------------------------------------------------------------------


@triton.jit
def attention_split(
    q_ptr,
    kv_ptr,
    table_ptr,
    items_ptr,
    part_ptr,
    lse_ptr,
    out_ptr,
    scale,
    table_width,
    kv_block_stride,
    kv_head_stride,
    kv_entry_stride,
    ENTRIES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DK1: tl.constexpr,
    DK2: tl.constexpr,
    DV: tl.constexpr,
    DV_TILE: tl.constexpr,
    V_OFFSET: tl.constexpr,
    V_IS_K1: tl.constexpr,
    DECODE: tl.constexpr,
    V_FACTOR: tl.constexpr,
    NORMALISE: tl.constexpr,
    COMPUTE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One (item, KV head, tile of its query group): positions [first, last) of the item's request.

    An item that is its request's only one writes the output; others their normalised part and its
    log-sum-exp (base 2; ``scale`` holds the factor). Keys are two tiles, DK1 (a power of two) and DK2
    wide (masked; 0 for none), so that 576 does not pad to 1024. ``V_IS_K1``: the values are the keys'
    first DK1 columns (MLA) and are not loaded again. ``NORMALISE``: float16 products of queries in
    another type, which are brought to at most 1 first. Where tiles lie inside of blocks, one block id
    is loaded for a tile, else one for a token; always an iteration ahead.
    """
    tiles: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    one_block: tl.constexpr = ENTRIES % TOKENS == 0
    item = items_ptr + tl.program_id(0) // (KV_HEADS * tiles) * 4
    tile = tl.program_id(0) % (KV_HEADS * tiles)
    head = tile // tiles
    g = tile % tiles * GROUP_TILE + tl.arange(0, GROUP_TILE)
    request, first, last, part = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    q_head = head * GROUP + g
    live = g < GROUP
    d1 = tl.arange(0, DK1)
    q_row = q_ptr + (request * KV_HEADS * GROUP + q_head[:, None]) * DK
    q1 = tl.load(q_row + d1[None, :], mask=live[:, None], other=0.0)
    if DK2 > 0:
        d2 = DK1 + tl.arange(0, DK2)
        q2 = tl.load(q_row + d2[None, :], mask=live[:, None] & (d2[None, :] < DK), other=0.0)
    row_scale = tl.full([GROUP_TILE], 0.0, tl.float32) + scale
    if NORMALISE:
        size = tl.max(tl.abs(q1.to(tl.float32)), 1)
        if DK2 > 0:
            size = tl.maximum(size, tl.max(tl.abs(q2.to(tl.float32)), 1))
        size = tl.where(size > 0.0, size, 1.0)
        row_scale = row_scale * size
        q1 = q1.to(tl.float32) / size[:, None]
        if DK2 > 0:
            q2 = q2.to(tl.float32) / size[:, None]
    q1 = q1.to(COMPUTE)
    if DK2 > 0:
        q2 = q2.to(COMPUTE)
    dv = tl.arange(0, DV_TILE)
    top = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    acc = tl.zeros([GROUP_TILE, DV_TILE], tl.float32)
    table = table_ptr + request * table_width
    base = kv_ptr + head.to(tl.int64) * kv_head_stride
    t = tl.arange(0, TOKENS)
    begin = tl.where(first < last, first // TOKENS * TOKENS, last)
    if one_block:
        block = tl.load(table + begin // ENTRIES, mask=first < last, other=0)
    else:
        seen = (begin + t >= first) & (begin + t < last)
        block = tl.load(table + (begin + t) // ENTRIES, mask=seen, other=0)
    for at in tl.range(begin, last, TOKENS):
        token = at + t
        seen = (token >= first) & (token < last)
        if one_block:
            row = base + block.to(tl.int64) * kv_block_stride + (at % ENTRIES + t) * kv_entry_stride
            block = tl.load(table + (at + TOKENS) // ENTRIES, mask=at + TOKENS < last, other=0)
        else:
            row = base + block.to(tl.int64) * kv_block_stride + token % ENTRIES * kv_entry_stride
            block = tl.load(table + (token + TOKENS) // ENTRIES, mask=token + TOKENS < last, other=0)
        k1 = _decode_tile(tl.load(row[:, None] + d1[None, :], mask=seen[:, None], other=0), DECODE, COMPUTE)
        scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        if DK2 > 0:
            in_k2 = seen[:, None] & (d2[None, :] < DK)
            k2 = _decode_tile(tl.load(row[:, None] + d2[None, :], mask=in_k2, other=0), DECODE, COMPUTE)
            scores += tl.dot(q2, tl.trans(k2), input_precision="ieee")
        scores = tl.where(seen[None, :], scores * row_scale[:, None], float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        keep = tl.exp2(top - higher)
        p = tl.exp2(scores - higher[:, None])
        if V_IS_K1:
            v = k1
        else:
            in_v = seen[:, None] & (dv[None, :] < DV)
            v = tl.load(row[:, None] + V_OFFSET + dv[None, :], mask=in_v, other=0)
            v = _decode_tile(v, DECODE, COMPUTE)
        acc = acc * keep[:, None] + tl.dot(p.to(COMPUTE), v, input_precision="ieee")
        total = total * keep + tl.sum(p, 1)
        top = higher
    empty = last <= first
    safe = tl.where(empty, 1.0, total)
    value = acc * (V_FACTOR / safe)[:, None]
    inside = live[:, None] & (dv[None, :] < DV)
    if part < 0:
        out = out_ptr + (request * KV_HEADS * GROUP + q_head[:, None]) * DV + dv[None, :]
        tl.store(out, value.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        out_row = part * KV_HEADS * GROUP + q_head
        tl.store(part_ptr + out_row[:, None] * DV + dv[None, :], value, mask=inside)
        tl.store(lse_ptr + out_row, top + tl.log2(safe), mask=live)


@triton.jit
def attention_merge(
    part_ptr,
    lse_ptr,
    out_ptr,
    merges_ptr,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    DV_TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One (split request, query head): its parts weighted by their log-sum-exp, ``PARTS`` at a time."""
    merge = merges_ptr + tl.program_id(0) // HEADS * 3
    head = tl.program_id(0) % HEADS
    request, first, last = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2)
    dv = tl.arange(0, DV_TILE)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([DV_TILE], tl.float32)
    for at in tl.range(first, last, PARTS):
        s = at + tl.arange(0, PARTS)
        row = s * HEADS + head
        lse = tl.load(lse_ptr + row, mask=s < last, other=float("-inf"))
        inside = (s[:, None] < last) & (dv[None, :] < DV)
        part = tl.load(part_ptr + row[:, None] * DV + dv[None, :], mask=inside, other=0.0)
        higher = tl.maximum(top, tl.max(lse, 0))
        weight = tl.exp2(lse - higher)
        keep = tl.exp2(top - higher)
        acc = acc * keep + tl.sum(part * weight[:, None], 0)
        total = total * keep + tl.sum(weight, 0)
        top = higher
    out = out_ptr + (request * HEADS + head) * DV + dv
    tl.store(out, (acc / total).to(out_ptr.dtype.element_ty), mask=dv < DV)


_FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _decoder(fp8: str, arch: int) -> str:
    """How float8 becomes float16: by the card's own conversion, by pairs, or in the interpreter by shifts."""
    if not fp8 or INTERPRETED:
        return fp8
    return "e4m3 native" if fp8 == "e4m3" and arch >= 89 else f"{fp8} pairs"


def attention_shape(
    group: int, dk: int, dv: int, v_offset: int, entries: int, cache: torch.dtype, q: torch.dtype, arch: int
) -> tuple[dict, dict]:
    """The split kernel's constants and Triton's options for these shapes on an architecture.

    Tiles are about 16 KiB of cache, so that several programs with two buffers each fit a
    multiprocessor; the choices were made by ``compile_ahead``'s table and are held by its tests.
    """
    fp8 = _FP8.get(cache, "")
    exact = torch.float32 in (q, cache)
    compute = torch.float32 if exact or INTERPRETED else torch.float16 if fp8 else cache
    dk1 = 1 << (dk.bit_length() - 1)
    dk2 = 0 if dk == dk1 else max(16, triton.next_power_of_2(dk - dk1))
    dv_tile = triton.next_power_of_2(dv)
    latent = v_offset == 0 and dv == dk1
    rows = triton.next_power_of_2(group)
    tokens, warps, stages = _tile(
        dk1 + dk2 + (0 if latent else dv_tile), cache.itemsize, dv_tile, rows, exact, arch
    )
    if dv_tile > 256:
        most = 64 if arch < 100 and not fp8 and not exact else 32
    else:
        most = 64
    decode = _decoder(fp8, arch)
    constants = {
        "ENTRIES": entries,
        "GROUP": group,
        # products of two-byte types take 16 rows at once, float32 ones as many as there are
        "GROUP_TILE": min(rows if exact else max(16, rows), most),
        "DK": dk,
        "DK1": dk1,
        "DK2": dk2,
        "DV": dv,
        "DV_TILE": dv_tile,
        "V_OFFSET": v_offset,
        "V_IS_K1": latent,
        "DECODE": decode,
        "V_FACTOR": E4M3_FACTOR if decode in ("e4m3", "e4m3 pairs") else 1.0,
        "NORMALISE": bool(fp8) and q != torch.float16 and not exact,
        "COMPUTE": _TL[compute],
        "TOKENS": tokens,
    }
    return constants, {"num_warps": warps, "num_stages": stages}


def _tile(width: int, itemsize: int, dv_tile: int, rows: int, exact: bool, arch: int) -> tuple[int, int, int]:
    """(tokens of a tile, warps, stages): what ``compile_ahead`` found without spills and with loads ahead."""
    if dv_tile > 256:  # latent attention
        if exact or width * itemsize >= 2048:
            return 16, 8, 3
        if rows > 32 and itemsize > 1 and 90 <= arch < 100:
            return 64, 8, 2  # two warpgroups' products on 64 query heads
        if itemsize > 1 and arch >= 90 and arch < 120:
            return 64, 8, 3
        return 32, 8, 3
    if exact:
        return (32, 4, 3) if width * itemsize <= 1024 else (16, 8, 3)
    wanted = 32768 if itemsize == 1 else 16384  # float8 products come cheaper in larger tiles
    tokens = max(32, min(128, 1 << (wanted // (width * itemsize)).bit_length() - 1))
    return tokens, 4, 3


@dataclass(frozen=True)
class Plan:
    """A batch's positions on the host, and what each kernel shape made of them on the device."""

    ranges: tuple[tuple[int, int], ...]
    #: tokens a chunk, where it was asked for; None searches
    chunk: int | None = None
    cuts: dict = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Cut:
    """Items on the device, int32 [items, 4] and [merges, 3], and scratch for the parts of split requests."""

    items: torch.Tensor
    merges: torch.Tensor | None
    parts: torch.Tensor
    lse: torch.Tensor


def prepare(
    view: torch.Tensor, table: torch.Tensor, start: torch.Tensor, stop: torch.Tensor, chunk: int | None = None
) -> Plan:
    """What ``attend`` cuts into programs: host work done once a batch, outside the clock."""
    return Plan(tuple(zip(start.tolist(), stop.tolist())), chunk)


def can_attend(q: torch.Tensor, view: torch.Tensor, head_size_v: int, v_offset: int) -> str | None:
    """Why these shapes are not for this backend, or None: tiles that no multiprocessor holds."""
    dk = q.shape[-1]
    wide = torch.float32 in (q.dtype, view.dtype)
    if dk > (256 if wide else 512) and not (dk == 576 and head_size_v == 512):
        return f"keys of {dk} numbers in {'float32' if wide else view.dtype} do not fit a program's memory"
    if view.dtype not in _TL and view.dtype not in _FP8:
        return f"cache dtype {view.dtype}"
    return None


def held_programs(shape: Mapping[str, object], options: Mapping[str, int], device: torch.device) -> Card:
    """Multiprocessors, and programs one holds: by threads and shared memory of tiles with two buffers."""
    if device.type != "cuda":
        return Card(2, 2)
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_multiprocessor", 164 << 10)
    size = 1 if "e" in str(shape["DECODE"]) else 4 if shape["COMPUTE"] == tl.float32 else 2
    width = shape["DK1"] + shape["DK2"] + (0 if shape["V_IS_K1"] else shape["DV_TILE"])
    tile = shape["TOKENS"] * width * size
    programs = max(1, min(6, shared // (2 * tile + 6144), 32 // options["num_warps"]))
    return Card(properties.multi_processor_count, 1 if shape["DV_TILE"] > 256 else programs)


def _cut(
    plan: Plan, tiles: int, heads: int, dv: int, shape: dict, options: dict, device: torch.device
) -> Cut:
    """The plan's items for one kernel shape; kept, so that a captured step allocates nothing."""
    key = (tiles, heads, dv, shape["TOKENS"], shape["GROUP_TILE"], shape["DECODE"], str(device))
    if key not in plan.cuts:
        tokens = shape["TOKENS"]
        chunk = plan.chunk and -(-plan.chunk // tokens) * tokens
        if chunk is None:
            width = shape["DK"] if shape["V_IS_K1"] else shape["DK"] + dv
            part_bytes = 2 * 4 * min(shape["GROUP"], shape["GROUP_TILE"]) * dv
            share = part_bytes / (tokens * width * (1 if shape["DECODE"] else 2))
            chunk = best_chunk(plan.ranges, tiles, tokens, held_programs(shape, options, device), share)
        work = items(plan.ranges, chunk, tokens)
        rows = [(item.request, item.first, item.last, item.part) for item in work]
        merges: dict[int, list[int]] = {}
        for item in work:
            if item.part >= 0:
                merges.setdefault(item.request, []).append(item.part)
        spans = [(request, min(parts), max(parts) + 1) for request, parts in merges.items()]
        parts = max((last for _, _, last in spans), default=0)
        plan.cuts[key] = Cut(
            torch.tensor(rows, dtype=torch.int32, device=device),
            torch.tensor(spans, dtype=torch.int32, device=device) if spans else None,
            torch.empty(max(1, parts * heads), dv, device=device),
            torch.empty(max(1, parts * heads), device=device),
        )
    return plan.cuts[key]


def attention_launches(
    q: torch.Tensor,
    view: torch.Tensor,
    table: torch.Tensor,
    plan: Plan,
    out: torch.Tensor,
    *,
    scale: float,
    v_offset: int,
    arch: int,
) -> list[Launch]:
    """The launches that attend: the split kernel, and the merge where a request has several items."""
    _, heads, dk = q.shape
    _, kv_heads, entries, _ = view.shape
    dv = out.shape[-1]
    shape, options = attention_shape(heads // kv_heads, dk, dv, v_offset, entries, view.dtype, q.dtype, arch)
    tiles = kv_heads * triton.cdiv(shape["GROUP"], shape["GROUP_TILE"])
    cut = _cut(plan, tiles, heads, dv, shape, options, q.device)
    keys = E4M3_FACTOR if shape["DECODE"] in ("e4m3", "e4m3 pairs") else 1.0
    arguments = {
        "q_ptr": q,
        "kv_ptr": view.view(torch.uint8) if shape["DECODE"] else view,
        "table_ptr": table,
        "items_ptr": cut.items,
        "part_ptr": cut.parts,
        "lse_ptr": cut.lse,
        "out_ptr": out,
        "scale": scale * keys * _LOG2_E,
        "table_width": table.stride(0),
        "kv_block_stride": view.stride(0),
        "kv_head_stride": view.stride(1),
        "kv_entry_stride": view.stride(2),
    }
    grid = (len(cut.items) * tiles,)
    launches = [Launch(attention_split, grid, arguments, shape | {"KV_HEADS": kv_heads}, options)]
    if cut.merges is not None:
        launches.append(merge_launch(cut.parts, cut.lse, out, cut.merges))
    return launches


def merge_launch(parts: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, merges: torch.Tensor) -> Launch:
    """The launch that puts the parts of split requests together."""
    dv_tile = triton.next_power_of_2(out.shape[-1])
    arguments = {"part_ptr": parts, "lse_ptr": lse, "out_ptr": out, "merges_ptr": merges}
    constants = {"HEADS": out.shape[1], "DV": out.shape[-1], "DV_TILE": dv_tile, "PARTS": 16}
    return Launch(attention_merge, (len(merges) * out.shape[1],), arguments, constants, {"num_warps": 4})


_LOG2_E = 1.4426950408889634


def attend(
    q, view, table, start, stop, *, scale: float, head_size_v: int, v_offset: int, plan: Plan | None = None
):
    """``reference.attend`` with float32 accumulation, in q's dtype.

    With a ``plan`` (``prepare``) that has been used once before it can be captured in a graph: nothing
    is read by the host, nothing but the output is allocated.
    """
    plan = prepare(view, table, start, stop) if plan is None else plan
    out = torch.empty(q.shape[0], q.shape[1], head_size_v, dtype=q.dtype, device=q.device)
    where = {"scale": scale, "v_offset": v_offset, "arch": architecture(q.device)}
    try:
        for launch in attention_launches(q.contiguous(), view, table, plan, out, **where):
            launch.run()
    except triton.OutOfResources as error:
        raise DecodeError(
            f"attention over keys of {q.shape[2]} numbers in {view.dtype}: {error}; use backend='torch'"
        ) from error
    return out


def write_launch(
    view: torch.Tensor, blocks: torch.Tensor, entries: torch.Tensor, new: torch.Tensor
) -> Launch:
    """The launch that stores one new entry a request."""
    fp8 = _FP8.get(view.dtype, "")
    heads, width = new.shape[1:]
    arguments = {
        "target_ptr": view.view(torch.uint8) if fp8 else view,
        "blocks_ptr": blocks,
        "entries_ptr": entries,
        "new_ptr": new,
        "block_stride": view.stride(0),
        "head_stride": view.stride(1),
        "entry_stride": view.stride(2),
    }
    constants = {"HEADS": heads, "WIDTH": width, "TILE": triton.next_power_of_2(width), "FP8": fp8}
    return Launch(write_entries, (len(blocks) * heads,), arguments, constants, {"num_warps": 1})


def write_kv(view: torch.Tensor, blocks: torch.Tensor, entries: torch.Tensor, new: torch.Tensor) -> None:
    """``reference.write_kv`` in one launch; float8 comes out as torch rounds and clamps it."""
    write_launch(view, blocks, entries, new.contiguous()).run()


# --- states ------------------------------------------------------------------------------------------


@triton.jit
def conv_update(
    state_ptr,
    rows_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    row_stride,
    channels,
    LENGTH: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    TILE: tl.constexpr,
):
    """Causal depthwise convolution of one new input over the stored ones, and the shift, in one pass."""
    request = tl.program_id(0)
    c = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = c < channels
    state = state_ptr + tl.load(rows_ptr + request).to(tl.int64) * row_stride + c
    now = tl.load(x_ptr + request * channels + c, mask=live, other=0.0)
    y = tl.load(bias_ptr + c, mask=live, other=0.0)
    y += now * tl.load(weight_ptr + c * (TAPS + 1) + TAPS, mask=live, other=0.0)
    for j in tl.static_range(LENGTH):
        old = tl.load(state + j * channels, mask=live, other=0.0)
        if j >= LENGTH - TAPS:
            tap = j - (LENGTH - TAPS)
            y += old.to(tl.float32) * tl.load(weight_ptr + c * (TAPS + 1) + tap, mask=live, other=0.0)
        if j > 0:
            tl.store(state + (j - 1) * channels, old, mask=live)
    tl.store(state + (LENGTH - 1) * channels, now.to(state_ptr.dtype.element_ty), mask=live)
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out_ptr + request * channels + c, y, mask=live)


@triton.jit
def mamba1_update(
    state_ptr,
    rows_ptr,
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    out_ptr,
    row_stride,
    channels,
    N: tl.constexpr,
    N_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    """h ← exp(dt·a)·h + dt·b·x, y = h·c + d·x for TILE channels of one request."""
    request = tl.program_id(0)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    n = tl.arange(0, N_TILE)
    live = (i[:, None] < channels) & (n[None, :] < N)
    row = tl.load(rows_ptr + request).to(tl.int64) * row_stride
    h = tl.load(state_ptr + row + i[:, None] * N + n[None, :], mask=live, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + request * channels + i, mask=i < channels, other=0.0)
    dt = tl.load(dt_ptr + request * channels + i, mask=i < channels, other=0.0)
    a = tl.load(a_ptr + i[:, None] * N + n[None, :], mask=live, other=0.0)
    b = tl.load(b_ptr + request * N + n, mask=n < N, other=0.0)
    c = tl.load(c_ptr + request * N + n, mask=n < N, other=0.0)
    h = h * tl.exp(dt[:, None] * a) + (dt * x)[:, None] * b[None, :]
    y = tl.sum(h * c[None, :], 1) + tl.load(d_ptr + i, mask=i < channels, other=0.0) * x
    tl.store(state_ptr + row + i[:, None] * N + n[None, :], h.to(state_ptr.dtype.element_ty), mask=live)
    tl.store(out_ptr + request * channels + i, y, mask=i < channels)


@triton.jit
def mamba2_update(
    state_ptr,
    rows_ptr,
    xbc_ptr,
    dt_ptr,
    a_ptr,
    d_ptr,
    out_ptr,
    row_stride,
    channels,
    groups,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    N_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    """h ← exp(dt·a)·h + dt·b·x, y = h·c + d·x for TILE of a head's P rows; a, d, dt one a head."""
    request = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    p = tl.program_id(1) * TILE + tl.arange(0, TILE)
    n = tl.arange(0, N_TILE)
    live = (p[:, None] < P) & (n[None, :] < N)
    state = state_ptr + tl.load(rows_ptr + request).to(tl.int64) * row_stride + head * P * N
    h = tl.load(state + p[:, None] * N + n[None, :], mask=live, other=0.0).to(tl.float32)
    xbc = xbc_ptr + request * channels
    x = tl.load(xbc + head * P + p, mask=p < P, other=0.0)
    group = head // (HEADS // groups)
    b = tl.load(xbc + HEADS * P + group * N + n, mask=n < N, other=0.0)
    c = tl.load(xbc + HEADS * P + (groups + group) * N + n, mask=n < N, other=0.0)
    dt = tl.load(dt_ptr + request * HEADS + head)
    h = h * tl.exp(dt * tl.load(a_ptr + head)) + (dt * x)[:, None] * b[None, :]
    y = tl.sum(h * c[None, :], 1) + tl.load(d_ptr + head) * x
    tl.store(state + p[:, None] * N + n[None, :], h.to(state_ptr.dtype.element_ty), mask=live)
    tl.store(out_ptr + (request * HEADS + head) * P + p, y, mask=p < P)


@triton.jit
def delta_update(
    state_ptr,
    rows_ptr,
    qkv_ptr,
    g_ptr,
    beta_ptr,
    out_ptr,
    row_stride,
    channels,
    key_heads,
    q_scale,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    DK: tl.constexpr,
    DK_TILE: tl.constexpr,
    TILE: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):
    """Gated delta rule for TILE of a head's DV rows; the decay is one a head or one a key channel."""
    request = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    v_at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    k_at = tl.arange(0, DK_TILE)
    in_k = k_at < DK
    live = (v_at[:, None] < DV) & in_k[None, :]
    state = state_ptr + tl.load(rows_ptr + request).to(tl.int64) * row_stride + head * DV * DK
    h = tl.load(state + v_at[:, None] * DK + k_at[None, :], mask=live, other=0.0).to(tl.float32)
    qkv = qkv_ptr + request * channels
    key_head = head // (HEADS // key_heads)
    q = tl.load(qkv + key_head * DK + k_at, mask=in_k, other=0.0)
    k = tl.load(qkv + (key_heads + key_head) * DK + k_at, mask=in_k, other=0.0)
    v = tl.load(qkv + 2 * key_heads * DK + head * DV + v_at, mask=v_at < DV, other=0.0)
    q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6) * q_scale
    k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    if PER_CHANNEL:
        decay = tl.exp(tl.load(g_ptr + (request * HEADS + head) * DK + k_at, mask=in_k, other=0.0))
        h = h * decay[None, :]
    else:
        h = h * tl.exp(tl.load(g_ptr + request * HEADS + head))
    change = tl.load(beta_ptr + request * HEADS + head) * (v - tl.sum(h * k[None, :], 1))
    h = h + change[:, None] * k[None, :]
    tl.store(state + v_at[:, None] * DK + k_at[None, :], h.to(state_ptr.dtype.element_ty), mask=live)
    tl.store(out_ptr + (request * HEADS + head) * DV + v_at, tl.sum(h * q[None, :], 1), mask=v_at < DV)


def can_update(kind: str, parts: dict[str, torch.Tensor]) -> str | None:
    """Why this state is not for this backend, or None."""
    for name, part in parts.items():
        if part.dtype not in _TL:
            return f"{name} state of {part.dtype}"
    return None if kind in ("mamba1", "mamba2", "gdn", "kda", "short_conv") else f"{kind} states"


def state_tile(rows: int, columns: int) -> int:
    """Rows of a state tile: about 4,096 elements a program, a power of two."""
    return max(1, min(triton.next_power_of_2(rows), 4096 // triton.next_power_of_2(columns)))


def state_launches(
    kind: str, parts: dict, rows: torch.Tensor, inputs: dict[str, torch.Tensor]
) -> tuple[list[Launch], torch.Tensor]:
    """The launches of a state's step (the convolution, then the recurrence), and the output they leave."""
    conv, batch = parts["conv"], len(rows)
    length, channels = conv.shape[1:]
    y = torch.empty(batch, channels, device=conv.device)
    arguments = {
        "state_ptr": conv,
        "rows_ptr": rows,
        "x_ptr": inputs["x"],
        "weight_ptr": inputs["weight"],
        "bias_ptr": inputs["bias"],
        "out_ptr": y,
        "row_stride": conv.stride(0),
        "channels": channels,
    }
    taps = inputs["weight"].shape[1] - 1
    constants = {"LENGTH": length, "TAPS": taps, "SILU": kind != "short_conv", "TILE": 1024}
    launches = [Launch(conv_update, (batch, triton.cdiv(channels, 1024)), arguments, constants)]
    if kind == "short_conv":
        return launches, y
    state = parts["ssm" if "ssm" in parts else "recurrent"]
    shape = state.shape[1:]
    columns = triton.next_power_of_2(shape[-1])
    tile = state_tile(shape[-2], shape[-1])
    out = torch.empty(batch, *shape[:-1], device=conv.device)
    common = {"state_ptr": state, "rows_ptr": rows}
    if kind == "mamba1":
        arguments = common | {"x_ptr": y} | {f"{n}_ptr": inputs[n] for n in ("dt", "a", "b", "c", "d")}
        arguments |= {"out_ptr": out, "row_stride": state.stride(0), "channels": shape[0]}
        constants = {"N": shape[1], "N_TILE": columns, "TILE": tile}
        grid = (batch, triton.cdiv(shape[0], tile))
        return [*launches, Launch(mamba1_update, grid, arguments, constants)], out
    heads, width, n = shape
    groups = (channels - heads * width) // (2 * n)
    strides = {"row_stride": state.stride(0), "channels": channels}
    grid = (batch * heads, triton.cdiv(width, tile))
    if kind == "mamba2":
        arguments = common | {"xbc_ptr": y} | {f"{n}_ptr": inputs[n] for n in ("dt", "a", "d")}
        arguments |= {"out_ptr": out} | strides | {"groups": groups}
        constants = {"HEADS": heads, "P": width, "N": n, "N_TILE": columns, "TILE": tile}
        return [*launches, Launch(mamba2_update, grid, arguments, constants)], out
    arguments = common | {"qkv_ptr": y} | {f"{n}_ptr": inputs[n] for n in ("g", "beta")}
    arguments |= {"out_ptr": out} | strides | {"key_heads": groups, "q_scale": n**-0.5}
    constants = {"HEADS": heads, "DV": width, "DK": n, "DK_TILE": columns, "TILE": tile}
    constants["PER_CHANNEL"] = kind == "kda"
    return [*launches, Launch(delta_update, grid, arguments, constants)], out


def state_step(kind: str, parts: dict, rows: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """``reference.state_step`` in float32, in place, each state byte read and written once."""
    launches, out = state_launches(kind, parts, rows, inputs)
    for launch in launches:
        launch.run()
    return out
