"""Short random runs of what ``tests/support`` runs at length: scenarios without a model, mutated fills."""

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed here: run `make test-vllm`")

import mutations
import scenarios

import decodebench.vllm as dbv


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_random_scenarios_of_vllms_own_scheduler_and_builders(first):
    for seed in range(first, first + 100):
        try:
            scenarios.Scenario(seed).run()
        except Exception as error:
            raise AssertionError(f"scenario {seed}: {error}") from error


@pytest.mark.parametrize("seed", [12914])
def test_a_prompt_that_hits_all_of_what_another_of_its_step_fills_is_not_taken_for_it(seed):
    scenarios.Scenario(seed).run()


@pytest.mark.parametrize("model", dbv.TINY)
def test_a_byte_audit_sees_each_mutation_of_a_fill_and_nothing_where_there_is_none(model):
    caught, wrong = mutations.trials(model, 3, seed=1)
    assert not wrong, wrong[0]
    assert caught["nothing"] == 3 * len(mutations.KINDS)
