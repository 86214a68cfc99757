"""Capacity, waste and log lines: figures people saw in their engines' logs, and the rules behind them."""

import json

import pytest

from decodebench.layout.capacity import capacity, waste
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.plan import from_groups, layout_for, plan, prepare
from decodebench.layout.pool import admit
from decodebench.layout.reads import decode_work
from decodebench.models.load import DATA, load_model
from decodebench.models.specs import FullAttentionSpec, MambaSpec, SlidingWindowSpec


def config(name: str, **changes) -> dict:
    """A known model's config with some fields changed; None takes a field away."""
    fields = json.loads((DATA / name / "config.json").read_text()) | changes
    return {field: value for field, value in fields.items() if value is not None}


def delta(layers: int, **changes) -> dict:
    return config(
        "qwen3.5-default",
        num_hidden_layers=layers,
        layer_types=None,
        full_attention_interval=4,
        max_position_embeddings=262144,
        mamba_ssm_dtype="float32",
        **changes,
    )


QWEN_08B = delta(
    24, hidden_size=1024, num_attention_heads=8, num_key_value_heads=2, linear_num_value_heads=16
)
QWEN_27B = delta(
    64, hidden_size=5120, num_attention_heads=24, num_key_value_heads=4, linear_num_value_heads=48
)
QWEN_35B = delta(40, hidden_size=2048, num_attention_heads=16, num_key_value_heads=2)
GRANITE_SMALL = config(
    "granite-4.0-h-tiny",
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    mamba_n_heads=128,
    mamba_d_head=64,
    num_hidden_layers=40,
    layer_types=(["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
)
NEMOTRON_NANO = config(
    "nemotron-h-8b",
    hidden_size=4480,
    num_attention_heads=40,
    mamba_head_dim=80,
    num_hidden_layers=56,
    hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
)


def gib(number: float) -> int:
    return int(number * 2**30)


def test_qwen3_next_on_two_ranks():
    """47,878,721,024 bytes: 7,162 blocks of 557,056-byte pages, 14.77x, 973,760 tokens by the old label."""
    layout = plan("qwen3-next-80b-a3b", 47_878_721_024, tensor_parallel_size=2, enable_prefix_caching=False)
    c = capacity(layout)
    assert (layout.resolved.block_size, layout.num_blocks) == (544, 7162)
    assert {spec.page_size_bytes for spec in layout.layer_specs.values()} == {557_056}
    assert f"{c.concurrency:.2f}" == "14.77"
    assert c.tokens_old == 973_760
    assert "Padding mamba page size by 1.49%" in " ".join(layout.log_lines())


@pytest.mark.parametrize(
    ("model", "memory", "block", "padding", "blocks", "tokens", "times", "options"),
    [
        (QWEN_08B, 61.818, 544, "2.64%", 9929, 3_697_198, "451.32", {"max_model_len": 8192}),
        (QWEN_27B, 18.61, 784, "0.13%", 388, 298_275, "1.14", {}),
        (
            QWEN_35B,
            66.58,
            2128,
            None,
            2982,
            5_747_892,
            "21.93",
            {"kv_cache_dtype": "fp8", "num_speculative_tokens": 2, "draft_layers": 1},
        ),
    ],
)
def test_delta_nets_with_prefix_caching(model, memory, block, padding, blocks, tokens, times, options):
    layout = plan(model, gib(memory), **options)
    c, lines = capacity(layout), layout.log_lines()
    assert (layout.resolved.block_size, layout.num_blocks, c.tokens) == (block, blocks, tokens)
    assert f"{c.concurrency:.2f}" == times
    assert lines[0].startswith(f"Setting attention block size to {block} tokens")
    # the padding line is printed only where the padding is not zero
    assert [line for line in lines if "Padding mamba page size" in line] == (
        [
            f"Padding mamba page size by {padding} to ensure that mamba page size and attention page size are "
            "exactly equal."
        ]
        if padding
        else []
    )
    if options.get("draft_layers"):
        assert "Add 3 padding layers, may waste at most 10.00% KV cache memory" in lines


def test_gemma_3_1b():
    """25.39 GiB (416,008 blocks), length 2,048: 2 padding layers (9.09 %),
    950,864 tokens by the old label, 461.21x.
    """
    layout = plan("gemma-3-1b", 416_008 * 65_536, max_model_len=2048)
    c = capacity(layout)
    assert c.tokens_old == 950_864
    assert f"{c.concurrency:.2f}" == "461.21"
    assert "Add 2 padding layers, may waste at most 9.09% KV cache memory" in layout.log_lines()
    assert not any("mamba" in line for line in layout.log_lines())


def test_lfm2():
    """40,738 blocks of 16 tokens, padding 300 %, 2 padding layers (20 %), 313.37x at length 2,048."""
    grouped = prepare("lfm2-1.2b", dtype="float16", max_model_len=2048, enable_prefix_caching=False)
    layout = layout_for(grouped, 40_738 * grouped.bytes_per_block())
    assert (layout.resolved.block_size, layout.num_blocks) == (16, 40_738)
    assert f"{capacity(layout).concurrency:.2f}" == "313.37"
    lines = layout.log_lines()
    # the block did not grow, so there is no line about it
    assert lines[0].startswith("Padding mamba page size by 300.00%")
    assert lines[1] == "Add 2 padding layers, may waste at most 20.00% KV cache memory"


def test_granite_small():
    lines = plan(GRANITE_SMALL, "40GiB").log_lines()
    assert lines[0].startswith("Setting attention block size to 528 tokens")
    assert lines[1].startswith("Padding mamba page size by 0.69%")


@pytest.mark.parametrize(("dtype", "block"), [("bfloat16", 672), ("float32", 1312), ("auto", 1312)])
def test_nemotron_nano_by_state_dtype(dtype, block):
    assert plan(NEMOTRON_NANO, "40GiB", mamba_ssm_cache_dtype=dtype).resolved.block_size == block


@pytest.mark.parametrize(("tokens", "block"), [(0, 784), (1, 800), (7, 832)])
def test_speculative_tokens_widen_the_convolution(tokens, block):
    assert plan(QWEN_27B, "40GiB", num_speculative_tokens=tokens).resolved.block_size == block


def test_a_block_size_given_is_the_grain():
    """A state that needs 818 tokens' worth of page: 832 in steps of 16, 1,632 in steps of 816."""
    model = delta(
        64, hidden_size=5120, num_attention_heads=24, num_key_value_heads=4, linear_num_value_heads=48
    )
    assert plan(model, "40GiB", num_speculative_tokens=7).resolved.block_size == 832
    grown = plan(model, "80GiB", num_speculative_tokens=7, block_size=816)
    assert grown.resolved.block_size == 1632


def test_start_and_slope_mean_what_their_words_say():
    """Starting costs what one token reserves; the slope joins two lengths, up to one block a group."""
    for name in ("gemma-3-1b", "jamba-v0.1", "gpt-oss-20b", "qwen3-next-80b-a3b", "mistral-7b-v0.1"):
        layout = plan(name, "80GiB", max_model_len="auto")
        one = layout.capacity(1)
        assert one.start_bytes == one.request_bytes == sum(one.blocks_per_request) * layout.bytes_per_block()
        for length in (20_480, 32_000):
            c = capacity(layout, length)
            assert c.start_bytes == one.request_bytes, "whatever length is asked about"
            assert c.request_bytes == sum(c.blocks_per_request) * layout.bytes_per_block()
            grown = capacity(
                layout, length + 100 * max(map(layout.tokens_per_block, range(len(layout.groups))))
            )
            further = (grown.request_bytes - c.request_bytes) - c.slope_bytes * (grown.length - c.length)
            assert abs(further) <= layout.bytes_per_block() * len(layout.groups)


def test_a_model_of_attention_alone_is_cheap_to_start():
    """Gemma's windows make long requests cheap; a request of one token holds two blocks a window and one else."""
    layout = plan("gemma-3-1b", "40GiB")
    c = capacity(layout, 32_768)
    assert c.start_bytes < 4 * 2**20 < 300 * 2**20 < c.request_bytes


def test_one_tokens_figure_hides_both():
    """Twice the length does not halve the requests of a hybrid: states cost the same."""
    layout = plan("jamba-v0.1", "8GiB")
    short, long = capacity(layout, 80), capacity(layout, 160)
    assert short.concurrency / long.concurrency == pytest.approx(16 / 15)


def small(groups, blocks=11, **facts):
    named = []
    for g, specs in enumerate(groups):
        names = tuple(f"g{g}.l{i}" for i in range(len(specs)))
        named.append(KVCacheGroupSpec(names, tuple(specs), specs[0]))
    return from_groups(named, blocks, **facts)


ATTENTION = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="bfloat16")  # 128 bytes a page


def test_waste_by_cause():
    """By hand: 2 + 1 layers of 128-byte pages, a state page of 100 bytes
    padded to 128, requests of 6 tokens.
    """
    state = MambaSpec(block_size=4, shapes=((25,),), dtypes=("float32",), page_size_padded=128)
    layout = small([[ATTENTION] * 2, [state]], blocks=10, max_model_len=6)
    # a request: 2 attention blocks and 1 state block; 9 usable blocks hold 3 requests
    w = waste(layout)
    assert w.padding_layers == 3 * 128
    assert w.padded_pages == 3 * 28
    assert w.last_block == 3 * 2 * 2 * 32
    assert w.content == 3 * (2 * 6 * 32 + 100)
    assert (w.null_block, w.tail, w.reserve) == (256, 0, 0)
    assert w.total == layout.size == 2560


def test_waste_counts_what_windows_hold_for_tokens_in_flight():
    window = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="bfloat16", sliding_window=5)
    layout = small([[window]], blocks=11, max_model_len=64, max_in_flight_tokens=16)
    # reserved: ceil((5 - 1 + 16) / 4) + 1 = 6 blocks; decode at 64 tokens reads [60, 64): one block
    w = waste(layout)
    assert layout.blocks_per_request() == [6]
    assert w.reserve == pytest.approx(5 * 128 * 10 / 6)
    assert w.content == pytest.approx(128 * 10 / 6)


def test_what_no_step_reads_counts_as_such_under_every_grouping():
    """Windows allocated as full attention keep tokens that no step reads: that is no content."""
    for name in ("gemma-3-1b", "gpt-oss-20b", "llama-4-scout-text"):
        length = 16_000  # not the first token of a chunk
        read = {}
        for grouping in ("hybrid", "promoted"):
            layout = plan(name, "80GiB", grouping=grouping, max_model_len=length)
            batch = admit(layout, requests=2, context=length)
            w = waste(layout, length)
            moved = sum(work.bytes_read + work.bytes_written for work in decode_work(layout, batch)) / 2
            fits = (layout.num_blocks - 1) / (
                layout.capacity(length).request_bytes / layout.bytes_per_block()
            )
            read[grouping] = w.content / fits
            assert read[grouping] == pytest.approx(moved, rel=0.01), (name, grouping)
            assert (w.unread > w.content / 10) == (grouping == "promoted")
        assert read["hybrid"] == pytest.approx(read["promoted"], rel=0.01), "a step reads the same bytes"


def test_shares_add_up():
    for name in ("gemma-3-1b", "jamba-v0.1", "whisper-large-v3", "gemma-4-default"):
        for grouping in ("auto", "separate", "per_layer"):
            shares = waste(plan(name, "40GiB", grouping=grouping)).shares()
            assert sum(shares.values()) == pytest.approx(1)
            assert min(shares.values()) >= 0, (name, grouping, shares)


def test_query_heads_of_every_layer():
    for name in ("gemma-3-1b", "jamba-v0.1", "kimi-linear-48b-a3b", "deepseek-v3.2", "deepseek-v4-mapped"):
        model = load_model(name)
        assert all(model.query_heads(layer) >= 0 for layer in model.layer_names)
