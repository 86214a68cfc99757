"""The ``triton`` backend: split-KV paged attention and state updates, any block size and strides.

Import this only where Triton is installed. On a GPU the kernels run; with ``TRITON_INTERPRET=1`` set
before the import they run in Triton's interpreter on the CPU, which is how they are tested without a
device. ``compile_ahead`` builds them for named architectures, also without a device.

Two things bite (both seen with Triton 3.7 to 3.9): the interpreter multiplies bfloat16 operands of
``tl.dot`` as raw bits, so it gets float32 ones (``UPCAST``); a float32 ``tl.dot`` is TF32 on the device
unless told ``ieee``. float8 pages are read as bytes and decoded by shifts: sm_80 has no float8 loads.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from decodebench.measure.kernels.reference import can_attend as can_attend
from decodebench.measure.kernels.reference import prepare as prepare
from decodebench.measure.kernels.reference import write_kv as write_kv

NAME = "triton"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def why_not(device: str | torch.device) -> str | None:
    """Why this backend cannot run on the device, or None where it can."""
    if torch.device(device).type == "cuda" or INTERPRETED:
        return None
    return f"Triton compiles for GPUs and the cache is on {device}: use backend='torch' or 'cpp'"


@triton.jit
def _decode_tile(x, FP8: tl.constexpr, TO: tl.constexpr):
    """float8 bytes as ``TO``: e5m2 is a float16's upper byte, e4m3 one with its exponent 8 too small."""
    if FP8 == "e5m2":
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(TO)
    if FP8 == "e4m3":
        wide = x.to(tl.uint16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        value = half.to(tl.float32) * 256.0
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(TO)
    return x.to(TO)


@triton.jit
def attention_split(
    q_ptr,
    kv_ptr,
    table_ptr,
    start_ptr,
    stop_ptr,
    part_ptr,
    lse_ptr,
    scale,
    entries,
    table_width,
    kv_block_stride,
    kv_head_stride,
    kv_entry_stride,
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
    FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One (request, KV head and tile of its group, split): normalised output and log-sum-exp of the split.

    Keys are two tiles, DK1 (a power of two) and DK2 wide (masked; 0 for none), so that 576 does not
    pad to 1024. ``V_IS_K1``: the values are the keys' first DK1 columns (MLA) and are not loaded again.
    """
    request = tl.program_id(0)
    tiles: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    head = tl.program_id(1) // tiles
    g = tl.program_id(1) % tiles * GROUP_TILE + tl.arange(0, GROUP_TILE)
    split = tl.program_id(2)
    start = tl.load(start_ptr + request)
    stop = tl.load(stop_ptr + request)
    each = tl.cdiv(tl.cdiv(stop - start, SPLITS), TOKENS) * TOKENS
    first = start + split * each
    last = tl.minimum(first + each, stop)

    q_head = head * GROUP + g
    live = g < GROUP
    d1 = tl.arange(0, DK1)
    q_row = q_ptr + (request * KV_HEADS * GROUP + q_head[:, None]) * DK
    q1 = tl.load(q_row + d1[None, :], mask=live[:, None], other=0.0).to(COMPUTE)
    if DK2 > 0:
        d2 = DK1 + tl.arange(0, DK2)
        q2 = tl.load(q_row + d2[None, :], mask=live[:, None] & (d2[None, :] < DK), other=0.0).to(COMPUTE)
    dv = tl.arange(0, DV_TILE)
    top = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    acc = tl.zeros([GROUP_TILE, DV_TILE], tl.float32)
    for at in range(first, last, TOKENS):
        token = at + tl.arange(0, TOKENS)
        seen = token < last
        block = tl.load(table_ptr + request * table_width + token // entries, mask=seen, other=0).to(tl.int64)
        row = kv_ptr + block * kv_block_stride + head * kv_head_stride + token % entries * kv_entry_stride
        k1 = _decode_tile(tl.load(row[:, None] + d1[None, :], mask=seen[:, None], other=0), FP8, COMPUTE)
        scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        if DK2 > 0:
            in_k2 = seen[:, None] & (d2[None, :] < DK)
            k2 = _decode_tile(tl.load(row[:, None] + d2[None, :], mask=in_k2, other=0), FP8, COMPUTE)
            scores += tl.dot(q2, tl.trans(k2), input_precision="ieee")
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        keep = tl.exp(top - higher)
        p = tl.exp(scores - higher[:, None])
        if V_IS_K1:
            v = k1
        else:
            in_v = seen[:, None] & (dv[None, :] < DV)
            v = tl.load(row[:, None] + V_OFFSET + dv[None, :], mask=in_v, other=0)
            v = _decode_tile(v, FP8, COMPUTE)
        acc = acc * keep[:, None] + tl.dot(p.to(COMPUTE), v, input_precision="ieee")
        total = total * keep + tl.sum(p, 1)
        top = higher
    empty = last <= first
    out_row = (request * KV_HEADS * GROUP + q_head) * SPLITS + split
    safe = tl.where(empty, 1.0, total)
    out = part_ptr + out_row[:, None] * DV + dv[None, :]
    tl.store(out, acc / safe[:, None], mask=live[:, None] & (dv[None, :] < DV))
    tl.store(lse_ptr + out_row, tl.where(empty, float("-inf"), top + tl.log(safe)), mask=live)


@triton.jit
def attention_merge(
    part_ptr, lse_ptr, out_ptr, DV: tl.constexpr, DV_TILE: tl.constexpr, SPLITS: tl.constexpr
):
    """One (request, query head): splits weighted by their log-sum-exp. An empty range gives zeros."""
    row = tl.program_id(0)
    dv = tl.arange(0, DV_TILE)
    s = tl.arange(0, SPLITS)
    lse = tl.load(lse_ptr + row * SPLITS + s)
    top = tl.max(lse, 0)
    weight = tl.where(top == float("-inf"), 0.0, tl.exp(lse - top))
    part = part_ptr + (row * SPLITS + s)[:, None] * DV + dv[None, :]
    part = tl.load(part, mask=dv[None, :] < DV, other=0.0)
    total = tl.maximum(tl.sum(weight, 0), 1e-30)
    tl.store(out_ptr + row * DV + dv, tl.sum(part * weight[:, None], 0) / total, mask=dv < DV)


def attention_shape(group: int, dk: int, dv: int, v_offset: int, element_size: int, fp8: str = "") -> dict:
    """The kernel's constants for these shapes; tile sizes keep shared memory below sm_80's 163 KiB."""
    dk1 = 1 << (dk.bit_length() - 1)
    dk2 = 0 if dk == dk1 else max(16, triton.next_power_of_2(dk - dk1))
    dv_tile = triton.next_power_of_2(dv)
    wide = dk1 + dk2 + dv_tile
    tokens = 64 if wide * element_size <= 512 else 32 if wide * element_size <= 2048 else 16
    return {
        "GROUP": group,
        # tl.dot takes at least 16 rows; more than 32 would not fit the registers at 512 columns
        "GROUP_TILE": min(max(16, triton.next_power_of_2(group)), 32 if dv_tile > 256 else 64),
        "DK": dk,
        "DK1": dk1,
        "DK2": dk2,
        "DV": dv,
        "DV_TILE": dv_tile,
        "V_OFFSET": v_offset,
        "V_IS_K1": v_offset == 0 and dv == dk1,
        "FP8": fp8,
        "TOKENS": tokens,
    }


def launch_options(shape: dict) -> dict:
    """Warps and pipeline stages: two stages overlap loads with products where the tiles are small."""
    return {"num_warps": 8 if shape["DV_TILE"] > 256 else 4, "num_stages": 2}


_FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def splits_for(batch: int, head_tiles: int, device: torch.device) -> int:
    """Splits that give every multiprocessor about two programs; a power of two, at most 64."""
    if device.type != "cuda":
        return 2
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return min(64, triton.next_power_of_2(max(1, wanted // max(1, batch * head_tiles))))


def attend(
    q,
    view,
    table,
    start,
    stop,
    *,
    scale: float,
    head_size_v: int,
    v_offset: int,
    plan: None = None,
    splits: int = 0,
):
    """``reference.attend`` with float32 accumulation, in q's dtype. Graph-capturable: no host reads."""
    batch, heads, dk = q.shape
    _, kv_heads, entries, _ = view.shape
    fp8 = _FP8.get(view.dtype, "")
    size = 2 if fp8 else view.element_size()  # of the tiles, which hold decoded values
    shape = attention_shape(heads // kv_heads, dk, head_size_v, v_offset, size, fp8)
    tiles = triton.cdiv(shape["GROUP"], shape["GROUP_TILE"])
    splits = splits or splits_for(batch, kv_heads * tiles, q.device)
    part = torch.empty(batch, heads, splits, head_size_v, device=q.device)
    lse = torch.empty(batch, heads, splits, device=q.device)
    out = torch.empty(batch, heads, head_size_v, dtype=q.dtype, device=q.device)
    compute = torch.float32 if torch.float32 in (q.dtype, view.dtype) else (q.dtype if fp8 else view.dtype)
    source = view.view(torch.uint8) if fp8 else view
    attention_split[(batch, kv_heads * tiles, splits)](
        q.contiguous(),
        source,
        table,
        start,
        stop,
        part,
        lse,
        scale,
        entries,
        table.stride(0),
        view.stride(0),
        view.stride(1),
        view.stride(2),
        KV_HEADS=kv_heads,
        SPLITS=splits,
        COMPUTE=tl.float32 if INTERPRETED else _TL[compute],
        **shape,
        **launch_options(shape),
    )
    attention_merge[(batch * heads,)](part, lse, out, DV=head_size_v, DV_TILE=shape["DV_TILE"], SPLITS=splits)
    return out


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


def state_step(kind: str, parts: dict, rows: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """``reference.state_step`` in float32, in place, each state byte read and written once."""
    conv, batch = parts["conv"], len(rows)
    length, channels = conv.shape[1:]
    y = torch.empty(batch, channels, device=conv.device)
    conv_update[(batch, triton.cdiv(channels, 1024))](
        conv,
        rows,
        inputs["x"],
        inputs["weight"],
        inputs["bias"],
        y,
        conv.stride(0),
        channels,
        LENGTH=length,
        TAPS=inputs["weight"].shape[1] - 1,
        SILU=kind != "short_conv",
        TILE=1024,
    )
    if kind == "short_conv":
        return y
    state = parts["ssm" if "ssm" in parts else "recurrent"]
    shape = state.shape[1:]
    columns = triton.next_power_of_2(shape[-1])
    tile = state_tile(shape[-2], shape[-1])
    out = torch.empty(batch, *shape[:-1], device=conv.device)
    if kind == "mamba1":
        mamba1_update[(batch, triton.cdiv(shape[0], tile))](
            state,
            rows,
            y,
            *(inputs[n] for n in ("dt", "a", "b", "c", "d")),
            out,
            state.stride(0),
            shape[0],
            N=shape[1],
            N_TILE=columns,
            TILE=tile,
        )
        return out
    heads, width, n = shape
    grid = (batch * heads, triton.cdiv(width, tile))
    if kind == "mamba2":
        mamba2_update[grid](
            state,
            rows,
            y,
            inputs["dt"],
            inputs["a"],
            inputs["d"],
            out,
            state.stride(0),
            channels,
            (channels - heads * width) // (2 * n),
            HEADS=heads,
            P=width,
            N=n,
            N_TILE=columns,
            TILE=tile,
        )
    else:
        delta_update[grid](
            state,
            rows,
            y,
            inputs["g"],
            inputs["beta"],
            out,
            state.stride(0),
            channels,
            (channels - heads * width) // (2 * n),
            n**-0.5,
            HEADS=heads,
            DV=width,
            DK=n,
            DK_TILE=columns,
            TILE=tile,
            PER_CHANNEL=kind == "kda",
        )
    return out
