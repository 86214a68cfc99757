"""Short random runs of what ``tests/support`` runs at length: scenarios without a model, mutated fills."""

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed here: run `make test-vllm`")

import mutations
import scenarios
import stress

import decodebench.vllm as dbv
from decodebench.cache.faults import FAULTS


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_random_scenarios_of_vllms_own_scheduler_and_builders(first):
    for seed in range(first, first + 100):
        try:
            scenarios.Scenario(seed).run()
        except Exception as error:
            raise AssertionError(f"scenario {seed}: {error}") from error


@pytest.mark.parametrize("seed", [531])
def test_a_prompt_that_hits_all_of_what_another_of_its_step_fills_is_not_taken_for_it(seed):
    scenarios.Scenario(seed).run()


# A13, a preemption forgotten, leaves right values at a wrong cost: the connector's own tests see it
@pytest.mark.parametrize("fault", ["A2", "A3", "A5", "A18"])
def test_a_fault_of_the_plan_shows_in_some_scenario(fault, monkeypatch):
    monkeypatch.setattr("decodebench.vllm.connector.ConnectorScheduler", FAULTS[fault].scheduler)
    with pytest.raises(AssertionError):
        for seed in range(100):
            scenarios.Scenario(seed).run()


@pytest.mark.parametrize("model", dbv.TINY)
def test_a_byte_audit_sees_each_mutation_of_a_fill_and_nothing_where_there_is_none(model):
    caught, wrong = mutations.trials(model, 3, seed=1)
    assert not wrong, wrong[0]
    assert caught["nothing"] == 3 * len(mutations.KINDS)


@pytest.mark.parametrize("setting", ["plain", "startup fill"])
def test_an_engine_under_stress_gives_no_false_alarm_and_no_false_ok(setting):
    found = stress.run("tiny-gemma3", setting, seed=1, requests=10)
    assert not found.wrong, found.wrong[0]
    assert found.seen["filling steps"] > 3
