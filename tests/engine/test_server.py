"""A server under vLLM's own benchmark client, over loopback, audited by file."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import decodebench.vllm as dbv
from decodebench.forecast.judge import judge_all
from decodebench.study import sweep

START_SECONDS = 150


def model_folder(folder: Path) -> Path:
    """The tiny Nemotron-H with a tokenizer of 512 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from decodebench.models.load import DATA
    from decodebench.vllm.launch import FORWARD

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t0", "unk_token": "t3"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    shape = json.loads((DATA / "tiny-nemotron-h" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(FORWARD | shape))
    return folder


def wait_until_up(address: str, server: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"{address}/health", timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"the server was not up after {START_SECONDS} s: {log.read_text()[-3000:]}")


def test_vllm_serve_under_vllm_bench(tmp_path):
    model, command = model_folder(tmp_path), ("-m", "decodebench.vllm.client")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address, log, audit = f"http://127.0.0.1:{port}", tmp_path / "server.log", tmp_path / "audit.jsonl"
    transfer = dbv.kv_transfer_config(
        "GroupedDecodeBenchConnector", std=0.02, audit="bytes", audit_file=str(audit)
    )
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("w") as output:
        server = subprocess.Popen(
            [
                sys.executable,
                *command,
                "serve",
                str(model),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--load-format",
                "dummy",
                "--enforce-eager",
                "--max-model-len",
                "4096",
                "--max-num-seqs",
                "8",
                "--kv-cache-memory-bytes",
                str(16 << 20),
                "--kv-transfer-config",
                json.dumps(transfer),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            wait_until_up(address, server, log)
            client = subprocess.run(
                [
                    sys.executable,
                    *command,
                    "bench",
                    "serve",
                    "--base-url",
                    address,
                    "--model",
                    str(model),
                    "--backend",
                    "openai",
                    "--dataset-name",
                    "random",
                    "--random-input-len",
                    "900",
                    "--random-output-len",
                    "8",
                    "--num-prompts",
                    "4",
                    "--ignore-eos",
                    "--num-warmups",
                    "0",
                    "--save-result",
                    "--result-dir",
                    str(tmp_path),
                    "--result-filename",
                    "bench.json",
                ],
                capture_output=True,
                text=True,
                env=environment,
                timeout=120,
            )
            metrics = urllib.request.urlopen(f"{address}/metrics", timeout=10).read().decode()
            found = dbv.read_audit(audit)
            case = {"model": str(model), "measure": "engine", "server": address, "machine": "this"}
            online = sweep.run(case | {"context": 300, "batch": [1, 2], "decode_steps": 6})
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
    assert client.returncode == 0, client.stderr[-3000:]
    bench = json.loads((tmp_path / "bench.json").read_text())
    assert bench["completed"] == 4 and bench["total_output_tokens"] == 32
    # the file that the client saved is one that `decodebench judge` reads
    (one,) = judge_all(tmp_path / "bench.json", model, "this")
    assert one.measured.seconds == bench["mean_tpot_ms"] / 1e3 and one.verdict in (
        "possible",
        "near the limit",
    )
    assert one.measured.context == 904 and 0 < one.bound.batch <= 4
    assert found.ok, str(found)
    assert set(found.groups.kind) == {"mamba", "full_attention"}
    # every prompt token but the last came from the connector: nothing was prefilled
    hits, queries = (
        sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(f"{name}{{"))
        for name in ("vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total")
    )
    assert queries > 4 * 890 and hits == queries - found.groups[found.groups.group == 0].required.sum()
    # the same server as rows of a sweep: concurrency is the axis, latencies are those of the stream
    assert list(online["status"]) == ["ok", "ok"], list(online["reason"])
    assert list(online["steps"]) == [6, 6] and (online["q1_s"] <= online["q3_s"]).all()
    assert (online["floor_share"] < 1).all() and online["verdict"].str.contains("judges itself").all()
