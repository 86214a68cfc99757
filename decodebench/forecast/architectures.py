"""What a family's tensors are beside those that its cache tells of: biases, norms, inner sizes, experts.

A line a family, by ``model_type``. Defaults are those of the config classes for fields that config.json
files leave out. A flag is True, False or the name of the field that says it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: names under which configs keep the number of routed experts, of experts a token, and their inner size
EXPERT_COUNTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")

#: True, False, the name of a field that says it, or a field and the value that means yes
Flag = bool | str | tuple[str, str]


@dataclass(frozen=True)
class Architecture:
    """Tensors of one family.

    ``matrices``: 3 where feed-forward blocks have a gate, else 2. ``norms``: norms of the model's width
    a layer, ``layer_norm``: with a bias; ``final_norm``: after the last layer. ``expert_size`` and
    ``shared_size`` name the fields with the inner size of one routed and of all shared experts.
    ``correction``: the router has a bias a expert that only steers its choice.
    """

    #: whether the head is the embedding where config.json does not say; ``own`` and ``shared`` are so whatever
    #: it says
    tied: bool | str = False
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    matrices: int = 3
    norms: int = 2
    layer_norm: bool = False
    #: the norms have no weights at all (OLMo)
    bare_norms: bool = False
    final_norm: bool = True
    query_key_norm: str | None = None
    #: the field that switches the norm of queries and keys on; None: always there
    query_key_norm_if: str | None = None
    norm_bias: bool = False
    gate: str | None = None
    sinks: str | None = None
    head_bias: Flag = False
    dense_size: tuple[str, ...] = (
        "intermediate_size",
        "ffn_hidden_size",
        "ffn_dim",
        "decoder_ffn_dim",
        "n_inner",
    )
    expert_size: tuple[str, ...] = ("moe_intermediate_size", "intermediate_size")
    shared_size: tuple[str, ...] = ()
    #: shared experts as a number of routed ones
    shared_count: tuple[str, ...] = ()
    #: shared experts have a gate of one number (Qwen)
    shared_gate: bool = False
    router_bias: bool = False
    correction: Flag = False
    expert_bias: bool = False
    defaults: Mapping = field(default_factory=dict)


def attention_bias(**more: Flag) -> dict[str, Any]:
    return {"qkv_bias": "attention_bias", "out_bias": "attention_bias"} | more


QWEN_MOE: dict[str, Any] = {
    "shared_size": ("shared_expert_intermediate_size",),
    "shared_gate": True,
    "expert_size": ("moe_intermediate_size",),
}
DEEPSEEK: dict[str, Any] = {
    "tied": "own",
    "shared_count": ("n_shared_experts",),
    "expert_size": ("moe_intermediate_size",),
    "correction": ("topk_method", "noaux_tc"),
    "defaults": {"first_k_dense_replace": 3},
}
BAILING: dict[str, Any] = {
    "qkv_bias": "use_qkv_bias",
    "out_bias": "use_bias",
    "expert_size": ("moe_intermediate_size",),
    "shared_size": ("moe_shared_expert_intermediate_size", "moe_intermediate_size"),
    "shared_count": ("num_shared_experts",),
    "correction": True,
    "defaults": {"first_k_dense_replace": 0},
}
OLD: dict[str, Any] = {
    "matrices": 2,
    "layer_norm": True,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(**attention_bias(mlp_bias="mlp_bias")),
    "mistral": Architecture(),
    "ministral": Architecture(),
    "ministral3": Architecture(),
    "mixtral": Architecture(),
    "phi": Architecture(
        **OLD | {"norms": 1}, query_key_norm="head", norm_bias=True, query_key_norm_if="qk_layernorm"
    ),
    "phi3": Architecture(),
    "phimoe": Architecture(tied="own", qkv_bias=True, out_bias=True, layer_norm=True, head_bias=True),
    "starcoder2": Architecture(
        tied=True,
        matrices=2,
        layer_norm=True,
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        defaults={"use_bias": True},
    ),
    "qwen2": Architecture(qkv_bias=True),
    "qwen2_moe": Architecture(qkv_bias=True, defaults={"decoder_sparse_step": 1}, **QWEN_MOE),
    "qwen3": Architecture(qkv_bias="attention_bias", query_key_norm="head"),
    "qwen3_moe": Architecture(
        qkv_bias="attention_bias",
        query_key_norm="head",
        expert_size=("moe_intermediate_size",),
        defaults={"decoder_sparse_step": 1},
    ),
    "gemma": Architecture(tied=True),
    "cohere": Architecture(tied="shared", norms=1, query_key_norm="each", query_key_norm_if="use_qk_norm"),
    "glm": Architecture(qkv_bias="attention_bias", defaults={"attention_bias": True}),
    "glm4": Architecture(qkv_bias="attention_bias", norms=4, defaults={"attention_bias": True}),
    "glm4_moe": Architecture(
        qkv_bias="attention_bias",
        query_key_norm="head",
        query_key_norm_if="use_qk_norm",
        **DEEPSEEK | {"correction": True, "defaults": {"first_k_dense_replace": 1}},
    ),
    "granite": Architecture(**attention_bias(mlp_bias="mlp_bias")),
    "granitemoe": Architecture(),
    "granitemoeshared": Architecture(shared_size=("shared_intermediate_size",)),
    "olmo": Architecture(bare_norms=True, **attention_bias()),
    "olmo2": Architecture(**attention_bias(), query_key_norm="heads"),
    "olmo3": Architecture(**attention_bias(), query_key_norm="heads"),
    "olmoe": Architecture(tied="own", query_key_norm="heads"),
    "flex_olmo": Architecture(**attention_bias(), query_key_norm="heads"),
    "stablelm": Architecture(layer_norm=True, qkv_bias="use_qkv_bias"),
    "seed_oss": Architecture(
        qkv_bias="attention_bias",
        out_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        defaults={"attention_bias": True},
    ),
    "ernie4_5": Architecture(tied=True),
    "ernie4_5_moe": Architecture(
        tied=True,
        qkv_bias="use_bias",
        mlp_bias="use_bias",
        expert_size=("moe_intermediate_size",),
        shared_count=("moe_num_shared_experts",),
        correction=True,
        defaults={"moe_layer_start_index": 1, "moe_layer_interval": 1},
    ),
    "hunyuan_v1_dense": Architecture(
        **attention_bias(), query_key_norm="head", query_key_norm_if="use_qk_norm"
    ),
    "hunyuan_v1_moe": Architecture(
        **attention_bias(),
        query_key_norm="head",
        query_key_norm_if="use_qk_norm",
        shared_size=("intermediate_size",),
        shared_count=("num_shared_expert",),
    ),
    "minimax_m2": Architecture(
        tied="own", query_key_norm="heads", expert_size=("intermediate_size",), correction=True
    ),
    "arcee": Architecture(**attention_bias(mlp_bias="mlp_bias"), matrices=2),
    "apertus": Architecture(**attention_bias(), matrices=2, query_key_norm="head"),
    "nemotron": Architecture(**attention_bias(mlp_bias="mlp_bias"), matrices=2, layer_norm=True),
    "smollm3": Architecture(tied=True, **attention_bias(mlp_bias="mlp_bias")),
    "internlm3": Architecture(qkv_bias="qkv_bias", out_bias="bias", mlp_bias="bias"),
    "mimo": Architecture(qkv_bias="attention_bias", defaults={"attention_bias": True}),
    "gpt2": Architecture(**OLD, tied=True),
    "gpt_neox": Architecture(**OLD | attention_bias(), defaults={"attention_bias": True}),
    "opt": Architecture(**OLD, tied=True),
    "bloom": Architecture(**OLD, tied=True),
    "falcon": Architecture(
        matrices=2, layer_norm=True, qkv_bias="bias", out_bias="bias", mlp_bias="bias", tied=True
    ),
    "gemma2": Architecture(tied="shared", **attention_bias(), norms=4),
    "gemma3_text": Architecture(tied=True, **attention_bias(), norms=4, query_key_norm="head"),
    "gemma3n_text": Architecture(tied="shared", **attention_bias(), norms=4, query_key_norm="head"),
    "gemma4_text": Architecture(tied=True, **attention_bias(), norms=4, query_key_norm="head"),
    "gpt_oss": Architecture(
        tied="own",
        qkv_bias=True,
        out_bias=True,
        sinks="all",
        expert_size=("intermediate_size",),
        expert_bias=True,
        router_bias=True,
    ),
    "cohere2": Architecture(tied="shared", norms=1),
    "cohere2_moe": Architecture(tied="shared", norms=1, shared_count=("num_shared_experts",)),
    "granite_swa": Architecture(tied=True, **attention_bias(mlp_bias="mlp_bias"), sinks="all"),
    "exaone4": Architecture(query_key_norm="head"),
    "exaone_moe": Architecture(
        query_key_norm="head",
        expert_size=("moe_intermediate_size",),
        shared_count=("num_shared_experts",),
        correction=True,
        defaults={"first_k_dense_replace": 1},
    ),
    "cwm": Architecture(mlp_bias="mlp_bias"),
    "afmoe": Architecture(
        tied="own",
        norms=4,
        query_key_norm="head",
        gate="full",
        expert_size=("moe_intermediate_size",),
        shared_count=("num_shared_experts",),
        correction=True,
        defaults={"num_dense_layers": 1},
    ),
    "laguna": Architecture(
        **attention_bias(),
        query_key_norm="head",
        gate="head",
        expert_size=("moe_intermediate_size",),
        shared_size=("shared_expert_intermediate_size",),
        correction=True,
    ),
    "mimo_v2_flash": Architecture(
        tied="own",
        qkv_bias="attention_bias",
        sinks="window",
        expert_size=("moe_intermediate_size",),
        correction=True,
        shared_count=("n_shared_experts",),
    ),
    "mimo_v2": Architecture(
        tied="own",
        qkv_bias="attention_bias",
        sinks="window",
        expert_size=("moe_intermediate_size",),
        correction=True,
        shared_count=("n_shared_experts",),
    ),
    "llama4_text": Architecture(
        dense_size=("intermediate_size_mlp",),
        defaults={"interleave_moe_layer_step": 1},
        expert_size=("intermediate_size",),
        shared_size=("intermediate_size",),
    ),
    "whisper": Architecture(**OLD | {"norms": 3}, tied="shared"),
    "deepseek_v2": Architecture(**DEEPSEEK | {"correction": False, "defaults": {"first_k_dense_replace": 0}}),
    "deepseek_v3": Architecture(**DEEPSEEK),
    "kimi_k2": Architecture(**DEEPSEEK),
    "deepseek_v32": Architecture(**DEEPSEEK),
    "glm_moe_dsa": Architecture(**DEEPSEEK),
    "glm4_moe_lite": Architecture(**DEEPSEEK | {"defaults": {"first_k_dense_replace": 1}}),
    "longcat_flash": Architecture(
        tied="own", expert_size=("expert_ffn_hidden_size",), correction=True, norms=4
    ),
    "minicpm3": Architecture(tied=True),
    "kimi_linear": Architecture(
        expert_size=("moe_intermediate_size",),
        shared_count=("num_shared_experts",),
        correction=True,
        defaults={"first_k_dense_replace": 1},
    ),
    "deepseek_v4": Architecture(
        tied="own",
        expert_size=("moe_intermediate_size",),
        shared_count=("n_shared_experts",),
        correction=True,
    ),
    "jamba": Architecture(
        tied="own",
        expert_size=("intermediate_size",),
        defaults={"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_conv_bias": True},
    ),
    "mamba": Architecture(tied=True, norms=1),
    "falcon_mamba": Architecture(tied=True, norms=1),
    "mamba2": Architecture(norms=1),
    "nemotron_h": Architecture(
        tied="own",
        matrices=2,
        norms=1,
        mlp_bias="mlp_bias",
        expert_size=("moe_intermediate_size",),
        shared_size=("moe_shared_expert_intermediate_size",),
        correction=True,
    ),
    "granitemoehybrid": Architecture(
        **attention_bias(), expert_size=("intermediate_size",), shared_size=("shared_intermediate_size",)
    ),
    "zamba2": Architecture(tied="shared", norms=1),
    "falcon_h1": Architecture(),
    "qwen3_next": Architecture(
        tied="own", query_key_norm="head", gate="full", defaults={"decoder_sparse_step": 1}, **QWEN_MOE
    ),
    "qwen3_5_text": Architecture(query_key_norm="head", gate="full"),
    "qwen3_5_moe_text": Architecture(query_key_norm="head", gate="full", **QWEN_MOE),
    "olmo_hybrid": Architecture(query_key_norm="heads"),
    "lfm2": Architecture(tied="shared", query_key_norm="head"),
    "lfm2_moe": Architecture(
        tied=True,
        query_key_norm="head",
        expert_size=("moe_intermediate_size",),
        correction="use_expert_bias",
        defaults={"num_dense_layers": 2, "use_expert_bias": True},
    ),
    # families whose config classes are their checkpoints' own, or newer than the published figures
    "deepseek": Architecture(
        shared_count=("n_shared_experts",),
        expert_size=("moe_intermediate_size",),
        defaults={"moe_layer_freq": 1, "first_k_dense_replace": 0},
    ),
    "aria_text": Architecture(
        **attention_bias(), shared_size=("intermediate_size",), shared_count=("moe_num_shared_experts",)
    ),
    "glm_ocr_text": Architecture(norms=4),
    "jais2": Architecture(
        **attention_bias(mlp_bias="mlp_bias"),
        matrices=2,
        layer_norm=True,
        defaults={"attention_bias": True, "mlp_bias": True},
    ),
    "minicpm": Architecture(),
    "mellum": Architecture(
        qkv_bias="attention_bias", query_key_norm="head", expert_size=("moe_intermediate_size",)
    ),
    "orion": Architecture(layer_norm=True),
    "PanguEmbedded": Architecture(qkv_bias="bias", out_bias="bias"),
    "iquestcoder": Architecture(**attention_bias(mlp_bias="mlp_bias")),
    "param2moe": Architecture(**BAILING),
    "solar": Architecture(**attention_bias(mlp_bias="mlp_bias")),
    "telechat3": Architecture(**attention_bias(mlp_bias="mlp_bias")),
    "TeleFLM": Architecture(),
    "paddleocr_vl_text": Architecture(),
    "qwen2_5_omni_text": Architecture(qkv_bias=True),
    "granitemoe_swa": Architecture(
        **attention_bias(), sinks="all", shared_size=("shared_intermediate_size",)
    ),
    "muse_glimmer_text": Architecture(norms=4, gate="full"),
    "cosmos3_edge_text": Architecture(**attention_bias(mlp_bias="mlp_bias"), matrices=2),
    "vaultgemma": Architecture(tied=True, **attention_bias()),
    "bailing_moe": Architecture(**BAILING),
    "bailing_moe_v2": Architecture(**BAILING),
    "sarvam_moe": Architecture(**BAILING),
    "internlm2": Architecture(qkv_bias="bias", out_bias="bias"),
    "chatglm": Architecture(qkv_bias="add_qkv_bias", out_bias="add_bias_linear", mlp_bias="add_bias_linear"),
    "exaone": Architecture(),
    "plamo3": Architecture(norms=4, query_key_norm="head"),
    "pangu_ultra_moe": Architecture(
        **DEEPSEEK | {"tied": False, "correction": "router_enable_expert_bias"}, norms=4
    ),
    "sarvam_mla": Architecture(**BAILING),
}
#: families that no line knows: the commonest tensors
COMMON = Architecture(
    **attention_bias(mlp_bias="mlp_bias"), shared_count=("n_shared_experts", "num_shared_experts")
)
