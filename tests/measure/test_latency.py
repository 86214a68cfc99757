"""decode: one step over a grouped cache against the specification, its bytes, and what it refuses.

Caches are poisoned (NaN) and only what DESIGN says a step reads is filled: a NaN in an output is a
byte read that nobody had to fill.
"""

import itertools
import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from decodebench.__main__ import main
from decodebench.cache.run import fill_cache
from decodebench.cache.small import small_cache
from decodebench.cache.tensors import allocate
from decodebench.cache.values import Normal
from decodebench.cache.write import fill_blocks
from decodebench.layout import reads
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.plan import from_groups
from decodebench.layout.pool import Batch, Request, RequestBlocks
from decodebench.layout.reads import DecodeError, LayerWork
from decodebench.measure import bandwidth, clock, latency, limits
from decodebench.measure import step as step_
from decodebench.measure.kernels import cpp
from decodebench.measure.latency import measure_decode
from decodebench.measure.limits import Operations
from decodebench.measure.step import prepare_step
from decodebench.models.specs import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    cdiv,
)
from decodebench.study import bench_decode, latency_table, sweep

pytestmark = pytest.mark.usefixtures("one_thread")

ATTENTION = {"num_kv_heads": 2, "head_size": 32}


def attention_specs(block_size, dtype="bfloat16"):
    common = {"block_size": block_size, "dtype": dtype}
    return {
        "full": FullAttentionSpec(**common, **ATTENTION),
        "window": SlidingWindowSpec(**common, **ATTENTION, sliding_window=20),
        "chunk": ChunkedLocalAttentionSpec(**common, **ATTENTION, attention_chunk_size=24),
        "latent": MLAAttentionSpec(**common, num_kv_heads=1, head_size=128),
        "cross": CrossAttentionSpec(**common, **ATTENTION, max_encoder_tokens=64),
        "window as full": FullAttentionSpec(**common, **ATTENTION, sliding_window=20),
    }


def state_specs(dtype="float32"):
    def spec(mamba_type, *shapes):
        dtypes = ("bfloat16", dtype)[: len(shapes)]
        return MambaSpec(block_size=4096, shapes=shapes, dtypes=dtypes, mamba_type=mamba_type)

    return {
        "mamba1": spec("MAMBA1", (3, 64), (64, 16)),
        "mamba2": spec("MAMBA2", (3, 2 * 32 + 2 * 16), (2, 32, 16)),
        "gdn": spec("GDN_ATTN", (3, 2 * 16 + 2 * 32), (2, 32, 16)),
        "short": spec("SHORT_CONV", (2, 64)),
    }


def layout_of(specs, num_blocks, memory_order="LBNHC", layers=2):
    """One group a spec, ``layers`` layers each, all pages padded to the largest."""
    page = max(cdiv(s.page_size_bytes, 4) * 4 for s in specs.values())
    groups = []
    for name, spec in specs.items():
        padded = spec if spec.page_size_bytes == page else spec.padded_to(page)
        names = tuple(f"{name}.{i}" for i in range(layers))
        groups.append(KVCacheGroupSpec(names, (padded,) * layers, padded))
    return from_groups(groups, num_blocks, memory_order, max_model_len=4096)


def batch_of(layout, lengths, encoder_tokens=0, shuffle=True):
    """Block tables by hand: one counter for all groups, null blocks where nothing later reads."""
    ids = list(range(1, layout.num_blocks))
    if shuffle:
        ids = [ids[i] for i in torch.randperm(len(ids), generator=torch.Generator().manual_seed(2)).tolist()]
    free = iter(ids)
    requests = []
    for i, n in enumerate(lengths):
        tables = []
        for g, group in enumerate(layout.groups):
            spec, tokens = group.kv_cache_spec, layout.tokens_per_block(g)
            if isinstance(spec, MambaSpec):
                tables.append((next(free),))
                continue
            length = encoder_tokens if isinstance(spec, CrossAttentionSpec) else n
            skipped = 0 if isinstance(spec, CrossAttentionSpec) else spec.num_skipped_tokens(n - 1) // tokens
            tables.append((0,) * skipped + tuple(itertools.islice(free, cdiv(length, tokens) - skipped)))
        requests.append(RequestBlocks(Request(f"r{i}", n, encoder_tokens=encoder_tokens), 0, tuple(tables)))
    return Batch(layout, tuple(requests))


def fill_required(cache, batch):
    """Random values at exactly what the next step reads; everything else stays poison."""
    random = torch.Generator().manual_seed(1)
    layout = cache.layout
    for layer in layout.layer_names:
        spec, group = layout.layer_specs[layer], layout.group_of[layer]
        for blocks in batch.requests:
            row = blocks.block_ids[group]
            view = cache.view(layer)
            if isinstance(spec, MambaSpec):
                for part in view.values() if isinstance(view, dict) else [view]:
                    part[row[0]] = torch.randn(part.shape[1:], generator=random).to(part.dtype)
                continue
            n, encoder = blocks.request.num_tokens, blocks.request.encoder_tokens
            start, stop = spec.visible(n, encoder)
            for p in range(start, stop if isinstance(spec, CrossAttentionSpec) else stop - 1):
                slot = view[row[p // spec.block_size], :, p % spec.block_size]
                value = torch.randn(slot.shape, generator=random).to(torch.float32)
                if slot.element_size() == 1:
                    slot.view(torch.uint8).copy_(value.to(slot.dtype).view(torch.uint8))
                else:
                    slot.copy_(value)


def made(specs, lengths, memory_order="LBNHC", encoder_tokens=0, layers=2):
    rows = sum(cdiv(max(*lengths, encoder_tokens), s.block_size) + 1 for s in specs.values())
    layout = layout_of(specs, 1 + rows * len(lengths), memory_order, layers)
    batch = batch_of(layout, lengths, encoder_tokens)
    cache = allocate(layout, "cpu", "poison")
    fill_required(cache, batch)
    return cache, batch


def backends():
    return ["torch"] + (["cpp"] if cpp.why_not() is None else [])


# --- what a step reads ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, window, chunk",
    [
        (1, (0, 1), (0, 1)),
        (20, (0, 20), (0, 20)),
        (21, (1, 21), (0, 21)),
        (24, (4, 24), (0, 24)),
        (25, (5, 25), (24, 25)),
        (100, (80, 100), (96, 100)),
    ],
)
def test_visible_positions(n, window, chunk):
    specs = attention_specs(16)
    assert specs["full"].visible(n) == (0, n)
    assert specs["window"].visible(n) == specs["window as full"].visible(n) == window
    assert specs["chunk"].visible(n) == chunk
    assert specs["cross"].visible(n, 37) == (0, 37)
    assert specs["cross"].visible(n) == (0, 64)


def test_bytes_by_hand():
    specs = attention_specs(16) | {"mamba2": state_specs()["mamba2"]}
    layout = layout_of(specs, 64, layers=1)
    work = {w.kind: w for w in reads.decode_work(layout, batch_of(layout, (50, 1), encoder_tokens=7))}
    token = 2 * (32 + 32) * 2  # heads x (K + V) x bfloat16
    assert work["sliding_window"].bytes_read == 19 * token
    assert work["sliding_window"].bytes_written == 2 * token
    assert work["chunked_local_attention"].bytes_read == 1 * token  # position 48 beside the new 49
    assert work["mla_attention"].bytes_read == 49 * 128 * 2
    assert (work["cross_attention"].bytes_read, work["cross_attention"].bytes_written) == (14 * token, 0)
    state = 3 * 96 * 2 + 2 * 32 * 16 * 4
    assert (work["mamba2"].bytes_read, work["mamba2"].bytes_written) == (2 * state, 2 * state)
    full = next(w for w in reads.decode_work(layout, batch_of(layout, (50, 1), 7)) if w.layer == "full.0")
    assert full.bytes_read == 49 * token
    table = reads.decode_bytes(layout, batch_of(layout, (50, 1), 7))
    assert table["bytes_read"].sum() == sum(
        w.bytes_read for w in reads.decode_work(layout, batch_of(layout, (50, 1), 7))
    )


def test_context_parallelism_reads_a_share():
    spec = FullAttentionSpec(block_size=16, dtype="bfloat16", num_kv_heads=1, head_size=32)
    group = KVCacheGroupSpec(("a",), (spec,), spec)
    layout = from_groups([group], 8, decode_context_parallel_size=2, max_model_len=128)
    batch = Batch(layout, (RequestBlocks(Request("r", 33), 0, ((3, 5),)),))
    assert reads.decode_work(layout, batch)[0].bytes_read == (17 - 1) * 64 * 2
    cache = allocate(layout, "cpu", "zeros")
    step = prepare_step(cache, batch)
    step.outputs()
    written = torch.nonzero(cache.view("a")[:, 0].float().abs().sum(-1))
    assert written.tolist() == [[5, 0]]  # local entry 16: the second block's first


# --- the step against the specification ------------------------------------------------------------------


@pytest.mark.parametrize("memory_order", ["LBNHC", "BLHNC"])
@pytest.mark.parametrize("block_size", [1, 7, 16, 48])
def test_attention_kinds_over_one_pool(block_size, memory_order):
    specs = attention_specs(block_size)
    cache, batch = made(specs, (61, 25, 1), memory_order, encoder_tokens=33)
    before = cache.storage.clone()
    for name in backends():
        errors = step_.compare_with_reference(cache, batch, name, query_heads=4)
        assert len(errors) == 2 * len(specs)
        for layer, (output, left) in errors.items():
            assert output <= 1e-2 and left == 0.0, (name, layer, output, left)
    assert torch.equal(cache.storage, before), "the step was not undone, or wrote somewhere else"


@pytest.mark.parametrize("block_size", [528, 784, 1024])
def test_large_blocks(block_size):
    specs = {k: v for k, v in attention_specs(block_size).items() if k in ("full", "window")}
    cache, batch = made(specs, (block_size + 9, 40), layers=1)
    for name in backends():
        errors = step_.compare_with_reference(cache, batch, name, query_heads=6)
        assert max(output for output, _ in errors.values()) <= 1e-2


@pytest.mark.parametrize(
    "dtype, tolerance", [("float32", 1e-5), ("float16", 2e-3), ("float8_e4m3fn", 1e-2), ("float8_e5m2", 1e-2)]
)
def test_cache_dtypes(dtype, tolerance):
    cache, batch = made(attention_specs(16, dtype), (61, 25), encoder_tokens=20, layers=1)
    activation = dtype if dtype in ("float32", "float16") else "bfloat16"
    for name in backends():
        errors = step_.compare_with_reference(cache, batch, name, query_heads=4, dtype=activation)
        assert max(output for output, _ in errors.values()) <= tolerance, errors


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("hit", [0, 32], ids=["filled", "prefix hit of everything"])
def test_a_state_step_at_a_block_boundary_updates_the_block_it_reads(backend, hit):
    specs = {"mamba2": replace(state_specs()["mamba2"], block_size=16, mamba_cache_mode="align")}
    layout = layout_of(specs, 8)
    batch = Batch(layout, (RequestBlocks(Request("r", 33), hit, ((0, 3, 5),)),))
    cache = allocate(layout, "cpu", "poison")
    filled = fill_cache(cache, batch) if not hit else fill_blocks(cache, [(3,)], Normal())
    assert filled.block_ids[0] == ((3,) if hit else (3, 5))
    before = cache.pages("mamba2.0").clone()
    step = prepare_step(cache, batch, backend)
    step()
    after = cache.pages("mamba2.0")
    # block 5 begins with the token to compute: its state is read and replaced, the one before is kept
    assert [block for block in range(8) if not torch.equal(before[block], after[block])] == [5]
    assert all(bool(output.isfinite().all()) for output in step.outputs().values())
    # what a hit brought has been copied on, as the engine does before the step
    step.restore()
    assert torch.equal(cache.pages("mamba2.0")[5], before[3] if hit else before[5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiled", [True, False])
def test_states_beside_attention(dtype, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(cpp, "why_not", lambda *_: "no compiler, for a test")
    specs = {"full": attention_specs(16)["full"]} | state_specs(dtype)
    cache, batch = made(specs, (61, 25, 1))
    before = cache.storage.clone()
    for name in backends() if compiled else ["torch"]:
        errors = step_.compare_with_reference(cache, batch, name)
        for layer, (output, left) in errors.items():
            assert output <= (1e-2 if "full" in layer else 1e-5) and left <= 1e-2, (name, layer)
    assert torch.equal(cache.storage, before)
    if not compiled:
        step = prepare_step(cache, batch, "torch")
        assert any("no compiler, for a test" in text for text in step.fallbacks)


def test_unfilled_required_byte_shows():
    cache, batch = made({"full": attention_specs(16)["full"]}, (61,), layers=1)
    row = batch.requests[0].block_ids[0]
    cache.pages("full.0")[row[2], 200:202] = 0xFF
    for name in ["reference", *backends()]:
        assert prepare_step(cache, batch, name).outputs()["full.0"].isnan().any()


def test_inputs_are_seeded():
    cache, batch = made(attention_specs(16), (61, 25), encoder_tokens=20, layers=1)

    def outputs(seed):
        step = prepare_step(cache, batch, "torch", seed=seed)
        result = step.outputs()
        step.restore()
        return result

    first, again, other = outputs(3), outputs(3), outputs(4)
    assert all(torch.equal(first[layer], again[layer]) for layer in first)
    assert not any(torch.equal(first[layer], other[layer]) for layer in first)


# --- bad input --------------------------------------------------------------------------------------------


def one(tokens=40, table=((1, 2, 3),), specs=None, layout=None):
    layout = layout or layout_of(specs or {"full": attention_specs(16)["full"]}, 8, layers=1)
    request = SimpleNamespace(request_id="req-7", num_tokens=tokens, encoder_tokens=None)
    return layout, Batch(layout, (RequestBlocks(request, 0, table),))


@pytest.mark.parametrize(
    "tokens, table, message",
    [
        (40, ((1, 2, 9),), "block 9 is beyond the pool of 8 blocks"),
        (0, ((1, 2, 3),), "context of 0 tokens"),
        (40, ((1, 2),), "need 3 blocks of 16, its table has 2"),
        (40, ((1, 0, 3),), "reads block 1 of its table, which is the null block"),
        (40, ((1, 2, 3), (4,)), "2 block tables, the layout 1 groups"),
    ],
)
def test_bad_batches_are_named(tokens, table, message):
    layout, batch = one(tokens, table)
    with pytest.raises(DecodeError, match=message) as caught:
        prepare_step(allocate(layout, "cpu", "zeros"), batch)
    assert "req-7" in str(caught.value)


def test_bad_requests_are_named(monkeypatch):
    layout, batch = one()
    cache = allocate(layout, "cpu", "zeros")
    with pytest.raises(DecodeError, match="no requests"):
        prepare_step(cache, Batch(layout, ()))
    with pytest.raises(DecodeError, match="backend 'fast': known are reference"):
        prepare_step(cache, batch, "fast")
    with pytest.raises(DecodeError, match="layers nowhere"):
        prepare_step(cache, batch, layers=["nowhere"])
    with pytest.raises(DecodeError, match="3 query heads do not divide among 2 KV heads"):
        prepare_step(cache, batch, query_heads=3)
    with pytest.raises(DecodeError, match="triton"):
        prepare_step(cache, batch, "triton")
    monkeypatch.setattr(cpp, "why_not", lambda *_: "no C++ compiler on PATH")
    with pytest.raises(DecodeError, match="no C.. compiler"):
        prepare_step(cache, batch, "cpp")
    assert "backend torch instead of cpp: backend 'cpp': no C++ compiler" in prepare_step(cache, batch).note
    state, owner = one(40, ((0,),), {"mamba2": state_specs()["mamba2"]})
    with pytest.raises(DecodeError, match="no state at position 0"):
        prepare_step(allocate(state, "cpu", "zeros"), owner)


def test_packed_pages_are_refused_by_name():
    packed = MLAAttentionSpec(
        block_size=16,
        num_kv_heads=1,
        head_size=576,
        dtype="uint8",
        packed="fp8_ds_mla",
        state_content_bytes=656,
    )
    layout, batch = one(specs={"sparse": packed})
    with pytest.raises(DecodeError, match="'sparse.0': pages are packed as fp8_ds_mla"):
        reads.decode_work(layout, batch)
    ring = CircularBufferSpec(block_size=16, num_kv_heads=1, head_size=32, dtype="bfloat16")
    layout, batch = one(specs={"ring": ring})
    with pytest.raises(DecodeError, match="ring of packed integers"):
        reads.decode_work(layout, batch)


def test_out_of_memory_names_the_batch(monkeypatch):
    layout, batch = one()

    def boom(*arguments, **options):
        raise MemoryError("boom")

    monkeypatch.setattr("decodebench.measure.latency.measure", boom)
    with pytest.raises(DecodeError, match="1 requests with up to 40 tokens: boom"):
        measure_decode(allocate(layout, "cpu", "zeros"), batch)


# --- measuring --------------------------------------------------------------------------------------------

SPEED = bandwidth.Bandwidth(read=10.0, copy=8.0, memset=5.0, update=4.0, device="cpu", buffer_bytes=1)


@pytest.mark.parametrize("cold", [False, True])
def test_measurement_record(cold, monkeypatch):
    monkeypatch.setattr(clock, "_eviction_bytes", lambda: 1 << 20)
    specs = {"full": attention_specs(16)["full"], "mamba2": state_specs()["mamba2"]}
    cache, batch = made(specs, (61, 25))
    before = cache.storage.clone()
    found = measure_decode(cache, batch, cold=cold, by_kind=True, min_seconds=0.01, limit=SPEED)
    assert torch.equal(cache.storage, before), "measuring left its own values behind"
    token, state = 2 * 64 * 2, 3 * 96 * 2 + 2 * 32 * 16 * 4
    assert found.bytes_read == 2 * ((60 + 24) * token + 2 * state)
    assert found.bytes_written == 2 * (2 * token + 2 * state)
    seconds = 2 * ((60 + 24) * token / 10 + (2 * token + 4 * state) / 4) / 1e9
    assert math.isclose(found.limit, seconds)
    assert math.isclose(found.share, seconds / found.latency)
    assert found.timing.cold is cold and found.timing.q1 <= found.latency <= found.timing.q3
    kinds = found.kinds().set_index("kind")
    assert list(kinds.index) == ["full_attention", "mamba2"] and (kinds["layers"] == 2).all()
    assert math.isclose(kinds["limit_s"].sum(), seconds) and (kinds["median_s"] > 0).all()
    assert found.bound_by == "memory" and (kinds["bound_by"] == "memory").all()
    row = found.to_dict()
    assert row["context_min"] == 25 and row["context_max"] == 61 and row["num_requests"] == 2
    text = str(found)
    assert "2 requests of 25 to 61 tokens" in text and "no weights" in text and "query heads assumed" in text


def test_a17_a_fill_inside_the_step_is_seen():
    """The resident step is measured; a step that also fills is told from it by comparison."""
    cache, batch = made({"full": attention_specs(16)["full"]}, (61, 25), layers=1)
    resident = measure_decode(cache, batch, min_seconds=0.01, limit=SPEED).timing
    step = prepare_step(cache, batch)
    fill_seconds = 0.05  # a sleep is never shorter than asked for, so no busy machine changes the outcome

    def filling_step():
        time.sleep(fill_seconds)
        step()

    assert latency.holds_fill(clock.measure(filling_step, min_seconds=0.05), resident, fill_seconds)
    assert not latency.holds_fill(resident, resident, fill_seconds)


# --- tables for notebooks ---------------------------------------------------------------------------------


def test_latency_table(monkeypatch):
    monkeypatch.setattr("decodebench.measure.latency.bandwidth", lambda device: SPEED)
    settings = [{"block_size": 16}, {"block_size": 48, "context": [100, 40]}]
    settings.append({"block_size": 16, "context": 10**9})
    table = latency_table.latency_table(
        settings, model="tiny-llama", requests=2, context=64, layers=1, min_seconds=0.01, backend="torch"
    )
    assert list(table["kind"]) == ["step", "full_attention", "step", "full_attention", "step"]
    assert list(table["block_tokens"].dropna()) == [16, 48]
    assert table["median_s"].notna().tolist() == [True] * 4 + [False]
    assert "takes requests of at most" in table["failed"].iloc[-1]
    step, kind = table.iloc[0], table.iloc[1]
    assert step["bytes_moved"] == kind["bytes_moved"] > 0 and step["num_requests"] == 2


def test_a_small_cache_stays_small():
    with pytest.raises(DecodeError, match="fewer requests"):
        small_cache("tiny-llama", requests=4, context=2000, max_bytes=1 << 20)
    cache, batch = small_cache("tiny-llama", requests=1, context=40, values=None)
    assert all(out.isnan().any() for out in prepare_step(cache, batch).outputs().values()), "poison shows"
    cache, batch = small_cache("tiny-llama", requests=3, context=40)
    assert not any(out.isnan().any() for out in prepare_step(cache, batch).outputs().values())


def test_bench_decode_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_decode, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(bench_decode, "bandwidth", lambda device, max_age: SPEED)
    small = ["bench", "decode", "--quick", "--requests", "2", "--context", "80", "--models"]
    status = main([*small, "tiny-nemotron-h", "--json", "--out", str(tmp_path)])
    result = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in result["rows"]] == ["mamba2", "full_attention"]
    assert all(row["median_s"] > 0 and row["x_reference"] > 0 for row in result["rows"])
    assert all(row["bound_by"] in ("memory", "arithmetic") for row in result["rows"])
    assert result["provenance"]["settings"]["context"] == 80
    mamba, attention = result["floors"]
    assert (mamba["at_least"], attention["at_least"]) == (0.75, 0.7) and "mamba2" in mamba["floor"]
    met = [floor["met"] for floor in result["floors"]]
    assert status == (1 if False in met else 3 if None in met else 0)
    assert list(sweep.read(tmp_path)["limit_share"]) == [row["limit_share"] for row in result["rows"]]
    assert main([*small, "tiny-llama"]) in (0, 1, 3)
    assert "full_attention" in capsys.readouterr().out
    assert main([*small, "no-such-model"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_floors_of_a_decode_bench():
    row = {"model": "m", "kind": "gdn", "dtype": "bf16", "holds_state": True, "bound_by": "memory"}
    row |= {"limit_share": 0.74, "disturbed": None, "x_vllm": 1.2, "vllm_disturbed": "turns scatter by 80%"}
    share, theirs = bench_decode.floors([row, {"model": "n", "failed": "why"}])
    assert (share.at_least, share.reached, share.met) == (0.75, 0.74, False)
    assert theirs.reached is theirs.met is None and "scatter" in theirs.disturbed
    (share,) = bench_decode.floors([row | {"holds_state": False, "x_vllm": None}])
    assert (share.at_least, share.met) == (0.7, True)


# --- limits -----------------------------------------------------------------------------------------------

FAST = replace(SPEED, products=2e-3, products_float32=1e-3, vector=1e-3, exponentials=1e-3)


def test_the_limit_is_the_longer_of_bytes_and_operations():
    work = [LayerWork("a", 0, "full_attention", 10**9, 0)]
    few, many = (Operations(products=int(n)) for n in (1e8, 1e9))
    assert limits.limit_of(work, [few], FAST) == limits.Limit(0.1, 0.05)
    assert limits.limit_of(work, [few], FAST).bound_by == "memory"
    assert limits.limit_of(work, [many], FAST).seconds == 0.5
    assert limits.limit_of(work, [many], FAST).bound_by == "arithmetic"
    exact = replace(many, product_dtype="float32")
    assert limits.limit_of(work, [exact, exact], FAST).seconds == 2.0
    assert limits.limit_of(work, [many], SPEED).bound_by == "memory", "what was not measured takes no time"
    launched = limits.limit_of(work, [many], replace(FAST, launch_seconds=1.0))
    assert launched.seconds == 1.5


def test_operations_of_states_are_those_of_their_formulas():
    conv = {"conv": (3, 64)}
    found = limits.state_operations("mamba2", conv | {"ssm": (4, 16, 32)}, 2)
    assert found == Operations(vector=2 * 4 * 16 * 32 * 5 + 2 * 2 * 64 * 4, exponentials=2 * 64)
    found = limits.state_operations("mamba1", conv | {"ssm": (96, 16)}, 1)
    assert found.exponentials == 96 * 16 + 64
    found = limits.state_operations("kda", conv | {"recurrent": (2, 32, 16)}, 1)
    assert found.exponentials == 2 * 16 + 64
    assert limits.state_operations("short_conv", conv, 2) == Operations(vector=2 * 2 * 64 * 4)


def test_each_field_is_the_best_of_its_probes():
    kernels = {"read": [bandwidth.Probe(int, 1e9), bandwidth.Probe(int, 1e9)]}
    kernels |= {name: [bandwidth.Probe(int, 1e12)] for name in ("products", "products_float32")}
    seconds = {"read": [1.0, 0.5], "products": [4.0], "products_float32": [2.0]}
    found = bandwidth.from_probes(seconds, kernels, "cpu", 1)
    assert found.read == 2.0 and math.isnan(found.copy)
    assert found.products == found.products_float32 == 0.5, "bfloat16 is no slower: it can be converted"
    assert set(bandwidth.probes(1 << 16)) >= {"read", "update", "products", "products_float32"}
