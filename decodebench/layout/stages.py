"""Pipelines: which stage holds which layers, each stage's share of the groups, and memories of several ranks.

Groups are made of all layers together; a stage then keeps its own layers of each group, and a group none of
whose layers it has still counts blocks. After ``get_pp_indices`` and ``get_kv_cache_configs`` of vLLM 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.placement import LayoutRefused
from decodebench.layout.records import Grouped
from decodebench.models.model import DRAFT_ROOT, Model
from decodebench.models.options import CacheOptions, OptionError

#: model types that vLLM 0.32 does not cut into stages
WHOLE = {"aria", "diffusion_gemma", "gemma3n", "gemma3n_text", "hrm_text", "idefics3", "iquestloopcoder"}
WHOLE |= {"mamba2", "paddleocr_vl", "smolvlm", "whisper", "zamba2"}


def partition(depth: int, stages: int, given: str | None = None) -> tuple[int, ...]:
    """Decoder layers of each stage: as evenly as vLLM deals them, or as ``VLLM_PP_LAYER_PARTITION`` says.

    What does not divide goes one layer each to the stages before the last, the last of those first.
    """
    if given is not None:
        parts = [part.strip() for part in given.split(",")]
        if not all(part.isdigit() for part in parts):
            raise OptionError(f"pp_layer_partition = {given!r}: numbers of layers, as in 20,12, are expected")
        counts = tuple(map(int, parts))
        if len(counts) != stages or sum(counts) != depth:
            raise OptionError(
                f"pp_layer_partition = {given!r}: {len(counts)} stages of {sum(counts)} layers in all, where "
                f"pipeline_parallel_size = {stages} and the model has {depth}"
            )
        return counts
    if stages > depth:
        raise OptionError(
            f"pipeline_parallel_size = {stages}: the model has {depth} layers, and every stage needs one"
        )
    counts_ = [depth // stages] * stages
    for i in range(2, depth % stages + 2):
        counts_[-i] += 1
    return tuple(counts_)


def stage_of(model: Model, options: CacheOptions) -> dict[str, int]:
    """layer → its stage; a drafter's layers are on the last one.

    Raises ``OptionError`` where vLLM does not cut the model into stages.
    """
    stages = options.pipeline_parallel_size
    whole = WHOLE & {model.model_type, str(model.config.get("model_type"))}
    if stages > 1 and whole:
        raise OptionError(
            f"pipeline_parallel_size = {stages}: vLLM does not cut models of type {min(whole)} into stages: "
            "use tensor_parallel_size"
        )
    counts = partition(model.depth, stages, options.pp_layer_partition)
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    found = {}
    drafted = {layer.name for layer in model.draft(options)}
    for name in [*model.layer_names, *drafted]:
        if name in drafted or name.startswith(DRAFT_ROOT):
            found[name] = stages - 1
            continue
        index = decoder_layer(name, model.depth)
        found[name] = next((stage for stage, end in enumerate(ends) if index < end), stages - 1)
    return found


def decoder_layer(name: str, depth: int) -> int:
    """The decoder layer that a cache belongs to, by its name.

    States beside attention in the same layer are numbered on from the depth (Falcon-H1).
    """
    match = re.search(r"(?:layers|h|blocks)\.(\d+)", name) or re.search(r"\.(\d+)\.", name)
    if match is None:
        raise OptionError(f"pipeline_parallel_size: layer {name} has no number to tell its stage by")
    return int(match[1]) % depth


def stages_of(grouped: Grouped) -> tuple[Grouped, ...]:
    """Each stage's share of the groups; all of them alone where there is one stage."""
    options, model = grouped.options, grouped.model
    if options is None or model is None or options.pipeline_parallel_size == 1:
        return (grouped,)
    where = stage_of(model, options)
    found = []
    for stage in range(options.pipeline_parallel_size):
        groups = tuple(_share(group, where, stage) for group in grouped.groups)
        if not any(group.layer_names for group in groups):
            raise OptionError(
                f"pipeline_parallel_size = {options.pipeline_parallel_size}: stage {stage} has no layer that "
                "stores anything, and vLLM does not start so: give pp_layer_partition"
            )
        found.append(replace(grouped, groups=groups, stage=stage))
    return tuple(found)


def _share(group: KVCacheGroupSpec, where: dict[str, int], stage: int) -> KVCacheGroupSpec:
    own = [i for i, name in enumerate(group.layer_names) if where[name] == stage]
    specs = tuple(group.layer_specs[i] for i in own)
    governing = specs[0] if group.mixed and specs else group.kv_cache_spec
    return replace(
        group,
        layer_names=tuple(group.layer_names[i] for i in own),
        layer_specs=specs,
        kv_cache_spec=governing,
    )


def memory_of_stages(budgets: Sequence[int], options: CacheOptions) -> tuple[int, ...]:
    """What each stage has: one memory for all, one a stage, or one a rank, of which the stage's smallest counts.

    Ranks are counted as vLLM counts them: the tensor parallel ranks of the first stage, then those of the next.
    """
    stages, tp = options.pipeline_parallel_size, options.tensor_parallel_size
    if len(budgets) == 1:
        return tuple(budgets) * stages
    if len(budgets) == stages * tp:
        return tuple(min(budgets[stage * tp : (stage + 1) * tp]) for stage in range(stages))
    if len(budgets) == stages:
        return tuple(budgets)
    raise LayoutRefused(
        f"{len(budgets)} memories for {stages * tp} ranks (tensor_parallel_size = {tp}, pipeline_parallel_size "
        f"= {stages}): give one for all, one a stage, or one a rank"
    )
