"""The simulated scheduler against vLLM's own: free blocks, running, waiting, scheduled tokens, at every step."""

import json
import os
import random
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")
if find_spec("numba") is None:  # found, not imported: see the conftest beside this file
    pytest.skip("numba is not installed here", allow_module_level=True)

import numpy as np
import torch
from small import chunk, full, small_layout, state, window
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as v
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from decodebench.forecast.simulate import OneSecond, Settings, simulate
from decodebench.forecast.traffic import ENDLESS, Segments, Traffic
from decodebench.vllm.launch import FORWARD

DATA = Path(__file__).parents[2] / "data"
EOS, LONGEST = 2, 128
SCENARIOS = int(os.environ.get("SCENARIOS", 100))


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
        num_prefill_checkpoint_blocks=spec.num_prefill_checkpoint_blocks,
        prefill_checkpoint_alignment=1 if spec.num_prefill_checkpoint_blocks else None,
    )


def engine_config(prefix, **arguments):
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
    return 10_000_000 + 10_000 * i + position


def vllm_steps(specs, num_blocks, arrivals, prompts, outputs, token=own_token, prefix=False, **arguments):
    """(free, running, waiting, scheduled) of each step of vLLM's scheduler, and preemptions by request."""
    config = engine_config(prefix, **arguments)
    groups = [v.KVCacheGroupSpec([f"g{g}"], vllm_spec(spec)) for g, spec in enumerate(specs)]
    sizes = [spec.block_size for spec in specs]
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.block_size = max(sizes)
    if any(getattr(spec, "mamba_cache_mode", "") == "align" for spec in specs):
        config.cache_config.mamba_cache_mode = "align"
    scheduler = Scheduler(
        config,
        v.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        StructuredOutputManager(config),
        block_size=int(np.lcm.reduce(sizes)),
        hash_block_size=int(np.gcd.reduce(sizes)),
    )
    init_none_hash(sha256)
    hasher = get_request_block_hasher(int(np.gcd.reduce(sizes)), sha256) if prefix else None
    rows, now, waiting, requests = [], 0, list(range(len(arrivals))), {}
    while waiting or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
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
        output = scheduler.schedule()
        running = list(scheduler.running)
        rows.append(
            (
                scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                len(running),
                len(scheduler.waiting),
                output.total_num_scheduled_tokens,
            )
        )
        names = [r.request_id for r in running if r.request_id in output.num_scheduled_tokens]
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[sampled(scheduler.requests[name], token) for name in names],
            ),
        )
        # a step without a token takes no time; where nothing moves, only the next arrival changes that
        now += output.total_num_scheduled_tokens > 0
        if not output.total_num_scheduled_tokens and not output.preempted_req_ids and waiting:
            now = max(now, arrivals[waiting[0]])
    return np.array(rows), np.array([requests[i].num_preemptions for i in range(len(arrivals))])


def sampled(request, token):
    """The token that comes out of a request's step, none where its prefill goes on."""
    done = request.num_computed_tokens >= request.num_tokens
    return [token(int(request.request_id[1:]), request.num_tokens)] if done else []


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
    largest = sum(-(-LONGEST // spec.block_size) if spec.kind != "mamba" else 3 for spec in specs)
    return 1 + largest + draw.choice([0, 1, 3, 10, 60, 1000])


def both(
    specs, num_blocks, arrivals, prompts, outputs, settings, segments=None, prefix=False, token=own_token
):
    """Steps of vLLM's scheduler, and the simulation of the same requests."""
    rows, preemptions = vllm_steps(
        specs,
        num_blocks,
        arrivals,
        prompts,
        outputs,
        token,
        prefix,
        max_model_len=LONGEST,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        scheduling_policy="priority" if settings.scheduling_policy == "shortest" else "fcfs",
    )
    layout = small_layout(
        specs, num_blocks, max_model_len=LONGEST, max_in_flight_tokens=settings.max_num_batched_tokens
    )
    traffic = Traffic("made", np.array(arrivals, float), np.array(prompts), np.array(outputs), segments)
    ours = simulate(
        layout, traffic, OneSecond(), settings, progress=False, prefix_caching=prefix, trace=len(rows) + 5
    )
    assert ours.trace.tolist() == rows.tolist()
    assert ours.requests.tokens[3].tolist() == preemptions.tolist()
    return ours


@pytest.mark.parametrize("seed", range(SCENARIOS))
def test_every_step_is_vllms(seed):
    draw = random.Random(seed)
    kinds = draw.sample(["window", "small window", "chunk", "state", "full"], draw.randint(0, 3))
    if seed % 3 == 0:
        kinds = [kind for kind in kinds if kind in ("window", "chunk")] + ["aligned"] * draw.randint(1, 2)
    block, specs = scenario(draw, kinds)
    arrivals, prompts, outputs, settings = some_requests(draw, 90)
    settings = replace(settings, max_num_batched_tokens=max(settings.max_num_batched_tokens, 2 * block))
    both(specs, crowded(draw, specs), arrivals, prompts, outputs, settings)


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


@pytest.mark.parametrize("seed", range(SCENARIOS))
def test_every_step_is_vllms_with_a_prefix_cache(seed):
    draw = random.Random(1000 + seed)
    kinds = [[], ["window"], ["small window"], ["full"], ["window", "small window"], ["aligned"]][seed % 6]
    if seed % 12 == 11:
        kinds = ["aligned", "aligned"]
    block, specs = scenario(draw, kinds)
    arrivals, prompts, outputs, settings = some_requests(draw, 90)
    settings = replace(settings, max_num_batched_tokens=max(settings.max_num_batched_tokens, 2 * block))
    segments, token = shared_prefixes(draw, prompts)
    if seed % 5 == 0:
        segments, token = None, own_token
    both(specs, crowded(draw, specs), arrivals, prompts, outputs, settings, segments, True, token)
