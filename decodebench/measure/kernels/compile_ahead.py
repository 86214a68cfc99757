"""Build the Triton kernels for cards that are not here, exactly as a launch would, and judge the code.

    python -m decodebench.measure.kernels.compile_ahead --out data/results/gpu-modelled.csv

A launch's integers become 32 bits wide, its ones constants, its multiples of 16 known as such; the
binder that Triton itself uses says so here too, so that what is judged is what will run. The command
writes a row a kernel, shape and card: registers, spills, loads ahead, and the time that ``cards``
models for it. Needs Triton and no GPU.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from decodebench.cache import triton_rows
from decodebench.cache.triton_launch import Launch
from decodebench.cache.values import Window
from decodebench.errors import DecodebenchError
from decodebench.layout.plan import plan
from decodebench.measure.kernels import splits, triton_ops
from decodebench.measure.kernels.cards import (
    CHIPS,
    NODE_SECONDS,
    REACHABLE,
    Chip,
    bytes_ahead,
    loop_seconds,
    programs_per_multiprocessor,
)
from decodebench.measure.kernels.machine_code import MachineCode, read
from decodebench.measure.kernels.reference import state_inputs
from decodebench.measure.kernels.splits import Card, best_chunk, items, iterations
from decodebench.models.load import list_models
from decodebench.models.specs import AttentionSpec

#: architecture → shared memory one program may ask for, in bytes (CUDA programming guide, opt-in maximum)
SHARED_LIMIT = {chip.sm: chip.program_shared_bytes for chip in CHIPS.values()}


@dataclass(frozen=True)
class Built:
    """A kernel built for one architecture. ``tiles_ahead``: iterations whose loads are on their way."""

    code: MachineCode
    tiles_ahead: float
    seconds: float


def build(launch: Launch, sm: int) -> Built:
    """Compile a launch for an architecture (90 for 9.0) with the specialisation the launch would get."""
    target = GPUTarget("cuda", sm, 32)
    backend = make_backend(target)
    kernel = launch.kernel
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = dict(launch.constants) | dict(launch.options)
    bound, specialised, options = binder(*launch.arguments.values(), **given)
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialised, options)
    start = time.perf_counter()
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=target, options=options.__dict__)
    seconds = time.perf_counter() - start
    code = read(made.asm["cubin"], made.metadata.num_warps, made.metadata.shared)
    return Built(code, _tiles_ahead(made.asm["ttgir"]), seconds)


def _tiles_ahead(ttgir: str) -> float:
    """Buffers of the loop's asynchronous copies, less the one in use; half of one that is issued late.

    A copy that the loop issues only behind its last product overlaps with that product alone.
    """
    rings = [int(n) for n in re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x", ttgir)]
    body = ttgir[ttgir.find("scf.for") :]
    copies = [m.start() for m in re.finditer("ttg.async_copy_global_to_local", body)]
    if not rings or not copies:
        return 0.0
    ahead = min(rings) - 1
    waits = [int(n) for n in re.findall(r"async_wait.*?num = (\d+)", body)]
    return ahead if not waits or waits[0] > 0 else ahead / 2


# -- the shapes that models bring ------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """One attention shape: query heads in all, KV heads, head sizes, latent or not, tokens a block."""

    name: str
    heads: int
    kv_heads: int
    dk: int
    dv: int
    entries: int = 16
    latent: bool = False
    dtype: torch.dtype = torch.bfloat16

    def launches(self, ranges: tuple[tuple[int, int], ...], chip: Chip) -> list[Launch]:
        """The launches of a step over these positions on a card; tensors of no content."""
        width = self.dk if self.latent else self.dk + self.dv
        q_type = torch.float32 if self.dtype == torch.float32 else torch.bfloat16
        blocks = 2 + max(-(-stop // self.entries) for _, stop in ranges)
        page = torch.empty(blocks, self.entries, self.kv_heads, width, dtype=self.dtype, device="meta")
        table = torch.empty(len(ranges), blocks, dtype=torch.int32, device="meta")
        q = torch.empty(len(ranges), self.heads, self.dk, dtype=q_type, device="meta")
        out = torch.empty(len(ranges), self.heads, self.dv, dtype=q_type, device="meta")
        plan = triton_ops.Plan(ranges)
        v_offset = 0 if self.latent else self.dk
        return triton_ops.attention_launches(
            q, page.transpose(1, 2), table, plan, out, scale=1.0, v_offset=v_offset, arch=chip.sm
        )

    @property
    def geometry(self) -> str:
        """What tells this shape from others of its model: "32/8 heads of 128+128, blocks of 16"."""
        sizes = f"{self.dk} (latent, {self.dv})" if self.latent else f"{self.dk}+{self.dv}"
        return f"{self.heads}/{self.kv_heads} heads of {sizes}, blocks of {self.entries}"

    @property
    def token_bytes(self) -> int:
        """Bytes of the cache that one token of one KV head takes."""
        return (self.dk if self.latent else self.dk + self.dv) * self.dtype.itemsize


BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
ATTENTIONS = (
    Attention("llama", 32, 8, 128, 128),
    Attention("llama", 32, 8, 128, 128, dtype=E4M3),
    Attention("llama", 32, 8, 128, 128, dtype=E5M2),
    Attention("llama", 32, 8, 128, 128, dtype=torch.float32),
    Attention("gpt-oss", 64, 8, 64, 64),
    Attention("gemma-3-1b", 4, 1, 256, 256),
    Attention("qwen3-next", 16, 2, 256, 256, entries=544),
    Attention("DeepSeek MLA", 128, 1, 576, 512, entries=64, latent=True),
    Attention("DeepSeek MLA", 128, 1, 576, 512, entries=64, latent=True, dtype=E4M3),
    Attention("kimi MLA", 32, 1, 576, 512, entries=1920, latent=True),
)


@dataclass(frozen=True)
class State:
    """One state layer: its kind, and the shapes of its convolution and its recurrent state."""

    name: str
    kind: str
    conv: tuple[int, int]
    state: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    def launches(self, batch: int) -> list[Launch]:
        """The launches of a step of so many requests; tensors of no content."""
        parts = {"conv": torch.empty(batch + 1, *self.conv, dtype=BF16, device="meta")}
        if self.state:
            name = "ssm" if self.kind.startswith("mamba") else "recurrent"
            parts[name] = torch.empty(batch + 1, *self.state, dtype=self.dtype, device="meta")
        rows = torch.empty(batch, dtype=torch.int64, device="meta")
        tiny = {name: torch.empty(2, *part.shape[1:]) for name, part in parts.items()}
        shapes = state_inputs(self.kind, tiny, 2, torch.Generator(), torch.device("cpu"))
        inputs = {name: torch.empty_like(x, device="meta") for name, x in shapes.items()}
        return triton_ops.state_launches(self.kind, parts, rows, inputs)[0]

    @property
    def geometry(self) -> str:
        """The shapes of its parts: "3×8192, 8192×16"."""
        return ", ".join("×".join(map(str, part)) for part in (self.conv, self.state) if part)

    @property
    def request_bytes(self) -> int:
        """Bytes that one request's step reads, and writes again."""
        recurrent = torch.Size(self.state).numel() * self.dtype.itemsize if self.state else 0
        return self.conv[0] * self.conv[1] * 2 + recurrent


FP32 = torch.float32
STATES = (
    State("jamba", "mamba1", (3, 8192), (8192, 16)),
    State("nemotron-h", "mamba2", (3, 10240), (128, 64, 128), FP32),
    State("qwen3-next", "gdn", (3, 8192), (32, 128, 128)),
    State("kimi", "kda", (3, 12288), (32, 128, 128), FP32),
    State("lfm2", "short_conv", (2, 2048)),
)


def fill_launches() -> dict[str, Launch]:
    """Variant → the launch that fills: a constant or noise, by the width of an element."""
    found = {}
    for bits in (torch.uint8, torch.int16, torch.int32):
        target = torch.empty(32, 64, 32768, dtype=bits, device="meta")
        rows = torch.empty(64, dtype=torch.int32, device="meta")
        bank = torch.empty(8 << 20, dtype=bits, device="meta")
        name = f"{8 * bits.itemsize} bits"
        found[f"constant {name}"] = triton_rows.launch(target, rows, 15478, None)
        window = Window(bank=bank, period=782910, shift=31, shift_of_layer=31, shift_of_block=4099)
        found[f"noise {name}"] = triton_rows.launch(target, rows, None, window)
    return found


def dtype_name(shape: Attention | State) -> str:
    """The dtype of its cache without torch's prefix."""
    return str(shape.dtype).removeprefix("torch.")


def context_text(ranges: tuple[tuple[int, int], ...]) -> str:
    """The lengths of a batch: "4096" where all are alike, else "7x512+1x8192"."""
    lengths = [stop - start for start, stop in ranges]
    if len(set(lengths)) == 1:
        return str(lengths[0])
    return "+".join(f"{lengths.count(n)}x{n}" for n in sorted(set(lengths)))


# -- judged by the model ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Modelled:
    """A step of one layer on a card as its machine code promises it: a row of the table.

    ``kernels``: ``source_hash`` of the kernels, or the commit of kernels that are no more.
    ``geometry``: query and KV heads, head sizes and tokens a block of an attention; a state's shapes.

    ``kernel_share``, ``layer_share``: the time that the bytes need at ``REACHABLE`` of the data sheet's
    bandwidth (for latent attention the products, where they take longer), over the modelled time of
    the main launch, and of all launches with ``NODE_SECONDS`` each.
    """

    kernels: str
    kernel: str
    shape: str
    geometry: str
    dtype: str
    card: str
    batch: int
    context: str
    registers: int
    stack_bytes: int
    shared_kib: float
    programs: int
    loop_instructions: int
    tiles_ahead: float
    kib_ahead: float
    kib_needed: float
    kernel_us: float
    limit_us: float
    kernel_share: float
    layer_share: float


@cache
def _built(attention: Attention, sm: int) -> tuple[Launch, Built]:
    chip = next(c for c in CHIPS.values() if c.sm == sm)
    launch = attention.launches(((0, 4096),) * 8, chip)[0]
    return launch, build(launch, sm)


def attention_step(attention: Attention, chip: Chip, ranges: tuple[tuple[int, int], ...]) -> Modelled:
    """A step of one layer over these positions, modelled."""
    launch, built = _built(attention, chip.sm)
    shape = launch.constants
    tokens, code = shape["TOKENS"], built.code
    head_tiles = -(-shape["GROUP"] // shape["GROUP_TILE"])
    tiles = attention.kv_heads * head_tiles
    tile_bytes = tokens * attention.token_bytes
    part_bytes = 2 * 4 * min(shape["GROUP"], shape["GROUP_TILE"]) * attention.dv
    held = programs_per_multiprocessor(code, chip)
    chunk = best_chunk(ranges, tiles, tokens, Card(chip.multiprocessors, held), part_bytes / tile_bytes)
    work = items(ranges, chunk, tokens)
    programs = [iterations(item, tokens) for item in work for _ in range(tiles)]
    seconds = loop_seconds(code, chip, programs, tile_bytes, head_tiles, built.tiles_ahead)
    split = sum(item.part >= 0 for item in work)
    parts = split * attention.heads * attention.dv * 4 * 2
    merge = NODE_SECONDS + parts / chip.bandwidth if split else 0.0
    cached = sum(stop - start for start, stop in ranges) * attention.kv_heads * attention.token_bytes
    limit = cached / (chip.bandwidth * REACHABLE)
    if attention.latent:
        flops = 2 * attention.heads * (attention.dk + attention.dv) * sum(b - a for a, b in ranges)
        limit = max(limit, flops / (chip.tensor_flops[0] * chip.multiprocessors * chip.clock))
    kib, need = (x / 1024 for x in bytes_ahead(code, chip, tile_bytes, built.tiles_ahead))
    return Modelled(
        source_hash(),
        "attention",
        attention.name,
        attention.geometry,
        dtype_name(attention),
        chip.name,
        len(ranges),
        context_text(ranges),
        code.registers,
        code.stack_bytes,
        round(code.shared_bytes / 1024, 1),
        held,
        len(code.loop.instructions) if code.loop else 0,
        built.tiles_ahead,
        round(kib, 1),
        round(need, 1),
        round(seconds * 1e6, 1),
        round(limit * 1e6, 1),
        round(limit / seconds, 2),
        round(limit / (seconds + merge + NODE_SECONDS), 2),
    )


def state_layer(state: State, chip: Chip, batch: int) -> Modelled:
    """A state layer's step, modelled: every launch takes its bytes' time, its latency, and a node."""
    launches = state.launches(batch)
    moved = 2 * batch * state.request_bytes
    limit = moved / (chip.bandwidth * REACHABLE)
    code = _state_code(state, chip.sm)
    held = programs_per_multiprocessor(code, chip)
    element = state.dtype.itemsize if state.state else 2
    program_bytes = 4096 * element if state.state else 1024 * 2 * state.conv[0]
    ahead, need = held * program_bytes, chip.bandwidth * 650e-9 / chip.multiprocessors
    # what is on its way limits the speed; every launch also waits for its rows, then for its states
    seconds = limit * max(1.0, need / ahead) + len(launches) * 2 * 650e-9
    nodes = len(launches) * NODE_SECONDS
    return Modelled(
        source_hash(),
        state.kind,
        state.name,
        state.geometry,
        dtype_name(state),
        chip.name,
        batch,
        "",
        code.registers,
        code.stack_bytes,
        round(code.shared_bytes / 1024, 1),
        held,
        0,
        0.0,
        round(ahead / 1024, 1),
        round(need / 1024, 1),
        round(seconds * 1e6, 1),
        round(limit * 1e6, 1),
        round(limit / seconds, 2),
        round(limit / (seconds + nodes), 2),
    )


@cache
def _state_code(state: State, sm: int) -> MachineCode:
    return build(state.launches(8)[-1], sm).code


BATCHES = {
    "8 × 4096": ((0, 4096),) * 8,
    "1 × 4096": ((0, 4096),),
    "32 × 4096": ((0, 4096),) * 32,
    "1 × 131072": ((0, 131072),),
    "7 × 512 + 8192": (*(((0, 512),) * 7), (0, 8192)),
}


@cache
def source_hash() -> str:
    """What the kernels and their tiles are written as, in twelve digits: a table of other ones is out of date."""
    files = (triton_ops.__file__, splits.__file__)
    text = "".join(Path(file).read_text() for file in files)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def model_shapes() -> list[Attention]:
    """Every attention shape that a model of ``data/models`` brings and a step takes, each once, plain and fp8."""
    found: dict[Attention, Attention] = {}
    for name in list_models():
        for dtype in ("auto", "fp8"):
            try:
                layout = plan(name, memory="16TiB", kv_cache_dtype=dtype)
            except DecodebenchError:
                continue  # that model takes no such cache
            for layer, spec in layout.layer_specs.items():
                part = spec.parts()[0]
                if not isinstance(spec, AttentionSpec) or part.zeros_only or layout.model is None:
                    continue
                latent = spec.head_size_v == 0
                rank = spec.head_size - 64 if latent and spec.head_size > 64 else spec.head_size
                heads = layout.model.query_heads(layer, 1)
                entries, kv_heads, _ = part.shape
                kind = getattr(torch, part.dtype)
                dv = rank if latent else spec.head_size_v or 0
                shape = Attention(name, heads, kv_heads, spec.head_size, dv, entries, latent, kind)
                q = torch.empty(1, heads, spec.head_size, device="meta")
                view = torch.empty(1, kv_heads, entries, 1, dtype=kind, device="meta")
                two_bytes = q if kind == torch.float32 else q.to(torch.bfloat16)
                if triton_ops.can_attend(two_bytes, view, dv, 0) is None:
                    found.setdefault(replace(shape, name=""), shape)
    return list(found.values())


@dataclass(frozen=True)
class Case:
    """One row to model: a shape on a card, and the positions of an attention's batch or a state's batch."""

    shape: Attention | State
    card: str
    batch: int
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """What the table's row of this case holds in ``KEY``'s columns."""
        context = context_text(self.ranges) if self.ranges else ""
        shape = self.shape
        return (
            source_hash(),
            shape.name,
            shape.geometry,
            dtype_name(shape),
            self.card,
            str(self.batch),
            context,
        )

    def row(self) -> Modelled:
        """Built and modelled."""
        if isinstance(self.shape, State):
            return state_layer(self.shape, CHIPS[self.card], self.batch)
        return attention_step(self.shape, CHIPS[self.card], self.ranges)


#: the columns that tell a row of the table from every other
KEY = ("kernels", "shape", "geometry", "dtype", "card", "batch", "context")


def cases(cards: Iterable[str] = tuple(CHIPS), every_model: bool = False) -> list[Case]:
    """Every row of the table: attention over several batches, states at 64 MB and more.

    ``every_model``: also ``model_shapes``, at 8 × 4096, on one card of each architecture.
    """
    found = [Case(a, card, len(r), r) for a in ATTENTIONS for card in cards for r in BATCHES.values()]
    for state in STATES:
        large = max(8, -(-(64 << 20) // (2 * state.request_bytes)))
        found += [Case(state, card, batch) for card in cards for batch in (8, large)]
    if every_model:
        ranges = BATCHES["8 × 4096"]
        found += [Case(a, card, 8, ranges) for a in model_shapes() for card in ("A100", "H200", "B200")]
    return found


def stored_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table, none where the file is not there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--out", type=Path, help="a CSV file for the rows; rows of commits long gone in it are kept"
    )
    parser.add_argument("--every-model", action="store_true", help="also every shape of data/models")
    parser.add_argument(
        "--missing", action="store_true", help="build only what the file does not hold of these kernels"
    )
    arguments = parser.parse_args()
    old = stored_rows(arguments.out) if arguments.out else []
    known = {tuple(row.get(name, "") for name in KEY): row for row in old} if arguments.missing else {}
    rows: list[dict[str, Any]] = [row for row in old if row["kernels"].startswith("commit ")]
    for case in cases(every_model=arguments.every_model):
        if case.key in known:
            rows.append(known[case.key])
            continue
        row = case.row()
        rows.append(asdict(row))
        print(
            f"{row.kernel:10s} {row.shape:13s} {row.dtype:14s} {row.card:5s} {row.batch:4d} × {row.context:14s} "
            f"{row.registers:4d} registers {row.stack_bytes:3d} spilled {row.programs:2d} programs "
            f"{row.kib_ahead:6.0f} of {row.kib_needed:3.0f} KiB ahead  kernel {row.kernel_share:4.0%} "
            f"layer {row.layer_share:4.0%}",
            flush=True,
        )
    if arguments.out:
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=[field.name for field in fields(Modelled)], restval="")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
