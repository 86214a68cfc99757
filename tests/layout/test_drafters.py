"""Drafters: their layers, groups and pools as vLLM 0.32's own code makes them (goldens by tests/engine/registry)."""

import gzip
import json
from pathlib import Path

import pytest

from decodebench.__main__ import main
from decodebench.errors import DecodebenchError
from decodebench.layout.dump import case
from decodebench.layout.plan import layout_for, plan, prepare
from decodebench.models.load import DATA

FILE = Path(__file__).parents[1] / "goldens" / "drafters.jsonl.gz"
ENTRIES = [json.loads(line) for line in gzip.decompress(FILE.read_bytes()).decode().splitlines()]
LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 1}


def draft_of(entry):
    """The drafter as a user would name it; a golden names its method apart."""
    method, config = entry["speculative"]["method"], entry["draft"]
    if method == "mtp":
        return "mtp"
    if method.startswith("eagle"):
        return config | {"architectures": [f"Eagle{config['architectures'][0]}"]}
    return config


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry["name"] for entry in ENTRIES])
def test_equal_to_vllm(entry):
    grouped = prepare(
        entry["config"],
        draft_config=draft_of(entry),
        num_speculative_tokens=entry["speculative"]["num_speculative_tokens"],
        engine="vllm-0.32",
        max_num_batched_tokens=entry["batched"],
    )
    names = entry["layers"]
    assert [
        [list(g.layer_names), g.block_size, g.bytes_per_block if g.mixed else g.kv_cache_spec.page_size_bytes]
        for g in grouped.groups
    ] == [[[names[i] for i in ids], block, page] for ids, block, page in entry["groups"]]
    wanted = entry["memory"]
    if "refused" in wanted:
        with pytest.raises(DecodebenchError) as refused:
            layout_for(grouped, 2**30)
        assert str(refused.value.max_model_len) in wanted["refused"]
        return
    layout = layout_for(grouped, 2**30)
    found = layout.capacity()
    assert (layout.num_blocks, found.concurrency, found.tokens) == (
        wanted["num_blocks"],
        wanted["max_concurrency"],
        wanted["capacity_tokens"],
    )


def test_a_drafter_is_named_where_the_layout_stands(tmp_path, capsys):
    eagle = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}
    (tmp_path / "config.json").write_text(json.dumps(eagle))
    named = ["--draft-config", str(tmp_path), "--num-speculative-tokens", "3"]
    assert main(["plan", "llama-3.1-8b", *named, "--memory", "40GiB"]) == 0
    shown = capsys.readouterr().out
    assert "drafter: " in shown and "(eagle), 1 caches (model.layers.32.self_attn.attn)" in shown
    assert "3 tokens a step" in shown
    inline = ["--draft-config", json.dumps(eagle), "--num-speculative-tokens", "3", "--json"]
    assert main(["plan", "llama-3.1-8b", *inline, "--memory", "40GiB"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["drafter"]["layers"] == ["model.layers.32.self_attn.attn"]
    assert found["options"]["num_speculative_tokens"] == 3


def test_a_model_that_is_known_drafts_whole():
    layout = plan(
        "llama-3.1-8b",
        memory="40GiB",
        draft_config="tiny-llama",
        num_speculative_tokens=4,
        max_model_len=4096,
    )
    assert layout.layer_names[-1].startswith("draft_model.model.layers.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_config": "mtp"}, "brings no layers for further tokens"),
        ({"draft_config": dict(LLAMA)}, "give num_speculative_tokens"),
        ({"draft_config": dict(LLAMA, model_type="medusa"), "num_speculative_tokens": 3}, "keeps no cache"),
        ({"draft_config": dict(LLAMA, model_type="brand_new"), "num_speculative_tokens": 3}, "not guessed"),
        ({"draft_config": {"model_type": "extract_hidden_states"}, "num_speculative_tokens": 1}, "eagle_aux"),
        ({"draft_config": "no/such.json", "num_speculative_tokens": 1}, "no such file"),
        ({"draft_config": "{oops", "num_speculative_tokens": 1}, "not JSON"),
        ({"draft_config": dict(LLAMA), "draft_layers": 1}, "give one of them"),
        ({"draft_config": "jamba-v0.1", "num_speculative_tokens": 1}, "drafters with states"),
    ],
)
def test_what_drafts_nothing_is_refused(options, message):
    with pytest.raises(DecodebenchError, match=message) as refused:
        prepare("llama-3.1-8b", **options)
    assert "\n" not in str(refused.value)


def test_own_layers_predict_whole_multiples():
    config = json.loads((DATA / "deepseek-v3" / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    with pytest.raises(DecodebenchError, match="whole multiples"):
        prepare(config, draft_config="mtp", num_speculative_tokens=3)
    assert prepare(config, draft_config="mtp").options.num_speculative_tokens == 2


def test_a_chain_of_own_layers_keeps_tokens_before_a_window():
    """Each further module reads a token further ahead, so windows keep as many tokens more (vLLM's rule)."""
    step = {
        "model_type": "step3p5",
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_attention_groups": 8,
    }
    step |= {"head_dim": 128, "num_hidden_layers": 2, "sliding_window": 512, "num_nextn_predict_layers": 3}
    step |= {"layer_types": ["full_attention", "sliding_attention"] + ["sliding_attention"] * 3}
    grouped = prepare(step, draft_config="mtp", max_num_batched_tokens=64, async_scheduling=False)
    assert grouped.options.num_speculative_tokens == 3
    windows = [s for g in grouped.groups for s in g.layer_specs if s.kind == "sliding_window"]
    assert len(windows) == 4 and {w.extra_retained_tokens for w in windows} == {2}
    spec = windows[0]
    assert spec.max_blocks_per_request(10_000, 64) == -(-(511 + 2 + 64) // spec.block_size) + 1
    assert spec.num_skipped_tokens(1000) == 1000 - 511 - 2 and spec.visible(1001) == (489, 1001)
    assert case({}, grouped)["drafter"]["name"] == "its own 3 layers for further tokens"
