"""Who wrote it: pages that hold other content than they should are traced to the layer it was meant for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decodebench.cache.readback import FILLED, identify_page, inspect_pages
from decodebench.cache.tensors import Cache
from decodebench.cache.values import Values
from decodebench.layout.layout import Layout

#: pages whose content is searched for in all of the values, a group (a search reads the noise bank)
LOOKUPS = 32


def extent(cache: Cache, layer: str) -> tuple[int, int, int, int]:
    """Where block 0 of a layer lies: (storage, first byte, bytes, bytes between blocks)."""
    place = cache.page_places[layer] or cache.places[layer][0]
    return place.storage.data_ptr(), place.offset, place.part.nbytes, place.block_stride


def overlap(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> bool:
    """Whether pages of the same block share bytes; yes where blocks of one storage are spaced unequally."""
    if a[0] != b[0]:
        return False
    return a[3] != b[3] or (a[1] < b[1] + b[2] and b[1] < a[1] + a[2])


@dataclass(frozen=True)
class Origins:
    """Whose values wrong pages hold. int64 [layers, num_blocks] a group.

    ``writer[g]``: layer index, -1 where unknown; ``block[g]``: the block they were meant for.
    """

    layout: Layout
    writer: list[np.ndarray]
    block: list[np.ndarray]

    @classmethod
    def of(cls, cache: Cache, values: Values, wrong: Sequence[np.ndarray]) -> Origins:
        """Pages are first compared with what each group that lies in the same bytes would have written there.

        What is left is searched for in all of the values, a limited number of pages a group.
        """
        layout = cache.layout
        writer = [np.full(w.shape, -1, dtype=np.int64) for w in wrong]
        block = [np.zeros(w.shape, dtype=np.int64) for w in wrong]
        if any(w.any() for w in wrong):
            cls._compare_aliases(cache, values, wrong, writer, block)
        for g, w in enumerate(wrong):
            for j, b in np.argwhere(w & (writer[g] < 0))[:LOOKUPS].tolist():
                found = identify_page(cache, g, j, b, values)
                if found is not None:
                    writer[g][j, b], block[g][j, b] = found
        return cls(layout, writer, block)

    @staticmethod
    def _compare_aliases(cache: Cache, values: Values, wrong, writer, block) -> None:
        layout = cache.layout
        extents = [[extent(cache, name) for name in group.layer_names] for group in layout.groups]
        for h, other in enumerate(layout.groups):
            suspects = [g for g, group in enumerate(layout.groups) if g != h and group.pool == other.pool]
            blocks = np.zeros(layout.num_blocks_of(h), dtype=bool)
            for g in suspects:
                blocks |= wrong[g].any(axis=0)
            if not blocks.any():
                continue
            filled = inspect_pages(cache, h, values, torch.from_numpy(blocks)).states.numpy() == FILLED
            for k, name in enumerate(other.layer_names):
                for g in suspects:
                    for j, place in enumerate(extents[g]):
                        if place[3] != extents[h][k][3] or not overlap(place, extents[h][k]):
                            continue
                        hers = wrong[g][j] & filled[k] & (writer[g][j] < 0)
                        writer[g][j, hers] = layout.layer_index[name]
                        block[g][j, hers] = np.nonzero(hers)[0]

    def by_writer(
        self, g: int, j: int, ids: np.ndarray
    ) -> Iterator[tuple[int | None, str | None, np.ndarray]]:
        """(writer's layer index, in words, blocks) of some pages of a layer; None where unknown."""
        writers, blocks = self.writer[g][j, ids], self.block[g][j, ids]
        for writer in np.unique(writers).tolist():
            same = writers == writer
            if writer < 0:
                yield None, None, ids[same]
                continue
            group, name = self.group_of(writer), self.layout.layer_names[writer]
            here = same & (blocks == ids)
            if here.any():
                own = name == self.layout.groups[g].layer_names[j]
                words = (
                    "its own values in part, then other bytes"
                    if own
                    else f"values of group {group}, layer {name!r}"
                )
                yield writer, words, ids[here]
            for i in np.nonzero(same & ~here)[0].tolist():
                yield writer, f"values of group {group}, layer {name!r}, block {blocks[i]}", ids[i : i + 1]

    def group_of(self, writer: int) -> int:
        """The group of the layer with index ``writer``."""
        return self.layout.group_of[self.layout.layer_names[writer]]

    def place(self, writer: int) -> tuple[int, int]:
        """(group, layer in it) of a layer index."""
        name = self.layout.layer_names[writer]
        group = self.layout.group_of[name]
        return group, self.layout.groups[group].layer_names.index(name)
