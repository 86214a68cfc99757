"""The wheel, installed where no checkout is: everything the package reads travels in it."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("decodebench-*.whl")
    return found


def environment(folder, wheel):
    """An empty environment with the wheel and nothing else; its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    target = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return python, Path(target)


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """Python with the wheel and no other package at all."""
    return environment(tmp_path_factory.mktemp("bare") / "env", wheel)[0]


@pytest.fixture(scope="module")
def full(wheel, tmp_path_factory):
    """Python with the wheel, and behind it the packages of the extras from this environment."""
    python, packages = environment(tmp_path_factory.mktemp("full") / "env", wheel)
    (packages / "extras.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(python, folder, *arguments):
    folder.mkdir(exist_ok=True)
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "OMP_WAIT_POLICY": "passive",
        "JUPYTER_PATH": str(Path(sys.prefix) / "share" / "jupyter"),  # the notebooks extra's own data files
    }
    return subprocess.run([python, *arguments], cwd=folder, capture_output=True, text=True, env=plain)


def test_a_plan_needs_nothing_but_python(bare, tmp_path):
    done = run(
        bare.with_name("python"), tmp_path, "-m", "decodebench", "plan", "jamba-v0.1", "--memory", "8GiB"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("jamba-v0.1: 6,553 blocks of 1,310,720 bytes in 8.00 GiB")
    listed = run(bare, tmp_path, "-c", "import decodebench as db; print(*db.list_models(), db.__file__)")
    assert "gemma-3-1b" in listed.stdout and str(ROOT) not in listed.stdout


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("report",), "notebooks"),
        (("bench", "fill"), "measure"),
        (("bench", "decode"), "measure"),
        (("sweep", "grid.toml", "--out", "rows"), "measure"),
    ],
    ids=" ".join,
)
def test_a_command_whose_extra_is_missing_names_it_in_one_line(bare, tmp_path, arguments, extra):
    (tmp_path / "grid.toml").write_text('model = "tiny-llama"\nmeasure = "audit"\n')
    done = run(bare, tmp_path, "-m", "decodebench", *arguments)
    assert done.returncode == 2
    assert re.fullmatch(rf"decodebench: .* pip install 'decodebench\[{extra}\]'\n", done.stderr), done.stderr


@pytest.mark.parametrize("name", ["fill_cache", "audit", "measure_decode", "allocate"])
def test_a_public_name_whose_extra_is_missing_names_it(bare, tmp_path, name):
    done = run(bare, tmp_path, "-c", f"import decodebench as db; db.{name}")
    assert done.stderr.splitlines()[-1].endswith("pip install 'decodebench[measure]'")


def test_the_ten_lines_of_the_readme_run(full, tmp_path):
    lines = re.search(
        r"```python\n(import decodebench as db\n.*?)```", (ROOT / "README.md").read_text(), re.S
    )[1]
    done = run(full, tmp_path, "-c", lines.replace("requests=4, context=4096", "requests=2, context=256"))
    assert done.returncode == 0, done.stderr
    assert "100 % of" in done.stdout and str(ROOT) not in done.stderr


def test_a_sweep_and_a_report_run_outside_any_checkout(full, tmp_path):
    (tmp_path / "grid.toml").write_text('model = ["tiny-llama", "jamba-v0.1"]\nmeasure = "coverage"\n')
    done = run(full, tmp_path, "-m", "decodebench", "sweep", "grid.toml", "--out", "rows")
    assert done.returncode == 0 and "2 cases of this grid (2 ok)" in done.stdout, done.stderr
    report = ("report", "--model", "tiny-nemotron-h", "--profile", "test", "--out", "r")
    done = run(full, tmp_path, "-m", "decodebench", *report)
    assert done.returncode == 0, done.stderr + done.stdout
    assert (tmp_path / "r" / "index.html").exists() and list((tmp_path / "r").glob("09-*.html"))
