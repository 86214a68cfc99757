"""Auditing a running engine: what the first decode step of each request reads, against what is there.

``StepAuditor`` stands beside a connector in a worker. Rows a fill must write are poisoned just
before it, whatever an earlier request left in them; after it, every row the step reads is compared
with the values asked for, and every page of the cache with what it held before. It does not ask
the connector what it wrote.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from decodebench.cache.bind import bind
from decodebench.cache.connector import startup_groups
from decodebench.cache.readback import FILLED, UNTOUCHED, ZEROED, inspect_rows
from decodebench.cache.tensors import POISON, Cache
from decodebench.cache.values import Values
from decodebench.coverage.required import required_rows
from decodebench.errors import DecodebenchError
from decodebench.layout.layout import Layout
from decodebench.layout.pool import NULL_BLOCK, Batch, Request, RequestBlocks
from decodebench.vllm.options import Options

if TYPE_CHECKING:
    import pandas

COUNTS = ("required", "filled", "zeroed", "wrong", "uncovered", "stray", "clobbered")


class AuditFailed(DecodebenchError):
    """A strict audit found rows that decode reads and nobody filled, or writes outside them."""


class NoAudit(DecodebenchError):
    """There is no audit to read."""


# -- scheduler side ------------------------------------------------------------------------------


class LiveTables:
    """The block tables behind a step's fills, kept in the scheduler's process."""

    def __init__(self) -> None:
        self._admitted: dict[str, RequestBlocks] = {}
        self._live: dict[str, Request] = {}

    def admit(self, request, table: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """A request whose external tokens are about to be filled; ``table`` has one row a group."""
        own = Request(request.request_id, request.num_tokens)
        computed = request.num_tokens - 1 - num_external_tokens
        self._live[own.request_id] = own
        self._admitted[own.request_id] = RequestBlocks(own, computed, tuple(tuple(ids) for ids in table))

    def forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._admitted.pop(request_id, None)

    def of_step(self, scheduler_output, state) -> tuple[tuple[RequestBlocks, ...], tuple[RequestBlocks, ...]]:
        """(requests filled in this step, the other scheduled ones); the first are handed over once."""
        admitted, self._admitted = self._admitted, {}
        if not admitted or state is None:
            return tuple(admitted.values()), ()
        others = [
            (own, state.get_block_ids(name)) for name, own in self._live.items() if name not in admitted
        ]
        running = tuple(RequestBlocks(own, 0, tuple(map(tuple, table))) for own, table in others if table)
        return tuple(admitted.values()), running


def tables_of(requests: Sequence[RequestBlocks], groups: Sequence[int]) -> tuple[RequestBlocks, ...]:
    """The same requests with the block tables of these groups only."""
    return tuple(replace(r, block_ids=tuple(r.block_ids[g] for g in groups)) for r in requests)


# -- worker side ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Required:
    """Blocks that one layer reads in a step: for the fill to write, or there before it (a prefix hit)."""

    fresh: tuple[int, ...]
    hit: tuple[int, ...]


def required_of(layout: Layout, requests: Sequence[RequestBlocks]) -> dict[str, Required]:
    """What the first decode step of these requests reads, per layer."""
    fresh: dict[str, set[int]] = {name: set() for name in layout.layer_names}
    hit: dict[str, set[int]] = {name: set() for name in layout.layer_names}
    for rows in required_rows(layout, Batch(layout, tuple(requests))):
        for layer in rows.layers:
            name = layout.groups[rows.group].layer_names[layer]
            fresh[name].update(rows.block_ids[~rows.shared].tolist())
            hit[name].update(rows.block_ids[rows.shared].tolist())
    # a request may hit what another of the same step fills
    return {
        name: Required(tuple(sorted(fresh[name])), tuple(sorted(hit[name] - fresh[name]))) for name in fresh
    }


class StepAuditor:
    """Audits the fills of one worker and writes them down; see the module's text."""

    def __init__(
        self, layout: Layout, values: Values, options: Options, path: Path, rank: int, connector: str
    ) -> None:
        self.layout, self.values, self.options, self.rank = layout, values, options, rank
        self.path, self.connector, self.step = path, connector, 0
        self.cache: Cache | None = None
        self.at_startup = startup_groups(layout) if options.startup_fill else frozenset()
        path.unlink(missing_ok=True)

    @classmethod
    def for_engine(cls, layout, values, options: Options, vllm_config, rank: int) -> StepAuditor:
        transfer = vllm_config.kv_transfer_config
        path = audit_path(options.audit_file, transfer.engine_id, rank)
        return cls(layout, values, options, path, rank, transfer.kv_connector)

    def register(self, kv_caches) -> None:
        """The engine's tensors, before anything was filled: poisoned for an audit by bytes."""
        if self.options.audit == "bytes":
            self.cache = bind(self.layout, kv_caches)
            self.cache.poison()

    def before_fill(self, meta) -> None:
        """Poison what the fill must write and remember every page."""
        self.required = required_of(self.layout, meta.admitted)
        if self.cache is None:
            return
        for layer, required in self.required.items():
            # what a startup fill wrote must stay; it is read back as it is found
            if required.fresh and self.layout.group_of[layer] not in self.at_startup:
                self.cache.pages(layer)[list(required.fresh)] = POISON
        # a fill writes the same bytes again that a prefix hit holds: hits are hidden while it runs
        self._hidden = {}
        for number, blocks in enumerate(self._hits(meta)):
            for layer in self.layout.groups[number].layer_names if blocks else ():
                pages = self.cache.pages(layer)
                self._hidden[layer] = (blocks, pages[blocks].clone())
                pages[blocks] = POISON
        self._before = self._pages()

    def after_fill(self, meta, report) -> list[dict]:
        """One record a group, written to the audit file; with ``strict`` faults are an error."""
        if self.cache is None:
            records = self._by_plan(meta)
        else:
            records = self._by_bytes(meta)
        self.step += 1
        counters = getattr(meta, "counters", {})
        shared = {
            "step": self.step,
            "rank": self.rank,
            "connector": self.connector,
            "source": self.options.audit,
            "requests": len(meta.admitted),
            "fill_seconds": report.seconds if report else None,
            "fill_bytes": report.bytes_written if report else None,
            "counters": counters,
        }
        records = [{**shared, **record} for record in records]
        with self.path.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        if self.options.strict and not LiveAudit.of(records).ok:
            raise AuditFailed(LiveAudit.of(records).verdict)
        return records

    def _hits(self, meta) -> list[list[int]]:
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
        sums = {}
        for layer in self.layout.layer_names:
            pages = self.cache.pages(layer)
            if _place(pages) not in sums:
                sums[_place(pages)] = checksums(pages)
        return sums

    def _by_bytes(self, meta) -> list[dict]:
        records = []
        outside = self._outside(meta)
        for layer, (blocks, content) in self._hidden.items():
            self.cache.pages(layer)[blocks] = content
        for number, group in enumerate(self.layout.groups):
            states = inspect_rows(self.cache, number, self.values).states
            self._clear(group.layer_names, states == UNTOUCHED)
            count = dict.fromkeys(COUNTS, 0) | outside[number]
            for row, layer in enumerate(group.layer_names):
                required = self.required[layer]
                zeros_only = all(part.zeros_only for part in self.cache.parts(layer))
                count["required"] += len(required.fresh) + len(required.hit)
                for block in required.fresh:
                    count[_verdict(int(states[row, block]), zeros_only, number not in self.at_startup)] += 1
                for block in required.hit:
                    # its first owner's fill, or tokens decoded since: anything but nothing
                    absent = int(states[row, block]) in (UNTOUCHED, *(() if zeros_only else (ZEROED,)))
                    count["uncovered" if absent else "filled"] += 1
            records.append({**self._names(number), **count})
        return records

    def _clear(self, layers: Sequence[str], poisoned: torch.Tensor) -> None:
        """Zero the poison that no step may read, as vLLM allocates it.

        Kernels read whole tiles and weight what lies behind a sequence with zero, but zero times
        NaN is NaN. What a step does read keeps its poison: missing fills show in what is decoded.
        """
        read = {block for required in self.required.values() for block in required.fresh}
        poisoned[:, list(read)] = False
        for layer, rows in zip(layers, poisoned):
            self.cache.pages(layer)[rows.to(self.cache.device)] = 0

    def _outside(self, meta) -> list[dict[str, int]]:
        """Pages that changed though no filled request owns them, per group: stray and clobbered.

        Groups lie in the same bytes. A changed page counts for the group of the block's owner where
        that group lies there, else for the first group that does.
        """
        owners = {
            block: number
            for request in (*meta.running, *meta.admitted)
            for number, table in enumerate(request.block_ids)
            for block in table
            if block != NULL_BLOCK
        }
        # behind a request's prefix hit its blocks are its own, even where another of the step hits them
        sizes = [self.layout.tokens_per_block(number) for number in range(len(self.layout.groups))]
        writable = [
            {b for r in meta.admitted for b in r.block_ids[number][r.num_computed // size :]}
            for number, size in enumerate(sizes)
        ]
        lying = {}
        for layer in self.layout.layer_names:
            lying.setdefault(_place(self.cache.pages(layer)), []).append(self.layout.group_of[layer])
        counts = [{"stray": 0, "clobbered": 0} for _ in self.layout.groups]
        for place, after in self._pages().items():
            for block in (after != self._before[place]).nonzero().flatten().tolist():
                owner = owners.get(block)
                group = owner if owner in lying[place] else lying[place][0]
                if owner == group and block in writable[group]:
                    continue
                counts[group]["stray" if owner is None else "clobbered"] += 1
        return counts

    def _by_plan(self, meta) -> list[dict]:
        """The same table from block ids: what the fill was told to write."""
        records = []
        for number, group in enumerate(self.layout.groups):
            planned = {row for request in meta.fill.requests for row in request.rows[number]}
            owned = {b for request in meta.admitted for b in request.block_ids[number]} - {NULL_BLOCK}
            count = dict.fromkeys(COUNTS, 0)
            count["stray"] = len(planned - owned) * len(group.layer_names)
            for layer, spec in zip(group.layer_names, group.layer_specs):
                required = self.required[layer]
                missed = set() if number in self.at_startup else set(required.fresh) - planned
                packed = all(part.zeros_only for part in spec.parts())
                count["required"] += len(required.fresh) + len(required.hit)
                count["zeroed" if packed else "filled"] += len(required.fresh) - len(missed)
                count["filled"] += len(required.hit)
                count["uncovered"] += len(missed)
                count["clobbered"] += len(planned & set(required.hit))
            records.append({**self._names(number), **count})
        return records

    def _names(self, number: int) -> dict:
        group = self.layout.groups[number]
        first = group.layer_names[0] if group.layer_names else ""
        return {
            "group": number,
            "kind": group.kind,
            "layers": len(group.layer_names),
            "first_layer": first,
            "block_size": group.block_size,
        }


def _place(pages: torch.Tensor) -> tuple[int, int]:
    return pages.data_ptr(), pages.stride(0)


def _verdict(state: int, zeros_only: bool, poisoned: bool) -> str:
    """What a required page's state counts as.

    Zeros over poison were written by the connector: on purpose, or instead of values. Zeros that
    were there before are the engine's.
    """
    if state == FILLED:
        return "filled"
    if state == ZEROED:
        return "zeroed" if zeros_only else "wrong" if poisoned else "uncovered"
    return "uncovered" if state == UNTOUCHED else "wrong"


def checksums(pages: torch.Tensor) -> torch.Tensor:
    """One number a row of uint8 ``[blocks, bytes]``; any single changed byte changes it."""
    if pages.ndim == 3:  # a page in pieces that lie apart
        return sum(checksums(piece) * (2 * i + 1) for i, piece in enumerate(pages.unbind(1)))
    width = 8 if pages.shape[1] % 8 == 0 and pages.stride(0) % 8 == 0 and pages.data_ptr() % 8 == 0 else 1
    words = pages.view(torch.int64) if width == 8 else pages
    # odd weights, so that moved words count; sums wrap around
    weights = torch.arange(words.shape[1], dtype=torch.int64, device=pages.device) * 2 + 0x9E3779B97F4A7C1
    rows = max(1, (1 << 22) // words.shape[1])
    found = [(piece.to(torch.int64) * weights).sum(1) for piece in words.split(rows)]
    return torch.cat(found).cpu()


# -- reading it ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LiveAudit:
    """What an engine's audits found: ``steps`` has one record a filling step, group and rank.

    Counts are pages: one block of one layer.
    """

    steps: pandas.DataFrame

    @classmethod
    def of(cls, records: list[dict]) -> LiveAudit:
        import pandas

        return cls(pandas.DataFrame(records))

    @property
    def groups(self) -> pandas.DataFrame:
        """One row a group, summed over steps and ranks; ``coverage`` counts filled and zeroed."""
        keys = ["group", "kind", "first_layer", "layers", "block_size"]
        table = self.steps.groupby(keys, as_index=False, sort=True)[list(COUNTS)].sum()
        covered = (table.filled + table.zeroed) / table.required.where(table.required > 0, 1)
        table.insert(len(keys) + 1, "coverage", covered.where(table.required > 0, 1.0))
        return table

    @property
    def ok(self) -> bool:
        """Every required page was filled or zeroed on purpose, and nothing else was written."""
        total = self.steps[list(COUNTS)].sum()
        return bool(total.required and not total[["wrong", "uncovered", "stray", "clobbered"]].sum())

    @property
    def verdict(self) -> str:
        """One line."""
        total, groups = self.steps[list(COUNTS)].sum(), self.groups
        if not total.required:
            return "NOTHING AUDITED: no decode step read a filled cache"
        share = (total.filled + total.zeroed) / total.required
        head = f"{'OK' if self.ok else 'NOT OK'}: {share:.1%} of {total.required:,} required pages"
        notes = [f"{total[name]:,} {name}" for name in COUNTS[2:] if total[name]]
        missed = groups[groups.coverage < 1]
        if len(missed):
            worst = ", ".join(f"group {r.group} ({r.kind}) {r.coverage:.0%}" for r in missed.itertuples())
            notes.append(f"short: {worst}")
        if not notes:
            return f"{head} hold the values asked for, nothing else written"
        return f"{head} ({'; '.join(notes)})"

    def __str__(self) -> str:
        return f"{self.verdict}\n{self.groups.to_string(index=False)}"

    def _repr_html_(self) -> str:
        shown = self.groups.style.format({"coverage": "{:.0%}"}).hide(axis="index")
        return f"<p><b>{self.verdict}</b></p>{shown.to_html()}"


def audit_path(audit_file: str | None, engine_id: str, rank: int = 0) -> Path:
    """Where a worker's audit is written; ranks other than 0 have files of their own."""
    default = Path(tempfile.gettempdir(), f"decodebench-audit-{engine_id}.jsonl")
    path = Path(audit_file) if audit_file else default
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def read_audit(path: str | Path) -> LiveAudit:
    """The audit of a server or an engine from its ``audit_file``, all ranks' files together."""
    path = Path(path)
    files = (path, *sorted(path.parent.glob(f"{path.stem}.rank*{path.suffix}")))
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    if not lines:
        raise NoAudit(
            f"no audit in {path}: start the engine with audit='plan' or audit='bytes', and send it a "
            "request of at least two tokens"
        )
    return LiveAudit.of([json.loads(line) for line in lines])


def audit(llm) -> LiveAudit:
    """The audit of an ``LLM`` started with ``audit`` "plan" or "bytes"; for servers see ``read_audit``."""
    transfer = llm.llm_engine.vllm_config.kv_transfer_config
    if transfer is None:
        raise NoAudit("this engine has no connector: give it kv_transfer_config(..., audit='bytes')")
    path = audit_path((transfer.kv_connector_extra_config or {}).get("audit_file"), transfer.engine_id)
    return read_audit(path)
