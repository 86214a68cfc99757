"""What a week of requests would do to a layout: how many run, wait, give way, and how long each takes.

    traffic = db.read_traffic("azure-conversation-2023")
    db.simulate(db.plan("gpt-oss-20b", memory="20GiB"), traffic, costs)

The scheduler is vLLM 0.32's (``scheduler``; with shared prefixes ``prefix_cache``), the pool is the layout's,
and the time of a step comes from ``costs``. Synchronous scheduling, no speculative tokens, one engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from decodebench.forecast import scheduler
from decodebench.forecast.scheduler import Costs, Requests
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
