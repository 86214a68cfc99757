"""timing: statistics, clocks, bandwidth, provenance. No assertion about how fast anything is."""

import json
import time

import pytest
import torch

from decodebench.measure import bandwidth, clock, provenance


def test_quantiles_are_linear_between_samples():
    t = clock.Timing((4.0, 1.0, 3.0, 2.0, 5.0), False, "cpu", "by hand", calls_per_sample=3)
    assert (t.median, t.q1, t.q3) == (3.0, 2.0, 4.0)
    assert t.p10 == pytest.approx(1.4) and t.p90 == pytest.approx(4.6)
    assert t.steps == 15
    assert clock.Timing((2.0,), True, "cpu", "by hand").p90 == 2.0


@pytest.mark.parametrize("cold", [False, True])
def test_measure_times_the_step_and_says_how(cold):
    t = clock.measure(lambda: time.sleep(0.002), cold=cold, min_seconds=0.02, min_steps=4)
    assert t.median >= 0.002
    assert t.steps >= 4 and t.cold is cold
    assert ("cold" if cold else "warm") in str(t)
    assert t.to_dict()["cache_state"] == ("cold" if cold else "warm")


def test_cold_evicts_outside_the_clock(monkeypatch):
    monkeypatch.setattr(clock, "_eviction_bytes", lambda: 1 << 20)
    calls = []
    t = clock.measure(lambda: calls.append(1), cold=True, min_seconds=0, min_steps=7, max_steps=7)
    assert t.steps == 7 and len(calls) == 8  # one warm-up before the clock
    assert "1 MiB" in t.method


def test_threads_are_restored():
    before = torch.get_num_threads()
    clock.measure(lambda: None, cold=True, min_seconds=0, min_steps=1, threads=1)
    assert torch.get_num_threads() == before


def test_bandwidth_is_positive_and_cached(monkeypatch):
    calls = []
    real = bandwidth._measure_bandwidth
    monkeypatch.setattr(bandwidth, "_measure_bandwidth", lambda *a: calls.append(a) or real(*a))
    bandwidth._cached_bandwidth.cache_clear()
    first = bandwidth.bandwidth("cpu", max_age=1e9)
    assert bandwidth.bandwidth("cpu", max_age=1e9) is first and len(calls) == 1
    assert min(first.read, first.copy, first.memset, first.update) > 0


def test_provenance_is_json_and_names_nobody():
    p = provenance.provenance({"block_size": 16}, seed=3)
    text = json.dumps(p)
    assert p["settings"] == {"block_size": 16} and p["seed"] == 3 and p["torch"] == torch.__version__
    assert p["date"].endswith("+00:00") and p["cores"] >= 1
    assert "/home" not in text and "/root" not in text


def test_bad_requests_are_named():
    with pytest.raises(clock.TimingError, match="max_steps"):
        clock.measure(lambda: None, min_steps=5, max_steps=2)
    with pytest.raises(clock.TimingError, match="meta"):
        clock.measure(lambda: None, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(clock.TimingError, match="cuda"):
            bandwidth.bandwidth("cuda")


def test_a_busy_machine_is_named(monkeypatch):
    monkeypatch.setattr(clock.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(clock.os, "getloadavg", lambda: (5.0, 0.0, 0.0))
    assert "load 5.0 on 2 cores" in clock.busy()
    monkeypatch.setattr(clock.os, "getloadavg", lambda: (2.1, 9.0, 9.0))
    assert clock.busy() is None
