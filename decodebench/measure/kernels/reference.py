"""The specification: what one decode step computes, in plain torch and in float64.

Other backends are checked against these functions; read them to learn the semantics. Attention
is softmax attention over a paged cache. The recurrences are one step of Mamba-1 (Gu & Dao 2023,
"Mamba", eq. 2 discretised with a zero-order hold on A), Mamba-2 (Dao & Gu 2024, "Transformers are
SSMs": a scalar A per head), the gated delta rule (Yang et al. 2024, "Gated Delta Networks", eq.
10), Kimi delta attention (Kimi Team 2025, "Kimi Linear": the gate per key channel), decayed linear
attention (Qin et al. 2024, "Lightning Attention-2") and LFM2's short convolution; each after the
causal depthwise convolution its model puts in front.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

NAME = "reference"


def why_not(device: str | torch.device = "cpu") -> str | None:
    """Torch runs everywhere."""
    return None


def can_attend(q: torch.Tensor, view: torch.Tensor, head_size_v: int, v_offset: int) -> str | None:
    """Torch attends over every page."""
    return None


def can_update(kind: str, parts: dict[str, torch.Tensor]) -> str | None:
    """Torch advances every state."""
    return None


def prepare(view: torch.Tensor, table: torch.Tensor, start: torch.Tensor, stop: torch.Tensor) -> None:
    """Nothing is made ahead of a step."""


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
    plan: None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Attention of one query token a request over cache positions [start, stop).

    ``q`` [B, query heads, Dk]; ``view`` [blocks, KV heads, entries a block, width], any strides with
    the last dimension contiguous: keys are ``[..., :Dk]``, values ``[..., v_offset:v_offset + Dv]``
    (``v_offset`` 0 for a latent cache, whose values are a prefix of its keys). ``table`` [B, W] int:
    position p lies in block ``table[i, p // entries]``. Query head h reads KV head
    ``h // (query heads / KV heads)``. An empty range gives zeros. Returns [B, query heads, Dv] in
    ``dtype``.
    """
    batch, heads, dk = q.shape
    _, kv_heads, entries, _ = view.shape
    out = torch.zeros(batch, heads, head_size_v, dtype=dtype, device=q.device)
    for i in range(batch):
        positions = torch.arange(int(start[i]), int(stop[i]), device=q.device)
        if not len(positions):
            continue
        kv = _take(view, table[i][positions // entries].long(), positions % entries).to(dtype)
        rows = q[i].to(dtype).view(kv_heads, heads // kv_heads, dk)
        scores = torch.einsum("hgd,lhd->hgl", rows, kv[..., :dk]) * scale
        values = kv[..., v_offset : v_offset + head_size_v]
        out[i] = torch.einsum("hgl,lhd->hgd", scores.softmax(-1), values).reshape(heads, head_size_v)
    return out


def _take(view: torch.Tensor, blocks: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """[tokens, KV heads, width] of the named slots; fp8 by its bytes, which every build can index."""
    if view.element_size() == 1:
        return view.view(torch.uint8)[blocks, :, entries].view(view.dtype)
    return view[blocks, :, entries]


def write_kv(view: torch.Tensor, blocks: torch.Tensor, entries: torch.Tensor, new: torch.Tensor) -> None:
    """Store ``new`` [B, KV heads, width] at (block, entry); fp8 is clamped to its finite range.

    The same for every backend: a few rows of copies.
    """
    if view.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        limit = torch.finfo(view.dtype).max
        encoded = new.float().clamp(-limit, limit).to(view.dtype).view(torch.uint8)
        view.view(torch.uint8)[blocks, :, entries] = encoded
    else:
        view[blocks, :, entries] = new.to(view.dtype)


def state_step(
    kind: str,
    parts: dict[str, torch.Tensor],
    rows: torch.Tensor,
    inputs: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Advance the states at ``rows`` [B] by one token, in place; returns the layer's output [B, ...].

    ``parts`` holds views [blocks, *shape]: ``conv`` [state_len, channels] (oldest input first) and
    ``ssm`` / ``recurrent``. ``inputs`` (float32, one row a request unless said otherwise):

    - all but ``linear``: ``x`` [B, channels] the convolution's new input, ``weight`` [channels, K],
      ``bias`` [channels]; SiLU follows, except for ``short_conv``;
    - ``mamba1`` (state [I, N]): ``dt`` [B, I] after softplus, ``a`` [I, N] negative, ``b``, ``c``
      [B, N], ``d`` [I]; h ← exp(dt·a)·h + dt·b·x, y = h·c + d·x;
    - ``mamba2`` (state [H, P, N]): ``dt`` [B, H], ``a``, ``d`` [H]; the convolution gives
      x [H, P], b, c [G, N];
    - ``gdn`` (state [Hv, V, K]): ``g`` [B, Hv] log decay, ``beta`` [B, Hv]; the convolution gives
      q, k [Hk, K] (normalised here, q scaled by K^-½), v [Hv, V];
      S ← e^g·S, S ← S + β·(v − S·k) kᵀ, y = S·q;
    - ``kda``: the same with ``g`` [B, Hv, K], one decay a key channel;
    - ``linear`` (state [H, D, E]): ``q``, ``k`` [B, H, D], ``v`` [B, H, E], ``g`` [H];
      S ← e^g·S + k vᵀ, y = q·S.

    The output is computed from the state before it is rounded to the cache's dtype.
    """
    x = {name: t.to(dtype) for name, t in inputs.items()}
    if kind != "linear":
        y = _convolve(parts["conv"], rows, x, activation=kind != "short_conv", dtype=dtype)
        if kind == "short_conv":
            return y
    state = parts["ssm" if "ssm" in parts else "recurrent"]
    h = state[rows].to(dtype)
    if kind == "mamba1":
        h = h * torch.exp(x["dt"][..., None] * x["a"]) + (x["dt"] * y)[..., None] * x["b"][:, None]
        out = torch.einsum("bin,bn->bi", h, x["c"]) + x["d"] * y
    elif kind == "mamba2":
        heads, width, n = h.shape[1:]
        y, b, c = split_mamba2(y, heads, width, n)
        decay = torch.exp(x["dt"] * x["a"])[..., None, None]
        h = h * decay + (x["dt"][..., None] * y)[..., None] * b[:, :, None]
        out = torch.einsum("bhpn,bhn->bhp", h, c) + x["d"][:, None] * y
    elif kind in ("gdn", "kda"):
        heads, dv, dk = h.shape[1:]
        q, k, v = split_delta(y, heads, dv, dk)
        decay = torch.exp(x["g"])
        h = h * (decay[..., None, None] if kind == "gdn" else decay[:, :, None])
        delta = x["beta"][..., None] * (v - torch.einsum("bhvk,bhk->bhv", h, k))
        h = h + delta[..., None] * k[:, :, None]
        out = torch.einsum("bhvk,bhk->bhv", h, q)
    elif kind == "linear":
        h = h * torch.exp(x["g"])[:, None, None] + x["k"][..., None] * x["v"][:, :, None]
        out = torch.einsum("bhde,bhd->bhe", h, x["q"])
    else:
        raise ValueError(f"state kind {kind!r}: mamba1, mamba2, gdn, kda, short_conv, linear")
    state[rows] = h.to(state.dtype)
    return out


def _convolve(conv, rows, x, *, activation: bool, dtype) -> torch.Tensor:
    """Causal depthwise convolution over the last K - 1 stored inputs and the new one; shifts the state."""
    stored = conv[rows].to(dtype)  # [B, state_len, channels]
    taps = x["weight"].shape[1] - 1
    window = torch.cat([stored[:, stored.shape[1] - taps :], x["x"][:, None]], dim=1)
    conv[rows] = torch.cat([stored[:, 1:], x["x"][:, None]], dim=1).to(conv.dtype)
    y = (window * x["weight"].T).sum(1) + x["bias"]
    return F.silu(y) if activation else y


def split_mamba2(
    y: torch.Tensor, heads: int, width: int, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convolution output [B, H·P + 2·G·N] → x [B, H, P], b, c [B, H, N] (each group's for its heads)."""
    batch = y.shape[0]
    groups = (y.shape[1] - heads * width) // (2 * n)
    x, b, c = y.split([heads * width, groups * n, groups * n], dim=1)
    b, c = (t.view(batch, groups, n).repeat_interleave(heads // groups, dim=1) for t in (b, c))
    return x.view(batch, heads, width), b, c


def split_delta(
    y: torch.Tensor, heads: int, dv: int, dk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convolution output [B, 2·Hk·K + Hv·V] → unit q·K^-½, unit k [B, Hv, K], v [B, Hv, V]."""
    batch = y.shape[0]
    key_heads = (y.shape[1] - heads * dv) // (2 * dk)
    q, k, v = y.split([key_heads * dk, key_heads * dk, heads * dv], dim=1)
    q, k = (t.view(batch, key_heads, dk) for t in (q, k))
    q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k = (t.repeat_interleave(heads // key_heads, dim=1) for t in (q, k))
    return q * dk**-0.5, k, v.view(batch, heads, dv)


def state_inputs(
    kind: str,
    parts: dict[str, torch.Tensor],
    batch: int,
    random: torch.Generator,
    device: str | torch.device = "cpu",
) -> dict[str, torch.Tensor]:
    """Seeded inputs of ``reference.state_step``, float32: decays below one, so that states stay bounded."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    x: dict[str, torch.Tensor] = {}
    if "conv" in parts:
        length, channels = parts["conv"].shape[1:]
        x |= {"x": normal(batch, channels), "weight": normal(channels, length + 1) / (length + 1) ** 0.5}
        x["bias"] = 0.1 * normal(channels)
    state = parts.get("ssm", parts.get("recurrent"))
    shape: tuple[int, ...] = () if state is None else tuple(state.shape[1:])
    if kind == "mamba1":
        channels, n = shape
        x |= {"dt": 0.2 * torch.rand(batch, channels, generator=random), "a": -torch.exp(normal(channels, n))}
        x |= {"b": normal(batch, n), "c": normal(batch, n), "d": normal(channels)}
    elif kind == "mamba2":
        heads = shape[0]
        x |= {"dt": 0.2 * torch.rand(batch, heads, generator=random), "a": -torch.exp(normal(heads))}
        x["d"] = normal(heads)
    elif kind in ("gdn", "kda"):
        heads, _, dk = shape
        gate = normal(batch, heads, dk) if kind == "kda" else normal(batch, heads)
        x |= {"g": -torch.nn.functional.softplus(gate), "beta": torch.sigmoid(normal(batch, heads))}
    elif kind == "linear":
        heads, d, e = shape
        x |= {"q": normal(batch, heads, d), "k": normal(batch, heads, d) / d**0.5}
        x |= {"v": normal(batch, heads, e), "g": -torch.rand(heads, generator=random)}
    return {name: t.to(device).contiguous() for name, t in x.items()}
