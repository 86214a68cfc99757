"""Bad input of every kind, a short random run; ``tests/support/bad_input.py`` is the long one."""

import pytest

pytest.importorskip("pandas")

import bad_input

from decodebench.errors import DecodebenchError


@pytest.mark.parametrize("kind", list(bad_input.KINDS))
def test_each_is_a_right_answer_or_one_line(kind):
    count = {"a million layers": 3, "config": 80, "result folder": 20}.get(kind, 60)
    _, wrong, _ = bad_input.run(kind, count, seed=7)
    assert not wrong, wrong[:3]


def test_an_error_is_one_line_whatever_it_was_told():
    text = str(DecodebenchError("a\nb\r\nc " + "x" * 10_000 + " the remedy"))
    assert "\n" not in text and len(text) < 2100 and text.startswith("a b") and text.endswith("the remedy")
