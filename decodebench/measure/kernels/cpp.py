"""The compiled CPU backend: ``attention.cpp`` and ``states.cpp``, built once and called by ctypes.

Why C++ and not ``torch.compile``: it builds in some seconds for all kinds and shapes (inductor takes
seven for each), takes row indices without a gather or an indexed store, and reads bfloat16 and float8
pages in place. What the processor has (AVX2, AVX512, AVX512-BF16) is chosen when it is built, on it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from decodebench.cache import compiled
from decodebench.errors import DecodebenchError
from decodebench.measure.kernels.reference import prepare as prepare
from decodebench.measure.kernels.reference import write_kv as write_kv

NAME = "cpp"
ATTENTION, STATES = (Path(__file__).with_name(name) for name in ("attention.cpp", "states.cpp"))
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}


def why_not(device: str | torch.device = "cpu") -> str | None:
    """Why this backend cannot run on the device, or None where it can."""
    if torch.device(device).type != "cpu":
        return f"it runs on cpu, the cache is on {device}"
    return compiled.why_not(ATTENTION) or compiled.why_not(STATES)


def can_attend(q: torch.Tensor, view: torch.Tensor, head_size_v: int, v_offset: int) -> str | None:
    """Why these shapes are not for this backend, or None."""
    if view.device.type != "cpu":
        return f"the C++ kernels run on cpu, the cache is on {view.device}"
    if view.dtype not in _CODES:
        return f"cache dtype {view.dtype}"
    if q.shape[-1] % 16 or head_size_v % 16:
        return f"head sizes {q.shape[-1]} and {head_size_v} are not multiples of 16"
    group = q.shape[1] // view.shape[1]
    if group > 16 and view.dtype == torch.bfloat16 == q.dtype and compiled.has("amx_bf16"):
        return f"{group} query heads a KV head: torch's matrix products use this processor's tiles"
    return None


def attend(
    q: torch.Tensor,
    view: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    stop: torch.Tensor,
    *,
    scale: float,
    head_size_v: int,
    v_offset: int,
    plan: None = None,
) -> torch.Tensor:
    """``reference.attend`` in float32; ``table`` int32, ``start`` and ``stop`` int64, all contiguous."""
    batch, heads, dk = q.shape
    _, kv_heads, entries, _ = view.shape
    q32 = q.float().contiguous()
    out = torch.empty(batch, heads, head_size_v)
    blocks, head, entry, last = view.stride()
    assert last == 1 and table.dtype == torch.int32 and table.is_contiguous()
    _call(
        ATTENTION,
        "decode_attention",
        view,
        _CODES[view.dtype],
        blocks,
        head,
        entry,
        table,
        table.shape[1],
        start,
        stop,
        batch,
        kv_heads,
        heads // kv_heads,
        entries,
        dk,
        head_size_v,
        v_offset,
        q32,
        float(scale),
        int(q.dtype != torch.bfloat16),
        out,
    )
    return out.to(q.dtype)


def can_update(kind: str, parts: dict[str, torch.Tensor]) -> str | None:
    """Why this state is not for this backend, or None."""
    for name, part in parts.items():
        if part.device.type != "cpu":
            return f"the C++ kernels run on cpu, the cache is on {part.device}"
        if part.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{name} state of {part.dtype}"
        if part.shape[-1] % 16:
            return f"{name} state whose last dimension {part.shape[-1]} is not a multiple of 16"
    return None if kind in ("mamba1", "mamba2", "gdn", "kda", "short_conv") else f"{kind} states"


def state_step(kind: str, parts: dict, rows: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """``reference.state_step`` in float32, in place, rows read and written once. Inputs contiguous."""
    batch = len(rows)
    conv = parts["conv"]
    length, channels = conv.shape[1:]
    y = torch.empty(batch, channels)
    weight = inputs.get("weight_t")
    weight = inputs["weight"].T.contiguous() if weight is None else weight
    _call(
        STATES,
        "decode_conv",
        conv,
        _CODES[conv.dtype],
        conv.stride(0),
        rows,
        batch,
        length,
        channels,
        inputs["x"],
        weight,
        inputs["bias"],
        weight.shape[0] - 1,
        int(kind != "short_conv"),
        y,
    )
    if kind == "short_conv":
        return y
    state = parts["ssm" if "ssm" in parts else "recurrent"]
    shape = state.shape[1:]
    out = torch.empty(batch, *shape[:-1])
    head = (state, _CODES[state.dtype], state.stride(0), rows, batch, *shape)
    if kind == "mamba1":
        _call(STATES, "decode_mamba1", *head, y, *(inputs[n] for n in ("dt", "a", "b", "c", "d")), out)
    elif kind == "mamba2":
        groups = (channels - shape[0] * shape[1]) // (2 * shape[2])
        _call(STATES, "decode_mamba2", *head, groups, y, inputs["dt"], inputs["a"], inputs["d"], out)
    else:
        key_heads = (channels - shape[0] * shape[1]) // (2 * shape[2])
        _call(
            STATES, "decode_delta", *head, key_heads, y, inputs["g"], inputs["beta"], int(kind == "kda"), out
        )
    return out


def _call(source: Path, name: str, *arguments: torch.Tensor | float | int) -> None:
    converted: list[ctypes.c_void_p | ctypes.c_double | ctypes.c_int64] = []
    for a in arguments:
        if isinstance(a, torch.Tensor):
            converted.append(ctypes.c_void_p(a.data_ptr()))
        elif isinstance(a, float):
            converted.append(ctypes.c_double(a))
        else:
            # the dtype and flag arguments are int, everything else int64: both fit, sign-extended
            converted.append(ctypes.c_int64(a))
    if getattr(compiled.library(source), name)(*converted):
        raise DecodebenchError(f"{name}: a dtype that the C++ kernels do not take")
