"""Small cases for the decode kernels: poisoned pages in which only what a step may read is filled."""

from math import prod

import torch

from decodebench.measure.kernels import reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def pages(blocks, entries, heads, width, dtype, order="LBNHC", pad_bytes=0):
    """A poisoned paged cache as [blocks, heads, entries, width], pages ``pad_bytes`` apart."""
    size = torch.empty(0, dtype=dtype).element_size()
    page = entries * heads * width * size + pad_bytes
    raw = torch.full((blocks, page), 0xFF, dtype=torch.uint8)
    typed = raw.view(dtype)[:, : entries * heads * width]
    if order == "LBNHC":
        return typed.unflatten(1, (entries, heads, width)).transpose(1, 2)
    return typed.unflatten(1, (heads, entries, width))


def fill(view, table, start, stop, seed=0):
    """Random values at exactly the positions [start, stop) of each request; the rest stays poison."""
    random = torch.Generator().manual_seed(seed)
    entries = view.shape[2]
    for row, a, b in zip(table.tolist(), start.tolist(), stop.tolist()):
        positions = torch.arange(a, b)
        blocks = torch.tensor(row)[positions // entries]
        values = torch.randn(len(positions), view.shape[1], view.shape[3], generator=random)
        reference.write_kv(view, blocks, positions % entries, values)


def attention_case(
    entries,
    ranges,
    *,
    heads=2,
    group=3,
    dk=64,
    dv=64,
    latent=False,
    dtype=torch.bfloat16,
    order="LBNHC",
    pad_bytes=0,
    runs=False,
):
    width = dk if latent else dk + dv
    per_request = [-(-b // entries) for _, b in ranges]
    total = 1 + sum(per_request)
    shuffled = 1 + torch.randperm(total - 1, generator=torch.Generator().manual_seed(5))
    ids = torch.arange(1, total) if runs else shuffled
    table = torch.zeros(len(ranges), max(per_request), dtype=torch.int32)
    for i, n in enumerate(per_request):
        table[i, :n] = ids[sum(per_request[:i]) : sum(per_request[: i + 1])]
        table[i, : ranges[i][0] // entries] = 0  # blocks behind a window are null: block 0 stays poison
    start, stop = (torch.tensor(x) for x in zip(*ranges))
    view = pages(total, entries, heads, width, dtype, order, pad_bytes)
    fill(view, table, start, stop)
    q_type = torch.bfloat16 if dtype in FP8 else dtype
    q = torch.randn(len(ranges), heads * group, dk, generator=torch.Generator().manual_seed(9)).to(q_type)
    options = {"scale": dk**-0.5, "head_size_v": dv, "v_offset": 0 if latent else dk}
    return (q, view, table, start, stop), options


def check_attention(backend, case, options):
    q = case[0]
    want = reference.attend(*case, **options)
    got = backend.attend(*case, **options)
    assert got.dtype == q.dtype and got.shape == want.shape
    assert not torch.isnan(want).any(), "the specification itself read poison"
    error = ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
    assert error <= TOLERANCE[q.dtype], f"{error:.1e}"


SHAPES = {
    "mamba1": {"conv": (3, 96), "ssm": (96, 16)},
    "mamba2": {"conv": (3, 4 * 32 + 2 * 2 * 16), "ssm": (4, 32, 16)},
    "gdn": {"conv": (3, 2 * 2 * 32 + 4 * 16), "recurrent": (4, 16, 32)},
    "kda": {"conv": (3, 3 * 2 * 32), "recurrent": (2, 32, 32)},
    "short_conv": {"conv": (2, 64)},
    "linear": {"recurrent": (2, 16, 16)},
}


def state_case(kind, state_dtype, pad_bytes=48, blocks=6, batch=2, speculative=0):
    """Poisoned pages [conv | state | padding]; only the batch's rows hold values."""
    shapes = dict(SHAPES[kind])
    if "conv" in shapes:
        shapes["conv"] = (shapes["conv"][0] + speculative, shapes["conv"][1])
    sizes = {n: prod(s) * (2 if n == "conv" else state_dtype.itemsize) for n, s in shapes.items()}
    raw = torch.full((blocks, sum(sizes.values()) + pad_bytes), 0xFF, dtype=torch.uint8)
    parts, at = {}, 0
    rows = torch.tensor([4, 1])[:batch]
    random = torch.Generator().manual_seed(3)
    for name, shape in shapes.items():
        dtype = torch.bfloat16 if name == "conv" else state_dtype
        parts[name] = raw[:, at : at + sizes[name]].view(dtype).unflatten(1, shape)
        parts[name][rows] = torch.randn(batch, *shape, generator=random).to(dtype)
        at += sizes[name]
    return raw, parts, rows, reference.state_inputs(kind, parts, batch, random)
