"""The command ``plan``: a layout, and beside its cache the model's weights, which take memory of their own."""

from __future__ import annotations

import argparse

from decodebench.errors import DecodebenchError
from decodebench.forecast.weights import weight_bytes
from decodebench.layout.command import add_plan_arguments as add_plan_arguments
from decodebench.layout.command import plan_command as plan_layouts
from decodebench.models.load import load_model
from decodebench.models.model import Model
from decodebench.words import bytes_text


def plan_command(arguments: argparse.Namespace) -> int:
    """Print the layout of a model's cache, then its weights where they are known; the layout's exit code."""
    arguments.model = load_model(arguments.model)  # read once: it may be a pipe
    code = plan_layouts(arguments)
    if not arguments.json:
        print(beside(arguments.model, arguments.tensor_parallel_size))
    return code


def beside(model: Model, tensor_parallel_size: int = 1) -> str:
    """A line: the weights that lie beside the cache on one rank, or why their size is not known."""
    try:
        size = bytes_text(weight_bytes(model, tensor_parallel_size))
    except DecodebenchError as error:
        return f"weights: not known ({error})"
    return f"weights: {size} beside it" + (" on each rank" if tensor_parallel_size > 1 else "")
