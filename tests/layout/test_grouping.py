"""Layers → groups: sizes, padding, merging, and what each strategy refuses. Small cases worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodebench.layout.grouping import (
    STRATEGIES,
    GroupingRefused,
    auto,
    fixed,
    hybrid,
    hybrid_group_size,
    least_padding,
    packed,
    per_layer,
    promote,
    promoted,
    separate,
    strategy,
    unify_pages,
)
from decodebench.models.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

HEADS = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}
FULL = FullAttentionSpec(**HEADS)  # 512 bytes
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=64)
CHUNK = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64)
CROSS = CrossAttentionSpec(**HEADS, max_encoder_tokens=100)
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype="bfloat16")  # 768 bytes
STATE = MambaSpec(block_size=16, shapes=((50,),), dtypes=("float32",))  # 200 bytes


def layers(*counted) -> dict:
    specs = [spec for spec, count in counted for _ in range(count)]
    return {f"l{i}": spec for i, spec in enumerate(specs)}


def sizes(groups) -> list[int]:
    return [len(group.layer_names) for group in groups]


@pytest.mark.parametrize(
    ("counts", "size"),
    # 13 beside 12 is padded to 13 rather than split; 1.5 times as many is split
    [((12, 13), 13), ((4, 6), 4), ((4, 5), 5), ((1, 1), 1), ((2, 3), 2), ((5, 25), 5)],
)
def test_hybrid_group_size(counts, size):
    assert hybrid_group_size(counts) == size


def test_hybrid_deals_layers_round_robin():
    groups = hybrid(layers((WINDOW, 5), (FULL, 2)))
    assert [group.layer_names for group in groups] == [("l0", "l3"), ("l1", "l4"), ("l2",), ("l5", "l6")]


def test_buckets_come_in_order_of_first_appearance():
    groups = hybrid({"a": FULL, "b": WINDOW, "c": FULL, "d": WINDOW})
    assert [group.layer_names for group in groups] == [("a", "c"), ("b", "d")]


def test_one_kind_is_one_group():
    assert sizes(hybrid(layers((FULL, 5)))) == [5]
    # full attention with and without one window value shares it, and remembers the window
    windowed = FullAttentionSpec(**HEADS, sliding_window=64)
    (group,) = hybrid(layers((FULL, 2), (windowed, 2)))
    assert group.kv_cache_spec == windowed and not group.mixed
    # different pages of one kind make a group of mixed pages
    wide = FullAttentionSpec(**(HEADS | {"head_size": 16}))
    (group,) = hybrid(layers((FULL, 2), (wide, 1)))
    assert group.mixed and group.bytes_per_block == 2 * 512 + 1024


def test_two_windows_do_not_share_a_group():
    other = SlidingWindowSpec(**HEADS, sliding_window=128)
    assert sizes(hybrid(layers((WINDOW, 2), (other, 2)))) == [2, 2]
    both = layers(
        (FullAttentionSpec(**HEADS, sliding_window=64), 1),
        (FullAttentionSpec(**HEADS, sliding_window=128), 1),
    )
    groups = hybrid(both)
    assert sizes(groups) == [2] and groups[0].mixed


def test_pages_are_made_equal():
    wide = FullAttentionSpec(**(HEADS | {"head_size": 16}))  # 1,024 bytes
    odd = FullAttentionSpec(**(HEADS | {"head_size": 12}))  # 768 bytes
    unified = unify_pages({"wide": wide, "half": WINDOW, "odd": odd, "state": STATE})
    assert {spec.page_size_bytes for spec in unified.values()} == {1024}
    # half the page: twice the tokens; no divisor: padding; states: padding
    assert unified["half"].block_size == 32 and unified["half"].page_size_padded is None
    assert (unified["odd"].block_size, unified["odd"].page_size_padded) == (16, 1024)
    assert unified["state"].page_size_padded == 1024
    assert unified["wide"] is wide


def test_latent_attention_cannot_be_padded():
    wide = SlidingWindowSpec(**(HEADS | {"head_size": 16}), sliding_window=64)  # 1,024 bytes, MLA 768
    with pytest.raises(GroupingRefused, match="latent attention cannot be padded"):
        unify_pages({"mla": MLA, "window": wide})
    # beside plain windows it is promoted instead: everything in one group
    (group,) = hybrid({"mla": MLA, "window": wide})
    assert group.mixed and isinstance(group.layer_specs[1], FullAttentionSpec)
    assert group.layer_specs[1].sliding_window == 64


@pytest.mark.parametrize("beside", [STATE, CROSS])
def test_promotion_is_refused_beside(beside):
    with pytest.raises(GroupingRefused, match="leave the hybrid manager on"):
        promote(layers((FULL, 2), (beside, 2)))


def test_promotion():
    specs = promote(layers((FULL, 1), (WINDOW, 1)))
    assert specs["l1"] == FullAttentionSpec(**HEADS, sliding_window=64)
    assert promote(layers((FULL, 1), (CHUNK, 1)))["l1"].attention_chunk_size == 64
    # windows alone are one kind already
    assert promote(layers((WINDOW, 3))) == layers((WINDOW, 3))
    assert sizes(promoted(layers((FULL, 2), (WINDOW, 4)))) == [6]
    latent = SlidingWindowMLASpec(
        block_size=16, num_kv_heads=1, head_size=24, dtype="bfloat16", sliding_window=8
    )
    with pytest.raises(GroupingRefused, match="latent"):
        promote({"a": MLA, "b": latent})
    with pytest.raises(GroupingRefused):
        auto(layers((FULL, 1), (STATE, 1)), hybrid_manager=False)


def test_packed_splits_windows_to_what_a_block_holds():
    """As gemma-4 with block-outermost memory: 5 wide pages hold 10 narrow
    ones, so 25 windows make 3 groups.
    """
    wide = FullAttentionSpec(**(HEADS | {"head_size": 16}))
    groups = packed(layers((WINDOW, 25), (wide, 5)))
    assert sizes(groups) == [9, 8, 8, 5]
    assert all(group.mixed for group in groups)
    assert max(group.bytes_per_block for group in groups) == 5 * 1024


def test_packed_repeats_a_pattern():
    """A bucket with equally many layers of two page sizes stays whole; others
    are split into as many repeats.
    """
    wide = FullAttentionSpec(**(HEADS | {"head_size": 16}))
    specs = {}
    for i in range(3):
        specs |= {f"f{i}": FULL, f"w{i}": wide}
    specs |= {f"s{i}": WINDOW for i in range(6)}
    groups = packed(specs)
    assert [group.layer_names for group in groups] == [
        ("f0", "w0", "f1", "w1", "f2", "w2"),
        ("s0", "s2", "s4"),
        ("s1", "s3", "s5"),
    ]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 20))
def test_least_padding(values, floor):
    def padding(d):
        return sum(-v % d for v in values)

    d = least_padding(values, floor)
    assert d >= floor
    for other in range(max(1, floor), max(values) + 1):
        assert padding(d) <= padding(other)
        assert padding(d) < padding(other) or other <= d


def test_fixed_and_per_layer():
    specs = layers((WINDOW, 5), (FULL, 2))
    assert sizes(fixed(specs, 3)) == [3, 2, 2]
    assert sizes(fixed(specs, 100)) == [5, 2]
    assert sizes(per_layer(specs)) == [1] * 7
    assert sizes(fixed(layers((FULL, 5)), 2)) == [2, 2, 1]
    with pytest.raises(GroupingRefused, match="at least one layer"):
        fixed(specs, 0)


def test_separate_gives_a_pool_to_each_kind():
    groups = separate(layers((STATE, 3), (FULL, 2)))
    assert [(group.kind, group.pool, len(group.layer_names)) for group in groups] == [
        ("mamba", 0, 3),
        ("full_attention", 1, 2),
    ]
    assert groups[0].kv_cache_spec.page_size_bytes == 200


@pytest.mark.parametrize(
    "name", ["", "hybird", "fixed", "fixed()", "fixed(x)", "hybrid(2)", "fixed(-1)", "auto "]
)
def test_names_that_are_no_strategy(name):
    with pytest.raises(GroupingRefused, match="known are auto, hybrid"):
        strategy(name)


def test_strategies_by_name():
    specs = layers((WINDOW, 4), (FULL, 2))
    assert sizes(strategy("fixed(2)")[1](specs)) == [2, 2, 2]
    plain = [name for name, how in STRATEGIES.items() if not how.parameter]
    assert {name: sizes(strategy(name)[1](specs)) for name in plain} == {
        "hybrid": [2, 2, 2],
        "packed": [2, 2, 2],
        "promoted": [6],
        "separate": [4, 2],
        "per_layer": [1] * 6,
    }


def test_auto_is_packed_only_where_pages_differ_and_blocks_are_outermost():
    wide = FullAttentionSpec(**(HEADS | {"head_size": 16}))
    assert auto(layers((WINDOW, 4), (FULL, 2)), block_outermost=True) == hybrid(
        layers((WINDOW, 4), (FULL, 2))
    )
    mixed = layers((WINDOW, 25), (wide, 5))
    assert auto(mixed, block_outermost=True) == packed(mixed)
    assert auto(mixed) == hybrid(mixed)
