"""Audit files as they are found: whole, of several workers, cut off, foreign. No vLLM needed."""

import json
import random

import numpy as np
import pytest
from small import full, small_layout, state

from decodebench.coverage.result import Audit, Finding
from decodebench.errors import DecodebenchError
from decodebench.vllm.audit_files import NoAudit, audit_steps, header, read_audit, record

LAYOUT = small_layout([[full(), full()], [state()]], 8)


def step(requests=("a", "b"), uncovered=0, findings=(), unseen=()):
    counts = np.zeros((len(requests), 3, 4), dtype=np.int64)
    counts[:, :, 0] = 5
    counts[0, 0, 0], counts[0, 0, 3] = 5 - uncovered, uncovered
    return Audit(LAYOUT, "bytes", tuple(requests), counts, tuple(findings), unseen=tuple(unseen))


def written(path, *audits, rank=0, numbers=(0, 1)):
    lines = [header(LAYOUT, numbers, "bytes", rank, "ours")]
    facts = {"fill_seconds": 0.1, "fill_bytes": 7, "counters": {"requests_filled": 1}}
    lines += [record(audit, {"step": i + 1, **facts}) for i, audit in enumerate(audits)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_what_is_written_is_read(tmp_path):
    finding = Finding(0, "g0.1", np.array([3, 4]), "a", "uncovered", "not in the plan")
    path = written(tmp_path / "audit.jsonl", step(), step(("c",), 2, [finding]))
    found = read_audit(path)
    assert (found.required, found.covered, found.ok) == (45, 43, False)
    assert found.request_ids == ("a", "b", "c") and found.rows.block.tolist() == [3, 4]
    assert found.verdict.startswith(
        "95.6 % of 45 required pages covered in 2 groups: group 0 (full_attention)"
    )
    assert found.groups.layers.tolist() == [2, 1]
    assert audit_steps(path)[["step", "requests", "required", "covered", "ok"]].values.tolist() == [
        [1, 2, 30, 30, True],
        [2, 1, 15, 13, False],
    ]


def test_files_of_all_ranks_are_one_audit(tmp_path):
    path = written(tmp_path / "audit.jsonl", step())
    written(tmp_path / "audit.rank1.jsonl", step(uncovered=1), rank=1)
    assert (read_audit(path).required, read_audit(path).covered) == (60, 59)
    # a later stage of a pipeline holds other layers of the same groups
    other = tmp_path / "audit.rank2.jsonl"
    written(other, step(), rank=2)
    other.write_text(other.read_text().replace("g0.", "late.g0.").replace("g1.", "late.g1."))
    found = read_audit(path)
    assert found.groups.layers.tolist() == [4, 2] and found.required == 90


def test_a_file_that_was_cut_off_is_read_up_to_there_and_not_ok(tmp_path):
    path = written(tmp_path / "audit.jsonl", step(), step())
    whole = path.read_bytes()
    start_of_last = whole.rstrip().rindex(b"\n") + 1
    for end in (start_of_last + 1, start_of_last + 40, len(whole) - 3):
        path.write_bytes(whole[:end])
        found = read_audit(path)
        assert found.required == 30 and not found.ok
        assert "Audit.jsonl ends inside line 3: the engine was stopped" in found.verdict


def test_an_audit_of_nothing_is_not_ok(tmp_path):
    found = read_audit(written(tmp_path / "audit.jsonl"))
    assert not found.ok and "Nothing was audited" in found.verdict


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: not the header"),
        (b"hello\n", "line 1: not the header"),
        (b"{}\n", "line 1: not the header"),
        (b"\xff\xfe\x00" * 100, "line 1: not the header"),
        (b'{"step": 1, "group": 0, "required": 3}\n', "line 1: not the header"),
        (b"[" * 100_000 + b"\n", "line 1: not the header"),
    ],
)
def test_foreign_files_are_refused_by_name_and_line(tmp_path, content, message):
    path = tmp_path / "audit.jsonl"
    path.write_bytes(content)
    with pytest.raises(NoAudit, match=f"audit.jsonl, {message}") as error:
        read_audit(path)
    assert "\n" not in str(error.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(NoAudit, match="no audit in .*start the engine with audit="):
        read_audit(tmp_path / "missing.jsonl")
    with pytest.raises(NoAudit, match="give the audit_file of an engine"):
        read_audit(tmp_path)


def test_random_damage_is_one_line_or_an_answer(tmp_path):
    path = written(tmp_path / "audit.jsonl", step(), step(("c",), 1))
    whole, draw = path.read_bytes(), random.Random(0)
    values = [None, -1, 1.5, True, "x", [], {}, [[1]], 10**30, {"a": 1}]
    for _ in range(300):
        lines = [json.loads(line) for line in whole.splitlines()]
        if draw.random() < 0.5:  # another value somewhere
            line = draw.choice(lines)
            line[draw.choice(sorted(line))] = draw.choice(values)
            damaged = "\n".join(map(json.dumps, lines)).encode() + b"\n"
        else:  # bytes changed, lost, or repeated
            at = draw.randrange(len(whole))
            damaged = (
                whole[:at] + draw.choice([b"", b"\x00", b"}", whole[:50]]) + whole[at + draw.randint(0, 9) :]
            )
        path.write_bytes(damaged)
        try:
            read_audit(path)
        except DecodebenchError as error:
            assert "\n" not in str(error) and "audit.jsonl" in str(error)
