"""C++ sources of this package, built once by the system's compiler and called through ctypes.

A built library lies in a folder that only this user can write to (mode 0700), under a name made of the
hash of source, flags, compiler and processor: another processor or another compiler builds its own.
Processes that need the same library wait for the first one's build. Where nothing can be built,
``CompilerMissing`` says why, once and for the whole process; callers fall back to torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache as memoize
from pathlib import Path
from types import ModuleType

import torch

from decodebench.errors import DecodebenchError

try:
    import fcntl as _fcntl

    fcntl: ModuleType | None = _fcntl
except ImportError:  # no file locks on this system: two builds at once are then harmless, only slower
    fcntl = None

FLAGS = (
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-std=c++17",
    "-fPIC",
    "-shared",
)


class CompilerMissing(DecodebenchError):
    """No C++ compiler, or one that cannot build this package's C++."""


def library(source: Path) -> ctypes.CDLL:
    """The library built from a source file. Raises ``CompilerMissing`` with the reason and the remedy."""
    found = _library(source)
    if isinstance(found, str):
        raise CompilerMissing(found)
    return found


def why_not(source: Path) -> str | None:
    """Why the source cannot be built and loaded here, or None where it can."""
    found = _library(source)
    return found if isinstance(found, str) else None


@memoize
def _library(source: Path) -> ctypes.CDLL | str:
    """The loaded library, or why there is none; a failed build is not tried twice in a process."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "no C++ compiler on PATH: install g++, or use backend='torch'"
    try:
        version = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True).stdout
        text = "\0".join(path.read_text() for path in [source, *sorted(source.parent.glob("*.h"))])
    except OSError as error:
        return f"the C++ compiler {compiler!r} does not run ({error.strerror}): unset CXX or install g++"
    identity = "\0".join([text, *FLAGS, compiler, version, _processor(), torch.__version__])
    name = f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    for folder in cache_folders():
        try:
            _make_private(folder)
            with _locked(folder / f"{source.stem}.lock"):
                path = folder / name
                if not path.exists():
                    partial = folder / f".{name}.{os.getpid()}"
                    reason = _build(compiler, source, partial)
                    if reason is not None:
                        return reason
                    partial.replace(path)
        except OSError:
            continue
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # a folder whose files must not be executed
            continue
    return "no folder that is private to this user, writable and executable: set XDG_CACHE_HOME to one"


def cache_folders() -> list[Path]:
    """Where built libraries may lie: the user's cache directory, else one in the temporary directory."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return [Path(home) / "decodebench", Path(tempfile.gettempdir()) / f"decodebench-{user}"]


def _make_private(folder: Path) -> None:
    """Make the folder, or see that it is ours alone: what lies in it is loaded into this process."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or (hasattr(os, "getuid") and facts.st_uid != os.getuid()):
        raise PermissionError(f"{folder} belongs to another user")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        folder.chmod(0o700)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written to")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, where the file system has locks."""
    with path.open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                pass
        yield


def _build(compiler: str, source: Path, target: Path) -> str | None:
    """Build, and return None; or the reason why not, after trying without what a compiler may not have."""
    reason = ""
    for optional in (("-march=native", "-fopenmp"), ("-fopenmp",), ()):
        command = [*compiler.split(), *FLAGS, *optional, "-o", str(target), str(source)]
        # torch's own OpenMP runtime, so that both share one thread pool and torch.set_num_threads holds
        libraries = Path(torch.__file__).parent / "lib"
        if (libraries / "libgomp.so.1").exists():
            command.append(f"-L{libraries}")
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            return None
        first = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr[:200])
        reason = reason or first.strip()
    target.unlink(missing_ok=True)
    return f"{Path(compiler).name} cannot build {source.name} ({reason}): use backend='torch'"


def has(flag: str) -> bool:
    """Whether the kernel says that the processor has a feature (``avx2``, ``avx512_bf16``, ``amx_bf16``)."""
    return flag in _processor().split()


@memoize
def _processor() -> str:
    """What this processor can do, as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""
