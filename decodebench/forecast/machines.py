"""Machines as data: bandwidth, peaks and memory of one chip, each with its source.

One TOML file a machine in data/machines. Units are bytes, bytes a second and operations a second; peaks
are dense, a multiply and an add counted as two operations. ``this`` is the machine the code runs on,
measured when it is asked for.
"""

from __future__ import annotations

import os.path
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from decodebench.errors import DecodebenchError
from decodebench.shipped import shipped

DATA = shipped("data/machines")
#: numbers of these dtypes are multiplied at the peak of the first that a machine has
PEAKS_OF = {
    "fp4": ("fp4", "fp8", "bf16"),
    "fp8": ("fp8", "bf16"),
    "int8": ("int8", "bf16"),
    "int4": ("bf16",),
    "bf16": ("bf16",),
    "fp16": ("bf16",),
    "fp32": ("fp32", "bf16"),
}


class MachineError(DecodebenchError):
    """A machine that is not known or badly described: says which, and what is known."""


@dataclass(frozen=True)
class Machine:
    """One chip. ``memory`` in bytes, ``bandwidth`` and ``link`` (one way) in bytes a second, ``peak`` in
    dense operations a second by dtype, ``source`` of the numbers.
    """

    name: str
    title: str
    memory: float
    bandwidth: float
    link: float
    peak: Mapping[str, float]
    source: Mapping[str, str] = field(default_factory=dict)
    #: chips of one generation take the same kernels
    generation: str = "unknown"

    def peak_of(self, dtype: str) -> float:
        """Operations a second on numbers of this dtype; what has no units of its own is widened."""
        known = PEAKS_OF.get(dtype, ("bf16",))
        return next(self.peak[name] for name in known if name in self.peak)


def list_machines() -> tuple[str, ...]:
    """Names that ``machine`` knows, ``this`` among them."""
    return (*sorted(path.stem for path in DATA.glob("*.toml")), "this")


def machine(name: Machine | str | Path) -> Machine:
    """A machine by its name, or from the path of a TOML file of the same form.

    Raises ``MachineError`` where it is not known, or a number is missing or not positive.
    """
    if isinstance(name, Machine):
        return name
    text = str(name)
    if text == "this":
        return this_machine()
    known = DATA / f"{text.lower()}.toml"
    path = known if os.path.isfile(known) else Path(text).expanduser()
    if not os.path.isfile(path):
        import difflib

        near = difflib.get_close_matches(text.lower(), list_machines(), n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise MachineError(
            f"machine {text!r}: {hint}Known are {', '.join(list_machines())}; or give the path of a TOML file "
            "with memory, bandwidth, link and [peak]"
        )
    return read_machine(path)


@cache
def read_machine(path: Path) -> Machine:
    """The machine that a TOML file describes."""
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MachineError(f"{path}: not a machine's TOML file ({error})") from None
    numbers = {name: _positive(path, values, name) for name in ("memory", "bandwidth", "link")}
    peak = values.get("peak")
    if not isinstance(peak, dict) or "bf16" not in peak:
        raise MachineError(f"{path}: no [peak] with bf16: operations a second are needed")
    peaks = {name: _positive(path, peak, name) for name in peak}
    return Machine(
        path.stem,
        str(values.get("title", path.stem)),
        peak=peaks,
        source=values.get("source", {}),
        generation=str(values.get("generation", "unknown")),
        **numbers,
    )


def _positive(path: Path, values: Mapping, name: str) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise MachineError(f"{path}: {name} = {value!r}: a positive number is expected")
    return float(value)


@cache
def this_machine() -> Machine:
    """The machine this runs on: its memory's bandwidth and its peak, the best of a few short trials.

    Bandwidth is that of sums over an array far larger than caches, one part a thread; the peak is that
    of a float32 matrix product. Both take under a second together.
    """
    import os
    import time
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    numbers = np.ones(32 * 2**20 * min(threads, 8) // 2, dtype=np.float64)
    pieces = np.array_split(numbers, threads)

    def best(run, trials: int) -> float:
        times = []
        for _ in range(trials):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)

    with ThreadPoolExecutor(threads) as pool:
        read = best(lambda: list(pool.map(np.sum, pieces)), 4)
    square = np.ones((1024, 1024), dtype=np.float32)
    product = best(lambda: square @ square, 4)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**33
    bandwidth, peak = numbers.nbytes / read, 2 * 1024**3 / product
    return Machine(
        "this",
        f"this machine ({threads} threads, measured)",
        memory=float(pages),
        bandwidth=bandwidth,
        link=bandwidth,
        peak={"bf16": peak, "fp32": peak},
        source={"chip": "measured here: float64 sums over a large array, a float32 matrix product"},
    )
