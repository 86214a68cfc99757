"""Block tables and rows of random layouts: request for request those of vLLM's own pool and connector."""

import math
import random
from dataclasses import replace

import pytest

pytest.importorskip("vllm.v1.core.kv_cache_manager")

import torch
from small import chunk, full, small_layout, state, window
from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as theirs
from vllm.sampling_params import SamplingParams
from vllm.v1 import kv_cache_interface as v
from vllm.v1.core.kv_cache_manager import KVCacheManager as VllmManager
from vllm.v1.request import Request as VllmRequest

from decodebench.cache.connector import ConnectorScheduler
from decodebench.layout.pool import KVCacheManager, Request

LONGEST = 512


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
    )


def some_specs(draw):
    block = draw.choice([4, 16, 32])
    states = state(LONGEST), state(block * draw.choice([1, 2]), mamba_cache_mode="align")
    others = [
        full(2 * block),
        window(draw.randint(2, 90), block),
        chunk(block * draw.choice([1, 2, 3]), block),
        replace(draw.choice(states), num_speculative_blocks=draw.choice([0, 0, 1])),
    ]
    return [full(block), *draw.sample(others, draw.randint(0, 3))]


def vllm_manager(groups, specs):
    sizes = [spec.block_size for spec in specs]
    config = v.KVCacheConfig(num_blocks=3000, kv_cache_tensors=[], kv_cache_groups=groups)
    return VllmManager(
        config,
        max_model_len=LONGEST,
        scheduler_block_size=math.lcm(*sizes),
        hash_block_size=math.gcd(*sizes),
        enable_caching=False,
    )


def upstream_rows(groups, request, blocks, external):
    """What the built-in connector's scheduler half plans."""
    scheduler = theirs.DecodeBenchConnectorScheduler.__new__(theirs.DecodeBenchConnectorScheduler)
    scheduler.startup_fill, scheduler._startup_fill_group_ids = False, set()
    scheduler.kv_cache_groups = groups
    scheduler.group_block_sizes = tuple(group.kv_cache_spec.block_size for group in groups)
    scheduler._filled_requests, scheduler._pending_fills = set(), {}
    scheduler.update_state_after_alloc(request, blocks, external)
    return tuple(map(tuple, scheduler._pending_fills[request.request_id][0]))


def held(tables):
    """Where a table holds a block, and where the null block; which ids they are is the pool's business."""
    return [[bool(block) for block in table] for table in tables]


@pytest.mark.parametrize("seed", range(30))
def test_tables_rows_and_growth_are_vllms(seed):
    draw = random.Random(seed)
    specs = some_specs(draw)
    layout = small_layout(specs, 3000, max_model_len=LONGEST)
    groups = [v.KVCacheGroupSpec([f"g{g}"], vllm_spec(spec)) for g, spec in enumerate(specs)]
    pool, ours = vllm_manager(groups, specs), KVCacheManager(layout)
    for i in range(draw.randint(1, 3)):
        name, tokens = f"r{i}", draw.randint(2, 300)
        request = VllmRequest(name, [1] * tokens, SamplingParams(max_tokens=200), pooling_params=None)
        assert pool.allocate_slots(request, 1, num_external_computed_tokens=tokens - 1) is not None
        table = pool.get_block_ids(name)
        blocks = ours.allocate(Request(name, tokens))
        assert held(blocks.block_ids) == held(table)
        scheduler = ConnectorScheduler(layout)
        scheduler.update_state_after_alloc(blocks, table, tokens - 1)
        rows = scheduler.build_connector_meta().requests[0].block_ids
        theirs_rows = upstream_rows(groups, request, pool.get_blocks(name), tokens - 1)
        for spec, own, upstream, ids in zip(specs, rows, theirs_rows, table):
            if getattr(spec, "mamba_cache_mode", None) == "align":
                # theirs stops at the state before the copy (A18)
                upstream = (*upstream, *{ids[(tokens - 1) // spec.block_size]} - {*upstream})
            assert own == upstream
        for _ in range(draw.randint(0, 40)):
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids(1)
            assert pool.allocate_slots(request, 1) is not None
            assert held(ours.append(name).block_ids) == held(pool.get_block_ids(name))
