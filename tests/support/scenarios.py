"""Random scenarios between vLLM's real scheduler, cache managers and metadata builders, without a model.

    python tests/support/scenarios.py --scenarios 20000 --seed 0

Each draws groups (full, windowed and chunked attention of several block sizes, states of both cache
modes), prompts around block edges with shared prefixes and of one to three tokens, several samples of
a prompt, few or many blocks, chunk sizes, asynchronous scheduling, drafted tokens, aborts and
preemptions. At every first decode step: what the
builders' metadata makes the kernels read is in the connector's plan or was brought by a prefix hit that
somebody filled; nothing planned belongs to another request; and the pool's tables are vLLM's. What a run has met, its
last line counts. ``--fault A18`` plants one of the connector's historic faults: the run must fail.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter, deque
from functools import cache
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from decodebench.vllm.launch import prepare_process

    prepare_process()

import stage
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as v
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata
from vllm.v1.attention.backends.linear_attn import LinearAttentionMetadataBuilder
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import decodebench.vllm.connector
from decodebench.cache.faults import FAULTS
from decodebench.coverage.required import hit_blocks
from decodebench.layout.pool import NULL_BLOCK, Batch, KVCacheManager, RequestBlocks
from decodebench.layout.pool import Request as OurRequest
from decodebench.vllm.step_reads import step_reads

#: longest request: a state that is kept once spans it
LONGEST = 512


@cache
def engine(prefix: bool, drafts: int, asynchronous: bool, batched: int):
    """vLLM's configuration for these settings, and the manager of structured outputs that belongs to it."""
    more = {}
    if drafts:
        method = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3}
        more["speculative_config"] = method
    config = stage.engine_config(
        options={"audit": "plan"},
        prefix=prefix,
        max_model_len=LONGEST,
        max_num_seqs=6,
        max_num_batched_tokens=batched,
        **more,
    )
    config.scheduler_config.async_scheduling = asynchronous
    return config, StructuredOutputManager(config)


class Scenario:
    """One engine without a model; ``run`` steps it and checks every first decode step."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.seen: Counter = Counter()
        block = draw.choice([4, 8, 16])
        self.prefix = draw.random() < 0.7
        self.drafts = draw.choice([0, 0, 0, 1, 3])
        self.asynchronous = not self.drafts and draw.random() < 0.4
        self.block = block
        mode = "align" if self.prefix else "none"
        state = {
            "block_size": block * draw.choice([1, 2, 4]) if self.prefix else LONGEST,
            "shapes": ((2, 4),),
            "dtypes": (torch.float32,),
            "mamba_cache_mode": mode,
            "num_speculative_blocks": self.drafts,
            "num_prefill_checkpoint_blocks": self.prefix and draw.randint(0, 1),
            "prefill_checkpoint_alignment": 1,
        }
        attention = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        others = [
            v.SlidingWindowSpec(block_size=block, sliding_window=draw.randint(2, 5 * block), **attention),
            v.FullAttentionSpec(block_size=draw.choice([2, 4]) * block, **attention),
        ]
        if not self.prefix:
            size = block * draw.randint(1, 4)
            others.append(
                v.ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=size, **attention)
            )
        specs = [v.FullAttentionSpec(block_size=block, **attention)]
        specs += [v.MambaSpec(**state)] * draw.choice([0, 1, 1, 2])
        specs += draw.sample(others, draw.randint(0, 1))
        if self.prefix and draw.random() < 0.15:  # a hit may end inside a block of the largest
            state["block_size"] = 2 * block
            specs = [v.FullAttentionSpec(block_size=n * block, **attention) for n in (1, 4)]
            specs.append(v.MambaSpec(**state))
        draw.shuffle(specs)
        self.specs = specs
        sizes = [spec.block_size for spec in specs]
        self.config, structured = engine(
            self.prefix, self.drafts, self.asynchronous, draw.choice([8, 64, 512])
        )
        cache = self.config.cache_config
        has_states = any(isinstance(spec, v.MambaSpec) for spec in specs)
        cache.mamba_cache_mode = mode if has_states else "none"
        cache.num_gpu_blocks = self.num_blocks = draw.choice([30, 60, 120, 600, 600])
        cache.block_size = block
        layers = [([f"g{g}"], spec) for g, spec in enumerate(specs)]
        self.scheduler = (AsyncScheduler if self.asynchronous else Scheduler)(
            self.config,
            stage.config_of(layers, self.num_blocks),
            structured,
            block_size=max(sizes),
            hash_block_size=min(sizes),
        )
        self.scheduler.need_mamba_block_aligned_split = has_states and self.prefix
        self.layout = self.scheduler.connector.layout
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(min(sizes), sha256)
        self.prompts = [[draw.randint(10, 10**6) for _ in range(LONGEST)] for _ in range(3)]
        self.requests: dict[str, Request] = {}
        self.tables: dict[str, list[list[int]]] = {}  # as a worker keeps them
        self.hits: dict[str, int] = {}
        self.holds: dict[int, int] = {}  # block → the group whose content it holds
        self.builders = {}

    def length(self) -> int:
        """A prompt's length, mostly around block edges."""
        draw, size = self.draw, self.draw.choice(self.specs).block_size
        size = size if size < LONGEST else self.block
        edge = size * draw.randint(1, max(1, 160 // size)) + draw.choice([-1, 0, 1, 1])
        return max(1, min(LONGEST - 40, draw.choice([edge, edge, draw.randint(1, 200), draw.randint(1, 3)])))

    def add(self) -> None:
        draw, number = self.draw, len(self.requests)
        tokens = list(draw.choice(self.prompts)[: self.length()])
        if number and draw.random() < 0.4:  # goes on where another one stands, as a conversation does
            before = draw.choice(list(self.requests.values()))
            more = draw.randint(0, 2 * self.block)
            tokens = [*before.all_token_ids, *range(10**7, 10**7 + more)][: LONGEST - 40]
        elif draw.random() < 0.5:  # a tail of its own behind a shared prefix
            at = draw.randint(0, len(tokens))
            tokens[at:] = [draw.randint(10, 10**6) for _ in tokens[at:]]
        params = SamplingParams(max_tokens=draw.choice([1, 2, 5, 30]), ignore_eos=True)
        params.update_from_generation_config({}, stage.EOS)
        samples = draw.choice([1, 1, 1, 1, 2, 3])  # an engine makes a request of each
        self.seen["several samples of a prompt"] += samples > 1
        for sample in range(number, number + samples):
            request = Request(f"r{sample}", tokens, params, None, block_hasher=self.hasher)
            self.requests[request.request_id] = request
            self.scheduler.add_request(request)

    def run(self) -> Counter:
        draw, pending = self.draw, deque()
        for _ in range(draw.randint(1, 4)):
            self.add()
        for _ in range(draw.randint(4, 16)):
            if draw.random() < 0.3:
                self.add()
            if draw.random() < 0.05 and self.scheduler.running:
                name = draw.choice(self.scheduler.running).request_id
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                self.seen["aborted"] += 1
            try:
                output = self.scheduler.schedule()
            except ValueError as error:
                if "free blocks from the pool" not in str(error):
                    raise
                # vLLM's admission counts one block too few beside states at boundaries and ends itself
                self.seen["ended by vLLM's own count of blocks"] += 1
                return self.seen
            self.follow(output)
            self.check(output)
            pending.append(output)
            while len(pending) > (1 if self.asynchronous and draw.random() < 0.7 else 0):
                self.update(pending.popleft())
        while pending:
            self.update(pending.popleft())
        self.seen["preempted"] += sum(request.num_preemptions for request in self.requests.values())
        self.seen["filled again"] += self.scheduler.connector.scheduler.counters["requests_refilled"]
        return self.seen

    def follow(self, output) -> None:
        """Block tables as a worker keeps them: it only ever hears of new ones."""
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            self.hits[new.req_id] = new.num_computed_tokens
        old = output.scheduled_cached_reqs
        for name, ids in zip(old.req_ids, old.new_block_ids):
            if name in old.resumed_req_ids:
                self.tables[name] = [list(group) for group in ids]
            elif ids is not None:
                for table, more in zip(self.tables[name], ids):
                    table.extend(more)

    def metadata(self, output) -> tuple[list[str], dict]:
        """(requests in the batch's order, what each group's own builder hands to its kernels)."""
        names = sorted(output.num_scheduled_tokens, key=lambda name: output.num_scheduled_tokens[name])
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        old = output.scheduled_cached_reqs
        computed |= dict(zip(old.req_ids, old.num_computed_tokens))
        queries = torch.tensor([output.num_scheduled_tokens[name] for name in names], dtype=torch.int32)
        lengths = torch.tensor([computed[name] for name in names], dtype=torch.int32) + queries
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), queries.cumsum(0).to(torch.int32)])
        made = {}
        for g, spec in enumerate(self.specs):
            width = max(len(self.tables[name][g]) for name in names) + self.drafts + 1
            width = max(width, -(-int(lengths.max()) // spec.block_size) + self.drafts + 1)
            rows = [self.tables[name][g] + [0] * (width - len(self.tables[name][g])) for name in names]
            table = torch.tensor(rows, dtype=torch.int32)
            positions = [range(int(n - q), int(n)) for n, q in zip(lengths, queries)]
            slots = [
                row[p // spec.block_size] * spec.block_size + p % spec.block_size
                for row, span in zip(rows, positions)
                for p in span
            ]
            common = CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=lengths,
                num_reqs=len(names),
                num_actual_tokens=int(starts[-1]),
                max_query_len=int(queries.max()),
                max_seq_len=int(lengths.max()),
                block_table_tensor=table,
                slot_mapping=torch.tensor(slots, dtype=torch.int64),
                is_prefilling=torch.ones(len(names), dtype=torch.bool),
                seq_lens_cpu_upper_bound=lengths,
            )
            made[f"g{g}"] = self.build(g, spec, common)
        return names, made

    def build(self, g: int, spec, common):
        if isinstance(spec, v.MambaSpec):
            if g not in self.builders:
                kind = LinearAttentionMetadataBuilder
                if not self.drafts and self.draw.random() < 0.5:
                    kind = ShortConvAttentionMetadataBuilder
                self.builders[g] = kind(spec, [f"g{g}"], self.config, torch.device("cpu"))
            return self.builders[g].build(0, common)
        table, lengths, starts = common.block_table_tensor, common.seq_lens, common.query_start_loc
        if isinstance(spec, v.ChunkedLocalAttentionSpec):
            from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches

            made = make_local_attention_virtual_batches(spec.attention_chunk_size, common, spec.block_size)
            local = made[0] if isinstance(made, tuple) else made
            table, lengths, starts = local.block_table_tensor, local.seq_lens, local.query_start_loc
        # (its builder adds only how the CPU's kernel splits its work)
        return CPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=starts,
            max_seq_len=common.max_seq_len,
            seq_lens=lengths,
            block_table=table,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
        )

    def check(self, output) -> None:
        meta = output.kv_connector_metadata
        fills = {fill.request_id: fill for fill in meta.fill.requests}
        if not output.num_scheduled_tokens:
            return
        names, metadata = self.metadata(output)
        if fills:
            batch = Batch(self.layout, meta.admitted)
            assert {blocks.request_id for blocks in batch.requests} == set(fills)
            modules = {
                f"g{g}": SimpleNamespace(impl=SimpleNamespace(sliding_window=spec.sliding_window))
                for g, spec in enumerate(self.specs)
                if isinstance(spec, v.SlidingWindowSpec)
            }
            reads = step_reads(self.layout, batch, metadata, modules)
            assert not reads.unseen and not reads.disagreements, (reads.unseen, reads.disagreements)
            planned = [
                set().union(*(fill.block_ids[g] for fill in fills.values())) for g in range(len(self.specs))
            ]
            for group, blocks in enumerate(planned):
                self.holds |= dict.fromkeys(blocks, group)
            for rows in reads.pages:
                for block, shared in zip(rows.block_ids.tolist(), rows.shared.tolist()):
                    brought = shared and self.holds.get(block) == rows.group
                    assert block in planned[rows.group] or brought, (rows, planned[rows.group])
                    self.seen["rows read"] += 1
            for blocks in batch.requests:
                self.check_request(blocks, fills[blocks.request_id], output)
        self.check_full_hits(output, fills, metadata)
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens))
        for g, spec in enumerate(self.specs):  # what the step's own tokens and states go to
            for name in names:
                table, start = self.tables[name][g], computed[name]
                self.holds[(table or [0])[-1]] = g
                if not isinstance(spec, v.MambaSpec):
                    stop = start + output.num_scheduled_tokens[name]
                    own = table[start // spec.block_size : -(-stop // spec.block_size)]
                    self.holds |= dict.fromkeys(own, g)

    def check_full_hits(self, output, fills, metadata) -> None:
        """A request whose whole prompt is a hit gets no fill: somebody filled all that it reads."""
        copies = {copy.dst_block_id: copy.src_block_id for copy in output.kv_cache_block_copies or ()}
        for new in output.scheduled_new_reqs:
            tokens = new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
            if new.req_id in fills or tokens == 1:
                continue
            self.seen["full hits"] += 1
            self.seen["full hits that end in a block"] += bool(copies)
            blocks = RequestBlocks(
                OurRequest(new.req_id, new.num_computed_tokens + 1),
                new.num_computed_tokens,
                tuple(map(tuple, self.tables[new.req_id])),
            )
            for pages in step_reads(self.layout, Batch(self.layout, (blocks,)), metadata).pages:
                held = [self.holds.get(copies.get(block, block)) for block in pages.block_ids.tolist()]
                if not isinstance(self.specs[pages.group], v.MambaSpec):  # a worker copies states itself
                    assert set(held) <= {pages.group}, (new.req_id, pages, held)

    def check_request(self, blocks, fill, output) -> None:
        name = blocks.request_id
        self.hits[name] = blocks.num_computed
        self.seen["requests filled"] += 1
        for offset, named in ((-1, "k × block - 1"), (0, "k × block"), (1, "k × block + 1")):
            self.seen[named] += any((blocks.num_tokens - offset) % s.block_size == 0 for s in self.specs)
        self.seen["of 1 to 3 tokens"] += blocks.num_tokens <= 3
        self.seen["behind a prefix hit"] += blocks.num_computed > 0
        for group, rows in enumerate(fill.block_ids):
            table = blocks.block_ids[group]
            assert [list(table)] == [self.tables[name][group]]
            own = set(table[hit_blocks(self.layout, blocks, group) :]) - {NULL_BLOCK}
            assert set(rows) <= own, (name, group, rows, table)
            for running in self.scheduler.running:
                other = running.request_id
                if other == name:
                    continue
                # a worker's table still lists blocks that were passed on: the manager's does not
                tables = self.scheduler.kv_cache_manager.get_block_ids(other)
                for position, block in enumerate(tables[group]):
                    if block in rows:  # only what the other hits, in this step or a later one
                        size = self.layout.tokens_per_block(group)
                        assert position < self.hits[other] // size, (name, other, group, block)
                for g, foreign in enumerate(tables):
                    assert g == group or not set(foreign) & set(rows), (name, other, g, group)
        if output.num_scheduled_tokens[name] == 1:
            ours = KVCacheManager(self.layout).allocate(OurRequest(name, blocks.num_tokens))
            theirs = [[bool(b) for b in table] for table in blocks.block_ids]
            assert [[bool(b) for b in table] for table in ours.block_ids] == theirs, (blocks, ours)
            self.seen["tables compared"] += 1
        else:
            self.seen["with drafted tokens"] += 1

    def update(self, output) -> None:
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            drafted = output.scheduled_spec_decode_tokens.get(name, [])
            request = self.requests[name]
            done = request.num_computed_tokens >= request.num_tokens or not request.is_finished()
            accepted = self.draw.randint(0, len(drafted))
            sampled.append([self.draw.randint(10, 10**6) for _ in range(1 + accepted)] if done else [])
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        if self.drafts:
            running = [request.request_id for request in self.scheduler.running]
            tokens = [[self.draw.randint(10, 99)] * self.draw.randint(0, self.drafts) for _ in running]
            self.scheduler.update_draft_token_ids(DraftTokenIds(running, tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scenarios", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="the first scenario's seed")
    parser.add_argument("--fault", choices=list(FAULTS), help="plant it in the connector's plan")
    asked = parser.parse_args()
    if asked.fault:
        decodebench.vllm.connector.ConnectorScheduler = FAULTS[asked.fault].scheduler
    began, seen, failed = time.perf_counter(), Counter(), []
    for number in range(asked.scenarios):
        try:
            seen += Scenario(asked.seed + number).run()
        except Exception as error:
            failed.append(asked.seed + number)
            text = str(error).splitlines()
            print(
                f"seed {asked.seed + number}: {type(error).__name__}: {text[0][:400] if text else ''}",
                flush=True,
            )
        if number % 500 == 499:
            print(f"{number + 1:,} of {asked.scenarios:,}, {time.perf_counter() - began:.0f} s", flush=True)
    print(
        f"{asked.scenarios:,} scenarios, seeds {asked.seed} to {asked.seed + asked.scenarios - 1}, "
        f"{time.perf_counter() - began:.0f} s, {len(failed)} failed: {dict(seen)}"
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
