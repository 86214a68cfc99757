"""The pool: requests → block tables, as each kind of layer keeps its blocks.

Every group draws ids from a pool; id 0 is the null block, a placeholder that is never owned,
filled or read. A block id belongs to one group at a time, and to one request, or to several that
share a prefix. The tables are those of vLLM's KV cache manager at the moment in which a request
whose prompt is stood in for runs its first decode step.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Hashable, Sequence, Sized
from dataclasses import dataclass, replace
from operator import index
from typing import SupportsIndex

from decodebench.errors import DecodebenchError
from decodebench.layout.layout import Layout
from decodebench.models.specs import KVCacheSpec, SpecError
from decodebench.words import counted, short, shown

#: placeholder in block tables: never owned, filled, or read as data
NULL_BLOCK = 0


def zeroed_on_allocation(layout: Layout, group: int) -> bool:
    """Whether the engine zeroes this group's blocks when it hands them out."""
    spec = layout.groups[group].kv_cache_spec
    return layout.needs_kv_cache_zeroing and not spec.holds_state and not spec.bookkeeping


class BlockError(DecodebenchError):
    """A request or block id that the pool does not know."""


class PoolExhausted(DecodebenchError):
    """A request that the free blocks cannot hold.

    ``wanted``: new blocks of each group that draws from ``pool``; ``free``: what is left there.
    """

    def __init__(self, message: str, pool: int, wanted: dict[int, int], free: int) -> None:
        super().__init__(message)
        self.pool, self.wanted, self.free = pool, wanted, free


@dataclass(frozen=True)
class Request:
    """A request of ``num_tokens`` tokens (prompt, and after a preemption what was generated).

    Requests with an equal ``prefix`` share their first ``prefix_tokens`` tokens: the first one
    computes them, the others hit. ``encoder_tokens`` is what cross attention reads (None: what
    the layout reserves for).
    """

    request_id: str
    num_tokens: int
    prefix: Hashable = None
    prefix_tokens: int = 0
    encoder_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_tokens", "prefix_tokens", "encoder_tokens"):
            if getattr(self, name) is not None:
                object.__setattr__(
                    self, name, _count(getattr(self, name), f"request {self.request_id!r}: {name}")
                )
        if self.num_tokens < 1:
            raise BlockError(
                f"request {self.request_id!r} has {self.num_tokens} tokens: at least 1 is needed"
            )
        if not 0 <= self.prefix_tokens < self.num_tokens:
            raise BlockError(
                f"request {self.request_id!r}: prefix of {self.prefix_tokens} tokens in {self.num_tokens}: "
                "the last token is always computed, so a prefix is shorter than the request"
            )
        if self.prefix_tokens and self.prefix is None:
            raise BlockError(
                f"request {self.request_id!r}: prefix of {self.prefix_tokens} tokens without a name: "
                "give prefix= a name that the requests sharing it have in common"
            )
        if self.encoder_tokens is not None and self.encoder_tokens < 0:
            raise BlockError(
                f"request {self.request_id!r} has {self.encoder_tokens} encoder tokens: 0 or more"
            )


def _count(number: object, what: str) -> int:
    """A whole number, or ``BlockError``."""
    try:
        if isinstance(number, bool) or not isinstance(number, SupportsIndex):
            raise TypeError
        return index(number)
    except TypeError:
        raise BlockError(f"{what} {number!r}: a whole number of tokens is expected") from None


@dataclass(frozen=True)
class RequestBlocks:
    """An admitted request: ``num_computed`` tokens came from a prefix hit; one block table a group."""

    request: Request
    num_computed: int
    block_ids: tuple[tuple[int, ...], ...]

    @property
    def request_id(self) -> str:
        """The name of the request, under which the manager knows it."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens of the request, the one that the next step computes included."""
        return self.request.num_tokens

    @property
    def num_external_tokens(self) -> int:
        """Tokens that the connector stands in for: all but the last, less the prefix hit."""
        return max(0, self.num_tokens - 1 - self.num_computed)

    def required_blocks(self, spec: KVCacheSpec, group: int, tokens_per_block: int) -> range:
        """Positions of its table in a group that layers of ``spec`` read in its next step.

        Where a prefix hit brought everything, nothing is filled, and a state is read from where the
        hit brought it.
        """
        read = spec.required_blocks if self.num_external_tokens else spec.blocks_after_full_hit
        return read(self.num_tokens, tokens_per_block, len(self.block_ids[group]))


@dataclass(frozen=True)
class Batch:
    """Requests admitted together. Block ids of one group never repeat except where a prefix is shared."""

    layout: Layout
    requests: tuple[RequestBlocks, ...]

    def __repr__(self) -> str:
        lengths = sorted({blocks.num_tokens for blocks in self.requests}) or [0]
        tokens = f"{lengths[0]:,}" + (f" to {lengths[-1]:,}" if len(lengths) > 1 else "")
        name = short(self.layout.model.name) if self.layout.model else "a layout by hand"
        return (
            f"Batch of {counted(len(self.requests), 'request')} of {tokens} tokens on {name}, "
            f"{counted(len(self.layout.groups), 'group')}"
        )

    @property
    def context_lens(self) -> tuple[int, ...]:
        """Tokens of each request, the one being computed included."""
        return tuple(blocks.num_tokens for blocks in self.requests)

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests together."""
        return sum(self.context_lens)

    def block_table(self, group: int) -> list[tuple[int, ...]]:
        """One row a request: sequence position in blocks → block id, 0 = null."""
        return [blocks.block_ids[group] for blocks in self.requests]

    def __len__(self) -> int:
        return len(self.requests)


@dataclass
class _Prefix:
    """A shared prefix: its tokens computed so far, and per group position → block id and back, while held."""

    blocks: list[dict[int, int]]
    positions: list[dict[int, int]]
    tokens: int = 0


class KVCacheManager:
    """Hands out blocks as vLLM's manager does and keeps who owns what.

    ``take_zeroed()`` lists what the engine would zero before the next step, where the layout says
    that it zeroes new blocks.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._free = [deque(range(1, n)) for n in layout.pool_num_blocks]
        self._holders: dict[tuple[int, int], set[str]] = {}  # (group, block id) → request ids
        self._tables: dict[str, RequestBlocks] = {}
        self._prefixes: dict[Hashable, _Prefix] = {}
        self._to_zero: list[list[int]] = [[] for _ in layout.groups]

    def num_free(self, pool: int = 0) -> int:
        """Blocks of a pool that nobody holds."""
        return len(self._free[pool])

    def owner(self, group: int, block_id: int) -> tuple[str, ...]:
        """Requests that hold this block id in this group."""
        return tuple(sorted(self._holders.get((group, block_id), ())))

    def blocks_of(self, request_id: str) -> RequestBlocks:
        """The blocks of one request as they are now; raises ``BlockError`` where it is not admitted."""
        if request_id not in self._tables:
            raise BlockError(f"request {request_id!r} is not admitted")
        return self._tables[request_id]

    def batch(self) -> Batch:
        """All admitted requests as they are now, in the order of their admission."""
        return Batch(self.layout, tuple(self._tables.values()))

    def take_zeroed(self) -> tuple[tuple[int, ...], ...]:
        """Block ids per group handed out since the last call, which the engine zeroes before use.

        Attention's only (circular buffers and states are not zeroed by the engine), and none where
        the layout does not ask for it.
        """
        taken = tuple(
            tuple(ids) if zeroed_on_allocation(self.layout, g) else () for g, ids in enumerate(self._to_zero)
        )
        self._to_zero = [[] for _ in self.layout.groups]
        return taken

    def allocate(self, request: Request) -> RequestBlocks:
        """Admit a request: share what its prefix hits, take new blocks for the rest.

        Raises ``PoolExhausted`` where the free blocks do not suffice (nothing is taken then), and
        ``BlockError`` for an id in use or a request longer than the layout serves.
        """
        if request.request_id in self._tables:
            raise BlockError(f"request {request.request_id!r} is admitted already; free it first")
        self._check_length(request.request_id, request.num_tokens)
        prefix = self._prefixes.get(request.prefix) if request.prefix is not None else None
        known = prefix.blocks if prefix else [{} for _ in self.layout.groups]
        hit = self._usable_hit(request, prefix) if prefix else 0
        plans = [self._plan(g, request, hit, known[g]) for g in range(len(self.layout.groups))]
        self._check_room(request, plans)
        tables = []
        for group, (length, shared, wanted) in enumerate(plans):
            table = [NULL_BLOCK] * length
            for position, block_id in shared.items():
                table[position] = block_id
                self._holders[group, block_id].add(request.request_id)
            for position in wanted:
                table[position] = self._take(group, request.request_id)
            tables.append(tuple(table))
        blocks = RequestBlocks(request, hit, tuple(tables))
        self._tables[request.request_id] = blocks
        if request.prefix is not None:
            self._remember_prefix(request, blocks)
        return blocks

    def free(self, request_id: str) -> None:
        """Give a request's blocks back; shared ones stay with whoever still holds them."""
        blocks = self.blocks_of(request_id)
        del self._tables[request_id]
        for group, table in enumerate(blocks.block_ids):
            for block_id in table:
                if block_id != NULL_BLOCK:
                    self._release(group, block_id, request_id)

    def preempt(self, request_id: str) -> Request:
        """Free a request that will come back; it must be filled again then."""
        request = self.blocks_of(request_id).request
        self.free(request_id)
        return request

    def append(self, request_id: str, tokens: int = 1) -> RequestBlocks:
        """Grow a request by generated tokens: tables lengthen, windows move, blocks left behind are freed.

        Raises ``PoolExhausted`` and ``BlockError`` as ``allocate`` does, before anything changes.
        """
        old = self.blocks_of(request_id)
        if _count(tokens, f"request {request_id!r}: append of") < 1:
            raise BlockError(f"request {request_id!r}: append of {tokens} tokens: a request only grows")
        self._check_length(request_id, old.num_tokens + tokens)
        request = replace(old.request, num_tokens=old.num_tokens + tokens)
        plans = []
        for group, table in enumerate(old.block_ids):
            length, kept, wanted = self._plan(group, request, 0, {})
            held = {p: table[p] for p in (*kept, *wanted) if p < len(table) and table[p] != NULL_BLOCK}
            plans.append((max(length, len(table)), held, [p for p in wanted if p not in held]))
        self._check_room(request, plans)
        tables = []
        for group, (length, held, wanted) in enumerate(plans):
            grown = [NULL_BLOCK] * length
            for position, block_id in held.items():
                grown[position] = block_id
            for block_id in set(old.block_ids[group]) - set(held.values()) - {NULL_BLOCK}:
                self._release(group, block_id, request_id)
            for position in wanted:
                grown[position] = self._take(group, request_id)
            tables.append(tuple(grown))
        self._tables[request_id] = replace(old, request=request, block_ids=tuple(tables))
        return self._tables[request_id]

    # -- how each kind keeps its blocks ---------------------------------------------------------

    def _positions(self, group: int, request: Request) -> tuple[int, Sequence[int]]:
        """(table length, positions that hold a real block) at the request's next decode step."""
        spec = self.layout.groups[group].kv_cache_spec
        per_block = self.layout.tokens_per_block(group)
        try:
            return spec.table_positions(request.num_tokens, per_block, request.encoder_tokens)
        except SpecError as error:
            raise BlockError(
                f"request {request.request_id!r}, group {group} ({spec.kind}): {error}"
            ) from None

    def _plan(
        self, group: int, request: Request, hit: int, known: dict[int, int]
    ) -> tuple[int, dict[int, int], list[int]]:
        """(table length, shared position → id, positions that want a new block)."""
        length, positions = self._positions(group, request)
        whole = hit // self.layout.tokens_per_block(group)
        shared = {p: known[p] for p in positions if p < whole and p in known}
        return length, shared, [p for p in positions if p not in shared]

    def _usable_hit(self, request: Request, prefix: _Prefix) -> int:
        """Tokens of the prefix that every group still holds, as far as it needs them."""
        if not any(prefix.blocks):
            return 0
        hit = min(request.prefix_tokens, prefix.tokens)
        for group, known in enumerate(prefix.blocks):
            if self.layout.groups[group].kv_cache_spec.own_blocks:
                continue
            per_block = self.layout.tokens_per_block(group)
            _, positions = self._positions(group, request)
            missing = [p for p in positions if p < hit // per_block and p not in known]
            if missing:
                hit = min(missing) * per_block
        if hit == request.num_tokens - 1 and hit and self._needs_own_blocks(request, hit, prefix):
            # a hit of everything leaves nothing to stand in for, and those rows would be nobody's task
            hit -= 1
        return hit

    def _needs_own_blocks(self, request: Request, hit: int, prefix: _Prefix) -> bool:
        """Whether the next step reads a block that this hit does not bring (a state, a half-hit block)."""
        for group, known in enumerate(prefix.blocks):
            per_block = self.layout.tokens_per_block(group)
            length, _ = self._positions(group, request)
            read = self.layout.groups[group].kv_cache_spec.blocks_after_full_hit(
                request.num_tokens, per_block, length
            )
            if any(p >= hit // per_block or p not in known for p in read):
                return True
        return False

    def _remember_prefix(self, request: Request, blocks: RequestBlocks) -> None:
        """Whole blocks of the prefix, while somebody holds them."""
        groups = self.layout.groups
        prefix = self._prefixes.setdefault(
            request.prefix, _Prefix([{} for _ in groups], [{} for _ in groups])
        )
        prefix.tokens = max(prefix.tokens, request.prefix_tokens)
        for group, table in enumerate(blocks.block_ids):
            if groups[group].kv_cache_spec.filled_whole:
                continue
            whole = request.prefix_tokens // self.layout.tokens_per_block(group)
            for position, block_id in enumerate(table[:whole]):
                if block_id != NULL_BLOCK and position not in prefix.blocks[group]:
                    prefix.blocks[group][position] = block_id
                    prefix.positions[group][block_id] = position

    def _forget_block(self, group: int, block_id: int) -> None:
        for name, prefix in list(self._prefixes.items()):
            position = prefix.positions[group].pop(block_id, None)
            if position is not None:
                del prefix.blocks[group][position]
                if not any(prefix.blocks):
                    del self._prefixes[name]

    def _check_length(self, request_id: str, num_tokens: int) -> None:
        limit = self.layout.max_model_len
        if limit and num_tokens > limit:
            raise BlockError(
                f"request {request_id!r} has {num_tokens} tokens, the layout serves at most "
                f"{limit}: plan it with a larger max_model_len"
            )

    # -- the pool -------------------------------------------------------------------------------

    def _check_room(self, request: Request, plans: Sequence[tuple[int, dict[int, int], list[int]]]) -> None:
        for pool, free in enumerate(self._free):
            groups = [g for g, group in enumerate(self.layout.groups) if group.pool == pool]
            wanted = {g: len(plans[g][2]) for g in groups}
            if sum(wanted.values()) > len(free):
                listing = ", ".join(
                    f"group {g} ({self.layout.groups[g].kind}) {n}" for g, n in wanted.items() if n
                )
                others = (
                    f"{len(self._tables)} requests admitted before hold the rest. " if self._tables else ""
                )
                raise PoolExhausted(
                    f"request {request.request_id!r} of {request.num_tokens} tokens wants "
                    f"{sum(wanted.values())} blocks of pool {pool}, {len(free)} of "
                    f"{self.layout.pool_num_blocks[pool] - 1} are free: {listing}. "
                    f"{others}Admit fewer or shorter requests, or plan more memory",
                    pool,
                    wanted,
                    len(free),
                )

    def _take(self, group: int, request_id: str) -> int:
        block_id = self._free[self.layout.groups[group].pool].popleft()
        self._holders[group, block_id] = {request_id}
        self._to_zero[group].append(block_id)
        return block_id

    def _release(self, group: int, block_id: int, request_id: str) -> None:
        holders = self._holders[group, block_id]
        holders.discard(request_id)
        if holders:
            return
        del self._holders[group, block_id]
        self._free[self.layout.groups[group].pool].append(block_id)
        self._forget_block(group, block_id)


def admit(
    layout: Layout,
    requests: int | None = None,
    context: int | Sequence[int] = 32_768,
    shared_prefix: int = 0,
    manager: KVCacheManager | None = None,
) -> Batch:
    """Admit requests of ``context`` tokens each (or of one length each), all at their first decode step.

    ``shared_prefix``: tokens that all requests share; the first one computes them. ``manager``: a
    pool that other requests live in. Raises ``PoolExhausted`` where they do not fit together (none
    is admitted then), ``BlockError`` for lengths that no request has.
    """
    if not isinstance(layout, Layout):
        raise BlockError(
            f"admit({_shown(layout)}, …): requests are admitted to a layout; db.plan(model, memory=…) makes one"
        )
    lengths = _lengths(requests, context)
    shared_prefix = _count(shared_prefix, "shared_prefix")
    manager = manager or KVCacheManager(layout)
    prefix = "shared" if shared_prefix else None
    admitted: list[RequestBlocks] = []
    try:
        for i, length in enumerate(lengths):
            admitted.append(manager.allocate(Request(f"request-{i}", length, prefix, shared_prefix)))
    except DecodebenchError:
        for blocks in admitted:
            manager.free(blocks.request_id)
        raise
    return Batch(layout, tuple(admitted))


def parse_lengths(text: str | int) -> tuple[int, ...]:
    """``"4096"`` → (4096,); ``"63x4096+1x262144"`` → 64 lengths. Raises ``BlockError``."""
    lengths: list[int] = []
    for term in str(text).replace(" ", "").replace("_", "").split("+"):
        match = re.fullmatch(r"(?:(\d+)[x×])?(\d+)", term)
        if not match or int(match[2]) < 1 or (match[1] and not 1 <= int(match[1]) <= 1_000_000):
            raise BlockError(
                f"context {shown(text)}: write a length such as 4096, or a mix such as 63x4096+1x262144"
            )
        lengths += [int(match[2])] * int(match[1] or 1)
    return tuple(lengths)


def _shown(value: object) -> str:
    """What somebody passed, short enough for an error's one line."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _lengths(requests: int | None, context: int | Sequence[int]) -> list[int]:
    """Tokens of each request."""
    count = None if requests is None else _count(requests, "requests")
    if not isinstance(context, str) and not isinstance(context, Sized):
        lengths = [_count(context, "context")] * (8 if count is None else count)
    else:
        each = parse_lengths(context) if isinstance(context, str) else context
        lengths = [_count(length, "context") for length in each]
        if isinstance(context, str) and len(lengths) == 1:
            lengths *= 8 if count is None else count
        if count not in (None, len(lengths)):
            raise BlockError(f"{count} requests with {len(lengths)} context lengths: give one length each")
    if not lengths:
        raise BlockError("0 requests: a batch has at least one")
    return lengths
