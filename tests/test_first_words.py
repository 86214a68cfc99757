"""What a newcomer types first: objects that answer in one line, options that complete, mistakes that are told."""

import inspect
import json
import time

import pytest

import decodebench as db
from decodebench.__main__ import main


@pytest.fixture(scope="module")
def made():
    layout = db.plan("tiny-nemotron-h", memory="64MiB", max_model_len="auto")
    batch = db.admit(layout, context="2x100+1x300")
    return layout, batch, db.allocate(layout.with_num_blocks(64), "cpu")


def test_every_object_answers_in_one_short_line_at_once(made):
    layout, batch, cache = made
    big = db.plan("jamba-v0.1", memory="8GiB", max_model_len="auto")
    start = time.perf_counter()
    texts = [repr(x) for x in (layout, batch, cache, big)]
    assert time.perf_counter() - start < 1, "a cache of 64 MiB printed byte by byte took ten minutes"
    for text in texts:
        assert len(text) < 200 and "\n" not in text
    assert texts[0].startswith("Layout of tiny-nemotron-h: 3 groups") or "groups" in texts[0]
    assert "3 requests of 100 to 300 tokens" in texts[1]
    assert "64 blocks" in texts[2] and "on cpu" in texts[2] and "poisoned" in texts[2]


def test_a_cache_says_what_it_was_filled_with_and_the_audit_expects_it(made):
    layout, _, _ = made
    small = layout.with_num_blocks(64)
    batch = db.admit(small, requests=2, context=100)
    for values in (db.Constant(0.015), db.Normal(), db.Constant(0.25)):
        cache = db.allocate(small, "cpu")
        db.fill_cache(cache, batch, values)
        assert str(values) in repr(cache)
        assert db.audit(cache, batch).coverage == 1, "no values= needed"
    assert db.audit(cache, batch, db.Constant(0.5)).coverage == 0, "other values can still be asked for"


def test_a_batch_takes_the_mixes_that_a_sweep_takes(made):
    layout, batch, _ = made
    assert batch.context_lens == (100, 100, 300)
    assert db.admit(layout, requests=2, context="50").context_lens == (50, 50)


def test_options_complete():
    for function in (db.plan, db.compare):
        names = set(inspect.signature(function).parameters)
        assert {"kv_cache_dtype", "max_model_len", "tensor_parallel_size", "memory"} <= names
        assert "options" not in names
    assert set(dir(db.sweep)) == set(db.sweep.__all__), "no argparse, no re"
    assert {"CacheOptions", "plot", "plan"} <= set(dir(db))


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda l, b, c: db.fill_cache(b, c), r"the other way round, fill_cache\(cache, batch\)"),
        (lambda l, b, c: db.audit(b, c), r"the other way round, audit\(cache, batch\)"),
        (lambda l, b, c: db.fill_cache(l, b), r"cache is Layout, not a Cache: db.allocate"),
        (lambda l, b, c: db.fill_cache(c, b, values=0.015), r"values=db.Constant\(0.015\)"),
        (lambda l, b, c: db.fill_cache(c, b, values=0), r"values=db.Zeros\(\)"),
        (lambda l, b, c: db.fill_cache(c, b, values="normal"), r"db.Normal\(\)"),
        (lambda l, b, c: db.admit("tiny-llama"), r"admit\('tiny-llama', …\): .*db.plan"),
        (lambda l, b, c: db.allocate("tiny-llama"), "a layout is allocated; db.plan"),
        (lambda l, b, c: db.allocate(l.with_num_blocks(4), "mps"), "device 'mps'"),
        (
            lambda l, b, c: db.plan("meta-llama/Llama-3.1-8B"),
            "hf download meta-llama/Llama-3.1-8B config.json",
        ),
        (lambda l, b, c: db.plan("https://example.org/org/name"), "hf download org/name config.json"),
        (lambda l, b, c: db.plan("llama-3.1-8b", memory="8GiB"), '"auto" finds it'),
    ],
)
def test_typical_mistakes_are_told_with_their_remedy(made, mistake, says):
    with pytest.raises(db.DecodebenchError, match=says) as told:
        mistake(*made)
    assert "\n" not in str(told.value)


def test_an_adapter_names_its_base_model(tmp_path):
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"}))
    with pytest.raises(db.DecodebenchError, match=r"an adapter \(LORA\).* config.json of org/base"):
        db.plan(str(path))


def test_known_models_say_where_their_values_come_from():
    known = db.list_models()
    assert "jamba-v0.1" in known and isinstance(known, tuple)
    for name, family, source in known.facts():
        assert family != "?" and source != "not said", name
    assert "transformers default of JambaConfig" in repr(known)
    assert "<td" in known._repr_html_()


def test_commands_of_a_newcomer(capsys):
    assert main(["models", "--names"]) == 0
    assert capsys.readouterr().out.split() == list(db.list_models())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"decodebench {db.__version__}"
    assert main(["swep"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "did you mean 'sweep'" in said.err and not said.out
