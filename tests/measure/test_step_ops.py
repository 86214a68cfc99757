"""What a step asks of a card, without one: no operation that waits for the host, few launches a layer, and the
error that two-byte products make there.

Launches are written down instead of run; everything else of a step runs as it would beside them.
"""

from collections import Counter
from importlib.util import find_spec

import pytest
import torch
from kernel_cases import TOLERANCE, attention_case
from torch.utils._python_dispatch import TorchDispatchMode

from decodebench.cache.small import small_cache
from decodebench.measure.kernels import reference
from decodebench.measure.step import prepare_step
from decodebench.study import gpu_gate

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed (optional extra)"
)

#: a kind of layer each, and every way in which a cache stores its numbers
STEPS = [
    ("llama-3.1-8b", {}),
    ("llama-3.1-8b", {"kv_cache_dtype": "fp8"}),
    ("llama-3.1-8b", {"dtype": "float32"}),
    ("gpt-oss-20b", {}),
    ("deepseek-v3", {}),
    ("jamba-v0.1", {}),
    ("nemotron-h-8b", {}),
    ("qwen3-next-80b-a3b", {}),
    ("kimi-linear-48b-a3b", {}),
    ("lfm2-1.2b", {}),
]

#: what makes views and room for results: nothing that reads a tensor on the host or copies to the device
ALLOWED = {"empty", "view", "transpose", "permute", "select", "slice", "unsqueeze", "squeeze", "as_strided"}
ALLOWED |= {"alias", "expand", "detach", "reshape", "_reshape_alias", "_unsafe_view", "unbind", "split"}


class Seen(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[function._schema.name.removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))


@needs_triton
@pytest.mark.parametrize(("model", "options"), STEPS, ids=lambda x: str(x))
def test_a_step_waits_for_no_host_and_launches_little(model, options, monkeypatch):
    from decodebench.cache.triton_launch import Launch
    from decodebench.measure.kernels import triton_ops

    launched = []
    monkeypatch.setattr(Launch, "run", lambda launch: launched.append(launch))
    monkeypatch.setattr(triton_ops, "why_not", lambda device: None)
    cache, batch = small_cache(model, requests=2, context=[70, 33], layers=1, values=None, **options)
    step = prepare_step(cache, batch, "triton")
    step()  # buffers for parts are made by the first one, before a graph is captured
    for layer in step.layers:
        launched.clear()
        with Seen() as seen:
            layer.run()
        assert layer.fallback is None, layer.fallback
        assert set(seen.names) <= ALLOWED, f"{layer.work.layer}: {set(seen.names) - ALLOWED}"
        most = 2 if cache.layout.layer_specs[layer.work.layer].holds_state else 3
        assert 1 <= len(launched) <= most, f"{layer.work.layer}: {len(launched)} launches"


def on_a_card(case, options, compute, tokens=64):
    """Attention as the kernel does it: products of two-byte numbers, sums in float32, a tile at a time."""
    q, view, table, start, stop = case
    group = q.shape[1] // view.shape[1]
    size, at = options["head_size_v"], options["v_offset"]
    out = torch.empty(*q.shape[:2], size, dtype=torch.float32)
    for i, (first, last) in enumerate(zip(start.tolist(), stop.tolist())):
        positions = torch.arange(first, last)
        rows = view[table[i, positions // view.shape[2]].long(), :, positions % view.shape[2]]
        rows = rows.float().to(compute).float().transpose(0, 1).repeat_interleave(group, 0)
        scores = torch.einsum("hd,htd->ht", q[i].to(compute).float(), rows[..., : q.shape[-1]])
        scores = scores * options["scale"]
        top = torch.full((q.shape[1], 1), float("-inf"))
        total, acc = torch.zeros(q.shape[1], 1), torch.zeros(q.shape[1], size)
        for tile in range(0, last - first, tokens):
            part = scores[:, tile : tile + tokens]
            higher = torch.maximum(top, part.max(1, keepdim=True).values)
            keep, p = torch.exp(top - higher), torch.exp(part - higher)
            values = rows[:, tile : tile + tokens, at : at + size]
            acc = acc * keep + torch.einsum("ht,htd->hd", p.to(compute).float(), values)
            total, top = total * keep + p.sum(1, keepdim=True), higher
        out[i] = acc / total
    return out.to(q.dtype)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
@pytest.mark.parametrize("ranges", [((0, 450), (33, 700)), ((0, 5), (0, 64))], ids=str)
def test_tolerances_are_what_two_byte_products_need_and_no_more(dtype, ranges):
    """Probabilities and the output are rounded, each to half a unit of the last place: theory, then the tolerance.

    The interpreter computes products of two bytes in four, so its agreement says nothing of this error.
    """
    case, options = attention_case(16, ranges, heads=2, group=4, dtype=dtype)
    compute = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    want = reference.attend(*case, **options)
    norm = want.norm()
    error = float((on_a_card(case, options, compute).double() - want).norm() / norm)
    magnitudes = reference.attend(case[0], _positive(case[1], options), *case[2:], **options)
    half = torch.finfo(compute).eps / 2
    theory = half * float(magnitudes.norm() / norm) + torch.finfo(case[0].dtype).eps / 2
    if dtype.itemsize == 1:  # queries of bfloat16 lose nothing in float16 after they were scaled to 1
        theory += half
    assert error <= theory
    assert 2 * error < TOLERANCE[case[0].dtype] <= gpu_gate.TOLERANCE
    lost = (case[0], case[1], case[2], case[3], case[4] - 1)  # the newest token, not seen
    assert float((reference.attend(*lost, **options) - want).norm() / norm) > gpu_gate.TOLERANCE


def _positive(view, options):
    """The same keys, and values without their signs: what rounding errors of each size add up to at most."""
    at, end = options["v_offset"], options["v_offset"] + options["head_size_v"]
    wide = view.float()
    wide[..., at:end] = wide[..., at:end].abs()
    return wide.to(view.dtype)
