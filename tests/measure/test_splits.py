"""How a batch is cut into programs: every position once, and no multiprocessor with much more than the others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodebench.measure.kernels.splits import Card, best_chunk, busiest_share, items, iterations

ranges_ = st.lists(
    st.tuples(st.integers(0, 700), st.integers(0, 2000)).map(sorted).map(tuple), min_size=1, max_size=9
)


@given(ranges_, st.integers(1, 20), st.sampled_from([16, 32, 64]))
def test_every_position_lies_in_exactly_one_item(ranges, count, tokens):
    work = items(ranges, count * tokens, tokens)
    for request, (start, stop) in enumerate(ranges):
        mine = sorted((i.first, i.last, i.part) for i in work if i.request == request)
        assert [p for first, last, _ in mine for p in range(first, last)] == list(range(start, stop))
        assert len(mine) >= 1, "an empty request writes its zeros"
        assert all((part < 0) == (len(mine) == 1) for _, _, part in mine)
        assert all(first % tokens == 0 for first, _, _ in mine[1:])
    parts = sorted(i.part for i in work if i.part >= 0)
    assert parts == list(range(len(parts)))
    assert [iterations(i, tokens) for i in work if i.last == i.first] == [0] * sum(a == b for a, b in ranges)


@given(ranges_, st.sampled_from([16, 64]))
def test_the_parts_of_a_request_follow_each_other(ranges, tokens):
    by_request = {}
    for item in items(ranges, tokens, tokens):
        by_request.setdefault(item.request, []).append(item.part)
    for parts in by_request.values():
        assert parts == [-1] or sorted(parts) == list(range(min(parts), max(parts) + 1))


#: programs a step of the batch has for each item, tokens of a tile, programs a multiprocessor holds, part's share
KERNELS = {
    "llama": (8, 32, 6, 0.25),
    "gemma-3-1b": (1, 32, 3, 0.25),
    "qwen3-next": (2, 32, 3, 0.5),
    "MLA, 128 heads": (2, 64, 1, 3.5),
    "MLA, 32 heads": (1, 64, 1, 1.8),
}


@pytest.mark.parametrize("sms", [108, 132, 148])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_multiprocessor_has_much_more_than_the_others(kernel, sms):
    """The busiest one's share: at least three quarters, from one request to 256, from 1K to 128K tokens."""
    tiles, tokens, held, share = KERNELS[kernel]
    card = Card(sms, held)
    for batch in (1, 8, 33, 256):
        for context in (1024, 8192, 131072):
            if batch * context <= 1 << 20:
                ranges = ((0, context),) * batch
                chunk = best_chunk(ranges, tiles, tokens, card, share)
                found = busiest_share(items(ranges, chunk, tokens), tiles, tokens, card)
                assert found >= 0.75, f"{batch} × {context}: {found:.2f} with chunks of {chunk}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_long_request_among_short_ones_is_shared_out(kernel):
    tiles, tokens, held, share = KERNELS[kernel]
    card = Card(132, held)
    ranges = (*(((0, 512),) * 7), (0, 8192))
    chunk = best_chunk(ranges, tiles, tokens, card, share)
    assert busiest_share(items(ranges, chunk, tokens), tiles, tokens, card) >= 0.6


@settings(max_examples=25)
@given(ranges_, st.integers(1, 16))
def test_the_chunk_is_whole_tiles(ranges, tiles):
    chunk = best_chunk(tuple(ranges), tiles, 32, Card(8, 2), 0.3)
    assert chunk >= 32 and chunk % 32 == 0
