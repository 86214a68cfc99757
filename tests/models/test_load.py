"""Known models: every config says where its values come from, and those called checked equal the published copy."""

import json

import pytest

from decodebench.models.load import DATA, list_models
from decodebench.shipped import shipped

COPIES = shipped("data/published/models")
#: known model → the published config of it that data/published/models carries
PUBLISHED = {
    "deepseek-v3": "deepseek-v3",
    "deepseek-v3.2": "deepseek-v3.2",
    "gpt-oss-20b": "gpt-oss-20b",
    "llama-3.1-8b": "llama-3.1-8b",
    "llama-4-scout-text": "llama-4-scout",
    "mimo-v2-flash": "mimo-v2-flash",
}
#: newer names of transformers for what published files call otherwise, and fields of whole classes
OTHERWISE = {"rope_parameters", "quantization_config", "architectures"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_called_checked_has_the_published_values(name):
    ours = json.loads((DATA / name / "config.json").read_text())
    copy = json.loads((COPIES / f"{PUBLISHED[name]}.json").read_text())
    copy = copy.get("text_config", copy)
    shared = set(ours) & set(copy) - {"_source"} - OTHERWISE
    assert len(shared) >= 8
    assert {key: ours[key] for key in shared} == {key: copy[key] for key in shared}


def test_every_config_says_where_its_values_come_from():
    words = ("checked against", "recalled", "transformers default", "synthetic")
    sources = {name: source for name, _, source in list_models().facts()}
    assert [name for name, source in sources.items() if not any(word in source for word in words)] == []
    checked = {name for name, source in sources.items() if "aiconfigurator-core" in source}
    assert checked == set(PUBLISHED), "who is called checked against the copy is checked above"
