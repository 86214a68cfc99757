"""Views of a layout's memory: every byte where the layout says, an engine's tensors checked."""

from dataclasses import replace

import pytest
import torch
from pages import ORDERS, attention, engine_tensor, make_layout, mamba

from decodebench.cache.bind import bind
from decodebench.cache.tensors import POISON, AllocationRefused, CacheMismatch, allocate
from decodebench.errors import DecodebenchError
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.layout import Layout
from decodebench.layout.placement import KVCacheTensor
from decodebench.models.specs import CircularBufferSpec, MLAAttentionSpec


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_a_fresh_cache_reads_as_nan(dtype):
    cache = allocate(make_layout([[attention(dtype=dtype)] * 2]))
    values = cache.flat("group0.layer1")
    assert values.dtype == getattr(torch, dtype)
    assert values.to(torch.float32).isnan().all()


@pytest.mark.parametrize("order", ORDERS)
def test_pages_lie_where_the_layout_says(order):
    layout = make_layout([[attention()] * 3, [attention()] * 2], order=order)
    cache = allocate(layout)
    assert cache.storage.numel() == layout.size
    for layer in layout.layer_names:
        offset, stride = layout.placement[layer]
        for block in range(layout.num_blocks):
            start = offset + block * stride
            cache.storage.fill_(0)
            cache.storage[start : start + layout.layer_specs[layer].page_size_bytes] = 7
            assert cache.pages(layer).shape == (8, 256)
            assert (cache.pages(layer)[block] == 7).all() and cache.pages(layer).sum() == 7 * 256


@pytest.mark.parametrize("order", ORDERS)
def test_the_logical_view_is_strided_as_the_memory_order_says(order):
    cache = allocate(make_layout([[attention()]], order=order))
    cache.flat("group0.layer0").copy_(torch.arange(8 * 128).reshape(8, 128) % 128)
    view = cache.view("group0.layer0")
    assert view.shape == (8, 2, 4, 16)
    # block 3, head 1, token 2, element 5 of K|V
    position = (2 * 2 + 1) * 16 + 5 if order == "LBNHC" else (1 * 4 + 2) * 16 + 5
    assert view[3, 1, 2, 5] == position


def test_state_parts_have_their_own_dtypes_inside_a_padded_page():
    spec = mamba(padded=320)
    cache = allocate(make_layout([[spec] * 2]))
    parts = cache.view("group0.layer1")
    assert {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()} == {
        "conv": (torch.bfloat16, (8, 3, 8)),
        "ssm": (torch.float32, (8, 2, 4, 8)),
    }
    parts["conv"].fill_(1)
    parts["ssm"].fill_(2)
    page = cache.pages("group0.layer1")[5]
    assert page[:48].view(torch.bfloat16).eq(1).all() and page[48:304].view(torch.float32).eq(2).all()
    assert page[304:].eq(POISON).all()
    assert cache.view("group0.layer1", "ssm").data_ptr() == parts["ssm"].data_ptr()
    assert cache.view("group0.layer1", 0).dtype == torch.bfloat16


@pytest.mark.parametrize("order", ORDERS)
def test_a_group_is_one_strided_view(order):
    cache = allocate(make_layout([[attention()] * 3, [attention()] * 2], order=order))
    [(first, view)] = cache.group_flat(1)
    assert first == 3 and view.shape == (2, 8, 128)
    for j in range(2):
        flat = cache.flat(f"group1.layer{j}")
        assert view[j].data_ptr() == flat.data_ptr() and view[j].stride() == flat.stride()


def test_a_group_of_mixed_pages_needs_a_view_for_each_spacing():
    small, large = attention(heads=1), attention(heads=2)
    names = ("a", "b", "c", "d")
    group = KVCacheGroupSpec(names, (large, small, large, small), large)
    tensors = tuple(
        KVCacheTensor((name,), offset, 0, 768, 8 * 768) for name, offset in zip(names, (0, 256, 384, 640))
    )
    cache = allocate(
        Layout(groups=(group,), tensors=tensors, pool_num_blocks=(8,), size=8 * 768, memory_order="BLHNC")
    )
    assert [(first, tuple(view.shape)) for first, view in cache.group_flat(0)] == [
        (i, (1, 8, 128 if i % 2 == 0 else 64)) for i in range(4)
    ]
    layers = [cache.flat(name) for name in names]
    for i, layer in enumerate(layers):
        layer.fill_(i + 1)
    assert [float(layer.to(torch.float32).mean()) for layer in layers] == [1, 2, 3, 4]


def test_a_cache_larger_than_the_device_is_refused():
    layout = make_layout([[attention()]])
    with pytest.raises(AllocationRefused, match="does not fit.*with_num_blocks"):
        allocate(replace(layout, size=2**50))
    with pytest.raises(DecodebenchError, match="poison"):
        allocate(layout, initial="ones")
    if not torch.cuda.is_available():
        with pytest.raises(AllocationRefused, match="device='cpu'"):
            allocate(layout, device="cuda")


def test_unknown_layers_and_parts_are_named():
    cache = allocate(make_layout([[mamba()]]))
    with pytest.raises(CacheMismatch, match="no layer 'x'.*group0.layer0"):
        cache.flat("x")
    with pytest.raises(CacheMismatch, match="conv, ssm"):
        cache.flat("group0.layer0", "kv")


# -- an engine's tensors ------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["NHC", "HNC"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("gap", [0, 64])
def test_typed_attention_views_are_bound(order, dtype, gap):
    spec = attention(dtype=dtype)
    layout = make_layout([[spec] * 2])
    tensors = {name: engine_tensor(spec, order=order, gap=gap) for name in layout.layer_names}
    cache = bind(layout, tensors)
    flat = cache.flat("group0.layer1")
    assert flat.shape == (8, 128) and flat.dtype == getattr(torch, dtype)
    flat[3] = 1.5
    written = tensors["group0.layer1"].view(flat.dtype).to(torch.float32)
    assert (written[3] == 1.5).all() and (written[[0, 1, 2, 4, 5, 6, 7]] == 0).all()
    assert cache.view("group0.layer1").stride() == tensors["group0.layer1"].stride()
    # separate allocations: one view a layer
    assert len(cache.group_flat(0)) == 2


def test_kernel_blocks_are_rows_of_the_manager_s_blocks():
    spec = attention(block_size=16)
    layout = make_layout([[spec]])
    tensor = engine_tensor(spec, ratio=4)
    cache = bind(layout, {"group0.layer0": tensor})
    cache.flat("group0.layer0")[1:3] = 1
    assert (tensor[4:12] == 1).all() and (tensor[:4] == 0).all() and (tensor[12:] == 0).all()


def test_kernel_blocks_apart_are_refused():
    spec = attention(block_size=16)
    with pytest.raises(CacheMismatch, match="side by side"):
        bind(make_layout([[spec]]), {"group0.layer0": engine_tensor(spec, ratio=4, gap=8)})


@pytest.mark.parametrize("raw_dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("width", [304, 320])
def test_raw_state_pages_are_bound_with_and_without_their_padding(raw_dtype, width):
    storage = torch.full((8 * 320,), -1 if raw_dtype == torch.int8 else 255, dtype=raw_dtype)
    page = storage.as_strided((8, 1, 1, width), (320, width, width, 1))
    cache = bind(make_layout([[mamba(padded=320)]]), {"group0.layer0": page})
    cache.view("group0.layer0", "conv").fill_(1)
    cache.view("group0.layer0", "ssm").fill_(2)
    assert cache.pages("group0.layer0").shape == (8, 320)
    rows = storage.view(torch.uint8).reshape(8, 320)
    assert (rows[:, :48].view(torch.bfloat16) == 1).all() and (rows[:, 48:304].view(torch.float32) == 2).all()
    assert (rows[:, 304:] == POISON).all()


def test_lists_of_state_tensors_in_one_page_or_apart():
    layout = make_layout([[mamba(padded=320)]])
    raw = torch.zeros(8 * 320, dtype=torch.uint8)
    conv = raw.view(torch.bfloat16).as_strided((8, 3, 8), (160, 8, 1))
    ssm = raw.view(torch.float32).as_strided((8, 2, 4, 8), (80, 32, 8, 1), 12)
    cache = bind(layout, {"group0.layer0": [conv, ssm]})
    cache.flat("group0.layer0", "ssm")[2] = 3
    assert (ssm[2] == 3).all() and ssm.sum() == 3 * 64 and (conv == 0).all()
    assert cache.pages("group0.layer0").shape == (8, 320)
    apart = bind(
        layout, {"group0.layer0": [torch.zeros(8, 3, 8, dtype=torch.bfloat16), torch.zeros(8, 2, 4, 8)]}
    )
    apart.flat("group0.layer0", 0)[2] = 1
    with pytest.raises(CacheMismatch, match="lie apart"):
        apart.pages("group0.layer0")


def test_keys_and_values_in_an_outermost_dimension():
    spec = attention()
    tensor = torch.zeros(2, 8, 4, 2, 8, dtype=torch.bfloat16)
    cache = bind(make_layout([[spec]]), {"group0.layer0": tensor})
    assert [part.name for part in cache.parts("group0.layer0")] == ["k", "v"]
    cache.flat("group0.layer0", "v")[3] = 1
    assert (tensor[1, 3] == 1).all() and tensor.sum() == 64


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_heads_outside_of_blocks(order):
    layout = make_layout([[attention()] * 3])
    raw = torch.zeros(layout.size // 2, dtype=torch.bfloat16)
    cells = raw.view(3, 2, 8, 4, 16) if order == "LHBNC" else raw.view(8, 2, 3, 4, 16).permute(2, 1, 0, 3, 4)
    tensors = {f"group0.layer{i}": cells[i].transpose(0, 1) for i in range(3)}
    cache = bind(layout, tensors)
    assert [part.name for part in cache.parts("group0.layer1")] == ["kv.head0", "kv.head1"]
    assert [tuple(span.view.shape) for span in cache.spans(0)] == [(3, 8, 64)] * 2
    for head in range(2):
        cache.flat("group0.layer1", head)[5] = 1
    assert (tensors["group0.layer1"][5] == 1).all() and raw.sum() == 128
    assert cache.view("group0.layer1").shape == (8, 2, 4, 16)


def test_mla_and_ring_pages_are_bound():
    mla = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=24, dtype="bfloat16")
    cache = bind(make_layout([[mla]]), {"group0.layer0": torch.zeros(8, 1, 4, 24, dtype=torch.bfloat16)})
    assert cache.view("group0.layer0").shape == (8, 1, 4, 24)
    ring = CircularBufferSpec(block_size=4, num_kv_heads=1, head_size=24, head_size_v=0, dtype="bfloat16")
    cache = bind(make_layout([[ring]]), {"group0.layer0": torch.zeros(8, 1, 4, 24, dtype=torch.bfloat16)})
    assert cache.flat("group0.layer0").dtype == torch.uint8 and cache.flat("group0.layer0").shape == (8, 192)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(8, 2, 4, 16), "float32.*expected dtype kv bfloat16"),
        (torch.zeros(7, 2, 4, 16, dtype=torch.bfloat16), "8 rows"),
        (torch.zeros(8, 2, 4, 8, dtype=torch.bfloat16), "256 bytes a block"),
        (torch.zeros(8, 2, 4, 32, dtype=torch.bfloat16)[..., ::2], "dense inside"),
        (torch.zeros(256, dtype=torch.uint8).expand(8, 256), "do not overlap"),
        (torch.zeros(8, 300, dtype=torch.uint8), "256 bytes a block"),
        ([torch.zeros(8, 128, dtype=torch.bfloat16)] * 2, "expected 1"),
        ([], "expected a tensor"),
        ("tensor", "expected a tensor"),
    ],
)
def test_tensors_that_do_not_hold_the_spec_are_refused_by_name(tensor, message):
    with pytest.raises(CacheMismatch, match=f"(?s)group0.layer0.*{message}"):
        bind(make_layout([[attention()]]), {"group0.layer0": tensor})


def test_missing_and_unknown_layers_are_refused_by_name():
    layout = make_layout([[attention()] * 2])
    good = torch.zeros(8, 2, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(CacheMismatch, match="group0.layer1.*group 0"):
        bind(layout, {"group0.layer0": good})
    with pytest.raises(CacheMismatch, match="'other'.*no group"):
        bind(layout, {"group0.layer0": good, "group0.layer1": good, "other": good})


def test_poison_reaches_all_pages_of_an_engine():
    spec = mamba(padded=320)
    raw = torch.zeros(2 * 8 * 320, dtype=torch.int8)
    layout = make_layout([[spec] * 2])
    tensors = {
        name: raw.as_strided((8, 1, 1, 304), (320, 304, 304, 1), i * 8 * 320)
        for i, name in enumerate(layout.layer_names)
    }
    cache = bind(layout, tensors)
    cache.poison()
    assert (raw == -1).all()
    assert len(cache.group_flat(0, 0)) == len(cache.group_flat(0, 1)) == 1
