"""Layouts hold their invariants or are refused with a reason; memory, lengths, small copies of big layouts."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodebench.errors import DecodebenchError
from decodebench.layout.compare import COMPARED, compare
from decodebench.layout.grouping import STRATEGIES, KVCacheGroupSpec
from decodebench.layout.placement import LayoutRefused
from decodebench.layout.plan import from_groups, layout_for, parse_memory, plan, prepare
from decodebench.models.load import list_models, load_model
from decodebench.models.options import OptionError
from decodebench.models.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

BLOCKS = st.sampled_from([1, 4, 16, 16, 32, 48])
HEADS = {
    "num_kv_heads": st.sampled_from([1, 1, 2, 3]),
    "head_size": st.sampled_from([8, 8, 16, 24]),
    "dtype": st.sampled_from(["bfloat16", "float8_e4m3fn"]),
    "block_size": BLOCKS,
}
SPECS = st.one_of(
    st.builds(FullAttentionSpec, **HEADS),
    st.builds(FullAttentionSpec, sliding_window=st.sampled_from([None, 8, 64]), **HEADS),
    st.builds(SlidingWindowSpec, sliding_window=st.sampled_from([8, 64, 100]), **HEADS),
    st.builds(ChunkedLocalAttentionSpec, attention_chunk_size=st.sampled_from([8, 64]), **HEADS),
    st.builds(CrossAttentionSpec, max_encoder_tokens=st.sampled_from([1, 40]), **HEADS),
    st.builds(
        MLAAttentionSpec,
        num_kv_heads=st.just(1),
        head_size=st.sampled_from([24, 72]),
        dtype=st.just("bfloat16"),
        block_size=BLOCKS,
        block_stride_alignment=st.sampled_from([1, 144, 256]),
    ),
    st.builds(
        MambaSpec,
        block_size=BLOCKS,
        shapes=st.sampled_from([((3, 8), (2, 4, 8)), ((40,), (100,))]),
        dtypes=st.just(("bfloat16", "float32")),
        mamba_cache_mode=st.sampled_from(["none", "align"]),
    ),
)
LAYERS = st.lists(st.tuples(SPECS, st.integers(1, 5)), min_size=1, max_size=4)
GROUPINGS = ["auto", "hybrid", "packed", "promoted", "separate", "per_layer", "fixed(1)", "fixed(3)"]


def named(drawn) -> dict:
    layers = [spec for spec, count in drawn for _ in range(count)]
    return {f"layer.{i}": spec for i, spec in enumerate(layers)}


def check_invariants(layout, specs: dict):
    """Every layer once; all pages inside the memory; pages of one block id
    apart; blocks of one layer apart.
    """
    assert sorted(layout.layer_names) == sorted(specs)
    assert set(layout.placement) == set(specs)
    assert layout.size <= layout.budget
    for name, spec in layout.layer_specs.items():
        offset, stride = layout.placement[name]
        blocks = layout.num_blocks_of(layout.group_of[name])
        assert (
            spec.page_size_bytes
            >= specs[name].unpadded_page_size_bytes * spec.block_size // specs[name].block_size
        )
        assert stride >= spec.page_size_bytes
        assert stride % spec.stride_alignment_bytes == 0
        assert offset >= 0 and offset + (blocks - 1) * stride + spec.page_size_bytes <= layout.size
    for pool, blocks in enumerate(layout.pool_num_blocks):
        groups = [group for group in layout.groups if group.pool == pool]
        assert blocks >= 1
        for group in groups:
            check_apart(layout, group, blocks)
        for one, other in list(pairwise(groups))[:8]:
            check_aliasing(layout, one, other, blocks)


def extents(layout, group, block: int) -> list[tuple[int, int]]:
    """Where the pages of one block id of a group lie, in order."""
    spans = []
    for name, spec in zip(group.layer_names, group.layer_specs):
        offset, stride = layout.placement[name]
        start = offset + block * stride
        spans.append((start, start + spec.page_size_bytes))
    return sorted(spans)


def check_apart(layout, group, blocks: int):
    """No two pages of a group overlap, whatever their block ids."""
    some = sorted({0, min(1, blocks - 1), blocks // 2, blocks - 1})
    spans = sorted(span for block in some for span in extents(layout, group, block))
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def check_aliasing(layout, one, other, blocks: int):
    """Two groups of a pool may share bytes, but only those of equal block ids."""
    for a in {0, blocks // 2}:
        for b in {blocks - 1} - {a}:
            for start, end in extents(layout, one, a):
                assert all(stop <= start or end <= begin for begin, stop in extents(layout, other, b))


@settings(max_examples=2000, deadline=None)
@given(
    drawn=LAYERS,
    grouping=st.sampled_from(GROUPINGS),
    order=st.sampled_from([None, "LBNHC", "BLHNC", "LBHNC", "BLNHC"]),
    budget=st.integers(1, 4_000_000),
    length=st.integers(1, 3000),
    dcp=st.sampled_from([1, 1, 2]),
)
def test_a_layout_holds_its_invariants_or_is_refused(drawn, grouping, order, budget, length, dcp):
    specs = named(drawn)
    options = {
        "memory_order": order,
        "max_model_len": length,
        "max_num_batched_tokens": 64,
        "decode_context_parallel_size": dcp,
        "tensor_parallel_size": dcp,
    }
    try:
        layout = plan(specs, budget, grouping=grouping, **options)
    except DecodebenchError as error:
        assert str(error)
        fits = getattr(error, "max_model_len", None)
        if fits is not None:
            assert fits < length
            plan(specs, budget, grouping=grouping, **(options | {"max_model_len": fits}))
            with pytest.raises(LayoutRefused):
                plan(specs, budget, grouping=grouping, **(options | {"max_model_len": fits + 1}))
        return
    check_invariants(layout, specs)
    assert layout.capacity().concurrency >= 1
    waste = layout.waste()
    assert waste.total == pytest.approx(budget)
    assert min(waste.shares().values()) >= -1e-9
    assert str(layout) and layout._repr_html_()
    small = layout.with_num_blocks(3)
    check_invariants(small, specs)
    assert set(small.pool_num_blocks) == {3}


@settings(max_examples=150, deadline=None)
@given(
    # every family, but not those of hundreds of layers: the invariants are the same
    model=st.sampled_from([name for name in list_models() if len(load_model(name).layers) < 100]),
    grouping=st.sampled_from(GROUPINGS),
    block=st.sampled_from([None, 16, 64, 96]),
    tp=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(["auto", "fp8", "fp8_e5m2"]),
    pc=st.booleans(),
    spec=st.sampled_from([0, 0, 1, 3]),
    memory=st.integers(2**26, 2**36),
)
def test_models_too(model, grouping, block, tp, dtype, pc, spec, memory):
    try:
        layout = plan(
            model,
            memory,
            block,
            grouping,
            tensor_parallel_size=tp,
            kv_cache_dtype=dtype,
            enable_prefix_caching=pc,
            num_speculative_tokens=spec,
            max_model_len="auto",
        )
    except DecodebenchError as error:
        assert str(error)
        return
    check_invariants(layout, dict(layout.layer_specs.items()))
    assert layout.waste().total == pytest.approx(memory)


def test_groups_alias_on_purpose():
    """All groups start at byte 0: a slot's memory serves the j-th layer of every group."""
    layout = plan("gemma-3-1b", "8GiB")
    assert {tensor.offset for tensor in layout.tensors} == {0}
    first = [layout.placement[group.layer_names[0]] for group in layout.groups]
    assert len(set(first)) == 1


def test_pools_do_not_alias():
    layout = plan("jamba-v0.1", "8GiB", grouping="separate")
    assert len(layout.pool_num_blocks) == len(layout.groups) == 2
    ends = [
        max(extents(layout, group, layout.num_blocks_of(g) - 1))[1] for g, group in enumerate(layout.groups)
    ]
    starts = [min(extents(layout, group, 0))[0] for group in layout.groups]
    assert ends[0] <= starts[1]
    # no page is padded where kinds do not share memory
    assert all(spec.page_size_padded is None for spec in layout.layer_specs.values())


def test_with_num_blocks_keeps_the_layout():
    layout = plan("jamba-v0.1", "8GiB")
    small = layout.with_num_blocks(400)
    assert (small.num_blocks, small.size) == (400, 400 * layout.bytes_per_block())
    assert small.groups == layout.groups
    assert small.placement["model.layers.8.mixer"] == (400 * 327_680, 327_680)
    with pytest.raises(LayoutRefused, match="null block"):
        layout.with_num_blocks(1)


def test_from_groups():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="bfloat16")
    groups = [KVCacheGroupSpec(("a",), (spec,), spec), KVCacheGroupSpec(("b", "c"), (spec, spec), spec)]
    layout = from_groups(groups, 8)
    assert (layout.num_blocks, layout.size) == (8, 8 * 1024)
    assert layout.placement == {"a": (0, 512), "b": (0, 512), "c": (4096, 512)}
    outer = from_groups(groups, 8, memory_order="BLHNC")
    assert outer.placement == {"a": (0, 1024), "b": (0, 1024), "c": (512, 1024)}


def test_a_length_that_fits_is_named_and_taken():
    with pytest.raises(LayoutRefused, match="65520 would fit") as refusal:
        plan("llama-3.1-8b", "8GiB")
    assert refusal.value.max_model_len == 65_520
    assert plan("llama-3.1-8b", "8GiB", max_model_len="auto").max_model_len == 65_520
    assert plan("llama-3.1-8b", "40GiB", max_model_len="auto").max_model_len == 131_072


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8GiB", 2**33),
        ("8 GB", 8 * 10**9),
        ("1024", 1024),
        (77, 77),
        ("1.5k", 1536),
        ("512m", 2**29),
        ("2TiB", 2**41),
    ],
)
def test_memory(text, number):
    assert parse_memory(text) == number


@pytest.mark.parametrize(
    "text", ["", "8 apples", "-8GiB", "0", 0, -5, "1e9", "nan", None, True, "99999999999999TiB"]
)
def test_memory_that_is_none(text):
    with pytest.raises(LayoutRefused, match="memory"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_size": 0}, "block_size = 0"),
        ({"block_size": True}, "block_size"),
        ({"max_model_len": -1}, "max_model_len = -1"),
        ({"max_model_len": "long"}, "max_model_len"),
        ({"kv_cache_dtype": "fp7"}, "known are auto"),
        ({"memory_order": "NHD"}, "LBNHC"),
        ({"tensor_parallel_size": 3}, "does not divide the query heads"),
        ({"max_model_len": 200_000}, "at most 131072"),
        ({"tp": 2}, "no option 'tp'"),
        ({"decode_context_parallel_size": 2}, "does not divide tensor_parallel_size"),
        ({"decode_context_parallel_size": 2, "tensor_parallel_size": 8}, "must exceed the KV heads"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "only latent attention"),
    ],
)
def test_options_that_no_engine_takes(options, says):
    with pytest.raises(OptionError, match=says):
        plan("llama-3.1-8b", "40GiB", **options)


def test_decode_context_parallel():
    """Attention blocks cover dcp times their tokens; states are on every rank."""
    layout = plan("qwen3-next-80b-a3b", "40GiB", tensor_parallel_size=4, decode_context_parallel_size=2)
    kinds = {group.kind: g for g, group in enumerate(layout.groups)}
    full, state = kinds["full_attention"], kinds["mamba"]
    assert layout.tokens_per_block(full) == 2 * layout.groups[full].block_size
    assert layout.tokens_per_block(state) == layout.groups[state].block_size
    with pytest.raises(OptionError, match="window"):
        plan("gemma-3-1b", "8GiB", tensor_parallel_size=2, decode_context_parallel_size=2)


def test_memory_orders_that_cannot_hold_the_pages():
    with pytest.raises(LayoutRefused, match="neither padded"):
        plan("jamba-v0.1", "8GiB", memory_order="LHBNC")
    with pytest.raises(LayoutRefused, match="BLHNC"):
        plan("gemma-4-default", "40GiB", grouping="packed", memory_order="LBNHC")


def test_cpu_engine():
    """An engine on CPU: blocks of 128 tokens, kernels of 32 (as seen in a running engine)."""
    layout = plan("tiny-granite-hybrid", "1GiB", block_size=128, kernel_block_size=32)
    assert {group.block_size for group in layout.groups} == {128}


def test_specs_by_hand():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="bfloat16")
    layout = plan({"a": spec, "b": spec}, "1MiB", max_model_len=100)
    assert layout.num_blocks == 2**20 // 1024
    with pytest.raises(LayoutRefused, match="max_model_len"):
        plan({"a": spec}, "1MiB")


def test_shows_itself():
    layout = plan("jamba-v0.1", "8GiB")
    text, markup = str(layout), layout._repr_html_()
    assert "6,553 blocks" in text and "5.26%" in text
    assert "Setting attention block size to 80 tokens" in text and "Setting attention block size" in markup
    assert markup.count("<tr>") == 1 + len(layout.groups)
    case = json.loads(json.dumps(layout.to_dict()))
    assert case["resolved"]["block_size"] == 80
    assert case["memory"][str(2**33)]["num_blocks"] == 6553


def test_compare():
    table = compare("gemma-3-1b", "8GiB", length=4096)
    assert list(table["strategy"]) == list(COMPARED)
    by = table.set_index("strategy")
    assert by.loc["hybrid", "groups"] == 7 and by.loc["per_layer", "groups"] == 26
    assert by.loc["hybrid", "concurrency"] > 0
    # a window held as full attention costs its bytes for every token
    assert by.loc["promoted", "slope_bytes"] == 26 * by.loc["per_layer", "bytes_per_block"] / 16
    hybrid = compare("jamba-v0.1", "8GiB").set_index("strategy")
    assert hybrid.loc["promoted", "status"] == "refused"
    assert "one kind" in hybrid.loc["promoted", "reason"]
    with pytest.raises(DecodebenchError, match="known are auto"):
        compare("jamba-v0.1", strategies=["hybird"])


def test_every_strategy_is_compared():
    """A strategy added to the table is tested by the invariants above."""
    assert {name.partition("(")[0] for name in GROUPINGS} - {"auto"} == set(STRATEGIES)


def test_grouped_once_for_several_memories():
    grouped = prepare("tiny-llama")
    assert [layout_for(grouped, m).num_blocks for m in (2**31, 2**32)] == [2**31 // 24576, 2**32 // 24576]
