"""What a card's memory leaves to the cache, with the arithmetic: vLLM's own, but for what only a run can tell.

After ``request_memory`` and ``determine_available_memory`` of vLLM 0.32: the card's memory times the share
that the engine may use, rounded up, less weights, activations, CUDA graphs and what the driver takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from decodebench.layout.placement import LayoutRefused
from decodebench.words import bytes_text

#: vLLM's --gpu-memory-utilization where the user says nothing
UTILIZATION = 0.92


@dataclass(frozen=True)
class CardMemory:
    """One rank's card and what it leaves to the cache, in bytes.

    ``weights_told`` says where the weights' bytes come from, ``other`` is what a run was seen to take beside
    them; None where nobody has said it, so that nothing is taken off.
    """

    card: int
    utilization: float
    weights: int
    weights_told: str
    other: int | None = None

    @property
    def asked_for(self) -> int:
        """The engine's share of the card."""
        return ceil(self.card * Fraction(str(self.utilization)))

    @property
    def cache(self) -> int:
        """What is left for the cache."""
        return self.asked_for - self.weights - (self.other or 0)

    def __str__(self) -> str:
        other = (
            f" - {self.other:,} of activations and the like"
            if self.other is not None
            else "; activations, CUDA graphs and the driver's memory are not taken off, for only a run tells them"
        )
        return (
            f"{self.card:,} bytes of the card × {self.utilization:g} = {self.asked_for:,}; "
            f"- {self.weights:,} of weights ({self.weights_told}){other if self.other is not None else ''} = "
            f"{self.cache:,} bytes ({bytes_text(self.cache)}) for the cache"
            f"{other if self.other is None else ''}"
        )


def checked(rank: CardMemory) -> CardMemory:
    """The same; raises ``LayoutRefused`` where the share is none, or nothing is left for the cache."""
    if not 0 < rank.utilization <= 1:
        raise LayoutRefused(
            f"gpu_memory_utilization = {rank.utilization:g}: a share above 0 and up to 1 is expected"
        )
    if rank.cache <= 0:
        raise LayoutRefused(
            f"nothing is left for the cache: {rank}: take a larger card, more ranks or smaller weights"
        )
    return rank
