"""Published figures and the efficiency model: the stored errors are those that the code measures."""

import math

import pytest

from decodebench.errors import DecodebenchError
from decodebench.forecast import efficiency as e
from decodebench.forecast.predict import predict
from decodebench.forecast.published import for_fit, published


def test_published_figures_are_sourced_and_chosen_by_rules():
    figures = published()
    assert len(figures) > 3000 and all(f.source and f.seconds > 0 for f in figures)
    reasons = {f.left_out for f in figures} - {""}
    assert len(reasons) <= 10 and all(len(reason) > 10 for reason in reasons)
    hybrids = [f for f in figures if f.kind == "decode only" or "aic:" not in f.source]
    kinds = {"gpt-oss-20b", "nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b", "qwen3-next-80b-a3b"}
    assert sum(f.model in kinds or f.model.startswith("gemma") for f in hybrids) >= 20


def test_hardly_a_published_figure_is_faster_than_its_floor():
    figures = [f for f in published() if not f.left_out]
    below = [f for f in figures if f.seconds < f.bound().seconds]
    assert len(below) <= 0.001 * len(figures)
    ratios = sorted(f.seconds / f.bound().seconds for f in figures)
    assert 1.2 < ratios[len(ratios) // 100] < 1.5 and 2.5 < ratios[len(ratios) // 2] < 4


def test_the_fit_finds_constants_that_made_its_figures(monkeypatch):
    """Times made from known constants come back to a few percent where nothing draws them elsewhere."""
    monkeypatch.setattr(e, "DRAW", 0.01)
    figures = for_fit()[::12]
    steps = [e.step_of(f) for f in figures]
    truth = e.START | {"weights": 0.9, "layer, vllm": 2e-5, "all-reduce": 1.2e-5}
    times = list(e.seconds(truth, e.columns(steps)))
    found = e.fit(steps, times, rounds=40)
    again = e.seconds(found, e.columns(steps))
    assert sorted(abs(a / b - 1) for a, b in zip(again, times))[int(0.9 * len(times))] < 0.06


def test_a_random_third_that_was_held_out_has_the_stored_error():
    """On every fourth figure, as a check of the stored table that takes seconds: no better than it by luck alone."""
    figures = for_fit()[::4]
    steps, measured = [e.step_of(f) for f in figures], [f.seconds for f in figures]
    found = e.errors(e.held_out(steps, measured, "random"))
    assert found["median"] < 0.12 and found["p90"] < 0.35
    table = e.stored()["errors"]
    assert set(table) == {"random", "machine", "model"} and all(
        row["figures"] > 700 for row in table.values()
    )
    assert table["random"]["median"] <= found["median"], "more neighbours, smaller errors"


def test_folds_hold_out_what_they_say():
    steps = [e.step_of(f) for f in for_fit()[::40]]
    for by in ("machine", "model"):
        tested = []
        for train, test in e.folds(steps, by):
            assert {getattr(steps[i], by) for i in train}.isdisjoint(getattr(steps[i], by) for i in test)
            tested += test
        assert sorted(tested) == list(range(len(steps)))


def test_an_estimate_stands_above_its_floor_with_its_error():
    p = predict("llama-3.1-8b", "h100", batch=8, context=2048)
    assert p.held_out == "random" and p.bound.seconds <= p.low < p.seconds < p.high
    assert math.isclose(sum(p.terms.values()), p.seconds, rel_tol=1e-9)
    assert predict("mistral-7b-v0.1", "h100", batch=8, context=2048).held_out == "model"
    a100 = predict("llama-3.1-8b", "a100-80gb", batch=8, context=2048)
    assert a100.held_out == "machine" and "ampere" in a100.notes[0] and "ampere" in str(a100)
    serving = predict("llama-3.1-8b", "h100", batch=8, input_tokens=1536, output_tokens=1024)
    assert serving.seconds > p.seconds and "prompts" in serving.terms


def test_figures_that_nobody_fitted_are_met():
    """Decode alone, measured by vLLM's authors: a fitted line's values for Llama-3.1-8B, never part of the fit."""
    shown = [
        f
        for f in published()
        if f.kind == "decode only" and f.model == "llama-3.1-8b" and f.machine == "h100"
    ]
    assert len(shown) >= 6 and all(f.left_out for f in shown)
    for f in shown:
        p = predict(
            "llama-3.1-8b",
            "h100",
            batch=1,
            context=f.context,
            kv_cache_dtype=f.kv_cache_dtype,
            quantization=None,
        )
        assert 0.65 < p.seconds / f.seconds < 1.35


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"engine": "x"}, "vllm, sglang"), ({}, "context is missing"), ({"context": "1x2+3x4"}, "one length")],
)
def test_bad_arguments_are_refused(arguments, says):
    with pytest.raises(DecodebenchError, match=says):
        predict("llama-3.1-8b", "h100", **arguments)
