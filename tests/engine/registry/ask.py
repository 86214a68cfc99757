import signal
import traceback
from dataclasses import replace

from card import *  # isort: skip
import vllm.transformers_utils.config as tc
from transformers import PreTrainedConfig

try:  # 0.33 moved the planning to a module of its own
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning
from transformers.models.auto import configuration_auto, modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import SlidingWindowSpec


class Block(dict):
    __getattr__ = dict.get


def blocks(self, **kw):
    kw.setdefault("hidden_act", "silu")
    self.block_configs = [Block({k: Block(v) for k, v in b.items()}) for b in kw.pop("block_configs", [])]
    PreTrainedConfig.__init__(self, **kw)


def register(mt):
    if mt and mt not in tc._CONFIG_REGISTRY and mt not in CONFIG_MAPPING:
        tc._CONFIG_REGISTRY[mt] = type(
            "AnyConfig",
            (PreTrainedConfig,),
            {
                "model_type": mt,
                "attribute_map": {
                    "exaone": {"num_hidden_layers": "num_layers"},
                    "telechat": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
                }.get(mt, {}),
            },
        )
        if mt == "nemotron-nas":
            tc._CONFIG_REGISTRY[mt].__init__ = blocks


def architectures():
    """architecture -> model_type, by the mappings that transformers has from configs to models"""
    found = {}
    for name in dir(modeling_auto):
        if name.endswith("_MAPPING_NAMES"):
            for model_type, archs in getattr(modeling_auto, name).items():
                for a in archs if isinstance(archs, (tuple, list)) else [archs]:
                    if isinstance(a, str):
                        found.setdefault(a, model_type)
                        if a.endswith("ForCausalLM") and model_type == found[a] + "_text":
                            found[a] = model_type
    return found


EXTRA = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "route_scale": 1.0},
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "glm4_moe": {"head_dim": 128},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "hy_v3": {"first_k_dense_replace": 1},
    "lfm2": {
        "block_dim": 2560,
        "block_ff_dim": 12288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "conv_dim": 2560,
    },
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "minimax_m2": {"rotary_dim": 64},
    "inkling_text": {"padded_vocab_size": 201024},
    "mimo_v2_flash": {"hybrid_layer_pattern": [0] + [1] * 5 + [0] + [1] * 41},
    "kimi_linear": {"mla_use_nope": True},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"output_gate_type": "sigmoid"},
    "qwen4_exp_text": {"output_gate_type": "sigmoid"},
}
DROP = {"deepseek_v4": ["mlp_layer_types"]}


def default_config(model_type, arch):
    cls = configuration_auto.CONFIG_MAPPING[model_type]
    c = cls()
    d = c.to_dict()
    d["architectures"] = [arch]
    d.setdefault("model_type", model_type)
    d.pop("transformers_version", None)
    d |= EXTRA.get(model_type, {})
    for k in DROP.get(model_type, ()):
        d.pop(k, None)
    if isinstance(d.get("attn_config"), dict):
        d["attn_config"] = {
            k: v
            for k, v in d["attn_config"].items()
            if k in ("attn_pdrop", "clip_qkv", "kv_n_heads", "rope_theta")
        }
    if isinstance(d.get("ffn_config"), dict):
        d["ffn_config"] = {
            k: v
            for k, v in d["ffn_config"].items()
            if k
            in (
                "ffn_act_fn",
                "ffn_hidden_size",
                "moe_num_experts",
                "moe_top_k",
                "moe_loss_weight",
                "moe_jitter_eps",
                "moe_normalize_expert_weights",
            )
        }
    return d


def describe(spec):
    out = {"class": type(spec).__name__}
    for k, v in spec.__dict__.items():
        if v is None:
            continue
        out[k] = plain(v)
    out["page_size_bytes"] = spec.page_size_bytes
    return out


def plain(v):
    if isinstance(v, torch.dtype):
        return str(v).removeprefix("torch.")
    if hasattr(v, "name") and not isinstance(v, type):
        return v.name
    if isinstance(v, (tuple, list)):
        return [plain(x) for x in v]
    if isinstance(v, (int, float, str, bool, type(None))):
        return v
    return str(v)


def groups_of(vc, found):
    if hasattr(planning, "get_global_kv_cache_groups"):
        return planning.get_global_kv_cache_groups(vc, [dict(found)])
    return planning.get_kv_cache_groups(vc, dict(found))


def ask(config, **options):
    vc, model, found, shared = specs(config, **options)
    by = []
    index = {}
    for n, s in found.items():
        d = describe(s)
        key = json.dumps(d, sort_keys=True)
        if key not in index:
            index[key] = len(by)
            by.append([d, []])
        by[index[key]][1].append(n)
    cc = vc.cache_config
    out = {
        "block_size": cc.block_size,
        "mamba_block_size": cc.mamba_block_size,
        "mamba_page_size_padded": cc.mamba_page_size_padded,
        "mamba_cache_mode": cc.mamba_cache_mode,
        "kv_cache_dtype": cc.cache_dtype,
        "max_model_len": vc.model_config.max_model_len,
        "dtype": plain(vc.model_config.dtype),
        "layers": list(found),
        "specs": by,
        "shared": dict(shared),
        "hybrid": vc.model_config.is_hybrid,
        "arch": vc.model_config.architecture,
        "batched": vc.scheduler_config.max_num_batched_tokens,
        "async": vc.scheduler_config.async_scheduling,
    }
    try:
        if found:
            from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
            from vllm.v1.worker.worker_base import WorkerBase

            with set_current_vllm_config(vc):
                sup = WorkerBase.get_supported_kv_cache_layouts(types.SimpleNamespace(vllm_config=vc))
                layout = resolve_kv_cache_layout(vc, [sup], list(found.values()))
            out["layout"] = layout.name
            if hasattr(WorkerBase, "set_kv_cache_layout"):
                WorkerBase.set_kv_cache_layout(types.SimpleNamespace(vllm_config=vc), layout.name)
            else:
                vc.cache_config.kv_cache_layout = layout.name
        retained = max(0, getattr(vc, "num_prefill_lookahead_tokens", 0) - 1)
        for name, spec in found.items():
            if retained and isinstance(spec, SlidingWindowSpec):
                found[name] = replace(spec, extra_retained_tokens=retained)
        groups = groups_of(vc, found) if found else []
        out["groups"] = [
            [
                g.layer_names,
                g.kv_cache_spec.block_size,
                g.kv_cache_spec.page_size_bytes,
                type(g.kv_cache_spec).__name__,
            ]
            for g in groups
        ]
        out["in_flight"] = vc.max_in_flight_tokens
        register_all_kvcache_specs(vc)
        if found:
            out["memory"] = {str(MEMORY): memory(vc, [dict(found)], [MEMORY])}
    except Exception as e:
        out["groups_refused"] = f"{type(e).__name__}: {e}"[:300]
    return out


#: bytes that every case is planned in
MEMORY = 1 << 30


def memory(vc, workers, budgets):
    """What the engine makes of these workers' layers and memories: blocks, requests, tokens."""
    vc.__dict__.pop("max_in_flight_tokens", None)
    try:
        configs = kv_cache_utils.get_kv_cache_configs(vc, workers, budgets)
    except ValueError as e:
        return {"refused": str(e)[:300]}
    tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(
        vc, kv_cache_utils.generate_scheduler_kv_cache_config(configs)
    )
    return {
        "num_blocks": configs[0].num_blocks,
        "max_concurrency": concurrency,
        "capacity_tokens": tokens,
        "ranks": [[g.layer_names for g in c.kv_cache_groups] for c in configs],
        "bytes": [kv_cache_utils._pool_bytes_per_block(vc, c.kv_cache_groups) for c in configs],
    }


def apart(task, seconds=240):
    """task() in a process of its own; its result, or why there is none"""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(r)
        signal.alarm(seconds)
        try:
            out = task()
        except BaseException as e:
            tb = traceback.extract_tb(e.__traceback__)
            where = [f"{f.filename.split('site-packages/')[-1]}:{f.lineno}" for f in tb][-3:]
            out = {"error": f"{type(e).__name__}: {e}"[:1500], "where": where}
        with os.fdopen(w, "w") as f:
            json.dump(out, f)
        os._exit(0)
    os.close(w)
    with os.fdopen(r) as f:
        text = f.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else {"error": "died or timed out"}
