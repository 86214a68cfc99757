"""The Triton kernels: loops that turn several times, every float8 byte, far offsets, and how they are launched.

What names ``triton`` runs in the interpreter, in the process that ``test_triton_in_the_interpreter`` starts.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from kernel_cases import FP8, attention_case, check_attention, state_case

from decodebench.measure.kernels import reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed (optional extra)"
)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="only where Triton interprets")
on_device = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available(), reason="no CUDA device, or a process that interprets"
)


def ops():
    from decodebench.measure.kernels import triton_ops

    return triton_ops


def iterations_of(plan):
    """(least, most) loop iterations of the items that a plan was cut into, and parts there are."""
    for (_, _, _, tokens, *_), cut in plan.cuts.items():
        each = [
            -(-last // tokens) - first // tokens for _, first, last, _ in cut.items.tolist() if last > first
        ]
        yield min(each), max(each), sum(part >= 0 for *_, part in cut.items.tolist())


LONG = ((0, 300), (33, 450))


@interpreted
@pytest.mark.parametrize("splits", ["one", "many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, *FP8], ids=str)
@pytest.mark.parametrize("entries", [7, 256])
def test_triton_attention_loops_several_times(splits, dtype, entries):
    """At least three iterations each, with one item a request and with several: buffers are used again."""
    if splits == "many" and dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        pytest.skip("cut as the others are")
    case, options = attention_case(entries, LONG, heads=1, group=2, dtype=dtype)
    plan = ops().prepare(*case[1:], chunk=4096 if splits == "one" else 96)
    check_attention(ops(), case, options | {"plan": plan})
    ((least, most, parts),) = iterations_of(plan)
    if splits == "one":
        assert least >= 3 and parts == 0
    else:
        assert parts >= 6 and most >= 1


@interpreted
def test_triton_latent_attention_loops_several_times():
    for chunk in (4096, 96):
        case, options = attention_case(64, LONG, heads=1, group=20, dk=576, dv=512, latent=True)
        plan = ops().prepare(*case[1:], chunk=chunk)
        check_attention(ops(), case, options | {"plan": plan})
        ((_, most, _),) = iterations_of(plan)
        assert most >= 3


@interpreted
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_triton_decodes_every_float8_byte(dtype):
    """One token a byte value, softmax over one token: the output is the value itself."""
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(dtype).float()
    view = codes.view(256, 1, 1, 1).expand(256, 1, 1, 32).contiguous()
    view[:, :, :, :16] = 0  # keys: zero scores, whatever the value
    zero, one = torch.zeros(256, dtype=torch.int64), torch.ones(256, dtype=torch.int64)
    table = torch.arange(256, dtype=torch.int32).view(256, 1)
    q = torch.zeros(256, 1, 16)
    where = {"scale": 1.0, "head_size_v": 16, "v_offset": 16}
    got = ops().attend(q, view.view(dtype), table, zero, one, **where)[:, 0, 0]
    assert torch.equal(got.isnan(), want.isnan())
    finite = want.isfinite()
    assert torch.equal(got[finite], want[finite])


def run_ptx(text, word):
    """The few PTX instructions of the float8 decoders, on one 32-bit word; two 32-bit results."""
    values = {"$2": word}

    def value(name):
        return values[name] if name in values else int(name, 0)

    def prmt(a, b, selector):
        pool = [(a | b << 32) >> 8 * i & 0xFF for i in range(8)]
        out = 0
        for i in range(4):
            pick = selector >> 4 * i & 0xF
            byte = pool[pick & 7]
            out |= ((0xFF if byte & 0x80 else 0) if pick & 8 else byte) << 8 * i
        return out

    for line in re.findall(r"(\w+)\.\w+ ([^;]+);", text):
        operation, (target, *given) = line[0], [x.strip() for x in line[1].split(",")]
        if operation == "reg" or target.startswith(("a b", ".b32")):
            continue
        x = [value(name) for name in given]
        if operation == "prmt":
            values[target] = prmt(*x)
        elif operation == "lop3":
            assert x[3] == 0xEA  # (a & b) | c
            values[target] = x[0] & x[1] | x[2]
        else:
            act = {"and": int.__and__, "or": int.__or__, "add": int.__add__, "shr": int.__rshift__}
            values[target] = act[operation](*x) & 0xFFFFFFFF
    return values["$0"], values["$1"]


@pytest.mark.skipif(INTERPRETED, reason="reads text, once is enough")
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_the_pairs_of_cards_without_float8_decode_every_byte(dtype):
    """The assembly itself, instruction by instruction: every byte in every place of the word."""
    e4m3 = dtype == torch.float8_e4m3fn
    text = ops().E4M3_PAIRS if e4m3 else ops().E5M2_PAIRS
    text = re.sub(r"\.reg[^;]*;", "", text)
    want = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    for code in range(256):
        others = [(code * 7 + 3 * i + 1) % 256 for i in range(3)]
        for place in range(4):
            codes = [*others[:place], code, *others[place:]]
            word = sum(c << 8 * i for i, c in enumerate(codes))
            halves = torch.tensor([x - (1 << 32 if x >> 31 else 0) for x in run_ptx(text, word)])
            got = halves.to(torch.int32).view(torch.float16).float() * (ops().E4M3_FACTOR if e4m3 else 1)
            torch.testing.assert_close(got, want[torch.tensor(codes)], rtol=0, atol=0, equal_nan=True)


@interpreted
@pytest.mark.parametrize("dtype", [*FP8, torch.bfloat16, torch.float16], ids=str)
def test_triton_writes_what_torch_writes(dtype):
    """Every bfloat16 there is, stored as torch rounds and clamps it, NaN included."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    new = bits.view(torch.bfloat16).view(32, 2, 1024)
    finite = new if dtype in FP8 else new.nan_to_num()
    blocks, entries = torch.arange(32), torch.arange(32) % 4
    views = [torch.zeros(32, 4, 2, 1024, dtype=torch.uint8 if dtype in FP8 else dtype) for _ in range(2)]
    views = [(v.view(dtype) if dtype in FP8 else v).transpose(1, 2) for v in views]
    reference.write_kv(views[0], blocks, entries, finite)
    ops().write_kv(views[1], blocks, entries, finite)
    if dtype not in FP8:
        torch.testing.assert_close(views[1], views[0], rtol=2**-10, atol=0)
        return
    a, b = (v.float() for v in views)
    assert torch.equal(a.isnan(), b.isnan())
    same = ~a.isnan()
    assert torch.equal(*(v.view(torch.uint8)[same] for v in views))


@interpreted
@pytest.mark.parametrize("far", ["blocks", "heads"])
def test_triton_reaches_beyond_two_to_the_31(far):
    """Offsets of blocks and of heads that no 32 bits hold, on memory that is only promised."""
    stride = 2**31 // 2 + 4096
    storage = torch.empty(3 * stride, dtype=torch.bfloat16)  # 6.4 GB of addresses, a few pages of memory
    strides = (stride, 64 * 16, 64, 1) if far == "blocks" else (2 * 64 * 16, stride, 64, 1)
    view = storage.as_strided((3, 2, 16, 64) if far == "blocks" else (2, 3, 16, 64), strides)
    table = torch.tensor([[2, 1]] if far == "blocks" else [[1, 0]], dtype=torch.int32)
    random = torch.Generator().manual_seed(1)
    for block in table[0].tolist():
        view[block] = torch.randn(*view.shape[1:], generator=random).to(torch.bfloat16)
    q = torch.randn(1, view.shape[1] * 2, 32, generator=random).to(torch.bfloat16)
    case = (q, view, table, torch.tensor([0]), torch.tensor([32]))
    check_attention(ops(), case, {"scale": 0.1, "head_size_v": 32, "v_offset": 32})


@pytest.mark.skipif(INTERPRETED, reason="looks at launches, runs none")
@pytest.mark.parametrize("dtype", [torch.bfloat16, *FP8], ids=str)
def test_an_attention_layer_is_three_launches_at_most(dtype):
    """One stores the new entry, one attends, one merges where a request was split."""
    case, options = attention_case(16, ((0, 4096),) * 2, dtype=dtype)
    q, view, table, start, stop = case
    out = torch.empty(*q.shape[:2], options["head_size_v"], dtype=q.dtype)
    where = {"scale": options["scale"], "v_offset": options["v_offset"], "arch": 90}
    new = torch.empty(2, view.shape[1], view.shape[3], dtype=q.dtype)
    write = ops().write_launch(view, torch.zeros(2), torch.zeros(2), new)
    for chunk, launches in ((8192, 1), (512, 2)):
        plan = ops().prepare(view, table, start, stop, chunk=chunk)
        found = ops().attention_launches(q, view, table, plan, out, **where)
        assert len(found) == launches
        assert len([write, *found]) <= 3
    for kind in ("mamba1", "mamba2", "gdn", "kda"):
        _, parts, rows, inputs = state_case(kind, torch.float32)
        assert len(ops().state_launches(kind, parts, rows, inputs)[0]) == 2


@pytest.mark.skipif(INTERPRETED, reason="once is enough")
def test_keys_that_no_program_holds_are_refused_before_they_are_launched():
    """DeepSeek-V4's compressors: float32 vectors of 1,024 and more go to torch, and it says why."""
    q = torch.empty(1, 4, 1024)
    view = torch.empty(2, 1, 4, 1024)
    assert "do not fit" in ops().can_attend(q, view, 1024, 0)
    assert ops().can_attend(torch.empty(1, 4, 128), torch.empty(2, 1, 4, 256), 128, 128) is None


@pytest.mark.skipif(INTERPRETED, reason="this is the process that interprets")
def test_triton_kernels_in_the_interpreter():
    """The tests above that need it, in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 23, done.stdout[-300:]
