"""Filling a cache: values, how they are written, and reading them back.

    report = fill_rows(cache, rows_by_group, Normal(std=0.02))
    states = inspect_rows(cache, group=0, values=Normal(std=0.02)).states

A fill writes every byte once: sorted block ids become runs, and a run is written for all layers
of a group through one strided view. Values are encoded in each part's own dtype and moved as
bits. Everything is checked before the first byte is written.
"""

from decodebench.fill.readback import (
    FILLED,
    STATE_NAMES,
    UNTOUCHED,
    WRONG,
    ZEROED,
    RowStates,
    identify_row,
    inspect_rows,
)
from decodebench.fill.values import (
    BLOCK_STRIDE,
    LAYER_STRIDE,
    MAX_BANK_BYTES,
    PART_STRIDE,
    Constant,
    FillRefused,
    Normal,
    Poison,
    Tags,
    Values,
    Zeros,
    encode,
)
from decodebench.fill.write import FillFailed, FillReport, check_rows, fill_rows, merge_rows, runs

__all__ = [
    "BLOCK_STRIDE",
    "FILLED",
    "LAYER_STRIDE",
    "MAX_BANK_BYTES",
    "PART_STRIDE",
    "STATE_NAMES",
    "UNTOUCHED",
    "WRONG",
    "ZEROED",
    "Constant",
    "FillFailed",
    "FillRefused",
    "FillReport",
    "Normal",
    "Poison",
    "RowStates",
    "Tags",
    "Values",
    "Zeros",
    "check_rows",
    "encode",
    "fill_rows",
    "identify_row",
    "inspect_rows",
    "merge_rows",
    "runs",
]
