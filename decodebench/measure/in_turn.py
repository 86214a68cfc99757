"""Ways of doing one thing, timed in turn, and whether something else was at work meanwhile.

The memory bus of a shared machine drifts by a factor of two within seconds: what is compared has to take
turns, and the ratio is that of one turn. Where another process takes a part of the cores, or the turns do
not agree, a ratio says nothing, and ``InTurn.disturbed`` says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from decodebench.measure.clock import Timing

#: share of the cores' time that others may take before a comparison is called disturbed
OTHERS = 0.1
#: the quartiles of a ratio's turns may lie this far apart, over the median
SCATTER = 0.25
#: times that a comparison is made again where it scatters; the calmest counts
ROUNDS = 3


@dataclass(frozen=True)
class InTurn:
    """Seconds of each way, turn by turn: ``samples[way][i]`` were all measured in turn i.

    ``others``: share of the cores' time that went to other processes meanwhile; None where nobody tells.
    """

    samples: Mapping[str, tuple[float, ...]]
    device: str
    others: float | None = None

    def timing(self, way: str) -> Timing:
        """The turns of one way as the clock gives them: seconds a step."""
        return Timing(
            self.samples[way], False, self.device, "perf_counter, in turn with what it is compared to"
        )

    def median(self, way: str) -> float:
        """Seconds."""
        return self.timing(way).median

    def ratio(self, way: str, to: str) -> float:
        """How many times faster ``way`` is than ``to``: the median of the turns' ratios."""
        return self._ratios(way, to).median

    def scatter(self, way: str, to: str) -> float:
        """Distance between the quartiles of the turns' ratios, over their median."""
        ratios = self._ratios(way, to)
        return (ratios.q3 - ratios.q1) / ratios.median

    def _ratios(self, way: str, to: str) -> Timing:
        each = tuple(b / a for a, b in zip(self.samples[way], self.samples[to]))
        return Timing(each, False, self.device, "ratios")

    def disturbed(self, way: str, to: str) -> str | None:
        """Why the ratio says nothing, or None where it does."""
        crowded = self.crowded()
        scatter = self.scatter(way, to)
        if crowded is None and scatter > SCATTER:
            return f"turns scatter by {scatter:.0%}"
        return crowded

    def crowded(self) -> str | None:
        """That others were at work, or None where they were not or nobody tells."""
        if self.others is None or self.others <= OTHERS:
            return None
        return f"other processes took {self.others:.0%} of the cores"


def in_turn(
    ways: Mapping[str, Callable[[], object]],
    *,
    turns: int = 7,
    seconds: float = 0.0,
    device: str | torch.device = "cpu",
    rounds: int = ROUNDS,
    own: Iterable[int] = (),
    compare: tuple[str, str] | None = None,
) -> InTurn:
    """Run every way once a turn, for ``turns`` turns and at least ``seconds``, after one that is not counted.

    Which way begins moves on from turn to turn. Where ``compare`` (default: the first two ways) is
    disturbed, all turns are made again, ``rounds`` times at most; the round that scatters least is
    returned. ``own``: processes of the caller whose work is no disturbance.
    """
    device = torch.device(device)
    names = list(ways)
    pair = compare or ((names[0], names[1]) if len(names) > 1 else (names[0], names[0]))
    best: InTurn | None = None
    for _ in range(max(1, rounds)):
        found = _one_round(ways, turns, seconds, device, tuple(own))
        if best is None or _calm(found, pair) < _calm(best, pair):
            best = found
        if found.disturbed(*pair) is None:
            break
    assert best is not None
    return best


def _calm(found: InTurn, pair: tuple[str, str]) -> tuple[bool, float]:
    return found.disturbed(*pair) is not None, found.scatter(*pair) + (found.others or 0.0)


def _one_round(ways, turns: int, seconds: float, device: torch.device, own: tuple[int, ...]) -> InTurn:
    names = list(ways)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # compiles, allocates, faults pages in: none of it is measured
        ways[name]()
    before, began, turn = _core_seconds(own), time.perf_counter(), 0
    while turn < turns or time.perf_counter() - began < seconds:
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            start = time.perf_counter()
            ways[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            samples[name].append(time.perf_counter() - start)
        turn += 1
    after = _core_seconds(own)
    others = None
    if before is not None and after is not None and after[0] - before[0] >= 0.1:
        others = max(0.0, (after[1] - before[1]) / (after[0] - before[0]))
    return InTurn({name: tuple(times) for name, times in samples.items()}, str(device), others)


def _core_seconds(own: tuple[int, ...]) -> tuple[float, float] | None:
    """Seconds of the cores that this process may use: all, and those spent for others (or withheld).

    From ``/proc/stat``, in steps of 10 ms; None where there is none.
    """
    try:
        tick = os.sysconf("SC_CLK_TCK")
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        everyone = total = 0.0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name in mine:
                user, nice, system, idle, iowait, irq, softirq, steal = (int(x) / tick for x in fields[:8])
                everyone += user + nice + system + irq + softirq + steal
                total += user + nice + system + irq + softirq + steal + idle + iowait
        used = os.times()
        spent = used.user + used.system
        for pid in own:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            spent += (int(fields[11]) + int(fields[12])) / tick
    except (OSError, ValueError, AttributeError, IndexError):
        return None
    return total, everyone - spent
