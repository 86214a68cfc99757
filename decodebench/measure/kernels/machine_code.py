"""What a kernel's machine code does: registers, spills, the width of its loads, its innermost loop.

Reads cubins with the disassembler that Triton brings along, so that a kernel's cost on a GPU can be
judged without one. Since Volta an instruction is 128 bits; bits 105 to 108 hold the cycles that its
warp waits before the next one issues (Jia et al. 2018, "Dissecting the NVIDIA Volta GPU Architecture
via Microbenchmarking", section 2.1). Their sum over a loop is the least time one warp needs for it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from decodebench.errors import DecodebenchError


class DisassemblerMissing(DecodebenchError):
    """Triton's tools to read machine code are not there, or refuse the file."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: its text without predicate, and the cycles before the next may issue."""

    text: str
    stall: int

    @property
    def name(self) -> str:
        """Operation with its modifiers, such as ``LDG.E.128``."""
        return self.text.split()[0]

    @property
    def operation(self) -> str:
        """Operation alone, such as ``LDG``."""
        return self.name.split(".")[0]


@dataclass(frozen=True)
class Loop:
    """The innermost loop that takes longest: instructions of one iteration of one warp."""

    instructions: tuple[Instruction, ...]

    @property
    def stall_cycles(self) -> int:
        """Cycles that one warp needs at least."""
        return sum(max(1, i.stall) for i in self.instructions)

    def count(self, *operations: str) -> int:
        """Instructions of these operations (without modifiers)."""
        return sum(i.operation in operations for i in self.instructions)

    def names(self) -> Counter[str]:
        """Name with modifiers → how often."""
        return Counter(i.name for i in self.instructions)


@dataclass(frozen=True)
class MachineCode:
    """A compiled kernel: resources of a program, all its instructions, and its innermost loop (if any).

    ``registers`` a thread; ``stack_bytes`` a thread (spilled registers live there); ``shared_bytes``
    a program.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    warps: int
    instructions: tuple[Instruction, ...]
    loop: Loop | None

    @property
    def narrow_loads(self) -> int:
        """Loads of one or two bytes a thread from global memory."""
        return sum(
            i.operation in ("LDG", "LD") and bool(re.search(r"\.[US](8|16)\b", i.name))
            for i in self.instructions
        )


def read(cubin: bytes, warps: int, shared_bytes: int) -> MachineCode:
    """Disassemble a cubin. ``shared_bytes``: what the launch asks for.

    Raises ``DisassemblerMissing`` where Triton's tools are not installed or fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run("cuobjdump", "-res-usage", path)
        listing = _run("nvdisasm", "-c", "-hex", path)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise DisassemblerMissing(f"cuobjdump names no registers: {usage[:200]!r}")
    instructions, labels = _parse(listing)
    return MachineCode(
        int(found[1]), int(found[2]), shared_bytes, warps, instructions, _innermost(instructions, labels)
    )


def _run(tool: str, *arguments: object) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    if not path.exists():
        raise DisassemblerMissing(f"{tool} is not part of this Triton ({triton.__version__}): install 3.7.1")
    done = subprocess.run([path, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise DisassemblerMissing(f"{tool} failed: {done.stderr.strip()[:200]}")
    return done.stdout


def _parse(listing: str) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    """Instructions in order, and label → index of the instruction that follows it."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    lines = listing.splitlines()
    for line, after in zip(lines, [*lines[1:], ""]):
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"^\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]+ \*/", line):
            upper = re.search(r"/\* 0x([0-9a-f]+) \*/", after)
            stall = int(upper[1], 16) >> 41 & 0xF if upper else 0
            instructions.append(Instruction(re.sub(r"^\{?\s*@!?U?P\w+\s+", "", found[1]), stall))
    return tuple(instructions), labels


def _innermost(instructions: tuple[Instruction, ...], labels: dict[str, int]) -> Loop | None:
    """Of the loops without a loop inside, the one with the largest sum of stalls."""
    loops = []
    for end, instruction in enumerate(instructions):
        target = re.search(r"`\((\.L_x_\d+)\)", instruction.text)
        if instruction.operation == "BRA" and target and labels.get(target[1], end) < end:
            loops.append((labels[target[1]], end))
    # a loop of a few instructions waits for a barrier: it is no loop over the data
    loops = [(start, end) for start, end in loops if end - start > 12]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    bodies = [Loop(instructions[start : end + 1]) for start, end in inner]
    return max(bodies, key=lambda loop: loop.stall_cycles, default=None)
