"""One case of a sweep in an engine that lives and dies with this process.

    python -m decodebench.vllm.run_case RESULT < CASE

The case comes as JSON on standard input, its columns go as JSON to the file RESULT. Standard input stays open
for as long as somebody waits: where it ends, this process and all that the engine started are killed, so that
no engine outlives the sweep that asked for it.
"""

from __future__ import annotations

import difflib
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import decodebench.vllm as dbv  # its names are imported when they are used: vLLM reads settings while it is
from decodebench.errors import DecodebenchError
from decodebench.forecast.bound import Bound, bound
from decodebench.forecast.judge import judge
from decodebench.forecast.machines import card_machine
from decodebench.forecast.results import Measured
from decodebench.layout.plan import parse_memory
from decodebench.layout.pool import parse_lengths
from decodebench.measure.provenance import machine
from decodebench.models.fields import read_config
from decodebench.models.load import DATA
from decodebench.vllm.audit_files import audit_steps, read_audit
from decodebench.vllm.client import bench_serve, model_at, serve_columns
from decodebench.vllm.launch import FORWARD, engine, kernel_blocks, prepare_process
from decodebench.vllm.measure import ADMISSIONS, run_batch

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig

#: axes that are engine arguments of the same name, with the value that leaves the choice to the engine
PASSED_ON: dict[str, object] = {
    "block_size": None,
    "kv_cache_dtype": "auto",
    "mamba_ssm_cache_dtype": "auto",
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "load_format": "",
}


#: the machine of a case that names none
DEFAULT_MACHINE = "h100"


class CaseRefused(DecodebenchError):
    """A case that this engine cannot run as asked: says which setting."""


def run_case(case: Mapping[str, Any]) -> dict:
    """The columns of one case: an engine started, its requests admitted, its resident steps timed.

    ``case``: the fields of a sweep's ``Case``. Raises ``CaseRefused`` and what vLLM raises.
    """
    lengths = parse_lengths(case["context"])
    lengths = lengths if len(lengths) == case["batch"] else lengths * case["batch"]
    steps = case["decode_steps"]
    if case["server"]:
        return on_server(case, lengths)
    model = model_of(case)
    connector, options = connector_of(case)
    arguments = arguments_of(case, max(lengths) + steps + 2)
    smaller = kernel_blocks(case["kernel_block"]) if case["kernel_block"] else nullcontext()
    with tempfile.TemporaryDirectory() as folder:
        if connector:
            options["audit_file"] = str(Path(folder, "audit.jsonl"))
        with smaller, engine(model, connector, options, **arguments) as llm:
            config = llm.llm_engine.vllm_config
            if case["kernel_block"] and not on_cpu():
                raise CaseRefused(
                    "kernel_block: only CPU attention can be told its kernel block; leave it out"
                )
            facts = layout_columns(case, llm, model)
            # one token a prompt: nothing is filled or audited, and every kernel has run once
            run_batch(llm, [1] * len(lengths), 3)
            llm.reset_prefix_cache()
            timed = run_batch(llm, list(lengths), steps)
        audited = coverage_columns(Path(folder, "audit.jsonl")) if connector else {"verdict": COMPUTED}
    resident = [seconds for phase, seconds in timed if phase == "decode"]
    if not resident:
        raise CaseRefused(f"decode_steps {steps}: no step had every request decoding; ask for more steps")
    admitting = [seconds for phase, seconds in timed if phase == "admit"]
    return (
        facts
        | audited
        | step_columns(resident)
        | {"admit_s": sum(admitting), "admit_steps": len(admitting)}
        | {"tokens_per_second": len(lengths) / statistics.median(resident)}
        | floor_columns(case, effective(model, config), lengths, resident, whose_floor(case, on_cpu()))
        | {"engine_used": engine_text(config), "node": node(on_cpu())}
        | ({"notes": BYTES_NOTE} if audits_bytes(case) else {})
    )


def on_server(case: Mapping[str, Any], lengths: Sequence[int]) -> dict:
    """The columns of one wave of requests against a running server; its cache is the server's own business."""
    if len(set(lengths)) > 1:
        raise CaseRefused("server with a mix of lengths: vllm bench serve's random prompts are of one length")
    found = bench_serve(case["server"], lengths[0], len(lengths), case["decode_steps"] + 1, case["seed"])
    columns = serve_columns(found, len(lengths))
    served = model_at(case["server"])
    floor = floor_columns(case, config_of(case), lengths, [columns["median_s"]], case["machine"])
    return (
        columns
        | floor
        | {"longest_context": lengths[0], "engine_used": f"served as {served['id']}", "verdict": SERVED}
    )


SERVED = "Not judged from here: a server started with the connector's audit_file judges itself (read_audit)."
COMPUTED = "Every prompt was computed (real prefill): nothing was filled, and there is nothing to audit."
BYTES_NOTE = "admission holds the audit's poisoning and reading back; measured without it, it is shorter"


def model_of(case: Mapping[str, Any]) -> str | dict:
    """What the engine is given: a known model's fields, a config.json's, or the path or name as it is.

    Fields that a forward pass needs and a known model's config leaves out are those of ``launch.FORWARD``.
    """
    name = case["model"]
    overrides = json.loads(case["hf_overrides"] or "{}")
    known = DATA / name / "config.json"
    if known.is_file() or name.endswith(".json"):
        fields = read_config(name, DATA)[0]
        return FORWARD | {k: v for k, v in fields.items() if not k.startswith("_")} | overrides
    if overrides:
        raise CaseRefused(f"hf_overrides with the folder {name}: give them as engine = {{hf_overrides = …}}")
    return name


def config_of(case: Mapping[str, Any]) -> dict:
    """The fields of the model behind a server, whose weights and tokenizer are the server's business."""
    model = model_of(case)
    return model if isinstance(model, dict) else read_config(model, DATA)[0]


def connector_of(case: Mapping[str, Any]) -> tuple[str | None, dict]:
    """The connector that admits, under audit, and its options."""
    connector = ADMISSIONS[case["admission"]]
    if connector == "DecodeBenchConnector":
        return "AuditedBuiltinConnector", {}
    return connector, {"audit": case["engine_audit"], "std": 0.02, "seed": case["seed"]}


def audits_bytes(case: Mapping[str, Any]) -> bool:
    """Whether the case's engine is audited by bytes: vLLM's own fill always is, ours where asked."""
    return case["admission"] == "built-in fill" or (
        case["admission"] == "grouped fill" and case["engine_audit"] == "bytes"
    )


def arguments_of(case: Mapping[str, Any], longest: int) -> dict:
    """The engine's arguments: those that axes give, then the case's own table over them."""
    from vllm.engine.arg_utils import EngineArgs

    given = json.loads(case["engine"] or "{}")
    known = [field.name for field in fields(EngineArgs)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise CaseRefused(f"engine: vLLM has no argument {name!r}{hint}")
    length = case["max_model_len"]
    found: dict[str, Any] = {
        "max_model_len": length if isinstance(length, int) else longest,
        "max_num_seqs": case["batch"],
        "kv_cache_memory_bytes": parse_memory(case["memory"]),
        "enable_prefix_caching": case["enable_prefix_caching"],
        "seed": case["seed"],
        "disable_log_stats": True,
    }
    found |= {name: case[name] for name, plain in PASSED_ON.items() if case[name] not in (plain, None)}
    if not Path(case["model"]).is_dir() and "skip_tokenizer_init" not in given:
        found["skip_tokenizer_init"] = True
    return found | given


def on_cpu() -> bool:
    """Whether the engine of this process runs on a CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def engine_text(config: VllmConfig) -> str:
    """The engine in words: release, dtype, eager or compiled."""
    import vllm

    kind = "eager" if config.model_config.enforce_eager else "compiled"
    return f"vllm {vllm.__version__}, {str(config.model_config.dtype).removeprefix('torch.')}, {kind}"


def whose_floor(case: Mapping[str, Any], cpu: bool) -> str:
    """The machine of the floor: this one on a CPU; else the one asked for, or by default the card that runs."""
    if cpu:
        return "this"
    if case["machine"] != DEFAULT_MACHINE:
        return case["machine"]
    return card_machine(str(machine("cuda")["device"])) or case["machine"]


def node(cpu: bool) -> str:
    """The machine, or the card, that the engine ran on."""
    facts = machine("cpu" if cpu else "cuda")
    return f"{facts['device']}, {facts['cores']} cores"


def effective(model: str | dict, config: VllmConfig) -> dict:
    """The model's fields as the engine runs them."""
    fields = dict(model) if isinstance(model, dict) else config.model_config.hf_config.to_dict()
    return fields | {"torch_dtype": str(config.model_config.dtype).removeprefix("torch.")}


# -- columns ---------------------------------------------------------------------------------------


def layout_columns(case: Mapping[str, Any], llm: LLM, model: str | dict) -> dict:
    """The engine's own layout, and whether ``plan`` says the same of this model and memory."""
    theirs = dbv.layout_of_engine(llm)
    config = llm.llm_engine.vllm_config
    sizes = [theirs.tokens_per_block(g) for g in range(len(theirs.groups))]
    columns = {
        "groups": len(theirs.groups),
        "layers": len(theirs.layer_names),
        "group_block_sizes": ",".join(map(str, sizes)),
        "group_kinds": ",".join(group.kind for group in theirs.groups),
        "block_in_use": max(sizes),
        "bytes_per_block": theirs.bytes_per_block(),
        "num_blocks": sum(theirs.pool_num_blocks),
        "longest_context": max(parse_lengths(case["context"])),
    }
    try:
        ours = dbv.plan_of_engine(llm, effective(model, config), memory=theirs.size)
    except DecodebenchError as error:
        return columns | {"plan_equal": False, "plan_difference": str(error)}
    difference = dbv.first_difference(ours, theirs)
    return columns | {"plan_equal": difference is None, "plan_difference": difference}


def coverage_columns(path: Path) -> dict:
    """What the audit of the filling steps found, and what the fill cost."""
    found, steps = read_audit(path), audit_steps(path)
    groups = found.groups
    return {
        "required_pages": found.required,
        "coverage": found.coverage,
        "worst_group_coverage": float(groups["coverage"].min()),
        "stray_pages": int(groups["stray"].sum()),
        "clobbered_pages": int(groups["clobbered"].sum()),
        "verdict": found.verdict,
        "fill_seconds": _sum(steps["fill_seconds"]),
        "fill_bytes": _sum(steps["fill_bytes"]),
    }


def _sum(column):
    known = column.dropna()
    return known.sum().item() if len(known) else None


def step_columns(resident: Sequence[float]) -> dict:
    """Median, quartiles and tenths of the resident steps, in seconds."""
    ordered = sorted(resident)
    tenths = statistics.quantiles(ordered, n=20, method="inclusive") if len(ordered) > 1 else ordered * 19
    return {
        "median_s": statistics.median(ordered),
        "q1_s": tenths[4],
        "q3_s": tenths[14],
        "p10_s": tenths[1],
        "p90_s": tenths[17],
        "steps": len(ordered),
        "clock": "host clock around each engine step",
    }


def floor_columns(
    case: Mapping[str, Any], config: Mapping, lengths: Sequence[int], resident: Sequence[float], whose: str
) -> dict:
    """The floor of the middle step on the machine ``whose``, and what the median is next to it."""
    grown = [length + len(resident) // 2 for length in lengths]
    try:
        floor = bound(
            config,
            whose,
            context={length: grown.count(length) for length in grown},
            tensor_parallel_size=case["tensor_parallel_size"],
            pipeline_parallel_size=case["pipeline_parallel_size"],
            data_parallel_size=case["data_parallel_size"],
            decode_context_parallel_size=case["decode_context_parallel_size"],
            kv_cache_dtype=case["kv_cache_dtype"],
        )
    except DecodebenchError as error:
        return {"floor_verdict": f"no floor: {error}"}
    assert isinstance(floor, Bound), "one batch, one context"
    found = judge(Measured(statistics.median(resident), len(lengths)), floor)
    return {
        "floor_s": floor.seconds,
        "floor_share": found.share,
        "floor_verdict": found.verdict,
        "floor_binds": floor.binds,
        "floor_machine": floor.machine.title,
        "bytes_moved": round(floor.bytes),
    }


# -- process ---------------------------------------------------------------------------------------


def die_with_the_sweep() -> None:
    """Kill this process's whole group once nobody holds the other end of standard input."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main(result: str) -> None:
    """Read a case, run it, write its columns or the reason why there are none."""
    case = json.loads(sys.stdin.readline())
    die_with_the_sweep()
    prepare_process()
    try:
        columns = run_case(case)
    except (DecodebenchError, ValueError, NotImplementedError) as error:  # vLLM refuses options so
        columns = {"status": "refused", "reason": f"{error}"}
    except Exception as error:
        columns = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    part = Path(f"{result}.part")
    part.write_text(json.dumps(columns, default=float))
    part.replace(result)
    sys.stdout.flush()
    os._exit(0)  # whatever threads an engine leaves behind: the answer is written


if __name__ == "__main__":
    main(sys.argv[1])
