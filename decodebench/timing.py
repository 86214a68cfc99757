"""Clocks, statistics, and what this machine's memory can do.

Every latency in the toolkit comes from ``measure`` and is set against ``bandwidth``, measured in
the same process: the memory bus of a shared machine drifts by a factor of two from run to run.
``machine`` and ``provenance`` say what was measured on what; neither holds user names or paths.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import torch

from decodebench.specs import DecodebenchError


class TimingError(DecodebenchError):
    """A measurement that cannot be made on this machine: names the device and the remedy."""


@dataclass(frozen=True)
class Timing:
    """Samples of one step in seconds. A sample is the mean of ``calls_per_sample`` steps.

    ``cold`` says whether caches were flushed before every step; ``method`` names the clock, and
    any fallback taken on the way to it.
    """

    samples: tuple[float, ...]
    cold: bool
    device: str
    method: str
    calls_per_sample: int = 1

    @property
    def steps(self) -> int:
        """Steps that were run under the clock."""
        return len(self.samples) * self.calls_per_sample

    def quantile(self, q: float) -> float:
        """The q-quantile in seconds, linear between samples."""
        ordered = sorted(self.samples)
        position = q * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def q1(self) -> float:
        return self.quantile(0.25)

    @property
    def q3(self) -> float:
        return self.quantile(0.75)

    @property
    def p10(self) -> float:
        return self.quantile(0.1)

    @property
    def p90(self) -> float:
        return self.quantile(0.9)

    def to_dict(self) -> dict[str, object]:
        """Flat columns for a result row: seconds, counts, and how it was measured."""
        return {
            "median_s": self.median,
            "q1_s": self.q1,
            "q3_s": self.q3,
            "p10_s": self.p10,
            "p90_s": self.p90,
            "steps": self.steps,
            "cache_state": "cold" if self.cold else "warm",
            "clock": self.method,
        }

    def __str__(self) -> str:
        return (
            f"{format_seconds(self.median)} median of {self.steps} steps "
            f"(quartiles {format_seconds(self.q1)} to {format_seconds(self.q3)}, "
            f"p10 {format_seconds(self.p10)}, p90 {format_seconds(self.p90)}, "
            f"{'cold' if self.cold else 'warm'}, {self.device})"
        )


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


def format_seconds(seconds: float) -> str:
    """A duration with three significant digits and a readable unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def measure(
    step: Callable[[], object],
    *,
    device: str | torch.device = "cpu",
    cold: bool = False,
    min_seconds: float = 0.3,
    min_steps: int = 5,
    max_steps: int = 1000,
    threads: int | None = None,
) -> Timing:
    """Time ``step`` until ``min_seconds`` and ``min_steps`` are reached (at most ``max_steps`` samples).

    CPU, warm: ``torch.utils.benchmark`` with ``threads`` (default: torch's own count). CPU, cold:
    caches are evicted before each step, outside the clock. CUDA: the step is captured once in a
    graph and replayed between events; cold evicts the L2 between replays, outside the events.
    A step that a graph cannot hold is timed eagerly, and ``method`` says so.

    Raises ``TimingError`` where the device is not there or a limit makes no sense.
    """
    device = torch.device(device)
    if min_steps < 1 or max_steps < min_steps or min_seconds < 0:
        raise TimingError(
            f"min_steps {min_steps}, max_steps {max_steps}, min_seconds {min_seconds}: ask for at least one "
            "step, and for no more than max_steps"
        )
    if device.type == "cuda":
        return _measure_cuda(step, device, cold, min_seconds, min_steps, max_steps)
    if device.type != "cpu":
        raise TimingError(f"device {device}: clocks exist for cpu and cuda")
    threads = threads or torch.get_num_threads()
    if cold:
        return _measure_cpu_cold(step, min_seconds, min_steps, max_steps, threads)
    return _measure_cpu_warm(step, min_seconds, min_steps, threads)


def _measure_cpu_warm(step, min_seconds: float, min_steps: int, threads: int) -> Timing:
    from torch.utils.benchmark import Timer

    step()  # compiles, allocates, faults pages in: none of it is a step
    timer = Timer("step()", globals={"step": step}, num_threads=threads)
    result = timer.blocked_autorange(min_run_time=min_seconds)
    samples = list(result.times)
    while len(samples) < min_steps:
        samples += timer.timeit(result.number_per_run).times
    return Timing(
        tuple(samples), False, "cpu", f"torch.utils.benchmark, {threads} threads", result.number_per_run
    )


def _measure_cpu_cold(step, min_seconds: float, min_steps: int, max_steps: int, threads: int) -> Timing:
    # Timer.timeit warms up before it measures, so a cold clock has to be our own.
    eviction = torch.empty(_eviction_bytes(), dtype=torch.uint8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step()
        samples: list[float] = []
        while len(samples) < min_steps or (sum(samples) < min_seconds and len(samples) < max_steps):
            eviction.fill_(len(samples) % 251)
            start = time.perf_counter()
            step()
            samples.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    method = f"perf_counter after writing {eviction.numel() >> 20} MiB, {threads} threads"
    return Timing(tuple(samples), True, "cpu", method)


def _measure_cuda(step, device, cold: bool, min_seconds: float, min_steps: int, max_steps: int) -> Timing:
    """Written for a GPU and reviewed, not run: no GPU was at hand when this was written."""
    require_device(device)
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm-up off the default stream, as graph capture asks for
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        method = "CUDA graph of one step, replayed between events"
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            replay = graph.replay
        except RuntimeError as error:
            torch.cuda.synchronize()
            why = str(error).splitlines()[0]
            replay, method = step, f"eager between events (graph capture failed: {why})"
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        eviction = torch.empty(max(4 * l2, 1 << 26), dtype=torch.uint8, device=device) if cold else None
        for _ in range(3):
            replay()
        samples: list[float] = []
        while len(samples) < min_steps or (sum(samples) < min_seconds and len(samples) < max_steps):
            pairs = []
            for _ in range(min(16, max_steps)):  # a batch of replays per synchronisation keeps the queue full
                if eviction is not None:
                    eviction.zero_()
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                replay()
                stop.record()
                pairs.append((start, stop))
            torch.cuda.synchronize()
            samples += [start.elapsed_time(stop) / 1e3 for start, stop in pairs]
    return Timing(tuple(samples), cold, str(device), method)


def require_device(device: str | torch.device) -> torch.device:
    """The device, or a ``TimingError`` where this build of torch or this machine has none of it."""
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TimingError(f"device {device}: torch {torch.__version__} sees no CUDA device; use 'cpu'")
    return device


def _eviction_bytes() -> int:
    """Bytes to write so that caches hold nothing of before: twice the last level, 64 to 512 MiB.

    Virtual machines report the host's shared last level (hundreds of MiB); past 512 MiB the
    flush would take longer than what is measured and the share of one guest is smaller anyway.
    """
    largest = 32 << 20
    for size in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            largest = max(largest, int(size.read_text().strip().rstrip("K")) << 10)
        except (OSError, ValueError):
            continue
    return min(2 * largest, 512 << 20)


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


def busy() -> str | None:
    """A warning where other processes are using this machine's cores, from the load of the last minute.

    A step on all cores waits for the slowest of them: beside other work its median says little.
    """
    try:
        load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return None
    if load <= 1.25 * cores + 0.25:
        return None
    return f"the machine was busy (load {load:.1f} on {cores} cores): latencies are pessimistic"


def machine(device: str | torch.device = "cpu") -> dict[str, object]:
    """What a reader must not have to guess: device, cores, memory, and versions."""
    facts: dict[str, object] = {
        "device": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in ("triton", "vllm", "flashinfer-python"):
        try:
            facts[package.removesuffix("-python")] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    if torch.device(device).type == "cuda":
        require_device(device)
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "driver": _driver_version(),
            "host": _cpu_name(),
        }
    return facts


def provenance(
    settings: dict[str, object] | None = None, *, seed: int | None = None, device: str | torch.device = "cpu"
) -> dict[str, object]:
    """``machine`` plus code version, date, settings and seed: what a stored result needs beside it."""
    from decodebench import __version__

    commit, dirty = _git_state()
    return {
        **machine(device),
        "decodebench": __version__,
        "commit": commit,
        "uncommitted_changes": dirty,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "settings": dict(settings or {}),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError, AttributeError):
        return None


def _driver_version() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.split("\n")[0] or None
    except (OSError, subprocess.SubprocessError):
        return None


def _git_state() -> tuple[str | None, bool | None]:
    """Commit of this package's checkout and whether tracked files differ; (None, None) outside one."""
    package = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != package.parent:
            return None, None  # installed inside somebody else's repository
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None
