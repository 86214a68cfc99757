"""The stored layouts of every release: what vLLM 0.32 computed, and where another release computed something else.

``tests/goldens/*.json.gz`` and ``variants.jsonl.gz`` are 0.32's own; ``releases.jsonl.gz`` holds, for each
release, a line with the number of cases, how many are equal and a hash of all of them, then one line a
case that differs. ``tests/goldens/recompute.py`` writes it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from decodebench.layout.command import planned_case
from decodebench.layout.plan import prepare

GOLDENS = Path(__file__).parents[1] / "goldens"
RELEASES = GOLDENS / "releases.jsonl.gz"


@dataclass(frozen=True)
class Case:
    """A stored layout of vLLM 0.32's: what to plan, and what came of it."""

    name: str
    model: str | dict
    options: dict
    layout: dict
    #: a line of ``variants.jsonl.gz``, which stores less of each group
    variant: bool = False


@cache
def golden(model: str) -> dict:
    """The stored cases of one model."""
    return json.loads(gzip.decompress((GOLDENS / f"{model}.json.gz").read_bytes()))


def golden_models() -> list[str]:
    return sorted(path.name.removesuffix(".json.gz") for path in GOLDENS.glob("*.json.gz"))


@cache
def registry() -> list[dict]:
    """The architectures of vLLM 0.32's registry (goldens/registry.md)."""
    text = gzip.decompress((GOLDENS / "registry.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


@cache
def variants() -> list[dict]:
    """The lines of ``variants.jsonl.gz``."""
    text = gzip.decompress((GOLDENS / "variants.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


#: stored with the length that transformers fills in; data/models has the published one
OTHER_LENGTH = {"mimo-v2-flash"}


def options_of(model: str, case: dict) -> dict:
    """Our options for a golden case; the maximum length is left to the config unless the case is about it."""
    o = case["options"]
    in_flight = o["max_in_flight_tokens"] or 2 * o["max_num_batched_tokens"]
    named = case["case"]
    return {
        "block_size": o["block_size"],
        "dtype": o["dtype"] if not named.startswith("default") else "auto",
        "kv_cache_dtype": o["kv_cache_dtype"],
        "tensor_parallel_size": o["tensor_parallel_size"],
        "decode_context_parallel_size": o["decode_context_parallel_size"],
        "max_model_len": o["max_model_len"] if named.startswith("len") or model in OTHER_LENGTH else None,
        "max_num_batched_tokens": o["max_num_batched_tokens"],
        "async_scheduling": in_flight == 2 * o["max_num_batched_tokens"],
        "enable_prefix_caching": o["enable_prefix_caching"],
        "hybrid_kv_cache_manager": o["hybrid_kv_cache_manager"],
        "memory_order": o["kv_cache_layout"] if named == "BLHNC" else None,
        # latent attention was dumped under kernels that take 64 tokens, sparse fp8 rows as a B200 has them
        "device": "b200",
        "kernel_block_size": 64 if o["kernel_block_sizes"] == ["64"] else None,
        "engine": "vllm-0.32",
    }


def variant_options(variant: dict) -> dict:
    """Our options for a variant; latent attention was dumped under kernels that take 64 tokens."""
    latent = {"kernel_block_size": 64} if "kv_lora_rank" in variant["config"] else {}
    return variant["options"] | latent | {"engine": "vllm-0.32"}


@cache
def cases() -> list[Case]:
    """Every stored case that vLLM 0.32 did not refuse."""
    found = []
    for model in golden_models():
        for case in golden(model)["cases"]:
            if "refused" not in case:
                name = f"{model}, {case['case']}"
                found.append(Case(name, model, options_of(model, case), _plain(case)))
    for i, variant in enumerate(variants()):
        if "refused" not in variant:
            name = f"{i}, {variant['name']}"
            found.append(
                Case(name, variant["config"], variant_options(variant), _variant(variant), variant=True)
            )
    return found


def like(layout: Mapping[str, Any], case: Case) -> dict:
    """A layout in the form in which this case is stored."""
    layout = json.loads(json.dumps(layout))
    if not case.variant:
        given = [group["blocks_per_request"] is None for group in case.layout["groups"]]
        for group, unknown in zip(layout["groups"], given):
            if unknown:  # blocks too small for one entry, whose pages are empty in vLLM
                group["blocks_per_request"] = None
        return _plain(layout)
    groups = [group | {"blocks": group["blocks_per_request"]} for group in layout["groups"]]
    memory = {
        budget: {"refused": (entry["auto_fit"] or {}).get("max_model_len")} if "refused" in entry else entry
        for budget, entry in layout["memory"].items()
    }
    return _variant(layout | {"groups": groups, "memory": memory})


def plan_of(case: Case, engine: str) -> dict:
    """What ``plan`` says of a case by a release's rules."""
    grouped = prepare(case.model, **case.options | {"engine": engine})
    return planned_case(grouped, map(int, case.layout["memory"]))


def _plain(layout: Mapping[str, Any]) -> dict:
    """Groups and memory of a golden case; releases word their refusals differently."""
    memory = {
        budget: {name: value for name, value in entry.items() if name != "refused"}
        for budget, entry in layout["memory"].items()
    }
    names = ("layers", "block_size", "page_size_bytes", "blocks_per_request", "spec")
    groups = [{name: group[name] for name in names} for group in layout["groups"]]
    groups = [group | {"spec": _in_every_release(group["spec"])} for group in groups]
    return {"groups": groups, "bytes_per_block": layout["bytes_per_block"], "memory": memory}


def _in_every_release(spec: Mapping[str, Any]) -> dict:
    """A spec without what 0.30's classes do not say; what it does shows in the blocks of a request."""
    kept = {name: value for name, value in spec.items() if name not in ("dcp_sharded", "bounded_replay")}
    if "layers_by_spec" in spec:
        parts = [part | {"spec": _in_every_release(part["spec"])} for part in spec["layers_by_spec"]]
        kept["layers_by_spec"] = parts
    return kept


def _variant(layout: Mapping[str, Any]) -> dict:
    names = ("layers", "block_size", "page_size_bytes", "blocks")
    groups = [{name: group[name] for name in names} for group in layout["groups"]]
    return {"groups": groups, "bytes_per_block": layout["bytes_per_block"], "memory": layout["memory"]}


# -- releases ------------------------------------------------------------------------------------


def digest(layouts: Mapping[str, dict]) -> str:
    """A hash of the layouts of all cases."""
    return hashlib.sha256(json.dumps(layouts, sort_keys=True).encode()).hexdigest()


@cache
def releases() -> dict[str, tuple[dict, dict[str, dict]]]:
    """release → (its summary, case → layout where it is not 0.32's)."""
    found: dict[str, tuple[dict, dict[str, dict]]] = {}
    for line in gzip.decompress(RELEASES.read_bytes()).decode().splitlines():
        entry = json.loads(line)
        if "case" in entry:
            found[entry["engine"]][1][entry["case"]] = entry["layout"]
        else:
            found[entry["engine"]] = (entry, {})
    return found


def write(engine: str, found: Mapping[str, dict]) -> None:
    """Store what a release computed, in place of what was stored of it."""
    kept = dict(releases()) if RELEASES.exists() else {}
    changed = {case.name: found[case.name] for case in cases() if found[case.name] != case.layout}
    summary = {
        "engine": engine,
        "command": "python tests/goldens/recompute.py --write",
        "cases": len(found),
        "equal_to_0.32": len(found) - len(changed),
        "sha256": digest(found),
    }
    kept[engine] = (summary, changed)
    lines = []
    for name in sorted(kept):
        lines.append(json.dumps(kept[name][0]))
        lines += [json.dumps({"engine": name, "case": c, "layout": kept[name][1][c]}) for c in kept[name][1]]
    RELEASES.write_bytes(gzip.compress("\n".join(lines).encode(), 9, mtime=0))
