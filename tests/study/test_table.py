"""One format for every harness: rows of a bench or a study are read, and told apart, like a sweep's."""

import pytest

from decodebench.measure.journal import JournalError, store
from decodebench.measure.provenance import provenance
from decodebench.study import sweep
from decodebench.study.grid import SweepError
from decodebench.study.latency_table import latency_table
from decodebench.vllm.real_engine import STORED, read_study

ROWS = [
    {"case": "contiguous", "values": "constant", "gb_per_s": 40.5, "repeats": 7, "ok": True, "note": None},
    {"case": "contiguous", "values": "normal", "gb_per_s": 38, "repeats": 7, "ok": False, "note": "busy"},
]


def test_rows_of_any_kind_come_back_with_their_types_and_provenance(tmp_path):
    store(tmp_path / "a", ROWS, ["case", "values"], provenance({"quick": True}))
    table = sweep.read(tmp_path / "a")
    assert table[["case", "values", "gb_per_s", "repeats", "ok"]].to_dict("records") == [
        {k: v for k, v in row.items() if k != "note"} for row in ROWS
    ]
    assert [str(table.dtypes[c]) for c in ("gb_per_s", "repeats", "ok", "note")] == [
        "Float64",
        "Int64",
        "boolean",
        "string",
    ]
    assert table.attrs["axes"] == ["case", "values"]
    (run,) = table.attrs["provenance"]
    assert run["settings"] == {"quick": True} and {"device", "commit", "date"} <= run.keys()


def test_a_later_run_replaces_its_cases_and_keeps_the_others(tmp_path):
    store(tmp_path, ROWS, ["case", "values"], provenance())
    store(tmp_path, [ROWS[1] | {"gb_per_s": 44.0}], ["case", "values"], provenance())
    table = sweep.read(tmp_path)
    assert dict(zip(table["values"], table["gb_per_s"])) == {"constant": 40.5, "normal": 44.0}
    assert len(table.attrs["provenance"]) == 2 and sorted(table["run"]) == [0, 1]


def test_two_rows_of_one_case_are_refused(tmp_path):
    with pytest.raises(JournalError, match="two rows of one case.*contiguous"):
        store(tmp_path, ROWS, ["case"], provenance())


def test_the_latency_table_stores_its_rows(tmp_path):
    settings = [{"model": "tiny-llama", "block_size": size} for size in (16, 32)]
    table = latency_table(
        settings, out=tmp_path, requests=2, context=64, min_seconds=0.01, backend="torch", max_model_len=512
    )
    stored = sweep.read(tmp_path)
    assert list(stored["median_s"]) == list(table["median_s"]) and {"block_size", "kind"} <= {
        *stored.attrs["axes"]
    }


def test_the_stored_study_of_engines_is_rows_like_any_others():
    """Two runs in one folder: step times are those of the run that measured them last."""
    study = read_study()
    assert set(study.coverage["connector"]) == {"grouped (ours)", "built-in"} and len(study.latency) == 24
    assert (study.latency["q1_s"] <= study.latency["q3_s"]).all() and len(study.provenance) == 2
    table = sweep.read(STORED)
    assert len(table) == len(study.coverage) + len(study.latency)
    same = sweep.compare(STORED, STORED)
    assert (same["ratio"].dropna() == 1).all() and {"coverage", "median_s"} == set(same["metric"])
    with pytest.raises(SweepError, match="unknown setting 'device'; known are machine, what, model, setting"):
        sweep.compare(STORED, STORED, across=("device",))
