"""Layouts that people published or that vLLM's own code gives, for families and cards that were once got wrong."""

import json
import random

import pytest

from decodebench.errors import DecodebenchError
from decodebench.layout.compare import compare_rows
from decodebench.layout.dump import case
from decodebench.layout.plan import layout_for, plan, prepare
from decodebench.models.load import load_model
from decodebench.models.options import CacheOptions
from decodebench.study.grid import Case
from decodebench.study.plans import layout_stage

ONE = {"num_hidden_layers": 1, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}
LATENT = ONE | {"num_attention_heads": 64, "hidden_size": 4096, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
GLM = LATENT | {"model_type": "glm_moe_dsa", "index_n_heads": 32, "index_head_dim": 128}


@pytest.mark.parametrize(
    ("config", "page"),
    [
        (
            {
                "model_type": "step3p5",
                "hidden_size": 4096,
                "num_attention_heads": 64,
                "num_attention_groups": 8,
            }
            | {"head_dim": 128},
            65_536,
        ),
        (
            {"model_type": "chatglm", "num_layers": 1, "num_attention_heads": 32, "kv_channels": 128}
            | {"multi_query_attention": True, "multi_query_group_num": 2},
            16_384,
        ),
    ],
)
def test_kv_heads_in_any_spelling(config, page):
    (group,) = prepare(ONE | config).groups
    assert group.bytes_per_block == page


@pytest.mark.parametrize(
    "spelling",
    ["n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups"],
)
def test_an_unknown_family_has_them_in_any_spelling_too(spelling):
    config = ONE | {"model_type": "brand_new", "hidden_size": 4096, "num_attention_heads": 32, spelling: 4}
    assert load_model(config).layers[0].num_kv_heads == 4


def test_nemotron_nas_has_a_layer_where_a_block_attends():
    blocks = [
        {"attention": {"n_heads_in_group": 8}},
        {"attention": {"no_op": True, "n_heads_in_group": None}},
    ]
    config = ONE | {"model_type": "nemotron-nas", "num_hidden_layers": 2, "hidden_size": 4096}
    config |= {"num_attention_heads": 32, "num_key_value_heads": None, "block_configs": blocks}
    assert [layer.num_kv_heads for layer in load_model(config).layers] == [4]


def test_qwen_flash_next():
    config = ONE | {
        "model_type": "qwen4_exp_text",
        "num_hidden_layers": 4,
        "hidden_size": 3072,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "mamba_ssm_dtype": "float32",
        "indexer_n_heads": 4,
        "indexer_head_dim": 128,
        "indexer_compress_ratio": 4,
    }
    grouped = prepare(config, num_speculative_tokens=2)
    r = grouped.resolved
    assert r.block_size == 1600
    assert f"{(r.mamba_page_size_padded - r.mamba_page_size) / r.mamba_page_size:.2%}" == "0.88%"
    kinds = [group.kv_cache_spec.kind for group in grouped.groups]
    assert kinds.count("mamba") == 3 and kinds.count("circular_buffer") == 1


def test_glm_flash_as_published():
    text = {
        "model_type": "glm5_next_text",
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "index_kpool": 4,
    }
    grouped = prepare(
        {"model_type": "glm5_next", "torch_dtype": "bfloat16", "text_config": text},
        tensor_parallel_size=8,
        enable_prefix_caching=False,
    )
    r = grouped.resolved
    assert r.block_size == 640
    assert f"{(r.mamba_page_size_padded - r.mamba_page_size) / r.mamba_page_size:.2%}" == "20.75%"
    assert [len(g.layer_names) for g in grouped.groups if g.kv_cache_spec.holds_state] == [9, 9, 8, 8]
    layout = layout_for(grouped, int(28.73 * 2**30))
    # the log has 4,145: its blocks lie 7,441,280 bytes apart, ours are rounded up for the index kernel's pages
    assert sum(spec.page_size_bytes for g in grouped.groups[4:5] for spec in g.layer_specs) == 7_441_280
    assert layout.num_blocks == 4130


def test_ling_is_linear_but_for_the_last_of_a_group():
    config = LATENT | {"model_type": "bailing_hybrid", "num_hidden_layers": 8, "layer_group_size": 8}
    specs = list(load_model(config | {"num_attention_heads": 32}).layer_specs().values())
    assert [spec.shapes for spec in specs[:7]] == [((32, 128, 128),)] * 7
    assert specs[0].dtypes == ("bfloat16",) and specs[7].head_size == 576


@pytest.mark.parametrize(
    ("device", "dtype", "blocks"),
    [
        ("h100", "auto", 58_254),
        ("h200", "auto", 58_254),
        ("a100", "auto", 58_254),
        ("sm120", "auto", 58_254),
        ("b200", "auto", 29_127),
        ("h100", "fp8", 29_127),
    ],
)
def test_dense_latents_by_card(device, dtype, blocks):
    config = LATENT | {"model_type": "deepseek_v3"}
    assert plan(config, memory="1GiB", device=device, kv_cache_dtype=dtype).num_blocks == blocks


def test_sparse_fp8_rows_are_packed_but_on_a_b200():
    tokens = {d: plan(GLM, memory="1GiB", device=d, kv_cache_dtype="fp8") for d in ("h100", "sm120", "b200")}
    assert [64 * layout.num_blocks for layout in tokens.values()] == [1_362_560, 1_362_560, 1_516_544]


def test_a_draft_layer_of_sparse_attention_has_its_index_keys():
    (group,) = prepare(GLM, draft_layers=1, num_speculative_tokens=1).groups
    assert len(group.layer_names) == 4
    assert group.bytes_per_block == 2 * 64 * (576 * 2 + 132)


def test_modelopt_leaves_its_cache_dtype_beside_the_config(tmp_path):
    config = ONE | {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    quant = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quant))
    for given in (tmp_path, tmp_path / "config.json"):
        assert load_model(given).kv_cache_dtype == "fp8_e4m3"
    four = {"quantization_config": {"kv_cache_scheme": {"num_bits": 4}}}
    assert load_model(config | four).kv_cache_dtype == "auto"


def test_minimax_keeps_index_keys_on_every_rank():
    sparse = {"use_sparse_attention": True, "sparse_index_dim": 128, "sparse_attention_freq": [0, 1]}
    config = ONE | {"model_type": "minimax_m3_text", "num_hidden_layers": 2, "num_attention_heads": 64}
    config |= {"hidden_size": 4096, "num_key_value_heads": 4, "sparse_attention_config": sparse}
    (group,) = prepare(config, tensor_parallel_size=4).groups
    assert group.block_size == 128 and len(group.layer_names) == 3
    assert group.bytes_per_block == 2 * 128 * 512 + 128 * 256


# -- nothing is both wrong and silent --------------------------------------------------------------

FIELDS = {
    "num_hidden_layers": [1, 4],
    "num_attention_heads": [8, 32],
    "num_key_value_heads": [2, None, 3],
    "num_attention_groups": [4],
    "head_dim": [64, None],
    "hidden_size": [256],
    "kv_lora_rank": [64, None],
    "sliding_window": [128, None],
    "layer_types": [["full_attention"] * 4, ["sliding_attention", "full_attention"] * 2, ["odd"]],
    "index_head_dim": [128],
    "block_configs": [[{"attention": {"no_op": True}}]],
    "compress_ratios": [[4, 128]],
    "loop_num": [2],
    "encoder_layers": [6],
    "ssm_state_size": [16],
}
TELLING = {"index_head_dim", "block_configs", "compress_ratios", "loop_num", "encoder_layers"}


def test_a_generic_reading_is_said_everywhere():
    """500 mutated configs of unknown families: refused in one line, or named generic wherever a figure stands."""
    chance, read = random.Random(0), 0
    for number in range(500):
        config = {
            "model_type": f"unknown_{number}",
            "torch_dtype": "bfloat16",
            "max_position_embeddings": 2048,
        }
        config |= {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 256}
        config |= {n: chance.choice(v) for n, v in FIELDS.items() if chance.random() < 0.3}
        try:
            layout = plan(config, memory="1GiB")
        except DecodebenchError as error:
            assert "\n" not in str(error)
            continue
        read += 1
        reading = layout.model.reading
        assert "read generically" in reading
        assert all(name in reading for name in TELLING & config.keys())
        assert reading in str(layout) and reading in case({}, prepare(config))["reading"]["note"]
        if number % 25 == 0:
            assert compare_rows(config, "1GiB", ["hybrid"])[0]["reading"] == reading
    assert read > 100


def test_sweep_rows_say_so_too(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "brand_new", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 256}
        )
    )
    case_ = Case(str(tmp_path / "config.json"), context="64")
    assert "read generically" in layout_stage(case_, {})["reading"]


def test_devices_are_known_by_name():
    with pytest.raises(DecodebenchError, match="device = 'k80': known are a100"):
        CacheOptions(device="k80")
    assert CacheOptions(device="a100").max_num_batched_tokens == 2048
