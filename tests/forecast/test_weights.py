"""Parameters by role: equal to what vLLM's own models hold, and to published sizes."""

import pytest
from weights_witness import read_golden

from decodebench.forecast.architectures import ARCHITECTURES
from decodebench.forecast.bound import bound
from decodebench.forecast.parts import ROLES
from decodebench.forecast.weights import not_exact, parameters, weights
from decodebench.models.families import FAMILIES
from decodebench.models.fields import ConfigError
from decodebench.models.load import list_models, load_model

GOLDEN = {line["name"]: line for line in read_golden()}
#: transformers differs here: experts of every layer as wide as the dense block (Hunyuan), experts that do nothing
#: counted as experts (LongCat), the decoder alone (Whisper), biases that one of the two has
OTHERWISE = (
    "hunyuan_v1_moe",
    "longcat_flash",
    "whisper",
    "phi",
    "falcon_h1+norm",
    "ernie+range",
    "qwen3+bias",
)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_total_is_what_vllm_holds(name):
    """Rows that only pad a vocabulary to a multiple of 64 are named apart."""
    line = GOLDEN[name]
    assert sum(parameters(line["config"]).values()) == line["parameters"] - line["padding"]


@pytest.mark.parametrize("name", [n for n in GOLDEN if "+flip" not in n and not n.startswith(OTHERWISE)])
def test_transformers_counts_the_same_but_for_buffers(name):
    """Biases that only steer the choice of experts, and tables of hashes, are buffers there."""
    line = GOLDEN[name]
    if line["transformers"] is None:
        pytest.skip("transformers has no model of this config")
    ours = sum(parameters(line["config"]).values())
    assert 0 <= ours - line["transformers"] <= 2e-4 * ours


#: families whose tensors nobody has counted against the engine yet: bound reads them as the commonest ones
UNCOUNTED = {
    *("axk1", "dbrx", "gpt_bigcode", "gptj", "hyperclovax", "iquestloopcoder", "longcat_flash_ngram"),
    *("nemotron-nas", "PanguProMoE", "step1", "step3_text", "step3p5", "telechat", "bailing_hybrid"),
    *("bailing_hybrid_v3", "bailing_moe_linear", "bailing_moe_v3", "deepseek_v41_text", "dots3_note"),
    *("glm5_next_text", "hrm_text", "hy_v4", "inkling_text", "k2_horizon", "minimax_m3_text"),
    "qwen4_exp_text",
}


def kind_of(config):
    """The model_type of a config's language model."""
    for name in ("text_config", "thinker_config"):
        if name in config:
            return kind_of(config[name])
    return config.get("model_type")


def test_every_family_has_a_line_and_a_witness():
    assert set(ARCHITECTURES) == set(FAMILIES) - UNCOUNTED
    witnessed = {kind_of(line["config"]) for line in GOLDEN.values()}
    unknown_to_the_engine = {
        "mimo",
        "mimo_v2",
        "internlm3",
        "kimi_k2",
    }  # built under another name, or by their own code
    assert set(ARCHITECTURES) - witnessed <= unknown_to_the_engine


def test_a_family_without_a_line_says_that_its_weights_are_an_estimate():
    said = not_exact(
        load_model(load_model("tiny-llama").config | {"model_type": "made_up", "architectures": ["X"]})
    )
    assert "made_up" in said and "estimate" in said
    assert [name for name in list_models() if not_exact(load_model(name))] == []
    config = load_model("tiny-llama").config | {"model_type": "step1"}
    found = bound(config, "h200")
    assert "estimate: of step1" in str(found) and found.to_dict()["weights_note"] == found.weights_note


@pytest.mark.parametrize(
    ("model", "published"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("gemma-3-1b", 999_885_952),
        ("gemma-2-2b", 2_614_341_888),
        ("lfm2-1.2b", 1_170_340_608),
        ("gpt-oss-20b", 20_914_757_184),
        ("jamba-v0.1", 51_570_323_328),
        ("mamba2-2.7b", 2_702_599_680),
        ("granite-4.0-h-tiny", 6_939_037_248),
        ("deepseek-v3", 671_026_419_200),
        # vLLM holds a bias of zeros for the keys of 96 attentions, which the checkpoint leaves out
        ("whisper-large-v3", 1_543_490_560 + 96 * 1280),
    ],
)
def test_published_sizes(model, published):
    assert sum(parameters(model).values()) == published


def test_mamba_130m_with_the_published_24_layers():
    """data/models holds transformers' default of 32, which the goldens of its layout were made with."""
    config = load_model("mamba-130m").config | {"num_hidden_layers": 24}
    assert sum(parameters(config).values()) == 129_135_360


@pytest.mark.parametrize("model", list_models())
def test_every_known_model_is_counted_by_role(model):
    found = parameters(model)
    assert set(found) <= set(ROLES) and {"embedding", "norm"} <= set(found)
    assert all(count > 0 for count in found.values())


def test_roles_of_a_mixture_of_experts():
    parts = {part.role: part for part in weights("deepseek-v3")}
    assert (parts["experts"].experts, parts["experts"].top_k, parts["experts"].layers) == (256, 8, 58)
    assert parts["experts"].params == 58 * 256 * 3 * 7168 * 2048
    assert parts["mlp"].params == 3 * 3 * 7168 * 18432
    assert parts["shared_experts"].params == 58 * 3 * 7168 * 2048


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size"])
def test_a_config_without_a_size_is_refused_by_its_name(field):
    config = {k: v for k, v in load_model("tiny-llama").config.items() if k != field}
    with pytest.raises(ConfigError, match=field):
        parameters(config)


def test_tensor_parallel_ranks_repeat_what_they_cannot_divide():
    kv = next(p for p in weights("llama-3.1-8b") if p.shards == 8)
    assert kv.per_rank(4) == kv.params / 4
    assert kv.per_rank(16) == kv.params / 8, "eight KV heads on sixteen ranks: each lies twice"
    norm = next(p for p in weights("llama-3.1-8b") if p.role == "norm")
    assert norm.per_rank(8) == norm.params


@pytest.mark.parametrize("value", ["many", [], {}, 0, -1, 2.5, True, None])
@pytest.mark.parametrize(
    "field", ["vocab_size", "intermediate_size", "n_routed_experts", "moe_intermediate_size", "q_lora_rank"]
)
def test_a_bad_size_is_refused_or_read_but_never_a_crash(field, value):
    """In one line that names the field; zero and null say of some that there is none."""
    config = load_model("deepseek-v3").config | {field: value}
    try:
        assert sum(parameters(config).values()) > 0
    except ConfigError as error:
        assert "\n" not in str(error)
