"""Which reader a ``model_type`` has, and the defaults that its config class would fill in.

A line a family. Defaults are those of the config classes (transformers 5) for fields that
config.json files leave out; sizes that make a model (layers, heads, width) have none here, so
that a config without them is refused rather than taken for another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from decodebench.models import attention, indexed, latent, packed, state
from decodebench.models.attention import all_or_none, alternating, as_a_whole, dense_first, every, first_of
from decodebench.models.fields import Fields
from decodebench.models.layers import Layer

Read = Callable[..., list[Layer] | tuple[list[Layer], dict[str, str]]]


@dataclass(frozen=True)
class Family:
    """How the configs of a ``model_type`` are read.

    ``read(fields, root, **arguments)`` gives the layers (and, where some share a cache, which),
    ``root`` being the path of the decoder layers. ``defaults``: fields that the config class fills
    in where config.json leaves them out or null.
    """

    read: Read
    arguments: Mapping = field(default_factory=dict)
    defaults: Mapping = field(default_factory=dict)
    root: str = "model.layers"
    #: tokens that the attention kernels work on at once
    kernel_block_size: int = 16
    #: field that names the dtype of recurrent states, and what holds where it is absent
    ssm_dtype: tuple[str, str] | None = None
    memory_order: str = "LBNHC"
    #: KV cache dtype that stands for "auto" and for the fp8 ones
    kv_cache_dtype: str = "auto"
    #: states alone: an engine reuses no prefixes unless it is told to
    attention_free: bool = False


def attending(
    max_position_embeddings: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    sliding_window: int | None = None,
    root: str = "model.layers",
    **arguments,
) -> Family:
    """A family of plain attention, by the defaults of its config class and what its reader is told."""
    defaults = {
        "max_position_embeddings": max_position_embeddings,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "sliding_window": sliding_window,
    }
    known = {name: value for name, value in defaults.items() if value is not None}
    return Family(attention.read_attention, arguments, known, root)


def full(
    max_position_embeddings: int, kv_heads: int | None = None, head_dim: int | None = None, **more
) -> Family:
    """A family whose layers are all alike, whatever ``layer_types`` says."""
    return attending(max_position_embeddings, kv_heads, head_dim, types=as_a_whole, always=True, **more)


def no_window(f: Fields, length: int) -> list[str]:
    """Every layer attends to everything, whatever ``layer_types`` says."""
    return ["full_attention"] * length


def mla(read: Read, max_position_embeddings: int, rope: int = 64, **arguments) -> Family:
    """A family with latent attention (DeepSeek's defaults, ``rope`` numbers of its row are rotary)."""
    defaults = {
        "max_position_embeddings": max_position_embeddings,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
    }
    return Family(read, arguments, defaults)


DELTA_NET = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
GRANITE_HYBRID = {
    "max_position_embeddings": 2048,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
}
MAMBA_1 = {"expand": 2, "conv_kernel": 4, "state_size": 16}
ZAMBA_2 = {
    "max_position_embeddings": 4096,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "n_mamba_heads": 8,
    "num_mem_blocks": 1,
    "hybrid_layer_ids": [6, 12, 18, 24, 30, 36, 42, 47, 51],
}
NEMOTRON_H = {
    "max_position_embeddings": 4096,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "conv_kernel": 4,
    "n_groups": 8,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
}

FAMILIES: dict[str, Family] = {
    # full attention, or one window for all layers
    "llama": attending(2048),
    "mistral": attending(131072, kv_heads=8, sliding_window=4096),
    "ministral": attending(131072, kv_heads=8, sliding_window=4096),
    "ministral3": attending(262144, kv_heads=8, head_dim=128),
    "mixtral": attending(131072, kv_heads=8),
    "phi": full(2048),
    "phi3": attending(4096),
    "phimoe": attending(131072, kv_heads=8),
    "starcoder2": attending(4096, kv_heads=2),
    "qwen2": attending(32768, types=all_or_none, always=True, gate="use_sliding_window"),
    "qwen2_moe": full(32768, kv_heads=16, gate="use_sliding_window"),
    "qwen3": attending(32768, head_dim=128, types=all_or_none, always=True, gate="use_sliding_window"),
    "qwen3_moe": attending(32768, kv_heads=4, gate="use_sliding_window"),
    "gemma": full(8192, kv_heads=16, head_dim=256),
    "cohere": full(8192),
    "glm": full(131072, kv_heads=2, head_dim=128),
    "glm4": full(131072, kv_heads=2, head_dim=128),
    "glm4_moe": full(131072, kv_heads=8),
    "granite": attending(2048),
    "granitemoe": full(2048),
    "granitemoeshared": full(2048),
    "olmo": full(2048),
    "olmo2": full(2048),
    "olmoe": full(4096),
    "flex_olmo": full(4096),
    "stablelm": full(4096),
    "seed_oss": full(524288, kv_heads=8, head_dim=128),
    "ernie4_5": full(131072, kv_heads=2, head_dim=128),
    "ernie4_5_moe": full(131072, kv_heads=4),
    "hunyuan_v1_dense": full(2048),
    "hunyuan_v1_moe": full(2048),
    "minimax_m2": full(196608, kv_heads=8, head_dim=128),
    "arcee": full(4096),
    "apertus": attending(65536),
    "nemotron": full(4096),
    "smollm3": full(32768, kv_heads=4),
    "internlm3": full(32768),
    "mimo": full(32768),
    "gpt2": Family(
        attention.read_multi_head,
        {"path": "attn.attn", "count": "n_head", "width": "n_embd", "depth": "n_layer"},
        {"n_positions": 1024},
        root="transformer.h",
    ),
    "gpt_neox": Family(
        attention.read_multi_head, {"path": "attention.attn"}, {"max_position_embeddings": 2048}
    ),
    "opt": Family(
        attention.read_multi_head,
        {"path": "self_attn.attn"},
        {"max_position_embeddings": 2048},
        root="model.decoder.layers",
    ),
    "bloom": Family(
        attention.read_multi_head,
        {"path": "self_attention.attn", "count": "n_head", "depth": "n_layer"},
        root="transformer.h",
    ),
    "falcon": Family(attention.read_falcon, defaults={"max_position_embeddings": 2048}, root="transformer.h"),
    **{
        name: full(length)
        for name, length in {
            "deepseek": 4096,
            "hyperclovax": 8192,
            "aria_text": 8192,
            "glm_ocr_text": 131072,
            "jais2": 8192,
            "minicpm": 4096,
            "mellum": 131072,
            "orion": 4096,
            "PanguEmbedded": 32768,
            "k2_horizon": 32768,
            "iquestcoder": 32768,
            "param2moe": 4096,
            "solar": 4096,
            "telechat3": 32768,
            "TeleFLM": 4096,
            "paddleocr_vl_text": 131072,
            "qwen2_5_omni_text": 32768,
        }.items()
    },
    "granitemoe_swa": attending(2048, sliding_window=128, types=first_of(4)),
    "hrm_text": Family(attention.read_hrm_text, defaults={"max_position_embeddings": 4096}, root="model"),
    "muse_glimmer_text": attending(262144, sliding_window=512),
    "cosmos3_edge_text": Family(attention.read_every_other, defaults={"max_position_embeddings": 262144}),
    "vaultgemma": attending(8192, kv_heads=4, head_dim=256, sliding_window=4096, types=every(2)),
    "bailing_moe": full(16384, path="attention.attn"),
    "bailing_moe_v2": full(16384, path="attention.attn"),
    "sarvam_moe": full(4096, path="attention.attn"),
    "internlm2": full(32768, path="attention.attn"),
    "step1": Family(attention.read_spelled, {"spellings": ("num_attention_groups", "num_key_value_heads")}),
    "step3_text": Family(
        attention.read_step3, defaults={"head_dim": 256, "max_position_embeddings": 65536}, root=".layers"
    ),
    "step3p5": Family(attention.read_step3p5, defaults={"max_position_embeddings": 262144}),
    "chatglm": Family(
        attention.read_chatglm, defaults={"seq_length": 8192}, root="transformer.encoder.layers"
    ),
    "nemotron-nas": Family(attention.read_nemotron_nas, defaults={"max_position_embeddings": 131072}),
    "exaone": Family(
        attention.read_spelled,
        {"path": "attn.attention.attn", "depth": "num_layers"},
        {"max_position_embeddings": 2048},
        root="model.h",
    ),
    "telechat": Family(attention.read_telechat, root="model.layers"),
    "iquestloopcoder": Family(attention.read_looped, defaults={"max_position_embeddings": 131072}),
    "dbrx": Family(attention.read_dbrx, defaults={"max_seq_len": 2048}, root="transformer.blocks"),
    "gptj": Family(
        attention.read_multi_head,
        {"path": "attn.attn", "count": "n_head", "width": "n_embd", "depth": "n_layer"},
        {"n_positions": 2048},
        root="transformer.h",
    ),
    "gpt_bigcode": Family(attention.read_gpt_bigcode, defaults={"n_positions": 1024}, root="model.h"),
    "PanguProMoE": Family(attention.read_pangu_sink),
    "plamo3": attending(4096, path="mixer.attn", root="model.layers.layers"),
    # windows beside full attention
    "gemma2": attending(8192, kv_heads=4, head_dim=256, sliding_window=4096, types=every(2)),
    "gemma3_text": Family(
        attention.read_gemma3,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
        },
    ),
    "gemma3n_text": Family(
        attention.read_gemma3n,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "sliding_window": 512,
            "num_kv_shared_layers": 15,
        },
    ),
    "gemma4_text": Family(
        attention.read_gemma4,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 512,
        },
    ),
    "gpt_oss": attending(
        131072, kv_heads=8, head_dim=64, sliding_window=128, path="attn.attn", types=alternating, always=True
    ),
    "cohere2": attending(8192, sliding_window=4096, types=every(4, "sliding_window_pattern"), widen=1),
    "cohere2_moe": attending(8192, sliding_window=4096, types=dense_first, widen=1),
    "granite_swa": attending(2048, sliding_window=128, types=first_of(4)),
    "olmo3": attending(2048, sliding_window=4096, types=every(4)),
    "exaone4": attending(2048, sliding_window=4096, types=every(4, "sliding_window_pattern")),
    "exaone_moe": attending(2048, sliding_window=4096, types=every(4, "sliding_window_pattern")),
    "cwm": attending(131072, kv_heads=8, head_dim=128, sliding_window=8192, types=first_of(4)),
    "afmoe": attending(
        16384, head_dim=128, sliding_window=1024, types=every(4, "global_attn_every_n_layers")
    ),
    "laguna": attending(131072, kv_heads=8, head_dim=128, sliding_window=512, types=no_window),
    "mimo_v2_flash": Family(
        attention.read_mimo,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "sliding_window": 128,
        },
    ),
    "mimo_v2": Family(attention.read_mimo, defaults={"max_position_embeddings": 131072}),
    # chunks
    "llama4_text": Family(
        attention.read_llama4,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_chunk_size": 8192,
        },
    ),
    # encoder and decoder
    "whisper": Family(attention.read_whisper, defaults={"max_target_positions": 448}, root=".decoder.layers"),
    # latent attention
    "deepseek_v2": mla(latent.read_deepseek, 2048),
    "deepseek_v3": mla(latent.read_deepseek, 4096),
    "kimi_k2": mla(latent.read_deepseek, 4096),
    "deepseek_v32": mla(latent.read_indexed, 163840),
    "glm_moe_dsa": mla(latent.read_indexed, 202752),
    "glm4_moe_lite": mla(latent.read_deepseek, 202752),
    "longcat_flash": mla(latent.read_latent, 131072, per_layer=2),
    "minicpm3": Family(
        latent.read_unabsorbed,
        defaults={"max_position_embeddings": 32768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
    ),
    "kimi_linear": Family(latent.read_kimi, defaults={"max_position_embeddings": 4096}),
    "axk1": mla(latent.read_deepseek, 32768),
    "pangu_ultra_moe": mla(latent.read_latent, 131072),
    "sarvam_mla": mla(latent.read_latent, 4096),
    "longcat_flash_ngram": mla(latent.read_latent, 131072, per_layer=2),
    "bailing_hybrid": mla(latent.read_bailing_hybrid, 8192),
    "bailing_moe_linear": mla(latent.read_bailing_hybrid, 8192),
    "bailing_moe_v3": mla(latent.read_bailing_hybrid, 8192),
    "bailing_hybrid_v3": mla(latent.read_bailing_hybrid, 8192),
    # attention that reads what index keys choose
    "hy_v4": mla(indexed.read_hy_v4, 262144),
    "dots3_note": mla(indexed.read_dots3_note, 4096),
    "glm5_next_text": Family(
        indexed.read_glm5_next,
        defaults={
            "num_attention_heads": 64,
            "max_position_embeddings": 1048576,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 0,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "index_kpool": 16,
            "linear_head_dim": 128,
            "linear_num_heads": 64,
            "linear_conv_kernel_dim": 4,
        },
        memory_order="BLHNC",
    ),
    "qwen4_exp_text": Family(
        indexed.read_qwen4_exp,
        defaults=DELTA_NET | {"ple_conv_kernel_size": 4, "ngram_size": 3, "hc_count": 4},
        ssm_dtype=("mamba_ssm_dtype", "auto"),
        memory_order="BLNHC",
    ),
    "minimax_m3_text": Family(
        indexed.read_minimax_m3,
        defaults={"max_position_embeddings": 524288, "num_key_value_heads": 4, "head_dim": 128},
        kernel_block_size=128,
    ),
    "inkling_text": Family(
        indexed.read_inkling,
        defaults={"max_position_embeddings": 131072, "conv_kernel_size": 4, "sliding_window_size": 512},
    ),
    # compressed latent attention
    "deepseek_v4": Family(
        packed.read_deepseek_v4,
        defaults={
            "max_position_embeddings": 1048576,
            "head_dim": 512,
            "sliding_window": 128,
            "index_head_dim": 128,
        },
        kernel_block_size=256,
        memory_order="BLHNC",
        kv_cache_dtype="fp8_ds_mla",
    ),
    "deepseek_v41_text": Family(
        packed.read_deepseek_v41,
        defaults={
            "max_position_embeddings": 1048576,
            "head_dim": 512,
            "sliding_window": 128,
            "index_head_dim": 128,
        },
        kernel_block_size=64,
        memory_order="BLHNC",
        kv_cache_dtype="fp8_ds_mla",
    ),
    # states
    "jamba": Family(
        state.read_jamba,
        defaults={
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
    ),
    "mamba": Family(state.read_mamba, defaults=MAMBA_1, root="backbone.layers", attention_free=True),
    "falcon_mamba": Family(state.read_mamba, defaults=MAMBA_1, root="backbone.layers", attention_free=True),
    "mamba2": Family(
        state.read_mamba2,
        defaults={
            "expand": 2,
            "conv_kernel": 4,
            "state_size": 128,
            "n_groups": 8,
            "num_heads": 128,
            "head_dim": 64,
        },
        root="backbone.layers",
        attention_free=True,
    ),
    "nemotron_h": Family(
        state.read_nemotron_h, defaults=NEMOTRON_H, ssm_dtype=("mamba_ssm_cache_dtype", "float32")
    ),
    "granitemoehybrid": Family(state.read_granite, defaults=GRANITE_HYBRID),
    "zamba2": Family(state.read_zamba2, defaults=ZAMBA_2),
    "falcon_h1": Family(
        state.read_falcon_h1,
        defaults={
            "max_position_embeddings": 8192,
            "num_key_value_heads": 8,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
    ),
    "qwen3_next": Family(state.read_delta_net, defaults=DELTA_NET),
    "qwen3_5_text": Family(
        state.read_delta_net,
        defaults=DELTA_NET | {"num_key_value_heads": 4},
        ssm_dtype=("mamba_ssm_dtype", "auto"),
    ),
    "qwen3_5_moe_text": Family(
        state.read_delta_net, defaults=DELTA_NET, ssm_dtype=("mamba_ssm_dtype", "auto")
    ),
    "olmo_hybrid": Family(
        state.read_delta_net,
        defaults={
            "max_position_embeddings": 65536,
            "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": 30,
            "linear_num_value_heads": 30,
            "linear_key_head_dim": 96,
            "linear_value_head_dim": 192,
        },
    ),
    "lfm2": Family(
        state.read_lfm2,
        defaults={"max_position_embeddings": 128000, "num_key_value_heads": 8, "conv_L_cache": 3},
    ),
    "lfm2_moe": Family(
        state.read_lfm2,
        {"width": "hidden_size"},
        {"max_position_embeddings": 128000, "num_key_value_heads": 8, "conv_L_cache": 3},
    ),
}
