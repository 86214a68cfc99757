"""Every backend's cache tensors, built without a GPU by the installed vLLM's own code.

    python tests/support/views.py                 # the table of this release, a line a refusal below it
    python tests/support/views.py --write         # stores it in data/results/views.json
    python tests/support/views.py --readme        # README's table of all stored releases

A backend customises a layer's spec, vLLM groups the layers, plans the memory, picks kernel blocks and
allocates; our connector's halves translate, bind and fill what comes out, the byte audit judges it, and
vLLM's own view of each page is read back beside it. Modules that only exist beside a GPU are stood in
for; backends that still cannot be imported are listed by name.
"""

# ruff: noqa: B023 - layers() calls what it is given at once
from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import math
import os
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from decodebench.vllm.launch import FORWARD, prepare_process  # noqa: E402

prepare_process()

import torch  # noqa: E402


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of packages that only exist beside a GPU: every name in them is harmless."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Anything(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module) -> None:
        pass


class _Anything(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


import vllm  # noqa: E402

sys.meta_path.insert(0, StandIn("flashinfer"))  # where there is no vLLM, nothing of a test run meets it

from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1 import kv_cache_interface as v  # noqa: E402
from vllm.v1.attention.backend import AttentionBackend  # noqa: E402
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as StateKind  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout as Order  # noqa: E402
from vllm.v1.worker import utils as worker_utils  # noqa: E402

from decodebench.cache.bind import bind as bind_caches  # noqa: E402
from decodebench.cache.connector import ConnectorScheduler, ConnectorWorker  # noqa: E402
from decodebench.cache.values import Constant  # noqa: E402
from decodebench.coverage.from_bytes import audit as db_audit  # noqa: E402
from decodebench.errors import DecodebenchError  # noqa: E402
from decodebench.layout.pool import Batch, Request, RequestBlocks  # noqa: E402
from decodebench.vllm import compat  # noqa: E402
from decodebench.vllm.connector import StepMetadata  # noqa: E402
from decodebench.vllm.options import Options  # noqa: E402
from decodebench.vllm.step_audit import StepAuditor  # noqa: E402
from decodebench.vllm.translate import layout_of, owned_groups, without_shared_layers  # noqa: E402

planning: Any = kv_cache_utils
if importlib.util.find_spec("vllm.v1.core.kv_cache_planning"):
    planning = importlib.import_module("vllm.v1.core.kv_cache_planning")

BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8
Mode = v.KVQuantMode
VALUE = 0.015
NUM_BLOCKS = 24


# -- backends ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backend:
    """A backend by vLLM's name: where its class is, and the block size its cases start from."""

    name: str
    path: str
    block_size: int = 16
    #: settings that only hold on its own device: (dotted name, what stands in for it)
    on_device: tuple[tuple[str, Any], ...] = ()


B = "vllm.v1.attention.backends."
HEADS = (
    Backend("FLASH_ATTN", B + "flash_attn.FlashAttentionBackend"),
    Backend("FLASHINFER", B + "flashinfer.FlashInferBackend"),
    Backend("TRITON_ATTN", B + "triton_attn.TritonAttentionBackend"),
    Backend("TRITON_FLASH_ATTN", B + "triton_flash_attn.TritonFlashAttentionBackend"),
    Backend("FLEX_ATTENTION", B + "flex_attention.FlexAttentionBackend"),
    Backend("TREE_ATTN", B + "tree_attn.TreeAttentionBackend"),
    Backend("B12X", B + "b12x.B12xPagedAttentionBackend", 64),
    Backend("HPC_ATTN", B + "hpc_attn.HpcAttentionBackend", 64),
    Backend("ROCM_ATTN", B + "rocm_attn.RocmAttentionBackend"),
    Backend("ROCM_AITER_FA", B + "rocm_aiter_fa.AiterFlashAttentionBackend"),
    Backend(
        "ROCM_AITER_FA (shuffled)",
        B + "rocm_aiter_fa.AiterFlashAttentionBackend",
        on_device=((B + "rocm_aiter_fa.rocm_aiter_ops.is_shuffle_kv_cache_enabled", lambda: True),),
    ),
    Backend("ROCM_AITER_UNIFIED", B + "rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend"),
    Backend("ROCM_SEGMENTED", B + "rocm_segmented_attn.RocmSegmentedAttentionBackend"),
    Backend("CPU_ATTN", B + "cpu_attn.CPUAttentionBackend", 32),
)
LATENT = (
    Backend("FLASHMLA", B + "mla.flashmla.FlashMLABackend", 64),
    Backend("CUTLASS_MLA", B + "mla.cutlass_mla.CutlassMLABackend", 128),
    Backend("FLASHINFER_MLA", B + "mla.flashinfer_mla.FlashInferMLABackend", 64),
    Backend("FLASH_ATTN_MLA", B + "mla.flashattn_mla.FlashAttnMLABackend"),
    Backend("TRITON_MLA", B + "mla.triton_mla.TritonMLABackend"),
    Backend("TOKENSPEED_MLA", B + "mla.tokenspeed_mla.TokenspeedMLABackend", 64),
    Backend("ROCM_AITER_MLA", B + "mla.rocm_aiter_mla.AiterMLABackend"),
    Backend("AITER_TRITON_MLA", B + "mla.aiter_triton_mla.AiterTritonMLABackend"),
    Backend("AMX_MLA", B + "mla.amx_mla.AMXMLABackend", 32),
    Backend("CPU_MLA", B + "mla.cpu_mla.CPUMLABackend"),
)
SPARSE = (
    Backend("FLASHMLA_SPARSE", B + "mla.flashmla_sparse.FlashMLASparseBackend", 64),
    Backend("FLASHINFER_MLA_SPARSE", B + "mla.flashinfer_mla_sparse.FlashInferMLASparseTRTLLMBackend", 64),
    Backend(
        "FLASHINFER_MLA_SPARSE_SM120", B + "mla.flashinfer_mla_sparse.FlashInferMLASparseSM120Backend", 64
    ),
    Backend(
        "FLASHINFER_MLA_SPARSE_SM90", B + "mla.flashinfer_mla_sparse_sm90.FlashInferMLASparseSM90Backend", 64
    ),
    Backend("FLASH_ATTN_MLA_SPARSE", B + "mla.flashattn_mla_sparse.FlashAttnMLASparseBackend", 64),
    Backend("ROCM_AITER_MLA_SPARSE", B + "mla.rocm_aiter_mla_sparse.ROCMAiterMLASparseBackend", 64),
    Backend("XPU_MLA_SPARSE", B + "mla.xpu_mla_sparse.XPUMLASparseBackend", 64),
)
#: formats with scales between the numbers: (backend, --kv-cache-dtype, dtype, how it is quantized)
PACKED = (
    ("TRITON_ATTN", "int8_per_token_head", torch.int8, "INT8_PER_TOKEN_HEAD"),
    ("TRITON_ATTN", "fp8_per_token_head", U8, "FP8_PER_TOKEN_HEAD"),
    ("TRITON_ATTN", "int4_per_token_head", U8, "INT4_PER_TOKEN_HEAD"),
    ("FLASHINFER", "nvfp4", U8, "NVFP4"),
    ("FLASH_ATTN", "fp8_e5m2", U8, "FP8_PER_TENSOR"),
)
INDEXER = Backend("DEEPSEEK_V32_INDEXER", B + "mla.indexer.DeepseekV32IndexerBackend", 64)
#: kinds of states → shapes and dtypes of one block
STATES = {
    "MAMBA1": (((3, 256), (256, 16)), (BF16, F32)),
    "MAMBA2": (((3, 288), (8, 32, 16)), (BF16, F32)),
    "MAMBA2, replay ring": (((3, 288), (8, 32, 16), (16, 8), (1,)), (BF16, F32, BF16, torch.int32)),
    "MAMBA2, odd convolution": (((3, 33), (8, 32, 16)), (BF16, F32)),
    "MAMBA2, fp8 state": (((3, 288), (8, 32, 16)), (BF16, torch.float8_e4m3fn)),
    "GDN_ATTN": (((288, 3), (8, 32, 32)), (BF16, F32)),
    "GDN_ATTN, four parts (KDA)": (((3, 64), (3, 64), (3, 64), (8, 32, 32)), (BF16, BF16, BF16, F32)),
    "SHORT_CONV": (((2, 256),), (BF16,)),
    "LINEAR": (((8, 32, 32),), (F32,)),
}


def backend_class(backend: Backend) -> type[AttentionBackend] | None:
    """The backend's own class; None where it cannot be imported without its device."""
    module, name = backend.path.rsplit(".", 1)
    try:
        return getattr(importlib.import_module(module), name)
    except Exception:  # whatever a kernel library says where there is no GPU
        return None


# -- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Layers with their backends under one order of memory and one cache dtype."""

    backend: str
    name: str
    layers: Mapping[str, tuple[Any, type[AttentionBackend] | None]]
    order: Order
    cache_dtype: str = "auto"
    on_device: tuple[tuple[str, Any], ...] = ()


def full(block_size: int, heads: int = 4, head_size: int = 64, dtype=BF16, mode=Mode.NONE, **more):
    return v.FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=heads,
        head_size=head_size,
        dtype=dtype,
        kv_quant_mode=mode,
        **more,
    )


def window(block_size: int, tokens: int, heads: int = 4, head_size: int = 64, dtype=BF16, mode=Mode.NONE):
    return v.SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=heads,
        head_size=head_size,
        dtype=dtype,
        kv_quant_mode=mode,
        sliding_window=tokens,
    )


def latent(block_size: int, dtype=BF16, mode=Mode.NONE, cache_dtype: str = "auto", **more):
    return v.MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=576,
        dtype=dtype,
        kv_quant_mode=mode,
        cache_dtype_str=cache_dtype,
        **more,
    )


def indexer(block_size: int):
    return v.MLAAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=132, dtype=U8, cache_role=v.SparseCacheRole.INDEXER
    )


def state(block_size: int, kind: str, page: int | None):
    shapes, dtypes = STATES[kind]
    return v.MambaSpec(
        block_size=block_size,
        shapes=shapes,
        dtypes=dtypes,
        page_size_padded=page,
        mamba_type=StateKind[kind.split(",")[0]],
        mamba_cache_mode="align",
    )


def orders(cls: type[AttentionBackend]) -> tuple[Order, ...]:
    """The orders of memory that a backend's kernels can read."""
    return cls.supported_kv_cache_layouts() or tuple(Order)


def layers(count: int, spec_of) -> dict[str, Any]:
    return {f"model.layers.{i}.attn": spec_of(i) for i in range(count)}


def cases() -> Iterator[Case]:
    """All cases of this release, backend after backend."""
    for backend in HEADS:
        cls = backend_class(backend)
        if cls is not None:
            for order in orders(cls):
                yield from _head_cases(backend, cls, order)
    by_name = {backend.name: backend for backend in HEADS}
    for name, cache_dtype, dtype, mode in PACKED:
        cls = backend_class(by_name[name])
        for order in orders(cls) if cls is not None else ():
            spec = full(16, head_size=128, dtype=dtype, mode=Mode[mode])
            yield Case(name, cache_dtype, layers(3, lambda i, s=spec: (s, cls)), order, cache_dtype)
    for backend in LATENT:
        cls = backend_class(backend)
        if cls is not None:
            for order in orders(cls):
                yield from _latent_cases(backend, cls, order)
    for backend in SPARSE:
        cls = backend_class(backend)
        if cls is not None:
            for order in orders(cls):
                yield from _sparse_cases(backend, cls, order)
    for kind in STATES:
        for page in (None, 65536):
            for order in (Order.LBNHC, Order.BLHNC, Order.LHBNC):
                specs = {f"model.layers.{i}.mixer": (state(16, kind, page), None) for i in range(3)}
                yield Case(kind, "padded" if page else "dense", specs, order)


def _head_cases(backend: Backend, cls, order: Order) -> Iterator[Case]:
    size = backend.block_size
    for cache_dtype, dtype, mode in (("auto", BF16, Mode.NONE), ("fp8", U8, Mode.FP8_PER_TENSOR)):
        shape: dict[str, Any] = {"dtype": dtype, "mode": mode}
        page = full(size, **shape).page_size_bytes
        state_page = state(size, "MAMBA2", None).page_size_bytes
        tall = size * -(-state_page // page)
        compositions = {
            "one group": layers(3, lambda i: (full(size, **shape), cls)),
            "one KV head": layers(3, lambda i: (full(size, heads=1, **shape), cls)),
            "windows": layers(
                6, lambda i: (full(size, **shape) if i % 3 == 2 else window(size, 2 * size, **shape), cls)
            ),
            "Mamba-2 hybrid": {
                f"model.layers.{i}.{'attn' if i % 3 == 2 else 'mixer'}": (
                    (full(tall, **shape), cls)
                    if i % 3 == 2
                    else (state(tall, "MAMBA2", full(tall, **shape).page_size_bytes), None)
                )
                for i in range(6)
            },
            "kernel blocks": layers(3, lambda i: (full(128, **shape), cls)),
        }
        for name, specs in compositions.items():
            yield Case(backend.name, f"{cache_dtype}, {name}", specs, order, cache_dtype, backend.on_device)


def _latent_cases(backend: Backend, cls, order: Order) -> Iterator[Case]:
    size = backend.block_size
    for cache_dtype, dtype, mode in (("auto", BF16, Mode.NONE), ("fp8", U8, Mode.FP8_PER_TENSOR)):
        spec, split = (latent(tokens, dtype, mode, cache_dtype) for tokens in (size, 128))
        tall = size * -(-state(size, "GDN_ATTN", None).page_size_bytes // spec.page_size_bytes)
        large = latent(tall, dtype, mode, cache_dtype)
        hybrid = {
            f"model.layers.{i}.{'attn' if i % 4 == 3 else 'mixer'}": (
                (large, cls) if i % 4 == 3 else (state(tall, "GDN_ATTN", large.page_size_bytes), None)
            )
            for i in range(8)
        }
        compositions = {
            "one group": layers(3, lambda i, s=spec: (s, cls)),
            "kernel blocks": layers(3, lambda i, s=split: (s, cls)),
            "state hybrid": hybrid,
        }
        for name, specs in compositions.items():
            yield Case(backend.name, f"{cache_dtype}, {name}", specs, order, cache_dtype)


def _sparse_cases(backend: Backend, cls, order: Order) -> Iterator[Case]:
    size = backend.block_size
    formats: dict[str, tuple[Any, Any, dict]] = {
        "auto": (BF16, Mode.NONE, {}),
        "fp8": (U8, Mode.FP8_PER_TENSOR, {}),
        "fp8_ds_mla": (U8, Mode.FP8_PER_TENSOR, {"state_content_bytes": 656}),
    }
    for cache_dtype, (dtype, mode, more) in formats.items():
        specs: dict[str, Any] = {}
        for i in range(3):
            specs[f"model.layers.{i}.attn"] = (latent(size, dtype, mode, cache_dtype, **more), cls)
            specs[f"model.layers.{i}.indexer"] = (indexer(size), backend_class(INDEXER))
        yield Case(backend.name, f"{cache_dtype} with its indexer", specs, order, cache_dtype)


# -- one case ------------------------------------------------------------------------------------

#: what may come of a case; ``wrong`` and ``crash`` never should
FILLED, ZEROED, REFUSED, NOT_BUILT = "filled", "zeroed", "refused", "not built"


@dataclass(frozen=True)
class Outcome:
    """What came of a case: how it was served, and the sentence that was said about it."""

    case: Case
    result: str
    sentence: str


_config = None


def engine_config():
    """One engine's configuration, whose order of memory and cache dtype each case overwrites."""
    global _config
    if _config is None:
        fields = json.loads((ROOT / "data" / "models" / "tiny-llama" / "config.json").read_text())
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(FORWARD | fields))
            _config = EngineArgs(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=4096,
            ).create_engine_config()
        register_all_kvcache_specs(_config)
    return _config


def build(case: Case):
    """(vLLM's ``KVCacheConfig``, the tensors it hands a worker, each layer's spec); raises what vLLM raises."""
    config = engine_config()
    config.cache_config.kv_cache_layout = case.order.name
    config.cache_config.cache_dtype = case.cache_dtype
    specs, classes = {}, {}
    # before 0.32 only the backend's own hook
    customize = getattr(worker_utils, "customize_attention_spec", lambda cls, spec: cls.customize_spec(spec))
    for name, (spec, cls) in case.layers.items():
        specs[name] = customize(cls, spec) if cls is not None else spec
        classes[name] = cls
    shapes = {(s.num_heads, s.num_states, s.page_size_bytes) for s in specs.values()}
    if len(shapes) > 1 and not case.order.is_block_compact:
        raise ValueError(f"{case.order.name} takes layers of one shape only")
    groups = planning.get_kv_cache_groups(config, dict(specs))
    planned = _plan(config, groups)
    planned.kv_cache_layout = case.order.name
    attention = [
        [
            SimpleNamespace(backend=classes[n], kv_cache_spec=specs[n])
            for n in group.layer_names
            if classes[n] is not None
        ]
        for group in groups
    ]
    kernel_blocks = worker_utils.prepare_kernel_block_sizes(planned, attention)
    tensors = worker_utils.allocate_kv_cache(planned, torch.device("cpu"), case.order, kernel_blocks)
    return planned, tensors, specs


def _plan(config, groups):
    try:
        per_block = planning._pool_bytes_per_block(config, groups)
    except TypeError:  # before 0.32
        per_block = planning._pool_bytes_per_block(groups)
    return planning.get_kv_cache_config_from_groups(config, groups, NUM_BLOCKS * per_block)


def run(case: Case) -> Outcome:
    """The case through translation, bind, scheduler half, fill and byte audit, and read back independently."""
    with ExitStack() as settings:
        for name, replacement in case.on_device:
            settings.enter_context(mock.patch(name, replacement))
        try:
            planned, tensors, specs = build(case)
        except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
            return Outcome(case, NOT_BUILT, str(error).split("\n")[0] or type(error).__name__)
    try:
        sentence, rows = fill(planned, tensors)
    except DecodebenchError as error:
        return Outcome(case, REFUSED, str(error))
    wrong, zeroed = read_back(case, planned, tensors, specs, rows)
    if wrong:
        return Outcome(case, "wrong", f"{wrong[0]} and {len(wrong) - 1} more pages; the audit: {sentence}")
    if zeroed and "zeroed on purpose (" not in sentence:
        return Outcome(case, "wrong", f"pages of zeros, and the audit does not say why: {sentence}")
    return Outcome(case, ZEROED if zeroed else FILLED, sentence)


def fill(planned, tensors) -> tuple[str, list[tuple[int, ...]]]:
    """(the byte audit's verdict, rows filled per group) of one request; raises what the connector raises."""
    layout, _ = owned_groups(layout_of(planned, engine_config()))
    tensors = without_shared_layers(layout, tensors)
    values = Constant(VALUE)
    tokens = max(2 * max(group.block_size for group in layout.groups) + 3, 5)
    request = Request("views", tokens)
    ids = iter(range(1, planned.num_blocks))
    tables = []
    for number, group in enumerate(layout.groups):
        per_block = layout.tokens_per_block(number)
        skipped = group.kv_cache_spec.num_skipped_tokens(tokens - 1) // per_block
        tables.append(tuple(0 if i < skipped else next(ids) for i in range(-(-tokens // per_block))))
    blocks = RequestBlocks(request, 0, tuple(tables))
    scheduler = ConnectorScheduler(layout)
    external, _ = scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, blocks.block_ids, external)
    step = StepMetadata(scheduler.build_connector_meta(), (blocks,), ())
    worker = ConnectorWorker(layout, values)
    with tempfile.TemporaryDirectory() as folder:
        options = Options(mean=VALUE, audit="bytes")
        auditor = StepAuditor(layout, values, options, Path(folder, "audit.jsonl"), 0, "views")
        cache = bind_caches(layout, tensors)
        cache.poison()
        auditor.register(tensors)
        worker.register_kv_caches(cache)
        # the cache's own audit first: the step's zeroes what stays poison behind a sequence
        worker.start_load_kv(step.fill)
        found = db_audit(cache, Batch(layout, (blocks,)), values)
        auditor.before_fill(step)
        of_step = auditor.after_fill(step, worker.start_load_kv(step.fill))
    # no model runs here, so that the step's audit counts as planned what a kernel would read
    if of_step.covered != of_step.required or of_step.findings or not found.ok:
        raise AssertionError(f"the step's audit: {of_step.verdict}; the cache's: {found.verdict}")
    return found.verdict, list(step.fill.requests[0].block_ids)


def read_back(case: Case, planned, tensors, specs, rows) -> tuple[list[str], bool]:
    """(pages that hold something else than asked, whether some hold zeros) through vLLM's own views."""
    wrong, zeroed = [], False
    for group, ids in zip(planned.kv_cache_groups, rows):
        for layer in group.layer_names:
            tensor, spec = tensors[layer], specs[layer]
            kernel_blocks = tensor.shape[0] // planned.num_blocks
            for block in ids:
                page = tensor[block * kernel_blocks : (block + 1) * kernel_blocks].contiguous()
                for numbers in typed(case, spec, page):
                    if numbers is None:
                        zeroed = True
                        good = not page.view(U8).any()
                    elif numbers.dtype in (torch.int32, torch.int64):
                        good = not numbers.any()
                    else:
                        good = bool((numbers.float() == torch.tensor(VALUE).to(numbers.dtype).float()).all())
                    if not good:
                        wrong.append(f"layer {layer}, block {block} ({page.dtype})")
    return wrong, zeroed


def typed(case: Case, spec, page: torch.Tensor) -> Iterator[torch.Tensor | None]:
    """The numbers that a kernel finds in a page; None for a page of packed bytes."""
    if isinstance(spec, v.MambaSpec):
        raw, at = page.view(U8).flatten(), 0
        for shape, dtype in zip(spec.shapes, spec.dtypes):
            size = math.prod(shape) * dtype.itemsize
            yield raw[at : at + size].clone().view(dtype)
            at += size
    elif page.dtype.is_floating_point:
        yield page
    elif spec.kv_quant_mode == Mode.FP8_PER_TENSOR and case.cache_dtype != "fp8_ds_mla":
        yield page.view(torch.float8_e5m2 if case.cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn)
    else:
        yield None


# -- the table -----------------------------------------------------------------------------------

STORED = ROOT / "data" / "results" / "views.json"


def table(outcomes: list[Outcome]) -> dict[str, dict[str, int]]:
    """Backend → how many of its cases were served in which way."""
    counts: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        found = counts.setdefault(outcome.case.backend, {})
        found[outcome.result] = found.get(outcome.result, 0) + 1
    missing = [b.name for b in (*HEADS, *LATENT, *SPARSE) if backend_class(b) is None]
    return counts | {name: {} for name in missing}


def readme_table() -> str:
    """README's table of the stored releases: a row a backend."""
    stored = json.loads(STORED.read_text())
    backends = list(dict.fromkeys(name for release in stored.values() for name in release))
    lines = [f"| backend | {' | '.join(stored)} |", "| --- |" + " --- |" * len(stored)]
    for name in backends:
        cells = [_cell(release.get(name)) for release in stored.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(counts: dict[str, int] | None) -> str:
    if counts is None:
        return "–"
    served = [f"{counts[result]} {result}" for result in (FILLED, ZEROED, REFUSED) if result in counts]
    return ", ".join(served) or "not importable without its device"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="store this release's table")
    parser.add_argument("--verbose", action="store_true", help="a line a case")
    parser.add_argument("--readme", action="store_true", help="print README's table of what is stored")
    arguments = parser.parse_args()
    if arguments.readme:
        print(readme_table())
        return 0
    outcomes = []
    for case in cases():
        outcomes.append(run(case))
        last = outcomes[-1]
        if arguments.verbose or last.result in ("wrong", REFUSED):
            print(f"{case.backend:28s} {case.name:24s} {case.order.name:6s} {last.result:9s} {last.sentence}")
    found = table(outcomes)
    for backend, counts in found.items():
        print(
            f"{backend:28s} "
            + (", ".join(f"{n} {result}" for result, n in counts.items()) or "not importable")
        )
    if arguments.write:
        stored = json.loads(STORED.read_text()) if STORED.exists() else {}
        stored[compat.release(vllm.__version__)] = found
        STORED.write_text(json.dumps(dict(sorted(stored.items())), indent=1) + "\n")
    return int(any(outcome.result == "wrong" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
