"""Every page with its state: the table that a page map is drawn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decodebench.coverage.required import required_pages
from decodebench.coverage.result import Audit
from decodebench.layout.pool import Batch

if TYPE_CHECKING:
    import pandas as pd


def page_map(audit: Audit, batch: Batch) -> pd.DataFrame:
    """Every page that a request owns, or that somebody wrote, with its state:
    the table that ``page_maps`` draws.

    Columns group, kind, layer, block, state. A page that the step reads and somebody else
    overwrote is ``wrong``; ``clobbered`` and ``stray`` are pages it does not read.
    """
    import pandas as pd

    layout = audit.layout
    state = {(layer, 0): "null" for layer in layout.layer_names}
    for g, spec in enumerate(layout.groups):
        owned = {block for blocks in batch.requests for block in blocks.block_ids[g]} - {0}
        state |= {(layer, block): "owned" for layer in spec.layer_names for block in owned}
    for pages in required_pages(layout, batch):
        group = layout.groups[pages.group]
        for layer in pages.layers:
            held = "zeroed" if all(part.zeros_only for part in group.layer_specs[layer].parts()) else "filled"
            state |= {(group.layer_names[layer], int(block)): held for block in pages.block_ids}
    for row in audit.rows.to_dict("records"):
        layers = [row["layer"]] if row["layer"] else layout.groups[row["group"]].layer_names
        for page in ((layer, int(row["block"])) for layer in layers):
            read = state.get(page) in ("filled", "zeroed", "wrong", "uncovered")
            state[page] = "wrong" if read and row["state"] in ("clobbered", "stray") else row["state"]
    kinds = [group.kind for group in layout.groups]
    order = {layer: i for i, layer in enumerate(layout.layer_names)}
    group_of = layout.group_of
    table = [
        (group_of[layer], kinds[group_of[layer]], layer, block, held)
        for (layer, block), held in sorted(state.items(), key=lambda item: (order[item[0][0]], item[0][1]))
    ]
    return pd.DataFrame(table, columns=["group", "kind", "layer", "block", "state"])
