"""vLLM's description of its KV cache → ours.

vLLM's connector gets a ``Layout`` of vLLM's own classes. ``layout_of`` turns it into the
``decodebench.layout.layout.KVCacheConfig`` that the connector, the fill and the audit work with. A kind
of layer that cannot be described exactly is refused by name: nothing is guessed from tensors.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as v

from decodebench import errors
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.layout import Layout
from decodebench.layout.placement import KVCacheTensor
from decodebench.models import specs
from decodebench.vllm import compat

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig


class UnknownToDecodebench(errors.DecodebenchError):
    """Something in vLLM's KV cache that has no description here."""


#: cache dtypes (``--kv-cache-dtype``) that hold one plain fp8 number an element
FP8_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def dtype_name(dtype: torch.dtype | str) -> str:
    """torch's name of a dtype, without the module."""
    return str(dtype).removeprefix("torch.")


def layout_of(kv_cache_config: v.KVCacheConfig, vllm_config: VllmConfig | None = None) -> Layout:
    """The layout of a running engine (or of one worker's share of it).

    ``vllm_config`` supplies what vLLM's ``Layout`` leaves out: the fp8 type behind uint8
    caches, the maximum length, tokens in flight, decode context parallelism and the order of
    memory. Without it lengths are 0 and fp8 means e4m3. Raises ``UnknownToDecodebench`` naming
    the layer for kinds that cannot be described.
    """
    cache_dtype = vllm_config.cache_config.cache_dtype if vllm_config else "auto"
    max_encoder_tokens = vllm_config.scheduler_config.max_num_encoder_input_tokens if vllm_config else 0
    return Layout(
        groups=tuple(
            _group(number, group, cache_dtype, max_encoder_tokens)
            for number, group in enumerate(kv_cache_config.kv_cache_groups)
        ),
        tensors=tuple(
            KVCacheTensor(tuple(t.layers), t.offset, t.layer_stride, t.block_stride, t.size)
            for t in kv_cache_config.kv_cache_tensors
        ),
        pool_num_blocks=(kv_cache_config.num_blocks,),
        size=max((t.size for t in kv_cache_config.kv_cache_tensors), default=0),
        memory_order=_memory_order(kv_cache_config, vllm_config),
        max_model_len=vllm_config.model_config.max_model_len if vllm_config else 0,
        max_in_flight_tokens=vllm_config.max_in_flight_tokens if vllm_config else 0,
        decode_context_parallel_size=(
            vllm_config.parallel_config.decode_context_parallel_size if vllm_config else 1
        ),
        needs_kv_cache_zeroing=kv_cache_config.needs_kv_cache_zeroing,
    )


def _memory_order(kv_cache_config: v.KVCacheConfig, vllm_config) -> str:
    """The engine's order of dimensions; the CPU backend keeps heads outside tokens (LBHNC)."""
    try:
        resolved = vllm_config.cache_config.get_resolved_kv_cache_layout().name
    except (AttributeError, AssertionError, ValueError):  # no config, or not resolved yet
        resolved = kv_cache_config.kv_cache_layout
    return resolved or "LBNHC"


def _group(
    number: int, group: v.KVCacheGroupSpec, cache_dtype: str, max_encoder_tokens: int
) -> KVCacheGroupSpec:
    if group.host_resident:
        raise UnknownToDecodebench(
            f"group {number} ({group.layer_names[0]!r}) lives in host memory, which no decode step "
            "reads directly: turn host offloading off"
        )
    merged = group.kv_cache_spec
    if type(merged) is v.FullAttentionSpec:
        # windows allocated as full attention: vLLM's merged spec no longer says which layers have
        # one, and a layer without it reads every block
        merged = replace(merged, sliding_window=None, attention_chunk_size=None)
    per_layer = getattr(merged, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, merged)
    layer_specs = tuple(
        spec_of(per_layer[name], name, cache_dtype, max_encoder_tokens) for name in group.layer_names
    )
    # a pipeline stage may own no layer of a group: its block tables still count blocks of this kind
    governing = (
        layer_specs[0]
        if layer_specs
        else spec_of(
            next(iter(per_layer.values()), merged), f"group {number}", cache_dtype, max_encoder_tokens
        )
    )
    return KVCacheGroupSpec(tuple(group.layer_names), layer_specs, governing)


def spec_of(
    spec: v.KVCacheSpec, layer: str, cache_dtype: str = "auto", max_encoder_tokens: int = 0
) -> specs.KVCacheSpec:
    """One layer's spec. ``cache_dtype`` is ``--kv-cache-dtype``: what uint8 caches hold."""
    shared = {
        "block_size": spec.block_size,
        "page_size_padded": getattr(spec, "page_size_padded", None),
        "dcp_sharded": compat.dcp_sharded(spec),
        "block_stride_alignment": compat.block_stride_alignment(spec),
    }
    if isinstance(spec, v.MambaSpec):
        _check_states(spec, layer)
        return specs.MambaSpec(
            **shared,
            shapes=tuple(tuple(shape) for shape in spec.shapes),
            dtypes=tuple(dtype_name(dtype) for dtype in spec.dtypes),
            mamba_type=getattr(spec.mamba_type, "name", str(spec.mamba_type)),
            mamba_cache_mode=spec.mamba_cache_mode,
            num_speculative_blocks=spec.num_speculative_blocks,
            num_prefill_checkpoint_blocks=spec.num_prefill_checkpoint_blocks,
        )
    kind = _attention_kind(spec, layer, max_encoder_tokens)
    return kind.pop("class")(**shared, **kind, **_attention_fields(spec, layer, cache_dtype))


def _check_states(spec: v.MambaSpec, layer: str) -> None:
    """Raise where a state would begin at a byte at which its numbers cannot be read in place."""
    at = 0
    for shape, dtype in zip(spec.shapes, spec.dtypes):
        if at % dtype.itemsize:
            raise UnknownToDecodebench(
                f"layer {layer!r}: {getattr(spec.mamba_type, 'name', spec.mamba_type)} in vLLM "
                f"{vllm.__version__} puts {dtype_name(dtype)} numbers at byte {at} of a page, no multiple of "
                f"{dtype.itemsize}, which vLLM's own view cannot read either: choose other state dtypes "
                "(--mamba-cache-dtype) or a tensor-parallel size that leaves an even number of channels"
            )
        at += prod(shape) * dtype.itemsize


def _attention_kind(spec: v.KVCacheSpec, layer: str, max_encoder_tokens: int) -> dict:
    """Our class for an attention-like spec and the fields that are its own; subclasses come first."""
    name = type(spec).__name__
    full = {
        "sliding_window": getattr(spec, "sliding_window", None),
        "attention_chunk_size": getattr(spec, "attention_chunk_size", None),
    }
    if compat.is_ring(spec):
        return {"class": specs.CircularBufferSpec}
    if isinstance(spec, v.SlidingWindowMLASpec):
        return {"class": specs.SlidingWindowMLASpec, "sliding_window": spec.sliding_window}
    if isinstance(spec, v.SlidingWindowSpec):
        return {"class": specs.SlidingWindowSpec, "sliding_window": spec.sliding_window}
    if isinstance(spec, v.ChunkedLocalAttentionSpec):
        return {"class": specs.ChunkedLocalAttentionSpec, "attention_chunk_size": spec.attention_chunk_size}
    if isinstance(spec, v.CrossAttentionSpec):
        return {"class": specs.CrossAttentionSpec, "max_encoder_tokens": max_encoder_tokens}
    if isinstance(spec, v.MLAAttentionSpec):
        return {"class": specs.MLAAttentionSpec, **full, "cache_role": spec.cache_role.name}
    if type(spec) is v.FullAttentionSpec:
        return {"class": specs.FullAttentionSpec, **full}
    raise UnknownToDecodebench(
        f"layer {layer!r}: vLLM's {name} has no counterpart in decodebench "
        "(known: full, MLA, sliding-window, chunked, cross attention, circular buffers, states)"
    )


def _attention_fields(spec: v.AttentionSpec, layer: str, cache_dtype: str) -> dict:
    """Heads, sizes and what the bytes hold: plain numbers of some dtype, or a packed format."""
    if spec.tokens_per_state != int(spec.tokens_per_state):
        raise UnknownToDecodebench(
            f"layer {layer!r} stores {1 / spec.tokens_per_state} states a token: not supported"
        )
    cache_dtype = getattr(spec, "cache_dtype_str", None) or cache_dtype
    dtype, packed, dense = dtype_name(spec.dtype), None, _is_dense(spec)
    if dense and spec.kv_quant_mode == v.KVQuantMode.FP8_PER_TENSOR and cache_dtype in FP8_DTYPES:
        dtype = FP8_DTYPES[cache_dtype]
        if dtype == "float8_e4m3fn" and current_platform.fp8_dtype() != torch.float8_e4m3fn:
            raise UnknownToDecodebench(f"layer {layer!r}: this device stores {current_platform.fp8_dtype()}")
    elif not (dense and spec.kv_quant_mode == v.KVQuantMode.NONE and spec.dtype.is_floating_point):
        # scales between the numbers, or bytes whose format nothing declares
        packed = cache_dtype if cache_dtype != "auto" else f"{spec.kv_quant_mode.name.lower()} {dtype}"
    return {
        "num_kv_heads": spec.num_heads if packed else spec.num_kv_heads,
        "head_size": spec.head_size,
        "head_size_v": spec.head_size_v,
        "dtype": dtype,
        "packed": packed,
        "state_content_bytes": spec.state_content_size_bytes if packed else None,
        "tokens_per_state": int(spec.tokens_per_state),
        "num_head_slots": None if packed or spec.num_heads == spec.num_kv_heads else spec.num_heads,
    }


def _is_dense(spec: v.AttentionSpec) -> bool:
    """Whether an entry holds its keys and values and no byte more, in whatever order of heads.

    Some kernels keep keys and values in two slots (``num_head_slots``): plain numbers all the same.
    """
    content = spec.num_kv_heads * (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
    return spec.num_heads * spec.state_content_size_bytes == content


def owned_groups(layout: Layout) -> tuple[Layout, tuple[int, ...]]:
    """The part of a layout that this worker holds layers of, and the numbers of those groups.

    A pipeline stage gets every group, without the layers of other stages; a group may be left empty.
    """
    kept = tuple(number for number, group in enumerate(layout.groups) if group.layer_names)
    return replace(layout, groups=tuple(layout.groups[number] for number in kept)), kept


def without_shared_layers(layout: Layout, kv_caches: dict) -> dict:
    """The registered tensors less those of layers that reuse another layer's cache.

    vLLM registers such a layer under its own name with the other's tensor; it owns no memory.
    """
    owned = {_address(kv_caches[name]) for name in layout.layer_names if name in kv_caches}
    return {
        name: tensor
        for name, tensor in kv_caches.items()
        if name in layout.layer_index or _address(tensor) not in owned
    }


def _address(tensors) -> tuple[int, ...]:
    listed = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    return tuple(tensor.data_ptr() for tensor in listed)


def layout_of_engine(llm: LLM) -> Layout:
    """The layout of an ``LLM`` whose engine runs in this process."""
    config = llm.llm_engine.vllm_config
    core = llm.llm_engine.engine_core.engine_core
    return layout_of(core.scheduler.kv_cache_config, config)
