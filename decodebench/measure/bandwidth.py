"""What this machine's memory can do, measured in this process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache

import torch

from decodebench.measure.clock import measure, require_device


@dataclass(frozen=True)
class Bandwidth:
    """What this machine's memory does, in GB/s (1e9 bytes), each the best of a few plain kernels.

    ``copy`` and ``update`` (an in-place multiply) count bytes read plus bytes written.
    """

    read: float
    copy: float
    memset: float
    update: float
    device: str
    buffer_bytes: int
    #: 1e12 floating-point operations a second of products of two-byte numbers; None where not measured
    products: float | None = None
    #: seconds that one more small kernel of a CUDA graph takes, whatever it does; 0 on a CPU
    launch_seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"read {self.read:.0f}, copy {self.copy:.0f}, in-place update {self.update:.0f}, "
            f"memset {self.memset:.0f} GB/s ({self.device}, {self.buffer_bytes >> 20} MiB buffer)"
        )


def bandwidth(device: str | torch.device = "cpu", max_age: float = 120.0) -> Bandwidth:
    """The measured read, copy, memset and in-place update speed of the device, under a second.

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
    speeds = _memory_speeds(device, size)
    if device == "cpu":
        return Bandwidth(**speeds, device=device, buffer_bytes=size)
    torch.cuda.empty_cache()  # the caches that follow need the room
    floor = launch_seconds(device, in_graph=True)
    return Bandwidth(
        **speeds, device=device, buffer_bytes=size, products=_products(device), launch_seconds=floor
    )


def _memory_speeds(device: str, size: int) -> dict[str, float]:
    """Read, copy, memset and update in GB/s, on numbers drawn at random: equal ones cost less power."""
    source = torch.empty(size // 4, dtype=torch.float32, device=device).uniform_(0.5, 1.5)
    target = torch.empty_like(source).uniform_(0.5, 1.5)
    rows = source.view(-1, 4096)
    vector = torch.ones(4096, dtype=torch.float32, device=device)
    out = torch.empty(rows.shape[0], device=device)

    def gbps(step, nbytes: int) -> float:
        return nbytes / measure(step, device=device, min_seconds=0.08).median / 1e9

    return {
        "read": max(gbps(lambda: source.sum(), size), gbps(lambda: torch.mv(rows, vector, out=out), size)),
        "update": gbps(lambda: target.mul_(0.999), 2 * size),
        "copy": gbps(lambda: target.copy_(source), 2 * size),
        "memset": gbps(lambda: target.zero_(), size),
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
