"""Clocks, statistics, and what this machine's memory can do.

Every latency in the toolkit comes from ``measure`` and is set against ``bandwidth``, measured in
the same process: the memory bus of a shared machine drifts by a factor of two from run to run.
``machine`` and ``provenance`` say what was measured on what; neither holds user names or paths.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from decodebench.errors import DecodebenchError
from decodebench.measure.card import why_unusable
from decodebench.words import seconds_text


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
        """Median seconds a step."""
        return self.quantile(0.5)

    @property
    def q1(self) -> float:
        """Lower quartile, seconds a step."""
        return self.quantile(0.25)

    @property
    def q3(self) -> float:
        """Upper quartile, seconds a step."""
        return self.quantile(0.75)

    @property
    def p10(self) -> float:
        """Seconds a step that one sample in ten stays below."""
        return self.quantile(0.1)

    @property
    def p90(self) -> float:
        """Seconds a step that nine samples in ten stay below."""
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
            f"{seconds_text(self.median)} median of {self.steps} steps "
            f"(quartiles {seconds_text(self.q1)} to {seconds_text(self.q3)}, "
            f"p10 {seconds_text(self.p10)}, p90 {seconds_text(self.p90)}, "
            f"{'cold' if self.cold else 'warm'}, {self.device})"
        )


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
    graph, several times where it is short, and replayed between events; cold reads the L2 empty between
    replays, outside the events. A step that a graph cannot hold is timed eagerly, and ``method`` says so.
    There the number of samples follows from ``min_seconds`` alone.

    Raises ``TimingError`` where the device is not there or a limit makes no sense.
    """
    device = torch.device(device)
    if min_steps < 1 or max_steps < min_steps or min_seconds < 0:
        raise TimingError(
            f"min_steps {min_steps}, max_steps {max_steps}, min_seconds {min_seconds}: ask for at least one "
            "step, and for no more than max_steps"
        )
    if device.type == "cuda":
        return _measure_cuda(step, device, cold, min_seconds, min_steps)
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


#: seconds of steps before the clock: an idle card's clocks take a quarter of a second to rise
WARM_UP_SECONDS = 0.3
#: least seconds of a sample; shorter steps are repeated in it, so that no launch by the host shows
SAMPLE_SECONDS = 1e-3
#: least seconds of reading that empty the L2 before a cold step, while the host enqueues the step
EVICTION_SECONDS = 1e-4


def _measure_cuda(step, device, cold: bool, min_seconds: float, min_steps: int) -> Timing:
    """Replays of a captured step between events, behind work that keeps the host out of the sample.

    Warm: a graph of several steps, one graph a sample. Cold: one step a sample, behind a read of more
    than the L2 holds; a read leaves no lines to be written back inside the sample. Tested on a virtual
    timeline.
    """
    device = require_device(device)
    with torch.cuda.device(device):
        _run_aside(step)
        play, method = _capture(step, 1)
        _warm_up(play)
        once = _mean_seconds(play)
        copies = 1
        if not cold:
            copies = min(512, max(1, math.ceil(SAMPLE_SECONDS / once)))
            if copies > 1:
                play, method = _capture(step, copies)
        evict = _eviction(device) if cold else play
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(16)
        ]
        samples: list[float] = []
        began = time.monotonic()
        while len(samples) * copies < min_steps or sum(samples) * copies < min_seconds:
            if not cold:
                play()  # the queue is never empty when a sample begins
            for start, stop in pairs:
                if cold:
                    evict()
                start.record()
                play()
                stop.record()
            torch.cuda.synchronize()
            samples += [start.elapsed_time(stop) / 1e3 / copies for start, stop in pairs]
            if time.monotonic() - began > 20 * min_seconds + 5 and len(samples) * copies >= min_steps:
                break
    if cold:
        method += ", each behind a read that empties the L2"
    return Timing(tuple(samples), cold, str(device), method, copies)


def _run_aside(step) -> None:
    """Compile and allocate: three steps off the default stream, as graph capture asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def _capture(step, copies: int) -> tuple[Callable[[], object], str]:
    """A function that runs ``copies`` steps, and how: a graph, or one by one where a graph cannot hold them."""
    text = "one step" if copies == 1 else f"{copies} steps"
    before = torch.cuda.current_stream()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(copies):
                step()
        return graph.replay, f"CUDA graph of {text}, replayed between events"
    except RuntimeError as error:
        # torch leaves its capture stream current where ending the capture fails
        torch.cuda.set_stream(before)
        torch.cuda.synchronize()
        why = str(error).splitlines()[0]

    def eagerly() -> None:
        for _ in range(copies):
            step()

    return eagerly, f"{text} eagerly between events (graph capture failed: {why})"


def _warm_up(play) -> None:
    end = time.monotonic() + WARM_UP_SECONDS
    while time.monotonic() < end:
        for _ in range(16):
            play()
        torch.cuda.synchronize()


def _mean_seconds(play) -> float:
    """Seconds a call, from many in a row: good enough to choose how often a sample repeats it."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    play()
    start.record()
    for _ in range(32):
        play()
    stop.record()
    torch.cuda.synchronize()
    return max(1e-7, start.elapsed_time(stop) / 1e3 / 32)


def _eviction(device: torch.device) -> Callable[[], object]:
    """A read of more than the L2 holds, repeated until it takes long enough for the host to enqueue a step."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    buffer = torch.zeros(max(4 * l2, 64 << 20) // 4, dtype=torch.float32, device=device)
    total = torch.zeros((), device=device)

    def read() -> None:
        torch.sum(buffer, dim=0, out=total)

    times = max(1, math.ceil(EVICTION_SECONDS / _mean_seconds(read)))

    def evict() -> None:
        for _ in range(times):
            read()

    return evict


def require_device(device: str | torch.device) -> torch.device:
    """The device, or a ``TimingError`` where this build of torch or this machine has none of it."""
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        told = why_unusable() or f"torch {torch.__version__} sees no CUDA device; use 'cpu'"
        raise TimingError(f"device {device}: {told}")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise TimingError(f"device {device}: this machine has cuda:0 to cuda:{count - 1}")
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
