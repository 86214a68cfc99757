"""Stands in for ``decodebench.vllm.run_case`` where there is no vLLM: answers, refuses, dies or hangs as told.

What it does stands in the case's ``engine`` arguments: {"do": "answer" | "refuse" | "fail" | "exit" | "hang" |
"kill" | "orphan"}; process ids of whatever it leaves behind go to the file ``pids``. Its times are those of
sleeping, and made for tests of what is around an engine.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(result: str) -> None:
    case = json.loads(sys.stdin.readline())
    asked = json.loads(case["engine"] or "{}")
    do = asked.get("do", "answer")
    if "pids" in asked:
        # a worker that the engine started, and that would outlive it
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(asked["pids"], "a") as file:
            file.write(f"{os.getpid()}\n{worker.pid}\n")
    if do == "hang":
        time.sleep(600)
    if do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "exit":
        print("RuntimeError: Engine core initialization failed. See root cause above.")
        print("(Worker) torch.OutOfMemoryError: 8 GiB are not there\nRuntimeError: See root cause above.")
        os._exit(3)
    began = time.perf_counter()
    time.sleep(0.001 * case["batch"])
    seconds = time.perf_counter() - began
    columns = {
        "refuse": {"status": "refused", "reason": "no option x"},
        "fail": {"status": "failed", "reason": "OSError: no room"},
    }.get(do) or {
        **{
            "median_s": seconds,
            "q1_s": seconds,
            "q3_s": seconds,
            "steps": 1,
            "longest_context": int(case["context"]),
        },
        **{"coverage": 1.0, "worst_group_coverage": 1.0, "required_pages": 4, "verdict": "covered"},
        **{
            "stray_pages": 0,
            "clobbered_pages": 0,
            "plan_equal": True,
            "groups": 1,
            "group_kinds": "full_attention",
        },
        **{
            "floor_s": seconds / 2,
            "floor_share": 0.5,
            "floor_verdict": "possible",
            "floor_machine": "a test",
        },
        **{"tokens_per_second": case["batch"] / seconds, "admit_s": seconds, "engine_used": "a stand-in"},
    }
    Path(result).write_text(json.dumps(columns))


if __name__ == "__main__":
    main(sys.argv[1])
