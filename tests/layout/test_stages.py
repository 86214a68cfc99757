"""Pipelines: layers of every stage, their groups and the one pool, as vLLM 0.32's own code makes them."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodebench.__main__ import main
from decodebench.errors import DecodebenchError
from decodebench.layout.plan import layout_for, plan, prepare
from decodebench.layout.pool import admit
from decodebench.layout.stages import partition

FILE = Path(__file__).parents[1] / "goldens" / "stages.jsonl.gz"
ENTRIES = [json.loads(line) for line in gzip.decompress(FILE.read_bytes()).decode().splitlines()]


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry["name"] for entry in ENTRIES])
def test_equal_to_vllm(entry):
    grouped = prepare(
        entry["config"],
        pipeline_parallel_size=entry["size"],
        engine="vllm-0.32",
        max_num_batched_tokens=entry["batched"],
    )
    assert grouped.max_in_flight_tokens == entry["in_flight"]
    layout, names = layout_for(grouped, entry["budgets"]), entry["layers"]
    assert [[list(g.layer_names) for g in stage.groups] for stage in layout.stages] == [
        [[names[i] for i in ids] for ids in rank] for rank in entry["ranks"]
    ]
    found, wanted = layout.capacity(), entry["memory"]
    assert [stage.bytes_per_block() for stage in layout.stages] == wanted["bytes"]
    assert {stage.num_blocks for stage in layout.stages} == {wanted["num_blocks"]}
    assert (found.concurrency, found.tokens) == (wanted["max_concurrency"], wanted["capacity_tokens"])


@given(st.integers(1, 200), st.integers(1, 16))
def test_stages_are_as_even_as_vllm_makes_them(depth, stages):
    if stages > depth:
        with pytest.raises(DecodebenchError, match="every stage needs one"):
            partition(depth, stages)
        return
    counts = partition(depth, stages)
    assert sum(counts) == depth and max(counts) - min(counts) <= 1
    # the last stage, and then the first, are the last to get a layer more
    assert counts[-1] == min(counts) and counts[0] == (
        min(counts) if depth % stages < stages - 1 else max(counts)
    )


def test_a_partition_by_hand():
    assert partition(32, 3, "12, 10,10") == (12, 10, 10)
    layout = plan("jamba-v0.1", memory="8GiB", pipeline_parallel_size=2, pp_layer_partition="20,12")
    assert [len(stage.layer_names) for stage in layout.stages] == [20, 12]
    for given_, message in (("12,10", "2 stages of 22 layers"), ("a,b", "numbers of layers")):
        with pytest.raises(DecodebenchError, match=message):
            plan("jamba-v0.1", pipeline_parallel_size=3, pp_layer_partition=given_)


def test_the_smallest_rank_decides():
    alone = plan("llama-3.1-8b", memory="20GiB")
    assert (
        plan("llama-3.1-8b", memory=["30GiB", "20GiB"], tensor_parallel_size=2).num_blocks
        == 2 * alone.num_blocks
    )
    two = plan("llama-3.1-8b", memory="20GiB,10GiB", pipeline_parallel_size=2)
    assert two.stage == 1 and two.num_blocks == alone.num_blocks
    four = plan(
        "llama-3.1-8b", memory="20GiB,20GiB,20GiB,5GiB", pipeline_parallel_size=2, tensor_parallel_size=2
    )
    assert four.num_blocks == alone.num_blocks
    with pytest.raises(DecodebenchError, match="3 memories for 2 ranks"):
        plan("llama-3.1-8b", memory="1GiB,2GiB,3GiB", pipeline_parallel_size=2)


def test_a_stage_that_is_too_small_is_named():
    with pytest.raises(DecodebenchError, match=r"stage 1 of the pipeline.*max_model_len = "):
        plan("llama-3.1-8b", memory="20GiB,1GiB", pipeline_parallel_size=2)
    layout = plan("llama-3.1-8b", memory="20GiB,1GiB", pipeline_parallel_size=2, max_model_len="auto")
    assert {stage.max_model_len for stage in layout.stages} == {layout.max_model_len} and layout.stage == 1


def test_whole_models_stay_whole():
    with pytest.raises(DecodebenchError, match="does not cut models of type zamba2"):
        plan("zamba2-2.7b", pipeline_parallel_size=2)


def test_a_drafter_is_on_the_last_stage():
    layout = plan("llama-3.1-8b", memory="40GiB", pipeline_parallel_size=2, draft_layers=1)
    assert [len(stage.layer_names) for stage in layout.stages] == [16, 17]


def test_a_stage_without_layers_of_a_group_still_counts_its_blocks():
    """Gemma's only full attention in six layers is on one stage; the other's tables count its blocks too."""
    layout = plan("gemma-3-1b", memory="4GiB", pipeline_parallel_size=13, max_model_len=2048)
    empty = [g for stage in layout.stages for g in stage.groups if not g.layer_names]
    assert empty
    batch = admit(layout, requests=2, context=1024)
    assert all(batch.block_table(g) for g in range(len(layout.groups)))
    assert str(layout) and layout._repr_html_() and layout.to_dict()


def test_text_and_json_show_every_stage(capsys):
    named = ["plan", "gemma-3-1b", "--memory", "8GiB,7GiB", "--pipeline-parallel-size", "2"]
    assert main(named) == 0
    shown = capsys.readouterr().out
    assert "stage 1 holds the fewest blocks" in shown and "262,144 blocks would fit 8.00 GiB" in shown
    assert main([*named, "--json"]) == 0
    (memory,) = json.loads(capsys.readouterr().out)["memory"].values()
    assert [stage["stage"] for stage in memory["stages"]] == [0, 1]
