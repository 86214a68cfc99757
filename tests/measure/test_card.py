"""The card as it says of itself: usable or not, its facts, its sensors, its breakage. On a pretended card."""

import time

import pytest
import torch
from pretend_card import UUID, install_card, install_smi

from decodebench.cache.tensors import free_memory
from decodebench.measure import card, clock
from decodebench.measure.provenance import machine, provenance


def test_a_card_that_torch_cannot_use_is_an_error_and_never_a_cpu_report(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    install_smi(tmp_path, monkeypatch)
    with pytest.raises(card.CardUnusable, match=r"NVIDIA H200.*driver 570\.00.*torch.*install") as caught:
        card.default_device("auto")
    assert "\n" not in str(caught.value)
    with pytest.raises(clock.TimingError, match="NVIDIA H200"):
        clock.require_device("cuda")
    assert card.default_device("cpu") == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert card.default_device("auto") == "cpu", "hidden on purpose"


def test_without_a_driver_auto_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", "")
    assert card.default_device("auto") == "cpu" and card.why_unusable() is None


def test_facts_name_the_card_its_limits_and_nobody(tmp_path, monkeypatch):
    install_card(monkeypatch)
    install_smi(tmp_path, monkeypatch)
    facts = card.facts("cuda")
    assert facts["device"] == "NVIDIA H200" and facts["multiprocessors"] == 132 and facts["l2_mib"] == 50
    assert facts["power_limit_w"] == "700.00" and facts["vbios"] is None
    assert UUID not in str(facts)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mig__mode__current": "Enabled"}, "MIG"),
        ({"processes": ("1, 500", "2, 600")}, "2 other processes on NVIDIA H200"),
        ({"free": 1 << 30}, "1.0 GiB free, 8 are needed"),
        ({}, None),
    ],
)
def test_a_card_whose_figures_would_not_be_its_own_is_refused(change, told, tmp_path, monkeypatch):
    install_card(monkeypatch, **({"free": change.pop("free")} if "free" in change else {}))
    install_smi(tmp_path, monkeypatch, **change)
    found = card.reasons_to_refuse("cuda", 8 << 30)
    assert (len(found) == 1 and told in found[0] and "\n" not in found[0]) if told else found == []


def test_sensors_are_read_beside_the_work(tmp_path, monkeypatch):
    install_card(monkeypatch)
    install_smi(tmp_path, monkeypatch, clocks_throttle_reasons__active="0x0000000000000024")
    monkeypatch.setattr(card.Watch, "FIELDS", card.Watch.FIELDS)
    with card.Watch("cuda") as watch:
        start = time.monotonic()
        while not watch._rows and time.monotonic() < start + 20:
            time.sleep(0.02)
        reading = watch.since(start)
    assert (reading.sm_mhz, reading.power_w, reading.temperature_c) == (1755.0, 412.5, 51.0)


def test_what_holds_clocks_down_is_named(tmp_path, monkeypatch):
    install_card(monkeypatch)
    watch = card.Watch("cuda")
    watch._rows = [(0.0, ["900", "3201", "700", "88", "0x0"]), (1.0, ["1100", "3201", "[N/A]", "90", "0x24"])]
    reading = watch.since(0.5)
    assert reading.note == "clocks were held down: power limit, thermal limit" and reading.power_w is None
    assert watch.since(9.0).sm_mhz == 1100.0, "the last word where nothing is newer"
    assert card.Watch("cuda").since(0.0).note is None


@pytest.mark.parametrize(
    ("error", "works", "want"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False, True),
        (RuntimeError("CUDA error: invalid argument"), True, False),
        (RuntimeError("shapes do not match"), False, False),
        (torch.cuda.OutOfMemoryError("CUDA error: out of memory"), True, False),
    ],
)
def test_breakage_is_asked_of_the_device_itself(error, works, want, monkeypatch):
    def synchronize(device=None):
        if not works:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert card.broke(error, "cuda:0") is want
    assert card.broke(error, "cpu") is False


def test_memory_that_torch_keeps_unused_is_free(monkeypatch):
    install_card(monkeypatch, free=90 << 30, reserved=45 << 30, allocated=1 << 30)
    assert free_memory(torch.device("cuda")) == 134 << 30


def test_provenance_names_the_card_wherever_a_row_came_from_it(tmp_path, monkeypatch):
    install_card(monkeypatch)
    install_smi(tmp_path, monkeypatch)
    assert machine("cuda:0")["device"] == "NVIDIA H200"
    both = provenance({}, device=["cpu", "cuda:0"])
    assert both["devices"] == {"cpu": machine("cpu")["device"], "cuda:0": "NVIDIA H200"}
    assert "NVIDIA H200" in both["device"] and both["driver"] == "570.00"
    assert provenance({}, device=["cuda:0"])["device"] == "NVIDIA H200"


def test_a_shared_card_is_told_by_its_processes_and_not_by_the_cores(tmp_path, monkeypatch):
    install_card(monkeypatch)
    monkeypatch.setattr(clock.os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    install_smi(tmp_path, monkeypatch)
    assert clock.busy("cuda") is None  # a GPU's steps wait for no core
    install_smi(tmp_path, monkeypatch, processes=["4242, 1000"])
    assert "1 other process on NVIDIA H200 (pid 4242)" in clock.busy("cuda")
