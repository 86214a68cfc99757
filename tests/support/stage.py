"""vLLM's real scheduler and cache allocation around a connector, without a model.

Hand-made groups, one region of memory a layer (groups do not alias), a step at a time.
"""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as v
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from decodebench.vllm.launch import FORWARD, kv_transfer_config

EOS = 2
DATA = Path(__file__).parents[2] / "data"


def full(block_size=16, heads=2, head_size=32, dtype=torch.float32, **more):
    return v.FullAttentionSpec(
        block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype=dtype, **more
    )


def window(size, block_size=16, heads=2, head_size=32, dtype=torch.float32):
    return v.SlidingWindowSpec(
        block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype=dtype, sliding_window=size
    )


def mamba(block_size=16, shapes=((3, 24), (4, 8)), dtypes=(torch.bfloat16, torch.float32), **more):
    return v.MambaSpec(block_size=block_size, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align", **more)


def config_of(groups, num_blocks):
    """A ``Layout`` of vLLM's for {layers: spec}: every layer in bytes of its own."""
    tensors, offset = [], 0
    for layers, spec in groups:
        for layer in layers:
            page = spec.page_size_bytes
            tensors.append((layer, page, offset))
            offset += page * num_blocks
    return v.KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            v.KVCacheTensor(
                size=offset, layers=[layer], layer_stride=page * num_blocks, block_stride=page, offset=at
            )
            for layer, page, at in tensors
        ],
        kv_cache_groups=[v.KVCacheGroupSpec(list(layers), spec) for layers, spec in groups],
    )


def engine_config(connector="GroupedDecodeBenchConnector", options=None, prefix=True, **arguments):
    """vLLM's configuration of an engine for the tiny Llama, which no test here runs."""
    with tempfile.TemporaryDirectory() as folder:
        config = FORWARD | json.loads((DATA / "models" / "tiny-llama" / "config.json").read_text())
        Path(folder, "config.json").write_text(json.dumps(config))
        arguments = {"max_model_len": 4096, "max_num_seqs": 8, "block_size": 16, **arguments}
        return EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=prefix,
            kv_transfer_config=kv_transfer_config(connector, **(options or {})),
            **arguments,
        ).create_engine_config()


class Stage:
    """One connector in both roles between vLLM's scheduler and caches that vLLM allocated."""

    def __init__(
        self, groups, num_blocks=64, options=None, kernel_block_sizes=None, register=True, **arguments
    ):
        self.vllm_config = engine_config(options=options, **arguments)
        self.config = config_of(groups, num_blocks)
        self.vllm_config.cache_config.num_gpu_blocks = num_blocks
        sizes = [spec.block_size for _, spec in groups]
        smallest = min(sizes)
        self.scheduler = Scheduler(
            self.vllm_config,
            self.config,
            StructuredOutputManager(self.vllm_config),
            block_size=max(sizes),
            hash_block_size=smallest,
        )
        create = KVConnectorFactory.create_connector
        self.worker = create(self.vllm_config, KVConnectorRole.WORKER, self.config)
        self.caches = allocate_kv_cache(
            self.config, torch.device("cpu"), KVCacheLayout.LBHNC, kernel_block_sizes
        )
        if register:
            self.worker.register_kv_caches(self.caches)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(smallest, sha256)
        self._number = 0

    @property
    def connector(self):
        return self.scheduler.connector

    def add(self, tokens, max_tokens=100):
        """A request of given token ids (or of that many distinct ones)."""
        if isinstance(tokens, int):
            tokens = list(range(10 + 5000 * self._number, 10 + 5000 * self._number + tokens))
        self._number += 1
        params = SamplingParams(max_tokens=max_tokens)
        params.update_from_generation_config({}, EOS)
        request = Request(f"request-{self._number}", list(tokens), params, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def step(self, token=7):
        """Schedule, fill, and pretend that every scheduled request decoded ``token``."""
        output = self.scheduler.schedule()
        block_ids = self.scheduler.kv_cache_manager.get_block_ids
        tables = {name: block_ids(name) for name in output.num_scheduled_tokens}
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        self.worker.start_load_kv(None)
        self.worker.clear_connector_metadata()
        running = [request.request_id for request in self.scheduler.running]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=running,
                req_id_to_index={name: i for i, name in enumerate(running)},
                sampled_token_ids=[[token]] * len(running),
            ),
        )
        fills = {fill.request_id: fill for fill in output.kv_connector_metadata.fill.requests}
        return SimpleNamespace(output=output, fills=fills, tables=tables)

    def rows(self, layer, value=0.015):
        """Blocks of a layer that hold exactly the value (as its dtype rounds it), and nothing else."""
        cache = self.caches[layer].flatten(1)
        wanted = torch.tensor(value).to(cache.dtype)
        return [block for block in range(cache.shape[0]) if bool((cache[block] == wanted).all())]

    def touched(self, layer):
        """Blocks of a layer that are not all zeros, as vLLM allocates them."""
        raw = self.caches[layer].contiguous().view(torch.uint8).flatten(1)
        return raw.any(1).nonzero().flatten().tolist()
