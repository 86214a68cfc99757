"""What was measured on what: machine, versions, commit, date, settings; neither user names nor paths."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from decodebench._version import __version__
from decodebench.shipped import PACKAGE

if TYPE_CHECKING:
    import torch


def machine(device: str | torch.device | Sequence[str] = "cpu") -> dict[str, object]:
    """What a reader must not have to guess: device, cores, memory, and versions.

    Several devices: a ``device`` that names them all, and ``devices`` that tells which is which. Loads
    torch for a CUDA device only: planning and comparing layouts need none.
    """
    if not isinstance(device, str) and isinstance(device, Sequence):
        if len(device) > 1:
            # the card last, so that its facts stay where facts differ
            each = {name: machine(name) for name in sorted(device, key=lambda d: d.startswith("cuda"))}
            names = {name: facts["device"] for name, facts in each.items()}
            together = {k: v for facts in each.values() for k, v in facts.items()}
            return together | {"device": " and ".join(map(str, names.values())), "devices": names}
        device = device[0]
    facts: dict[str, object] = {
        "device": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None,
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for package in ("torch", "triton", "vllm", "flashinfer-python"):
        try:
            facts[package.removesuffix("-python")] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    if str(device).startswith("cuda"):
        import torch

        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "driver": _driver_version(getattr(properties, "uuid", None)),
            "host": _cpu_name(),
        }
    return facts


def provenance(
    settings: dict[str, object] | None = None,
    *,
    seed: int | None = None,
    device: str | torch.device | Sequence[str] = "cpu",
) -> dict[str, object]:
    """``machine`` plus code version, date, settings and seed: what a stored result needs beside it."""
    commit, dirty = _git_state()
    return {
        **machine(device),
        "decodebench": __version__,
        "commit": commit,
        "uncommitted_changes": dirty,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "settings": dict(settings or {}),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError, AttributeError):
        return None


def _driver_version(uuid: object) -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        query += ["-i", f"GPU-{str(uuid).removeprefix('GPU-')}"] if uuid else []
        return subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.split("\n")[0] or None
    except (OSError, subprocess.SubprocessError):
        return None


def _git_state() -> tuple[str | None, bool | None]:
    """Commit of this package's checkout and whether tracked files differ; (None, None) outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(PACKAGE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != PACKAGE.parent:
            return None, None  # installed inside somebody else's repository
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None
