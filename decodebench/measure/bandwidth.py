"""What this machine's memory and its arithmetic can do, measured in this process."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch

from decodebench.cache import compiled
from decodebench.measure.clock import measure, require_device

THROUGHPUT = Path(__file__).parent / "kernels" / "throughput.cpp"


@dataclass(frozen=True)
class Bandwidth:
    """What this machine's memory does, in GB/s (1e9 bytes), each the best of a few plain kernels; and its
    arithmetic, in 1e12 operations a second, where it was measured.

    ``copy`` and ``update`` (an in-place multiply) count bytes read plus bytes written.
    """

    read: float
    copy: float
    memset: float
    update: float
    device: str
    buffer_bytes: int
    #: products of two-byte numbers, a multiplication and an addition counted as two
    products: float | None = None
    #: seconds that one more small kernel of a CUDA graph takes, whatever it does; 0 on a CPU
    launch_seconds: float = 0.0
    #: products of float32
    products_float32: float | None = None
    #: multiplications and additions of float32 vectors in registers (CPU)
    vector: float | None = None
    #: exponentials of float32 vectors, 1e12 a second, as the decode kernels compute them (CPU)
    exponentials: float | None = None

    def __str__(self) -> str:
        text = (
            f"read {self.read:.0f}, copy {self.copy:.0f}, in-place update {self.update:.0f}, "
            f"memset {self.memset:.0f} GB/s ({self.device}, {self.buffer_bytes >> 20} MiB buffer)"
        )
        arithmetic = {
            "products": self.products,
            "of float32": self.products_float32,
            "vectors": self.vector,
            "exponentials": self.exponentials,
        }
        known = [f"{name} {1e3 * rate:.0f}" for name, rate in arithmetic.items() if rate is not None]
        return text + (f"; {', '.join(known)} billion operations a second" if known else "")


@dataclass(frozen=True)
class Probe:
    """A plain kernel that does one thing as fast as this machine can: ``amount`` bytes or operations a run."""

    run: Callable[[], object]
    amount: float


def probes(size: int = 128 << 20) -> dict[str, list[Probe]]:
    """Field of ``Bandwidth`` → the kernels that measure it on a CPU, the best of which counts.

    ``size``: bytes of the buffers, well above the caches. Numbers are drawn at random: equal ones cost
    less power. Arithmetic in registers needs the C++ compiler and is left out where there is none.
    """
    found = _memory_probes("cpu", size)
    for name, dtype in (("products", torch.bfloat16), ("products_float32", torch.float32)):
        n = 1024
        a, b = (torch.empty(n, n).normal_().to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        found[name] = [Probe(partial(torch.mm, a, b, out=out), 2 * n**3)]
    if compiled.why_not(THROUGHPUT) is None:
        library, threads = compiled.library(THROUGHPUT), torch.get_num_threads()
        for name, call, each in (
            ("vector", library.vector_multiply_add, 2 * 16 * 12),
            ("exponentials", library.vector_exponentials, 16 * 4),
        ):
            count = int(4e7) // each  # a millisecond or so
            found[name] = [Probe(partial(call, ctypes.c_int64(count)), count * each * threads)]
    return found


def from_probes(
    seconds: Mapping[str, Sequence[float]], kernels: Mapping[str, Sequence[Probe]], device: str, size: int
) -> Bandwidth:
    """What the probes' times come to: the fastest of each field's, where it was run.

    The product of two-byte numbers is no slower than that of float32: a processor that has no
    instructions for the former can always convert.
    """
    rates = {
        name: max(kernel.amount / t for kernel, t in zip(kernels[name], times))
        for name, times in seconds.items()
    }
    memory = {name: rates.get(name, float("nan")) / 1e9 for name in ("read", "copy", "memset", "update")}
    arithmetic = {
        name: rates[name] / 1e12
        for name in ("products", "products_float32", "vector", "exponentials")
        if name in rates
    }
    if "products" in arithmetic and "products_float32" in arithmetic:
        arithmetic["products"] = max(arithmetic["products"], arithmetic["products_float32"])
    return Bandwidth(**memory, device=device, buffer_bytes=size, **arithmetic)


def bandwidth(device: str | torch.device = "cpu", max_age: float = 120.0) -> Bandwidth:
    """The measured read, copy, memset and in-place update speed of the device and its arithmetic, in a second.

    Cached for ``max_age`` seconds, 0 measures anew. Medians; for reads and updates the fastest of
    a few plain kernels, so that the limit is the machine's and not one kernel's.
    """
    device = require_device(device)
    if device.type == "cuda" and max_age > 0:
        return _cached_bandwidth(str(device), 0, 0)  # a card does not drift as a shared machine does
    bucket = int(time.monotonic() / max_age) if max_age > 0 else None
    if bucket is None:
        return _measure_bandwidth(str(device), torch.get_num_threads())
    return _cached_bandwidth(str(device), torch.get_num_threads(), bucket)


@lru_cache(maxsize=4)
def _cached_bandwidth(device: str, threads: int, bucket: int) -> Bandwidth:
    return _measure_bandwidth(device, threads)


def _measure_bandwidth(device: str, threads: int) -> Bandwidth:
    size = 256 << 20 if device == "cpu" else _buffer_bytes(torch.device(device))
    kernels = probes(size) if device == "cpu" else _memory_probes(device, size)
    seconds = {
        name: [measure(kernel.run, device=device, min_seconds=0.08).median for kernel in each]
        for name, each in kernels.items()
    }
    found = from_probes(seconds, kernels, device, size)
    if device == "cpu":
        return found
    del kernels
    torch.cuda.empty_cache()  # the caches that follow need the room
    floor = launch_seconds(device, in_graph=True)
    return replace(found, products=_products(device), launch_seconds=floor)


def _memory_probes(device: str, size: int) -> dict[str, list[Probe]]:
    source = torch.empty(size // 4, dtype=torch.float32, device=device).uniform_(0.5, 1.5)
    target = torch.empty_like(source).uniform_(0.5, 1.5)
    rows = source.view(-1, 4096)
    vector = torch.ones(4096, dtype=torch.float32, device=device)
    out = torch.empty(rows.shape[0], device=device)
    return {
        "read": [Probe(source.sum, size), Probe(partial(torch.mv, rows, vector, out=out), size)],
        "update": [Probe(partial(target.mul_, 0.999), 2 * size)],
        "copy": [Probe(partial(target.copy_, source), 2 * size)],
        "memset": [Probe(target.zero_, size)],
    }


def _buffer_bytes(device: torch.device) -> int:
    """2 GiB, or a quarter of what a fuller card has free; at least four times the L2."""
    free = torch.cuda.mem_get_info(device)[0]
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return max(4 * l2, min(2 << 30, free // 4)) >> 20 << 20


def _products(device: str) -> float:
    """1e12 operations a second of one large product of bfloat16 matrices."""
    n = 8192
    a, b = (torch.empty(n, n, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
    out = torch.empty_like(a)
    seconds = measure(lambda: torch.mm(a, b, out=out), device=device, min_seconds=0.1).median
    return 2 * n**3 / seconds / 1e12


def launch_seconds(device: str | torch.device, in_graph: bool) -> float:
    """Seconds that one kernel which does next to nothing takes: in a graph of a hundred, or one by one."""
    tiny = torch.zeros(1, device=device)

    def hundred() -> None:
        for _ in range(100):
            tiny.add_(1.0)

    if in_graph:
        return measure(hundred, device=device, min_seconds=0.05).median / 100
    hundred()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    hundred()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / 100
