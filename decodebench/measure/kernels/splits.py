"""How a batch's attention is cut into programs: a chunk of tokens for each, alike for all requests.

A request of few tokens needs few programs, a long one many, whatever else is in the batch; so the
number of splits is not chosen, the chunk is. The search is over chunk sizes, as FlashInfer's scheduler
does it (``scheduler.cuh``), with the time of the busiest multiprocessor as the cost.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

#: iterations that starting and ending a program takes: its item, its query, its first block ids and entries
PROGRAM_COST = 1.5
#: iterations that one more launch takes, which merges what was split
MERGE_COST = 1.0
#: programs at which a multiprocessor's loads overlap fully; one alone waits for its own
ENOUGH_PROGRAMS = 2
#: least mean over largest load that a cut should have, where any cut has it
EVEN = 0.75


@dataclass(frozen=True)
class Card:
    """What a launch meets: multiprocessors, and programs that one of them holds at once."""

    multiprocessors: int
    programs: int


@dataclass(frozen=True)
class Item:
    """Positions [first, last) of a request; ``part`` is its row among the partial results, -1 for none."""

    request: int
    first: int
    last: int
    part: int


def items(ranges: Sequence[tuple[int, int]], chunk: int, tokens: int) -> tuple[Item, ...]:
    """Every request's [start, stop) in chunks, tiles of ``tokens`` at multiples of it; longest first.

    A request of one chunk writes its output itself (``part`` -1); an empty one keeps an item, which
    writes zeros.
    """
    found, parts = [], 0
    for request, (start, stop) in enumerate(ranges):
        edges = list(_edges(start, stop, chunk, tokens))
        for first, last in edges:
            alone = len(edges) == 1
            found.append(Item(request, first, last, -1 if alone else parts))
            parts += not alone
    # stable: the chunks of a request stay together
    return tuple(sorted(found, key=lambda item: item.first - item.last))


def _edges(start: int, stop: int, chunk: int, tokens: int) -> Iterator[tuple[int, int]]:
    if stop <= start:
        yield start, start
        return
    base = start // tokens * tokens
    for at in range(base, stop, chunk):
        yield max(start, at), min(stop, at + chunk)


def iterations(item: Item, tokens: int) -> int:
    """Tiles of ``tokens`` positions that an item touches, its first and last ones perhaps in part."""
    return -(-item.last // tokens) - item.first // tokens if item.last > item.first else 0


def busiest_share(work: Sequence[Item], tiles: int, tokens: int, card: Card) -> float:
    """Least possible over actual iterations of the busiest multiprocessor; 1.0 is a perfect balance.

    ``tiles`` programs run each item (KV heads times tiles of their query group). No cut can give the
    busiest one less than the mean, in whole iterations.
    """
    found = _loads([iterations(item, tokens) for item in work], tiles, card, 0.0)
    total = sum(load * count for load, _, count in found)
    if not total:
        return 1.0
    return -(-total // card.multiprocessors) / max(load for load, _, _ in found)


def _loads(sizes: Sequence[int], tiles: int, card: Card, start_cost: float) -> list[tuple[float, int, int]]:
    """(load, programs held, how many multiprocessors are so): each program goes to one with least to do.

    Programs of one size are dealt to all multiprocessors of one load at once.
    """
    queue: list[tuple[float, int, int]] = [(0.0, 0, card.multiprocessors)]
    for size, count in sorted(Counter(sizes).items(), reverse=True):
        left = count * tiles
        while left:
            load, held, alike = heapq.heappop(queue)
            while queue and queue[0][:2] == (load, held):
                alike += heapq.heappop(queue)[2]
            served = min(left, alike)
            heapq.heappush(queue, (load + size + start_cost, held + 1, served))
            if alike > served:
                heapq.heappush(queue, (load, held, alike - served))
            left -= served
    return queue


@lru_cache(maxsize=256)
def best_chunk(
    ranges: tuple[tuple[int, int], ...], tiles: int, tokens: int, card: Card, merge_share: float
) -> int:
    """The chunk, a multiple of ``tokens``, whose programs end first, among those that share the work evenly.

    ``tiles``: programs for one item. ``merge_share``: iterations that writing and reading one
    program's partial result takes, by its bytes. Pure arithmetic, so that every card can be judged
    without one.
    """
    longest = max((-(-stop // tokens) - start // tokens for start, stop in ranges if stop > start), default=1)
    room = 16 * card.multiprocessors * card.programs + len(ranges) * tiles
    best: tuple[bool, float, int] | None = None
    for count in _candidates(longest):
        work = items(ranges, count * tokens, tokens)
        if len(work) * tiles > room and count < longest:
            continue
        uneven = busiest_share(work, tiles, tokens, card) < EVEN
        found = (uneven, _cost(work, tiles, tokens, card, merge_share), count)
        best = found if best is None or found < best else best
    assert best is not None
    return best[2] * tokens


def _candidates(longest: int) -> list[int]:
    """Chunk sizes in tiles worth a look: the whole, what halves, thirds … need, and all small ones."""
    parts = {-(-longest // n) for n in range(1, 65)}
    return sorted(parts | set(range(1, min(longest, 16) + 1)), reverse=True)


def _cost(work: Sequence[Item], tiles: int, tokens: int, card: Card, merge_share: float) -> float:
    """Iterations until the last program ends, merging included."""
    sizes = [iterations(item, tokens) for item in work]
    split = sum(item.part >= 0 for item in work)
    time = 0.0
    for load, programs, _ in _loads(sizes, tiles, card, PROGRAM_COST):
        live = min(programs, card.programs)
        if live:
            time = max(time, load * max(1.0, min(ENOUGH_PROGRAMS, card.programs) / live))
    merge = MERGE_COST + merge_share * split * tiles / card.multiprocessors if split else 0.0
    return time + merge
