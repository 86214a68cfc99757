"""Numbers as people read them: bytes, seconds, shares, lists, tables of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

#: endings of column names that say how a number is read
_SHARES = ("coverage", "share", "waste", "_loss")


def plain_number(value: Any, column: str = "") -> str:
    """A number as people read it: thousands apart, three digits, shares in
    percent, bytes and seconds with units.
    """
    if isinstance(value, bool) or not hasattr(value, "__float__") or isinstance(value, str):
        return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    if column.startswith("waste_") or column.endswith(_SHARES):
        return share_text(float(value))
    if column.endswith(("_bytes", "bytes_per_block")) or column in ("bytes", "bytes_moved"):
        return bytes_text(float(value))
    if column.endswith("_s") or column.endswith("seconds"):
        return seconds_text(float(value))
    number = float(value)
    if number == int(number) and abs(number) < 1e15:
        return f"{int(number):,}"
    return f"{number:,.2f}" if abs(number) >= 10 else f"{number:.3g}"


def share_text(share: float) -> str:
    """A share in percent that says 100 % only where nothing is missing, and 0
    % only where nothing is there.
    """
    if share in (0, 1):
        return f"{share:.0%}"
    return f"{min(max(share, 0.001), 0.999):.1%}" if 0 < share < 1 else f"{share:.1%}"


def seconds_text(seconds: float) -> str:
    """A duration with three significant digits and a readable unit: 0.00123 → ``1.23 ms``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def bytes_text(count: float) -> str:
    """Bytes with a binary unit: 1536 → ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:,.0f} {unit}" if count == int(count) else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def shown(value: object, longest: int = 60) -> str:
    """A value in a message: as Python writes it, cut off behind ``longest`` characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deep, or a number of too many digits
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= longest else text[: longest - 3] + "..."


def short(text: object, length: int = 34) -> str:
    """A name that fits a label: of a path its folder and file, else shortened in the middle."""
    text = str(text)
    if text.startswith(("/", ".", "~")) or text.count("/") > 1 or text.endswith("/config.json"):
        parts = text.removesuffix("/config.json").split("/")
        text = parts[-1] if text.endswith("/config.json") else "/".join(parts[-2:])
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


def counted(number: int, noun: str) -> str:
    """A number with its noun: ``1 request``, ``2,048 tokens``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def runs(text: str) -> str:
    """``16,32,32,32`` as ``16, 3 × 32``."""
    counted = [(item, len(list(same))) for item, same in groupby(text.split(","))]
    return ", ".join(item if n == 1 else f"{n} × {item}" for item, n in counted)


def some(names: Iterable[object], none: str = "none") -> str:
    """The first three of many names, and how many more there are; ``none`` where there are none."""
    shown = [str(name) for name in names]
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ", ".join(shown[:3]) + more if shown else none


def columns(table: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """A table's rows as lines: headings first and underlined, cells flush right but for the columns ``left``."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in table
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
