"""The resident step's latency next to what this machine's memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from decodebench.cache.tensors import Cache
from decodebench.layout.pool import Batch
from decodebench.layout.reads import DecodeError, LayerWork
from decodebench.measure.bandwidth import Bandwidth, bandwidth
from decodebench.measure.clock import Timing, busy, measure
from decodebench.measure.step import DecodeStep, prepare_step
from decodebench.words import seconds_text

if TYPE_CHECKING:
    import pandas as pd


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
    #: kind → floating-point operations of a step's products
    operations: dict[str, int] = field(default_factory=dict)
    #: kind → timing of that kind's layers alone, where asked for
    kind_timings: dict[str, Timing] = field(default_factory=dict)

    @property
    def bytes_read(self) -> int:
        """Bytes that a step reads from the cache, over all layers timed."""
        return sum(w.bytes_read for w in self.work)

    @property
    def bytes_written(self) -> int:
        """Bytes that a step writes to the cache, over all layers timed."""
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
        """Seconds that this step needs at least: its bytes, or its products where those take longer."""
        return limit_seconds(self.work, self.bandwidth, sum(self.operations.values()))

    @property
    def share(self) -> float:
        """limit / median: 1.0 is the memory's speed."""
        return self.limit / self.latency

    def kinds(self) -> pd.DataFrame:
        """One row a kind of layer: layers, bytes, and where timed alone its latency, GB/s and share."""
        import pandas as pd

        return pd.DataFrame(self.kind_rows())

    def kind_rows(self) -> list[dict[str, object]]:
        """``kinds`` as dictionaries, for where there is no pandas (an engine's environment)."""
        rows = []
        for kind in dict.fromkeys(w.kind for w in self.work):
            work = [w for w in self.work if w.kind == kind]
            read, written = sum(w.bytes_read for w in work), sum(w.bytes_written for w in work)
            limit = limit_seconds(work, self.bandwidth, self.operations.get(kind, 0))
            row: dict[str, object] = {"kind": kind, "layers": len(work), "bytes_read": read}
            row |= {"bytes_written": written, "bytes_moved": read + written, "limit_s": limit}
            if kind in self.kind_timings:
                t = self.kind_timings[kind]
                row |= t.to_dict()
                row["gb_per_s"] = (read + written) / t.median / 1e9
                row["limit_share"] = limit / t.median
            rows.append(row)
        return rows

    def to_dict(self) -> dict[str, object]:
        """Flat columns for a result row."""
        return {
            **self.timing.to_dict(),
            "backend": self.backend,
            "device": self.timing.device,
            "num_requests": self.num_requests,
            "context_min": self.context[0],
            "context_max": self.context[1],
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "bytes_moved": self.bytes_read + self.bytes_written,
            "gb_per_s": self.gbps,
            "limit_s": self.limit,
            "limit_share": self.share,
            "read_gbps": self.bandwidth.read,
            "update_gbps": self.bandwidth.update,
            "seed": self.seed,
            "fallbacks": "; ".join(self.fallbacks),
            "notes": "; ".join(self.notes),
        }

    def __str__(self) -> str:
        low, high = self.context
        tokens = str(low) if low == high else f"{low} to {high}"
        lines = [
            f"decode step, {self.num_requests} requests of {tokens} tokens, backend {self.backend}:",
            f"  {self.timing}",
            f"  {(self.bytes_read + self.bytes_written) / 1e6:.1f} MB to move, {self.gbps:.1f} GB/s, "
            f"{self.share:.0%} of this machine's limit ({seconds_text(self.limit)}; read "
            f"{self.bandwidth.read:.0f}, update {self.bandwidth.update:.0f} GB/s)",
            "  attention and state work only: no weights, no projections",
        ]
        return "\n".join(lines + [f"  {text}" for text in (*self.fallbacks, *self.notes)])

    __repr__ = __str__


def limit_seconds(work: Sequence[LayerWork], speed: Bandwidth, operations: int = 0) -> float:
    """Seconds that a step needs at least: ``max(bytes, operations)`` and a launch for each layer.

    What is only read moves at read speed, states and new slots at update speed. ``operations`` count where
    the speed of products was measured (CUDA), as does the launch floor: 0 on a CPU.
    """
    updated = sum(w.bytes_updated for w in work)
    read = sum(w.bytes_read for w in work) - updated / 2
    written = sum(w.bytes_written for w in work) - updated / 2
    moving = (read / speed.read + (updated + written) / speed.update) / 1e9
    computing = operations / (speed.products * 1e12) if speed.products else 0.0
    return max(moving, computing) + len(work) * speed.launch_seconds


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
    clock = partial(measure, device=cache.device, cold=cold, min_seconds=min_seconds, min_steps=min_steps)
    if limit is None and cache.device.type == "cuda":
        limit = bandwidth(cache.device)  # measured before: a card that the step fills has no room for it
    try:
        step = prepare_step(
            cache, batch, backend, seed=seed, layers=layers, query_heads=query_heads, dtype=dtype
        )
        try:
            timing = clock(step)
            kind_timings = {}
            if by_kind:
                for kind in dict.fromkeys(x.work.kind for x in step.layers):
                    part = replace(step, layers=tuple(x for x in step.layers if x.work.kind == kind))
                    kind_timings[kind] = clock(part)
        finally:
            step.restore()
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        tokens = [blocks.request.num_tokens for blocks in batch.requests]
        raise DecodeError(
            f"out of memory for a step of {len(tokens)} requests with up to {max(tokens)} tokens: {error}"
        ) from error
    tokens = [blocks.request.num_tokens for blocks in batch.requests]
    quiet = busy() if cache.device.type == "cpu" else None
    notes = [note for note in (step.note, None if cold else _small_working_set(cache, step), quiet) if note]
    if step.assumed:
        notes.append("query heads assumed: one a KV head (a layout made by hand); pass query_heads=")
    return DecodeMeasurement(
        timing,
        step.backend,
        limit or bandwidth(cache.device),
        tuple(x.work for x in step.layers),
        len(tokens),
        (min(tokens), max(tokens)),
        seed,
        step.fallbacks,
        tuple(notes),
        {
            kind: sum(x.operations for x in step.layers if x.work.kind == kind)
            for kind in dict.fromkeys(x.work.kind for x in step.layers)
        },
        kind_timings,
    )


def _small_working_set(cache: Cache, step: DecodeStep) -> str | None:
    """A GPU step that the L2 could hold looks faster than a model's would."""
    if cache.device.type != "cuda":
        return None
    l2 = torch.cuda.get_device_properties(cache.device).L2_cache_size
    each: dict[str, int] = {}
    for layer in step.layers:
        each[layer.work.kind] = each.get(layer.work.kind, 0) + layer.work.bytes_read
    small = [kind for kind, moved in each.items() if moved < 4 * l2]
    total = sum(each.values())
    if total < 4 * l2:
        return f"in L2: the step reads {total >> 20} MiB, the L2 holds {l2 >> 20}: ask for cold=True or more layers"
    if not small or len(each) == 1:
        return None
    return f"in L2 where timed alone: {', '.join(small)} (less than four times the L2's {l2 >> 20} MiB)"


def holds_fill(suspect: Timing, resident: Timing, fill_seconds: float) -> bool:
    """Whether a step's timing contains a fill (fault A17): it exceeds the resident step by half a fill.

    ``resident`` is ``measure_decode(...).timing`` of the same batch,
    ``fill_seconds`` the fill's own time (``FillReport.seconds``).
    """
    return suspect.median - resident.median > fill_seconds / 2
