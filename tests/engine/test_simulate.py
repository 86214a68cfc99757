"""The simulated scheduler against vLLM's own: free blocks, running, waiting, scheduled tokens, at every step.

A few scenarios of every kind run as tests, in plain Python. Many, with the compiled loops, from any seed:

    python tests/engine/test_simulate.py --scenarios 2000 --seed 7
"""

import argparse
import json
import random
import tempfile
from collections import deque
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")
import numpy as np
import torch
import vllm
from small import chunk, full, small_layout, state, window
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as v
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from decodebench.forecast import prefix_cache
from decodebench.forecast.simulate import OneSecond, Settings, simulate
from decodebench.forecast.traffic import ENDLESS, Segments, Traffic
from decodebench.vllm import compat
from decodebench.vllm.launch import FORWARD

DATA = Path(__file__).parents[2] / "data"
EOS, LONGEST = 2, 128
SCENARIOS = 48  # of each test; a multiple of 12, over which the kinds of groups repeat
#: the release whose scheduler the simulation follows; others may schedule a step otherwise
FOLLOWED = "0.32"
pytestmark = (
    []
    if compat.release(vllm.__version__) == FOLLOWED
    else pytest.mark.xfail(reason=f"the simulation follows vLLM {FOLLOWED}'s scheduler", strict=False)
)


def vllm_spec(spec):
    attention = {"block_size": spec.block_size, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    if spec.kind == "full_attention":
        return v.FullAttentionSpec(**attention)
    if spec.kind == "sliding_window":
        return v.SlidingWindowSpec(**attention, sliding_window=spec.sliding_window)
    if spec.kind == "chunked_local_attention":
        return v.ChunkedLocalAttentionSpec(**attention, attention_chunk_size=spec.attention_chunk_size)
    return v.MambaSpec(
        block_size=spec.block_size,
        shapes=((3, 8),),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode=spec.mamba_cache_mode,
        num_speculative_blocks=spec.num_speculative_blocks,
        num_prefill_checkpoint_blocks=spec.num_prefill_checkpoint_blocks,
        prefill_checkpoint_alignment=1 if spec.num_prefill_checkpoint_blocks else None,
    )


@lru_cache(256)
def engine_config(prefix, drafts, **arguments):
    if drafts:
        arguments["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": drafts,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        }
    with tempfile.TemporaryDirectory() as folder:
        config = FORWARD | json.loads((DATA / "models" / "tiny-llama" / "config.json").read_text())
        Path(folder, "config.json").write_text(json.dumps(config))
        return EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=prefix,
            async_scheduling=False,
            **arguments,
        ).create_engine_config()


def own_token(i, position):
    """A token that only request ``i`` has."""
    return 1_000_000_000 + 10_000 * i + position


def vllm_steps(specs, num_blocks, arrivals, prompts, outputs, settings, token=own_token, prefix=False):
    """(free, running, waiting, scheduled) of each step of vLLM's scheduler, and preemptions by request.

    Steps follow one another as in vLLM's engine: done before the next is scheduled, or after it.
    """
    drafts = settings.num_speculative_tokens
    config = engine_config(
        prefix,
        drafts,
        max_model_len=LONGEST,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        scheduling_policy="priority" if settings.scheduling_policy == "shortest" else "fcfs",
    )
    groups = [v.KVCacheGroupSpec([f"g{g}"], vllm_spec(spec)) for g, spec in enumerate(specs)]
    sizes = [spec.block_size for spec in specs]
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.block_size = max(sizes)
    aligned = any(getattr(spec, "mamba_cache_mode", "") == "align" for spec in specs)
    config.cache_config.mamba_cache_mode = "align" if aligned else "none"
    scheduler = (AsyncScheduler if settings.async_scheduling else Scheduler)(
        config,
        v.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        StructuredOutputManager(config),
        block_size=int(np.lcm.reduce(sizes)),
        hash_block_size=int(np.gcd.reduce(sizes)),
    )
    scheduler.num_lookahead_tokens = settings.lookahead
    init_none_hash(sha256)
    hasher = get_request_block_hasher(int(np.gcd.reduce(sizes)), sha256) if prefix else None
    rows, now, waiting, requests = [], 0, list(range(len(arrivals))), {}
    under_way = deque()
    while waiting or under_way or scheduler.has_unfinished_requests():
        if not under_way and not scheduler.has_unfinished_requests():
            now = max(now, arrivals[waiting[0]])
        while waiting and arrivals[waiting[0]] <= now:
            i = waiting.pop(0)
            params = SamplingParams(max_tokens=int(outputs[i]), ignore_eos=True)
            params.update_from_generation_config({}, EOS)
            request = Request(
                f"r{i:05d}",
                [token(i, p) for p in range(prompts[i])],
                params,
                None,
                block_hasher=hasher,
                arrival_time=i,
            )
            request.priority = prompts[i]
            requests[i] = request
            scheduler.add_request(request)
        scheduled = 0
        if scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            scheduled = output.total_num_scheduled_tokens
            if scheduled or not settings.async_scheduling:
                free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
                rows.append((free, len(scheduler.running), len(scheduler.waiting), scheduled))
            if scheduled or output.preempted_req_ids:
                end = (max(now, under_way[-1][0]) if under_way else now) + (scheduled > 0)
                if scheduled or not settings.async_scheduling:
                    under_way.append((end, output, drawn(scheduler, output)))
            elif not under_way and waiting:  # nothing moves: only the next arrival changes that
                now = max(now, arrivals[waiting[0]])
        if settings.async_scheduling and scheduled and len(under_way) < 2:
            continue
        if under_way:
            now, output, kinds = under_way.popleft()
            update(scheduler, output, kinds, settings, token)
    return np.array(rows), np.array([requests[i].num_preemptions for i in range(len(arrivals))])


def drawn(scheduler, output):
    """Request → whether its step draws tokens, and whether its drafts are only padding."""
    new = {r.req_id for r in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
    return {
        name: (not scheduler.requests[name].is_prefill_chunk, name in new)
        for name in output.num_scheduled_tokens
    }


def update(scheduler, output, kinds, settings, token):
    """What the model would give back: a token where the known ones are computed, and drafts that hold."""
    names, tokens = list(output.num_scheduled_tokens), []
    for name in names:
        request, (draws, padded) = scheduler.requests.get(name), kinds[name]
        if request is None or not draws:
            tokens.append([])
            continue
        i, known = int(name[1:]), request.num_tokens
        drafts = 0 if padded else len(output.scheduled_spec_decode_tokens.get(name, ()))
        threshold = round(settings.acceptance_rate * prefix_cache.CERTAIN)
        right = prefix_cache.accepted(threshold, i, known, drafts)
        tokens.append([token(i, known + k) for k in range(right + 1)])
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=tokens
        ),
    )
    drafts = settings.num_speculative_tokens
    if drafts and not settings.async_scheduling:
        scheduler.update_draft_token_ids(DraftTokenIds(names, [[1] * drafts for _ in names]))


def scenario(draw, kinds):
    """Specs, a pool that one request of the longest length fits, requests that crowd it."""
    block = draw.choice([2, 4, 8])
    states = (
        state(block, mamba_cache_mode="align"),
        state(block, mamba_cache_mode="align", num_prefill_checkpoint_blocks=1),
    )
    others = {
        "full": full(2 * block),
        "window": window(draw.randint(2, 40), block),
        "small window": window(draw.randint(2, 12), block),
        "chunk": chunk(draw.choice([block, 3 * block, 5 * block, 2 * block + 1]), block),
        "state": state(4096),
        "aligned": draw.choice(states),
    }
    specs = [full(block), *(others[kind] for kind in kinds)]
    return block, specs


def some_requests(draw, largest):
    """(arrivals, prompts, outputs, settings) of requests that crowd a pool."""
    n = draw.randint(4, 14)
    most = draw.randint(2, 8)
    prompts = [draw.randint(1, largest) for _ in range(n)]
    outputs = [draw.randint(1, 36) for _ in range(n)]
    arrivals, now = [], 0
    for _ in range(n):
        arrivals.append(now)
        now += draw.choice([0, 0, 1, 3, 10, 60])
    policy = draw.choice(["fcfs", "fcfs", "shortest"])
    return arrivals, prompts, outputs, Settings(most, draw.choice([16, 24, 32, 64, 128]), policy)


def crowded(draw, specs):
    """Blocks of a pool that the longest request just fits, or several do."""
    largest = sum(
        -(-LONGEST // spec.block_size) if spec.kind != "mamba" else 3 + spec.num_speculative_blocks
        for spec in specs
    )
    return 1 + largest + draw.choice([0, 1, 3, 10, 60, 1000])


def both(specs, num_blocks, asked, settings, segments=None, prefix=False, token=own_token, plain=True):
    """Every step of vLLM's scheduler is the simulation's of the same requests."""
    arrivals, prompts, outputs = asked
    rows, preemptions = vllm_steps(specs, num_blocks, *asked, settings, token, prefix)
    layout = small_layout(
        specs, num_blocks, max_model_len=LONGEST, max_in_flight_tokens=settings.max_num_batched_tokens
    )
    traffic = Traffic("made", np.array(arrivals, float), np.array(prompts), np.array(outputs), segments)
    ours = simulate(
        layout,
        traffic,
        OneSecond(),
        settings,
        progress=False,
        prefix_caching=prefix,
        trace=len(rows) + 5,
        plain=plain,
    )
    assert ours.trace.tolist() == rows.tolist()
    assert ours.requests.tokens[3].tolist() == preemptions.tolist()
    return ours


def counted(seed, plain=True):
    """Blocks that are only counted: no prefix is shared."""
    draw = random.Random(seed)
    kinds = draw.sample(["window", "small window", "chunk", "state", "full"], draw.randint(0, 3))
    if seed % 3 == 0:
        kinds = [kind for kind in kinds if kind in ("window", "chunk")] + ["aligned"] * draw.randint(1, 2)
    block, specs = scenario(draw, kinds)
    *asked, settings = some_requests(draw, 90)
    settings = replace(settings, max_num_batched_tokens=max(settings.max_num_batched_tokens, 2 * block))
    both(specs, crowded(draw, specs), asked, settings, plain=plain)


def shared_prefixes(draw, prompts):
    """Segments of requests that begin alike: system prompts, and conversations that go on."""
    systems = [(draw.randint(1, 40), i) for i in range(draw.randint(1, 3))]
    rows = []
    for _ in prompts:
        length, system = draw.choice(systems)
        conversation = draw.choice([None, 100 + draw.randint(0, 2)])
        row = [(system, length)] if draw.random() < 0.8 else []
        if conversation is not None:
            row.append((conversation if not row else conversation * 10 + system, ENDLESS))
        rows.append(row)
    start = np.cumsum([0, *map(len, rows)])
    ids = np.array([number for row in rows for number, _ in row], np.int64)
    ends = np.array([end for row in rows for _, end in row], np.int64)

    def token(i, position):
        for number, end in rows[i]:
            if position < end:
                return 100_000 * (1 + number) + position
        return own_token(i, position)

    return Segments(start, ids, ends), token


PREFIX_KINDS = [[], ["window"], ["small window"], ["full"], ["window", "small window"], ["aligned"]]


def named(seed, plain=True):
    """Requests that share prefixes."""
    draw = random.Random(1000 + seed)
    kinds = ["aligned", "aligned"] if seed % 12 == 11 else PREFIX_KINDS[seed % 6]
    block, specs = scenario(draw, kinds)
    *asked, settings = some_requests(draw, 90)
    settings = replace(settings, max_num_batched_tokens=max(settings.max_num_batched_tokens, 2 * block))
    segments, token = shared_prefixes(draw, asked[1])
    if seed % 5 == 0:
        segments, token = None, own_token
    both(specs, crowded(draw, specs), asked, settings, segments, True, token, plain)


def ahead_or_drafted(seed, plain=True):
    """Steps that verify drafts, steps scheduled ahead, and both; with and without shared prefixes."""
    draw = random.Random(2000 + seed)
    drafts = [0, 1, 3, 5][seed % 4]
    kinds = draw.sample(["window", "small window", "chunk", "full"], draw.randint(0, 2))
    prefix = seed % 3 == 0 and "chunk" not in kinds
    if not prefix and draw.random() < 0.3:
        kinds.append("state")
    block, specs = scenario(draw, kinds)
    specs = [replace(s, num_speculative_blocks=drafts) if s.kind == "mamba" else s for s in specs]
    *asked, settings = some_requests(draw, 90)
    settings = replace(
        settings,
        max_num_batched_tokens=max(settings.max_num_batched_tokens, 2 * block),
        num_speculative_tokens=drafts,
        acceptance_rate=draw.choice([0.0, 0.5, 0.8, 1.0]),
        num_lookahead_tokens=draw.choice([None, 0]),
        async_scheduling=drafts == 0 or draw.random() < 0.5,
    )
    segments, token = shared_prefixes(draw, asked[1]) if prefix else (None, own_token)
    both(specs, crowded(draw, specs), asked, settings, segments, prefix, token, plain)


KINDS = {"counted": counted, "named": named, "ahead or drafted": ahead_or_drafted}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", range(4))
def test_every_step_is_vllms(kind, part):
    for seed in range(part * SCENARIOS // 4, (part + 1) * SCENARIOS // 4):
        KINDS[kind](seed)


def main():
    """The long run; stops at the first scenario in which a step differs, and names its seed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--scenarios", type=int, default=2000, metavar="N", help="of each kind")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first one")
    parser.add_argument("--kind", choices=list(KINDS), help="only these")
    parser.add_argument("--plain", action="store_true", help="without numba's compiled loops")
    arguments = parser.parse_args()
    from tqdm import tqdm

    for kind in [arguments.kind] if arguments.kind else KINDS:
        for seed in tqdm(range(arguments.seed, arguments.seed + arguments.scenarios), kind):
            try:
                KINDS[kind](seed, arguments.plain)
            except AssertionError as error:
                raise SystemExit(f"{kind}, seed {seed}: {error}") from error
        print(f"{kind}: {arguments.scenarios:,} scenarios from seed {arguments.seed} on, every step equal")


if __name__ == "__main__":
    main()
