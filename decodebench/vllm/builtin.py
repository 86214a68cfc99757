"""vLLM's own decode-bench connector under our audit: what it fills is its own business, unchanged.

The audit poisons the cache before the fill and reads it back after, and takes what decode reads
from the block tables; it asks the connector for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
    DecodeBenchConnector,
    DecodeBenchConnectorMetadata,
)

from decodebench.cache.values import Constant
from decodebench.layout.pool import RequestBlocks
from decodebench.vllm.connector import rank
from decodebench.vllm.launch import request_amx
from decodebench.vllm.options import Options
from decodebench.vllm.step_audit import StepAuditor
from decodebench.vllm.tables import LiveTables, tables_of
from decodebench.vllm.translate import layout_of, owned_groups, without_shared_layers

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass
class AuditedMetadata(DecodeBenchConnectorMetadata):
    """The built-in connector's metadata and the block tables behind it."""

    admitted: tuple[RequestBlocks, ...] = ()
    running: tuple[RequestBlocks, ...] = ()


class AuditedBuiltinConnector(DecodeBenchConnector):
    """vLLM's ``DecodeBenchConnector`` with ``audit="bytes"``.

    Options: the built-in's (``fill_mean``, ``startup_fill``; constants only, its random values
    cannot be known) and ``audit_file``.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.layout, self._kept = owned_groups(layout_of(kv_cache_config, vllm_config))
        self._tables = LiveTables()
        if role == KVConnectorRole.WORKER:
            request_amx()
            options = Options(
                mean=extra.get("fill_mean", 0.015),
                startup_fill=extra.get("startup_fill", False),
                audit="bytes",
                audit_file=extra.get("audit_file"),
            )
            values = Constant(options.mean)
            self._auditor = StepAuditor.for_engine(
                self.layout, values, options, vllm_config, rank(), self._kept
            )

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._tables.admit(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> AuditedMetadata:
        meta = super().build_connector_meta(scheduler_output)
        tables = self._tables.of_step(scheduler_output, scheduler_output.kv_connector_block_state)
        return AuditedMetadata(meta.reqs_to_fill, *tables)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._tables.forget(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._tables.forget(request.request_id)
        return super().request_finished(request, block_ids)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._auditor.register(without_shared_layers(self.layout, kv_caches))
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        bound = self._get_connector_metadata()
        tables = (tables_of(requests, self._kept) for requests in (bound.admitted, bound.running))
        meta = AuditedMetadata(bound.reqs_to_fill, *tables)
        if meta.admitted:
            self._auditor.before_fill(meta, forward_context, kwargs.get("attn_metadata"))
        super().start_load_kv(forward_context, **kwargs)
        if meta.admitted:
            self._auditor.after_fill(meta, None)
