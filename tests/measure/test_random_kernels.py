"""A short run of ``support/random_kernels.py``; the long one is a command with a seed."""

import random

import pytest
import random_kernels

from decodebench.cache.values import Constant, Normal

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("number", range(0, 120, 20))
def test_random_shapes_agree_with_float64(number):
    for each in range(number, number + 20):
        random_kernels.check_case(each, seed=14)


@pytest.mark.parametrize("values", [Constant(0.015), Normal(0.015, 0.02)], ids=["constant", "normal"])
def test_every_flipped_byte_is_found(values):
    for number in range(40):
        random_kernels.check_flip(random.Random(f"14/flip/{number}"), values)


def test_a_wrong_kernel_is_named_with_its_shape(monkeypatch):
    """The check means something: a kernel that reads one token too many meets poison."""
    attend = random_kernels.cpp.attend

    def one_more(q, view, table, start, stop, **options):
        inside = stop % view.shape[2] != 0
        return attend(q, view, table, start, stop + inside, **options)

    monkeypatch.setattr(random_kernels, "BACKENDS", {"broken": random_kernels.cpp})
    monkeypatch.setattr(random_kernels.cpp, "attend", one_more)
    with pytest.raises(AssertionError, match="attention .*broken: relative error nan"):
        for number in range(40):
            random_kernels.check_case(number, seed=14)
