"""The command ``plan``: a layout, and beside its cache the model's weights, which take memory of their own."""

from __future__ import annotations

import argparse

from decodebench.forecast.weights import weights_text
from decodebench.layout.command import add_plan_arguments as add_plan_arguments
from decodebench.layout.command import plan_command as plan_layouts
from decodebench.models.load import load_model


def plan_command(arguments: argparse.Namespace) -> int:
    """Print the layout of a model's cache, then its weights where they are known; the layout's exit code."""
    arguments.model = load_model(arguments.model)  # read once: it may be a pipe
    code = plan_layouts(arguments)
    if not arguments.json:
        ranks = arguments.tensor_parallel_size
        where = "beside the cache" + (f" on each of {ranks} ranks" if ranks > 1 else "")
        print(f"weights {where}: {weights_text(arguments.model, ranks)}")
    return code
