"""A decode step made ready: block tables, seeded inputs, views, checks, and the backend that runs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from decodebench.cache.tensors import Cache, torch_dtype
from decodebench.layout.layout import Layout
from decodebench.layout.pool import NULL_BLOCK, Batch
from decodebench.layout.reads import DecodeError, LayerWork, decode_work, local_range, model_layer
from decodebench.measure.backends import resolve_backend
from decodebench.measure.kernels import reference, torch_ops
from decodebench.models.specs import AttentionSpec, cdiv


@dataclass(frozen=True)
class LayerStep:
    """One layer, ready to run: ``run()`` stores the new token or advances the state, and returns the output.

    ``touched`` are (view, index) of what it overwrites. ``fallback`` says why another backend runs it.
    """

    work: LayerWork
    run: Callable[[], torch.Tensor] = field(repr=False)
    touched: tuple[tuple[torch.Tensor, tuple], ...] = field(repr=False)
    fallback: str | None = None
    #: floating-point operations of its products: attention's, two a multiplication and addition
    operations: int = 0


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
        """Put back what the cache held where a step writes, as it was when the step was prepared."""
        for view, index, value in self._saved:
            _bits(view)[index] = value.to(view.device)

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
    runs_on, note = resolve_backend(backend, cache.device)
    _check_batch(layout, batch)
    chosen = decode_work(layout, batch, layers)
    model = getattr(layout, "model", None)
    activation = torch_dtype(dtype or getattr(model, "dtype", None) or "bfloat16")
    tables = {g: _table(layout, batch, g, cache.device) for g in {w.group for w in chosen}}
    steps: list[LayerStep] = []
    plans: dict[tuple, object] = {}
    for work in chosen:
        random = torch.Generator().manual_seed(seed * 1_000_003 + layout.layer_index[work.layer])
        spec = layout.layer_specs[work.layer]
        if spec.holds_state:
            steps.append(_state_layer(cache, batch, work, spec, runs_on, tables[work.group], random))
        else:
            heads = query_heads or _query_heads(layout, work.layer) or cast(AttentionSpec, spec).num_kv_heads
            q = (heads, activation)
            table = tables[work.group]
            steps.append(_attention_layer(cache, batch, work, spec, runs_on, table, random, q, plans))
    # a GPU's states are kept in host memory: a second copy of them would not fit beside a full cache
    saved = tuple((view, index, _bits(view)[index].cpu()) for s in steps for view, index in s.touched)
    assumed = query_heads is None and any(
        model_layer(layout, w.layer) is None and not layout.layer_specs[w.layer].holds_state for w in chosen
    )
    return DecodeStep(tuple(steps), runs_on.NAME, cache.device, note, assumed, saved)


def _check_batch(layout: Layout, batch: Batch) -> None:
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


def _table(layout: Layout, batch: Batch, group: int, device: torch.device) -> torch.Tensor:
    """Block table [B, W] int32, short rows padded with the null block."""
    rows = [blocks.block_ids[group] for blocks in batch.requests]
    width = max(1, max(len(row) for row in rows))
    padded = [list(row) + [NULL_BLOCK] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int32, device=device)


def _attention_layer(cache, batch, work, spec, backend, table, random, query, plans) -> LayerStep:
    heads, activation = query
    layout, device = cache.layout, cache.device
    view = cache.view(work.layer)
    if isinstance(view, dict):
        raise DecodeError(f"layer {work.layer!r}: keys and values lie in tensors of their own; one is needed")
    entries = view.shape[2]
    shards = layout.decode_context_parallel_size if spec.dcp_sharded else 1
    if entries * shards != layout.tokens_per_block(work.group):
        raise DecodeError(
            f"layer {work.layer!r} holds {entries} tokens a block, its group's table counts "
            f"{layout.tokens_per_block(work.group)}"
        )
    ranges = [local_range(layout, work.group, spec, blocks) for blocks in batch.requests]
    for (first, last), blocks in zip(ranges, batch.requests):
        _check_row(work, blocks, first, last, entries)
    start, stop = (torch.tensor(side, dtype=torch.int64, device=device) for side in zip(*ranges))
    latent = spec.head_size_v == 0
    shape = {
        "scale": _scale(spec),
        "head_size_v": _latent_rank(layout, work.layer, spec) if latent else spec.head_size_v,
        "v_offset": 0 if latent else spec.head_size,
    }
    if heads % spec.num_kv_heads:
        raise DecodeError(
            f"layer {work.layer!r}: {heads} query heads do not divide among {spec.num_kv_heads} KV heads"
        )
    q = torch.randn(len(ranges), heads, spec.head_size, generator=random).to(activation).to(device)
    fallback = backend.can_attend(q, view, shape["head_size_v"], shape["v_offset"])
    runner = torch_ops if fallback else backend
    key = (runner.NAME, work.group, tuple(ranges), tuple(view.shape), view.stride(), view.dtype)
    if key not in plans:
        plans[key] = runner.prepare(view, table, start, stop)
    options = shape | {"plan": plans[key]}
    touched: tuple[tuple[torch.Tensor, tuple], ...] = ()
    if spec.written_by_steps:
        at = stop - 1
        blocks = table.gather(1, (at // entries).unsqueeze(1)).squeeze(1).long()
        slot = (blocks, slice(None), at % entries)
        new = torch.randn(len(ranges), spec.num_kv_heads, view.shape[3], generator=random)
        new = new.to(activation).to(device)
        touched = ((view, slot),)

        def run() -> torch.Tensor:
            runner.write_kv(view, slot[0], slot[2], new)
            return runner.attend(q, view, table, start, stop, **options)
    else:

        def run() -> torch.Tensor:
            return runner.attend(q, view, table, start, stop, **options)

    seen = sum(max(0, last - first) for first, last in ranges)
    operations = 2 * heads * (spec.head_size + shape["head_size_v"]) * seen
    return LayerStep(work, run, touched, fallback and f"torch, {fallback}", operations)


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


def _scale(spec: AttentionSpec) -> float:
    """1 / √(query head size): of the unabsorbed query where attention is latent (DeepSeek: 128 + 64)."""
    return 1 / math.sqrt(192 if spec.head_size_v == 0 and spec.head_size == 576 else spec.head_size)


def _latent_rank(layout: Layout, layer: str, spec: AttentionSpec) -> int:
    """Width of a latent vector's values: the model's ``kv_lora_rank``, else all but 64 rope dimensions."""
    rank = getattr(model_layer(layout, layer), "kv_lora_rank", None)
    return rank or (spec.head_size - 64 if spec.head_size > 64 else spec.head_size)


def _query_heads(layout: Layout, layer: str) -> int | None:
    model = getattr(layout, "model", None)
    return None if model is None else model.query_heads(layer, getattr(layout, "tensor_parallel_size", 1))


def _state_layer(cache, batch, work, spec, backend, table, random) -> LayerStep:
    """A state layer; the row that ``spec.required_blocks`` names is read and updated in place.

    Where the token opens a block, a fill stands in for the engine's copy of the state before it;
    where a prefix hit brought that state, it is copied here as the engine would.
    """
    views = cache.view(work.layer)
    parts = views if isinstance(views, dict) else {spec.parts()[0].name: views}
    ids: list[int] = []
    brought: list[int] = []
    for blocks in batch.requests:
        row, tokens = blocks.block_ids[work.group], cache.layout.tokens_per_block(work.group)
        running = spec.required_blocks(blocks.num_tokens, tokens, len(row))
        before = blocks.required_blocks(spec, work.group, tokens)
        for required, places in ((running, ids), (before, brought)):
            at = required.start if required else 0  # a first token starts from a fresh state
            if at >= len(row) or row[at] == NULL_BLOCK:
                raise DecodeError(
                    f"request {blocks.request_id!r}, group {work.group} ({work.layer}): no state at "
                    f"position {at} of its block table"
                )
            places.append(row[at])
    rows = torch.tensor(ids, dtype=torch.int64, device=cache.device)
    if brought != ids:
        for part in map(_bits, parts.values()):
            part[rows] = part[torch.tensor(brought, device=cache.device)]
    inputs = reference.state_inputs(work.kind, parts, len(ids), random, cache.device)
    fallback = backend.can_update(work.kind, parts)
    runner = torch_ops if fallback else backend
    touched = tuple((part, (rows,)) for part in parts.values())
    return LayerStep(
        work,
        lambda: runner.state_step(work.kind, parts, rows, inputs),
        touched,
        fallback and f"eager torch in float32, {fallback}",
    )


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

    return {
        layer: (distance(got[layer][0], want[layer][0]), distance(got[layer][1], want[layer][1]))
        for layer in want
    }


def _left(step: LayerStep) -> torch.Tensor:
    parts = [_bits(view)[index].view(view.dtype).double().flatten() for view, index in step.touched]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)
