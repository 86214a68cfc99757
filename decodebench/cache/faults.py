"""The connector's historic defects as switches, to prove that the audit sees them.

Each fault overrides one or two of the small steps of ``connector``'s halves and leaves the rest
as it is. Ids and cases are those of the field reports that the connector grew up with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from decodebench.cache.connector import ConnectorMetadata, ConnectorScheduler, ConnectorWorker, Fillable
from decodebench.cache.tensors import Cache
from decodebench.cache.values import Constant, Values, Zeros
from decodebench.cache.write import FillReport, fill_blocks
from decodebench.errors import DecodebenchError
from decodebench.layout.layout import Layout
from decodebench.layout.pool import NULL_BLOCK
from decodebench.models.specs import cdiv


@dataclass(frozen=True)
class Fault:
    """One defect. ``leaves`` says what gives it away: wrong bytes, or right bytes at a wrong cost."""

    id: str
    name: str
    what: str
    scheduler: type[ConnectorScheduler] = ConnectorScheduler
    worker: type[ConnectorWorker] = ConnectorWorker
    leaves: str = "wrong bytes"
    startup_fill: bool = False

    @property
    def shows_in_block_ids(self) -> bool:
        """Whether block ids tell what it leaves. Not so where the bytes written differ, or are wiped again."""
        return self.worker.write is ConnectorWorker.write and not self.startup_fill

    @property
    def half(self) -> str:
        """Which half of the connector it sits in: ``scheduler``, ``worker`` or ``both``."""
        return (
            "scheduler"
            if self.worker is ConnectorWorker
            else "worker"
            if (self.scheduler is ConnectorScheduler)
            else "both"
        )


# -- scheduler half -----------------------------------------------------------------------------


class _Slicing(ConnectorScheduler):
    """Takes a slice of the table without asking how long it is, or what it holds."""

    def positions(self, group: int, start: int, stop: int, table_length: int) -> range:
        wanted = super().positions(group, start, stop, table_length)
        return range(min(wanted.start, table_length), min(wanted.stop, table_length))

    def check_table(
        self, request: Fillable, group: int, table: Sequence[int], positions: range, stop: int
    ) -> None:
        """Not looked at."""


class OneBlockSize(_Slicing):
    """A2: every group's table is counted in blocks of the first group's size."""

    def tokens_per_block(self, group: int) -> int:
        return super().tokens_per_block(0)


class PrefixIgnored(_Slicing):
    """A3: filling starts at block 0, over the blocks that a prefix hit brought."""

    def positions(self, group: int, start: int, stop: int, table_length: int) -> range:
        return super().positions(group, 0, stop - start, table_length)


class PrefixEndRoundedUp(_Slicing):
    """A4: the block in which a prefix hit ends is taken for filled."""

    def first_block(self, group: int, start: int) -> int:
        return cdiv(start, self.tokens_per_block(group))


class NullBlocksFilled(_Slicing):
    """A5: the null block that pads a window's table is taken for data."""

    def keep(self, block_id: int) -> bool:
        return True


class ContextParallelIgnored(_Slicing):
    """A6: a block is counted as ``block_size`` tokens where its ranks share ``block_size × dcp``."""

    def tokens_per_block(self, group: int) -> int:
        return self.layout.groups[group].block_size


class PreemptedCountsAsFilled(ConnectorScheduler):
    """A13: a request that was preempted and comes back counts as filled."""

    def is_filled(self, request: Fillable, num_computed_tokens: int) -> bool:
        return request.request_id in self._filled

    def request_preempted(self, request_id: str) -> None:
        """Nobody told the connector."""


class IdsUnchecked(_Slicing):
    """A14's scheduler half: ids that no pool has are handed on."""

    def check_ids(self, request: Fillable, group: int, blocks: Sequence[int]) -> None:
        """Out of range or not, the worker will see."""


class StateBeforeTheCopy(ConnectorScheduler):
    """Fills the state after the last token stood in for, wherever the step reads the running one."""

    def positions(self, group: int, start: int, stop: int, table_length: int) -> range:
        wanted = super().positions(group, start, stop, table_length)
        return wanted[:1] if self.layout.groups[group].kv_cache_spec.holds_state else wanted


class EverythingAtStartup(ConnectorScheduler):
    """A16's scheduler half: no group is filled per request, though the engine zeroes new blocks."""

    def groups_filled_at_startup(self) -> frozenset[int]:
        return _all_but_rings(self.layout)


# -- worker half --------------------------------------------------------------------------------


class Group0Map(ConnectorWorker):
    """A1: the layers of every group are filled at group 0's block ids."""

    def blocks_to_write(self, blocks: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        limits = [self.layout.num_blocks_of(group) for group in range(len(blocks))]
        return [tuple(block for block in blocks[0] if block < limit) for limit in limits]


class NullBlockAllowed(ConnectorWorker):
    """A5's worker half: id 0 is written like any other."""

    def write(self, blocks: Sequence[Sequence[int]]) -> FillReport:
        return fill_blocks(self.registered(), blocks, self.values, allow_null_block=True)


class StatesFilledWhole(NullBlockAllowed):
    """A7: a state tensor is written in its entirety, all requests' states with it."""

    def blocks_to_write(self, blocks: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [
            tuple(range(self.layout.num_blocks_of(group)))
            if ids and self.layout.groups[group].kv_cache_spec.holds_state
            else ids
            for group, ids in enumerate(blocks)
        ]


class _OtherValues(ConnectorWorker):
    """Right blocks, wrong bytes in the groups that ``concerns`` names."""

    def concerns(self, group: int) -> bool:
        raise NotImplementedError

    def write_wrongly(self, group: int, blocks: Sequence[int]) -> None:
        only = [blocks if g == group else () for g in range(len(self.layout.groups))]
        fill_blocks(self.registered(), only, Zeros())

    def write(self, blocks: Sequence[Sequence[int]]) -> FillReport:
        report = super().write(blocks)
        for group, group_blocks in enumerate(blocks):
            if group_blocks and self.concerns(group):
                self.write_wrongly(group, group_blocks)
        return report

    def overwrite_pages(self, group: int, blocks: Sequence[int]) -> None:
        """Floats where no floats belong."""
        number = torch.tensor([self.values.mean if isinstance(self.values, Constant) else 0.015])
        for layer in self.layout.groups[group].layer_names:
            content = self.registered().flat(layer, 0)
            content[list(blocks)] = number.view(torch.uint8).repeat(cdiv(content.shape[1], 4))[
                : content.shape[1]
            ]


class StatesAsRawBytes(_OtherValues):
    """A8: states arrive as integer pages and are filled by that dtype, which leaves zeros."""

    def concerns(self, group: int) -> bool:
        return self.layout.groups[group].kv_cache_spec.holds_state


class RingsFilled(_OtherValues):
    """A9: packed integers of a ring are overwritten by floats."""

    write_wrongly = _OtherValues.overwrite_pages

    def concerns(self, group: int) -> bool:
        return self.layout.groups[group].kv_cache_spec.bookkeeping


class Fp8CastToInteger(_OtherValues):
    """A10: the value is cast to the storage's uint8, which makes it 0."""

    def concerns(self, group: int) -> bool:
        return any(
            getattr(s, "dtype", "").startswith("float8") for s in self.layout.groups[group].layer_specs
        )


class PackedFilled(_OtherValues):
    """A11: pages with scales among their numbers are filled like plain ones."""

    write_wrongly = _OtherValues.overwrite_pages

    def concerns(self, group: int) -> bool:
        return any(getattr(s, "packed", None) for s in self.layout.groups[group].layer_specs)


class KernelBlocksMistaken(ConnectorWorker):
    """A12: takes manager ids for rows of a view whose blocks are ``kernel_blocks`` times smaller."""

    kernel_blocks = 4

    def write(self, blocks: Sequence[Sequence[int]]) -> FillReport:
        attention = [not group.kv_cache_spec.holds_state for group in self.layout.groups]
        report = super().write([() if a else r for a, r in zip(attention, blocks)])
        for group, group_blocks in enumerate(blocks):
            if not attention[group]:
                continue
            report.blocks[group], report.block_ids[group] = (
                len(group_blocks),
                tuple(group_blocks),
            )  # so it believes
            for layer in self.layout.groups[group].layer_names:
                flat = self.registered().flat(layer, 0)
                if flat.shape[1] % self.kernel_blocks:
                    continue
                part, index = self.registered().parts(layer)[0], self.layout.layer_index[layer]
                small = flat.unflatten(1, (self.kernel_blocks, -1))
                for block in group_blocks:
                    content = self.values.expected(part, index, block, device=flat.device)
                    small[block // self.kernel_blocks, block % self.kernel_blocks] = content[: small.shape[2]]
                    report.bytes_written += small.shape[2] * small.itemsize
        return report


class SilentSkips(ConnectorWorker):
    """A14's worker half: ids out of range and layers without a cache are dropped without a word."""

    def blocks_to_write(self, blocks: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [
            tuple(block for block in ids if NULL_BLOCK < block < self.layout.num_blocks_of(group))
            for group, ids in enumerate(blocks)
        ]

    def bind(self, kv_caches: Mapping) -> Cache:
        """A layer without a cache is written to memory that nobody reads."""
        nowhere = {
            name: torch.empty((self.layout.num_blocks_of(g), spec.page_size_bytes), dtype=torch.uint8)
            for g, group in enumerate(self.layout.groups)
            for name, spec in zip(group.layer_names, group.layer_specs)
            if name not in kv_caches
        }
        return super().bind({**nowhere, **kv_caches})


class FilledPerRequest(ConnectorWorker):
    """A15: each request of a step fills what the others filled."""

    def fill_step(self, meta: ConnectorMetadata, needed: list[tuple[int, ...]]) -> list[FillReport]:
        return [self.write(self.merge(ConnectorMetadata((fill,)))) for fill in meta.requests]


class WorkerEverythingAtStartup(ConnectorWorker):
    """A16's worker half: everything but rings is written once at startup."""

    def groups_filled_at_startup(self) -> frozenset[int]:
        return _all_but_rings(self.layout)


class FillInsideStep(ConnectorWorker):
    """A17: returns at once and fills when the step asks for its first layer."""

    late: ConnectorMetadata = ConnectorMetadata()

    def start_load_kv(self, meta: ConnectorMetadata) -> FillReport:
        groups = len(self.layout.groups)
        self.late, self.report = meta, FillReport(blocks=[0] * groups, block_ids=[()] * groups)
        return self.report

    def wait_for_layer_load(self, layer: str) -> None:
        meta, self.late = self.late, ConnectorMetadata()
        if meta.requests:
            vars(self.report).update(vars(super().start_load_kv(meta)))
            self.counters["seconds_in_step"] += self.report.seconds


def _all_but_rings(layout: Layout) -> frozenset[int]:
    rings = (group.kv_cache_spec.bookkeeping for group in layout.groups)
    return frozenset(g for g, ring in enumerate(rings) if not ring)


# -- the switches -------------------------------------------------------------------------------

COST = "right bytes at a wrong cost"

FAULTS: dict[str, Fault] = {
    fault.id: fault
    for fault in (
        Fault("A1", "group-0 map", "every layer is filled at group 0's block ids", worker=Group0Map),
        Fault(
            "A2",
            "one global block size",
            "blocks of every group counted with group 0's block size",
            OneBlockSize,
        ),
        Fault(
            "A3", "prefix ignored", "the fill starts at block 0 and overwrites shared blocks", PrefixIgnored
        ),
        Fault(
            "A4",
            "unaligned prefix end",
            "the block that a prefix hit ends in is left out",
            PrefixEndRoundedUp,
        ),
        Fault(
            "A5",
            "null padding filled",
            "the null block is taken for data",
            NullBlocksFilled,
            NullBlockAllowed,
        ),
        Fault(
            "A6",
            "context parallelism ignored",
            "a block is thought to cover one rank's tokens",
            ContextParallelIgnored,
        ),
        Fault(
            "A7",
            "state filled whole",
            "every block of a state cache is written, other requests' too",
            worker=StatesFilledWhole,
        ),
        Fault(
            "A8",
            "state as raw bytes",
            "states arrive as bytes and are filled with zeros",
            worker=StatesAsRawBytes,
        ),
        Fault(
            "A9", "circular buffer filled", "packed integers are overwritten by floats", worker=RingsFilled
        ),
        Fault("A10", "fp8 cast to uint8", "0.015 becomes the byte 0", worker=Fp8CastToInteger),
        Fault(
            "A11", "packed format filled", "scales and packed values get arbitrary bytes", worker=PackedFilled
        ),
        Fault(
            "A12",
            "kernel blocks",
            "block ids are used as rows of a view with smaller blocks",
            worker=KernelBlocksMistaken,
        ),
        Fault(
            "A13",
            "preemption forgotten",
            "a resumed request counts as filled and is prefilled for real",
            PreemptedCountsAsFilled,
            leaves=COST,
        ),
        Fault(
            "A14",
            "silent skips",
            "block ids out of range and layers without a cache are dropped",
            IdsUnchecked,
            SilentSkips,
        ),
        Fault(
            "A15",
            "repeated fills",
            "each request of a step fills what others filled",
            worker=FilledPerRequest,
            leaves=COST,
        ),
        Fault(
            "A16",
            "startup fill wiped",
            "the engine zeroes new blocks after a fill at startup",
            EverythingAtStartup,
            WorkerEverythingAtStartup,
            startup_fill=True,
        ),
        Fault(
            "A17",
            "fill inside the measurement",
            "the fill runs within the first decode step",
            worker=FillInsideStep,
            leaves=COST,
        ),
        Fault(
            "A18",
            "state before the copy",
            "where a token opens a block, the block that its state was copied from is filled",
            StateBeforeTheCopy,
        ),
    )
}


def fault_of(fault: str) -> Fault:
    """A fault by its id (``A1`` …) or name; ``DecodebenchError`` lists them where there is none such."""
    by_name = {f.name: f for f in FAULTS.values()}
    found = FAULTS.get(fault) or by_name.get(fault)
    if found is None:
        known = ", ".join(f"{f.id} ({f.name})" for f in FAULTS.values())
        raise DecodebenchError(f"unknown fault {fault!r}: known are {known}")
    return found


def faulty_halves(
    layout: Layout, fault: str, values: Values | None = None
) -> tuple[ConnectorScheduler, ConnectorWorker]:
    """Both halves of the connector with one defect switched on, by id (``A1`` …) or name."""
    found = fault_of(fault)
    return (
        found.scheduler(layout, startup_fill=found.startup_fill),
        found.worker(layout, values, startup_fill=found.startup_fill),
    )
