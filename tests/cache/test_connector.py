"""The connector: which rows, each once, in the right group; what it refuses; what it counts."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from small import (
    NOISE,
    apart,
    chunk,
    cross,
    full,
    latent,
    managers,
    on_tables,
    ring,
    small_layout,
    state,
    window,
)

from decodebench.cache.connector import (
    ConnectorError,
    ConnectorMetadata,
    ConnectorScheduler,
    ConnectorWorker,
    RequestFill,
    startup_groups,
)
from decodebench.cache.readback import FILLED, UNTOUCHED, ZEROED, inspect_pages
from decodebench.cache.run import fill_cache, run_connector, zero_new_blocks
from decodebench.cache.tensors import CacheMismatch, allocate
from decodebench.cache.values import Constant, FillRefused, Normal, encode
from decodebench.errors import DecodebenchError
from decodebench.layout.pool import NULL_BLOCK, KVCacheManager, Request, RequestBlocks, admit
from decodebench.models.specs import CircularBufferSpec, CrossAttentionSpec, MambaSpec


@dataclass
class AnyRequest:
    """What an engine's request looks like to the connector."""

    request_id: str = "r"
    num_tokens: int = 1


def rows(layout, tokens, tables, computed=0):
    """Rows planned for one request, per group."""
    scheduler, request = ConnectorScheduler(layout), AnyRequest("r", tokens)
    external, asynchronous = scheduler.get_num_new_matched_tokens(request, computed)
    assert (external, asynchronous) == (tokens - 1 - computed, False)
    scheduler.update_state_after_alloc(request, tables, external)
    (fill,) = scheduler.build_connector_meta().requests
    assert (fill.request_id, fill.num_external_tokens) == ("r", external)
    return fill.block_ids


def states(cache, group, values):
    return inspect_pages(cache, group, values).states


# -- the two cases of the upstream repair -------------------------------------------------------


def test_each_group_is_filled_at_its_own_block_ids():
    layout = small_layout([full(), full(num_kv_heads=2)], 8)
    cache = apart(layout)
    worker = ConnectorWorker(layout, NOISE)
    worker.register_kv_caches(cache)
    report = worker.start_load_kv(ConnectorMetadata((RequestFill("r", ((1,), (5,)), 16),)))
    assert report.block_ids == [(1,), (5,)]
    assert [(states(cache, g, NOISE)[0] == FILLED).nonzero().flatten().tolist() for g in (0, 1)] == [[1], [5]]
    assert [(states(cache, g, NOISE)[0] != UNTOUCHED).sum().item() for g in (0, 1)] == [1, 1]


def test_each_groups_rows_are_counted_with_its_own_block_size():
    layout = small_layout([full(16), full(32)], 8)
    assert rows(layout, 34, [[1, 2, 3], [4, 5]]) == ((1, 2, 3), (4, 5))


# -- which rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "tokens", "computed", "table", "wanted"),
    [
        (full(16), 2, 0, [7], (7,)),
        (full(16), 17, 0, [7, 8], (7,)),  # block 8 holds only the token being computed
        (full(16), 18, 0, [7, 8], (7, 8)),
        (full(16), 50, 32, [1, 2, 3, 4], (3, 4)),  # rows 1 and 2 are a prefix hit's
        (full(32), 41, 23, [1, 2], (1, 2)),  # the hit ends inside block 1: the request's own copy
        (full(16), 50, 48, [1, 2, 3, 4], (4,)),
        (window(33), 65, 0, [0, 0, 1, 2, 3], (1, 2)),
        (window(33), 65, 48, [0, 0, 1, 2, 3], (2,)),
        (window(1), 65, 0, [0, 0, 0, 0, 3], ()),  # reads nothing but itself
        (chunk(64), 65, 0, [0, 0, 0, 0, 3], ()),
        (chunk(48), 65, 0, [0, 0, 0, 2, 3], (2,)),
        (state(), 65, 0, [2], (2,)),
        (state(num_speculative_blocks=2), 65, 0, [2, 3, 4], (2,)),
        # block 3 begins with the token to compute: the step reads it, a later prefix hit reads block 2
        (state(16, mamba_cache_mode="align"), 65, 0, [0, 0, 0, 2, 3], (2, 3)),
        (state(16, mamba_cache_mode="align"), 65, 48, [0, 0, 0, 2, 3], (2, 3)),
        (state(16, mamba_cache_mode="align"), 64, 0, [0, 0, 0, 2], (2,)),
        (state(16, mamba_cache_mode="align"), 2, 0, [2], (2,)),
        (state(16, mamba_cache_mode="align", num_speculative_blocks=2), 65, 0, [0, 0, 0, 2, 3, 4, 5], (2, 3)),
        # two drafted tokens reach into the next block, and the running state with them
        (state(16, mamba_cache_mode="align", num_speculative_blocks=2), 63, 0, [0, 0, 0, 2, 3, 4, 5], (2, 3)),
        (
            state(4, mamba_cache_mode="align", num_speculative_blocks=7),
            8,
            0,
            [0, 2, 0, 3, *range(4, 11)],
            (2, 3),
        ),
        (state(16), 65, 0, [0, 0, 0, 2, 3], (2,)),
        (state(16, mamba_cache_mode="align"), 66, 32, [0, 0, 0, 0, 3], (3,)),
        (ring(), 65, 32, [5], (5,)),
        (cross(48), 5, 0, [5, 2, 6], (5, 2, 6)),
        (cross(48), 5, 3, [5, 2, 6], (5, 2, 6)),
    ],
)
def test_rows_of_each_kind(spec, tokens, computed, table, wanted):
    assert rows(small_layout([spec], 16), tokens, [table], computed) == (wanted,)


def test_context_parallelism_lengthens_blocks_of_attention():
    layout = small_layout([full(16), state()], 16, decode_context_parallel_size=2)
    assert rows(layout, 34, [[1, 2, 3], [4]]) == ((1, 2), (4,))


@settings(max_examples=60, deadline=None)
@given(managers())
def test_rows_are_what_decode_reads_less_what_a_hit_brought(manager):
    """Against plain loops over tokens."""
    layout = manager.layout
    for blocks in manager.batch().requests:
        scheduler = ConnectorScheduler(layout)
        external, _ = scheduler.get_num_new_matched_tokens(blocks, blocks.num_computed)
        scheduler.update_state_after_alloc(blocks, blocks.block_ids, external)
        planned = scheduler.build_connector_meta().requests
        if not external:
            assert planned == ()
            continue
        for group, table in enumerate(blocks.block_ids):
            spec, per_block = layout.groups[group].kv_cache_spec, layout.tokens_per_block(group)
            if isinstance(spec, CircularBufferSpec | CrossAttentionSpec):
                wanted = set(table)
            elif isinstance(spec, MambaSpec):
                last = blocks.num_tokens - 2
                wanted = {table[last // per_block]}
                if spec.mamba_cache_mode == "align":  # the engine's copy of it, where the step reads it
                    wanted.add(table[(last + 1) // per_block])
            else:
                tokens = range(blocks.num_computed, blocks.num_tokens - 1)
                wanted = {table[token // per_block] for token in tokens}
            assert set(planned[0].block_ids[group]) == wanted - {NULL_BLOCK}


# -- the life of a request ----------------------------------------------------------------------


def test_a_request_is_stood_in_for_once():
    scheduler = ConnectorScheduler(small_layout([full()], 8))
    request = AnyRequest("r", 33)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (32, False)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (32, False)  # not scheduled yet: asked again
    scheduler.update_state_after_alloc(request, [[1, 2, 3]], 32)
    assert len(scheduler.build_connector_meta().requests) == 1
    assert scheduler.build_connector_meta().requests == ()  # handed over once
    request.num_tokens = 40  # decoding went on
    assert scheduler.get_num_new_matched_tokens(request, 39) == (0, False)
    assert scheduler.get_num_new_matched_tokens(request, 35) == (0, False)
    assert scheduler.counters == {"requests_filled": 1, "requests_refilled": 0, "external_tokens": 32}


@pytest.mark.parametrize(("tokens", "computed"), [(1, 0), (33, 32)])
def test_nothing_to_fill_is_nothing_planned(tokens, computed):
    scheduler = ConnectorScheduler(small_layout([full()], 8))
    request = AnyRequest("r", tokens)
    assert scheduler.get_num_new_matched_tokens(request, computed) == (0, False)
    scheduler.update_state_after_alloc(request, [[1, 2, 3]], 0)
    assert scheduler.build_connector_meta().requests == ()


def test_a_finished_request_is_forgotten():
    scheduler = ConnectorScheduler(small_layout([full()], 8))
    for finish in (scheduler.request_finished, scheduler.request_finished_all_groups):
        request = AnyRequest("r", 33)
        scheduler.update_state_after_alloc(request, [[1, 2, 3]], 32)
        finish("r")
        assert scheduler.build_connector_meta().requests == ()
        assert scheduler.get_num_new_matched_tokens(request, 0) == (32, False)
    assert scheduler.counters["requests_refilled"] == 0


@pytest.mark.parametrize("told", [True, False])
def test_a_preempted_request_is_filled_again_and_counted(told):
    scheduler = ConnectorScheduler(small_layout([full()], 8))
    request = AnyRequest("r", 33)
    scheduler.update_state_after_alloc(request, [[1, 2, 3]], 32)
    scheduler.build_connector_meta()
    request.num_tokens = 36
    if told:
        scheduler.request_preempted("r")
    # with a hit of the blocks it left behind
    assert scheduler.get_num_new_matched_tokens(request, 16) == (19, False)
    scheduler.update_state_after_alloc(request, [[1, 5, 6]], 19)
    assert scheduler.build_connector_meta().requests[0].block_ids == ((5, 6),)
    assert scheduler.counters == {"requests_filled": 1, "requests_refilled": 1, "external_tokens": 51}


def test_a_preempted_request_is_filled_again_even_where_a_hit_brings_more_than_it_was_filled_with():
    scheduler = ConnectorScheduler(small_layout([full()], 8))
    request = AnyRequest("r", 33)
    scheduler.update_state_after_alloc(request, [[1, 2, 3]], 32)
    request.num_tokens = 60
    scheduler.request_preempted("r")
    assert scheduler.get_num_new_matched_tokens(request, 48) == (11, False)


def test_both_halves_through_a_pool_with_preemption():
    layout = small_layout([full(), state()], 40)
    manager, cache = KVCacheManager(layout), apart(layout)
    scheduler, worker = ConnectorScheduler(layout), ConnectorWorker(layout, NOISE)
    worker.register_kv_caches(cache)
    manager.allocate(Request("r", 60))
    run_connector(scheduler, worker, manager.batch())
    manager.append("r", 10)
    request = manager.preempt("r")
    scheduler.request_preempted("r")
    manager.allocate(request)
    cache.poison()
    report = run_connector(scheduler, worker, manager.batch())
    assert report.block_ids == [tuple(sorted(b)) for b in manager.batch().requests[0].block_ids]
    assert scheduler.counters["requests_refilled"] == 1


# -- one write a row and step -------------------------------------------------------------------


def test_a_step_writes_each_row_once_however_many_requests_want_it():
    layout = small_layout([full(), state()], 40)
    worker = ConnectorWorker(layout, NOISE)
    worker.register_kv_caches(allocate(layout))
    fills = tuple(RequestFill(f"r{i}", ((9, 3, 4), (20 + i,)), 48) for i in range(8))
    report = worker.start_load_kv(ConnectorMetadata(fills))
    assert report.block_ids == [(3, 4, 9), tuple(range(20, 28))]
    assert report.bytes_written == report.bytes_needed
    assert worker.counters["blocks_asked"] == 8 * 4
    assert worker.counters["blocks_written"] == 3 + 8
    assert worker.counters["bytes_written"] == worker.counters["bytes_needed"] == report.bytes_written
    assert worker.counters["seconds_in_step"] == 0
    assert worker.start_load_kv(ConnectorMetadata()).blocks == [0, 0]
    assert worker.counters["fills"] == 1


def test_states_and_rings_of_a_whole_step():
    layout = small_layout([[full(), full()], [state()], [ring()]], 8)
    cache = apart(layout)
    batch = on_tables(layout, (33, 0, [[1, 2, 3], [4], [5]]), (18, 0, [[6, 7], [1], [2]]))
    fill_cache(cache, batch, Constant())
    assert (
        states(cache, 0, Constant()).tolist()
        == [[UNTOUCHED, FILLED, FILLED, UNTOUCHED, UNTOUCHED, UNTOUCHED, FILLED, FILLED]] * 2
    )
    assert (states(cache, 1, Constant())[0] == FILLED).nonzero().flatten().tolist() == [1, 4]
    assert (states(cache, 2, Constant())[0] == ZEROED).nonzero().flatten().tolist() == [2, 5]
    conv, ssm = cache.flat("g1.0", 0), cache.flat("g1.0", 1)
    assert conv.dtype == torch.bfloat16 and (conv[4].view(torch.int16) == encode(0.015, "bfloat16")).all()
    assert ssm.dtype == torch.float32 and (ssm[4].view(torch.int32) == encode(0.015, "float32")).all()


def test_an_engines_tensors_work_like_a_cache_of_ours():
    layout = small_layout([full(), state()], 8)
    ours = allocate(layout)
    fill_cache(ours, on_tables(layout, (33, 0, [[1, 2, 3], [4]])), NOISE)
    worker = ConnectorWorker(layout, NOISE)
    pages = {
        name: torch.full((8, s.page_size_bytes), 255, dtype=torch.uint8)
        for name, s in layout.layer_specs.items()
    }
    worker.register_kv_caches({name: page.view(torch.int8) for name, page in pages.items()})
    run_connector(ConnectorScheduler(layout), worker, on_tables(layout, (33, 0, [[1, 2, 3], [4]])))
    assert torch.equal(pages["g0.0"][1:3], ours.pages("g0.0")[1:3])
    assert torch.equal(pages["g1.0"][4], ours.pages("g1.0")[4])
    assert (pages["g1.0"][[0, 1, 2, 3, 5, 6, 7]] == 255).all()


# -- startup ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "groups"),
    [
        ([full()], {0}),
        ([full(), window()], {0, 1}),
        ([full(), state()], set()),  # the engine zeroes new attention blocks, steps replace states
        ([state()], set()),
        ([full(), ring()], set()),  # rings are zeroed per request, and their blocks change hands
        ([latent(), state(), ring()], set()),
        ([full(), full(packed="fp8", state_content_bytes=24)], set()),
        ([full(), full(dtype="float8_e4m3fn", head_size=16)], set()),  # blocks change between precisions
    ],
)
def test_what_a_startup_fill_covers(specs, groups):
    layout = small_layout(specs, 8)
    assert startup_groups(layout) == groups
    scheduler, worker = (
        ConnectorScheduler(layout, startup_fill=True),
        ConnectorWorker(layout, startup_fill=True),
    )
    assert scheduler.startup_filled == worker.startup_filled == groups
    # noise differs from layer to layer: a block that changes hands brings another's
    assert startup_groups(layout, NOISE) == (groups if len(specs) == 1 else set())


def test_a_startup_fill_writes_once_and_leaves_the_rest_to_requests():
    attention = small_layout([full(), window()], 8)
    cache = apart(attention)
    report = fill_cache(cache, on_tables(attention, (33, 0, [[1, 2, 3], [4, 5, 6]])), startup_fill=True)
    assert report.block_ids == [(), ()]
    for group in (0, 1):
        assert states(cache, group, Constant())[0].tolist() == [UNTOUCHED] + [FILLED] * 7
    layout = small_layout([full(), state()], 8)
    cache = apart(layout)
    batch = on_tables(layout, (33, 0, [[1, 2, 3], [4]]))
    report = fill_cache(cache, batch, startup_fill=True)
    assert report.block_ids == [(1, 2), (4,)]
    assert states(cache, 0, Constant())[0].tolist() == [UNTOUCHED, FILLED, FILLED] + [UNTOUCHED] * 5
    assert states(cache, 1, Constant())[0].tolist() == [UNTOUCHED] * 4 + [FILLED] + [UNTOUCHED] * 3


def test_the_engine_zeroes_what_the_pool_handed_out():
    layout = small_layout([full(), state(), ring()], 40)
    manager, cache = KVCacheManager(layout), apart(layout)
    admit(layout, context=[40, 60], shared_prefix=32, manager=manager)
    zero_new_blocks(cache, manager.batch())
    for group, zeroed in enumerate(manager.take_zeroed()):
        found = (states(cache, group, NOISE)[0] == ZEROED).nonzero().flatten().tolist()
        assert found == sorted(zeroed)


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "tokens", "tables", "words"),
    [
        ([full(), full()], 17, [[1, 2], [9, 2]], ["'r'", "group 1", "g1.0", "block id 9", "1 to 7"]),
        ([full()], 17, [[-1, 2]], ["group 0", "block id -1"]),
        ([full(), full()], 34, [[1, 2, 3], [4, 5]], ["group 1", "tokens up to 33", "block 2", "2 entries"]),
        ([state()], 17, [[]], ["group 0 (mamba", "0 entries"]),
        ([full()], 34, [[1, 0, 3]], ["group 0", "position 1", "null block", "0 to 2"]),
        ([window(33)], 65, [[0, 0, 0, 2, 3]], ["sliding_window", "position 2", "null block", "2 to 3"]),
        ([state()], 17, [[0]], ["mamba", "position 0", "null block"]),
        ([ring()], 17, [[0]], ["circular_buffer", "position 0", "null block"]),
        ([cross(32)], 17, [[4, 0]], ["cross_attention", "position 1", "null block"]),
        ([full(), full()], 17, [[1, 2]], ["'r'", "1 block tables for 2 groups"]),
    ],
)
def test_a_bad_table_is_an_error_with_names(specs, tokens, tables, words):
    scheduler = ConnectorScheduler(small_layout(specs, 8))
    request = AnyRequest("r", tokens)
    with pytest.raises(ConnectorError) as error:
        scheduler.update_state_after_alloc(request, tables, tokens - 1)
    for word in words:
        assert word in str(error.value)
    assert scheduler.build_connector_meta().requests == ()
    assert scheduler.get_num_new_matched_tokens(request, 0)[0] == tokens - 1  # it does not count as filled


@pytest.mark.parametrize("external", [-1, 17])
def test_external_tokens_fit_the_request(external):
    with pytest.raises(ConnectorError, match="external tokens"):
        ConnectorScheduler(small_layout([full()], 8)).update_state_after_alloc(
            AnyRequest("r", 17), [[1, 2]], external
        )


def test_the_worker_refuses_what_it_cannot_place():
    layout = small_layout([full(), full()], 8)
    worker = ConnectorWorker(layout, NOISE)
    with pytest.raises(ConnectorError, match="register_kv_caches"):
        worker.start_load_kv(ConnectorMetadata((RequestFill("r", ((1,), (2,)), 16),)))
    tensors = {"g0.0": torch.zeros(8, layout.layer_specs["g0.0"].page_size_bytes, dtype=torch.uint8)}
    with pytest.raises(CacheMismatch, match="g1.0.*group 1"):
        worker.register_kv_caches(tensors)
    with pytest.raises(CacheMismatch, match="other"):
        worker.register_kv_caches(
            {"g0.0": tensors["g0.0"], "g1.0": tensors["g0.0"], "other": tensors["g0.0"]}
        )
    with pytest.raises(ConnectorError, match="one layout"):
        worker.register_kv_caches(allocate(small_layout([full(), full()], 9)))
    cache = allocate(layout)
    worker.register_kv_caches(cache)
    with pytest.raises(ConnectorError, match="'r'.*1 groups.*2"):
        worker.start_load_kv(ConnectorMetadata((RequestFill("r", ((1,),), 16),)))
    with pytest.raises(FillRefused, match="group 1.*g1.0.*block id 8.*1 to 7"):
        worker.start_load_kv(ConnectorMetadata((RequestFill("r", ((1,), (8,)), 16),)))
    with pytest.raises(FillRefused, match="null block"):
        worker.start_load_kv(ConnectorMetadata((RequestFill("r", ((0,), (1,)), 16),)))
    assert all((states(cache, group, NOISE) == UNTOUCHED).all() for group in (0, 1))  # before the first byte


def test_a_group_without_layers_is_refused():
    layout = small_layout([full()], 8)
    empty = replace(layout, groups=(replace(layout.groups[0], layer_names=(), layer_specs=()),))
    with pytest.raises(ConnectorError, match="group 0.*no layer"):
        ConnectorWorker(empty)
    with pytest.raises(DecodebenchError, match="group 0"):
        ConnectorScheduler(empty).update_state_after_alloc(AnyRequest("r", 17), [[9, 2]], 16)


def test_anything_with_an_id_and_tokens_is_a_request():
    layout = small_layout([full()], 8)
    for request in (
        SimpleNamespace(request_id="r", num_tokens=17),
        RequestBlocks(Request("r", 17), 0, ((1, 2),)),
    ):
        scheduler = ConnectorScheduler(layout)
        scheduler.update_state_after_alloc(request, [[1, 2]], 16)
        assert scheduler.build_connector_meta().requests[0].block_ids == ((1,),)


def test_default_values_tell_layers_apart():
    layout = small_layout([[full(), full()]], 8)
    cache = allocate(layout)
    fill_cache(cache, on_tables(layout, (17, 0, [[1, 2]])))
    assert (states(cache, 0, Normal())[:, 1] == FILLED).all()
    assert not torch.equal(cache.flat("g0.0")[1], cache.flat("g0.1")[1])
