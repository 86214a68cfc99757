"""``decodebench plan``: the weights that lie beside the cache, where they are known."""

import json

import pytest

from decodebench.__main__ import main
from decodebench.forecast.weights import parameters, weight_bytes
from decodebench.models.load import DATA


def last_line(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments, "--memory", "64MiB", "--max-model-len", "auto"]) == 0
    return capsys.readouterr().out.splitlines()[-1]


def test_weights_stand_under_the_layout_and_their_share_on_each_rank(capsys):
    assert weight_bytes("tiny-llama") == 2 * sum(parameters("tiny-llama").values())
    assert last_line(capsys, "tiny-llama").startswith("weights beside the cache: ")
    assert "on each of 2 ranks" in last_line(capsys, "tiny-llama", "--tensor-parallel-size", "2")
    assert weight_bytes("tiny-llama", 2) < weight_bytes("tiny-llama")


def test_sizes_that_a_config_leaves_out_and_unknown_families_are_said(capsys, tmp_path):
    config = json.loads((DATA / "tiny-llama" / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "vocab_size"}))
    assert "not known (" in last_line(capsys, str(path))
    path.write_text(json.dumps(config | {"model_type": "newest"}))
    assert last_line(capsys, str(path)).endswith("an estimate")


def test_a_dump_stays_json(capsys):
    assert main(["plan", "tiny-llama", "--memory", "64MiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("model", ["gpt-oss-20b", "llama-3.1-8b"])
def test_a_checkpoints_own_format_counts(model):
    plain = 2 * sum(parameters(model).values())
    assert (weight_bytes(model) < 0.5 * plain) == (model == "gpt-oss-20b")
