"""A generic reading is said wherever a figure of it stands: charts, alt text, explorer, verdict, forecasts."""

import json

import pytest

pytest.importorskip("matplotlib")

import decodebench as db
from decodebench.forecast.bound import bound
from decodebench.forecast.judge import judge
from decodebench.show import explorer, figures, verdicts

CONFIG = {"model_type": "brand_new", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 256}
CONFIG |= {"num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000, "index_head_dim": 128}
CONFIG |= {"torch_dtype": "bfloat16", "max_position_embeddings": 8192}
SAID = ("read generically", "index_head_dim")


@pytest.fixture
def path(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "config.json")


def said(text: str) -> bool:
    flat = " ".join(text.split())
    return all(word in flat for word in SAID)


def shown(figure) -> str:
    return " ".join(text.get_text() for text in figure.texts)


def test_figures_of_a_sweep(path):
    grid = {"model": path, "grouping": ["hybrid", "per_layer"], "context": [64, 1024], "memory": "1GiB"}
    table = db.sweep.run(grid | {"measure": "layout"}, progress=False)
    for figure in (
        db.plot(table, series="grouping"),
        figures.capacity(table, "title", series="grouping"),
        figures.waste_panels(table[table["context"] == "64"], "grouping", "title"),
        figures.bar_panels(
            table[table["context"] == "64"], "grouping", "concurrency", "model", name="n", title="title"
        ),
    ):
        assert said(shown(figure)) and said(figure.alt)


def test_a_known_family_says_nothing():
    table = db.sweep.run(
        {"model": "tiny-llama", "context": [64, 128], "memory": "1GiB", "measure": "layout"}, progress=False
    )
    assert "generically" not in shown(db.plot(table))


def test_the_explorer_and_the_verdict_of_ones_own_model(path):
    view = explorer.look(explorer.Choice(model=path, memory="1GiB", requests=1, context=64, blocks=16))
    assert said(view.title)
    assert said(verdicts.model(view.layout, 64, 1.0, 1.0)[0])
    assert said(view.layout._repr_html_())


def test_floors_and_what_follows_from_them(path):
    found = bound(path, "h100", batch=4, context=1024)
    assert said(str(found)) and said(found.to_dict()["reading"]) and said(found._repr_html_())
    assert said(str(bound(path, "h100", batch=[1, 4], context=1024)))
    assert said(str(judge(1.0, found)))
    assert "estimate" in str(found)


def test_a_known_model_rests_on_no_guess():
    assert bound("llama-3.1-8b", "h100", batch=4, context=1024).guess is None
