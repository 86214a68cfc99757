"""Audits of an engine as files: one a worker, a header and then one JSON line a filling step.

``read_audit`` joins them into one ``coverage.Audit``, the same result that ``decodebench.audit``
gives; ``audit_steps`` lists the steps. Needs no vLLM.
"""

from __future__ import annotations

import json
import os.path
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from decodebench.coverage.result import STATES, Audit, Finding
from decodebench.errors import DecodebenchError
from decodebench.layout.layout import Layout

if TYPE_CHECKING:
    import pandas
    from vllm import LLM

#: what the first line of a file says it is
FORMAT = "decodebench audit 1"

#: longest line that is read: a header or a step is far shorter
MAX_LINE = 64 << 20


class NoAudit(DecodebenchError):
    """There is no audit to read, or the file is none."""


@dataclass(frozen=True)
class AuditedGroup:
    """What an audit's tables say about a group; ``number`` is the engine's."""

    number: int
    kind: str
    block_size: int
    layer_names: tuple[str, ...]


@dataclass(frozen=True)
class AuditedLayout:
    """The groups behind an audit that was read from a file."""

    groups: tuple[AuditedGroup, ...]

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """All layers, group after group; a layer's position here is its layer index."""
        return tuple(name for group in self.groups for name in group.layer_names)

    @cached_property
    def layer_index(self) -> dict[str, int]:
        """layer → its position in ``layer_names``."""
        return {name: i for i, name in enumerate(self.layer_names)}

    @cached_property
    def group_of(self) -> dict[str, int]:
        """layer → its group's position in ``groups``."""
        return {name: g for g, group in enumerate(self.groups) for name in group.layer_names}


# -- writing -------------------------------------------------------------------------------------


def header(layout: Layout, numbers: Sequence[int], source: str, rank: int, connector: str) -> str:
    """The first line of a worker's file."""
    groups = [
        {
            "number": number,
            "kind": group.kind,
            "block_size": group.block_size,
            "layers": list(group.layer_names),
        }
        for number, group in zip(numbers, layout.groups)
    ]
    return json.dumps(
        {"format": FORMAT, "source": source, "rank": rank, "connector": connector, "groups": groups}
    )


def record(audit: Audit, facts: Mapping[str, Any]) -> str:
    """One step's audit as a line; ``facts`` are further columns of ``audit_steps``."""
    findings = [
        {
            "group": f.group,
            "layer": f.layer,
            "blocks": [int(block) for block in f.blocks],
            "request": f.request,
            "state": f.state,
            "detail": f.detail,
        }
        for f in audit.findings
    ]
    return json.dumps(
        {
            **facts,
            "requests": list(audit.request_ids),
            "counts": audit.counts.tolist(),
            "findings": findings,
            "suspects": list(audit.suspects),
            "disagreements": list(audit.disagreements),
            "unseen": list(audit.unseen),
        }
    )


def audit_path(audit_file: str | None, engine_id: str, rank: int = 0) -> Path:
    """Where a worker's audit is written; ranks other than 0 have files of their own."""
    default = Path(tempfile.gettempdir(), f"decodebench-audit-{engine_id}.jsonl")
    path = Path(audit_file) if audit_file else default
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


# -- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Worker:
    """One file: the header's facts, and (facts, audit) of each step."""

    facts: dict[str, Any]
    layout: AuditedLayout
    steps: tuple[tuple[dict[str, Any], Audit], ...]
    cut_off: str | None = None


def read_audit(path: str | Path) -> Audit:
    """The audit of a server or an engine from its ``audit_file``, all ranks' files together.

    Pages of all steps are summed; a request that was filled in several steps counts in each. A file
    whose last line was cut off, as by a killed engine, is read up to there, and is not ``ok``.
    Raises ``NoAudit`` where there is no such file, or it is no audit.
    """
    workers = _workers(Path(path))
    layout = _joined(workers)
    audits = [_in_layout(audit, worker.layout, layout) for worker in workers for _, audit in worker.steps]
    unseen = [clause for audit in audits for clause in audit.unseen]
    unseen += [worker.cut_off for worker in workers if worker.cut_off]
    empty = np.zeros((0, len(layout.layer_names), len(STATES)), dtype=np.int64)
    counts = np.concatenate([empty, *(audit.counts for audit in audits)])
    if not counts.sum():
        unseen.append("nothing was audited: no step read a filled cache; send prompts of at least two tokens")

    def together(name: str) -> tuple:
        return tuple(dict.fromkeys(x for audit in audits for x in getattr(audit, name)))

    return Audit(
        _as_layout(layout),
        workers[0].facts["source"],
        tuple(name for audit in audits for name in audit.request_ids),
        counts,
        tuple(finding for audit in audits for finding in audit.findings),
        together("suspects"),
        together("disagreements"),
        tuple(dict.fromkeys(unseen)),
    )


def audit_steps(path: str | Path) -> pandas.DataFrame:
    """One row a filling step and rank: its requests, pages required and covered, the fill's cost, counters."""
    import pandas

    return pandas.DataFrame(
        [
            {
                "step": facts["step"],
                "rank": worker.facts["rank"],
                "connector": worker.facts["connector"],
                "source": worker.facts["source"],
                "requests": len(audit.request_ids),
                "required": audit.required,
                "covered": audit.covered,
                "ok": audit.ok,
                **{name: facts.get(name) for name in ("fill_seconds", "fill_bytes", "counters")},
            }
            for worker in _workers(Path(path))
            for facts, audit in worker.steps
        ]
    )


def audit_file_of(llm: LLM) -> Path:
    """The file in which the first worker of an ``LLM`` writes its audit."""
    transfer = llm.llm_engine.vllm_config.kv_transfer_config
    if transfer is None:
        raise NoAudit("this engine has no connector: give it kv_transfer_config(..., audit='bytes')")
    options = transfer.kv_connector_extra_config or {}
    return audit_path(options.get("audit_file"), transfer.engine_id)


def audit(llm: LLM) -> Audit:
    """The audit of an ``LLM`` started with ``audit`` "plan" or "bytes"; for servers see ``read_audit``."""
    return read_audit(audit_file_of(llm))


def _workers(path: Path) -> list[_Worker]:
    try:
        files = [path, *sorted(path.parent.glob(f"{path.stem}.rank*{path.suffix}"))]
        found = [_worker(file) for file in files if os.path.exists(file)]
    except OSError as error:
        raise NoAudit(f"{path}: {error.strerror}; give the audit_file of an engine") from None
    if not found:
        raise NoAudit(f"no audit in {path}: start the engine with audit='plan' or audit='bytes'")
    return found


def _worker(path: Path) -> _Worker:
    lines = _lines(path)
    number, line, _ = next(lines, (1, b"", False))
    try:
        facts = json.loads(line)
        if facts["format"] != FORMAT:
            raise ValueError
        layout = _layout(facts)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise NoAudit(
            f"{path}, line {number}: not the header of an audit ({FORMAT!r}); give the audit_file of an engine "
            "that ran with this version of decodebench"
        ) from None
    steps, cut_off = [], None
    for number, line, whole in lines:
        try:
            steps.append(_step(json.loads(line), layout, facts["source"]))
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
            if not whole:
                cut_off = f"{path.name} ends inside line {number}: the engine was stopped while writing it"
                break
            raise NoAudit(
                f"{path}, line {number}: not a step of this audit; was the file edited, or written by two "
                "engines? Remove the line, or give each engine an audit_file of its own"
            ) from None
    return _Worker(facts, layout, tuple(steps), cut_off)


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """(number, line, whether it ends in a line break) of a file, blank ones left out."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if line.strip():
                yield number, line, line.endswith(b"\n")


def _layout(facts: Mapping) -> AuditedLayout:
    groups = tuple(
        AuditedGroup(
            _count(group["number"]),
            _text(group["kind"]),
            _count(group["block_size"]),
            tuple(_text(name) for name in group["layers"]),
        )
        for group in facts["groups"]
    )
    layout = AuditedLayout(groups)
    _text(facts["source"]), _count(facts["rank"]), _text(facts["connector"])
    if not groups or len(layout.layer_index) != len(layout.layer_names):
        raise ValueError("no groups, or a layer twice")
    return layout


def _step(line: Mapping, layout: AuditedLayout, source: str) -> tuple[dict[str, Any], Audit]:
    requests = tuple(_text(name) for name in line["requests"])
    counts = np.array(line["counts"], dtype=object).reshape(
        len(requests), len(layout.layer_names), len(STATES)
    )
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in counts.flat):
        raise ValueError("counts are whole numbers")
    findings = tuple(_finding(found, layout) for found in line["findings"])
    clauses = {
        name: tuple(_text(clause) for clause in line[name])
        for name in ("suspects", "disagreements", "unseen")
    }
    facts = {name: value for name, value in line.items() if name not in ("counts", "findings")}
    facts["step"] = _count(line["step"])
    return facts, Audit(_as_layout(layout), source, requests, counts.astype(np.int64), findings, **clauses)


def _finding(found: Mapping, layout: AuditedLayout) -> Finding:
    group, layer, request = _count(found["group"]), found["layer"], found["request"]
    if layer is not None and layer not in layout.groups[group].layer_names:
        raise ValueError("a layer of another group")
    blocks = np.array([int(block) for block in found["blocks"]], dtype=np.int64)
    request = None if request is None else _text(request)
    return Finding(group, layer, blocks, request, _text(found["state"]), _text(found["detail"]))


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("a whole number is expected")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("text is expected")
    return value


def _joined(workers: Sequence[_Worker]) -> AuditedLayout:
    """The groups of all workers: stages of a pipeline hold layers of their own, ranks of a stage the same."""
    groups: dict[int, AuditedGroup] = {}
    for worker in workers:
        for group in worker.layout.groups:
            known = groups.get(group.number)
            names = (*(known.layer_names if known else ()), *group.layer_names)
            groups[group.number] = AuditedGroup(
                group.number, group.kind, group.block_size, tuple(dict.fromkeys(names))
            )
    return AuditedLayout(tuple(groups[number] for number in sorted(groups)))


def _as_layout(layout: AuditedLayout) -> Layout:
    """What an ``Audit`` asks of its layout, groups and layers by name, a file's groups answer as well."""
    return cast(Layout, layout)


def _in_layout(audit: Audit, own: AuditedLayout, layout: AuditedLayout) -> Audit:
    """A worker's audit with the groups and layers of all."""
    if own == layout:
        return audit
    counts = np.zeros((len(audit.counts), len(layout.layer_names), len(STATES)), dtype=np.int64)
    counts[:, [layout.layer_index[name] for name in own.layer_names]] = audit.counts
    numbers = [group.number for group in layout.groups]
    findings = tuple(
        Finding(numbers.index(own.groups[f.group].number), f.layer, f.blocks, f.request, f.state, f.detail)
        for f in audit.findings
    )
    return Audit(
        _as_layout(layout),
        audit.source,
        audit.request_ids,
        counts,
        findings,
        audit.suspects,
        audit.disagreements,
        audit.unseen,
    )
