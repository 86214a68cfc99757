"""The commands. Each is a pair of functions in the room it belongs to: one adds its arguments, one runs it.

Rooms are imported only when their command is asked for, so that ``plan`` needs neither torch nor pandas.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from decodebench._version import __version__
from decodebench.errors import DecodebenchError, MissingExtra

#: command → (module, function that adds arguments, function that runs it, one line of help)
COMMANDS = {
    "plan": (
        "decodebench.layout.command",
        "add_plan_arguments",
        "plan_command",
        "the layout of a model's cache",
    ),
    "models": (
        "decodebench.models.load",
        "add_models_arguments",
        "models_command",
        "the models that are known by name, and where their values come from",
    ),
    "bound": (
        "decodebench.forecast.command",
        "add_bound_arguments",
        "bound_command",
        "the floor of a decode step that no engine can beat",
    ),
    "judge": (
        "decodebench.forecast.command",
        "add_judge_arguments",
        "judge_command",
        "a measured figure against its floor",
    ),
    "sweep": (
        "decodebench.study.sweep",
        "add_sweep_arguments",
        "sweep_command",
        "a grid of cases to a table",
    ),
    "simulate": (
        "decodebench.forecast.simulate_command",
        "add_simulate_arguments",
        "simulate_command",
        "a layout under traffic: what runs, waits, is preempted",
    ),
    "plot": ("decodebench.show.plot", "add_plot_arguments", "plot_command", "a stored sweep as a figure"),
    "report": ("decodebench.show.report", "add_report_arguments", "report_command", "notebooks to HTML"),
    "gpu": ("decodebench.study.gpu", "add_gpu_arguments", "gpu_command", "ten minutes of figures from a GPU"),
    "bench fill": (
        "decodebench.study.bench_fill",
        "add_arguments",
        "bench_fill_command",
        "fill speed against memset",
    ),
    "bench simulate": (
        "decodebench.study.bench_simulate",
        "add_arguments",
        "bench_simulate_command",
        "requests simulated a second, and how that grows",
    ),
    "bench decode": (
        "decodebench.study.bench_decode",
        "add_arguments",
        "bench_decode_command",
        "decode step against the bandwidth limit",
    ),
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line."""

    def error(self, message: str) -> NoReturn:
        """One line on stderr, and exit status 2."""
        print(
            f"decodebench: {message} ({self.prog} --help lists all options)".replace("\n", " "),
            file=sys.stderr,
        )
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 with one line on stderr where the input is bad."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name = " ".join(argv[:2]) if argv[:1] == ["bench"] else "".join(argv[:1])
    if name in ("-V", "--version"):
        print(f"decodebench {__version__}")
        return 0
    if name not in COMMANDS:
        if name not in ("", "-h", "--help"):
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            print(f"decodebench: no command {name!r}: {hint}known are {', '.join(COMMANDS)}", file=sys.stderr)
            return 2
        listing = "\n".join(f"  {command:14s} {spec[3]}" for command, spec in COMMANDS.items())
        print(f"usage: decodebench COMMAND …\n\n{listing}\n\nCOMMAND --help tells more.")
        return 2 if name == "" else 0
    module_name, add_arguments, run, help_line = COMMANDS[name]
    try:
        module = import_module(module_name)
        parser = Parser(prog=f"decodebench {name}", description=help_line)
        getattr(module, add_arguments)(parser)
        arguments = parser.parse_args(argv[len(name.split()) :])
        return getattr(module, run)(arguments) or 0
    except ModuleNotFoundError as error:
        missing = MissingExtra.of(error, name)
        if missing is None:
            raise
        print(f"decodebench: {missing}", file=sys.stderr)
        return 2
    except DecodebenchError as error:
        print(f"decodebench: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupted:
        told = f" ({interrupted})" if str(interrupted) else ""
        print(f"\ndecodebench: stopped{told}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
