"""vLLM's releases: which this connector was run with, and what differs between them.

No other module of decodebench names a release of the engine's or asks whether a class has a field.
``plan``'s releases are rules about layouts, apart from this (``models.engines``).

A release that is not listed starts with a warning, after a self-test of everything this connector
touches: what is gone or takes other arguments is named in one line before anything is allocated.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from decodebench.errors import DecodebenchError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

#: vLLM releases whose engine ran this connector's tests; the last one has no CPU build of its own
#: and was run on the extension of the one before
TESTED = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")


class UntestedVersion(DecodebenchError):
    """A vLLM release that this connector was never run with."""


class IncompatibleVersion(DecodebenchError):
    """A vLLM release that lacks something this connector needs."""


@dataclass(frozen=True)
class Difference:
    """Something that changed between two releases, and what stands in for it on the other side."""

    since: str
    what: str
    bridge: str


DIFFERENCES = (
    Difference(
        "0.31",
        "specs say whether decode context parallelism shards them (dcp_sharded)",
        "before: full and latent attention is sharded, nothing else",
    ),
    Difference(
        "0.32",
        "specs compute the alignment between blocks (get_block_stride_alignment)",
        "before: a number of bytes (0.31), or none (0.30)",
    ),
    Difference(
        "0.32",
        "an indexer's raw tail is a CircularBufferSpec",
        "before: KpoolTailSpec, one block a request as well",
    ),
    Difference(
        "0.32",
        "connectors name the groups they load (get_loaded_kv_cache_group_ids)",
        "the connector names all of them; before, nobody asks",
    ),
    Difference(
        "0.33",
        "planning lives in a module of its own (kv_cache_planning)",
        "read only by tests: the connector is handed the plan",
    ),
)


# -- what specs say ------------------------------------------------------------------------------


def dcp_sharded(spec: KVCacheSpec) -> bool:
    """Whether decode context parallelism splits this cache's tokens between ranks."""
    interface = import_module("vllm.v1.kv_cache_interface")
    return getattr(spec, "dcp_sharded", isinstance(spec, interface.FullAttentionSpec))


def block_stride_alignment(spec: KVCacheSpec) -> int:
    """Bytes that the distance between two blocks must be a multiple of."""
    if hasattr(spec, "get_block_stride_alignment"):
        return spec.get_block_stride_alignment()
    return getattr(spec, "block_stride_alignment", None) or 1


def is_ring(spec: KVCacheSpec) -> bool:
    """Whether a layer keeps one circular buffer a request, whatever its length."""
    interface = import_module("vllm.v1.kv_cache_interface")
    kinds = (getattr(interface, name, ()) for name in ("CircularBufferSpec", "KpoolTailSpec"))
    return any(isinstance(spec, kind) for kind in kinds)


# -- versions ------------------------------------------------------------------------------------


def release(version: str) -> str:
    """``0.32`` of ``0.32.0+cpu``."""
    return ".".join(version.split("+")[0].split(".")[:2])


def check_version(version: str, strict: bool) -> str | None:
    """None for a tested vLLM; else the self-test runs, and a warning is returned.

    Raises ``UntestedVersion`` instead of the warning where ``strict``, and ``IncompatibleVersion``
    where the self-test finds something missing.
    """
    if version.split("+")[0] in TESTED:
        return None
    message = (
        f"vLLM {version} was never tested with decodebench's connector (tested: {', '.join(TESTED)}): "
        "its connector interface is experimental and changes between releases; audit='bytes' shows "
        "whether fills still land where decode reads"
    )
    if strict:
        raise UntestedVersion(message)
    faults = self_test()
    if faults:
        raise IncompatibleVersion(
            f"vLLM {version} does not fit decodebench's connector: {'; '.join(faults)}; "
            f"use one of {', '.join(TESTED)}"
        )
    return f"{message}; its classes and methods passed the self-test"


#: module → class (or function) → attributes that this package reads
READ: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.v1.kv_cache_interface": {
        "KVCacheConfig": (
            "kv_cache_groups",
            "kv_cache_tensors",
            "num_blocks",
            "kv_cache_layout",
            "needs_kv_cache_zeroing",
            "transfer_group_ids",
        ),
        "KVCacheGroupSpec": ("layer_names", "kv_cache_spec", "host_resident"),
        "KVCacheTensor": ("layers", "offset", "layer_stride", "block_stride", "size"),
        "KVCacheSpec": ("block_size",),
        "AttentionSpec": (
            "num_kv_heads",
            "num_heads",
            "head_size",
            "head_size_v",
            "dtype",
            "kv_quant_mode",
            "page_size_padded",
            "num_head_slots",
            "state_content_bytes",
            "state_content_size_bytes",
            "tokens_per_state",
        ),
        "FullAttentionSpec": ("sliding_window", "attention_chunk_size"),
        "MLAAttentionSpec": ("cache_dtype_str", "cache_role"),
        "SlidingWindowSpec": ("sliding_window",),
        "SlidingWindowMLASpec": ("cache_dtype_str",),
        "ChunkedLocalAttentionSpec": ("attention_chunk_size",),
        "CrossAttentionSpec": (),
        "MambaSpec": (
            "shapes",
            "dtypes",
            "page_size_padded",
            "mamba_type",
            "mamba_cache_mode",
            "num_speculative_blocks",
            "num_prefill_checkpoint_blocks",
        ),
        "UniformTypeKVCacheSpecs": ("kv_cache_specs",),
        "KVQuantMode": ("NONE", "FP8_PER_TENSOR"),
    },
    "vllm.v1.request": {"Request": ("request_id", "num_tokens", "num_preemptions")},
    "vllm.v1.core.sched.output": {"SchedulerOutput": ("kv_connector_block_state",)},
    "vllm.v1.core.kv_cache_manager": {"KVCacheBlocks": ("get_block_ids",)},
    "vllm.config": {
        "VllmConfig": (
            "cache_config",
            "model_config",
            "scheduler_config",
            "parallel_config",
            "kv_transfer_config",
            "max_in_flight_tokens",
        ),
        "CacheConfig": ("cache_dtype", "get_resolved_kv_cache_layout"),
        "ParallelConfig": ("decode_context_parallel_size",),
        "SchedulerConfig": ("max_num_encoder_input_tokens",),
        "KVTransferConfig": ("kv_connector", "kv_connector_extra_config", "engine_id"),
    },
    "vllm.platforms": {"current_platform": ("fp8_dtype",)},
    "vllm.distributed.parallel_state": {"get_world_group": (), "model_parallel_is_initialized": ()},
    "vllm.distributed.kv_transfer.kv_connector.v1": {
        "KVConnectorBase_V1": ("_get_connector_metadata",),
        "KVConnectorRole": ("SCHEDULER", "WORKER"),
        "SupportsHMA": (),
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {"KVConnectorMetadata": ()},
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
        "KVConnectorStats": ("reset", "aggregate", "reduce", "is_empty", "data")
    },
}

#: the connector's methods that vLLM calls → the names of their arguments, as vLLM passes them
CALLED: dict[str, tuple[str, ...]] = {
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "request_finished": ("request", "block_ids"),
    "register_kv_caches": ("kv_caches",),
    "start_load_kv": ("forward_context",),
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
    "wait_for_save": (),
    "get_kv_connector_stats": (),
    "build_kv_connector_stats": ("data",),
}


def self_test() -> list[str]:
    """What the installed vLLM lacks of everything this package reads or is called by; empty where nothing."""
    faults = []
    for module, classes in READ.items():
        try:
            found = import_module(module)
        except ImportError as error:
            faults.append(f"{module} cannot be imported ({error})")
            continue
        for name, attributes in classes.items():
            owner = getattr(found, name, None)
            if owner is None:
                faults.append(f"{module} has no {name}")
                continue
            faults += [f"{name} has no {a}" for a in attributes if not _has(owner, a)]
    return faults or _called_otherwise()


def _called_otherwise() -> list[str]:
    """Methods that vLLM calls with other arguments, or that it asks for and nobody wrote."""
    base = import_module("vllm.distributed.kv_transfer.kv_connector.v1").KVConnectorBase_V1
    faults = [
        f"connectors must have a new method {name}"
        for name in sorted(base.__abstractmethods__ - CALLED.keys())
    ]
    for name, arguments in CALLED.items():
        if not hasattr(base, name):
            faults.append(f"connectors are no longer asked to {name}")
            continue
        parameters = inspect.signature(getattr(base, name)).parameters.values()
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        taken = tuple(p.name for p in parameters if p.name != "self" and p.kind not in kinds)
        if taken != arguments:
            faults.append(f"{name} takes {', '.join(taken) or 'nothing'}, not {', '.join(arguments)}")
    return faults


def _has(owner: object, name: str) -> bool:
    """Whether a class declares an attribute, as a field, a property, or in its ``__init__``."""
    if hasattr(owner, name) or not isinstance(owner, type):
        return hasattr(owner, name)
    for kind in owner.__mro__:
        if name in getattr(kind, "__dataclass_fields__", ()):
            return True
        code = getattr(kind.__dict__.get("__init__"), "__code__", None)
        if code is not None and name in code.co_names:
            return True
    return False
