"""What one layer stores: the kinds of KV cache specs and their page arithmetic.

A *page* is what one block of one layer occupies. Every other room asks the spec for it:
how many bytes, which typed tensors lie inside, which blocks of a block table a decode
step reads. Names follow vLLM's ``v1/kv_cache_interface.py``.

No torch here: dtypes are torch's names as strings, so that planning a layout starts fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm, prod
from typing import ClassVar, Self

from decodebench.errors import DecodebenchError

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}

#: dtypes of a state's tensors that hold positions (of a replay ring), not values
COUNTERS = ("int16", "int32", "int64")


class SpecError(DecodebenchError):
    """A layer spec that no cache could hold (zero heads, negative window, unknown dtype)."""


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b for integers."""
    return -(-a // b)


@dataclass(frozen=True)
class PagePart:
    """One typed tensor inside a page.

    ``shape`` is the tensor of one block, in the order in which it lies in memory where the
    page holds a single part; ``offset`` is in bytes from the start of the page. ``dtype`` is
    the type of the *values* (``float8_e4m3fn`` even where an engine declares ``uint8``).
    ``zeros_only`` marks contents that are not plain numbers (packed formats with scales,
    circular buffers of packed integers): they may be zeroed, never filled with values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0
    zeros_only: bool = False

    @property
    def numel(self) -> int:
        """Numbers in the part."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What one layer stores. ``block_size`` is in tokens, sizes are in bytes."""

    kind: ClassVar[str] = "unknown"
    #: the kind in a table's cell
    short: ClassVar[str] = "unknown"
    #: one state a request, which every step reads and replaces
    holds_state: ClassVar[bool] = False
    #: one latent vector a token, without values of its own
    latent: ClassVar[bool] = False
    #: all earlier tokens are kept, whatever of them is read
    keeps_all: ClassVar[bool] = False
    #: packed bookkeeping that no step attends to
    bookkeeping: ClassVar[bool] = False
    #: a request's own blocks, which no prefix of another request brings
    own_blocks: ClassVar[bool] = False
    #: all of a request's blocks are filled, whatever its length
    filled_whole: ClassVar[bool] = False
    #: whether a decode step writes its token there
    written_by_steps: ClassVar[bool] = True

    block_size: int
    page_size_padded: int | None = None
    #: whether decode context parallelism splits this cache's tokens between ranks
    dcp_sharded: bool = False
    #: bytes that the stride between two blocks must be a multiple of (some MLA kernels ask for it)
    block_stride_alignment: int = 1
    #: kernel blocks of up to this many tokens must lie whole inside the stride between two blocks
    #: (kernels with a fixed block size; matters only where a block holds several kernel blocks)
    kernel_block_tokens: int | None = None
    #: tokens that one stored entry stands for
    tokens_per_state: int = 1
    #: a format whose page is not plain numbers; None where it is
    packed: str | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise SpecError(f"block size {self.block_size}: a block holds at least one token")
        if self.page_size_padded is not None and self.page_size_padded < self.unpadded_page_size_bytes:
            raise SpecError(
                f"padded page of {self.page_size_padded} bytes is smaller than its content of "
                f"{self.unpadded_page_size_bytes} bytes ({self.kind})"
            )

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of content in one page."""
        raise NotImplementedError

    @property
    def page_size_bytes(self) -> int:
        """Bytes one page occupies, padding included."""
        return self.page_size_padded or self.unpadded_page_size_bytes

    def parts(self) -> tuple[PagePart, ...]:
        """The typed tensors inside one page, in memory order."""
        raise NotImplementedError

    @property
    def not_plain(self) -> str | None:
        """What a page holds where it holds no plain numbers and is zeroed instead of filled; None where it does."""
        return None

    def with_block_size(self, block_size: int) -> Self:
        """The same layer with blocks of ``block_size`` tokens."""
        return replace(self, block_size=block_size)

    @property
    def label(self) -> str:
        """The kind in a table's cell, with the number that matters to it."""
        number = getattr(self, "sliding_window", None) or getattr(self, "attention_chunk_size", None)
        return self.short + (f" {number:,}" if number else "")

    @property
    def holds_vectors(self) -> bool:
        """Of latent layers alone: whether a page holds the vectors themselves."""
        return False

    @property
    def recurrence(self) -> str:
        """Of states: what advances them, as far as the spec tells."""
        return ""

    @property
    def bytes_per_token_slot(self) -> int:
        """Bytes of one stored entry of all KV heads; 0 for states."""
        return 0

    @property
    def precision(self) -> tuple[str, str | None] | None:
        """How numbers are stored where a block may change hands between layers; None for states."""
        return None

    def miniature(self) -> Self:
        """The same blocks with pages of a few bytes, unpadded."""
        return replace(self, page_size_padded=None, block_stride_alignment=1)

    def promoted(self, block_size: int | None) -> KVCacheSpec | None:
        """The layer allocated as full attention, where it keeps less; None where it cannot be.

        A layer that keeps everything, or a state, is itself. ``block_size``: another one to give it.
        """
        return self

    def engine_fields(self) -> dict[str, object]:
        """The fields that vLLM's class of this name has, by vLLM's names; ``layout/dump.py`` prints them."""
        return {
            "block_size": self.block_size,
            "dcp_sharded": self.dcp_sharded,
            "page_size_bytes": self.page_size_bytes,
            "unpadded_page_size_bytes": self.unpadded_page_size_bytes,
            "page_size_padded": self.page_size_padded,
            "prefix_cacheable": not self.bookkeeping,
        }

    @property
    def stride_alignment_bytes(self) -> int:
        """Bytes that the distance between two blocks must be a multiple of; 1 where nothing asks."""
        if self.kernel_block_tokens is None:
            return self.block_stride_alignment
        tokens = gcd(self.kernel_block_tokens, self.block_size)
        if tokens == self.block_size:
            return self.block_stride_alignment
        kernel_page = self.with_block_size(tokens).page_size_bytes
        return lcm(self.block_stride_alignment, max(1, kernel_page))

    def merged_with(self, others: Sequence[KVCacheSpec]) -> KVCacheSpec | None:
        """One spec that governs this layer and the others in a common group; None where none can."""
        return self if all(other == self for other in others) else None

    def same_token_slots(self, other: KVCacheSpec) -> bool:
        """Whether both layers need the same blocks of a request, whatever
        their pages (one group of mixed pages).
        """
        base = _slot_family(self)
        return isinstance(other, base) and self._same_slots(other)

    def _same_slots(self, other: KVCacheSpec) -> bool:
        return True

    def padded_to(self, page_size: int) -> Self:
        """The same layer with its page padded to ``page_size`` bytes."""
        return replace(self, page_size_padded=page_size)

    # -- which blocks matter (DESIGN: which blocks decode reads) -------------------------------

    def num_skipped_tokens(self, num_computed: int) -> int:
        """Leading tokens that no later step reads once ``num_computed`` tokens are computed.

        Blocks that hold only skipped tokens are null in the block table.
        """
        return 0

    def required_blocks(self, num_tokens: int, tokens_per_block: int, table_length: int) -> range:
        """Block-table positions that the next decode step reads.

        The request has ``num_tokens`` tokens; the step computes position ``num_tokens - 1``,
        so positions ``[0, num_tokens - 1)`` come from the cache. ``tokens_per_block`` is the
        block size times the decode-context-parallel size where the layer is sharded by it.
        """
        return _blocks_of(self.num_skipped_tokens(num_tokens - 1), num_tokens - 1, tokens_per_block)

    def table_positions(
        self, num_tokens: int, tokens_per_block: int, encoder_tokens: int | None = None
    ) -> tuple[int, Sequence[int]]:
        """(length of a request's block table at its next decode step, positions that hold a real block).

        ``SpecError``: more ``encoder_tokens`` than the engine reserves for (cross attention alone reads them).
        """
        length = cdiv(num_tokens, tokens_per_block)
        return length, range(self.num_skipped_tokens(num_tokens - 1) // tokens_per_block, length)

    def blocks_for_later_hits(self, num_tokens: int, tokens_per_block: int, table_length: int) -> range:
        """Held positions that the next step does not read, but a prefix hit on the same tokens would."""
        return range(0)

    def blocks_after_full_hit(self, num_tokens: int, tokens_per_block: int, table_length: int) -> range:
        """``required_blocks`` of a request whose prefix hit brought every token but the last."""
        return self.required_blocks(num_tokens, tokens_per_block, table_length)

    def held_blocks(self, num_tokens: int, tokens_per_block: int, table_length: int) -> range:
        """Block-table positions that hold something of the tokens ``[0, num_tokens - 1)``.

        What a fill writes where no prefix hit brought it and the table holds a block: at least
        what the next step reads.
        """
        return _blocks_of(0, num_tokens - 1, tokens_per_block)

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int, dcp: int = 1) -> int:
        """Blocks the engine reserves for one request of ``max_model_len`` tokens."""
        return cdiv(max_model_len, self.block_size * (dcp if self.dcp_sharded else 1))

    def resident_blocks(self, length: int, reserved: int, tokens_per_block: int) -> tuple[float, float]:
        """Blocks that a decoding request of this length really needs, and how many its tokens fill."""
        first = min(self.num_skipped_tokens(length), length)
        blocks = min(reserved, cdiv(length, tokens_per_block) - first // tokens_per_block)
        return blocks, min(blocks, (length - first) / tokens_per_block)

    def visible(self, num_tokens: int, encoder_tokens: int | None = None) -> tuple[int, int]:
        """Positions [start, stop) that the new token attends to, itself (position ``num_tokens - 1``) included.

        Cross attention: the encoder's tokens, all that the layout reserves for where None.
        """
        return self.num_skipped_tokens(num_tokens - 1), num_tokens


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of every token of a block, K and V side by side per head and token.

    ``packed`` names a format whose page is not plain numbers (``fp8_ds_mla``, ``nvfp4``,
    an indexer's fp8 keys with scales); ``state_content_bytes`` is then the bytes of one
    head and token. ``tokens_per_state`` > 1: several tokens are compressed into one entry.
    """

    dcp_sharded: bool = True
    num_kv_heads: int
    head_size: int
    head_size_v: int | None = None
    dtype: str
    state_content_bytes: int | None = None
    #: slots that a kernel keeps a page's heads in where that is not one a KV head (2: keys, then values)
    num_head_slots: int | None = None

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(f"KV cache dtype {self.dtype!r}: known are {', '.join(DTYPE_BYTES)}")
        if self.num_kv_heads < 1 or self.head_size < 1 or (self.head_size_v or 0) < 0:
            raise SpecError(
                f"attention layer with {self.num_kv_heads} KV heads of size {self.head_size}: "
                "both must be positive"
            )
        super().__post_init__()

    @property
    def entries_per_block(self) -> int:
        """Stored entries (tokens, or compressed groups of tokens) in one block."""
        return self.block_size // self.tokens_per_state

    @property
    def head_slots(self) -> int:
        """Heads of the page as kernels see it: H of ``[B, H, N, C]``."""
        return self.num_head_slots or self.num_kv_heads

    @property
    def entry_bytes(self) -> int:
        """Bytes of one head's entry: its key and its value."""
        if self.state_content_bytes is not None:
            return self.state_content_bytes
        return (self.head_size + (self.head_size_v or 0)) * DTYPE_BYTES[self.dtype]

    @property
    def unpadded_page_size_bytes(self) -> int:
        return self.num_kv_heads * self.entries_per_block * self.entry_bytes

    @property
    def not_plain(self) -> str | None:
        return self.packed

    def parts(self) -> tuple[PagePart, ...]:
        if self.packed is not None:
            return (PagePart("packed", (self.unpadded_page_size_bytes,), "uint8", zeros_only=True),)
        width = self.num_kv_heads * (self.head_size + (self.head_size_v or 0)) // self.head_slots
        return (PagePart("kv", (self.entries_per_block, self.head_slots, width), self.dtype),)

    @property
    def precision(self) -> tuple[str, str | None] | None:
        return self.dtype, self.packed

    def miniature(self) -> Self:
        # a handful of entries a block stand for its tokens, however many those are
        small = replace(
            super().miniature(),
            num_kv_heads=1,
            tokens_per_state=max(self.tokens_per_state, self.block_size // 16),
        )
        if self.packed is not None:
            return replace(small, state_content_bytes=8)
        return replace(small, head_size=1, head_size_v=min(1, self.head_size_v or 0))

    @property
    def bytes_per_token_slot(self) -> int:
        return self.num_kv_heads * self.entry_bytes

    @property
    def holds_vectors(self) -> bool:
        """Of latent layers: whether these are the vectors, not an indexer's keys or a compressor's sums."""
        return self.packed != "fp8_indexer" and self.dtype != "float32"

    @property
    def quant_mode(self) -> str:
        """vLLM's name for how the values are quantized."""
        if self.packed in (None, "fp8_ds_mla"):
            return "FP8_PER_TENSOR" if self.dtype.startswith("float8") or self.packed else "NONE"
        return "NONE" if self.packed == "fp8_indexer" else self.packed.upper()

    def engine_fields(self) -> dict[str, object]:
        return super().engine_fields() | {
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
            "dtype": "uint8" if self.dtype.startswith("float8") else self.dtype,
            "kv_quant_mode": self.quant_mode,
            "tokens_per_state": self.tokens_per_state,
            "state_content_bytes": self.state_content_bytes,
            "sliding_window": getattr(self, "sliding_window", None),
            "alignment": getattr(self, "alignment", None),
            "attention_chunk_size": getattr(self, "attention_chunk_size", None),
        }


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Attention over all earlier tokens.

    ``sliding_window`` or ``attention_chunk_size`` is set where a window or chunk layer is
    *allocated* as full attention (hybrid manager off): the pool keeps every block, the
    kernel still reads only its window.
    """

    kind: ClassVar[str] = "full_attention"
    short: ClassVar[str] = "full"
    keeps_all: ClassVar[bool] = True
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def visible(self, num_tokens: int, encoder_tokens: int | None = None) -> tuple[int, int]:
        if self.sliding_window is not None:
            return max(0, num_tokens - self.sliding_window), num_tokens
        if self.attention_chunk_size is not None:
            return (num_tokens - 1) // self.attention_chunk_size * self.attention_chunk_size, num_tokens
        return super().visible(num_tokens, encoder_tokens)

    def required_blocks(self, num_tokens: int, tokens_per_block: int, table_length: int) -> range:
        first = 0
        if self.sliding_window is not None:
            first = max(0, num_tokens - self.sliding_window)
        elif self.attention_chunk_size is not None:
            c = self.attention_chunk_size
            first = (num_tokens - 1) // c * c
        return _blocks_of(first, num_tokens - 1, tokens_per_block)

    def merged_with(self, others: Sequence[KVCacheSpec]) -> KVCacheSpec | None:
        """Layers that differ only in one window (or chunk) value share a group; two windows do not."""
        specs = [spec for spec in (self, *others) if type(spec) is FullAttentionSpec]
        if len(specs) < 1 + len(others):
            return None
        windows = {spec.sliding_window for spec in specs} - {None}
        chunks = {spec.attention_chunk_size for spec in specs} - {None}
        if len(windows) + len(chunks) > 1:
            return None
        merged = replace(
            self, sliding_window=next(iter(windows), None), attention_chunk_size=next(iter(chunks), None)
        )
        same = (
            replace(merged, sliding_window=s.sliding_window, attention_chunk_size=s.attention_chunk_size) == s
            for s in specs
        )
        return merged if all(same) else None


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Multi-head latent attention: one latent vector a token, no separate V."""

    kind: ClassVar[str] = "mla_attention"
    short: ClassVar[str] = "latent"
    latent: ClassVar[bool] = True
    head_size_v: int = 0
    #: SPARSE (the latent vectors) or INDEXER (the keys that choose which of them are read)
    cache_role: str = "SPARSE"
    #: bytes that the page is rounded up to a multiple of
    alignment: int | None = None
    #: whether this layer runs an indexer whose choice later layers share
    is_index_group_leader: bool = False

    def __post_init__(self) -> None:
        _round_page_up(self)
        super().__post_init__()

    def merged_with(self, others: Sequence[KVCacheSpec]) -> KVCacheSpec | None:
        return KVCacheSpec.merged_with(self, others)

    def engine_fields(self) -> dict[str, object]:
        return super().engine_fields() | {"cache_role": self.cache_role}


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Attention over the last ``sliding_window`` tokens, the current one included."""

    kind: ClassVar[str] = "sliding_window"
    short: ClassVar[str] = "window"
    sliding_window: int

    def promoted(self, block_size: int | None) -> KVCacheSpec | None:
        return _as_full_attention(self, block_size, sliding_window=self.sliding_window)

    def engine_fields(self) -> dict[str, object]:
        return super().engine_fields() | {"extra_retained_tokens": 0}

    def __post_init__(self) -> None:
        if self.sliding_window < 1:
            raise SpecError(f"sliding window of {self.sliding_window} tokens: must be positive")
        super().__post_init__()

    def _same_slots(self, other: KVCacheSpec) -> bool:
        return isinstance(other, SlidingWindowSpec) and other.sliding_window == self.sliding_window

    def num_skipped_tokens(self, num_computed: int) -> int:
        return max(0, num_computed - self.sliding_window + 1)

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int, dcp: int = 1) -> int:
        tokens = min(self.sliding_window - 1 + max_in_flight_tokens, max_model_len)
        return cdiv(tokens, self.block_size) + 1


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A sliding window over latent vectors."""

    kind: ClassVar[str] = "sliding_window_mla"
    short: ClassVar[str] = "latent window"
    latent: ClassVar[bool] = True
    head_size_v: int = 0
    #: bytes that the page is rounded up to a multiple of
    alignment: int | None = None

    def __post_init__(self) -> None:
        _round_page_up(self)
        super().__post_init__()

    def promoted(self, block_size: int | None) -> KVCacheSpec | None:
        return None

    def engine_fields(self) -> dict[str, object]:
        return super().engine_fields() | {"bounded_replay": False}


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Attention within the current chunk of ``attention_chunk_size`` tokens."""

    kind: ClassVar[str] = "chunked_local_attention"
    short: ClassVar[str] = "chunk"
    attention_chunk_size: int

    def promoted(self, block_size: int | None) -> KVCacheSpec | None:
        return _as_full_attention(self, block_size, attention_chunk_size=self.attention_chunk_size)

    def __post_init__(self) -> None:
        if self.attention_chunk_size < 1:
            raise SpecError(f"attention chunk of {self.attention_chunk_size} tokens: must be positive")
        super().__post_init__()

    def _same_slots(self, other: KVCacheSpec) -> bool:
        return (
            isinstance(other, ChunkedLocalAttentionSpec)
            and other.attention_chunk_size == self.attention_chunk_size
        )

    def num_skipped_tokens(self, num_computed: int) -> int:
        return num_computed // self.attention_chunk_size * self.attention_chunk_size

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int, dcp: int = 1) -> int:
        return cdiv(min(self.attention_chunk_size + max_in_flight_tokens, max_model_len), self.block_size)


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Attention over the encoder's tokens: all of them, whatever the decoder's length."""

    kind: ClassVar[str] = "cross_attention"
    short: ClassVar[str] = "cross"
    own_blocks: ClassVar[bool] = True
    filled_whole: ClassVar[bool] = True
    written_by_steps: ClassVar[bool] = False
    #: encoder tokens the engine reserves for (``max_num_encoder_input_tokens``)
    max_encoder_tokens: int

    def table_positions(
        self, num_tokens: int, tokens_per_block: int, encoder_tokens: int | None = None
    ) -> tuple[int, Sequence[int]]:
        encoder = self.max_encoder_tokens if encoder_tokens is None else encoder_tokens
        if encoder > self.max_encoder_tokens:
            raise SpecError(
                f"{encoder} encoder tokens, and the layer takes at most {self.max_encoder_tokens}"
            )
        return cdiv(encoder, tokens_per_block), range(cdiv(encoder, tokens_per_block))

    def required_blocks(self, num_tokens: int, tokens_per_block: int, table_length: int) -> range:
        return range(table_length)

    held_blocks = required_blocks

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int, dcp: int = 1) -> int:
        return cdiv(self.max_encoder_tokens, self.block_size)

    def resident_blocks(self, length: int, reserved: int, tokens_per_block: int) -> tuple[float, float]:
        return reserved, min(reserved, self.max_encoder_tokens / tokens_per_block)

    def visible(self, num_tokens: int, encoder_tokens: int | None = None) -> tuple[int, int]:
        return 0, self.max_encoder_tokens if encoder_tokens is None else encoder_tokens


@dataclass(frozen=True, kw_only=True)
class CircularBufferSpec(AttentionSpec):
    """A ring of packed integers, one block a request, ``block_size`` entries long."""

    kind: ClassVar[str] = "circular_buffer"
    short: ClassVar[str] = "ring"
    bookkeeping: ClassVar[bool] = True
    own_blocks: ClassVar[bool] = True
    filled_whole: ClassVar[bool] = True

    @property
    def not_plain(self) -> str | None:
        return "circular buffer"

    def parts(self) -> tuple[PagePart, ...]:
        return (PagePart("ring", (self.unpadded_page_size_bytes,), "uint8", zeros_only=True),)

    def table_positions(
        self, num_tokens: int, tokens_per_block: int, encoder_tokens: int | None = None
    ) -> tuple[int, Sequence[int]]:
        return 1, range(1)

    def required_blocks(self, num_tokens: int, tokens_per_block: int, table_length: int) -> range:
        return range(min(1, table_length))

    held_blocks = required_blocks

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int, dcp: int = 1) -> int:
        return 1

    def resident_blocks(self, length: int, reserved: int, tokens_per_block: int) -> tuple[float, float]:
        return min(1, reserved), min(1, reserved)


def _as_full_attention(
    spec: AttentionSpec,
    block_size: int | None,
    *,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
) -> FullAttentionSpec:
    """A window or chunk layer with every block kept; what it reads stays what it was."""
    block_size = block_size or spec.block_size
    padded = spec.page_size_padded
    if padded is not None:
        padded = max(padded, spec.unpadded_page_size_bytes * block_size // spec.block_size)
    return FullAttentionSpec(
        block_size=block_size,
        page_size_padded=padded,
        dcp_sharded=spec.dcp_sharded,
        block_stride_alignment=spec.block_stride_alignment,
        kernel_block_tokens=spec.kernel_block_tokens,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        packed=spec.packed,
        state_content_bytes=spec.state_content_bytes,
        tokens_per_state=spec.tokens_per_state,
        sliding_window=sliding_window,
        attention_chunk_size=attention_chunk_size,
    )


def _blocks_of(first: int, stop: int, tokens_per_block: int) -> range:
    """Blocks that hold the tokens ``[first, stop)``; none where there are no such tokens."""
    end = cdiv(stop, tokens_per_block)
    return range(first // tokens_per_block if first < stop else end, end)


#: names of a state layer's tensors, by the kernel that owns them
STATE_PART_NAMES = {
    "MAMBA1": ("conv", "ssm"),
    "MAMBA2": ("conv", "ssm"),
    "GDN_ATTN": ("conv", "recurrent"),
    "SHORT_CONV": ("conv",),
    "LINEAR": ("recurrent",),
}


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A recurrent state: a few tensors of fixed shape a request, whatever its length.

    One page holds ``shapes[i]`` of ``dtypes[i]`` one after another. ``mamba_cache_mode``:
    ``none`` keeps one state a request (its block spans the maximum length), ``align`` keeps
    states at block boundaries too, for prefix caching. There the running state lies in the block
    of the last token to compute, with the speculative blocks behind it; where that token opens a
    block, the engine copies the state of the block before into it ahead of the step (vLLM's
    ``preprocess_mamba``), and the step reads and updates the copy.
    """

    kind: ClassVar[str] = "mamba"
    holds_state: ClassVar[bool] = True
    own_blocks: ClassVar[bool] = True
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    mamba_type: str = "MAMBA2"
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    #: every rank of a tensor parallel group holds the whole state
    tp_replicated: bool = False

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.dtypes):
            raise SpecError(f"state layer with {len(self.shapes)} shapes and {len(self.dtypes)} dtypes")
        unknown = next((dtype for dtype in self.dtypes if dtype not in DTYPE_BYTES), None)
        if unknown is not None:
            raise SpecError(f"state layer of {unknown!r}: known are {', '.join(DTYPE_BYTES)}")
        if any(d < 1 for shape in self.shapes for d in shape):
            raise SpecError(f"state layer with an empty shape among {self.shapes}")
        super().__post_init__()

    @property
    def unpadded_page_size_bytes(self) -> int:
        return sum(prod(s) * DTYPE_BYTES[d] for s, d in zip(self.shapes, self.dtypes))

    def parts(self) -> tuple[PagePart, ...]:
        names = STATE_PART_NAMES.get(self.mamba_type, ())
        if len(names) != len(self.shapes):
            names = tuple(f"state_{i}" for i in range(len(self.shapes)))
        parts, offset = [], 0
        for name, shape, dtype in zip(names, self.shapes, self.dtypes):
            size = prod(shape) * DTYPE_BYTES[dtype]
            if dtype in COUNTERS:
                part = PagePart(name, (size,), "uint8", offset, zeros_only=True)
            else:
                part = PagePart(name, shape, dtype, offset)
            parts.append(part)
            offset += size
        return tuple(parts)

    def _same_slots(self, other: KVCacheSpec) -> bool:
        return (
            isinstance(other, MambaSpec)
            and other.num_speculative_blocks == self.num_speculative_blocks
            and other.num_prefill_checkpoint_blocks == self.num_prefill_checkpoint_blocks
            and other.page_size_bytes == self.page_size_bytes
            and other.tp_replicated == self.tp_replicated
        )

    def num_skipped_tokens(self, num_computed: int) -> int:
        return max(0, num_computed - 1)

    def table_positions(
        self, num_tokens: int, tokens_per_block: int, encoder_tokens: int | None = None
    ) -> tuple[int, Sequence[int]]:
        """The state that the step starts from, the block in which it leaves the next one, and drafted tokens'."""
        length, computed = cdiv(num_tokens, tokens_per_block), num_tokens - 1
        read = [(computed - 1) // tokens_per_block] if computed else []
        extra = self.num_speculative_blocks
        kept = sorted({*read, computed // tokens_per_block})
        return length + extra, kept + list(range(length, length + extra))

    def required_blocks(self, num_tokens: int, tokens_per_block: int, table_length: int) -> range:
        before = super().required_blocks(num_tokens, tokens_per_block, table_length)
        if self.mamba_cache_mode != "align" or not before:
            return before
        # tokens drafted for this step lengthen the table, and the running state moves on with them
        running = table_length - 1 - self.num_speculative_blocks
        running = max(running, (num_tokens - 1) // tokens_per_block)
        return range(running, running + 1)

    def held_blocks(self, num_tokens: int, tokens_per_block: int, table_length: int) -> range:
        """The state after the last token stood in for, which later prefix hits read, to the running one."""
        before = super().required_blocks(num_tokens, tokens_per_block, table_length)
        running = self.required_blocks(num_tokens, tokens_per_block, table_length)
        return range(before.start, running.stop) if before else before

    def blocks_for_later_hits(self, num_tokens: int, tokens_per_block: int, table_length: int) -> range:
        """The state that the running one was copied from."""
        return self.held_blocks(num_tokens, tokens_per_block, table_length)[:-1]

    def blocks_after_full_hit(self, num_tokens: int, tokens_per_block: int, table_length: int) -> range:
        """The state that the hit brought: the engine copies it to where the step reads."""
        return self.held_blocks(num_tokens, tokens_per_block, table_length)[:1]

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int, dcp: int = 1) -> int:
        if self.mamba_cache_mode == "align":
            return 2 + self.num_speculative_blocks + self.num_prefill_checkpoint_blocks
        return 1 + self.num_speculative_blocks

    def resident_blocks(self, length: int, reserved: int, tokens_per_block: int) -> tuple[float, float]:
        return min(1, reserved), min(1, reserved)

    @property
    def recurrence(self) -> str:
        words = {"MAMBA1": "mamba1", "MAMBA2": "mamba2", "GDN_ATTN": "gdn", "SHORT_CONV": "short_conv"}
        return words.get(self.mamba_type.upper(), self.mamba_type.lower())

    @property
    def label(self) -> str:
        return self.mamba_type.lower().removesuffix("_attn").replace("_", " ")

    def miniature(self) -> Self:
        shapes = tuple(tuple(min(d, 4) for d in shape) for shape in self.shapes)
        return replace(super().miniature(), shapes=shapes)

    def engine_fields(self) -> dict[str, object]:
        return super().engine_fields() | {
            "shapes": [list(shape) for shape in self.shapes],
            "dtypes": list(self.dtypes),
            "mamba_type": self.mamba_type,
            "mamba_cache_mode": self.mamba_cache_mode,
            "num_speculative_blocks": self.num_speculative_blocks,
            "num_prefill_checkpoint_blocks": self.num_prefill_checkpoint_blocks,
            "tokens_per_state": -1,
        }


def _round_page_up(spec: MLAAttentionSpec | SlidingWindowMLASpec) -> None:
    """Pad the page to the spec's own alignment (DeepSeek-V4: 576 bytes)."""
    if spec.alignment is not None:
        content = spec.unpadded_page_size_bytes
        padded = cdiv(content, spec.alignment) * spec.alignment
        if padded != content:
            object.__setattr__(spec, "page_size_padded", padded)


def _slot_family(spec: KVCacheSpec) -> type[KVCacheSpec]:
    """The kind that all layers of a group of mixed pages must be of."""
    families = (
        FullAttentionSpec,
        CircularBufferSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
        ChunkedLocalAttentionSpec,
        CrossAttentionSpec,
        MambaSpec,
    )
    return next((family for family in families if isinstance(spec, family)), type(spec))
