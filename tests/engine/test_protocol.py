"""The connector through vLLM's real scheduler: what is filled, when, and what is left alone.

Restates in our own words what vLLM's public tests ask of its connector, and what they do not.
"""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
NO_VLLM = "vLLM is not installed here: run `make test-vllm`, which sets it up"
stage = pytest.importorskip("stage", reason=NO_VLLM, exc_type=ImportError)

from decodebench.errors import DecodebenchError  # noqa: E402

full, window, mamba, Stage = stage.full, stage.window, stage.mamba, stage.Stage


def one_group(**arguments):
    return Stage([(["a", "b"], full())], **arguments)


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(48, 3), (40, 3), (33, 2), (34, 3), (17, 1), (320, 20), (2, 1)]
)
def test_all_of_the_prompt_but_its_last_token_is_filled(tokens, blocks):
    s = one_group()
    request = s.add(tokens)
    step = s.step()
    (fill,) = step.fills.values()
    assert fill.num_external_tokens == tokens - 1
    assert step.output.num_scheduled_tokens == {request.request_id: 1}
    table = step.tables[request.request_id][0][:blocks]
    assert fill.block_ids == (tuple(table),)
    for layer in ("a", "b"):
        assert s.rows(layer) == s.touched(layer) == sorted(table)


def test_a_prompt_of_one_token_needs_no_fill():
    s = one_group()
    s.add(1)
    assert not s.step().fills
    assert s.touched("a") == []


def test_a_request_is_filled_once():
    s = one_group()
    s.add(32)
    assert len(s.step().fills) == 1
    assert not s.step().fills


def test_requests_one_after_another_and_together():
    s = one_group()
    first = s.add(32, max_tokens=1)
    assert set(s.step().fills) == {first.request_id}
    assert not s.scheduler.running
    others = [s.add(48), s.add(16), s.add(100)]
    step = s.step()
    assert {name: fill.num_external_tokens for name, fill in step.fills.items()} == {
        request.request_id: request.num_prompt_tokens - 1 for request in others
    }
    assert not s.step().fills


def test_a_prefix_hit_is_left_alone_and_the_rest_filled():
    s = one_group()
    first = s.add(48, max_tokens=1)
    shared = s.step().tables[first.request_id][0][:3]
    for cache in s.caches.values():
        cache[shared] = 7.0  # as if a real prefill had computed them
    again = s.add(list(first.prompt_token_ids) + list(range(9000, 9032)))
    step = s.step()
    table = step.tables[again.request_id][0]
    assert table[:3] == shared
    assert step.fills[again.request_id].num_external_tokens == 31
    assert step.fills[again.request_id].block_ids == (tuple(table[3:5]),)
    assert all(bool((s.caches[layer][shared] == 7.0).all()) for layer in "ab")


def test_every_group_at_its_own_blocks_and_block_size():
    s = Stage([(["full"], full(16)), (["state"], mamba(32)), (["near"], window(32, 16))])
    request = s.add(129)
    step = s.step()
    fill, tables = step.fills[request.request_id], step.tables[request.request_id]
    assert fill.block_ids[0] == tuple(tables[0][:8])
    # block 4 begins with the token being computed: the step reads the copy of the state there
    assert fill.block_ids[1] == tuple(tables[1][3:5]) and set(tables[1][:3]) == {0}
    # positions 97 to 127 are read: blocks 6 and 7, and block 8 holds the token being computed
    assert fill.block_ids[2] == tuple(tables[2][6:8]) and set(tables[2][:6]) == {0}
    assert s.touched("full") == sorted(fill.block_ids[0])
    assert s.touched("near") == sorted(fill.block_ids[2])
    assert s.touched("state") == sorted(fill.block_ids[1])


def test_states_hold_values_in_their_own_types_and_padding_is_untouched():
    spec = mamba(16, page_size_padded=4096)
    s = Stage([(["full"], full(16)), (["state"], spec)])
    request = s.add(33)
    rows = s.step().fills[request.request_id].block_ids[1]
    assert len(rows) == 2  # the running state, and the one that later prefix hits read
    for row in rows:
        page = torch.as_strided(s.caches["state"], (64, 4096), (4096, 1))[row].clone().view(torch.uint8)
        assert bool((page[:144].view(torch.bfloat16) == torch.tensor(0.015).bfloat16()).all())
        assert bool((page[144:272].view(torch.float32) == 0.015).all())
        assert not page[272:].any()


def test_kernel_blocks_are_not_taken_for_manager_blocks():
    s = Stage([(["a"], full(128))], kernel_block_sizes=[32], block_size=128)
    assert s.caches["a"].shape[0] == 4 * 64
    request = s.add(1000)
    step = s.step()
    table = step.tables[request.request_id][0]
    assert s.rows("a") == sorted(4 * block + part for block in table for part in range(4))


@pytest.mark.parametrize(
    ("cache_dtype", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)]
)
@pytest.mark.parametrize("std", [0.0, 0.1])
def test_fp8_behind_uint8_is_encoded(cache_dtype, dtype, std):
    spec = full(dtype=torch.uint8, kv_quant_mode=stage.v.KVQuantMode.FP8_PER_TENSOR)
    s = Stage([(["a"], spec)], options={"std": std}, kv_cache_dtype=cache_dtype)
    s.add(33)
    rows = list(next(iter(s.step().fills.values())).block_ids[0])
    values = s.caches["a"].view(dtype)[rows].float()
    assert s.touched("a") == sorted(rows)
    if std:
        assert bool(values.isfinite().all()) and 0.05 < values.std() < 0.2
    else:
        assert bool((values == torch.tensor(0.015).to(dtype).float()).all())


def test_packed_bytes_are_zeroed():
    spec = full(dtype=torch.uint8, kv_quant_mode=stage.v.KVQuantMode.NVFP4)
    s = Stage([(["a"], spec)])
    s.caches["a"].fill_(7)
    s.add(33)
    rows = next(iter(s.step().fills.values())).block_ids[0]
    left = [block for block in range(64) if bool((s.caches["a"][block] == 7).all())]
    assert s.rows("a", 0) == sorted(rows) and sorted([*rows, *left]) == list(range(64))


def test_a_preempted_request_is_filled_again_and_counted():
    s = one_group(num_blocks=10, prefix=False)
    first, second = s.add(64), s.add(64)
    assert set(s.step().fills) == {first.request_id, second.request_id}
    # 4 blocks each and a fifth for the 65th token; the third block more than the pool's 9 preempts
    while not second.num_preemptions:
        assert s.step().output.num_scheduled_tokens
    s.scheduler.finish_requests(first.request_id, stage_finished())
    step = s.step()
    fill = step.fills[second.request_id]
    assert fill.num_external_tokens == second.num_tokens - 2  # the step has added one token since
    assert step.output.num_scheduled_tokens[second.request_id] == 1  # no real prefill
    assert s.connector.scheduler.counters["requests_refilled"] == 1


def test_startup_fill_leaves_nothing_to_each_request():
    s = one_group(options={"startup_fill": True})
    for layer in "ab":
        assert s.rows(layer) == list(range(1, 64))  # all but the null block
        s.caches[layer].fill_(7.0)
    request = s.add(32)
    step = s.step()
    assert step.output.num_scheduled_tokens == {request.request_id: 1}
    assert not any(any(fill.block_ids) for fill in step.fills.values())
    assert all(bool((s.caches[layer] == 7.0).all()) for layer in "ab")


def test_startup_fill_still_fills_what_the_engine_zeroes():
    s = Stage([(["full"], full(16)), (["state"], mamba(16))], options={"startup_fill": True})
    assert s.config.needs_kv_cache_zeroing
    assert s.rows("full") == s.touched("state") == []  # and steps replace states
    request = s.add(33)
    fill = s.step().fills[request.request_id]
    assert len(fill.block_ids[0]) == 2 and s.rows("full") == sorted(fill.block_ids[0])
    assert len(fill.block_ids[1]) == 2 and s.touched("state") == sorted(fill.block_ids[1])


def test_every_row_of_a_step_is_written_once():
    s = one_group(options={"audit": "plan"})
    prompt = list(range(100, 164))
    for number in range(4):
        s.add([*prompt, 1000 + number])
    s.step()
    stats = s.worker.get_kv_connector_stats()
    page = s.config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    # all four share the prompt's four blocks, which the first one fills; the last token's block is empty
    assert stats.data["bytes"] == stats.data["blocks"] * 2 * page
    assert stats.data["blocks"] == len(s.rows("a")) == 4


def test_block_ids_out_of_range_are_an_error_that_says_where():
    s = one_group(num_blocks=8)
    request = SimpleNamespace(request_id="r", num_tokens=34, num_preemptions=0)
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 9, 3],))
    with pytest.raises(DecodebenchError, match=r"9.*"):
        s.connector.update_state_after_alloc(request, blocks, 33)
        s.worker.bind_connector_metadata(s.connector.build_connector_meta(empty_step()))
        s.worker.start_load_kv(None)
    assert s.touched("a") == []


def test_a_table_too_short_and_a_missing_layer_are_errors():
    s = one_group(register=False)
    request = SimpleNamespace(request_id="r", num_tokens=34, num_preemptions=0)
    with pytest.raises(DecodebenchError, match="r"):
        s.connector.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1],)), 33)
    with pytest.raises(DecodebenchError, match="'b'"):
        s.worker.register_kv_caches({"a": s.caches["a"]})


def test_a_pipeline_stage_without_layers_of_a_group_fills_the_others():
    s = Stage([(["full"], full(16)), (["state"], mamba(16))], register=False)
    # the second stage of a pipeline: all groups, but only its own layers
    s.config.kv_cache_groups[0].layer_names.clear()
    s.config.kv_cache_tensors = [t for t in s.config.kv_cache_tensors if t.layers == ["state"]]
    worker = type(s.worker)(s.vllm_config, s.worker.role, s.config)
    worker.register_kv_caches({"state": s.caches["state"]})
    request = s.add(33)
    output = s.scheduler.schedule()
    worker.bind_connector_metadata(output.kv_connector_metadata)
    worker.start_load_kv(None)
    (fill,) = output.kv_connector_metadata.fill.requests
    assert fill.request_id == request.request_id and len(fill.block_ids) == 2
    assert s.touched("state") == sorted(fill.block_ids[1]) and s.touched("full") == []


def test_dcp_multiplies_what_a_full_attention_block_covers():
    from decodebench.cache.connector import ConnectorScheduler
    from decodebench.vllm.translate import layout_of

    config = stage.config_of([(["full"], full(16)), (["state"], mamba(16))], 16)
    parallel = SimpleNamespace(decode_context_parallel_size=2)
    settings = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=parallel,
        max_in_flight_tokens=0,
        scheduler_config=SimpleNamespace(max_num_encoder_input_tokens=0),
        model_config=SimpleNamespace(max_model_len=4096),
    )
    scheduler = ConnectorScheduler(layout_of(config, settings))
    request = SimpleNamespace(request_id="r", num_tokens=34)
    scheduler.update_state_after_alloc(request, ([1, 2, 3], [0, 0, 4]), 33)
    (fill,) = scheduler.build_connector_meta().requests
    assert fill.block_ids == ((1, 2), (4,))


def empty_step():
    from vllm.v1.core.sched.output import SchedulerOutput

    return SchedulerOutput.make_empty()


def stage_finished():
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
