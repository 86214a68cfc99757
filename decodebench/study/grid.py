"""A grid of cases: axes, each a value or a list of values, from a dictionary or a TOML file.

{"model": ["jamba-v0.1", "gemma-3-1b"], "block_size": [16, 32, 64], "context": "63x4096+1x262144"}
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import os.path
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from decodebench.errors import DecodebenchError
from decodebench.layout.pool import BlockError, parse_lengths
from decodebench.measure.journal import SCHEMA_VERSION
from decodebench.words import shown

#: how far a case goes, each level including those before it; traffic goes on from the layout alone
MEASURES = ("layout", "coverage", "audit", "decode", "traffic")
#: what the connector writes
VALUES = ("constant", "normal", "zeros", "unfilled")


class SweepError(DecodebenchError):
    """A grid that cannot be read, or two sweeps that should not be compared: says which key or setting."""


@dataclass(frozen=True)
class Case:
    """One point of a grid. Everything that can change its row is here, and so is hashed."""

    #: name of a model in data/models, or path of a config.json
    model: str
    #: fields of the config.json to change, as JSON: {"num_key_value_heads": 2}
    hf_overrides: str | None = None
    #: how far to go: "layout" (arithmetic), "coverage" (block ids), "audit" (bytes), "decode" (latency), or
    #: "traffic" (requests simulated on the layout)
    measure: str = "coverage"
    #: memory the layout is planned for, in bytes or with a unit
    memory: str = "8GiB"
    #: tokens a block; null: the model's and vLLM's own choice
    block_size: int | None = None
    #: strategy that makes groups; "fixed(4)" is fixed with four layers a group
    grouping: str = "auto"
    #: LBNHC (layers outermost) or BLHNC (blocks outermost); null: vLLM's own choice
    memory_order: str | None = None
    #: tokens a request, or a mix such as "63x4096+1x262144", which then also sets the batch
    context: str = "4096"
    #: requests in the batch
    batch: int = 8
    #: leading tokens that all requests share as a prefix-cache hit
    shared_prefix: int = 0
    #: "auto", "fp8", "fp8_e5m2" …
    kv_cache_dtype: str = "auto"
    #: dtype of recurrent states; "auto": the checkpoint's
    mamba_ssm_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_prefix_caching: bool = True
    #: longest request the layout must hold; null: the config's; "auto": what fits
    max_model_len: int | str | None = None
    #: a historic defect of the connector (A1 … A18), or null for the connector as it should be
    fault: str | None = None
    #: what is written: "constant", "normal", "zeros", or "unfilled" to leave the cache as allocated
    values: str = "normal"
    #: layers of each group that are allocated, for "audit" and "decode"; null: all of them
    layers_per_group: int | None = None
    #: decode implementation; null: the fastest that runs on the device
    backend: str | None = None
    device: str = "cpu"
    #: caches flushed before every step
    cold: bool = False
    #: decode steps are timed for at least this long
    min_seconds: float = 0.3
    seed: int = 0
    #: for "traffic": a trace's name or path
    trace: str | None = None
    #: requests a second; null: the trace's own times
    rate: float | None = None
    #: only the first so many; null: all
    requests: int | None = None
    #: whose floor steps take, divided by the efficiency
    machine: str = "h100"
    efficiency: float = 1.0
    max_num_seqs: int = 256
    #: limits of goodput in seconds: first token, further tokens; null: none
    ttft_limit: float | None = None
    tpot_limit: float | None = None

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens of every request."""
        lengths = parse_context(self.context)
        return lengths if len(lengths) == self.batch else lengths * self.batch

    def case_id(self) -> str:
        """A name made of the case's content and, for a config of the user's own, the file's content."""
        content = {"schema": SCHEMA_VERSION} | asdict(self)
        if self.measure != "traffic":  # these mean nothing to it, and came later
            content = {name: value for name, value in content.items() if name not in TRAFFIC_AXES}
        if os.path.isfile(self.model):
            content["model"] = hashlib.sha256(Path(self.model).read_bytes()).hexdigest()
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


AXES = tuple(field.name for field in fields(Case))

#: axes of ``traffic`` alone
TRAFFIC_AXES = AXES[AXES.index("trace") :]


def parse_context(text: str | int) -> tuple[int, ...]:
    """``"4096"`` → (4096,); ``"63x4096+1x262144"`` → 64 lengths. Raises ``SweepError``."""
    try:
        return parse_lengths(text)
    except BlockError as error:
        raise SweepError(str(error)) from None


def cases(grid: Mapping | Sequence[Mapping]) -> list[Case]:
    """Every case of a grid, or of several grids one after another, each case once.

    Raises ``SweepError`` for an unknown key, an empty axis, or a value of the wrong kind.
    """
    grids = [grid] if isinstance(grid, Mapping) else list(grid)
    if not grids:
        raise SweepError("an empty grid: give at least a model")
    found: dict[Case, None] = {}
    for one in grids:
        axes = {_known_axis(key): _values(key, value) for key, value in one.items()}
        if "model" not in axes:
            raise SweepError('a grid without a model: add model = "gemma-3-1b" or the path of a config.json')
        for point in itertools.product(*axes.values()):
            found[_case(dict(zip(axes, point)))] = None
    return list(found)


def load_grid(path: str | Path) -> list[dict]:
    """Grids of a TOML file: its top-level axes, joined with each ``[[grid]]`` table where there are some."""
    import tomllib

    try:
        content = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise SweepError(f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SweepError(f"{path}: not TOML ({error})") from error
    tables = content.pop("grid", [{}])
    if not isinstance(tables, list) or not tables:
        raise SweepError(f"{path}: [[grid]] is a list of tables, written with double brackets")
    return [content | table for table in tables]


def _known_axis(key: str) -> str:
    if key not in AXES:
        close = difflib.get_close_matches(key, AXES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise SweepError(f"unknown key {shown(key)} in a grid{hint}. Known are: {', '.join(AXES)}")
    return key


def _values(key: str, value) -> list:
    values = list(value) if isinstance(value, list | tuple | set | range) else [value]
    if not values:
        raise SweepError(f"axis {key!r} is empty: leave it out, or give it at least one value")
    return [None if v == "" else v for v in values]


_TYPES = {
    "int": (int,),
    "int | None": (int, type(None)),
    "bool": (bool,),
    "str": (str,),
    "str | None": (str, type(None)),
    "int | str | None": (int, str, type(None)),
    "float": (float, int),
    "float | None": (float, int, type(None)),
}


def _case(point: dict) -> Case:
    point = {k: str(v) if k in ("context", "memory") and type(v) is int else v for k, v in point.items()}
    if isinstance(point.get("hf_overrides"), Mapping):
        point["hf_overrides"] = json.dumps(point["hf_overrides"], sort_keys=True)
    point["model"] = str(point["model"]) if isinstance(point["model"], Path) else point["model"]
    for field in fields(Case):
        value = point.get(field.name, field.default)
        allowed = _TYPES[str(field.type)]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise SweepError(
                f"axis {field.name!r}: {shown(value)} is not {str(field.type).replace('None', 'null')}"
            )
        if isinstance(value, int) and not isinstance(value, bool) and value < (field.name in _POSITIVE):
            raise SweepError(f"axis {field.name!r}: {value} is too small")
    case = Case(**point)
    if case.measure not in MEASURES:
        raise SweepError(f"measure {shown(case.measure)}: choose {', '.join(MEASURES)}")
    if case.values not in VALUES:
        raise SweepError(f"values {shown(case.values)}: choose {', '.join(VALUES)}")
    lengths = parse_context(case.context)
    case = replace(case, context=case.context.replace(" ", "").replace("_", "").replace("×", "x"))
    # a mix says itself how many requests there are: one case, whatever the batch axis says
    return replace(case, batch=len(lengths)) if "x" in case.context or "+" in case.context else case


_POSITIVE = {
    "block_size",
    "batch",
    "tensor_parallel_size",
    "decode_context_parallel_size",
    "max_model_len",
    "layers_per_group",
    "requests",
    "max_num_seqs",
}
