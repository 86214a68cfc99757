"""Releases of vLLM whose layouts are known, and the rules that changed between them.

``tests/goldens/recompute.py`` runs a release's own planning on every stored case, ``tests/engine/registry``
its own models on every stored config; a release is listed here when ``plan`` computes the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

ENGINES = ("vllm-0.30", "vllm-0.31", "vllm-0.32", "vllm-0.33")
NEWEST = ENGINES[-1]


@dataclass(frozen=True)
class Rule:
    """Something that holds from the release ``since`` on; ``pull``: the pull request of vLLM that brought it.

    ``pull`` is None where it was found by comparing the releases' code and no pull request is known.
    """

    name: str
    since: str
    pull: int | None
    what: str


RULES = (
    Rule(
        "flat_rows",
        "vllm-0.31",
        None,
        "sparse latent kernels of a B200 read flat rows: blocks are whole rows apart (DeepSeek V3.2 and its like)",
    ),
    Rule(
        "mamba2_checkpoint",
        "vllm-0.32",
        57329,
        "Mamba-2 exports the state at the last boundary of a prefill: a request needs one block more a group",
    ),
    Rule(
        "kda_checkpoint",
        "vllm-0.32",
        56960,
        "Kimi delta attention of GLM-5.3 does the same where the card's kernels can",
    ),
    Rule(
        "whole_kernel_blocks",
        "vllm-0.32",
        None,
        "blocks lie whole rows apart on every card, and whole kernel blocks where their size is fixed",
    ),
    Rule(
        "layers_aligned",
        "vllm-0.32",
        None,
        "where layers are outermost each layer's blocks are aligned by themselves, before the sum of all was",
    ),
    Rule(
        "two_widths_fp8",
        "vllm-0.32",
        None,
        "keys and values of different widths are kept in fp8 where that is asked for (MiMo-V2)",
    ),
    Rule(
        "gdn_checkpoint",
        "vllm-0.33",
        None,
        "gated delta nets on FlashInfer's prefill export states too: a block more a group, and blocks grow in "
        "steps of 64 tokens",
    ),
    Rule(
        "wide_fp8_blocks",
        "vllm-0.33",
        None,
        "heads of 512 in fp8 on Hopper (Gemma 4) run on FlashAttention 4, in blocks of 64 tokens",
    ),
)

#: model_type → the first release whose layout of it is known; before, memory was cut in another way
FIRST_KNOWN = {
    "glm5_next": "vllm-0.32",
    "glm5_next_text": "vllm-0.32",
    "minimax_m3_text": "vllm-0.31",
    "minimax_m3_vl": "vllm-0.31",
}


def holds(name: str, engine: str) -> bool:
    """Whether a rule of ``RULES`` holds in a release of ``ENGINES``."""
    return reached(next(rule.since for rule in RULES if rule.name == name), engine)


def reached(since: str, engine: str) -> bool:
    """Whether a release of ``ENGINES`` is ``since`` or later."""
    return ENGINES.index(engine) >= ENGINES.index(since)
