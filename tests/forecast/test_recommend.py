"""Recommendations: better beyond noise, with a reason; never what vLLM refuses or cannot be told."""

import pytest

from decodebench.forecast.recommend import Choice, RecommendError, recommend
from decodebench.forecast.simulate import simulate
from decodebench.forecast.step_costs import CostError, Fitted, step_floor
from decodebench.forecast.traces import read_traffic
from decodebench.forecast.traffic import synthetic_traffic
from decodebench.layout.plan import plan


@pytest.fixture(scope="module")
def traffic():
    return synthetic_traffic(120, 30.0, (400, 0.5), (60, 0.5), seed=1)


def test_a_crowded_cache_is_given_smaller_numbers_and_a_reason(traffic):
    axes = {"kv_cache_dtype": ("auto", "fp8"), "grouping": ("auto", "fixed(2)")}
    found = recommend(
        "llama-3.1-8b", "h100", traffic, "1GiB", ttft=2.0, axes=axes, efficiency=0.5, progress=False
    )
    assert found.best.choice == Choice(kv_cache_dtype="fp8")
    assert found.best.facts["goodput"] > found.start.facts["goodput"]
    assert found.steps[0].startswith("kv_cache_dtype fp8 instead of auto: ") and "because" in found.steps[0]
    assert "--kv-cache-dtype fp8" in found.flags and "grouping" not in found.flags
    table = found.table()
    assert (
        table["goodput"].is_monotonic_decreasing
        and not table.loc[table["grouping"] != "auto", "offered"].any()
    )
    assert found.best.choice.offered and found.steps[0] in str(found)


def test_what_is_refused_is_named_and_not_recommended(traffic):
    found = recommend(
        "gemma-3-1b", "h100", traffic, "1GiB", axes={"kv_cache_dtype": ("auto", "fp4")}, progress=False
    )
    refused = [one for one in found.tried if one.refused]
    assert len(refused) == 1 and "fp4" in refused[0].refused and found.best is found.start
    assert found.table()["reason"].notna().sum() == 1 and "nothing that was tried is better" in str(found)


def test_searches_that_cannot_be_are_refused(traffic):
    with pytest.raises(RecommendError, match="colour"):
        recommend("gemma-3-1b", "h100", traffic, axes={"colour": ("red",)})
    with pytest.raises(RecommendError, match="serve nothing"):
        recommend("llama-3.1-8b", "h100", traffic, "64KiB")


def test_steps_of_the_floor_are_bounds_own():
    """A batch that decodes takes what ``bound`` says of it."""
    steps = step_floor("llama-3.1-8b", "h200", launch=0.0)
    alone = read_traffic("azure-code-2023").first(1)
    layout = plan("llama-3.1-8b", "4GiB", max_model_len="auto")
    found = simulate(layout, alone, steps, progress=False, plain=True)
    prompt, output = int(alone.prompt[0]), int(alone.output[0])
    wanted = sum(steps.deployment.at(1, prompt + k).seconds for k in range(1, output))
    assert found.latencies["tpot"][0] * (output - 1) == pytest.approx(wanted, rel=0.01)


def test_measured_steps_are_fitted_and_bad_ones_refused():
    rows = [
        {"batch": b, "context": c, "seconds": 4e-3 + 1e-5 * b + 2e-8 * b * c}
        for b in (1, 8, 64)
        for c in (100, 4000)
    ]
    fitted = Fitted.of(rows)
    assert (fitted.step, fitted.sequence, fitted.read) == pytest.approx((4e-3, 1e-5, 2e-8))
    for bad in ([], rows[:2], [{"batch": 1}], [rows[0] | {"seconds": 0}] * 3):
        with pytest.raises(CostError):
            Fitted.of(bad)
    for efficiency in (0, 1.5, float("nan")):
        with pytest.raises(CostError):
            step_floor("llama-3.1-8b", "h200", efficiency)
