"""The compiled CPU backend: ``decode.cpp`` built once by the system's C++ compiler, called by ctypes.

Why C++ and not ``torch.compile``: it builds in about four seconds for all kinds and shapes (inductor
takes seven for each), takes row indices without a gather or an indexed store, and reads bfloat16 and
float8 pages in place. The library is kept in the user's cache directory, named by a hash of source,
flags, compiler and CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from decodebench.errors import DecodebenchError
from decodebench.measure.kernels.reference import prepare as prepare
from decodebench.measure.kernels.reference import write_kv as write_kv

NAME = "cpp"
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-std=c++17")
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}


class CompilerMissing(DecodebenchError):
    """No C++ compiler, or one that cannot build the kernels."""


def why_not(device: str | torch.device = "cpu") -> str | None:
    """Why this backend cannot run on the device, or None where it can."""
    if torch.device(device).type != "cpu":
        return f"it runs on cpu, the cache is on {device}"
    try:
        _library()
    except CompilerMissing as error:
        return str(error)
    return None


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CompilerMissing("no C++ compiler on PATH: install g++, or use backend='torch'")
    source = Path(__file__).with_name("decode.cpp")
    version = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True).stdout
    identity = "\0".join([source.read_text(), *FLAGS, compiler, version, _cpu_flags(), torch.__version__])
    name = f"decode-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    for folder in _cache_folders():
        path = folder / name
        if not path.exists():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                partial = folder / f".{name}.{os.getpid()}"
                _build(compiler, source, partial)
                partial.replace(path)  # atomic: two processes may build at once
            except OSError:
                continue
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise CompilerMissing(f"the built kernels do not load ({error}): use backend='torch'") from error
    raise CompilerMissing("no writable folder to keep the built kernels in: set XDG_CACHE_HOME")


def _build(compiler: str, source: Path, target: Path) -> None:
    command = [*compiler.split(), *FLAGS, "-fPIC", "-shared", "-fopenmp", "-o", str(target), str(source)]
    # torch's own OpenMP runtime, so that both share one thread pool and torch.set_num_threads holds
    if list(Path(torch.__file__).parent.glob("lib/libgomp.so.1")):
        command.append(f"-L{Path(torch.__file__).parent / 'lib'}")
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        first = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr[:200])
        name = Path(compiler).name
        raise CompilerMissing(f"{name} cannot build the kernels ({first}): use backend='torch'")


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


def _cache_folders() -> list[Path]:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return [Path(home) / "decodebench", Path(tempfile.gettempdir()) / f"decodebench-{os.getuid()}"]


def can_attend(q: torch.Tensor, view: torch.Tensor, head_size_v: int, v_offset: int) -> str | None:
    """Why these shapes are not for this backend, or None."""
    if view.device.type != "cpu":
        return f"the C++ kernels run on cpu, the cache is on {view.device}"
    if view.dtype not in _CODES:
        return f"cache dtype {view.dtype}"
    if q.shape[-1] % 16 or head_size_v % 16:
        return f"head sizes {q.shape[-1]} and {head_size_v} are not multiples of 16"
    if q.shape[1] // view.shape[1] > 16:
        return f"{q.shape[1] // view.shape[1]} query heads a KV head: matrix products are faster above 16"
    return None


def attend(
    q, view, table, start, stop, *, scale: float, head_size_v: int, v_offset: int, plan: None = None
) -> torch.Tensor:
    """``reference.attend`` in float32; ``table`` int32, ``start`` and ``stop`` int64, all contiguous."""
    batch, heads, dk = q.shape
    _, kv_heads, entries, _ = view.shape
    q32 = (q.float() * scale).contiguous()
    out = torch.empty(batch, heads, head_size_v)
    blocks, head, entry, last = view.stride()
    assert last == 1 and table.dtype == torch.int32 and table.is_contiguous()
    _call(
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
        _call("decode_mamba1", *head, y, *(inputs[n] for n in ("dt", "a", "b", "c", "d")), out)
    elif kind == "mamba2":
        groups = (channels - shape[0] * shape[1]) // (2 * shape[2])
        _call("decode_mamba2", *head, groups, y, inputs["dt"], inputs["a"], inputs["d"], out)
    else:
        key_heads = (channels - shape[0] * shape[1]) // (2 * shape[2])
        _call("decode_delta", *head, key_heads, y, inputs["g"], inputs["beta"], int(kind == "kda"), out)
    return out


def _call(name: str, *arguments) -> None:
    converted = []
    for a in arguments:
        if isinstance(a, torch.Tensor):
            converted.append(ctypes.c_void_p(a.data_ptr()))
        else:
            # the dtype and flag arguments are int, everything else int64: both fit, sign-extended
            converted.append(ctypes.c_int64(a))
    if getattr(_library(), name)(*converted):
        raise DecodebenchError(f"{name}: a dtype that the C++ kernels do not take")
