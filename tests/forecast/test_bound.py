"""The floor of a step: against hand counts, against what the layout's reads say, and its laws."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodebench.errors import DecodebenchError
from decodebench.forecast.bound import Bounds, bound, prepare
from decodebench.forecast.machines import list_machines, machine
from decodebench.forecast.weights import parameters
from decodebench.layout.plan import plan
from decodebench.layout.pool import admit
from decodebench.layout.reads import decode_work
from decodebench.models.load import list_models, load_model

H200 = machine("h200")


def test_a_dense_model_by_hand():
    """Llama-3.1-8B, 64 requests of 8,192 tokens on eight ranks: one KV head a rank, bf16."""
    b = bound("llama-3.1-8b", "h200", batch=64, context=8192, tensor_parallel_size=8)
    loads = {load.part: load for load in b.loads}
    mlp = 32 * 3 * 4096 * 14336 / 8
    assert loads["mlp"].bytes == 2 * mlp and loads["mlp"].operations == 2 * mlp * 64
    # 8,191 tokens are read and one is written, 128 keys and values of two bytes, 32 layers
    assert loads["cache, full"].bytes == 64 * 8192 * 2 * 128 * 2 * 32
    assert loads["cache, full"].operations == 64 * 32 * 4 * 2 * 256 * 8192
    assert loads["head"].bytes == 2 * 128256 * 4096 / 8
    assert loads["embedding"].bytes == 64 * 4096 * 2
    # an attention and an MLP a layer, a ring sends 2·7/8 of 64 rows of 4,096 numbers of two bytes
    assert loads["all-reduce"].sent == 64 * 64 * 4096 * 2 * 2 * 7 / 8
    assert b.seconds == pytest.approx(sum(load.bytes for load in b.loads) / 4.8e12)
    assert b.binds == "memory" and b.tokens_per_second == pytest.approx(64 / b.seconds)
    assert b.parameters == sum(parameters("llama-3.1-8b").values())


@pytest.mark.parametrize(
    "model",
    [
        "llama-3.1-8b",
        "gemma-3-1b",
        "jamba-v0.1",
        "llama-4-scout-text",
        "zamba2-2.7b",
        "lfm2-1.2b",
        "mimo-v2-flash",
    ],
)
@pytest.mark.parametrize("context", [1, 100, 4000])
def test_the_cache_is_what_the_layouts_reads_count(model, context):
    layout = plan(model, memory="64GiB", max_model_len=4096)
    batch = admit(layout, requests=2, context=context)
    moved = sum(w.bytes_read + w.bytes_written for w in decode_work(layout, batch))
    b = bound(model, H200, batch=2, context=context)
    cache = sum(load.bytes for load in b.loads if "cache" in load.part or load.part == "states")
    assert cache == pytest.approx(moved)


def test_experts_by_the_formula():
    """E·(1 − (1 − k/E)^B) experts of every layer, no more than all and no fewer than one token's."""
    one = bound("gpt-oss-20b", H200, batch=1, context=10)
    assert one.experts_touched == pytest.approx(4) and one.experts == 32
    many = bound("gpt-oss-20b", H200, batch=8, context=10)
    assert many.experts_touched == pytest.approx(32 * (1 - (28 / 32) ** 8))
    same = bound("gpt-oss-20b", H200, batch=8, context=10, routing="same")
    assert same.experts_touched == 4 and same.seconds < many.seconds
    assert bound("gpt-oss-20b", H200, batch=4096, context=10).experts_touched == pytest.approx(32)


def test_mxfp4_experts_of_gpt_oss():
    """Its own quantization_config: experts in 4 bits and an eighth of a byte of scale, everything else bf16."""
    b = bound("gpt-oss-20b", H200)
    counts = parameters("gpt-oss-20b")
    experts = counts["experts"] * (4 + 8 / 32) / 8
    assert b.weight_bytes == pytest.approx(experts + 2 * (sum(counts.values()) - counts["experts"]))
    assert b.weight_bytes == pytest.approx(13.76e9, rel=0.01), "the checkpoint's files"


@pytest.mark.parametrize("model", ["deepseek-v3.2", "deepseek-v4-mapped"])
def test_sparse_attention_reads_what_its_indexer_chooses(model):
    short, long = (bound(model, H200, context=n) for n in (60_000, 120_000))

    def moved(b, name):
        return next(load.bytes for load in b.loads if name in load.part)

    assert moved(long, "indexer") == pytest.approx(2 * moved(short, "indexer"), rel=0.01)
    if model == "deepseek-v3.2":
        assert moved(long, "chosen") == moved(short, "chosen")


settings_ = settings(max_examples=60, deadline=None)
MODELS = st.sampled_from([m for m in list_models() if not m.startswith("tiny")])


@settings_
@given(MODELS, st.sampled_from(list_machines()[:-1]), st.integers(1, 512), st.integers(1, 100_000))
def test_laws_of_a_floor(model, name, batch, context):
    """More requests or longer ones never take less; a faster machine never more; parts add up."""
    b = bound(model, name, batch=batch, context=context)
    assert 0 < b.seconds <= b.serial_seconds * (1 + 1e-9)
    assert max(load.seconds(b.machine) for load in b.loads) <= b.seconds * (1 + 1e-9)
    assert bound(model, name, batch=2 * batch, context=context).seconds >= b.seconds * (1 - 1e-9)
    assert bound(model, name, batch=batch, context=2 * context).seconds >= b.seconds * (1 - 1e-9)
    faster = replace(b.machine, bandwidth=2 * b.machine.bandwidth)
    assert bound(model, faster, batch=batch, context=context).seconds <= b.seconds
    assert json.loads(json.dumps(b.to_dict()))["seconds"] == b.seconds
    assert len(str(b).splitlines()) <= 10


@settings_
@given(
    st.sampled_from(["llama-3.1-8b", "jamba-v0.1", "gpt-oss-20b", "nemotron-h-8b"]),
    st.sampled_from([2, 4, 8]),
)
def test_ranks_share_what_they_can(model, ranks):
    alone = bound(model, H200, batch=32, context=4096)
    together = bound(model, H200, batch=32, context=4096, tensor_parallel_size=ranks)
    assert alone.bytes / ranks <= together.bytes * (1 + 1e-9) <= alone.bytes
    assert alone.seconds / ranks <= together.seconds * (1 + 1e-9)


def test_an_encoder_gives_no_more_than_its_positions():
    """Whisper's decoder attends to 1,500 frames, however many tokens an engine reserves for."""
    cross = next(load for load in bound("whisper-large-v3", H200).loads if "cross" in load.part)
    assert cross.bytes == 32 * 1500 * 20 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("model", "mixers", "feeding"),
    [
        ("llama-3.1-8b", 32, 32),
        ("deepseek-v3.2", 61, 61),
        ("deepseek-v4-mapped", 43, 43),
        ("nemotron-h-8b", 28, 24),
    ],
)
def test_a_reduce_a_mixer_and_a_feed_forward_block(model, mixers, feeding):
    """Indexers and compressors serve the attention beside them: nothing of theirs is added up."""
    assert prepare(model, H200, tensor_parallel_size=2).reduces == mixers + feeding


@pytest.mark.parametrize("model", ["gemma-4-default", "gemma-3n-e4b", "gemma-3-1b", "mamba2-2.7b"])
def test_a_tied_head_reads_the_table_of_tokens_alone(model):
    """Not the narrow tables of every layer, of which a token reads a row; and nothing is held twice."""
    config = load_model(model).config
    vocabulary, width = config["vocab_size"], config["hidden_size"]
    b = bound(model, H200)
    loads = {load.part: load for load in b.loads}
    assert loads["head"].bytes == 2 * vocabulary * width == 2 * loads["head"].operations / 2
    narrow = config.get("hidden_size_per_layer_input", 0) * config["num_hidden_layers"]
    assert loads["embedding"].bytes == 2 * (width + narrow)
    assert b.weight_bytes == pytest.approx(2 * sum(parameters(model).values()))


def test_replicas_and_stages():
    """Data parallel replicas have their own requests and share experts; a request waits for all stages."""
    one = bound("gpt-oss-20b", H200, batch=16, context=1000)
    two = bound(
        "gpt-oss-20b", H200, batch=32, context=1000, data_parallel_size=2, enable_expert_parallel=True
    )
    assert two.experts_touched == pytest.approx(32 * (1 - (28 / 32) ** 32))
    assert two.weight_bytes < one.weight_bytes and two.tokens_per_second > one.tokens_per_second
    staged = bound("llama-3.1-8b", H200, batch=16, context=1000, pipeline_parallel_size=2)
    whole = bound("llama-3.1-8b", H200, batch=8, context=1000)
    assert staged.seconds == pytest.approx(whole.seconds)
    assert staged.weight_bytes == pytest.approx(whole.weight_bytes / 2)
    assert staged.tokens_per_second == pytest.approx(2 * whole.tokens_per_second)


def test_a_mixed_batch_is_the_sum_of_its_requests():
    p = prepare("gemma-3-1b", H200)
    mixed = p.at(context="3x1000+1x8000")
    assert mixed.batch == 4 and mixed.context == "3x1000+1x8000"
    assert p.at(context={1000: 3, 8000: 1}).seconds == mixed.seconds
    alone = {n: p.at(1, n) for n in (1000, 8000)}
    assert mixed.cache_seconds == pytest.approx(3 * alone[1000].cache_seconds + alone[8000].cache_seconds)


def test_lists_give_a_case_for_every_pair():
    found = bound("gemma-3-1b", "h100", batch=[1, 8], context=[1024, 8192, 32768])
    assert isinstance(found, Bounds) and len(found) == 6
    table = found.table()
    assert list(table["context"]) == [1024, 8192, 32768] * 2 and (table["floor_s"] > 0).all()
    assert len(str(found).splitlines()) == 9


def test_prompts_in_the_same_step_add_work():
    decode = bound("llama-3.1-8b", "h100", batch=8, context=1000)
    both = bound("llama-3.1-8b", "h100", batch=8, context=1000, prompt_tokens=8192)
    assert both.binds == "arithmetic" and both.operations > 100 * decode.operations
    assert both.seconds > 10 * decode.seconds


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"batch": 0}, "batch = 0"),
        ({"batch": -3}, "batch = -3"),
        ({"batch": "many"}, "batch"),
        ({"context": 0}, "context = 0"),
        ({"context": "3x"}, "3x"),
        ({"context": {}}, "context"),
        ({"context": []}, "empty list"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size = 0"),
        ({"tensor_parallel_size": 3}, "does not divide"),
        ({"data_parallel_size": True}, "data_parallel_size"),
        ({"quantization": "fp3"}, "fp3"),
        ({"quantization": {"banana": "fp8"}}, "banana"),
        ({"routing": "some"}, "routing"),
        ({"kv_cache_dtype": "fp9"}, "kv_cache_dtype"),
        ({"tokens_per_step": 0.5}, "step"),
        ({"prompt_tokens": -1}, "prompt_tokens"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments, says):
    with pytest.raises(DecodebenchError, match=says) as error:
        bound("llama-3.1-8b", H200, **arguments)
    assert "\n" not in str(error.value)


def test_a_machine_that_is_not_known_is_refused_with_the_nearest_one():
    with pytest.raises(DecodebenchError, match="did you mean h200"):
        bound("llama-3.1-8b", "h2000")


def test_the_command_needs_neither_torch_nor_numpy():
    code = (
        "import sys; from decodebench.__main__ import main; "
        "main('bound gpt-oss-20b --machine h200 --batch 64 --context 8192 -tp 8'.split()); "
        "print([n for n in ('torch', 'numpy', 'pandas') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "[]" and "no step is faster than" in lines[1] and len(lines) <= 11
