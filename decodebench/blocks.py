"""The pool: requests → block tables, as each kind of layer keeps its blocks.

Every group draws ids from a pool; id 0 is the null block, a placeholder that is never owned,
filled or read. A block id belongs to one group at a time, and to one request, or to several that
share a prefix. The tables are those of vLLM's KV cache manager at the moment in which a request
whose prompt is stood in for runs its first decode step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from decodebench.layout import KVCacheConfig
from decodebench.specs import CircularBufferSpec, CrossAttentionSpec, DecodebenchError, MambaSpec, cdiv

#: placeholder in block tables: never owned, filled, or read as data
NULL_BLOCK = 0


class BlockError(DecodebenchError):
    """A request or block id that the pool does not know."""


class PoolExhausted(DecodebenchError):
    """A request that the free blocks cannot hold; says what each group wanted."""


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
        if self.num_tokens < 1:
            raise BlockError(f"request {self.request_id!r} has {self.num_tokens} tokens: at least 1 is needed")
        if not 0 <= self.prefix_tokens < self.num_tokens:
            raise BlockError(
                f"request {self.request_id!r}: prefix of {self.prefix_tokens} tokens in {self.num_tokens}: "
                "the last token is always computed, so a prefix is shorter than the request"
            )


@dataclass(frozen=True)
class RequestBlocks:
    """An admitted request: ``num_computed`` tokens came from a prefix hit; one block table a group."""

    request: Request
    num_computed: int
    block_ids: tuple[tuple[int, ...], ...]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return self.request.num_tokens

    @property
    def num_external_tokens(self) -> int:
        """Tokens that the connector stands in for: all but the last, less the prefix hit."""
        return max(0, self.num_tokens - 1 - self.num_computed)


@dataclass(frozen=True)
class Batch:
    """Requests admitted together. Block ids of one group never repeat except where a prefix is shared."""

    layout: KVCacheConfig
    requests: tuple[RequestBlocks, ...]

    @property
    def context_lens(self) -> tuple[int, ...]:
        """Tokens of each request, the one being computed included."""
        return tuple(blocks.num_tokens for blocks in self.requests)

    @property
    def num_tokens(self) -> int:
        return sum(self.context_lens)

    def block_table(self, group: int) -> list[tuple[int, ...]]:
        """One row a request: sequence position in blocks → block id, 0 = null."""
        return [blocks.block_ids[group] for blocks in self.requests]

    def __len__(self) -> int:
        return len(self.requests)


class KVCacheManager:
    """Hands out blocks as vLLM's manager does and keeps who owns what.

    ``take_zeroed()`` lists what the engine would zero before the next step, where the layout says
    that it zeroes new blocks.
    """

    def __init__(self, layout: KVCacheConfig) -> None:
        self.layout = layout
        self._free = [deque(range(1, n)) for n in layout.pool_num_blocks]
        self._holders: dict[tuple[int, int], set[str]] = {}  # (group, block id) → request ids
        self._tables: dict[str, RequestBlocks] = {}
        self._prefixes: dict[Hashable, list[dict[int, int]]] = {}  # prefix → per group: position → id
        self._to_zero: list[list[int]] = [[] for _ in layout.groups]

    def num_free(self, pool: int = 0) -> int:
        return len(self._free[pool])

    def owner(self, group: int, block_id: int) -> tuple[str, ...]:
        """Requests that hold this block id in this group."""
        return tuple(sorted(self._holders.get((group, block_id), ())))

    def blocks_of(self, request_id: str) -> RequestBlocks:
        if request_id not in self._tables:
            raise BlockError(f"request {request_id!r} is not admitted")
        return self._tables[request_id]

    def take_zeroed(self) -> tuple[tuple[int, ...], ...]:
        """Block ids per group handed out since the last call, which the engine zeroes before use."""
        taken = tuple(tuple(ids) for ids in self._to_zero)
        self._to_zero = [[] for _ in self.layout.groups]
        return taken if self.layout.needs_kv_cache_zeroing else tuple(() for _ in taken)

    def allocate(self, request: Request) -> RequestBlocks:
        """Admit a request: share what its prefix hits, take new blocks for the rest.

        Raises ``PoolExhausted`` where the free blocks do not suffice (nothing is taken then), and
        ``BlockError`` for an id in use or a request longer than the layout serves.
        """
        if request.request_id in self._tables:
            raise BlockError(f"request {request.request_id!r} is admitted already; free it first")
        limit = self.layout.max_model_len
        if limit and request.num_tokens > limit:
            raise BlockError(
                f"request {request.request_id!r} has {request.num_tokens} tokens, the layout serves at most "
                f"{limit}: plan it with a larger max_model_len"
            )
        known = self._prefixes.get(request.prefix) if request.prefix is not None else None
        hit = self._usable_hit(request, known)
        plans = [self._plan(g, request, hit, known[g] if known else {}) for g in range(len(self.layout.groups))]
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
        """Grow a request by generated tokens: tables lengthen, windows move, blocks left behind are freed."""
        old = self.blocks_of(request_id)
        request = replace(old.request, num_tokens=old.num_tokens + tokens)
        plans = []
        for group, table in enumerate(old.block_ids):
            length, kept, wanted = self._plan(group, request, 0, {})
            held = {p: table[p] for p in (*kept, *wanted) if p < len(table) and table[p] != NULL_BLOCK}
            plans.append((max(length, len(table)), held, [p for p in wanted if p not in held]))
        self._check_room(request, plans)
        tables = []
        for group, (length, held, wanted) in enumerate(plans):
            table = [NULL_BLOCK] * length
            for position, block_id in held.items():
                table[position] = block_id
            for block_id in set(old.block_ids[group]) - set(held.values()) - {NULL_BLOCK}:
                self._release(group, block_id, request_id)
            for position in wanted:
                table[position] = self._take(group, request_id)
            tables.append(tuple(table))
        self._tables[request_id] = replace(old, request=request, block_ids=tuple(tables))
        return self._tables[request_id]

    # -- how each kind keeps its blocks ---------------------------------------------------------

    def _positions(self, group: int, request: Request) -> tuple[int, range | list[int]]:
        """(table length, positions that hold a real block) at the request's next decode step."""
        spec = self.layout.groups[group].kv_cache_spec
        per_block = self.layout.tokens_per_block(group)
        if isinstance(spec, CircularBufferSpec):
            return 1, range(1)
        if isinstance(spec, CrossAttentionSpec):
            encoder = request.encoder_tokens or spec.max_encoder_tokens
            return cdiv(encoder, per_block), range(cdiv(encoder, per_block))
        length = cdiv(request.num_tokens, per_block)
        if isinstance(spec, MambaSpec):
            # the state the step starts from, and the block in which it leaves the next one
            computed = request.num_tokens - 1
            read = [] if computed == 0 else [(computed - 1) // per_block]
            kept = sorted({*read, computed // per_block})
            extra = spec.num_speculative_blocks
            return length + extra, kept + list(range(length, length + extra))
        first = spec.num_skipped_tokens(request.num_tokens - 1) // per_block
        return length, range(first, length)

    def _plan(
        self, group: int, request: Request, hit: int, known: dict[int, int]
    ) -> tuple[int, dict[int, int], list[int]]:
        """(table length, shared position → id, positions that want a new block)."""
        length, positions = self._positions(group, request)
        whole = hit // self.layout.tokens_per_block(group)
        shared = {p: known[p] for p in positions if p < whole and p in known}
        return length, shared, [p for p in positions if p not in shared]

    def _usable_hit(self, request: Request, known: list[dict[int, int]] | None) -> int:
        """Tokens of the prefix that every group still holds, as far as it needs them."""
        if not known or not any(known):
            return 0
        hit = request.prefix_tokens
        for group, group_spec in enumerate(self.layout.groups):
            if isinstance(group_spec.kv_cache_spec, MambaSpec | CircularBufferSpec | CrossAttentionSpec):
                continue  # their rows are the request's own
            per_block = self.layout.tokens_per_block(group)
            _, positions = self._positions(group, request)
            missing = [p for p in positions if p < hit // per_block and p not in known[group]]
            if missing:
                hit = min(missing) * per_block
        return hit

    def _remember_prefix(self, request: Request, blocks: RequestBlocks) -> None:
        """Whole blocks of the prefix, while somebody holds them."""
        remembered = self._prefixes.setdefault(request.prefix, [{} for _ in self.layout.groups])
        for group, table in enumerate(blocks.block_ids):
            spec = self.layout.groups[group].kv_cache_spec
            if isinstance(spec, CircularBufferSpec | CrossAttentionSpec):
                continue
            whole = request.prefix_tokens // self.layout.tokens_per_block(group)
            for position, block_id in enumerate(table[:whole]):
                if block_id != NULL_BLOCK:
                    remembered[group].setdefault(position, block_id)

    # -- the pool -------------------------------------------------------------------------------

    def _check_room(self, request: Request, plans: Sequence[tuple[int, dict[int, int], list[int]]]) -> None:
        for pool, free in enumerate(self._free):
            groups = [g for g, group in enumerate(self.layout.groups) if group.pool == pool]
            wanted = {g: len(plans[g][2]) for g in groups}
            if sum(wanted.values()) > len(free):
                listing = ", ".join(f"group {g} ({self.layout.groups[g].kind}) {n}" for g, n in wanted.items() if n)
                raise PoolExhausted(
                    f"request {request.request_id!r} of {request.num_tokens} tokens wants "
                    f"{sum(wanted.values())} blocks of pool {pool}, {len(free)} of "
                    f"{self.layout.pool_num_blocks[pool] - 1} are free: {listing}. "
                    "Admit fewer or shorter requests, or plan more memory"
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
        for remembered in self._prefixes.values():
            for position in [p for p, known in remembered[group].items() if known == block_id]:
                del remembered[group][position]


def admit(
    layout: KVCacheConfig,
    requests: int | None = None,
    context: int | Sequence[int] = 32_768,
    shared_prefix: int = 0,
    manager: KVCacheManager | None = None,
) -> Batch:
    """Admit requests of ``context`` tokens each (or of one length each), all at their first decode step.

    ``shared_prefix``: tokens that all requests share; the first one computes them. Raises
    ``PoolExhausted`` where they do not fit together.
    """
    lengths = [context] * (8 if requests is None else requests) if isinstance(context, int) else list(context)
    if not lengths or (not isinstance(context, int) and requests not in (None, len(lengths))):
        raise BlockError(f"{requests} requests with {len(lengths)} context lengths: give one length each")
    manager = manager or KVCacheManager(layout)
    prefix = "shared" if shared_prefix else None
    return Batch(
        layout,
        tuple(
            manager.allocate(Request(f"request-{i}", length, prefix, shared_prefix))
            for i, length in enumerate(lengths)
        ),
    )
