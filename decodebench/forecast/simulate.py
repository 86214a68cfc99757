"""What a week of requests would do to a layout: how many run, wait, give way, and how long each takes.

    traffic = db.read_traffic("azure-conversation-2023")
    db.simulate(db.plan("gpt-oss-20b", memory="20GiB"), traffic, "h200")

The scheduler is vLLM 0.32's (``scheduler``; where prefixes are shared ``prefix_cache``), the pool is the
layout's, the time of a step comes from ``step_time``. One engine, scheduled synchronously, no speculation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol

from decodebench.forecast import scheduler
from decodebench.forecast.scheduler import Costs, Requests, State
from decodebench.forecast.traffic import Traffic
from decodebench.layout import KVCacheConfig
from decodebench.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    DecodebenchError,
    MambaSpec,
    SlidingWindowSpec,
    cdiv,
)

if TYPE_CHECKING:
    import numpy as np

POLICIES = {"fcfs": scheduler.FIRST_COME, "shortest": scheduler.SHORTEST_FIRST}

#: blocks that admission never asks for more than, where a group has no cap
NO_CAP = 1 << 60


class SimulationError(DecodebenchError):
    """Settings or traffic that no engine would run: says which and what to change."""


class StepTime(Protocol):
    """What says how long steps take."""

    def costs(self, layout: KVCacheConfig, groups: np.ndarray, members: tuple, budget: int) -> Costs:
        """Seconds by scheduled tokens (0 to ``budget``) and by token read of each column of ``groups``,
        which stand for the groups ``members`` of the layout.
        """


@dataclass(frozen=True)
class OneSecond:
    """Every step takes a second: for counting steps."""

    def costs(self, layout: KVCacheConfig, groups: np.ndarray, members: tuple, budget: int) -> Costs:
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


def groups_of(layout: KVCacheConfig, budget: int) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
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


def _rule(layout: KVCacheConfig, i: int, budget: int) -> tuple[int, int, int, int, int, int]:
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
    layout: KVCacheConfig,
    traffic: Traffic,
    step_time: StepTime,
    settings: Settings = Settings(),
    *,
    progress: bool | None = None,
    plain: bool = False,
    trace: int = 0,
) -> Simulation:
    """Serve ``traffic`` on ``layout``; see ``Simulation`` for what comes of it.

    Requests that the layout serves under no circumstances are refused and counted; answers end at the
    longest length that it serves. ``progress``: a bar; by default where stderr is a terminal. Ctrl-C ends
    the simulation early and keeps what was simulated. ``plain``: do not use numba's compiled loops.
    ``trace``: so many first steps are written down (``Simulation.trace``).
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
    arguments = (
        groups,
        state,
        requests,
        step_time.costs(layout, groups, members, budget),
        settings.max_num_seqs,
        budget,
        aligned,
        bool(groups[scheduler.CHECKPOINT, states].all()),
        POLICIES[settings.scheduling_policy],
        settings.prefill,
    )
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


def _served(
    layout: KVCacheConfig, traffic: Traffic, groups: np.ndarray
) -> tuple[SimpleNamespace, dict[str, int]]:
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


@dataclass(frozen=True, eq=False)
class Simulation:
    """Requests served on a layout.

    ``requests``, ``state``: the scheduler's, at its end; ``served``: which of the traffic's requests they
    are; ``refused``: how many are not, by reason. ``trace``: (free blocks of pool 0, running, waiting,
    scheduled tokens) of the first steps.
    """

    layout: KVCacheConfig
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
