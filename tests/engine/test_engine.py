"""Running engines: four tiny models on the CPU, audited by their bytes, beside the built-in connector."""

import pytest

import decodebench as db
import decodebench.vllm as dbv

OURS = "GroupedDecodeBenchConnector"
BUILTIN = "AuditedBuiltinConnector"
LENGTHS = (1000, 700, 129, 130, 2)
STATES = ("mamba",)


@pytest.fixture
def run(tmp_path):
    """Engine, prompts, audit: ``run(name, connector)`` → (LiveAudit, LLM's outputs)."""

    def start(
        name, connector=OURS, lengths=LENGTHS, shared=0, max_tokens=3, options=None, look=None, **arguments
    ):
        options = {"audit_file": str(tmp_path / "audit.jsonl"), **(options or {})}
        if connector == OURS:
            options = {"audit": "bytes", "std": 0.02, **options}
        with dbv.engine(name, connector, options, **arguments) as llm:
            outputs = dbv.generate(llm, dbv.prompts(lengths, shared=shared), max_tokens)
            if look:
                look(llm)
            return dbv.audit(llm), outputs

    return start


def plan_for(llm, name):
    """The plan for an engine's own block size and options."""
    config = llm.llm_engine.vllm_config
    cache = config.cache_config
    return db.plan(
        name,
        memory=cache.kv_cache_memory_bytes,
        block_size=cache.block_size,
        kernel_block_size=32,  # what the CPU's attention takes
        kv_cache_dtype=cache.cache_dtype,
        mamba_ssm_cache_dtype=cache.mamba_ssm_cache_dtype,
        max_model_len=config.model_config.max_model_len,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        async_scheduling=config.scheduler_config.async_scheduling,
        enable_prefix_caching=cache.enable_prefix_caching,
        memory_order="LBHNC",
    )


@pytest.mark.parametrize(
    ("kv_cache_dtype", "prefix"), [("auto", True), ("fp8", False)], ids=["bf16-prefix-caching", "fp8"]
)
@pytest.mark.parametrize("name", dbv.TINY)
def test_every_required_page_holds_its_values_and_the_plan_is_the_layout(run, name, kv_cache_dtype, prefix):
    layouts = {}

    def look(llm):
        layouts["engine"], layouts["plan"] = dbv.layout_of_engine(llm), plan_for(llm, name)

    audit, outputs = run(name, look=look, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=prefix)
    assert audit.ok, str(audit)
    assert (audit.groups.coverage == 1).all() and (audit.groups.required > 0).all()
    assert len(audit.groups) == len(layouts["engine"].groups)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3] * len(LENGTHS)
    ours, engines = layouts["plan"], layouts["engine"]
    for fact in (
        "groups",
        "tensors",
        "pool_num_blocks",
        "size",
        "memory_order",
        "max_model_len",
        "max_in_flight_tokens",
        "needs_kv_cache_zeroing",
    ):
        assert getattr(ours, fact) == getattr(engines, fact), fact


def test_the_plan_audit_counts_what_the_bytes_say(run):
    by_bytes, _ = run("tiny-granite-hybrid")
    by_plan, _ = run("tiny-granite-hybrid", options={"audit": "plan"})
    assert set(by_plan.steps.source) == {"plan"}
    assert by_plan.groups.equals(by_bytes.groups)


@pytest.mark.parametrize("name", dbv.TINY)
def test_an_audit_does_not_change_what_is_decoded(run, name):
    # 129 tokens: the step's own token begins a block that nobody filled
    audited = run(name, lengths=(700, 129), max_tokens=4)[1]
    with dbv.engine(name, OURS, {"std": 0.02}) as llm:
        plain = dbv.generate(llm, dbv.prompts((700, 129)), 4)
    assert [o.outputs[0].token_ids for o in audited] == [o.outputs[0].token_ids for o in plain]


@pytest.mark.parametrize("name", ["tiny-nemotron-h", "tiny-granite-hybrid"])
def test_the_built_in_connector_fills_no_state(run, name):
    audit, _ = run(name, BUILTIN)
    states = audit.groups[audit.groups.kind.isin(STATES)]
    rest = audit.groups[~audit.groups.kind.isin(STATES)]
    assert (states.coverage == 0).all() and (states.wrong == states.required).all()  # zeros for values
    assert (rest.coverage == 1).all()
    assert "mamba) 0%" in audit.verdict


@pytest.mark.parametrize("name", ["tiny-gemma3", "tiny-llama"])
def test_where_the_built_in_connector_is_right_the_audit_says_so(run, name):
    audit, _ = run(name, BUILTIN)
    assert audit.ok, str(audit)


def test_kernel_blocks(run):
    with dbv.kernel_blocks(32):
        ours, tokens = run("tiny-gemma3", lengths=(1000,), options={"std": 0.0})
        builtin, others = run("tiny-gemma3", BUILTIN, lengths=(1000,))
    assert ours.ok, str(ours)
    groups = builtin.groups.set_index("kind")
    # (a window group's pages may hold the constant by accident: other groups' wrong rows alias them)
    assert groups.loc["full_attention", "coverage"] == 0 and groups.uncovered.sum() > 0
    assert not builtin.ok
    # decoding over poison is decoding over NaN
    assert tokens[0].outputs[0].token_ids != others[0].outputs[0].token_ids


def test_kernel_blocks_do_not_change_what_is_decoded(run):
    whole = run("tiny-llama", options={"std": 0.0})[1]
    with dbv.kernel_blocks(32):
        split = run("tiny-llama", options={"std": 0.0})[1]
    assert [o.outputs[0].token_ids for o in split] == [o.outputs[0].token_ids for o in whole]


def test_prefix_hits_are_counted_and_left_alone(run):
    lengths, hit = (1000, 1000, 900), {}

    def look(llm):
        again = dbv.generate(llm, dbv.prompts(lengths, shared=640), 3)
        hit["cached"] = [output.num_cached_tokens for output in again]

    for name in ("tiny-llama", "tiny-gemma3", "tiny-nemotron-h"):
        audit, _ = run(name, lengths=lengths, shared=640, look=look)
        assert audit.ok, f"{name}: {audit}"
        assert audit.steps.step.max() >= 2


def test_a_preempted_request_is_refilled_and_nothing_is_prefilled():
    with dbv.engine(
        "tiny-llama",
        OURS,
        {"audit": "bytes", "std": 0.02},
        kv_cache_memory_bytes=6 * 32768 * 11,
        enable_prefix_caching=False,
        max_model_len=1024,
    ) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule, most = scheduler.schedule, []

        def spy(*arguments):
            output = schedule(*arguments)
            most.extend(output.num_scheduled_tokens.values())
            return output

        scheduler.schedule = spy
        # two requests of 5 blocks each fill the pool's 10; the first to need a sixth preempts the other
        outputs = dbv.generate(llm, dbv.prompts([630, 630]), 24)
        audit = dbv.audit(llm)
        counters = scheduler.connector.scheduler.counters
    assert counters["requests_filled"] == 2 and counters["requests_refilled"] >= 1
    assert max(most) == 1  # a real prefill would schedule hundreds of tokens at once
    assert [len(output.outputs[0].token_ids) for output in outputs] == [24, 24]
    assert audit.ok, str(audit)
    assert audit.steps.counters.iloc[-1]["requests_refilled"] == counters["requests_refilled"]


def test_startup_fill_where_the_engine_zeroes_new_blocks(run):
    audit, _ = run("tiny-nemotron-h", options={"startup_fill": True, "std": 0.0})
    assert (audit.groups.coverage == 1).all(), str(audit)
    audit, _ = run("tiny-llama", options={"startup_fill": True, "std": 0.0})
    assert audit.ok, str(audit)


def test_a_connector_that_forgets_a_group_is_seen_and_strict_stops_the_engine(run, monkeypatch):
    from decodebench.cache.connector import ConnectorWorker
    from decodebench.vllm.live import AuditFailed

    write = ConnectorWorker.write
    monkeypatch.setattr(ConnectorWorker, "write", lambda self, rows: write(self, [(), *rows[1:]]))
    audit, _ = run("tiny-granite-hybrid")
    assert not audit.ok and list(audit.groups.coverage) == [0, 1, 1]
    assert audit.groups.uncovered[0] == audit.groups.required[0]
    with pytest.raises(AuditFailed, match=r"NOT OK: .*group 0 \(mamba\) 0%"):
        run("tiny-granite-hybrid", options={"strict": True})


def test_a_connector_that_writes_elsewhere_is_seen(run, monkeypatch):
    from decodebench.cache.connector import ConnectorWorker

    write = ConnectorWorker.write

    def shifted(self, rows):
        return write(self, [tuple(row + 20 for row in rows[0]), *rows[1:]])

    monkeypatch.setattr(ConnectorWorker, "write", shifted)
    audit, _ = run("tiny-granite-hybrid", lengths=(1000, 700))
    assert audit.groups.stray.sum() + audit.groups.clobbered.sum() > 0
    assert audit.groups.coverage[0] == 0


def test_fills_and_audits_travel_on_vllms_stats_channel(run):
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    seen = []

    def look(llm):
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        make = scheduler.make_stats

        def spy(*arguments, **named):
            made = make(*arguments, **named)
            if made is not None and made.kv_connector_stats:
                seen.append(made.kv_connector_stats)
            return made

        scheduler.make_stats = spy
        dbv.generate(llm, dbv.prompts([500]), 2)
        logging = KVConnectorLogging(llm.llm_engine.vllm_config.kv_transfer_config)
        for data in seen:
            logging.observe(data)
        logging.log(lambda *line: seen.append(line[0] % line[1:]))

    run("tiny-llama", look=look, disable_log_stats=False)
    assert "filled requests=1" in seen[-1] and "covered=1.0, faults=0" in seen[-1]


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("A1", "tiny-nemotron-h"),
        ("A2", "tiny-nemotron-h"),
        ("A3", "tiny-llama"),
        ("A7", "tiny-granite-hybrid"),
        ("A8", "tiny-nemotron-h"),
        ("A12", "tiny-gemma3"),
    ],
)
def test_a_historic_defect_in_a_running_engine_is_seen(run, monkeypatch, fault, name):
    from decodebench.cache.faults import FAULTS

    monkeypatch.setattr("decodebench.vllm.connector.ConnectorScheduler", FAULTS[fault].scheduler)
    monkeypatch.setattr("decodebench.vllm.connector.ConnectorWorker", FAULTS[fault].worker)
    # (A2 needs groups of two block sizes: without prefix caching a state's block spans the longest request)
    batch = dbv.prompts((1000, 700, 390), shared=256)
    audit, _ = run(
        name,
        lengths=(1000, 700, 390),
        shared=256,
        enable_prefix_caching=fault != "A2",
        look=lambda llm: dbv.generate(llm, [[*prompt, 5, 6, 7] for prompt in batch], 3),
    )
    assert not audit.ok, str(audit)
    found = audit.groups[["wrong", "uncovered", "stray", "clobbered"]].sum()
    assert found["clobbered"] > 0 if fault == "A3" else True
    assert found["stray"] + found["clobbered"] > 0 if fault == "A7" else True
    assert found["wrong"] + found["uncovered"] > 0 if fault not in ("A3", "A7") else True
