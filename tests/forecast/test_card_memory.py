"""The cache's memory from the cards' size: vLLM's arithmetic, weights counted, the smallest rank decides."""

import io
import json
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

import decodebench as db
from decodebench.__main__ import main
from decodebench.errors import DecodebenchError
from decodebench.forecast.weights import parameters
from decodebench.layout.card_memory import CardMemory
from decodebench.models.load import DATA


def test_weights_are_counted_and_taken_off():
    (rank,) = db.card_memory("llama-3.1-8b", "80GB")
    assert rank.weights == 2 * sum(parameters("llama-3.1-8b").values()) == 16_060_522_496
    assert (rank.asked_for, rank.cache) == (73_600_000_000, 57_539_477_504)
    assert db.plan("llama-3.1-8b", memory=rank.cache).num_blocks == 57_539_477_504 // 2_097_152
    (two, _) = db.card_memory("llama-3.1-8b", ["80GB", "80GB"], tensor_parallel_size=2)
    assert 2 * two.weights - rank.weights == 2 * 4096 * 65  # norms lie on every rank


@given(st.integers(2**30, 2**40), st.integers(1, 100))
def test_the_share_is_rounded_up_as_vllm_rounds_it(card, percent):
    found = CardMemory(card, percent / 100, 0, "given")
    exact = -(-card * percent // 100)
    assert found.asked_for == exact
    assert abs(found.asked_for - ceil(card * (percent / 100))) <= 1  # vLLM's product of floats


def test_stages_hold_their_own_weights():
    ranks = db.card_memory("llama-3.1-8b", "80GB", pipeline_parallel_size=3)
    embedding = 128_256 * 4096 * 2
    between = 16_060_522_496 - 2 * embedding
    assert [rank.weights for rank in ranks] == [
        round(embedding + between * 11 / 32),
        round(between * 11 / 32),
        round(embedding + between * 10 / 32),
    ]
    assert "weigh alike" in ranks[1].weights_told


def test_the_arithmetic_is_shown(capsys):
    assert main(["plan", "llama-3.1-8b", "--gpu-memory", "80GB", "--gpu-memory-utilization", "0.9"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "80,000,000,000 bytes of the card × 0.9 = 72,000,000,000; - 16,060,522,496 of weights" in first
    assert "55,939,477,504 bytes (52.1 GiB) for the cache" in first and "only a run tells them" in first
    given_ = ["--gpu-memory", "80GB", "--weights", "15GiB", "--other-memory", "3GiB", "--json"]
    assert main(["plan", "llama-3.1-8b", *given_]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["card_memory"]
    assert rank["cache"] == 73_600_000_000 - 18 * 2**30 and rank["weights_told"] == "given"


def test_the_smallest_card_decides(capsys):
    assert main(["plan", "llama-3.1-8b", "--gpu-memory", "80GB", "--gpu-memory", "70GB", "-tp", "2"]) == 0
    shown = capsys.readouterr().out
    smallest = db.card_memory("llama-3.1-8b", "70GB", tensor_parallel_size=2)[0].cache
    assert "rank 1: 70,000,000,000" in shown and f"{smallest // 2**20:,} blocks" in shown


def test_a_model_from_standard_input_is_read_once(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO((DATA / "llama-3.1-8b" / "config.json").read_text()))
    assert main(["plan", "-", "--gpu-memory", "80GB"]) == 0
    assert "standard input: 27,436 blocks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory", "10GB"], "nothing is left for the cache"),
        (["--weights", "1GiB"], "it is a part of --gpu-memory"),
        (["--gpu-memory", "80GB", "--memory", "8GiB"], "give one"),
        (["--gpu-memory", "80GB", "--gpu-memory-utilization", "1.5"], "a share above 0"),
        (["--gpu-memory", "80GB,80GB,80GB", "-tp", "2"], "3 cards for 2 ranks"),
        (["--gpu-memory", "eighty"], "bytes, or a number with a unit"),
    ],
)
def test_refused_in_one_line(capsys, arguments, message):
    assert main(["plan", "llama-3.1-8b", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def test_weights_that_nobody_counted_are_asked_for():
    config = {"model_type": "brand_new", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 256}
    with pytest.raises(DecodebenchError, match=r"give --weights"):
        db.card_memory(config, "80GB")
    assert db.card_memory(config, "80GB", weights="1GiB")[0].weights == 2**30
