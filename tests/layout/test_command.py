"""python -m decodebench plan: what it prints, what it refuses in one line, and that it stays light."""

import json
import subprocess
import sys

import pytest

import decodebench as db
from decodebench.__main__ import main
from decodebench.errors import DecodebenchError
from decodebench.models.load import DATA


def run(capsys, *arguments):
    try:
        code = main(["plan", *arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_table(capsys):
    code, out, err = run(capsys, "jamba-v0.1", "--memory", "8GiB")
    assert (code, err) == (0, "")
    assert "6,553 blocks" in out
    rows = [
        line.split() for line in out.splitlines() if line.strip()[:1].isdigit() and "model.layers" in line
    ]
    assert [(row[1], row[2], row[3]) for row in rows] == [("mamba1", "4", "80")] * 7 + [("full", "4", "80")]
    assert "Setting attention block size to 80 tokens" in out
    assert "Padding mamba page size by 5.26%" in out


def test_json_is_a_case_of_an_engines_dump(capsys):
    code, out, _ = run(capsys, "llama-3.1-8b", "--memory", "8GiB", "--memory", "40GiB", "--json")
    case = json.loads(out)
    assert code == 0
    assert case["bytes_per_block"] == 2_097_152 and case["resolved"]["block_size"] == 16
    small, large = case["memory"][str(8 * 2**30)], case["memory"][str(40 * 2**30)]
    assert small["auto_fit"] == {"max_model_len": 65_520, "num_blocks": 4096} and "65520" in small["refused"]
    assert large["num_blocks"] == 20_480 and len(large["tensors"]) == 1
    _, out, _ = run(capsys, "jamba-v0.1", "--json", "--disable-hybrid-kv-cache-manager")
    assert "hybrid manager" in json.loads(out)["refused"]["message"]


def test_compare(capsys):
    code, out, _ = run(capsys, "gemma-3-1b", "--compare", "--length", "4096")
    assert code == 0 and "requests of 4,096 tokens" in out
    assert [line.split()[0] for line in out.splitlines()[4:12]] == [
        "hybrid",
        "packed",
        "promoted",
        "separate",
        "fixed(2)",
        "fixed(4)",
        "fixed(8)",
        "per_layer",
    ]
    _, out, _ = run(capsys, "jamba-v0.1", "--compare")
    assert "promoted: refused: without the hybrid manager" in out


def test_options_reach_the_layout(capsys):
    _, out, _ = run(
        capsys,
        "qwen3-next-80b-a3b",
        "--json",
        "--memory",
        "40GiB",
        "--tensor-parallel-size",
        "4",
        "--decode-context-parallel-size",
        "2",
        "--no-async-scheduling",
        "--no-enable-prefix-caching",
        "--kv-cache-dtype",
        "fp8",
        "--mamba-ssm-cache-dtype",
        "float32",
        "--num-speculative-tokens",
        "1",
        "--max-model-len",
        "4096",
        "--max-num-batched-tokens",
        "1024",
        "--kv-cache-layout",
        "BLHNC",
        "--block-size",
        "32",
        "--dtype",
        "float16",
        "--kernel-block-size",
        "32",
    )
    case = json.loads(out)
    assert case["options"]["max_in_flight_tokens"] == 1024
    state = next(group["spec"] for group in case["groups"] if group["spec"]["class"] == "MambaSpec")
    assert state["dtypes"] == ["float16", "float32"] and state["num_speculative_blocks"] == 1
    assert state["block_size"] == 4096 and case["resolved"]["mamba_cache_mode"] == "none"
    _, out, _ = run(capsys, "llama-3.1-8b", "--max-model-len", "auto")
    assert "length 65,520" in out
    _, out, _ = run(capsys, "gemma-3-1b", "--grouping", "fixed(2)")
    assert "grouping fixed(2)" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing-like-it"], "neither a file nor a known model"),
        (["jamba-v0.2"], "did you mean jamba-v0.1"),
        ([str(DATA)], "a directory without"),
        ([__file__], "not JSON"),
        (["llama-3.1-8b"], "65520 would fit"),
        (["jamba-v0.1", "--memory", "1000"], "holds no block"),
        (["jamba-v0.1", "--memory", "many"], "memory 'many'"),
        (["jamba-v0.1", "--block-size", "-4"], "block_size = -4"),
        (["jamba-v0.1", "--block-size", "x"], "invalid int value"),
        (["jamba-v0.1", "--kv-cache-dtype", "fp9"], "invalid choice"),
        (["jamba-v0.1", "--max-model-len", "999999999"], "at most 262144"),
        (["jamba-v0.1", "--grouping", "nice"], "known are auto"),
        (["jamba-v0.1", "--disable-hybrid-kv-cache-manager"], "leave the hybrid manager on"),
        (["jamba-v0.1", "--compare", "--length", "0"], "at least one token"),
        (["jamba-v0.1", "--nonsense"], "unrecognized arguments"),
        ([], "required: model"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, arguments, says):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == ""
    assert says in err
    assert err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "unheard_of", "layer_types": ["telepathy"] * 32}, "telepathy"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"sliding_window": -1}, "sliding_window = -1"),
    ],
)
def test_bad_configs(capsys, tmp_path, changes, says):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads((DATA / "llama-3.1-8b" / "config.json").read_text()) | changes))
    code, _, err = run(capsys, str(path))
    assert code == 2 and says in err and str(path) in err and err.count("\n") == 1


def test_a_cold_plan_loads_nothing_heavy():
    """From standard input, in a process of its own: no torch, no pandas, no numpy."""
    script = (
        "import sys; from decodebench.__main__ import main; code = main(['plan', '-', '--compare']); "
        "heavy = {'torch', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules); print(heavy, "
        "file=sys.stderr); sys.exit(code)"
    )
    config = (DATA / "gemma-3-1b" / "config.json").read_text()
    done = subprocess.run([sys.executable, "-c", script], input=config, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "set()"
    assert "standard input" in done.stdout


def test_releases_side_by_side(capsys):
    assert main(["plan", "qwen3-next-80b-a3b", "--memory", "80GiB", "--compare-engines"]) == 0
    shown = capsys.readouterr().out
    assert "vllm-0.32" in shown and "vllm-0.33" in shown and "nothing changes between these releases" in shown


def test_an_unknown_release_is_refused_with_the_known_ones():
    with pytest.raises(DecodebenchError, match=r"engine = 'vllm-0\.9': known are vllm-0\.32, vllm-0\.33"):
        db.plan("tiny-llama", memory="1GiB", engine="vllm-0.9")
