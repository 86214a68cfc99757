"""What vLLM itself lays out for a config.json, asked without a GPU."""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
import warnings

os.environ.update(
    VLLM_LOGGING_LEVEL=os.environ.get("LOG", "ERROR"),
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    CUDA_VISIBLE_DEVICES="",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    PYTORCH_NVML_BASED_CUDA_CHECK="0",
    VLLM_TARGET_DEVICE="cuda",
)
warnings.filterwarnings("ignore")
from unittest.mock import MagicMock

CARDS = {"a100": (8, 0), "h100": (9, 0), "b200": (10, 0), "sm120": (12, 0)}
CARD = os.environ.get("CARD", "h100")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    roots = (
        "vllm.third_party.deep_gemm",
        "vllm._flashkda_C",
        "vllm.third_party.flashmla",
        "flashinfer",
        "torchvision",
        "librosa",
        "soundfile",
        "soxr",
        "av",
        "timm",
        "open_clip",
        "torchaudio",
        "deep_gemm",
        "vllm._C_stable_libtorch",
        "vllm._moe_C_stable_libtorch",
        "vllm._flashmla_C",
        "vllm._flashmla_extension_C",
        "vllm.vllm_flash_attn._vllm_fa2_C",
        "vllm.vllm_flash_attn._vllm_fa3_C",
        "cutlass",
        "cuda",
        "quack",
        "tilelang",
    )

    def find_spec(self, name, path=None, target=None):
        if any(name == r or name.startswith(r + ".") for r in self.roots):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        m = MagicMock(name=spec.name)
        m.__spec__ = spec
        m.__path__ = []
        m.__name__ = spec.name
        m.__version__ = "0.9.9"
        return m

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Absent())

import torch

_plain = torch._ops._OpNamespace.__getattr__


class _Op:
    def __call__(self, *a, **k):
        return True

    def __getattr__(self, n):
        if n.startswith("__"):
            raise AttributeError(n)
        return _Op()


def _op(self, name):
    try:
        return _plain(self, name)
    except AttributeError:
        if self.name in ("_C", "_moe_C", "_C_cache_ops", "_flashmla_C", "_flashkda_C"):
            return _Op()
        raise


import torch.library

_fake = torch.library.Library._register_fake


def _register_fake(self, *a, **k):
    try:
        return _fake(self, *a, **k)
    except RuntimeError:
        pass


torch.library.Library._register_fake = _register_fake
torch.cuda.get_device_properties = lambda *a, **k: types.SimpleNamespace(
    multi_processor_count=132,
    total_memory=80 << 30,
    major=CARDS[CARD][0],
    minor=CARDS[CARD][1],
    name="x",
    is_integrated=False,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    warp_size=32,
    max_threads_per_multi_processor=2048,
)
torch.cuda.get_device_capability = lambda *a, **k: CARDS[CARD]
torch.cuda.current_device = lambda: 0
torch.version.cuda = "13.0"


class _S:
    def __init__(self, *a, **k):
        pass

    def __getattr__(self, n):
        return lambda *a, **k: None


torch.cuda.Stream = torch.cuda.Event = _S
torch.cuda.current_stream = lambda *a, **k: _S()
import vllm.platforms as platforms
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability

platforms._current_platform = CpuPlatform()
platforms.vllm_version_matches_substr = lambda s: False
from vllm.platforms import cuda


class Card(cuda.CudaPlatformBase):
    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(*CARDS[CARD])

    @classmethod
    def get_device_name(cls, device_id=0):
        return {
            "a100": "NVIDIA A100-SXM4-80GB",
            "h100": "NVIDIA H100 80GB HBM3",
            "b200": "NVIDIA B200",
            "sm120": "NVIDIA RTX PRO 6000",
        }[CARD]

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return 80 << 30

    @classmethod
    def is_fully_connected(cls, ids):
        return True

    @classmethod
    def device_count(cls):
        return 8

    @classmethod
    def num_compute_units(cls, device_id=0):
        return 132

    @classmethod
    def set_device(cls, device):
        pass

    @classmethod
    def is_pin_memory_available(cls):
        return False

    @classmethod
    def get_device_uuid(cls, device_id=0):
        return "0"


platforms._current_platform = Card()

torch._ops._OpNamespace.__getattr__ = _op
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec, get_shared_kv_cache_layers


def engine_config(config, **options):
    folder = tempfile.mkdtemp(prefix="oracle-")
    with open(folder + "/config.json", "w") as f:
        json.dump(config, f)
    args = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        tokenizer=folder,
        load_format="dummy",
        enforce_eager=True,
        trust_remote_code=False,
        disable_log_stats=True,
        **options,
    )
    return args.create_engine_config()


class FakeRank(Exception):
    pass


def parallel(tp=1):
    """One rank's view of tp ranks, without the others."""
    from vllm.distributed import parallel_state

    init_distributed_environment(1, 0, "tcp://127.0.0.1:%d" % (20000 + os.getpid() % 20000), 0, "gloo")
    ensure_model_parallel_initialized(1, 1)
    if tp > 1:
        g = parallel_state.get_tp_group()
        g.world_size = tp


def specs(config, **options):
    tp = options.pop("tensor_parallel_size", 1)
    vc = engine_config(config, **options)
    with set_current_vllm_config(vc):
        parallel(1)
        if tp > 1:
            from vllm.distributed import parallel_state

            parallel_state.get_tp_group().world_size = tp
            vc.parallel_config.tensor_parallel_size = tp
        from vllm.v1.worker import workspace

        workspace._manager = MagicMock()
        with set_default_torch_dtype(vc.model_config.dtype), torch.device("meta"), Meta():
            model = initialize_model(vc)
    Card.update_block_size_for_backend(vc)
    with set_current_vllm_config(vc):
        found = get_kv_cache_spec(vc)
        shared = get_shared_kv_cache_layers(vc)
    return vc, model, found, shared


# values that a constructor wants to look at: there are none on the meta device, so zeros stand for them
def _real(name, plain):
    def method(self, *a, **k):
        if isinstance(self, torch.Tensor) and self.device.type == "meta":
            self = torch.zeros(self.shape, dtype=self.dtype, device="cpu")
        return plain(self, *a, **k)

    return method


for _name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__"):
    setattr(torch.Tensor, _name, _real(_name, getattr(torch.Tensor, _name)))
_to = torch.Tensor.to


def _keep(self, *a, **k):
    if self.device.type == "meta":
        a = tuple("meta" if isinstance(x, (str, torch.device)) else x for x in a)
        if k.get("device") is not None:
            k["device"] = "meta"
    return _to(self, *a, **k)


torch.Tensor.to = _keep
import time as _time

import vllm.transformers_utils.repo_utils as _ru

_ru.time = types.SimpleNamespace(sleep=lambda s: None, time=_time.time)
from vllm.model_executor.models import registry as _registry

_registry._LazyRegisteredModel.inspect_model_cls = lambda self: _registry._ModelInfo.from_model_cls(
    self.load_model_cls()
)

from torch.overrides import TorchFunctionMode


class Meta(TorchFunctionMode):
    """Whatever asks for the card gets the meta device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


for _n in ("current_device_index", "current_accelerator", "device_count", "synchronize"):
    setattr(
        torch.accelerator,
        _n,
        (lambda v: lambda *a, **k: v)({"current_device_index": 0, "device_count": 1}.get(_n)),
    )
torch.accelerator.current_accelerator = lambda *a, **k: torch.device("cuda")
torch.Tensor.cuda = lambda self, *a, **k: self
torch.Tensor.pin_memory = lambda self, *a, **k: self

#: fields that a model wants, its config class lacks and no cache depends on
PLAIN = {
    "dense_mlp_idx": 1,
    "dense_intermediate_size": 512,
    "topk_method": "noaux_tc",
    "image_token_id": 5,
    "video_token_id": 6,
    "audio_token_id": 7,
    "n_group": 1,
    "topk_group": 1,
    "rope_theta": 10000.0,
    "expert_hidden_dim": 1024,
    "moe_intermediate_size": 1024,
    "zero_expert_type": "identity",
    "zero_expert_num": 1,
    "scoring_func": "sigmoid",
    "use_embed_norm": False,
    "layernorm_epsilon": 1e-6,
    "norm_topk_prob": True,
    "mhc": True,
    "deepstack_visual_indexes": [1],
    "image_size": 224,
    "patch_size": 14,
    "output_dim": 1024,
    "downsample_factor": 4,
    "embed_dim": 1024,
    "route_scale": 1.0,
    "use_moe": True,
    "router_dtype": "float32",
    "moe_router_enable_expert_bias": True,
}
from transformers import PreTrainedConfig as _PTC

USED = set()


def _attr(self, name):
    if name in PLAIN:
        USED.add(name)
        return PLAIN[name]
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_PTC.__getattr__ = _attr

import vllm.utils.platform_utils as _pu

for _n in dir(_pu):
    if "uva" in _n:
        setattr(_pu, _n, lambda *a, **k: True)
