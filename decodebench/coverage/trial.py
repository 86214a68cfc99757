"""A batch filled on a small layout and audited: with a fault, without it, or one beside the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decodebench.cache.run import fill_cache
from decodebench.cache.tensors import allocate
from decodebench.cache.values import Normal, Values
from decodebench.coverage.from_bytes import audit
from decodebench.coverage.page_map import page_map
from decodebench.coverage.result import Audit
from decodebench.layout.layout import Layout
from decodebench.layout.plan import plan
from decodebench.layout.pool import Batch, admit
from decodebench.layout.shrink import small_pool
from decodebench.models.model import Model

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Trial:
    """A batch that was filled, and what the audit found."""

    batch: Batch
    audit: Audit

    @property
    def pages(self) -> pd.DataFrame:
        """The state of every page; see ``page_map``."""
        return page_map(self.audit, self.batch)


def trial(layout: Layout, batch: Batch, values: Values, fault: str | None = None) -> Trial:
    """Fill a batch on a poisoned cache on the CPU, with one of ``FAULTS`` or none, and audit every byte."""
    cache = allocate(layout, "cpu")
    report = fill_cache(cache, batch, values, fault=fault)
    return Trial(batch, audit(cache, batch, values, report))


def before_and_after(
    model: Model | str | Mapping,
    requests: int,
    context: int,
    blocks: int | None = None,
    fault: str = "A1",
    memory: int | str = "8GiB",
) -> tuple[Trial, Trial]:
    """The same batch on a small pool of a model's real layout, filled with the fault and without it.

    ``blocks``: size of that pool; default: what the batch takes and one block more.
    """
    layout = small_pool(plan(model, memory=memory, max_model_len="auto"), requests, context, blocks)
    batch = admit(layout, requests=requests, context=context)
    return trial(layout, batch, Normal(), fault), trial(layout, batch, Normal())
