"""Other libraries' decode attention over the same shapes, where they are installed: seconds, or why not.

Each gets its own memory in the form it asks for, and as many layers as ours in turn, so that it finds
the L2 as ours does. None of these has run here: the figures come from whoever has a card.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch

from decodebench.cache.tensors import Cache
from decodebench.layout.pool import Batch
from decodebench.measure.clock import measure

#: column → the module that a user would install
MODULES = {"flashinfer": "flashinfer", "flash_attn": "flash_attn", "vllm_triton": "vllm", "sdpa": "torch"}


def rivals(
    cache: Cache, batch: Batch, layers: list[str], ours: float, seconds: float, cold: bool
) -> dict[str, object]:
    """``x_…`` columns: how many times longer each takes than ``ours`` (seconds a layer), and ``why_no_…``."""
    row: dict[str, object] = {}
    for name, module in MODULES.items():
        try:
            if find_spec(module) is None:
                raise ImportError(f"{module} is not installed")
            steps = [_STEPS[name](cache, batch, layer) for layer in layers]
            timing = measure(partial(_all, steps), device=cache.device, cold=cold, min_seconds=seconds)
            row[f"x_{name}"] = timing.median / len(layers) / ours
        except Exception as error:  # another library's own limits and changes are no failure of ours
            row[f"why_no_{name}"] = " ".join(str(error).split())[:200] or type(error).__name__
    return row


def _all(steps: list[Callable[[], object]]) -> None:
    for step in steps:
        step()


def _shapes(cache: Cache, batch: Batch, layer: str):
    """(spec, query heads, view, block table [B, W] int32, tokens of each request, queries [B, heads, Dk])."""
    layout, spec = cache.layout, cache.layout.layer_specs[layer]
    size = getattr(spec, "head_size", 0)
    if (
        layout.model is None
        or not size
        or getattr(spec, "head_size_v", 0) != size
        or getattr(spec, "sliding_window", None)
    ):
        raise ValueError("compared on plain attention only: keys and values of one size, no window")
    view = cache.view(layer)
    if not isinstance(view, torch.Tensor) or view.element_size() != 2:
        raise ValueError("compared on two-byte caches only")
    heads = layout.model.query_heads(layer, layout.tensor_parallel_size)
    rows = [blocks.block_ids[layout.group_of[layer]] for blocks in batch.requests]
    width = max(map(len, rows))
    table = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int32)
    tokens = [blocks.request.num_tokens for blocks in batch.requests]
    q = torch.randn(len(rows), heads, size).to(view.dtype).to(cache.device)
    return spec, heads, view, table.to(cache.device), tokens, q


def _apart(view: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [blocks, entries, heads, size], each by itself, token-major."""
    pages = view.transpose(1, 2)
    return pages[..., :size].contiguous().nan_to_num(), pages[..., size:].contiguous().nan_to_num()


def _sdpa(cache: Cache, batch: Batch, layer: str) -> Callable[[], object]:
    """Gather, then torch's own attention: what one writes first."""
    spec, _, view, table, tokens, q = _shapes(cache, batch, layer)
    longest = max(tokens)
    rows = table.long()

    def step() -> object:
        kv = view[rows].transpose(1, 2).flatten(2, 3)[:, :, :longest]
        k, v = kv[..., : spec.head_size], kv[..., spec.head_size :]
        return torch.nn.functional.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)

    return step


def _flashinfer(cache: Cache, batch: Batch, layer: str) -> Callable[[], object]:
    import flashinfer

    spec, heads, view, table, tokens, q = _shapes(cache, batch, layer)
    entries = view.shape[2]
    needed = [-(-n // entries) for n in tokens]
    indptr = torch.tensor([0, *torch.tensor(needed).cumsum(0).tolist()], dtype=torch.int32)
    indices = torch.cat([row[:n] for row, n in zip(table, needed)])
    last = torch.tensor([(n - 1) % entries + 1 for n in tokens], dtype=torch.int32)
    scratch = torch.empty(128 << 20, dtype=torch.uint8, device=cache.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        scratch, use_tensor_cores=heads > spec.num_kv_heads
    )
    shape = (heads, spec.num_kv_heads, spec.head_size, entries)
    types = {"q_data_type": q.dtype, "kv_data_type": view.dtype}
    wrapper.plan(indptr.to(cache.device), indices, last.to(cache.device), *shape, **types)
    pages = _apart(view, spec.head_size)
    return lambda: wrapper.run(q, pages)


def _flash_attn(cache: Cache, batch: Batch, layer: str) -> Callable[[], object]:
    from flash_attn import flash_attn_with_kvcache

    spec, _, view, table, tokens, q = _shapes(cache, batch, layer)
    k, v = _apart(view, spec.head_size)
    lengths = torch.tensor(tokens, dtype=torch.int32, device=cache.device)
    options = {"cache_seqlens": lengths, "block_table": table, "causal": True}
    return lambda: flash_attn_with_kvcache(q.unsqueeze(1), k, v, **options)


def _vllm_triton(cache: Cache, batch: Batch, layer: str) -> Callable[[], object]:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    spec, _, view, table, tokens, q = _shapes(cache, batch, layer)
    k, v = _apart(view, spec.head_size)
    lengths = torch.tensor(tokens, dtype=torch.int32, device=cache.device)
    starts = torch.arange(len(tokens) + 1, dtype=torch.int32, device=cache.device)
    out = torch.empty_like(q)
    return lambda: unified_attention(
        q=q,
        k=k,
        v=v,
        out=out,
        cu_seqlens_q=starts,
        max_seqlen_q=1,
        seqused_k=lengths,
        max_seqlen_k=max(tokens),
        softmax_scale=spec.head_size**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=table,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )


_STEPS = {"flashinfer": _flashinfer, "flash_attn": _flash_attn, "vllm_triton": _vllm_triton, "sdpa": _sdpa}
