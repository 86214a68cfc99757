"""Page arithmetic, which blocks decode reads, and which specs may share a block table."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodebench.cache.run import fill_cache
from decodebench.cache.tensors import allocate
from decodebench.coverage.from_bytes import audit
from decodebench.coverage.required import required_pages
from decodebench.layout.plan import plan
from decodebench.layout.pool import admit
from decodebench.measure.step import compare_with_reference
from decodebench.models.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SpecError,
    cdiv,
)

HEADS = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=40)
CHUNK = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=48)
STATE = MambaSpec(block_size=16, shapes=((3, 288), (8, 32, 16)), dtypes=("bfloat16", "float32"))


def test_page_sizes():
    assert FULL.page_size_bytes == 2 * 16 * (64 + 64) * 2
    assert FullAttentionSpec(**HEADS, head_size_v=32).page_size_bytes == 2 * 16 * (64 + 32) * 2
    assert FullAttentionSpec(**(HEADS | {"dtype": "float8_e5m2"})).page_size_bytes == 2 * 16 * 128
    mla = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype="bfloat16")
    assert mla.page_size_bytes == 64 * 576 * 2
    # conv (3, 288) bf16 and ssm (8, 32, 16) float32, whatever the block size
    assert STATE.page_size_bytes == STATE.with_block_size(999).page_size_bytes == 18_112
    assert STATE.padded_to(20_480).page_size_bytes == 20_480
    assert [(part.name, part.offset, part.nbytes) for part in STATE.parts()] == [
        ("conv", 0, 1728),
        ("ssm", 1728, 16_384),
    ]


def test_compressed_pages_are_rounded_to_rows():
    """DeepSeek-V4: 584 bytes for each 4 tokens, pages of whole 576-byte rows."""
    spec = MLAAttentionSpec(
        block_size=256,
        num_kv_heads=1,
        head_size=512,
        dtype="uint8",
        packed="fp8_ds_mla",
        state_content_bytes=584,
        tokens_per_state=4,
        alignment=576,
    )
    assert (spec.unpadded_page_size_bytes, spec.page_size_bytes) == (37_376, 37_440)
    window = SlidingWindowMLASpec(
        block_size=8, num_kv_heads=1, head_size=1024, dtype="float32", sliding_window=128, alignment=576
    )
    assert window.page_size_bytes == 32_832


def test_strides_hold_whole_kernel_blocks():
    spec = MLAAttentionSpec(
        block_size=128, num_kv_heads=1, head_size=576, dtype="bfloat16", kernel_block_tokens=64
    )
    assert spec.stride_alignment_bytes == 64 * 576 * 2
    # a block that is one kernel block asks for nothing
    assert spec.with_block_size(64).stride_alignment_bytes == 1
    assert (
        MLAAttentionSpec(
            block_size=64, num_kv_heads=1, head_size=576, dtype="bfloat16", block_stride_alignment=1152
        ).stride_alignment_bytes
        == 1152
    )


@given(tokens=st.integers(1, 500), per_block=st.sampled_from([1, 4, 16, 48]))
def test_required_blocks_are_those_of_the_tokens_read(tokens, per_block):
    """Against a list of positions: the step computes position tokens - 1 and reads those before it."""
    last = tokens - 1
    table = 1 + last // per_block
    reads = {
        FULL: range(last),
        WINDOW: range(max(0, tokens - 40), last),
        CHUNK: range(last // 48 * 48, last),
        FullAttentionSpec(**HEADS, sliding_window=40): range(max(0, tokens - 40), last),
        FullAttentionSpec(**HEADS, attention_chunk_size=48): range(last // 48 * 48, last),
    }
    for spec, positions in reads.items():
        wanted = sorted({position // per_block for position in positions})
        got = spec.required_blocks(tokens, per_block, table)
        # a chunk that has just begun is read from nowhere, but its first block is the one being written
        assert list(got) == wanted or not wanted


@given(tokens=st.integers(1, 500), per_block=st.sampled_from([1, 4, 16, 48]), spare=st.integers(0, 3))
def test_a_running_state_lies_in_the_block_of_the_token_to_compute(tokens, per_block, spare):
    spec = replace(STATE, mamba_cache_mode="align", num_speculative_blocks=spare)
    last = (tokens - 1) // per_block
    table = last + 1 + spare
    if tokens == 1:  # starts from a state of nothing, whatever the block holds
        assert not spec.required_blocks(1, per_block, table) and not spec.held_blocks(1, per_block, table)
        return
    assert list(spec.required_blocks(tokens, per_block, table)) == [last]
    # the state after the tokens stood in for, which a prefix hit may read; often the same block
    copied = (tokens - 2) // per_block
    assert sorted(spec.held_blocks(tokens, per_block, table)) == sorted({copied, last})
    assert list(spec.blocks_after_full_hit(tokens, per_block, table)) == [copied]
    # without boundaries to keep there is one state, and no copy
    assert list(STATE.required_blocks(tokens, 4096, 1 + spare)) == [0]


def test_one_state_and_one_ring_and_all_of_the_encoder():
    assert list(STATE.required_blocks(33, 16, 3)) == [1]
    ring = CircularBufferSpec(**HEADS)
    assert list(ring.required_blocks(100, 16, 1)) == [0]
    cross = CrossAttentionSpec(**HEADS, max_encoder_tokens=100)
    assert list(cross.required_blocks(3, 16, 7)) == list(range(7))


def test_blocks_a_request_reserves():
    assert FULL.max_blocks_per_request(100, 64) == 7
    assert FULL.max_blocks_per_request(100, 64, dcp=2) == 4
    # window - 1 + in flight, and one block because a window need not start at a block's edge
    assert WINDOW.max_blocks_per_request(1000, 64) == 7 + 1
    assert WINDOW.max_blocks_per_request(20, 64) == 2 + 1
    assert CHUNK.max_blocks_per_request(1000, 64) == 7
    assert CrossAttentionSpec(**HEADS, max_encoder_tokens=100).max_blocks_per_request(1, 1) == 7
    assert CircularBufferSpec(**HEADS).max_blocks_per_request(10**6, 1) == 1


@pytest.mark.parametrize(
    ("mode", "speculative", "checkpoints", "blocks"),
    [("none", 0, 1, 1), ("none", 2, 1, 3), ("align", 0, 0, 2), ("align", 0, 1, 3), ("align", 2, 0, 4)],
)
def test_states_a_request_reserves(mode, speculative, checkpoints, blocks):
    spec = MambaSpec(
        block_size=16,
        shapes=((4,),),
        dtypes=("float32",),
        mamba_cache_mode=mode,
        num_speculative_blocks=speculative,
        num_prefill_checkpoint_blocks=checkpoints,
    )
    assert spec.max_blocks_per_request(10_000, 64) == blocks


def test_merging():
    windowed = FullAttentionSpec(**HEADS, sliding_window=40)
    assert FULL.merged_with([windowed, FULL]) == windowed
    assert windowed.merged_with([FullAttentionSpec(**HEADS, sliding_window=41)]) is None
    assert windowed.merged_with([FullAttentionSpec(**HEADS, attention_chunk_size=8)]) is None
    assert FULL.merged_with([FullAttentionSpec(**(HEADS | {"head_size": 32}))]) is None
    assert FULL.merged_with([WINDOW]) is None and WINDOW.merged_with([WINDOW]) == WINDOW
    mla = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype="bfloat16")
    assert FULL.merged_with([mla]) is None and mla.merged_with([mla]) == mla
    # the same tokens, other pages: may share a block table, each with its own spec
    assert FULL.same_token_slots(mla) and not FULL.same_token_slots(WINDOW)
    assert not WINDOW.same_token_slots(SlidingWindowSpec(**HEADS, sliding_window=41))


@pytest.mark.parametrize(
    "make",
    [
        lambda: FullAttentionSpec(**(HEADS | {"num_kv_heads": 0})),
        lambda: FullAttentionSpec(**(HEADS | {"block_size": 0})),
        lambda: FullAttentionSpec(**(HEADS | {"dtype": "int3"})),
        lambda: FullAttentionSpec(**HEADS, page_size_padded=10),
        lambda: SlidingWindowSpec(**HEADS, sliding_window=-1),
        lambda: ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=0),
        lambda: MambaSpec(block_size=16, shapes=((0,),), dtypes=("float32",)),
        lambda: MambaSpec(block_size=16, shapes=((1,),), dtypes=()),
    ],
)
def test_specs_that_no_cache_could_hold(make):
    with pytest.raises(SpecError):
        make()


def test_the_kind_of_cache_that_contributing_adds_needs_no_other_file():
    """The example's own text, run: planned, admitted, filled, audited, shown and stepped through."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    source = re.search(r"```python\n(@dataclass.*?class SpanAttentionSpec.*?)```", text, re.S)[1]
    names = {"dataclass": dataclass, "ClassVar": ClassVar, "AttentionSpec": AttentionSpec, "cdiv": cdiv}
    names["__name__"] = __name__
    exec(source, names)
    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": "float32"}
    spans = names["SpanAttentionSpec"](span=32, spans=2, **shape)
    layout = plan(
        {f"layer.{i}": spans if i % 2 else FullAttentionSpec(**shape) for i in range(4)},
        memory="1MiB",
        max_model_len=400,
        max_num_batched_tokens=64,
    )
    assert [group.kind for group in layout.groups] == ["full_attention", "span_attention"]
    assert "spans" in str(layout) and layout.to_dict()["groups"][1]["spec"]["class"] == "SpanAttentionSpec"
    batch = admit(layout, context=[100, 65, 17])
    cache = allocate(layout)
    fill_cache(cache, batch)
    found = audit(cache, batch)
    assert found.ok, found.verdict
    # token 99 lies in span 3: spans 2 and 3, tokens 64 to 98, blocks 4 to 6
    (rows,) = [r for r in required_pages(layout, batch) if r.request == 0 and r.group == 1]
    assert rows.positions.tolist() == [4, 5, 6]
    errors = compare_with_reference(cache, batch, "torch", dtype="float32")
    assert max(max(pair) for pair in errors.values()) < 1e-5
