"""The parameters that a person would try: eight kinds of models in every notebook, one of each and many at once."""

import json

import pytest
from cells_in_process import run

from decodebench.models.load import DATA
from decodebench.show import notebooks

KINDS = (
    "tiny-llama",
    "tiny-gemma3",
    "tiny-nemotron-h",
    "deepseek-v3.2",  # packed pages and an indexer: no decode backend
    "whisper-large-v3",  # cross attention: one request takes hundreds of blocks, 448 tokens at most
    "qwen3-next-80b-a3b",  # linear attention
    "llama-4-scout-text",  # chunks
    "mamba-130m",  # no attention
)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """kind → a config of the user's own: the known one, of four layers, in a folder with a long name."""
    made = {}
    for name in KINDS:
        config = json.loads((DATA / name / "config.json").read_text())
        for key, value in config.items():
            if key in ("num_hidden_layers", "decoder_layers", "encoder_layers", "n_layer"):
                config[key] = min(value, 4)
            elif isinstance(value, list) and key.endswith(("types", "pattern")):
                config[key] = value[:4]
        folder = tmp_path_factory.mktemp("a-rather-long-name-of-a-folder") / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        made[name] = str(folder / "config.json")
    return made


def shown(number, **given):
    """The cells of a notebook at the test profile, with these parameters where it has them."""
    (path,) = notebooks.NOTEBOOKS.glob(f"{number}-*.ipynb")
    notebook = notebooks._read(path)
    known = notebooks.parameter_names(notebook)
    parameters = notebooks._parameters(path, notebook, "test", None)
    found = run(path, parameters | {k: v for k, v in given.items() if k in known})
    verdicts = [cell.facts["text"] for cell in found if cell.role == "verdict"]
    assert len(verdicts) == 1 and not verdicts[0].rstrip(".").endswith((",", ":", "grouping"))
    assert all(len(cell.facts["alt"]) > 30 for cell in found if cell.role == "chart")
    return found, verdicts[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", ["01", "09"])
def test_notebooks_of_one_model_run_on_every_kind(configs, number, kind):
    cells, verdict = shown(number, model=configs[kind], context=70, requests=2, contexts=[64, 256])
    assert verdict.startswith("100 %") or "100%" in verdict
    assert sum(cell.role == "chart" for cell in cells) >= (1 if number == "01" else 2)


@pytest.mark.parametrize("number", ["03", "04", "05"])
def test_notebooks_of_many_models_take_eight_at_once(configs, number):
    every = list(configs.values())
    cells, verdict = shown(
        number,
        models=every,
        waste_models=every,
        contexts=[64, 256],
        model=configs["tiny-gemma3"],
        context=256,
        groupings=["hybrid", "promoted", "per_layer"],
    )
    assert len(verdict) > 40


@pytest.mark.parametrize("kind", ["tiny-llama", "whisper-large-v3"])
def test_the_story_runs_on_other_kinds(configs, kind):
    shown("02", model=configs[kind], second_model="tiny-llama", context=70)


@pytest.mark.parametrize("contexts", [[512], [64, 256, 512], [1024, 64]])
def test_one_or_three_contexts_and_one_grouping(contexts):
    for number in ("04", "05", "09"):
        _, verdict = shown(
            number, contexts=contexts, groupings=["per_layer"], models=["tiny-gemma3"], model="tiny-gemma3"
        )
        assert verdict


def test_a_model_without_decode_backend_gets_sentences_in_place_of_times(configs):
    cells, verdict = shown(
        "07", models=[configs["deepseek-v3.2"]], block_sizes=[64], min_seconds=0.001, context=70
    )
    assert verdict.startswith("No step could be measured") and "packed" in verdict
    assert any(cell.role == "note" for cell in cells)
