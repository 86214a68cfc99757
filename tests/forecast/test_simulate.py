"""Simulation: blocks event by event as the block manager has them, and figures that add up."""

import copy
import random

import numpy as np
import pytest
from small import chunk, cross, full, ring, small_layout, state, window

from decodebench.forecast import scheduler
from decodebench.forecast.simulate import OneSecond, Settings, SimulationError, compare_simulations, simulate
from decodebench.forecast.traces import read_traffic
from decodebench.forecast.traffic import ENDLESS, Segments, Traffic, synthetic_traffic
from decodebench.layout.plan import plan
from decodebench.layout.pool import KVCacheManager, Request

FAST = scheduler.compiled().fast
SCENARIOS = 2000 if FAST else 150
PLAIN = {"plain": not FAST, "progress": False}


def made(arrivals, prompts, outputs, segments=None):
    return Traffic("made", np.array(arrivals, float), np.array(prompts), np.array(outputs), segments)


class Reference:
    """vLLM's first-come scheduling in a few lines, with every block in the block manager's hands.

    The manager's pool has a few blocks more than the simulated one (``SLACK``), because ``append`` asks for
    new blocks before it gives old ones back.
    """

    SLACK = 64

    def __init__(self, layout, prompts, outputs, most):
        self.layout, self.prompts, self.outputs, self.most = layout, prompts, outputs, most
        self.blocks = layout.pool_num_blocks[0]
        self.manager = KVCacheManager(layout.with_num_blocks(self.blocks + self.SLACK))
        self.running, self.waiting, self.known = [], [], list(prompts)
        self.preemptions = [0] * len(prompts)

    def free(self):
        return self.manager.num_free() - self.SLACK

    def grow(self, i):
        """Append a token to a running request; False where the pool could not hold it."""
        before = copy.deepcopy(self.manager) if self.free() < len(self.layout.groups) else None
        self.manager.append(f"r{i}")
        if self.free() >= 0:
            return True
        self.manager = before
        return False

    def step(self):
        preempted = False
        for i in list(self.running):
            if i not in self.running:
                continue
            while not self.grow(i):
                victim = self.running.pop()
                self.manager.preempt(f"r{victim}")
                self.waiting.insert(0, victim)
                self.preemptions[victim] += 1
                preempted = True
                if victim == i:
                    break
        while not preempted and self.waiting and len(self.running) < self.most:
            i = self.waiting[0]
            self.manager.allocate(Request(f"r{i}", self.known[i]))
            if self.free() < 0:
                self.manager.free(f"r{i}")
                break
            self.running.append(self.waiting.pop(0))
        row = [self.free(), len(self.running), len(self.waiting), len(self.running)]
        for i in list(self.running):
            self.known[i] += 1  # a token comes out
            if self.known[i] - self.prompts[i] >= self.outputs[i]:
                self.running.remove(i)
                self.manager.free(f"r{i}")
        return row


def some_groups(draw):
    block = draw.choice([2, 4, 8])
    kinds = [
        full(2 * block),
        window(draw.randint(1, 40), block),
        window(draw.randint(1, 9), 2 * block),
        chunk(draw.choice([block, 3 * block, 2 * block + 1]), block),
        state(4096, num_speculative_blocks=draw.choice([0, 2])),
        state(block, mamba_cache_mode="align"),
        ring(),
        cross(draw.randint(1, 50), block),
    ]
    return [full(block), *draw.sample(kinds, draw.randint(0, 3))]


@pytest.mark.parametrize("part", range(10))
def test_every_event_is_the_block_managers(part):
    """Free blocks, running, waiting and preemptions at every step of random crowded pools."""
    crowded = 0
    for seed in range(part * SCENARIOS // 10, (part + 1) * SCENARIOS // 10):
        draw = random.Random(seed)
        specs = some_groups(draw)
        n, most = draw.randint(2, 7), draw.randint(2, 5)
        prompts = [draw.randint(1, 50) for _ in range(n)]
        outputs = [draw.randint(1, 24) for _ in range(n)]
        arrivals = sorted(draw.choice([0, 0, 1, 3, 10]) for _ in range(n))
        layout = small_layout(specs, 2000, max_model_len=80)
        needed = 1 + sum(
            max(3, -(-80 // spec.block_size), layout.blocks_per_request()[g]) for g, spec in enumerate(specs)
        )
        layout = layout.with_num_blocks(needed + draw.choice([0, 1, 3, 10, 500]))
        found = simulate(
            layout,
            made(arrivals, prompts, outputs),
            OneSecond(),
            Settings(most, 64, prefill=False),
            trace=1000,
            **PLAIN,
        )
        reference, rows, coming = Reference(layout, prompts, outputs, most), [], list(enumerate(arrivals))
        now = 0
        while coming or reference.running or reference.waiting:
            if not reference.running and not reference.waiting:
                now = max(now, coming[0][1])
            while coming and coming[0][1] <= now:
                reference.waiting.append(coming.pop(0)[0])
            rows.append(reference.step())
            now += rows[-1][3] > 0
        assert found.trace.tolist() == rows, seed
        assert found.requests.tokens[scheduler.PREEMPTIONS].tolist() == reference.preemptions, seed
        crowded += sum(reference.preemptions)
    assert crowded, "scenarios in which requests give way are among them"


@pytest.mark.parametrize("seed", range(60))
def test_prefix_hits_are_the_block_managers(seed):
    """Whole blocks of a prefix, while their owner runs: as many as the manager finds."""
    draw = random.Random(seed)
    block = draw.choice([4, 8])
    specs = [full(block), *draw.sample([full(2 * block), window(100, block)], draw.randint(0, 1))]
    lcm = max(spec.block_size for spec in specs)
    shared = lcm * draw.randint(1, 4)
    prompts = [shared + draw.randint(1, 30) for _ in range(5)]
    layout = small_layout(specs, 900, max_model_len=128)
    manager = KVCacheManager(layout)
    hits = [
        manager.allocate(Request(f"r{i}", tokens, "prefix", shared)).num_computed
        for i, tokens in enumerate(prompts)
    ]
    rows = [[(0, shared), (1 + i, ENDLESS)] for i in range(5)]
    segments = Segments(
        np.arange(0, 11, 2),
        np.array([i for row in rows for i, _ in row]),
        np.array([e for row in rows for _, e in row]),
    )
    traffic = made(range(5), prompts, [40] * 5, segments)
    found = simulate(layout, traffic, OneSecond(), Settings(8, 256), prefix_caching=True, **PLAIN)
    assert found.count(scheduler.N_HITS) == sum(hits) == 4 * shared


def some_traffic(n=60, **facts):
    return synthetic_traffic(n, 2.0, (60, 0.8), (20, 0.8), longest=200, **facts)


LAYOUTS = {
    "full": [full(8)],
    "windows": [full(8), window(30, 8), window(30, 8)],
    "states": [full(16), state(16, mamba_cache_mode="align"), state(16, mamba_cache_mode="align")],
    "chunks": [full(8), chunk(24, 8)],
}


@pytest.mark.skipif(not FAST, reason="numba is not installed")
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("sharing", [False, True])
def test_compiled_loops_equal_the_plain_ones(name, sharing):
    layout = small_layout(LAYOUTS[name], 90, max_model_len=256)
    traffic = some_traffic(**({"system_prompts": 2, "system_tokens": 32, "turns": 2} if sharing else {}))
    one, two = (
        simulate(layout, traffic, OneSecond(), Settings(8, 64), plain=plain, progress=False, trace=500)
        for plain in (False, True)
    )
    assert one.trace.tolist() == two.trace.tolist()
    for a, b in zip(one.requests, two.requests):
        assert np.array_equal(a, b)
    assert np.array_equal(one.state.samples, two.state.samples)
    assert np.array_equal(one.state.n, two.state.n)


@pytest.mark.parametrize("policy", ["fcfs", "shortest"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_everything_is_served_and_given_back(name, policy):
    layout = small_layout(LAYOUTS[name], 70, max_model_len=256)
    for caching in (False, True):
        found = simulate(
            layout, some_traffic(), OneSecond(), Settings(8, 64, policy), prefix_caching=caching, **PLAIN
        )
        assert found.finished == 60 and found.count(scheduler.N_PREEMPTIONS) > 0
        assert found.state.free.tolist() == [69]
        assert found.output_tokens == found.requests.tokens[scheduler.OUTPUT].sum()
        times = found.requests.times
        assert (times[scheduler.SCHEDULED] >= times[scheduler.ARRIVAL]).all()
        assert (times[scheduler.FIRST] > times[scheduler.SCHEDULED]).all()
        assert (times[scheduler.FINISH] >= times[scheduler.FIRST]).all()
        over = found.over_time()
        parts = over[["content_bytes", "last_block_bytes", "padding_bytes", "free_bytes"]]
        assert np.allclose(parts.sum(axis=1), 69 * layout.bytes_per_block()) and (parts >= 0).all().all()


def test_shortest_first_serves_short_prompts_sooner():
    layout = small_layout([full(8)], 60, max_model_len=256)
    traffic = some_traffic(200)
    first, short = (
        simulate(layout, traffic, OneSecond(), Settings(8, 64, policy), **PLAIN)
        for policy in ("fcfs", "shortest")
    )
    small = traffic.prompt < np.median(traffic.prompt)
    assert short.latencies["queue"][small].mean() < first.latencies["queue"][small].mean()


def test_several_pools_are_counted_apart():
    layout = plan("gpt-oss-20b", memory="2GiB", grouping="separate", max_model_len=4096)
    found = simulate(layout, some_traffic(), OneSecond(), Settings(8, 512), **PLAIN)
    assert found.finished == 60
    assert found.state.free.tolist() == [blocks - 1 for blocks in layout.pool_num_blocks]


def test_a_larger_pool_is_never_slower_and_a_comparison_says_so():
    traffic = some_traffic(200)
    small, large = (
        simulate(
            small_layout([full(8)], blocks, max_model_len=256), traffic, OneSecond(), Settings(8, 64), **PLAIN
        )
        for blocks in (40, 400)
    )
    table = compare_simulations(small, large).set_index("metric")
    assert table.loc["latency_s", "difference"] < 0 and table.loc["latency_s", "distinguishable"]
    same = compare_simulations(small, small).set_index("metric")
    assert (same["difference"] == 0).all() and not same["distinguishable"].any()
    with pytest.raises(SimulationError, match="different traffic"):
        compare_simulations(
            small, simulate(small.layout, some_traffic(100), OneSecond(), Settings(8, 64), **PLAIN)
        )


def test_too_long_and_too_large_are_refused_and_counted():
    layout = small_layout([full(8)], 12, max_model_len=100)
    traffic = made([0, 1, 2, 3], [100, 95, 90, 20], [5, 50, 1, 5])
    found = simulate(layout, traffic, OneSecond(), Settings(8, 128), **PLAIN)
    assert sum(found.refused.values()) == 3 and found.finished == 1 and found.served.tolist() == [3]
    assert all(reason in str(found) for reason in found.refused)
    with pytest.raises(SimulationError, match="none of the 1 requests"):
        simulate(layout, made([0], [100], [1]), OneSecond(), Settings(8, 128), **PLAIN)


def test_answers_end_at_the_longest_length():
    found = simulate(
        small_layout([full(8)], 40, max_model_len=64),
        made([0], [60], [500]),
        OneSecond(),
        Settings(8, 64),
        **PLAIN,
    )
    assert found.requests.tokens[scheduler.OUTPUT].tolist() == [4] and found.output_tokens == 4


@pytest.mark.parametrize("arguments", [(0,), (8, 4), (8, 64, "longest"), (True,), (8.5,), (1 << 40,)])
def test_bad_settings_are_refused(arguments):
    with pytest.raises(SimulationError) as error:
        Settings(*arguments)
    assert "\n" not in str(error.value)


def test_an_interrupted_simulation_keeps_what_it_has(monkeypatch):
    layout, calls = small_layout([full(8)], 60, max_model_len=256), []
    loops = scheduler.run_steps

    def some_steps(*arguments):
        if calls:
            raise KeyboardInterrupt
        calls.append(1)
        return loops(*arguments[:-2], 60, arguments[-1])

    monkeypatch.setattr(scheduler, "run_steps", some_steps)
    found = simulate(layout, some_traffic(200), OneSecond(), Settings(8, 64), plain=True, progress=False)
    assert found.interrupted and 0 < found.finished < 200 and "interrupted" in str(found)
    assert found.table()["finished"].sum() == found.finished


def test_a_shared_prefix_is_hit_where_the_layout_was_planned_for_it():
    traffic = some_traffic(system_prompts=1, system_tokens=32)
    on, off = (
        simulate(
            plan("llama-3.1-8b", "1GiB", max_model_len=2048, enable_prefix_caching=caching),
            traffic,
            OneSecond(),
            Settings(8, 512),
            **PLAIN,
        )
        for caching in (True, False)
    )
    assert (
        on.count(scheduler.N_HITS) == (len(traffic) - 1) * 32
        and on.prefix_hit_rate > 0.1
        and off.prefix_hit_rate == 0
    )


def test_the_first_hour_of_azure_code_is_what_it_was():
    layout = plan("nemotron-h-8b", "4GiB", max_model_len="auto")
    found = simulate(
        layout, read_traffic("azure-code-2023").first(300), OneSecond(), Settings(32, 4096), **PLAIN
    )
    assert found.finished == 300
