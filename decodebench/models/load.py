"""config.json → a model's layers and what each of them stores.

A *reader* turns the fields of one kind of family into layers; ``FAMILIES`` says which reader a
``model_type`` has, with the defaults its config class would fill in. Adding a family is a line
there; adding a kind of family is a reader.
"""

from __future__ import annotations

import argparse
import html
import os.path
from collections.abc import Mapping
from pathlib import Path

from decodebench.models.families import FAMILIES, Family
from decodebench.models.fields import ConfigError, Fields, read_config
from decodebench.models.generic import GENERIC, unread_fields
from decodebench.models.layers import AttentionLayer, IndexerLayer, LatentLayer, Layer, Resolved, StateLayer
from decodebench.models.model import Model, checkpoint_kv_dtype, model_dtype, model_length
from decodebench.models.options import STATE_DTYPES, CacheOptions, OptionError
from decodebench.shipped import shipped
from decodebench.words import columns, shown

__all__ = [
    "FAMILIES",
    "AttentionLayer",
    "CacheOptions",
    "ConfigError",
    "Family",
    "IndexerLayer",
    "KnownModels",
    "LatentLayer",
    "Layer",
    "Model",
    "OptionError",
    "Resolved",
    "StateLayer",
    "list_models",
    "load_model",
]

#: config.json facts of known models
DATA = shipped("data/models")


class KnownModels(tuple[str, ...]):
    """Names that ``load_model`` knows; shown, they are a table of families and of where the values come from."""

    def __repr__(self) -> str:
        return "\n".join(columns([("model", "model_type", "values"), *self.facts()], left=(0, 1, 2)))

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>"
            + "".join(f'<td style="text-align:left">{html.escape(cell)}</td>' for cell in row)
            + "</tr>"
            for row in self.facts()
        )
        heads = "".join(
            f'<th scope="col" style="text-align:left">{h}</th>' for h in ("model", "model_type", "values")
        )
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"

    def facts(self) -> list[tuple[str, str, str]]:
        """(name, model_type, where the config's values come from) of each."""
        found = []
        for name in self:
            config, _ = read_config(name, DATA)
            found.append((name, str(config.get("model_type", "?")), str(config.get("_source", "not said"))))
        return found


def list_models() -> KnownModels:
    """Names that ``load_model`` knows."""
    return KnownModels(sorted(path.parent.name for path in DATA.glob("*/config.json")))


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``decodebench models``."""
    parser.add_argument("--names", action="store_true", help="names alone, one a line")


def models_command(arguments: argparse.Namespace) -> int:
    """Print the known models, their families, and where each config's values come from."""
    known = list_models()
    print("\n".join(known) if arguments.names else repr(known))
    return 0


def load_model(config: Model | str | Path | Mapping) -> Model:
    """A model from its name in data/models, the path of any config.json, its folder, ``-``, or a dictionary.

    Raises ``ConfigError`` naming file, field and value where it does not describe a cache.
    """
    if isinstance(config, Model):
        return config
    if isinstance(config, Mapping):
        return read_model(config, "config")
    values, name = read_config(config, DATA)
    return read_model(values | modelopt_config(config, values), name)


def modelopt_config(config: str | Path, values: Mapping) -> dict:
    """The quantization that ModelOpt leaves in hf_quant_config.json beside a config without its own."""
    path = Path(config).expanduser()
    beside = (path if os.path.isdir(path) else path.parent) / "hf_quant_config.json"
    if (
        str(config) == "-"
        or not os.path.exists(path)
        or values.get("quantization_config")
        or not os.path.isfile(beside)
    ):
        return {}
    try:
        return {"quantization_config": read_config(beside, DATA)[0]}
    except ConfigError:
        raise ConfigError(f"{beside}: not a JSON object: repair it, or remove it") from None


def read_model(config: Mapping, name: str) -> Model:
    """A parsed config as a model; ``name`` is what errors call it."""
    outer = Fields(config, name)
    f, prefix = text_config(outer)
    model_type = f.get("model_type") or outer.get("model_type")
    if not isinstance(model_type, str):
        raise outer.missing("model_type")
    if str(outer.values.get("model_type", model_type)) in ENCODERS:
        raise ConfigError(
            f"{name}: model_type = {shown(model_type)} only encodes: an engine keeps no cache for it, there is "
            "nothing to plan"
        )
    family = FAMILIES.get(TEXT_TYPES.get(model_type, model_type)) or FAMILIES.get(f"{model_type}_text")
    generic = family is None
    family = family or GENERIC
    f = f.with_defaults(family.defaults)
    try:
        root = TEXT_ROOTS.get(str(outer.values.get("model_type")), prefix + family.root)
        found = family.read(f, root, **family.arguments)
    except ConfigError as error:
        if not generic:
            raise
        raise ConfigError(
            f"{error} (no reader knows model_type {shown(model_type)}, so its fields were read by name alone)"
        ) from None
    layers, shared = found if isinstance(found, tuple) else (found, {})
    if not layers:
        raise ConfigError(f"{name}: no layer of this model stores anything: there is no cache to plan")
    field, default = family.ssm_dtype or ("", "auto")
    lengths, dtype = model_length(f, outer), model_dtype(f, outer)
    return Model(
        name=name,
        model_type=model_type,
        source=str(config.get("_source", name)),
        dtype=dtype,
        layers=tuple(layers),
        shared_layers=shared,
        generic=generic,
        kernel_block_size=kernel_block_size(family, layers),
        ssm_dtype=state_dtype(f, field, default) if field else default,
        kv_cache_dtype=family.kv_cache_dtype
        if family.kv_cache_dtype != "auto"
        else checkpoint_kv_dtype(outer),
        memory_order=family.memory_order,
        attention_free=family.attention_free,
        unread_fields=unread_fields(f) if generic else (),
        config=config,
        fields_used=tuple(sorted(f.used)),
        **lengths,
    )


#: where multimodal configs keep the language model
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
#: model types that are read like another one
TEXT_TYPES = {
    "gemma4_unified_text": "gemma4_text",
    "kimi_vl": "deepseek_v3",
    "deepseek_vl_v2": "deepseek_v2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "mistral3": "mistral",
    "diffusion_gemma_text": "gemma4_text",
    "qwen3_5_omni_text": "qwen3_5_text",
}
#: multimodal model type → path of its language model; "language_model." where it has a text config
TEXT_PREFIXES = {
    "lfm2_vl": "language.",
    "deepseek_vl_v2": "language.",
    "ovis": "llm.",
    "ovis2_5": "llm.",
    "minicpmv": "llm.",
    "qwen2_vl": "language_model.",
    "qwen2_5_vl": "language_model.",
    "inkling_mm_model": "",
    "muse_glimmer": "",
    "diffusion_gemma": "",
}
#: multimodal model type → path of its decoder layers, where it is not the language model's own
TEXT_ROOTS = {
    "clip": "text_model.encoder.layers",
    "idefics3": "model.text_model.layers",
    "smolvlm": "model.text_model.layers",
}
#: model types that encode only: an engine keeps no cache for them
ENCODERS = {
    "bert",
    "colmodernvbert",
    "embedding_gemma2",
    "gte",
    "modernbert",
    "nomic_bert",
    "openai_privacy_filter",
    "roberta",
    "siglip",
    "xlm-roberta",
}


def text_config(outer: Fields) -> tuple[Fields, str]:
    """The fields of the language model, and the path under which an engine registers its layers."""
    model_type = str(outer.values.get("model_type"))
    fields, prefix = outer, TEXT_PREFIXES.get(model_type, "")
    for _ in range(2):  # thinker_config holds a text_config of its own
        inner = next(
            (fields.values[n] for n in TEXT_CONFIGS if isinstance(fields.values.get(n), Mapping)), None
        )
        if inner is None:
            break
        prefix = TEXT_PREFIXES.get(model_type, "language_model.")
        fields = Fields(inner, f"{outer.source}, text_config")
        fields.used = outer.used
    return fields, prefix


def kernel_block_size(family: Family, layers: list[Layer]) -> int:
    """Tokens that the attention kernels take at once where the card does not say: 64 for sparse latents."""
    if any(isinstance(layer, LatentLayer) and layer.sparse for layer in layers):
        return max(64, family.kernel_block_size)
    return family.kernel_block_size


def state_dtype(f: Fields, field: str, default: str) -> str:
    """The dtype that a checkpoint asks for its recurrent states."""
    value = str(f.get(field, default=default)).removeprefix("torch.")
    if value not in STATE_DTYPES:
        raise f.wrong((field,), value, f"known are {', '.join(STATE_DTYPES)}")
    return value
