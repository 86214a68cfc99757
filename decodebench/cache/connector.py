"""The grouped connector: stands in for a prefill, so that a benchmark starts at the first decode step.

Two halves with the protocol of vLLM's connector API v1, without importing it. The *scheduler half*
decides which blocks (ids per group) still need values; the *worker half* has ``fill`` write
them. Both are built from the layout. Blocks are manager blocks; nothing is guessed from a tensor,
and nothing that cannot be placed is skipped: it is an error that names group, layer, id and limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from decodebench.cache.bind import bind
from decodebench.cache.tensors import Cache
from decodebench.cache.values import Constant, Values, Zeros, default_values
from decodebench.cache.write import FillReport, fill_blocks, merge_blocks
from decodebench.errors import DecodebenchError
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.layout import Layout
from decodebench.layout.pool import NULL_BLOCK
from decodebench.models.specs import KVCacheSpec


class ConnectorError(DecodebenchError):
    """A block table or layout that the connector will not guess about."""


@dataclass(frozen=True)
class RequestFill:
    """The blocks of one request that need values: block ids per group, null blocks left out."""

    request_id: str
    block_ids: tuple[tuple[int, ...], ...]
    num_external_tokens: int


@dataclass(frozen=True)
class ConnectorMetadata:
    """What the scheduler half hands to the worker half for one step."""

    requests: tuple[RequestFill, ...] = ()


def startup_groups(layout: Layout, values: Values | None = None) -> frozenset[int]:
    """Groups that one fill of ``values`` (default: a constant) at startup covers for good.

    Not circular buffers, which are zeroed per request, and not states, which every step replaces;
    not attention whose new blocks the engine zeroes before use, which would wipe the fill; and not
    groups that share a pool with other bytes: a block that changes hands brings what was written
    for another group. There only a constant of one precision is the same for all.
    """
    same_anywhere = values is None or isinstance(values, Constant | Zeros)

    def keeps(group: KVCacheGroupSpec) -> bool:
        spec = group.kv_cache_spec
        if spec.bookkeeping or spec.holds_state:
            return False
        neighbours = [other for other in layout.groups if other.pool == group.pool]
        contents = {_content(spec) for other in neighbours for spec in other.layer_specs}
        return not layout.needs_kv_cache_zeroing and (
            len(neighbours) == 1 or (same_anywhere and len(contents) == 1)
        )

    return frozenset(g for g, group in enumerate(layout.groups) if keeps(group))


def _content(spec: KVCacheSpec) -> tuple:
    """What decides a page's bytes under a constant, wherever in the page they lie."""
    numbers = frozenset((part.dtype, part.zeros_only) for part in spec.parts())
    return numbers, spec.bookkeeping


class Fillable(Protocol):
    """What the scheduler half asks of a request; vLLM's own objects fit."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...


class ConnectorScheduler:
    """Scheduler half: which blocks of which request need values in this step.

    ``request`` is anything with ``request_id`` and ``num_tokens`` (vLLM's own objects fit).
    ``startup_fill``: the worker writes ``values`` (default: a constant) once at startup, and groups
    that keep them (``startup_groups``) get no blocks here.
    ``counters``: requests filled, refilled after a preemption, and external tokens stood in for.
    """

    def __init__(self, layout: Layout, startup_fill: bool = False, values: Values | None = None) -> None:
        self.layout, self.values = layout, values
        self.startup_filled = self.groups_filled_at_startup() if startup_fill else frozenset()
        self.counters = {"requests_filled": 0, "requests_refilled": 0, "external_tokens": 0}
        self._filled: dict[str, int] = {}  # request → tokens that its blocks hold
        self._preempted: set[str] = set()
        self._pending: dict[str, RequestFill] = {}

    def get_num_new_matched_tokens(self, request: Fillable, num_computed_tokens: int) -> tuple[int, bool]:
        """(tokens this connector stands in for, False: synchronously).

        All uncomputed tokens but the last. 0 for a request that is filled already; one that
        comes back with fewer computed tokens than it was filled with lost its blocks.
        """
        if self.is_filled(request, num_computed_tokens):
            return 0, False
        return max(0, request.num_tokens - num_computed_tokens - 1), False

    def update_state_after_alloc(
        self, request: Fillable, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Plan the fill of a request whose blocks were allocated: ``block_ids[g]`` is its table in group g.

        Raises ``ConnectorError`` where a table is shorter than the plan, an id is out of range, or
        the number of tables is not the number of groups.
        """
        if num_external_tokens == 0:
            return
        if num_external_tokens < 0:
            raise ConnectorError(f"request {request.request_id!r}: {num_external_tokens} external tokens")
        if len(block_ids) != len(self.layout.groups):
            raise ConnectorError(
                f"request {request.request_id!r}: {len(block_ids)} block tables "
                f"for {len(self.layout.groups)} groups"
            )
        stop = request.num_tokens - 1
        start = stop - num_external_tokens
        if start < 0:
            raise ConnectorError(
                f"request {request.request_id!r}: {num_external_tokens} external tokens of "
                f"{request.num_tokens}: the last token is computed, so at most all the others can be external"
            )
        blocks = tuple(
            (
                ()
                if group in self.startup_filled
                else self.blocks_of_group(request, group, block_ids[group], start, stop)
            )
            for group in range(len(self.layout.groups))
        )
        again = request.request_id in self._filled or request.request_id in self._preempted
        self._preempted.discard(request.request_id)
        self._filled[request.request_id] = stop
        self._pending[request.request_id] = RequestFill(request.request_id, blocks, num_external_tokens)
        self.counters["requests_refilled" if again else "requests_filled"] += 1
        self.counters["external_tokens"] += num_external_tokens

    def build_connector_meta(self) -> ConnectorMetadata:
        """Hand over what this step fills, and forget it."""
        meta = ConnectorMetadata(tuple(self._pending.values()))
        self._pending = {}
        return meta

    def request_finished(self, request_id: str) -> None:
        """Forget a request and the fill planned for it; an unknown one is no error."""
        self._filled.pop(request_id, None)
        self._preempted.discard(request_id)
        self._pending.pop(request_id, None)

    request_finished_all_groups = request_finished

    def request_preempted(self, request_id: str) -> None:
        """The request lost its blocks; when it comes back it is filled again, and counted."""
        if self._filled.pop(request_id, None) is not None:
            self._preempted.add(request_id)
        self._pending.pop(request_id, None)

    # -- small steps, each of which some connector got wrong (faults.py overrides them) ----------

    def groups_filled_at_startup(self) -> frozenset[int]:
        """The groups that no request of a step needs to fill."""
        return startup_groups(self.layout, self.values)

    def is_filled(self, request: Fillable, num_computed_tokens: int) -> bool:
        """Whether the request's blocks hold what they were filled with; one never seen counts as unfilled until
        all of its tokens are computed.
        """
        return num_computed_tokens >= self._filled.get(request.request_id, request.num_tokens)

    def tokens_per_block(self, group: int) -> int:
        """Tokens that one block of a group's table covers, over all ranks that share it."""
        return self.layout.tokens_per_block(group)

    def first_block(self, group: int, start: int) -> int:
        """The block that a prefix hit of ``start`` tokens ends in is the request's own copy: it is filled."""
        return start // self.tokens_per_block(group)

    def positions(self, group: int, start: int, stop: int, table_length: int) -> range:
        """Block-table positions that hold external tokens ``[start, stop)``."""
        spec = self.layout.groups[group].kv_cache_spec
        held = spec.held_blocks(stop + 1, self.tokens_per_block(group), table_length)
        if spec.own_blocks:
            return held
        return range(self.first_block(group, start), held.stop)

    def keep(self, block_id: int) -> bool:
        """Whether an entry of a table names a block to fill: all but the null block."""
        return block_id != NULL_BLOCK

    def blocks_of_group(
        self, request: Fillable, group: int, table: Sequence[int], start: int, stop: int
    ) -> tuple[int, ...]:
        """The block ids of a group that hold external tokens ``[start, stop)`` of a request.

        Raises ``ConnectorError`` where the table is too short, null where decode reads, or
        names no block of the pool.
        """
        positions = self.positions(group, start, stop, len(table))
        self.check_table(request, group, table, positions, stop)
        blocks = tuple(table[p] for p in positions if self.keep(table[p]))
        self.check_ids(request, group, blocks)
        return blocks

    def check_table(
        self, request: Fillable, group: int, table: Sequence[int], positions: range, stop: int
    ) -> None:
        """The table reaches as far as the plan, and holds blocks wherever decode will read."""
        where, per_block = (
            f"request {request.request_id!r}, {describe(self.layout, group)}",
            self.tokens_per_block(group),
        )
        if len(positions) and positions[-1] >= len(table):
            raise ConnectorError(
                f"{where}: tokens up to {stop} reach block {positions[-1]} of its table (at {per_block} "
                f"tokens a block), but the table has {len(table)} entries"
            )
        read = self.layout.groups[group].kv_cache_spec.required_blocks(stop + 1, per_block, len(table))
        for p in range(max(read.start, positions.start), min(read.stop, positions.stop)):
            if table[p] == NULL_BLOCK:
                raise ConnectorError(
                    f"{where}: position {p} of its table is the null block, but decode reads positions "
                    f"{read.start} to {read.stop - 1} there"
                )

    def check_ids(self, request: Fillable, group: int, blocks: Sequence[int]) -> None:
        """Raises ``ConnectorError`` for an id that the group's pool does not have."""
        limit = self.layout.num_blocks_of(group)
        for block_id in blocks:
            if not 0 <= block_id < limit:
                raise ConnectorError(
                    f"request {request.request_id!r}, {describe(self.layout, group)}: block id {block_id} "
                    f"is out of range, the pool's ids are 1 to {limit - 1}"
                )


class ConnectorWorker:
    """Worker half: has ``fill`` write the blocks it is handed, each once a step.

    ``counters``: steps with a fill; blocks asked for (requests that share a block ask for it each) and
    blocks written; bytes needed (each block's once) and bytes written; seconds spent filling, and the
    part of them spent after the step had begun, which must stay 0.
    """

    def __init__(self, layout: Layout, values: Values | None = None, startup_fill: bool = False) -> None:
        for group, spec in enumerate(layout.groups):
            if not spec.layer_names:
                raise ConnectorError(
                    f"group {group} ({spec.kind}) has no layer: its blocks could not be filled"
                )
        self.layout = layout
        self.values = default_values(startup_fill) if values is None else values
        self.startup_filled = self.groups_filled_at_startup() if startup_fill else frozenset()
        self.cache: Cache | None = None
        self.counters = {
            "fills": 0,
            "blocks_asked": 0,
            "blocks_written": 0,
            "bytes_needed": 0,
            "bytes_written": 0,
            "seconds": 0.0,
            "seconds_in_step": 0.0,
        }

    def register_kv_caches(self, kv_caches: Cache | Mapping) -> None:
        """Take a cache of ours, or an engine's tensors per layer (checked: ``CacheMismatch``)."""
        cache = kv_caches if isinstance(kv_caches, Cache) else self.bind(kv_caches)
        ours = self.layout
        if cache.layout.groups != ours.groups or cache.layout.pool_num_blocks != ours.pool_num_blocks:
            raise ConnectorError(
                f"this cache has {len(cache.layout.groups)} groups and {cache.layout.pool_num_blocks} "
                f"blocks, the connector's layout {len(ours.groups)} and {ours.pool_num_blocks}, or other "
                "layers: make both from one layout"
            )
        self.cache = cache
        if self.startup_filled:
            blocks = [
                tuple(range(1, ours.num_blocks_of(group))) if group in self.startup_filled else ()
                for group in range(len(ours.groups))
            ]
            self._count(blocks, self.write(blocks), asked=sum(map(len, blocks)))

    def registered(self) -> Cache:
        """The cache that was registered; raises ``ConnectorError`` before ``register_kv_caches``."""
        if self.cache is None:
            raise ConnectorError("no KV caches are registered: call register_kv_caches first")
        return self.cache

    def start_load_kv(self, meta: ConnectorMetadata) -> FillReport:
        """Fill a step's blocks; they are written when this returns.

        Raises ``ConnectorError`` before ``register_kv_caches``, ``FillRefused`` for blocks that do
        not exist, before the first byte is written.
        """
        self.registered()  # refused before a request is looked at
        needed = self.union(meta)
        report = together(self.fill_step(meta, needed), len(self.layout.groups))
        self._count(
            needed, report, asked=sum(len(blocks) for fill in meta.requests for blocks in fill.block_ids)
        )
        return report

    def wait_for_layer_load(self, layer: str) -> None:
        """Called by the running step before a layer; nothing is left to wait for."""

    # -- small steps, each of which some connector got wrong (faults.py overrides them) ----------

    def groups_filled_at_startup(self) -> frozenset[int]:
        """The groups that keep what the worker writes when it takes its cache."""
        return startup_groups(self.layout, self.values)

    def bind(self, kv_caches: Mapping) -> Cache:
        """An engine's tensors per layer as a cache of this layout; raises ``CacheMismatch``."""
        return bind(self.layout, kv_caches)

    def union(self, meta: ConnectorMetadata) -> list[tuple[int, ...]]:
        """The blocks of all requests of the step, per group, each once."""
        for fill in meta.requests:
            if len(fill.block_ids) != len(self.layout.groups):
                raise ConnectorError(
                    f"request {fill.request_id!r}: blocks for {len(fill.block_ids)} groups, the layout has "
                    f"{len(self.layout.groups)}: build both halves from one layout"
                )
        return [
            merge_blocks(fill.block_ids[group] for fill in meta.requests)
            for group in range(len(self.layout.groups))
        ]

    def blocks_to_write(self, blocks: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Each group's layers are filled at the group's own blocks."""
        return blocks

    def merge(self, meta: ConnectorMetadata) -> list[tuple[int, ...]]:
        """What a step's metadata makes this worker write: block ids per group."""
        return self.blocks_to_write(self.union(meta))

    def fill_step(self, meta: ConnectorMetadata, needed: list[tuple[int, ...]]) -> list[FillReport]:
        """One write for all requests of the step."""
        return [self.write(self.blocks_to_write(needed))]

    def write(self, blocks: Sequence[Sequence[int]]) -> FillReport:
        """Write these blocks, ids per group; raises ``FillRefused`` before the first byte, ``FillFailed`` after
        it.
        """
        return fill_blocks(self.registered(), blocks, self.values)

    def _count(self, needed: Sequence[Sequence[int]], report: FillReport, asked: int) -> None:
        self.counters["fills"] += bool(asked)
        self.counters["blocks_asked"] += asked
        self.counters["bytes_needed"] += sum(
            len(blocks) * sum(spec.unpadded_page_size_bytes for spec in group.layer_specs)
            for blocks, group in zip(needed, self.layout.groups)
        )
        self.counters["blocks_written"] += sum(report.blocks)
        self.counters["bytes_written"] += report.bytes_written
        self.counters["seconds"] += report.seconds


def together(reports: Sequence[FillReport], groups: int) -> FillReport:
    """The reports of several fills as one: blocks written twice count twice, ``block_ids`` name each once."""
    if len(reports) == 1:
        return reports[0]
    total = FillReport(blocks=[0] * groups, block_ids=[()] * groups)
    for report in reports:
        total.blocks = [a + b for a, b in zip(total.blocks, report.blocks)]
        for name in ("bytes_needed", "bytes_written", "bytes_zeroed", "writes", "seconds", "prepare_seconds"):
            setattr(total, name, getattr(total, name) + getattr(report, name))
    total.block_ids = [merge_blocks(report.block_ids[g] for report in reports) for g in range(groups)]
    return total


def describe(layout: Layout, group: int) -> str:
    """A group in words, for messages."""
    spec = layout.groups[group]
    first = f"first layer {spec.layer_names[0]!r}" if spec.layer_names else "no layer"
    return f"group {group} ({spec.kind}, {first})"
