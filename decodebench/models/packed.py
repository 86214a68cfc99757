"""Reader of DeepSeek-V4: compressed latent attention, its windows, and the states of its compressors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from decodebench.models.fields import Fields
from decodebench.models.layers import Layer, Resolved, split
from decodebench.models.options import OptionError
from decodebench.models.specs import CircularBufferSpec, KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

#: bytes of one entry: 448 of nope in fp8, 128 of rope, 8 of scales; pages are whole 576-byte rows
ENTRY_BYTES = 584
PAGE_GRAIN = 576
#: compression ratio → tokens a block of compressor states
STATE_BLOCK = {4: 4, 128: 8}
WINDOW_BLOCK = 64
#: the same of DeepSeek-V4.1, and the rows of its rings
WINDOW_BLOCK_41 = 32
RING_ROWS = 8


@dataclass(frozen=True)
class PackedLayer:
    """One cache of a compressed attention. ``part``: latent, window, indexer, compressor or ring.

    ``width`` values an entry; ``ratio`` tokens are compressed into one entry.
    """

    mixer: ClassVar[str] = "packed"
    name: str
    num_heads: int
    part: str
    width: int
    ratio: int = 1
    sliding_window: int = 0
    #: tokens a block of the window
    window_block: int = WINDOW_BLOCK

    def query_heads(self, tp: int = 1) -> int:
        """Query heads on one of ``tp`` ranks; raises ``OptionError`` where ``tp`` does not divide them."""
        return split(self.num_heads, tp, "the query heads")

    def spec(self, r: Resolved) -> KVCacheSpec:
        """What one part of compressed attention stores; raises ``OptionError`` unless packed as fp8_ds_mla."""
        if r.kv_cache_dtype != "fp8_ds_mla":
            raise OptionError(
                f"kv_cache_dtype = {r.kv_cache_dtype!r}: compressed attention is packed as fp8_ds_mla; "
                "leave it at auto"
            )
        if self.part == "compressor":
            return SlidingWindowMLASpec(
                block_size=STATE_BLOCK[self.ratio],
                num_kv_heads=1,
                head_size=self.width,
                dtype="float32",
                sliding_window=self.sliding_window,
                alignment=PAGE_GRAIN,
            )
        if self.part == "ring":
            # drafts, the token itself and the one before it, as a power of two
            rows = max(RING_ROWS, 1 << (r.num_speculative_tokens + 1).bit_length())
            return CircularBufferSpec(
                block_size=rows, num_kv_heads=1, head_size=self.width, head_size_v=0, dtype="float32"
            )
        if self.part == "indexer":
            return MLAAttentionSpec(
                block_size=r.block_size,
                num_kv_heads=1,
                head_size=self.width,
                dtype="uint8",
                packed="fp8_indexer",
                tokens_per_state=self.ratio,
                alignment=PAGE_GRAIN,
            )
        latent: dict[str, Any] = {
            "num_kv_heads": 1,
            "head_size": self.width,
            "dtype": "uint8",
            "packed": "fp8_ds_mla",
            "state_content_bytes": ENTRY_BYTES,
            "alignment": PAGE_GRAIN,
        }
        if self.part == "window":
            return SlidingWindowMLASpec(
                block_size=self.window_block, sliding_window=self.sliding_window, **latent
            )
        return MLAAttentionSpec(
            block_size=r.block_size,
            tokens_per_state=self.ratio,
            kernel_block_tokens=r.kernel_block_size,
            **latent,
        )


#: layer types of transformers' config → tokens an entry where ``compress_rates`` says no other number
RATES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def ratios_of(f: Fields) -> list[int]:
    """Tokens an entry for each layer: a list, or layer types with a rate for each (transformers' spelling)."""
    length = f.layer_count()
    ratios = f.listing("compress_ratios", length=length, choices={0, 1, 4, 128})
    if ratios is not None:
        return ratios
    types, rates = f.listing("layer_types", length=length, choices=RATES), f.get("compress_rates")
    if types is None:
        raise f.missing("compress_ratios", "layer_types")
    known = RATES | (dict(rates) if isinstance(rates, Mapping) else {})
    if any(known[kind] not in (0, 1, 4, 128) for kind in types):
        raise f.wrong(("compress_rates",), rates, "entries of 4 or 128 tokens are known")
    return [known[kind] for kind in types]


def read_deepseek_v4(f: Fields, root: str) -> list[Layer]:
    """A window in every layer; beside it entries of 4 tokens with an indexer, or of 128 tokens."""
    ratios = ratios_of(f)
    heads, width = f.integer("num_attention_heads"), f.integer("head_dim")
    layers: list[Layer] = []
    for i, ratio in enumerate(ratios):
        name = f"{root}.{i}.attn"
        if ratio == 4:
            index = f.integer("index_head_dim")
            layers.append(
                PackedLayer(f"{name}.indexer.k_cache", heads, "indexer", index + index // 128 * 4, ratio)
            )
            layers.append(_compressor(f"{name}.indexer", heads, index, ratio))
        layers.append(
            PackedLayer(f"{name}.swa_cache", heads, "window", width, 1, f.integer("sliding_window"))
        )
        if ratio > 1:
            layers.append(PackedLayer(name, heads, "latent", width, ratio))
            layers.append(_compressor(name, heads, width, ratio))
    return layers


def read_deepseek_v41(f: Fields, root: str) -> list[Layer]:
    """A window in every layer; entries of 1 or 2 tokens, index keys and rings where a layer is their source.

    ``kv_source_layer_ids`` own entries that the layers behind them read as well; an index source has keys
    of its own only where it owns entries.
    """
    length = f.layer_count()
    ratios = f.listing("compress_ratios", length=length, choices={0, 1, 2})
    if ratios is None:
        raise f.missing("compress_ratios")
    sources = {name: f.layer_numbers(name) for name in ("kv_source_layer_ids", "index_source_layer_ids")}
    if any(ratios) and not all(sources.values()):
        raise f.missing(*(name for name, ids in sources.items() if not ids))
    heads, width, index = f.integer("num_attention_heads"), f.integer("head_dim"), f.integer("index_head_dim")
    owners, choosers = sources.values()
    layers: list[Layer] = []
    for i, ratio in enumerate(ratios):
        name = f"{root}.{i}.attn"
        if i in owners:
            if ratio == 0:
                raise f.wrong(
                    ("kv_source_layer_ids",), i, "its compress_ratios entry is 0: it has a window alone"
                )
            layers.append(PackedLayer(name, heads, "latent", width, ratio))
            if i in choosers:
                keys = index + index // 128 * 4
                layers.append(PackedLayer(f"{name}.indexer.k_cache", heads, "indexer", keys, ratio))
        layers.append(
            PackedLayer(
                f"{name}.swa_cache",
                heads,
                "window",
                width,
                sliding_window=f.integer("sliding_window"),
                window_block=WINDOW_BLOCK_41,
            )
        )
        if i in owners and ratio > 1:
            layers.append(PackedLayer(f"{name}.compressor.state_cache", heads, "ring", 2 * width, ratio))
    return layers


def _compressor(name: str, heads: int, width: int, ratio: int) -> PackedLayer:
    """Keys and scores of the tokens that are still to be compressed; ratio 4 overlaps its windows."""
    overlap = 2 if ratio == 4 else 1
    return PackedLayer(
        f"{name}.compressor.state_cache", heads, "compressor", 2 * overlap * width, ratio, overlap * ratio
    )
