"""A sentence claims nothing that its rows contradict: each is tried on the data that used to make it lie."""

from types import SimpleNamespace

import pandas as pd
import pytest

import decodebench as db
from decodebench.coverage.trial import before_and_after
from decodebench.show import verdicts


def faults(caught=17, of=17):
    return pd.DataFrame({"caught": [True] * caught + [False] * (of - caught)})


@pytest.mark.parametrize(
    ("model", "title", "says"),
    [
        ("tiny-llama", "nothing changes here: this model has one group", "one group, so group 0's blocks"),
        (
            "tiny-gemma3",
            "decode reads memory that was not filled",
            "0% of what decode reads was filled; group by group",
        ),
    ],
)
def test_the_story_is_told_only_where_it_happens(model, title, says):
    before, after = before_and_after(model, 2, 100)
    assert title in verdicts.difference(before, after)
    text, ok = verdicts.story(before, after, faults())
    assert says in text and ok is True
    assert verdicts.story(before, after, faults(16)) == (text.replace("17 of 17", "16 of 17"), False)


def test_a_fault_that_leaves_several_groups_covered_is_not_called_one_group():
    same = SimpleNamespace(
        audit=SimpleNamespace(coverage=1.0, ok=True, layout=SimpleNamespace(groups=[1, 2]))
    )
    assert verdicts.difference(same, same).endswith("this batch is covered all the same")
    bad = SimpleNamespace(
        audit=SimpleNamespace(coverage=0.4, ok=False, layout=SimpleNamespace(groups=[1, 2]))
    )
    text, ok = verdicts.story(bad, bad, faults())
    assert ok is False and "group by group, 40.0%" in text


def test_a_models_verdict_reports_what_was_found_for_both_fills():
    layout = db.plan("tiny-gemma3", memory="64MiB", max_model_len="auto")
    text, ok = verdicts.model(layout, 256, 0.25, 0.5)
    assert "covers 25.0%" in text and "own table 50.0%" in text and ok is False
    assert "weights not counted" in text and "256 tokens" in text
    assert verdicts.model(layout, 256, 0.25, 1.0)[1] is True
    one = db.plan("tiny-llama", memory="64MiB", max_model_len="auto")
    assert "one group, so group 0's table is the right one" in verdicts.model(one, 1, 1.0, 1.0)[0]


def ratios(*rows):
    columns = ["fault", "block_size_ratio", "coverage", "worst_group_coverage"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.assign(status="ok", reason=None, model="m", grouping="auto")


def test_equal_block_sizes_are_no_finding_and_a_hole_is_not_green():
    equal = ratios((None, 1, 1.0, 1.0), ("A2", 1, 1.0, 1.0))
    text, ok = verdicts.block_ratio(equal)
    assert "equal in every case measured" in text and "leaves a group" not in text and ok is True
    differ = ratios((None, 2, 1.0, 1.0), ("A2", 2, 0.9, 0.0))
    assert "leaves a group at 0% where sizes differ by 2x" in verdicts.block_ratio(differ)[0]
    harmless = ratios((None, 2, 1.0, 1.0), ("A2", 2, 1.0, 1.0))
    assert "leaves" not in verdicts.block_ratio(harmless)[0]
    broken = ratios((None, 2, 0.8, 0.8), ("A2", 2, 0.9, 0.0))
    assert verdicts.block_ratio(broken)[1] is False and "fills 80.0%" in verdicts.block_ratio(broken)[0]
    refused = differ.assign(status="refused", reason="too large")
    assert (
        verdicts.block_ratio(refused)[0].startswith("No case could be measured")
        and "too large" in (verdicts.block_ratio(refused)[0])
    )


def layouts(rows):
    frame = pd.DataFrame(rows, columns=["model", "grouping", "context", "concurrency"])
    frame["longest_context"] = frame["context"].astype(int)
    frame["status"] = ["ok" if v == v else "refused" for v in frame["concurrency"]]
    frame["reason"] = None
    return frame


def test_groupings_are_compared_at_every_length_and_the_refused_are_named():
    table = layouts(
        [
            ("g", "hybrid", "2048", 100.0),
            ("g", "promoted", "2048", 108.0),
            ("g", "hybrid", "32768", 100.0),
            ("g", "promoted", "32768", 40.0),
            ("j", "hybrid", "2048", 15.46),
            ("j", "packed", "2048", 15.48),
            ("j", "promoted", "2048", None),
            ("r", "hybrid", "2048", None),
            ("r", "packed", "2048", 3.0),
            ("a", "hybrid", "2048", 3.0),
        ]
    )
    text, ok = verdicts.groupings(table)
    assert ok is None
    assert "g at 2,048 tokens: promoted fits 8 % more" in text, "shorter lengths are told too"
    assert "g at 32,768 tokens: no other fits more, promoted 60 % fewer" in text
    assert "j at 2,048 tokens: packed fits less than 1 % more (refused: promoted)" in text
    assert "r at 2,048 tokens: hybrid was refused, so nothing to compare with" in text
    assert "a at 2,048 tokens: hybrid alone, 3.00 requests" in text
    assert "hybrid was not asked for" in verdicts.groupings(table[table["grouping"] != "hybrid"])[0]
    assert verdicts.groupings(table[:0]) == ("No grouping was asked for.", None)


def test_the_order_changes_only_where_it_does():
    table = layouts(
        [
            (m, g, c, v)
            for m, vs in (("x", (1, 2, 1, 2)), ("y", (1, 2, 3, 2)))
            for (g, c), v in zip(
                [("hybrid", "64"), ("packed", "64"), ("hybrid", "128"), ("packed", "128")], vs
            )
        ]
    )
    assert verdicts.order(table) == "Short requests rank the groupings otherwise on y"
    assert verdicts.order(table[table["model"] == "x"]) == "Short requests rank the groupings as long ones do"
    assert verdicts.order(table[table["context"] == "64"]) == "Requests that fit, by grouping"


def test_starting_costs_what_one_token_reserves():
    """Gemma was called the dearest to start, by a tangent drawn at 32,768 tokens."""
    rows = db.sweep.run(
        {
            "model": ["gemma-3-1b", "jamba-v0.1"],
            "context": [64, 32768],
            "measure": "layout",
            "memory": "40GiB",
            "max_model_len": "auto",
        }
    )
    text, _ = verdicts.capacity(rows)
    assert "KV cache only" in text and "most on jamba-v0.1" in text and "least on gemma-3-1b" in text
    assert "at 32,768 tokens a further token" in text
    alone, _ = verdicts.capacity(rows[rows["model"] == "gemma-3-1b"])
    assert "most" not in alone and "one of 32,768 tokens" in alone
    assert verdicts.capacity(rows.assign(status="refused", reason="no"))[0].startswith("No case could be")


@pytest.mark.parametrize(
    ("ratios_", "says"),
    [
        ([2.0, 2.0], "2.00 times as many"),
        ([1.0, 1.0], "as many requests fit as without"),
        ([1.0, 1.84], "1.00 to 1.84"),
    ],
)
def test_what_a_smaller_type_gives_is_read_off_the_rows(ratios_, says):
    rows = [
        {"model": "m", "longest_context": i, "kv_cache_dtype": d, "concurrency": v, "status": "ok"}
        for i, r in enumerate(ratios_)
        for d, v in (("auto", 10.0), ("fp8", 10.0 * r))
    ]
    assert says in verdicts.gain(pd.DataFrame(rows), "fp8")
    assert "not measured" in verdicts.gain(pd.DataFrame(rows[::2]), "fp8")


def test_growth_and_short_prompts_follow_their_rows():
    table = pd.DataFrame(
        {"status": "ok", "block_in_use": [16, 16], "blocks_per_request": 1.0, "num_blocks": 4}
    )
    assert verdicts.growth(table) == "Blocks cover 16 tokens whatever the types"
    assert "16 to 32 tokens" in verdicts.growth(table.assign(block_in_use=[16, 32]))
    assert "at most 25.0% of all blocks" in verdicts.short_prompt(table, 12)
    assert verdicts.short_prompt(table.assign(status="refused"), 1) == (
        "No combination could be planned for a request of 1 token"
    )


def test_the_count_of_faults_that_leave_something_else_is_a_count():
    table = pd.DataFrame(
        {"status": "ok", "fault": [None, "A1", "A2", "A3"], "coverage": [1.0, 0.5, 1.0, 1.0]}
    )
    assert verdicts.history(table).startswith("1 of 3 historic ways of filling leave")


def steps(times, spread=0.05, model="m"):
    return pd.DataFrame(
        [
            {
                "model": model,
                "block_in_use": b,
                "median_s": t,
                "q1_s": t * (1 - spread),
                "q3_s": t * (1 + spread),
            }
            for b, t in times.items()
        ]
    ).assign(status="ok", reason=None, limit_share=0.5, grouping="auto")


def test_block_sizes_differ_only_where_both_runs_say_so():
    quick = steps({16: 2.0, 64: 1.0})
    text, _ = verdicts.latency(quick, steps({16: 2.1, 64: 1.1}), "cpu")
    assert "blocks of 64 tokens are fastest, 2.00x as fast as 16, in both runs" in text
    for again in (steps({16: 1.0, 64: 1.0}), steps({16: 1.0, 64: 2.0}), quick[:0]):
        assert "cannot tell apart" in verdicts.latency(quick, again, "cpu")[0]
    assert "cannot tell apart" in verdicts.latency(steps({16: 2.0, 64: 1.0}, 0.5), quick, "cpu")[0]
    twice = pd.concat([steps({16: 8.32}), steps({16: 4.85})])
    assert "one block size, 16 tokens" in verdicts.latency(twice, twice, "cpu")[0], (
        "one layout asked for twice"
    )
    refused = quick.assign(status="refused", reason="packed")
    assert verdicts.latency(refused, refused, "cpu")[0].startswith("No step could be measured")


def test_settings_of_engines_are_never_pooled():
    table = pd.DataFrame(
        [
            {"setting": s, "model": "m", "connector": c, "required": 100, "filled": f, "zeroed": 0}
            for s, c, f in (("a", "ours", 100), ("a", "theirs", 90), ("b", "ours", 100), ("b", "theirs", 10))
        ]
    )
    text, _ = verdicts.engine(table)
    assert "a (1 model): ours 100%, theirs 90.0%; b (1 model): ours 100%, theirs 10.0%" in text
    assert "50" not in text


def test_a_fill_names_the_cases_at_both_ends():
    costs = pd.DataFrame(
        {
            "values": "constant",
            "case": ["large", "shared"],
            "bytes": [8 << 20, 128 << 10],
            "of_memset": [0.9, 0.2],
            "vs_naive": [2.0, None],
        }
    )
    text, _ = verdicts.fill(costs)
    assert "20.0% of memset's speed (shared, 128 KiB) to 90% (large, 8 MiB)" in text and "2.0 times" in text
