"""The connector's two halves, or those of a historic fault, run over a cache as in an engine's first step."""

from __future__ import annotations

from decodebench.cache.connector import ConnectorMetadata, ConnectorScheduler, ConnectorWorker
from decodebench.cache.faults import faulty_halves
from decodebench.cache.tensors import Cache
from decodebench.cache.values import FillRefused, Values, Zeros, default_values
from decodebench.cache.write import FillReport, fill_blocks, merge_blocks
from decodebench.layout.pool import Batch, zeroed_on_allocation


def check_cache_and_batch(call: str, cache: object, batch: object) -> None:
    """Raises ``FillRefused`` where a call was not given a cache and a batch, in this order."""
    if isinstance(cache, Batch) and isinstance(batch, Cache):
        raise FillRefused(
            f"{call}(batch, cache): the arguments are the other way round, {call}(cache, batch)"
        )
    for name, given, kind, source in (
        ("cache", cache, Cache, "db.allocate(layout, device)"),
        ("batch", batch, Batch, "db.admit(layout, requests=…, context=…)"),
    ):
        if not isinstance(given, kind):
            raise FillRefused(
                f"{call}: {name} is {type(given).__name__}, not a {kind.__name__}: {source} makes one"
            )


def check_values(values: object) -> None:
    """Raises ``FillRefused`` for what is no ``Values``, with the call that makes one."""
    if isinstance(values, bool | int | float):
        made = "Zeros()" if values == 0 else f"Constant({float(values)})"
        raise FillRefused(f"values={values!r}: what is written is an object, values=db.{made}")
    if values is not None and not isinstance(values, Values):
        raise FillRefused(
            f"values={type(values).__name__}: db.Normal(), db.Constant(0.015) or db.Zeros() is expected"
        )


def zero_new_blocks(cache: Cache, batch: Batch) -> None:
    """What the engine does before a step where its layout asks for it: zero the blocks it handed out.

    Attention's only (as ``KVCacheManager.take_zeroed`` lists); blocks of a prefix hit are not new.
    """
    layout = cache.layout
    new: list[tuple[int, ...]] = [()] * len(layout.groups)
    for g in range(len(layout.groups)):
        if zeroed_on_allocation(layout, g):
            per_block = layout.tokens_per_block(g)
            tables = [blocks.block_ids[g][blocks.num_computed // per_block :] for blocks in batch.requests]
            new[g] = merge_blocks(filter(None, table) for table in tables)
    if any(new):
        fill_blocks(cache, new, Zeros())


def schedule(scheduler: ConnectorScheduler, batch: Batch) -> ConnectorMetadata:
    """The blocks that need values: a batch through the scheduler half, as an engine's first step would."""
    for blocks in batch.requests:
        external, _ = scheduler.get_num_new_matched_tokens(blocks, blocks.num_computed)
        scheduler.update_state_after_alloc(blocks, blocks.block_ids, external)
    return scheduler.build_connector_meta()


def run_connector(scheduler: ConnectorScheduler, worker: ConnectorWorker, batch: Batch) -> FillReport:
    """Admit a batch through both halves, as an engine's first step would."""
    return worker.start_load_kv(schedule(scheduler, batch))


def fill_cache(
    cache: Cache,
    batch: Batch,
    values: Values | None = None,
    fault: str | None = None,
    startup_fill: bool = False,
) -> FillReport:
    """Fill everything that the batch's next decode step reads, each group at its own blocks.

    ``values``: ``Normal()`` by default, whose content tells every layer and block apart, so that ``audit``
    can say where a stray byte came from. ``fault`` switches one of the connector's historic defects on
    (``decodebench.FAULTS``). ``startup_fill``: everything is written before the first request comes, as far
    as it keeps (``startup_groups``; a constant is the default then), then the engine zeroes new blocks where
    it does. The report is the step's; what a startup fill wrote is not in it.

    Raises ``DecodebenchError`` subclasses that name group, layer and block before the first byte is written.
    """
    check_cache_and_batch("fill_cache", cache, batch)
    check_values(values)
    if fault is None:
        values = default_values(startup_fill) if values is None else values
        scheduler = ConnectorScheduler(cache.layout, startup_fill, values)
        worker = ConnectorWorker(cache.layout, values, startup_fill)
    else:
        values = default_values() if values is None else values
        scheduler, worker = faulty_halves(cache.layout, fault, values)
    cache.filled_with["values"] = values
    worker.register_kv_caches(cache)
    if worker.startup_filled:
        zero_new_blocks(cache, batch)
    report = run_connector(scheduler, worker, batch)
    for layer in cache.layout.layer_names:  # the step begins, and waits for each layer's load
        worker.wait_for_layer_load(layer)
    return report
