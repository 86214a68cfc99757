"""Traces of real requests → ``Traffic``. Lines that are no requests are counted and named, never lost.

Known forms (``FORMATS``), told apart by their columns:

    azure      Azure LLM inference 2023 and 2024 (CSV): TIMESTAMP, ContextTokens, GeneratedTokens
    mooncake   Mooncake (JSON lines): timestamp in ms, input_length, output_length, hash_ids
    burstgpt   BurstGPT (CSV): Timestamp in s, Request tokens, Response tokens
    lengths    JSON lines or CSV with prompt and output tokens of any usual name, arrival times or none
    results    what vLLM's serving benchmark saves (JSON): input_lens, output_lens, start_times where there
    sharegpt   ShareGPT (JSON): conversations; tokens are estimated from characters

A name without a folder is a trace of ``data/traces``. ``.gz`` files are read as they are.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os.path
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from decodebench.forecast.traffic import Segments, Traffic, TrafficError, arrival_times
from decodebench.shipped import shipped

if TYPE_CHECKING:
    import numpy as np

TRACES = shipped("data/traces")

#: tokens that one of Mooncake's hash ids stands for
MOONCAKE_BLOCK = 512

#: reasons of lines left out that are kept word for word
REASONS_KEPT = 5

LONGEST = 2**31 - 1


@dataclass(frozen=True)
class Format:
    """Names of a trace's columns; several where publishers differ. ``unit``: date, s or ms."""

    prompt: tuple[str, ...]
    output: tuple[str, ...]
    time: tuple[str, ...] = ()
    unit: str = "s"
    hashes: str | None = None


FORMATS = {
    "azure": Format(("ContextTokens",), ("GeneratedTokens",), ("TIMESTAMP",), "date"),
    "mooncake": Format(("input_length",), ("output_length",), ("timestamp",), "ms", "hash_ids"),
    "burstgpt": Format(("Request tokens",), ("Response tokens",), ("Timestamp",)),
    "lengths": Format(
        ("prompt_tokens", "prompt_len", "input_len", "input_tokens", "input_length", "num_prefill_tokens"),
        ("output_tokens", "output_len", "completion_tokens", "output_length", "num_decode_tokens"),
        ("arrival", "arrived_at", "arrival_s", "arrival_time", "timestamp"),
    ),
}


def list_traces() -> tuple[str, ...]:
    """Names of the traces that come with the toolkit."""
    return tuple(sorted(path.name.split(".")[0] for path in TRACES.glob("*.gz")))


def read_traffic(
    trace: str | Path, rate: float | None = None, seed: int = 0, characters_per_token: float = 4.0
) -> Traffic:
    """A trace by name or path, in the order of arrival; the first request arrives at 0.

    ``rate``: requests a second. Where the trace has times they are stretched to it; where it has none,
    requests arrive as a Poisson process of this rate, which then has to be given.
    ``characters_per_token``: how tokens of a ShareGPT file are estimated, which holds texts.
    Raises ``TrafficError`` for a file of no known form or without a single request.
    """
    path = _find(trace)
    text = _text(path)
    found = _Found()
    whole = _whole_document(text)
    if whole is None:
        _read_rows(_rows(text, found), path, found)
    elif isinstance(whole, dict) and "input_lens" in whole:
        _read_results(whole, path, found)
    elif isinstance(whole, list) and any(isinstance(r, dict) and "conversations" in r for r in whole):
        _read_sharegpt(whole, characters_per_token, found)
    elif isinstance(whole, list):
        _read_rows(_entries(whole, found), path, found)
    else:
        raise TrafficError(
            f"{path}: a JSON document that is neither a list of requests nor a benchmark's result"
        )
    return found.traffic(path, rate, seed)


def _find(trace: str | Path) -> Path:
    path = Path(trace).expanduser()
    if os.path.isfile(path):
        return path
    if path.name == str(trace):
        for known in TRACES.glob(f"{path.name}.*.gz"):
            return known
    known = ", ".join(list_traces())
    raise TrafficError(f"trace {str(trace)!r}: no such file, and no trace of that name; known are {known}")


def _text(path: Path) -> str:
    """The file's text; what is no UTF-8 becomes a replacement sign, which no number contains."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise TrafficError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return data.decode("utf-8-sig", errors="replace")


@dataclass
class _Found:
    """What a file holds so far."""

    time: list[float] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    hashes: list[list[int]] = field(default_factory=list)
    dropped: int = 0
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def drop(self, where: str, why: str) -> None:
        self.dropped += 1
        if len(self.reasons) < REASONS_KEPT:
            self.reasons.append(f"{where}: {why}")
        elif len(self.reasons) == REASONS_KEPT:
            self.reasons.append("…")

    def add(self, prompt: int, output: int, time: float | None, hashes: list[int] | None = None) -> None:
        self.prompt.append(prompt)
        self.output.append(output)
        if time is not None:
            self.time.append(time)
        if hashes is not None:
            self.hashes.append(hashes)

    def traffic(self, path: Path, rate: float | None, seed: int) -> Traffic:
        import numpy as np

        n = len(self.prompt)
        if not n:
            why = f": {self.reasons[0]}" if self.reasons else ": it is empty"
            raise TrafficError(f"{path}: no request in it{why}")
        if self.time:
            times = np.array(self.time)
            order = np.argsort(times, kind="stable")
            if (np.diff(order) < 0).any():
                self.notes.append("times that run backwards: requests were put in the order of their arrival")
            arrival = times[order] - times[order[0]]
        elif rate is None:
            raise TrafficError(f"{path}: lengths without arrival times: say how many arrive a second (rate)")
        else:
            order = np.arange(n)
            arrival = arrival_times(n, rate, seed=seed)
            self.notes.append(f"no arrival times in the file: a Poisson process of {rate:g} a second")
        prompt, output = np.array(self.prompt, np.int64)[order], np.array(self.output, np.int64)[order]
        segments = _segments([self.hashes[i] for i in order], prompt) if self.hashes else None
        made = Traffic(
            path.name.split(".")[0],
            arrival,
            prompt,
            output,
            segments,
            self.dropped,
            tuple(self.reasons),
            tuple(self.notes),
        )
        return made.at_rate(rate) if rate is not None and self.time else made


def _segments(hashes: list[list[int]], prompt: np.ndarray) -> Segments:
    """Mooncake's hash ids: each covers 512 tokens, the last what is left of the prompt."""
    import numpy as np

    counts = np.array([len(ids) for ids in hashes])
    start = np.concatenate([[0], np.cumsum(counts)])
    position = np.arange(start[-1]) - np.repeat(start[:-1], counts)
    ends = np.minimum((position + 1) * MOONCAKE_BLOCK, np.repeat(prompt, counts))
    return Segments(start, np.fromiter((i for ids in hashes for i in ids), np.int64, int(start[-1])), ends)


# -- rows: CSV and JSON lines ----------------------------------------------------------------------


def _whole_document(text: str) -> dict | list | None:
    """The JSON document that the text is, None where it is lines of a table or of JSON."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        whole = json.loads(text)
    except ValueError:
        return None
    # a file of a single JSON line is a table of one row
    return None if isinstance(whole, dict) and "input_lens" not in whole else whole


def _rows(text: str, found: _Found) -> Iterator[tuple[str, dict]]:
    """(where, fields) of each line; lines that are no rows are dropped with their reason."""
    lines = text.split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if lines and lines[0].lstrip()[:1] == "{":
        for number, line in enumerate(lines, 1):
            where = f"line {number}"
            try:
                row = json.loads(line)
            except ValueError:
                found.drop(where, "empty" if not line.strip() else "not JSON")
                continue
            if isinstance(row, dict):
                yield where, row
            else:
                found.drop(where, "not a JSON object")
        return
    columns: list[str] | None = None
    for number, line in enumerate(lines, 1):
        where = f"line {number}"
        try:
            cells = next(csv.reader(io.StringIO(line.rstrip("\r"))), [])
        except csv.Error as error:
            found.drop(where, str(error))
            continue
        if columns is None:
            columns = [cell.strip() for cell in cells]
        elif not line.strip():
            found.drop(where, "empty")
        elif len(cells) != len(columns):
            found.drop(where, f"{len(cells)} cells, {len(columns)} are expected")
        else:
            yield where, dict(zip(columns, cells))


def _entries(whole: list, found: _Found) -> Iterator[tuple[str, dict]]:
    """(where, fields) of each entry of a JSON list."""
    for i, row in enumerate(whole, 1):
        if isinstance(row, dict):
            yield f"entry {i}", row
        else:
            found.drop(f"entry {i}", "not a JSON object")


def _read_rows(rows: Iterator[tuple[str, dict]], path: Path, found: _Found) -> None:
    form = columns = None
    for where, row in rows:
        if form is None:
            form, columns = _form_of(row, path)
        prompt, output, time, hashes = columns
        try:
            tokens = _tokens(row, prompt, "prompt"), _tokens(row, output, "output")
            when = _time(row.get(time), form.unit) if time else None
            ids = _hashes(row, hashes, tokens[0]) if hashes else None
        except _BadRow as error:
            found.drop(where, str(error))
        else:
            found.add(*tokens, when, ids)


class _BadRow(ValueError):
    """A row that is no request, and why."""


def _form_of(row: dict, path: Path) -> tuple[Format, tuple[str, str, str | None, str | None]]:
    """The format whose columns a row has, and their names there."""
    for name, form in FORMATS.items():
        prompt, output, time = (
            next((column for column in columns if column in row), None)
            for columns in (form.prompt, form.output, form.time)
        )
        hashes = form.hashes if form.hashes in row else None
        if prompt and output and (name == "lengths" or (time and (hashes or not form.hashes))):
            return form, (prompt, output, time, hashes)
    seen = ", ".join(map(str, list(row)[:8]))
    known = "; ".join(f"{name}: {form.prompt[0]}, {form.output[0]}" for name, form in FORMATS.items())
    raise TrafficError(f"{path}: columns of no known trace ({seen}). Known are {known}")


def _tokens(row: dict, column: str, what: str) -> int:
    value = row.get(column)
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number != int(number):
        raise _BadRow(f"{column} {value!r} is not a number of tokens")
    if not 1 <= number <= LONGEST:
        raise _BadRow(f"{int(number)} {what} tokens")
    return int(number)


def _time(value: object, unit: str) -> float:
    """Seconds, from a date, seconds or milliseconds."""
    try:
        if unit == "date":
            moment = datetime.fromisoformat(str(value).strip())
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise _BadRow(f"time {value!r} is not a {'date' if unit == 'date' else 'number'}")
    return number / 1000 if unit == "ms" else number


def _hashes(row: dict, column: str, prompt: int) -> list[int]:
    ids = row.get(column)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= LONGEST for i in ids):
        raise _BadRow(f"{column} is not a list of ids")
    expected = -(-prompt // MOONCAKE_BLOCK)
    if len(ids) != expected:
        raise _BadRow(f"{len(ids)} {column} for {prompt} tokens, {expected} are expected")
    return ids


# -- documents -------------------------------------------------------------------------------------


def _read_results(whole: dict, path: Path, found: _Found) -> None:
    """Lengths (and times, where saved) of a run of vLLM's serving benchmark."""
    inputs, outputs, times = (whole.get(name) for name in ("input_lens", "output_lens", "start_times"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise TrafficError(f"{path}: input_lens and output_lens are not lists of one length")
    timed = isinstance(times, list) and len(times) == len(inputs)
    for i, (prompt, output) in enumerate(zip(inputs, outputs)):
        try:
            row = {"input_lens": prompt, "output_lens": output}
            tokens = _tokens(row, "input_lens", "prompt"), _tokens(row, "output_lens", "output")
            when = _time(times[i], "s") if timed else None
        except _BadRow as error:
            found.drop(f"request {i}", str(error))
        else:
            found.add(*tokens, when)


def _read_sharegpt(whole: list, characters_per_token: float, found: _Found) -> None:
    """The first question and answer of each conversation, as vLLM's benchmark takes them."""
    if not characters_per_token > 0:
        raise TrafficError(f"characters_per_token {characters_per_token!r}: a positive number is expected")
    for i, entry in enumerate(whole, 1):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        texts = [t.get("value") for t in turns if isinstance(t, dict)] if isinstance(turns, list) else []
        if len(texts) < 2 or not all(isinstance(text, str) and text for text in texts[:2]):
            found.drop(f"entry {i}", "not a conversation of a question and an answer")
            continue
        prompt, output = (max(1, round(len(text) / characters_per_token)) for text in texts[:2])
        found.add(prompt, output, None)
    found.notes.append(f"tokens estimated as characters / {characters_per_token:g}")
