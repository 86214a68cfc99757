"""Layer specs → KV cache groups: the strategies.

A group's layers share one block table. A strategy is a function from the layers' specs to
groups; ``STRATEGIES`` names them.
"""

from __future__ import annotations

from dataclasses import dataclass

from decodebench.specs import KVCacheSpec


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table.

    ``layer_specs[i]`` is the spec of ``layer_names[i]`` as placed in this group (block size
    and padding settled). ``kv_cache_spec`` is the merged spec that governs the block table:
    what is skipped, how many blocks a request takes. ``pool`` numbers the block pool that the
    group draws from: always 0 in vLLM, one a kind in the ``separate`` strategy.
    """

    layer_names: tuple[str, ...]
    layer_specs: tuple[KVCacheSpec, ...]
    kv_cache_spec: KVCacheSpec
    pool: int = 0

    @property
    def block_size(self) -> int:
        return self.kv_cache_spec.block_size

    @property
    def kind(self) -> str:
        return self.kv_cache_spec.kind

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block id of this group stands for, over all its layers."""
        return sum(spec.page_size_bytes for spec in self.layer_specs)
