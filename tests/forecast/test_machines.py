"""Machines as data: complete, sourced, and refused in one line where they are not."""

import pytest

from decodebench.errors import DecodebenchError
from decodebench.forecast.machines import list_machines, machine

ASKED_FOR = [
    "a100-40gb",
    "a100-80gb",
    "h100",
    "h100-pcie",
    "h100-nvl",
    "h200",
    "h20",
    "b200",
    "gb200",
    "b300",
    "l40s",
    "l4",
    "a10",
    "rtx-4090",
    "rtx-5090",
    "mi300x",
    "mi325x",
    "mi355x",
    "gaudi-3",
    "tpu-v5e",
    "tpu-v5p",
    "tpu-v6e",
    "apple-m4-max",
    "this",
]


def test_the_machines_that_people_have():
    assert set(ASKED_FOR) <= set(list_machines())


@pytest.mark.parametrize("name", [n for n in list_machines() if n != "this"])
def test_a_machine_is_complete_and_sourced(name):
    m = machine(name)
    assert m.name == name and len(m.title) > 4 and m.generation != "unknown"
    assert 8e9 <= m.memory <= 1e12 and 1e11 <= m.bandwidth <= 1e13 and 1e9 <= m.link <= 2e12
    assert all(len(m.source[part]) > 10 for part in ("chip", "link"))
    # arithmetic outruns the memory everywhere, and narrow numbers are no slower than wide ones
    assert m.peak["bf16"] > 10 * m.bandwidth
    for narrow in ("fp8", "int8", "fp4"):
        assert m.peak_of(narrow) >= m.peak["bf16"]


def test_numbers_without_units_of_their_own_are_widened():
    a100 = machine("a100-80gb")
    assert a100.peak_of("fp8") == a100.peak["bf16"] == 312e12
    assert machine("h100").peak_of("fp4") == machine("h100").peak["fp8"]


def test_this_machine_is_measured():
    m = machine("this")
    assert m.bandwidth > 1e8 and m.peak["bf16"] > 1e8 and m.memory > 1e8
    assert machine("this") is m, "once a process"


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("memory = 1e9\nbandwidth = 2e9\nlink = 1e8\n[peak]\nbf16 = 3e9\n")
    assert machine(path).bandwidth == 2e9 and machine(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("memory = 1e9", "bandwidth"),
        ("memory = 1e9\nbandwidth = -1\nlink = 1", "bandwidth = -1"),
        ("memory = 1\nbandwidth = 1\nlink = 1", "peak"),
        ("memory = 1\nbandwidth = 1\nlink = 1\n[peak]\nbf16 = 'fast'", "bf16 = 'fast'"),
        ("memory ==", "not a machine"),
    ],
)
def test_a_bad_file_is_refused_by_its_field(tmp_path, text, says):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(DecodebenchError, match=says) as error:
        machine(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
