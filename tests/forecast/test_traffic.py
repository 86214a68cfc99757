"""Made traffic: rates, bursts, days, lengths, what is shared."""

import numpy as np
import pytest

from decodebench.forecast.traces import read_traffic
from decodebench.forecast.traffic import ENDLESS, TrafficError, arrival_times, synthetic_traffic


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "diurnal"])
def test_arrivals_come_at_their_rate_in_order(arrivals):
    times = arrival_times(50_000, 5.0, arrivals, period=1000.0)
    assert times[0] == 0 and (np.diff(times) >= 0).all()
    assert 50_000 / times[-1] == pytest.approx(5, rel=0.05)


def test_gaps_vary_as_asked():
    for burstiness in (1.0, 4.0, 9.0):
        gaps = np.diff(arrival_times(200_000, 2.0, "gamma", burstiness=burstiness))
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(burstiness, rel=0.1)


def test_days_have_their_peak_in_the_first_half():
    times = arrival_times(40_000, 4.0, "diurnal", period=1000.0, swing=0.8)
    early = (times % 1000 < 500).mean()
    # the mean of 1 + 0.8 sin over half a turn
    assert early == pytest.approx(0.5 + 0.8 / np.pi, abs=0.02)


def test_lengths_have_their_median():
    traffic = synthetic_traffic(20_000, prompt=(800, 1.0), output=50)
    assert np.median(traffic.prompt) == pytest.approx(800, rel=0.05) and set(traffic.output) == {50}


def test_conversations_repeat_what_was_said():
    traffic = synthetic_traffic(
        400, prompt=(50, 0.5), output=(20, 0.5), turns=4, system_prompts=2, system_tokens=64
    )
    assert traffic.segments.start.tolist() == list(range(0, 2 * len(traffic) + 1, 2))
    own = traffic.segments.ids[1::2]
    for conversation in np.unique(own)[:20]:
        turns = np.flatnonzero(own == conversation)
        said = traffic.prompt[turns] + traffic.output[turns]
        assert (traffic.prompt[turns][1:] > said[:-1]).all()
    assert set(traffic.segments.ends[0::2]) == {64} and set(traffic.segments.ends[1::2]) == {ENDLESS}
    assert set(traffic.segments.ids[0::2]) <= {0, 1} and own.min() >= 2


def test_the_same_seed_makes_the_same_traffic():
    one, two, other = (synthetic_traffic(100, seed=seed) for seed in (3, 3, 4))
    assert one.table().equals(two.table()) and not one.table().equals(other.table())


def test_first_rate_and_resample():
    traffic = read_traffic("mooncake-conversation")
    few = traffic.first(100)
    assert len(few) == 100 and len(few.segments.ids) == few.segments.start[-1]
    assert few.at_rate(1.0).duration == pytest.approx(99.0)
    with pytest.raises(TrafficError, match="arrive together"):
        traffic.first(5).at_rate(1.0)
    drawn = traffic.resample(500, rate=3.0)
    pairs = set(zip(traffic.prompt.tolist(), traffic.output.tolist()))
    assert set(zip(drawn.prompt.tolist(), drawn.output.tolist())) <= pairs and drawn.segments is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"requests": 0},
        {"rate": 0.0},
        {"rate": float("inf")},
        {"arrivals": "weekly"},
        {"prompt": (10,)},
        {"prompt": 0},
        {"prompt": (10, -1)},
        {"prompt": "many"},
        {"turns": 0},
        {"system_prompts": -1},
        {"system_prompts": 1, "system_tokens": 0},
        {"arrivals": "diurnal", "swing": 1.0},
        {"arrivals": "gamma", "burstiness": 0.0},
    ],
)
def test_traffic_that_cannot_be_is_refused(arguments):
    with pytest.raises(TrafficError) as error:
        synthetic_traffic(**{"requests": 10} | arguments)
    assert "\n" not in str(error.value)
