"""What fits a layout and what is wasted: requests, tokens, bytes by cause. Arithmetic on groups alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import lcm

from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.records import Placed
from decodebench.models.specs import KVCacheSpec, cdiv

#: no request is longer: where the search for the longest that fits ends
MAX_LENGTH = 2**40


@dataclass(frozen=True)
class Capacity:
    """How many requests of one length fit.

    ``blocks_per_request``: blocks that each group reserves for a request, in the groups' order, with
    room for the tokens in flight. ``concurrency`` is vLLM's: blocks of the pool over blocks of a
    request (the scarcest pool's, where there are several).
    """

    length: int
    num_blocks: tuple[int, ...]
    blocks_per_request: tuple[int, ...]
    concurrency: float
    #: tokens as logs have counted them since about vLLM 0.20.1: concurrency × length
    tokens: int
    #: tokens as logs counted them before: blocks // groups × the smallest block
    tokens_old: int
    #: bytes of KV cache that a request of one token reserves: what it costs to start one
    start_bytes: int
    #: bytes of KV cache that a request of ``length`` tokens reserves
    request_bytes: int
    #: bytes that a further token costs around ``length``: nothing once states and full windows are held
    slope_bytes: float

    def __str__(self) -> str:
        return (
            f"{self.concurrency:.2f} requests of {self.length:,} tokens; "
            f"{sum(self.blocks_per_request):,} blocks each; "
            f"a request of one token costs {self.start_bytes:,} bytes of KV cache, one of {self.length:,} tokens "
            f"{self.request_bytes:,} and {self.slope_bytes:,.0f} for each further token"
        )


def capacity(layout: Placed, length: int | None = None) -> Capacity:
    """What fits for requests of ``length`` tokens (default: the layout's maximum length).

    The slope describes the cost around that length: a group takes further blocks there, or holds what it
    holds (states, full windows). Bytes are those of the KV cache alone, without weights and activations.
    """
    length = layout.max_model_len if length is None else length
    blocks = request_blocks(layout, length)
    fits = [count / need for count, need in zip(layout.pool_num_blocks, by_pool(layout, blocks)) if need]
    concurrency = min(fits) if fits else 0.0
    slope = 0.0
    for g, group in enumerate(layout.groups):
        tokens, bytes_ = layout.tokens_per_block(g), layout.bytes_per_block(group.pool)
        edge = cdiv(length, tokens) * tokens
        here, next_ = (_blocks(layout, group, at) for at in (edge, edge + tokens))
        if next_ > here:
            slope += bytes_ / tokens
    smallest = min(layout.tokens_per_block(g) for g in range(len(layout.groups)))
    return Capacity(
        length,
        layout.pool_num_blocks,
        tuple(blocks),
        concurrency,
        int(concurrency * length),
        layout.num_blocks // len(layout.groups) * smallest,
        request_bytes(layout, 1),
        request_bytes(layout, length),
        slope,
    )


def request_bytes(layout: Placed, length: int) -> int:
    """Bytes of KV cache that all groups reserve for a request of this length."""
    return sum(
        count * layout.bytes_per_block(group.pool)
        for group, count in zip(layout.groups, request_blocks(layout, length))
    )


@dataclass(frozen=True)
class Ceilings:
    """What else bounds a layout: the labels that people quote, sequences at a time, reuse of prefixes."""

    #: blocks × block size, as NIM and ``cache_config_info`` print it (the resolved block size)
    tokens_blocks: int
    #: vLLM refuses full CUDA graphs for more sequences than this ("exceeds available Mamba cache blocks")
    state_sequences: int | None
    #: requests of one token that fit at the same time
    short_requests: int
    #: a prefix is reused in whole multiples of so many tokens; a shorter prompt never hits
    reuse_tokens: int
    #: the longest request that fits alone, if the model could serve it
    longest_length: int

    def __str__(self) -> str:
        states = (
            ""
            if self.state_sequences is None
            else f"at most {self.state_sequences:,} sequences have a state; "
        )
        return (
            f"{states}{self.short_requests:,} one-token requests fit; prefixes are reused in multiples of "
            f"{self.reuse_tokens:,} tokens; the longest request that fits alone has {self.longest_length:,} tokens"
        )


def ceilings(layout: Placed) -> Ceilings:
    """Bounds of a layout other than concurrency at one length (see ``Ceilings``)."""
    sizes = [
        layout.tokens_per_block(g)
        for g, group in enumerate(layout.groups)
        if not group.kv_cache_spec.bookkeeping
    ]
    resolved = layout.resolved.block_size if layout.resolved else min(sizes, default=1)
    holds_state = any(group.kv_cache_spec.holds_state for group in layout.groups)
    usable = [count - 1 for count in layout.pool_num_blocks]

    def fits(length: int) -> int:
        needs = by_pool(layout, request_blocks(layout, length))
        return min((have // need for have, need in zip(usable, needs) if need), default=0)

    low, high = 0, 1
    while high < MAX_LENGTH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Ceilings(
        tokens_blocks=layout.num_blocks * resolved,
        state_sequences=layout.num_blocks if holds_state else None,
        short_requests=fits(1),
        reuse_tokens=lcm(*sizes) if sizes else 1,
        longest_length=low,
    )


def request_blocks(layout: Placed, length: int) -> list[int]:
    """Blocks that each group reserves for a request of this length."""
    return [_blocks(layout, group, length) for group in layout.groups]


def by_pool(layout: Placed, blocks: Sequence[int]) -> list[int]:
    """Blocks of each group, summed by the pool they come from."""
    pools = [0] * len(layout.pool_num_blocks)
    for group, count in zip(layout.groups, blocks):
        pools[group.pool] += count
    return pools


def _blocks(layout: Placed, group: KVCacheGroupSpec, length: int) -> int:
    return group.blocks_per_request(length, layout.max_in_flight_tokens, layout.decode_context_parallel_size)


@dataclass(frozen=True)
class Waste:
    """Where the bytes of a memory go when it is full of requests of one length."""

    length: int
    #: what the next decode step of every request reads
    content: float
    #: parts of blocks that belong to no layer: groups narrower than the widest
    padding_layers: float
    #: pages padded to a common size
    padded_pages: float
    #: tokens that are kept though their window or chunk has left them behind, so that no step reads them
    unread: float
    #: parts of blocks behind a request's last token and before its window
    last_block: float
    #: blocks held for tokens in flight, for reuse of states at block boundaries, for speculation
    reserve: float
    #: the block of each pool that is nobody's
    null_block: float
    #: memory behind the last whole block
    tail: float

    @property
    def total(self) -> float:
        """Bytes of all causes together: the whole of the memory."""
        return sum(value for name, value in asdict(self).items() if name != "length")

    def shares(self) -> dict[str, float]:
        """cause → share of the memory."""
        return {name: value / self.total for name, value in asdict(self).items() if name != "length"}

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {share:.2%}" for name, share in self.shares().items())


def waste(layout: Placed, length: int | None = None) -> Waste:
    """Bytes by cause, for a memory whose blocks are all held by requests of ``length`` tokens."""
    length = layout.max_model_len if length is None else length
    blocks = request_blocks(layout, length)
    needs = by_pool(layout, blocks)
    usable = [count - 1 for count in layout.pool_num_blocks]
    requests = min((have / need for have, need in zip(usable, needs) if need), default=0.0)
    causes = dict.fromkeys(
        ("content", "padding_layers", "padded_pages", "unread", "last_block", "reserve"), 0.0
    )
    for g, (group, count) in enumerate(zip(layout.groups, blocks)):
        causes["padding_layers"] += count * (layout.bytes_per_block(group.pool) - group.bytes_per_block)
        for spec in group.layer_specs:
            page = spec.unpadded_page_size_bytes
            causes["padded_pages"] += count * (spec.page_size_bytes - page)
            resident, full = spec.resident_blocks(length, count, layout.tokens_per_block(g))
            unread = min(full, kept_unread(spec, length) / layout.tokens_per_block(g))
            causes["content"] += page * (full - unread)
            causes["unread"] += page * unread
            causes["last_block"] += page * (resident - full)
            causes["reserve"] += page * (count - resident)
    held = {name: value * requests for name, value in causes.items()}
    null = sum(layout.bytes_per_block(pool) for pool in range(len(layout.pool_num_blocks)))
    # what no whole request takes, where one of several pools runs out before the others, counts as tail
    tail = max(layout.budget, layout.size) - null - sum(held.values())
    return Waste(length, null_block=null, tail=tail, **held)


def kept_unread(spec: KVCacheSpec, length: int) -> int:
    """Tokens that a request of this length keeps in its blocks and that the next step does not read."""
    return max(0, spec.visible(length + 1)[0] - spec.num_skipped_tokens(length))


def log_lines(layout: Placed) -> list[str]:
    """The lines that vLLM's log shows for such a layout, in its words, in its order."""
    lines = []
    r = layout.resolved
    if r is not None and r.mamba_page_size is not None:
        if r.block_size_grew:
            lines.append(
                f"Setting attention block size to {r.block_size} tokens "
                "to ensure that attention page size is >= mamba page size."
            )
        if r.mamba_page_size_padded is not None:
            percent = 100 * (r.mamba_page_size_padded - r.mamba_page_size) / r.mamba_page_size
            lines.append(
                f"Padding mamba page size by {percent:.2f}% "
                "to ensure that mamba page size and attention page size are exactly equal."
            )
    for padding, layers in padding_layers(layout.groups) if layout.grouping in ("auto", "hybrid") else ():
        lines.append(
            f"Add {padding} padding layers, may waste at most {padding / layers * 100:.2f}% KV cache memory"
        )
    c = capacity(layout)
    lines.append(
        f"GPU KV cache size: {c.tokens:,} tokens, "
        f"Maximum concurrency for {c.length:,} tokens per request: {c.concurrency:.2f}x"
    )
    return lines


def padding_layers(groups: Sequence[KVCacheGroupSpec]) -> list[tuple[int, int]]:
    """(padding layers, layers) of each bucket of the hybrid grouping that does not fill its groups."""
    if len(groups) < 2 or any(group.mixed for group in groups):
        return []
    size = max(len(group.layer_names) for group in groups)
    buckets: dict[KVCacheSpec, int] = {}
    for group in groups:
        buckets[group.kv_cache_spec] = buckets.get(group.kv_cache_spec, 0) + len(group.layer_names)
    return [(-layers % size, layers) for layers in buckets.values() if layers % size]
