"""A model's layers as facts, and the spec each of them has under an engine's options.

Sizes are the whole model's; ``spec`` divides them by the tensor parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from decodebench.models.devices import DEFAULT_DEVICE, DEVICES
from decodebench.models.engines import NEWEST, rule
from decodebench.models.options import KV_CACHE_DTYPES, OptionError
from decodebench.models.specs import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    cdiv,
)


@dataclass(frozen=True)
class Resolved:
    """Options and config put together: what the layers' specs are made with."""

    dtype: str
    kv_cache_dtype: str
    #: dtype of the values in attention pages
    value_dtype: str
    conv_dtype: str
    ssm_dtype: str
    block_size: int
    kernel_block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    tensor_parallel_size: int = 1
    mamba_cache_mode: str = "none"
    mamba_block_size: int | None = None
    mamba_page_size_padded: int | None = None
    num_speculative_tokens: int = 0
    #: content of a state page in bytes, where states were aligned to attention
    mamba_page_size: int | None = None
    #: the attention block grew beyond what was asked for
    block_size_grew: bool = False
    #: the card whose kernels are assumed
    device: str = DEFAULT_DEVICE
    #: the release whose rules hold
    engine: str = NEWEST
    #: tokens of a block that latent kernels split larger blocks into; None where any multiple will do
    latent_kernel_tokens: int | None = None


def split(number: int, parts: int, what: str) -> int:
    """number / parts; raises ``OptionError`` where it does not divide."""
    if number % parts:
        raise OptionError(f"tensor_parallel_size = {parts} does not divide {what} ({number})")
    return number // parts


def kv_heads_per_rank(num_kv_heads: int, tp: int, layer: str) -> int:
    """KV heads of one rank: divided, or replicated where there are fewer heads than ranks."""
    if max(num_kv_heads, tp) % min(num_kv_heads, tp):
        raise OptionError(
            f"layer {layer}: {num_kv_heads} KV heads can be neither divided between nor "
            f"repeated on tensor_parallel_size = {tp} ranks"
        )
    return max(1, num_kv_heads // tp)


def packed_heads(r: Resolved, kv_heads: int, head_size: int, head_size_v: int) -> dict:
    """Spec fields of the KV cache dtypes that pack values with their scales, per head and token."""
    if r.kv_cache_dtype == "nvfp4":
        # fp4 pairs and one fp8 scale for 16 values, keys and values in slots of their own
        content = (head_size // 2 + head_size // 16) + (head_size_v // 2 + head_size_v // 16)
        return {"packed": "nvfp4", "state_content_bytes": content}
    if r.kv_cache_dtype.endswith("_per_token_head"):
        shrink = 2 if r.kv_cache_dtype.startswith("int4") else 1
        content = (
            head_size // shrink + head_size_v // shrink + 2 * 4
        )  # a float32 scale for keys and for values
        return {"packed": r.kv_cache_dtype, "state_content_bytes": content}
    if r.kv_cache_dtype.endswith("_ds_mla"):
        raise OptionError(
            f"kv_cache_dtype = {r.kv_cache_dtype!r}: only latent attention (MLA) packs its cache so"
        )
    return {}


@dataclass(frozen=True)
class AttentionLayer:
    """Keys and values per head. ``kind``: ``full``, ``cross`` or, by its fields, a window or chunk."""

    mixer: ClassVar[str] = "attention"
    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    cross: bool = False
    #: tokens that the layer's own kernels take at once, where they ask for it
    kernel_tokens: int | None = None

    def query_heads(self, tp: int = 1) -> int:
        """Query heads on one of ``tp`` ranks; raises ``OptionError`` where ``tp`` does not divide them."""
        return split(self.num_heads, tp, "the query heads")

    def spec(self, r: Resolved) -> KVCacheSpec:
        """What one rank stores of it; raises ``OptionError`` where heads do not divide or a dtype does not go."""
        self.query_heads(r.tensor_parallel_size)
        kv_heads = kv_heads_per_rank(self.num_kv_heads, r.tensor_parallel_size, self.name)
        head_size_v = self.head_size if self.head_size_v is None else self.head_size_v
        common: dict[str, Any] = {
            "block_size": r.block_size,
            "num_kv_heads": kv_heads,
            "head_size": self.head_size,
            "dtype": r.value_dtype,
            "kernel_block_tokens": self.kernel_tokens,
            **packed_heads(r, kv_heads, self.head_size, head_size_v),
        }
        if self.cross:
            return CrossAttentionSpec(**common, max_encoder_tokens=r.max_num_batched_tokens)
        if self.attention_chunk_size is not None:
            return ChunkedLocalAttentionSpec(**common, attention_chunk_size=self.attention_chunk_size)
        if self.sliding_window is not None:
            # windows take the largest multiple of the kernel's block that fits into the block
            kernel = r.kernel_block_size
            common["block_size"] = max(kernel, r.block_size // kernel * kernel)
            return SlidingWindowSpec(**common, head_size_v=head_size_v, sliding_window=self.sliding_window)
        return FullAttentionSpec(**common, head_size_v=head_size_v)


#: bytes a token and layer take where nope, rope and scales are packed into one blob
PACKED_LATENT_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}


@dataclass(frozen=True)
class LatentLayer:
    """Multi-head latent attention: one vector of ``kv_lora_rank + rope`` a token, on every rank."""

    mixer: ClassVar[str] = "mla"
    name: str
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    #: reads only the tokens that an indexer chooses
    sparse: bool = False
    #: has an indexer of its own
    indexer: bool = False
    sliding_window: int | None = None
    #: values of a row, where rows are padded beyond what they hold
    row: int | None = None

    @property
    def head_size(self) -> int:
        """Numbers in the row of one token: the latent and its rotary part, unless ``row`` says otherwise."""
        return self.row or self.kv_lora_rank + self.qk_rope_head_dim

    def query_heads(self, tp: int = 1) -> int:
        """Query heads on one of ``tp`` ranks; raises ``OptionError`` where ``tp`` does not divide them."""
        return split(self.num_heads, tp, "the query heads")

    def spec(self, r: Resolved) -> KVCacheSpec:
        """What every rank stores of it; raises ``OptionError`` for a dtype that its rows cannot be packed in."""
        self.query_heads(r.tensor_parallel_size)
        cache_dtype = r.kv_cache_dtype
        if self.sparse and cache_dtype.startswith("fp8") and cache_dtype != "fp8_ds_mla":
            cache_dtype = DEVICES[r.device].sparse_fp8 if cache_dtype != "fp8_e5m2" else cache_dtype
        if cache_dtype.endswith("_ds_mla") and not self.sparse:
            raise OptionError(
                f"kv_cache_dtype = {cache_dtype!r}: only sparse latent attention packs its rows so, and layer "
                f"{self.name} is dense: use auto or fp8"
            )
        packed = PACKED_LATENT_BYTES.get(cache_dtype)
        if packed is None and packed_heads(replace(r, kv_cache_dtype=cache_dtype), 1, self.head_size, 0):
            raise OptionError(
                f"kv_cache_dtype = {r.kv_cache_dtype!r} does not go with latent attention (MLA): use "
                "auto, fp8 or fp8_ds_mla"
            )
        common: dict[str, Any] = {
            "block_size": r.block_size,
            "num_kv_heads": 1,
            "head_size": self.head_size,
            "dtype": "uint8" if packed else KV_CACHE_DTYPES[cache_dtype] or r.dtype,
            "packed": cache_dtype if packed else None,
            "state_content_bytes": packed,
        }
        if self.sliding_window is not None:
            return SlidingWindowMLASpec(**common, sliding_window=self.sliding_window)
        spec = MLAAttentionSpec(
            **common,
            is_index_group_leader=self.indexer,
            kernel_block_tokens=None if self.sparse else r.latent_kernel_tokens,
        )
        if not self.sparse:
            return spec
        # sparse kernels read flat rows: blocks must be whole rows apart, whole 64-token pages where quantized
        if cache_dtype in ("auto", "bfloat16", "float16"):
            return replace(spec, block_stride_alignment=spec.entry_bytes)
        return replace(spec, kernel_block_tokens=64)


@dataclass(frozen=True)
class IndexerLayer:
    """The keys by which sparse attention chooses what it reads, the same on every rank.

    ``quantized``: fp8, with a float32 scale for every 128 values; otherwise in the model's dtype.
    ``ratio`` tokens have one key. ``kernel_tokens``: tokens that the kernels take at once, where they ask.
    """

    mixer: ClassVar[str] = "indexer"
    name: str
    num_heads: int
    head_dim: int
    ratio: int = 1
    quantized: bool = True
    kernel_tokens: int | None = 64
    role: str = "INDEXER"
    #: tokens that a block which grows for a state must hold a multiple of
    grain: int = 1

    def query_heads(self, tp: int = 1) -> int:
        """Its heads: every rank scores with all of them."""
        return self.num_heads

    def spec(self, r: Resolved) -> KVCacheSpec:
        """One key a token, or a ``ratio``-th of them; quantized, with a float32 scale for 128 numbers."""
        content = self.head_dim + self.head_dim // 128 * 4 if self.quantized else self.head_dim
        return MLAAttentionSpec(
            block_size=r.block_size,
            num_kv_heads=1,
            head_size=content,
            dtype="uint8" if self.quantized else r.dtype,
            packed="fp8_indexer" if self.quantized else None,
            tokens_per_state=self.ratio,
            cache_role=self.role,
            kernel_block_tokens=self.kernel_tokens,
        )


@dataclass(frozen=True)
class RingLayer:
    """What the tokens of a group that is still open left behind: one block a request, overwritten in turn.

    ``ratio`` tokens make a group; speculative tokens need room for further groups, a power of two of
    them where ``doubles``. ``slots`` vectors of ``width`` values a token.
    """

    mixer: ClassVar[str] = "ring"
    name: str
    ratio: int
    width: int
    slots: int = 1
    doubles: bool = False
    split_by_context: bool = True

    def query_heads(self, tp: int = 1) -> int:
        """One: the ring is kept whole on every rank."""
        return 1

    def spec(self, r: Resolved) -> KVCacheSpec:
        """The ring of one request, long enough for the tokens of a speculative step."""
        groups = cdiv(self.ratio + r.num_speculative_tokens, self.ratio)
        if self.doubles:
            groups = 1 << (groups - 1).bit_length()
        return CircularBufferSpec(
            block_size=self.ratio * groups,
            num_kv_heads=self.slots,
            head_size=self.width,
            head_size_v=0,
            dtype="bfloat16",
            dcp_sharded=self.split_by_context,
        )


@dataclass(frozen=True)
class ConvolutionWindowLayer:
    """Inputs of short convolutions, kept as a window of as many tokens as the kernel is wide."""

    mixer: ClassVar[str] = "convolution"
    name: str
    num_kv_heads: int
    width: int
    kernel: int

    def query_heads(self, tp: int = 1) -> int:
        """KV heads on one of ``tp`` ranks, which the convolution runs over."""
        return kv_heads_per_rank(self.num_kv_heads, tp, self.name)

    def spec(self, r: Resolved) -> KVCacheSpec:
        """A window as long as the kernel; raises ``OptionError`` where heads do not divide."""
        return SlidingWindowSpec(
            block_size=self.kernel,
            num_kv_heads=self.query_heads(r.tensor_parallel_size),
            head_size=self.width,
            head_size_v=0,
            dtype=r.dtype,
            sliding_window=self.kernel,
        )


@dataclass(frozen=True)
class StateLayer:
    """A recurrent state. ``mixer``: mamba1, mamba2, gdn, kda, short_conv or linear.

    What the numbers mean: ``channels`` of the convolution's input that are the layer's inner size
    (mamba1, mamba2, short_conv); heads of ``head_dim`` values with ``state_size`` numbers for each
    (mamba2: the state size; gdn and kda: the key size); ``num_groups`` share B and C (mamba2);
    ``num_key_heads`` (gdn, kda). ``conv_width`` is the convolution's kernel size.
    """

    name: str
    mixer: str
    conv_width: int = 0
    channels: int = 0
    num_heads: int = 0
    head_dim: int = 0
    state_size: int = 0
    num_groups: int = 0
    num_key_heads: int = 0
    #: every rank holds the whole state
    replicated: bool = False
    #: kernels of some cards export the state at the last boundary of a prefill as well
    exported: bool = False

    def query_heads(self, tp: int = 1) -> int:
        """Heads of the state on one of ``tp`` ranks; raises ``OptionError`` where ``tp`` does not divide them."""
        return split(self.num_heads, tp, "the state's heads")

    def per_rank(self, tp: int) -> StateLayer:
        """The same facts for one of ``tp`` ranks."""
        if self.replicated:
            return self
        groups = groups_for_shards(self.num_groups, tp) if self.mixer == "mamba2" else self.num_groups
        return replace(
            self,
            channels=split(self.channels, tp, f"{self.name}'s channels"),
            num_heads=split(self.num_heads, tp, f"{self.name}'s state heads"),
            num_groups=groups // tp,
            num_key_heads=split(self.num_key_heads, tp, f"{self.name}'s key heads"),
        )

    def shapes(self, tp: int, num_speculative_tokens: int = 0) -> tuple[tuple[int, ...], ...]:
        """Shapes of the state's tensors on one rank: convolution ``(tokens,
        channels)``, then the recurrent one.
        """
        return STATE_SHAPES[self.mixer](self, 1 if self.replicated else tp, num_speculative_tokens)

    def spec(self, r: Resolved) -> KVCacheSpec:
        """The states of one rank; raises ``OptionError`` where they do not divide or a dtype does not go."""
        shapes = self.shapes(r.tensor_parallel_size, r.num_speculative_tokens)
        ssm = "float32" if self.mixer == "kda" and r.ssm_dtype == "auto" else r.ssm_dtype
        ssm = r.conv_dtype if ssm == "auto" else ssm
        if self.mixer == "kda" and ssm == "float16":
            raise OptionError(
                "mamba_ssm_cache_dtype = 'float16': Kimi delta attention keeps float32 or bfloat16"
            )
        return MambaSpec(
            block_size=r.mamba_block_size or r.block_size,
            shapes=shapes,
            dtypes=(r.conv_dtype, ssm)[: len(shapes)],
            page_size_padded=r.mamba_page_size_padded,
            mamba_type=MAMBA_TYPES[self.mixer],
            mamba_cache_mode=r.mamba_cache_mode,
            num_speculative_blocks=r.num_speculative_tokens,
            # Mamba-2 kernels export the state at the last boundary of a prefill as well
            num_prefill_checkpoint_blocks=int(
                self.mixer == "mamba2"
                or (
                    self.exported
                    and DEVICES[r.device].exports_states
                    and rule("delta_checkpoint_blocks", r.engine)
                )
            ),
            tp_replicated=self.replicated,
        )


def groups_for_shards(groups: int, tp: int) -> int:
    """Groups after giving every rank those that its heads need; vLLM only repeats a single group."""
    if groups % tp and groups != 1:
        raise OptionError(
            f"tensor_parallel_size = {tp} does not divide the {groups} groups of the states, and only a "
            "single group can be repeated on every rank"
        )
    return groups if groups % tp == 0 else tp


def _mamba1(layer: StateLayer, tp: int, spec_tokens: int):
    channels = split(layer.channels, tp, f"{layer.name}'s channels")
    return (layer.conv_width - 1, channels), (channels, layer.state_size)


def _mamba2(layer: StateLayer, tp: int, spec_tokens: int):
    conv = layer.channels + 2 * groups_for_shards(layer.num_groups, tp) * layer.state_size
    heads = split(layer.num_heads, tp, f"{layer.name}'s state heads")
    channels = split(conv, tp, f"{layer.name}'s convolution channels")
    return (layer.conv_width - 1 + spec_tokens, channels), (heads, layer.head_dim, layer.state_size)


def _delta(layer: StateLayer, tp: int, spec_tokens: int):
    conv = 2 * layer.num_key_heads * layer.state_size + layer.num_heads * layer.head_dim
    heads = split(layer.num_heads, tp, f"{layer.name}'s state heads")
    channels = split(conv, tp, f"{layer.name}'s convolution channels")
    return (layer.conv_width - 1 + spec_tokens, channels), (heads, layer.head_dim, layer.state_size)


def _short_conv(layer: StateLayer, tp: int, spec_tokens: int):
    return ((layer.conv_width - 1 + spec_tokens, split(layer.channels, tp, f"{layer.name}'s channels")),)


def _linear(layer: StateLayer, tp: int, spec_tokens: int):
    return ((split(layer.num_heads, tp, f"{layer.name}'s state heads"), layer.head_dim, layer.state_size),)


#: mixer → its state's shapes; a new kind of state is a line here and one below
STATE_SHAPES = {
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "gdn": _delta,
    "kda": _delta,
    "short_conv": _short_conv,
    "linear": _linear,
}
MAMBA_TYPES = {
    "mamba1": "MAMBA1",
    "mamba2": "MAMBA2",
    "gdn": "GDN_ATTN",
    "kda": "GDN_ATTN",
    "short_conv": "SHORT_CONV",
    "linear": "LINEAR",
}


class Layer(Protocol):
    """What every kind of layer offers; each is a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...

    @property
    def mixer(self) -> str:
        """How the layer mixes tokens: attention, mla, indexer, packed, or the kind of its state."""

    def query_heads(self, tp: int = 1) -> int:
        """Query heads on one of ``tp`` ranks."""

    def spec(self, r: Resolved) -> KVCacheSpec:
        """What the layer stores on one rank."""
