"""Releases of vLLM whose layouts are known, and the rules that changed between them.

``tests/goldens/recompute.py`` runs a release's own planning on every stored case; a release is listed
here when it computes the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

ENGINES = ("vllm-0.32", "vllm-0.33")
NEWEST = ENGINES[-1]


@dataclass(frozen=True)
class Rule:
    """A number that specs take from the release: ``before`` until, and ``after`` from ``since`` on."""

    name: str
    since: str
    before: int
    after: int
    what: str


RULES = (
    Rule(
        "delta_checkpoint_blocks",
        "vllm-0.33",
        0,
        1,
        "gated delta nets whose kernel exports states keep one more, for an aligned prefill",
    ),
)


def rule(name: str, engine: str) -> int:
    """A rule's number in a release of ``ENGINES``."""
    found = next(rule for rule in RULES if rule.name == name)
    return found.after if ENGINES.index(engine) >= ENGINES.index(found.since) else found.before
