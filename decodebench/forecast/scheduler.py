"""Continuous batching over counts of blocks: vLLM 0.32's scheduler, a step at a time, no block has a name.

How many blocks a group holds for a request follows from two numbers: the tokens computed before its last
step and after it (``kept``, ``held``). So requests that decode need no work of their own: they are counted
by the step at which they cross a block boundary, leave a window or finish, and a step costs a few additions
a group, however many requests run. Where the pool may run out, or prefills compete for the batch, the order
of requests decides; such a step goes through them one by one as vLLM does (``_in_order``).

Everything here is plain Python over numpy arrays; ``compiled`` gives the same functions compiled by numba,
where it is installed: 200 times faster, and equal to the last bit.
"""

from __future__ import annotations

from functools import lru_cache
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

#: how a group keeps blocks: all of them; a window; a chunk; a state and those at block boundaries; so many
FULL, WINDOW, CHUNK, STATE, FIXED = range(5)

#: what a slot holds: nothing; a request in prefill or new to decoding; one that is counted
EMPTY, SINGLE, COUNTED = range(3)

FIRST_COME, SHORTEST_FIRST = range(2)

#: columns of a sample before the held blocks and the content of each group
SAMPLE = ("time", "running", "waiting", "preemptions", "finished")


#: rows of ``groups``, an int64 array with a column for all groups of the layout that need equal blocks.
#: SPAN: window or chunk in tokens; FIXED_BLOCKS: blocks of a FIXED group, speculative ones of a STATE group;
#: CHECKPOINT: whether a prefill exports its state at a boundary; CAP: blocks that admission asks for at
#: most; WEIGHT: groups of the layout; PHASE, LEAVE: where their counters begin
KIND, BLOCK, SPAN, FIXED_BLOCKS, CHECKPOINT, CAP, WEIGHT, POOL, PHASE, LEAVE = range(10)

#: rows of ``Requests.tokens``: asked for, and how many were known when the request last waited
PROMPT, OUTPUT, KNOWN, PREEMPTIONS = range(4)
#: rows of ``Requests.times``, in seconds; -1 where it has not come to it
ARRIVAL, SCHEDULED, FIRST, FINISH = range(4)

#: rows of ``State.slots``. COMPUTED, BEFORE, TOTAL (SINGLE only): tokens computed, computed before the last
#: step, known; BASE (COUNTED only): tokens computed, less the number of the step; CHUNK: tokens of this
#: step; AHEAD, BEHIND: the running order; FINISH_*: neighbours of those that finish in the same step.
#: SINGLES, SPARE: lists of slots, as long as their counters say
(
    REQUEST,
    MODE,
    COMPUTED,
    BEFORE,
    TOTAL,
    BASE,
    CHUNK_TOKENS,
    AHEAD,
    BEHIND,
    FINISH_AHEAD,
    FINISH_BEHIND,
    SINGLES,
    SPARE,
) = range(13)
#: rows of ``State.sums``, by group: counted requests whose window is not full, the sum of their bases, and
#: the computed tokens that the counted have in their chunks
SLEEPING, SLEEPING_BASE, IN_CHUNK = range(3)
WAKE_AHEAD, WAKE_BEHIND = range(2)


class Costs(NamedTuple):
    """Seconds of a step: the larger of memory's and compute's, and what launching it takes.

    ``memory``, ``compute``: by scheduled tokens (float64, one entry from 0 to the batch's limit);
    ``memory_sequence``: a sequence; ``memory_read``, ``compute_read``: a cached token read or a pair of
    tokens attended, for each column of groups; ``launch``: seconds whatever the step does.
    """

    memory: np.ndarray
    compute: np.ndarray
    memory_sequence: float
    memory_read: np.ndarray
    compute_read: np.ndarray
    launch: float


class Requests(NamedTuple):
    """What is asked and what comes of it, a column each request, in the order of arrival."""

    tokens: np.ndarray
    times: np.ndarray


class State(NamedTuple):
    """The scheduler between two steps (``new_state``)."""

    slots: np.ndarray
    #: by step modulo its length: the first slot that finishes then
    finish_head: np.ndarray
    #: by group and step: the first slot whose window is full then; by group and slot: the next and the last
    wake_head: np.ndarray
    wakes: np.ndarray
    #: by group and phase: counted requests that take, and that leave, a block then
    grows: np.ndarray
    leaves: np.ndarray
    sums: np.ndarray
    #: blocks by pool: free, and wanted by whom is looked at
    free: np.ndarray
    need: np.ndarray
    #: requests that wait: the preempted as a stack, or all as a heap
    queue: np.ndarray
    samples: np.ndarray
    #: counters (N_*) and seconds (X_*)
    n: np.ndarray
    x: np.ndarray


(
    N_STEP,
    N_ARRIVED,
    N_NEXT,
    N_QUEUED,
    N_RUNNING,
    N_HEAD,
    N_TAIL,
    N_SINGLES,
    N_SPARE,
    N_COUNTED,
    N_BASE,
    N_DONE,
    N_PREEMPTIONS,
    N_RECOMPUTED,
    N_SAMPLES,
    N_DECODED,
    N_PREFILLED,
    N_IN_ORDER,
    N_SCHEDULED,
    N_HITS,
    N_OUTPUT,
    N_COUNTERS,
) = range(22)
X_NOW, X_BUSY, X_RUNNING, X_WAITING, X_SAMPLE_AT, X_SAMPLE_EVERY, X_SUMS = range(7)


# -- blocks of one request -----------------------------------------------------------------------


def kept(g, i, c):
    """Blocks that group ``i`` holds of ``c`` computed tokens once those no later step reads are given back."""
    kind, b = g[KIND, i], g[BLOCK, i]
    if kind == FIXED:
        return g[FIXED_BLOCKS, i]
    if c == 0:
        return 0
    if kind == STATE:
        return 1 + g[FIXED_BLOCKS, i]
    blocks = -(-c // b)
    if kind == WINDOW:
        return blocks - max(0, c - g[SPAN, i] + 1) // b
    if kind == CHUNK:
        return blocks - c // g[SPAN, i] * g[SPAN, i] // b
    return blocks


def held(g, i, c, e):
    """Blocks that group ``i`` holds after a step from ``c`` to ``e`` tokens."""
    kind, b = g[KIND, i], g[BLOCK, i]
    if kind == FIXED:
        return g[FIXED_BLOCKS, i]
    blocks = -(-e // b)
    if kind == FULL:
        return blocks
    if kind == WINDOW:
        return blocks - max(0, c - g[SPAN, i] + 1) // b
    if kind == CHUNK:
        return blocks - c // g[SPAN, i] * g[SPAN, i] // b
    count = 1 + g[FIXED_BLOCKS, i]
    if c > 0 and -(-c // b) != blocks:
        count += 1  # the state it starts from, in the block before
    if g[CHECKPOINT, i]:
        at = (e - 1) // b * b
        if c % b == 0 and blocks - 2 > (c - 1) // b and c + b <= at and c < at < e:
            count += 1
    return count


def content(g, i, e):
    """Blocks that ``e`` tokens of a request fill, as far as a later step reads them (a fraction)."""
    kind = g[KIND, i]
    if kind == FULL:
        return e / g[BLOCK, i]
    if kind == WINDOW:
        return min(e, g[SPAN, i]) / g[BLOCK, i]
    if kind == CHUNK:
        return ((e - 1) % g[SPAN, i] + 1) / g[BLOCK, i]
    if kind == STATE:
        return 1.0
    return float(g[FIXED_BLOCKS, i])


def aligned_chunk(start, new, prompt, total, b, limit, checkpoint):
    """Tokens of a prefill chunk that ends where a state can be kept: vLLM's ``_mamba_block_aligned_split``."""
    prefill_end = max(prompt, total - 1)
    if start >= prefill_end:
        return new
    end = start + new
    last = (total - 1) // b * b
    exported = False
    if checkpoint and end >= prefill_end:
        at = (prefill_end - 1) // b * b
        exported = (
            start % b == 0 and -(-end // b) - 2 > (start - 1) // b and start + b <= at and start < at < end
        )
    if end < prefill_end:
        whole = end // b * b
        if whole > start or b <= limit:
            end = whole
    stop = end
    if not exported:
        if start % b != 0:
            boundary = (start // b + 1) * b
            if start < boundary < stop:
                stop = boundary
        if start < last < stop:
            stop = last
    return max(stop - start, 0)


# -- the waiting: a stack before the arrivals, or a heap --------------------------------------------


def _before(tokens, a, b):
    return tokens[PROMPT, a] < tokens[PROMPT, b] or (tokens[PROMPT, a] == tokens[PROMPT, b] and a < b)


def push(queue, size, r, tokens, policy):
    """One more request that waits; in front where first come is first served."""
    queue[size] = r
    if policy == SHORTEST_FIRST:
        i = size
        while i > 0 and _before(tokens, queue[i], queue[(i - 1) // 2]):
            queue[i], queue[(i - 1) // 2] = queue[(i - 1) // 2], queue[i]
            i = (i - 1) // 2
    return size + 1


def pop(queue, size, tokens, policy):
    """Take the next one away (it is the last of a stack, the first of a heap)."""
    size -= 1
    if policy == SHORTEST_FIRST:
        queue[0] = queue[size]
        i = 0
        while True:
            least = i
            for child in (2 * i + 1, 2 * i + 2):
                if child < size and _before(tokens, queue[child], queue[least]):
                    least = child
            if least == i:
                break
            queue[i], queue[least] = queue[least], queue[i]
            i = least
    return size


# -- counting a request that decodes ----------------------------------------------------------------


def count_in(g, q, s, step, prompt, output):
    """Slot ``s`` decodes from ``step`` on with ``base + step`` tokens computed: count it."""
    base = q.slots[BASE, s]
    q.slots[MODE, s] = COUNTED
    q.n[N_COUNTED] += 1
    q.n[N_BASE] += base
    for i in range(g.shape[1]):
        kind, b = g[KIND, i], g[BLOCK, i]
        if kind != FIXED:
            q.grows[g[PHASE, i] + (-base) % b] += 1
        if kind == WINDOW:
            if base + step >= g[SPAN, i]:
                q.leaves[g[LEAVE, i] + (g[SPAN, i] - 1 - base) % b] += 1
                q.wakes[WAKE_BEHIND, i, s] = -1
            else:
                q.sums[SLEEPING, i] += 1
                q.sums[SLEEPING_BASE, i] += base
                at = (g[SPAN, i] - base) & (q.wake_head.shape[1] - 1)
                first = q.wake_head[i, at]
                q.wakes[WAKE_AHEAD, i, s], q.wakes[WAKE_BEHIND, i, s] = first, -2 - at
                if first >= 0:
                    q.wakes[WAKE_BEHIND, i, first] = s
                q.wake_head[i, at] = s
        elif kind == CHUNK:
            q.leaves[g[LEAVE, i] + (-base) % g[SPAN, i]] += 1
            q.sums[IN_CHUNK, i] += (base + step) % g[SPAN, i]
    at = (prompt + output - 2 - base) & (len(q.finish_head) - 1)
    first = q.finish_head[at]
    q.slots[FINISH_AHEAD, s], q.slots[FINISH_BEHIND, s] = first, -2 - at
    if first >= 0:
        q.slots[FINISH_BEHIND, first] = s
    q.finish_head[at] = s


def count_out(g, q, s, step):
    """Slot ``s`` is counted no longer, from ``step`` on."""
    base = q.slots[BASE, s]
    q.n[N_COUNTED] -= 1
    q.n[N_BASE] -= base
    for i in range(g.shape[1]):
        kind, b = g[KIND, i], g[BLOCK, i]
        if kind != FIXED:
            q.grows[g[PHASE, i] + (-base) % b] -= 1
        if kind == WINDOW:
            behind = q.wakes[WAKE_BEHIND, i, s]
            if behind == -1:
                q.leaves[g[LEAVE, i] + (g[SPAN, i] - 1 - base) % b] -= 1
            else:
                q.sums[SLEEPING, i] -= 1
                q.sums[SLEEPING_BASE, i] -= base
                ahead = q.wakes[WAKE_AHEAD, i, s]
                if behind <= -2:
                    q.wake_head[i, -2 - behind] = ahead
                else:
                    q.wakes[WAKE_AHEAD, i, behind] = ahead
                if ahead >= 0:
                    q.wakes[WAKE_BEHIND, i, ahead] = behind
        elif kind == CHUNK:
            q.leaves[g[LEAVE, i] + (-base) % g[SPAN, i]] -= 1
            q.sums[IN_CHUNK, i] -= (base + step) % g[SPAN, i]
    behind, ahead = q.slots[FINISH_BEHIND, s], q.slots[FINISH_AHEAD, s]
    if behind <= -2:
        q.finish_head[-2 - behind] = ahead
    else:
        q.slots[FINISH_AHEAD, behind] = ahead
    if ahead >= 0:
        q.slots[FINISH_BEHIND, ahead] = behind


def wake(g, q, step):
    """Windows that are full from this step on give a block back now and then."""
    for i in range(g.shape[1]):
        if g[KIND, i] != WINDOW:
            continue
        at = step & (q.wake_head.shape[1] - 1)
        s = q.wake_head[i, at]
        q.wake_head[i, at] = -1
        while s >= 0:
            q.leaves[g[LEAVE, i] + (g[SPAN, i] - 1 - q.slots[BASE, s]) % g[BLOCK, i]] += 1
            q.sums[SLEEPING, i] -= 1
            q.sums[SLEEPING_BASE, i] -= q.slots[BASE, s]
            q.wakes[WAKE_BEHIND, i, s] = -1
            s = q.wakes[WAKE_AHEAD, i, s]


def leave_order(q, s):
    """Take a slot out of the running order and make it empty."""
    ahead, behind = q.slots[AHEAD, s], q.slots[BEHIND, s]
    if behind >= 0:
        q.slots[AHEAD, behind] = ahead
    else:
        q.n[N_HEAD] = ahead
    if ahead >= 0:
        q.slots[BEHIND, ahead] = behind
    else:
        q.n[N_TAIL] = behind
    q.n[N_RUNNING] -= 1
    if q.slots[MODE, s] == SINGLE:
        k = 0
        while q.slots[SINGLES, k] != s:
            k += 1
        q.n[N_SINGLES] -= 1
        q.slots[SINGLES, k] = q.slots[SINGLES, q.n[N_SINGLES]]
    q.slots[MODE, s] = EMPTY
    q.slots[SPARE, q.n[N_SPARE]] = s
    q.n[N_SPARE] += 1


# -- one step ---------------------------------------------------------------------------------------


def _quiet(g, q, r, step, budget, align, checkpoint):
    """Schedule the running requests at once, where no order can matter; False where it can.

    It cannot where all tokens wanted fit into the batch (or only the last running request has to do with
    less), and the free blocks suffice without those that the step itself gives back.
    """
    n = q.n
    left = budget - n[N_COUNTED]
    tail = n[N_TAIL]
    others = 0
    for k in range(n[N_SINGLES]):
        s = q.slots[SINGLES, k]
        if s != tail:
            others += q.slots[TOTAL, s] - q.slots[COMPUTED, s]
    short = n[N_SINGLES] > 0 and tail >= 0 and q.slots[MODE, tail] == SINGLE
    if others > left or (short and others == left) or left < 0:
        return False
    for p in range(len(q.need)):
        q.need[p] = 0
    taken = 0
    for last in range(2):  # the tail after all others
        for k in range(n[N_SINGLES]):
            s = q.slots[SINGLES, k]
            if (s == tail) != (last == 1):
                continue
            c = q.slots[COMPUTED, s]
            new = min(q.slots[TOTAL, s] - c, left - taken)
            if align:
                new = aligned_chunk(
                    c,
                    new,
                    r.tokens[PROMPT, q.slots[REQUEST, s]],
                    q.slots[TOTAL, s],
                    align,
                    budget,
                    checkpoint,
                )
            q.slots[CHUNK_TOKENS, s] = new
            taken += new
            if new > 0:
                for i in range(g.shape[1]):
                    q.need[g[POOL, i]] += g[WEIGHT, i] * (held(g, i, c, c + new) - kept(g, i, c))
    for i in range(g.shape[1]):
        if g[KIND, i] != FIXED:
            q.need[g[POOL, i]] += g[WEIGHT, i] * q.grows[g[PHASE, i] + step % g[BLOCK, i]]
        if g[KIND, i] == CHUNK and g[SPAN, i] % g[BLOCK, i] and q.leaves[g[LEAVE, i] + step % g[SPAN, i]]:
            return False  # how many blocks a chunk leaves differs from chunk to chunk
    for p in range(len(q.need)):
        if q.need[p] > q.free[p]:
            return False
    for p in range(len(q.need)):
        q.free[p] -= q.need[p]
    for i in range(g.shape[1]):
        given = 0
        if g[KIND, i] == WINDOW:
            given = q.leaves[g[LEAVE, i] + step % g[BLOCK, i]]
        elif g[KIND, i] == CHUNK:
            given = q.leaves[g[LEAVE, i] + step % g[SPAN, i]] * (g[SPAN, i] // g[BLOCK, i])
        elif g[KIND, i] == STATE:
            given = q.grows[g[PHASE, i] + (step - 1) % g[BLOCK, i]]
        for k in range(n[N_SINGLES]):
            s = q.slots[SINGLES, k]
            if q.slots[CHUNK_TOKENS, s] > 0:
                given += held(g, i, q.slots[BEFORE, s], q.slots[COMPUTED, s]) - kept(
                    g, i, q.slots[COMPUTED, s]
                )
        q.free[g[POOL, i]] += g[WEIGHT, i] * given
    n[N_SCHEDULED] = n[N_COUNTED]
    return True


def _victim(q, r, policy):
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


def _in_order(g, q, r, step, budget, align, checkpoint, policy):
    """Schedule the running requests one by one, the last giving way where blocks run out; whether one did."""
    n = q.n
    s = n[N_HEAD]
    while s >= 0:
        q.slots[CHUNK_TOKENS, s] = 0
        s = q.slots[AHEAD, s]
    left, preempted = budget, False
    s = n[N_HEAD]
    while s >= 0 and left > 0:
        counted = q.slots[MODE, s] == COUNTED
        c = q.slots[BASE, s] + step if counted else q.slots[COMPUTED, s]
        total = c + 1 if counted else q.slots[TOTAL, s]
        new = min(total - c, left)
        if align:
            new = aligned_chunk(
                c, new, r.tokens[PROMPT, q.slots[REQUEST, s]], total, align, budget, checkpoint
            )
        if new == 0:
            s = q.slots[AHEAD, s]
            continue
        past = c - 1 if counted else q.slots[BEFORE, s]
        for i in range(g.shape[1]):
            q.free[g[POOL, i]] += g[WEIGHT, i] * (held(g, i, past, c) - kept(g, i, c))
        for p in range(len(q.need)):
            q.need[p] = 0
        for i in range(g.shape[1]):
            q.need[g[POOL, i]] += g[WEIGHT, i] * (held(g, i, c, c + new) - kept(g, i, c))
        lost = False
        while True:
            fits = True
            for p in range(len(q.need)):
                if q.need[p] > q.free[p]:
                    fits = False
            if fits:
                break
            v = _victim(q, r, policy)
            counted = q.slots[MODE, v] == COUNTED
            vc = q.slots[BASE, v] + step if counted else q.slots[COMPUTED, v]
            past = vc - 1 if counted else q.slots[BEFORE, v]
            for i in range(g.shape[1]):
                if v == s:
                    blocks = kept(g, i, vc)
                elif q.slots[CHUNK_TOKENS, v] > 0:
                    blocks = held(g, i, vc, vc + q.slots[CHUNK_TOKENS, v])
                else:
                    blocks = held(g, i, past, vc)
                q.free[g[POOL, i]] += g[WEIGHT, i] * blocks
            left += q.slots[CHUNK_TOKENS, v]
            q.slots[CHUNK_TOKENS, v] = 0
            request = q.slots[REQUEST, v]
            r.tokens[KNOWN, request] = vc + 1 if counted else q.slots[TOTAL, v]
            r.tokens[PREEMPTIONS, request] += 1
            n[N_PREEMPTIONS] += 1
            n[N_RECOMPUTED] += vc
            if counted:
                count_out(g, q, v, step)
            leave_order(q, v)
            n[N_QUEUED] = push(q.queue, n[N_QUEUED], request, r.tokens, policy)
            preempted = True
            if v == s:
                lost = True
                break
        if lost:
            break
        for p in range(len(q.need)):
            q.free[p] -= q.need[p]
        q.slots[CHUNK_TOKENS, s] = new
        left -= new
        s = q.slots[AHEAD, s]
    n[N_SCHEDULED] = 0
    s = n[N_HEAD]
    while s >= 0:
        if q.slots[MODE, s] == COUNTED:
            if q.slots[CHUNK_TOKENS, s]:
                n[N_SCHEDULED] += 1
            else:  # it waits a step: everything of its comes one later
                request = q.slots[REQUEST, s]
                count_out(g, q, s, step)
                q.slots[BASE, s] -= 1
                count_in(g, q, s, step, r.tokens[PROMPT, request], r.tokens[OUTPUT, request])
        s = q.slots[AHEAD, s]
    n[N_IN_ORDER] += 1
    return preempted


def _admit(g, q, r, step, budget, left, align, checkpoint, policy, most, prefill):
    """Admit waiting requests, in their order, until one does not fit."""
    n = q.n
    while left > 0 and n[N_RUNNING] < most:
        stacked = n[N_QUEUED] > 0
        if not stacked and (policy == SHORTEST_FIRST or n[N_NEXT] == n[N_ARRIVED]):
            break
        if policy == SHORTEST_FIRST:
            request = q.queue[0]
        else:
            request = q.queue[n[N_QUEUED] - 1] if stacked else n[N_NEXT]
        total = r.tokens[KNOWN, request]
        c = 0 if prefill else total - 1
        new = min(total - c, left)
        if align:
            new = aligned_chunk(c, new, r.tokens[PROMPT, request], total, align, budget, checkpoint)
        if new == 0:
            break
        fits = True
        for whole in range(2):  # what the step needs, and what its whole sequence would need
            for p in range(len(q.need)):
                q.need[p] = 0
            for i in range(g.shape[1]):
                blocks = held(g, i, c, c + new)
                if whole == 0 and prefill:
                    blocks = min(held(g, i, 0, total), g[CAP, i])
                q.need[g[POOL, i]] += g[WEIGHT, i] * blocks
            for p in range(len(q.need)):
                if q.need[p] > q.free[p]:
                    fits = False
        if not fits:
            break
        for p in range(len(q.need)):
            q.free[p] -= q.need[p]
        if stacked:
            n[N_QUEUED] = pop(q.queue, n[N_QUEUED], r.tokens, policy)
        else:
            n[N_NEXT] += 1
        n[N_SPARE] -= 1
        s = q.slots[SPARE, n[N_SPARE]]
        q.slots[REQUEST, s], q.slots[MODE, s], q.slots[TOTAL, s] = request, SINGLE, total
        q.slots[COMPUTED, s], q.slots[BEFORE, s], q.slots[CHUNK_TOKENS, s] = c, c, new
        q.slots[SINGLES, n[N_SINGLES]] = s
        n[N_SINGLES] += 1
        tail = n[N_TAIL]
        q.slots[BEHIND, s], q.slots[AHEAD, s] = tail, -1
        if tail >= 0:
            q.slots[AHEAD, tail] = s
        else:
            n[N_HEAD] = s
        n[N_TAIL] = s
        n[N_RUNNING] += 1
        if r.times[SCHEDULED, request] < 0:
            r.times[SCHEDULED, request] = q.x[X_NOW]
        left -= new


def _seconds(g, q, cost, step, reads, pairs):
    """Seconds of the step that was scheduled; also counts its tokens."""
    n = q.n
    sequences = n[N_SCHEDULED]
    tokens = n[N_SCHEDULED]
    decoded = n[N_SCHEDULED]
    for i in range(g.shape[1]):
        kind = g[KIND, i]
        reads[i] = 0.0
        if kind == FULL:
            reads[i] = n[N_BASE] + n[N_COUNTED] * (step + 1)
        elif kind == WINDOW:
            awake = n[N_COUNTED] - q.sums[SLEEPING, i]
            reads[i] = awake * g[SPAN, i] + q.sums[SLEEPING_BASE, i] + q.sums[SLEEPING, i] * (step + 1)
        elif kind == CHUNK:
            reads[i] = q.sums[IN_CHUNK, i] + n[N_COUNTED]
        pairs[i] = reads[i]
    for k in range(n[N_SINGLES]):
        s = q.slots[SINGLES, k]
        new = q.slots[CHUNK_TOKENS, s]
        if new == 0:
            continue
        c = q.slots[COMPUTED, s]
        sequences += 1
        tokens += new
        if new == 1 and c + 1 == q.slots[TOTAL, s]:
            decoded += 1
        for i in range(g.shape[1]):
            kind = g[KIND, i]
            if kind >= STATE:  # a state is read whole, with its sequence
                continue
            past = c
            if kind == WINDOW:
                past = min(c, g[SPAN, i])
            elif kind == CHUNK:
                past = c % g[SPAN, i]
            reads[i] += past + new
            reach = past + (new + 1) / 2
            if kind != FULL:
                reach = min(reach, float(g[SPAN, i]))
            pairs[i] += new * reach
    memory = cost.memory[tokens] + cost.memory_sequence * sequences
    compute = cost.compute[tokens]
    for i in range(g.shape[1]):
        memory += cost.memory_read[i] * reads[i]
        compute += cost.compute_read[i] * pairs[i]
    n[N_DECODED] += decoded
    n[N_PREFILLED] += tokens - decoded
    return max(memory, compute) + cost.launch if tokens else 0.0


def _finish_step(g, q, r, step):
    """Tokens come out: who is done leaves, who decodes is counted from the next step on."""
    n, now = q.n, q.x[X_NOW]
    n[N_OUTPUT] += n[N_SCHEDULED]
    at = step & (len(q.finish_head) - 1)
    s = q.finish_head[at]
    while s >= 0:
        after = q.slots[FINISH_AHEAD, s]
        c = q.slots[BASE, s] + step
        for i in range(g.shape[1]):
            q.free[g[POOL, i]] += g[WEIGHT, i] * held(g, i, c, c + 1)
        r.times[FINISH, q.slots[REQUEST, s]] = now
        n[N_DONE] += 1
        count_out(g, q, s, step)
        leave_order(q, s)
        s = after
    for i in range(g.shape[1]):
        if g[KIND, i] == CHUNK:
            left = q.leaves[g[LEAVE, i] + (step + 1) % g[SPAN, i]]
            q.sums[IN_CHUNK, i] += n[N_COUNTED] - g[SPAN, i] * left
    k = n[N_SINGLES] - 1
    while k >= 0:  # backwards, because those who leave are replaced by the last
        s = q.slots[SINGLES, k]
        k -= 1
        new = q.slots[CHUNK_TOKENS, s]
        if new == 0:
            continue
        q.slots[BEFORE, s] = q.slots[COMPUTED, s]
        q.slots[COMPUTED, s] += new
        if q.slots[COMPUTED, s] < q.slots[TOTAL, s]:
            continue
        q.slots[TOTAL, s] += 1
        n[N_OUTPUT] += 1
        request = q.slots[REQUEST, s]
        if r.times[FIRST, request] < 0:
            r.times[FIRST, request] = now
        if q.slots[TOTAL, s] - r.tokens[PROMPT, request] >= r.tokens[OUTPUT, request]:
            for i in range(g.shape[1]):
                q.free[g[POOL, i]] += g[WEIGHT, i] * held(g, i, q.slots[BEFORE, s], q.slots[COMPUTED, s])
            r.times[FINISH, request] = now
            n[N_DONE] += 1
            leave_order(q, s)
        elif new == 1 and q.slots[BEFORE, s] > 0:
            q.slots[BASE, s] = q.slots[COMPUTED, s] - step - 1
            n[N_SINGLES] -= 1
            q.slots[SINGLES, k + 1] = q.slots[SINGLES, n[N_SINGLES]]
            count_in(g, q, s, step + 1, r.tokens[PROMPT, request], r.tokens[OUTPUT, request])


def sample_row(q, waiting):
    """The number of the next row of samples, begun; where the table is full, every other row is kept."""
    n, x, rows = q.n, q.x, q.samples
    if n[N_SAMPLES] == len(rows):
        half = len(rows) // 2
        for k in range(half):
            rows[k] = rows[2 * k + 1]
        n[N_SAMPLES] = half
        x[X_SAMPLE_EVERY] *= 2
    at = n[N_SAMPLES]
    n[N_SAMPLES] += 1
    x[X_SAMPLE_AT] = x[X_NOW] + x[X_SAMPLE_EVERY]
    rows[at, :] = 0.0
    rows[at, 0], rows[at, 1], rows[at, 2] = x[X_NOW], n[N_RUNNING], waiting
    rows[at, 3], rows[at, 4] = n[N_PREEMPTIONS], n[N_DONE]
    return at


def _sample(g, q, step, waiting):
    """Write down how things stand."""
    row = q.samples[sample_row(q, waiting)]
    groups = g.shape[1]
    s = q.n[N_HEAD]
    while s >= 0:
        if q.slots[MODE, s] == COUNTED:
            c = q.slots[BASE, s] + step
            e = c + 1
        else:
            new = q.slots[CHUNK_TOKENS, s]
            c = q.slots[COMPUTED, s] if new else q.slots[BEFORE, s]
            e = q.slots[COMPUTED, s] + new
        for i in range(groups):
            row[5 + i] += held(g, i, c, e)
            row[5 + groups + i] += content(g, i, e)
        s = q.slots[AHEAD, s]


def run_steps(g, q, r, cost, most, budget, align, checkpoint, policy, prefill, steps, trace):
    """Go on for ``steps`` steps or until all is done; whether there is more to do.

    ``trace``: rows of (free blocks of pool 0, running, waiting, scheduled tokens) by step, as far as it goes.
    """
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
        wake(g, q, step)
        preempted = False
        if not _quiet(g, q, r, step, budget, align, checkpoint):
            preempted = _in_order(g, q, r, step, budget, align, checkpoint, policy)
        left = budget - n[N_SCHEDULED]
        for k in range(n[N_SINGLES]):
            left -= q.slots[CHUNK_TOKENS, q.slots[SINGLES, k]]
        if not preempted:
            _admit(g, q, r, step, budget, left, align, checkpoint, policy, most, prefill)
        before = n[N_DECODED] + n[N_PREFILLED]
        seconds = _seconds(g, q, cost, step, reads, pairs)
        waiting = n[N_QUEUED] + n[N_ARRIVED] - n[N_NEXT]
        x[X_NOW] += seconds
        x[X_BUSY] += seconds
        x[X_RUNNING] += seconds * n[N_RUNNING]
        x[X_WAITING] += seconds * waiting
        if step < len(trace):
            trace[step, 0], trace[step, 1], trace[step, 2] = q.free[0], n[N_RUNNING], waiting
            trace[step, 3] = n[N_DECODED] + n[N_PREFILLED] - before
        if x[X_NOW] >= x[X_SAMPLE_AT]:
            _sample(g, q, step, waiting)
        _finish_step(g, q, r, step)
        n[N_STEP] += 1
        if n[N_DECODED] + n[N_PREFILLED] == before and not preempted:
            # nothing could be scheduled: only another arrival changes that
            if n[N_ARRIVED] == total:
                return False
            x[X_NOW] = max(x[X_NOW], r.times[ARRIVAL, n[N_ARRIVED]])
    return True


# -- around the steps -------------------------------------------------------------------------------

#: functions that ``compiled`` compiles, each after those it calls
_COMPILED = (
    kept,
    held,
    content,
    aligned_chunk,
    _before,
    push,
    pop,
    count_in,
    count_out,
    wake,
    leave_order,
    _quiet,
    _victim,
    _in_order,
    _admit,
    _seconds,
    _finish_step,
    sample_row,
    _sample,
    run_steps,
)


@lru_cache(1)
def compiled() -> SimpleNamespace:
    """The functions above compiled by numba; as they stand where it is not installed (``fast`` says which).

    Compiling takes some 20 seconds once; numba keeps the result beside this file or in its own cache folder.
    """
    try:
        import numba
    except ImportError:
        return SimpleNamespace(fast=False, **{f.__name__: f for f in _COMPILED})
    space = dict(globals())
    for function in _COMPILED:
        copy = FunctionType(function.__code__, space, function.__name__)
        copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
        space[function.__name__] = numba.njit(cache=True)(copy)
    return SimpleNamespace(fast=True, **{f.__name__: space[f.__name__] for f in _COMPILED})


def new_state(
    groups: np.ndarray, free: list[int], requests: Requests, most: int, samples: int = 512
) -> State:
    """A scheduler before its first step. ``free``: blocks of each pool; ``most``: running requests at most."""
    import numpy as np

    n, kinds = requests.times.shape[1], groups.shape[1]
    windows = groups[SPAN, groups[KIND] == WINDOW]
    longest = int(requests.tokens[OUTPUT].max(initial=1))

    def empty(*shape: int) -> np.ndarray:
        return np.full(shape, -1, np.int64)

    def ring(longest: int) -> int:
        return 1 << (longest + 2).bit_length()

    slots = empty(SPARE + 1, most)
    slots[MODE] = EMPTY
    slots[SPARE] = np.arange(most - 1, -1, -1)
    counters = np.zeros(N_COUNTERS, np.int64)
    counters[[N_HEAD, N_TAIL]] = -1
    counters[N_SPARE] = most
    sums = np.zeros(X_SUMS)
    sums[X_SAMPLE_EVERY] = max(float(requests.times[ARRIVAL].max(initial=0.0)) / (samples // 2), 1e-3)
    return State(
        slots,
        finish_head=empty(ring(longest)),
        wake_head=empty(kinds, ring(int(windows.max(initial=0)))),
        wakes=empty(2, kinds, most),
        grows=np.zeros(phases(groups)[0].sum(), np.int64),
        leaves=np.zeros(phases(groups)[1].sum(), np.int64),
        sums=np.zeros((3, kinds), np.int64),
        free=np.array(free, np.int64),
        need=np.zeros(len(free), np.int64),
        queue=np.zeros(n + 1, np.int32),
        samples=np.zeros((samples, len(SAMPLE) + 2 * kinds)),
        n=counters,
        x=sums,
    )


def phases(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counters that each column of groups has: of blocks taken, and of blocks left."""
    import numpy as np

    kind, block, span = groups[KIND], groups[BLOCK], groups[SPAN]
    taken = np.where(kind == FIXED, 0, block)
    return taken, np.where(kind == WINDOW, block, np.where(kind == CHUNK, span, 0))
