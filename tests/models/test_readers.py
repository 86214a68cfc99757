"""config.json → layers: families, defaults, multimodal and unknown configs, and bad ones refused by name."""

import json

import pytest

from decodebench.errors import DecodebenchError
from decodebench.forecast.weights import fields_of, tensors
from decodebench.models.families import FAMILIES
from decodebench.models.fields import ConfigError
from decodebench.models.load import DATA, list_models, load_model
from decodebench.models.options import CacheOptions, OptionError
from decodebench.models.specs import FullAttentionSpec, SlidingWindowSpec

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "torch_dtype": "float16",
}


def windows(model) -> list:
    return [getattr(layer, "sliding_window", None) for layer in model.layers]


def test_a_plain_model():
    model = load_model(TINY)
    assert (model.model_type, model.dtype, model.max_model_len, model.generic) == (
        "llama",
        "float16",
        1024,
        False,
    )
    specs = model.layer_specs(CacheOptions(tensor_parallel_size=2))
    assert list(specs) == [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    expected = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="float16")
    assert set(specs.values()) == {expected}
    assert model.query_heads("model.layers.0.self_attn.attn", tp=2) == 4


def test_known_models_say_where_their_values_come_from():
    """And hold no field that shapes neither a cache nor weights."""
    assert len(list_models()) >= 29
    for name in list_models():
        model = load_model(name)
        assert model.name == name and model.source != name and not model.generic
        config = json.loads((DATA / name / "config.json").read_text())
        f, has = fields_of(model)
        tensors(model, f, has)
        aside = {
            "_source",
            "architectures",
            "model_type",
            "torch_dtype",
            "index_topk",
        }  # the last: what is read
        used = {*model.fields_used, *f.used, *aside}
        assert not set(config) - used, f"{name}: fields that shape neither a cache nor weights"


def test_the_same_from_a_path_a_folder_and_a_dictionary(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    layers = load_model(TINY).layers
    assert load_model(tmp_path).layers == load_model(str(tmp_path / "config.json")).layers == layers
    model = load_model(TINY)
    assert load_model(model) is model


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # a window without layer types holds for all layers; null and zero say there is none
        ({"model_type": "mistral", "sliding_window": 32}, [32] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "mistral"}, [4096] * 4),
        ({"model_type": "phi3", "sliding_window": 0}, [None] * 4),
        # Qwen's window has a switch
        ({"model_type": "qwen3", "sliding_window": 32, "use_sliding_window": False}, [None] * 4),
        (
            {"model_type": "qwen3", "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0},
            [32] * 4,
        ),
        # patterns of the config classes
        ({"model_type": "gemma2", "sliding_window": 32}, [32, None, 32, None]),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"] * 4}, [128, None, 128, None]),
        ({"model_type": "cohere2", "sliding_window": 32}, [33, 33, 33, None]),
        ({"model_type": "cohere2", "sliding_window": 32, "sliding_window_pattern": 2}, [33, None, 33, None]),
        (
            {"model_type": "exaone4", "sliding_window": 32, "sliding_window_pattern": "LLG"},
            [32, 32, None, 32],
        ),
        ({"model_type": "exaone4", "sliding_window": None}, [None] * 4),
        ({"model_type": "olmo3"}, [4096, 4096, 4096, None]),
        (
            {"model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 2},
            [32, None, 32, None],
        ),
        # windows to both sides: half on each
        ({"model_type": "gemma3_text", "sliding_window": 32, "use_bidirectional_attention": True}, [17] * 4),
        (
            {
                "model_type": "olmo3",
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [8, None, 8, None],
        ),
    ],
)
def test_windows(changes, expected):
    assert windows(load_model(TINY | changes)) == expected


def test_layers_that_share_a_cache_have_none_of_their_own():
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = load_model(TINY | {"model_type": "gemma3n_text", "layer_types": kinds, "num_kv_shared_layers": 2})
    assert model.layer_names == ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
    assert model.shared_layers == {
        "model.layers.2.self_attn.attn": "model.layers.0.self_attn.attn",
        "model.layers.3.self_attn.attn": "model.layers.1.self_attn.attn",
    }
    assert model.query_heads("model.layers.3.self_attn.attn") == 8


def test_gemma4_has_two_kinds_of_heads():
    model = load_model(
        TINY
        | {
            "model_type": "gemma4_text",
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "layer_types": ["sliding_attention"] * 6,
        }
    )
    shapes = [(layer.num_kv_heads, layer.head_size, layer.sliding_window) for layer in model.layers]
    # the last layer attends to everything, whatever its type says
    assert shapes == [(2, 16, 512)] * 5 + [(1, 32, None)]


def test_multimodal_configs_have_a_text_config():
    text = {k: v for k, v in TINY.items() if k != "torch_dtype"}
    model = load_model(
        {"model_type": "llava", "torch_dtype": "bfloat16", "text_config": text, "vision_config": {}}
    )
    assert model.layer_names[0] == "language_model.model.layers.0.self_attn.attn"
    assert (model.dtype, model.model_type, model.generic) == ("bfloat16", "llama", False)
    # the text config's type may be left out where the outer one says it
    text = text | {"model_type": None, "sliding_window": 32}
    assert windows(load_model({"model_type": "gemma3", "text_config": text}))[:2] == [32, 32]


@pytest.mark.parametrize(
    ("changes", "length", "default"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 4096, 4096),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 1024, 1024),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 1024, 1024),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 256}, 1024, 256),
        ({"model_max_length": 4096}, 4096, 4096),
        ({"seq_length": 512}, 512, 512),
    ],
)
def test_lengths(changes, length, default):
    model = load_model(TINY | changes)
    assert model.max_model_len == length
    assert model.resolve(CacheOptions()).max_model_len == default


def test_a_config_without_a_length():
    model = load_model("mamba-130m")
    assert model.max_model_len == 2048
    assert model.resolve(CacheOptions(max_model_len=100_000)).max_model_len == 100_000


def test_checkpoints_that_ask_for_a_cache_dtype():
    quant = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    model = load_model(TINY | {"quantization_config": quant})
    assert model.resolve(CacheOptions()).value_dtype == "float8_e4m3fn"
    assert model.resolve(CacheOptions(kv_cache_dtype="bfloat16")).value_dtype == "bfloat16"


def test_packed_formats():
    """Bytes of a head and token: nvfp4 (4 bits and a scale for 16), scales per head, MLA with scales."""
    model = load_model(TINY | {"head_dim": 64})

    def entry(dtype):
        options = CacheOptions(kv_cache_dtype=dtype, device="b200")
        return next(iter(model.layer_specs(options).values())).entry_bytes

    assert entry("nvfp4") == 2 * (32 + 4)
    assert entry("fp8_per_token_head") == 2 * (64 + 4)
    assert entry("int4_per_token_head") == 2 * (32 + 4)
    spec = next(
        s
        for s in load_model("deepseek-v3.2").layer_specs(CacheOptions(kv_cache_dtype="fp8_ds_mla")).values()
        if s.packed == "fp8_ds_mla"
    )
    assert spec.page_size_bytes == 64 * 656 and spec.parts()[0].zeros_only


def test_indexers_may_be_shared():
    base = {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "index_topk": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "hidden_size": 64,
    }

    def indexers(**fields):
        names = load_model(base | fields).layer_names
        return [int(name.split(".")[2]) for name in names if "indexer" in name]

    assert indexers() == [0, 1, 2, 3, 4, 5]
    assert indexers(index_topk_freq=2, index_skip_topk_offset=2) == [0, 1, 3, 5]
    assert indexers(index_topk_pattern="FSFSSS") == [0, 2]


def test_delta_attention_is_told_from_delta_nets():
    kimi, qwen = load_model("kimi-linear-48b-a3b"), load_model("qwen3-next-80b-a3b")
    assert kimi.layers[0].mixer == "kda" and qwen.layers[0].mixer == "gdn"
    rank = qwen.layers[0].per_rank(2)
    assert (rank.num_heads, rank.num_key_heads, rank.head_dim, rank.state_size) == (16, 8, 128, 128)


def test_a_single_group_of_states_is_on_every_rank():
    """Mamba-2's B and C: divided between ranks, or one group repeated; anything else no engine loads."""
    one = load_model("tiny-granite-hybrid").layer_specs(CacheOptions(tensor_parallel_size=4))
    # (8 * 32 inner + 2 * 4 groups * 16 state) / 4 channels
    assert one["model.layers.0.mixer"].shapes == ((3, 96), (2, 32, 16))
    eight = load_model("nemotron-h-8b")
    shape = eight.layer_specs(CacheOptions(tensor_parallel_size=8))[eight.layer_names[0]].shapes
    assert shape == ((3, 1280), (16, 64, 128))
    with pytest.raises(OptionError, match="single group"):
        eight.layer_specs(CacheOptions(tensor_parallel_size=16))


def test_a_granite_hybrid_without_states():
    model = load_model(
        {
            "model_type": "granitemoehybrid",
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "layer_types": ["attention", "attention"],
        }
    )
    assert not model.has_states and model.resolve(CacheOptions()).block_size == 16


# -- configs that no reader knows ------------------------------------------------------------------


def test_an_unknown_family_is_read_by_its_fields():
    model = load_model(
        TINY
        | {
            "model_type": "brand_new",
            "num_hidden_layers": 4,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention", "linear_attention", "mamba"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
        }
    )
    assert model.generic
    assert [layer.mixer for layer in model.layers] == ["attention", "attention", "gdn", "gdn"]
    plain = load_model(TINY | {"model_type": "brand_new"})
    assert plain.generic and plain.layer_specs() == load_model(TINY).layer_specs()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"layer_types": ["full_attention", "holographic", "full_attention", "full_attention"]},
            "holographic",
        ),
        ({"mamba_d_state": 16}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_num_value_heads"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"kv_lora_rank": 64, "qk_rope_head_dim": 16}, "kv_lora_rank = 64"),
        ({"num_key_value_heads": None}, "num_key_value_heads = None"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_way_out(changes, says):
    with pytest.raises(ConfigError, match=says) as error:
        load_model(TINY | {"model_type": "brand_new"} | changes)
    assert "brand_new" in str(error.value)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads = 0: it must be positive"),
        ({"num_attention_heads": None}, "no field 'num_attention_heads'"),
        ({"num_key_value_heads": -2}, "num_key_value_heads = -2"),
        ({"num_key_value_heads": 3}, "does not divide"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: at most"),
        ({"num_hidden_layers": 2.5}, "an integer is expected"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers = 'many'"),
        ({"num_hidden_layers": True}, "an integer"),
        ({"hidden_size": 10**30}, "hidden_size"),
        ({"head_dim": -1}, "head_dim = -1"),
        ({"model_type": "mistral", "sliding_window": -5}, "sliding_window = -5"),
        ({"model_type": "gemma2", "sliding_window": "wide"}, "sliding_window"),
        ({"max_position_embeddings": 0}, "max_position_embeddings = 0"),
        ({"layer_types": ["full_attention"]}, "there are 4 layers"),
        ({"layer_types": "full"}, "a list is expected"),
        ({"layer_types": [["full_attention"]] * 4}, "known are"),
        ({"model_type": None}, "model_type"),
        ({"model_type": 7}, "model_type"),
        ({"torch_dtype": "int3"}, "torch_dtype = 'int3'"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            "not served",
        ),
        ({"model_type": "jamba", "attn_layer_period": 0}, "attn_layer_period = 0"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*X"}, "'X' is none of"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "----"}, "no layer of this model stores"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 4}, "one must have a cache"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 0}, "kv_lora_rank = 0"),
        ({"model_type": "deepseek_v4"}, "compress_ratios"),
        ({"model_type": "whisper"}, "decoder_attention_heads"),
    ],
)
def test_fields_that_no_cache_has(changes, says):
    with pytest.raises(ConfigError, match=says):
        load_model(TINY | changes)


def test_files_that_are_no_config(tmp_path):
    def refused(content: bytes | None, says: str, name: str = "config.json"):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=says):
            load_model(path)

    refused(b"{not json", "not JSON")
    refused(b"[1, 2]", "list instead of an object")
    refused(b"\xff\xfe\x00", "cannot be read as text")
    refused(b"[" * 100_000, "not JSON")
    refused(b"", "not JSON")
    refused(None, "neither a file", "nothing.json")
    (tmp_path / "empty").mkdir()
    refused(None, "a directory without", "empty")
    with pytest.raises(ConfigError, match="did you mean jamba-v0.1"):
        load_model("jamba-v0.2")


def test_nothing_in_a_config_is_executed(tmp_path):
    marker = tmp_path / "touched"
    code = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    load_model(TINY | {"auto_map": {"AutoConfig": code}, "model_class": code, "torch_dtype": "bfloat16"})
    assert not marker.exists()


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_family_refuses_an_empty_config_by_name(model_type):
    with pytest.raises(ConfigError, match="no field"):
        load_model({"model_type": model_type})


@pytest.mark.parametrize("name", list_models())
def test_nonsense_in_any_field_is_named_or_harmless(name):
    """A known config with one field after another replaced: no reader answers
    with anything but a named error.
    """
    config = json.loads((DATA / name / "config.json").read_text())
    for field in (
        *config,
        "quantization_config",
        "layers_block_type",
        "rope_scaling",
        "sliding_window",
        "text_config",
    ):
        for value in (0, -1, 3, 2.5, "x", [], ["x"], [[]], {}, {"x": {}}, None, True, 10**12):
            try:
                load_model(config | {field: value}).layer_specs(CacheOptions(max_model_len=None))
            except DecodebenchError as error:
                assert str(error) and "\n" not in str(error)


def test_window_of_layers():
    specs = load_model("gemma-3-1b").layer_specs()
    assert {type(spec) for spec in specs.values()} == {FullAttentionSpec, SlidingWindowSpec}
