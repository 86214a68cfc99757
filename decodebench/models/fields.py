"""A config.json as data: typed access to its fields, with errors that name file, field and value."""

from __future__ import annotations

import json
import os.path
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decodebench.errors import DecodebenchError
from decodebench.words import shown

#: no model has more: such a number is a typing error, and would take hours to plan
MAX_LAYERS = 10_000
MAX_COUNT = 2**31
MAX_FILE_BYTES = 64 * 2**20


class ConfigError(DecodebenchError):
    """A config.json that does not describe a cache: says which file, field and value, and what to do."""


class Fields:
    """The fields of one config, with the defaults of its family behind them.

    A field that is absent takes the family's default, then the caller's; one that is null takes the
    caller's alone, as in the config classes. ``used`` collects the names that were asked for: they
    are the ones that shape the cache.
    """

    def __init__(self, values: Mapping, source: str, defaults: Mapping | None = None) -> None:
        self.values = values
        self.source = source
        self.defaults = defaults or {}
        self.used: set[str] = set()

    def with_defaults(self, defaults: Mapping) -> Fields:
        """The same fields with a family's defaults; both note in one set what was asked for."""
        fields = Fields(self.values, self.source, defaults)
        fields.used = self.used
        return fields

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that is there, as it is; ``default`` where none is."""
        self.used.update(names)
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        if not any(name in self.values for name in names):
            for name in names:
                if self.defaults.get(name) is not None:
                    return self.defaults[name]
        return default

    def declares(self, name: str) -> bool:
        """Whether the field is written down, even as null or zero."""
        self.used.add(name)
        return name in self.values or name in self.defaults

    def has(self, *names: str) -> bool:
        """Whether one of these fields is there, or has a default, and is not null."""
        return self.get(*names) is not None

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = MAX_COUNT) -> int:
        """An integer field; raises ``ConfigError`` where it is missing, no integer or out of range."""
        value = self.get(*names, default=default)
        if value is None:
            raise self.missing(*names)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(names, value, "an integer is expected")
        if value < least:
            raise self.wrong(
                names, value, "it must be positive" if least == 1 else f"at least {least} is expected"
            )
        if value > most:
            raise self.wrong(names, value, f"at most {most} is sensible")
        return value

    def number(self, *names: str) -> float:
        """A positive number; raises ``ConfigError`` where it is missing or none."""
        value = self.get(*names)
        if value is None:
            raise self.missing(*names)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MAX_COUNT:
            raise self.wrong(names, value, "a positive number is expected")
        return value

    def layer_count(self, *names: str) -> int:
        """A number of layers, at most ``MAX_LAYERS``; raises ``ConfigError`` like ``integer``."""
        return self.integer(*(names or ("num_hidden_layers",)), most=MAX_LAYERS)

    def optional(self, *names: str, least: int = 1) -> int | None:
        """An integer field, or None where it is absent or null."""
        return self.integer(*names, least=least) if self.has(*names) else None

    def listing(
        self, *names: str, length: int | None = None, choices: Mapping | set | None = None
    ) -> list | None:
        """A list field, or None; every entry must be one of ``choices``, and there must be ``length``."""
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise self.wrong(names, value, "a list is expected")
        if len(value) > MAX_LAYERS:
            raise self.wrong(names, f"a list of {len(value)}", f"at most {MAX_LAYERS} layers are sensible")
        if length is not None and len(value) < length:
            raise self.wrong(names, f"a list of {len(value)}", f"there are {length} layers")
        if choices is not None:
            for entry in value:
                if not isinstance(entry, str | int) or entry not in choices:
                    raise self.wrong(names, entry, f"known are {', '.join(map(str, choices))}")
        return list(value) if length is None else list(value[:length])

    def missing(self, *names: str) -> ConfigError:
        """The error that none of these fields is there, for the caller to raise."""
        wanted = " or ".join(map(repr, names))
        return ConfigError(
            f"{self.source}: no field {wanted}: add it, or pass the layers' specs by hand, "
            "plan({'layer name': FullAttentionSpec(...), ...}, memory=...)"
        )

    def wrong(self, names: Sequence[str], value: object, why: str) -> ConfigError:
        """The error that a field's ``value`` cannot be used, and why, for the caller to raise."""
        name = next((n for n in names if self.values.get(n) is not None), names[0])
        return ConfigError(f"{self.source}: {name} = {shown(value)}: {why}")

    def layer_numbers(self, *names: str) -> list[int]:
        """A list field of whole numbers, empty where it is absent."""
        found = self.listing(*names) or []
        for entry in found:
            if isinstance(entry, bool) or not isinstance(entry, int):
                raise self.wrong(names, entry, "a list of layers' numbers is expected")
        return found


def read_config(name_or_path: str | Path, data: Path) -> tuple[dict, str]:
    """The parsed config and what to call it: a name in ``data``, a path, a
    folder with a config.json, or ``-``.

    Raises ``ConfigError`` where there is no such file, or it is not a JSON object.
    """
    text = str(name_or_path)
    if text == "-":
        return parse(sys.stdin.read(), "standard input"), "standard input"
    if "/" not in text and "\\" not in text and not text.startswith("."):
        known = data / text / "config.json"
        if os.path.isfile(known):
            return parse(known.read_text(), str(known)), text
    path = Path(text).expanduser()
    if os.path.isdir(path):
        if not os.path.isfile(path / "config.json"):
            raise ConfigError(f"{text}: a directory without a config.json: name the file itself")
        path = path / "config.json"
    if not os.path.isfile(path):
        raise ConfigError(_unknown(text, data))
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{text}: {path.stat().st_size} bytes are too many for a config.json")
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{text}: cannot be read as text ({type(error).__name__}): is it a config.json?"
        ) from None
    return parse(content, text), text


def parse(content: str, source: str) -> dict:
    """The object that a config.json holds; raises ``ConfigError`` for anything else and for an adapter's."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not JSON ({error}): a model's config.json is expected") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{source}: JSON, but {type(config).__name__} instead of an object with fields")
    if "peft_type" in config and "model_type" not in config:
        base = config.get("base_model_name_or_path") or "its base model"
        raise ConfigError(
            f"{source}: the config of an adapter ({config['peft_type']}), which has no cache of its own: "
            f"give the config.json of {base}"
        )
    return config


def _unknown(text: str, data: Path) -> str:
    remote = re.fullmatch(r"(?:https?://[^/]+/)?([\w.-]+/[\w.-]+?)(?:/(?:tree|blob|raw|resolve)/.*)?/?", text)
    if remote and not text.startswith((".", "/", "~")):
        name = remote[1]
        return (
            f"{text}: no such file. A hub's id or address is not fetched: download its config first "
            f"(hf download {name} config.json --local-dir {name.split('/')[-1]}) and give its path"
        )
    if not data.is_dir():
        return (
            f"{text}: no such file, and the folder of known models {data} is missing: "
            "install from a clone (pip install -e .), or give the path of a config.json"
        )
    import difflib

    names = sorted(p.parent.name for p in data.glob("*/config.json"))
    near = difflib.get_close_matches(text, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"{text}: neither a file nor a known model{hint} Known are {', '.join(names)}"
