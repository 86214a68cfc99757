"""A model as its layers, and what an engine's options make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm

from decodebench.models.devices import DEVICES
from decodebench.models.fields import MAX_COUNT, ConfigError, Fields
from decodebench.models.layers import AttentionLayer, IndexerLayer, LatentLayer, Layer, Resolved, StateLayer
from decodebench.models.options import KV_CACHE_DTYPES, CacheOptions, OptionError
from decodebench.models.specs import AttentionSpec, KVCacheSpec, cdiv

#: tokens that TurboQuant's and UltraQuant's kernels take at once
QUANT_KERNEL_TOKENS = 32
#: length assumed where a config gives none
DEFAULT_MAX_MODEL_LEN = 2048
#: latent attention beside states: decode kernels want blocks of whole 128 tokens
LATENT_GRAIN = 128
#: where the layers of a draft model are said to be
DRAFT_ROOT = "mtp.layers."


@dataclass(frozen=True)
class Model:
    """The layers of a model that store something, in the order in which an engine registers them.

    ``generic``: read by field names alone, because no reader knows its ``model_type``.
    ``shared_layers``: layers without a cache of their own → the layer whose cache they read.
    """

    name: str
    model_type: str
    source: str
    dtype: str
    #: longest request that the config allows
    max_model_len: int
    layers: tuple[Layer, ...]
    shared_layers: Mapping[str, str] = field(default_factory=dict)
    generic: bool = False
    #: length where the user asks for none, if it is not ``max_model_len`` (LongRoPE)
    default_model_len: int | None = None
    #: the config gives no length: any may be asked for
    unbounded: bool = False
    #: ``model_max_length`` of the config: lets the user ask for more than is derived
    longest_allowed: int | None = None
    #: tokens that the attention kernels work on at once
    kernel_block_size: int = 16
    #: dtype of recurrent states where the user asks for none; "auto" is the model's dtype
    ssm_dtype: str = "auto"
    #: KV cache dtype that the checkpoint asks for
    kv_cache_dtype: str = "auto"
    memory_order: str = "LBNHC"
    #: states alone: an engine reuses no prefixes unless it is told to
    attention_free: bool = False
    #: fields that were not read and whose names speak of a cache; only a generic reading has any
    unread_fields: tuple[str, ...] = ()
    #: the parsed config.json that it was read from
    config: Mapping = field(default_factory=dict, repr=False, compare=False)
    #: the config.json's fields that shaped the layers
    fields_used: tuple[str, ...] = ()

    @cached_property
    def layer(self) -> dict[str, Layer]:
        """name → the layer's facts, those of shared layers included."""
        own = {layer.name: layer for layer in self.layers}
        return own | {name: replace(own[target], name=name) for name, target in self.shared_layers.items()}

    @property
    def reading(self) -> str | None:
        """What an unknown family's layers rest on, in one sentence; None where a reader knows the family."""
        if not self.generic:
            return None
        unread = ", ".join(self.unread_fields)
        return (
            f"no reader knows model_type {self.model_type!r}: read generically, by the names of its fields alone"
            + (f"; not read, though they may change the cache: {unread}" if unread else "")
        )

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The names of all layers with a cache, in registration order."""
        return tuple(layer.name for layer in self.layers)

    @property
    def has_states(self) -> bool:
        """Whether one of its layers keeps a state instead of tokens."""
        return any(isinstance(layer, StateLayer) for layer in self.layers)

    def query_heads(self, layer: str, tp: int = 1) -> int:
        """Query heads of a layer on one of ``tp`` ranks (a state layer's heads)."""
        return self._layer(layer).query_heads(tp)

    def layer_specs(self, options: CacheOptions | None = None) -> dict[str, KVCacheSpec]:
        """layer → spec, in registration order, with block sizes aligned as an engine aligns them.

        Raises ``OptionError`` where the options do not go with the model.
        """
        options = options or CacheOptions()
        return self.specs(self.resolve(options), options)

    def specs(self, resolved: Resolved, options: CacheOptions) -> dict[str, KVCacheSpec]:
        """The specs for options that are resolved already."""
        return {layer.name: layer.spec(resolved) for layer in self.layers + self.draft(options)}

    def draft(self, options: CacheOptions) -> tuple[Layer, ...]:
        """Layers of a draft model, shaped like the model's own full attention."""
        if options.draft_layers == 0:
            return ()
        like = next((layer for layer in self.layers if _is_full_attention(layer)), None)
        if like is None:
            raise OptionError(
                f"draft_layers = {options.draft_layers}: {self.name} has no full attention to copy"
            )
        drafted: list[Layer] = []
        for i in range(options.draft_layers):
            name = f"{DRAFT_ROOT}{i}.self_attn"
            keys = next((layer for layer in self.layers if isinstance(layer, IndexerLayer)), None)
            if isinstance(like, LatentLayer) and like.sparse and keys is not None:
                # what a sparse layer reads is chosen by index keys of its own
                drafted.append(replace(keys, name=f"{name}.indexer.k_cache"))
            drafted.append(replace(like, name=f"{name}.attn"))
        return tuple(drafted)

    def resolve(self, options: CacheOptions, aligned: bool = True) -> Resolved:
        """Options and config put together; ``aligned``: state pages made equal to attention pages."""
        self._check_parallel(options)
        dtype = self.dtype if options.dtype == "auto" else options.dtype
        kv_cache_dtype = self.kv_cache_dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
        if self.kv_cache_dtype == "fp8_ds_mla" and kv_cache_dtype.startswith("fp8"):
            kv_cache_dtype = "fp8_ds_mla"
        device = DEVICES[options.device]
        kernel, latent_kernel = self._kernels(options, kv_cache_dtype)
        block = device.block_size if device.block_size % kernel == 0 else kernel
        resolved = Resolved(
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            value_dtype=KV_CACHE_DTYPES[kv_cache_dtype] or dtype,
            conv_dtype=dtype if options.mamba_cache_dtype == "auto" else options.mamba_cache_dtype,
            ssm_dtype=self.ssm_dtype
            if options.mamba_ssm_cache_dtype == "auto"
            else options.mamba_ssm_cache_dtype,
            block_size=options.block_size or block,
            kernel_block_size=kernel,
            max_model_len=self._length(options),
            max_num_batched_tokens=options.max_num_batched_tokens or device.batched_tokens,
            tensor_parallel_size=options.tensor_parallel_size,
            num_speculative_tokens=options.num_speculative_tokens,
            device=options.device,
            engine=options.engine,
            latent_kernel_tokens=latent_kernel,
        )
        if not self.has_states:
            return resolved
        caching = options.enable_prefix_caching
        if caching is None:
            caching = not self.attention_free
        mode = "align" if caching else "none"
        resolved = replace(resolved, mamba_cache_mode=mode)
        if aligned:
            resolved = self._align(resolved)
        length = resolved.max_model_len if mode == "none" else resolved.block_size
        return replace(resolved, mamba_block_size=length)

    def _kernels(self, options: CacheOptions, kv_cache_dtype: str) -> tuple[int, int | None]:
        """Tokens that the attention kernels take at once, and what latent kernels split larger blocks into."""
        if options.kernel_block_size is not None:
            return options.kernel_block_size, options.kernel_block_size
        if kv_cache_dtype.startswith(("turboquant_", "ultraquant_")):
            return QUANT_KERNEL_TOKENS, None
        device = DEVICES[options.device]
        latent = [layer for layer in self.layers if isinstance(layer, LatentLayer)]
        if not latent or any(layer.sparse for layer in latent):
            return (
                self.kernel_block_size if latent else max(self.kernel_block_size, device.attention_tokens)
            ), (self.kernel_block_size)
        kernel = device.latent_fp8 if kv_cache_dtype.startswith("fp8") else device.latent
        return max(kernel.tokens, self.kernel_block_size), kernel.tokens if kernel.fixed else None

    def _align(self, r: Resolved) -> Resolved:
        """Grow the attention block until its page holds a state, then pad the state's page to it."""
        attention = next(
            (layer for layer in self.layers if isinstance(layer, AttentionLayer | LatentLayer)), None
        )
        if attention is None:
            return r
        spec = attention.spec(r)
        assert isinstance(spec, AttentionSpec)
        token_bytes = spec.num_kv_heads * spec.entry_bytes
        # vLLM sizes short convolutions without their speculative rows when it aligns pages
        plain = replace(r, num_speculative_tokens=0)
        state_page = max(
            layer.spec(plain if layer.mixer == "short_conv" else r).unpadded_page_size_bytes
            for layer in self.layers
            if isinstance(layer, StateLayer)
        )
        grain = max(r.kernel_block_size, r.block_size)
        if isinstance(attention, LatentLayer):
            grain = max(grain, LATENT_GRAIN)
        block = grain * cdiv(state_page, grain * token_bytes)
        kernels = lcm(r.kernel_block_size, *(x.grain for x in self.layers if isinstance(x, IndexerLayer)))
        block = kernels * cdiv(block, kernels)
        grew = block > r.block_size
        page = max(block, r.block_size) * token_bytes
        return replace(
            r,
            block_size=max(block, r.block_size),
            block_size_grew=grew,
            mamba_page_size=state_page,
            mamba_page_size_padded=None if page == state_page else page,
        )

    def _length(self, options: CacheOptions) -> int:
        asked = options.max_model_len
        if asked is None or isinstance(asked, str):  # "auto"
            return self.default_model_len or self.max_model_len
        if asked > max(self.max_model_len, self.longest_allowed or 0) and not self.unbounded:
            raise OptionError(
                f"max_model_len = {asked}: {self.name} is made for at most {self.max_model_len} tokens "
                f"(from {self.source}); ask for no more"
            )
        return asked

    def _check_parallel(self, options: CacheOptions) -> None:
        tp, dcp = options.tensor_parallel_size, options.decode_context_parallel_size
        if dcp == 1:
            return
        if tp % dcp:
            raise OptionError(
                f"decode_context_parallel_size = {dcp} does not divide tensor_parallel_size = {tp}"
            )
        for layer in self.layers:
            if not isinstance(layer, AttentionLayer):
                continue
            refused = f"decode_context_parallel_size = {dcp}: layer {layer.name} "
            if layer.sliding_window or layer.attention_chunk_size or layer.cross:
                raise OptionError(
                    refused + "has a window, chunks or cross attention, whose tokens are not split"
                )
            heads, kv_heads = layer.num_heads, layer.num_kv_heads
            if tp <= kv_heads or dcp > tp // kv_heads or heads // kv_heads % dcp:
                raise OptionError(
                    refused
                    + f"has {kv_heads} KV heads for {heads} query heads: tensor_parallel_size = {tp} must "
                    f"exceed the KV heads by a factor of at least {dcp}, and {dcp} divide the query "
                    "heads of each"
                )

    def _layer(self, name: str) -> Layer:
        if name.startswith(DRAFT_ROOT):
            return self.draft(CacheOptions(draft_layers=1))[-1]
        if name not in self.layer:
            raise ConfigError(
                f"{self.name}: no layer {name!r}; its layers are {', '.join(self.layer_names[:3])} …"
            )
        return self.layer[name]


def _is_full_attention(layer: Layer) -> bool:
    if isinstance(layer, AttentionLayer):
        return not (layer.sliding_window or layer.attention_chunk_size or layer.cross)
    return isinstance(layer, LatentLayer)


# -- what all configs have in common ---------------------------------------------------------------

#: fields that may hold the longest sequence; the smallest of them counts
LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
#: rope scalings whose factor is already in max_position_embeddings
SCALED_ROPES = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def model_length(f: Fields, outer: Fields) -> dict:
    """Fields of ``Model`` about the length of a request."""
    lengths = [f.integer(name) for name in LENGTH_FIELDS if f.has(name)]
    if not lengths:
        return {"max_model_len": DEFAULT_MAX_MODEL_LEN, "unbounded": True}
    longest = f.optional("model_max_length")
    derived: float = longest or min(lengths)
    ropes = _ropes(f)
    model_type = str(outer.get("model_type", default=""))
    if "gemma3" not in model_type:
        factors = [rope.get("factor") for rope in ropes if rope_type(rope) not in SCALED_ROPES]
        factor = next((x for x in reversed(factors) if isinstance(x, int | float)), 1)
        if isinstance(factor, bool) or not 0 < factor < MAX_COUNT:
            raise f.wrong(("rope_scaling", "rope_parameters"), factor, "a positive factor is expected")
        derived *= factor
    result = {"max_model_len": int(derived), "longest_allowed": longest}
    if any(rope_type(rope) == "longrope" for rope in ropes):
        original = next(
            (
                r["original_max_position_embeddings"]
                for r in ropes
                if isinstance(r.get("original_max_position_embeddings"), int)
            ),
            None,
        )
        result["default_model_len"] = f.optional("original_max_position_embeddings") or original
    return result


def rope_type(rope: Mapping) -> str:
    """The kind of scaling in a set of RoPE parameters, by its new or its old name."""
    return str(rope.get("rope_type", rope.get("type", "default")))


def _ropes(f: Fields) -> list[Mapping]:
    """Rope parameters: one set, or one a layer type; old configs call them rope_scaling."""
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        rope = f.get(name)
        if isinstance(rope, Mapping):
            nested = [value for value in rope.values() if isinstance(value, Mapping)]
            found += nested or [rope]
    return found


DTYPE_NAMES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "bfloat16",
    "float": "bfloat16",
}


def model_dtype(f: Fields, outer: Fields) -> str:
    """The dtype an engine runs the model in: float32 checkpoints run in bfloat16."""
    value = outer.get("dtype", "torch_dtype") or f.get("dtype", "torch_dtype", default="float32")
    name = str(value).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise f.wrong(("torch_dtype", "dtype"), value, f"known are {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[name]


def checkpoint_kv_dtype(f: Fields) -> str:
    """The KV cache dtype that a quantized checkpoint asks for; "auto" where it asks for none."""
    quant = f.get("quantization_config")
    if not isinstance(quant, Mapping):
        return "auto"
    scheme = quant.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        # compressed-tensors knows fp8 caches alone: 4 bits there are not nvfp4
        return "fp8" if scheme.get("num_bits") == 8 else "auto"
    inner = quant.get("quantization")
    algorithm = str((inner if isinstance(inner, Mapping) else quant).get("kv_cache_quant_algo") or "").lower()
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(algorithm, "auto")
