"""What a running step reads, from the metadata that the engine hands to its own kernels.

Nothing of ours decides here which blocks matter: block tables, sequence lengths, slot mappings and
state indices are the step's (``forward_context.attn_metadata``), the window is the layer's own. Any
backend whose metadata holds such tensors is read; what holds none is named, so that an audit says
what it could not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from decodebench.cache.connector import describe
from decodebench.coverage.required import RequiredPages, hit_blocks, required_pages
from decodebench.layout.layout import Layout
from decodebench.layout.pool import NULL_BLOCK, Batch
from decodebench.models.specs import KVCacheSpec


@dataclass(frozen=True)
class Reading:
    """One sequence of a step in one layer: blocks that its kernel reads, and blocks that it writes."""

    read: np.ndarray
    written: np.ndarray


@dataclass(frozen=True)
class StepReads:
    """Pages that the step reads for the requests of a batch, as ``required_pages`` gives the plan's.
    ``disagreements``: where they are not the plan's. ``unseen``: layers whose metadata does not
    tell; their pages are the plan's.
    """

    pages: tuple[RequiredPages, ...]
    disagreements: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


def step_reads(
    layout: Layout,
    batch: Batch,
    attn_metadata: object,
    layers: Mapping[str, object] | None = None,
    kernel_blocks: Mapping[str, int] | None = None,
) -> StepReads:
    """What a step's metadata makes the kernels read for ``batch``, held against the plan.

    ``attn_metadata``: layer → metadata, or a list of such (microbatches). ``layers``: layer → the
    engine's module, whose window counts. ``kernel_blocks``: layer → blocks of its kernel in one of
    ours (1 where absent).
    """
    parts = _parts(attn_metadata)
    planned = _by_layer(required_pages(layout, batch))
    pages: list[RequiredPages] = []
    told: dict[tuple[int, int, str], list[str]] = {}
    unseen: dict[str, list[str]] = {}
    readings: dict[tuple, list[Reading] | None] = {}  # layers of a group share their metadata
    for group, spec in enumerate(layout.groups):
        owner = _owner(layout, batch, group)
        for layer, (name, layer_spec) in enumerate(zip(spec.layer_names, spec.layer_specs)):
            module, ratio = (layers or {}).get(name), (kernel_blocks or {}).get(name, 1)
            found = [part[name] for part in parts if name in part]
            sequences: list[list[Reading] | None] = []
            for metadata in found:
                key = (group, id(metadata), layer_spec, _window(layer_spec, module), ratio)
                if key not in readings:
                    readings[key] = _sequences(layout, group, layer_spec, metadata, module, ratio)
                sequences.append(readings[key])
            if not found or None in sequences:
                what = type(found[0]).__name__ if found else "no metadata"
                unseen.setdefault(f"{describe(layout, group)} ({what})", []).append(name)
                pages += [r for (_, g, j), r in planned.items() if (g, j) == (group, layer)]
                continue
            seen = _seen([part for part in sequences if part is not None], owner)
            for request, blocks in enumerate(batch.requests):
                plan = planned.get((request, group, layer))
                plan_ids = set() if plan is None else set(plan.block_ids.tolist())
                if request not in seen:
                    if plan is not None and plan_ids:
                        where = (request, group, "no sequence of the step writes into its blocks")
                        told.setdefault(where, []).append(name)
                        pages.append(plan)
                    continue
                ids = seen[request]
                if ids != plan_ids and not (ids < plan_ids and _lost_its_window(layer_spec, module)):
                    where = (
                        request,
                        group,
                        f"the plan reads blocks {_some(plan_ids)}, the step {_some(ids)}",
                    )
                    told.setdefault(where, []).append(name)
                if ids:
                    pages.append(_rows(layout, blocks, request, group, layer, ids))
    return StepReads(
        tuple(pages),
        tuple(
            f"plan and step disagree: request {batch.requests[request].request_id!r}, "
            f"{describe(layout, group)}, {len(names)} layer{'s' * (len(names) > 1)} from {names[0]!r}: {what}"
            for (request, group, what), names in told.items()
        ),
        tuple(
            f"what the step reads cannot be seen in {where}, {len(names)} "
            f"layer{'s' * (len(names) > 1)} from {names[0]!r}: counted as planned"
            for where, names in unseen.items()
        ),
    )


def opened_blocks(
    layout: Layout, attn_metadata: object, kernel_blocks: Mapping[str, int] | None = None
) -> dict[tuple[int, int], list[int]]:
    """(group, layer) → blocks of attention that begin with a token which the step computes."""
    parts = _parts(attn_metadata)
    opened: dict[tuple[int, int], list[int]] = {}
    known: dict[tuple, list[int]] = {}
    for group, spec in enumerate(layout.groups):
        for layer, (name, layer_spec) in enumerate(zip(spec.layer_names, spec.layer_specs)):
            if layer_spec.holds_state or not layer_spec.written_by_steps:
                continue
            for metadata in (part[name] for part in parts if name in part):
                key = (group, id(metadata), layer_spec)
                if key not in known:
                    ratio = (kernel_blocks or {}).get(name, 1)
                    readings = _sequences(layout, group, layer_spec, metadata, None, ratio) or []
                    behind = (set(r.written.tolist()) - set(r.read.tolist()) for r in readings)
                    known[key] = sorted(set().union(*behind))
                if known[key]:
                    opened.setdefault((group, layer), []).extend(known[key])
    return opened


def _parts(attn_metadata: Any) -> list[Mapping[str, object]]:
    """layer → metadata, one a microbatch; those without any left out."""
    parts = attn_metadata if isinstance(attn_metadata, list | tuple) else [attn_metadata]
    return [part for part in parts if part]


def _by_layer(required: Sequence[RequiredPages]) -> dict[tuple[int, int, int], RequiredPages]:
    """(request, group, layer of the group) → its pages alone."""
    return {
        (pages.request, pages.group, layer): RequiredPages(
            pages.request, pages.group, (layer,), pages.positions, pages.block_ids, pages.shared
        )
        for pages in required
        for layer in pages.layers
    }


def _owner(layout: Layout, batch: Batch, group: int) -> dict[int, int]:
    """Block → the request that alone writes it, behind its prefix hit."""
    owner: dict[int, int] = {}
    twice = set()
    for request, blocks in enumerate(batch.requests):
        for block in set(blocks.block_ids[group][hit_blocks(layout, blocks, group) :]) - {NULL_BLOCK}:
            if owner.setdefault(block, request) != request:
                twice.add(block)
    return {block: request for block, request in owner.items() if block not in twice}


def _seen(sequences: Sequence[list[Reading]], owner: Mapping[int, int]) -> dict[int, set[int]]:
    """Request → blocks that its sequences read."""
    seen: dict[int, set[int]] = {}
    for sequence in (one for part in sequences for one in part):
        # the block that it writes is its own; one that it reads may be another's that it hits
        blocks = sequence.written.tolist() or sequence.read[::-1].tolist()
        request = next((owner[block] for block in blocks if block in owner), None)
        if request is not None:
            seen.setdefault(request, set()).update(sequence.read.tolist())
    return seen


def _rows(layout, blocks, request: int, group: int, layer: int, ids: set[int]) -> RequiredPages:
    table = {block: p for p, block in reversed(list(enumerate(blocks.block_ids[group])))}
    ordered = sorted(ids, key=lambda block: (table.get(block, -1), block))
    positions = np.array([table.get(block, len(table)) for block in ordered], dtype=np.int64)
    shared = positions < hit_blocks(layout, blocks, group)
    return RequiredPages(request, group, (layer,), positions, np.array(ordered, dtype=np.int64), shared)


def _some(ids: set[int]) -> str:
    listed = sorted(ids)
    return f"{listed[:6]}" if len(listed) <= 6 else f"{listed[:5]} and {len(listed) - 5} more"


# -- metadata of any backend ----------------------------------------------------------------------


def _sequences(
    layout: Layout, group: int, spec: KVCacheSpec, metadata: object, module: object, ratio: int
) -> list[Reading] | None:
    """A layer's sequences in the order of the batch; None where its metadata does not tell."""
    if spec.holds_state:
        return _states(metadata)
    tables = list(_tables(metadata))
    if not tables:
        return None
    per_block, window = layout.tokens_per_block(group), _window(spec, module)
    sequences = []
    for table, lengths, queries, slots in tables:
        starts = np.concatenate([[0], np.cumsum(queries)])
        for i, (length, query) in enumerate(zip(lengths.tolist(), queries.tolist())):
            if length == 0 or query == 0:
                continue  # padding of a captured graph
            before = length - query if _is_causal(spec) else length
            first = 0 if window is None else max(0, before + 1 - window)
            kernel_block = per_block // ratio
            reach = range(first // kernel_block, -(-before // kernel_block)) if first < before else range(0)
            read = table[i, reach.start : reach.stop] // ratio
            written = np.empty(0, dtype=np.int64)
            if slots is not None and spec.tokens_per_state == 1:
                written = slots[starts[i] : starts[i + 1]]
                written = written[written >= 0] // spec.block_size
            sequences.append(Reading(np.unique(read), np.unique(written)))
    return sequences


def _tables(metadata: object) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]]:
    """(block table, sequence lengths, query lengths, slots) of the metadata, or of its decode part."""
    starts, slots = _array(metadata, "query_start_loc"), _array(metadata, "slot_mapping")
    for part in (metadata, getattr(metadata, "decode", None)):
        table = _array(part, "block_table", "block_tables", "block_table_tensor")
        lengths = _array(part, "dcp_tot_seq_lens", "seq_lens")
        if table is None or lengths is None or table.ndim != 2:
            continue
        count = min(len(table), len(lengths))
        if starts is not None and len(starts) > count:
            queries = np.diff(starts)[:count]
        elif starts is None and slots is not None and count and len(slots) % count == 0:
            queries = np.full(count, len(slots) // count)
        else:
            continue
        yield table, lengths[:count], queries, slots
        return


def _states(metadata: object) -> list[Reading] | None:
    """State layers: the page that each sequence starts from, which it also replaces."""
    found = []
    accepted = _array(metadata, "num_accepted_tokens")
    for name in (
        "state_indices_tensor_d",
        "state_indices_tensor_p",
        "spec_state_indices_tensor",
        "non_spec_state_indices_tensor",
    ):
        indices = _array(metadata, name)
        if indices is None or not indices.size:
            continue
        if indices.ndim == 2:
            # a step after speculation starts from the state of the last token that was accepted
            last = np.zeros(len(indices), dtype=np.int64)
            if accepted is not None and not name.endswith("_p"):
                last[: len(accepted)] = np.maximum(accepted[: len(indices)] - 1, 0)
            indices = indices[np.arange(len(indices)), np.minimum(last, indices.shape[1] - 1)]
        begun = _array(metadata, "has_initial_states_p") if name.endswith("_p") else None
        found += [
            (block, begun is None or i >= len(begun) or bool(begun[i])) for i, block in enumerate(indices)
        ]
    if not found:
        indices = _array(metadata, "state_indices_tensor")
        if indices is None:
            return None
        found = [(block, True) for block in (indices if indices.ndim == 1 else indices[:, 0])]
    return [
        Reading(np.array([block] if begun else [], dtype=np.int64), np.array([block], dtype=np.int64))
        for block, begun in found
        if block > NULL_BLOCK
    ]


def _array(holder: object, *names: str) -> np.ndarray | None:
    """The first of these attributes that holds a tensor, as int64 on the CPU."""
    for name in names:
        tensor = getattr(holder, name, None)
        if tensor is not None and hasattr(tensor, "detach"):
            return tensor.detach().cpu().numpy().astype(np.int64)
    return None


def _is_causal(spec: KVCacheSpec) -> bool:
    """Cross attention reads all of the encoder; everything else what lies before the tokens computed."""
    return spec.kind != "cross_attention"


def _window(spec: KVCacheSpec, module: object) -> int | None:
    """Tokens that a layer looks back at, its own included: the engine's word, else the spec's."""
    window = _own_window(spec, module)
    return window if window is not None else getattr(spec, "sliding_window", None)


def _own_window(spec: KVCacheSpec, module: object) -> int | None:
    """The window of the engine's layer: ``w``, or ``(w - 1, 0)`` to the left and the right."""
    window = getattr(getattr(module, "impl", None), "sliding_window", None)
    if isinstance(window, tuple | list):
        return window[0] + 1 if window and window[0] >= 0 else None
    if not isinstance(window, int) or window <= 0:
        return None
    return window


def _lost_its_window(spec: KVCacheSpec, module: object) -> bool:
    """A window layer in a group that the engine describes as full attention: its spec lost the window."""
    return (
        spec.keeps_all
        and getattr(spec, "sliding_window", None) is None
        and _own_window(spec, module) is not None
    )
