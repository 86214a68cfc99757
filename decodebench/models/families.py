"""Which reader a ``model_type`` has, and the defaults that its config class would fill in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from decodebench.models import attention, state
from decodebench.models.fields import Fields
from decodebench.models.layers import Layer


@dataclass(frozen=True)
class Family:
    """How the configs of a ``model_type`` are read.

    ``read(fields, root, **arguments)`` gives the layers, ``root`` being the path of the decoder
    layers. ``defaults``: fields that the config class fills in where config.json leaves them out.
    """

    read: Callable[..., list[Layer]]
    arguments: Mapping = field(default_factory=dict)
    defaults: Mapping = field(default_factory=dict)
    root: str = "model.layers"
    #: tokens that the attention kernels work on at once
    kernel_block_size: int = 16
    #: field that names the dtype of recurrent states, and what holds where it is absent
    ssm_dtype: tuple[str, str] | None = None
    memory_order: str = "LBNHC"


ATTENTION = attention.read_attention

FAMILIES: dict[str, Family] = {
    "llama": Family(ATTENTION),
    "gemma3_text": Family(ATTENTION),
    "gpt_oss": Family(ATTENTION, {"path": "attn.attn"}),
    "jamba": Family(state.read_jamba),
    "granitemoehybrid": Family(state.read_granite),
    "nemotron_h": Family(state.read_nemotron_h, ssm_dtype=("mamba_ssm_cache_dtype", "float32")),
    "qwen3_next": Family(state.read_delta_net),
}
