"""What ``kv_connector_extra_config`` may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from decodebench.cache.values import Constant, Normal, Values
from decodebench.errors import DecodebenchError
from decodebench.words import shown

AUDITS = ("off", "plan", "bytes")


class OptionRefused(DecodebenchError):
    """An option of the connector that does not exist or cannot have this value."""


@dataclass(frozen=True)
class Options:
    """Options of ``GroupedDecodeBenchConnector``, as given in ``kv_connector_extra_config``.

    ``mean``, ``std``, ``seed``: the values (std 0 is a constant). ``startup_fill``: write the whole
    cache once at start; groups whose new blocks the engine zeroes are still filled per request.
    ``audit``: ``plan`` compares block ids, ``bytes`` poisons the cache, reads it back before each
    first decode step and is slow. ``audit_file``: where audits are written as JSON lines.
    ``strict``: an untested vLLM or an audit that finds a fault stops the engine.
    """

    mean: float = 0.015
    std: float = 0.0
    seed: int = 0
    startup_fill: bool = False
    audit: str = "off"
    audit_file: str | None = None
    strict: bool = False

    @property
    def values(self) -> Values:
        """What the connector fills with: a constant, or normal values from a bank of 4 MiB a dtype."""
        if self.std == 0:
            return Constant(self.mean)
        return Normal(self.mean, self.std, self.seed, bank_bytes=4 << 20)


def parse(extra_config: dict | None) -> Options:
    """The options in an extra config; ``OptionRefused`` names what is unknown and what is known."""
    if extra_config is not None and not isinstance(extra_config, Mapping):
        raise OptionRefused(
            f"kv_connector_extra_config={shown(extra_config)}: give a dictionary of options, "
            f"{', '.join(field.name for field in fields(Options))}"
        )
    extra_config = dict(extra_config or {})
    known = {field.name: field for field in fields(Options)}
    renamed = {"fill_mean": "mean", "fill_std": "std"}
    for name, value in extra_config.items():
        if name not in known:
            hint = f"; vLLM's {name} is called {renamed[name]} here" if name in renamed else ""
            raise OptionRefused(f"unknown option {shown(name)}: known are {', '.join(known)}{hint}")
        default = known[name].default
        accepted = {bool: bool, int: int, float: int | float}.get(type(default), str | None)
        if not isinstance(value, accepted) or (isinstance(value, bool) and not isinstance(default, bool)):
            raise OptionRefused(f"option {name}={shown(value)}: expected a value like {default!r}")
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
            raise OptionRefused(f"option {name}={shown(value)}: expected a number of at most 64 bits")
    options = Options(**extra_config)
    if options.audit not in AUDITS:
        raise OptionRefused(f"option audit={shown(options.audit)}: known are {', '.join(AUDITS)}")
    if options.seed < 0:
        raise OptionRefused(f"option seed={options.seed}: expected a whole number of 0 or more")
    if options.audit_file is not None and (not options.audit_file.strip() or "\0" in options.audit_file):
        raise OptionRefused(f"option audit_file={shown(options.audit_file)}: expected the path of a file")
    try:
        options.values  # noqa: B018 - refuses infinite means and negative spreads
    except DecodebenchError as error:
        raise OptionRefused(f"options mean={options.mean}, std={options.std}: {error}") from None
    return options
