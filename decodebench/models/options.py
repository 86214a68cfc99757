"""What an engine is started with, as far as it shapes the cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields

from decodebench.errors import DecodebenchError
from decodebench.models.devices import DEFAULT_DEVICE, DEVICES
from decodebench.models.engines import ENGINES, NEWEST
from decodebench.models.fields import MAX_LAYERS

#: --kv-cache-dtype → dtype of the values (None: the model's own); packed formats hold no plain values
KV_CACHE_DTYPES: dict[str, str | None] = {
    "auto": None,
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_ds_mla": "uint8",
    "nvfp4_ds_mla": "uint8",
    "nvfp4": "uint8",
    "int8_per_token_head": "int8",
    "fp8_per_token_head": "uint8",
    "int4_per_token_head": "uint8",
}
STATE_DTYPES = ("auto", "float32", "float16", "bfloat16")
MODEL_DTYPES = ("auto", "bfloat16", "float16", "float32")
MEMORY_ORDERS = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


class OptionError(DecodebenchError):
    """An option that no engine takes, or not with this model: says which, its value, and what is known."""


def with_options(function: Callable) -> Callable:
    """Show the fields of ``CacheOptions`` in the signature of a function that takes ``**options``.

    So Tab completes them, and ``help`` lists them with their defaults.
    """
    signature = inspect.signature(function)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    given = {p.name for p in named}
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(CacheOptions)
        if f.name not in given
    ]
    function.__signature__ = signature.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class CacheOptions:
    """An engine's options, by vLLM's names; the defaults are those of an API server on ``device``."""

    #: tokens a block; with state layers it is the grain in which the block grows
    block_size: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    #: longest request: a number, None for the config's own, "auto" for what fits the memory
    max_model_len: int | str | None = None
    #: tokens scheduled in one step; None: the card's default
    max_num_batched_tokens: int | None = None
    async_scheduling: bool = True
    #: states are kept at block boundaries, so that prefixes can be reused; None: on where there is attention
    enable_prefix_caching: bool | None = None
    hybrid_kv_cache_manager: bool = True
    #: dimensions from the outermost in: L(ayers), B(locks), N (tokens), H(eads), C(ontent); None: vLLM's
    #: choice
    memory_order: str | None = None
    #: dtype of convolution states
    mamba_cache_dtype: str = "auto"
    #: dtype of recurrent states
    mamba_ssm_cache_dtype: str = "auto"
    #: tokens that attention kernels work on at once; None: 16, 64 for latent attention
    kernel_block_size: int | None = None
    num_speculative_tokens: int = 0
    #: the release whose layouts are planned
    engine: str = NEWEST
    #: layers of a draft model that are shaped like the model's own full attention
    draft_layers: int = 0
    #: the card whose kernels and defaults are assumed
    device: str = DEFAULT_DEVICE

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise OptionError(f"device = {self.device!r}: known are {', '.join(DEVICES)}")
        if self.max_num_batched_tokens is None:
            object.__setattr__(self, "max_num_batched_tokens", DEVICES[self.device].batched_tokens)
        for name, least in (
            ("block_size", 1),
            ("tensor_parallel_size", 1),
            ("decode_context_parallel_size", 1),
            ("max_num_batched_tokens", 1),
            ("kernel_block_size", 1),
            ("num_speculative_tokens", 0),
            ("draft_layers", 0),
        ):
            value = getattr(self, name)
            if value is None and name in ("block_size", "kernel_block_size"):
                continue
            most = MAX_LAYERS if name == "draft_layers" else 2**31 - 1
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise OptionError(f"{name} = {value!r}: an integer from {least} to {most} is expected")
        length = self.max_model_len
        if not (length is None or length == "auto" or (type(length) is int and length >= 1)):
            raise OptionError(f"max_model_len = {length!r}: a positive integer, None or 'auto' is expected")
        for name, known in (
            ("dtype", MODEL_DTYPES),
            ("kv_cache_dtype", tuple(KV_CACHE_DTYPES)),
            ("mamba_cache_dtype", STATE_DTYPES),
            ("mamba_ssm_cache_dtype", STATE_DTYPES),
            ("memory_order", (None, *MEMORY_ORDERS)),
            ("engine", ENGINES),
        ):
            if getattr(self, name) not in known:
                shown = ", ".join(str(k) for k in known if k is not None)
                raise OptionError(f"{name} = {getattr(self, name)!r}: known are {shown}")

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens scheduled but not settled: windows keep their blocks until a step is settled."""
        tokens = self.max_num_batched_tokens or DEVICES[self.device].batched_tokens
        return tokens * (2 if self.async_scheduling else 1)

    @classmethod
    def of(cls, options: dict) -> CacheOptions:
        """Options from keywords; a name that is no option is refused with the nearest known one."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                import difflib

                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise OptionError(f"no option {name!r}: {hint}Known are {', '.join(known)}")
        return cls(**options)
