"""Models with a drafter, small: name -> (target's config, what speculates, drafter's config or None)."""

import json
from pathlib import Path

from configs import CONFIGS, DS, KV, MOE, B, c

LLAMA = c("LlamaForCausalLM", "llama", KV, num_hidden_layers=4)
QWEN = c("Qwen3ForCausalLM", "qwen3", KV, head_dim=128)
DRAFT = dict(B, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=128)
EAGLE = dict(DRAFT, architectures=["LlamaForCausalLM"], model_type="llama")
EAGLE_3 = dict(
    DRAFT,
    architectures=["LlamaForCausalLMEagle3"],
    model_type="llama",
    num_hidden_layers=1,
    draft_vocab_size=500,
)
DFLASH = dict(
    DRAFT,
    architectures=["DFlashDraftModel"],
    model_type="qwen3",
    block_size=8,
    dflash_config={"mask_token_id": 5, "target_layer_ids": [0, 2]},
)
WINDOWS = {
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 256,
    "use_sliding_window": True,
    "max_window_layers": 0,
}
MIXED = WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]}
DFLASH_2 = DFLASH | {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {
        "mask_token_id": 5,
        "target_layer_ids": [0, 2],
        "conv_kernel_size": 4,
        "conv_group_size": 64,
        "selector_rank": 16,
        "selector_top_k": 8,
    },
}
DELTA = dict(
    head_dim=256,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_conv_kernel_dim=4,
    full_attention_interval=4,
    num_hidden_layers=8,
    decoder_sparse_step=1,
    shared_expert_intermediate_size=128,
)
QWEN_NEXT = c(
    "Qwen3NextForCausalLM", "qwen3_next", KV, MOE, DELTA, num_nextn_predict_layers=1, mlp_only_layers=[]
)
QWEN_35 = dict(
    architectures=["Qwen3_5ForConditionalGeneration"],
    model_type="qwen3_5",
    torch_dtype="bfloat16",
    text_config=dict(
        B,
        **KV,
        **{
            k: v
            for k, v in DELTA.items()
            if k not in ("decoder_sparse_step", "shared_expert_intermediate_size")
        },
        model_type="qwen3_5_text",
        mtp_num_hidden_layers=1,
        mamba_ssm_dtype="float32",
    ),
)
V3 = c("DeepseekV3ForCausalLM", "deepseek_v3", DS, num_nextn_predict_layers=1)
V32 = c(
    "DeepseekV32ForCausalLM",
    "deepseek_v32",
    DS,
    num_nextn_predict_layers=1,
    index_n_heads=8,
    index_head_dim=128,
    index_topk=512,
)
GEMMA = c(
    "Gemma3ForCausalLM",
    "gemma3_text",
    KV,
    head_dim=128,
    sliding_window=512,
    num_hidden_layers=6,
    query_pre_attn_scalar=128,
    layer_types=["sliding_attention"] * 5 + ["full_attention"],
)
OSS = c(
    "GptOssForCausalLM",
    "gpt_oss",
    KV,
    head_dim=64,
    sliding_window=128,
    num_local_experts=4,
    num_experts_per_tok=2,
    swiglu_limit=7.0,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
MTP = {"method": "mtp"}


def own(name, **fields):
    """A model of configs.py with heads of its own that predict further tokens."""
    return json.loads(json.dumps(CONFIGS[name])) | fields


DRAFTS = {
    "llama eagle": (LLAMA, {"method": "eagle", "num_speculative_tokens": 3}, EAGLE),
    "llama eagle3": (LLAMA, {"method": "eagle3", "num_speculative_tokens": 3}, EAGLE_3),
    "llama draft model": (LLAMA, {"method": "draft_model", "num_speculative_tokens": 4}, dict(EAGLE)),
    "llama dflash": (LLAMA, {"method": "dflash", "num_speculative_tokens": 7}, DFLASH),
    "llama dflash windows": (LLAMA, {"method": "dflash", "num_speculative_tokens": 7}, DFLASH | WINDOWS),
    "llama dflash mixed": (LLAMA, {"method": "dflash", "num_speculative_tokens": 7}, DFLASH | MIXED),
    "llama dflash2": (LLAMA, {"method": "dflash", "num_speculative_tokens": 7}, DFLASH_2 | WINDOWS),
    "qwen3 eagle3": (
        QWEN,
        {"method": "eagle3", "num_speculative_tokens": 3},
        dict(EAGLE_3, architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3"),
    ),
    "gemma3 eagle3": (GEMMA, {"method": "eagle3", "num_speculative_tokens": 3}, EAGLE_3),
    "gpt-oss eagle3": (OSS, {"method": "eagle3", "num_speculative_tokens": 3}, EAGLE_3),
    "deepseek-v3 eagle3": (V3, {"method": "eagle3", "num_speculative_tokens": 3}, EAGLE_3),
    "qwen3.5 dflash windows": (QWEN_35, {"method": "dflash", "num_speculative_tokens": 7}, DFLASH | WINDOWS),
    "qwen3.5 dflash": (QWEN_35, {"method": "dflash", "num_speculative_tokens": 7}, DFLASH),
    "qwen3.5 eagle3": (QWEN_35, {"method": "eagle3", "num_speculative_tokens": 3}, EAGLE_3),
    "deepseek-v3 mtp": (V3, MTP | {"num_speculative_tokens": 1}, None),
    "deepseek-v3.2 mtp": (V32, MTP | {"num_speculative_tokens": 3}, None),
    "qwen3-next mtp": (QWEN_NEXT, MTP | {"num_speculative_tokens": 2}, None),
    "qwen3.5 mtp": (QWEN_35, MTP | {"num_speculative_tokens": 2}, None),
    "mimo mtp": (
        c("MiMoForCausalLM", "mimo", KV, num_nextn_predict_layers=1),
        MTP | {"num_speculative_tokens": 1},
        None,
    ),
    "glm4-moe mtp": (
        c("Glm4MoeForCausalLM", "glm4_moe", KV, MOE, head_dim=128, n_routed_experts=4, n_shared_experts=1)
        | {"num_nextn_predict_layers": 1, "use_qk_norm": True, "partial_rotary_factor": 0.5},
        MTP | {"num_speculative_tokens": 1},
        None,
    ),
    "ernie mtp": (
        c("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", KV, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1)
        | {"moe_intermediate_size": 128, "moe_layer_start_index": 1, "moe_layer_end_index": 3}
        | {"moe_layer_interval": 1, "num_nextn_predict_layers": 1, "moe_use_aux_free": True},
        MTP | {"num_speculative_tokens": 1},
        None,
    ),
    "llama hidden states": (
        LLAMA,
        {"method": "extract_hidden_states", "num_speculative_tokens": 1},
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    ),
    "gemma3 hidden states": (
        GEMMA,
        {"method": "extract_hidden_states", "num_speculative_tokens": 1},
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]},
    ),
    "qwen3.5 hidden states": (
        QWEN_35,
        {"method": "extract_hidden_states", "num_speculative_tokens": 1},
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 7]},
    ),
    "deepseek-v3 hidden states": (
        V3,
        {"method": "extract_hidden_states", "num_speculative_tokens": 1},
        {"eagle_aux_hidden_state_layer_ids": [1, 2]},
    ),
    **{
        f"{name} mtp": (own(name, **fields), MTP | {"num_speculative_tokens": tokens}, None)
        for name, fields, tokens in (
            ("bailing_hybrid", {"num_nextn_predict_layers": 1}, 1),
            ("bailing_hybrid_v3", {"num_nextn_predict_layers": 1}, 1),
            ("pangu_ultra_moe", {"num_nextn_predict_layers": 1}, 1),
            ("qwen4_exp_text", {"mtp_num_hidden_layers": 1}, 2),
            ("deepseek_v4_layer_types", {"num_nextn_predict_layers": 1}, 1),
        )
    },
    "step3p5 mtp": (
        own("step3p5", num_nextn_predict_layers=2, partial_rotary_factors=[0.5, 1.0, 1.0, 1.0, 1.0, 1.0])
        | {
            "layer_types": ["full_attention"]
            + ["sliding_attention"] * 3
            + ["sliding_attention", "full_attention"]
        },
        MTP | {"num_speculative_tokens": 2},
        None,
    ),
    "longcat mtp": (
        own("longcat_flash_ngram", model_type="longcat_flash", architectures=["LongcatFlashForCausalLM"])
        | {"num_layers": 2, "zero_expert_num": 1, "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
        MTP | {"num_speculative_tokens": 1},
        None,
    ),
    "glm5_next mtp": (
        own("glm5_next", text_config=own("glm5_next")["text_config"] | {"num_nextn_predict_layers": 1}),
        MTP | {"num_speculative_tokens": 1},
        None,
    ),
    "glm4-moe-lite mtp": (
        c("Glm4MoeLiteForCausalLM", "glm4_moe_lite", DS, num_nextn_predict_layers=1),
        MTP | {"num_speculative_tokens": 1},
        None,
    ),
    "exaone-moe mtp": (
        c("ExaoneMoEForCausalLM", "exaone_moe", KV, MOE, head_dim=64, num_nextn_predict_layers=1)
        | {"sliding_window": 128, "sliding_window_pattern": "LLLG", "is_moe_layer": [False, True, True, True]}
        | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "scoring_func": "sigmoid"},
        MTP | {"num_speculative_tokens": 1},
        None,
    ),
    "mimo-v2 mtp": (
        c("MiMoV2FlashForCausalLM", "mimo_v2_flash", KV, head_dim=192, v_head_dim=128)
        | {
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 192,
            "swa_v_head_dim": 128,
        }
        | {"hybrid_layer_pattern": [0, 1, 1, 1], "sliding_window": 128, "sliding_window_size": 128}
        | {"moe_layer_freq": [0, 1, 1, 1], "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
        | {"topk_group": 1, "moe_intermediate_size": 128, "layernorm_epsilon": 1e-5, "attention_bias": False}
        | {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
        },
        MTP | {"num_speculative_tokens": 1},
        None,
    ),
    "nemotron-h mtp": (
        c("NemotronHForCausalLM", "nemotron_h", KV, head_dim=64, num_nextn_predict_layers=1)
        | {"hybrid_override_pattern": "M-M*M-M*", "num_hidden_layers": 8, "mtp_hybrid_override_pattern": "*E"}
        | {
            "mamba_num_heads": 16,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
        }
        | {
            "layer_norm_epsilon": 1e-5,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
        }
        | {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 128, "mlp_hidden_act": "relu2"}
        | {
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_bias": False,
        },
        MTP | {"num_speculative_tokens": 1},
        None,
    ),
}
