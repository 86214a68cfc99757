"""The block tables behind a step's fills, kept in the scheduler's process for the audit in the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from decodebench.layout.pool import Request, RequestBlocks

if TYPE_CHECKING:
    from decodebench.cache.connector import Fillable


class BlockState(Protocol):
    """The block tables of running requests, as vLLM's scheduler hands them to a connector."""

    def get_block_ids(self, request_id: str) -> Sequence[Sequence[int]] | None: ...


class LiveTables:
    """Tables of the requests that are about to be filled, and of those that were filled and still run."""

    def __init__(self) -> None:
        self._admitted: dict[str, RequestBlocks] = {}
        self._live: dict[str, Request] = {}

    def admit(self, request: Fillable, table: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """A request whose external tokens are about to be filled; ``table`` has one row a group."""
        own = Request(request.request_id, request.num_tokens)
        computed = request.num_tokens - 1 - num_external_tokens
        self._live[own.request_id] = own
        self._admitted[own.request_id] = RequestBlocks(own, computed, tuple(tuple(ids) for ids in table))

    def forget(self, request_id: str) -> None:
        """A request ended; an unknown one is no error."""
        self._live.pop(request_id, None)
        self._admitted.pop(request_id, None)

    def of_step(
        self, scheduler_output: object, state: BlockState | None
    ) -> tuple[tuple[RequestBlocks, ...], tuple[RequestBlocks, ...]]:
        """(requests filled in this step, the other scheduled ones); the first are handed over once."""
        admitted, self._admitted = self._admitted, {}
        if not admitted or state is None:
            return tuple(admitted.values()), ()
        others = [
            (own, state.get_block_ids(name)) for name, own in self._live.items() if name not in admitted
        ]
        running = tuple(RequestBlocks(own, 0, tuple(map(tuple, table))) for own, table in others if table)
        return tuple(admitted.values()), running


def tables_of(requests: Sequence[RequestBlocks], groups: Sequence[int]) -> tuple[RequestBlocks, ...]:
    """The same requests with the block tables of these groups only."""
    return tuple(replace(r, block_ids=tuple(r.block_ids[g] for g in groups)) for r in requests)
