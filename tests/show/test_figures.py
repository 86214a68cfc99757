"""Charts say what they show in words, can be told apart without colour vision, and follow the page's inks."""

import itertools

import numpy as np
import pandas as pd
import pytest

from decodebench import words
from decodebench.show import cells, charts, figures, look


@pytest.fixture
def frame():
    return pd.DataFrame(
        {
            "size": [16, 64, 16, 64],
            "ms": [1.0, 2.0, 3.0, None],
            "model": ["a", "a", "b", "b"],
            "q1": 0.5,
            "q3": 3.5,
        }
    )


def test_a_line_chart_has_title_units_alt_and_leaves_out_what_is_missing(frame):
    chart = charts.lines(
        frame, "size", "ms", "model", name="n", title="T", x_label="block size (tokens)", y_label="ms"
    )
    (axes,) = chart.axes
    assert axes.get_xlabel() == "block size (tokens)" and axes.get_ylabel() == "ms"
    assert [list(line.get_xdata()) for line in axes.lines] == [[16, 64], [16]]
    assert (
        chart.alt
        == "T. Line chart of ms against block size (tokens). a: 1 at 16 to 2 at 64; b: 3 at 16 to 3 at 16."
    )
    assert len({line.get_marker() for line in axes.lines}) == 2, "a second channel beside the colour"


def test_bars_stack_and_label_their_totals():
    frame = pd.DataFrame({"g": ["x", "y"], "a": [0.1, 0.0], "b": [0.2, 0.05]})
    chart = charts.bars(
        frame,
        "g",
        {"a": "first", "b": "second"},
        name="n",
        title="T",
        x_label="share",
        stacked=True,
        percent=True,
    )
    (axes,) = chart.axes
    assert [t.get_text() for t in axes.texts] == ["30.0%", "5.0%"]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.1, 0.0, 0.2, 0.05])
    assert "x first 10.0%, second 20.0%" in chart.alt


def test_pages_are_drawn_one_shape_a_state():
    figure, axes = look.chart("n", "T")
    drawn = figures.draw_pages(axes, {"filled": [(0, 0), (1, 3)], "uncovered": [(2, 2)], "stray": []})
    assert drawn == ["filled", "uncovered"] and len(axes.patches) == 2
    outline = axes.patches[0].get_path()
    assert len(outline.vertices) == 10 and outline.get_extents().bounds == pytest.approx(
        (-0.46, -0.44, 3.92, 1.88)
    )


# Machado, Oliveira and Fernandes (2009): what a person without one kind of cone sees, on linear RGB
BLINDNESS = {
    "none": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def lab(colour, blindness):
    srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(BLINDNESS[blindness] @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = np.cbrt(np.maximum(xyz / np.array([0.9505, 1, 1.089]), 1e-9))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize("dark", [False, True])
def test_page_states_are_told_apart_without_full_colour_vision(blindness, dark):
    colours = {state: colour for state, (colour, _) in figures.PAGE_STATES.items()}
    if dark:
        colours = {state: look.darkened(colour.lower()) for state, colour in colours.items()}
    del colours["free"]  # an empty place, drawn to be nearly the ground
    for (a, one), (b, other) in itertools.combinations(colours.items(), 2):
        distance = np.linalg.norm(lab(one, blindness) - lab(other, blindness))
        assert distance > 15, f"{a} and {b} look alike ({blindness}, {distance:.0f})"


def test_the_dark_version_is_the_same_drawing_in_other_inks(frame):
    chart = charts.lines(frame, "size", "ms", "model", name="n", title="T")
    light, dark = chart.svg(), chart.svg(dark=True)
    assert look.INK in light and look.INK not in dark
    assert len(light) == len(dark)
    assert chart.svg() == light, "the same chart is the same file"


def test_a_chart_shows_itself_with_what_an_export_needs(frame):
    chart = charts.lines(
        frame, "size", "ms", "model", name="n", title="T", spread=("q1", "q3"), limit=(2.0, "limit")
    )
    data, metadata = chart._repr_mimebundle_()
    assert set(data) == {"image/png", "image/svg+xml", "text/plain"}
    assert metadata["decodebench"] == {"role": "chart", "name": "n", "alt": chart.alt, "caption": ""}


def test_tables_show_units_and_keep_raw_numbers():
    frame = pd.DataFrame(
        {"model": ["<a>"], "page_bytes": [327680], "waste_tail": [0.125], "median_s": [0.0012], "n": [None]}
    )
    data, _ = cells.table(frame, "t", caption="C & D")._repr_mimebundle_()
    assert "&lt;a&gt;" in data["text/html"] and "C &amp; D" in data["text/html"]
    for text in ("320 KiB", "12.5%", "1.2 ms", "–"):
        assert f">{text}</td>" in data["text/html"]
    assert data["text/csv"].splitlines()[1].startswith("<a>,327680,0.125,0.0012")


@pytest.mark.parametrize(
    ("value", "column", "text"),
    [
        (1234567, "blocks", "1,234,567"),
        (0.98765, "x", "0.988"),
        (1234.567, "x", "1,234.57"),
        (True, "x", "yes"),
        (1.0, "coverage", "100%"),
        (0.5, "worst_group_coverage", "50.0%"),
        (2048, "bytes", "2 KiB"),
        ("s", "x", "s"),
        (0.9999, "coverage", "99.9%"),
    ],
)
def test_numbers_as_people_read_them(value, column, text):
    assert words.plain_number(value, column) == text


def test_a_verdict_is_one_line():
    data, metadata = cells.verdict("two\n  lines", False)._repr_mimebundle_()
    assert metadata["decodebench"] == {"role": "verdict", "text": "two lines", "ok": False}
    assert data["text/plain"] == "two lines"
