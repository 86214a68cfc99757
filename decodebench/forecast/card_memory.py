"""The cache's memory from the cards' size: weights counted from config.json, the rest in ``layout.card_memory``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decodebench.errors import DecodebenchError
from decodebench.forecast.quantization import formats
from decodebench.forecast.weights import fields_of, not_exact, resident, tensors, tied_head
from decodebench.layout.card_memory import UTILIZATION, CardMemory, checked
from decodebench.layout.plan import parse_memories, parse_memory
from decodebench.layout.stages import partition
from decodebench.models.load import load_model
from decodebench.models.model import Model
from decodebench.models.options import CacheOptions, OptionError

#: parts of a config that describe an encoder, whose weights are not counted
ENCODERS = ("vision_config", "audio_config", "encoder_config", "vision_tower_config")


def stage_weights(
    model: Model, options: CacheOptions, quantization: str | Mapping | None = "auto"
) -> tuple[list[int], str]:
    """Bytes of weights on one rank of every pipeline stage, and what was counted.

    The embedding lies on the first stage, the head on the last; decoder layers are taken to weigh alike.
    Raises ``OptionError`` where a family's parameters are not known.
    """
    f, has = fields_of(model)
    if not_exact(model):
        raise OptionError(
            f"gpu_memory: the weights of model_type {model.model_type!r} are not known: give --weights with "
            "their bytes on one rank"
        )
    dtype = model.dtype if options.dtype == "auto" else options.dtype
    numbers = formats(model.config, dtype, quantization)
    tp, stages = options.tensor_parallel_size, options.pipeline_parallel_size
    ends = {"embedding": 0.0, "head": 0.0}
    between = 0.0
    for part in tensors(model, f, has):
        held = resident(part, numbers, tp)
        if part.role in ends:
            ends[part.role] += held
        else:
            between += held
    if stages > 1 and (tied := tied_head(f, has)):  # the last stage needs the embedding as well
        ends["head"] += tied / tp * numbers["embedding"].bits / 8
    counts = partition(model.depth, stages, options.pp_layer_partition)
    found = [between * count / sum(counts) for count in counts]
    found[0] += ends["embedding"]
    found[-1] += ends["head"]
    told = f"counted from config.json, {numbers['mlp'].name if 'mlp' in numbers else dtype}"
    told += f", one rank of {tp}" if tp > 1 else ""
    told += ", decoder layers taken to weigh alike" if stages > 1 else ""
    if any(name in model.config for name in ENCODERS):
        told += ", without the encoder's"
    if options.draft_config is not None or options.draft_layers:
        told += ", without the drafter's"
    return [round(x) for x in found], told


def card_memory(
    model: Model | str | Path | Mapping,
    gpu_memory: int | str | Sequence[int | str],
    gpu_memory_utilization: float = UTILIZATION,
    weights: int | str | None = None,
    other: int | str | None = None,
    quantization: str | Mapping | None = "auto",
    **options: Any,
) -> tuple[CardMemory, ...]:
    """What the cards leave to the cache, a ``CardMemory`` a rank (a stage, where all cards are alike).

    ``gpu_memory``: bytes of a card, or of every rank's; ``weights``: bytes on one rank, counted from
    config.json where None; ``other``: what a run takes beside them (activations, graphs, the driver's).
    ``options``: those of ``plan``. Its ``memory`` takes ``[rank.cache for rank in card_memory(…)]``.

    Raises ``LayoutRefused`` where nothing is left, ``OptionError`` where the weights are not known.
    """
    asked = CacheOptions.of(options)
    known = load_model(model)
    cards = parse_memories(gpu_memory)
    stages, tp = asked.pipeline_parallel_size, asked.tensor_parallel_size
    if weights is not None:
        held, told = [parse_memory(weights)] * stages, "given"
    else:
        try:
            held, told = stage_weights(known, asked, quantization)
        except DecodebenchError as error:
            remedy = "" if "--weights" in str(error) else ": give --weights with their bytes on one rank"
            raise type(error)(f"{error}{remedy}") from None
    if len(cards) == 1:
        cards *= stages
    per_stage = max(1, len(cards) // stages)
    beside = None if other is None else parse_memory(other)
    found = []
    for rank, card in enumerate(cards):
        stage = min(rank // per_stage, stages - 1)
        found.append(checked(CardMemory(card, gpu_memory_utilization, held[stage], told, beside)))
    if len(cards) not in (stages, stages * tp):
        raise OptionError(
            f"gpu_memory: {len(cards)} cards for {stages * tp} ranks: give one for all, one a stage or one a rank"
        )
    return tuple(found)
