"""What a step of continuous batching costs on a machine: the floor of ``bound``, or times that were measured.

``Floor`` asks ``bound`` what weights, cache, operations and messages must take, and divides by an efficiency:
at 1 no engine is faster; measured engines reach a part of it. ``Fitted`` is a plane through measured steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decodebench.errors import DecodebenchError
from decodebench.forecast import bound as floors
from decodebench.forecast import scheduler
from decodebench.forecast.machines import Machine
from decodebench.forecast.parts import ROLES
from decodebench.forecast.scheduler import Costs
from decodebench.layout.layout import Layout
from decodebench.models.model import Model

if TYPE_CHECKING:
    import numpy as np

#: numbers of scheduled tokens at which weights are asked for; between them the floor is straight
ASKED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)


class CostError(DecodebenchError):
    """Costs of a step that cannot be told: says which number is missing or bad."""


@dataclass(frozen=True)
class Floor:
    """The floor of a step on a machine, divided by ``efficiency``; ``launch``: seconds a step takes anyway."""

    deployment: floors.Prepared
    efficiency: float = 1.0
    launch: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise CostError(
                f"efficiency {self.efficiency!r}: the share of the floor that is reached, above 0 up to 1"
            )
        if not 0 <= self.launch < 10:
            raise CostError(f"launch {self.launch!r}: seconds from 0 to 10 are expected")

    def costs(self, layout: Layout, groups: np.ndarray, members: tuple, budget: int) -> Costs:
        """See ``simulate.StepTime``. Attention is told by span, so by each column of ``groups``."""
        import numpy as np

        memory, work, link = self._by_tokens(budget)
        machine = self.deployment.machine
        columns = groups.shape[1]
        read, pairs, sequence = np.zeros(columns), np.zeros(columns), 0.0
        for reading in self.deployment.readings:
            if reading.state_operations:
                sequence += 2 * reading.layers * reading.spec.unpadded_page_size_bytes / machine.bandwidth
                work[: budget + 1] += (
                    np.arange(budget + 1)
                    * reading.layers
                    * reading.state_operations
                    / machine.peak_of("bf16")
                )
                continue
            span = getattr(reading.spec, "sliding_window", None) or getattr(
                reading.spec, "attention_chunk_size", None
            )
            alike = [k for k in range(columns) if groups[scheduler.SPAN, k] == (span or 0)]
            alike = alike or [k for k in range(columns) if groups[scheduler.KIND, k] == scheduler.FULL]
            if not alike:
                continue
            size = reading.spec.num_kv_heads * reading.spec.entry_bytes / reading.spec.tokens_per_state
            read[alike[0]] += reading.layers * size / machine.bandwidth
            pairs[alike[0]] += (
                reading.layers * 2 * reading.query_heads * reading.widths / machine.peak_of("bf16")
            )
        share = self.efficiency
        return Costs(
            memory / share,
            np.maximum(work, link) / share,
            sequence / share,
            read / share,
            pairs / share,
            self.launch,
        )

    def _by_tokens(self, budget: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of weights from memory, of operations on them and of messages, by scheduled tokens."""
        import numpy as np

        asked = [*(t for t in ASKED if t < budget), budget]
        rows = [[0.0, 0.0, 0.0]]
        for tokens in asked:
            found = self.deployment.at(tokens, 1)
            weights = [load for load in found.loads if load.part in ROLES]
            rows.append(
                [
                    sum(load.bytes for load in weights) / found.machine.bandwidth,
                    sum(load.operations / found.machine.peak_of(load.dtype) for load in weights),
                    found.resources["link"],
                ]
            )
        every = np.arange(budget + 1)
        memory, work, link = (np.interp(every, [0, *asked], column) for column in zip(*rows))
        return memory, work, link


def step_floor(
    model: Model | str | Mapping,
    machine: Machine | str,
    efficiency: float = 1.0,
    launch: float = 0.0,
    **options,
) -> Floor:
    """The floor of a model's steps on a machine. ``options``: those of ``bound.prepare``."""
    return Floor(floors.prepare(model, machine, **options), efficiency, launch)


@dataclass(frozen=True)
class Fitted:
    """Steps as measured: seconds = step + sequence × sequences + read × cached tokens + prefill × other tokens."""

    step: float
    sequence: float = 0.0
    read: float = 0.0
    prefill: float = 0.0

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, float]], prefill: float | None = None) -> Fitted:
        """The plane nearest (least squares of relative errors, no negative slope) to measured decode steps.

        ``rows``: batch (sequences), context (tokens each) and seconds. ``prefill``: seconds of a further
        token of a prompt; default what a sequence takes.
        """
        import numpy as np

        try:
            table = np.array([[float(row[k]) for k in ("batch", "context", "seconds")] for row in rows])
        except (KeyError, TypeError, ValueError):
            raise CostError("measured steps: rows with batch, context and seconds are expected") from None
        if len(table) < 3 or not (table > 0).all():
            raise CostError(f"{len(table)} measured steps: at least 3, of positive numbers, are needed")
        batch, context, seconds = table.T
        features = np.stack([np.ones(len(batch)), batch, batch * context]).T / seconds[:, None]
        used = [0, 1, 2]
        while True:
            found = np.linalg.lstsq(features[:, used], np.ones(len(batch)), rcond=None)[0]
            if (found >= 0).all():
                break
            used.remove(used[int(found.argmin())])
        weights = dict(zip(used, map(float, found)))
        step, sequence, read = (weights.get(k, 0.0) for k in range(3))
        return cls(step, sequence, read, sequence if prefill is None else prefill)

    def costs(self, layout: Layout, groups: np.ndarray, members: tuple, budget: int) -> Costs:
        """See ``simulate.StepTime``. Reads count where a group keeps the whole context, else the widest."""
        import numpy as np

        columns = groups.shape[1]
        read = np.zeros(columns)
        full = np.flatnonzero(groups[scheduler.KIND] == scheduler.FULL)
        reading = full if len(full) else np.flatnonzero(groups[scheduler.SPAN])
        if len(reading):
            read[reading[groups[scheduler.SPAN, reading].argmax()]] = self.read
        memory = self.step + self.prefill * np.arange(budget + 1)
        return Costs(memory, np.zeros(budget + 1), self.sequence - self.prefill, read, np.zeros(columns), 0.0)
