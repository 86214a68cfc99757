"""What a bench must reach, what it did, and the exit status that follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MET, MISSED, DISTURBED = 0, 1, 3


@dataclass(frozen=True)
class Floor:
    """A ratio that must be reached. ``disturbed``: why nobody can tell, ``reached`` is then None."""

    floor: str
    at_least: float
    reached: float | None
    disturbed: str | None = None

    @property
    def met(self) -> bool | None:
        """Whether the floor is reached; None where other work on the machine hides it."""
        return None if self.reached is None else self.reached >= self.at_least

    def to_dict(self) -> dict[str, object]:
        """``floor``, ``at_least``, ``reached``, ``met``, and what disturbed it where something did."""
        facts: dict[str, object] = {"floor": self.floor, "at_least": self.at_least}
        facts |= {"reached": self.reached, "met": self.met}
        return facts | ({"disturbed": self.disturbed} if self.disturbed else {})

    def __str__(self) -> str:
        if self.reached is None:
            return f"?       {self.floor}: {self.disturbed} (floor {self.at_least:g})"
        word = "met   " if self.met else "MISSED"
        return f"{word}  {self.floor}: {self.reached:.2f} (floor {self.at_least:g})"


def floors_from(stored: Sequence[Mapping[str, Any]]) -> list[Floor]:
    """Floors from their dictionaries."""
    return [Floor(f["floor"], f["at_least"], f["reached"], f.get("disturbed")) for f in stored]


def exit_status(floors: Sequence[Floor]) -> int:
    """1 where a floor is missed; else 3 where other work hides one; else 0."""
    if any(f.met is False for f in floors):
        return MISSED
    return DISTURBED if any(f.met is None for f in floors) else MET


def verdict(floors: Sequence[Floor]) -> str:
    """One sentence."""
    missed = sum(f.met is False for f in floors)
    hidden = [f for f in floors if f.met is None]
    text = f"{sum(f.met is True for f in floors)} of {len(floors)} floors met, {missed} missed"
    if hidden:
        text += f"; {len(hidden)} not measured, because of other work on this machine ({hidden[0].disturbed})"
        text += ": run it again when nothing else runs"
    return text
