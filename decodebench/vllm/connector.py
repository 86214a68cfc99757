"""``GroupedDecodeBenchConnector``: vLLM's connector interface on top of ours.

Nothing is decided here. vLLM's objects are translated and handed to ``ConnectorScheduler`` in the
scheduler's process and ``ConnectorWorker`` in each worker's; both are the ones every other part of
decodebench uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.parallel_state import get_world_group, model_parallel_is_initialized
from vllm.logger import init_logger

from decodebench.cache.connector import ConnectorMetadata, ConnectorScheduler, ConnectorWorker
from decodebench.errors import DecodebenchError
from decodebench.layout.pool import RequestBlocks
from decodebench.vllm.compat import check_version
from decodebench.vllm.launch import request_amx
from decodebench.vllm.options import Options, parse
from decodebench.vllm.stats import DecodeBenchStats
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

logger = init_logger(__name__)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What one step's workers get: blocks to fill, and where audits are on, the block tables behind them."""

    fill: ConnectorMetadata
    admitted: tuple[RequestBlocks, ...] = ()
    running: tuple[RequestBlocks, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)

    def of_groups(self, kept: tuple[int, ...]) -> StepMetadata:
        """The same step for a worker that holds layers of these groups only."""
        fills = (
            replace(fill, block_ids=tuple(fill.block_ids[g] for g in kept)) for fill in self.fill.requests
        )
        admitted, running = (tables_of(requests, kept) for requests in (self.admitted, self.running))
        return StepMetadata(ConnectorMetadata(tuple(fills)), admitted, running, self.counters)


class RequestRefused(DecodebenchError):
    """A request for something that only a prompt which is computed can give."""


class GroupedDecodeBenchConnector(KVConnectorBase_V1, SupportsHMA):
    """Stands in for a prefill: fills each group's blocks before a request's first decode step."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.options: Options = parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        warning = check_version(vllm.__version__, self.options.strict)
        if warning:
            logger.warning_once(warning)
        self.layout = layout_of(kv_cache_config, vllm_config)
        self._auditor: StepAuditor | None = None
        self._stats = DecodeBenchStats()
        if role == KVConnectorRole.SCHEDULER:
            startup, values = self.options.startup_fill, self.options.values
            self.scheduler = ConnectorScheduler(self.layout, startup_fill=startup, values=values)
            self._preemptions: dict[str, int] = {}
            self._tables = LiveTables()
        else:
            request_amx()
            self.layout, self._kept = owned_groups(self.layout)
            values = self.options.values
            self.worker = ConnectorWorker(self.layout, values, startup_fill=self.options.startup_fill)
            if self.options.audit != "off":
                self._auditor = StepAuditor.for_engine(
                    self.layout, values, self.options, vllm_config, rank(), self._kept
                )

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed on to another engine."""
        return False

    # -- scheduler -------------------------------------------------------------------------------

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All of them: where a group is left out, vLLM computes its last window again."""
        return self._kv_cache_config.transfer_group_ids

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        if getattr(request.sampling_params, "prompt_logprobs", None) is not None:
            raise RequestRefused(
                f"request {request.request_id!r} asks for prompt_logprobs, but a prompt that is stood in for is "
                "never computed and has none: send it without them, or to an engine without this connector"
            )
        # a preempted request lost its blocks, however much of them the prefix cache gives back
        if request.num_preemptions > self._preemptions.setdefault(request.request_id, 0):
            self._preemptions[request.request_id] = request.num_preemptions
            self.scheduler.request_preempted(request.request_id)
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        table = blocks.get_block_ids()
        self.scheduler.update_state_after_alloc(request, table, num_external_tokens)
        if self.options.audit != "off" and num_external_tokens:
            self._tables.admit(request, table, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        fill = self.scheduler.build_connector_meta()
        meta = StepMetadata(fill, counters=dict(self.scheduler.counters))
        if self.options.audit != "off":
            resolve = scheduler_output.kv_connector_block_state
            meta.admitted, meta.running = self._tables.of_step(scheduler_output, resolve)
        return meta

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request)

    def _finished(self, request: Request) -> tuple[bool, None]:
        self.scheduler.request_finished(request.request_id)
        self._preemptions.pop(request.request_id, None)
        self._tables.forget(request.request_id)
        return False, None

    # -- worker ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        kv_caches = without_shared_layers(self.layout, kv_caches)
        if self._auditor is not None:
            self._auditor.register(kv_caches)
        self.worker.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        meta = self._get_connector_metadata().of_groups(self._kept)
        if not meta.fill.requests:
            if self._auditor is not None:
                self._auditor.later_step(forward_context, kwargs.get("attn_metadata"))
            return
        if self._auditor is not None:
            self._auditor.before_fill(meta, forward_context, kwargs.get("attn_metadata"))
        report = self.worker.start_load_kv(meta.fill)
        self._stats.record_fill(report, len(meta.fill.requests))
        if self._auditor is not None:
            self._stats.record_audit(self._auditor.after_fill(meta, report))

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.worker.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_kv_connector_stats(self) -> DecodeBenchStats | None:
        return self._stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DecodeBenchStats:
        return DecodeBenchStats(data=data) if data else DecodeBenchStats()


def rank() -> int:
    """This worker's rank among all workers of the engine."""
    return get_world_group().rank if model_parallel_is_initialized() else 0
