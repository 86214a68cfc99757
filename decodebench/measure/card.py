"""The GPU itself: whether it can be used, what it is, how it is doing, and whether it still works.

Asks torch and ``nvidia-smi``; sets, locks and resets nothing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decodebench.errors import DecodebenchError

#: what holds clocks down, by bit (NVML's ``nvmlClocksEventReasons``); idle and the user's own choices are not here
THROTTLES = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "thermal limit",
    0x40: "hardware thermal limit",
    0x80: "power brake",
}


class CardUnusable(DecodebenchError):
    """A GPU that is not there, that torch cannot use, or that broke: names it and the remedy."""


def smi(fields: Sequence[str], card: str | None = None, what: str = "gpu") -> list[dict[str, str]]:
    """Rows of an ``nvidia-smi --query-…``; empty where there is no driver or it does not answer.

    ``card``: index or UUID, None for all. A field that the driver does not know is an empty text.
    """
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    if card is not None:
        command += ["-i", card]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    if done.returncode:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    unknown = ("[Not Supported]", "[N/A]", "N/A")
    return [
        {field: "" if cell in unknown else cell for field, cell in zip(fields, row)}
        for row in rows
        if len(row) == len(fields)
    ]


def why_unusable() -> str | None:
    """One line where a driver sees a card and torch does not; None where torch does or there is no card.

    Where the environment hides the cards (``CUDA_VISIBLE_DEVICES`` empty or -1) that was asked for.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available() or (hidden is not None and hidden.strip() in ("", "-1")):
        return None
    cards = smi(["name", "driver_version"])
    if not cards:
        return None
    build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build without CUDA"
    return (
        f"{cards[0]['name']} is here (driver {cards[0]['driver_version']}), but torch {torch.__version__} "
        f"cannot use it: it {build}; install a torch that fits the driver, or a newer driver "
        "(to use the CPU all the same, say device='cpu')"
    )


def default_device(asked: str = "auto") -> str:
    """``cuda`` where there is one, else ``cpu``; any other device as asked for.

    Raises ``CardUnusable`` where there is a card that torch cannot use: a CPU's figures would be
    taken for its.
    """
    if asked != "auto":
        return asked
    reason = why_unusable()
    if reason:
        raise CardUnusable(reason)
    return "cuda" if torch.cuda.is_available() else "cpu"


def uuid_of(device: str | torch.device) -> str | None:
    """The card's UUID as ``nvidia-smi`` takes it; None where torch does not tell."""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if found is None else f"GPU-{str(found).removeprefix('GPU-')}"


_FACTS = {
    "driver": "driver_version",
    "vbios": "vbios_version",
    "persistence": "persistence_mode",
    "ecc": "ecc.mode.current",
    "mig": "mig.mode.current",
    "power_limit_w": "power.limit",
    "power_default_w": "power.default_limit",
    "clock_max_mhz": "clocks.max.sm",
    "clock_memory_max_mhz": "clocks.max.memory",
    "clock_application_mhz": "clocks.applications.graphics",
    "pcie_generation": "pcie.link.gen.current",
    "pcie_width": "pcie.link.width.current",
}


def facts(device: str | torch.device) -> dict[str, object]:
    """What the card is: its name, sizes, driver, limits and modes; nothing that names its owner."""
    properties = torch.cuda.get_device_properties(device)
    told = smi(list(_FACTS.values()), uuid_of(device))
    return {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_mib": properties.L2_cache_size >> 20,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    } | ({name: told[0][field] or None for name, field in _FACTS.items()} if told else {})


def reasons_to_refuse(device: str | torch.device, free_bytes: int) -> list[str]:
    """Why figures from this card would not be its own, a line each; empty where there is nothing.

    A MIG slice, processes of others, and less than ``free_bytes`` of free memory.
    """
    found, card = [], uuid_of(device)
    name = torch.cuda.get_device_properties(device).name
    if "MIG" in name or any(row["mig.mode.current"] == "Enabled" for row in smi(["mig.mode.current"], card)):
        found.append(
            f"{name} is cut into MIG slices: a slice's figures are not the card's; ask for a whole card"
        )
    others = other_processes(device)
    if others:
        found.append(f"{others}: wait until the card is free")
    free = torch.cuda.mem_get_info(device)[0]
    if free < free_bytes:
        found.append(
            f"{name} has {free / 2**30:.1f} GiB free, {free_bytes / 2**30:.0f} are needed: close what holds them"
        )
    return found


def other_processes(device: str | torch.device) -> str | None:
    """How many others compute on the card and which; None where nobody does, or nobody tells."""
    rows = smi(["pid", "used_memory"], uuid_of(device), "compute-apps")
    pids = [row["pid"] for row in rows if row["pid"] != str(os.getpid())]
    if not pids:
        return None
    name = torch.cuda.get_device_properties(device).name
    return f"{len(pids)} other process{'es' * (len(pids) > 1)} on {name} (pid {', '.join(pids[:3])})"


def broke(error: BaseException, device: str | torch.device) -> bool:
    """Whether an error left the device unusable for this process (an illegal access stays for ever).

    Asks the device itself: a synchronisation fails again after a sticky error, and works after any other.
    """
    accelerator = getattr(torch, "AcceleratorError", ())
    suspect = isinstance(error, accelerator) or "CUDA error" in str(error)
    if not suspect or torch.device(device).type != "cuda":
        return False
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


@dataclass(frozen=True)
class Reading:
    """The card's own sensors over a while: medians of clocks and power, the largest temperature."""

    sm_mhz: float | None
    memory_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttles: tuple[str, ...]

    @property
    def note(self) -> str | None:
        """One line where something held the clocks down."""
        return f"clocks were held down: {', '.join(self.throttles)}" if self.throttles else None


class Watch:
    """Reads a card's sensors ten times a second while it is open, in a process of ``nvidia-smi``.

    Without ``nvidia-smi`` every reading is empty, and nothing else changes.
    """

    FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")

    def __init__(self, device: str | torch.device) -> None:
        self._rows: list[tuple[float, list[str]]] = []
        self._process: subprocess.Popen[str] | None = None
        self._card = uuid_of(device)

    def __enter__(self) -> Watch:
        command = ["nvidia-smi", f"--query-gpu={','.join(self.FIELDS)}", "--format=csv,noheader,nounits"]
        command += ["-lms", "100"] + (["-i", self._card] if self._card else [])
        try:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return self
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) == len(self.FIELDS):
                self._rows.append((time.monotonic(), cells))

    def since(self, start: float) -> Reading:
        """What the sensors said since ``start`` (``time.monotonic``), or their last word before."""
        rows = [row for at, row in list(self._rows) if at >= start] or [row for _, row in self._rows[-1:]]

        def middle(column: int) -> float | None:
            numbers = [float(row[column]) for row in rows if row[column].replace(".", "", 1).isdigit()]
            return statistics.median(numbers) if numbers else None

        bits = 0
        for row in rows:
            if row[4].lower().startswith("0x"):
                bits |= int(row[4], 16)
        throttles = tuple(name for bit, name in THROTTLES.items() if bits & bit)
        return Reading(middle(0), middle(1), middle(2), middle(3), throttles)
