"""Small layouts made by hand, and batches on them: for the tests of blocks, connector, faults, coverage."""

import torch
from hypothesis import strategies as st

from decodebench.cache.bind import bind
from decodebench.cache.tensors import POISON, torch_dtype
from decodebench.cache.values import Normal
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.plan import from_groups
from decodebench.layout.pool import Batch, KVCacheManager, Request, RequestBlocks
from decodebench.models.specs import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

#: one object, so that its bank is drawn once
NOISE = Normal(bank_bytes=1 << 20)

HEADS = {"num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"}


def full(block=16, **facts):
    return FullAttentionSpec(block_size=block, **HEADS | facts)


def window(size=40, block=16, **facts):
    return SlidingWindowSpec(block_size=block, sliding_window=size, **HEADS | facts)


def chunk(size=64, block=16, **facts):
    return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=size, **HEADS | facts)


def cross(tokens=48, block=16):
    return CrossAttentionSpec(block_size=block, max_encoder_tokens=tokens, **HEADS)


def ring(block=16, **facts):
    return CircularBufferSpec(block_size=block, **HEADS | facts)


def latent(block=16, **facts):
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=32, dtype="bfloat16", **facts)


def state(block=4096, **facts):
    shapes = {"shapes": ((3, 8), (2, 4, 8)), "dtypes": ("bfloat16", "float32")}
    return MambaSpec(block_size=block, **shapes | facts)


def small_layout(groups, num_blocks=32, **facts):
    """One list of specs a group; all pages padded to the largest. Layers are called g0.0, g0.1, g1.0 …"""
    groups = [specs if isinstance(specs, list) else [specs] for specs in groups]
    page = max(spec.page_size_bytes for specs in groups for spec in specs)
    padded = [[s if s.page_size_bytes == page else s.padded_to(page) for s in specs] for specs in groups]
    made = [
        KVCacheGroupSpec(tuple(f"g{g}.{j}" for j in range(len(specs))), tuple(specs), specs[0])
        for g, specs in enumerate(padded)
    ]
    return from_groups(made, num_blocks, **facts)


def apart(layout):
    """A cache in which every layer has a tensor of its own, poisoned: nothing hides behind aliasing."""
    tensors = {}
    for name, spec in layout.layer_specs.items():
        blocks = layout.num_blocks_of(layout.group_of[name])
        if len(spec.parts()) == 1 and not spec.parts()[0].zeros_only and spec.page_size_padded is None:
            part = spec.parts()[0]
            tensors[name] = torch.empty((blocks, *part.shape), dtype=torch_dtype(part.dtype))
        else:
            tensors[name] = torch.empty((blocks, spec.page_size_bytes), dtype=torch.uint8)
        tensors[name].view(torch.uint8).fill_(POISON)
    return bind(layout, tensors)


def on_tables(layout, *requests):
    """A batch from tables written by hand: (tokens, computed tokens, one table a group)."""
    return Batch(
        layout,
        tuple(
            RequestBlocks(Request(f"request-{i}", tokens), computed, tuple(tuple(table) for table in tables))
            for i, (tokens, computed, tables) in enumerate(requests)
        ),
    )


KINDS = {
    "full": st.builds(full, block=st.sampled_from([1, 4, 16, 32])),
    "window": st.builds(window, size=st.integers(1, 70), block=st.sampled_from([4, 16])),
    "chunk": st.builds(chunk, size=st.integers(1, 70), block=st.sampled_from([4, 16])),
    "latent": st.builds(latent, block=st.sampled_from([16, 32])),
    "packed": st.just(full(packed="fp8", state_content_bytes=24)),
    "window kept whole": st.builds(lambda size: full(sliding_window=size), st.integers(1, 70)),
    "state": st.builds(state, num_speculative_blocks=st.integers(0, 2)),
    "state at boundaries": st.builds(
        lambda block: state(block, mamba_cache_mode="align"), st.sampled_from([8, 16, 48])
    ),
    "ring": st.just(ring()),
    "cross": st.builds(cross, st.sampled_from([16, 40])),
}


@st.composite
def small_layouts(draw, kinds=tuple(KINDS), num_blocks=3200):
    """One to four groups of one to three layers, in either memory order."""
    chosen = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=4))
    specs = [draw(KINDS[kind]) for kind in chosen]
    groups = [[spec] * draw(st.integers(1, 3)) for spec in specs]
    order = draw(st.sampled_from(["LBNHC", "BLHNC"]))
    return small_layout(groups, num_blocks, memory_order=order)


@st.composite
def managers(draw, layouts=small_layouts()):
    """A pool with one to five requests in it, some of which share a prefix, some grown by a few tokens."""
    layout = draw(layouts)
    manager = KVCacheManager(layout)
    prefix = draw(st.integers(0, 80))
    for i in range(draw(st.integers(1, 5))):
        tokens = draw(st.integers(1, 150))
        shared = min(draw(st.sampled_from([0, prefix])), tokens - 1)
        manager.allocate(Request(f"request-{i}", tokens, "prefix" if shared else None, shared))
    return manager
