"""The floor of a decode step: what it must read, compute and send, at the machine's data-sheet rates.

A part takes at least max(bytes / bandwidth, operations / peak of its dtype). A perfect engine overlaps
parts, so no step is faster than all bytes at full bandwidth, all operations at full peak, or all
messages at the link's rate, whichever is longest: that is ``Bound.seconds``. ``serial_seconds`` adds the
parts up, as an engine does that runs one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from math import prod
from typing import TYPE_CHECKING, Any

from decodebench.errors import DecodebenchError
from decodebench.forecast.machines import Machine
from decodebench.forecast.machines import machine as find_machine
from decodebench.forecast.parts import ROLES, Part
from decodebench.forecast.quantization import Format, formats
from decodebench.forecast.weights import fields_of, not_exact, tensors, tied_head, width_of
from decodebench.models.fields import Fields
from decodebench.models.layers import Layer
from decodebench.models.load import load_model
from decodebench.models.model import Model
from decodebench.models.options import CacheOptions
from decodebench.models.specs import DTYPE_BYTES, KVCacheSpec, cdiv
from decodebench.words import bytes_text, columns, seconds_text, share_text

if TYPE_CHECKING:
    import pandas as pd

#: operations that a number of a state takes in one step: decay and update, and what is read out of it
STATE_OPERATIONS = {"mamba1": 6, "mamba2": 6, "gdn": 8, "kda": 8, "linear": 4, "short_conv": 2}


class BoundError(DecodebenchError):
    """A step that cannot be bounded: says which argument, its value, and what is expected."""


@dataclass(frozen=True)
class Load:
    """One part of a step on one rank: bytes from memory, operations at a dtype's peak, bytes over the link."""

    part: str
    bytes: float = 0.0
    operations: float = 0.0
    dtype: str = "bf16"
    sent: float = 0.0

    def seconds(self, machine: Machine) -> float:
        """The least time of this part alone."""
        return max(
            self.bytes / machine.bandwidth,
            self.operations / machine.peak_of(self.dtype),
            self.sent / machine.link,
        )


@dataclass(frozen=True)
class Bound:
    """The floor of one decode step. All sizes are one rank's; ``batch`` is the whole deployment's.

    With pipeline parallelism as many microbatches are under way as there are stages, and ``seconds`` is
    what one of them takes through all stages: each of its requests has a token more then.
    """

    model: str
    machine: Machine
    batch: float
    context: str
    loads: tuple[Load, ...]
    #: tokens that one request gets a step
    tokens_per_step: float = 1.0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    #: bytes of weights that lie on one rank, and of the cache of its requests
    weight_bytes: float = 0.0
    cache_bytes: float = 0.0
    parameters: int = 0
    #: routed experts that a layer is expected to touch, of how many
    experts_touched: float = 0.0
    experts: int = 0
    #: why the weights are an estimate, in one sentence; None where they are exact
    weights_note: str | None = None
    #: length → requests of it
    lengths: Mapping[int, float] = field(default_factory=dict, repr=False)
    #: what it is the floor of, to ask for other requests
    deployment: Prepared | None = field(default=None, repr=False, compare=False)

    @cached_property
    def bytes(self) -> float:
        """Bytes that one rank moves between memory and chip."""
        return sum(load.bytes for load in self.loads)

    @cached_property
    def operations(self) -> float:
        return sum(load.operations for load in self.loads)

    @cached_property
    def resources(self) -> dict[str, float]:
        """Seconds that each resource of one rank is busy at its full rate."""
        work = sum(load.operations / self.machine.peak_of(load.dtype) for load in self.loads)
        sent = sum(load.sent for load in self.loads)
        return {
            "memory": self.bytes / self.machine.bandwidth,
            "arithmetic": work,
            "link": sent / self.machine.link,
        }

    @cached_property
    def seconds(self) -> float:
        """The floor: no engine makes a step of this work faster on this machine."""
        return max(self.resources.values())

    @cached_property
    def serial_seconds(self) -> float:
        """The floor of an engine that runs parts one after another."""
        return sum(load.seconds(self.machine) for load in self.loads)

    @property
    def binds(self) -> str:
        """The resource that is busy longest: memory, arithmetic or link."""
        return max(self.resources, key=self.resources.__getitem__)

    @property
    def tokens_per_second(self) -> float:
        """The ceiling of all requests together."""
        return self.batch * self.tokens_per_step / self.seconds

    @property
    def tokens_per_second_per_request(self) -> float:
        return self.tokens_per_step / self.seconds

    @property
    def fits(self) -> bool:
        """Whether weights and cache fit the machine's memory."""
        return self.weight_bytes + self.cache_bytes <= self.machine.memory

    @cached_property
    def weight_seconds(self) -> float:
        """Least seconds of the parts that are weights."""
        return sum(load.seconds(self.machine) for load in self.loads if load.part in ROLES)

    @cached_property
    def cache_seconds(self) -> float:
        """Least seconds of the parts that are the cache: keys, values, latents, states."""
        others = (*ROLES, "all-reduce", "all-to-all", "prompt attention")
        return sum(load.seconds(self.machine) for load in self.loads if load.part not in others)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Part → its least seconds."""
        return {load.part: load.seconds(self.machine) for load in self.loads}

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The bound in at most ten lines: what it is of, the floor, the largest parts, whether it fits."""
        where = self.machine.title + (f" × {self.ranks}" if self.ranks > 1 else "")
        head = f"{self.model} on {where}: {self.requests_text}"
        what = {"memory": "memory's bandwidth", "arithmetic": "arithmetic", "link": "the link"}[self.binds]
        floor = f"no step is faster than {seconds_text(self.seconds)}: {what} binds; at most " + (
            f"{self.tokens_per_second:,.0f} tokens a second, {self.tokens_per_second_per_request:,.1f} each request"
        )
        total = sum(self.parts.values())
        table: list[tuple[str, ...]] = [("part", "bytes", "operations", "at least", "share")]
        shown = sorted(self.loads, key=lambda load: -load.seconds(self.machine))
        for load in shown[:4]:
            table.append(
                self._cells(load.part, load.bytes + load.sent, load.operations, self.parts[load.part], total)
            )
        if rest := shown[4:]:
            spent = sum(self.parts[load.part] for load in rest)
            moved, work = sum(x.bytes + x.sent for x in rest), sum(x.operations for x in rest)
            table.append(self._cells(f"{len(rest)} other parts", moved, work, spent, total))
        return [head, floor, *columns(table), self._last_line()]

    @property
    def requests_text(self) -> str:
        """``64 requests of 8,192 tokens``; of a mixed batch its lengths with their counts."""
        if len(self.lengths) == 1:
            length = next(iter(self.lengths))
            return (
                f"{self.batch:.4g} request{'s' * (self.batch != 1)} of {length:,} token{'s' * (length != 1)}"
            )
        return f"{self.batch:.4g} requests of {self.context} tokens"

    @staticmethod
    def _cells(name: str, moved: float, work: float, spent: float, total: float) -> tuple[str, ...]:
        return (name, bytes_text(round(moved)), f"{work:.3g}", seconds_text(spent), share_text(spent / total))

    def _last_line(self) -> str:
        held, space = self.weight_bytes + self.cache_bytes, self.machine.memory
        text = f"{bytes_text(round(self.weight_bytes))} of weights and {bytes_text(round(self.cache_bytes))} of cache"
        fits = (
            f" of {bytes_text(round(space))} a chip"
            if held <= space
            else (f": more than the {bytes_text(round(space))} of a chip")
        )
        touched = f"; {self.experts_touched:.0f} of {self.experts} experts a layer" if self.experts else ""
        return text + fits + touched + (f"; {self.weights_note}" if self.weights_note else "")

    @property
    def ranks(self) -> int:
        """Chips of the deployment."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(load.part)}</td><td>{bytes_text(round(load.bytes + load.sent))}</td>"
            f"<td>{load.operations:.3g}</td><td>{seconds_text(self.parts[load.part])}</td></tr>"
            for load in self.loads
        )
        head, floor, *_, last = self.lines()
        return (
            f"<p><b>{escape(head)}</b><br>{escape(floor)}</p><table><thead><tr><th>part</th><th>bytes</th>"
            f"<th>operations</th><th>at least</th></tr></thead><tbody>{rows}</tbody></table><p>{escape(last)}</p>"
        )

    def to_dict(self) -> dict:
        """Everything as plain numbers, seconds and bytes."""
        return {
            "model": self.model,
            "machine": self.machine.name,
            "batch": self.batch,
            "context": self.context,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "data_parallel_size": self.data_parallel_size,
            "expert_parallel_size": self.expert_parallel_size,
            "seconds": self.seconds,
            "serial_seconds": self.serial_seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_request": self.tokens_per_second_per_request,
            "binds": self.binds,
            "resources": dict(self.resources),
            "bytes": self.bytes,
            "operations": self.operations,
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "fits": self.fits,
            "parameters": self.parameters,
            "weights_note": self.weights_note,
            "parts": [
                {
                    "part": load.part,
                    "bytes": load.bytes,
                    "operations": load.operations,
                    "dtype": load.dtype,
                    "sent": load.sent,
                    "seconds": load.seconds(self.machine),
                }
                for load in self.loads
            ],
        }


def bound(
    model: Model | str | Mapping,
    machine: Machine | str,
    *,
    batch: float | Sequence[float] = 1,
    context: int | str | Mapping[int, float] | Sequence = 1024,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
    quantization: str | Mapping | None = "auto",
    routing: str = "uniform",
    tokens_per_step: float = 1,
    positions_per_step: float | None = None,
    prompt_tokens: float = 0,
    prompt_context: float = 0,
    **options,
) -> Bound | Bounds:
    """The floor of one decode step of ``batch`` requests of ``context`` tokens, the new one included.

    Lists of batches or contexts give a ``Bounds``, a case for every pair.

    ``model``: what ``load_model`` takes; ``machine``: what ``forecast.machines.machine`` takes.
    ``context``: a length, lengths with counts (``{1024: 3, 8192: 1}``) or the same as text
    (``3x1024+1x8192``), which then give the batch. ``batch`` counts requests of the whole deployment:
    of ``data_parallel_size`` replicas, each of ``tensor_parallel_size`` × ``pipeline_parallel_size`` ranks.
    ``enable_expert_parallel``: routed experts lie whole on one of all tensor and data parallel ranks.
    ``quantization``: see ``forecast.quantization.formats``. ``routing``: ``uniform`` counts the experts
    that tokens are expected to touch, E·(1 − (1 − k/E)^tokens); ``same`` those that one token touches.
    ``tokens_per_step``: tokens a request is given a step (speculative decoding), of ``positions_per_step``
    that were computed for it. ``prompt_tokens``: tokens of prompts computed in the same step, on top of
    ``prompt_context`` earlier ones each. ``options``: see ``CacheOptions`` (``kv_cache_dtype``, …).

    Raises ``BoundError``, or another ``DecodebenchError``, where an argument is bad.
    """
    prepared = prepare(
        model,
        machine,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        data_parallel_size=data_parallel_size,
        enable_expert_parallel=enable_expert_parallel,
        quantization=quantization,
        routing=routing,
        **options,
    )
    more: dict[str, Any] = {
        "tokens_per_step": tokens_per_step,
        "positions_per_step": positions_per_step,
        "prompt_tokens": prompt_tokens,
        "prompt_context": prompt_context,
    }
    batches: list[Any] = list(batch) if isinstance(batch, list | tuple | range) else [batch]
    contexts: list[Any] = list(context) if isinstance(context, list | tuple | range) else [context]
    if not batches or not contexts:
        raise BoundError("batch or context is an empty list: at least one number is expected")
    cases = tuple(prepared.at(b, c, **more) for b in batches for c in contexts)
    alone = batches == [batch] and contexts == [context]
    return cases[0] if alone else Bounds(cases)


@dataclass(frozen=True)
class Bounds:
    """Floors of one deployment for several batches and contexts."""

    cases: tuple[Bound, ...]

    def __iter__(self):
        return iter(self.cases)

    def __len__(self) -> int:
        return len(self.cases)

    def __str__(self) -> str:
        heading = (
            "batch",
            "context",
            "floor",
            "tokens/s",
            "each request",
            "binds",
            "weights",
            "cache",
            "fits",
        )
        rows = [heading, *(self._row(case) for case in self.cases)]
        first = self.cases[0]
        return "\n".join([f"{first.model} on {first.machine.title} × {first.ranks}", *columns(rows, left=())])

    @staticmethod
    def _row(case: Bound) -> tuple[str, ...]:
        return (
            f"{case.batch:g}",
            case.context,
            seconds_text(case.seconds),
            f"{case.tokens_per_second:,.0f}",
            f"{case.tokens_per_second_per_request:,.1f}",
            case.binds,
            seconds_text(case.weight_seconds),
            seconds_text(case.cache_seconds),
            "yes" if case.fits else "no",
        )

    def table(self) -> pd.DataFrame:
        """A row a case: batch, context, floor and ceiling, seconds of weights and of the cache."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "model": case.model,
                    "machine": case.machine.name,
                    "batch": case.batch,
                    "context": int(case.context) if case.context.isdigit() else case.context,
                    "floor_s": case.seconds,
                    "tokens_per_second": case.tokens_per_second,
                    "tokens_per_second_per_request": case.tokens_per_second_per_request,
                    "binds": case.binds,
                    "weights_s": case.weight_seconds,
                    "cache_s": case.cache_seconds,
                    "fits": case.fits,
                }
                for case in self.cases
            ]
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def to_dict(self) -> dict:
        return {"cases": [case.to_dict() for case in self.cases]}


@dataclass(frozen=True)
class Reading:
    """Layers that keep the same: how many, their spec, query heads, and how many tokens at most they read."""

    name: str
    layers: int
    spec: KVCacheSpec
    query_heads: int = 0
    #: values of a key and of a value that one query head multiplies
    widths: int = 0
    at_most: int | None = None
    state_operations: float = 0.0
    #: cached values of one byte, which may be multiplied as they are
    narrow: bool = False


@dataclass(frozen=True)
class Prepared:
    """A deployment: everything about a model on a machine but the requests. ``at`` gives their floor."""

    model: Model
    machine: Machine
    parts: tuple[Part, ...]
    formats: Mapping[str, Format]
    readings: tuple[Reading, ...]
    width: int
    #: blocks of a layer after which tensor parallel ranks add up their results
    reduces: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    expert_parallel_size: int
    routing: str
    #: mixers, indexers and feed-forward blocks, one after another
    blocks: int
    #: parameters of the embedding where it is the head as well
    tied_head: int = 0
    decode_context_parallel_size: int = 1
    #: see ``Bound.weights_note``
    weights_note: str | None = None

    @property
    def chips(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def at(
        self,
        batch: float = 1,
        context: int | str | Mapping[int, float] = 1024,
        *,
        tokens_per_step: float = 1,
        positions_per_step: float | None = None,
        prompt_tokens: float = 0,
        prompt_context: float = 0,
    ) -> Bound:
        """The floor of one step; see ``bound``."""
        lengths = requests(batch, context)
        total = sum(lengths.values())
        positions = _at_least("positions_per_step", positions_per_step or tokens_per_step, 1)
        share = self.data_parallel_size * self.pipeline_parallel_size
        local = {length: count / share for length, count in lengths.items()}
        tokens = total / share * positions + _at_least("prompt_tokens", prompt_tokens, 0) / share
        loads = [*self._weights(tokens, total / share + bool(prompt_tokens)), *self._cache(local, positions)]
        if prompt_tokens:
            loads.append(self._prompt(prompt_tokens / share, prompt_context))
        loads += self._messages(tokens)
        experts = next((part for part in self.parts if part.role == "experts"), None)
        held = sum(self._resident(part) for part in self.parts) / self.pipeline_parallel_size
        cached = self._held(local)
        text = context if isinstance(context, str) else "+".join(f"{n:g}x{l}" for l, n in lengths.items())
        return Bound(
            model=self.model.name,
            machine=self.machine,
            batch=total,
            context=str(next(iter(lengths))) if len(lengths) == 1 else text,
            loads=tuple(load for load in loads if load.bytes or load.operations or load.sent),
            tokens_per_step=tokens_per_step,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            data_parallel_size=self.data_parallel_size,
            expert_parallel_size=self.expert_parallel_size,
            weight_bytes=held,
            cache_bytes=cached,
            parameters=sum(part.params for part in self.parts),
            experts_touched=self._touched(experts, tokens) if experts else 0.0,
            experts=experts.experts if experts else 0,
            weights_note=self.weights_note,
            lengths=lengths,
            deployment=self,
        )

    # -- weights

    def _resident(self, part: Part) -> float:
        """Bytes of a part's weights on one rank, all stages together."""
        size = self.formats[part.role].bits / 8
        if part.role == "experts":
            # data parallel replicas share their experts: each holds a part of them
            return part.params * size / (self.tensor_parallel_size * self.data_parallel_size)
        return part.per_rank(self.tensor_parallel_size) * size

    def _touched(self, part: Part, tokens: float) -> float:
        """Routed experts of a layer that the tokens of all replicas use."""
        if self.routing == "same":
            return min(part.experts, part.top_k)
        everywhere = tokens * self.data_parallel_size
        return part.experts * (1 - (1 - min(1.0, part.top_k / part.experts)) ** everywhere)

    def _weights(self, tokens: float, sampled: float) -> list[Load]:
        """What the step reads of the weights: all of them once, of the embedding a row a token.

        ``tokens`` are one replica's in one microbatch, ``sampled`` those that the head is applied to.
        """
        loads: dict[str, Load] = {}
        for part in self.parts:
            format = self.formats[part.role]
            size = format.bits / 8
            rank = part.per_rank(self.tensor_parallel_size)
            if part.role == "encoder":
                continue
            if part.role == "embedding":
                read, work = tokens * part.params / (part.rows or 1) * size, 0.0
            elif part.role == "experts":
                ranks = self.tensor_parallel_size * self.data_parallel_size
                one = part.params / part.experts / ranks
                read = self._touched(part, tokens) * one * size
                work = 2 * one * part.top_k * tokens * self.data_parallel_size
            elif part.role == "norm":
                read, work = rank * size, 0.0
            else:
                each = sampled if part.role == "head" else tokens
                read, work = rank * size, 2 * rank * part.uses * each
            before = loads.get(part.role, Load(part.role, dtype=format.dtype))
            loads[part.role] = Load(part.role, before.bytes + read, before.operations + work, format.dtype)
        if self.tied_head:  # the embedding, read whole; it is not held twice
            format, rank = self.formats["embedding"], self.tied_head / self.tensor_parallel_size
            loads["head"] = Load("head", rank * format.bits / 8, 2 * rank * sampled, format.dtype)
        return [loads[role] for role in ROLES if role in loads]

    # -- cache

    def _cache(self, lengths: Mapping[int, float], positions: float) -> list[Load]:
        """What the step reads and writes of the cache, and the operations on it."""
        loads: dict[str, Load] = {}
        for reading in self.readings:
            moved = work = 0.0
            for length, count in lengths.items():
                if reading.spec.holds_state:
                    moved += 2 * count * reading.spec.unpadded_page_size_bytes
                    work += count * positions * reading.state_operations
                    continue
                entries, new = seen(reading, length, self.decode_context_parallel_size)
                size = reading.spec.bytes_per_token_slot
                moved += count * size * (entries + new * positions)
                work += count * positions * 2 * reading.query_heads * reading.widths * (entries + new)
            dtype = "fp8" if reading.narrow else "bf16"
            before = loads.get(reading.name, Load(reading.name))
            loads[reading.name] = Load(
                reading.name,
                before.bytes + moved * reading.layers,
                before.operations + work * reading.layers,
                dtype,
            )
        return list(loads.values())

    def _prompt(self, tokens: float, context: float) -> Load:
        """Attention of prompt tokens to what came before them; the prompts' own cache is written."""
        work = moved = 0.0
        for reading in self.readings:
            if reading.spec.holds_state:
                work += tokens * reading.state_operations * reading.layers
                continue
            length = int(context + tokens / 2) + 1
            entries, new = seen(reading, length, self.decode_context_parallel_size)
            size = reading.spec.bytes_per_token_slot
            moved += reading.layers * size * (entries + tokens * new)
            work += reading.layers * 2 * tokens * reading.query_heads * reading.widths * (entries + new)
        return Load("prompt attention", moved, work)

    def prompt_attention(self, length: float) -> float:
        """Seconds of attention that one token of a prompt of ``length`` tokens costs on average, at full peak."""
        return self._prompt(1.0, length / 2).operations / self.machine.peak_of("bf16")

    def _held(self, lengths: Mapping[int, float]) -> float:
        """Bytes that the requests' cache takes on one rank, without unused rest of blocks."""
        total = 0.0
        for reading in self.readings:
            for length, count in lengths.items():
                if reading.spec.holds_state:
                    total += count * reading.layers * reading.spec.unpadded_page_size_bytes
                else:
                    start, stop = reading.spec.visible(length)
                    if reading.spec.dcp_sharded:
                        stop = start + cdiv(stop - start, self.decode_context_parallel_size)
                    entries = cdiv(stop - start, tokens_per_entry(reading.spec))
                    total += count * reading.layers * entries * reading.spec.bytes_per_token_slot
        return total

    # -- messages

    def _messages(self, tokens: float) -> list[Load]:
        """Bytes one rank sends: all-reduces of tensor parallel ranks, tokens to experts elsewhere and back.

        A ring sends 2 (n − 1) / n of the message; activations are of two bytes.
        """
        found = []
        ranks = self.tensor_parallel_size
        message = tokens * self.width * 2
        if ranks > 1:
            found.append(Load("all-reduce", sent=self.reduces * message * 2 * (ranks - 1) / ranks))
        experts = [part for part in self.parts if part.role == "experts"]
        if experts and self.data_parallel_size > 1:
            everyone = ranks * self.data_parallel_size
            away = (everyone - 1) / everyone
            sent = sum(
                2 * part.layers * min(part.top_k, everyone) * message * away / ranks for part in experts
            )
            found.append(Load("all-to-all", sent=sent))
        return found


def prepare(
    model: Model | str | Mapping,
    machine: Machine | str,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
    quantization: str | Mapping | None = "auto",
    routing: str = "uniform",
    **options,
) -> Prepared:
    """Everything about a deployment but its requests: read once, then asked with ``Prepared.at``."""
    model, machine = load_model(model), find_machine(machine)
    for name, value in (
        ("tensor_parallel_size", tensor_parallel_size),
        ("pipeline_parallel_size", pipeline_parallel_size),
        ("data_parallel_size", data_parallel_size),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 4096:
            raise BoundError(f"{name} = {value!r}: an integer from 1 to 4096 is expected")
    if routing not in ("uniform", "same"):
        raise BoundError(f"routing = {routing!r}: uniform or same is expected")
    asked = CacheOptions.of(options | {"tensor_parallel_size": tensor_parallel_size})
    f, has = fields_of(model)
    parts = tensors(model, f, has)
    resolved = model.resolve(asked)
    specs = model.specs(resolved, asked)
    feeding = sum(part.layers for part in parts if part.role in ("mlp", "experts"))
    return Prepared(
        model,
        machine,
        parts,
        formats(model.config, resolved.dtype, quantization),
        readings(model, specs, f, tensor_parallel_size),
        width_of(f),
        reduces=sum(map(adds_up, model.layer.values())) + feeding,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        data_parallel_size=data_parallel_size,
        expert_parallel_size=tensor_parallel_size * data_parallel_size if enable_expert_parallel else 1,
        routing=routing,
        blocks=len(model.layer) + feeding,
        tied_head=tied_head(f, has),
        decode_context_parallel_size=asked.decode_context_parallel_size,
        weights_note=not_exact(model),
    )


def adds_up(layer: Layer) -> bool:
    """Whether a layer's output is added up over tensor parallel ranks: not those that only serve another one."""
    return layer.mixer != "indexer" and getattr(layer, "part", "window") == "window"


def readings(model: Model, specs: Mapping[str, KVCacheSpec], f: Fields, ranks: int) -> tuple[Reading, ...]:
    """The model's layers, those that read alike put together."""
    limits = {"sparse": f.optional("index_topk"), "cross": f.optional("max_source_positions")}
    together: dict[tuple, Reading] = {}
    for name, spec in specs.items():
        reading = one_reading(model.layer.get(name), spec, limits, ranks)
        key = (reading.name, spec, reading.query_heads, reading.widths, reading.at_most)
        before = together.get(key)
        together[key] = replace(reading, layers=1 + (before.layers if before else 0))
    return tuple(together.values())


def one_reading(
    layer: Layer | None, spec: KVCacheSpec, limits: Mapping[str, int | None], ranks: int
) -> Reading:
    """What one layer reads a step: by its spec, and by the model's facts where those say more.

    ``limits``: tokens that sparse attention chooses, and that an encoder gives at most.
    """
    facts: Any = layer  # of many kinds: what a kind lacks is not asked of it
    stored: Any = spec
    mixer = layer.mixer if layer else ""
    if spec.holds_state:
        operations = STATE_OPERATIONS.get(mixer, 6) * prod(stored.shapes[-1])
        return Reading("states", 1, spec, state_operations=operations)
    heads = max(1, getattr(facts, "num_heads", 0) // ranks)
    widths = stored.head_size + stored.head_size_v
    narrow = DTYPE_BYTES[stored.dtype] == 1
    part = getattr(facts, "part", mixer)
    at_most = None if spec.written_by_steps else limits["cross"]
    name = f"cache, {spec.label}"
    if mixer == "mla":
        # keys are the latent and its rotary part, values the latent alone
        widths = stored.head_size + facts.kv_lora_rank
        name = "latent cache, chosen tokens" if facts.sparse else "latent cache"
        at_most = limits["sparse"] if facts.sparse else None
    elif part == "indexer":  # whole on every rank, keys alone
        name, heads, widths = "indexer's keys", getattr(facts, "num_heads", 0), stored.head_size
    elif part == "compressor":
        name, heads, widths = "compressors' states", 0, 0
    elif part == "latent":
        name, widths = "compressed cache", 2 * stored.head_size
        at_most = limits["sparse"] if stored.tokens_per_state == 4 else None
    return Reading(name, 1, spec, heads, widths, at_most, narrow=narrow)


def seen(reading: Reading, length: int, shards: int = 1) -> tuple[float, int]:
    """Entries that one request's step reads from the cache of one layer, and entries that it adds."""
    spec = reading.spec
    start, stop = spec.visible(length)
    if shards > 1 and spec.dcp_sharded:
        start, stop = start // shards, cdiv(stop, shards)
    new = int(spec.written_by_steps)
    entries = max(0, stop - start - new) / tokens_per_entry(spec)
    if reading.at_most is not None:
        entries = min(entries, reading.at_most)
    return entries, new


def tokens_per_entry(spec: KVCacheSpec) -> int:
    """Tokens that are compressed into one entry of the cache."""
    return getattr(spec, "tokens_per_state", 1)


def requests(batch: float, context: int | str | Mapping[int, float]) -> dict[int, float]:
    """Length → how many requests have it."""
    if isinstance(context, Mapping):
        found = {_length(length): _at_least("context", count, 0) for length, count in context.items()}
        if not found or not sum(found.values()) > 0:
            raise BoundError(f"context = {dict(context)!r}: at least one request is needed")
        return found
    if isinstance(context, str) and not context.strip().isdigit():
        found = {}
        for piece in context.split("+"):
            count, _, length = piece.strip().rpartition("x")
            if not length.isdigit() or not (count == "" or count.isdigit()):
                raise BoundError(f"context = {context!r}: a number of tokens, or 3x1024+1x8192, is expected")
            found[_length(int(length))] = found.get(int(length), 0) + int(count or 1)
        return found
    if isinstance(batch, bool) or not isinstance(batch, int | float) or not 0 < batch < 2**31:
        raise BoundError(f"batch = {batch!r}: a positive number of requests is expected")
    return {_length(int(context) if isinstance(context, str) else context): batch}


def _length(length) -> int:
    if isinstance(length, float) and length >= 1:
        length = round(length)
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length < 2**31:
        raise BoundError(f"context = {length!r}: a positive number of tokens is expected")
    return length


def _at_least(name: str, value, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 2**31:
        raise BoundError(f"{name} = {value!r}: a number of at least {least} is expected")
    return value
