"""Building this package's C++: once, in private, and with a reason where it cannot be."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from decodebench.cache import compiled, compiled_rows
from decodebench.cache.readback import FILLED, inspect_pages
from decodebench.cache.tensors import allocate
from decodebench.cache.values import Constant
from decodebench.cache.write import fill_blocks
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.plan import from_groups
from decodebench.models.specs import FullAttentionSpec

pytestmark = pytest.mark.skipif(compiled_rows.why_not() is not None, reason="no C++ compiler")
SMALL = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A tiny source, and a cache and a temporary directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    path = tmp_path / "source" / "small.cpp"
    path.parent.mkdir()
    path.write_text(SMALL)
    compiled._library.cache_clear()
    yield path
    compiled._library.cache_clear()


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_library_is_built_once_in_a_private_folder(source, tmp_path):
    assert compiled.library(source).answer() == 42
    (built,) = (tmp_path / "cache" / "decodebench").glob("small-*.so")
    assert mode(built.parent) == 0o700
    first = built.stat().st_mtime_ns
    compiled._library.cache_clear()
    assert compiled.library(source).answer() == 42 and built.stat().st_mtime_ns == first


def test_a_folder_that_others_could_write_to_is_closed_first(source, tmp_path):
    folder = tmp_path / "cache" / "decodebench"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    compiled.library(source)
    assert mode(folder) == 0o700


def test_a_link_in_place_of_the_folder_is_not_followed(source, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "decodebench").symlink_to(elsewhere)
    assert compiled.library(source).answer() == 42
    assert not list(elsewhere.iterdir())


def test_a_home_that_cannot_be_written_to_gives_way_to_the_temporary_directory(source, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert compiled.library(source).answer() == 42
    assert list((tmp_path / "temporary").glob("decodebench-*/small-*.so"))


def test_nowhere_to_build_is_said_with_the_remedy(source, tmp_path):
    (tmp_path / "cache").write_text("")
    (tmp_path / "temporary").write_text("")
    assert "XDG_CACHE_HOME" in compiled.why_not(source)


def test_a_source_that_does_not_build_is_named_and_tried_once(source, monkeypatch):
    source.write_text("this is no C++")
    assert "cannot build small.cpp" in compiled.why_not(source)
    monkeypatch.setattr(compiled, "_build", lambda *_: pytest.fail("tried again"))
    with pytest.raises(compiled.CompilerMissing, match="cannot build small.cpp"):
        compiled.library(source)


def test_a_compiler_that_does_not_run_is_named(source, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert "'/no/such/compiler' does not run" in compiled.why_not(source)


def test_processes_that_start_together_build_once(source, tmp_path):
    """Each logs its build; the others wait for the lock and find the library."""
    code = (
        "import sys; from pathlib import Path; from decodebench.cache import compiled\n"
        "build = compiled._build\n"
        "def logged(*arguments):\n"
        "    print('built', flush=True)\n"
        "    return build(*arguments)\n"
        "compiled._build = logged\n"
        f"assert compiled.library(Path({str(source)!r})).answer() == 42\n"
    )
    root = Path(compiled.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in started]
    assert all(process.returncode == 0 for process in started)
    assert b"".join(said).count(b"built") == 1


def test_a_fill_and_an_audit_without_a_compiler(monkeypatch):
    monkeypatch.setattr(compiled_rows, "why_not", lambda: "no C++ compiler")
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype="bfloat16")
    cache = allocate(from_groups((KVCacheGroupSpec(("a", "b"), (spec, spec), spec),), 4))
    fill_blocks(cache, [[1, 3]], Constant())
    states = inspect_pages(cache, 0, Constant()).states
    assert (states[:, [1, 3]] == FILLED).all() and (states[:, [0, 2]] != FILLED).all()
