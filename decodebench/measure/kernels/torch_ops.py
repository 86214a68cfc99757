"""The ``torch`` backend: paged attention from torch's own operators, on any device.

The query heads of one KV head become the rows of one product (at one query token that is about ten
times faster on a CPU than ``scaled_dot_product_attention`` with ``enable_gqa``). Contiguous runs of
blocks are views; scattered ones are gathered a few MiB at a time into a reused scratch; pieces are
merged by their log-sum-exp. State updates are the compiled ones of ``cpp`` where they build and
take the shapes, else ``reference`` in float32 (``can_update`` says why).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decodebench.measure.kernels import cpp, reference
from decodebench.measure.kernels.reference import can_attend as can_attend
from decodebench.measure.kernels.reference import why_not as why_not
from decodebench.measure.kernels.reference import write_kv as write_kv

NAME = "torch"
SCRATCH_BYTES = 4 << 20


@dataclass(frozen=True)
class Piece:
    """Tokens of one request, as entries [offset, offset + tokens) of the named blocks laid end to end."""

    request: int
    blocks: torch.Tensor | None  # gathered where given
    first_block: int
    num_blocks: int
    offset: int
    tokens: int


def prepare(view: torch.Tensor, table: torch.Tensor, start: torch.Tensor, stop: torch.Tensor) -> list[Piece]:
    """Cut every request's range into pieces; host work done once a batch, outside the clock.

    A run of consecutive blocks is a view where the memory between its blocks has no gap.
    """
    _, heads, entries, width = view.shape
    chunk = max(1, SCRATCH_BYTES // max(1, heads * entries * width * view.element_size()))
    seamless = view.stride(0) == entries * view.stride(2) and view.element_size() > 1
    pieces = []
    for i, (row, a, b) in enumerate(zip(table.tolist(), start.tolist(), stop.tolist())):
        if b <= a:
            continue
        ids = row[a // entries : (b - 1) // entries + 1]
        at = 0
        while at < len(ids):
            run = 1
            while at + run < len(ids) and ids[at + run] == ids[at] + run:
                run += 1
            if seamless and (run * entries >= 256 or run == len(ids)):
                end, blocks = at + run, None
            else:
                end = min(at + chunk, len(ids))
                blocks = torch.tensor(ids[at:end], device=view.device)
            first = a % entries if at == 0 else 0
            last = b - (a // entries + at) * entries if end == len(ids) else (end - at) * entries
            pieces.append(Piece(i, blocks, ids[at], end - at, first, last - first))
            at = end
    return pieces


def attend(
    q: torch.Tensor,
    view: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    stop: torch.Tensor,
    *,
    scale: float,
    head_size_v: int,
    v_offset: int,
    plan: list[Piece] | None = None,
) -> torch.Tensor:
    """``reference.attend`` with float32 accumulation, in q's dtype; ``plan`` from ``prepare``."""
    batch, heads, dk = q.shape
    _, kv_heads, entries, width = view.shape
    group = heads // kv_heads
    fp8 = view.element_size() == 1
    compute = torch.float32 if torch.float32 in (q.dtype, view.dtype) else (q.dtype if fp8 else view.dtype)
    rows = q.to(compute).view(batch, kv_heads, group, dk)
    plan = prepare(view, table, start, stop) if plan is None else plan
    most = max((p.num_blocks for p in plan if p.blocks is not None), default=0)
    source = view.view(torch.uint8) if fp8 else view
    token_major = view.stride(1) < view.stride(2)
    source = source.transpose(1, 2) if token_major else source  # gathered in the order of the memory
    scratch = torch.empty(most, *source.shape[1:], dtype=source.dtype, device=view.device)
    out = torch.zeros(batch, kv_heads, group, head_size_v, device=q.device)
    total = torch.full((batch, kv_heads, group, 1), -torch.inf, device=q.device)
    for p in plan:
        if p.blocks is None:
            shape = (kv_heads, p.tokens, width)
            at = view.storage_offset() + p.first_block * view.stride(0) + p.offset * view.stride(2)
            kv = view.as_strided(shape, (view.stride(1), view.stride(2), 1), at)
        else:
            gathered = torch.index_select(source, 0, p.blocks, out=scratch[: p.num_blocks])
            gathered = gathered.view(view.dtype).to(compute) if fp8 else gathered
            gathered = gathered.transpose(1, 2) if token_major else gathered
            kv = gathered.transpose(0, 1).reshape(kv_heads, p.num_blocks * entries, width)
            kv = kv[:, p.offset : p.offset + p.tokens]
        kv = kv if kv.dtype == compute else kv.to(compute)
        piece, lse = _attend_piece(rows[p.request], kv, scale, head_size_v, v_offset)
        i = p.request
        merged = torch.logaddexp(total[i], lse)
        out[i] = out[i] * torch.exp(total[i] - merged) + piece * torch.exp(lse - merged)
        total[i] = merged
    return out.reshape(batch, heads, head_size_v).to(q.dtype)


def _attend_piece(q, kv, scale: float, head_size_v: int, v_offset: int):
    """[KV heads, group, Dv] and its log-sum-exp [KV heads, group, 1], float32, over all of ``kv``."""
    dk, group = q.shape[-1], q.shape[1]
    k, v = kv[..., :dk], kv[..., v_offset : v_offset + head_size_v]
    flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)  # private: may go
    if flash is not None and kv.device.type == "cpu" and dk == head_size_v:
        out, lse = flash(q[None], k[None], v[None], scale=scale)
        return out[0].float(), lse[0].float().unsqueeze(-1)
    if group < 16:  # half-precision products of a few rows are slow on a CPU and no slower on a GPU
        q, k, v = q.float(), k.float(), v.float()
    if len(q) == 1:  # one plain product: a batch of one takes three times as long in bfloat16 on a CPU
        out, lse = _softmax_product(q[0], k[0], v[0], scale)
        return out[None], lse[None]
    return _softmax_product(q, k, v, scale)


def _softmax_product(q, k, v, scale: float):
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    lse = torch.logsumexp(scores, -1, keepdim=True)
    return torch.matmul(torch.exp(scores - lse).to(v.dtype), v).float(), lse


def can_update(kind: str, parts: dict[str, torch.Tensor]) -> str | None:
    """Why ``state_step`` takes the eager path for this layer, or None where it is compiled."""
    return cpp.can_update(kind, parts) or cpp.why_not()


def state_step(kind: str, parts: dict, rows: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """``reference.state_step``, compiled and in place where that is possible, else eagerly in float32."""
    if can_update(kind, parts) is None:
        return cpp.state_step(kind, parts, rows, inputs)
    return reference.state_step(kind, parts, rows, inputs, dtype=torch.float32)
