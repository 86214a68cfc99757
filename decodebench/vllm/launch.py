"""A vLLM engine with a connector, started and shut down inside this process.

One process, so that what the connector saw can be read directly, and several engines one after
another take a second each. Needs vLLM; nothing else in decodebench does.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodebench.models.load import DATA

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

#: models of data/models that a CPU runs in no time, one for each kind of hybrid
TINY = ("tiny-nemotron-h", "tiny-granite-hybrid", "tiny-gemma3", "tiny-llama")

#: what a forward pass needs beside the fields in data/models, which are those that shape the cache
FORWARD = {
    "vocab_size": 512,
    "intermediate_size": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}

#: connector name → where vLLM finds it (None: among its own)
CONNECTORS = {
    "GroupedDecodeBenchConnector": "decodebench.vllm",
    "AuditedBuiltinConnector": "decodebench.vllm",
    "DecodeBenchConnector": None,
}


def kv_transfer_config(connector: str, **options) -> dict:
    """What ``--kv-transfer-config`` (or ``LLM(kv_transfer_config=…)``) takes for a connector."""
    config: dict[str, Any] = {"kv_connector": connector, "kv_role": "kv_both"}
    config["kv_connector_extra_config"] = options
    if CONNECTORS.get(connector):
        config["kv_connector_module_path"] = CONNECTORS[connector]
    return config


def prepare_process() -> None:
    """Settings that vLLM reads while it is imported; call before the first import of vLLM."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    request_amx()


def request_amx() -> None:
    """Ask the kernel for the processor's matrix tiles.

    vLLM 0.32's CPU attention uses them wherever they exist, but asks for them only by way of a
    matrix product large enough for oneDNN to use them: a small model dies of an illegal instruction.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


@contextmanager
def engine(
    model: str | Path | Mapping,
    connector: str | None = "GroupedDecodeBenchConnector",
    options: Mapping | None = None,
    **llm_arguments,
) -> Iterator[LLM]:
    """An ``LLM`` with a connector; shut down on leaving.

    ``model``: a path or name vLLM knows; or a ``config.json`` as a dictionary or one of
    decodebench's tiny models by name, for which dummy weights are made and no tokenizer is needed.
    ``connector=None``: none, a real prefill.
    ``options`` go to the connector, everything else to ``vllm.LLM``.
    """
    prepare_process()
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    if str(model) in TINY:
        model = FORWARD | json.loads((DATA / str(model) / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(model, Mapping):
            Path(folder, "config.json").write_text(json.dumps(dict(model)))
            model = folder
            llm_arguments = {
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "enforce_eager": True,
                "max_model_len": 4096,
                "kv_cache_memory_bytes": 32 << 20,
                "max_num_seqs": 8,
                **llm_arguments,
            }
        if connector is not None:
            llm_arguments["kv_transfer_config"] = kv_transfer_config(connector, **(options or {}))
        llm = LLM(model=str(model), **llm_arguments)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()


@contextmanager
def kernel_blocks(tokens: int) -> Iterator[None]:
    """CPU attention that works on this many tokens at once, as many GPU kernels do.

    Engines started inside split each block into kernel blocks of this size.
    """
    prepare_process()
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    before = CPUAttentionBackend.__dict__["get_supported_kernel_block_sizes"]
    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [tokens])
    try:
        yield
    finally:
        CPUAttentionBackend.get_supported_kernel_block_sizes = before


def generate(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int = 2) -> list[RequestOutput]:
    """Greedy decoding of prompts given as token ids; end-of-sequence tokens are ignored."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
    return llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)


def prompts(lengths: Sequence[int], vocabulary: int = 512, shared: int = 0) -> list[list[int]]:
    """Distinct prompts of given lengths whose first ``shared`` tokens are the same."""
    free = vocabulary - 8
    return [
        [4 + (7 * place + (0 if place < shared else 11 * number + 5)) % free for place in range(length)]
        for number, length in enumerate(lengths)
    ]
