"""Bad input of every kind, at random: a right answer or one line that says what, where and the remedy.

    python tests/support/bad_input.py --cases 5000 --seed 0

Configs, grids, memory texts, flags, connector options, audit files and result folders are mutated; each
case has five seconds and one gibibyte of memory more than the process began with. ``--kinds`` takes some.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from decodebench.__main__ import main as command
from decodebench.errors import DecodebenchError
from decodebench.layout.plan import parse_memory, plan
from decodebench.models.load import DATA, list_models, load_model
from decodebench.models.options import CacheOptions

SECONDS, BYTES, LONGEST_LINE = 5, 1 << 30, 1000

#: a right answer, however it reads
FINE = "answered"

ODD = (
    None, True, False, 0, 1, -1, -7, 2, 3, 0.5, 1e308, -0.0, math.nan, math.inf, -math.inf, 2**31, 2**63, 10**30,
    1_000_000, "", " ", "x", "16", "-1", "nan", "\0", "é" * 50, "<script>alert(1)</script>", "\u202egnp.exe",
    [], {}, [None], [[]], [1, 2, 3], ["full_attention"], [0] * 100_000, {"a": {"b": None}}, "x" * 100_000,
)  # fmt: off


def nested(depth: int) -> object:
    value: object = 1
    for level in range(depth):
        value = {"text_config": value} if level % 2 else [value]
    return value


def places(value: object, path: tuple = ()) -> list[tuple]:
    """The path of every value inside, itself left out; not deeper than five."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inner = [] if len(path) == 5 else list(inner)[:200]
    return [found for key, v in inner for found in ((*path, key), *places(v, (*path, key)))]


def mutate(draw: random.Random, value: object) -> object:
    """The same data with one value changed, left out, repeated or put elsewhere."""
    found = places(value)
    if not found:
        return draw.choice(ODD)
    *way, last = draw.choice(found)
    value = holder = copy.copy(value)
    for key in way:
        holder[key] = copy.copy(holder[key])
        holder = holder[key]
    old, how = holder[last], draw.randrange(7)
    if how == 0:
        del holder[last]
    elif how == 1 and isinstance(old, int | float):
        holder[last] = draw.choice([-old, old * 10**6, old + 0.5, str(old), [old], old + 1, -1, 10**7])
    elif how == 2 and isinstance(old, list):
        others = [old[: len(old) // 2], old * 3, old[::-1], [old], [*old, None], dict(enumerate(old))]
        holder[last] = draw.choice(others)
    elif how == 3 and isinstance(old, str):
        holder[last] = draw.choice([old.upper(), old + "x", old[:-1], [old], {old: old}, old * 1000])
    elif how == 4:
        holder[last] = nested(draw.choice([3, 50, 900]))
    else:
        holder[last] = draw.choice(ODD)
    return value


def damaged(draw: random.Random, content: bytes) -> bytes:
    """The same bytes cut off, with some changed, doubled, or of another file."""
    at = draw.randrange(len(content) + 1)
    return draw.choice(
        [
            content[:at],
            content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :],
            content[:at] + content[at // 2 :],
            content + content,
            content[::-1],
            b"",
            b"\xff\xfe" + content,
            b"PK\3\4" + content[:at],
            b"[" * 100_000,
            b'{"a":' * 50_000,
            content.replace(b"\n", b"\r\n"),
            content.replace(b"1", b"-1"),
            content.replace(b":", b";", 1),
        ]
    )


# -- one case of each kind --------------------------------------------------------------------------


@cache
def known(name: str) -> str:
    return (DATA / name / "config.json").read_text()


def a_config(draw: random.Random, folder: Path) -> None:
    """A config.json with one to three values changed, as a dictionary, a file, or damaged bytes."""
    config = json.loads(known(draw.choice(list_models())))
    for _ in range(draw.randint(1, 3)):
        config = mutate(draw, config)
        if not isinstance(config, dict):
            break
    path = folder / "config.json"
    how = draw.randrange(4)
    if how == 0 and isinstance(config, dict):
        layout = plan(config, memory="8GiB")
    else:
        with contextlib.suppress(RecursionError):
            content = json.dumps(config).encode()
            path.write_bytes(damaged(draw, content) if how == 1 else content)
        layout = plan(path, memory=draw.choice(["8GiB", "80GiB", 10**9]))
    str(layout), repr(layout), layout.groups[0].kv_cache_spec.page_size_bytes
    assert layout.num_blocks > 0


def a_million_layers(draw: random.Random, folder: Path) -> None:
    """The same with a layer count or a list of layers that no model has."""
    config = json.loads(known(draw.choice(list_models())))
    inner = config.get("text_config", config)
    count = draw.choice([10**6, 10**9, 10_000, 9_999, 0, -1])
    for name in [*draw.sample(list(inner), min(4, len(inner))), "num_hidden_layers"]:
        if isinstance(inner.get(name), int) and "layer" in name:
            inner[name] = count
        elif isinstance(inner.get(name), list) and inner[name]:
            inner[name] = inner[name][:1] * min(abs(count), 10**6)
    str(plan(config, memory="8GiB"))


MEMORY = ("8GiB", "80 GiB", "1.5TiB", "1e10", "10 GB", "8589934592", "0", "512MiB")


def a_memory(draw: random.Random, folder: Path) -> None:
    """A memory text with characters changed."""
    text = draw.choice(MEMORY)
    for _ in range(draw.randint(0, 3)):
        at = draw.randrange(len(text) + 1)
        text = (
            text[:at]
            + draw.choice([*"0123456789.eE+-_ GgMmiBbtT,%\0é٣", "9" * 400, "inf", "nan"])
            + text[at + draw.randint(0, 2) :]
        )
    value = draw.choice([text, text, text, *ODD])
    found = parse_memory(value)
    assert isinstance(found, int) and found > 0, (value, found)


def a_grid(draw: random.Random, folder: Path) -> None:
    """A grid as a dictionary, as TOML, or as damaged TOML."""
    from decodebench.study.grid import AXES, cases, load_grid

    grid = {
        "model": ["tiny-llama", "jamba-v0.1"],
        "block_size": [16, 32],
        "context": ["4096", "3x1024+1x8192"],
    }
    grid |= {"batch": 4, "measure": "layout", "memory": "1GiB", "fault": ["A1"], "hf_overrides": {"a": 1}}
    if draw.random() < 0.6:
        for _ in range(draw.randint(1, 3)):
            grid = mutate(draw, grid)
            if not isinstance(grid, dict):
                break
            if draw.random() < 0.4:
                grid[draw.choice(AXES)] = draw.choice(ODD)
        found = cases(grid)
    else:
        text = b'model = ["tiny-llama", "gemma-3-1b"]\nblock_size = [16, 32]\n'
        text += b'context = "3x1024+1x8192"\n[[grid]]\nbatch = 4\n'
        path = folder / "grid.toml"
        path.write_bytes(damaged(draw, text))
        found = cases(load_grid(path))
    assert all(case.model for case in found)


FLAGS = [
    "--memory", "--block-size", "--dtype", "--kv-cache-dtype", "-tp", "-dcp", "--max-model-len",
    "--max-num-batched-tokens", "--mamba-cache-dtype", "--device", "--num-speculative-tokens", "--draft-layers",
    "--kv-cache-layout", "--kernel-block-size", "--grouping", "--engine", "--compare", "--json", "--nonsense",
]  # fmt: skip


def a_command(draw: random.Random, folder: Path) -> None:
    """A command line of plan, bound or judge with odd flags and values."""
    name = draw.choice(["plan", "plan", "plan", "bound", "judge"])
    model = draw.choice([*list_models()[:20], "jamba", "", "/", ".", "a/b", "-x", "\u202e", "x" * 300])
    values = [
        "0",
        "-1",
        "1",
        "16",
        "nan",
        "inf",
        "1e400",
        "auto",
        "",
        " ",
        "fp8",
        "9" * 400,
        "é",
        "8GiB",
        "7.5",
        "h100",
    ]
    arguments = [name, model]
    if name == "judge":
        arguments = ["judge", draw.choice(values), "--model", model]
    if name != "plan":
        arguments += ["--machine", draw.choice(["h200", "h100", "abacus", ""])]
        flags = ["--batch", "--context", "-tp", "--nonsense", "--kv-cache-dtype"]
    else:
        flags = FLAGS
    for _ in range(draw.randint(0, 3)):
        arguments += [draw.choice(flags), draw.choice(values)][: draw.randint(1, 2)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = command(arguments)
        except SystemExit as end:
            code = end.code
    if code == 2:
        lines = err.getvalue().splitlines()
        assert len(lines) == 1 and lines[0].startswith("decodebench: "), (arguments, lines)
        raise DecodebenchError(lines[0])
    assert code in (0, 1) and out.getvalue().strip(), (arguments, code)


def an_option(draw: random.Random, folder: Path) -> None:
    """A connector's options."""
    from decodebench.vllm.options import parse

    options = {
        "mean": 0.015,
        "std": 0.02,
        "seed": 3,
        "startup_fill": True,
        "audit": "plan",
        "audit_file": "a",
        "strict": False,
    }
    for _ in range(draw.randint(1, 3)):
        options = mutate(draw, options)
        if not isinstance(options, dict):
            break
    parse(options)


def an_audit_file(draw: random.Random, folder: Path) -> None:
    """An audit's file cut off, damaged, with a value changed, or another file in its place."""
    from decodebench.vllm.audit_files import FORMAT, audit_steps, read_audit

    layers = ["a.0", "a.1"]
    group = {"number": 0, "kind": "full_attention", "block_size": 16, "layers": layers}
    header = {"format": FORMAT, "source": "bytes", "rank": 0, "connector": "x", "groups": [group]}
    finding = {"group": 0, "layer": "a.0", "blocks": [1, 2], "request": "r", "state": "wrong", "detail": "d"}
    step = {"step": 0, "fill_seconds": 0.1, "fill_bytes": 10, "counters": {}, "requests": ["r"]}
    step |= {
        "counts": [[[1] * 5] * 2],
        "findings": [finding],
        "suspects": [],
        "disagreements": [],
        "unseen": [],
    }
    lines: list[object] = [header, step, step | {"step": 1}]
    how = draw.randrange(3)
    if how:
        at = draw.randrange(len(lines))
        lines[at] = mutate(draw, lines[at])
    with contextlib.suppress(RecursionError):
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        path = folder / "audit.jsonl"
        path.write_bytes(damaged(draw, content) if how != 1 else content)
        str(read_audit(path)), audit_steps(path)


def a_result_folder(draw: random.Random, folder: Path) -> None:
    """A result folder whose journal, table or provenance is damaged or another file."""
    from decodebench.measure.journal import JOURNAL, PROVENANCE, Journal
    from decodebench.study import sweep

    out = folder / "results"
    shutil.copytree(stored(), out)
    path = out / draw.choice([JOURNAL, JOURNAL, PROVENANCE, "rows.parquet"])
    if path.name == PROVENANCE and draw.random() < 0.6:
        with contextlib.suppress(RecursionError):
            path.write_text(json.dumps(mutate(draw, json.loads(path.read_text()))))
    elif path.name == JOURNAL and draw.random() < 0.6:
        lines = path.read_text().splitlines()
        at = draw.randrange(len(lines))
        with contextlib.suppress(RecursionError):
            lines[at] = json.dumps(mutate(draw, json.loads(lines[at])))
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_bytes(damaged(draw, path.read_bytes()))
    if draw.random() < 0.5:
        sweep.read(out)
        return
    with Journal(out) as journal:
        journal.begin_run({"settings": {}})
        row = dict.fromkeys(("case_id",), "x")
        journal.append(row)


@cache
def stored() -> Path:
    """A folder of a small sweep, some rows of which still lie in the journal."""
    from decodebench.measure.journal import Journal
    from decodebench.study import sweep

    folder = Path(tempfile.mkdtemp()) / "sweep"
    sweep.run(
        {"model": "tiny-llama", "measure": "layout", "block_size": [16, 32, 48]}, folder, progress=False
    )
    with Journal(folder) as journal:
        journal.begin_run({"settings": {}})
        for number, row in enumerate(list(journal.rows.values())):
            journal.append(row | {"case_id": f"other {number}"})
    return folder


KINDS: dict[str, tuple[Callable, float]] = {
    "config": (a_config, 1.0),
    "a million layers": (a_million_layers, 0.05),
    "memory": (a_memory, 0.2),
    "grid": (a_grid, 0.2),
    "command": (a_command, 0.2),
    "connector options": (an_option, 0.2),
    "audit file": (an_audit_file, 0.2),
    "result folder": (a_result_folder, 0.1),
}


# -- running them -----------------------------------------------------------------------------------


class TooSlow(BaseException):
    """A case that took longer than it may."""


def judge(kind: str, seed: str, folder: Path) -> tuple[str, str]:
    """(how one case ended, what is wrong with that: nothing where it is right)."""
    draw, case = random.Random(seed), KINDS[kind][0]
    try:
        case(draw, folder)
    except DecodebenchError as error:
        text = str(error)
        if "\n" in text or not text.strip() or len(text) > LONGEST_LINE:
            return "refused", f"{len(text)} characters in {len(text.splitlines())} lines: {text[:300]!r}"
        return "refused", ""
    except TooSlow:
        return "too slow", f"more than {SECONDS} s"
    except MemoryError:
        return "too large", f"more than {BYTES:,} B"
    except BaseException as error:
        where = error.__traceback__
        while where.tb_next:
            where = where.tb_next
        line = f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}"
        return "escaped", f"{type(error).__name__} at {line}: {str(error)[:200]}"
    return FINE, ""


def run(kind: str, count: int, seed: int) -> tuple[Counter, list[str], float]:
    """(how the cases ended, what is wrong, the slowest one's seconds)."""
    ended, wrong, slowest = Counter(), [], 0.0

    def late(*_):
        raise TooSlow

    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    warm(kind)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + BYTES, before[1]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(count):
                with tempfile.TemporaryDirectory() as folder:
                    began = time.perf_counter()
                    signal.setitimer(signal.ITIMER_PROF, 0)
                    signal.alarm(4 * SECONDS)  # a busy machine's; what counts is the processor's time
                    cpu = time.process_time()
                    name = f"{kind} {seed} {number}"
                    how, why = judge(kind, name, Path(folder))
                    signal.alarm(0)
                    took = time.process_time() - cpu
                    slowest = max(slowest, took)
                    if not why and took > SECONDS:
                        why = f"{took:.1f} s ({time.perf_counter() - began:.1f} s of the clock)"
                    ended[how] += 1
                    if why:
                        wrong.append(f"{name}: {how}: {why}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
    return ended, wrong, slowest


def warm(kind: str) -> None:
    """What a kind loads is loaded before its memory is counted."""
    plan("tiny-llama", memory="8GiB"), load_model("tiny-llama"), CacheOptions()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(5):
            fresh = Path(folder, str(number))
            fresh.mkdir()
            judge(kind, f"warm {number}", fresh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--cases", type=int, default=5000, help="mutated configs; the other kinds in proportion"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    asked = parser.parse_args()
    failed = 0
    for kind in asked.kinds:
        began = time.perf_counter()
        count = round(asked.cases * KINDS[kind][1])
        ended, wrong, slowest = run(kind, count, asked.seed)
        failed += len(wrong)
        print(
            f"{kind}: {count:,} cases, seed {asked.seed}, {time.perf_counter() - began:.0f} s, the slowest "
            f"{slowest:.2f} s: {dict(ended)}, {len(wrong)} wrong",
            flush=True,
        )
        print(*wrong[:20], sep="\n", end="\n" if wrong else "", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
