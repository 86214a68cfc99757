"""Readers of traces: every form, and every line that is none."""

import gzip
import json

import numpy as np
import pytest

from decodebench.forecast.traces import TRACES, list_traces, read_traffic
from decodebench.forecast.traffic import TrafficError


def written(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text) if isinstance(text, str) else path.write_bytes(text)
    return path


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "output"),
    [
        ("azure-code-2023", 8819, 18_059_974, 245_896),
        ("azure-conversation-2023", 19_366, 22_361_870, 4_088_665),
        ("mooncake-conversation", 2000, 27_441_774, 704_602),
    ],
)
def test_shipped_traces_are_whole(name, requests, prompt, output):
    traffic = read_traffic(name)
    assert name in list_traces()
    assert (len(traffic), traffic.dropped) == (requests, 0)
    assert (traffic.prompt.sum(), traffic.output.sum()) == (prompt, output)
    assert traffic.arrival[0] == 0 and (np.diff(traffic.arrival) >= 0).all()
    assert "licence" in (TRACES / "README.md").read_text()


def test_traces_take_little_room():
    assert sum(path.stat().st_size for path in TRACES.iterdir()) < 1_500_000


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,{},{}\n"


def test_azure_2024_dates_with_a_zone(tmp_path):
    rows = "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.009930+00:00,2399,6\n"
    traffic = read_traffic(written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows))
    assert traffic.arrival.tolist() == [0, 1] and traffic.prompt.tolist() == [2162, 2399]


def test_burstgpt(tmp_path):
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,0,1087,API log\n118,ChatGPT,417,276,693,API log\n"
    traffic = read_traffic(written(tmp_path, head + rows))
    assert traffic.arrival.tolist() == [0, 113] and traffic.output.tolist() == [18, 276]
    assert traffic.dropped == 1 and traffic.reasons == ("line 3: 0 output tokens",)


def test_mooncake_shares_prefixes(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 2000, "input_length": 513, "output_length": 6, "hash_ids": [0, 2]},
    ]
    traffic = read_traffic(written(tmp_path, "\n".join(map(json.dumps, rows)), "m.jsonl"))
    assert traffic.arrival.tolist() == [0, 2]
    assert traffic.segments.start.tolist() == [0, 2, 4]
    assert traffic.segments.ids.tolist() == [0, 1, 0, 2]
    assert traffic.segments.ends.tolist() == [512, 1000, 512, 513]


def test_lengths_want_a_rate(tmp_path):
    path = written(tmp_path, '{"input_len": 10, "output_len": 3}\n{"prompt_tokens": 1}\n', "l.jsonl")
    with pytest.raises(TrafficError, match="rate"):
        read_traffic(path)
    traffic = read_traffic(path, rate=2)
    assert len(traffic) == 1 and traffic.dropped == 1 and "Poisson" in str(traffic)


def test_results_of_vllms_benchmark(tmp_path):
    saved = {"input_lens": [5, 6, 0], "output_lens": [1, 2, 3], "start_times": [10.0, 9.0, 8.0]}
    traffic = read_traffic(written(tmp_path, json.dumps(saved), "r.json"))
    assert traffic.prompt.tolist() == [6, 5] and traffic.arrival.tolist() == [0, 1]
    assert traffic.dropped == 1 and "backwards" in str(traffic)


def test_sharegpt_is_estimated_and_says_so(tmp_path):
    talk = [{"conversations": [{"value": "a" * 40}, {"value": "b" * 8}]}, {"conversations": [{"value": "x"}]}]
    traffic = read_traffic(written(tmp_path, json.dumps(talk), "s.json"), rate=1)
    assert (traffic.prompt.tolist(), traffic.output.tolist()) == ([10], [2])
    assert traffic.dropped == 1 and "estimated" in str(traffic)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("2023-11-16 18:17:05,374", "2 cells"),
        ("2023-11-16 18:17:05,374,44,1", "4 cells"),
        ("2023-11-16 18:17:05,374.5,44", "374.5"),
        ("2023-11-16 18:17:05,many,44", "many"),
        ("2023-11-16 18:17:05,-3,44", "-3 prompt"),
        ("2023-11-16 18:17:05,0,44", "0 prompt"),
        ("2023-11-16 18:17:05,3,0", "0 output"),
        ("2023-11-16 18:17:05,nan,44", "nan"),
        ("2023-11-16 18:17:05,inf,44", "inf"),
        ("2023-11-16 18:17:05,99999999999,44", "99999999999"),
        ("yesterday,3,44", "yesterday"),
        ("2023-13-16 18:17:05,3,44", "2023-13-16"),
        (",3,44", "''"),
        ("   ", "empty"),
        ("\x00\x01,3,4", "time"),
        ("2023-11-16 18:17:05,374,", "''"),
    ],
)
def test_malformed_lines_are_counted_and_named(tmp_path, line, why):
    text = AZURE.format(374, 44) + line + "\n2023-11-16 18:17:09,100,10\n"
    traffic = read_traffic(written(tmp_path, text))
    assert len(traffic) == 2 and traffic.dropped == 1
    assert traffic.reasons[0].startswith("line 3: ") and why in traffic.reasons[0]
    assert "1 line left out: line 3" in str(traffic)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"timestamp": 0, "input_length": true, "output_length": 1, "hash_ids": [0]}', "True"),
        ('{"timestamp": null, "input_length": 4, "output_length": 1, "hash_ids": [0]}', "None"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0]}', "2 are expected"),
        ('{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": ["a"]}', "list of ids"),
        ('{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [-1]}', "list of ids"),
        ('{"timestamp": 0, "input_length": 4, "output_length": 1}', "list of ids"),
        ("", "empty"),
    ],
)
def test_malformed_json_lines_are_counted_and_named(tmp_path, row, why):
    good = '{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [0]}'
    traffic = read_traffic(written(tmp_path, f"{good}\n{row}\n{good}\n", "m.jsonl"))
    assert len(traffic) == 2 and traffic.dropped == 1
    assert traffic.reasons[0].startswith("line 2: ") and why in traffic.reasons[0]


def test_many_malformed_lines_are_counted_not_listed(tmp_path):
    traffic = read_traffic(written(tmp_path, AZURE.format(1, 1) + "x\n" * 1000))
    assert traffic.dropped == 1000 and len(traffic.reasons) == 6 and "1,000 lines left out" in str(traffic)


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "{}", "[]", "[1, 2]", "\xff\xfe"],
)
def test_files_without_a_request_are_refused_in_one_line(tmp_path, text):
    with pytest.raises(TrafficError) as error:
        read_traffic(written(tmp_path, text))
    assert "\n" not in str(error.value)


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path / "none.csv", tmp_path, "azure"):
        with pytest.raises(TrafficError, match="azure-code-2023"):
            read_traffic(path)
    with pytest.raises(TrafficError, match="cannot be read"):
        read_traffic(written(tmp_path, gzip.compress(b"x" * 1000)[:20], "cut.csv.gz"))


def test_a_byte_order_mark_windows_ends_and_no_last_end_change_nothing(tmp_path):
    text = AZURE.format(374, 44) + "2023-11-16 18:17:09,100,10"
    plain = read_traffic(written(tmp_path, text))
    other = read_traffic(written(tmp_path, b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(), "w.csv"))
    assert plain.table().equals(other.table()) and other.dropped == 0
    packed = read_traffic(written(tmp_path, gzip.compress(text.encode()), "p.csv.gz"))
    assert plain.table().equals(packed.table())


def test_a_rate_stretches_time():
    traffic = read_traffic("azure-code-2023", rate=10)
    assert traffic.rate == pytest.approx(10) and len(traffic) == 8819
