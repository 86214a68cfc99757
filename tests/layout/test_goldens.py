"""Layouts equal to what vLLM 0.32's own code computed, case by case (see goldens/README.md)."""

import json

import pytest
from stored_layouts import golden, golden_models, options_of

from decodebench.errors import DecodebenchError
from decodebench.layout import dump
from decodebench.layout.placement import LayoutRefused
from decodebench.layout.plan import layout_for, prepare
from decodebench.models.load import load_model


def all_cases() -> list:
    return [
        pytest.param(model, i, id=f"{model}-{case['case']}")
        for model in golden_models()
        for i, case in enumerate(golden(model)["cases"])
    ]


@pytest.mark.parametrize(("model", "index"), all_cases())
def test_case(model: str, index: int):
    case = golden(model)["cases"][index]
    if "refused" in case:
        with pytest.raises(DecodebenchError):
            prepare(model, **options_of(model, case))
        return
    grouped = prepare(model, **options_of(model, case))
    assert grouped.max_model_len == case["options"]["max_model_len"]
    assert grouped.options.max_in_flight_tokens == case["options"]["max_in_flight_tokens"]
    assert grouped.memory_order == case["options"]["kv_cache_layout"]
    ours = json.loads(json.dumps(dump.case({}, grouped)))
    if case["resolved"]:
        assert ours["resolved"] == case["resolved"]
    assert len(ours["groups"]) == len(case["groups"])
    for mine, theirs in zip(ours["groups"], case["groups"]):
        assert mine["spec"] == theirs["spec"]
        for key in ("layers", "block_size", "page_size_bytes", "blocks_per_request"):
            if theirs[key] is not None:
                assert mine[key] == theirs[key], key
    assert ours["bytes_per_block"] == case["bytes_per_block"]
    for budget, memory in case["memory"].items():
        check_memory(grouped, model, case, int(budget), memory)


def check_memory(grouped, model: str, case: dict, budget: int, memory: dict):
    if "refused" not in memory:
        assert json.loads(json.dumps(dump.memory_dict(layout_for(grouped, budget)))) == memory
        return
    with pytest.raises(LayoutRefused) as refusal:
        layout_for(grouped, budget)
    fits = memory["auto_fit"]
    assert refusal.value.max_model_len == fits["max_model_len"]
    fitted = layout_for(prepare(model, **(options_of(model, case) | {"max_model_len": "auto"})), budget)
    assert (fitted.max_model_len, fitted.num_blocks) == (fits["max_model_len"], fits["num_blocks"])


@pytest.mark.parametrize("model", golden_models())
def test_layers(model: str):
    """Layers in registration order, layers that share a cache, and the same from the whole config."""
    expected = golden(model)
    for source in (model, expected["config"]):
        read = load_model(source)
        assert list(read.layer_names) == expected["layers"]
        assert dict(read.shared_layers) == expected["shared_kv_cache_layers"]
        assert not read.generic


def test_all_cases_are_here():
    assert sum(len(golden(model)["cases"]) for model in golden_models()) >= 375
