"""Figures of cards beside those of the machine that makes a report: a panel a stored folder, none mixed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from decodebench.show.cells import Table, note
from decodebench.show.charts import bar_panels
from decodebench.words import seconds_text

if TYPE_CHECKING:
    import pandas as pd

#: what is asked for → the columns that tell it
COLUMNS = {
    "decode": "model kind batch context block_size kv_cache_dtype cold median_s share_of_read limit_share "
    "x_flashinfer x_flash_attn x_vllm_triton x_sdpa sm_mhz throttles notes",
    "fill": "what kind fill_bytes fill_seconds device_seconds gb_per_s of_memset share_of_read sm_mhz throttles",
}


class Stored(Protocol):
    """A result folder of a card: ``study.gpu_results.StoredCard``."""

    folder: str
    title: str
    rows: Sequence[dict]
    reason: str | None


def panels(what: str, folders: Sequence[Stored]) -> Iterator[object]:
    """A chart (decode steps) and a table for each folder: "decode", or "fill" for fills and audits.

    A folder that could not be read is a table of one line with the reason.
    """
    import pandas as pd

    wanted = {"decode"} if what == "decode" else {"fill", "audit"}
    for folder in folders:
        if folder.reason is not None:
            yield Table(
                pd.DataFrame([{"folder": folder.folder, "reason": folder.reason}]), f"gpu-{folder.folder}"
            )
            continue
        chosen = [row for row in folder.rows if row.get("what") in wanted and row["status"] == "ok"]
        if not chosen:
            continue
        frame = pd.DataFrame(chosen)
        if what == "decode":
            yield _steps(frame, folder)
        columns = [c for c in COLUMNS[what].split() if c in frame and frame[c].notna().any()]
        yield Table(frame[columns], f"gpu-{what}-{folder.folder}", folder.title)


def _steps(frame: pd.DataFrame, folder: Stored) -> pd.DataFrame:
    """The first setting measured of each model and kind, cold."""
    first = frame[(frame["kind"] != "step") & frame["cold"].astype(bool)]
    first = first.drop_duplicates(["model", "kind"])
    names = first["model"] + ", " + first["kind"].str.replace("_", " ")
    return bar_panels(
        first.assign(layer=names, card="first setting of each model"),
        "layer",
        "median_s",
        "card",
        name=f"gpu-decode-{folder.folder}",
        as_text=seconds_text,
        x_label="one decode step (s)",
        title="Decode steps on a GPU, by kind of layer, cold L2",
        subtitle=folder.title,
    )


def show(what: str, folders: Sequence[Stored]) -> None:
    """``panels`` in a notebook; without any folder a line that says how to make one."""
    from IPython.display import display

    for output in panels(what, folders):
        display(output)
    if not folders:
        display(note("No card's figures are stored yet: decodebench gpu makes them on a GPU machine."))
