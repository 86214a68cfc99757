"""Pipelines: the layers of every stage, built on the meta device as that stage builds them, and their one pool.

python from_stages.py OUT.jsonl
"""

import ask as asking
from ask import *
from card import parallel_state_of
from drafts import GEMMA, LLAMA, OSS, QWEN_35, QWEN_NEXT, V3, V32
from vllm.v1.worker import workspace

G = 1 << 30
STAGES = {
    "llama 2": (LLAMA | {"num_hidden_layers": 7}, 2, [G, G]),
    "llama 3": (LLAMA | {"num_hidden_layers": 8}, 3, [G, G // 2, G]),
    "llama 4": (LLAMA | {"num_hidden_layers": 10}, 4, [G, G, G, G]),
    "gemma3 2": (GEMMA, 2, [G, G]),
    "gemma3 4": (GEMMA | {"num_hidden_layers": 6}, 4, [G, G, G, G // 4]),
    "gpt-oss 3": (OSS, 3, [G, G, G]),
    "qwen3.5 2": (QWEN_35, 2, [G, G]),
    "qwen3.5 3": (QWEN_35, 3, [G, G, G]),
    "qwen3-next 4": (QWEN_NEXT, 4, [G, G, G, G]),
    "deepseek-v3 2": (V3, 2, [G, G // 2]),
    "deepseek-v3.2 3": (V32, 3, [G, G, G]),
}
NAMED = ("GraniteMoeHybridForCausalLM", "FalconH1ForCausalLM", "Lfm2ForCausalLM")


def stage(config, size, rank):
    """The specs of one stage, with the configuration that it was built under."""
    vc = engine_config(config)
    with set_current_vllm_config(vc):
        parallel(1)
        parallel_state_of("pp", size, rank)
        vc.parallel_config.pipeline_parallel_size = size
        workspace._manager = MagicMock()
        with set_default_torch_dtype(vc.model_config.dtype), torch.device("meta"), Meta():
            initialize_model(vc)
    Card.update_block_size_for_backend(vc)
    with set_current_vllm_config(vc):
        return vc, get_kv_cache_spec(vc)


def task(config, size, budgets):
    found = [apart(lambda rank=rank: list(stage(config, size, rank)[1])) for rank in range(size)]
    if any(isinstance(names, dict) for names in found):
        return next(names for names in found if isinstance(names, dict))
    vc = engine_config(config)
    with set_current_vllm_config(vc):
        parallel(1)
        workspace._manager = MagicMock()
        with set_default_torch_dtype(vc.model_config.dtype), torch.device("meta"), Meta():
            initialize_model(vc)
    Card.update_block_size_for_backend(vc)
    with set_current_vllm_config(vc):
        whole = get_kv_cache_spec(vc)
        from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
        from vllm.v1.worker.worker_base import WorkerBase

        this = types.SimpleNamespace(vllm_config=vc)
        layout = resolve_kv_cache_layout(
            vc, [WorkerBase.get_supported_kv_cache_layouts(this)], list(whole.values())
        )
    WorkerBase.set_kv_cache_layout(this, layout.name)
    vc.parallel_config.pipeline_parallel_size = size
    asking.register_all_kvcache_specs(vc)
    workers = [{name: whole[name] for name in names} for names in found]
    return {
        "layout": layout.name,
        "batched": vc.scheduler_config.max_num_batched_tokens,
        "in_flight": vc.max_in_flight_tokens,
        "stages": found,
        "memory": memory(vc, workers, budgets),
    }


if __name__ == "__main__":
    out, only = sys.argv[1], sys.argv[2:]
    known = architectures()
    cases = dict(STAGES)
    for name in NAMED:
        config = default_config(known[name], name) | {"torch_dtype": "bfloat16"}
        for size in (2, 3):
            cases[f"{name} {size}"] = (config, size, [8 * G] * size)
    with open(out, "a") as f:
        for name, (config, size, budgets) in cases.items():
            if only and name not in only:
                continue
            entry = {"name": name, "config": config, "size": size, "budgets": budgets}
            entry |= apart(lambda: task(json.loads(json.dumps(config)), size, budgets), 500)
            f.write(json.dumps(entry) + "\n")
            f.flush()
            print(name, entry.get("error", "ok")[:300], entry.get("where", ""), flush=True)
