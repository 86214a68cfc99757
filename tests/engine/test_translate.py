"""vLLM's specs and layouts in our words: page sizes must agree, what cannot be described is refused."""

import pytest

torch = pytest.importorskip("torch")


def full(**changes):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{**fields, **changes})


def translated(spec, cache_dtype="auto"):
    from decodebench.vllm.translate import spec_of

    ours = spec_of(spec, "model.layers.0", cache_dtype, max_encoder_tokens=1500)
    assert ours.page_size_bytes == spec.page_size_bytes
    assert ours.block_size == spec.block_size
    return ours


def test_full_attention_keeps_window_and_padding():
    ours = translated(full(sliding_window=128, page_size_padded=16384, head_size_v=32))
    assert (ours.kind, ours.sliding_window, ours.dtype) == ("full_attention", 128, "bfloat16")
    assert (ours.head_size, ours.head_size_v, ours.unpadded_page_size_bytes) == (64, 32, 16 * 2 * 96 * 2)


@pytest.mark.parametrize(
    ("cache_dtype", "dtype"),
    [("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")],
)
def test_fp8_behind_uint8_has_its_own_type(cache_dtype, dtype):
    from vllm.v1.kv_cache_interface import KVQuantMode

    ours = translated(full(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), cache_dtype)
    assert (ours.dtype, ours.packed) == (dtype, None)
    assert not ours.parts()[0].zeros_only


def test_packed_formats_are_never_plain_numbers():
    from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec

    mla = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
        state_content_bytes=656,
    )
    nvfp4 = full(dtype=torch.uint8, kv_quant_mode=KVQuantMode.NVFP4, state_content_bytes=72)
    indexer = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    for spec, cache_dtype in ((mla, "fp8_ds_mla"), (nvfp4, "nvfp4"), (indexer, "auto")):
        ours = translated(spec, cache_dtype)
        assert ours.packed and ours.parts()[0].zeros_only
        assert ours.parts()[0].nbytes == spec.page_size_bytes
    assert translated(mla).page_size_bytes == 64 * 656


def test_states_windows_chunks_rings_and_encoders():
    from vllm.v1 import kv_cache_interface as v

    mamba = translated(
        v.MambaSpec(
            block_size=80,
            shapes=((3, 288), (8, 32, 16)),
            dtypes=(torch.bfloat16, torch.float32),
            page_size_padded=20480,
            mamba_cache_mode="align",
            num_prefill_checkpoint_blocks=1,
        )
    )
    assert [(p.name, p.shape, p.dtype) for p in mamba.parts()] == [
        ("conv", (3, 288), "bfloat16"),
        ("ssm", (8, 32, 16), "float32"),
    ]
    assert mamba.unpadded_page_size_bytes == 18112
    common = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float16}
    assert translated(v.SlidingWindowSpec(**common, sliding_window=128)).num_skipped_tokens(999) == 872
    chunked = translated(v.ChunkedLocalAttentionSpec(**common, attention_chunk_size=64))
    assert chunked.attention_chunk_size == 64
    assert translated(v.CrossAttentionSpec(**common)).max_encoder_tokens == 1500
    assert translated(v.CircularBufferSpec(**common)).parts()[0].zeros_only
    assert translated(v.MLAAttentionSpec(**common)).head_size_v == 0
    assert translated(v.SlidingWindowMLASpec(**common, sliding_window=8)).kind == "sliding_window_mla"


def test_what_has_no_counterpart_is_refused_by_name():
    from vllm.v1.kv_cache_interface import SinkFullAttentionSpec

    from decodebench.vllm.translate import UnknownToDecodebench

    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    spec = SinkFullAttentionSpec(**shape, sink_len=16)
    with pytest.raises(UnknownToDecodebench, match="model.layers.0.*SinkFullAttentionSpec"):
        translated(spec)


def test_a_layout_keeps_groups_tensors_and_lengths():
    from vllm.v1 import kv_cache_interface as v

    from decodebench.vllm.translate import layout_of

    window = v.SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=32
    )
    page = window.page_size_bytes
    mixed = v.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"c": full(), "d": full(num_kv_heads=1)})
    config = v.KVCacheConfig(
        num_blocks=9,
        kv_cache_tensors=[
            v.KVCacheTensor(size=9 * page * 2, layers=["a", "b"], layer_stride=9 * page, block_stride=page),
            v.KVCacheTensor(size=9 * page * 2, layers=["c"], layer_stride=9 * page, block_stride=page),
            v.KVCacheTensor(
                size=9 * page * 2,
                layers=["d"],
                layer_stride=9 * page,
                block_stride=page // 2,
                offset=9 * page,
            ),
        ],
        kv_cache_groups=[v.KVCacheGroupSpec(["a", "b"], window), v.KVCacheGroupSpec(["c", "d"], mixed)],
    )
    layout = layout_of(config)
    assert layout.layer_names == ("a", "b", "c", "d")
    assert layout.placement == {
        "a": (0, page),
        "b": (9 * page, page),
        "c": (0, page),
        "d": (9 * page, page // 2),
    }
    assert [spec.page_size_bytes for spec in layout.groups[1].layer_specs] == [page, page // 2]
    assert (layout.num_blocks, layout.size, layout.needs_kv_cache_zeroing) == (9, 18 * page, False)
