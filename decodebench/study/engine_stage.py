"""What a case measures in the engine that a user has: decode steps of the whole model, beside their floor.

Every engine lives in a process of its own, the leader of a group. Whatever becomes of it, the group is killed
before the next case begins, and a group whose sweep was killed ends itself: no process and no memory of a card
is left behind.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from decodebench.shipped import PACKAGE
from decodebench.study.grid import Case, SweepError

#: the module that runs one case; vLLM is imported there alone
RUN_CASE = "decodebench.vllm.run_case"

#: what a line of an engine's log looks like that says why it died
ERROR = re.compile(r"\b((?:\w+\.)*\w*(?:Error|Exception|Refused)): (.+)")


class EngineDied(RuntimeError):
    """An engine that ended without an answer: says how, and the last error in its log."""


def engine_stage(case: Case, made: dict) -> dict:
    """Columns of the case, measured by an engine of its own. Raises ``SweepError`` for what it refuses.

    ``EngineDied`` where the engine was killed, crashed, or took longer than the case's ``time_limit``.
    """
    with tempfile.TemporaryDirectory(prefix="decodebench-engine-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "engine.log")
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", RUN_CASE, str(result)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *_path()])},
                start_new_session=True,
            )
            try:
                assert child.stdin is not None
                try:
                    child.stdin.write((json.dumps(asdict(case)) + "\n").encode())
                    child.stdin.flush()
                except BrokenPipeError:
                    pass  # it died at once: its log says why
                try:
                    code = child.wait(case.time_limit)
                except subprocess.TimeoutExpired:
                    raise EngineDied(f"no answer within time_limit = {case.time_limit:g} s: killed") from None
            finally:
                _kill_group(child)
        if not result.exists():
            raise EngineDied(_how(code, log.read_text(errors="replace")))
        columns = json.loads(result.read_text())
    reason = columns.get("reason")
    if columns.pop("status", "ok") == "refused":
        raise SweepError(reason)
    if reason is not None:
        raise EngineDied(reason)
    return columns


def _path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def _kill_group(child: subprocess.Popen) -> None:
    """Kill the engine and whatever it started, and wait for it."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()
    if child.stdin is not None:
        try:
            child.stdin.close()
        except BrokenPipeError:
            pass


def _how(code: int, log: str) -> str:
    """How an engine ended, with the last error of its log that is not only a pointer to another one."""
    ended = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    ended += " (out of memory?)" if code == -signal.SIGKILL else ""
    found = [m for m in ERROR.finditer(log) if "root cause" not in m[2]]
    return f"the engine {ended}" + (f": {found[-1][1]}: {found[-1][2]}" if found else "")
