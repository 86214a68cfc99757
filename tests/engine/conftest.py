"""These tests run vLLM's own code; without vLLM they are skipped (``make test-vllm`` has it)."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

FOUND = find_spec("vllm")
# a folder called vllm on the path (this one's parent) is no vLLM
HAS_VLLM = FOUND is not None and FOUND.origin is not None and Path(FOUND.origin).name == "__init__.py"

if HAS_VLLM:
    # tiny models gain nothing from a second thread, and lose much where another process has the core
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from decodebench.vllm.launch import prepare_process

    prepare_process()


def pytest_collection_modifyitems(items):
    if HAS_VLLM:
        # last, because it loads numba: in a process that has, vLLM 0.32's CPU worker cannot start (it looks for
        # its kernels in every loaded module with `vars`, and llvmlite's library answers that with no dict)
        items.sort(key=lambda item: item.path.name == "test_simulate.py")
        return
    skip = pytest.mark.skip(reason="vLLM is not installed here: run `make test-vllm`, which sets it up")
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.name not in (
            "test_options.py",
            "test_audit_files.py",
        ):
            item.add_marker(skip)
