"""Charts say what they show in words, can be told apart without colour vision, and follow the page's inks."""

import base64
import io
import itertools

import matplotlib
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from decodebench import words
from decodebench.show import cells, charts, figures, look
from decodebench.study import table as table_


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
    assert chart.alt == "T. Line chart of ms against block size (tokens). a: 1 at 16 to 2 at 64; b: 3 at 16."
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


def contrast(one, other):
    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_marks_and_text_keep_their_contrast_on_light_and_dark_grounds():
    for ink in (*look.PALETTE, look.VIOLET, look.GREY, look.INK, look.MUTED):
        least = 4.5 if ink in (look.INK, look.MUTED) else 3
        assert contrast(ink, look.GROUND) >= least, ink
        assert contrast(look.darkened(ink), look.darkened(look.GROUND)) >= least, ink


def test_what_a_notebook_shows_has_an_opaque_ground(frame):
    """Dark themes of JupyterLab, VS Code and Colab lie behind it."""
    chart = charts.lines(frame, "size", "ms", "model", name="n", title="T")
    data, _ = chart._repr_mimebundle_()
    assert f"fill: {look.GROUND}" in data["image/svg+xml"]
    image = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGBA")
    assert {image.getpixel(at) for at in ((0, 0), (image.width - 1, image.height - 1))} == {(255,) * 4}


def many(count, name="model-{:02d}-with-a-name"):
    return pd.DataFrame(
        [
            {"size": size, "ms": float(i + size), "model": name.format(i), "kind": kind, "share": i / count}
            for i in range(count)
            for size, kind in ((16, "hybrid"), (64, "per_layer"))
        ]
    )


def inside(chart):
    """Whether every text of the drawn figure lies in it, and none of a legend is cut."""
    chart.draw_without_rendering()
    renderer = chart._get_renderer()
    width, height = chart.get_size_inches() * chart.dpi
    for text in chart.findobj(matplotlib.text.Text):
        if text.get_visible() and text.get_text().strip():
            box = text.get_window_extent(renderer)
            shown = all(a.get_visible() for a in chart.axes if text in a.findobj(matplotlib.text.Text))
            if shown:
                assert box.x0 >= -2 and box.x1 <= width + 2, f"{text.get_text()!r} is cut"
                assert box.y0 >= -2 and box.y1 <= height + 2, f"{text.get_text()!r} is cut"


@pytest.mark.parametrize("count", [1, 2, 7, 12, 24])
def test_no_two_lines_look_alike_and_no_legend_is_cut(count):
    chart = charts.lines(many(count), "size", "ms", "model", name="n", title="T", y_label="ms")
    looks = [(line.get_color(), line.get_marker()) for line in chart.axes[0].lines]
    assert len(set(looks)) == count
    inside(chart)


@pytest.mark.parametrize("count", [1, 3, 4, 12])
def test_panels_wrap(count):
    frame = many(count, "/a/long/way/to/the/folder-of-model-number-{}-and-more/config.json")
    title = "A title that is MUCH TOO LONG FOR ONE LINE AND MUST BE BROKEN to be read by anybody who looks"
    chart = charts.bar_panels(frame, "kind", "ms", "model", name="n", title=title, subtitle=title)
    drawn = [axes for axes in chart.axes if axes.get_visible()]
    assert len(drawn) == count and all(len(a.get_title()) < 70 for a in drawn)
    inside(chart)
    head = next(t for t in chart.texts if t.get_color() == look.MUTED).get_window_extent()
    assert all(head.y0 >= axes.title.get_window_extent().y1 - 2 for axes in drawn), "titles keep apart"
    assert all(axes.get_position().width > 0.1 for axes in drawn), "no panel collapses"


def test_shares_have_one_axis_and_other_scales_are_announced():
    frame = many(3).assign(share=[0.02, 0.03, 0.9, 0.95, 1.0, 1.0])
    chart = charts.bar_panels(frame, "kind", "share", "model", name="n", title="T", percent=True)
    assert len({axes.get_xlim() for axes in chart.axes}) == 1, "a bar of 6 % is shorter than one of 100 %"
    frame["ms"] = [1, 1, 1, 1, 500, 500]
    chart = charts.bar_panels(frame, "kind", "ms", "model", name="n", title="T", subtitle="S")
    assert len({axes.get_xlim() for axes in chart.axes}) > 1
    assert any("its own scale" in text.get_text() for text in chart.texts)


def test_an_axis_of_time_and_its_labels_have_one_unit():
    frame = pd.DataFrame({"kind": ["a", "b"], "model": "m", "median_s": [0.0025, 0.004]})
    chart = charts.bar_panels(
        frame, "kind", "median_s", "model", name="n", title="T", as_text=words.seconds_text, x_label="a step"
    )
    (axes,) = chart.axes
    assert axes.get_xlabel() == "a step (ms)" and [p.get_width() for p in axes.patches] == pytest.approx(
        [2.5, 4]
    )
    assert [t.get_text() for t in axes.texts] == ["2.5 ms", "4 ms"]


def waste_table(causes):
    rows = [
        {"grouping": g, "model": "m", "status": "ok", **dict.fromkeys(figures.WASTE, 0.0), **c}
        for g, c in causes
    ]
    return pd.DataFrame(rows)


def test_a_cause_of_waste_has_one_look_on_every_page():
    """Whatever other causes there are, and every key of the legend is inside the figure."""
    every = waste_table([("hybrid", dict.fromkeys(figures.WASTE, 0.1)), ("fixed(2)", {"waste_tail": 0.5})])
    only = waste_table([("hybrid", {"waste_tail": 0.5})])
    for table in (every, only):
        chart = figures.waste_panels(table, "grouping", title="T")
        inside(chart)
        keys = {t.get_text(): p for t, p in zip(chart.legends[0].get_texts(), chart.legends[0].get_patches())}
        style = figures.WASTE_STYLE["waste_tail"]
        assert matplotlib.colors.to_hex(keys["left over"].get_facecolor()) == style["color"]
        assert keys["left over"].get_hatch() == style["hatch"]
    looks = [(s["color"], s["hatch"]) for s in figures.WASTE_STYLE.values()]
    assert len(set(looks)) == len(figures.WASTE) and set(figures.WASTE_STYLE) == set(figures.WASTE)
    assert {c for c in table_.COLUMNS if c.startswith("waste_")} == set(figures.WASTE)


def test_a_layout_asked_for_twice_is_one_point_and_two_settings_are_refused():
    frame = pd.DataFrame(
        {
            "case_id": ["a", "b", "c"],
            "model": "m",
            "block_size": [8, 16, 32],
            "batch": 2,
            "status": "ok",
            "group_block_sizes": ["16", "16", "32"],
            "block_in_use": [16, 16, 32],
            "median_s": [0.008, 0.005, 0.004],
            "q1_s": 0.003,
            "q3_s": 0.009,
            "limit_s": 0.001,
        }
    )
    chart = figures.latency(frame, "block_in_use", title="T")
    assert list(chart.axes[0].lines[0].get_xdata()) == [16, 32], "no best and worst of one layout"
    with pytest.raises(charts.PlotRefused, match=r"several batch \(2, 4\)"):
        figures.latency(frame.assign(block_size=16, batch=[2, 4, 2]), "block_in_use", title="T")


@pytest.mark.parametrize(
    "figure",
    [
        lambda t: figures.capacity(t, title="T"),
        lambda t: figures.latency(t, "block_in_use", title="T"),
        lambda t: figures.waste_panels(t, "grouping", title="T"),
        lambda t: figures.coverage_by_block_ratio(t, title="T"),
        lambda t: figures.dtype_gain(t, title="T"),
        lambda t: figures.fill_and_step(t, title="T"),
        lambda t: figures.block_growth(t, title="T"),
        lambda t: figures.by_fault(t, "coverage", name="n", title="T"),
    ],
)
def test_where_nothing_was_measured_a_sentence_says_why(figure):
    table = pd.DataFrame({"status": ["refused"], "reason": ["the model is too large"], "model": ["m"]})
    data, facts = figure(table)._repr_mimebundle_()
    assert facts["decodebench"]["role"] == "note" and "the model is too large" in data["text/plain"]


def test_states_differ_in_shape_where_they_matter_on_grey_paper():
    shapes = [
        figures.SHAPES.get(s, figures.SQUARE) for s in ("filled", "uncovered", "wrong", "stray", "zeroed")
    ]
    assert len(set(map(str, shapes))) == 5


def test_labels_of_many_groups_do_not_print_over_each_other():
    frame = pd.DataFrame(
        [(g, "mamba", f"l{g}", g + 1, "filled") for g in range(60)],
        columns=["group", "kind", "layer", "block", "state"],
    )
    chart = figures.page_maps({"a": frame}, name="n", title="T")
    chart.draw_without_rendering()
    boxes = [t.get_window_extent() for t in chart.axes[0].get_yticklabels() if t.get_text()]
    assert len(boxes) > 5 and all(a.y0 >= b.y1 - 1 for a, b in itertools.pairwise(boxes))


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
    assert '<th scope="col" class="number" style="text-align:right">median step</th>' in data["text/html"]
    assert ">left over</th>" in data["text/html"], "a heading in words"
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
