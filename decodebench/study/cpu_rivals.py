"""Other ways to take a decode step's layer on a CPU: what one writes first, and vLLM's own kernels.

Each is a function without arguments over memory of its own in the form that it asks for, of the same
shapes and block tables as ours, or the reason why there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import cast

import torch

from decodebench.cache.tensors import Cache, torch_dtype
from decodebench.layout.pool import Batch
from decodebench.layout.reads import model_layer
from decodebench.models.specs import AttentionSpec

Way = Callable[[], object]


def plain(cache: Cache, batch: Batch, layer: str) -> Way | str:
    """Gather the visible blocks, then torch's attention with ``enable_gqa``: what one writes first."""
    spec, heads, tables, tokens = _attention(cache, batch, layer)
    if not spec.head_size_v or not spec.written_by_steps:
        return "latent or encoder attention"
    view, window = _view(cache, layer), getattr(spec, "sliding_window", None)
    entries = view.shape[2]
    first = max(0, tokens - window) // entries if window else 0
    last = -(-tokens // entries)
    table = tables[:, first:last].long().to(cache.device)
    dtype = view.dtype if view.element_size() > 1 else torch.bfloat16
    q = torch.randn(len(table), heads, 1, spec.head_size, device=cache.device).to(dtype)
    start = max(0, tokens - window) - first * entries if window else 0
    stop = tokens - first * entries

    def step() -> torch.Tensor:
        blocks = view[table].to(dtype)  # [B, blocks, heads, entries, width]
        kv = blocks.transpose(1, 2).flatten(2, 3)[:, :, start:stop]
        k, v = kv[..., : spec.head_size], kv[..., spec.head_size :]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return step


def multiply(cache: Cache, batch: Batch, layers: list[str]) -> Way:
    """An in-place multiply of as many bytes as the states hold, in their own dtypes."""
    parts = [part for layer in layers for part in cache.layout.layer_specs[layer].parts()]
    shape = (len(batch.requests),)
    states = [torch.ones(shape + p.shape, dtype=torch_dtype(p.dtype), device=cache.device) for p in parts]

    def step() -> None:
        for state in states:
            state.mul_(0.999)

    return step


def vllm(cache: Cache, batch: Batch, layer: str, kind: str) -> Way | str:
    """vLLM's CPU kernel for this layer, or why there is none."""
    if cache.device.type != "cpu":
        return "a CPU's kernels"
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    spec = cache.layout.layer_specs[layer]
    try:
        if spec.holds_state:
            return _vllm_state(cache, batch, layer, kind)
        if cast(AttentionSpec, spec).head_size_v == 0:
            return _vllm_latent(cache, batch, layer)
        return _vllm_attention(cache, batch, layer)
    except Exception as error:  # another library's own limits and changes are no failure of ours
        return " ".join(str(error).split())[:200] or type(error).__name__


def _attention(cache: Cache, batch: Batch, layer: str) -> tuple[AttentionSpec, int, torch.Tensor, int]:
    """(spec, query heads, block table [B, W] int32, tokens of each request)."""
    layout, spec = cache.layout, cast(AttentionSpec, cache.layout.layer_specs[layer])
    model = getattr(layout, "model", None)
    heads = spec.num_kv_heads if model is None else model.query_heads(layer, layout.tensor_parallel_size)
    tables = [blocks.block_ids[layout.group_of[layer]] for blocks in batch.requests]
    return spec, heads, torch.tensor(tables, dtype=torch.int32), batch.requests[0].request.num_tokens


def _view(cache: Cache, layer: str) -> torch.Tensor:
    """Keys and values side by side, [blocks, heads, entries, width]."""
    return cast(torch.Tensor, cache.view(layer))


def _vllm_attention(cache: Cache, batch: Batch, layer: str) -> Way | str:
    """Its pages are head-major with a packing of their own, so it gets memory of its own, the same size."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    spec, heads, table, tokens = _attention(cache, batch, layer)
    view, size = _view(cache, layer), spec.head_size
    entries = view.shape[2]
    if entries % 16 or spec.head_size_v != size:
        return f"blocks of {entries} tokens, keys of {size} and values of {spec.head_size_v}"
    fp8 = view.element_size() == 1
    dtype, window = torch.bfloat16 if fp8 else view.dtype, getattr(spec, "sliding_window", None) or -1
    pages = torch.randn(len(view), spec.num_kv_heads, 2 * entries, size).to(view.dtype)
    keys, values = pages.chunk(2, dim=2)
    kept = {"kv_cache_dtype": "fp8_e4m3" if view.dtype == torch.float8_e4m3fn else "fp8_e5m2"} if fp8 else {}
    if fp8:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    isa = _get_attn_isa(dtype, entries, size, "auto")
    starts = torch.arange(len(table) + 1, dtype=torch.int32)
    lengths = torch.full((len(table),), tokens, dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(table),
        num_heads=heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=size,
        seq_lens=lengths,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=window,
        isa=isa,
        enable_kv_split=True,
        **kept,
    )
    q = torch.randn(len(table), heads, size).to(dtype)
    out = torch.empty_like(q)

    def step() -> torch.Tensor:
        ops.cpu_attention_with_kv_cache(
            query=q,
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=window,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
            **kept,
        )
        return out

    return step


def _vllm_latent(cache: Cache, batch: Batch, layer: str) -> Way | str:
    from vllm import _custom_ops as ops

    spec, heads, table, tokens = _attention(cache, batch, layer)
    view = _view(cache, layer)
    if view.element_size() == 1:
        return "no latent kernel for one-byte caches"
    rank = getattr(model_layer(cache.layout, layer), "kv_lora_rank", None) or spec.head_size - 64
    pages = torch.randn(len(view), view.shape[2], spec.head_size).to(view.dtype)
    q = torch.randn(len(table), heads, spec.head_size).to(view.dtype)
    out = torch.empty(len(table), heads, rank, dtype=view.dtype)
    lengths = torch.full((len(table),), tokens, dtype=torch.int32)

    def step() -> torch.Tensor:
        ops.mla_decode_kvcache_cpu(out, q, pages, spec.head_size**-0.5, table, lengths)
        return out

    step()
    return step


def _vllm_state(cache: Cache, batch: Batch, layer: str, kind: str) -> Way | str:
    """The state update alone, and of a short convolution the whole of it."""
    from vllm import _custom_ops as ops

    parts = {part.name: part for part in cache.layout.layer_specs[layer].parts()}
    size = len(batch.requests)
    rows = torch.arange(1, size + 1, dtype=torch.int32)
    half = torch.bfloat16
    if kind == "short_conv":
        length, channels = parts["conv"].shape
        state = torch.randn(size + 1, channels, length).to(torch_dtype(parts["conv"].dtype))
        x = torch.randn(size, channels).to(state.dtype)
        weight = torch.randn(channels, length + 1).to(state.dtype)
        return lambda: ops.causal_conv1d_update_cpu(x, state, weight, None, False, rows, False)
    name = "ssm" if "ssm" in parts else "recurrent"
    shape, dtype = parts[name].shape, torch_dtype(parts[name].dtype)
    state = torch.randn(size + 1, *shape).to(dtype)
    if kind in ("mamba1", "mamba2"):
        heads, width, n = shape if kind == "mamba2" else (1, *shape)
        if kind == "mamba1":
            state = state.unsqueeze(1)
        x, dt = torch.randn(size, heads, width).to(half), torch.rand(size, heads, width).to(half)
        a = -torch.rand(heads, width, n)
        if kind == "mamba2":
            dt = dt[..., :1].expand(size, heads, width)
            a = a[:, :1, :1].expand(heads, width, n)
        groups = max(1, (parts["conv"].shape[1] - heads * width) // (2 * n)) if kind == "mamba2" else 1
        b, c = (torch.randn(size, groups, n).to(half) for _ in range(2))
        d, bias, out = torch.randn(heads, width), torch.randn(heads, width), torch.empty_like(x)
        if kind == "mamba2":
            d, bias = d[:, :1].expand(heads, width), bias[:, :1].expand(heads, width)
        step = lambda: ops.selective_state_update_cpu(  # noqa: E731
            state, x, dt, a, b, c, d, None, bias, True, rows, rows, 0, out, None, None
        )
        step()
        return step
    if kind == "gdn":
        heads, dv, dk = shape
        key_heads = (parts["conv"].shape[1] - heads * dv) // (2 * dk)
        q, k = (torch.randn(1, size, key_heads, dk).to(half) for _ in range(2))
        v = torch.randn(1, size, heads, dv).to(half)
        gates = [torch.randn(size, heads).to(half) for _ in range(2)]
        decay, bias = torch.randn(heads), torch.randn(heads).to(half)
        starts = torch.arange(size + 1, dtype=torch.int32)
        step = lambda: ops.fused_sigmoid_gating_delta_rule_update_cpu(  # noqa: E731
            decay, bias, q, k, v, *gates, state, rows, starts, True
        )
        step()
        return step
    return f"vLLM has no CPU kernel for {kind} states"
