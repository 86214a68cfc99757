"""Random shapes for every decode kernel against float64, and single flipped bytes for the audit.

    python tests/support/random_kernels.py --shapes 2000 --flips 1000 --seed 0

Attention: groups of 1 to 128 query heads, numbers of heads that are no powers of two, blocks of 1, 3, 16,
1,040 and other sizes, contexts of 1, windows, both float8 kinds, latent caches, pages with gaps between
them. States: every kind, dtype and shape of rows. Everything that a step may not read is 0xFF bytes, which
is NaN in every floating type, and what it may not write is compared byte by byte. Flips: one bit pattern of
one byte of one required page, of a fill with constants and of one with normal values; the audit of the
bytes has to name that page and no other.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from kernel_cases import FP8, TOLERANCE, attention_case

from decodebench.cache.readback import FILLED, inspect_pages
from decodebench.cache.tensors import Cache, allocate
from decodebench.cache.values import Constant, Normal, Values
from decodebench.cache.write import fill_blocks
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.plan import from_groups
from decodebench.measure.kernels import cpp, reference, torch_ops
from decodebench.models.specs import FullAttentionSpec, MambaSpec, MLAAttentionSpec

BACKENDS = {"cpp": cpp, "torch": torch_ops}
BLOCKS = (1, 3, 7, 16, 48, 64, 1040)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 20, 24, 31, 32, 33, 48, 64, 65, 96, 127, 128)
STATES = ("mamba1", "mamba2", "gdn", "kda", "short_conv", "linear")


def attention_shape(draw: random.Random) -> tuple[dict, torch.dtype]:
    """Arguments of ``attention_case``, and the dtype of the queries."""
    entries = draw.choice(BLOCKS)
    heads = draw.choice((1, 2, 3, 5, 6)) if entries < 1000 else 1
    latent = draw.random() < 0.2
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16, *FP8))
    longest = draw.choice((1, 2, 17, 90, 200)) if entries < 1000 else draw.choice((1, 1040, 1041, 2100))
    ranges = []
    for _ in range(draw.randint(1, 4)):
        stop = draw.choice((1, longest, draw.randint(1, longest)))
        start = draw.choice((0, 0, max(0, stop - 1), draw.randint(0, stop)))  # full, one token, a window
        ranges.append((start, stop))
    dk = 16 * draw.randint(1, 16 if entries < 1000 else 4)
    dv = draw.choice((dk, 16 * draw.randint(1, 16 if entries < 1000 else 4)))
    shape = {"heads": heads, "group": draw.choice(GROUPS), "dk": dk, "dv": dv}
    if latent:
        dk = draw.choice((576, 16 * draw.randint(2, 40))) if entries < 1000 else 96
        shape |= {"heads": 1, "dk": dk, "dv": draw.choice((16 * draw.randint(1, dk // 16), dk - 16))}
    shape |= {"dtype": dtype, "latent": latent, "runs": draw.random() < 0.3}
    shape |= {"order": draw.choice(("LBNHC", "BLHNC")), "pad_bytes": 16 * draw.randint(0, 4)}
    queries = draw.choice((torch.bfloat16, torch.float32)) if dtype in FP8 else dtype
    return shape | {"entries": entries, "ranges": tuple(ranges)}, queries


def check_attention_shape(shape: dict, queries: torch.dtype) -> None:
    """Every backend that takes the shape against float64. Raises ``AssertionError`` with the backend's name."""
    case, options = attention_case(**shape)
    case = (case[0].to(queries), *case[1:])
    want = reference.attend(*case, **options)
    assert not want.isnan().any(), "the specification itself read poison"
    for name, backend in BACKENDS.items():
        if backend.can_attend(case[0], case[1], options["head_size_v"], options["v_offset"]):
            continue
        got = backend.attend(*case, **options)
        error = ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
        assert error <= TOLERANCE[queries], f"{name}: relative error {error:.1e}"  # NaN is no less


def state_shape(draw: random.Random) -> tuple[str, dict[str, tuple[int, ...]], torch.dtype, int, int]:
    """(kind, shapes of the parts, dtype of the recurrent state, requests, bytes between pages)."""
    kind = draw.choice(STATES)
    sixteen = lambda most: 16 * draw.randint(1, most)  # noqa: E731
    heads, taps = draw.choice((1, 2, 3, 5, 8)), draw.randint(1, 4)
    if kind == "mamba1":
        channels = sixteen(12)
        shapes = {"conv": (taps, channels), "ssm": (channels, sixteen(4))}
    elif kind == "mamba2":
        width, n, groups = draw.randint(1, 5) * 16, sixteen(8), draw.choice((1, heads))
        shapes = {"conv": (taps, heads * width + 2 * groups * n), "ssm": (heads, width, n)}
    elif kind in ("gdn", "kda"):
        dv, dk = sixteen(8), sixteen(8)
        key_heads = heads if kind == "kda" else draw.choice((1, heads))
        shapes = {"conv": (taps, 2 * key_heads * dk + heads * dv), "recurrent": (heads, dv, dk)}
    elif kind == "linear":
        shapes = {"recurrent": (heads, sixteen(4), sixteen(4))}
    else:
        shapes = {"conv": (taps, sixteen(40))}
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
    return kind, shapes, dtype, draw.randint(1, 5), 16 * draw.randint(0, 4)


def check_state_shape(kind, shapes, dtype, batch, pad_bytes, seed) -> None:
    """Output, the states left, and every byte outside them, for every backend that takes the shape."""
    blocks = batch + 3
    sizes = {n: prod(s) * (2 if n == "conv" else dtype.itemsize) for n, s in shapes.items()}
    rows = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))[:batch]

    def made():
        values = torch.Generator().manual_seed(seed)
        raw = torch.full((blocks, sum(sizes.values()) + pad_bytes), 0xFF, dtype=torch.uint8)
        parts, at = {}, 0
        for name, shape in shapes.items():
            part_dtype = torch.bfloat16 if name == "conv" else dtype
            parts[name] = raw[:, at : at + sizes[name]].view(part_dtype).unflatten(1, shape)
            parts[name][rows] = torch.randn(batch, *shape, generator=values).to(part_dtype)
            at += sizes[name]
        return raw, parts, reference.state_inputs(kind, parts, batch, values)

    raw_want, exact, inputs = made()
    want = reference.state_step(kind, exact, rows, inputs)
    for name, backend in BACKENDS.items():
        if name == "cpp" and backend.can_update(kind, made()[1]):
            continue
        raw, parts, _ = made()
        got = backend.state_step(kind, parts, rows, inputs).reshape(want.shape)
        error = ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
        assert error <= 1e-5, f"{name}: relative error {error:.1e}"
        for part, values in parts.items():
            a, b = values[rows].double(), exact[part][rows].double()
            left = ((a - b).norm() / b.norm().clamp_min(1e-30)).item()
            assert left <= TOLERANCE[values.dtype], f"{name}: {part} left with a relative error of {left:.1e}"
        others = [b for b in range(blocks) if b not in rows.tolist()]
        assert (raw[others] == 0xFF).all(), f"{name}: wrote a row of somebody else"
        assert (raw[:, sum(sizes.values()) :] == 0xFF).all(), f"{name}: wrote between the pages"


def filled_cache(draw: random.Random, values: Values) -> tuple[Cache, list[list[int]]]:
    """A small cache of one group of any kind, filled, and the blocks of each group that were."""
    dtype = draw.choice(("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"))
    tokens, heads, size = draw.choice((1, 3, 16)), draw.randint(1, 3), draw.choice((8, 16, 40))
    attention = FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=size, dtype=dtype)
    latent = MLAAttentionSpec(block_size=tokens, num_kv_heads=1, head_size=draw.choice((24, 72)), dtype=dtype)
    state = MambaSpec(
        block_size=64,
        shapes=((3, draw.choice((8, 24))), (draw.randint(1, 5), 8)),
        dtypes=("bfloat16", draw.choice(("float32", "bfloat16"))),
    )
    spec = draw.choice((attention, latent, state))
    names = tuple(f"layers.{i}" for i in range(draw.randint(1, 3)))
    layout = from_groups((KVCacheGroupSpec(names, (spec,) * len(names), spec),), 12)
    cache = allocate(layout)
    blocks = sorted(draw.sample(range(1, 12), draw.randint(1, 8)))
    fill_blocks(cache, [blocks], values)
    return cache, [blocks]


def check_flip(draw: random.Random, values: Values) -> None:
    """One byte of one filled page, changed: the audit finds that page, and calls every other one filled."""
    cache, (blocks,) = filled_cache(draw, values)
    group = cache.layout.groups[0]
    layer, block = draw.randrange(len(group.layer_names)), draw.choice(blocks)
    page = cache.pages(group.layer_names[layer])[block]
    at = draw.randrange(group.kv_cache_spec.unpadded_page_size_bytes)
    assert (inspect_pages(cache, 0, values).states[:, blocks] == FILLED).all(), "filled before the flip"
    page[at] ^= draw.randint(1, 255)
    states = inspect_pages(cache, 0, values).states
    assert states[layer, block] != FILLED, f"byte {at} of {len(page)} changed unseen"
    states[layer, block] = FILLED
    assert (states[:, blocks] == FILLED).all(), "another page was called wrong"


def check_case(number: int, seed: int) -> str:
    """One random shape; its kind. Raises ``AssertionError`` that names the shape."""
    draw = random.Random(f"{seed}/{number}")
    if draw.random() < 0.65:
        shape, queries = attention_shape(draw)
        return _named("attention", check_attention_shape, shape, queries)
    kind, *rest = state_shape(draw)
    return _named(kind, check_state_shape, kind, *rest, number)


def _named(kind: str, check: Callable[..., None], *arguments) -> str:
    try:
        check(*arguments)
    except Exception as error:
        raise AssertionError(f"{kind} {arguments}: {type(error).__name__}: {error}") from error
    return kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", type=int, default=2000)
    parser.add_argument("--flips", type=int, default=1000, help="for constant and for normal values each")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # small shapes gain nothing from more
    began, seen, failed = time.perf_counter(), Counter(), []
    for number in range(asked.shapes):
        try:
            seen[check_case(number, asked.seed)] += 1
        except AssertionError as error:
            failed.append(number)
            print(f"shape {number}: {error}", flush=True)
    print(f"{asked.shapes:,} shapes, seed {asked.seed}: {len(failed)} failed; {dict(seen)}")
    for values in (Constant(0.015), Normal(0.015, 0.02)):
        missed = 0
        for number in range(asked.flips):
            try:
                check_flip(random.Random(f"{asked.seed}/flip/{number}"), values)
            except AssertionError as error:
                missed += 1
                print(f"flip {number}: {error}", flush=True)
        failed += [asked.flips] * missed
        name = type(values).__name__.lower()
        print(f"{asked.flips - missed:,} of {asked.flips:,} flipped bytes found, {name} values")
    print(f"{time.perf_counter() - began:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
