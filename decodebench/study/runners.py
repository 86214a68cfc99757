"""One case run: its stages in order, and what became of it as a row."""

from __future__ import annotations

import re
import time
from pkgutil import resolve_name

from decodebench.errors import DecodebenchError
from decodebench.study.grid import MEASURES, Case


class DeviceBroken(DecodebenchError):
    """A device that no later case of this process can use: names the case that it broke in."""


#: measure → the stage that adds its columns, loaded when a case first asks for it: layouts need no torch
STAGES = {
    "layout": "decodebench.study.plans:layout_stage",
    "coverage": "decodebench.study.stages:coverage_stage",
    "audit": "decodebench.study.stages:audit_stage",
    "decode": "decodebench.study.stages:decode_stage",
    "traffic": "decodebench.study.traffic_stage:traffic_stage",
}


def stages_of(measure: str) -> tuple[str, ...]:
    """The measures whose stages a case runs, in order."""
    return ("layout", "traffic") if measure == "traffic" else MEASURES[: MEASURES.index(measure) + 1]


def evaluate(case: Case) -> dict:
    """The measured columns of one case; never raises for a bad case: that is a row with its reason."""
    start = time.perf_counter()
    row: dict = {"status": "ok", "reason": None}
    made: dict = {}  # what a stage leaves for the next: layout, batch, cache
    try:
        for measure in stages_of(case.measure):
            row |= resolve_name(STAGES[measure])(case, made)
    except DecodebenchError as error:
        row |= {"status": "refused", "reason": _one_line(error)}
    except Exception as error:  # out of memory, a backend's own error: the sweep goes on
        if case.device.startswith("cuda") and resolve_name("decodebench.measure.card:broke")(
            error, case.device
        ):
            raise DeviceBroken(
                f"{case.device} broke in the case {case.model} {case.context} × {case.batch}, backend "
                f"{case.backend or 'default'}: {_one_line(error)}. Neither it nor anything behind it was stored: "
                "start the same sweep again to go on, without this case if it breaks there again"
            ) from error
        row |= {"status": "failed", "reason": f"{type(error).__name__}: {_one_line(error)}"}
    return row | {"seconds": time.perf_counter() - start}


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:500]
