"""Fills and audits on vLLM's connector-stats channel: its periodic log line and its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

if TYPE_CHECKING:
    from decodebench.cache.write import FillReport
    from decodebench.coverage.result import Audit


@dataclass
class DecodeBenchStats(KVConnectorStats):
    """Sums since they were last taken: plain numbers by name, so that they travel between processes.

    ``requests``, ``blocks``, ``bytes`` and ``seconds`` of the fills; with an audit also how many
    pages (a block of one layer each) were ``required``, ``covered`` and at ``fault``.
    """

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> DecodeBenchStats:
        for name, number in other.data.items():
            self.data[name] = self.data.get(name, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        shown = {f"filled {name}": self.data[name] for name in ("requests", "blocks") if name in self.data}
        if self.data.get("seconds"):
            shown["fill seconds"] = round(self.data["seconds"], 6)
            shown["fill GB/s"] = round(self.data["bytes"] / self.data["seconds"] / 1e9, 3)
        if "required" in self.data:
            share = self.data["covered"] / self.data["required"] if self.data["required"] else 1.0
            shown |= {"audited pages": self.data["required"], "covered": round(share, 6)}
            shown["faults"] = self.data["faults"]
        return shown

    def is_empty(self) -> bool:
        return not self.data

    def take(self) -> DecodeBenchStats | None:
        """What was recorded since the last call, or None."""
        if self.is_empty():
            return None
        taken, self.data = DecodeBenchStats(data=self.data), {}
        return taken

    def record_fill(self, report: FillReport, requests: int) -> None:
        """Add one step's fill: its requests, blocks, bytes and seconds."""
        self.aggregate(
            DecodeBenchStats(
                data={
                    "requests": requests,
                    "blocks": sum(report.blocks),
                    "bytes": report.bytes_written,
                    "seconds": report.seconds,
                }
            )
        )

    def record_audit(self, audit: Audit) -> None:
        """``audit``: one step's ``coverage.Audit``; what it could not see or reconcile counts as a fault."""
        faults = sum(finding.pages(audit.layout) for finding in audit.findings)
        faults += len(audit.disagreements) + len(audit.unseen)
        data = {"required": audit.required, "covered": audit.covered, "faults": faults}
        self.aggregate(DecodeBenchStats(data=data))
