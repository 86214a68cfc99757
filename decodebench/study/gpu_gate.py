"""What must be right on a card before anything is timed there: each check small, named, and fatal.

Everything is compared with ``kernels/reference.py`` or with torch itself; a check that fails stops the
run with its name, and no figure is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from decodebench.cache.run import fill_cache
from decodebench.cache.small import small_cache
from decodebench.cache.values import Normal
from decodebench.coverage.from_bytes import audit
from decodebench.errors import DecodebenchError
from decodebench.measure.backends import resolve_backend
from decodebench.measure.kernels import reference
from decodebench.measure.step import compare_with_reference, prepare_step

#: relative error allowed: accumulation in float32, queries and probabilities in two bytes
TOLERANCE = 2e-2


class GateFailed(DecodebenchError):
    """A check that did not hold: names the case. Nothing was timed."""


def checks(device: str, backend: str | None) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, function that raises ``GateFailed``) of every check, the most telling first."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2):
        for entries in (16, 7, 256):
            for chunk in (4096, 96):
                name = (
                    f"attention {str(dtype).removeprefix('torch.')}, blocks of {entries}, "
                    f"{'one item' if chunk == 4096 else 'several items'} a request"
                )
                yield name, _attention(name, device, backend, dtype, entries, chunk)
    for model, options in (
        ("llama-3.1-8b", {"memory_order": "BLHNC"}),
        ("gemma-3-1b", {}),
        ("deepseek-v3", {}),
        ("tiny-nemotron-h", {}),
        ("jamba-v0.1", {}),
        ("qwen3-next-80b-a3b", {}),
        ("kimi-linear-48b-a3b", {}),
        ("llama-3.1-8b", {"kv_cache_dtype": "fp8"}),
    ):
        name = " ".join(["step and what it leaves:", model, *(f"{k}={v}" for k, v in options.items())])
        yield name, _model(name, device, backend, model, options)
    yield "fill and audit, a planted byte found", _fill_and_audit(device)
    yield "poison reaches the output", _poison(device, backend)
    if device.startswith("cuda"):
        yield (
            "a replayed graph gives the eager output, and no step waits for the host",
            _graph(device, backend),
        )


def _attention(
    name: str, device: str, backend: str | None, dtype: torch.dtype, entries: int, chunk: int
) -> Callable[[], None]:
    def check() -> None:
        module, _ = resolve_backend(backend, device)
        random = torch.Generator().manual_seed(entries + chunk)
        lengths, heads, group, size = (700, 450), 2, 4, 64
        needed = [-(-n // entries) for n in lengths]
        ids = 1 + torch.randperm(sum(needed), generator=random)
        table = torch.zeros(2, max(needed), dtype=torch.int32)
        table[0, : needed[0]], table[1, : needed[1]] = ids[: needed[0]], ids[needed[0] :]
        values = torch.randn(len(ids) + 1, entries, heads, 2 * size, generator=random) * 0.5
        view = values.to(dtype).transpose(1, 2)
        two_bytes = torch.bfloat16 if dtype.itemsize == 1 else dtype
        q = torch.randn(2, heads * group, size, generator=random).to(two_bytes)
        case = (q, view, table, torch.tensor([0, 33]), torch.tensor(lengths))
        shape = {"scale": size**-0.5, "head_size_v": size, "v_offset": size}
        want = reference.attend(*case, **shape)
        there = [_move(x, device) for x in case]
        cut: dict[str, Any] = {"chunk": chunk} if module.NAME == "triton" else {}
        plan = module.prepare(*there[1:], **cut)
        got = module.attend(*there, **shape, plan=plan)
        _close(name, got.cpu().double(), want)

    return check


def _move(x: torch.Tensor, device: str) -> torch.Tensor:
    """On the device with its strides; float8 as bytes, which every build can copy."""
    if x.dtype.itemsize == 1:
        return x.view(torch.uint8).to(device).view(x.dtype)
    return x.to(device)


def _close(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    error = float((got - want).norm() / want.norm().clamp_min(1e-30))
    if not error <= tolerance:  # NaN fails as well
        raise GateFailed(f"{name}: relative error {error:.1e}, allowed {tolerance:.0e}")


def _model(
    name: str, device: str, backend: str | None, model: str, options: dict[str, Any]
) -> Callable[[], None]:
    def check() -> None:
        cache, batch = small_cache(model, requests=2, context=[600, 333], layers=1, device=device, **options)
        layers = [
            x for x in cache.layout.layer_names if not cache.layout.layer_specs[x].parts()[0].zeros_only
        ]
        for layer, errors in compare_with_reference(cache, batch, backend, layers=layers).items():
            for what, error in zip(("output", "bytes left"), errors):
                if not error <= TOLERANCE:
                    raise GateFailed(
                        f"{name}, layer {layer}: {what} off by {error:.1e}, allowed {TOLERANCE:.0e}"
                    )

    return check


def _fill_and_audit(device: str) -> Callable[[], None]:
    def check() -> None:
        values = Normal()
        cache, batch = small_cache("tiny-nemotron-h", requests=2, context=200, values=None, device=device)
        report = fill_cache(cache, batch, values)
        found = audit(cache, batch, values, report)
        if found.coverage != 1 or int(found.groups["wrong"].sum()):
            raise GateFailed(f"fill and audit: {found.verdict}")
        specs = cache.layout.layer_specs
        layer = next(name for name in cache.layout.layer_names if not specs[name].holds_state)
        block = batch.block_table(cache.layout.group_of[layer])[0][0]
        cache.pages(layer)[block, 1] ^= 0x55
        found = audit(cache, batch, values, report)
        wrong = int(found.groups["wrong"].sum())
        if wrong != 1:
            raise GateFailed(f"fill and audit: one byte was changed, the audit calls {wrong} pages wrong")

    return check


def _poison(device: str, backend: str | None) -> Callable[[], None]:
    def check() -> None:
        cache, batch = small_cache(
            "tiny-llama", requests=1, context=100, layers=1, values=None, device=device
        )
        outputs = prepare_step(cache, batch, backend).outputs()
        if not all(bool(out.isnan().any()) for out in outputs.values()):
            raise GateFailed("poison reaches the output: a step over memory nobody filled gave numbers")

    return check


def _graph(device: str, backend: str | None) -> Callable[[], None]:
    def check() -> None:
        cache, batch = small_cache("llama-3.1-8b", requests=4, context=1000, layers=1, device=device)
        step = prepare_step(cache, batch, backend)
        eager = {name: out.clone() for name, out in step.outputs().items()}
        torch.cuda.synchronize(device)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        except RuntimeError as error:
            raise GateFailed(f"a step waits for the host: {str(error).splitlines()[0]}") from error
        finally:
            torch.cuda.set_sync_debug_mode(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(graph):
            captured = step.outputs()
        graph.replay()
        torch.cuda.synchronize(device)
        for name, out in captured.items():
            _close(f"a replayed graph, layer {name}", out.double(), eager[name].double(), 1e-6)

    return check
