"""The CUDA clock on a virtual timeline: what it says a step takes is what the step takes."""

import pytest
import torch
from timeline import Timeline

from decodebench.measure import clock

SIZES = (2e-6, 5e-6, 12e-6, 40e-6, 300e-6, 2e-3)


@pytest.fixture
def on(monkeypatch):
    """Puts the clock on a timeline."""

    def put(timeline):
        monkeypatch.setattr(clock, "torch", timeline.torch(torch))
        monkeypatch.setattr(clock.time, "monotonic", lambda: timeline.host)
        return timeline

    return put


def timed(timeline, **options):
    return clock.measure(timeline.step, device="cuda", min_seconds=0.05, **options)


@pytest.mark.parametrize("seconds", SIZES)
@pytest.mark.parametrize("launch", [3e-6, 8e-6, 15e-6])
def test_a_warm_step_takes_what_it_takes(seconds, launch, on):
    timeline = on(Timeline(seconds, launch=launch))
    found = timed(timeline)
    assert found.median == pytest.approx(seconds, rel=0.02)
    assert found.p90 == pytest.approx(seconds, rel=0.02)
    assert found.steps >= 5 and found.steps * seconds >= 0.05 and "graph" in found.method
    assert timeline.stream == "default"


@pytest.mark.parametrize("seconds", SIZES)
def test_a_cold_step_takes_what_it_takes_behind_an_emptied_l2(seconds, on):
    timeline = on(Timeline(seconds / 3, cold=seconds))
    found = timed(timeline, cold=True)
    assert found.median == pytest.approx(seconds, rel=0.02)
    assert found.cold and found.calls_per_sample == 1 and "empties the L2" in found.method


def test_the_clocks_of_an_idle_card_rise_before_the_first_sample(on):
    timeline = on(Timeline(20e-6))
    began = []
    wait = clock._warm_up

    def warm_up(play):
        wait(play)
        began.append(timeline.host)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "_warm_up", warm_up)
        timed(timeline)
    assert began[0] >= 0.3


def test_a_capture_that_fails_leaves_the_stream_as_it_was_and_says_so(on):
    timeline = on(Timeline(50e-6, capture_fails=True))
    found = timed(timeline)
    assert timeline.stream == "default"
    assert "eagerly" in found.method and "not permitted" in found.method and "\n" not in found.method
    assert found.median == pytest.approx(50e-6, rel=0.02)


def test_a_device_that_is_not_there_is_named(on):
    on(Timeline(1e-3))
    with pytest.raises(clock.TimingError, match="cuda:7.*cuda:0"):
        clock.require_device("cuda:7")
