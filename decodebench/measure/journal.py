"""Rows that survive `kill -9`: an append-only journal beside a compacted Parquet file.

A result folder holds

    provenance.json   the schema version and one entry a run: device, versions, commit, date, settings
    journal.jsonl     one JSON object a line, flushed to the disk before the next case starts
    rows.parquet      the same rows, compacted when a sweep ends; the journal is then removed

A row belongs to its case, named by ``case_id``; where both files hold a case, the journal's
row is the newer one. Nothing here knows what the columns mean.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from decodebench.errors import DecodebenchError
from decodebench.words import shown

if TYPE_CHECKING:
    import pandas as pd

#: raised when a column changes its meaning or a case its default; folders of another version are refused
SCHEMA_VERSION = 2

JOURNAL, PARQUET, PROVENANCE = "journal.jsonl", "rows.parquet", "provenance.json"


class JournalError(DecodebenchError):
    """A result folder that cannot be read or written: another schema, damage, a full disk, two writers."""


def read_folder(folder: str | Path) -> tuple[dict[str, dict], list[dict]]:
    """Finished rows by case id, and the runs that made them; safe while a sweep is writing.

    A last line without its end is a row being written and is left out. Raises ``JournalError``
    where the folder holds no results, results of another schema, or a damaged line before the last.
    """
    folder = Path(folder)
    rows = {row["case_id"]: row for row in _read_parquet(folder / PARQUET)}
    runs = _read_runs(folder)
    journal, _ = _read_journal(folder / JOURNAL)
    rows.update((row["case_id"], row) for row in journal)
    return rows, runs


class Journal:
    """The writing side of a result folder, for one process at a time; use as a context manager.

    ``rows``: case id → finished row, those of earlier runs included.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.run: int | None = None
        self.rows: dict[str, dict] = {}
        self.runs: list[dict] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = _open_locked(self.folder)
        except OSError as error:
            raise JournalError(
                f"{self.folder}: cannot write results there ({error.strerror or error})"
            ) from error
        try:
            fresh = not (self.folder / PROVENANCE).exists() and not (self.folder / PARQUET).exists()
            if not (fresh and os.fstat(self._file.fileno()).st_size == 0):
                self.rows, self.runs = read_folder(self.folder)
            # a half-written last row: its case was not finished and will run again
            _, whole = _read_journal(self.folder / JOURNAL)
            self._file.truncate(whole)
        except BaseException:
            self._file.close()
            raise

    def begin_run(self, provenance: dict) -> None:
        """Store what makes the rows that follow; rows name their run by its number."""
        self.run = len(self.runs)
        self.runs.append({"run": self.run} | provenance)
        text = json.dumps({"schema": SCHEMA_VERSION, "runs": self.runs}, indent=1, default=str) + "\n"
        temporary = self.folder / (PROVENANCE + ".part")
        try:
            with open(temporary, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / PROVENANCE)
            _sync_folder(self.folder)
        except OSError as error:
            raise JournalError(f"{self.folder / PROVENANCE}: {error.strerror or error}") from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc) -> None:
        self._file.close()

    def append(self, row: dict) -> None:
        """Write one finished row and wait until the disk has it."""
        row = row | {"run": self.run}
        line = (json.dumps({k: _plain(v) for k, v in row.items()}) + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self._discard_after(end)
            raise JournalError(
                f"{self.folder / JOURNAL}: {error.strerror or error} while writing a row. The "
                f"{len(self.rows)} rows finished before it are safe: free some space and start the same "
                "sweep again"
            ) from error
        self.rows[row["case_id"]] = json.loads(line)

    def _discard_after(self, end: int) -> None:
        """Drop a partial row and what the file object still buffers; recovery would drop it as well."""
        path = self._file.name
        try:
            self._file.close()
        except OSError:
            pass
        with open(path, "r+b") as file:
            file.truncate(end)

    def compact(self, order: Sequence[str], types: dict[str, str]) -> None:
        """Move every row into Parquet: cases of ``order`` first, in that order, then the others.

        ``types``: column → pandas dtype. The new file replaces the old one in a single step, and
        only then does the journal end, so that there is no moment at which a row exists nowhere.
        """
        ordered = [case for case in order if case in self.rows]
        chosen = set(ordered)
        ordered += [case for case in self.rows if case not in chosen]
        frame = _framed(self.folder, [self.rows[case] for case in ordered], types)
        temporary = self.folder / (PARQUET + ".part")
        try:
            frame.to_parquet(temporary, index=False)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / PARQUET)
            _sync_folder(self.folder)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise JournalError(
                f"{self.folder / PARQUET}: {error.strerror or error}. All {len(self.rows)} rows are safe in "
                f"{JOURNAL}: free some space and start the same sweep again"
            ) from error
        self._file.close()
        (self.folder / JOURNAL).unlink()


def store(
    folder: str | Path, rows: Iterable[Mapping[str, object]], axes: Sequence[str], provenance: dict
) -> None:
    """Measured rows of whatever kind as one run of a result folder, which ``db.sweep.read`` and ``compare`` take.

    ``axes``: the columns that say what was measured; a row with the same values there replaces the one of
    an earlier run. All other columns are what was found. Raises ``JournalError`` as ``Journal`` does, and
    for two rows of the same case.
    """
    rows = [dict(row) for row in rows]
    with Journal(folder) as journal:
        journal.begin_run(provenance | {"axes": list(axes), "columns": _types(rows)})
        seen: set[str] = set()
        for row in rows:
            content = json.dumps([[axis, _plain(row.get(axis))] for axis in axes])
            case_id = hashlib.sha256(content.encode()).hexdigest()[:16]
            if case_id in seen:
                raise JournalError(
                    f"{folder}: two rows of one case ({content}): another axis tells them apart"
                )
            seen.add(case_id)
            journal.append({"case_id": case_id, **row})
        journal.compact([], columns_of(journal.runs) or {})


def _framed(folder: Path, rows: Sequence[dict], types: dict[str, str]) -> pd.DataFrame:
    try:
        return to_frame(rows, types)
    except JournalError as error:
        raise JournalError(f"{folder}: {error}") from None


def columns_of(runs: Sequence[Mapping]) -> dict[str, str] | None:
    """column → pandas dtype as the runs of a folder name them; None where they are a sweep's own."""
    named: dict[str, str] = {}
    for run in runs:
        named |= run.get("columns") or {}
    return {"case_id": "string", **named, "run": "Int64"} if named else None


def _types(rows: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """A pandas dtype that holds every value of a column."""
    types: dict[str, str] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        kinds = {type(_plain(row[name])) for row in rows if row.get(name) is not None}
        if kinds <= {bool}:
            types[name] = "boolean" if kinds else "string"
        elif kinds <= {int}:
            types[name] = "Int64"
        else:
            types[name] = "Float64" if kinds <= {int, float} else "string"
    return types


def to_frame(rows: Iterable[dict], types: dict[str, str]) -> pd.DataFrame:
    """Rows as a DataFrame with exactly the columns and dtypes of ``types``, missing values empty.

    Raises ``JournalError`` naming case and column where a value is none of the column's.
    """
    import pandas as pd

    rows = list(rows)
    return pd.DataFrame({name: _column(rows, name, dtype) for name, dtype in types.items()})


def _column(rows: Sequence[Mapping], name: str, dtype: str):
    import pandas as pd

    try:
        return pd.array([row.get(name) for row in rows], dtype=dtype)
    except (ValueError, TypeError, OverflowError):
        pass
    for row in rows:
        try:
            pd.array([row.get(name)], dtype=dtype)
        except (ValueError, TypeError, OverflowError):
            break
    raise JournalError(
        f"case {shown(row.get('case_id'))}, column {shown(name)}: {shown(row.get(name))} is no {shown(dtype)}. "
        f"The row was edited or damaged: remove its line from {JOURNAL}, or start a new folder"
    )


def _read_journal(path: Path) -> tuple[list[dict], int]:
    """Rows of the journal, and how many of its bytes are whole lines."""
    if not path.exists():
        return [], 0
    data = path.read_bytes()
    rows: list[dict] = []
    start = 0
    while start < len(data):
        end = data.find(b"\n", start)
        try:
            row = json.loads(data[start:end]) if end >= 0 else None
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("case_id"), str):
            # only the last line can be half written: a row starts when the one before is on the disk
            if end >= 0 and data[end + 1 :].strip(b"\0\n "):
                raise JournalError(
                    f"{path}, line {len(rows) + 1}: not a row, though more rows follow. The file was "
                    "edited or damaged: remove that line to go on without it"
                )
            break
        rows.append(row)
        start = end + 1
    return rows, start


def _read_parquet(path: Path) -> list[dict]:
    if not path.exists():
        return []
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
        if not all(isinstance(row.get("case_id"), str) for row in rows):
            raise ValueError("rows without a case_id")
    except (OSError, ValueError, TypeError, KeyError, MemoryError, pyarrow.ArrowException) as error:
        raise JournalError(
            f"{path}: not the table of a sweep ({shown(str(error), 160)}). Remove it and start the same sweep "
            f"again: rows in {JOURNAL} are kept"
        ) from error
    return rows


def _read_runs(folder: Path) -> list[dict]:
    path = folder / PROVENANCE
    if not path.exists():
        raise JournalError(
            f"{folder}: no {PROVENANCE} there, so this is not a folder that a sweep has written"
        )
    try:
        stored = json.loads(path.read_text())
        schema, runs = stored["schema"], list(stored["runs"])
        for run in runs:
            axes, types = run.get("axes") or [], run.get("columns") or {}
            if not all(isinstance(name, str) for name in (*axes, *types, *types.values())):
                raise TypeError("names of columns are texts")
            to_frame([], types)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise JournalError(
            f"{path}: not the provenance of a sweep ({shown(error, 160)}). Choose another folder, or "
            "bring back the file that the sweep wrote"
        ) from error
    if schema != SCHEMA_VERSION:
        raise JournalError(
            f"{folder}: written with schema {shown(schema)}, this version reads and writes schema {SCHEMA_VERSION}. "
            "Choose another folder, or run the version that wrote it"
        )
    return runs


def _plain(value):
    """What JSON can hold: numpy scalars become Python's, not-a-number becomes empty."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _open_locked(folder: Path):
    """The journal opened for appending, locked against a second writer."""
    try:
        import fcntl
    except ImportError:  # no advisory locks on this platform: the user keeps the folders apart
        return open(folder / JOURNAL, "ab")
    while True:
        file = open(folder / JOURNAL, "ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise JournalError(
                f"{folder}: another sweep is writing there; wait for it or choose another folder"
            ) from error
        # another sweep may have compacted, and so removed, this very file before the lock was ours
        if (folder / JOURNAL).exists() and os.path.samestat(
            os.stat(folder / JOURNAL), os.fstat(file.fileno())
        ):
            return file
        file.close()


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; not every file system lets a folder be synced."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
