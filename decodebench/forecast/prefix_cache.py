"""Continuous batching over named blocks: what ``scheduler`` does, where requests share prefixes.

Blocks have ids and, once full, a key: the segment that covers their last token, and that token's position.
A request that comes later finds the blocks of its own keys. Blocks given back keep their key until they are
handed out again, the longest unused first; all as in vLLM 0.32, whose hits end at a multiple of all groups'
block sizes. Every step goes through the running requests one by one, and states are tables of block ids.
"""

from __future__ import annotations

from functools import lru_cache
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

from decodebench.forecast import scheduler
from decodebench.forecast.scheduler import (
    AHEAD,
    ARRIVAL,
    BEHIND,
    BLOCK,
    CAP,
    CHECKPOINT,
    CHUNK,
    CHUNK_TOKENS,
    COMPUTED,
    FINISH,
    FIRST,
    FIRST_COME,
    FIXED,
    FIXED_BLOCKS,
    FULL,
    KIND,
    KNOWN,
    N_ARRIVED,
    N_DECODED,
    N_DONE,
    N_HEAD,
    N_HITS,
    N_IN_ORDER,
    N_NEXT,
    N_OUTPUT,
    N_PREEMPTIONS,
    N_PREFILLED,
    N_QUEUED,
    N_RECOMPUTED,
    N_RUNNING,
    N_SINGLES,
    N_SPARE,
    N_STEP,
    N_TAIL,
    OUTPUT,
    POOL,
    PREEMPTIONS,
    PROMPT,
    REQUEST,
    SCHEDULED,
    SHORTEST_FIRST,
    SINGLES,
    SPAN,
    SPARE,
    STATE,
    TOTAL,
    WEIGHT,
    WINDOW,
    X_BUSY,
    X_NOW,
    X_RUNNING,
    X_SAMPLE_AT,
    X_WAITING,
    Requests,
)

if TYPE_CHECKING:
    import numpy as np

    from decodebench.forecast.traffic import Segments

#: rows of ``Blocks.facts``: requests that hold it; its key (segment, token, group; segment NO_KEY: none);
#: neighbours among the blocks of its bucket; neighbours among the free blocks that keep a key; the last step
#: in which a state was written down
HOLDERS, KEY_SEGMENT, KEY_TOKEN, KEY_GROUP, BUCKET_NEXT, FREE_NEXT, FREE_BEFORE, WRITTEN = range(8)
NO_KEY = -1

#: rows of ``Blocks.pools``: free blocks without a key, first and last free block with one
UNKEYED, OLDEST, NEWEST = range(3)


class Blocks(NamedTuple):
    """The pool's blocks and who holds them. Ids count through all pools; 0 is the null block.

    ``tables``: by slot, group of the layout and position, a block id; ``lengths``, ``cached``, ``retired``:
    entries, entries with a key, entries given back, by slot and group; ``hits``: a lookup's blocks by group,
    ``firsts``: the first of them by column; ``junction``: by request, the token up to which other groups knew
    its prefix when it was looked up; ``column``: the layout's groups → columns of the scheduler's; ``used``:
    held blocks by column; ``align``: tokens that hits are a multiple of, ``fine``: that keys could be.
    """

    facts: np.ndarray
    buckets: np.ndarray
    pools: np.ndarray
    unkeyed: np.ndarray
    tables: np.ndarray
    lengths: np.ndarray
    cached: np.ndarray
    retired: np.ndarray
    hits: np.ndarray
    firsts: np.ndarray
    junction: np.ndarray
    column: np.ndarray
    used: np.ndarray
    segment_start: np.ndarray
    segment_ids: np.ndarray
    segment_ends: np.ndarray
    align: int
    fine: int


# -- keys -------------------------------------------------------------------------------------------


def segment_at(starts, ids, ends, request, token):
    """The segment that covers the token before position ``token``; a number of its own behind all."""
    low, high = starts[request], starts[request + 1]
    if low == high or ends[high - 1] < token:
        return -2 - request
    high -= 1
    while low < high:
        middle = (low + high) // 2
        if ends[middle] < token:
            low = middle + 1
        else:
            high = middle
    return ids[low]


def bucket_of(buckets, segment, token, group):
    """Where the blocks of a key are kept."""
    mixed = segment * 1_000_003 + token * 7919 + group * 104_729
    return (mixed ^ (mixed >> 7) ^ (mixed >> 13)) & (len(buckets) - 1)


def find(facts, buckets, segment, token, group):
    """The oldest block with this key, 0 where there is none."""
    block = buckets[bucket_of(buckets, segment, token, group)]
    while block > 0:
        if (
            facts[KEY_SEGMENT, block] == segment
            and facts[KEY_TOKEN, block] == token
            and facts[KEY_GROUP, block] == group
        ):
            return block
        block = facts[BUCKET_NEXT, block]
    return 0


def forget(k, block):
    """Take a block's key away."""
    if k.facts[KEY_SEGMENT, block] == NO_KEY:
        return
    at = bucket_of(
        k.buckets, k.facts[KEY_SEGMENT, block], k.facts[KEY_TOKEN, block], k.facts[KEY_GROUP, block]
    )
    other = k.buckets[at]
    if other == block:
        k.buckets[at] = k.facts[BUCKET_NEXT, block]
    else:
        while k.facts[BUCKET_NEXT, other] != block:
            other = k.facts[BUCKET_NEXT, other]
        k.facts[BUCKET_NEXT, other] = k.facts[BUCKET_NEXT, block]
    k.facts[KEY_SEGMENT, block] = NO_KEY


def remember(k, block, segment, token, group):
    """Give a block a key, behind others of the same one."""
    if k.facts[KEY_SEGMENT, block] != NO_KEY:
        if k.facts[KEY_TOKEN, block] == token:
            return
        forget(k, block)
    k.facts[KEY_SEGMENT, block], k.facts[KEY_TOKEN, block] = segment, token
    k.facts[KEY_GROUP, block], k.facts[BUCKET_NEXT, block] = group, 0
    at = bucket_of(k.buckets, segment, token, group)
    other = k.buckets[at]
    if other == 0:
        k.buckets[at] = block
        return
    while k.facts[BUCKET_NEXT, other] != 0:
        other = k.facts[BUCKET_NEXT, other]
    k.facts[BUCKET_NEXT, other] = block


# -- free blocks ------------------------------------------------------------------------------------


def take(g, q, k, group):
    """A free block for a group: one without a key, else the one longest unused."""
    column = k.column[group]
    pool = g[POOL, column]
    if k.pools[UNKEYED, pool] > 0:
        k.pools[UNKEYED, pool] -= 1
        block = k.unkeyed[pool, k.pools[UNKEYED, pool]]
    else:
        block = k.pools[OLDEST, pool]
        unlink(k, block, pool)
        forget(k, block)
    k.facts[HOLDERS, block] = 1
    k.used[column] += 1
    q.free[pool] -= 1
    return block


def unlink(k, block, pool):
    """Out of the list of free blocks with a key."""
    after, before = k.facts[FREE_NEXT, block], k.facts[FREE_BEFORE, block]
    if before > 0:
        k.facts[FREE_NEXT, before] = after
    else:
        k.pools[OLDEST, pool] = after
    if after > 0:
        k.facts[FREE_BEFORE, after] = before
    else:
        k.pools[NEWEST, pool] = before


def touch(g, q, k, group, block):
    """One more request holds a block that was found."""
    column = k.column[group]
    if k.facts[HOLDERS, block] == 0:
        unlink(k, block, g[POOL, column])
        k.used[column] += 1
        q.free[g[POOL, column]] -= 1
    k.facts[HOLDERS, block] += 1


def give(g, q, k, group, block):
    """One request less holds a block; the last one makes it free."""
    k.facts[HOLDERS, block] -= 1
    if k.facts[HOLDERS, block] > 0:
        return
    column = k.column[group]
    pool = g[POOL, column]
    k.used[column] -= 1
    q.free[pool] += 1
    if k.facts[KEY_SEGMENT, block] == NO_KEY:
        k.unkeyed[pool, k.pools[UNKEYED, pool]] = block
        k.pools[UNKEYED, pool] += 1
        return
    last = k.pools[NEWEST, pool]
    k.facts[FREE_NEXT, block], k.facts[FREE_BEFORE, block] = 0, last
    if last > 0:
        k.facts[FREE_NEXT, last] = block
    else:
        k.pools[OLDEST, pool] = block
    k.pools[NEWEST, pool] = block


# -- a request's tables -----------------------------------------------------------------------------


def give_all(g, q, k, s):
    """All blocks of a slot, group by group, the last first."""
    for group in range(len(k.column)):
        for at in range(k.lengths[s, group] - 1, -1, -1):
            if k.tables[s, group, at]:
                give(g, q, k, group, k.tables[s, group, at])
        k.lengths[s, group] = 0


def give_skipped(g, q, k, s, c):
    """Blocks that no later step reads once ``c`` tokens are computed."""
    for group in range(len(k.column)):
        i = k.column[group]
        kind, b = g[KIND, i], g[BLOCK, i]
        if kind == WINDOW:
            stop = max(0, c - g[SPAN, i] + 1) // b
        elif kind == CHUNK:
            stop = c // g[SPAN, i] * g[SPAN, i] // b
        elif kind == STATE:
            stop = max(0, c - 1) // b
        else:
            continue
        for at in range(stop - 1, k.retired[s, group] - 1, -1):
            block = k.tables[s, group, at]
            if block:
                give(g, q, k, group, block)
                k.tables[s, group, at] = 0
        k.retired[s, group] = max(stop, k.retired[s, group])


def wanted(g, k, i, length, c, e, first, found):
    """New blocks that group ``i`` takes for a step from ``c`` to ``e`` tokens, ``length`` entries there."""
    kind, b = g[KIND, i], g[BLOCK, i]
    if kind == FIXED:
        return g[FIXED_BLOCKS, i] if first else 0
    if kind == STATE:
        new = -(-e // b) + g[FIXED_BLOCKS, i] - length - found
        exported = exports(g, i, c, e)
        most = 1 + exported + (g[FIXED_BLOCKS, i] if first else 0)
        return min(new, most) if new > 0 else 0
    skipped = 0
    if first and kind == WINDOW:
        skipped = max(0, c - g[SPAN, i] + 1) // b
    elif first and kind == CHUNK:
        skipped = c // g[SPAN, i] * g[SPAN, i] // b
    return max(0, -(-e // b) - max(skipped, length + found))


def exports(g, i, c, e):
    """1 where a prefill from ``c`` to ``e`` exports its state at a boundary on the way."""
    b = g[BLOCK, i]
    at = (e - 1) // b * b
    if g[CHECKPOINT, i] and c % b == 0 and -(-e // b) - 2 > (c - 1) // b and c + b <= at and c < at < e:
        return 1
    return 0


def extend(g, q, k, s, c, e):
    """Blocks for a step from ``c`` to ``e`` tokens, group by group."""
    for group in range(len(k.column)):
        i = k.column[group]
        kind, b = g[KIND, i], g[BLOCK, i]
        length = k.lengths[s, group]
        if kind == FIXED:
            while length < g[FIXED_BLOCKS, i]:
                k.tables[s, group, length] = take(g, q, k, group)
                length += 1
        elif kind == STATE:
            spare = g[FIXED_BLOCKS, i]
            end = -(-e // b)
            started = q.slots[COMPUTED, s] > 0
            had = length - spare if started else length
            if spare and started:  # blocks for drafts stand behind the states and move with their end
                for j in range(spare - 1, -1, -1):
                    k.tables[s, group, end + j] = k.tables[s, group, had + j]
                for at in range(had, end):
                    k.tables[s, group, at] = 0
            elif spare:
                for j in range(spare):
                    k.tables[s, group, end + j] = take(g, q, k, group)
            new = end - 1 - exports(g, i, c, e)
            for at in range(had, end):
                k.tables[s, group, at] = take(g, q, k, group) if at >= new else 0
            length = max(end, had) + spare
        else:
            while length < -(-e // b):
                k.tables[s, group, length] = take(g, q, k, group)
                length += 1
        k.lengths[s, group] = length


def write_keys(g, q, k, s, request, prompt, tokens, step):
    """Keys for blocks that ``tokens`` computed tokens have filled, as far as a hit could use them."""
    groups = len(k.column)
    if groups > 1:
        tokens = tokens // k.align * k.align
    for group in range(groups):
        i = k.column[group]
        kind, b = g[KIND, i], g[BLOCK, i]
        if kind == FIXED:
            continue
        full = tokens // b
        segment = k.align // b
        need = -(-(g[SPAN, i] - 1) // b)
        for at in range(k.cached[s, group], full):
            block = k.tables[s, group, at]
            if block == 0 or (kind == WINDOW and need < segment and at % segment < segment - need):
                continue
            key = segment_at(k.segment_start, k.segment_ids, k.segment_ends, request, (at + 1) * b)
            remember(k, block, key, (at + 1) * b, group)
            if kind == STATE:
                k.facts[WRITTEN, find(k.facts, k.buckets, key, (at + 1) * b, group)] = step
        k.cached[s, group] = max(k.cached[s, group], full)
        last = (prompt - 1) // k.fine * k.fine
        if kind == STATE and tokens == last and tokens > 0 and tokens % b == 0:
            block = k.tables[s, group, tokens // b - 1]
            if block:
                key = segment_at(k.segment_start, k.segment_ids, k.segment_ends, request, tokens)
                remember(k, block, key, tokens, group)
                k.facts[WRITTEN, find(k.facts, k.buckets, key, tokens, group)] = step
        if kind == FULL and b != k.fine and 0 < last <= tokens and last % b:
            block = k.tables[s, group, last // b]
            if k.facts[KEY_SEGMENT, block] == NO_KEY:
                remember(
                    k,
                    block,
                    segment_at(k.segment_start, k.segment_ids, k.segment_ends, request, last),
                    last,
                    group,
                )


def known(g, k, i, request, token):
    """Whether every group of column ``i`` holds the block of this request that ends at ``token``."""
    segment = segment_at(k.segment_start, k.segment_ids, k.segment_ends, request, token)
    missing = 0
    for group in range(len(k.column)):
        if k.column[group] == i and missing == 0:
            missing += find(k.facts, k.buckets, segment, token, group) == 0
    return missing == 0


def longest_hit(g, k, i, request, most):
    """(tokens, first block) of the longest prefix up to ``most`` tokens that column ``i`` can start from."""
    kind, b, align = g[KIND, i], g[BLOCK, i], k.align
    blocks = most // b
    if kind == FULL:
        run = 0
        while run < blocks and known(g, k, i, request, (run + 1) * b):
            run += 1
        return run * b // align * align, 0
    if kind == CHUNK:
        first = most // g[SPAN, i] * g[SPAN, i] // b
        run = first
        while run < blocks and known(g, k, i, request, (run + 1) * b):
            run += 1
        return run * b, first
    if kind == STATE:
        for at in range(blocks - 1, -1, -1):
            if (at + 1) * b % align == 0 and known(g, k, i, request, (at + 1) * b):
                return (at + 1) * b, at
        return 0, 0
    need = -(-(g[SPAN, i] - 1) // b)
    run = 0
    for at in range(blocks - 1, -1, -1):
        if known(g, k, i, request, (at + 1) * b):
            if run == 0 and (at + 1) * b % align:
                continue
            run += 1
            if run >= need:
                return (at + run) * b, at
        else:
            run = 0
    return run * b // align * align, 0


def look_up(g, k, request, most):
    """Tokens of the prefix that all groups can start from; their blocks are in ``hits``, from which on in
    the entry before them. Sets the request's junction.
    """
    groups = len(k.column)
    hit, longest = most, 0
    while True:
        now = hit
        for kinds in range(2):  # full attention first: what it lacks, nobody can use
            for i in range(g.shape[1]):
                if g[KIND, i] == FIXED or (g[KIND, i] == FULL) != (kinds == 0):
                    continue
                now, first = longest_hit(g, k, i, request, now)
                k.firsts[i] = first
                longest = max(longest, now)
        if now >= hit:
            break
        hit = now
    hit = min(hit, now)
    for group in range(groups):
        i = k.column[group]
        if g[KIND, i] == FIXED:
            continue
        b = g[BLOCK, i]
        for at in range(hit // b):
            k.hits[group, at] = 0
            if at >= k.firsts[i]:
                k.hits[group, at] = find(
                    k.facts,
                    k.buckets,
                    segment_at(k.segment_start, k.segment_ids, k.segment_ends, request, (at + 1) * b),
                    (at + 1) * b,
                    group,
                )
    k.junction[request] = longest if longest > hit else 0
    return hit


# -- one step ---------------------------------------------------------------------------------------


def leave(q, s):
    """Take a slot out of the running order and make it empty."""
    n = q.n
    ahead, behind = q.slots[AHEAD, s], q.slots[BEHIND, s]
    if behind >= 0:
        q.slots[AHEAD, behind] = ahead
    else:
        n[N_HEAD] = ahead
    if ahead >= 0:
        q.slots[BEHIND, ahead] = behind
    else:
        n[N_TAIL] = behind
    n[N_RUNNING] -= 1
    q.slots[SPARE, n[N_SPARE]] = s
    n[N_SPARE] += 1


def to_junction(start, new, prompt, total, b, junction):
    """A chunk that also ends where the request's prefix parted from what other groups knew of it."""
    if junction == 0 or start >= max(prompt, total - 1):
        return new
    stop = start + (junction - start) // b * b
    return stop - start if start < junction < start + new and start < stop < start + new else new


def go_on(g, q, r, k, budget, align, checkpoint, policy):
    """Schedule the running requests; (tokens left of the batch, whether one had to give way)."""
    n = q.n
    s = n[N_HEAD]
    while s >= 0:
        q.slots[CHUNK_TOKENS, s] = 0
        s = q.slots[AHEAD, s]
    left, preempted = budget, False
    s = n[N_HEAD]
    while s >= 0 and left > 0:
        request, c, total = q.slots[REQUEST, s], q.slots[COMPUTED, s], q.slots[TOTAL, s]
        prompt = r.tokens[PROMPT, request]
        new = min(total - c, left)
        if align:
            new = aligned_chunk(c, new, prompt, total, align, budget, checkpoint)
            new = to_junction(c, new, prompt, total, align, k.junction[request])
        if new == 0:
            s = q.slots[AHEAD, s]
            continue
        give_skipped(g, q, k, s, c)
        for p in range(len(q.need)):
            q.need[p] = 0
        for group in range(len(k.column)):
            i = k.column[group]
            q.need[g[POOL, i]] += wanted(g, k, i, k.lengths[s, group], c, c + new, False, 0)
        lost = False
        while True:
            fits = True
            for p in range(len(q.need)):
                if q.need[p] > q.free[p]:
                    fits = False
            if fits:
                break
            v = victim(q, r, policy)
            give_all(g, q, k, v)
            left += q.slots[CHUNK_TOKENS, v]
            q.slots[CHUNK_TOKENS, v] = 0
            other = q.slots[REQUEST, v]
            r.tokens[KNOWN, other] = q.slots[TOTAL, v]
            r.tokens[PREEMPTIONS, other] += 1
            n[N_PREEMPTIONS] += 1
            n[N_RECOMPUTED] += q.slots[COMPUTED, v]
            leave(q, v)
            n[N_QUEUED] = push(q.queue, n[N_QUEUED], other, r.tokens, policy)
            preempted = True
            if v == s:
                lost = True
                break
        if lost:
            break
        extend(g, q, k, s, c, c + new)
        write_keys(g, q, k, s, request, prompt, min(c + new, total), n[N_STEP])
        q.slots[CHUNK_TOKENS, s] = new
        left -= new
        s = q.slots[AHEAD, s]
    n[N_IN_ORDER] += 1
    return left, preempted


def victim(q, r, policy):
    """The running request that gives way: the last one, or the one that the queue would serve last."""
    if policy == FIRST_COME:
        return q.n[N_TAIL]
    worst = q.n[N_HEAD]
    s = q.slots[AHEAD, worst]
    while s >= 0:
        if _before(r.tokens, q.slots[REQUEST, worst], q.slots[REQUEST, s]):
            worst = s
        s = q.slots[AHEAD, s]
    return worst


def admit(g, q, r, k, budget, left, align, checkpoint, policy, most):
    """Admit waiting requests, in their order, until one does not fit."""
    n, groups = q.n, len(k.column)
    while left > 0 and n[N_RUNNING] < most:
        stacked = n[N_QUEUED] > 0
        if not stacked and (policy == SHORTEST_FIRST or n[N_NEXT] == n[N_ARRIVED]):
            break
        if policy == SHORTEST_FIRST:
            request = q.queue[0]
        else:
            request = q.queue[n[N_QUEUED] - 1] if stacked else n[N_NEXT]
        total, prompt = r.tokens[KNOWN, request], r.tokens[PROMPT, request]
        hit = look_up(g, k, request, total - 1)
        new = min(total - hit, left)
        if align:
            new = aligned_chunk(hit, new, prompt, total, align, budget, checkpoint)
            new = to_junction(hit, new, prompt, total, align, k.junction[request])
        if new == 0:
            break
        fits = True
        for whole in range(2):  # what the step needs, and what its whole sequence would need
            for p in range(len(q.need)):
                q.need[p] = 0
            for group in range(groups):
                i = k.column[group]
                b = g[BLOCK, i]
                found = hit // b if g[KIND, i] != FIXED else 0
                end = hit + new if whole == 0 else total
                blocks = wanted(g, k, i, 0, hit, end, True, found)
                if whole and g[CAP, i] < -(-end // b):
                    blocks = max(0, g[CAP, i] - max(-(-end // b) - blocks, found))
                for at in range(first_kept(g, i, hit), found):
                    block = k.hits[group, at]
                    if block and k.facts[HOLDERS, block] == 0:
                        blocks += 1
                    if block and g[KIND, i] == STATE and k.facts[WRITTEN, block] == n[N_STEP]:
                        fits = False  # its state is written in this very step
                q.need[g[POOL, i]] += blocks
            for p in range(len(q.need)):
                if q.need[p] > q.free[p]:
                    fits = False
        if not fits:
            break
        if stacked:
            n[N_QUEUED] = pop(q.queue, n[N_QUEUED], r.tokens, policy)
        else:
            n[N_NEXT] += 1
        n[N_SPARE] -= 1
        s = q.slots[SPARE, n[N_SPARE]]
        for group in range(groups):
            i = k.column[group]
            found = hit // g[BLOCK, i] if g[KIND, i] != FIXED else 0
            for at in range(found):
                block = k.hits[group, at] if at >= first_kept(g, i, hit) else 0
                k.tables[s, group, at] = block
                if block:
                    touch(g, q, k, group, block)
            skipped = first_kept(g, i, hit)
            for at in range(found, skipped):
                k.tables[s, group, at] = 0
            k.lengths[s, group] = max(found, skipped) if g[KIND, i] != FIXED else 0
            k.cached[s, group] = k.lengths[s, group]
            k.retired[s, group] = min(first_kept(g, i, hit), k.lengths[s, group])
        q.slots[COMPUTED, s] = 0
        extend(g, q, k, s, hit, hit + new)
        write_keys(g, q, k, s, request, prompt, min(hit + new, total), n[N_STEP])
        q.slots[REQUEST, s], q.slots[TOTAL, s] = request, total
        q.slots[COMPUTED, s], q.slots[CHUNK_TOKENS, s] = hit, new
        tail = n[N_TAIL]
        q.slots[BEHIND, s], q.slots[AHEAD, s] = tail, -1
        if tail >= 0:
            q.slots[AHEAD, tail] = s
        else:
            n[N_HEAD] = s
        n[N_TAIL] = s
        n[N_RUNNING] += 1
        n[N_HITS] += hit
        if r.times[SCHEDULED, request] < 0:
            r.times[SCHEDULED, request] = q.x[X_NOW]
        left -= new


def first_kept(g, i, c):
    """The first block of a group that a step from ``c`` tokens reads."""
    kind, b = g[KIND, i], g[BLOCK, i]
    if kind == WINDOW:
        return max(0, c - g[SPAN, i] + 1) // b
    if kind == CHUNK:
        return c // g[SPAN, i] * g[SPAN, i] // b
    if kind == STATE:
        return max(0, c - 1) // b
    return 0


def end_step(g, q, r, k):
    """Tokens come out, in the running order; who is done leaves."""
    n, now = q.n, q.x[X_NOW]
    s = n[N_HEAD]
    while s >= 0:
        after = q.slots[AHEAD, s]
        new = q.slots[CHUNK_TOKENS, s]
        q.slots[COMPUTED, s] += new
        if new and q.slots[COMPUTED, s] >= q.slots[TOTAL, s]:
            q.slots[TOTAL, s] += 1
            n[N_OUTPUT] += 1
            request = q.slots[REQUEST, s]
            if r.times[FIRST, request] < 0:
                r.times[FIRST, request] = now
            if q.slots[TOTAL, s] - r.tokens[PROMPT, request] >= r.tokens[OUTPUT, request]:
                give_all(g, q, k, s)
                r.times[FINISH, request] = now
                n[N_DONE] += 1
                leave(q, s)
        s = after


def write_sample(g, q, k, waiting):
    """Write down how things stand."""
    row = q.samples[sample_row(q, waiting)]
    columns = g.shape[1]
    for i in range(columns):
        row[5 + i] = k.used[i] / g[WEIGHT, i]
    s = q.n[N_HEAD]
    while s >= 0:
        for i in range(columns):
            row[5 + columns + i] += content(g, i, q.slots[COMPUTED, s] + q.slots[CHUNK_TOKENS, s])
        s = q.slots[AHEAD, s]


def run_steps(g, q, r, cost, k, most, budget, align, checkpoint, policy, steps, trace):
    """Go on for ``steps`` steps or until all is done; whether there is more to do. See ``scheduler.run_steps``."""
    n, x = q.n, q.x
    reads = q.samples[0, 5:].copy()
    pairs = reads.copy()
    total = r.times.shape[1]
    until = n[N_STEP] + steps
    while n[N_STEP] < until:
        while n[N_ARRIVED] < total and r.times[ARRIVAL, n[N_ARRIVED]] <= x[X_NOW]:
            if policy == SHORTEST_FIRST:
                n[N_QUEUED] = push(q.queue, n[N_QUEUED], n[N_ARRIVED], r.tokens, policy)
                n[N_NEXT] += 1
            n[N_ARRIVED] += 1
        if n[N_RUNNING] == 0 and n[N_QUEUED] == 0 and n[N_NEXT] == n[N_ARRIVED]:
            if n[N_ARRIVED] == total:
                return False
            if r.times[ARRIVAL, n[N_ARRIVED]] >= x[X_SAMPLE_AT]:  # long enough idle to be seen
                sample_row(q, 0)
                x[X_SAMPLE_AT] = x[X_NOW]
            x[X_NOW] = r.times[ARRIVAL, n[N_ARRIVED]]
            continue
        step = n[N_STEP]
        left, preempted = go_on(g, q, r, k, budget, align, checkpoint, policy)
        if not preempted:
            admit(g, q, r, k, budget, left, align, checkpoint, policy, most)
        n[N_SINGLES] = 0
        s = n[N_HEAD]
        while s >= 0:
            q.slots[SINGLES, n[N_SINGLES]] = s
            n[N_SINGLES] += 1
            s = q.slots[AHEAD, s]
        before = n[N_DECODED] + n[N_PREFILLED]
        seconds = _seconds(g, q, cost, step, reads, pairs)
        waiting = n[N_QUEUED] + n[N_ARRIVED] - n[N_NEXT]
        x[X_NOW] += seconds
        x[X_BUSY] += seconds
        x[X_RUNNING] += seconds * n[N_RUNNING]
        x[X_WAITING] += seconds * waiting
        scheduled = n[N_DECODED] + n[N_PREFILLED] - before
        if step < len(trace):
            trace[step, 0], trace[step, 1], trace[step, 2] = q.free[0], n[N_RUNNING], waiting
            trace[step, 3] = scheduled
        if x[X_NOW] >= x[X_SAMPLE_AT]:
            write_sample(g, q, k, waiting)
        end_step(g, q, r, k)
        n[N_STEP] += 1
        if scheduled == 0 and not preempted:
            if n[N_ARRIVED] == total:
                return False
            x[X_NOW] = max(x[X_NOW], r.times[ARRIVAL, n[N_ARRIVED]])
    return True


# -- around the steps -------------------------------------------------------------------------------

#: what is taken over from ``scheduler``
aligned_chunk, push, pop = scheduler.aligned_chunk, scheduler.push, scheduler.pop
_before, _seconds, content = scheduler._before, scheduler._seconds, scheduler.content
sample_row = scheduler.sample_row

_COMPILED = (
    segment_at,
    bucket_of,
    find,
    forget,
    remember,
    unlink,
    take,
    touch,
    give,
    give_all,
    give_skipped,
    exports,
    wanted,
    extend,
    write_keys,
    known,
    longest_hit,
    first_kept,
    look_up,
    leave,
    victim,
    to_junction,
    go_on,
    admit,
    end_step,
    write_sample,
    run_steps,
)


@lru_cache(1)
def compiled() -> SimpleNamespace:
    """The functions above compiled by numba; as they stand where it is not installed."""
    theirs = scheduler.compiled()
    if not theirs.fast:
        return SimpleNamespace(fast=False, run_steps=run_steps)
    import numba

    space = dict(globals())
    for name in ("aligned_chunk", "push", "pop", "_before", "_seconds", "content", "sample_row"):
        space[name] = getattr(theirs, name)
    for function in _COMPILED:
        copy = FunctionType(function.__code__, space, function.__name__)
        copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
        space[function.__name__] = numba.njit(cache=True)(copy)
    return SimpleNamespace(fast=True, run_steps=space["run_steps"])


def new_blocks(
    groups: np.ndarray,
    members: tuple[tuple[int, ...], ...],
    pool_num_blocks: tuple[int, ...],
    requests: Requests,
    segments: Segments,
    most: int,
) -> Blocks:
    """All blocks free, nothing known. ``members``: the layout's groups of each column of ``groups``."""
    import numpy as np

    count = sum(map(len, members))
    column = np.zeros(count, np.int64)
    for i, group in enumerate(members):
        column[list(group)] = i
    usable = [blocks - 1 for blocks in pool_num_blocks]
    first = 1 + np.concatenate([[0], np.cumsum(usable)])
    facts = np.zeros((WRITTEN + 1, int(first[-1])), np.int64)
    facts[KEY_SEGMENT] = NO_KEY
    facts[WRITTEN] = -1
    unkeyed = np.zeros((len(usable), max(usable)), np.int64)
    for pool, blocks in enumerate(usable):
        unkeyed[pool, :blocks] = first[pool] + np.arange(blocks)[::-1]
    pools = np.zeros((3, len(usable)), np.int64)
    pools[UNKEYED] = usable
    sizes = [int(b) for kind, b in zip(groups[KIND], groups[BLOCK]) if kind != FIXED]
    longest = int((requests.tokens[PROMPT] + requests.tokens[OUTPUT]).max(initial=1))
    positions = longest // min(sizes, default=longest) + 2 + int(groups[FIXED_BLOCKS].max())
    return Blocks(
        facts,
        buckets=np.zeros(1 << int(2 * first[-1]).bit_length(), np.int64),
        pools=pools,
        unkeyed=unkeyed,
        tables=np.zeros((most, count, positions), np.int32),
        lengths=np.zeros((most, count), np.int64),
        cached=np.zeros((most, count), np.int64),
        retired=np.zeros((most, count), np.int64),
        hits=np.zeros((count, positions), np.int64),
        firsts=np.zeros(groups.shape[1], np.int64),
        junction=np.zeros(requests.times.shape[1], np.int64),
        column=column,
        used=np.zeros(groups.shape[1], np.int64),
        segment_start=segments.start,
        segment_ids=segments.ids,
        segment_ends=segments.ends,
        align=int(np.lcm.reduce(sizes)) if sizes else 1,
        fine=int(np.gcd.reduce(sizes)) if sizes else 1,
    )
