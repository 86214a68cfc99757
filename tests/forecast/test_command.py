"""The two commands as a reader of the README types them."""

import json
import re
from pathlib import Path

import pytest

from decodebench.__main__ import main

README = (Path(__file__).parents[2] / "README.md").read_text()
SHOWN = re.findall(r"```\n\$ python -m decodebench ((?:bound|judge) [^\n]*)\n(.*?)```", README, re.S)


@pytest.mark.parametrize(("arguments", "output"), SHOWN, ids=[a.split()[0] for a, _ in SHOWN])
def test_the_readme_shows_what_is_printed(arguments, output, capsys):
    assert main(arguments.split()) in (0, 1)
    assert capsys.readouterr().out == output


def test_both_commands_are_shown():
    assert [arguments.split()[0] for arguments, _ in SHOWN] == ["bound", "judge"]


def test_a_table_for_several_batches_and_contexts(capsys):
    assert (
        main(["bound", "gemma-3-1b", "--machine", "l4", "--batch", "1,8", "--context", "1024,8192", "--json"])
        == 0
    )
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert [(c["batch"], c["context"]) for c in cases] == [(1, "1024"), (1, "8192"), (8, "1024"), (8, "8192")]


def test_formats_by_role(capsys):
    assert (
        main(
            [
                "bound",
                "deepseek-v3",
                "--machine",
                "b200",
                "-tp",
                "8",
                "--quantization",
                "experts=nvfp4,latent=fp8",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["weight_bytes"] < 60e9


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("bound nowhere --machine h200", "neither a file nor a known model"),
        ("bound tiny-llama --machine h2", "did you mean"),
        ("bound tiny-llama --machine h200 --batch x", "--batch = 'x'"),
        ("bound tiny-llama --machine h200 --context 12k", "12k"),
        ("bound tiny-llama --machine h200 --quantization banana=fp8", "banana"),
        ("bound tiny-llama --machine h200 --batch 1,2 --engine vllm", "one batch"),
        ("judge 5 --model tiny-llama --machine h200", "--batch"),
        ("judge /nowhere.json --model tiny-llama --machine h200", "no such file"),
    ],
)
def test_bad_input_is_one_line(arguments, says, capsys):
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
