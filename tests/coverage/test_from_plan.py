"""Block ids and bytes give one number; one answer to one question wherever it is asked."""

import pytest

import decodebench as db
from decodebench.cache.connector import ConnectorScheduler, ConnectorWorker
from decodebench.cache.faults import faulty_halves
from decodebench.cache.run import fill_cache, schedule
from decodebench.cache.tensors import allocate
from decodebench.cache.values import Constant, Normal, default_values
from decodebench.coverage.from_bytes import audit
from decodebench.coverage.from_plan import plan_audit
from decodebench.coverage.required import CoverageError
from decodebench.layout.compare import compare_rows
from decodebench.layout.grouping import GroupingRefused
from decodebench.layout.plan import plan
from decodebench.layout.pool import admit
from decodebench.layout.shrink import shrink
from decodebench.study import sweep

MODELS = (
    "jamba-v0.1",
    "nemotron-h-8b",
    "tiny-gemma3",
    "tiny-granite-hybrid",
    "deepseek-v3.2",
    "llama-3.1-8b",
)
#: faults that show in block ids
BY_ID = (None, "A1", "A2", "A3", "A4", "A5", "A6")


@pytest.mark.parametrize("grouping", ["auto", "per_layer", "fixed(2)"])
@pytest.mark.parametrize("model", MODELS)
def test_coverage_by_ids_and_by_bytes_is_one_number(model, grouping):
    try:
        layout = plan(model, memory="40GiB", max_model_len="auto", grouping=grouping)
    except GroupingRefused:
        pytest.skip(f"{model} has pages that {grouping} refuses")
    layout = shrink(layout, layers=2, miniature=True, num_blocks=2000)
    batch = admit(layout, context=[300, 129, 17], shared_prefix=16)
    for fault in BY_ID:
        scheduler, worker = (
            faulty_halves(layout, fault) if fault else (ConnectorScheduler(layout), ConnectorWorker(layout))
        )
        by_ids = plan_audit(layout, batch, worker.merge(schedule(scheduler, batch)))
        cache = allocate(layout)
        fill_cache(cache, batch, fault=fault)
        by_bytes = audit(cache, batch)
        assert by_ids.coverage == pytest.approx(by_bytes.coverage, abs=1e-12), fault
        assert list(by_ids.groups["coverage"]) == pytest.approx(list(by_bytes.groups["coverage"])), fault


def test_a_page_that_another_group_fills_afterwards_is_wrong_and_says_by_whom():
    layout = shrink(plan("jamba-v0.1", memory="8GiB"), miniature=True, num_blocks=64)
    batch = admit(layout, requests=1, context=200)
    scheduler, worker = faulty_halves(layout, "A1")
    found = plan_audit(layout, batch, worker.merge(schedule(scheduler, batch)))
    rows = found.rows
    mine = rows[(rows["group"] == 0) & (rows["state"] == "wrong")]
    assert len(mine) and mine["detail"].str.contains("was filled over it").all()
    assert found.groups["coverage"][0] == 0


@pytest.mark.parametrize("initial", ["zeros", "none"])
def test_an_audit_of_a_cache_that_was_never_poisoned_refuses(initial):
    layout = plan("tiny-llama", memory="8GiB").with_num_blocks(20)
    batch = admit(layout, requests=1, context=40)
    cache = allocate(layout, initial=None if initial == "none" else initial)
    fill_cache(cache, batch)
    if initial == "none":
        cache.storage.fill_(0xFF)
        fill_cache(cache, batch)
        assert audit(cache, batch).ok, "whoever poisons the memory themselves is not refused"
    else:
        with pytest.raises(CoverageError, match="initial='zeros'.*allocate.*poisons"):
            audit(cache, batch)


@pytest.mark.parametrize("model", ["deepseek-v3.2", "jamba-v0.1", "whisper-large-v3"])
def test_bytes_a_block_of_several_pools_is_one_number(model):
    layout = plan(model, memory="40GiB", max_model_len="auto", grouping="separate")
    (compared,) = compare_rows(model, "40GiB", ["separate"], max_model_len="auto")
    swept = sweep.run(
        {
            "model": model,
            "memory": "40GiB",
            "grouping": "separate",
            "max_model_len": "auto",
            "measure": "layout",
            "context": 16,
        }
    )
    widest = max(layout.bytes_per_block(pool) for pool in layout.pools)
    assert (
        compared["bytes_per_block"]
        == swept["bytes_per_block"][0]
        == layout.to_dict()["bytes_per_block"]
        == widest
    )


def test_what_is_filled_by_default_is_what_is_looked_for_by_default():
    assert default_values() == Normal() and default_values(startup_fill=True) == Constant()
    layout = plan("tiny-llama", memory="8GiB").with_num_blocks(20)
    assert ConnectorWorker(layout).values == default_values()
    batch, cache = admit(layout, requests=1, context=40), db.allocate(layout)
    worker = ConnectorWorker(layout)
    worker.register_kv_caches(cache)
    worker.start_load_kv(schedule(ConnectorScheduler(layout), batch))
    assert db.audit(cache, batch).ok
