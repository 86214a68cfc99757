"""Reports: pages that stand alone, say their verdict first, and name no machine."""

import base64
import re
from html.parser import HTMLParser

import nbformat
import pytest

from decodebench.__main__ import main
from decodebench.shipped import PACKAGE
from decodebench.show import notebooks, report
from decodebench.show.notebooks import ReportError

GOOD = [
    "# A trial\n\nIs a *trial* page as it should be?\n\nMore text.",
    ("parameters", "model = 'tiny-llama'\nsize = 3"),
    """import pandas as pd
from decodebench.show import cells, charts
frame = pd.DataFrame({"x": [16, 32], "y": [1.0, float(size)], "of": ["<b>", "<b>"]})
charts.lines(frame, "x", "y", "of", name="curve", title="A curve & more", y_label="ms")""",
    """cells.table(frame, "numbers", caption="All numbers")""",
    """import ipywidgets
ipywidgets.IntSlider()""",
    """import sys, pathlib
print("a bar of progress", file=sys.stderr)
print(pathlib.Path(cells.__file__).resolve(), pathlib.Path.home())""",
    """cells.verdict(f"Size {size} for {model}: it is <fine>.", True)""",
    """cells.provenance(size=size)""",
]
BAD = ["# A failure\n\nWhat happens then?", ("parameters", "size = 1"), "1 / 0", "print('never')"]


def write(path, cells):
    notebook = nbformat.v4.new_notebook()
    for cell in cells:
        if isinstance(cell, tuple):
            notebook.cells.append(nbformat.v4.new_code_cell(cell[1], metadata={"tags": [cell[0]]}))
        elif cell.startswith("#"):
            notebook.cells.append(nbformat.v4.new_markdown_cell(cell))
        else:
            notebook.cells.append(nbformat.v4.new_code_cell(cell))
    nbformat.write(notebook, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    write(folder / "01-good.ipynb", GOOD)
    write(folder / "02-bad.ipynb", BAD)
    (folder / "profiles.toml").write_text('[full."01-good"]\nsize = 5\n[broken."01-good"]\nsise = 5\n')
    return folder


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notebooks, "NOTEBOOKS", folder)
        patch.setattr(notebooks, "PROFILES", folder / "profiles.toml")
        pages = report.build(out, profile="full", progress=False)
    return out, pages


@pytest.fixture
def trial(folder, monkeypatch):
    monkeypatch.setattr(notebooks, "NOTEBOOKS", folder)
    monkeypatch.setattr(notebooks, "PROFILES", folder / "profiles.toml")


class Links(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.images = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.found += [attributes[a] for a in ("src", "href", "srcset") if a in attributes]
        if tag == "img":
            self.images.append(attributes)
        assert tag not in ("script", "iframe", "object"), "a page needs no program"


@pytest.mark.parametrize("name", ["index.html", "01-good.html", "02-bad.html"])
def test_pages_need_nothing_but_themselves(made, name):
    text = (made[0] / name).read_text()
    for link in Links(text).found:
        assert link.startswith("data:") or re.fullmatch(r"[\w-]+\.html", link), link
    assert not re.search(r"@import|url\(\s*['\"]?http", text)
    assert "<script" not in text


def test_the_verdict_stands_on_top_once_and_escaped(made):
    text = (made[0] / "01-good.html").read_text()
    assert text.count("it is &lt;fine&gt;.</div>") == 1
    assert (
        text.index("it is &lt;fine&gt;.</div>")
        < text.index("<picture>")
        < text.index("<details>", text.index("<picture>"))
    )
    assert "Size 5 for tiny-llama" in text, "the profile's parameters were given"
    assert "Size 5 for tiny-llama: it is &lt;fine&gt;." in (made[0] / "index.html").read_text()


def test_outputs_come_before_their_code_and_the_code_is_folded(made):
    text = (made[0] / "01-good.html").read_text()
    assert text.index("All numbers") < text.index("All numbers", text.index("All numbers") + 1)
    outside = re.sub(r"<details>.*?</details>", "", text, flags=re.S)
    assert "import" not in re.sub(r"<style>.*?</style>", "", outside, flags=re.S).replace("important", "")
    assert "open" not in re.findall(r"<details([^>]*)>", text)


def test_figures_have_alt_text_a_dark_version_and_files(made):
    out, _ = made
    (image,) = Links((out / "01-good.html").read_text()).images
    assert image["alt"].startswith("A curve & more. Line chart of ms against x. <b>: 1 at 16 to 5 at 32")
    assert (out / "figures/01-good--curve.png").read_bytes().startswith(b"\x89PNG")
    svg = (out / "figures/01-good--curve.svg").read_text()
    light, dark = (
        base64.b64decode(link.split("base64,")[1]).decode()
        for link in sorted(
            {u for u in Links((out / "01-good.html").read_text()).found if "svg" in u},
            key=lambda u: "#1f2429" not in base64.b64decode(u.split("base64,")[1]).decode(),
        )
    )
    assert light in svg and "#1f2429" in light and "#1f2429" not in dark and "#e8eaed" in dark


def test_tables_are_written_as_csv(made):
    assert (made[0] / "tables/01-good--numbers.csv").read_text().startswith("x,y,of\n16,1.0,<b>")


def test_no_machine_and_no_widget_reaches_a_page(made):
    out, _ = made
    for path in out.rglob("*"):
        if path.suffix in (".html", ".svg", ".csv"):
            text = path.read_text()
            assert str(PACKAGE.parent) not in text
            assert not re.search(r"/(home|Users)/\w", text)
    text = (out / "01-good.html").read_text()
    assert "IntSlider(" in text and "widget-view" not in text, "a widget is shown by its text"
    assert "a bar of progress</pre>" not in text


def test_a_notebook_that_fails_ends_its_page_and_not_the_report(made):
    out, pages = made
    assert [page.error for page in pages] == [None, "ZeroDivisionError: division by zero"]
    assert "This notebook stopped at an error: ZeroDivisionError" in (out / "index.html").read_text()
    text = (out / "02-bad.html").read_text()
    assert "Traceback" in text and "\x1b" not in text


def test_bad_requests_are_named(trial, tmp_path):
    for request, says in [
        ({"profile": "quickest"}, "profile 'quickest': choose quick, broken, full"),
        ({"profile": "broken", "only": ["01"]}, "01-good has no parameter 'sise'"),
        ({"only": ["77"]}, "no notebook begins with '77'"),
    ]:
        with pytest.raises(ReportError, match=says):
            report.build(tmp_path / "out", **request)
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot write a report there"):
        report.build(tmp_path / "file")


def test_the_command_prints_the_path_and_tells_of_a_failure(trial, tmp_path, capsys):
    assert main(["report", "--only", "02", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert str(tmp_path / "index.html") in said.out
    assert "02-bad stopped at an error (ZeroDivisionError: division by zero)" in said.err
    assert said.err.count("\n") == 1


def test_only_notebooks_that_take_a_model_get_it(trial, tmp_path, monkeypatch):
    given = []

    def note(path, parameters, *, folder, **_):
        given.append((path.stem, parameters, folder))
        return notebooks.Page(path.stem, "title", "question", nbformat.v4.new_notebook())

    monkeypatch.setattr(report, "execute", note)
    monkeypatch.setattr(report, "_write_page", lambda *a, **k: None)
    config = tmp_path / "config.json"
    config.write_text("{}")
    report.build(tmp_path / "out", model=config, progress=False)
    ((stem, parameters, where),) = given
    assert stem == "01-good"
    assert (where / parameters["model"]).resolve() == config.resolve()
    assert parameters["model"].count("/") == 1, "no folders of this machine"


def test_any_parameter_can_be_given_and_an_unknown_one_is_named(trial, tmp_path, capsys):
    command = ["report", "--only", "01", "--out", str(tmp_path / "a")]
    assert main([*command, "-p", "size=4", "-p", "model=a name"]) == 0
    assert "Size 4 for a name" in (tmp_path / "a/index.html").read_text()
    capsys.readouterr()
    for wrong, says in [
        (["-p", "sise=4"], "no notebook has a parameter 'sise': there are model, size"),
        (["-p", "size"], "NAME=VALUE is expected"),
        (["--memory", "much"], "memory 'much'"),
        (["--context", "0"], "at least one token"),
    ]:
        assert main([*command, *wrong]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1


def test_memory_and_context_reach_every_notebook_that_has_them():
    import argparse

    parser = argparse.ArgumentParser()
    report.add_report_arguments(parser)
    given = report.parameters_of(
        parser.parse_args(["--memory", "80GiB", "--context", "8192", "-p", "requests=3"])
    )
    assert given == {"memory": "80GiB", "context": 8192, "contexts": [128, 512, 2048, 8192], "requests": 3}
    for path in notebooks.NOTEBOOKS.glob("0[19]-*.ipynb"):
        assert {"memory", "context"} & set(given) & set(notebooks.parameter_names(notebooks._read(path)))


def test_a_report_never_writes_over_another(made, trial, tmp_path):
    out, _ = made
    before = {path.name: path.read_bytes() for path in out.glob("*.html")}
    with pytest.raises(ReportError, match=r"holds another report \(02-bad.html\): .* --out FOLDER"):
        report.build(out, only=["01"], progress=False)
    assert {path.name: path.read_bytes() for path in out.glob("*.html")} == before


def test_a_report_on_one_model_has_a_folder_of_its_own(trial, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        report,
        "execute",
        lambda path, parameters, **_: notebooks.Page(
            path.stem, "title", "question", nbformat.v4.new_notebook()
        ),
    )
    monkeypatch.setattr(report, "_write_page", lambda *a, **k: None)
    assert main(["report", "--model", "tiny-llama"]) == 0
    assert [p.name for p in (tmp_path / "reports").iterdir()] == ["tiny-llama"]
    assert "decodebench report: tiny-llama" in (tmp_path / "reports/tiny-llama/index.html").read_text()


def test_a_single_file_holds_every_page(trial, tmp_path):
    report.build(tmp_path, only=["01"], single_file=True, progress=False)
    text = (tmp_path / "index.html").read_text()
    assert 'href="#01-good"' in text and '<article id="01-good">' in text and "All numbers" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for link in Links(text).found:
        assert link.startswith(("data:", "#")), f"{link} is dead where the file was forwarded alone"


def test_the_footer_names_where_each_page_was_measured(folder, tmp_path):
    pages = []
    for stem, device in (("01-a", "one"), ("02-b", "one"), ("08-c", "another")):
        notebook = nbformat.v4.new_notebook()
        cell = nbformat.v4.new_code_cell("x")
        facts = {"role": "provenance", "facts": {"device": device, "cores": "2", "date": "2026-01-02T03:04"}}
        cell.outputs = [nbformat.v4.new_output("display_data", {}, metadata={"decodebench": facts})]
        notebook.cells.append(cell)
        pages.append(notebooks.Page(stem, "t", "q", notebook))
    said = report._made_on(pages)
    assert said.startswith("Made 2026-01-02 on one, 2 cores") and "08: measured 2026-01-02 on another" in said


def test_a_progress_bar_of_a_notebook_is_no_part_of_a_page():
    data = {
        "text/plain": "  0%|          | 0/4 [00:00<?, ?case/s]",
        "application/vnd.jupyter.widget-view+json": {},
    }
    assert report._render(nbformat.v4.new_output("display_data", data)) == ""
