"""Verdicts: on figures of every tool, and in plain words where a file holds none."""

import json

import pytest

from decodebench.__main__ import main
from decodebench.errors import DecodebenchError
from decodebench.forecast.bound import bound
from decodebench.forecast.judge import judge, judge_all
from decodebench.forecast.results import read_results

FLOOR = bound("llama-3.1-8b", "h100", batch=16, context=4096)

SERVE = {
    "backend": "vllm",
    "model_id": "x",
    "num_prompts": 100,
    "max_concurrency": 16,
    "duration": 10.0,
    "completed": 100,
    "total_input_tokens": 102_400,
    "total_output_tokens": 12_800,
    "output_throughput": 1280.0,
    "mean_ttft_ms": 50.0,
    "mean_tpot_ms": 10.0,
    "median_tpot_ms": 9.9,
    "mean_itl_ms": 10.1,
}
STATISTIC = {"mean": 10.0, "median": 9.9}
GUIDELLM = {
    "benchmarks": [
        {
            "metrics": {
                "inter_token_latency_ms": {"successful": STATISTIC, "total": {"mean": 99.0}},
                "output_tokens_per_second": {"successful": {"mean": rate}},
                "prompt_token_count": {"successful": {"mean": 1024.0}},
                "output_token_count": {"successful": {"mean": 128.0}},
            }
        }
        for rate in (100.0, 1280.0)
    ]
}
AIPERF = {
    "inter_token_latency": {"unit": "ms", "avg": 10.0, "p50": 9.9},
    "time_to_first_token": {"unit": "ms", "avg": 50.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 1280.0},
    "input_sequence_length": {"unit": "tokens", "avg": 1024.0},
    "output_sequence_length": {"unit": "tokens", "avg": 128.0},
}


@pytest.mark.parametrize(
    "result", [SERVE, AIPERF, {"benchmarks": GUIDELLM["benchmarks"][1:]}], ids=["vllm", "aiperf", "guidellm"]
)
def test_every_tool_says_the_same_of_the_same_run(result, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    (one,) = read_results(path)
    assert one.seconds == pytest.approx(0.010) and one.batch == pytest.approx(12.8) and one.context == 1088
    assert "prompt tokens for an output token" in one.notes[0]
    (verdict,) = judge_all(path, "llama-3.1-8b", "h100")
    assert verdict.verdict == "possible" and verdict.bound.batch == pytest.approx(12.8)
    assert verdict.share == pytest.approx(verdict.bound.seconds / 0.010)


def test_a_report_of_several_rates_and_a_folder_of_runs(tmp_path):
    assert [round(m.batch, 1) for m in read_results(GUIDELLM)] == [1.0, 12.8]
    for i, name in enumerate(("run=0.json", "run=1.json", "summary.json")):
        folder = tmp_path / "sweep" / f"case{i}"
        folder.mkdir(parents=True)
        (folder / name).write_text(json.dumps([SERVE] if name == "summary.json" else SERVE))
    (tmp_path / "sweep" / "settings.json").write_text("{}")
    assert len(read_results(tmp_path)) == 2, "summaries repeat their runs"


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(1.3, "impossible"), (1.001, "impossible"), (0.95, "near the limit"), (0.5, "possible")],
)
def test_verdicts(share, verdict):
    found = judge(FLOOR.seconds / share, FLOOR)
    assert found.verdict == verdict and found.share == pytest.approx(share)
    assert str(found).startswith(verdict) and json.loads(json.dumps(found.to_dict()))["verdict"] == verdict


def explained(measured, floor):
    return " ".join(judge(measured, floor).explanations)


def test_an_impossible_figure_names_the_mistakes_that_would_explain_it():
    """Each by a figure that would be true under it."""
    p = FLOOR.deployment
    unfilled = p.at(16, 1).seconds * 1.01
    assert "never filled" in explained(unfilled, FLOOR) and "fp8" in explained(FLOOR.seconds / 1.1, FLOOR)
    assert "no more than 8 of the 16 requests" in explained(p.at(8, 4096).seconds * 1.0001, FLOOR)
    assert "speculative decoding" in explained(FLOOR.seconds / 3, FLOOR)
    moe = bound("gpt-oss-20b", "h100", batch=16, context=1000)
    same = bound("gpt-oss-20b", "h100", batch=16, context=1000, routing="same")
    assert "same experts" in explained(same.seconds, moe)
    latent = bound("deepseek-v3", "h200", batch=256, context=8000, tensor_parallel_size=8, quantization="fp8")
    apart = bound(
        "deepseek-v3",
        "h200",
        batch=256,
        context=8000,
        data_parallel_size=8,
        enable_expert_parallel=True,
        quantization="fp8",
    )
    assert apart.seconds < latent.seconds and "data parallel" in explained(apart.seconds, latent)


def test_the_length_at_which_it_would_be_true_is_true():
    text = explained(FLOOR.deployment.at(16, 2000).seconds, FLOOR)
    assert "2,000 tokens a request" in text


def test_speculative_decoding_is_a_step_of_several_tokens():
    spec = SERVE | {
        "spec_decode_acceptance_rate": 0.5,
        "spec_decode_acceptance_length": 2.5,
        "mean_tpot_ms": 4.0,
    }
    (one,) = judge_all(spec, "llama-3.1-8b", "h100")
    assert one.step_seconds == pytest.approx(0.010) and one.verdict == "possible"
    with pytest.raises(DecodebenchError, match="acceptance_length"):
        read_results({k: v for k, v in spec.items() if k != "spec_decode_acceptance_length"})


def test_a_saturated_engine_is_named():
    (one,) = read_results(SERVE | {"mean_ttft_ms": 5000.0})
    assert any("saturated" in note for note in one.notes)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ("[]", "list"),
        ("{}", "no decode figure"),
        (
            json.dumps({k: v for k, v in SERVE.items() if "tpot" not in k and "itl" not in k}),
            "no mean_tpot_ms",
        ),
        (json.dumps(SERVE | {"mean_tpot_ms": 0}), "mean_tpot_ms = 0"),
        (json.dumps(SERVE | {"completed": None}), "completed"),
        (json.dumps(SERVE | {"mean_tpot_ms": "fast"}), "'fast'"),
        (json.dumps({"benchmarks": []}), "empty"),
        (json.dumps({"benchmarks": [{}]}), "no metrics"),
        (json.dumps({"benchmarks": [{"metrics": {}}]}), "streamed"),
        (json.dumps({"inter_token_latency": {}}), "avg"),
        (json.dumps({"tpot_ms": 3, "speed": 1}), "speed"),
    ],
)
def test_a_file_without_a_figure_is_refused_in_one_line(content, says, tmp_path, capsys):
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(DecodebenchError, match=says) as error:
        read_results(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    assert main(["judge", str(path), "--model", "llama-3.1-8b", "--machine", "h100"]) == 2
    assert says in capsys.readouterr().err


def test_what_a_result_does_not_say_must_be_given():
    with pytest.raises(DecodebenchError, match="--batch"):
        judge_all(0.01, "llama-3.1-8b", "h100")
    (one,) = judge_all(0.01, "llama-3.1-8b", "h100", batch=4, context=100)
    assert one.bound.batch == 4
    with pytest.raises(DecodebenchError, match="two|2 figures"):
        judge(GUIDELLM, FLOOR)


def test_the_command_says_by_its_code_whether_a_figure_is_impossible(capsys):
    arguments = ["--model", "llama-3.1-8b", "--machine", "h100", "--batch", "16", "--context", "4096"]
    assert main(["judge", "1.5", *arguments]) == 1
    assert capsys.readouterr().out.startswith("impossible: 1.5 ms a step is")
    assert main(["judge", "20", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["verdict"] == "possible"
    assert main(["judge", "nowhere.json", *arguments]) == 2
    assert "no such file" in capsys.readouterr().err
