"""The stored result behind "The real engine": our connector beside the built-in one on four tiny models.

    python -m decodebench.vllm.real_engine --out data/results/real-engine

A few minutes on two cores. Its rows are a result folder's: ``db.sweep.read`` and
``compare`` take them, and reading them back (``read_study``) needs no vLLM.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodebench.measure.journal import columns_of, read_folder, store, to_frame
from decodebench.measure.provenance import provenance
from decodebench.shipped import shipped
from decodebench.vllm.audit_files import audit
from decodebench.vllm.launch import TINY, engine, generate, kernel_blocks, prepare_process, prompts
from decodebench.vllm.measure import measure_decode

if TYPE_CHECKING:
    import pandas

STORED = shipped("data/results/real-engine")

#: columns that say what a row is about; the others say what was found
AXES = ("what", "model", "setting", "connector", "group", "kind", "admission", "context", "batch")

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
    """``coverage``: one row a model, setting, connector and group; ``latency``: one a model, context and admission.

    ``provenance``: the runs that made the rows, the newest last.
    """

    coverage: pandas.DataFrame
    latency: pandas.DataFrame
    provenance: list[dict]


def read_study(folder: str | Path = STORED) -> Study:
    """A stored study (the repository's by default). Raises ``JournalError`` where the folder holds none."""
    rows, runs = read_folder(folder)
    frame = to_frame(rows.values(), columns_of(runs) or {})
    tables = []
    for what in ("coverage", "step"):
        part = frame[frame["what"] == what].reset_index(drop=True)
        tables.append(part.dropna(axis="columns", how="all").drop(columns=["case_id", "what", "run"]))
    return Study(tables[0], tables[1], [runs[number] for number in sorted(set(frame["run"]))])


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
    """Engine step times, one record a model, context and admission; real prefill and the built-in beside ours."""
    records = []
    for model in models:
        frame = measure_decode(model, **LATENCY)
        records += [{"model": model, **row} for row in step_rows(frame)]
        print(f"{model}: {len(frame)} steps timed", flush=True)
    return records


def step_rows(frame: pandas.DataFrame) -> list[dict]:
    """``measure_decode``'s steps as rows: seconds of admitting, median and quartiles of the resident steps."""
    rows = []
    for keys, part in frame.groupby(["admission", "context", "batch"], sort=False):
        decode = part.loc[part["phase"] == "decode", "seconds"]
        rows.append(
            dict(zip(("admission", "context", "batch"), keys))
            | {"admit_s": part.loc[part["phase"] == "admit", "seconds"].sum()}
            | {"median_s": decode.median(), "q1_s": decode.quantile(0.25), "q3_s": decode.quantile(0.75)}
            | {"steps": len(decode)}
        )
    return rows


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
    prepare_process()
    import torch
    import vllm

    # tiny models gain nothing from more threads, and step times suffer from whoever else has the cores
    torch.set_num_threads(1)

    settings = {
        "vllm": vllm.__version__,
        "lengths": LENGTHS,
        "threads": 1,
        "fill": "normal, mean 0.015, std 0.02 (ours); 0.015 (built-in)",
        "note": "tiny models with dummy weights on a CPU: step times say nothing about a GPU's",
    }
    rows = [{"what": "coverage", **row} for row in coverage()]
    if not asked.coverage_only:
        settings["latency"] = LATENCY
        rows += [{"what": "step", **row} for row in latency()]
    store(asked.out, rows, AXES, provenance(settings, seed=0))
    print(f"written: {asked.out}")


if __name__ == "__main__":
    main()
