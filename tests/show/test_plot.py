"""A sweep's table as a figure in two lines, and from the command line; tables that mix series are refused."""

import pytest

import decodebench as db
from decodebench.__main__ import main
from decodebench.show.charts import PlotRefused


@pytest.fixture(scope="module")
def table():
    return db.sweep.run(
        {
            "model": ["tiny-llama", "tiny-gemma3"],
            "context": [100, 2048, 512],
            "batch": [1, 2],
            "measure": "layout",
            "memory": "64MiB",
            "max_model_len": 2048,
        }
    )


def test_a_figure_in_two_lines(table):
    chart = db.plot(table[table["batch"] == 1])
    (axes,) = chart.axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[100, 512, 2048]] * 2, (
        "lengths sort as numbers"
    )
    assert axes.get_ylabel() == "requests that fit at once" and "tiny-gemma3" in chart.alt


def test_a_table_that_mixes_series_is_refused_and_the_column_named(table):
    with pytest.raises(
        PlotRefused, match=r"several batch \(1, 2\): filter it to one, or draw .* series='batch'"
    ):
        db.plot(table)
    assert db.plot(table, where={"batch": 2, "model": "tiny-llama"}).axes[0].lines
    with pytest.raises(PlotRefused, match="no row has batch = 3: there are 1, 2"):
        db.plot(table, where={"batch": 3})
    with pytest.raises(PlotRefused, match="no column 'speed'"):
        db.plot(table, "speed")


def test_names_become_bars_in_panels():
    rows = db.sweep.run(
        {
            "model": "tiny-gemma3",
            "grouping": ["hybrid", "per_layer"],
            "measure": "layout",
            "max_model_len": "auto",
        }
    )
    chart = db.plot(rows)
    assert [t.get_text() for t in chart.axes[0].get_yticklabels()] == ["hybrid", "per_layer"]


def test_a_column_of_bytes_or_another_axis_can_be_asked_for(table):
    assert db.plot(table[table["batch"] == 1], y="waste_last_block").axes
    assert db.plot(table[table["context"] == "100"], x="batch").axes


def test_the_command_draws_what_a_sweep_wrote(tmp_path, capsys):
    grid = tmp_path / "grid.toml"
    grid.write_text(
        'model = "tiny-llama"\nmeasure = "layout"\nmax_model_len = "auto"\nblock_size = [16, 32]\n'
    )
    out = tmp_path / "out"
    assert main(["sweep", str(grid), "--out", str(out), "--csv", str(tmp_path / "t.csv"), "--quiet"]) == 0
    assert f"decodebench plot {out}" in capsys.readouterr().out
    assert main(["plot", str(out)]) == 0
    assert (out / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["plot", str(tmp_path / "t.csv"), "--out", str(tmp_path / "a.svg")]) == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()
    capsys.readouterr()
    assert main(["plot", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
