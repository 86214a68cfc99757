"""The result of an audit: counts by request and layer, findings with their places, a verdict of one line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from decodebench.cache.faults import FAULTS
from decodebench.coverage.required import RequiredPages
from decodebench.layout.layout import Layout
from decodebench.layout.pool import Batch

if TYPE_CHECKING:
    import pandas as pd

#: states of a required page, in the order of the tables' columns
STATES = ("filled", "zeroed", "wrong", "uncovered")
FILLED_PAGE, ZEROED_PAGE, WRONG_PAGE, UNCOVERED_PAGE = range(4)

#: pages that nobody should have touched
TOUCHED = ("stray", "clobbered")


@dataclass(frozen=True, eq=False)
class Finding:
    """Pages that are not as they should be, in one place and for one reason.

    ``layer`` None: all layers of the group. ``request`` None: no request of the batch reads them.
    ``state``: one of ``wrong``, ``uncovered``, ``stray``, ``clobbered``.
    """

    group: int
    layer: str | None
    blocks: np.ndarray
    request: str | None
    state: str
    detail: str

    def pages(self, layout: Layout) -> int:
        """Pages of single layers."""
        return len(self.blocks) * (1 if self.layer else len(layout.groups[self.group].layer_names))


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found. ``ok``: every required page filled or zeroed on purpose, nothing else touched.

    Tables (pandas): ``groups``, ``layers``, ``requests`` count pages by state; ``rows`` lists every
    page that is not as it should be, with what its bytes are. ``counts`` is what the tables sum:
    pages by state, int64 [requests, layers in the layout's order, 4]. ``disagreements``: where two
    sources that should agree do not (plan and bytes, plan and step). ``unseen``: what the audit
    could not look at; there it vouches for nothing. Both in words, each a clause of the verdict.
    """

    layout: Layout
    source: str
    request_ids: tuple[str, ...]
    counts: np.ndarray
    findings: tuple[Finding, ...] = ()
    suspects: tuple[str, ...] = ()
    disagreements: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    @property
    def required(self) -> int:
        """Required pages of all groups."""
        return int(self.counts.sum())

    @property
    def covered(self) -> int:
        """Required pages filled, or zeroed on purpose."""
        return int(self.counts[:, :, :WRONG_PAGE].sum())

    @property
    def coverage(self) -> float:
        """Share of the required pages that are covered, 0 to 1."""
        return self.covered / self.required if self.required else 1.0

    @property
    def ok(self) -> bool:
        """Whether every required page is covered and nothing else was found: no stray page, no disagreement."""
        return self.covered == self.required and not (self.findings or self.disagreements or self.unseen)

    @cached_property
    def groups(self) -> pd.DataFrame:
        """One row a group: pages by state, coverage, stray and clobbered pages."""
        import pandas as pd

        touched = {state: [0] * len(self.layout.groups) for state in TOUCHED}
        for finding in self.findings:
            if finding.state in TOUCHED:
                touched[finding.state][finding.group] += finding.pages(self.layout)
        facts = pd.DataFrame(
            {"group": g, "kind": group.kind, "layers": len(group.layer_names), "block_size": group.block_size}
            for g, group in enumerate(self.layout.groups)
        )
        return pd.concat([facts, _by_state(self._by_group().sum(axis=0)), pd.DataFrame(touched)], axis=1)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """One row a layer."""
        import pandas as pd

        names = self.layout.layer_names
        facts = pd.DataFrame({"group": [self.layout.group_of[name] for name in names], "layer": names})
        return pd.concat([facts, _by_state(self.counts.sum(axis=0))], axis=1)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row a request and group."""
        import pandas as pd

        groups = len(self.layout.groups)
        facts = pd.DataFrame(
            {
                "request": np.repeat(self.request_ids, groups),
                "group": np.tile(np.arange(groups), len(self.request_ids)),
            }
        )
        return pd.concat([facts, _by_state(self._by_group().reshape(-1, 4))], axis=1)

    @cached_property
    def rows(self) -> pd.DataFrame:
        """One row for every page that is not as it should be."""
        import pandas as pd

        found = self.findings
        repeats = np.array([len(finding.blocks) for finding in found], dtype=np.int64)

        def column(name: str) -> np.ndarray:  # object: None stays None
            return np.repeat(np.array([getattr(finding, name) for finding in found], dtype=object), repeats)

        return pd.DataFrame(
            {
                "group": column("group").astype(np.int64),
                "layer": pd.Series(column("layer"), dtype=object),
                "block": np.concatenate(
                    [np.empty(0, dtype=np.int64), *(finding.blocks for finding in found)]
                ),
                "request": pd.Series(column("request"), dtype=object),
                "state": column("state"),
                "detail": column("detail"),
            }
        )

    def _why_zeroed(self) -> str:
        """The formats among the zeroed pages that hold no plain numbers, in brackets; empty where none is known."""
        specs = getattr(self.layout, "layer_specs", {})
        zeroed = self.counts[:, :, ZEROED_PAGE].sum(axis=0)
        found = [
            specs[name].not_plain for name, count in zip(self.layout.layer_names, zeroed) if count and specs
        ]
        formats = dict.fromkeys(filter(None, found))
        return f" ({', '.join(formats)}: no plain numbers to fill)" if formats else ""

    @property
    def verdict(self) -> str:
        """One line for a reader in a hurry."""
        share = "100 %" if self.covered == self.required else f"{min(99.9, 100 * self.coverage):.1f} %"
        groups = len(self.layout.groups)
        covered = "written, by block ids," if self.source == "plan" else "covered"
        line = f"{share} of {self.required:,} required pages {covered} in {groups} group{'s' * (groups != 1)}"
        zeroed = int(self.counts[:, :, ZEROED_PAGE].sum())
        if zeroed:
            line += f", {zeroed:,} of them zeroed on purpose{self._why_zeroed()}"
        bad = [
            f"group {row.group} ({row.kind}) {min(99.9, 100 * row.coverage):.3g} %"
            for row in self.groups.itertuples()
            if row.filled + row.zeroed < row.required
        ]
        if bad:
            line += ": " + ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
        touched = [(int(self.groups[state].sum()), state) for state in TOUCHED]
        if any(count for count, _ in touched):
            line += "; " + ", ".join(
                f"{count:,} page{'s' * (count != 1)} {state}" for count, state in touched if count
            )
        elif not bad:
            line += "; nothing else touched"
        for detail in (FOR_LATER_HITS, NOT_FINITE):
            beside = sum(f.pages(self.layout) for f in self.findings if f.detail == detail)
            if beside:
                line += f"; {beside:,} page{'s' * (beside != 1)} beside them: {detail}"
        if self.suspects:
            line += f". Looks like {' or '.join(f'{s} {FAULTS[s].name}' for s in self.suspects)}"
        for told, what in ((self.disagreements, "disagreements"), (self.unseen, "things unseen")):
            if told:
                more = f" (and {len(told) - 1:,} more {what})" if len(told) > 1 else ""
                line += f". {told[0][:1].upper()}{told[0][1:]}{more}"
        return line + "."

    def __repr__(self) -> str:
        table = self.groups.to_string(index=False, formatters={"coverage": "{:.1%}".format})
        return f"{self.verdict}\n{table}"

    def _repr_html_(self) -> str:
        from html import escape

        table = self.groups.style.hide(axis="index").format({"coverage": "{:.1%}"}).to_html()
        return f"<p><strong>{escape(self.verdict)}</strong></p>{table}"

    def _by_group(self) -> np.ndarray:
        """Pages by state, int64 [requests, groups, 4]."""
        ends = np.cumsum([0] + [len(group.layer_names) for group in self.layout.groups])
        parts = [self.counts[:, a:b].sum(axis=1) for a, b in itertools.pairwise(ends)]
        return np.stack(parts, axis=1)


def _by_state(counts: np.ndarray) -> pd.DataFrame:
    """Columns required, filled, zeroed, wrong, uncovered, coverage from int64 [rows, 4]."""
    import pandas as pd

    required = counts.sum(axis=1)
    table = pd.DataFrame({"required": required, **{s: counts[:, i] for i, s in enumerate(STATES)}})
    covered = counts[:, :WRONG_PAGE].sum(axis=1)
    table["coverage"] = np.where(required > 0, covered / np.maximum(required, 1), 1.0)
    return table


class Tally:
    """Counts and findings of an audit under way."""

    def __init__(self, layout: Layout, batch: Batch, source: str) -> None:
        self.layout, self.batch, self.source = layout, batch, source
        self.counts = np.zeros((len(batch.requests), len(layout.layer_names), 4), dtype=np.int64)
        self.findings: list[Finding] = []
        self._first = [layout.layer_index[group.layer_names[0]] for group in layout.groups]

    def count(self, pages: RequiredPages, layer: int, page_states: np.ndarray) -> None:
        """Count the states (0 to 3 a page) of a request's required pages in one layer of their group."""
        self.counts[pages.request, self._first[pages.group] + layer] += np.bincount(page_states, minlength=4)[
            :4
        ]

    def find(
        self,
        group: int,
        layer: int | None,
        blocks: Sequence[int] | np.ndarray,
        state: str,
        detail: str,
        request: int | None = None,
    ) -> None:
        """Note what was found at some blocks of a group: in one layer, or in all of it; of one request, or of
        none.
        """
        if not len(blocks):
            return
        name = None if layer is None else self.layout.groups[group].layer_names[layer]
        who = None if request is None else self.batch.requests[request].request_id
        self.findings.append(Finding(group, name, np.asarray(blocks), who, state, detail))

    def result(
        self,
        suspects: tuple[str, ...] = (),
        disagreements: tuple[str, ...] = (),
        unseen: tuple[str, ...] = (),
    ) -> Audit:
        """The audit of what was counted and found."""
        names = tuple(blocks.request_id for blocks in self.batch.requests)
        found = tuple(self.findings)
        return Audit(self.layout, self.source, names, self.counts, found, suspects, disagreements, unseen)


#: a request's own page that was filled although no token before the computed one lies in it
NOTHING_TO_HOLD = "holds nothing to stand in for: the step writes it itself"

#: a page that a fill left out, or filled wrongly, and that no step reads yet
FOR_LATER_HITS = "the state that the running one was copied from: later prefix hits read it"

#: what a kernel that reads whole tiles finds behind a sequence, in the block that its token opens
NOT_FINITE = "numbers behind the sequence are not finite: kernels that read whole tiles decode NaN"

#: a page that a prefix hit brought, and that this batch's fill had to leave alone
SHARED = "a prefix hit's shared block"


def place_of(block_id: int, holder: int) -> str:
    """Whose a block is, in words."""
    if block_id == 0:
        return "the null block"
    return f"owned by group {holder}" if holder >= 0 else "owned by no request"
