"""Random mutations of the connector's fill in tiny running engines: the byte audit of the step must see each.

    python tests/support/mutations.py --trials 200 --seed 0

Every trial sends one to three prompts to an engine, and changes one thing about what is written for
them; every second one changes nothing, and the audit must say so.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import decodebench.vllm as dbv

KINDS = ("skip a row", "shift a row", "another group's row", "another layer", "half a page", "one byte")


def mutated_write(worker, write, rows, kind: str, draw: random.Random):
    """``worker.write`` of these rows with one mutation."""
    cache, layout = worker.cache, worker.layout
    rows = [list(ids) for ids in rows]
    group = draw.choice([g for g, ids in enumerate(rows) if ids])
    row = draw.choice(rows[group])
    others = [g for g in range(len(rows)) if g != group]
    if kind == "another group's row" and not others:
        kind = "skip a row"
    if kind in KINDS[:3]:
        rows[group].remove(row)
        if kind == "shift a row":
            possible = [b for b in (row - 1, row + 1) if 0 < b < layout.num_blocks_of(group)]
            rows[group].append(draw.choice(possible))
        elif kind == "another group's row":
            rows[draw.choice(others)].append(row)
        return write([tuple(sorted(set(ids))) for ids in rows])
    layer = draw.choice(layout.groups[group].layer_names)
    part = draw.randrange(len(cache.parts(layer)))
    content = cache.flat(layer, part)[row].view(torch.uint8)
    before = content.clone()
    report = write([tuple(ids) for ids in rows])
    if kind == "half a page":
        half = len(content) // 2
        side = slice(0, half) if draw.random() < 0.5 else slice(half, None)
        content[side] = before[side]
    elif kind == "another layer":
        index = layout.layer_index[layer]
        other = draw.choice([i for i in range(len(layout.layer_names)) if i != index])
        wanted = worker.values.expected(cache.parts(layer)[part], other, row, part)
        content.copy_(wanted.view(torch.uint8))
    else:
        content[draw.randrange(len(content))] ^= draw.randint(1, 255)
    return report


def trials(model: str, count: int, seed: int, kinds=KINDS) -> tuple[Counter, list[str]]:
    """(how often each kind was caught and no mutation passed, what went wrong)."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    draw, caught, wrong = random.Random(seed), Counter(), []
    with dbv.engine(model, options={"audit": "bytes", "std": 0.02}) as llm:
        connector = get_kv_transfer_group()
        worker, auditor, audits = connector.worker, connector._auditor, []
        write, keep = worker.write, auditor._write
        auditor._write = lambda audit, *more: (audits.append(audit), keep(audit, *more))
        for number in range(2 * count * len(kinds)):
            kind = kinds[number // 2 % len(kinds)] if number % 2 else None
            mutations = [kind] if kind else []

            def once(rows, mutations=mutations):
                return mutated_write(worker, write, rows, mutations.pop(), draw) if mutations else write(rows)

            worker.write = once
            audits.clear()
            for layer in worker.layout.layer_names:  # poison that a mutation left is no later trial's fault
                worker.cache.pages(layer).zero_()
            lengths = [
                draw.choice([2, 3, 127, 128, 129, 130, 256, 257, 400, 513]) for _ in range(draw.randint(1, 3))
            ]
            prompts = [[draw.randint(4, 500) for _ in range(length)] for length in lengths]
            dbv.generate(llm, prompts, 1)
            ok = all(audit.ok for audit in audits) and bool(audits)
            if ok == (kind is None):
                caught[kind or "nothing"] += 1
            else:
                wrong.append(
                    f"{model}, trial {number}, {kind}, prompts of {lengths}: {[a.verdict for a in audits]}"
                )
    return caught, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=200, help="of each kind and model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="*", default=list(dbv.TINY))
    asked = parser.parse_args()
    failed = 0
    for model in asked.models:
        began = time.perf_counter()
        caught, wrong = trials(model, asked.trials, asked.seed)
        failed += len(wrong)
        print(f"{model}, seed {asked.seed}, {time.perf_counter() - began:.0f} s: {dict(caught)}", flush=True)
        print(*wrong[:10], sep="\n", end="\n" if wrong else "")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
