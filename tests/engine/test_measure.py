"""Engine step times: phases told apart, nothing prefilled, bad requests refused by name."""

import pytest

import decodebench.vllm as dbv
from decodebench.errors import DecodebenchError


def test_admission_and_resident_steps_are_told_apart():
    frame = dbv.measure_decode("tiny-llama", (300, [200, 600]), batch=2, steps=5)
    assert set(frame.admission) == {"grouped fill", "built-in fill", "real prefill"}
    assert list(frame.context.unique()) == ["300", "200 to 600"]
    table = dbv.summary(frame)
    assert len(table) == 6 and (table.steps == 5).all() and (table.batch == 2).all()
    assert (frame.seconds > 0).all()
    # a filled prompt is admitted in one step, and that step is not a decode step's time
    admitted = frame[(frame.phase == "admit") & (frame.admission != "real prefill")]
    assert len(admitted) == 4


def test_a_running_engine_is_measured_with_its_own_connector():
    with dbv.engine("tiny-llama", options={"std": 0.02}) as llm:
        frame = dbv.measure_decode(llm, 100, batch=2, steps=3)
        with pytest.raises(DecodebenchError, match="5,000 tokens and 3 steps exceed the engine's 4,096"):
            dbv.measure_decode(llm, 5000, batch=1, steps=3)
    assert set(frame.admission) == {"GroupedDecodeBenchConnector"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps 0"),
        ({"batch": 0}, "batch 0"),
        ({"admissions": ["magic"]}, "no admission 'magic'"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message):
    with pytest.raises(DecodebenchError, match=message):
        dbv.measure_decode("tiny-llama", 100, **arguments)
