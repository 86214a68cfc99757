"""The audit of one filling step in a worker: what the step reads, against what is there.

``StepAuditor`` stands beside a connector. What is read, the step's own metadata tells
(``step_reads``), and it is held against the plan. Pages that a fill must write are poisoned just
before it, whatever an earlier request left in them; after it every page that the step reads is
compared with the values asked for, and every page of the cache with what it held before. It does
not ask the connector what it wrote. Counting, words and verdict are ``coverage``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from decodebench.cache.bind import bind
from decodebench.cache.connector import ConnectorMetadata, startup_groups
from decodebench.cache.readback import WRONG, inspect_pages
from decodebench.cache.tensors import POISON, Cache
from decodebench.cache.values import Values
from decodebench.cache.write import FillReport
from decodebench.coverage.from_bytes import explained, states_of_fill, states_of_hit
from decodebench.coverage.from_plan import blocks_of, plan_audit, plan_suspects
from decodebench.coverage.origins import Origins
from decodebench.coverage.required import RequiredPages, kept_pages, written_blocks
from decodebench.coverage.result import (
    FOR_LATER_HITS,
    NOT_FINITE,
    NOTHING_TO_HOLD,
    SHARED,
    UNCOVERED_PAGE,
    WRONG_PAGE,
    Audit,
    Tally,
    place_of,
)
from decodebench.errors import DecodebenchError
from decodebench.layout.layout import Layout
from decodebench.layout.pool import NULL_BLOCK, Batch, RequestBlocks
from decodebench.vllm.audit_files import audit_path, header, record
from decodebench.vllm.options import Options
from decodebench.vllm.step_reads import opened_blocks, step_reads

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class AuditFailed(DecodebenchError):
    """A strict audit found pages that decode reads and nobody filled, or writes outside them."""


class StepTables(Protocol):
    """What the audit asks of a step's metadata: block tables of the requests filled, and of the others."""

    admitted: tuple[RequestBlocks, ...]
    running: tuple[RequestBlocks, ...]


class StepAuditor:
    """Audits the fills of one worker and writes them down; see the module's text.

    ``group_numbers``: the engine's numbers of the layout's groups, where a worker holds only some.
    """

    def __init__(
        self,
        layout: Layout,
        values: Values,
        options: Options,
        path: Path,
        rank: int = 0,
        connector: str = "",
        group_numbers: Sequence[int] | None = None,
    ) -> None:
        self.layout, self.values, self.options = layout, values, options
        self.path, self.step = path, 0
        self.cache: Cache | None = None
        self.kernel_blocks: dict[str, int] = {}
        self.at_startup = startup_groups(layout, values) if options.startup_fill else frozenset()
        numbers = range(len(layout.groups)) if group_numbers is None else group_numbers
        try:
            path.write_text(header(layout, numbers, options.audit, rank, connector) + "\n")
        except OSError as error:
            raise DecodebenchError(
                f"option audit_file={str(path)!r}: {error.strerror}; give a file in a folder that the "
                "engine's workers can write to"
            ) from None

    @classmethod
    def for_engine(
        cls,
        layout: Layout,
        values: Values,
        options: Options,
        vllm_config: VllmConfig,
        rank: int,
        group_numbers: Sequence[int],
    ) -> StepAuditor:
        """The auditor of a worker, by an engine's config; raises ``DecodebenchError`` for a file it cannot
        write.
        """
        transfer = vllm_config.kv_transfer_config
        path = audit_path(options.audit_file, transfer.engine_id, rank)
        return cls(layout, values, options, path, rank, transfer.kv_connector, group_numbers)

    def register(self, kv_caches: Mapping) -> None:
        """The engine's tensors, before anything was filled."""
        for name, tensor in kv_caches.items():
            spec = self.layout.layer_specs.get(name)
            if isinstance(tensor, torch.Tensor) and spec is not None and not spec.holds_state:
                blocks = self.layout.num_blocks_of(self.layout.group_of[name])
                self.kernel_blocks[name] = max(1, _rows(tensor) // blocks)
        if self.options.audit == "bytes":
            self.cache = bind(self.layout, kv_caches)

    def before_fill(
        self, meta: StepTables, forward_context: object = None, attn_metadata: object = None
    ) -> None:
        """See what the step reads, poison what the fill must write of it, and remember every page.

        ``attn_metadata``: where the step runs without a forward context of its own (whole graphs).
        """
        metadata = attn_metadata or getattr(forward_context, "attn_metadata", None)
        layers = getattr(forward_context, "no_compile_layers", None)
        self.batch, self._metadata = Batch(self.layout, meta.admitted), metadata
        self.reads = step_reads(self.layout, self.batch, metadata, layers, self.kernel_blocks)
        if self.cache is None:
            return
        self.kept = [
            pages for pages in kept_pages(self.layout, self.batch) if pages.group not in self.at_startup
        ]
        own = [pages for pages in (*self.reads.pages, *self.kept) if pages.group not in self.at_startup]
        self._fresh = _blocks(self.layout, ((pages, ~pages.shared) for pages in own))
        # a request may hit what another of the same step fills
        for layer, blocks in self._fresh.items():
            self.cache.pages(layer)[blocks.tolist()] = POISON
        # a fill writes the same bytes again that a prefix hit holds: hits are hidden while it runs
        self._hidden: dict[str, tuple[list[int], torch.Tensor]] = {}
        self._hits = self._hits_of(meta)
        for number, hits in enumerate(self._hits):
            for layer in self.layout.groups[number].layer_names if hits else ():
                page = self.cache.pages(layer)
                self._hidden[layer] = (hits, page[hits].clone())
                page[hits] = POISON
        self._before = self._pages()

    def after_fill(self, meta: StepTables, report: FillReport | None) -> Audit:
        """The step's audit, written down as one line; with ``strict`` faults are an error."""
        fill = getattr(meta, "fill", None)
        if self.cache is None:
            assert fill is not None  # only our connector takes audit="plan"
            startup, required = self.options.startup_fill, self.reads.pages
            audit = plan_audit(self.layout, self.batch, fill, None, startup, required, self.values)
            audit = self._with_reads(audit)
        else:
            audit = self._by_bytes(meta, fill)
        self.step += 1
        self._write(audit, report, getattr(meta, "counters", {}))
        return audit

    def _write(self, audit: Audit, report: FillReport | None, counters: Mapping[str, int]) -> None:
        facts = {
            "step": self.step,
            "fill_seconds": report.seconds if report else None,
            "fill_bytes": report.bytes_written if report else None,
            "counters": counters,
        }
        with self.path.open("a") as file:
            file.write(record(audit, facts) + "\n")
        if self.options.strict and not audit.ok:
            raise AuditFailed(audit.verdict)

    def later_step(self, forward_context: object = None, attn_metadata: object = None) -> None:
        """A step that fills nothing: blocks that its tokens open must hold finite numbers.

        Written down only where they do not. The engine calls this behind the step.
        """
        metadata = attn_metadata or getattr(forward_context, "attn_metadata", None)
        if self.cache is None or not metadata:
            return
        tally = Tally(self.layout, Batch(self.layout, ()), "bytes")
        self._find_behind(tally, metadata)
        if tally.findings:
            self._write(tally.result(), None, {})

    @property
    def _held(self) -> Cache:
        """The cache whose bytes are looked at; there with ``audit="bytes"`` alone."""
        assert self.cache is not None
        return self.cache

    def _with_reads(self, audit: Audit) -> Audit:
        return replace(
            audit,
            disagreements=audit.disagreements + self.reads.disagreements,
            unseen=audit.unseen + self.reads.unseen,
        )

    # -- bytes -------------------------------------------------------------------------------------

    def _by_bytes(self, meta: StepTables, fill: ConnectorMetadata | None) -> Audit:
        layout, tally = self.layout, Tally(self.layout, self.batch, "bytes")
        self._find_outside(tally, meta)
        for name, (hits, content) in self._hidden.items():
            self._held.pages(name)[hits] = content
        asked = _blocks(layout, ((pages, slice(None)) for pages in (*self.reads.pages, *self.kept)))
        states = []
        for number, group in enumerate(layout.groups):
            look = np.zeros(layout.num_blocks_of(number), dtype=bool)
            for name in group.layer_names:
                look[_existing(asked.get(name), len(look))] = True
            states.append(
                inspect_pages(self._held, number, self.values, torch.from_numpy(look)).states.numpy()
            )
        self._clear_padding()
        wrong = [np.zeros_like(found, dtype=bool) for found in states]
        short = []
        for pages in self.reads.pages:
            found_of = states[pages.group]
            exists = (pages.block_ids > NULL_BLOCK) & (pages.block_ids < found_of.shape[1])
            ids = np.where(exists, pages.block_ids, NULL_BLOCK)
            for layer in pages.layers:
                spec, found = layout.groups[pages.group].layer_specs[layer], found_of[layer, ids]
                name = layout.groups[pages.group].layer_names[layer]
                # somebody else's fill, or decoded into since
                foreign = np.isin(ids, self._fresh.get(name, ()), invert=True)
                page_states = np.where(
                    foreign, states_of_hit(found, spec), states_of_fill(found, spec, self.values)
                )
                page_states[~exists] = UNCOVERED_PAGE
                tally.count(pages, layer, page_states)
                bad = page_states >= WRONG_PAGE
                tally.find(
                    pages.group,
                    layer,
                    pages.block_ids[bad & ~exists],
                    "uncovered",
                    "no such block",
                    pages.request,
                )
                if (bad & exists).any():
                    short.append((pages, layer, ids[bad & exists]))
                    wrong[pages.group][layer, ids[bad & exists & (found == WRONG)]] = True
        for pages in self.kept:
            for layer in pages.layers:
                spec, found = (
                    layout.groups[pages.group].layer_specs[layer],
                    states[pages.group][layer, pages.block_ids],
                )
                bad = states_of_fill(found, spec, self.values) >= WRONG_PAGE
                for state, which in (("uncovered", found != WRONG), ("wrong", found == WRONG)):
                    blocks = pages.block_ids[bad & which]
                    tally.find(pages.group, layer, blocks, state, FOR_LATER_HITS, pages.request)
        self._find_behind(tally, self._metadata)
        origins = Origins.of(self._held, self.values, wrong)
        for pages, layer, ids in short:
            for blocks, state, detail in explained(origins, states, pages, layer, ids):
                tally.find(pages.group, layer, blocks, state, detail, pages.request)
        suspects: tuple[str, ...] = ()
        if tally.findings and fill is not None:
            suspects = plan_suspects(layout, self.batch, blocks_of(layout, fill))
        return tally.result(suspects, self.reads.disagreements, self.reads.unseen)

    def _find_behind(self, tally: Tally, metadata: object) -> None:
        """Blocks that the step's tokens open, of any request, in which a number is not finite.

        The step reads none of them, but kernels that work on whole tiles weight what lies behind a
        sequence with zero, and zero times NaN is NaN.
        """
        for (group, layer), blocks in opened_blocks(self.layout, metadata, self.kernel_blocks).items():
            name = self.layout.groups[group].layer_names[layer]
            if not any(part.zeros_only for part in self._held.parts(name)):
                tally.find(group, layer, self._not_finite(name, blocks), "wrong", NOT_FINITE)

    def _not_finite(self, layer: str, blocks: list[int]) -> list[int]:
        """Those of some blocks in which a number of this layer is infinite or NaN."""
        bad = np.zeros(len(blocks), dtype=bool)
        for part in range(len(self._held.parts(layer))):
            numbers = self._held.flat(layer, part)
            if numbers.element_size() == 1:  # fp8: not every build indexes or compares it
                numbers = numbers.view(torch.uint8)[blocks].view(numbers.dtype)
            else:
                numbers = numbers[blocks]
            bad |= ~numbers.to(torch.float32).isfinite().all(1).cpu().numpy()
        return [block for block, is_bad in zip(blocks, bad) if is_bad]

    def _clear_padding(self) -> None:
        """Zero what is left of the poison between and behind the parts of pages, as vLLM allocates them.

        A block may go to another group later, whose kernels read whole tiles and weight what lies
        behind a sequence with zero; but zero times NaN is NaN. What the step reads keeps its poison:
        missing fills show in what is decoded.
        """
        for layer, blocks in self._fresh.items():
            pages, end = self._held.pages(layer), 0
            if pages.ndim == 3:  # nothing lies between or behind the pieces of a page
                continue
            for part in (*sorted(self._held.parts(layer), key=lambda part: part.offset), None):
                start = pages.shape[1] if part is None else part.offset
                if end < start:
                    pages[blocks.tolist(), end:start] = 0
                end = 0 if part is None else part.offset + part.nbytes

    def _hits_of(self, meta: StepTables) -> list[list[int]]:
        """Blocks per group that this step's requests took from the prefix cache and none of them fills."""
        found = []
        for number in range(len(self.layout.groups)):
            size = self.layout.tokens_per_block(number)
            tables = [(r.block_ids[number], r.num_computed // size) for r in meta.admitted]
            own = {block for table, hit in tables for block in table[hit:]}
            shared = {block for table, hit in tables for block in table[:hit]}
            found.append(sorted(shared - own - {NULL_BLOCK}))
        return found

    def _pages(self) -> dict[tuple[int, int], torch.Tensor]:
        """(address, block stride) of each distinct region of pages → one checksum a block."""
        sums: dict[tuple[int, int], torch.Tensor] = {}
        for layer in self.layout.layer_names:
            pages = self._held.pages(layer)
            if _place(pages) not in sums:
                sums[_place(pages)] = checksums(pages)
        return sums

    def _find_outside(self, tally: Tally, meta: StepTables) -> None:
        """Pages that changed though no filled request owns them: stray and clobbered.

        Groups lie in the same bytes. A changed page counts for the group of the block's owner where
        that group lies there, else for the first group that does.
        """
        layout = self.layout
        owners = {
            block: number
            for request in (*meta.running, *meta.admitted)
            for number, table in enumerate(request.block_ids)
            for block in table
            if block != NULL_BLOCK
        }
        writable = [set(np.nonzero(pages)[0].tolist()) for pages in written_blocks(layout, self.batch)]
        lying: dict[tuple[int, int], dict[int, int]] = {}
        for number, spec in enumerate(layout.groups):
            for layer, name in enumerate(spec.layer_names):
                lying.setdefault(_place(self._held.pages(name)), {}).setdefault(number, layer)
        own = [{b for r in meta.admitted for b in r.block_ids[g]} for g in range(len(layout.groups))]
        for place, after in self._pages().items():
            changed: dict[tuple[int, str, str], list[int]] = {}
            for block in (after != self._before[place]).nonzero().flatten().tolist():
                owner = owners.get(block)
                group = owner if owner is not None and owner in lying[place] else next(iter(lying[place]))
                if owner == group and block in writable[group]:
                    continue
                if owner is None:
                    state, detail = "stray", place_of(block, -1)
                elif owner == group and block in self._hits[group]:
                    state, detail = "clobbered", SHARED
                elif owner == group and block in own[group]:
                    state, detail = "stray", NOTHING_TO_HOLD
                else:
                    state, detail = "clobbered", f"{place_of(block, owner)}, another request's"
                changed.setdefault((group, state, detail), []).append(block)
            for (group, state, detail), blocks in changed.items():
                tally.find(group, lying[place][group], blocks, state, detail)


def _rows(tensor: torch.Tensor) -> int:
    """Rows of an engine's tensor, its blocks or its kernels': behind an outermost pair of keys and values."""
    return tensor.shape[1] if tensor.ndim > 1 and tensor.shape[0] == 2 < tensor.shape[1] else tensor.shape[0]


def _blocks(
    layout: Layout, pages: Iterable[tuple[RequiredPages, np.ndarray | slice]]
) -> dict[str, np.ndarray]:
    """Layer → sorted blocks of some pages."""
    found: dict[str, set[int]] = {}
    for some, which in pages:
        group = layout.groups[some.group]
        ids = _existing(some.block_ids[which], layout.num_blocks_of(some.group)).tolist()
        for layer in some.layers:
            found.setdefault(group.layer_names[layer], set()).update(ids)
    return {name: np.array(sorted(ids), dtype=np.int64) for name, ids in found.items() if ids}


def _existing(ids: np.ndarray | None, limit: int) -> np.ndarray:
    ids = np.empty(0, dtype=np.int64) if ids is None else ids
    return ids[(ids > NULL_BLOCK) & (ids < limit)]


def _place(pages: torch.Tensor) -> tuple[int, int]:
    return pages.data_ptr(), pages.stride(0)


def checksums(pages: torch.Tensor) -> torch.Tensor:
    """One number a row of uint8 ``[blocks, bytes]``; any single changed byte changes it."""
    if pages.ndim == 3:  # a page in pieces that lie apart
        return sum(
            (checksums(piece) * (2 * i + 1) for i, piece in enumerate(pages.unbind(1))),
            torch.zeros(()).long(),
        )
    width = 8 if pages.shape[1] % 8 == 0 and pages.stride(0) % 8 == 0 and pages.data_ptr() % 8 == 0 else 1
    words = pages.view(torch.int64) if width == 8 else pages
    # odd weights, so that moved words count; sums wrap around
    weights = torch.arange(words.shape[1], dtype=torch.int64, device=pages.device) * 2 + 0x9E3779B97F4A7C1
    rows = max(1, (1 << 22) // words.shape[1])
    found = [(piece.to(torch.int64) * weights).sum(1) for piece in words.split(rows)]
    return torch.cat(found).cpu()
