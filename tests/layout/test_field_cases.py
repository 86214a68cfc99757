"""The second round of field cases, entry by entry: the ones that no other test holds, and where the others are.

A to L: ``tests/models/test_field_cases.py``; whole families and their spellings: ``tests/models/test_registry.py``;
drafters: ``test_drafters.py``; pipelines and ranks: ``test_stages.py``; cards:
``tests/forecast/test_card_memory.py``; cache dtypes: ``test_cache_dtypes.py``; generic readings:
``tests/show/test_guesses.py``.
"""

import pytest

from decodebench.errors import DecodebenchError
from decodebench.layout.capacity import ceilings
from decodebench.layout.plan import plan, prepare
from decodebench.models.families import FAMILIES
from decodebench.models.options import KV_CACHE_DTYPES

QWEN_27B = {
    "model_type": "qwen3_5_text",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 262144,
    "mamba_ssm_dtype": "float32",
}
DFLASH_2 = {
    "model_type": "qwen3",
    "architectures": ["DFlash2DraftModel"],
    "num_hidden_layers": 5,
    "hidden_size": 5120,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
}


def test_a_drafter_of_another_shape_as_published():
    """2,082 blocks in 16.37 GiB, 739,544 tokens, 2.82x: exact where 4,096 tokens are batched, twice in flight."""
    options = {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8", "max_num_batched_tokens": 4096}
    options |= {"draft_config": DFLASH_2, "num_speculative_tokens": 7, "engine": "vllm-0.32"}
    least, most = (plan(QWEN_27B, memory=int(gib * 2**30), **options) for gib in (16.365, 16.375))
    assert least.num_blocks <= 2082 <= most.num_blocks
    found = least.with_num_blocks(2082).capacity()
    assert (found.tokens, f"{found.concurrency:.2f}") == (739_544, "2.82")


#: families that people run and that were refused or guessed, by their model types
FAMILY_ENTRIES = [
    *("step3p5", "chatglm", "nemotron-nas", "qwen4_exp_text", "bailing_hybrid", "deepseek_v41_text"),
    *(
        "minimax_m3_text",
        "iquestloopcoder",
        "dots3_note",
        "hy_v4",
        "glm5_next_text",
        "inkling_text",
        "exaone",
    ),
    *("gptj", "gpt_bigcode", "dbrx", "bailing_moe_v3", "deepseek_v4", "step3_text"),
]


@pytest.mark.parametrize("name", FAMILY_ENTRIES)
def test_a_reader_knows_the_family(name):
    assert name in FAMILIES


@pytest.mark.parametrize(
    "dtype",
    [
        *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
        *("ultraquant_4bit", "nvfp4_4over6", "fp8_inc"),
    ],
)
def test_a_cache_dtype_is_known(dtype):
    assert dtype in KV_CACHE_DTYPES


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "voxtral_realtime"},
        {"model_type": "voxtral", "architectures": ["VoxtralRealtimeGeneration"]},
        {"model_type": "brand_new_audio", "audio_config": {"block_pool_size": 4}},
        {"model_type": "voxtral", "audio_config": {"is_causal": True}},
    ],
)
def test_an_encoder_that_keeps_a_cache_is_never_left_out_in_silence(config):
    text = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(DecodebenchError, match="audio encoder keeps caches of its own") as refused:
        prepare(config | {"text_config": text})
    assert "\n" not in str(refused.value)


def test_labels_and_ceilings_of_a_hybrid_are_told():
    """Sequences that have a state, one-token requests, the third label, the grain in which prefixes are reused."""
    layout = plan(QWEN_27B, memory="18.61GiB", engine="vllm-0.32", max_model_len=262144)
    bounds, shown = ceilings(layout), str(layout)
    assert bounds.state_sequences == layout.num_blocks == 388
    assert bounds.tokens_blocks == 388 * 784 and bounds.reuse_tokens == 784
    assert bounds.short_requests == 387 // sum(layout.capacity(1).blocks_per_request)
    assert f"{388 * 784:,} (blocks × block size: NIM, cache_config_info)" in shown
    assert "prefixes are reused in multiples of 784 tokens" in shown
    assert f"{layout.capacity().tokens:,} (vLLM since 0.20.1)" in shown


@pytest.mark.parametrize(("device", "batched"), [("h100", 8192), ("a100", 2048)])
def test_assumed_tokens_in_flight_are_told(device, batched):
    shown = str(plan("gemma-3-1b", memory="8GiB", device=device))
    assert f"kernels and defaults of {device}; {batched:,} batched tokens, {2 * batched:,} in flight" in shown


def test_a_benchmark_that_repeats_its_seed_is_warned_of():
    shown = str(plan("gemma-3-1b", memory="8GiB"))
    assert (
        "a benchmark that repeats its prompts (its seed)" in shown and "--no-enable-prefix-caching" in shown
    )
    assert "its seed" not in str(plan("gemma-3-1b", memory="8GiB", enable_prefix_caching=False))
