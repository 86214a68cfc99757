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
    bucket = int(time.monotonic() / max_age) if max_age > 0 else None
    if bucket is None:
        return _measure_bandwidth(str(device), torch.get_num_threads())
    return _cached_bandwidth(str(device), torch.get_num_threads(), bucket)


@lru_cache(maxsize=4)
def _cached_bandwidth(device: str, threads: int, bucket: int) -> Bandwidth:
    return _measure_bandwidth(device, threads)


def _measure_bandwidth(device: str, threads: int) -> Bandwidth:
    size = 256 << 20 if device == "cpu" else 2 << 30
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    rows = source.view(-1, 4096)
    vector = torch.ones(4096, dtype=torch.float32, device=device)
    out = torch.empty(rows.shape[0], device=device)

    def gbps(step, nbytes: int) -> float:
        return nbytes / measure(step, device=device, min_seconds=0.08).median / 1e9

    read = max(gbps(lambda: source.sum(), size), gbps(lambda: torch.mv(rows, vector, out=out), size))
    update = gbps(lambda: target.mul_(0.5), 2 * size)
    copy = gbps(lambda: target.copy_(source), 2 * size)
    return Bandwidth(read, copy, gbps(lambda: target.zero_(), size), update, device, size)
