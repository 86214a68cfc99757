"""A sweep whose device breaks stops in one line; its provenance names every device that made a row."""

import pytest
import torch
from pretend_card import install_card, install_smi

from decodebench.measure import card
from decodebench.measure.journal import read_folder
from decodebench.show import cells
from decodebench.study import runners, sweep
from decodebench.study.grid import cases

GRID = {"model": "tiny-llama", "measure": "decode", "context": [32, 48, 64, 80], "batch": 1, "memory": "1GiB"}


def test_a_sticky_device_error_stops_the_sweep_and_stores_nothing_behind_it(tmp_path, monkeypatch):
    install_card(monkeypatch)
    monkeypatch.setattr(card, "smi", lambda *a, **k: [])
    broken = []

    def stage(case, made):
        if case.context == "48":
            broken.append(case)
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return {"median_s": 1e-3}

    def synchronize(device=None):
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    for name in ("coverage", "audit", "decode"):
        monkeypatch.setitem(runners.STAGES, name, f"{__name__}:nothing")
    monkeypatch.setattr(runners, "resolve_name", lambda where: _stage_or(where, stage))
    with pytest.raises(runners.DeviceBroken, match="tiny-llama 48") as caught:
        sweep.run(GRID | {"device": "cuda:0"}, tmp_path / "out", progress=False)
    assert "\n" not in str(caught.value)
    rows, _ = read_folder(tmp_path / "out")
    assert [row["status"] for row in rows.values()] == ["ok"]
    broken.clear()  # a fresh process
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


def _stage_or(where, stage):
    if where.endswith("layout_stage"):
        return lambda case, made: {}
    return card.broke if where.endswith(":broke") else stage


def test_an_error_that_the_device_survives_is_a_row(monkeypatch):
    install_card(monkeypatch)

    def stage(case, made):
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(runners, "resolve_name", lambda where: _stage_or(where, stage))
    (case,) = cases(GRID | {"context": 32, "device": "cuda:0"})
    row = runners.evaluate(case)
    assert row["status"] == "failed" and "invalid argument" in row["reason"]


def test_provenance_of_a_sweep_asks_every_device_that_made_rows(tmp_path, monkeypatch):
    install_card(monkeypatch)
    install_smi(tmp_path, monkeypatch)
    for measure, devices in (("audit", ["cuda:0"]), ("decode", ["cpu", "cuda:0"])):
        grid = GRID | {"measure": measure, "device": devices}
        assert "NVIDIA H200" in sweep._provenance(grid, cases(grid))["device"]
    grid = GRID | {"measure": "layout", "device": "cuda:0"}
    assert "NVIDIA" not in str(sweep._provenance(grid, cases(grid))["device"]), "layouts are arithmetic"
    shown = cells.provenance(model="jamba-v0.1", device="cuda")
    assert shown.facts["device"] == "NVIDIA H200"
