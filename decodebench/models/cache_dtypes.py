"""KV cache dtypes that pack keys and values with their scales: bytes a head and token, and who takes them.

After ``CacheDType`` and the attention backends of vLLM 0.32: ``turboquant/config.py``, ``ultraquant/format.py``,
``flashinfer.py``, ``triton_attn.py``, and the selection of backends on each platform.
"""

from __future__ import annotations

from collections.abc import Sequence

from decodebench.models.devices import DEVICES
from decodebench.models.options import OptionError
from decodebench.models.specs import cdiv

#: bits of a key and of a value; a key of less than 8 bits has a 16-bit norm, a value a 16-bit scale and zero
TURBOQUANT = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
ULTRAQUANT = "ultraquant_4bit"
#: values that share a scale byte in UltraQuant
ULTRAQUANT_GROUP = 32
#: NVFP4, with another search for the scales in the second
NVFP4 = ("nvfp4", "nvfp4_4over6")
#: layers at each end of a model without states that TurboQuant and UltraQuant leave in the model's dtype
BOUNDARY = 2

CUDA = ("a100", "h100", "h200", "b200", "sm120")
#: dtype → cards on which vLLM has kernels for it; a dtype that is not here runs on all of them
CARDS: dict[str, tuple[str, ...]] = {
    "nvfp4": CUDA,
    "nvfp4_4over6": ("b200",),
    "nvfp4_ds_mla": ("b200",),
    "fp8_inc": (),
    ULTRAQUANT: ("mi300",),
    **dict.fromkeys(TURBOQUANT, (*CUDA, "mi300", "xpu")),
}


def keeps_boundary(dtype: str) -> bool:
    """Whether the first and last layers keep the model's own dtype (TurboQuant, UltraQuant)."""
    return dtype in TURBOQUANT or dtype == ULTRAQUANT


def packed_bytes(dtype: str, head_size: int, head_size_v: int, layer: str) -> int | None:
    """Bytes of one head's key and value of a token; None where the dtype holds plain numbers.

    Raises ``OptionError`` where the head size does not go with the dtype.
    """
    if dtype in NVFP4:
        # fp4 pairs and one fp8 scale for 16 values, keys and values in slots of their own
        return (head_size // 2 + head_size // 16) + (head_size_v // 2 + head_size_v // 16)
    if dtype.endswith("_per_token_head"):
        shrink = 2 if dtype.startswith("int4") else 1
        return head_size // shrink + head_size_v // shrink + 2 * 4  # a float32 scale for each of both
    if dtype in TURBOQUANT:
        key, value = TURBOQUANT[dtype]
        keys = head_size if key == 8 else cdiv(head_size * key, 8) + 2
        slot = keys + cdiv(head_size * value, 8) + 4
        return slot + slot % 2
    if dtype == ULTRAQUANT:
        if head_size % ULTRAQUANT_GROUP:
            raise OptionError(
                f"kv_cache_dtype = {dtype!r}: layer {layer} has heads of {head_size}, and a scale is for "
                f"{ULTRAQUANT_GROUP} values: use another dtype"
            )
        return 2 * (head_size // 2 + head_size // ULTRAQUANT_GROUP)
    return None


def boundary_layers(depth: int) -> set[int]:
    """Decoder layers that keep the model's dtype: two at each end, at most half of them at either."""
    n = min(BOUNDARY, depth // 2)
    return {*range(n), *range(depth - n, depth)}


def refuse(dtype: str, device: str, layers: Sequence) -> None:
    """Raises ``OptionError`` where no attention backend of vLLM 0.32 takes this dtype, card and these layers."""
    cards = CARDS.get(dtype)
    if cards == ():
        raise OptionError(
            f"kv_cache_dtype = {dtype!r}: no attention backend of vLLM takes it any more (it was Gaudi's): use fp8"
        )
    if cards is not None and device not in cards:
        raise OptionError(
            f"kv_cache_dtype = {dtype!r}: vLLM has no kernels for it on device = {device!r}, only on "
            f"{', '.join(cards)} of {', '.join(DEVICES)}: use another dtype"
        )
    if keeps_boundary(dtype) and device == "b200" and not any(hasattr(layer, "shapes") for layer in layers):
        raise OptionError(
            f"kv_cache_dtype = {dtype!r}: on device = 'b200' its layers and the plain ones at both ends have no "
            "order of memory in common: use another dtype"
        )
    for layer in layers:
        if dtype.endswith("_per_token_head") and layer.mixer == "mla":
            raise OptionError(
                f"kv_cache_dtype = {dtype!r} does not go with latent attention (MLA), layer {layer.name}: use auto, "
                "fp8 or fp8_ds_mla"
            )
        size = getattr(layer, "head_size", None)
        if dtype in NVFP4 and layer.mixer == "attention" and size == 64 and device != "b200":
            raise OptionError(
                f"kv_cache_dtype = {dtype!r}: layer {layer.name} has heads of 64, whose packed cache the prefill "
                f"kernels misread on device = {device!r}: use another dtype, or device b200"
            )
        if not keeps_boundary(dtype):
            continue
        if layer.mixer == "mla":
            raise OptionError(
                f"kv_cache_dtype = {dtype!r} does not go with latent attention (MLA), layer {layer.name}: use auto"
            )
        if any(getattr(layer, name, None) for name in ("sliding_window", "attention_chunk_size", "cross")):
            raise OptionError(
                f"kv_cache_dtype = {dtype!r}: its kernels know no windows, chunks or cross attention, and layer "
                f"{layer.name} has one: use another dtype"
            )


def doubt(dtype: str, device: str, layers: Sequence) -> str | None:
    """What an engine on this card would stumble over though the cache can be planned; None where nothing."""
    if dtype == "fp8_e5m2" and device != "mi300" and any(layer.mixer == "mla" for layer in layers):
        return f"no kernels for latent attention (MLA) take fp8_e5m2 on {device}: an engine refuses it when it starts"
    return None
