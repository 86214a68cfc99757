"""Compile the Triton kernels for architectures that are not here: what would not build, or not fit.

``python -m decodebench.measure.kernels.compile_ahead`` prints the table. Needs Triton and no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from decodebench.cache import triton_rows
from decodebench.measure.kernels import triton_ops

#: architecture → shared memory one block may ask for, in bytes (CUDA programming guide, opt-in maximum)
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}

_POINTERS = {tl.float32: "*fp32", tl.bfloat16: "*bf16", tl.float16: "*fp16"}


@dataclass(frozen=True)
class Compiled:
    """One kernel variant built for one architecture."""

    kernel: str
    variant: str
    arch: int
    shared_bytes: int
    limit_bytes: int
    seconds: float

    @property
    def fits(self) -> bool:
        return self.shared_bytes <= self.limit_bytes


def _attention(group: int, dk: int, dv: int, v_offset: int, dtype, fp8: str = "", splits: int = 8) -> tuple:
    size = 4 if dtype == tl.float32 else 2
    shape = triton_ops.attention_shape(group, dk, dv, v_offset, size, fp8)
    pointers = {
        "q_ptr": _POINTERS[dtype],
        "kv_ptr": "*u8" if fp8 else _POINTERS[dtype],
        "table_ptr": "*i32",
        "start_ptr": "*i64",
        "stop_ptr": "*i64",
        "part_ptr": "*fp32",
        "lse_ptr": "*fp32",
        "scale": "fp32",
    }
    integers = ("entries", "table_width", "kv_block_stride", "kv_head_stride", "kv_entry_stride")
    signature = pointers | dict.fromkeys(integers, "i64")
    constants = shape | {"KV_HEADS": 8, "COMPUTE": dtype, "SPLITS": splits}
    return triton_ops.attention_split, signature, constants, triton_ops.launch_options(shape)


def _state(kernel, pointers: str, integers: str, floats: str = "", state=tl.bfloat16, **constants) -> tuple:
    signature = {"state_ptr": _POINTERS[state], "rows_ptr": "*i64"}
    signature |= dict.fromkeys((f"{name}_ptr" for name in pointers.split()), "*fp32")
    signature |= dict.fromkeys(integers.split(), "i64") | dict.fromkeys(floats.split(), "fp32")
    return kernel, signature, constants, {}


def _rows(bits: str, noise: bool) -> tuple:
    integers = "columns tiles layer_stride block_stride shift shift_of_layer shift_of_block period"
    signature = {"target_ptr": bits, "ids_ptr": "*i64", "bank_ptr": bits, "number": "i32"}
    constants = {"NOISE": noise, "TILE": triton_rows.TILE}
    return triton_rows.fill_kernel, signature | dict.fromkeys(integers.split(), "i64"), constants, {}


def variants() -> dict[str, tuple]:
    """Name → (kernel, signature, constants, options): every shape class that real models bring."""
    bf16, fp16, fp32 = tl.bfloat16, tl.float16, tl.float32
    delta = {"pointers": "qkv g beta out", "integers": "row_stride channels key_heads", "floats": "q_scale"}
    mamba2 = {"pointers": "xbc dt a d out", "integers": "row_stride channels groups"}
    return {
        "attention bf16 4×128": _attention(4, 128, 128, 128, bf16),
        "attention fp16 1×64": _attention(1, 64, 64, 64, fp16),
        "attention fp32 8×128": _attention(8, 128, 128, 128, fp32),
        "attention bf16 2×256": _attention(2, 256, 256, 256, bf16),
        "attention fp32 2×256": _attention(2, 256, 256, 256, fp32),
        "attention bf16 16×192/128": _attention(16, 192, 128, 192, bf16),
        "attention e4m3 4×128": _attention(4, 128, 128, 128, bf16, "e4m3"),
        "attention e5m2 4×96": _attention(4, 96, 96, 96, fp16, "e5m2"),
        "MLA bf16 128×576/512": _attention(128, 576, 512, 0, bf16),
        "MLA fp32 16×576/512": _attention(16, 576, 512, 0, fp32),
        "MLA e4m3 128×576/512": _attention(128, 576, 512, 0, bf16, "e4m3"),
        "merge 8×128": (
            triton_ops.attention_merge,
            {"part_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16"},
            {"DV": 128, "DV_TILE": 128, "SPLITS": 8},
            {},
        ),
        "merge 64×512": (
            triton_ops.attention_merge,
            {"part_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16"},
            {"DV": 512, "DV_TILE": 512, "SPLITS": 64},
            {"num_warps": 8},
        ),
        "conv bf16": _state(
            triton_ops.conv_update,
            "x weight bias out",
            "row_stride channels",
            LENGTH=3,
            TAPS=3,
            SILU=True,
            TILE=1024,
        ),
        "mamba1 bf16": _state(
            triton_ops.mamba1_update, "x dt a b c d out", "row_stride channels", N=16, N_TILE=16, TILE=256
        ),
        "mamba2 fp32": _state(
            triton_ops.mamba2_update, **mamba2, state=fp32, HEADS=128, P=64, N=128, N_TILE=128, TILE=32
        ),
        "mamba2 bf16": _state(triton_ops.mamba2_update, **mamba2, HEADS=48, P=64, N=128, N_TILE=128, TILE=32),
        "gdn bf16": _state(
            triton_ops.delta_update,
            **delta,
            HEADS=32,
            DV=128,
            DK=128,
            DK_TILE=128,
            TILE=32,
            PER_CHANNEL=False,
        ),
        "kda fp32": _state(
            triton_ops.delta_update,
            **delta,
            state=fp32,
            HEADS=32,
            DV=128,
            DK=128,
            DK_TILE=128,
            TILE=32,
            PER_CHANNEL=True,
        ),
        "fill constant fp32": _rows("*i32", noise=False),
        "fill noise bf16": _rows("*i16", noise=True),
        "fill noise fp8": _rows("*u8", noise=True),
    }


def compile_ahead(
    archs: Iterable[int] = (80, 90, 100), names: Iterable[str] | None = None, aligned: bool = True
) -> list[Compiled]:
    """Build the named variants (default all) for each architecture. Compiler errors are raised.

    ``aligned``: pointers and strides are said to be multiples of 16, as a launch says of real pages;
    loads are then asynchronous and take more shared memory. False: nothing is known (odd strides).
    """
    built = []
    for name in names or variants():
        kernel, signature, constants, options = variants()[name]
        full = {argument: signature.get(argument, "constexpr") for argument in kernel.arg_names}
        hinted = [i for i, kind in enumerate(full.values()) if kind.startswith("*") or kind == "i64"]
        attributes = {(i,): [["tt.divisibility", 16]] for i in hinted} if aligned else {}
        for arch in archs:
            start = time.perf_counter()
            source = ASTSource(kernel, full, constexprs=constants, attrs=attributes)
            result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
            seconds = time.perf_counter() - start
            shared = result.metadata.shared
            built.append(Compiled(kernel.fn.__name__, name, arch, shared, SHARED_LIMIT[arch], seconds))
    return built


def main() -> None:
    print(f"Triton {triton.__version__}; shared memory in KiB of what one block may ask for")
    print(f"{'variant':28s}" + "".join(f"{'sm_' + str(arch):>14s}" for arch in SHARED_LIMIT))
    for name in variants():
        row = compile_ahead(names=[name])
        cells = (f"{c.shared_bytes >> 10}/{c.limit_bytes >> 10}{'' if c.fits else ' TOO BIG'}" for c in row)
        print(f"{name:28s}" + "".join(f"{cell:>14s}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
