"""A card that is not there: torch.cuda's facts and an ``nvidia-smi`` on the PATH, for tests without one."""

import os
import stat
from types import SimpleNamespace

import torch

UUID = "GPU-11111111-2222-3333-4444-555555555555"
ANSWERS = {
    "name": "NVIDIA H200",
    "driver_version": "570.00",
    "mig.mode.current": "Disabled",
    "power.limit": "700.00",
    "power.default_limit": "700.00",
    "clocks.max.sm": "1980",
    "persistence_mode": "Enabled",
    "ecc.mode.current": "Enabled",
    "clocks.sm": "1755",
    "clocks.mem": "3201",
    "power.draw": "412.5",
    "temperature.gpu": "51",
    "clocks_throttle_reasons.active": "0x0000000000000000",
}

SCRIPT = """#!{python}
import sys, time
answers = {answers!r}
processes = {processes!r}
query = next(a for a in sys.argv if a.startswith("--query-"))
what, fields = query.removeprefix("--query-").split("=")
if what == "compute-apps":
    print("\\n".join(processes))
    sys.exit(0)
line = ", ".join(answers.get(field, "[N/A]") for field in fields.split(","))
while True:
    print(line, flush=True)
    if "-lms" not in sys.argv:
        break
    time.sleep(0.02)
"""


def install_smi(folder, monkeypatch, processes=(), **answers):
    """Put an ``nvidia-smi`` that gives these answers first on the PATH."""
    import sys

    path = folder / "nvidia-smi"
    given = ANSWERS | {name.replace("__", "."): text for name, text in answers.items()}
    path.write_text(SCRIPT.format(python=sys.executable, answers=given, processes=list(processes)))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def install_card(monkeypatch, *, free=100 << 30, reserved=0, allocated=0, name="NVIDIA H200", count=1):
    """Let torch report one H200; nothing can be allocated on it."""
    properties = SimpleNamespace(
        name=name,
        uuid=UUID.removeprefix("GPU-"),
        major=9,
        minor=0,
        multi_processor_count=132,
        L2_cache_size=50 << 20,
        total_memory=139 << 30,
    )
    facts = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (free, 139 << 30),
        "memory_reserved": lambda device=None: reserved,
        "memory_allocated": lambda device=None: allocated,
        "synchronize": lambda device=None: None,
    }
    for fact, value in facts.items():
        monkeypatch.setattr(torch.cuda, fact, value)
