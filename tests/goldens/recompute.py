"""The stored layouts against the vLLM that is installed here.

    python tests/goldens/recompute.py

Layers come from decodebench's reading of each stored config, as vLLM specs; everything after that is
vLLM's own code: grouping, page alignment, placement, capacity, the length that fits where the one asked
for does not. Prints a line for every case whose numbers are other ones. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from decodebench.vllm.launch import FORWARD, prepare_process  # noqa: E402

prepare_process()

import torch  # noqa: E402
import vllm  # noqa: E402
from tqdm import tqdm  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1 import kv_cache_interface as v  # noqa: E402
from vllm.v1.attention.backend import MultipleOf  # noqa: E402
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs  # noqa: E402

from decodebench.layout import dump  # noqa: E402
from decodebench.layout.plan import prepare  # noqa: E402
from decodebench.models.specs import AttentionSpec, KVCacheSpec, MambaSpec  # noqa: E402

try:  # 0.33 moved the planning to a module of its own
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    planning = kv_cache_utils

# -- our specs in vLLM's words -------------------------------------------------------------------


def vllm_spec(spec: KVCacheSpec, cache_dtype: str = "auto") -> v.KVCacheSpec:
    """The same layer as a spec of the installed vLLM; fields that a release does not have are left out."""
    kind = getattr(v, type(spec).__name__)
    alignment: Any = spec.block_stride_alignment if spec.block_stride_alignment > 1 else None
    if spec.kernel_block_tokens is not None:
        alignment = MultipleOf(spec.kernel_block_tokens)
        if not hasattr(v.KVCacheSpec, "get_block_stride_alignment"):
            alignment = None  # before 0.32 only a number of bytes could be asked for
    wanted: dict[str, Any] = {
        "block_size": spec.block_size,
        "page_size_padded": spec.page_size_padded,
        "dcp_sharded": spec.dcp_sharded,
        "block_stride_alignment": alignment,
    }
    if isinstance(spec, MambaSpec):
        wanted |= {
            "shapes": spec.shapes,
            "dtypes": tuple(getattr(torch, name) for name in spec.dtypes),
            "mamba_type": MambaAttentionBackendEnum[spec.mamba_type],
            "mamba_cache_mode": spec.mamba_cache_mode,
            "num_speculative_blocks": spec.num_speculative_blocks,
            "num_prefill_checkpoint_blocks": spec.num_prefill_checkpoint_blocks,
        }
    if isinstance(spec, AttentionSpec):
        listed = dump.spec_dict(spec, cache_dtype)
        wanted |= {
            "num_kv_heads": spec.num_kv_heads,
            "head_size": spec.head_size,
            "head_size_v": spec.head_size_v,
            "dtype": getattr(torch, listed["dtype"]),
            "kv_quant_mode": v.KVQuantMode[listed["kv_quant_mode"]],
            "state_content_bytes": spec.state_content_bytes,
            "tokens_per_state": spec.tokens_per_state,
        }
        for name in ("sliding_window", "attention_chunk_size", "alignment", "is_index_group_leader"):
            if hasattr(spec, name):
                wanted[name] = getattr(spec, name)
        if hasattr(spec, "cache_role"):
            wanted["cache_role"] = v.SparseCacheRole[spec.cache_role]
        if "cache_dtype_str" in listed:
            wanted["cache_dtype_str"] = listed["cache_dtype_str"]
        if "model_version" in listed:
            wanted["model_version"] = listed["model_version"]
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in wanted.items() if name in known})


# -- vLLM's configuration ------------------------------------------------------------------------


@cache
def engine_config():
    """One engine's configuration, whose fields each case overwrites."""
    fields_of = json.loads((HERE.parents[1] / "data" / "models" / "tiny-llama" / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(FORWARD | fields_of))
        config = EngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=4096,
        ).create_engine_config()
    register_all_kvcache_specs(config)
    return config


def config_for(grouped, length: int, fit: bool):
    """The configuration under which vLLM plans this case; ``fit`` asks for the longest length that fits."""
    config, options = engine_config(), grouped.options
    config.model_config.max_model_len = length
    config.model_config.original_max_model_len = -1 if fit else length
    config.parallel_config.tensor_parallel_size = options.tensor_parallel_size
    config.parallel_config.decode_context_parallel_size = options.decode_context_parallel_size
    config.scheduler_config.max_num_batched_tokens = options.max_num_batched_tokens
    config.scheduler_config.async_scheduling = options.async_scheduling
    config.scheduler_config.disable_hybrid_kv_cache_manager = not options.hybrid_kv_cache_manager
    config.cache_config.enable_prefix_caching = options.enable_prefix_caching
    config.cache_config.mamba_cache_mode = grouped.resolved.mamba_cache_mode if grouped.resolved else "none"
    config.cache_config.kv_cache_layout = grouped.memory_order
    encoder = [
        s.max_encoder_tokens
        for g in grouped.groups
        for s in g.layer_specs
        if hasattr(s, "max_encoder_tokens")
    ]
    config.scheduler_config.max_num_encoder_input_tokens = max(encoder, default=0)
    config.__dict__.pop("max_in_flight_tokens", None)
    assert config.max_in_flight_tokens == options.max_in_flight_tokens, config.max_in_flight_tokens
    return config


def configs(config, specs: dict[str, v.KVCacheSpec], budget: int):
    """vLLM's ``KVCacheConfig`` of a single worker with this much memory."""
    given = dict(specs)
    if hasattr(planning, "get_global_kv_cache_groups"):
        groups = planning.get_global_kv_cache_groups(config, [given])
        return planning.get_kv_cache_configs(config, [given], [budget], groups)[0]
    return planning.get_kv_cache_configs(config, [given], [budget])[0]


# -- one case ------------------------------------------------------------------------------------


def groups_of(config, specs: dict[str, v.KVCacheSpec]) -> list[v.KVCacheGroupSpec]:
    if hasattr(planning, "get_global_kv_cache_groups"):
        return planning.get_global_kv_cache_groups(config, [dict(specs)])
    return planning.get_kv_cache_groups(config, dict(specs))


def layout(grouped, specs: dict[str, v.KVCacheSpec], budgets: list[int]) -> dict:
    """Groups, and for each budget the memory or why it is refused, in the form of the stored cases."""
    config = config_for(grouped, grouped.max_model_len, fit=False)
    groups = groups_of(config, specs)
    return {
        "groups": [group_dict(config, group) for group in groups],
        "bytes_per_block": bytes_per_block(config, groups),
        "memory": {str(budget): memory(grouped, specs, budget) for budget in budgets},
    }


def bytes_per_block(config, groups) -> int:
    try:
        return planning._pool_bytes_per_block(config, groups)
    except TypeError:  # before 0.32 without the configuration
        return planning._pool_bytes_per_block(groups)


def memory(grouped, specs: dict[str, v.KVCacheSpec], budget: int) -> dict:
    config = config_for(grouped, grouped.max_model_len, fit=False)
    try:
        found = configs(config, specs, budget)
    except ValueError as error:
        return {"refused": str(error), "auto_fit": auto_fit(grouped, specs, budget)}
    tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(config, found)
    return {
        "num_blocks": found.num_blocks,
        "max_concurrency": concurrency,
        "capacity_tokens": tokens,
        "needs_kv_cache_zeroing": found.needs_kv_cache_zeroing,
        "tensors": [tensor_dict(tensor) for tensor in found.kv_cache_tensors],
    }


def auto_fit(grouped, specs: dict[str, v.KVCacheSpec], budget: int) -> dict | None:
    config = config_for(grouped, grouped.max_model_len, fit=True)
    try:
        found = configs(config, specs, budget)
    except ValueError:
        return None
    return {"max_model_len": config.model_config.max_model_len, "num_blocks": found.num_blocks}


def tensor_dict(tensor) -> dict:
    names = ("layers", "offset", "layer_stride", "block_stride", "size")
    return {name: getattr(tensor, name) for name in names}


def group_dict(config, group) -> dict:
    spec = group.kv_cache_spec
    return {
        "layers": list(group.layer_names),
        "block_size": spec.block_size,
        "page_size_bytes": spec.page_size_bytes,
        "blocks_per_request": blocks_per_request(config, spec),
        "spec": spec_dict(spec),
    }


def blocks_per_request(config, spec) -> int | None:
    """Blocks that a request of the maximum length needs; None where pages are empty."""
    try:
        return -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
    except ZeroDivisionError:  # a block too small for one compressed entry
        return None


#: what a stored spec says beside its fields
PROPERTIES = ("page_size_bytes", "prefix_cacheable", "tokens_per_state")


def spec_dict(spec) -> dict:
    """A spec of vLLM's as the stored cases write it: fields that are None are left out."""
    out = {"class": type(spec).__name__}
    if isinstance(spec, v.UniformTypeKVCacheSpecs):
        by_spec: list[dict] = []
        for name, inner in spec.kv_cache_specs.items():
            listed = spec_dict(inner)
            same = next((entry for entry in by_spec if entry["spec"] == listed), None)
            if same is None:
                by_spec.append({"spec": listed, "layers": [name]})
            else:
                same["layers"].append(name)
        out["layers_by_spec"] = by_spec
    else:
        out |= {field.name: plain(getattr(spec, field.name)) for field in fields(spec)}
        out["unpadded_page_size_bytes"] = (
            spec.unpadded_page_size_bytes if isinstance(spec, v.AttentionSpec) else spec.real_page_size_bytes
        )
    out |= {name: plain(getattr(spec, name)) for name in ("block_size", "dcp_sharded") if hasattr(spec, name)}
    out |= {name: plain(getattr(spec, name)) for name in PROPERTIES if _has(spec, name)}
    return {name: value for name, value in out.items() if value is not None and name not in NOT_STORED}


#: fields that say nothing about memory, or that only some releases have
NOT_STORED = {
    "block_stride_alignment",
    "cache_hit_alignment_tokens",
    "is_draft",
    "is_index_group_leader",
    "max_tp_shards",
    "non_causal",
    "non_causal_multi_token_decode",
    "num_head_slots",
    "num_heads",
    "prefill_checkpoint_alignment",
    "storage_block_size",
    "topk_buffer_width",
    "tp_replicated",
}


def _has(spec, name: str) -> bool:
    try:
        return getattr(spec, name) is not None
    except NotImplementedError:
        return False


def plain(value):
    """A field as JSON would hold it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if hasattr(value, "name"):
        return value.name
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


# -- all of them ---------------------------------------------------------------------------------


def main() -> int:
    """0 where the installed release computes every stored case."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    sys.path.insert(0, str(HERE.parent / "layout"))
    from test_goldens import golden, options_of

    cases, differences = 0, []
    for path in tqdm(sorted(HERE.glob("*.json.gz")), unit="model"):
        stored = golden(path.name.removesuffix(".json.gz"))
        for case in stored["cases"]:
            cases += 1
            if "refused" in case:
                continue
            grouped = prepare(stored["model"], **options_of(case))
            config_for(grouped, grouped.max_model_len, fit=False)
            dtype = grouped.resolved.kv_cache_dtype
            specs = {
                n: vllm_spec(s, dtype)
                for n, s in grouped.model.specs(grouped.resolved, grouped.options).items()
            }
            found = json.loads(json.dumps(layout(grouped, specs, [int(b) for b in case["memory"]])))
            wanted = {key: case[key] for key in found}
            for memory in (*found["memory"].values(), *wanted["memory"].values()):
                memory.pop("refused", None)  # releases word it differently
            at = first_difference(found, wanted)
            if at:
                differences.append(f"{stored['model']}, {case['case']}: {at}")
    print(*differences, f"vLLM {vllm.__version__}: {len(differences)} of {cases} cases differ", sep="\n")
    return int(bool(differences))


def first_difference(found, stored, at: str = "") -> str:
    """Where two JSON values part, and how; empty where they are the same."""
    if found == stored:
        return ""
    if isinstance(found, dict) and isinstance(stored, dict):
        keys = [key for key in {**stored, **found} if found.get(key) != stored.get(key)]
        return first_difference(found.get(keys[0]), stored.get(keys[0]), f"{at}.{keys[0]}")
    if isinstance(found, list) and isinstance(stored, list) and len(found) == len(stored):
        place = next(i for i, (a, b) in enumerate(zip(found, stored)) if a != b)
        return first_difference(found[place], stored[place], f"{at}[{place}]")
    return f"{at.lstrip('.')} is {found!r}, stored is {stored!r}"


if __name__ == "__main__":
    sys.exit(main())
