"""Every release's own layouts: stored beside 0.32's (goldens/releases.jsonl.gz), and planned by its rules."""

from pathlib import Path

import pytest
from stored_layouts import cases, digest, like, plan_of, releases

from decodebench.models.engines import ENGINES, FIRST_KNOWN, RULES

README = Path(__file__).parents[2] / "README.md"
CASES = {case.name: case for case in cases()}
CHANGED = [(engine, name) for engine, (_, changed) in releases().items() for name in changed]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_stored_is_what_the_release_computed(engine):
    """The hash is of the release's own numbers, made where it was installed."""
    summary, changed = releases()[engine]
    layouts = {name: changed.get(name, case.layout) for name, case in CASES.items()}
    assert (summary["cases"], summary["equal_to_0.32"]) == (len(layouts), len(layouts) - len(changed))
    assert digest(layouts) == summary["sha256"]


@pytest.mark.parametrize(("engine", "name"), CHANGED, ids=[f"{e}-{n}" for e, n in CHANGED])
def test_a_layout_that_changed_is_planned_as_the_release_does(engine, name):
    assert like(plan_of(CASES[name], engine), CASES[name]) == releases()[engine][1][name]


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "vllm-0.32"])
def test_nothing_else_changes(engine):
    _, changed = releases()[engine]
    for name, case in CASES.items():
        if name not in changed:
            assert like(plan_of(case, engine), case) == case.layout, name


def test_readme_lists_the_rules():
    text = README.read_text()
    assert all(rule.what in text for rule in RULES)
    counts = [releases()[engine] for engine in ("vllm-0.30", "vllm-0.31", "vllm-0.33")]
    assert f"all {len(CASES)} stored cases" in text
    assert (
        "{} of\nthem are others in 0.30 than in 0.32, {} in 0.31, {} in 0.33".format(
            *(len(changed) for _, changed in counts)
        )
        in text
    )


def test_every_rule_names_a_known_release():
    assert {rule.since for rule in RULES} | set(FIRST_KNOWN.values()) <= set(ENGINES[1:])
    assert len({rule.name for rule in RULES}) == len(RULES)
