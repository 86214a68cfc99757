"""One decode step over a grouped cache, and what it costs next to what the memory allows.

A step, per layer: store the new token's keys and values at its slot (or advance the state) and
attend over the block table. Attention and state work only: weights, projections, norms and
sampling are not in it, and neither are building block tables and filling (``prepare_step`` is
outside the clock). Semantics: ``kernels/reference.py``; speed: the other backends.

Under decode context parallelism a step is that of the rank that holds the new token: it reads
``ceil(n / dcp)`` tokens of a sharded layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from decodebench.blocks import NULL_BLOCK, Batch
from decodebench.cache import Cache, torch_dtype
from decodebench.kernels import cpp, eager, reference
from decodebench.layout import KVCacheConfig
from decodebench.specs import (
    AttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    DecodebenchError,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    cdiv,
)
from decodebench.timing import Bandwidth, Timing, bandwidth, format_seconds, measure

if TYPE_CHECKING:
    import pandas as pd

BACKENDS = ("reference", "torch", "cpp", "triton")


class DecodeError(DecodebenchError):
    """A decode step that cannot be built or run: names the layer, request or backend, and the remedy."""


# --- what a step reads and writes: from the layout alone --------------------------------------------


@dataclass(frozen=True)
class LayerWork:
    """One layer's share of a step. ``kind`` is the spec's kind, for states the recurrence's name."""

    layer: str
    group: int
    kind: str
    bytes_read: int
    bytes_written: int
    #: bytes among both that are updated in place: a state is read and written
    bytes_updated: int = 0


def visible(spec: KVCacheSpec, num_tokens: int, encoder_tokens: int = 0) -> tuple[int, int]:
    """Positions [start, stop) that the new token attends to, itself (position n - 1) included."""
    if isinstance(spec, CrossAttentionSpec):
        return 0, encoder_tokens
    start = spec.num_skipped_tokens(num_tokens - 1)
    if isinstance(spec, FullAttentionSpec) and spec.sliding_window is not None:
        start = max(0, num_tokens - spec.sliding_window)
    elif isinstance(spec, FullAttentionSpec) and spec.attention_chunk_size is not None:
        start = (num_tokens - 1) // spec.attention_chunk_size * spec.attention_chunk_size
    return start, num_tokens


def decode_work(
    layout: KVCacheConfig, batch: Batch, layers: Sequence[str] | None = None
) -> tuple[LayerWork, ...]:
    """Bytes that one step must read and write, layer by layer: cached entries, the new slot, states.

    The new token's own entry is written and not counted as read. Raises ``DecodeError`` for a layer
    whose pages are packed formats or rings: they hold no plain numbers to attend to.
    """
    unknown = sorted(set(layers or ()) - set(layout.layer_names))
    if unknown:
        raise DecodeError(f"layers {', '.join(unknown)} are not in this layout")
    work = []
    for layer in layout.layer_names if layers is None else layers:
        group, spec = layout.group_of[layer], layout.layer_specs[layer]
        kind = layer_kind(layout, layer)
        read = written = updated = 0
        if isinstance(spec, MambaSpec):
            updated = 2 * spec.unpadded_page_size_bytes * len(batch.requests)
            read = written = updated // 2
        else:
            _refuse_packed(layer, spec)
            entry = spec.num_kv_heads * spec.entry_bytes
            for request in batch.requests:
                start, stop = _local_range(layout, group, spec, request)
                new = not isinstance(spec, CrossAttentionSpec)
                read += max(0, stop - start - new) * entry
                written += entry * new
        work.append(LayerWork(layer, group, kind, read, written, updated))
    return tuple(work)


def decode_bytes(layout: KVCacheConfig, batch: Batch) -> pd.DataFrame:
    """``decode_work`` by group and kind: layers, bytes read and written, bytes a request on average."""
    import pandas as pd

    frame = pd.DataFrame([vars(w) for w in decode_work(layout, batch)])
    table = frame.groupby(["group", "kind"], sort=False).agg(
        layers=("layer", "size"), bytes_read=("bytes_read", "sum"), bytes_written=("bytes_written", "sum")
    )
    table["read_per_request"] = table["bytes_read"] / len(batch.requests)
    return table.reset_index()


def layer_kind(layout: KVCacheConfig, layer: str) -> str:
    """The spec's kind; for a state layer the recurrence: the model's word for it, else from the spec."""
    spec = layout.layer_specs[layer]
    if not isinstance(spec, MambaSpec):
        return spec.kind
    mixer = getattr(_model_layer(layout, layer), "mixer", None)
    by_type = {"MAMBA1": "mamba1", "MAMBA2": "mamba2", "GDN_ATTN": "gdn", "SHORT_CONV": "short_conv"}
    kind = mixer or by_type.get(spec.mamba_type.upper(), spec.mamba_type.lower())
    if kind not in ("mamba1", "mamba2", "gdn", "kda", "short_conv", "linear"):
        raise DecodeError(
            f"layer {layer!r}: no decode step for state type {spec.mamba_type!r}; known are MAMBA1, MAMBA2, "
            "GDN_ATTN, SHORT_CONV and LINEAR"
        )
    return kind


def _model_layer(layout: KVCacheConfig, layer: str):
    """The model's facts about a layer, or None for a layout made by hand."""
    model = getattr(layout, "model", None)
    return next((x for x in getattr(model, "layers", ()) if x.name == layer), None)


def _local_range(layout: KVCacheConfig, group: int, spec: AttentionSpec, request) -> tuple[int, int]:
    """``visible`` in this rank's entries: shared out where decode context parallelism shards the layer."""
    start, stop = visible(spec, request.request.num_tokens, request.request.encoder_tokens)
    shards = layout.decode_context_parallel_size if spec.dcp_sharded else 1
    return (start, stop) if shards == 1 else (start // shards, cdiv(stop, shards))


def _refuse_packed(layer: str, spec: KVCacheSpec) -> None:
    if isinstance(spec, CircularBufferSpec) or spec.packed is not None or spec.tokens_per_state > 1:
        what = f"packed as {spec.packed}" if spec.packed else f"{spec.tokens_per_state} tokens in one entry"
        if isinstance(spec, CircularBufferSpec):
            what = "a ring of packed integers"
        raise DecodeError(
            f"layer {layer!r}: pages are {what}, no backend attends to them; measure a layout with a plain "
            "KV cache dtype (auto, fp8), or pass layers= without it"
        )


# --- backends -----------------------------------------------------------------------------------------


def resolve_backend(name: str | None, device: str | torch.device) -> tuple[ModuleType, str | None]:
    """The backend's module, and a note where the default had to be another than the fastest.

    None chooses: CUDA ``triton``, CPU ``cpp`` (needs a C++ compiler), else ``torch``. A backend asked
    for by name that cannot run raises ``DecodeError`` with the reason.
    """
    device = torch.device(device)
    if name is None:
        fast = "triton" if device.type == "cuda" else "cpp"
        try:
            return resolve_backend(fast, device)
        except DecodeError as error:
            return eager, f"backend torch instead of {fast}: {error}"
    if name not in BACKENDS:
        raise DecodeError(f"backend {name!r}: known are {', '.join(BACKENDS)}")
    if name == "triton":
        if find_spec("triton") is None:
            raise DecodeError("backend 'triton': Triton is not installed; pip install 'decodebench[triton]'")
        from decodebench.kernels import gpu

        reason = gpu.why_not(device)
        if reason:
            raise DecodeError(f"backend 'triton': {reason}")
        return gpu, None
    if name == "cpp":
        reason = cpp.why_not() if device.type == "cpu" else f"it runs on cpu, the cache is on {device}"
        if reason:
            raise DecodeError(f"backend 'cpp': {reason}")
        return cpp, None
    return {"torch": eager, "reference": reference}[name], None


# --- the step -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerStep:
    """One layer, ready to run: ``run()`` stores the new token or advances the state, and returns the output.

    ``touched`` are (view, index) of what it overwrites. ``fallback`` says why another backend runs it.
    """

    work: LayerWork
    run: Callable[[], torch.Tensor] = field(repr=False)
    touched: tuple[tuple[torch.Tensor, tuple], ...] = field(repr=False)
    fallback: str | None = None


@dataclass(frozen=True)
class DecodeStep:
    """A batch's next decode step over a cache; call it to run all layers in order.

    It repeats position n - 1: keys and values land in the same slot each time, states move on.
    ``restore()`` puts back what the cache held when the step was prepared.
    """

    layers: tuple[LayerStep, ...]
    backend: str
    device: torch.device
    note: str | None = None
    #: query heads that had to be assumed (layout made by hand): one a KV head
    assumed: bool = False
    _saved: tuple = field(default=(), repr=False)

    def __call__(self) -> None:
        for layer in self.layers:
            layer.run()

    def outputs(self) -> dict[str, torch.Tensor]:
        """Run once and keep each layer's output: attention [B, query heads, Dv], states [B, ...]."""
        return {layer.work.layer: layer.run() for layer in self.layers}

    def restore(self) -> None:
        for view, index, value in self._saved:
            _bits(view)[index] = value

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Each distinct stated fallback, by kind of layer."""
        return tuple(dict.fromkeys(f"{x.work.kind}: {x.fallback}" for x in self.layers if x.fallback))


def prepare_step(
    cache: Cache,
    batch: Batch,
    backend: str | None = None,
    *,
    seed: int = 0,
    layers: Sequence[str] | None = None,
    query_heads: int | None = None,
    dtype: str | None = None,
) -> DecodeStep:
    """Everything a step needs, made outside the clock: block tables, seeded inputs, views, checks.

    ``layers``: only these (default all). ``query_heads`` a layer: default the model's, for a layout
    made by hand one a KV head. ``dtype`` of queries: default the model's. Raises ``DecodeError``
    naming the request, layer or backend where the batch does not fit the cache.
    """
    layout = cache.layout
    module, note = resolve_backend(backend, cache.device)
    _check_batch(layout, batch)
    chosen = decode_work(layout, batch, layers)
    model = getattr(layout, "model", None)
    activation = torch_dtype(dtype or getattr(model, "dtype", None) or "bfloat16")
    tables = {g: _table(layout, batch, g, cache.device) for g in {w.group for w in chosen}}
    steps, plans = [], {}
    for work in chosen:
        random = torch.Generator().manual_seed(seed * 1_000_003 + layout.layer_index[work.layer])
        spec = layout.layer_specs[work.layer]
        if isinstance(spec, MambaSpec):
            steps.append(_state_layer(cache, batch, work, spec, module, tables[work.group], random))
        else:
            heads = query_heads or _query_heads(layout, work.layer) or spec.num_kv_heads
            q = (heads, activation)
            table = tables[work.group]
            steps.append(_attention_layer(cache, batch, work, spec, module, table, random, q, plans))
    saved = tuple((view, index, _bits(view)[index].clone()) for s in steps for view, index in s.touched)
    assumed = query_heads is None and any(
        _model_layer(layout, w.layer) is None and not isinstance(layout.layer_specs[w.layer], MambaSpec)
        for w in chosen
    )
    return DecodeStep(tuple(steps), module.NAME, cache.device, note, assumed, saved)


def _check_batch(layout: KVCacheConfig, batch: Batch) -> None:
    if not batch.requests:
        raise DecodeError("a batch of no requests: admit at least one")
    for blocks in batch.requests:
        request = blocks.request
        if request.num_tokens < 1:
            raise DecodeError(
                f"request {request.request_id!r} has a context of {request.num_tokens} tokens: at least one, "
                "the token the step computes"
            )
        if len(blocks.block_ids) != len(layout.groups):
            raise DecodeError(
                f"request {request.request_id!r} has {len(blocks.block_ids)} block tables, the layout "
                f"{len(layout.groups)} groups: it was admitted to another layout"
            )
        for group, ids in enumerate(blocks.block_ids):
            limit = layout.num_blocks_of(group)
            wrong = next((b for b in ids if not 0 <= b < limit), None)
            if wrong is not None:
                raise DecodeError(
                    f"request {request.request_id!r}, group {group}: block {wrong} is beyond the pool of "
                    f"{limit} blocks; admit the batch to this layout"
                )


def _table(layout: KVCacheConfig, batch: Batch, group: int, device: torch.device) -> torch.Tensor:
    """Block table [B, W] int32, short rows padded with the null block."""
    rows = [blocks.block_ids[group] for blocks in batch.requests]
    width = max(1, *(len(row) for row in rows)) if len(rows) > 1 else max(1, len(rows[0]))
    padded = [list(row) + [NULL_BLOCK] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int32, device=device)


def _attention_layer(cache, batch, work, spec, module, table, random, query, plans) -> LayerStep:
    heads, activation = query
    layout, device = cache.layout, cache.device
    view = cache.view(work.layer)
    if isinstance(view, dict):
        raise DecodeError(f"layer {work.layer!r}: keys and values lie in tensors of their own; one is needed")
    entries = view.shape[2]
    ranges = [_local_range(layout, work.group, spec, blocks) for blocks in batch.requests]
    for (start, stop), blocks in zip(ranges, batch.requests):
        _check_row(work, blocks, start, stop, entries)
    start, stop = (torch.tensor(side, dtype=torch.int64, device=device) for side in zip(*ranges))
    latent = spec.head_size_v == 0
    shape = {
        "scale": _scale(layout, work.layer, spec),
        "head_size_v": _latent_rank(layout, work.layer, spec) if latent else spec.head_size_v,
        "v_offset": 0 if latent else spec.head_size,
    }
    if heads % spec.num_kv_heads:
        raise DecodeError(
            f"layer {work.layer!r}: {heads} query heads do not divide among {spec.num_kv_heads} KV heads"
        )
    q = torch.randn(len(ranges), heads, spec.head_size, generator=random).to(activation).to(device)
    fallback = None
    if module is cpp:
        fallback = cpp.can_attend(q, view, shape["head_size_v"], shape["v_offset"])
        module = eager if fallback else cpp
    options = dict(shape)
    if module is eager:
        key = (work.group, tuple(ranges), tuple(view.shape), view.stride(), view.dtype)
        if key not in plans:
            plans[key] = eager.prepare(view, table, start, stop)
        options["plan"] = plans[key]
    touched = ()
    if not isinstance(spec, CrossAttentionSpec):
        at = stop - 1
        blocks = table.gather(1, (at // entries).unsqueeze(1)).squeeze(1).long()
        slot = (blocks, slice(None), at % entries)
        new = torch.randn(len(ranges), spec.num_kv_heads, view.shape[3], generator=random)
        new = new.to(activation).to(device)
        touched = ((view, slot),)

        def run() -> torch.Tensor:
            module.write_kv(view, slot[0], slot[2], new)
            return module.attend(q, view, table, start, stop, **options)
    else:

        def run() -> torch.Tensor:
            return module.attend(q, view, table, start, stop, **options)

    return LayerStep(work, run, touched, fallback and f"torch, {fallback}")


def _check_row(work: LayerWork, blocks, start: int, stop: int, entries: int) -> None:
    """Every block that positions [start, stop) lie in must be in the table, and owned."""
    row, name = blocks.block_ids[work.group], blocks.request.request_id
    for j in range(start // entries, cdiv(stop, entries) if stop > start else 0):
        if j >= len(row):
            raise DecodeError(
                f"request {name!r}, group {work.group} ({work.layer}): {stop} tokens need "
                f"{cdiv(stop, entries)} blocks of {entries}, its table has {len(row)}; append the token first"
            )
        if row[j] == NULL_BLOCK:
            raise DecodeError(
                f"request {name!r}, group {work.group} ({work.layer}): the step reads block {j} of its "
                "table, which is the null block"
            )


def _scale(layout: KVCacheConfig, layer: str, spec: AttentionSpec) -> float:
    """1 / √(query head size): of the unabsorbed query where attention is latent (DeepSeek: 128 + 64)."""
    return 1 / math.sqrt(192 if spec.head_size_v == 0 and spec.head_size == 576 else spec.head_size)


def _latent_rank(layout: KVCacheConfig, layer: str, spec: AttentionSpec) -> int:
    """Width of a latent vector's values: the model's ``kv_lora_rank``, else all but 64 rope dimensions."""
    rank = getattr(_model_layer(layout, layer), "kv_lora_rank", None)
    return rank or (spec.head_size - 64 if spec.head_size > 64 else spec.head_size)


def _query_heads(layout: KVCacheConfig, layer: str) -> int | None:
    model = getattr(layout, "model", None)
    return None if model is None else model.query_heads(layer, getattr(layout, "tensor_parallel_size", 1))


def _state_layer(cache, batch, work, spec, module, table, random) -> LayerStep:
    """A state layer; its row is the state that the step starts from (``spec.required_blocks``)."""
    views = cache.view(work.layer)
    parts = views if isinstance(views, dict) else {spec.parts()[0].name: views}
    ids = []
    for blocks in batch.requests:
        row, tokens = blocks.block_ids[work.group], cache.layout.tokens_per_block(work.group)
        required = spec.required_blocks(blocks.request.num_tokens, tokens, len(row))
        at = required.start if required else 0  # a first token starts from a fresh state
        if at >= len(row) or row[at] == NULL_BLOCK:
            raise DecodeError(
                f"request {blocks.request.request_id!r}, group {work.group} ({work.layer}): no state at "
                f"position {at} of its block table"
            )
        ids.append(row[at])
    rows = torch.tensor(ids, dtype=torch.int64, device=cache.device)
    inputs = reference.state_inputs(work.kind, parts, len(ids), random, cache.device)
    fallback = None
    if module in (cpp, eager):
        fallback = eager.state_fallback(work.kind, parts)
        module = eager if fallback or module is eager else cpp
    elif module is not reference:
        fallback = module.can_update(work.kind, parts)
        module = eager if fallback else module
    touched = tuple((part, (rows,)) for part in parts.values())
    return LayerStep(
        work, lambda: module.state_step(work.kind, parts, rows, inputs), touched,
        fallback and f"eager torch in float32, {fallback}",
    )  # fmt: skip


def _bits(view: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: every build can index them."""
    return view.view(torch.uint8) if view.element_size() == 1 else view


def compare_with_reference(
    cache: Cache, batch: Batch, backend: str | None = None, **options
) -> dict[str, tuple[float, float]]:
    """layer → relative error (norm of the difference over the norm) of (output, bytes left in the cache).

    Both backends start from the same cache, which is put back afterwards. NaN where a step read
    poison: a byte that nobody filled.
    """

    def outcome(backend: str | None) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        step = prepare_step(cache, batch, backend, **options)
        outputs = step.outputs()
        left = {x.work.layer: _left(x) for x in step.layers}
        step.restore()
        return {layer: (out.double(), left[layer]) for layer, out in outputs.items()}

    want, got = outcome("reference"), outcome(backend)

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).norm() / b.norm().clamp_min(1e-30)) if a.numel() else 0.0

    return {layer: tuple(distance(a, b) for a, b in zip(got[layer], want[layer])) for layer in want}


def _left(step: LayerStep) -> torch.Tensor:
    parts = [_bits(view)[index].view(view.dtype).double().flatten() for view, index in step.touched]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


# --- measuring --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeMeasurement:
    """Latency of the resident step: the batch sits in the cache; admitting and filling are not in it.

    ``share`` compares the median with the time this machine's memory needs for the bytes: reads at its
    read speed, states at its in-place update speed, both measured in this process.
    """

    timing: Timing
    backend: str
    bandwidth: Bandwidth
    work: tuple[LayerWork, ...]
    num_requests: int
    context: tuple[int, int]
    seed: int
    fallbacks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    #: kind → timing of that kind's layers alone, where asked for
    kind_timings: dict[str, Timing] = field(default_factory=dict)

    @property
    def bytes_read(self) -> int:
        return sum(w.bytes_read for w in self.work)

    @property
    def bytes_written(self) -> int:
        return sum(w.bytes_written for w in self.work)

    @property
    def latency(self) -> float:
        """Median seconds a step."""
        return self.timing.median

    @property
    def gbps(self) -> float:
        """Bytes that had to move, over the median, in GB/s."""
        return (self.bytes_read + self.bytes_written) / self.latency / 1e9

    @property
    def limit(self) -> float:
        """Seconds that the memory needs for this step's bytes."""
        return limit_seconds(self.work, self.bandwidth)

    @property
    def share(self) -> float:
        """limit / median: 1.0 is the memory's speed."""
        return self.limit / self.latency

    def kinds(self) -> pd.DataFrame:
        """One row a kind of layer: layers, bytes, and where timed alone its latency, GB/s and share."""
        import pandas as pd

        rows = []
        for kind in dict.fromkeys(w.kind for w in self.work):
            work = [w for w in self.work if w.kind == kind]
            read, written = sum(w.bytes_read for w in work), sum(w.bytes_written for w in work)
            row = {"kind": kind, "layers": len(work), "bytes_read": read, "bytes_written": written}
            row["limit_s"] = limit_seconds(work, self.bandwidth)
            if kind in self.kind_timings:
                t = self.kind_timings[kind]
                row |= t.to_dict()
                row |= {"gbps": (read + written) / t.median / 1e9, "share": row["limit_s"] / t.median}
            rows.append(row)
        return pd.DataFrame(rows)

    def to_dict(self) -> dict[str, object]:
        """Flat columns for a result row."""
        return {
            **self.timing.to_dict(), "backend": self.backend, "device": self.timing.device,
            "num_requests": self.num_requests, "context_min": self.context[0], "context_max": self.context[1],
            "bytes_read": self.bytes_read, "bytes_written": self.bytes_written, "gbps": self.gbps,
            "limit_s": self.limit, "share": self.share, "read_gbps": self.bandwidth.read,
            "update_gbps": self.bandwidth.update, "seed": self.seed,
            "fallbacks": "; ".join(self.fallbacks), "notes": "; ".join(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        low, high = self.context
        tokens = str(low) if low == high else f"{low} to {high}"
        lines = [
            f"decode step, {self.num_requests} requests of {tokens} tokens, backend {self.backend}:",
            f"  {self.timing}",
            f"  {(self.bytes_read + self.bytes_written) / 1e6:.1f} MB to move, {self.gbps:.1f} GB/s, "
            f"{self.share:.0%} of this machine's limit ({format_seconds(self.limit)}; read "
            f"{self.bandwidth.read:.0f}, update {self.bandwidth.update:.0f} GB/s)",
            "  attention and state work only: no weights, no projections",
        ]
        return "\n".join(lines + [f"  {text}" for text in (*self.fallbacks, *self.notes)])

    __repr__ = __str__


def limit_seconds(work: Sequence[LayerWork], speed: Bandwidth) -> float:
    """Seconds the memory needs: what is only read at read speed, states and new slots at update speed."""
    updated = sum(w.bytes_updated for w in work)
    read = sum(w.bytes_read for w in work) - updated / 2
    written = sum(w.bytes_written for w in work) - updated / 2
    return (read / speed.read + (updated + written) / speed.update) / 1e9


def measure_decode(
    cache: Cache,
    batch: Batch,
    backend: str | None = None,
    *,
    cold: bool = False,
    by_kind: bool = False,
    min_seconds: float = 0.3,
    min_steps: int = 5,
    seed: int = 0,
    layers: Sequence[str] | None = None,
    query_heads: int | None = None,
    dtype: str | None = None,
    limit: Bandwidth | None = None,
) -> DecodeMeasurement:
    """Time the batch's resident decode step. The cache holds afterwards what it held before.

    ``by_kind`` times each kind of layer alone as well. ``limit``: the memory's speed, default measured
    in this process (at most two minutes old). Other options as in ``prepare_step``. Out of memory is
    a ``DecodeError`` that names the batch.
    """
    options = {"seed": seed, "query_heads": query_heads, "dtype": dtype}
    clock = {"device": cache.device, "cold": cold, "min_seconds": min_seconds, "min_steps": min_steps}
    try:
        step = prepare_step(cache, batch, backend, layers=layers, **options)
        try:
            timing = measure(step, **clock)
            kind_timings = {}
            if by_kind:
                for kind in dict.fromkeys(x.work.kind for x in step.layers):
                    part = replace(step, layers=tuple(x for x in step.layers if x.work.kind == kind))
                    kind_timings[kind] = measure(part, **clock)
        finally:
            step.restore()
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        tokens = [blocks.request.num_tokens for blocks in batch.requests]
        raise DecodeError(
            f"out of memory for a step of {len(tokens)} requests with up to {max(tokens)} tokens: {error}"
        ) from error
    tokens = [blocks.request.num_tokens for blocks in batch.requests]
    notes = [note for note in (step.note, _small_working_set(cache, step)) if note]
    if step.assumed:
        notes.append("query heads assumed: one a KV head (a layout made by hand); pass query_heads=")
    return DecodeMeasurement(
        timing, step.backend, limit or bandwidth(cache.device), tuple(x.work for x in step.layers),
        len(tokens), (min(tokens), max(tokens)), seed, step.fallbacks, tuple(notes), kind_timings,
    )  # fmt: skip


def _small_working_set(cache: Cache, step: DecodeStep) -> str | None:
    """A GPU step that the L2 could hold looks faster than a model's would."""
    if cache.device.type != "cuda":
        return None
    l2 = torch.cuda.get_device_properties(cache.device).L2_cache_size
    moved = sum(x.work.bytes_read for x in step.layers)
    if moved >= 4 * l2:
        return None
    return f"the step reads {moved >> 20} MiB, the L2 holds {l2 >> 20}: ask for cold=True or a longer context"


def holds_fill(suspect: Timing, resident: Timing, fill_seconds: float) -> bool:
    """Whether a step's timing contains a fill (fault A17): it exceeds the resident step by half a fill.

    ``resident`` is ``measure_decode(...).timing`` of the same batch, ``fill_seconds`` the fill's own time
    (``FillReport.seconds``).
    """
    return suspect.median - resident.median > fill_seconds / 2
