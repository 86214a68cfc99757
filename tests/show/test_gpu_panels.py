"""Stored figures of cards, beside a report's own: every folder labelled, none mixed, a broken one named."""

import json

import pytest

from decodebench.measure.journal import Journal
from decodebench.show import gpu_panels
from decodebench.study import gpu_results

ROW = {
    "status": "ok",
    "what": "decode",
    "model": "llama-3.1-8b",
    "kind": "full_attention",
    "batch": 8,
    "context": "8192",
}
ROW |= {
    "block_size": 16,
    "kv_cache_dtype": "auto",
    "cold": True,
    "median_s": 1e-3,
    "share_of_read": 0.9,
    "case_id": "a",
}


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_results, "shipped", lambda name: tmp_path)
    for card, day in (("NVIDIA H200", "2026-01-02"), ("NVIDIA B200", "2026-01-03")):
        with Journal(tmp_path / card.lower().replace(" ", "-")) as journal:
            journal.begin_run(
                {"device": card, "date": f"{day}T00:00:00", "commit": "0123456789abcdef", "settings": {}}
            )
            journal.append(ROW)
            journal.append(ROW | {"what": "fill", "kind": "constant", "fill_bytes": 1 << 30, "case_id": "b"})
    return tmp_path


def test_every_folder_is_a_panel_with_card_date_and_commit(stored):
    found = list(gpu_panels.panels("decode", gpu_results.stored()))
    assert [type(x).__name__ for x in found] == ["Chart", "Table"] * 2
    assert [x.caption for x in found[1::2]] == [
        "NVIDIA B200, 2026-01-03, commit 0123456789",
        "NVIDIA H200, 2026-01-02, commit 0123456789",
    ]
    assert all(len(chart.alt) > 40 for chart in found[::2])
    assert len({x.name for x in found[::2]}) == len({x.name for x in found[1::2]}) == 2
    (table, _) = gpu_panels.panels("fill", gpu_results.stored())
    assert table.frame["fill_bytes"].tolist() == [1 << 30]


def test_a_folder_that_cannot_be_read_is_named_and_the_others_are_shown(stored):
    (stored / "broken").mkdir()
    (stored / "broken" / "provenance.json").write_text(json.dumps({"schema": 99, "runs": []}))
    found = list(gpu_panels.panels("fill", gpu_results.stored()))
    assert len(found) == 3 and "schema 99" in found[0].frame["reason"][0]


def test_without_a_folder_it_says_how_to_make_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_results, "shipped", lambda name: tmp_path / "nothing")
    assert gpu_results.stored() == [] and list(gpu_panels.panels("decode", gpu_results.stored())) == []
    gpu_panels.show("decode", [])
