"""Requests over time: when they arrive, how long they are, what they share. Made, not read: ``traces`` reads.

Lengths are in tokens, times in seconds. What requests share is told by *segments*: a request's tokens
are covered from the front by segments, each with an id and the token at which it ends; two requests
hold the same tokens up to a position where the segments that cover it have the same id. The ids are
those of prefixes: an equal id says that all before it is equal as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from decodebench.errors import DecodebenchError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

#: a segment that ends here goes on into what the request generates
ENDLESS = 1 << 40

ARRIVALS = ("poisson", "gamma", "diurnal", "together")


class TrafficError(DecodebenchError):
    """Traffic that cannot be read or made: says which line, field or argument."""


@dataclass(frozen=True, eq=False)
class Segments:
    """What requests share: segments ``start[i]`` to ``start[i + 1]`` cover request ``i`` from its front.

    ``ids`` are 0 or larger. ``ends``: token at which each segment ends (``ENDLESS``: beyond all tokens).
    """

    start: np.ndarray
    ids: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True, eq=False)
class Traffic:
    """Requests in the order of their arrival.

    ``arrival``: seconds since the first (float64); ``prompt``, ``output``: tokens (int64), at least 1.
    ``dropped``: lines of the source that are no requests, ``reasons`` says of the first few why.
    """

    name: str
    arrival: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    segments: Segments | None = None
    dropped: int = 0
    reasons: tuple[str, ...] = ()
    #: how times or lengths were come by, where the source does not give them
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival[-1]) if len(self) else 0.0

    @property
    def rate(self) -> float:
        """Requests a second over the duration; infinite where all arrive together."""
        return (len(self) - 1) / self.duration if self.duration else float("inf")

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {len(self):,} requests in {self.duration:,.0f} s ({self.rate:.2f} a second), "
            f"prompts of {self.prompt.mean():,.0f} tokens, outputs of {self.output.mean():,.0f} (means)"
        ]
        if self.dropped:
            lines.append(
                f"{self.dropped:,} line{'s' * (self.dropped > 1)} left out: " + "; ".join(self.reasons)
            )
        return "\n".join([*lines, *self.notes])

    def table(self) -> pd.DataFrame:
        """One row a request: arrival_s, prompt_tokens, output_tokens."""
        import pandas as pd

        return pd.DataFrame(
            {"arrival_s": self.arrival, "prompt_tokens": self.prompt, "output_tokens": self.output}
        )

    def first(self, requests: int) -> Traffic:
        """Only the first requests."""
        _positive(requests=requests)
        n = min(int(requests), len(self))
        kept = self.segments
        if kept is not None:
            last = int(kept.start[n])
            kept = Segments(kept.start[: n + 1], kept.ids[:last], kept.ends[:last])
        return replace(
            self, arrival=self.arrival[:n], prompt=self.prompt[:n], output=self.output[:n], segments=kept
        )

    def at_rate(self, rate: float) -> Traffic:
        """The same requests with all times stretched so that ``rate`` arrive a second."""
        _positive(rate=rate)
        if not self.duration:
            raise TrafficError(f"{self.name}: all requests arrive together, there is no time to stretch")
        return replace(self, arrival=self.arrival * (self.rate / rate))

    def resample(self, requests: int, rate: float | None = None, seed: int = 0) -> Traffic:
        """Requests whose lengths are drawn from this traffic's (with what they belong to: prompt and output
        stay together), arriving as a Poisson process. Nothing is shared. ``rate``: default this traffic's.
        """
        import numpy as np

        rate = self.rate if rate is None else rate
        _positive(requests=requests, rate=rate)
        draw = np.random.default_rng(seed)
        chosen = draw.integers(0, len(self), requests)
        return Traffic(
            f"{self.name}, {requests:,} drawn",
            arrival_times(requests, rate, seed=seed),
            self.prompt[chosen],
            self.output[chosen],
        )

    def without_sharing(self) -> Traffic:
        """The same lengths and times, every prompt its own."""
        return replace(self, segments=None)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0 or value == float("inf"):
            raise TrafficError(f"{name} {value!r}: a positive number is expected")


def arrival_times(
    requests: int,
    rate: float,
    arrivals: str = "poisson",
    burstiness: float = 4.0,
    period: float = 86_400.0,
    swing: float = 0.8,
    seed: int = 0,
) -> np.ndarray:
    """Seconds at which requests arrive, the first at 0, ``rate`` a second on average.

    ``poisson``: gaps of an exponential distribution; ``gamma``: of a gamma distribution whose squared
    coefficient of variation is ``burstiness`` (1: Poisson; larger: bursts); ``diurnal``: Poisson at a rate
    that swings by the share ``swing`` as a sine of ``period`` seconds, from its mean upwards;
    ``together``: all at 0.
    """
    import numpy as np

    _positive(requests=requests, rate=rate, burstiness=burstiness, period=period)
    if arrivals not in ARRIVALS:
        raise TrafficError(f"arrivals {arrivals!r}: choose {', '.join(ARRIVALS)}")
    if not 0 <= swing < 1:
        raise TrafficError(f"swing {swing!r}: a share from 0 to below 1 is expected")
    draw = np.random.default_rng(seed)
    if arrivals == "together":
        return np.zeros(requests)
    if arrivals == "gamma":
        gaps = draw.gamma(1 / burstiness, burstiness / rate, requests)
    else:
        gaps = draw.exponential(1 / rate, requests)
    times = np.cumsum(gaps) - gaps[0]
    if arrivals == "diurnal":
        # the clock of a steady process, read at the time by which as many requests have come
        clock = np.linspace(0, max(times[-1], period / 100) + period, 4096 + int(64 * times[-1] / period))
        turn = 2 * np.pi / period
        times = np.interp(times, clock + swing / turn * (1 - np.cos(turn * clock)), clock)
    return times


def lengths(
    requests: int, tokens: int | tuple[float, float], longest: int = 131_072, seed: int = 0
) -> np.ndarray:
    """Tokens of each request: a number for all, or (median, sigma) of a lognormal distribution."""
    import numpy as np

    if isinstance(tokens, int):
        _positive(tokens=tokens)
        return np.full(requests, tokens, np.int64)
    try:
        median, sigma = (float(part) for part in tokens)
    except (TypeError, ValueError):
        raise TrafficError(f"lengths {tokens!r}: a number of tokens or (median, sigma) is expected") from None
    _positive(median=median)
    if not 0 <= sigma <= 10:
        raise TrafficError(f"sigma {sigma!r} of a lognormal distribution: 0 to 10 is expected")
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, requests)
    return np.clip(np.rint(drawn), 1, longest).astype(np.int64)


def synthetic_traffic(
    requests: int = 10_000,
    rate: float = 4.0,
    prompt: int | tuple[float, float] = (1000, 1.0),
    output: int | tuple[float, float] = (200, 0.8),
    arrivals: str = "poisson",
    system_prompts: int = 0,
    system_tokens: int = 1024,
    turns: int = 1,
    think_seconds: float = 30.0,
    longest: int = 131_072,
    seed: int = 0,
    **shape: float,
) -> Traffic:
    """Made traffic: ``requests`` of them, ``rate`` a second.

    ``prompt``, ``output``: tokens, or (median, sigma) of a lognormal distribution; no prompt is longer than
    ``longest``. ``system_prompts``: so many different ones, of ``system_tokens`` each, stand before the
    prompts, the k-th used in proportion to 1 / k. ``turns``: requests of a conversation; each repeats all
    before it, what was generated included, and comes ``think_seconds`` (mean of an exponential
    distribution) after the one before. ``shape``: ``burstiness``, ``period``, ``swing`` of
    ``arrival_times``. The same seed gives the same traffic.
    """
    import numpy as np

    _positive(requests=requests, turns=turns, think_seconds=think_seconds)
    if system_prompts < 0 or (system_prompts and system_tokens < 1):
        raise TrafficError(f"{system_prompts} system prompts of {system_tokens} tokens: both are positive")
    draw = np.random.default_rng(seed)
    conversations = -(-requests // turns)
    begin = arrival_times(conversations, rate / turns, arrivals, seed=seed + 1, **shape)
    new = lengths(conversations * turns, prompt, longest, seed + 2).reshape(conversations, turns)
    out = lengths(conversations * turns, output, longest, seed + 3).reshape(conversations, turns)
    before = np.cumsum(new + out, axis=1) - (new + out)
    system = system_tokens if system_prompts else 0
    pauses = draw.exponential(think_seconds, (conversations, turns))
    pauses[:, 0] = 0
    times = begin[:, None] + np.cumsum(pauses, axis=1)
    order = np.argsort(times, axis=None, kind="stable")[:requests]
    prompts = (system + before + new).ravel()[order]
    kept = prompts <= longest
    order, prompts = order[kept], prompts[kept]
    notes = () if kept.all() else (f"{int((~kept).sum()):,} turns beyond {longest:,} tokens are not sent",)
    segments = None
    if system_prompts or turns > 1:
        weights = 1 / np.arange(1, max(system_prompts, 1) + 1)
        chosen = draw.choice(len(weights), conversations, p=weights / weights.sum())[order // turns]
        own = max(system_prompts, 1) + order // turns
        ids, ends = (own[:, None], np.full((len(order), 1), ENDLESS))
        if system_prompts:
            ids = np.column_stack([chosen, own])
            ends = np.column_stack([np.full(len(order), system), ends])
        start = np.arange(0, ids.size + 1, ids.shape[1])
        segments = Segments(start, ids.ravel().astype(np.int64), ends.ravel().astype(np.int64))
    arrival = times.ravel()[order]
    name = f"synthetic, {arrivals} at {rate:g} a second"
    return Traffic(name, arrival - arrival[0], prompts, out.ravel()[order], segments, notes=notes)
