"""What NVIDIA's cards can do by their data sheets, and a model of how long a kernel's code takes on them.

For judging kernels without a card: registers, loads and the loop come from the machine code
(``machine_code``), everything else from here. Modelled times are good to about ±30 %; no figure
that the toolkit reports as measured comes from this module.

Sources: NVIDIA A100, H100, H200 and B200 data sheets (multiprocessors, boost clock, memory, tensor
throughput) and the CUDA programming guide's table of technical specifications (shared memory,
registers, programs). Latencies: Luo et al. 2024, "Benchmarking and Dissecting the Nvidia Hopper GPU
Architecture via Microbenchmarking", rounded up.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass

from decodebench.measure.kernels.machine_code import MachineCode


@dataclass(frozen=True)
class Chip:
    """A card: ``sm`` 90 for compute capability 9.0; bandwidth in bytes/s, clock in cycles/s.

    ``tensor_flops`` a cycle and multiprocessor for two-byte types: (asynchronous warpgroup products,
    plain ``mma.sync``); where they are one unit, the same number twice.
    """

    name: str
    sm: int
    multiprocessors: int
    clock: float
    bandwidth: float
    shared_bytes: int
    program_shared_bytes: int
    tensor_flops: tuple[int, int]


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("A100", 80, 108, 1.410e9, 2.039e12, 164 << 10, 163 << 10, (2048, 2048)),
        Chip("H100", 90, 132, 1.755e9, 3.35e12, 228 << 10, 227 << 10, (4096, 2560)),
        Chip("H200", 90, 132, 1.755e9, 4.80e12, 228 << 10, 227 << 10, (4096, 2560)),
        Chip("B200", 100, 148, 1.850e9, 8.00e12, 228 << 10, 227 << 10, (8192, 2560)),
    )
}

#: share of the data sheet's bandwidth that a plain read reaches
REACHABLE = 0.92
#: seconds from a load that misses every cache to its data
MEMORY_LATENCY = 650e-9
#: cycles of a load that the L2 holds
L2_CYCLES = 270
#: cycles that one barrier of a program costs, and the fixed latencies of one iteration's chain of products
BARRIER_CYCLES, CHAIN_CYCLES = 30, 300
#: seconds of one dependent node in a CUDA graph, whatever it does
NODE_SECONDS = 2e-6
#: bytes a second from the L2, for what several programs read
L2_BANDWIDTH = 5.5e12


def programs_per_multiprocessor(code: MachineCode, chip: Chip) -> int:
    """How many programs a multiprocessor holds: limited by registers, shared memory and threads."""
    threads = 32 * code.warps
    warp_registers = -(-code.registers // 8) * 8 * 32
    by_registers = 65536 // warp_registers // code.warps
    by_shared = chip.shared_bytes // (code.shared_bytes + 1024)
    return min(by_registers, by_shared, 2048 // threads, 32)


def tensor_cycles(code: MachineCode, chip: Chip) -> float:
    """Cycles of a multiprocessor's tensor units for one iteration of one program."""
    cycles = 0.0
    for name, count in (code.loop.names() if code.loop else {}).items():
        wide = re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name)
        plain = re.match(r"HMMA\.16816", name)
        if wide:  # a product of four warps together, each of which issues it
            m, n, k = map(int, wide.groups())
            cycles += code.warps / 4 * count * 2 * m * n * k / chip.tensor_flops[0]
        elif plain:
            cycles += code.warps * count * 2 * 16 * 8 * 16 / chip.tensor_flops[1]
    return cycles


def shared_cycles(code: MachineCode) -> float:
    """Cycles of a multiprocessor's shared memory (128 bytes each) for one iteration of one program."""
    lines = 0.0
    for name, count in (code.loop.names() if code.loop else {}).items():
        if name.startswith("LDSM"):
            lines += count * (4 if name.endswith(".4") else 2)
        elif name.startswith(("LDS", "STS", "STSM")):
            lines += count * (4 if "128" in name else 2 if "64" in name else 1)
        elif name.startswith("LDGSTS"):
            lines += count * (4 if "128" in name else 1)
        elif wide := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name):
            _, n, k = map(int, wide.groups())
            lines += count / 4 * n * k * 2 / 128  # its right-hand side; the left one mostly sits in registers
    return lines * code.warps


def iteration_seconds(
    code: MachineCode,
    chip: Chip,
    live: int,
    tile_bytes: int,
    readers: int,
    tiles_ahead: float,
    products: float,
) -> float:
    """Seconds in which ``live`` programs of a multiprocessor finish one iteration each.

    The longest of: memory, L2, instruction issue, shared memory, tensor units, and the latency of one
    program's own chain. ``readers`` programs elsewhere read the same tile, memory once for all of them.
    ``products``: tensor cycles of an iteration where the machine code does not show them.
    """
    assert code.loop is not None
    tensor = max(tensor_cycles(code, chip), products)
    chain = code.loop.stall_cycles + BARRIER_CYCLES * code.loop.count("BAR") + CHAIN_CYCLES + tensor
    memory = L2_CYCLES + MEMORY_LATENCY * chip.clock
    chain = max(chain, memory / tiles_ahead) if tiles_ahead else chain + memory
    issue = live * len(code.loop.instructions) * code.warps / 4
    cycles = max(chain, issue, live * shared_cycles(code), live * tensor)
    each = chip.bandwidth * REACHABLE / chip.multiprocessors
    from_memory = live * tile_bytes / readers / each
    from_l2 = live * tile_bytes / (L2_BANDWIDTH / chip.multiprocessors) if readers > 1 else 0.0
    return max(cycles / chip.clock, from_memory, from_l2)


def bytes_ahead(code: MachineCode, chip: Chip, tile_bytes: int, tiles_ahead: float) -> tuple[float, float]:
    """(bytes that a multiprocessor keeps on their way, bytes that its share of the memory asks for)."""
    need = chip.bandwidth * MEMORY_LATENCY / chip.multiprocessors
    return programs_per_multiprocessor(code, chip) * tiles_ahead * tile_bytes, need


def loop_seconds(
    code: MachineCode,
    chip: Chip,
    programs: Sequence[int],
    tile_bytes: int,
    readers: int,
    tiles_ahead: float,
    products: float = 0.0,
) -> float:
    """Seconds of a launch whose programs run so many iterations each, in launch order.

    Programs go to the multiprocessor with least to do; what one of them holds at once shares it.
    """
    held = programs_per_multiprocessor(code, chip)
    start = (2 * L2_CYCLES + 2 * MEMORY_LATENCY * chip.clock + 900) / chip.clock
    lanes: list[list[int]] = [[] for _ in range(chip.multiprocessors)]
    loads = [0.0] * chip.multiprocessors
    queue = [(0.0, k) for k in range(chip.multiprocessors)]
    for iterations in programs:
        load, k = heapq.heappop(queue)
        lanes[k].append(iterations)
        loads[k] = load + iterations + 1
        heapq.heappush(queue, (loads[k], k))
    busiest = max(range(chip.multiprocessors), key=loads.__getitem__)
    seconds, left = 0.0, lanes[busiest]
    while left:
        now, left = left[:held], left[held:]
        each = iteration_seconds(code, chip, len(now), tile_bytes, readers, tiles_ahead, products)
        seconds += start + sum(now) / len(now) * each
    return seconds
