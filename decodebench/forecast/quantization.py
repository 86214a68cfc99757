"""How many bits a weight takes, by role: from ``quantization_config``, or by the name of a scheme.

Scales are counted with the weights they scale. What a scheme leaves alone (embeddings, norms, routers,
the head unless it is named, and what a config excludes) keeps the model's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from decodebench.errors import DecodebenchError
from decodebench.forecast.parts import ROLES
from decodebench.models.specs import DTYPE_BYTES


class QuantizationError(DecodebenchError):
    """A quantization that is not known: says which field or name, and what is."""


@dataclass(frozen=True)
class Format:
    """``bits`` a weight, scales included, and the dtype whose peak its products run at."""

    name: str
    bits: float
    dtype: str


#: scheme → format; scales: one float32 for 128×128 values (fp8 blocks), one byte for 32 (mxfp4, mxfp8) or
#: 16 values (nvfp4), a 16-bit scale and a zero point a group (int4)
FORMATS = {
    "fp8": Format("fp8", 8, "fp8"),
    "fp8_block": Format("fp8_block", 8 + 32 / 128**2, "fp8"),
    "mxfp8": Format("mxfp8", 8 + 8 / 32, "fp8"),
    "int8": Format("int8", 8, "int8"),
    "nvfp4": Format("nvfp4", 4 + 8 / 16, "fp4"),
    "mxfp4": Format("mxfp4", 4 + 8 / 32, "fp4"),
    "int4": Format("int4", 4 + (16 + 4) / 128, "int4"),
    "nf4": Format("nf4", 4 + 32 / 64, "int4"),
}
#: roles that a scheme quantizes where it is only named
BY_NAME = ("attention", "latent", "mixer", "mlp", "experts", "shared_experts")
#: role → modules that stand for it, against which a config's exclusions are matched
MODULES = {
    "attention": (
        "model.layers.{i}.self_attn.q_proj",
        "model.layers.{i}.self_attn.o_proj",
        "model.layers.{i}.self_attn",
    ),
    "latent": (
        "model.layers.{i}.self_attn.kv_b_proj",
        "model.layers.{i}.self_attn.o_proj",
        "model.layers.{i}.self_attn",
    ),
    "mixer": (
        "model.layers.{i}.linear_attn.in_proj_qkv",
        "model.layers.{i}.linear_attn.in_proj_qkvz",
        "model.layers.{i}.linear_attn",
        "model.layers.{i}.mixer.in_proj",
        "backbone.layers.{i}.mixer.in_proj",
        "model.layers.{i}.mamba.in_proj",
    ),
    "mlp": (
        "model.layers.{i}.mlp.gate_proj",
        "model.layers.{i}.mlp.down_proj",
        "model.layers.{i}.mlp",
        "backbone.layers.{i}.mixer.up_proj",
    ),
    "experts": (
        "model.layers.{i}.mlp.experts.0.gate_proj",
        "model.layers.{i}.mlp.experts",
        "backbone.layers.{i}.mixer.experts.0.up_proj",
    ),
    "shared_experts": (
        "model.layers.{i}.mlp.shared_experts.gate_proj",
        "model.layers.{i}.mlp.shared_expert.gate_proj",
        "model.layers.{i}.mlp.shared_experts",
        "model.layers.{i}.mlp.shared_expert",
        "backbone.layers.{i}.mixer.shared_experts.up_proj",
    ),
    "head": ("lm_head",),
}


def formats(config: Mapping, dtype: str, scheme: str | Mapping | None = "auto") -> dict[str, Format]:
    """Role → format of its weights; roles that are missing keep ``dtype``.

    ``scheme``: ``auto`` reads config.json's ``quantization_config``, None takes none, a name is one of
    ``FORMATS`` for all projections and experts, a mapping gives names by role. Raises
    ``QuantizationError`` for a method that is not known.
    """
    plain = Format(dtype, 8 * DTYPE_BYTES[dtype], {"float32": "fp32", "float16": "fp16"}.get(dtype, "bf16"))
    if scheme == "auto":
        found = from_config(config)
    elif scheme is None or scheme == "none":
        found = {}
    elif isinstance(scheme, Mapping):
        found = {role: named(name) for role, name in scheme.items() if name not in (None, "none", dtype)}
    else:
        found = dict.fromkeys(BY_NAME, named(scheme))
    if unknown := sorted(set(found) - set(ROLES)):
        raise QuantizationError(f"quantization of {unknown[0]!r}: roles are {', '.join(ROLES)}")
    return {role: found.get(role, plain) for role in ROLES}


def named(name: str) -> Format:
    if name not in FORMATS:
        raise QuantizationError(f"quantization {name!r}: known are auto, none, {', '.join(FORMATS)}")
    return FORMATS[name]


def from_config(config: Mapping) -> dict[str, Format]:
    """Role → format, as the checkpoint's own ``quantization_config`` says."""
    quant = config.get("quantization_config")
    if not isinstance(quant, Mapping):
        inner = config.get("text_config")
        quant = inner.get("quantization_config") if isinstance(inner, Mapping) else None
    if not isinstance(quant, Mapping):
        return {}
    nested = quant.get("quantization")
    inner = nested if isinstance(nested, Mapping) else quant
    method = str(quant.get("quant_method") or "modelopt").lower().replace("_", "-")
    by_layer = inner.get("quantized_layers")
    if isinstance(by_layer, Mapping) and by_layer:
        return from_layers(by_layer)
    excluded = exclusions(inner, quant)
    chosen = method_format(method, quant, inner)
    roles = [role for role in (*BY_NAME, "head") if role != "head" or excluded]
    if method == "mxfp4":  # the kernels of this method take experts alone
        roles = ["experts"]
    if "compressed" in method or method == "modelopt":
        roles = [role for role in roles if role != "head" or targets_head(quant)]
    else:
        roles = [role for role in roles if role != "head"]
    return {role: chosen for role in roles if not is_excluded(role, excluded)}


def exclusions(*places: Mapping) -> list[str]:
    """Modules that a config leaves alone, under the names that methods use."""
    found: list[str] = []
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude"):
        value = next((place[key] for place in places if place.get(key)), ())
        if not isinstance(value, list | tuple):
            raise QuantizationError(f"quantization_config: {key} = {value!r}: a list of modules is expected")
        found += map(str, value)
    return found


def whole(place: Mapping, default: int, *names: str) -> int:
    """An integer field of a quantization config; ``default`` where none of the names is there."""
    name = next((n for n in names if place.get(n) is not None), None)
    value = default if name is None else place[name]
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= 2**20:
        raise QuantizationError(f"quantization_config: {name} = {value!r}: an integer is expected")
    return value


def targets_head(quant: Mapping) -> bool:
    """Whether a config's groups name the head beside all linear layers."""
    groups = quant.get("config_groups")
    groups = groups.values() if isinstance(groups, Mapping) else ()
    return any("lm_head" in str(group.get("targets")) for group in groups if isinstance(group, Mapping))


def method_format(method: str, quant: Mapping, inner: Mapping) -> Format:
    """The format that a method and its numbers describe."""
    algorithm = str(inner.get("quant_algo") or "").lower()
    if method in ("fp8", "fbgemm-fp8", "ptpc-fp8", "modelopt-fp8") or algorithm.startswith("fp8"):
        return FORMATS["fp8_block" if quant.get("weight_block_size") else "fp8"]
    if method in ("mxfp4", "gpt-oss-mxfp4") or "mxfp4" in algorithm:
        return FORMATS["mxfp4"]
    if "nvfp4" in algorithm or "nvfp4" in method or method == "modelopt-fp4":
        return FORMATS["nvfp4"]
    if method == "mxfp8" or "mxfp8" in algorithm:
        return FORMATS["mxfp8"]
    if method == "bitsandbytes":
        return FORMATS["int8"] if quant.get("load_in_8bit") or quant.get("_load_in_8bit") else FORMATS["nf4"]
    if (
        method
        in (
            "gptq",
            "awq",
            "auto-round",
            "gptq-marlin",
            "awq-marlin",
            "w4a16-awq",
            "autoround",
            "intel/auto-round",
        )
        or "w4a" in algorithm
    ):
        return grouped(whole(quant, 4, "bits", "w_bit"), whole(quant, 128, "group_size"), zeros=True)
    if "compressed" in method or method == "quark":
        return compressed(quant)
    raise QuantizationError(
        f"quantization_config: quant_method {quant.get('quant_method')!r}: pass quantization= with one of "
        f"{', '.join(FORMATS)}, or a format by role"
    )


def grouped(bits: int, group: int, zeros: bool = False) -> Format:
    """Integers with a 16-bit scale a group, and a zero point where they are not symmetric."""
    if not 1 <= bits <= 16:
        raise QuantizationError(f"quantization_config: {bits} bits a weight: 1 to 16 are expected")
    extra = (16 + (bits if zeros else 0)) / group if group > 0 else 0
    return Format(f"int{bits}", bits + extra, "int8" if bits == 8 else "int4")


def compressed(quant: Mapping) -> Format:
    """The weights of the first group of a compressed-tensors config."""
    groups = quant.get("config_groups") or {"all": quant.get("global_quant_config")}
    first = (
        next((g for g in groups.values() if isinstance(g, Mapping)), {})
        if isinstance(groups, Mapping)
        else {}
    )
    weights = first.get("weights") or first.get("weight") or {}
    if not isinstance(weights, Mapping) or not weights:
        raise QuantizationError("quantization_config: no config_groups with weights: pass quantization=")
    kind, strategy = str(weights.get("type", weights.get("dtype", "int"))), str(weights.get("strategy", ""))
    bits = whole(weights, {"fp8_e4m3": 8, "fp4": 4}.get(kind, 4), "num_bits")
    group = whole(weights, 0, "group_size")
    if kind.startswith(("float", "fp")):
        if bits == 8:
            return FORMATS["fp8_block" if strategy == "block" else "mxfp8" if group == 32 else "fp8"]
        return FORMATS["nvfp4" if group == 16 else "mxfp4"]
    if strategy in ("channel", "tensor"):
        group = 0
    return grouped(bits, group, zeros=weights.get("symmetric") is False)


def from_layers(by_layer: Mapping) -> dict[str, Format]:
    """Formats by role where a config lists every module (mixed precision): the commonest of each role."""
    counts: dict[str, dict[str, int]] = {}
    for module, how in by_layer.items():
        algorithm = str(how.get("quant_algo") if isinstance(how, Mapping) else how).lower()
        format = (
            "nvfp4" if "nvfp4" in algorithm or "fp4" in algorithm else "fp8" if "fp8" in algorithm else None
        )
        if "w4a16" in algorithm and "fp4" not in algorithm:
            format = "int4"
        role = role_of(str(module))
        if format and role:
            votes = counts.setdefault(role, {})
            votes[format] = votes.get(format, 0) + 1
    return {role: FORMATS[max(votes, key=votes.__getitem__)] for role, votes in counts.items()}


def role_of(module: str) -> str | None:
    """The role of a module by its path."""
    if "lm_head" in module:
        return "head"
    if "shared_expert" in module:
        return "shared_experts"
    if "expert" in module:
        return "experts"
    if "linear_attn" in module or "mamba" in module or re.search(r"mixer\.(in|out)_proj", module):
        return "mixer"
    if re.search(r"kv_a_proj|kv_b_proj|q_a_proj|q_b_proj", module):
        return "latent"
    if "attn" in module or re.search(r"mixer\.[qkvo]_proj", module):
        return "attention"
    if "mlp" in module or "up_proj" in module or "down_proj" in module:
        return "mlp"
    return None


def is_excluded(role: str, patterns: list[str]) -> bool:
    """Whether a config's exclusions take a role out, judged by modules of layers in the middle.

    Patterns are substrings or paths, ``*`` for anything, or regular expressions after ``re:``.
    """
    for template in MODULES.get(role, ()):
        for layer in (3, 4, 5, 7):
            module = template.format(i=layer)
            if any(matches(pattern, module) for pattern in patterns):
                break
        else:
            continue
        return True
    return False


def matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    pattern = pattern.replace("language_model.", "")
    if "*" in pattern:
        return re.match(re.escape(pattern).replace(r"\*", ".*") + "$", module) is not None
    return (
        module == pattern
        or module.endswith("." + pattern)
        or f".{pattern}." in module
        or module.startswith(pattern + ".")
    )
