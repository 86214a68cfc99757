"""The house as a stranger meets it: environments in step, a quick start, a one-way data flow."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: DESIGN: a module imports only from those before it
ROOMS = (
    "specs",
    "models",
    "grouping",
    "placement",
    "capacity",
    "listing",
    "layout",
    "cache",
    "blocks",
    "kernels",
    "fill",
    "connector",
    "faults",
    "coverage",
    "gallery",
    "timing",
    "decode",
    "journal",
    "grid",
    "sweep",
    "display",
    "charts",
    "plots",
    "verdicts",
    "explorer",
    "report",
    "bench",
    "vllm",
    "__main__",
)


def requirements(lines):
    """'name>=1.2' lines as a dictionary name → constraint."""
    return dict(re.match(r"([\w.-]+)(.*)", line.replace(" ", "")).groups() for line in lines)


def test_environment_yml_names_the_packages_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = requirements(project["dependencies"] + project["optional-dependencies"]["test"])
    wanted["python"] = project["requires-python"]
    lines = re.findall(r"^\s+- ([\w.-]+[=<>].*)$", (ROOT / "environment.yml").read_text(), re.M)
    assert requirements(lines) == wanted


def imports_of(path):
    """Rooms of this package that a file imports while it loads (not inside functions)."""
    tree = ast.parse(path.read_text())
    inside_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_type_checkers(function)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if id(node) in inside_functions:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "decodebench":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("decodebench."))


def _is_for_type_checkers(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("path", sorted((ROOT / "decodebench").rglob("*.py")), ids=lambda p: p.stem)
def test_rooms_import_only_from_rooms_before_them(path):
    room = path.relative_to(ROOT / "decodebench").parts[0].removesuffix(".py")
    if room == "__init__":
        return
    assert room in ROOMS, f"{room} is not a room of the house: add it to ROOMS where it belongs"
    for imported in imports_of(path):
        assert imported == room or ROOMS.index(imported) < ROOMS.index(room), f"{room} imports {imported}"


def test_planning_needs_neither_torch_nor_pandas():
    script = (
        "import sys, decodebench as db; db.plan('jamba-v0.1', memory='8GiB');"
        "print([m for m in ('torch', 'pandas', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_public_names_exist():
    import decodebench

    for name in decodebench.__all__:
        assert getattr(decodebench, name) is not None


def test_nothing_committed_names_a_machine():
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT).stdout.split("\n")
    pattern = re.compile(r"/(work|root|home)/[a-z]|/tmp/[a-z]+_jobs", re.I)
    suffixes = {".py", ".md", ".ipynb", ".toml", ".yml", ".json", ".html", ".jsonl"}
    found = [
        name
        for name in listed
        if Path(name).suffix in suffixes
        and name != "tests/test_packaging.py"
        and (ROOT / name).is_file()
        and pattern.search((ROOT / name).read_text(errors="replace"))
    ]
    assert not found
