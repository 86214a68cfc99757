"""The explorer: a miniature with the layout's own block tables, refusals in words, a still picture for exports."""

from dataclasses import replace

import pytest

import decodebench as db
from decodebench.cache.faults import FAULTS
from decodebench.layout.shrink import shrink
from decodebench.show.explorer import Choice, explore, look, panel

MODELS = ["jamba-v0.1", "gemma-3-1b", "nemotron-h-8b", "deepseek-v3.2", "mimo-v2-flash", "llama-4-scout-text"]


@pytest.mark.parametrize("model", MODELS)
def test_a_miniature_keeps_groups_block_sizes_and_tables(model):
    layout = db.plan(model, memory="80GiB", max_model_len="auto").with_num_blocks(64)
    small = shrink(layout, miniature=True, num_blocks=64)
    assert [g.layer_names for g in small.groups] == [g.layer_names for g in layout.groups]
    assert [small.tokens_per_block(g) for g in range(len(small.groups))] == [
        layout.tokens_per_block(g) for g in range(len(layout.groups))
    ]
    tables = [[b.block_ids for b in db.admit(x, requests=1, context=100).requests] for x in (layout, small)]
    assert tables[0] == tables[1]
    assert small.size < min(layout.size, 16 << 20)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_filled_and_the_fault_is_seen(model):
    assert look(Choice(model=model)).trial.audit.ok
    found = look(Choice(model=model, fault="A1")).trial.audit
    groups = len(db.plan(model, memory="80GiB", max_model_len="auto").groups)
    assert found.ok == (groups == 1)


def test_what_does_not_fit_is_cut_down_and_said():
    asked = Choice(model="gemma-3-1b", context=4096, requests=3)
    view = look(asked)
    assert view.choice.requests == 1 and view.choice.context < 4096
    assert "holds 1 of 3 requests" in panel(view, asked)


def test_every_fault_can_be_chosen():
    for fault in FAULTS:
        assert look(Choice(model="tiny-nemotron-h", fault=fault)).trial.audit.required > 0


def test_the_panel_follows_its_controls_and_says_what_is_refused():
    explorer = explore("tiny-nemotron-h")
    assert "nothing else touched" in explorer.output.value
    explorer.controls["fault"].value = "A1"
    assert "A1 group-0 map" in explorer.output.value and "never filled" in explorer.output.value
    explorer.controls["grouping"].value = "promoted"
    assert explorer.view is None and "Refused." in explorer.output.value
    explorer.controls["grouping"].value = "auto"
    assert explorer.view.choice == replace(explorer.view.choice, model="tiny-nemotron-h", fault="A1")
    data, metadata = explorer._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "image/svg+xml"} <= set(data)
    assert metadata["decodebench"]["role"] == "chart" and len(metadata["decodebench"]["alt"]) > 40


def test_no_choice_is_the_value_that_ipywidgets_take_for_nothing_chosen():
    explorer = explore("tiny-nemotron-h", fault="A1")
    for name in ("fault", "block_size"):
        control = explorer.controls[name]
        assert None not in [value for _, value in control.options]
        control.value = control.options[0][1]
        assert control.index == 0 and getattr(explorer.view.choice, name) is None


def test_a_model_whose_smallest_request_is_larger_than_the_pool_gets_a_larger_pool():
    view = look(Choice(model="whisper-large-v3", blocks=40))
    assert view.choice.blocks > 40 and view.trial.audit.ok
