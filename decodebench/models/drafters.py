"""Drafters: what a speculating engine keeps beside a model, from the drafter's config.json or the model's own.

After ``config/speculative.py`` and the drafting models of vLLM 0.32. A drafter attends with layers of its
own shape, numbered behind the model's; a model that brings layers for further tokens (multi-token
prediction) keeps for each of them what its last attending decoder layer keeps, with a few exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from decodebench.models.attention import KINDS, heads, window
from decodebench.models.families import FAMILIES
from decodebench.models.fields import ConfigError, Fields, parse, read_config
from decodebench.models.layers import AttentionLayer, HiddenStatesLayer, Layer
from decodebench.models.load import DATA, read_model, text_config
from decodebench.models.model import Model, is_full_attention
from decodebench.models.options import CacheOptions, OptionError

#: what ``draft_config`` says for the layers that the model brings itself
OWN = "mtp"
#: model type of the config that keeps hidden states for a connector
HIDDEN_STATES = "extract_hidden_states"
#: drafters without a cache: they guess from tokens, or with heads on the model's last hidden state
WITHOUT_CACHE = ("medusa", "mlp_speculator", "ngram", "suffix")
#: layers that attend, as ``Layer.mixer`` names them
ATTENDING = ("attention", "mla")
#: fields that say how many layers a model brings for further tokens
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


@dataclass(frozen=True)
class Own:
    """The layers for further tokens that models of a family bring, where they are not copies of its last ones.

    ``root``: where the i-th of them is registered; {n} is the model's depth plus i. ``kind``: ``full``,
    ``window``, ``typed`` (the config lists them behind the model's layers), ``first`` (like the model's i-th
    layer, whose number the engine reads for its own) or ``compressed`` (DeepSeek-V4). ``count``: how many,
    whatever the config says. ``chained``: each has its own step, so no more are built than tokens are drafted.
    """

    root: str = "model.layers.{n}"
    kind: str = "full"
    count: int | None = None
    chained: bool = False


#: model type → its layers for further tokens
OWN_LAYERS: dict[str, Own] = {
    "deepseek_v3": Own(),
    "deepseek_v32": Own(),
    "glm_moe_dsa": Own(),
    "kimi_k2": Own(),
    "mimo": Own(),
    "glm4_moe": Own(),
    "glm4_moe_lite": Own(),
    "glm_ocr_text": Own(),
    "ernie4_5_moe": Own(),
    "pangu_ultra_moe": Own(),
    "bailing_hybrid": Own(),
    "hy_v3": Own(),
    "hy_v4": Own(),
    "kimi_linear": Own(),
    "glm5_next_text": Own(),
    "longcat_flash": Own("model.layers.{twice}", count=1),
    "qwen3_next": Own("mtp.layers.{i}"),
    "qwen3_5_text": Own("mtp.layers.{i}"),
    "qwen3_5_moe_text": Own("mtp.layers.{i}"),
    "qwen4_exp_text": Own("mtp.layers.{n}"),
    "exaone_moe": Own("mtp.layers.{i}", "first"),
    "exaone4_5_text": Own("mtp.layers.{i}", "first"),
    "deepseek_v4": Own("model.layers.{n}", "compressed"),
    "nemotron_h": Own("mtp.layers.{i}", count=1),
    "minimax_m3_text": Own("model.layers.{i}"),
    "mimo_v2": Own("model.mtp.layers.{i}", "window", count=1),
    "mimo_v2_flash": Own("model.mtp.layers.{i}", "window", count=1),
    "dots3_note": Own(kind="typed"),
    "step3p5": Own("model.layers.{n}.mtp_block", "typed"),
    "inkling_model": Own("model.layers.{i}.transformer_block", "typed", chained=True),
}


def with_drafter(model: Model, options: CacheOptions) -> tuple[Model, CacheOptions]:
    """The model with the layers of the drafter that the options name, and the tokens that it drafts.

    Without one both come back as they are. Raises ``OptionError`` or ``ConfigError`` where the model has no
    such layers, the drafter's config describes none, or the number of tokens does not go with it.
    """
    asked = options.draft_config
    if asked is None:
        return model, options
    if asked == OWN:
        return _own(model, options)
    config, name = _config(asked)
    drafted = options.num_speculative_tokens or _tokens(config)
    if not drafted:
        raise OptionError(
            f"draft_config = {name}: it does not say how many tokens are drafted: give num_speculative_tokens"
        )
    layers, what = drafter_layers(model, config, name)
    return (
        replace(model, drafter=layers, drafter_name=f"{name} ({what})"),
        replace(options, num_speculative_tokens=drafted),
    )


def _config(asked: str | Mapping) -> tuple[dict, str]:
    """The drafter's fields and what to call it: a mapping, JSON, a known name or a path."""
    if isinstance(asked, Mapping):
        return dict(asked), "the drafter"
    if asked.lstrip().startswith("{"):
        return parse(asked, "draft_config"), "the drafter"
    return read_config(asked, DATA)


def _tokens(config: Mapping) -> int | None:
    """Tokens that a config of the speculators' format drafts; other drafters leave it to the user."""
    inner = config.get("speculators_config")
    methods = inner.get("proposal_methods") if isinstance(inner, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    found = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return found if isinstance(found, int) else None


def drafter_layers(model: Model, config: Mapping, name: str) -> tuple[tuple[Layer, ...], str]:
    """The layers of a drafter with a config of its own, named as an engine names them, and its method."""
    f = Fields(_unwrapped(config), f"draft_config, {name}")
    model_type = f.get("model_type")
    if model_type == HIDDEN_STATES or (model_type is None and f.has("eagle_aux_hidden_state_layer_ids")):
        return (_hidden_states(model, f),), "hidden states"
    if model_type in WITHOUT_CACHE:
        raise OptionError(
            f"draft_config = {name}: a drafter of type {model_type} keeps no cache: give "
            "num_speculative_tokens alone"
        )
    method = _method(f, name)
    if not isinstance(model_type, str):
        raise f.missing("model_type")
    if method == "dflash" or (method == "eagle" and model_type == "qwen3"):
        family = FAMILIES.get(model_type)
        layers = _by_types(f.with_defaults(family.defaults if family else {}), whole=method == "dflash")
        return tuple(replace(x, name=_moved(x.name, model.depth)) for x in layers), method
    draft = read_model(f.values, f.source)
    if draft.generic:
        raise ConfigError(
            f"{f.source}: no reader knows model_type {model_type!r}, and a drafter is not guessed: pass the "
            "layers' specs by hand"
        )
    if draft.has_states:
        raise OptionError(f"draft_config = {name}: it keeps states, and drafters with states are not served")
    if method == "draft model":
        return tuple(replace(x, name=f"draft_model.{x.name}") for x in draft.layers), method
    return tuple(replace(x, name=_moved(x.name, model.depth)) for x in draft.layers), method


def _unwrapped(config: Mapping) -> dict:
    """The fields of the drafting layers: speculators and EAGLE configs hold them inside."""
    found: dict[str, Any] = dict(config)
    inner = config.get("transformer_layer_config")
    if isinstance(inner, Mapping):
        kept = {k: v for k, v in config.items() if k in ("speculators_model_type", "dflash_config")}
        found = {"torch_dtype": config.get("torch_dtype")} | dict(inner) | kept
        found.setdefault("model_type", "llama")
    if config.get("model_type") == "eagle" and isinstance(config.get("model"), Mapping):
        found = dict(config["model"]) | {"architectures": config.get("architectures") or ["Eagle"]}
    return found


def _method(f: Fields, name: str) -> str:
    """How the drafter works, by its architecture, its format, or as vLLM does by its name."""
    said = f.get("architectures")
    told = " ".join(map(str, said)) if isinstance(said, list) else ""
    told = f"{told} {f.get('speculators_model_type', default='')} {name}".lower()
    if "dflash" in told or f.has("dflash_config") or "assistantmodel" in told or "lilicorr" in told:
        return "dflash"
    if "dspark" in told:
        return "dspark"
    return "eagle" if "eagle" in told else "draft model"


def _moved(name: str, depth: int) -> str:
    """A layer's name behind the model's own: the drafter's layers are counted on from its depth."""
    return re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) + depth}", name, count=1)


def _by_types(f: Fields, whole: bool) -> tuple[Layer, ...]:
    """Attention whose windows stand in ``layer_types`` alone.

    ``whole``: block drafters (DFlash) may give all layers a window in ``dflash_config``.
    """
    given = f.get("dflash_config") if whole else None
    config = Fields(given if isinstance(given, Mapping) else {}, f"{f.source}, dflash_config")
    count, kv_heads, size = heads(f)
    length = f.layer_count()
    types = f.listing("layer_types", length=length, choices=KINDS)
    everywhere = bool(config.get("use_swa", default=False))
    if types is None or (everywhere and "sliding_attention" not in types):
        types = ["sliding_attention" if everywhere else "full_attention"] * length
    span = config.optional("swa_window_size") or window(f)
    if "sliding_attention" in types and span is None:
        raise f.missing("sliding_window", "dflash_config.swa_window_size")
    return tuple(
        AttentionLayer(
            f"model.layers.{i}.self_attn.attn",
            count,
            kv_heads,
            size,
            sliding_window=span if kind == "sliding_attention" else None,
        )
        for i, kind in enumerate(types)
    )


def _hidden_states(model: Model, f: Fields) -> HiddenStatesLayer:
    ids = f.listing("eagle_aux_hidden_state_layer_ids")
    if not ids:
        raise f.missing("eagle_aux_hidden_state_layer_ids")
    inner, _ = text_config(Fields(model.config, model.name))
    width = inner.integer("hidden_size", "n_embd", "d_model")
    return HiddenStatesLayer(f"cache_only_layers.{model.depth}", len(ids), width)


# -- layers that the model brings itself ------------------------------------------------------------


def _own(model: Model, options: CacheOptions) -> tuple[Model, CacheOptions]:
    """The model with its own layers for further tokens."""
    own = OWN_LAYERS.get(model.model_type)
    f, _ = text_config(Fields(model.config, model.name))
    brings = _count(f, own, model.config)
    if own is None or not brings:
        field = next((name for name in COUNTS if f.has(name)), None)
        why = "no such layers are known of its family" if own is None else "its config counts none of them"
        raise OptionError(
            f"draft_config = {OWN!r}: {model.name} ({model.model_type}) brings no layers for further tokens "
            f"({why}{f'; {field} = {f.get(field)}' if field and own is None else ''}): give the drafter's config"
        )
    drafted = options.num_speculative_tokens or brings
    if drafted > brings and drafted % brings:
        raise OptionError(
            f"num_speculative_tokens = {drafted}: {model.name} predicts {brings} tokens at a time, and only "
            "whole multiples of that are served"
        )
    built = min(brings, drafted) if own.chained else brings
    layers: list[Layer] = []
    for i in range(built):
        root = own.root.format(i=i, n=model.depth + i, twice=2 * model.depth + i)
        for prefix, layer in _like(model, f, own, i):
            layers.append(replace(layer, name=root + layer.name[len(prefix) :]))
    # every layer of a chain reads a token further ahead, and may come back to the last ones
    chain = f.optional("num_nextn_predict_layers", least=0) or 1
    kept = drafted - 1 if min(chain, drafted) > 1 else 0
    name = f"its own {built} layer{'s' * (built != 1)} for further tokens"
    return (
        replace(model, drafter=tuple(layers), drafter_name=name, extra_retained_tokens=kept),
        replace(options, num_speculative_tokens=drafted),
    )


def _count(f: Fields, own: Own | None, outer: Mapping) -> int:
    """How many layers for further tokens the config counts."""
    nested = outer.get("mtp_config")
    if isinstance(nested, Mapping):
        f = Fields(nested, f"{f.source}, mtp_config")
    found = next((f.integer(name, least=0) for name in COUNTS if f.has(name)), 0)
    if found == 0 and own is not None and own.count and "num_nextn_predict_layers" not in f.values:
        # counted by the engine alone, where the weights are there (MiMo-V2, LongCat)
        return own.count
    return own.count if own is not None and own.count and found else found


def _like(model: Model, f: Fields, own: Own, i: int) -> list[tuple[str, Layer]]:
    """The caches of the decoder layer that the i-th layer for further tokens is like, with its path."""
    kind = own.kind
    if kind == "first":
        return _caches_of(model, decoder_layer(model, i))
    if kind == "compressed":
        ratios = f.listing("compress_ratios") or []
        if any(ratios[model.depth + i : model.depth + i + 1]):
            raise f.wrong(
                ("compress_ratios",), ratios[model.depth + i], "a layer for further tokens has a window alone"
            )
        prefix = decoder_layer(model, 0)
        return [(prefix, x) for _, x in _caches_of(model, prefix) if getattr(x, "part", "") == "window"]
    if kind == "typed":
        kind = _type_of(model, f, i)
    windowed = [x for x in model.layers if getattr(x, "sliding_window", None) and x.mixer in ATTENDING]
    full = [x for x in model.layers if is_full_attention(x) and not getattr(x, "sliding_window", None)]
    wanted = windowed if kind == "window" else full
    if not wanted:
        raise OptionError(
            f"draft_config = {OWN!r}: {model.name} has no layer with "
            f"{'a window' if kind == 'window' else 'full attention'} that a layer for further tokens could be "
            "like: give the drafter's config"
        )
    # of sparse attention one with keys of its own
    like = next((x for x in wanted if getattr(x, "indexer", False)), wanted[-1])
    found = _caches_of(model, _prefix(like.name))
    if own.count and "{twice}" in own.root:  # LongCat's layers attend twice, these once
        prefix, layer = found[-1]
        return [(prefix, replace(layer, name=layer.name.replace("self_attn.1.", "self_attn.")))]
    return found


def _prefix(name: str) -> str:
    """The path of the decoder layer that a cache belongs to."""
    match = re.match(r".*?layers\.\d+", name)
    return match[0] if match else name.rsplit(".", 1)[0]


def decoder_layer(model: Model, number: int) -> str:
    """The path of the decoder layer of this number."""
    return next(
        (p for p in map(_prefix, model.layer_names) if p.endswith(f".{number}")),
        _prefix(model.layer_names[0]),
    )


def _caches_of(model: Model, prefix: str) -> list[tuple[str, Layer]]:
    return [(prefix, x) for x in model.layers if x.name.startswith(prefix + ".")]


def _type_of(model: Model, f: Fields, i: int) -> str:
    """Whether the i-th layer for further tokens has a window: config.json lists them behind the others."""
    local = model.config.get("mtp_config")
    if isinstance(local, Mapping):
        return "window" if i in (local.get("local_layer_ids") or ()) else "full"
    listed = f.listing("mtp_layer_types")
    if listed is None and model.model_type == "dots3_note":
        return "window"
    if listed is None:
        types = f.listing("layer_types") or []
        listed = types[model.depth :]
    if i >= len(listed):
        raise f.missing("layer_types of the layers for further tokens")
    return "window" if listed[i] == "sliding_attention" else "full"


def drafter_text(model: Model, options: CacheOptions) -> str | None:
    """One line about what drafts; None where nothing does."""
    if not model.drafter:
        return None
    names = ", ".join(layer.name for layer in model.drafter[:2]) + (" …" if len(model.drafter) > 2 else "")
    return (
        f"drafter: {model.drafter_name}, {len(model.drafter)} caches ({names}), "
        f"{options.num_speculative_tokens} tokens a step"
    )
