"""``decodebench bound`` and ``decodebench judge``: the floor of a step, and a figure against it."""

from __future__ import annotations

import argparse
import json
import os.path

from decodebench.forecast.bound import BoundError, Bounds, bound
from decodebench.forecast.judge import IMPOSSIBLE, judge_all
from decodebench.forecast.machines import list_machines
from decodebench.forecast.predict import predict
from decodebench.forecast.quantization import FORMATS
from decodebench.models.options import KV_CACHE_DTYPES, STATE_DTYPES


def _deployment_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--machine",
        required=True,
        help=f'{", ".join(list_machines())}; or a TOML file. "this" is measured here',
    )
    add("--tensor-parallel-size", "-tp", type=int, default=1, metavar="RANKS")
    add("--pipeline-parallel-size", "-pp", type=int, default=1, metavar="RANKS")
    add("--data-parallel-size", "-dp", type=int, default=1, metavar="REPLICAS")
    add("--decode-context-parallel-size", "-dcp", type=int, default=1, metavar="RANKS")
    add("--enable-expert-parallel", action="store_true", help="routed experts lie whole on one rank each")
    add(
        "--quantization",
        default="auto",
        help=f"auto (config.json's), none, one of {', '.join(FORMATS)}, or by role: experts=mxfp4,attention=fp8",
    )
    add("--kv-cache-dtype", default="auto", choices=list(KV_CACHE_DTYPES))
    add("--mamba-ssm-cache-dtype", default="auto", choices=STATE_DTYPES)
    add("--block-size", type=int, metavar="TOKENS")
    add("--json", action="store_true", help="print everything as JSON")


def _deployment(arguments: argparse.Namespace) -> dict:
    names = (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "enable_expert_parallel",
        "kv_cache_dtype",
        "mamba_ssm_cache_dtype",
        "block_size",
    )
    found = {name: getattr(arguments, name) for name in names}
    scheme = arguments.quantization
    if "=" in scheme:
        pairs = (pair.partition("=") for pair in scheme.split(","))
        scheme = {role.strip(): name.strip() for role, _, name in pairs}
    return found | {"quantization": scheme}


# -- bound -------------------------------------------------------------------------------------------


def add_bound_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bound``: vLLM's own names where it has one."""
    add = parser.add_argument
    add(
        "model", help="name of a known model, path of a config.json or of its folder, or - for standard input"
    )
    add("--batch", default="1", metavar="N[,N…]", help="requests that decode together, of all replicas")
    add(
        "--context",
        default="1024",
        metavar="TOKENS[,…]",
        help="tokens of a request, or 3x1024+1x8192 for a mixed batch",
    )
    add("--routing", default="uniform", choices=("uniform", "same"), help="how tokens choose their experts")
    add("--engine", choices=("vllm", "sglang", "trtllm"), help="add the time that is likely in this engine")
    _deployment_arguments(parser)


def bound_command(arguments: argparse.Namespace) -> int:
    """Print the floor of a step, or of several as a table."""
    batches = [_number(piece, "--batch") for piece in arguments.batch.split(",")]
    contexts = [piece.strip() for piece in arguments.context.split(",")]
    one = len(batches) == len(contexts) == 1
    found = bound(
        arguments.model,
        arguments.machine,
        batch=batches[0] if one else batches,
        context=contexts[0] if one else contexts,
        routing=arguments.routing,
        **_deployment(arguments),
    )
    estimate = None
    if arguments.engine:
        if isinstance(found, Bounds) or not contexts[0].isdigit():
            raise BoundError("--engine: an estimate is for one batch and one length")
        estimate = predict(
            arguments.model,
            arguments.machine,
            engine=arguments.engine,
            batch=batches[0],
            context=int(contexts[0]),
            **_deployment(arguments),
        )
    if arguments.json:
        values = found.to_dict() | ({"estimate": estimate.to_dict()} if estimate else {})
        print(json.dumps(values, indent=1))
    else:
        print(found)
        if estimate:
            print(estimate)
    return 0


# -- judge -------------------------------------------------------------------------------------------


def add_judge_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``judge``."""
    add = parser.add_argument
    add(
        "result",
        help="JSON of vllm bench serve --save-result, a folder of vllm bench sweep, a report of GuideLLM, an export "
        "of genai-perf or AIPerf, or milliseconds of an output token",
    )
    add("--model", required=True, help="name of a known model, or path of a config.json")
    add(
        "--batch",
        type=float,
        metavar="N",
        help="requests that decode together, where the result does not say it",
    )
    add("--context", type=int, metavar="TOKENS", help="tokens of a request, where the result does not say it")
    _deployment_arguments(parser)


def judge_command(arguments: argparse.Namespace) -> int:
    """Print a verdict a figure; 1 where one of them is impossible."""
    source: str | float = arguments.result
    if not os.path.exists(arguments.result):
        try:
            source = float(source) / 1e3
        except ValueError:
            pass  # read_results says that there is no such file
    found = judge_all(
        source,
        arguments.model,
        arguments.machine,
        batch=arguments.batch,
        context=arguments.context,
        **_deployment(arguments),
    )
    if arguments.json:
        print(json.dumps([one.to_dict() for one in found], indent=1))
    else:
        print("\n\n".join(map(str, found)))
    return int(any(one.verdict == IMPOSSIBLE for one in found))


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BoundError(f"{name} = {text!r}: a number is expected") from None
