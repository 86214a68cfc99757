"""Every historic fault on its smallest case, run and looked at: the table of the group-0 story.

    decodebench.study.fault_cases.fault_table()   # one row a fault: the case, how it is caught, what is found

Each case is run twice, with the fault switched on and with the connector as it should be. Faults
that leave wrong bytes are caught by the audit; faults that leave right bytes at a wrong cost by
the connector's counters; what must never happen silently, by an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from decodebench.cache.connector import ConnectorError, ConnectorScheduler, ConnectorWorker
from decodebench.cache.faults import FAULTS, faulty_halves
from decodebench.cache.run import run_connector
from decodebench.cache.tensors import allocate
from decodebench.cache.values import Constant, Normal, Values, Zeros
from decodebench.cache.write import fill_blocks
from decodebench.coverage.from_bytes import audit
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.layout import Layout
from decodebench.layout.plan import from_groups
from decodebench.layout.pool import Batch, Request, RequestBlocks
from decodebench.models.specs import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    import pandas as pd

VALUES, RESIDENT = Normal(), Normal(seed=1)

#: (caught, what was found)
Finding = tuple[bool, str]


#: fault → the pull request or issue of vLLM that tells of it in DecodeBenchConnector, where one is public
REPORTED = {
    "A1": "vllm#54647",
    "A3": "vllm#54878",
    "A4": "vllm#54878",
    "A5": "vllm#54878",
    "A7": "vllm#56473",
    "A15": "vllm#57847",
    "A17": "vllm#56473",
}


@dataclass(frozen=True)
class SmallCase:
    """The smallest situation in which a fault shows. ``run(fault)`` says
    whether something was caught, and what.
    """

    fault: str
    situation: str
    caught_by: str
    run: Callable[[str | None], Finding]


def fault_table() -> pd.DataFrame:
    """One row a fault: id, name, what it does, the case, how it is caught,
    what is found with and without it.
    """
    import pandas as pd

    rows = []
    for case in CASES:
        fault = FAULTS[case.fault]
        caught, found = case.run(case.fault)
        clean, sound = case.run(None)
        rows.append(
            {
                "id": case.fault,
                "fault": fault.name,
                "what it does": fault.what,
                "smallest case": case.situation,
                "caught by": case.caught_by,
                "found with the fault": found,
                "found without it": sound,
                "caught": caught and not clean,
                "reported": REPORTED.get(case.fault, "–"),
            }
        )
    return pd.DataFrame(rows)


# -- layouts and batches of a few blocks -----------------------------------------------------------


def attention(block_size: int = 16, **changes: Any) -> FullAttentionSpec:
    """Full attention in bfloat16, its pages equal whatever the block size."""
    heads = 64 // block_size  # equal pages, whatever the block size
    plain = FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=8, dtype="bfloat16")
    return replace(plain, **changes)


def state(block_size: int = 16, **changes) -> MambaSpec:
    """A state of two parts with dtypes of their own, in a page of 2,048 bytes of which 1,232 are used."""
    return MambaSpec(
        block_size=block_size,
        shapes=((3, 24), (8, 34)),
        dtypes=("bfloat16", "float32"),
        page_size_padded=2048,
        **changes,
    )


def layout_of(specs: Sequence[KVCacheSpec], blocks: int = 8, **facts) -> Layout:
    """One layer a group, one group a spec."""
    return from_groups(
        [KVCacheGroupSpec((f"layer.{i}",), (spec,), spec) for i, spec in enumerate(specs)], blocks, **facts
    )


def one_request(layout: Layout, tokens: int, *tables: Sequence[int], computed: int = 0) -> Batch:
    """One request of ``tokens`` tokens with these block tables, ``computed`` of them a prefix hit."""
    return Batch(layout, (RequestBlocks(Request("a", tokens), computed, tuple(map(tuple, tables))),))


def halves(
    layout: Layout, fault: str | None, values: Values = VALUES
) -> tuple[ConnectorScheduler, ConnectorWorker]:
    """The connector's halves with the fault switched on, or as they should be."""
    if fault is None:
        return ConnectorScheduler(layout), ConnectorWorker(layout, values)
    return faulty_halves(layout, fault, values)


def filled(
    batch: Batch, values: Values = VALUES, resident: Sequence[Sequence[int]] = ()
) -> Callable[[str | None], Finding]:
    """Fill the batch through both halves and audit every byte; ``resident``
    rows hold somebody else's values.
    """

    def run(fault: str | None) -> Finding:
        cache = allocate(batch.layout, "cpu")
        if resident:
            fill_blocks(cache, resident, RESIDENT)
        scheduler, worker = halves(batch.layout, fault, values)
        worker.register_kv_caches(cache)
        report = run_connector(scheduler, worker, batch)
        found = audit(cache, batch, values, report, RESIDENT if resident else None)
        return not found.ok, found.verdict.split(" Plan and bytes")[0]

    return run


# -- cases that are not a fill and an audit --------------------------------------------------------


def preempted(fault: str | None) -> Finding:
    """A request is filled, preempted, and scheduled again."""
    layout = layout_of([attention()])
    scheduler, _ = halves(layout, fault)
    blocks = one_request(layout, 33, (1, 2, 3)).requests[0]
    first, _ = scheduler.get_num_new_matched_tokens(blocks, 0)
    scheduler.update_state_after_alloc(blocks, blocks.block_ids, first)
    scheduler.build_connector_meta()
    scheduler.request_preempted("a")
    again, _ = scheduler.get_num_new_matched_tokens(blocks, 0)
    return again < 32, f"{again} tokens stood in for, {32 - again} prefilled for real"


def out_of_range(fault: str | None) -> Finding:
    """A block table names a block that the pool does not have; caught means: it went through in silence."""
    layout = layout_of([attention()])
    scheduler, worker = halves(layout, fault)
    worker.register_kv_caches(allocate(layout, "cpu"))
    try:
        report = run_connector(scheduler, worker, one_request(layout, 17, (9,)))
    except ConnectorError as error:
        return False, f"refused: {error}"
    return True, f"nothing happened: {sum(report.blocks)} blocks written, no word of it"


def shared_blocks(fault: str | None) -> Finding:
    """Four requests in one step ask for the same blocks."""
    layout = layout_of([attention()])
    requests = tuple(RequestBlocks(Request(f"r{i}", 49), 0, ((1, 2, 3, 4),)) for i in range(4))
    scheduler, worker = halves(layout, fault)
    worker.register_kv_caches(allocate(layout, "cpu"))
    run_connector(scheduler, worker, Batch(layout, requests))
    written, needed = worker.counters["blocks_written"], 3
    return written > needed, f"{written} blocks written for {needed} needed"


def zeroed_by_the_engine(fault: str | None) -> Finding:
    """Everything is filled at startup; the engine then zeroes the blocks that it hands out."""
    layout = layout_of([attention(), state()])
    batch = one_request(layout, 17, (1, 2), (3, 4))
    cache = allocate(layout, "cpu")
    if fault is None:
        scheduler, worker = (
            ConnectorScheduler(layout, startup_fill=True),
            ConnectorWorker(layout, VALUES, startup_fill=True),
        )
    else:
        scheduler, worker = halves(layout, fault)
    worker.register_kv_caches(cache)
    fill_blocks(cache, [(1, 2), ()], Zeros())  # states are kept: the engine zeroes attention only
    run_connector(scheduler, worker, batch)
    share = {row.group: row.coverage for row in audit(cache, batch, VALUES).groups.itertuples()}
    return share[0] < 1, f"attention {share[0]:.0%} covered, states {share[1]:.0%}"


def inside_the_step(fault: str | None) -> Finding:
    """Seconds of filling that fall into the step that is measured."""
    layout = layout_of([attention()])
    scheduler, worker = halves(layout, fault)
    worker.register_kv_caches(allocate(layout, "cpu"))
    run_connector(scheduler, worker, one_request(layout, 33, (1, 2, 3)))
    worker.wait_for_layer_load("layer.0")
    spent = worker.counters["seconds_in_step"]
    return spent > 0, "the fill ran inside the step" if spent > 0 else "no fill inside the step"


def _window() -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=16, num_kv_heads=4, head_size=8, dtype="bfloat16", sliding_window=33)


def _cases() -> tuple[SmallCase, ...]:
    two = layout_of([attention(), state()])
    sizes = layout_of([attention(32), attention(16)])
    full, wide = layout_of([attention()]), layout_of([attention(32)])
    split = layout_of([attention(), state()], decode_context_parallel_size=2)
    ring = CircularBufferSpec(block_size=16, num_kv_heads=4, head_size=8, dtype="uint8")
    fp8 = attention(dtype="float8_e4m3fn")
    packed = MLAAttentionSpec(
        block_size=16,
        num_kv_heads=1,
        head_size=576,
        dtype="uint8",
        packed="fp8_ds_mla",
        state_content_bytes=656,
    )
    reading = "audit of the bytes"
    return (
        SmallCase(
            "A1", "two groups, blocks [1] and [5]", reading, filled(one_request(two, 17, (1, 2), (5, 6)))
        ),
        SmallCase(
            "A2",
            "groups of 32 and 16 tokens a block, 33 tokens to fill",
            reading,
            filled(one_request(sizes, 34, (4, 5), (1, 2, 3))),
        ),
        SmallCase(
            "A3",
            "32 tokens hit, 17 to fill, blocks [1, 2, 3, 4]",
            reading,
            filled(one_request(full, 50, (1, 2, 3, 4), computed=32), resident=[(1, 2)]),
        ),
        SmallCase(
            "A4",
            "a hit of 23 tokens ends inside a block of 32",
            reading,
            filled(one_request(wide, 41, (1, 2), computed=23)),
        ),
        SmallCase(
            "A5",
            "a window's table [null, null, 1, 2, 3]",
            reading,
            filled(one_request(layout_of([_window()]), 65, (0, 0, 1, 2, 3))),
        ),
        SmallCase(
            "A6",
            "2 ranks share a block's 32 tokens, 32 hit, 64 to fill",
            reading,
            filled(
                one_request(split, 97, (1, 2, 3, 4), (0, 0, 0, 0, 0, 5, 6), computed=32), resident=[(1,), ()]
            ),
        ),
        SmallCase(
            "A7",
            "one request's state in block [2] of 8",
            reading,
            filled(one_request(layout_of([state()]), 17, (2, 3))),
        ),
        SmallCase(
            "A8",
            "a state of bfloat16 and float32 parts",
            reading,
            filled(one_request(layout_of([state()]), 17, (2, 3))),
        ),
        SmallCase(
            "A9",
            "a ring of packed integers in block [5]",
            reading,
            filled(one_request(layout_of([ring]), 17, (5,)), Constant()),
        ),
        SmallCase(
            "A10",
            "fp8 values stored as uint8",
            reading,
            filled(one_request(layout_of([fp8]), 17, (1, 2)), Constant()),
        ),
        SmallCase(
            "A11",
            "MLA pages with scales, 656 bytes a token",
            reading,
            filled(one_request(layout_of([packed]), 17, (1, 2)), Constant()),
        ),
        SmallCase(
            "A12", "4 kernel blocks a block, blocks [1, 2]", reading, filled(one_request(full, 33, (1, 2, 3)))
        ),
        SmallCase("A13", "filled, preempted, scheduled again", "the connector's counters", preempted),
        SmallCase("A14", "block 9 of a pool of 8", "silence where the sound connector refuses", out_of_range),
        SmallCase("A15", "4 requests share 3 blocks in one step", "the connector's counters", shared_blocks),
        SmallCase("A16", "filled at startup, then zeroed on allocation", reading, zeroed_by_the_engine),
        SmallCase("A17", "the fill is left for the first step", "the connector's counters", inside_the_step),
        SmallCase(
            "A18",
            "17 tokens, states kept at boundaries of 16, blocks [2, 3]",
            reading,
            filled(one_request(layout_of([state(mamba_cache_mode="align")]), 17, (2, 3))),
        ),
    )


CASES = _cases()
