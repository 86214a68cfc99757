"""Fills: the right bytes in the right rows, nothing else, and read back exactly."""

import importlib
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import ORDERS, attention, engine_tensor, make_layout, mamba

from decodebench.cache import readback, write
from decodebench.cache import values as values_
from decodebench.cache.bind import bind
from decodebench.cache.readback import FILLED, UNTOUCHED, WRONG, ZEROED, identify_page, inspect_pages
from decodebench.cache.tensors import POISON, allocate
from decodebench.cache.values import Constant, FillRefused, Normal, Poison, Tags, Zeros, encode
from decodebench.cache.write import FillFailed, fill_blocks, merge_blocks, runs
from decodebench.models.specs import CircularBufferSpec, FullAttentionSpec, MambaSpec, MLAAttentionSpec

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")

#: a bank small enough for tests, and one object so that it is drawn once
NOISE = Normal(mean=0.1, std=0.5, bank_bytes=1 << 20)
ALL_VALUES = (Constant(), NOISE, Tags(), Zeros())
name_of = lambda values: type(values).__name__  # noqa: E731


def expected_storage(cache, ids_by_group, values):
    """The whole allocation as it must look: poison, but for the rows' parts. Plain loops, byte by byte."""
    layout = cache.layout
    storage = torch.full((layout.size,), POISON, dtype=torch.uint8)
    for group, rows in zip(layout.groups, ids_by_group):
        for layer, spec in zip(group.layer_names, group.layer_specs):
            offset, stride = layout.placement[layer]
            for row in rows:
                for i, part in enumerate(spec.parts()):
                    start = offset + row * stride + part.offset
                    content = values.expected(part, layout.layer_index[layer], row, i)
                    storage[start : start + part.nbytes] = content.view(torch.uint8)
    return storage


# -- encodings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bits"),
    # 0.015 by hand: nearest multiples are 1.921875 * 2^-7, 1966 * 2^-17, 2^-6 and 2^-6
    [
        ("bfloat16", 0x3C76),
        ("float16", 0x23AE),
        ("float32", 0x3C75C28F),
        ("float8_e4m3fn", 0x08),
        ("float8_e5m2", 0x24),
    ],
)
def test_a_constant_is_encoded_in_the_dtype(dtype, bits):
    assert encode(0.015, dtype) == bits


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        ("bfloat16", 0x7F7F),
        ("float16", 0x7BFF),
        ("float32", 0x7F7FFFFF),
        ("float8_e4m3fn", 0x7E),
        ("float8_e5m2", 0x7B),
    ],
)
def test_values_are_clamped_to_the_finite_range(dtype, largest):
    assert encode(1e300, dtype) == largest
    assert torch.tensor(encode(-1e300, dtype)).item() & largest == largest
    row = Normal(mean=0, std=1e30, bank_bytes=1 << 20).expected(attention(dtype=dtype).parts()[0], 0, 1)
    assert row.to(torch.float32).isfinite().all()


# -- what is written, and what is not -----------------------------------------------------------


@st.composite
def cases(draw):
    """A small layout of one to three groups (attention, states, packed) that alias slots, with rows."""
    blocks = draw(st.integers(2, 24))
    order = draw(st.sampled_from(ORDERS))
    dtype = draw(st.sampled_from(DTYPES))
    page = draw(st.sampled_from([512, 576, 640]))
    kinds = {
        "attention": attention(block_size=draw(st.integers(1, 4)), head_size=8, dtype=dtype).padded_to(page),
        "mamba": mamba(padded=page),
        "ring": CircularBufferSpec(
            block_size=4, num_kv_heads=1, head_size=16, dtype="bfloat16", page_size_padded=page
        ),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=3))
    layout = make_layout([[kinds[kind]] * draw(st.integers(1, 3)) for kind in chosen], blocks, order)
    ids = st.integers(1, blocks - 1)
    taken, rows = set(), []
    for _ in chosen:  # a block id belongs to one group at a time
        mine = draw(st.sets(ids)) - taken
        taken |= mine
        rows.append(sorted(mine))
    return layout, rows


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(ALL_VALUES))
def test_every_row_is_written_and_no_other_byte(case, values):
    layout, rows = case
    cache = allocate(layout)
    report = fill_blocks(cache, rows, values)
    assert torch.equal(cache.storage, expected_storage(cache, rows, values))
    assert report.blocks == [len(r) for r in rows]
    written = int((cache.storage != POISON).sum())
    assert report.bytes_written == report.bytes_needed >= written
    for g, group in enumerate(layout.groups):
        states = inspect_pages(cache, g, values).states
        zeros_only = all(part.zeros_only for part in group.kv_cache_spec.parts())
        good = ZEROED if zeros_only else FILLED
        assert (states[:, rows[g]] == good).all()
        free = sorted(set(range(layout.num_blocks)) - {row for mine in rows for row in mine})
        assert (states[:, free] == UNTOUCHED).all()


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 200)))
def test_runs_cover_rows_once_and_in_order(rows):
    rows = sorted(rows)
    assert [start + i * step for start, count, step in runs(rows) for i in range(count)] == rows


def test_equally_spaced_rows_are_one_run():
    assert runs(range(1, 100, 3)) == [(1, 33, 3)]
    assert runs([1, 2, 3, 7, 9, 11, 20]) == [(1, 3, 1), (7, 3, 2), (20, 1, 1)]
    # two rows are always equally spaced: half as many writes for scattered ones
    assert runs([1, 5, 7, 90]) == [(1, 2, 4), (7, 2, 83)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 50))))
def test_tables_of_many_requests_merge_into_sorted_unique_rows(tables):
    assert list(merge_blocks(tables)) == sorted({row for table in tables for row in table})


def test_shared_rows_are_written_once():
    cache = allocate(make_layout([[attention()] * 2]))
    report = fill_blocks(cache, [merge_blocks([(1, 2, 3)] * 200 + [(3, 4)])], Constant())
    assert report.blocks == [4] and report.bytes_written == 4 * 2 * 256


@pytest.mark.parametrize("values", ALL_VALUES, ids=name_of)
def test_many_small_scattered_rows_are_written_like_few(values):
    cache = allocate(make_layout([[attention(block_size=1)] * 2], num_blocks=64))
    rows = [[1, 2, 5, 11, 12, 30, 31, 33, 40, 63]]
    fill_blocks(cache, rows, values)
    assert torch.equal(cache.storage, expected_storage(cache, rows, values))


def test_a_fill_does_not_depend_on_how_it_is_batched():
    layout = make_layout([[attention()] * 3, [mamba(padded=256 * 2)] * 2], num_blocks=40)
    layouts = make_layout([[attention(block_size=8)] * 3, [mamba(padded=512)] * 2], num_blocks=40)
    del layout
    at_once, one_by_one = allocate(layouts), allocate(layouts)
    fill_blocks(at_once, [range(1, 30), range(30, 40)], NOISE)
    for row in range(39, 0, -1):
        fill_blocks(one_by_one, [[row], []] if row < 30 else [[], [row]], NOISE)
    assert torch.equal(at_once.storage, one_by_one.storage)


# -- noise --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_is_the_window_that_the_rule_says(dtype):
    period = NOISE.period(dtype)
    noise = NOISE.bank(dtype, torch.device("cpu"))[:period]
    part = attention(block_size=64, dtype=dtype).parts()[0]
    for layer, block, index in ((0, 0, 0), (3, 1, 0), (7, period // 4099, 0), (131, 90_000, 0), (2, 5, 1)):
        where = (block * 4099 + layer * 31 + index * 1_299_709 + torch.arange(part.numel)) % period
        row = NOISE.expected(part, layer, block, index)
        assert torch.equal(row.view(noise.dtype), noise[where])


def test_rows_larger_than_the_bank_wrap():
    spec = MambaSpec(block_size=16, shapes=((700_001,),), dtypes=("float32",), mamba_type="LINEAR")
    cache = allocate(make_layout([[spec] * 2], num_blocks=3))
    fill_blocks(cache, [[2]], NOISE)
    period = NOISE.period("float32")
    noise = NOISE.bank("float32", torch.device("cpu"))[:period]
    for layer in range(2):
        where = (2 * 4099 + layer * 31 + torch.arange(700_001)) % period
        assert torch.equal(cache.flat(f"group0.layer{layer}")[2].view(torch.int32), noise[where])
    states = inspect_pages(cache, 0, NOISE).states
    assert states.tolist() == [[UNTOUCHED, UNTOUCHED, FILLED]] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_no_two_rows_within_the_guaranteed_distance_are_the_same(dtype):
    normal = Normal()
    period = normal.period(dtype)
    blocks = 31 * (period // values_.BLOCK_STRIDE)
    assert blocks > {"bfloat16": 47_000, "float32": 23_000, "float8_e4m3fn": 94_000}[dtype]
    seen = torch.zeros(period, dtype=torch.bool)
    ids = torch.arange(blocks) * values_.BLOCK_STRIDE
    for layer in range(132):
        shift = (ids + layer * values_.LAYER_STRIDE) % period
        assert not seen[shift].any()
        seen[shift] = True
    assert int(seen.sum()) == 132 * blocks


def test_no_two_rows_of_a_deep_stack_are_the_same_nearby():
    period = Normal().period("bfloat16")
    near = torch.arange(7 * (period // values_.BLOCK_STRIDE)) * values_.BLOCK_STRIDE
    shifts = torch.cat([(near + layer * values_.LAYER_STRIDE) % period for layer in range(0, 400)])
    assert shifts.unique().numel() == shifts.numel()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_mean_and_spread_of_noise(dtype):
    normal = Normal(mean=0.25, std=0.5, bank_bytes=2 << 20)
    cache = allocate(make_layout([[attention(block_size=16, dtype=dtype)] * 4], num_blocks=65))
    fill_blocks(cache, [range(1, 65)], normal)
    [(_, view)] = cache.group_flat(0)
    sample = view[:, 1:].to(torch.float64)
    # windows of one bank overlap: what counts is how many of its elements were seen
    start = torch.arange(1, 65)[:, None] * values_.BLOCK_STRIDE + torch.arange(512)
    seen = (torch.arange(4)[:, None, None] * values_.LAYER_STRIDE + start) % normal.period(dtype)
    count = seen.unique().numel()
    assert abs(sample.mean() - 0.25) < 4 * 0.5 / math.sqrt(count)
    assert abs(sample.std() - 0.5) < 4 * 0.5 / math.sqrt(2 * count)
    # neither skewed nor heavy-tailed
    z = (sample - sample.mean()) / sample.std()
    assert abs((z**3).mean()) < 0.05 and abs((z**4).mean() - 3) < 0.1


def test_the_seed_decides():
    part = attention().parts()[0]
    again = Normal(mean=0.1, std=0.5, bank_bytes=1 << 20)
    other = Normal(mean=0.1, std=0.5, seed=1, bank_bytes=1 << 20)
    assert torch.equal(NOISE.expected(part, 1, 2), again.expected(part, 1, 2))
    assert not torch.equal(NOISE.expected(part, 1, 2), other.expected(part, 1, 2))
    assert NOISE == again != other


def test_banks_stay_within_their_size():
    NOISE.prepare(DTYPES, torch.device("cpu"))
    sizes = [bank.numel() * bank.itemsize for bank in NOISE._banks.values()]
    assert sizes and all(size <= 1 << 20 for size in sizes)
    # from one bank of the largest size allowed to four of the default
    Normal(bank_bytes=64 << 20)
    assert 4 * Normal().bank_bytes <= values_.MAX_BANK_BYTES


# -- who wrote it -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_tags_spell_layer_and_block(dtype):
    part = attention(block_size=1, dtype=dtype).parts()[0]
    row = Tags().expected(part, layer_index=0o1234, block=0o76543210)
    digits = (row[:13].to(torch.float32) * 64 - 1).to(torch.int64).tolist()
    assert digits == [0, 1, 2, 3, 4, 5, 6, 7, 4, 3, 2, 1, 0]
    assert torch.equal(row[:16], row[16:]) and row.to(torch.float32).isfinite().all()


@pytest.mark.parametrize("values", [NOISE, Tags()], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES)
def test_content_in_the_wrong_place_is_traced_to_its_owner(values, dtype):
    cache = allocate(make_layout([[attention(dtype=dtype)] * 3, [attention(dtype=dtype)] * 3], num_blocks=70))
    fill_blocks(cache, [[5, 66], [9]], values)
    cache.flat("group0.layer1")[8] = cache.flat("group0.layer0")[66]
    cache.flat("group1.layer2")[7] = cache.flat("group1.layer1")[9]
    assert inspect_pages(cache, 0, values).states[1, 8] == WRONG
    assert identify_page(cache, 0, 1, 8, values) == (0, 66)
    assert identify_page(cache, 1, 2, 7, values) == (4, 9)
    # the aliased page of group 0 holds what group 1 wrote
    assert identify_page(cache, 0, 2, 9, values) == (5, 9)
    assert identify_page(cache, 0, 0, 5, values) == (0, 5)
    assert identify_page(cache, 0, 0, 6, values) is None


# -- reading back -------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [Constant(), NOISE, Tags()], ids=name_of)
@pytest.mark.parametrize("order", ORDERS)
def test_one_wrong_byte_anywhere_is_seen(values, order):
    cache = allocate(make_layout([[mamba(padded=320)] * 2], order=order))
    fill_blocks(cache, [[2, 3, 6]], values)
    page = cache.pages("group0.layer1")
    for byte in (0, 47, 48, 200, 303):
        before = int(page[3, byte])
        page[3, byte] = before ^ 1
        found = inspect_pages(cache, 0, values)
        assert found.states[1].tolist() == [2, 2, 0, 3, 2, 2, 0, 2] and not found.padding_written.any()
        assert found.states[0].tolist() == [2, 2, 0, 0, 2, 2, 0, 2]
        page[3, byte] = before
    for byte, state in ((304, FILLED), (319, FILLED)):
        page[3, byte] ^= 1
        found = inspect_pages(cache, 0, values)
        assert found.states[1, 3] == state and found.padding[1, 3] == WRONG
        assert int(found.padding_written.sum()) == 1
        page[3, byte] ^= 1
    page[4, 310] = 0  # an unowned page whose padding was written is not untouched
    assert inspect_pages(cache, 0, values).states[1, 4] == WRONG
    page[5] = 0
    found = inspect_pages(cache, 0, values)
    assert found.states[1, 5] == ZEROED and found.padding[1, 5] == ZEROED


def test_zeros_are_filled_where_zeros_were_asked_and_zeroed_elsewhere():
    cache = allocate(make_layout([[attention()]]))
    fill_blocks(cache, [[2]], Zeros())
    assert inspect_pages(cache, 0, Zeros()).states[0, 2] == FILLED
    assert inspect_pages(cache, 0, Constant()).states[0, 2] == ZEROED
    assert inspect_pages(cache, 0, NOISE).states[0, 2] == ZEROED


def test_inspection_works_in_chunks_smaller_than_a_row(monkeypatch):
    monkeypatch.setitem(readback.LOOK_BYTES, "cpu", 64)
    monkeypatch.setitem(readback.COMPARE_BYTES, "cpu", 64)
    cache = allocate(make_layout([[attention()] * 2, [mamba(padded=256 + 64)] * 2][:1]))
    for values in (Constant(), NOISE, Tags()):
        cache.poison()
        fill_blocks(cache, [[1, 4, 5]], values)
        cache.flat("group0.layer1")[5, 100] = 3
        cache.flat("group0.layer0")[6] = 0
        assert inspect_pages(cache, 0, values).states.tolist() == [
            [2, 0, 2, 2, 0, 0, 1, 2],
            [2, 0, 2, 2, 0, 3, 2, 2],
        ]


def test_poison_can_be_written_back():
    cache = allocate(make_layout([[attention()]]))
    fill_blocks(cache, [[2, 3]], Constant())
    fill_blocks(cache, [[3]], Poison())
    assert inspect_pages(cache, 0, Constant()).states[0].tolist() == [2, 2, 0, 2, 2, 2, 2, 2]


# -- the smallest cases of the connector's history ----------------------------------------------


def test_a7_a_state_s_row_is_written_and_no_other():
    layout = make_layout([[mamba(padded=320)]], num_blocks=4)
    raw = torch.zeros(4 * 320, dtype=torch.uint8)
    conv = raw.view(torch.bfloat16).as_strided((4, 3, 8), (160, 8, 1))
    ssm = raw.view(torch.float32).as_strided((4, 2, 4, 8), (80, 32, 8, 1), 12)
    fill_blocks(bind(layout, {"group0.layer0": [conv, ssm]}), [[2]], Constant(0.5))
    for state in (conv, ssm):
        assert (state[2] == 0.5).all() and (state[[0, 1, 3]] == 0).all()
    assert (raw.view(4, 320)[:, 304:] == 0).all()


def test_a8_states_in_raw_pages_hold_values_in_their_own_dtypes():
    spec = MambaSpec(
        block_size=64, shapes=((3, 288), (8, 32, 16)), dtypes=("bfloat16", "float32"), page_size_padded=20_480
    )
    assert spec.unpadded_page_size_bytes == 18_112
    storage = torch.full((5 * 20_480,), -1, dtype=torch.int8)
    page = storage.as_strided((5, 1, 1, 18_112), (20_480, 18_112, 18_112, 1))
    cache = bind(make_layout([[spec]], num_blocks=5), {"group0.layer0": page})
    fill_blocks(cache, [[3]], Constant(0.015))
    rows = storage.view(torch.uint8).view(5, 20_480)
    assert (rows[3, :1728].view(torch.bfloat16) == torch.tensor(0.015, dtype=torch.bfloat16)).all()
    assert (rows[3, 1728:18_112].view(torch.float32) == 0.015).all()
    assert (rows[3, 18_112:] == 255).all() and (rows[[0, 1, 2, 4]] == 255).all()


@pytest.mark.parametrize("values", ALL_VALUES, ids=name_of)
def test_a9_circular_buffers_are_zeroed(values):
    ring = CircularBufferSpec(block_size=4, num_kv_heads=1, head_size=16, dtype="bfloat16")
    cache = allocate(make_layout([[ring]]))
    report = fill_blocks(cache, [[5]], values)
    assert (cache.pages("group0.layer0")[5] == 0).all()
    assert int((cache.storage != POISON).sum()) == ring.page_size_bytes == report.bytes_zeroed
    assert inspect_pages(cache, 0, values).states[0].tolist() == [2, 2, 2, 2, 2, ZEROED, 2, 2]


@pytest.mark.parametrize(("dtype", "bits"), [("float8_e4m3fn", 0x08), ("float8_e5m2", 0x24)])
def test_a10_fp8_in_uint8_holds_fp8_values(dtype, bits):
    spec = attention(dtype=dtype)
    layout = make_layout([[spec]])
    tensor = engine_tensor(spec)
    assert tensor.dtype == torch.uint8
    cache = bind(layout, {"group0.layer0": tensor})
    fill_blocks(cache, [[3]], Constant(0.015))
    assert (tensor[3] == bits).all() and (tensor[[0, 1, 2, 4, 5, 6, 7]] == 0).all()
    fill_blocks(cache, [[3]], Normal(mean=0, std=1e6, bank_bytes=1 << 20))
    values = tensor[3].view(getattr(torch, dtype)).to(torch.float32)
    assert values.isfinite().all() and values.abs().max() == torch.finfo(getattr(torch, dtype)).max


@pytest.mark.parametrize("values", ALL_VALUES, ids=name_of)
def test_a11_packed_formats_are_zeroed_and_said_so(values):
    spec = MLAAttentionSpec(
        block_size=4,
        num_kv_heads=1,
        head_size=576,
        dtype="uint8",
        packed="fp8_ds_mla",
        state_content_bytes=656,
    )
    cache = allocate(make_layout([[spec]]))
    report = fill_blocks(cache, [[1, 2]], values)
    assert (cache.pages("group0.layer0")[1:3] == 0).all() and report.bytes_zeroed == 2 * 4 * 656
    assert inspect_pages(cache, 0, values).states[0, :4].tolist() == [UNTOUCHED, ZEROED, ZEROED, UNTOUCHED]


def test_a12_manager_ids_are_blocks_of_kernel_rows():
    spec = attention(block_size=16)
    tensor = engine_tensor(spec, ratio=4)
    fill_blocks(bind(make_layout([[spec]]), {"group0.layer0": tensor}), [[1, 2]], Constant(0.5))
    assert (tensor[4:12] == 0.5).all() and (tensor[:4] == 0).all() and (tensor[12:] == 0).all()


@pytest.mark.parametrize("values", ALL_VALUES, ids=name_of)
def test_an_engine_s_tensors_are_filled_like_our_own(values):
    layout = make_layout([[attention(block_size=5)] * 2, [mamba(padded=320)] * 2])
    own = allocate(layout)
    raw = torch.full((layout.size,), -1, dtype=torch.int8)
    tensors = {}
    for i in range(2):
        tensors[f"group0.layer{i}"] = raw.view(torch.bfloat16).as_strided(
            (8, 2, 5, 16), (160, 16, 32, 1), i * 8 * 160
        )
        tensors[f"group1.layer{i}"] = raw.as_strided((8, 1, 1, 304), (320, 304, 304, 1), i * 8 * 320)
    engine = bind(layout, tensors)
    for cache in (own, engine):
        fill_blocks(cache, [[1, 4], [2, 7]], values)
    assert torch.equal(own.storage, raw.view(torch.uint8))
    for group in range(2):
        ours, theirs = inspect_pages(own, group, values), inspect_pages(engine, group, values)
        assert torch.equal(ours.states, theirs.states) and torch.equal(ours.padding, theirs.padding)


def test_keys_and_values_apart_are_filled_and_read_back():
    tensor = torch.zeros(2, 8, 4, 2, 8, dtype=torch.bfloat16)
    cache = bind(make_layout([[attention()]]), {"group0.layer0": tensor})
    cache.poison()
    for values in (Constant(), NOISE):
        fill_blocks(cache, [[3, 4]], values)
        assert tensor[:, 3:5].isfinite().all() and tensor[:, [0, 1, 2, 5, 6, 7]].isnan().all()
        assert inspect_pages(cache, 0, values).states[0].tolist() == [2, 2, 2, 0, 0, 2, 2, 2]
    tensor[1, 3, 0, 0, 0] = 7
    assert inspect_pages(cache, 0, NOISE).states[0, 3] == WRONG


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(math.nan),
        lambda: Constant(math.inf),
        lambda: Normal(mean=math.nan),
        lambda: Normal(std=math.inf),
        lambda: Normal(std=-1.0),
        lambda: Normal(bank_bytes=65 << 20),
        lambda: Normal(bank_bytes=1000),
    ],
)
def test_values_that_make_no_sense_are_refused(make):
    with pytest.raises(FillRefused):
        make()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1], [8]], "group 1.*group1.layer0.*block id 8 is out of range.*1 to 7"),
        ([[1], [-1]], "block id -1 is out of range"),
        ([[0, 1], []], "group 0.*null block"),
        ([[2, 2], []], "sorted and unique"),
        ([[3, 2], []], "sorted and unique"),
        ([[1]], "blocks for 1 groups.*2"),
    ],
)
def test_bad_rows_are_refused_before_the_first_byte(rows, message):
    cache = allocate(make_layout([[attention()] * 2, [attention()] * 2]))
    with pytest.raises(FillRefused, match=f"(?s){message}"):
        fill_blocks(cache, rows, Constant())
    assert (cache.storage == POISON).all()


def test_banks_of_too_many_dtypes_are_refused_before_the_first_byte():
    cache = allocate(make_layout([[mamba(padded=320)]]))
    with pytest.raises(FillRefused, match="bank_bytes"):
        fill_blocks(cache, [[1]], Normal(bank_bytes=40 << 20))
    assert (cache.storage == POISON).all()


def test_numbers_are_refused_for_integers():
    spec = MambaSpec(block_size=1, shapes=((16,),), dtypes=("int8",), mamba_type="LINEAR")
    cache = allocate(make_layout([[spec]]))
    for values in (Constant(), NOISE, Tags()):
        with pytest.raises(FillRefused, match="int8"):
            fill_blocks(cache, [[1]], values)
    assert (cache.storage == POISON).all()


def test_a_fill_that_breaks_leaves_a_report():
    class Breaking(Constant):
        def sources(self, target, dtype, layer, block, step, part):
            if block > 3:
                raise RuntimeError("the device went away")
            yield 0, target, super().number(dtype)

        def number(self, dtype):
            return None  # no kernel knows these values: torch writes them, run after run

    values = Breaking(0.5)
    cache = allocate(
        make_layout([[FullAttentionSpec(block_size=512, num_kv_heads=2, head_size=64, dtype="float32")]])
    )
    with pytest.raises(FillFailed, match="the device went away") as caught:
        fill_blocks(cache, [[1, 2, 5]], values)
    assert caught.value.report.bytes_written == 2 * cache.layout.groups[0].bytes_per_block
    assert caught.value.report.bytes_needed == 3 * cache.layout.groups[0].bytes_per_block


def test_the_null_block_is_written_only_where_a_fault_asks_for_it():
    cache = allocate(make_layout([[attention()]]))
    fill_blocks(cache, [[0, 1]], Constant(), allow_null_block=True)
    assert inspect_pages(cache, 0, Constant()).states[0, :2].tolist() == [FILLED, FILLED]


# -- on a GPU, in Triton's interpreter ----------------------------------------------------------


@pytest.fixture(scope="module")
def kernel():
    """The Triton kernel in the interpreter: it has to be imported with TRITON_INTERPRET set."""
    pytest.importorskip("triton", reason="Triton is not installed (optional extra)")
    name = "decodebench.cache.triton_rows"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module(name)
        # both ways to the interpreted module: other tests compile the kernel for real
        del sys.modules[name], sys.modules["decodebench.cache"].triton_rows


@pytest.mark.parametrize("values", ALL_VALUES, ids=name_of)
@pytest.mark.parametrize(
    ("order", "dtype"), [("LBNHC", "bfloat16"), ("BLHNC", "float32"), ("BLHNC", "float8_e4m3fn")]
)
def test_the_triton_kernel_writes_the_same_bytes(values, order, dtype, kernel, monkeypatch):
    monkeypatch.setattr(write, "_kernel", lambda device: kernel)
    spec = attention(block_size=9, heads=8, head_size=33, dtype=dtype)  # 4,752 elements: one tile and a bit
    state = MambaSpec(
        block_size=16,
        shapes=((3, 8), (2, 4, 8)),
        dtypes=("bfloat16", "float32"),
        page_size_padded=spec.page_size_bytes,
    )
    cache = allocate(make_layout([[spec] * 2, [state] * 2], num_blocks=4, order=order))
    rows = [[1, 3], [2]]
    report = fill_blocks(cache, rows, values)
    assert torch.equal(cache.storage, expected_storage(cache, rows, values))
    assert report.bytes_written == report.bytes_needed
    if not isinstance(values, Tags):
        assert report.writes == 3  # one launch for attention, one for each part of the states


def test_the_triton_kernel_follows_the_noise_around_its_period(kernel):
    period = NOISE.period("bfloat16")
    bits = torch.zeros((2, 3, 5000), dtype=torch.int16)
    bank = NOISE.bank("bfloat16", torch.device("cpu"))
    shift = period - 4200  # the first tile ends behind the period, the second begins behind it
    kernel.write(
        bits,
        [2],
        None,
        bank=bank,
        period=period,
        shift=shift,
        shift_of_layer=values_.LAYER_STRIDE,
        shift_of_block=values_.BLOCK_STRIDE,
    )
    for layer in range(2):
        where = (
            shift + layer * values_.LAYER_STRIDE + 2 * values_.BLOCK_STRIDE + torch.arange(5000)
        ) % period
        assert torch.equal(bits[layer, 2], bank[where])
    assert (bits[:, :2] == 0).all()


def test_a_constant_that_its_dtype_cannot_hold_is_refused_before_anything_is_written():
    cache = allocate(make_layout([[attention(dtype="float8_e4m3fn")]], num_blocks=3))
    with pytest.raises(FillRefused, match="becomes 0 in float8_e4m3fn"):
        fill_blocks(cache, [[1]], Constant(1e-9))
    assert (cache.storage == 0xFF).all()
