"""The stored result behind "The real engine": our connector beside the built-in one on four tiny models.

    python -m decodebench.vllm.real_engine --out data/results/real-engine.json

A few minutes on two cores. Reading it back (``read``) needs no vLLM.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodebench.measure.provenance import provenance
from decodebench.shipped import shipped
from decodebench.vllm.audit_files import audit
from decodebench.vllm.launch import TINY, engine, generate, kernel_blocks, prepare_process, prompts
from decodebench.vllm.measure import measure_decode

if TYPE_CHECKING:
    import pandas

STORED = shipped("data/results/real-engine.json")

#: tokens of the prompts sent at once, in blocks of 128: several blocks; one and eight blocks and a token,
#: whose step opens a block; one block and two tokens
LENGTHS = (1000, 700, 129, 130, 1025)

#: connector → its name in tables, and the options it is audited with
CONNECTORS: dict[str, tuple[str, dict]] = {
    "GroupedDecodeBenchConnector": ("grouped (ours)", {"audit": "bytes", "std": 0.02}),
    "AuditedBuiltinConnector": ("built-in", {}),
}
#: setting → (kernel block size, further engine arguments, models)
SETTINGS: dict[str, tuple[int | None, dict, Sequence[str]]] = {
    "bf16, prefix caching": (None, {}, TINY),
    "fp8, no prefix caching": (None, {"kv_cache_dtype": "fp8", "enable_prefix_caching": False}, TINY),
    "bf16, kernel blocks of 32": (32, {}, ("tiny-gemma3", "tiny-llama")),
}
LATENCY: dict[str, Any] = {"contexts": (500, 2000), "batch": 4, "steps": 24}


@dataclass(frozen=True)
class Study:
    """``coverage``: one row a model, setting, connector and group. ``latency``: one row an engine step."""

    coverage: pandas.DataFrame
    latency: pandas.DataFrame
    provenance: dict


def read_study(path: str | Path = STORED) -> Study:
    """A stored study (the repository's by default)."""
    import pandas

    stored = json.loads(Path(path).read_text())
    steps = pandas.DataFrame(stored["latency"])
    return Study(pandas.DataFrame(stored["coverage"]), steps, stored["provenance"])


def coverage(
    lengths: Sequence[int] = LENGTHS,
    settings: Mapping[str, tuple[int | None, dict, Sequence[str]]] = SETTINGS,
) -> list[dict]:
    """Audits of both connectors: one record a model, setting, connector and group."""
    records = []
    for setting, (tokens, arguments, models) in settings.items():
        for model in models:
            for connector, (shown, options) in CONNECTORS.items():
                began = time.perf_counter()
                smaller = kernel_blocks(tokens) if tokens else nullcontext()
                with smaller, engine(model, connector, options, **arguments) as llm:
                    generate(llm, prompts(lengths), 3)
                    found = audit(llm)
                seconds = round(time.perf_counter() - began, 2)
                print(f"{model}, {setting}, {shown}: {found.verdict} [{seconds} s]", flush=True)
                shared = {"model": model, "setting": setting, "connector": shown, "engine_seconds": seconds}
                records += [shared | row for row in found.groups.to_dict("records")]
    return records


def latency(models: Iterable[str] = TINY) -> list[dict]:
    """Engine step times, one record a step; real prefill and the built-in connector beside ours."""
    records = []
    for model in models:
        frame = measure_decode(model, **LATENCY)
        records += [{"model": model, **row} for row in frame.to_dict("records")]
        print(f"{model}: {len(frame)} steps timed", flush=True)
    return records


def main(arguments: list[str] | None = None) -> None:
    """Measure, and write the result where ``--out`` says (by default over the stored one)."""
    parser = argparse.ArgumentParser(
        "python -m decodebench.vllm.real_engine", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=STORED)
    parser.add_argument(
        "--coverage-only", action="store_true", help="keep the stored step times, which want a quiet machine"
    )
    asked = parser.parse_args(arguments)
    out = asked.out
    prepare_process()
    import torch
    import vllm

    # tiny models gain nothing from more threads, and step times suffer from whoever else has the cores
    torch.set_num_threads(1)

    settings = {
        "vllm": vllm.__version__,
        "lengths": LENGTHS,
        "latency": LATENCY,
        "threads": 1,
        "fill": "normal, mean 0.015, std 0.02 (ours); 0.015 (built-in)",
        "note": "tiny models with dummy weights on a CPU: step times say nothing about a GPU's",
    }
    if asked.coverage_only:
        kept = json.loads(STORED.read_text())
        stored = kept["provenance"]
        # step times are those of the run that measured them last
        settings["latency_of"] = stored["settings"].get("latency_of") or {
            name: stored[name] for name in ("commit", "date") if name in stored
        }
        settings["latency"] = stored["settings"]["latency"]
    result: dict[str, Any] = {"provenance": provenance(settings, seed=0), "coverage": coverage()}
    result["latency"] = kept["latency"] if asked.coverage_only else latency()
    for row in result["latency"]:
        row["seconds"] = round(row["seconds"], 7)
    out.parent.mkdir(parents=True, exist_ok=True)
    # one line a record, so that a new result reads as a difference
    tables = [
        f'"{name}": [\n' + ",\n".join(map(json.dumps, result[name])) + "\n]"
        for name in ("coverage", "latency")
    ]
    out.write_text(",\n".join([f'{{"provenance": {json.dumps(result["provenance"])}', *tables]) + "}\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
