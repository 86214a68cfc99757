"""How blocks are written: each byte once, all blocks, layers and parts of a step in one call where C++ builds.

Values that no compiled kernel knows, and machines without a compiler, take torch: runs of block ids,
all layers of a group through one strided view.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache as memoize
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from decodebench.cache import compiled_rows
from decodebench.cache.tensors import Cache, Span
from decodebench.cache.values import (
    FillRefused,
    Normal,
    Tags,
    Values,
    default_values,
    put,
    source_of,
    value_dtypes,
)
from decodebench.errors import DecodebenchError
from decodebench.layout.layout import Layout


class FillFailed(DecodebenchError):
    """A fill that broke on its way; ``report`` says what was written until then."""

    def __init__(self, message: str, report: FillReport) -> None:
        super().__init__(message)
        self.report = report


@dataclass
class FillReport:
    """What a fill wrote.

    ``blocks[g]``: blocks written in group g (a block's page in every layer of the group);
    ``block_ids[g]``: which.
    ``bytes_needed``: bytes of the parts of all blocks asked for, each once; ``bytes_zeroed`` of them
    hold no plain numbers and were zeroed. ``seconds`` includes waiting for the device,
    ``prepare_seconds`` is checking and drawing the noise bank (once per ``Values``).
    """

    blocks: list[int] = field(default_factory=list)
    block_ids: list[tuple[int, ...]] = field(default_factory=list, repr=False)
    bytes_needed: int = 0
    bytes_written: int = 0
    bytes_zeroed: int = 0
    writes: int = 0
    seconds: float = 0.0
    #: of them the device's own, where it keeps its own time (CUDA); the host's work is the rest
    device_seconds: float | None = None
    prepare_seconds: float = 0.0

    def count(self, nbytes: int, zeroed: bool) -> None:
        """One write of so many bytes."""
        self.writes += 1
        self.bytes_written += nbytes
        self.bytes_zeroed += nbytes if zeroed else 0


def merge_blocks(tables: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """The block ids of many requests as sorted unique blocks.

    Equal tables are looked at once: requests that share their blocks cost a hash each.
    """
    merged: set[int] = set()
    for table in {tuple(table) for table in tables}:
        merged.update(table)
    return tuple(sorted(merged))


def runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Sorted unique blocks as (start, count, step): equally spaced blocks are written at once."""
    found, i = [], 0
    while i < len(blocks):
        step = blocks[i + 1] - blocks[i] if i + 1 < len(blocks) else 1
        j = i + 1
        while j < len(blocks) and blocks[j] - blocks[j - 1] == step:
            j += 1
        found.append((blocks[i], j - i, step))
        i = j
    return found


def check_blocks(
    layout: Layout, ids_by_group: Sequence[Sequence[int]], allow_null_block: bool = False
) -> None:
    """Refuse blocks that do not exist, are the null block, repeat, or are out of order."""
    if len(ids_by_group) != len(layout.groups):
        raise FillRefused(f"blocks for {len(ids_by_group)} groups, but the layout has {len(layout.groups)}")
    for group, blocks in enumerate(ids_by_group):
        limit = layout.num_blocks_of(group)
        spec = layout.groups[group]
        name = f"group {group} ({spec.kind}, first layer {spec.layer_names[0]!r})"
        previous = -1
        for block in blocks:
            if not 0 <= block < limit:
                raise FillRefused(f"{name}: block id {block} is out of range, valid ids are 1 to {limit - 1}")
            if block <= previous:
                raise FillRefused(
                    f"{name}: block id {block} after {previous}: blocks must be sorted and unique (merge_blocks)"
                )
            previous = block
        if len(blocks) and blocks[0] == 0 and not allow_null_block:
            raise FillRefused(
                f"{name}: block id 0 is the null block, a placeholder that holds no data: leave it out"
            )


def fill_blocks(
    cache: Cache,
    ids_by_group: Sequence[Sequence[int]],
    values: Values | None = None,
    *,
    allow_null_block: bool = False,
) -> FillReport:
    """Write the blocks of a step: ``ids_by_group[g]`` are sorted unique block ids of group g.

    All layers of a group are written. Parts that hold no plain numbers (packed formats, circular
    buffers) are zeroed. Raises ``FillRefused`` before anything is written, ``FillFailed`` (with
    the report so far) if a write breaks.
    """
    values = default_values() if values is None else values
    began = time.perf_counter()
    ids_by_group = [list(blocks) for blocks in ids_by_group]
    check_blocks(cache.layout, ids_by_group, allow_null_block)
    spans = [cache.spans(group) if blocks else [] for group, blocks in enumerate(ids_by_group)]
    values.prepare(value_dtypes(spans, values), cache.device)
    report = FillReport(blocks=[0] * len(ids_by_group), block_ids=[()] * len(ids_by_group))
    for group_spans, blocks in zip(spans, ids_by_group):
        report.bytes_needed += len(blocks) * sum(s.view.shape[0] * s.part.nbytes for s in group_spans)
    kernel = _kernel(cache.device)
    if kernel is not None:
        for span in [s for group_spans in spans for s in group_spans]:
            _warm(kernel, span, values)
    events = _events(cache.device)
    started = time.perf_counter()
    report.prepare_seconds = started - began
    try:
        if events:
            events[0].record()
        if kernel is None:
            spans = _fill_compiled(spans, ids_by_group, values, report)
        for group, (group_spans, blocks) in enumerate(zip(spans, ids_by_group)):
            ids = kernel.device_rows(blocks, cache.device) if kernel is not None and blocks else None
            group_runs = runs(blocks) if group_spans and (ids is None or isinstance(values, Tags)) else []
            for span in group_spans:
                _fill_span(span, group_runs, values, report, ids)
            report.blocks[group], report.block_ids[group] = len(blocks), tuple(blocks)
    except RuntimeError as error:
        raise FillFailed(f"the fill broke after {report.bytes_written} bytes: {error}", report) from error
    finally:
        if events:
            events[1].record()
            torch.cuda.synchronize(cache.device)
            report.device_seconds = events[0].elapsed_time(events[1]) / 1e3
        report.seconds = time.perf_counter() - started
    return report


def _warm(kernel: ModuleType, span: Span, values: Values) -> None:
    """Compile what this span's launch needs, before the clock runs."""
    source = source_of(span, values)
    number = source.number(span.part.dtype)
    if number is not None or isinstance(source, Normal):
        window = source.window(span) if number is None and isinstance(source, Normal) else None
        kernel.launch(span.bits, kernel.device_rows([0], span.bits.device), number, window).warm()


def _events(device: torch.device) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _fill_compiled(
    spans: list[list[Span]], ids_by_group: Sequence[Sequence[int]], values: Values, report: FillReport
) -> list[list[Span]]:
    """Write what the C++ kernels can, in one call; returns the spans that are left for torch."""
    left: list[list[Span]] = [[] for _ in spans]
    writes = []
    for group, (group_spans, blocks) in enumerate(zip(spans, ids_by_group)):
        if not group_spans or group_spans[0].bits.device.type != "cpu" or compiled_rows.why_not():
            left[group] = group_spans
            continue
        ids = torch.tensor(blocks, dtype=torch.int64)
        for span in group_spans:
            source = source_of(span, values)
            number = source.number(span.part.dtype)
            if number is None and not isinstance(source, Normal):
                left[group].append(span)
                continue
            content = compiled_rows.Noise(**source.window(span)) if isinstance(source, Normal) else number
            writes.append(compiled_rows.Rows(span.bits, ids, content))
            zeroed = span.part.zeros_only and number == 0
            report.count(len(blocks) * span.bits.shape[0] * span.part.nbytes, zeroed)
    if writes:
        compiled_rows.write(writes)
    return left


def _fill_span(
    span: Span,
    group_runs: list[tuple[int, int, int]],
    values: Values,
    report: FillReport,
    ids: torch.Tensor | None = None,
) -> None:
    """Write one part of some layers of a group: in one launch where ``ids`` lie on a GPU, else run by run."""
    source = source_of(span, values)
    number = source.number(span.part.dtype)
    zeroed = span.part.zeros_only and number == 0
    kernel = _kernel(span.bits.device)
    if ids is not None and kernel is not None and (number is not None or isinstance(source, Normal)):
        window: Mapping[str, object] = source.window(span) if isinstance(source, Normal) else {}
        kernel.write(span.bits, ids, number, **window)
        report.count(len(ids) * span.bits.shape[0] * span.part.nbytes, zeroed)
        return
    blocks = sum(count for _, count, _ in group_runs)
    if number is not None and _indexed_is_faster(span, blocks, len(group_runs)):
        listed = [start + i * step for start, count, step in group_runs for i in range(count)]
        span.bits.index_fill_(1, torch.tensor(listed, device=span.bits.device), number)
        report.count(blocks * span.bits.shape[0] * span.part.nbytes, zeroed)
        return
    for start, count, step in group_runs:
        target = span.bits[:, start : start + (count - 1) * step + 1 : step]
        for _, piece, content in source.sources(
            target, span.part.dtype, span.first_layer, start, step, span.part_index
        ):
            put(piece, content)
            report.count(piece.numel() * piece.itemsize, zeroed)


@memoize
def _kernel(device: torch.device) -> ModuleType | None:
    """The Triton kernel's module where it can be used: one launch a view, whatever the blocks."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    return import_module("decodebench.cache.triton_rows")


def _indexed_is_faster(span: Span, blocks: int, num_runs: int) -> bool:
    """Whether one indexed write beats many small ones.

    An indexed write reaches about 0.6 of what a strided one does on a CPU, but costs one call; a
    call costs a few microseconds, in which a CPU writes some 100 KiB and a GPU some 10 MiB.
    """
    small = (96 << 10) if span.bits.device.type == "cpu" else (8 << 20)
    return num_runs > 1 and blocks * span.bits.shape[0] * span.part.nbytes < num_runs * small
