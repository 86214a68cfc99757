"""Every backend's view of the cache: filled exactly, zeroed with a reason, or refused in one sentence."""

import json
from pathlib import Path

import pytest

views = pytest.importorskip(
    "views", reason="vLLM is not installed here: run `make test-vllm`", exc_type=ImportError
)

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def outcomes():
    return [views.run(case) for case in views.cases()]


def test_nothing_is_filled_wrongly_or_zeroed_without_a_word(outcomes):
    assert [(o.case.backend, o.case.name, o.sentence) for o in outcomes if o.result == "wrong"] == []


def test_what_is_refused_names_kernel_and_release(outcomes):
    refused = [o for o in outcomes if o.result == views.REFUSED]
    assert {o.case.backend for o in refused} == {"MAMBA2, odd convolution"}
    for outcome in refused:
        assert f"MAMBA2 in vLLM {views.vllm.__version__}" in outcome.sentence
        assert "\n" not in outcome.sentence


def test_the_stored_table_is_this_releases(outcomes):
    stored = json.loads(views.STORED.read_text())
    release = views.compat.release(views.vllm.__version__)
    if release not in stored:
        pytest.skip(f"no table stored for {release}: python tests/support/views.py --write")
    assert views.table(outcomes) == stored[release]


def test_readme_shows_the_stored_table():
    assert views.readme_table() in README.read_text()
