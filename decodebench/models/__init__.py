"""config.json → a model's layers and what each of them stores.

A *reader* turns the fields of one kind of family into layers; ``FAMILIES`` says which reader a
``model_type`` has, with the defaults its config class would fill in. Adding a family is a line
there; adding a kind of family is a reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from decodebench.models.families import FAMILIES, Family
from decodebench.models.fields import ConfigError, Fields, read_config
from decodebench.models.layers import AttentionLayer, IndexerLayer, LatentLayer, Layer, Resolved, StateLayer
from decodebench.models.model import Model, checkpoint_kv_dtype, model_dtype, model_length
from decodebench.models.options import CacheOptions, OptionError

__all__ = [
    "FAMILIES", "AttentionLayer", "CacheOptions", "ConfigError", "Family", "IndexerLayer", "LatentLayer", "Layer",
    "Model", "OptionError", "Resolved", "StateLayer", "list_models", "load_model",
]  # fmt: skip

#: config.json facts of known models
DATA = Path(__file__).resolve().parents[2] / "data" / "models"


def list_models() -> tuple[str, ...]:
    """Names that ``load_model`` knows."""
    return tuple(sorted(path.parent.name for path in DATA.glob("*/config.json")))


def load_model(config: Model | str | Path | Mapping) -> Model:
    """A model from its name in data/models, the path of any config.json, its folder, ``-``, or a dictionary.

    Raises ``ConfigError`` naming file, field and value where it does not describe a cache.
    """
    if isinstance(config, Model):
        return config
    if isinstance(config, Mapping):
        return read_model(config, "config")
    values, name = read_config(config, DATA)
    return read_model(values, name)


def read_model(config: Mapping, name: str) -> Model:
    """A parsed config as a model; ``name`` is what errors call it."""
    outer = Fields(config, name)
    model_type = outer.get("model_type")
    if not isinstance(model_type, str):
        raise outer.missing("model_type")
    family = FAMILIES[model_type]
    f = outer.with_defaults(family.defaults)
    layers = family.read(f, family.root, **family.arguments)
    if not layers:
        raise ConfigError(f"{name}: no layer of this model stores anything: there is no cache to plan")
    field, default = family.ssm_dtype or ("", "auto")
    return Model(
        name=name,
        model_type=model_type,
        source=str(config.get("_source", name)),
        dtype=model_dtype(f, outer),
        layers=tuple(layers),
        kernel_block_size=family.kernel_block_size,
        ssm_dtype=str(f.get(field, default=default)) if field else default,
        kv_cache_dtype=checkpoint_kv_dtype(outer),
        memory_order=family.memory_order,
        fields_used=tuple(sorted(f.used)),
        **model_length(f),
    )
