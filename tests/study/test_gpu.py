"""``decodebench gpu``: to the end in a rehearsal, refused in words without a card, stopped by a failing check."""

import pytest
import torch
from pretend_card import install_card, install_smi

from decodebench.__main__ import main
from decodebench.measure import card
from decodebench.measure.bandwidth import Bandwidth
from decodebench.measure.journal import read_folder
from decodebench.study import gpu, gpu_gate, gpu_rivals
from decodebench.study.table import read

SPEEDS = Bandwidth(4000.0, 4000.0, 4200.0, 4000.0, "cuda", 2 << 30, 700.0, 2e-6)


@pytest.fixture
def quick(monkeypatch):
    """A rehearsal of one model and one point."""
    target = gpu.Target("cpu", "torch", True, ("tiny-llama",), (2,), (64,), (1 << 20,), 0.001)
    monkeypatch.setattr(gpu, "rehearsal", lambda: target)
    monkeypatch.setattr(gpu, "bandwidth", lambda device: Bandwidth(20.0, 20.0, 20.0, 20.0, "cpu", 1 << 28))
    return target


def test_it_runs_to_the_end_and_goes_on_where_it_was_cut(quick, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["gpu", "--rehearse", "--out", str(out), "--minutes", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "checks hold" in text and "MISSED" in text and "not measured" in text
    rows, runs = read_folder(out)
    assert {row["what"] for row in rows.values()} == {"decode", "fill", "audit"}
    assert all(row["status"] == "ok" and row["simulated"] for row in rows.values())
    assert any("x_sdpa" in row for row in rows.values())
    assert any("not installed" in str(row.get("why_no_flashinfer")) for row in rows.values())
    assert runs[0]["settings"]["simulated"] and runs[0]["settings"]["card"]["device"].startswith("rehearsal")
    assert {"rows.parquet", "rows.csv", "summary.md", "provenance.json"} <= {p.name for p in out.iterdir()}
    assert "no figure here is a card's" in (out / "summary.md").read_text()
    assert len(read(out)) == len(rows), "a sweep's reader reads it"
    assert main(["gpu", "--rehearse", "--out", str(out), "--minutes", "0.5"]) == 0
    assert len(read_folder(out)[0]) == len(rows), "nothing is measured twice"


def test_a_check_that_fails_stops_it_by_name_before_any_timing(quick, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_gate, "TOLERANCE", -1.0)
    monkeypatch.setattr(gpu, "measure_decode", lambda *a, **k: pytest.fail("timed behind a failing check"))
    monkeypatch.setattr(gpu_gate._close, "__defaults__", (-1.0,))
    assert main(["gpu", "--rehearse", "--out", str(tmp_path / "out")]) == 3
    told = capsys.readouterr().err
    assert (
        "attention bfloat16, blocks of 16" in told and "nothing was timed" in told and told.count("\n") == 1
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [RuntimeError("boom\nmore"), ValueError("no")])
def test_a_check_that_breaks_is_a_failed_check(quick, monkeypatch, error, capsys):
    def broken():
        raise error

    monkeypatch.setattr(gpu, "checks", lambda device, backend: iter([("a check", broken)]))
    assert main(["gpu", "--rehearse"]) == 3
    assert f"a check: {type(error).__name__}" in capsys.readouterr().err


def test_without_a_card_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(card, "smi", lambda *a, **k: [])
    assert main(["gpu"]) == 2
    told = capsys.readouterr().err
    assert "no CUDA device" in told and "--rehearse" in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mig__mode__current": "Enabled"}, "MIG"),
        ({"processes": ("77, 500",)}, "1 other process"),
        ({"free": 2 << 30}, "2.0 GiB free"),
    ],
)
def test_a_card_in_no_state_to_be_measured_is_refused(change, told, tmp_path, monkeypatch, capsys):
    install_card(monkeypatch, **({"free": change.pop("free")} if "free" in change else {}))
    install_smi(tmp_path, monkeypatch, **change)
    monkeypatch.setattr(gpu, "checks", lambda *a: pytest.fail("a refused card was used"))
    assert main(["gpu"]) == 2
    text = capsys.readouterr().err
    assert told in text and text.count("\n") == 1


@pytest.mark.parametrize("device", ["cuda:3", "cuda:7"])
def test_a_card_that_is_not_there_is_named(device, tmp_path, monkeypatch, capsys):
    install_card(monkeypatch)
    install_smi(tmp_path, monkeypatch)
    assert main(["gpu", "--device", device]) == 2
    assert f"{device}: this machine has cuda:0 to cuda:0" in capsys.readouterr().err


def test_time_that_makes_no_sense_is_refused(capsys):
    assert main(["gpu", "--minutes", "0"]) == 2
    assert "--minutes" in capsys.readouterr().err


def test_the_grid_begins_with_what_is_most_useful_and_repeats_nothing():
    target = gpu.the_card()
    grid = list(gpu.points(target))
    first = grid[: len(gpu.MODELS)]
    assert [point["model"] for point in first] == list(gpu.MODELS)
    assert {(p["batch"], p["context"], p["kv_cache_dtype"]) for p in first} == {(8, 8192, "auto")}
    keys = [tuple(point.values()) for point in grid]
    assert len(keys) == len(set(keys)) == 8 * 4 * 3 * 3 * 2


def row(**facts):
    common = {
        "status": "ok",
        "what": "decode",
        "cold": True,
        "kv_cache_dtype": "auto",
        "layers": 1,
        "model": "m",
    }
    return common | {"batch": 8, "context": 8192, "block_size": 16} | facts


def test_floors_are_met_or_missed_with_the_number():
    rows = [
        row(kind="full_attention", bytes_moved=int(1e9), share_of_read=0.9, limit_share=0.9, median_s=1.0),
        row(kind="full_attention", bytes_moved=int(5e8), share_of_read=0.9, limit_share=0.9, median_s=0.7)
        | {"kv_cache_dtype": "fp8"},
        row(kind="mamba2", bytes_moved=int(7e7), share_of_read=0.9, limit_share=0.86, median_s=1.0),
        row(kind="constant", what="fill", fill_bytes=1 << 30, of_memset=0.95),
        row(kind="normal", what="audit", share_of_read=0.2),
        row(kind="mla_attention") | {"status": "failed"},
    ]
    told = "\n".join(gpu.judge(rows, SPEEDS))
    assert "met     two-byte attention from 0.5 GB a layer, of a read: 0.90 (at least 0.80)" in told
    assert "MISSED  fp8 step over the two-byte one: 0.70 (at most 0.65)" in told
    assert "not measured  latent attention" in told
    assert "met     states from 64 MB" in told and "MISSED  audit" in told


def test_a_rehearsals_folder_is_no_cards_folder():
    assert str(gpu._folder("NVIDIA H200", False)).startswith("data/results/gpu/h200-2")
    assert str(gpu._folder("rehearsal on x", True)).startswith("rehearsal/")


def test_another_librarys_failure_is_a_reason_and_no_error(monkeypatch):
    monkeypatch.setattr(gpu_rivals, "find_spec", lambda name: True)
    cache, batch = gpu.small_cache("tiny-llama", requests=1, context=40, layers=1)
    found = gpu_rivals.rivals(cache, batch, cache.layout.layer_names[:1], 1e-3, 0.001, False)
    assert found["x_sdpa"] > 0
    assert all(found[f"why_no_{name}"] for name in ("flashinfer", "flash_attn"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_check_holds_on_this_card():
    for _, check in gpu_gate.checks("cuda", None):
        check()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_command_on_this_card(tmp_path):
    """Half a minute of it: gate, ceilings, clock, fills, audit, rows."""
    target = gpu.Target(
        "cuda", None, False, ("llama-3.1-8b", "nemotron-h-8b"), (8,), (2048,), (1 << 30,), 0.02
    )
    out = gpu.run(target, tmp_path / "out", 0.5, lambda text: None)
    rows, runs = read_folder(out)
    assert runs[0]["device"] == torch.cuda.get_device_name()
    assert {row["status"] for row in rows.values()} == {"ok"}
