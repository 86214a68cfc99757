"""What a week of requests would do to a layout: how many run, wait, give way, and how long each takes.

    traffic = db.read_traffic("azure-conversation-2023")
    db.simulate(db.plan("gpt-oss-20b", memory="20GiB"), traffic, "h200")

The scheduler is vLLM 0.32's (``scheduler``; where prefixes are shared ``prefix_cache``), the pool is the
layout's, the time of a step comes from ``step_time``. One engine, scheduled synchronously, no speculation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol

from decodebench.errors import DecodebenchError
from decodebench.forecast import prefix_cache, scheduler
from decodebench.forecast.scheduler import Costs, Requests, State
from decodebench.forecast.traffic import Segments, Traffic
from decodebench.layout.layout import Layout
from decodebench.models.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    cdiv,
)
from decodebench.words import seconds_text

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

POLICIES = {"fcfs": scheduler.FIRST_COME, "shortest": scheduler.SHORTEST_FIRST}

#: blocks that admission never asks for more than, where a group has no cap
NO_CAP = 1 << 60


class SimulationError(DecodebenchError):
    """Settings or traffic that no engine would run: says which and what to change."""


class StepTime(Protocol):
    """What says how long steps take."""

    def costs(self, layout: Layout, groups: np.ndarray, members: tuple, budget: int) -> Costs:
        """Seconds by scheduled tokens (0 to ``budget``) and by token read of each column of ``groups``,
        which stand for the groups ``members`` of the layout.
        """


@dataclass(frozen=True)
class OneSecond:
    """Every step takes a second: for counting steps."""

    def costs(self, layout: Layout, groups: np.ndarray, members: tuple, budget: int) -> Costs:
        import numpy as np

        none = np.zeros(groups.shape[1])
        return Costs(np.ones(budget + 1), np.zeros(budget + 1), 0.0, none, none, 0.0)


@dataclass(frozen=True)
class Settings:
    """How the engine serves. Names are vLLM's; ``prefill`` False: a connector stands in for all of a prompt
    but its last token, as in a decode benchmark. ``scheduling_policy``: fcfs or shortest (prompt first).
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    scheduling_policy: str = "fcfs"
    prefill: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20:
                raise SimulationError(f"{name} {value!r}: a whole number from 1 to {1 << 20} is expected")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SimulationError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} below max_num_seqs "
                f"{self.max_num_seqs}: a step has a token for each sequence"
            )
        if self.scheduling_policy not in POLICIES:
            raise SimulationError(
                f"scheduling_policy {self.scheduling_policy!r}: choose {', '.join(POLICIES)}"
            )


def groups_of(layout: Layout, budget: int) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """The layout's groups as the scheduler counts them, and which of the layout's each column stands for.

    ``budget``: tokens of a batch, for layouts that do not say how many may be in flight.
    """
    import numpy as np

    found: dict[tuple[int, ...], list[int]] = {}
    for i, group in enumerate(layout.groups):
        found.setdefault((*_rule(layout, i, budget), group.pool), []).append(i)
    groups = np.zeros((scheduler.LEAVE + 1, len(found)), np.int64)
    for column, (rule, members) in enumerate(found.items()):
        groups[[*range(scheduler.CAP + 1), scheduler.POOL], column] = rule
        groups[scheduler.WEIGHT, column] = len(members)
    for row, counters in zip((scheduler.PHASE, scheduler.LEAVE), scheduler.phases(groups)):
        groups[row] = np.cumsum(counters) - counters
    return groups, tuple(map(tuple, found.values()))


def _rule(layout: Layout, i: int, budget: int) -> tuple[int, int, int, int, int, int]:
    """(kind, tokens a block, span, fixed blocks, checkpoint, admission cap) of one group."""
    spec, block = layout.groups[i].kv_cache_spec, layout.tokens_per_block(i)
    longest = layout.max_model_len or NO_CAP
    flying = layout.max_in_flight_tokens or budget
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
        return (
            scheduler.STATE,
            block,
            0,
            spec.num_speculative_blocks,
            int(spec.num_prefill_checkpoint_blocks > 0),
            NO_CAP,
        )
    if isinstance(spec, MambaSpec):
        return scheduler.FIXED, block, 0, 1 + spec.num_speculative_blocks, 0, NO_CAP
    if isinstance(spec, CircularBufferSpec):
        return scheduler.FIXED, block, 0, 1, 0, NO_CAP
    if isinstance(spec, CrossAttentionSpec):
        return scheduler.FIXED, block, 0, cdiv(spec.max_encoder_tokens, block), 0, NO_CAP
    cap = spec.max_blocks_per_request(longest, flying, layout.decode_context_parallel_size)
    if isinstance(spec, SlidingWindowSpec):
        return scheduler.WINDOW, block, spec.sliding_window, 0, 0, cap
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return scheduler.CHUNK, block, spec.attention_chunk_size, 0, 0, cap
    if isinstance(spec, AttentionSpec):
        return scheduler.FULL, block, 0, 0, 0, NO_CAP
    raise SimulationError(f"group {i} ({spec.kind}): no rule says how it keeps its blocks")


# -- running ---------------------------------------------------------------------------------------


def simulate(
    layout: Layout,
    traffic: Traffic,
    step_time: StepTime,
    settings: Settings = Settings(),
    *,
    progress: bool | None = None,
    prefix_caching: bool | None = None,
    plain: bool = False,
    trace: int = 0,
) -> Simulation:
    """Serve ``traffic`` on ``layout``; see ``Simulation`` for what comes of it.

    Requests that the layout serves under no circumstances are refused and counted; answers end at the
    longest length that it serves. ``prefix_caching``: whether blocks are named and found again; by default
    where the layout was planned for it and the traffic shares prefixes (True also lets a request that gave
    way find its own blocks; blocks that are only counted are computed again). ``progress``: a bar; by default
    where stderr is a terminal. Ctrl-C ends the simulation early and keeps what was simulated. ``plain``: do
    not use numba's compiled loops. ``trace``: so many first steps are written down (``Simulation.trace``).
    Raises ``SimulationError`` where no request can be served at all.
    """
    import numpy as np

    budget = settings.max_num_batched_tokens
    groups, members = groups_of(layout, budget)
    asked, refused = _served(layout, traffic, groups)
    n = len(asked.served)
    requests = Requests(
        np.stack([asked.prompt, asked.output, asked.prompt, np.zeros(n, np.int64)]),
        np.stack([traffic.arrival[asked.served], *np.full((3, n), -1.0)]),
    )
    state = scheduler.new_state(
        groups, [b - 1 for b in layout.pool_num_blocks], requests, settings.max_num_seqs
    )
    states = groups[scheduler.KIND] == scheduler.STATE
    aligned = int(groups[scheduler.BLOCK, states].max(initial=0))
    steps = np.zeros((trace, 4), np.int64)
    if prefix_caching is None:
        planned = layout.options is None or layout.options.enable_prefix_caching
        prefix_caching = traffic.segments is not None and planned
    if prefix_caching and not settings.prefill:
        raise SimulationError(
            "prefix caching with prefill=False: who stands in for a prompt's tokens needs no hits; simulate "
            "traffic.without_sharing()"
        )
    rest = (
        settings.max_num_seqs,
        budget,
        aligned,
        bool(groups[scheduler.CHECKPOINT, states].all()),
        POLICIES[settings.scheduling_policy],
    )
    arguments = (groups, state, requests, step_time.costs(layout, groups, members, budget))
    if prefix_caching:
        segments = _segments_of(traffic, asked.served)
        blocks = prefix_cache.new_blocks(
            groups, members, layout.pool_num_blocks, requests, segments, settings.max_num_seqs
        )
        arguments = (*arguments, blocks, *rest)
        loops = SimpleNamespace(run_steps=prefix_cache.run_steps) if plain else prefix_cache.compiled()
    else:
        arguments = (*arguments, *rest, settings.prefill)
        loops = SimpleNamespace(run_steps=scheduler.run_steps) if plain else scheduler.compiled()
    interrupted = False
    try:
        for _ in _slices(loops, arguments, steps, requests, state, progress):
            pass
    except KeyboardInterrupt:
        interrupted = True
    return Simulation(
        layout,
        traffic,
        settings,
        requests,
        state,
        groups,
        members,
        asked.served,
        refused,
        interrupted,
        steps[: state.n[scheduler.N_STEP]],
    )


def _slices(
    loops: SimpleNamespace,
    arguments: tuple,
    trace: np.ndarray,
    requests: Requests,
    state: State,
    progress: bool | None,
) -> Iterator[None]:
    """Run in slices of some tenths of a second: between them the bar moves and Ctrl-C is heard."""
    import time

    from tqdm import tqdm

    n = state.n
    hidden = None if progress is None else not progress
    steps, more = 1000, True
    with tqdm(total=requests.times.shape[1], unit="request", disable=hidden, leave=False) as bar:
        while more:
            began = time.perf_counter()
            more = loops.run_steps(*arguments, steps, trace)
            took = time.perf_counter() - began
            if 0 < took < 0.1:
                steps = min(2 * steps, 1 << 24)
            elif took > 0.4:
                steps = max(steps // 2, 100)
            bar.update(int(n[scheduler.N_DONE]) - bar.n)
            yield


def _served(layout: Layout, traffic: Traffic, groups: np.ndarray) -> tuple[SimpleNamespace, dict[str, int]]:
    """(which requests are served, their prompts and outputs), and how many are not, by reason."""
    import numpy as np

    prompt, output = traffic.prompt, traffic.output
    longest = layout.max_model_len or int((prompt + output).max(initial=1))
    too_long = prompt >= longest
    output = np.minimum(output, np.maximum(longest - prompt, 1))
    tokens = prompt + output - 1
    too_large = np.zeros(len(prompt), bool)
    for pool, blocks in enumerate(layout.pool_num_blocks):
        needed = np.zeros(len(prompt), np.int64)
        for column in groups[:, groups[scheduler.POOL] == pool].T:
            needed += column[scheduler.WEIGHT] * np.minimum(_whole(column, tokens), column[scheduler.CAP])
        too_large |= needed > blocks - 1
    served = np.flatnonzero(~too_long & ~too_large)
    refused = {
        f"prompts of {longest:,} tokens and more": int(too_long.sum()),
        "requests larger than the pool": int((too_large & ~too_long).sum()),
    }
    refused = {reason: count for reason, count in refused.items() if count}
    if not len(served):
        raise SimulationError(
            f"none of the {len(traffic):,} requests of {traffic.name} can be served: "
            + ", ".join(f"{count:,} {reason}" for reason, count in refused.items())
            + "; plan more memory or a longer max_model_len"
        )
    return SimpleNamespace(served=served, prompt=prompt[served], output=output[served]), refused


def _segments_of(traffic: Traffic, served: np.ndarray) -> Segments:
    """The segments of the requests that are served; none where nothing is shared."""
    import numpy as np

    shared = traffic.segments
    if shared is None:
        return Segments(np.zeros(len(served) + 1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    counts = np.diff(shared.start)[served]
    start = np.concatenate([[0], np.cumsum(counts)])
    chosen = np.repeat(shared.start[:-1][served] - start[:-1], counts) + np.arange(start[-1])
    return Segments(start, shared.ids[chosen], shared.ends[chosen])


def _whole(column: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Blocks of one group for whole sequences (``scheduler.held`` from the first token, over arrays)."""
    import numpy as np

    kind, fixed = column[scheduler.KIND], column[scheduler.FIXED_BLOCKS]
    if kind == scheduler.FIXED:
        return np.full(len(tokens), fixed)
    if kind == scheduler.STATE:  # one to start from, one to end in, one exported
        return np.full(len(tokens), 2 + fixed + column[scheduler.CHECKPOINT])
    return -(-tokens // column[scheduler.BLOCK])


# -- what came of it -------------------------------------------------------------------------------

LATENCIES = {
    "queue": "waiting to be admitted",
    "ttft": "time to first token",
    "tpot": "time per further token",
    "latency": "whole request",
}


@dataclass(frozen=True, eq=False)
class Simulation:
    """Requests served on a layout.

    ``requests``, ``state``: the scheduler's, at its end; ``served``: which of the traffic's requests they
    are; ``refused``: how many are not, by reason. ``trace``: (free blocks of pool 0, running, waiting,
    scheduled tokens) of the first steps.
    """

    layout: Layout
    traffic: Traffic
    settings: Settings
    requests: Requests
    state: State
    groups: np.ndarray
    members: tuple[tuple[int, ...], ...]
    served: np.ndarray
    refused: dict[str, int]
    interrupted: bool
    trace: np.ndarray

    def count(self, counter: int) -> int:
        """A counter of the scheduler (``scheduler.N_*``)."""
        return int(self.state.n[counter])

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return float(self.state.x[scheduler.X_NOW])

    @property
    def finished(self) -> int:
        return self.count(scheduler.N_DONE)

    @property
    def output_tokens(self) -> int:
        """Tokens that came out, of requests that are not finished as well."""
        return self.count(scheduler.N_OUTPUT)

    @cached_property
    def latencies(self) -> dict[str, np.ndarray]:
        """Seconds of each finished request: queue, ttft (arrival to first token), tpot (between tokens, after
        the first; nan where there is only one), latency (arrival to last token).
        """
        import numpy as np

        done = self.requests.times[scheduler.FINISH] >= 0
        arrival, scheduled, first, finish = self.requests.times[:, done]
        later = self.requests.tokens[scheduler.OUTPUT, done] - 1
        with np.errstate(invalid="ignore", divide="ignore"):
            tpot = np.where(later > 0, (finish - first) / later, np.nan)
        return {
            "queue": scheduled - arrival,
            "ttft": first - arrival,
            "tpot": tpot,
            "latency": finish - arrival,
        }

    def good(self, ttft: float = float("inf"), tpot: float = float("inf")) -> np.ndarray:
        """Which finished requests met limits in seconds (a request of one token has no tpot to miss)."""
        import numpy as np

        found = self.latencies
        return (found["ttft"] <= ttft) & (np.isnan(found["tpot"]) | (found["tpot"] <= tpot))

    def table(self) -> pd.DataFrame:
        """One row a request that was served: what was asked, seconds of ``latencies``, preemptions."""
        import numpy as np
        import pandas as pd

        tokens, times = self.requests
        done = times[scheduler.FINISH] >= 0
        rows = pd.DataFrame(
            {
                "request": self.served,
                "arrival_s": times[scheduler.ARRIVAL],
                "prompt_tokens": tokens[scheduler.PROMPT],
                "output_tokens": tokens[scheduler.OUTPUT],
                "preemptions": tokens[scheduler.PREEMPTIONS],
                "finished": done,
            }
        )
        for name, seconds in self.latencies.items():
            column = np.full(len(rows), np.nan)
            column[done] = seconds
            rows[f"{name}_s"] = column
        return rows

    def facts(self, ttft: float = float("inf"), tpot: float = float("inf")) -> dict:
        """The simulation as one row of numbers; ``ttft`` and ``tpot`` are the limits of goodput, in seconds."""
        import numpy as np

        n, x = self.count, self.state.x
        busy, seconds = float(x[scheduler.X_BUSY]), self.seconds
        over_time = max(seconds, 1e-300)
        row = {
            "requests": len(self.traffic),
            "refused": sum(self.refused.values()),
            "finished": self.finished,
            "seconds": seconds,
            "busy": busy / over_time,
            "running": float(x[scheduler.X_RUNNING]) / max(busy, 1e-300),
            "waiting": float(x[scheduler.X_WAITING]) / max(busy, 1e-300),
            "steps": n(scheduler.N_STEP),
            "preemptions": n(scheduler.N_PREEMPTIONS),
            "recomputed_tokens": n(scheduler.N_RECOMPUTED),
            "prefix_hit_rate": self.prefix_hit_rate,
            "output_tokens_per_second": self.output_tokens / over_time,
            "prompt_tokens_per_second": n(scheduler.N_PREFILLED) / over_time,
            "requests_per_second": self.finished / over_time,
            "goodput": float(self.good(ttft, tpot).sum()) / over_time,
        }
        for name, values in self.latencies.items():
            known = values[~np.isnan(values)]
            for q in (50, 95, 99):
                row[f"{name}_p{q}_s"] = float(np.percentile(known, q)) if len(known) else None
        return row

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompts' tokens that were found in the prefix cache."""
        hits = self.count(scheduler.N_HITS)
        return hits / max(hits + self.count(scheduler.N_PREFILLED), 1)

    def over_time(self) -> pd.DataFrame:
        """How things stood at some hundred moments, each until the next: running and waiting requests,
        preemptions so far, and the pools' bytes by cause: content, last_block (slots of held blocks without
        a token that is read), padding (pages and layers that groups are padded with), free.
        """
        import numpy as np
        import pandas as pd

        rows = self.state.samples[: self.count(scheduler.N_SAMPLES)]
        columns = self.groups.shape[1]
        start = len(scheduler.SAMPLE)
        table = pd.DataFrame(rows[:, :start], columns=scheduler.SAMPLE)
        weight = self.groups[scheduler.WEIGHT]
        held = rows[:, start : start + columns] * weight
        filled = np.minimum(rows[:, start + columns :] * weight, held)
        page = np.array([np.mean([_content_bytes(self.layout, i) for i in group]) for group in self.members])
        whole = np.array([self.layout.bytes_per_block(int(p)) for p in self.groups[scheduler.POOL]])
        table["content_bytes"] = filled @ page
        table["last_block_bytes"] = (held - filled) @ page
        table["padding_bytes"] = held @ (whole - page)
        usable = sum(
            (b - 1) * self.layout.bytes_per_block(p) for p, b in enumerate(self.layout.pool_num_blocks)
        )
        table["free_bytes"] = usable - held @ whole
        return table

    def __str__(self) -> str:
        row = self.facts()
        lines = [
            f"{self.layout.model.name if self.layout.model else 'layout'} ({self.layout.grouping}) serves "
            f"{self.traffic.name}: {row['finished']:,} of {row['requests']:,} requests in "
            f"{row['seconds']:,.0f} s" + (", interrupted" if self.interrupted else ""),
            f"  {row['running']:.1f} run and {row['waiting']:.1f} wait while it is busy "
            f"({row['busy']:.0%} of the time); {row['output_tokens_per_second']:,.0f} tokens a second",
            f"  {row['preemptions']:,} preemptions ({row['recomputed_tokens']:,} tokens computed again); "
            f"prefix hits {row['prefix_hit_rate']:.1%} of prompt tokens",
        ]
        for name, title in LATENCIES.items():
            values = [row[f"{name}_p{q}_s"] for q in (50, 95, 99)]
            if None not in values:
                lines.append(
                    f"  {title}: "
                    + ", ".join(f"p{q} {seconds_text(v)}" for q, v in zip((50, 95, 99), values))
                )
        lines += [f"  refused: {count:,} {reason}" for reason, count in self.refused.items()]
        return "\n".join(lines)


def _content_bytes(layout: Layout, group: int) -> int:
    """Bytes of one block of a group that its layers fill."""
    return sum(spec.unpadded_page_size_bytes for spec in layout.groups[group].layer_specs)


# -- two side by side ------------------------------------------------------------------------------

#: parts that traffic is cut into, in the order of arrival, to see how much differences vary
PARTS = 20


def compare_simulations(
    a: Simulation, b: Simulation, ttft: float = float("inf"), tpot: float = float("inf")
) -> pd.DataFrame:
    """Two simulations of the same traffic, request by request: a row a metric, with ``b`` less ``a``.

    Requests that both finished are paired and cut, in the order of arrival, into ``PARTS`` parts; ``low`` and
    ``high`` bound the mean difference at 95 % by how much it varies between parts; ``distinguishable`` says
    whether they leave out 0. ``better``: share of requests for which ``b`` is lower. Raises
    ``SimulationError`` where the traffic differs.
    """
    import numpy as np
    import pandas as pd

    if a.traffic is not b.traffic and not (
        len(a.traffic) == len(b.traffic)
        and np.array_equal(a.traffic.arrival, b.traffic.arrival)
        and np.array_equal(a.traffic.prompt, b.traffic.prompt)
        and np.array_equal(a.traffic.output, b.traffic.output)
    ):
        raise SimulationError(
            f"simulations of different traffic ({a.traffic.name}; {b.traffic.name}): compare on the same requests"
        )
    sides = [s.table().set_index("request").assign(good=0.0) for s in (a, b)]
    for side, s in zip(sides, (a, b)):
        side.loc[side["finished"], "good"] = s.good(ttft, tpot).astype(float)
    common = sides[0].index[sides[0]["finished"]].intersection(sides[1].index[sides[1]["finished"]])
    rows = []
    for metric in ("queue_s", "ttft_s", "tpot_s", "latency_s", "preemptions", "good"):
        x, y = (side.loc[common, metric].to_numpy(float) for side in sides)
        difference = y - x
        parts = [part[~np.isnan(part)] for part in np.array_split(difference, PARTS)]
        means = np.array([part.mean() for part in parts if len(part)])
        spread = 2.09 * means.std(ddof=1) / len(means) ** 0.5 if len(means) > 1 else float("nan")
        centre = float(np.nanmean(difference)) if len(difference) else float("nan")
        rows.append(
            {
                "metric": metric,
                "a": float(np.nanmean(x)) if len(x) else None,
                "b": float(np.nanmean(y)) if len(y) else None,
                "difference": centre,
                "low": centre - spread,
                "high": centre + spread,
                "distinguishable": bool(abs(centre) > spread),
                "better": float((difference < 0).mean()) if len(difference) else None,
                "requests": len(common),
            }
        )
    return pd.DataFrame(rows)
