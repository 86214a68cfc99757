"""Running engines: four tiny models on the CPU, audited by their bytes, beside the built-in connector."""

import pytest

import decodebench.vllm as dbv

OURS = "GroupedDecodeBenchConnector"
BUILTIN = "AuditedBuiltinConnector"
#: several blocks, and in blocks of 128 tokens: one and a token, one and two, a step that opens the ninth
LENGTHS = (1000, 700, 129, 130, 1025, 2)
STATES = ("mamba",)


@pytest.fixture
def run(tmp_path):
    """Engine, prompts, audit: ``run(name, connector)`` → (Audit, LLM's outputs)."""

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


@pytest.mark.parametrize(
    ("kv_cache_dtype", "prefix"), [("auto", True), ("fp8", False)], ids=["bf16-prefix-caching", "fp8"]
)
@pytest.mark.parametrize("name", dbv.TINY)
def test_every_required_page_holds_its_values_and_the_plan_is_the_layout(run, name, kv_cache_dtype, prefix):
    layouts = {}

    def look(llm):
        layouts["engine"], layouts["plan"] = dbv.layout_of_engine(llm), dbv.plan_of_engine(llm, name)

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
    assert (by_bytes.source, by_plan.source) == ("bytes", "plan")
    assert by_plan.groups.equals(by_bytes.groups)
    assert by_plan.verdict == by_bytes.verdict.replace("covered", "written, by block ids,")


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
    assert (states.coverage == 0).all() and (states.uncovered == states.required).all()
    assert {"zeros that nobody asked for", "still poison: decode reads NaN"} <= set(audit.rows.detail)
    assert (rest.coverage == 1).all()
    assert "mamba) 0 %" in audit.verdict


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
        assert len(audit.request_ids) > len(lengths)


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
        audit, steps = dbv.audit(llm), dbv.audit_steps(dbv.audit_file_of(llm))
        counters = scheduler.connector.scheduler.counters
    assert counters["requests_filled"] == 2 and counters["requests_refilled"] >= 1
    assert max(most) == 1  # a real prefill would schedule hundreds of tokens at once
    assert [len(output.outputs[0].token_ids) for output in outputs] == [24, 24]
    assert audit.ok, str(audit)
    assert steps.counters.iloc[-1]["requests_refilled"] == counters["requests_refilled"]


@pytest.mark.parametrize("std", [0.0, 0.02])
@pytest.mark.parametrize("name", ["tiny-nemotron-h", "tiny-gemma3", "tiny-llama"])
def test_a_startup_fill_serves_every_request_though_blocks_change_hands(run, name, std):
    def again(llm):
        dbv.generate(llm, dbv.prompts(LENGTHS[::-1]), 3)

    audit, _ = run(name, options={"startup_fill": True, "std": std}, look=again)
    assert audit.ok, str(audit)


def test_a_connector_that_forgets_a_group_is_seen_and_strict_stops_the_engine(run, monkeypatch):
    from decodebench.cache.connector import ConnectorWorker
    from decodebench.vllm.step_audit import AuditFailed

    write = ConnectorWorker.write
    monkeypatch.setattr(ConnectorWorker, "write", lambda self, rows: write(self, [(), *rows[1:]]))
    audit, _ = run("tiny-granite-hybrid")
    assert not audit.ok and list(audit.groups.coverage) == [0, 1, 1]
    assert audit.groups.uncovered[0] == audit.groups.required[0]
    with pytest.raises(AuditFailed, match=r"pages covered in 3 groups: group 0 \(mamba\) 0 %"):
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
        ("A18", "tiny-nemotron-h"),
        ("A18", "tiny-granite-hybrid"),
    ],
)
def test_a_historic_defect_in_a_running_engine_is_seen(run, monkeypatch, fault, name):
    from decodebench.cache.faults import FAULTS

    monkeypatch.setattr("decodebench.vllm.connector.ConnectorScheduler", FAULTS[fault].scheduler)
    monkeypatch.setattr("decodebench.vllm.connector.ConnectorWorker", FAULTS[fault].worker)
    # (A2 needs groups of two block sizes: without prefix caching a state's block spans the longest request)
    lengths = (1000, 700, 385)  # the last one's token opens a block of 128
    batch = dbv.prompts(lengths, shared=256)
    audit, _ = run(
        name,
        lengths=lengths,
        shared=256,
        enable_prefix_caching=fault != "A2",
        look=lambda llm: dbv.generate(llm, [[*prompt, 5, 6, 7] for prompt in batch], 3),
    )
    assert not audit.ok, str(audit)
    found = audit.groups[["wrong", "uncovered", "stray", "clobbered"]].sum()
    if fault == "A18":  # the running state alone, and the audit says what it looks like
        assert set(audit.rows.request) == {name for name in audit.request_ids if name.startswith("2-")}
        assert "Looks like A18 state before the copy" in audit.verdict
    assert found["clobbered"] > 0 if fault == "A3" else True
    assert found["stray"] + found["clobbered"] > 0 if fault == "A7" else True
    assert found["wrong"] + found["uncovered"] > 0 if fault not in ("A3", "A7") else True


# -- where a token opens a block -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-nemotron-h", "tiny-granite-hybrid"])
def test_the_state_at_a_block_boundary_is_filled_where_the_kernels_read_it(run, monkeypatch, name):
    from decodebench.vllm.connector import GroupedDecodeBenchConnector as Connector

    read = {}
    load = Connector.start_load_kv

    def spy(self, forward_context, **kwargs):
        load(self, forward_context, **kwargs)
        for fill in self._get_connector_metadata().fill.requests:
            for layer, metadata in forward_context.attn_metadata.items():
                if hasattr(metadata, "state_indices_tensor_d"):
                    planned = fill.block_ids[self.layout.group_of[layer]]
                    read[layer] = (metadata.state_indices_tensor_d[0, 0].item(), planned)

    monkeypatch.setattr(Connector, "start_load_kv", spy)
    audit, _ = run(name, lengths=(129,))
    assert audit.ok and read
    # the block of the 129th token, and the one that its state was copied from, which prefix hits read
    assert all(len(planned) == 2 and row == planned[1] for row, planned in read.values())


def test_what_an_audit_cannot_see_it_does_not_vouch_for(run, monkeypatch):
    from decodebench.vllm import step_reads

    monkeypatch.setattr(step_reads, "_states", lambda metadata: None)
    audit, _ = run("tiny-granite-hybrid", lengths=(700,))
    assert audit.coverage == 1 and not audit.ok
    assert "What the step reads cannot be seen in group 0 (mamba" in audit.verdict


def test_a_step_that_reads_other_rows_than_planned_is_a_finding(run, monkeypatch):
    from decodebench.layout.pool import RequestBlocks

    def moved(self, spec, group, tokens_per_block):  # the plan's rule of before
        return spec.held_blocks(self.num_tokens, tokens_per_block, len(self.block_ids[group]))[:1]

    plan = RequestBlocks.required_blocks
    monkeypatch.setattr(
        RequestBlocks,
        "required_blocks",
        lambda self, spec, group, size: (moved if spec.holds_state else plan)(self, spec, group, size),
    )
    audit, _ = run("tiny-granite-hybrid", lengths=(129,))
    assert audit.coverage == 1 and not audit.ok
    assert "Plan and step disagree: request '0-" in audit.verdict


def test_numbers_behind_a_sequence_that_a_kernel_multiplies_are_seen(run):
    # vLLM's CPU runner zeroes new blocks as rows of the kernels' view: with kernel blocks, other rows
    lengths, steps = (700, 129, 128, 3, 513, 1, 700, 512, 257, 129, 130, 255), 20
    with dbv.kernel_blocks(32):
        audit, _ = run("tiny-nemotron-h", lengths=lengths, max_tokens=steps)
    assert (audit.groups.coverage == 1).all()
    assert audit.ok or "not finite" in audit.verdict


def test_prompt_logprobs_are_refused_in_one_sentence():
    from vllm import SamplingParams

    from decodebench.errors import DecodebenchError

    params = SamplingParams(max_tokens=2, prompt_logprobs=1, detokenize=False)
    with (
        dbv.engine("tiny-llama", OURS) as llm,
        pytest.raises(DecodebenchError, match="prompt_logprobs.*never computed"),
    ):
        llm.generate([{"prompt_token_ids": dbv.prompts([300])[0]}], params, use_tqdm=False)
