"""kernels: every backend against the float64 specification; Triton's built for GPUs that are not here.

Caches are poisoned with 0xFF bytes (NaN in every floating type) and only what a step may read is
filled, so a backend that reads one byte more returns NaN.
"""

import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from kernel_cases import FP8, SHAPES, TOLERANCE, attention_case, check_attention, state_case

from decodebench.cache import compiled
from decodebench.measure.kernels import cpp, reference, torch_ops

pytestmark = pytest.mark.usefixtures("one_thread")

#: Triton interprets only where it was told so before its first import: a process of its own, see below
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = ["triton"] if INTERPRETED else []
NO_TRITON = "Triton is not installed (optional extra)"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason=NO_TRITON)
needs_compiler = pytest.mark.skipif(cpp.why_not() is not None, reason=f"no compiled backend: {cpp.why_not()}")


def backend_named(name):
    if name == "triton":
        return importlib.import_module("decodebench.measure.kernels.triton_ops")
    if name == "cpp" and cpp.why_not():
        pytest.skip(cpp.why_not())
    return {"cpp": cpp, "torch": torch_ops}[name]


RAGGED = ((0, 70), (33, 95))
BLOCK_SIZES = (1, 7, 16, 48, 528, 784, 1024)


@pytest.mark.parametrize("name", ["cpp", "torch", *TRITON])
@pytest.mark.parametrize("order", ["LBNHC", "BLHNC"])
@pytest.mark.parametrize("entries", BLOCK_SIZES)
def test_attention_any_block_size_and_order(name, order, entries):
    backend = backend_named(name)
    long = 2 * entries + 5 if entries > 100 and name != "triton" else 90
    ranges = ((0, long), (min(33, long - 1), long - 2), (long - 1, long))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_attention(backend, *attention_case(entries, ranges, dtype=dtype, order=order, pad_bytes=64))


@pytest.mark.parametrize("name", ["cpp", "torch", *TRITON])
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("order", ["LBNHC", "BLHNC"])
def test_attention_float8_caches(name, dtype, order):
    case = attention_case(16, RAGGED, dtype=dtype, order=order, pad_bytes=3)
    check_attention(backend_named(name), *case)


@pytest.mark.parametrize("name", ["cpp", "torch"])
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_float8_decoding_of_every_byte(name, dtype):
    """One token a byte value, softmax over one token: the output is the value itself."""
    backend = backend_named(name)
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(dtype).float()
    view = codes.view(256, 1, 1, 1).expand(256, 1, 1, 32).contiguous().view(dtype)
    q = torch.zeros(256, 1, 16)
    zero, one = torch.zeros(256, dtype=torch.int64), torch.ones(256, dtype=torch.int64)
    view.view(torch.uint8)[:, :, :, :16] = 0  # keys: zero scores, whatever the value
    table = torch.arange(256, dtype=torch.int32).view(256, 1)
    got = backend.attend(q, view, table, zero, one, scale=1.0, head_size_v=16, v_offset=16)[:, 0, 0]
    assert torch.equal(got.isnan(), want.isnan())
    finite = want.isfinite()
    # neighbours differ by 6 % at least; a softmax over one token may be off 1 by a rounding
    torch.testing.assert_close(got[finite], want[finite], rtol=1e-6, atol=0.0)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("group", [1, 8, 20])
def test_float8_beside_bfloat16_queries_of_every_byte(dtype, group):
    """The same through pairs of bfloat16, in which every float8 is exact: few heads, two quads, products."""
    codes = torch.arange(256, dtype=torch.uint8)
    view = codes.view(256, 1, 1, 1).expand(256, 1, 1, 128).contiguous()
    view[..., :64] = 0
    view, want = view.view(dtype), codes.view(dtype).float()
    zero, one = torch.zeros(256, dtype=torch.int64), torch.ones(256, dtype=torch.int64)
    table = torch.arange(256, dtype=torch.int32).view(256, 1)
    q = torch.zeros(256, group, 64, dtype=torch.bfloat16)
    got = cpp.attend(q, view, table, zero, one, scale=1.0, head_size_v=64, v_offset=64).float()
    finite = want.isfinite()
    assert torch.equal(got[finite], want[finite, None, None].expand(-1, group, 64))
    assert got[want.isnan()].isnan().all()


@pytest.mark.parametrize("name", ["cpp", "torch", *TRITON])
@pytest.mark.parametrize(
    "shape",
    [
        {"group": 1, "heads": 3},
        {"group": 4, "heads": 2, "dk": 128, "dv": 128},
        {"group": 7, "heads": 1, "dk": 80, "dv": 80},
        {"group": 16, "heads": 1, "dk": 192, "dv": 128},
        {"group": 5, "heads": 1, "dk": 96, "dv": 96},
    ],
    ids=str,
)
def test_attention_shapes(name, shape):
    backend = backend_named(name)
    for dtype in (torch.float32, torch.bfloat16):
        check_attention(backend, *attention_case(16, RAGGED, dtype=dtype, runs=True, **shape))


@pytest.mark.parametrize("name", ["torch", *TRITON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entries", [7, 64])
def test_latent_attention(name, dtype, entries):
    """MLA, absorbed: 576 wide keys whose first 512 columns are the values."""
    case = attention_case(entries, RAGGED, heads=1, group=20, dk=576, dv=512, latent=True, dtype=dtype)
    check_attention(backend_named(name), *case)


@pytest.mark.parametrize("name", ["cpp", "torch", *TRITON])
def test_an_empty_range_gives_zeros(name):
    case, options = attention_case(16, ((0, 20), (5, 5)))
    got = backend_named(name).attend(*case, **options)
    assert torch.count_nonzero(got[1]) == 0 and not got[0].isnan().any()


@pytest.mark.parametrize("name", ["cpp", "torch", *TRITON])
@pytest.mark.parametrize("column", [0, 63, 64, 127])
def test_poison_in_any_required_byte_shows(name, column):
    """The poison tests mean something: a NaN at one column of one key or value reaches the output."""
    case, options = attention_case(16, ((0, 40),))
    q, view, table, _, _ = case
    view[table[0, 1].long(), 0, 3, column] = torch.nan
    assert backend_named(name).attend(*case, **options)[0, 0].isnan().any()


def test_attention_views_a_run_without_a_gather():
    case, _ = attention_case(16, ((0, 512), (100, 400)), runs=True)
    pieces = torch_ops.prepare(*case[1:])
    assert [p.blocks for p in pieces] == [None, None]
    assert [(p.offset, p.tokens) for p in pieces] == [(0, 512), (100 % 16, 300)]
    scattered, _ = attention_case(16, ((0, 512),))
    assert all(p.blocks is not None for p in torch_ops.prepare(*scattered[1:]))


# --- states -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpp", "torch", "eager", *TRITON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", list(SHAPES))
def test_state_steps(name, dtype, kind, monkeypatch):
    if name == "eager":  # the torch backend on a machine without a compiler
        monkeypatch.setattr(cpp, "why_not", lambda *_: "no compiler")
    backend = torch_ops if name == "eager" else backend_named(name)
    raw, parts, rows, inputs = state_case(kind, dtype)
    if name in ("cpp", "triton") and backend.can_update(kind, parts):
        pytest.skip(backend.can_update(kind, parts))
    raw_want, exact, _, _ = state_case(kind, dtype)
    # the first output comes from equal states in float32, whatever the cache's type; later ones carry
    # the rounding of two-byte caches from step to step
    for step, tolerance in enumerate((1e-5, 1e-2, 1e-2)):
        want = reference.state_step(kind, exact, rows, inputs)
        got = backend.state_step(kind, parts, rows, inputs)
        assert not got.isnan().any() and not want.isnan().any()
        assert ((got.double() - want).norm() / want.norm()).item() <= tolerance, f"step {step}"
    for part, values in parts.items():
        a, b = values[rows].double(), exact[part][rows].double()
        assert ((a - b).norm() / b.norm()).item() <= max(TOLERANCE[values.dtype], 2e-3)
    others = [b for b in range(len(raw)) if b not in rows.tolist()]
    assert (raw[others] == 0xFF).all() and (raw[:, -48:] == 0xFF).all(), "a byte outside was written"


@pytest.mark.parametrize("name", ["cpp", *TRITON])
def test_wider_convolution_states_of_speculation(name):
    """With speculative tokens the state holds more inputs than the kernel has taps: the last ones count."""
    backend = backend_named(name)
    raw, parts, rows, inputs = state_case("short_conv", torch.bfloat16, speculative=2)
    inputs["weight"] = inputs["weight"][:, :3].contiguous()
    _, exact, _, _ = state_case("short_conv", torch.bfloat16, speculative=2)
    want = reference.state_step("short_conv", exact, rows, inputs)
    got = backend.state_step("short_conv", parts, rows, inputs)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    # one unit in the last place: Triton's interpreter cuts to bfloat16, devices round to nearest
    rounding = {"rtol": 2**-7 if name == "triton" else 0, "atol": 0}
    torch.testing.assert_close(parts["conv"][rows].float(), exact["conv"][rows].float(), **rounding)


def test_the_specification_by_hand():
    """Recurrences on numbers small enough to check on paper."""
    conv = torch.tensor([[[1.0], [2.0], [3.0]]])
    weight = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    inputs = {"x": torch.tensor([[4.0]]), "weight": weight, "bias": torch.zeros(1)}
    y = reference.state_step("short_conv", {"conv": conv}, torch.tensor([0]), inputs)
    assert y.item() == 1 + 20 + 300 + 4000
    assert conv.flatten().tolist() == [2.0, 3.0, 4.0]

    state = torch.tensor([[[[2.0]]]])  # one head, D = E = 1
    inputs = {n: torch.tensor([[[v]]]) for n, v in (("q", 5.0), ("k", 3.0), ("v", 7.0))}
    inputs["g"] = torch.zeros(1)
    y = reference.state_step("linear", {"recurrent": state}, torch.tensor([0]), inputs)
    assert state.item() == 2 + 3 * 7 and y.item() == 5 * 23

    view = torch.tensor([[[[0.0, 10.0], [0.0, 20.0]]]])  # two entries of key 0: the mean of their values
    out = reference.attend(
        torch.ones(1, 1, 1),
        view,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0]),
        torch.tensor([2]),
        scale=1.0,
        head_size_v=1,
        v_offset=1,
    )
    assert out.item() == 15.0


def test_delta_rule_forgets_what_it_overwrites():
    """With β = 1 and no decay, reading the state at the key just written gives the value just written."""
    raw, parts, rows, inputs = state_case("gdn", torch.float32)
    inputs["g"].zero_(), inputs["beta"].fill_(1.0)
    before = {name: t[rows].clone() for name, t in parts.items()}
    x = {name: t.double() for name, t in inputs.items()}
    y = reference._convolve(parts["conv"], rows, x, activation=True, dtype=torch.float64)
    parts["conv"][rows] = before["conv"]
    reference.state_step("gdn", parts, rows, inputs)
    _, k, v = reference.split_delta(y, 4, 16, 32)
    read = torch.einsum("bhvk,bhk->bhv", parts["recurrent"][rows].double(), k)
    torch.testing.assert_close(read, v, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    compiled._library.cache_clear()
    try:
        assert "no C++ compiler" in cpp.why_not()
    finally:
        monkeypatch.undo()
        compiled._library.cache_clear()
    assert cpp.why_not() is None


# --- Triton without a GPU -------------------------------------------------------------------------------


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the process that interprets")
def test_triton_in_the_interpreter():
    """Every test above that names a backend, with Triton's kernels run on the CPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", "triton"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 48, done.stdout[-300:]


# --- on a GPU (none was at hand when these were written: they have never run) ---------------------------

needs_gpu = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available(), reason="no CUDA device, or a process that interprets"
)


def on_gpu(case):
    q, view, table, start, stop = case
    moved = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device="cuda")
    moved.view(torch.uint8).copy_(view.view(torch.uint8))
    return q.cuda(), moved, table.cuda(), start.cuda(), stop.cuda()


@needs_gpu
@needs_triton
@pytest.mark.parametrize("order", ["LBNHC", "BLHNC"])
@pytest.mark.parametrize("entries", BLOCK_SIZES)
def test_attention_on_a_gpu(entries, order):
    from decodebench.measure.kernels import triton_ops

    for dtype in (torch.float32, torch.bfloat16, torch.float16, *FP8):
        case, options = attention_case(entries, ((0, 700), (33, 450)), dtype=dtype, order=order)
        there = on_gpu(case)
        for chunk in (4096, 96):  # one item a request, and many: at least three iterations somewhere
            plan = triton_ops.prepare(*there[1:], chunk=chunk)
            check_attention(triton_ops, there, options | {"plan": plan})
    case, options = attention_case(entries, RAGGED, heads=1, group=128, dk=576, dv=512, latent=True)
    check_attention(triton_ops, on_gpu(case), options)


@needs_gpu
@needs_triton
@pytest.mark.parametrize("kind", ["mamba1", "mamba2", "gdn", "kda", "short_conv"])
def test_states_on_a_gpu(kind):
    from decodebench.measure.kernels import triton_ops

    for dtype in (torch.float32, torch.bfloat16):
        raw, parts, rows, inputs = state_case(kind, dtype)
        there = raw.cuda()  # strided pages, as they lie in a cache
        moved = {}
        for name, part in parts.items():
            at = part.storage_offset() * part.itemsize
            moved[name] = there[:, at : at + part[0].nbytes].view(part.dtype).unflatten(1, part.shape[1:])
        for step in range(3):
            want = reference.state_step(kind, parts, rows, inputs)
            got = triton_ops.state_step(kind, moved, rows.cuda(), {n: x.cuda() for n, x in inputs.items()})
            rough = 1e-4 if dtype == torch.float32 and step == 0 else 2e-2
            assert ((got.cpu().double() - want).norm() / want.norm()).item() <= rough
        for name, part in parts.items():
            left, exact = moved[name][rows.cuda()].cpu().double(), part[rows].double()
            assert ((left - exact).norm() / exact.norm()).item() <= 2e-2
        others = [b for b in range(len(raw)) if b not in rows.tolist()]
        assert (there[others] == 0xFF).all() and (there[:, -48:] == 0xFF).all(), "a byte outside was written"


@needs_gpu
@pytest.mark.skipif(find_spec("flashinfer") is None, reason="FlashInfer is not installed (optional)")
@pytest.mark.parametrize("entries", [16, 48, 784])
def test_flashinfer_agrees(entries):
    """A library kernel over the same pages: token-major, keys and values apart for it."""
    import flashinfer

    from decodebench.measure.kernels import triton_ops

    case, options = attention_case(entries, ((0, 2000), (0, 333)), group=4, dk=128, dv=128)
    q, view, table, start, stop = on_gpu(case)
    needed = [-(-n // entries) for n in stop.tolist()]
    indptr = torch.tensor([0, *torch.tensor(needed).cumsum(0)], dtype=torch.int32)
    indices = torch.cat([row[:n] for row, n in zip(table, needed)])
    last = torch.tensor([(n - 1) % entries + 1 for n in stop.tolist()], dtype=torch.int32)
    pages = view.transpose(1, 2).nan_to_num()  # it may read what lies behind the last token
    scratch = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(scratch)
    wrapper.plan(
        indptr.cuda(),
        indices,
        last.cuda(),
        q.shape[1],
        view.shape[1],
        128,
        entries,
        q_data_type=q.dtype,
        kv_data_type=view.dtype,
    )
    theirs = wrapper.run(q, (pages[..., :128].contiguous(), pages[..., 128:].contiguous()))
    ours = triton_ops.attend(q, view, table, start, stop, **options)
    assert ((theirs - ours).float().norm() / ours.float().norm()).item() < 1e-2
