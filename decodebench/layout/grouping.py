"""Layer specs → KV cache groups: the strategies.

A group's layers share one block table. A strategy is a function from the layers' specs to
groups; ``STRATEGIES`` names them, and adding one is a line there. ``hybrid`` and ``packed``
are vLLM's own (after ``v1/core/kv_cache_utils.py`` of vLLM 0.32); ``auto`` chooses as vLLM does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from decodebench.errors import DecodebenchError
from decodebench.models.specs import CircularBufferSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec, cdiv
from decodebench.words import some

Specs = Mapping[str, KVCacheSpec]


class GroupingRefused(DecodebenchError):
    """Layers that a strategy cannot group: says which, and why."""


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table.

    ``layer_specs[i]`` is the spec of ``layer_names[i]`` as placed in this group (block size
    and padding settled). ``kv_cache_spec`` is the merged spec that governs the block table:
    what is skipped, how many blocks a request takes. ``pool`` numbers the block pool that the
    group draws from: always 0 in vLLM, one a kind in the ``separate`` strategy. ``mixed``: the
    layers keep specs of their own (vLLM's ``UniformTypeKVCacheSpecs``), ``kv_cache_spec`` is the first.
    """

    layer_names: tuple[str, ...]
    layer_specs: tuple[KVCacheSpec, ...]
    kv_cache_spec: KVCacheSpec
    pool: int = 0
    mixed: bool = False

    @property
    def block_size(self) -> int:
        """Tokens that one block holds on one rank."""
        return self.kv_cache_spec.block_size

    @property
    def kind(self) -> str:
        """The kind of the spec that governs the block table, such as ``sliding_window``."""
        return self.kv_cache_spec.kind

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block id of this group stands for, over all its layers."""
        return sum(spec.page_size_bytes for spec in self.layer_specs)

    def blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int, dcp: int = 1) -> int:
        """Blocks that an engine reserves for one request of ``max_model_len`` tokens."""
        specs = self.layer_specs if self.mixed else (self.kv_cache_spec,)
        return max(
            spec.max_blocks_per_request(max_model_len, max_in_flight_tokens, dcp) for spec in set(specs)
        )

    def layers_by_spec(self) -> list[tuple[KVCacheSpec, tuple[str, ...]]]:
        """The layers of equal spec, in order of first appearance; all of them where specs were merged."""
        if not self.mixed:
            return [(self.kv_cache_spec, self.layer_names)]
        found: dict[KVCacheSpec, list[str]] = {}
        for name, spec in zip(self.layer_names, self.layer_specs):
            found.setdefault(spec, []).append(name)
        return [(spec, tuple(names)) for spec, names in found.items()]


def mixed_group(specs: Specs, pool: int = 0) -> KVCacheGroupSpec:
    """One group whose layers keep their own specs (equal token slots, pages may differ)."""
    values = tuple(specs.values())
    return KVCacheGroupSpec(tuple(specs), values, values[0], pool, mixed=True)


def merged_group(specs: Specs, pool: int = 0) -> KVCacheGroupSpec:
    """One group whose layers have one merged spec; raises ``GroupingRefused`` where they cannot be merged."""
    values = tuple(specs.values())
    merged = values[0].merged_with(values[1:])
    if merged is None:
        raise GroupingRefused(f"layers {some(specs)} have specs that cannot share a block table")
    return KVCacheGroupSpec(tuple(specs), values, merged, pool)


def same_slots(specs: Specs) -> bool:
    """Whether all layers need the same blocks of a request, so that they may form one group."""
    values = list(specs.values())
    first = values[0]
    return len({(spec.block_size, spec.dcp_sharded) for spec in values}) == 1 and all(
        first.same_token_slots(spec) for spec in values
    )


def single_group(specs: Specs) -> tuple[KVCacheGroupSpec, ...] | None:
    """All layers in one group, where they are of one kind; None where they are not."""
    values = list(specs.values())
    if values[0].merged_with(values[1:]) is not None:
        return (merged_group(specs),)
    return (mixed_group(specs),) if same_slots(specs) else None


# -- vLLM's strategies -----------------------------------------------------------------------------


def auto(
    specs: Specs, block_outermost: bool = False, hybrid_manager: bool = True
) -> tuple[KVCacheGroupSpec, ...]:
    """vLLM's own choice: one group, ``packed`` for block-outermost memory with unequal pages, else
    ``hybrid``.
    """
    if not hybrid_manager:
        specs = promote(specs)
    if block_outermost and len({spec.page_size_bytes for spec in specs.values()}) > 1:
        return packed(specs)
    return hybrid(specs)


def hybrid(specs: Specs) -> tuple[KVCacheGroupSpec, ...]:
    """Groups of equally many layers and equal pages; short groups are padded."""
    if (single := single_group(specs)) is not None:
        return single
    try:
        unified = unify_pages(specs)
    except GroupingRefused:
        if (fallback := _full_allocation(specs)) is None:
            raise
        return fallback
    buckets = mergeable_buckets(unified)
    return _dealt(unified, buckets, hybrid_group_size([len(bucket) for bucket in buckets]))


def hybrid_group_size(counts: Sequence[int]) -> int:
    """Layers a group: the smallest bucket's, or the largest's where that is under 1.5 times the smallest."""
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def unify_pages(specs: Specs) -> dict[str, KVCacheSpec]:
    """The specs with all pages as large as the largest.

    State pages are padded; other pages hold a multiple of their tokens where that fits exactly;
    attention that is not latent is padded where it does not. Raises ``GroupingRefused`` otherwise.
    """
    largest = max(spec.page_size_bytes for spec in specs.values())
    unified = {}
    for name, spec in specs.items():
        page = spec.page_size_bytes
        if page == largest:
            unified[name] = spec
        elif spec.holds_state:
            unified[name] = spec.padded_to(largest)
        elif page and largest % page == 0:
            unified[name] = _grown(spec, largest // page)
        elif not (spec.latent and spec.keeps_all):
            unified[name] = spec.padded_to(largest)
        else:
            raise GroupingRefused(
                f"layer {name}: its page of {page} bytes does not divide the largest page of {largest} "
                "bytes, and latent attention cannot be padded: use block-outermost memory (BLHNC)"
            )
        if unified[name].page_size_bytes != largest:
            raise GroupingRefused(
                f"layer {name}: a page of {page} bytes cannot be made one of {largest} bytes"
            )
    return unified


def _grown(spec: KVCacheSpec, ratio: int) -> KVCacheSpec:
    return spec.with_block_size(spec.block_size * ratio)


def mergeable_buckets(specs: Specs) -> list[list[str]]:
    """Layers by equal spec in order of first appearance; specs that can be merged share a bucket."""
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        by_spec.setdefault(spec, []).append(name)
    names: list[list[str]] = []
    merged: list[list[KVCacheSpec]] = []
    for spec, layers in by_spec.items():
        for bucket, found in zip(names, merged):
            if found[0].merged_with([*found[1:], spec]) is not None:
                bucket.extend(layers)
                found.append(spec)
                break
        else:
            names.append(list(layers))
            merged.append([spec])
    return names


def _dealt(specs: Specs, buckets: list[list[str]], size: int) -> tuple[KVCacheGroupSpec, ...]:
    """Each bucket as ``ceil(n / size)`` groups, its layers dealt round-robin."""
    groups = []
    for bucket in buckets:
        count = cdiv(len(bucket), size)
        groups += [merged_group({name: specs[name] for name in bucket[i::count]}) for i in range(count)]
    return tuple(groups)


def packed(specs: Specs) -> tuple[KVCacheGroupSpec, ...]:
    """Groups for memory where a block holds all layers' pages, which may differ in size.

    Layers are bucketed by kind. A bucket with equally many layers of each page size repeats a
    pattern, one layer of each size, and is split into groups of as many repeats as waste least.
    States and rings (and windows where no bucket mixes sizes) are split until a group fits the
    bytes that the others need per block.
    """
    if (single := single_group(specs)) is not None:
        return single
    buckets = [_Bucket.of(bucket) for bucket in _uniform_buckets(specs)]
    floor = max((b.repeats for b in buckets if b.balanced and len(b.by_page) > 1), default=0)
    repeats = least_padding([b.repeats for b in buckets if b.balanced], floor) if floor else None

    def split(bucket: _Bucket) -> int:
        return cdiv(bucket.repeats, repeats) if bucket.balanced and repeats is not None else 1

    def is_state(bucket: _Bucket) -> bool:
        kinds = (
            (MambaSpec, CircularBufferSpec)
            if repeats is not None
            else (MambaSpec, CircularBufferSpec, SlidingWindowSpec)
        )
        return isinstance(bucket.first, kinds)

    anchor = max(b.widest_group_bytes(len(b.specs) if is_state(b) else split(b)) for b in buckets)
    groups = []
    for bucket in buckets:
        count = split(bucket)
        if anchor and is_state(bucket):
            per_block = max(anchor // bucket.first.page_size_bytes, 1)
            count = max(count, cdiv(len(bucket.specs), per_block))
        if count == 1:
            groups.append(mixed_group(bucket.specs))
            continue
        if not bucket.balanced or count > bucket.repeats:
            raise GroupingRefused(
                f"layers {some(bucket.specs)}: pages of {', '.join(map(str, bucket.by_page))} bytes do "
                f"not repeat evenly, and {count} groups of them are needed: give layers of one kind "
                "equally many of each size"
            )
        pattern = list(zip(*bucket.by_page.values()))
        for i in range(count):
            names = [name for repeat in pattern[i::count] for name in repeat]
            groups.append(mixed_group({name: bucket.specs[name] for name in names}))
    return tuple(groups)


@dataclass(frozen=True)
class _Bucket:
    """Layers of one uniform kind, by page size."""

    specs: dict[str, KVCacheSpec]
    by_page: dict[int, list[str]]

    @classmethod
    def of(cls, specs: dict[str, KVCacheSpec]) -> _Bucket:
        by_page: dict[int, list[str]] = {}
        for name, spec in specs.items():
            by_page.setdefault(spec.page_size_bytes, []).append(name)
        return cls(specs, by_page)

    @property
    def first(self) -> KVCacheSpec:
        return next(iter(self.specs.values()))

    @property
    def balanced(self) -> bool:
        return len({len(names) for names in self.by_page.values()}) == 1

    @property
    def repeats(self) -> int:
        return max(len(names) for names in self.by_page.values())

    def widest_group_bytes(self, count: int) -> int:
        return sum(cdiv(len(names), count) * page for page, names in self.by_page.items())


def _uniform_buckets(specs: Specs) -> list[dict[str, KVCacheSpec]]:
    buckets: list[dict[str, KVCacheSpec]] = []
    for name, spec in specs.items():
        for bucket in buckets:
            first = next(iter(bucket.values()))
            alike = (spec.block_size, spec.dcp_sharded) == (first.block_size, first.dcp_sharded)
            if alike and first.same_token_slots(spec):
                bucket[name] = spec
                break
        else:
            buckets.append({name: spec})
    return buckets


def least_padding(values: Sequence[int], floor: int) -> int:
    """The size d >= ``floor`` for which rounding all values up to multiples of
    d adds least; the larger of equals.
    """
    candidates = range(max(1, floor), max(values) + 1)
    return min(candidates, key=lambda d: (sum(-value % d for value in values), -d), default=floor)


def promote(specs: Specs) -> dict[str, KVCacheSpec]:
    """Windows and chunks allocated as full attention (hybrid manager off).

    Raises ``GroupingRefused`` where the layers are not of one kind then: beside states or cross attention.
    """
    promoted = dict(specs)
    if single_group(promoted) is not None:
        return promoted
    sizes = {spec.block_size for spec in specs.values() if spec.keeps_all}
    if sizes:
        common = next(iter(sizes)) if len(sizes) == 1 else None
        for name, spec in specs.items():
            whole = spec.promoted(common)
            if whole is None:
                raise GroupingRefused(
                    f"layer {name}: a window over latent vectors cannot be allocated as full attention: "
                    "leave the hybrid manager on"
                )
            promoted[name] = whole
    if single_group(promoted) is None:
        kinds = ", ".join(sorted({spec.kind for spec in promoted.values()}))
        raise GroupingRefused(
            f"without the hybrid manager all layers must be allocated as one kind, and {kinds} are not: "
            "leave the hybrid manager on"
        )
    return promoted


def _full_allocation(specs: Specs) -> tuple[KVCacheGroupSpec, ...] | None:
    """Latent attention beside plain windows whose pages cannot be unified: windows as full attention."""
    values = specs.values()
    if not any(spec.latent and spec.keeps_all for spec in values):
        return None
    windows = [spec for spec in values if spec.promoted(None) is not spec]
    if not windows or any(spec.kind != SlidingWindowSpec.kind for spec in windows):
        return None
    try:
        promoted = promote(specs)
    except GroupingRefused:
        return None
    return (mixed_group(promoted),) if same_slots(promoted) else None


# -- strategies to compare with --------------------------------------------------------------------


def promoted(specs: Specs) -> tuple[KVCacheGroupSpec, ...]:
    """The hybrid manager off: every layer keeps every token, in one group."""
    return hybrid(promote(specs))


def fixed(specs: Specs, layers: int) -> tuple[KVCacheGroupSpec, ...]:
    """Groups of ``layers`` layers of one kind, pages made equal as in ``hybrid``."""
    if layers < 1:
        raise GroupingRefused(f"fixed({layers}): a group has at least one layer")
    unified = unify_pages(specs)
    return _dealt(unified, mergeable_buckets(unified), layers)


def per_layer(specs: Specs) -> tuple[KVCacheGroupSpec, ...]:
    """A block table of its own for every layer."""
    return fixed(specs, 1)


def separate(specs: Specs) -> tuple[KVCacheGroupSpec, ...]:
    """A group and a pool for each kind, with its own page size (TensorRT-LLM, SGLang, llama.cpp)."""
    return tuple(
        merged_group({name: specs[name] for name in bucket}, pool=pool)
        for pool, bucket in enumerate(mergeable_buckets(specs))
    )


@dataclass(frozen=True)
class Strategy:
    """A grouping by name.

    ``aligned``: wants pages of attention and states made equal by the model's alignment.
    ``memory_order``: what it needs (None: any). ``parameter``: takes a number, as in ``fixed(4)``.
    """

    group: Callable[..., tuple[KVCacheGroupSpec, ...]]
    aligned: bool = True
    memory_order: str | None = None
    parameter: bool = False


STRATEGIES: dict[str, Strategy] = {
    "hybrid": Strategy(hybrid),
    "packed": Strategy(packed, memory_order="BLHNC"),
    "promoted": Strategy(promoted),
    "separate": Strategy(separate, aligned=False, memory_order="LBNHC"),
    "fixed": Strategy(fixed, parameter=True),
    "per_layer": Strategy(per_layer),
}


def strategy(name: str) -> tuple[Strategy, Callable[[Specs], tuple[KVCacheGroupSpec, ...]]]:
    """The strategy of this name and its function of specs alone; ``fixed(4)`` is ``fixed`` with 4 layers.

    Raises ``GroupingRefused`` for a name that is none.
    """
    match = re.fullmatch(r"(\w+)(?:\((\d+)\))?", name)
    word, number = match.groups() if match else (name, None)
    found = STRATEGIES.get(word)
    if found is None or (number is not None) != found.parameter:
        known = ", ".join(n + ("(k)" if s.parameter else "") for n, s in STRATEGIES.items())
        raise GroupingRefused(f"grouping {name!r}: known are auto, {known}")
    if number is not None:
        return found, lambda specs: found.group(specs, int(number))
    return found, found.group
