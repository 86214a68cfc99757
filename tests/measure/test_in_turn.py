"""in_turn: who is timed when, what a ratio is, and that other work is noticed."""

import os
import subprocess
import sys

import pytest

from decodebench.measure import in_turn as module
from decodebench.measure.in_turn import InTurn, in_turn


def test_ways_take_turns_and_the_first_turn_is_not_counted():
    calls = []
    found = in_turn({name: lambda name=name: calls.append(name) for name in "ab"}, turns=3, rounds=1)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert {name: len(times) for name, times in found.samples.items()} == {"a": 3, "b": 3}


def test_a_ratio_is_of_one_turn_each():
    """A bus twice as slow in some turns changes both ways, and not their ratio."""
    found = InTurn({"ours": (1.0, 2.0, 1.0, 2.0), "memset": (0.5, 1.0, 0.5, 1.0)}, "cpu")
    assert found.ratio("ours", "memset") == 0.5 and found.scatter("ours", "memset") == 0.0
    assert found.median("ours") == 1.5 and found.disturbed("ours", "memset") is None


def test_turns_that_do_not_agree_are_disturbed():
    found = InTurn({"ours": (1.0, 1.0, 1.0, 1.0), "memset": (0.5, 1.0, 2.0, 4.0)}, "cpu")
    assert "scatter" in found.disturbed("ours", "memset")
    busy = InTurn({"ours": (1.0, 1.0), "memset": (1.0, 1.0)}, "cpu", others=0.4)
    assert "40%" in busy.disturbed("ours", "memset")


def test_a_round_that_scatters_is_made_again_and_the_calmest_counts(monkeypatch):
    rounds = [(1.0, 9.0, 1.0), (1.0, 2.0, 1.0), (1.0, 5.0, 1.0)]
    made = iter(rounds)
    monkeypatch.setattr(
        module, "_one_round", lambda *_: InTurn({"a": next(made), "b": (1.0, 1.0, 1.0)}, "cpu")
    )
    assert in_turn({"a": None, "b": None}).samples["a"] == (1.0, 2.0, 1.0)
    made = iter([(1.0, 1.0, 1.0), (0.0, 0.0, 0.0)])
    assert in_turn({"a": None, "b": None}).samples["a"] == (1.0, 1.0, 1.0), "a calm one is enough"


@pytest.mark.skipif(module._core_seconds(()) is None, reason="only where Linux tells")
def test_other_work_is_seen_unless_it_is_the_callers_own():
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())]
    try:
        found = in_turn({"a": lambda: sum(range(10000)), "b": int}, seconds=0.6, rounds=1)
        assert found.others > 0.3 and found.crowded()
        pids = [process.pid for process in spinning]
        ours = in_turn({"a": lambda: sum(range(10000)), "b": int}, seconds=0.6, rounds=1, own=pids)
        assert ours.others < found.others
    finally:
        for process in spinning:
            process.kill()
            process.wait()
