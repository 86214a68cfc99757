"""Notebooks: each runs from top to bottom, states a question, gives a verdict,
ends with its settings, holds no logic.
"""

import ast
import json
import re
import tomllib

import pytest

from decodebench.cache.faults import FAULTS
from decodebench.show import notebooks as report
from decodebench.study.fault_cases import CASES, fault_table

PATHS = sorted(report.NOTEBOOKS.glob("*.ipynb"))


@pytest.fixture(scope="module")
def executed():
    """Notebooks run with the small parameters of the "test" profile, each once."""
    pages = {}

    def run(path):
        if path not in pages:
            pages[path] = report.execute(path, report._parameters(path, report._read(path), "test", None))
        return pages[path]

    return run


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_a_notebook_runs_and_says_what_it_found(executed, path):
    page = executed(path)
    assert page.error is None
    assert page.title and page.question.endswith("?")
    assert len(page.verdicts) == 1, "one answer a notebook"
    charts = report._facts(page.notebook, "chart")
    assert charts and all(len(c["alt"]) > 40 for c in charts)
    for role in ("chart", "table"):
        names = [fact["name"] for fact in report._facts(page.notebook, role)]
        assert len(names) == len(set(names)), "files of an export do not overwrite each other"
    first = next(cell for cell in page.notebook.cells if cell.cell_type == "code" and cell.outputs)
    assert any(o.get("metadata", {}).get("decodebench", {}).get("role") == "chart" for o in first.outputs), (
        "the first thing that is shown is a figure"
    )
    last = [c for c in page.notebook.cells if c.cell_type == "code"][-1]
    assert last.outputs[0]["metadata"]["decodebench"]["role"] == "provenance"


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_a_notebook_is_text_calls_and_figures(path):
    notebook = report._read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code), (
        "committed without outputs"
    )
    assert report._tagged(code[0], "parameters")
    assert sum(report._tagged(cell, "parameters") for cell in code) == 1
    for cell in code:
        tree = ast.parse(cell.source)
        banned = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.If, ast.Try, ast.Lambda)
        assert not [node for node in ast.walk(tree) if isinstance(node, banned)], "logic belongs in a module"
        assert len(cell.source.splitlines()) <= 25
    words = sum(len(cell.source.split()) for cell in notebook.cells if cell.cell_type == "markdown")
    assert words < 750, "five minutes"
    raw = json.loads(path.read_text())
    assert set(raw["metadata"]) == {"kernelspec", "language_info"}
    text = " ".join(re.sub(r"\]\(https://[^)]+\)", "", c.source) for c in notebook.cells)
    assert not re.search(r"!\[|https?://", text), "pages load nothing; a source is a link in the text"
    assert not re.search(r"https?://", " ".join(cell.source for cell in code))


def test_notebooks_are_numbered_without_gaps():
    numbers = [int(path.stem[:2]) for path in PATHS]
    assert numbers == list(range(1, len(PATHS) + 1)), [path.stem for path in PATHS]


def test_profiles_name_notebooks_and_parameters_that_exist():
    for profile, notebooks in tomllib.loads(report.PROFILES.read_text()).items():
        for stem, values in notebooks.items():
            names = report.parameter_names(report._read(report.NOTEBOOKS / f"{stem}.ipynb"))
            assert set(values) <= set(names), f"{profile}: {stem}"


def test_every_fault_is_in_the_gallery_and_caught_there():
    assert [case.fault for case in CASES] == list(FAULTS)
    table = fault_table()
    assert table["caught"].all(), table[~table["caught"]].to_string()
    assert (table["found with the fault"] != table["found without it"]).all()
