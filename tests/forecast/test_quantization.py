"""Bits a weight: what the quantization_config of checkpoints says, by role."""

import json

import pytest

from decodebench.forecast.bound import bound
from decodebench.forecast.quantization import QuantizationError, formats
from decodebench.models.fields import ConfigError
from decodebench.models.load import load_model


def bits(config, scheme="auto"):
    return {role: f.bits for role, f in formats(config, "bfloat16", scheme).items()}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True}


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        (
            FP8,
            {
                "experts": 8 + 32 / 128**2,
                "latent": 8 + 32 / 128**2,
                "head": 16,
                "embedding": 16,
                "router": 16,
            },
        ),
        (
            {"quant_method": "fp8", "ignored_layers": ["model.layers.4.self_attn"]},
            {"attention": 16, "mlp": 8},
        ),
        ({"quant_method": "mxfp4"}, {"experts": 4.25, "attention": 16, "mlp": 16}),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128},
            {"mlp": 4 + 20 / 128, "attention": 4 + 20 / 128, "head": 16},
        ),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, {"mlp": 8, "norm": 16}),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {"mlp": 4.5}),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {"mlp": 8}),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
                "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"],
            },
            {"experts": 4 + 16 / 32, "attention": 16, "latent": 16, "shared_experts": 16, "head": 16},
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*self_attn*", "lm_head"]},
            {"experts": 4.5, "mlp": 4.5, "attention": 16, "latent": 16},
        ),
        (
            {
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
            },
            {"mlp": 8, "head": 16},
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    "backbone.layers.1.mixer.in_proj": {"quant_algo": "FP8"},
                    "backbone.layers.2.mixer.experts.0.up_proj": {"quant_algo": "NVFP4"},
                },
            },
            {"mixer": 8, "experts": 4.5, "attention": 16},
        ),
    ],
    ids=lambda x: str(x.get("quant_method", "")) if isinstance(x, dict) else "",
)
def test_checkpoints(quant, expected):
    found = bits({"quantization_config": quant})
    assert {role: found[role] for role in expected} == pytest.approx(expected)


def test_a_scheme_by_name_and_by_role():
    assert bits({}, "nvfp4")["experts"] == 4.5 and bits({}, "nvfp4")["embedding"] == 16
    assert bits({"quantization_config": FP8}, None)["mlp"] == 16
    by_role = bits({}, {"experts": "mxfp4", "attention": "fp8"})
    assert (by_role["experts"], by_role["attention"], by_role["mlp"]) == (4.25, 8, 16)
    assert bits({"text_config": {"quantization_config": FP8}})["mlp"] > 8


def test_an_unknown_method_is_refused_with_what_is_known():
    with pytest.raises(QuantizationError, match=r"'hqq9'.*quantization="):
        formats({"quantization_config": {"quant_method": "hqq9"}}, "bfloat16")


def test_a_file_beside_the_config_is_read(tmp_path):
    """ModelOpt's checkpoints keep their formats in hf_quant_config.json; config.json's own word goes first."""
    config = load_model("tiny-llama").config
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = bound(tmp_path, "h100").weight_bytes
    beside = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    for path in (tmp_path, tmp_path / "config.json"):
        assert bound(path, "h100").weight_bytes < 0.5 * plain
    assert bound(tmp_path, "h100", quantization=None).weight_bytes == plain
    for broken in ("{", "[]"):
        (tmp_path / "hf_quant_config.json").write_text(broken)
        with pytest.raises(ConfigError, match="hf_quant_config.json: not a JSON object: repair it"):
            bound(tmp_path, "h100")


@pytest.mark.parametrize(
    ("quant", "says"),
    [
        ({"quant_method": "awq", "bits": "four"}, "bits = 'four'"),
        ({"quant_method": "gptq", "group_size": "none"}, "group_size = 'none'"),
        ({"quant_method": "gptq", "bits": 99}, "99 bits"),
        ({"quant_method": "fp8", "ignored_layers": 5}, "ignored_layers = 5"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "no config_groups"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": "q"}}}},
            "num_bits = 'q'",
        ),
    ],
)
def test_a_malformed_config_is_refused_by_its_field(quant, says):
    with pytest.raises(QuantizationError, match=says):
        formats({"quantization_config": quant}, "bfloat16")
