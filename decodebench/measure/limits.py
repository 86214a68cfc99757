"""What a layer of a step needs at least: bytes over the memory's speed, operations over the processor's.

A step is bound by whichever takes longer. Both speeds are measured in the same process (``bandwidth``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from decodebench.layout.reads import LayerWork
from decodebench.measure.bandwidth import Bandwidth


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of some layers; a multiplication and an addition are two.

    ``products`` are those of matrix products, whose operands are ``product_dtype``; ``vector`` those of
    recurrences, element by element in float32. Conversions between dtypes are not counted.
    """

    products: int = 0
    product_dtype: str = "bfloat16"
    vector: int = 0
    exponentials: int = 0


NOTHING = Operations()


@dataclass(frozen=True)
class Limit:
    """Least seconds of some layers of one kind: for their bytes, for their operations, for launches."""

    memory: float
    arithmetic: float
    launches: float = 0.0

    @property
    def seconds(self) -> float:
        """The least that a step takes: memory and arithmetic overlap, launches do not."""
        return max(self.memory, self.arithmetic) + self.launches

    @property
    def bound_by(self) -> str:
        """``"memory"`` or ``"arithmetic"``, whichever takes longer."""
        return "memory" if self.memory >= self.arithmetic else "arithmetic"


def limit_of(work: Sequence[LayerWork], operations: Iterable[Operations], speed: Bandwidth) -> Limit:
    """The limit of layers of one kind: ``operations`` are theirs, in any order.

    What is only read moves at read speed, states and new slots at update speed. Operations whose speed was
    not measured take no time: recurrences on a GPU, everything where there is no C++ compiler.
    """
    updated = sum(w.bytes_updated for w in work)
    read = sum(w.bytes_read for w in work) - updated / 2
    written = sum(w.bytes_written for w in work) - updated / 2
    memory = (read / speed.read + (updated + written) / speed.update) / 1e9
    arithmetic = 0.0
    for each in operations:
        exact = each.product_dtype == "float32" and speed.products_float32 is not None
        arithmetic += _seconds(each.products, speed.products_float32 if exact else speed.products)
        arithmetic += _seconds(each.vector, speed.vector) + _seconds(each.exponentials, speed.exponentials)
    return Limit(memory, arithmetic, len(work) * speed.launch_seconds)


def _seconds(operations: int, rate: float | None) -> float:
    return operations / (rate * 1e12) if rate else 0.0


#: kind → operations an element of its recurrent state: those of the recurrence as written in
#: ``kernels/reference.py``, each a multiplication or an addition
STATE_OPERATIONS = {
    "mamba1": 6,  # dt a; h e^(dt a) + b u: three; y += h c: two
    "mamba2": 5,  # the decay is one a head
    "gdn": 7,  # the decay; k S: two; S + k change: two; q S: two
    "kda": 7,
    "linear": 5,
    "short_conv": 0,
}


def state_operations(kind: str, shapes: Mapping[str, tuple[int, ...]], batch: int) -> Operations:
    """Operations of one token of a state layer; ``shapes`` of its parts without the batch."""
    length, channels = shapes.get("conv", (0, 0))
    recurrent = shapes.get("ssm", shapes.get("recurrent", (0,)))
    elements = batch * prod(recurrent)
    vector = elements * STATE_OPERATIONS[kind] + 2 * batch * channels * (length + 1)
    decays = 0
    if kind == "mamba1":  # one an element
        decays = elements
    elif kind == "kda":  # one a key channel; the others have one a head
        decays = elements // recurrent[-2]
    activations = batch * channels if kind != "short_conv" else 0  # silu behind the convolution
    return Operations(vector=vector, exponentials=decays + activations)
