"""How many parameters vLLM's own model of a config holds, and transformers': built on torch's meta device.

``python tests/support/weights_witness.py`` in the engine's environment counts every config of
tests/goldens/weights.jsonl.gz anew and stores the counts there. Families whose files import packages that
are not installed keep the count that is stored (Qwen3.5: torchvision, Kimi Linear: CUTLASS; both were
counted with stand-ins for these imports).
"""

import gzip
import json
import os
import sys
import tempfile
from math import prod
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "goldens" / "weights.jsonl.gz"
#: a vocabulary's rows are padded to a multiple of it
VOCABULARY_GRAIN = 64


def read_golden() -> list[dict]:
    return [json.loads(line) for line in gzip.decompress(GOLDEN.read_bytes()).decode().splitlines()]


def write_golden(lines: list[dict]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    GOLDEN.write_bytes(gzip.compress(text.encode(), mtime=0))


def prepare_vllm(replace=setattr) -> None:
    """Let every family be built on a CPU: what only its kernels lack is passed over, no tensor changes.

    ``replace(object, name, value)`` puts a stand-in in its place; a test hands one that can be undone.
    """
    import torch
    import vllm.model_executor.layers.fused_moe.config as moe
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as method
    import vllm.model_executor.models.registry as registry
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
        UnquantizedMoeBackend,
        backend_to_kernel_cls,
    )
    from vllm.platforms.cpu import CpuPlatform
    from vllm.triton_utils import triton

    class Elsewhere:
        """The platform, but for experts without a gate, which only GPUs have kernels for."""

        def __init__(self, platform):
            self.platform = platform

        def is_xpu(self):
            return True

        def __getattr__(self, name):
            return getattr(self.platform, name)

    class Nothing:
        def __init__(self, *args, **kwargs):
            pass

    dense = CpuPlatform.__dict__["get_attn_backend_cls"].__func__

    def attention_backend(cls, *args, **kwargs):
        def plain(value):
            return value._replace(use_sparse=False) if getattr(value, "use_sparse", False) else value

        return dense(cls, *map(plain, args), **{name: plain(value) for name, value in kwargs.items()})

    select = method.select_unquantized_moe_backend

    def expert_backend(*args, **kwargs):
        try:
            return select(*args, **kwargs)
        except NotImplementedError:
            return UnquantizedMoeBackend.CPU, backend_to_kernel_cls(UnquantizedMoeBackend.CPU)[-1]

    replace(moe, "current_platform", Elsewhere(moe.current_platform))
    replace(CpuPlatform, "get_attn_backend_cls", classmethod(attention_backend))
    replace(method, "select_unquantized_moe_backend", expert_backend)
    replace(registry, "_run_in_subprocess", lambda function: function())
    replace(torch.cuda, "Event", Nothing)
    replace(torch.cuda, "Stream", Nothing)
    if not hasattr(triton, "set_allocator"):
        triton.set_allocator = lambda *args: None


def vllm_shapes(config: dict, device: str = "meta") -> dict[str, tuple[int, ...]]:
    """Parameter → shape of vLLM's model of a config."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.network_utils import get_open_port
    from vllm.utils.torch_utils import set_default_torch_dtype

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        arguments = EngineArgs(
            model=folder, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, dtype="bfloat16"
        )
        engine = arguments.create_engine_config()
        with set_current_vllm_config(engine):
            if not model_parallel_is_initialized():
                init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
                ensure_model_parallel_initialized(1, 1)
            with torch.device(device), set_default_torch_dtype(torch.bfloat16):
                model = initialize_model(engine)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def padding(shapes: dict[str, tuple[int, ...]], vocabulary: int) -> int:
    """Parameters of the rows that only pad embeddings and heads."""
    rows = -(-vocabulary // VOCABULARY_GRAIN) * VOCABULARY_GRAIN
    ends = (
        "embed_tokens.weight",
        "embeddings.weight",
        "wte.weight",
        "lm_head.weight",
        "word_embeddings.weight",
    )
    tables = [
        shape for name, shape in shapes.items() if name.endswith(ends) and shape[0] == rows != vocabulary
    ]
    return sum((rows - vocabulary) * prod(shape[1:]) for shape in tables)


def transformers_count(config: dict) -> int | None:
    """Parameters of transformers' own model of a config; None where it has none, or cannot build it so."""
    import torch
    import transformers

    kind = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")}
    try:
        known = transformers.AutoConfig.for_model(kind.pop("model_type"), **kind)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(known)
    except Exception:
        return None
    return sum(parameter.numel() for parameter in model.parameters())


def vocabulary_of(config: dict) -> int:
    return config.get("vocab_size") or config["text_config"]["vocab_size"]


def main() -> None:
    prepare_vllm()
    lines = read_golden()
    # expert parallel groups are made with the first engine config, where that is one of experts
    lines.sort(key=lambda line: "mixtral" not in line["name"])
    for line in lines:
        config = line["config"]
        try:
            shapes = vllm_shapes(config, line.get("device", "meta"))
            line["parameters"] = sum(map(prod, shapes.values()))
            line["padding"] = padding(shapes, vocabulary_of(config))
        except Exception as error:
            print(f"{line['name']}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        line["transformers"] = transformers_count(config)
        print(line["name"], line["parameters"], line["padding"], line["transformers"], flush=True)
    lines.sort(key=lambda line: line["name"])
    write_golden(lines)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
