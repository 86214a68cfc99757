"""The command ``plan``: a layout from a given memory or from the cards', and beside its cache the model's weights."""

from __future__ import annotations

import argparse

from decodebench.forecast.card_memory import card_memory
from decodebench.forecast.weights import weights_text
from decodebench.layout import command
from decodebench.layout.card_memory import UTILIZATION
from decodebench.layout.placement import LayoutRefused
from decodebench.models.load import load_model


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``plan``, with those that make the cache's memory from the cards'."""
    command.add_plan_arguments(parser)
    add = parser.add_argument
    add(
        "--gpu-memory",
        action="append",
        metavar="BYTES",
        help="of a card as it reports it (an H100 of 80 GB: 81559MiB), instead of --memory: what it leaves to the "
        "cache, with the arithmetic; several (80GB,79GB, or repeated) are those of the ranks",
    )
    add("--gpu-memory-utilization", type=float, default=None, metavar="SHARE", help=f"default: {UTILIZATION}")
    add("--weights", metavar="BYTES", help="on one rank; default: counted from config.json")
    add(
        "--other-memory",
        metavar="BYTES",
        help="of activations, CUDA graphs, the driver: what a run was seen to take",
    )
    add(
        "--quantization",
        default="auto",
        help="of the weights that are counted: auto (config.json's), none, fp8, …",
    )


def plan_command(arguments: argparse.Namespace) -> int:
    """``layout``'s command on the memory asked for, and the weights beside it; or on what the cards leave."""
    named = [
        "--" + name.replace("_", "-")
        for name in ("gpu_memory_utilization", "weights", "other_memory")
        if getattr(arguments, name) is not None
    ]
    if named and arguments.gpu_memory is None:
        raise LayoutRefused(f"{named[0]}: it is a part of --gpu-memory, which is missing")
    if arguments.memory and arguments.gpu_memory is not None:
        raise LayoutRefused(
            "--memory and --gpu-memory: the first is the cache's, the second the card's; give one"
        )
    arguments.model = load_model(arguments.model)  # read once: it may come from standard input
    if arguments.gpu_memory is None:
        code = command.plan_command(arguments)
        if not arguments.json:
            ranks = arguments.tensor_parallel_size
            where = "beside the cache" + (f" on each of {ranks} ranks" if ranks > 1 else "")
            print(f"weights {where}: {weights_text(arguments.model, ranks)}")
        return code
    options = command.options_of(arguments) | {"block_size": arguments.block_size}
    share = arguments.gpu_memory_utilization
    cards = card_memory(
        arguments.model,
        ",".join(arguments.gpu_memory),
        UTILIZATION if share is None else share,
        arguments.weights,
        arguments.other_memory,
        arguments.quantization,
        **options,
    )
    arguments.memory = [",".join(str(rank.cache) for rank in cards)]
    return command.plan_command(arguments, cards)
