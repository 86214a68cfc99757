"""bench growth: what varies is one thing at a time, and what a level line is."""

import json

import pytest

from decodebench.__main__ import main
from decodebench.show import figures
from decodebench.study import bench_growth as bench
from decodebench.study import sweep


def test_one_thing_varies_at_a_time():
    found = list(bench.shapes(256 << 20))
    by_size = [shape[1] for shape in found if shape[0] == "bytes"]
    assert by_size == [64 << 20, 128 << 20, 256 << 20]
    for i, varies in enumerate(("layers", "requests", "page_bytes"), start=2):
        lines = [shape for shape in found if shape[0] == varies]
        assert len({shape[i] for shape in lines}) == len(lines) > 1
        others = {shape[1:i] + shape[i + 1 :] for shape in lines}
        assert len(others) == 1, varies


@pytest.mark.parametrize("requests", [1, 3])
def test_rows_of_a_shape(requests):
    rows = list(bench.measure_shape("bytes", 1 << 20, 2, requests, 64 << 10, seconds=0.0))
    assert [(row["work"], row["values"]) for row in rows] == [
        (work, values) for values in ("constant", "normal") for work in ("fill", "audit")
    ]
    assert all(row["bytes"] == 1 << 20 and row["seconds"] > 0 and row["share"] > 0 for row in rows)


def row(varies, work, share, disturbed=None, **other):
    settings = {"varies": varies, "work": work, "values": "constant", "bytes": 1, "layers": 1, "requests": 1}
    return settings | {"page_bytes": 1, "share": share, "disturbed": disturbed} | other


def test_a_level_line_meets_its_floor_and_a_falling_one_does_not():
    rows = [row(v, w, s) for v in ("bytes", "layers") for w in ("fill", "audit") for s in (0.95, 1.0)]
    rows += [{**r, "values": "normal"} for r in rows]
    assert all(floor.met for floor in bench.floors(rows))
    rows[0]["share"] = 0.5
    missed = [floor.floor for floor in bench.floors(rows) if not floor.met]
    assert missed == ["fill, constant: smallest share over largest by bytes"]
    rows[0]["disturbed"] = "other processes took half"
    assert [floor.reached for floor in bench.floors(rows)].count(None) == 1


def test_the_command_stores_rows_that_the_figure_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "shapes", lambda most: [("bytes", 1 << 20, 2, 1, 64 << 10)])
    status = main(["bench", "growth", "--json", "--out", str(tmp_path)])
    result = json.loads(capsys.readouterr().out)
    assert status in (0, 3) and len(result["rows"]) == len(result["floors"]) == 4
    chart = figures.growth(sweep.read(tmp_path), title="Speed by size")
    assert "Speed by size" in chart.alt and "audit, normal values" in chart.alt
    monkeypatch.setattr(bench, "shipped", lambda _: tmp_path)
    assert len(bench.stored()) == 4
    monkeypatch.setattr(bench, "shipped", lambda _: tmp_path / "nothing")
    assert bench.stored() is None and "no rows are stored" in str(vars(figures.growth(None, title="")))
    assert main(["bench", "growth", "--most", "0.001"]) == 2
    assert "--most" in capsys.readouterr().err
