"""Fixtures of every room's tests."""

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """Small shapes gain nothing from threads, and lose much beside other processes."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
