"""Every architecture of vLLM 0.32's registry that could be asked: our layers, specs and groups equal vLLM's.

The goldens are made by tests/engine/registry. Run as a script this prints the table of architectures.
"""

import gzip
import json
from pathlib import Path

import pytest

from decodebench.errors import DecodebenchError
from decodebench.layout.plan import prepare
from decodebench.models.engines import FIRST_KNOWN, reached

FILE = Path(__file__).parents[1] / "goldens" / "registry.jsonl.gz"
ENTRIES = [json.loads(line) for line in gzip.decompress(FILE.read_bytes()).decode().splitlines()]
#: what other releases lay out otherwise than 0.32: the architectures, and models under options
RELEASES = [
    json.loads(line)
    for line in gzip.decompress((FILE.parent / "registry-releases.jsonl.gz").read_bytes())
    .decode()
    .splitlines()
]
#: known to differ from 0.33, which reads no ``attention_other_setting`` and no default of ``layer_types``
NOT_PLANNED = {("vllm-0.33", "step3p5"), ("vllm-0.33", "step3p5_plain")}
ASKED = [entry for entry in ENTRIES if "engine" not in entry]
#: equal but for a name that no cache depends on
OTHER_NAMES = {"Gemma3TextModel": "an embedding model, whose layers vLLM registers without a path"}
#: a kind of vLLM's that stores what another one stores
SAME_PAGES = {"SinkFullAttentionSpec": "FullAttentionSpec"}


def field(spec, name: str):
    """A field of ours as the dump has it."""
    value = type(spec).__name__ if name == "class" else getattr(spec, name, None)
    if name == "dtype" and str(value).startswith("float8"):
        return "uint8"
    return json.loads(json.dumps(value))


def differences(entry: dict) -> list[str]:
    """What we lay out otherwise than vLLM, in words."""
    try:
        engine = entry.get("release", "vllm-0.32")
        grouped = prepare(entry["config"], engine=engine, **entry.get("options", {}))
    except DecodebenchError as error:
        return [] if not entry["layers"] else [f"refused: {error}"]
    if not entry["layers"]:
        return ["vLLM keeps no cache, and we plan one"]
    model, found = grouped.model, []
    if entry["name"] in OTHER_NAMES:
        return []
    if list(model.layer_names) != entry["layers"]:
        return [f"layers {model.layer_names[:3]} where vLLM has {entry['layers'][:3]}"]
    if grouped.max_model_len != entry.get("max_model_len", grouped.max_model_len):
        found.append(f"length {grouped.max_model_len}, vLLM {entry['max_model_len']}")
    specs = model.specs(grouped.resolved, grouped.options)
    for theirs, indices in entry["specs"]:
        ours = specs[entry["layers"][indices[0]]]
        for name, value in theirs.items():
            if name == "tokens_per_state" and value == -1:
                continue
            if name == "class":
                value = SAME_PAGES.get(value, value)
            if field(ours, name) != value:
                found.append(f"{entry['layers'][indices[0]]}: {name} {field(ours, name)}, vLLM {value}")
        if len({specs[entry["layers"][i]] for i in indices}) != 1:
            found.append(f"{entry['layers'][indices[0]]}: layers alike in vLLM differ here")
    if dict(model.shared_layers) != entry.get("shared", dict(model.shared_layers)):
        found.append("layers that share a cache")
    if "groups" in entry:
        ours = [
            [
                list(group.layer_names),
                group.block_size,
                group.bytes_per_block if group.mixed else group.kv_cache_spec.page_size_bytes,
            ]
            for group in grouped.groups
        ]
        theirs = [[[entry["layers"][i] for i in ids], block, page] for ids, block, page in entry["groups"]]
        if ours != theirs:
            found.append("groups")
    return found


@pytest.mark.parametrize("entry", ASKED, ids=[entry["name"] for entry in ASKED])
def test_equal_to_vllm(entry):
    assert differences(entry) == []


@pytest.mark.parametrize("entry", RELEASES, ids=[f"{e['release']}-{e['name']}" for e in RELEASES])
def test_equal_to_other_releases(entry):
    family = entry["config"].get("model_type")
    if not reached(FIRST_KNOWN.get(family, "vllm-0.30"), entry["release"]):
        with pytest.raises(DecodebenchError, match="a way of its own"):
            prepare(entry["config"], engine=entry["release"])
        return
    if (entry["release"], entry["name"]) in NOT_PLANNED:
        assert differences(entry)  # where this fails, it is planned: take it off the list
        return
    assert differences(entry) == []


def test_most_of_the_registry_was_asked():
    assert len(ASKED) >= 180 and len(ENTRIES) - len(ASKED) <= 40


def table() -> str:
    """architecture × equal, refused or not asked, as Markdown."""
    rows = ["| architecture or config | model_type | result |", "| --- | --- | --- |"]
    for entry in sorted(ENTRIES, key=lambda e: e["name"].lower()):
        if "engine" in entry:
            result = f"not asked: {entry['engine'][:110]}".replace("|", "/")
        elif not entry["layers"]:
            result = "refused: vLLM keeps no cache"
        else:
            found = differences(entry)
            result = OTHER_NAMES.get(entry["name"]) or ("equal" if not found else "; ".join(found))
        rows.append(f"| {entry['name']} | {entry['model_type']} | {result} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
