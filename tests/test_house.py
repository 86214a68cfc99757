"""The house as a stranger meets it: environments in step, a quick start, a one-way data flow."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: room → the rooms it may import; DESIGN.md tells why
GROUND = {"_version", "errors", "words", "shipped"}
ROOMS: dict[str, set[str]] = {"models": set()}
ROOMS["layout"] = {"models"}
ROOMS["forecast"] = ROOMS["layout"] | {"layout"}
ROOMS["cache"] = ROOMS["layout"] | {"layout"}
ROOMS["coverage"] = ROOMS["cache"] | {"cache"}
ROOMS["measure"] = ROOMS["cache"] | {"cache"}
ROOMS["study"] = ROOMS["show"] = ROOMS["vllm"] = {*ROOMS["coverage"], "coverage", "measure", "forecast"}
#: they lead to every room
DOORS = {"__init__", "__main__"}
PACKAGE = ROOT / "decodebench"
FILES = sorted(PACKAGE.rglob("*.py"))


def requirements(lines):
    """'name>=1.2' lines as a dictionary name → constraint."""
    return dict(re.match(r"([\w.-]+)(.*)", line.replace(" ", "")).groups() for line in lines)


def pinned():
    return [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def test_environment_yml_names_the_packages_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ours = [
        r
        for extra in ("measure", "forecast", "notebooks", "test")
        for r in extras[extra]
        if "decodebench[" not in r
    ]
    wanted = requirements(ours) | requirements(pinned())
    wanted["python"] = project["requires-python"]
    lines = re.findall(r"^\s+- ([\w.-]+[=<>].*)$", (ROOT / "environment.yml").read_text(), re.M)
    assert requirements(lines) == wanted


def module_of(path):
    """decodebench/layout/plan.py → ("layout", "plan")"""
    return path.relative_to(PACKAGE).with_suffix("").parts


def imports_of(path):
    """(line, module's parts, whether inside a function) of every import of this package, wherever it stands."""
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, functions) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "").split(".")[0] == "decodebench"
        ):
            parts = tuple((node.module or "").split(".")[1:])
            for alias in node.names:
                deeper = (*parts, alias.name)
                known = (
                    PACKAGE.joinpath(*deeper).with_suffix(".py").exists()
                    or PACKAGE.joinpath(*deeper).is_dir()
                )
                yield node.lineno, deeper if known else parts, id(node) in inside
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "decodebench":
                    yield node.lineno, tuple(alias.name.split(".")[1:]), id(node) in inside


def test_the_top_holds_nine_rooms_and_four_files():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    files = {p.stem for p in PACKAGE.glob("*.py")}
    assert folders <= ROOMS.keys(), f"{folders - ROOMS.keys()} is not a room of the house"
    assert files <= GROUND | DOORS, f"{files - GROUND - DOORS}: files live in rooms"


@pytest.mark.parametrize("path", FILES, ids=lambda p: "/".join(p.relative_to(PACKAGE).parts))
def test_a_room_imports_only_rooms_below_it(path):
    here = module_of(path)
    for line, there, inside in imports_of(path):
        where = f"decodebench/{'/'.join(here)}.py:{line} imports {'.'.join(there) or 'the public names'}"
        if here[-1] in DOORS:
            continue
        assert not inside, f"{where} inside a function: that hides an arrow"
        assert there, f"{where}: inside the package, name the file"
        if here[0] in GROUND:
            assert there[0] in GROUND, where
        else:
            assert there[0] == here[0] or there[0] in ROOMS[here[0]] | GROUND, where


def test_no_file_imports_itself_round_about():
    arrows = {
        module_of(path): {
            t for _, t, _ in imports_of(path) if t and PACKAGE.joinpath(*t).with_suffix(".py").exists()
        }
        for path in FILES
        if path.stem not in DOORS
    }
    done: set = set()

    def visit(module, way):
        assert module not in way, " → ".join(".".join(m) for m in (*way[way.index(module) :], module))
        if module not in done:
            for there in sorted(arrows.get(module, ())):
                visit(there, (*way, module))
            done.add(module)

    for module in arrows:
        visit(module, ())


@pytest.mark.parametrize("room", ROOMS)
def test_a_rooms_door_is_a_docstring(room):
    door = PACKAGE / room / "__init__.py"
    body = ast.parse(door.read_text()).body
    assert ast.get_docstring(ast.parse(door.read_text())), f"{room} says what its job is"
    assert len(body) == 1 or room == "vllm", (
        f"{door} holds code: public names live in decodebench/__init__.py"
    )


def test_no_room_bears_the_name_of_a_public_function():
    import decodebench

    assert not ROOMS.keys() & set(decodebench.__all__)


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
        and name != "tests/test_house.py"
        and (ROOT / name).is_file()
        and pattern.search((ROOT / name).read_text(errors="replace"))
    ]
    assert not found
