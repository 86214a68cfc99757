"""Decode latency of the whole model in a running engine: real layers around the cache we filled.

The step that admits requests (and fills them, or computes their prompts) is reported apart from
the resident steps, in which every request decodes one token: only those are decode latency.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from decodebench.errors import DecodebenchError
from decodebench.vllm.launch import engine, prompts

if TYPE_CHECKING:
    import pandas
    from vllm import LLM

#: how a prompt's cache comes about → the connector that does it
ADMISSIONS = {
    "grouped fill": "GroupedDecodeBenchConnector",
    "built-in fill": "DecodeBenchConnector",
    "real prefill": None,
}


class EngineMeasurementRefused(DecodebenchError):
    """A decode measurement that the engine would not make as asked."""


def measure_decode(
    model: str | Path | Mapping | LLM,
    contexts: int | Sequence[int] = (1000,),
    batch: int = 4,
    steps: int = 32,
    admissions: Sequence[str] = tuple(ADMISSIONS),
    options: Mapping | None = None,
    **llm_arguments,
) -> pandas.DataFrame:
    """Times of every engine step, one row a step.

    ``model`` is what ``engine`` takes (a path, a name, a ``config.json`` as a dictionary) or a
    running ``LLM`` in this process, whose own connector is then the only admission. Each context
    length is a batch of its own; a sequence inside ``contexts`` is one batch of mixed lengths.
    Columns: ``admission``, ``context`` (text), ``batch``, ``step``, ``phase`` ("admit": a prompt is
    filled or computed; "decode": every request decodes one token), ``seconds``.
    """
    import pandas

    if steps < 1 or batch < 1:
        raise EngineMeasurementRefused(f"batch {batch}, steps {steps}: both must be at least 1")
    cases = [contexts] if isinstance(contexts, int) else list(contexts)
    batches = [[case] * batch if isinstance(case, int) else list(case) for case in cases]
    rows = []
    if hasattr(model, "llm_engine"):
        config = model.llm_engine.vllm_config.kv_transfer_config
        rows += _batches(model, config.kv_connector if config else "real prefill", batches, steps)
    else:
        unknown = [name for name in admissions if name not in ADMISSIONS]
        if unknown:
            raise EngineMeasurementRefused(f"no admission {unknown[0]!r}: known are {', '.join(ADMISSIONS)}")
        longest = max(max(lengths) for lengths in batches)
        defaults = {"max_num_seqs": max(map(len, batches)), "max_model_len": longest + steps + 2}
        # a prefix hit would turn the second batch's prefill into a look-up
        defaults |= {"enable_prefix_caching": False, **llm_arguments}
        for name in admissions:
            given = options if name == "grouped fill" else None
            with engine(model, ADMISSIONS[name], given, **defaults) as llm:
                rows += _batches(llm, name, batches, steps)
    return pandas.DataFrame(rows)


def summary(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Median and quartiles of the resident steps, and all admitting steps together, in milliseconds."""
    import pandas

    rows = []
    for keys, part in frame.groupby(["admission", "context", "batch"], sort=False):
        decode = part.loc[part.phase == "decode", "seconds"] * 1e3
        rows.append(
            {
                **dict(zip(("admission", "context", "batch"), keys)),
                "admit ms": part.loc[part.phase == "admit", "seconds"].sum() * 1e3,
                "decode ms (median)": decode.median(),
                "q1": decode.quantile(0.25),
                "q3": decode.quantile(0.75),
                "steps": len(decode),
            }
        )
    return pandas.DataFrame(rows)


def _batches(llm, admission: str, batches: list[list[int]], steps: int) -> list[dict]:
    rows, longest = [], llm.llm_engine.vllm_config.model_config.max_model_len
    for lengths in batches:
        if max(lengths) + steps + 1 > longest:
            raise EngineMeasurementRefused(
                f"a context of {max(lengths):,} tokens and {steps} steps exceed the engine's {longest:,}: "
                "raise max_model_len"
            )
    _run(llm, [min(min(lengths) for lengths in batches)], 2)  # kernels and pages are touched once before
    for lengths in batches:
        same = len(set(lengths)) == 1
        context = f"{lengths[0]:,}" if same else f"{min(lengths):,} to {max(lengths):,}"
        for step, (phase, seconds) in enumerate(_run(llm, lengths, steps)):
            rows.append(
                {
                    "admission": admission,
                    "context": context,
                    "batch": len(lengths),
                    "step": step,
                    "phase": phase,
                    "seconds": seconds,
                }
            )
    return rows


def _run(llm, lengths: list[int], steps: int) -> list[tuple[str, float]]:
    """(phase, seconds) of each engine step of one batch."""
    from vllm import SamplingParams

    core = llm.llm_engine
    params = SamplingParams(max_tokens=steps + 1, temperature=0, ignore_eos=True, detokenize=False)
    vocabulary = core.vllm_config.model_config.get_vocab_size()
    for number, prompt in enumerate(prompts(lengths, vocabulary)):
        core.add_request(f"decode-{number}", {"prompt_token_ids": prompt}, params)
    timed: list[tuple[str, float]] = []
    started: set[str] = set()
    while core.has_unfinished_requests():
        resident = len(started) == len(lengths)
        began = time.perf_counter()
        outputs = core.step()
        timed.append(("decode" if resident else "admit", time.perf_counter() - began))
        started |= {output.request_id for output in outputs}
    return timed
