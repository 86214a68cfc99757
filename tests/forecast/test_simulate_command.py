"""The README shows what ``simulate`` prints."""

import shlex
from pathlib import Path

import pytest

from decodebench.__main__ import main
from decodebench.forecast import scheduler

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.skipif(not scheduler.compiled().fast, reason="numba is not installed: minutes without it")
def test_the_readmes_simulation_is_printed_by_its_command(capsys):
    text = README.read_text()
    shown = text[text.index("$ python -m decodebench simulate ") :].split("\n```")[0]
    command, _, printed = shown.partition("\n")
    assert main(shlex.split(command)[4:]) == 0
    assert capsys.readouterr().out.strip() == printed.strip()
