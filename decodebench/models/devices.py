"""What a card's kernels ask of the cache: blocks, packing of fp8 latents, batched tokens.

After ``platforms/cuda.py`` (priorities of attention backends), the backends' supported block sizes and
``EngineArgs.get_batch_defaults`` of vLLM 0.32. Nothing here was measured on a card.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """Tokens that a kernel takes at once; ``fixed``: no multiple of them, so blocks are split into them."""

    tokens: int
    fixed: bool = False


@dataclass(frozen=True)
class Device:
    """A card by the rules that shape a cache on it."""

    name: str
    #: dense latent attention (MLA), values in the model's dtype and in fp8
    latent: Kernel
    latent_fp8: Kernel
    #: what ``--kv-cache-dtype fp8`` means to sparse latent attention
    sparse_fp8: str = "fp8_ds_mla"
    #: tokens a block where nothing asks for another number
    block_size: int = 16
    #: tokens that plain attention kernels work on at once
    attention_tokens: int = 16
    #: tokens scheduled in one step where the user says nothing (an API server's default)
    batched_tokens: int = 8192
    #: whether delta attention exports the state at the last boundary of a prefill (heads of 128; Hopper: any)
    exports_states: bool = False
    #: sparse latent kernels kept blocks whole rows apart before vLLM 0.32 did so on every card
    flat_rows: bool = False
    #: a Hopper card, whose kernels some formats have to themselves
    hopper: bool = False


DEVICES = {
    device.name: device
    for device in (
        Device("a100", Kernel(16), Kernel(16), batched_tokens=2048),
        Device("h100", Kernel(16), Kernel(64, fixed=True), exports_states=True, hopper=True),
        Device("h200", Kernel(16), Kernel(64, fixed=True), exports_states=True, hopper=True),
        Device(
            "b200",
            Kernel(32, fixed=True),
            Kernel(32, fixed=True),
            sparse_fp8="fp8",
            exports_states=True,
            flat_rows=True,
        ),
        Device("sm120", Kernel(16), Kernel(16), exports_states=True),
        Device("mi300", Kernel(64), Kernel(64)),
        Device("xpu", Kernel(64), Kernel(64), block_size=64, attention_tokens=64),
        Device("cpu", Kernel(16), Kernel(16), block_size=128, attention_tokens=32, batched_tokens=2048),
    )
}
DEFAULT_DEVICE = "h100"
