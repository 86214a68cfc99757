"""Blocks: tables as each kind keeps them, shared prefixes, growth, refusals, and nothing owned twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import chunk, cross, full, managers, ring, small_layout, state, window

from decodebench import plan
from decodebench.errors import DecodebenchError
from decodebench.layout.plan import from_groups
from decodebench.layout.pool import NULL_BLOCK, BlockError, KVCacheManager, PoolExhausted, Request, admit
from decodebench.models.specs import CircularBufferSpec, CrossAttentionSpec, MambaSpec


def positions(table):
    """Where a table holds real blocks."""
    return [p for p, block in enumerate(table) if block != NULL_BLOCK]


def table_of(spec, tokens, **facts):
    """The table of one request in a layout of one layer."""
    layout = small_layout([spec], 400, **facts)
    return KVCacheManager(layout).allocate(Request("r", tokens)).block_ids[0]


# -- one table a kind ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "tokens", "length", "held"),
    [
        (full(16), 1, 1, [0]),
        (full(16), 16, 1, [0]),
        (full(16), 17, 2, [0, 1]),  # the token being computed has a slot
        (full(16), 65, 5, [0, 1, 2, 3, 4]),
        # the step computes token 64; a window of 18 reads tokens 47 to 64, block 2 holds token 47
        (window(18), 65, 5, [2, 3, 4]),
        (window(17), 65, 5, [3, 4]),  # tokens 48 to 64
        (window(1), 65, 5, [4]),  # only itself
        (window(100), 65, 5, [0, 1, 2, 3, 4]),
        # token 64 opens a new chunk of 64, token 63 closes one
        (chunk(64), 65, 5, [4]),
        (chunk(64), 64, 4, [0, 1, 2, 3]),
        (chunk(48), 65, 5, [3, 4]),
        (ring(), 1000, 1, [0]),
        (cross(48), 1, 3, [0, 1, 2]),
        (cross(40), 1000, 3, [0, 1, 2]),
        (state(), 65, 1, [0]),
        (state(num_speculative_blocks=2), 65, 3, [0, 1, 2]),
        # states at block boundaries: the one after token 63 (block 3), the next one goes to block 4
        (state(16, mamba_cache_mode="align"), 65, 5, [3, 4]),
        (state(16, mamba_cache_mode="align"), 64, 4, [3]),
        (state(16, mamba_cache_mode="align"), 66, 5, [4]),
        (state(16, mamba_cache_mode="align"), 1, 1, [0]),
        (state(16, mamba_cache_mode="align", num_speculative_blocks=1), 65, 6, [3, 4, 5]),
    ],
)
def test_a_table_follows_its_kind(spec, tokens, length, held):
    table = table_of(spec, tokens)
    assert len(table) == length
    assert positions(table) == held


def test_context_parallelism_makes_blocks_of_attention_longer_and_leaves_states():
    layout = small_layout([full(16), state(64)], 40, decode_context_parallel_size=2)
    attention, states = KVCacheManager(layout).allocate(Request("r", 65)).block_ids
    assert len(attention) == 3  # 32 tokens a block
    assert len(states) == 2  # 64 tokens a block


def test_encoder_tokens_decide_cross_attention():
    layout = small_layout([cross(48)], 40)
    manager = KVCacheManager(layout)
    assert len(manager.allocate(Request("a", 5, encoder_tokens=17)).block_ids[0]) == 2
    assert manager.allocate(Request("b", 5, encoder_tokens=0)).block_ids[0] == ()
    with pytest.raises(BlockError, match="group 0.*49 encoder tokens.*at most 48"):
        manager.allocate(Request("c", 5, encoder_tokens=49))


def test_pools_count_apart():
    groups = small_layout([full(16), window(16)], 4).groups
    layout = from_groups(
        (
            groups[0],
            type(groups[1])(groups[1].layer_names, groups[1].layer_specs, groups[1].kv_cache_spec, pool=1),
        ),
        (9, 5),
    )
    manager = KVCacheManager(layout)
    blocks = manager.allocate(Request("r", 65))
    assert (manager.num_free(0), manager.num_free(1)) == (8 - 5, 4 - 2)
    assert set(blocks.block_ids[0]) & set(blocks.block_ids[1]) - {NULL_BLOCK}  # ids of two pools may be equal


# -- shared prefixes ----------------------------------------------------------------------------


def test_a_prefix_is_computed_once_and_shared_by_block():
    layout = small_layout([full(16), full(32)], 40)
    first, second = admit(layout, context=[70, 100], shared_prefix=64).requests
    assert (first.num_computed, second.num_computed) == (0, 64)
    assert second.block_ids[0][:4] == first.block_ids[0][:4]
    assert second.block_ids[1][:2] == first.block_ids[1][:2]
    assert not set(second.block_ids[0][4:]) & set(first.block_ids[0])


def test_a_hit_that_ends_inside_a_block_leaves_that_block_to_the_request():
    layout = small_layout([full(16), full(32)], 40)
    first, second = admit(layout, context=[70, 100], shared_prefix=50).requests
    assert second.num_computed == 50
    assert second.block_ids[0][:3] == first.block_ids[0][:3]
    assert second.block_ids[0][3] != first.block_ids[0][3]
    assert second.block_ids[1][0] == first.block_ids[1][0]
    assert second.block_ids[1][1] != first.block_ids[1][1]


def test_a_hit_goes_as_far_as_every_group_still_holds_the_blocks():
    # the first request's window has left the prefix behind; the second would read it
    layout = small_layout([full(16), window(16)], 60)
    first, second = admit(layout, context=[150, 50], shared_prefix=48).requests
    assert positions(first.block_ids[1]) == [8, 9]
    assert second.num_computed == 32  # its window needs block 2, which nobody holds
    assert second.block_ids[0][:2] == first.block_ids[0][:2]


def test_states_rings_and_encoders_are_each_requests_own():
    layout = small_layout([full(16), state(), ring(), cross(32)], 60)
    first, second = admit(layout, context=[70, 70], shared_prefix=64).requests
    for group in (1, 2, 3):
        assert not set(first.block_ids[group]) & set(second.block_ids[group])


@pytest.mark.parametrize("own", [state(), ring(), cross(32)])
def test_a_hit_of_everything_leaves_a_token_where_the_request_has_rows_of_its_own(own):
    # otherwise nobody would be asked to fill its state: the connector has nothing to stand in for
    layout = small_layout([full(16), own], 60)
    second = admit(layout, context=[65, 65], shared_prefix=64).requests[1]
    assert (second.num_computed, second.num_external_tokens) == (63, 1)
    alone = admit(small_layout([full(16)], 60), context=[65, 65], shared_prefix=64).requests[1]
    assert (alone.num_computed, alone.num_external_tokens) == (64, 0)


def test_a_state_at_the_boundary_where_a_hit_ends_is_shared():
    layout = small_layout([full(16), state(16, mamba_cache_mode="align")], 60)
    first, second = admit(layout, context=[65, 65], shared_prefix=64).requests
    assert second.num_computed == 64
    assert second.block_ids[1][3] == first.block_ids[1][3] != NULL_BLOCK  # the state after token 63
    assert second.block_ids[1][4] != first.block_ids[1][4]  # where each leaves its next one


def test_shared_blocks_stay_until_the_last_holder_leaves():
    layout = small_layout([full(16)], 40)
    manager = KVCacheManager(layout)
    batch = admit(layout, context=[65, 65, 65], shared_prefix=64, manager=manager)
    shared = batch.requests[0].block_ids[0][0]
    assert manager.owner(0, shared) == ("request-0", "request-1", "request-2")
    manager.free("request-0")
    assert manager.owner(0, shared) == ("request-1", "request-2")
    again = manager.allocate(Request("later", 65, "shared", 64))
    assert again.block_ids[0][0] == shared
    for name in ("request-1", "request-2", "later"):
        manager.free(name)
    assert manager.num_free() == 39
    assert manager.allocate(Request("much later", 65, "shared", 64)).num_computed == 0


def test_a_prefix_is_no_longer_than_what_was_computed_of_it():
    layout = small_layout([window(8)], 60)
    manager = KVCacheManager(layout)
    manager.allocate(Request("short", 20, "p", 16))
    assert manager.allocate(Request("long", 66, "p", 64)).num_computed <= 16


# -- growth -------------------------------------------------------------------------------------


def test_growing_adds_blocks_and_moves_windows():
    layout = small_layout([full(16), window(17), state(16, mamba_cache_mode="align")], 60)
    manager = KVCacheManager(layout)
    before = manager.allocate(Request("r", 64))
    assert [positions(t) for t in before.block_ids] == [[0, 1, 2, 3], [2, 3], [3]]
    after = manager.append("r")
    assert [positions(t) for t in after.block_ids] == [[0, 1, 2, 3, 4], [3, 4], [3, 4]]
    assert after.block_ids[0][:4] == before.block_ids[0]
    assert after.block_ids[1][3] == before.block_ids[1][3]
    assert manager.owner(1, before.block_ids[1][2]) == ()
    later = manager.append("r")
    assert positions(later.block_ids[2]) == [4]  # the state before was copied on and is free
    assert manager.batch().requests == (later,)


def test_preempted_requests_leave_everything_and_may_come_back():
    layout = small_layout([full(16), state()], 20)
    manager = KVCacheManager(layout)
    manager.allocate(Request("r", 100))
    manager.append("r", 5)
    request = manager.preempt("r")
    assert request.num_tokens == 105
    assert manager.num_free() == 19
    assert manager.allocate(request).num_external_tokens == 104


def test_new_blocks_of_attention_are_zeroed_where_states_lie_beside_them():
    layout = small_layout([full(16), state(), ring()], 40)
    assert layout.needs_kv_cache_zeroing
    manager = KVCacheManager(layout)
    first = manager.allocate(Request("a", 33, "p", 32))
    assert manager.take_zeroed() == (first.block_ids[0], (), ())
    second = manager.allocate(Request("b", 40, "p", 32))
    assert manager.take_zeroed() == (second.block_ids[0][2:], (), ())  # a hit's blocks are not new
    manager.append("a", 15)
    assert manager.take_zeroed() == ((), (), ())
    assert KVCacheManager(small_layout([full(16)], 4)).take_zeroed() == ((),)


# -- invariants ---------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(managers(), st.data())
def test_nothing_is_owned_twice_and_nothing_is_lost(manager, data):
    layout = manager.layout
    for request in [blocks.request_id for blocks in manager.batch().requests]:
        action = data.draw(st.sampled_from(["stay", "grow", "free", "return"]))
        if action == "grow":
            manager.append(request, data.draw(st.integers(1, 40)))
        elif action == "free":
            manager.free(request)
        elif action == "return":
            manager.allocate(manager.preempt(request))
    holders = {}
    for blocks in manager.batch().requests:
        for group, table in enumerate(blocks.block_ids):
            held = [b for b in table if b != NULL_BLOCK]
            assert len(held) == len(set(held))
            for block in held:
                holders.setdefault(block, set()).add(group)
                assert blocks.request_id in manager.owner(group, block)
    assert all(len(groups) == 1 for groups in holders.values())  # one group at a time
    assert manager.num_free() == layout.num_blocks - 1 - len(holders)
    for blocks in manager.batch().requests:
        for group, spec in enumerate(layout.groups):
            spec, per_block, table = (
                spec.kv_cache_spec,
                layout.tokens_per_block(group),
                blocks.block_ids[group],
            )
            read = list(spec.required_blocks(blocks.num_tokens, per_block, len(table)))
            assert set(read) <= set(positions(table))  # whatever a step reads is there
            if not isinstance(spec, MambaSpec | CircularBufferSpec | CrossAttentionSpec):
                assert (
                    table[(blocks.num_tokens - 1) // per_block] != NULL_BLOCK
                )  # and so is the slot it writes
    for blocks in manager.batch().requests:
        manager.free(blocks.request_id)
    assert manager.num_free() == layout.num_blocks - 1


# -- real layouts, and refusals -----------------------------------------------------------------


def test_jamba_takes_a_state_a_group_and_attention_for_all_tokens():
    layout = plan("jamba-v0.1", memory="8GiB")
    batch = admit(layout, requests=3, context=1000)
    for blocks in batch.requests:
        for group, spec in enumerate(layout.groups):
            held = positions(blocks.block_ids[group])
            assert held == (list(range(13)) if spec.kind == "full_attention" else [12])
    assert batch.context_lens == (1000, 1000, 1000)
    assert batch.num_tokens == 3000


def test_gemma_windows_hold_what_the_window_reads():
    layout = plan("gemma-3-1b", memory="2GiB")
    blocks = admit(layout, requests=1, context=2000).requests[0]
    for group, spec in enumerate(layout.groups):
        first = 0 if spec.kind == "full_attention" else (2000 - 512) // 16
        assert positions(blocks.block_ids[group]) == list(range(first, 125))


def test_a_full_pool_says_what_each_group_wanted_and_takes_nothing():
    layout = small_layout([full(16), state()], 10)
    manager = KVCacheManager(layout)
    manager.allocate(Request("a", 60))
    with pytest.raises(PoolExhausted) as error:
        manager.allocate(Request("b", 100))
    assert error.value.wanted == {0: 7, 1: 1}
    assert error.value.free == manager.num_free() == 4
    for word in ("'b'", "8 blocks", "4 of 9 are free", "group 0 (full_attention) 7", "group 1 (mamba) 1"):
        assert word in str(error.value)
    with pytest.raises(PoolExhausted, match="group 0 .full_attention. 5"):
        manager.append("a", 80)
    assert manager.num_free() == 4


def test_a_batch_that_does_not_fit_is_not_half_admitted():
    layout = small_layout([full(16)], 10)
    manager = KVCacheManager(layout)
    with pytest.raises(PoolExhausted, match="request-2"):
        admit(layout, requests=4, context=60, manager=manager)
    assert manager.num_free() == 9


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: Request("r", 0), "'r' has 0 tokens"),
        (lambda m: Request("r", 2.5), "num_tokens 2.5"),
        (lambda m: Request("r", True), "num_tokens True"),
        (lambda m: Request("r", 10, "p", 10), "prefix of 10 tokens in 10"),
        (lambda m: Request("r", 10, "p", -1), "prefix of -1"),
        (lambda m: Request("r", 10, prefix_tokens=4), "without a name"),
        (lambda m: Request("r", 10, encoder_tokens=-1), "-1 encoder tokens"),
        (lambda m: m.allocate(Request("here", 5)), "'here' is admitted already"),
        (lambda m: m.allocate(Request("r", 201)), "201 tokens.*at most 200"),
        (lambda m: m.append("here", 500), "at most 200"),
        (lambda m: m.append("here", 0), "append of 0"),
        (lambda m: m.append("here", -3), "append of -3"),
        (lambda m: m.append("nobody"), "'nobody' is not admitted"),
        (lambda m: m.free("nobody"), "'nobody' is not admitted"),
        (lambda m: admit(m.layout, requests=0), "0 requests"),
        (lambda m: admit(m.layout, requests=-1), "0 requests"),
        (lambda m: admit(m.layout, context=[]), "0 requests"),
        (lambda m: admit(m.layout, requests=2, context=[5, 6, 7]), "2 requests with 3 context lengths"),
        (lambda m: admit(m.layout, context="long"), "context 'long'"),
        (lambda m: admit(m.layout, context=[5, None]), "context None"),
        (lambda m: admit(m.layout, requests=2, context=16, shared_prefix=16), "'request-0'.*prefix of 16"),
        (lambda m: admit(m.layout, requests=2, context=16, shared_prefix=-16), "prefix of -16"),
    ],
)
def test_bad_input_is_refused_with_names(call, words):
    manager = KVCacheManager(small_layout([full(16)], 40, max_model_len=200))
    manager.allocate(Request("here", 5))
    with pytest.raises(DecodebenchError, match=words):
        call(manager)
    assert manager.num_free() == 38
