"""What one decode step reads and writes, layer by layer: from the layout and the block tables alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decodebench.errors import DecodebenchError
from decodebench.layout.layout import Layout
from decodebench.layout.pool import Batch, RequestBlocks
from decodebench.models.layers import Layer
from decodebench.models.specs import KVCacheSpec, cdiv

if TYPE_CHECKING:
    import pandas as pd


class DecodeError(DecodebenchError):
    """A decode step that cannot be built or run: names the layer, request or backend, and the remedy."""


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


def decode_work(layout: Layout, batch: Batch, layers: Sequence[str] | None = None) -> tuple[LayerWork, ...]:
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
        if spec.holds_state:
            updated = 2 * spec.unpadded_page_size_bytes * len(batch.requests)
            read = written = updated // 2
        else:
            _refuse_packed(layer, spec)
            if getattr(model_layer(layout, layer), "sparse", False):
                raise DecodeError(
                    f"layer {layer!r} reads only the tokens that its indexer chooses: no backend does that, and "
                    "reading all of them would be another model; pass layers= without it"
                )
            entry = spec.bytes_per_token_slot
            for request in batch.requests:
                start, stop = local_range(layout, group, spec, request)
                new = spec.written_by_steps
                read += max(0, stop - start - new) * entry
                written += entry * new
        work.append(LayerWork(layer, group, kind, read, written, updated))
    return tuple(work)


def decode_bytes(layout: Layout, batch: Batch) -> pd.DataFrame:
    """``decode_work`` by group and kind: layers, bytes read and written, bytes a request on average."""
    import pandas as pd

    frame = pd.DataFrame([vars(w) for w in decode_work(layout, batch)])
    table = frame.groupby(["group", "kind"], sort=False).agg(
        layers=("layer", "size"), bytes_read=("bytes_read", "sum"), bytes_written=("bytes_written", "sum")
    )
    table["read_per_request"] = table["bytes_read"] / len(batch.requests)
    return table.reset_index()


def layer_kind(layout: Layout, layer: str) -> str:
    """The spec's kind; for a state layer the recurrence: the model's word for it, else from the spec."""
    spec = layout.layer_specs[layer]
    if not spec.holds_state:
        return spec.kind
    kind = getattr(model_layer(layout, layer), "mixer", None) or spec.recurrence
    if kind not in ("mamba1", "mamba2", "gdn", "kda", "short_conv", "linear"):
        raise DecodeError(
            f"layer {layer!r}: no decode step for state type {spec.label!r}; known are MAMBA1, MAMBA2, "
            "GDN_ATTN, SHORT_CONV and LINEAR"
        )
    return kind


def model_layer(layout: Layout, layer: str) -> Layer | None:
    """The model's facts about a layer, or None for a layout made by hand."""
    model = getattr(layout, "model", None)
    return next((x for x in getattr(model, "layers", ()) if x.name == layer), None)


def local_range(layout: Layout, group: int, spec: KVCacheSpec, request: RequestBlocks) -> tuple[int, int]:
    """``visible`` in this rank's entries: shared out where decode context parallelism shards the layer."""
    start, stop = spec.visible(request.request.num_tokens, request.request.encoder_tokens)
    shards = layout.decode_context_parallel_size if spec.dcp_sharded else 1
    return (start, stop) if shards == 1 else (start // shards, cdiv(stop, shards))


def _refuse_packed(layer: str, spec: KVCacheSpec) -> None:
    if spec.bookkeeping or spec.packed is not None or spec.tokens_per_state > 1:
        what = f"packed as {spec.packed}" if spec.packed else f"{spec.tokens_per_state} tokens in one entry"
        if spec.bookkeeping:
            what = "a ring of packed integers"
        raise DecodeError(
            f"layer {layer!r}: pages are {what}, no backend attends to them; measure a layout with a plain "
            "KV cache dtype (auto, fp8), or pass layers= without it"
        )
