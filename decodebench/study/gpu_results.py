"""What ``decodebench gpu`` has stored: every folder under ``data/results/gpu``, with card, date and commit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from decodebench.errors import DecodebenchError
from decodebench.measure.journal import read_folder
from decodebench.shipped import shipped


@dataclass(frozen=True)
class StoredCard:
    """One folder: its name, ``title`` (card, date, commit), rows; or the reason why it cannot be read."""

    folder: str
    title: str
    rows: tuple[dict, ...] = ()
    reason: str | None = None


def stored() -> list[StoredCard]:
    """Every result folder of a card, by name; a folder that cannot be read says why."""
    top = shipped("data/results/gpu")
    paths = sorted(path.parent for path in top.glob("*/provenance.json")) if top.exists() else []
    return [_read(path) for path in paths]


def _read(folder: Path) -> StoredCard:
    try:
        rows, runs = read_folder(folder)
        newest = runs[-1]
        commit = str(newest.get("commit") or "unknown")[:10]
        changed = " with uncommitted changes" if newest.get("uncommitted_changes") else ""
        rehearsed = "REHEARSAL, no card: " if newest.get("settings", {}).get("simulated") else ""
        title = f"{rehearsed}{newest['device']}, {str(newest['date'])[:10]}, commit {commit}{changed}"
    except (DecodebenchError, KeyError, IndexError) as error:
        return StoredCard(folder.name, folder.name, reason=str(error))
    return StoredCard(folder.name, title, tuple(rows.values()))
