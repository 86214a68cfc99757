"""Other checkpoints, random sizes and option combinations of the families, against what vLLM 0.32 computed.

Made as the golden layouts were (see goldens/README.md), by running vLLM's own code on a CPU build: other
sizes of the same families, tensor and context parallelism, speculative tokens, fp8 e5m2, float16,
block-outermost memory, multimodal configs. Refusals included.
"""

import json

import pytest
from stored_layouts import variant_options, variants

from decodebench.errors import DecodebenchError
from decodebench.layout import dump
from decodebench.layout.placement import LayoutRefused
from decodebench.layout.plan import layout_for, prepare

#: what the dump does not have, or has under another name
NOT_DUMPED = {
    "class",
    "prefix_cacheable",
    "kv_quant_mode",
    "mode",
    "cache_dtype_str",
    "cache_role",
    "tokens_per_state",
    "alignment",
    "extra_retained_tokens",
    "unpadded_page_size_bytes",
}


def comparable(spec: dict) -> dict:
    return {name: value for name, value in spec.items() if name not in NOT_DUMPED} | {"class": spec["class"]}


def specs_of(spec) -> list:
    """The specs of a group with their layers; None where all layers have one."""
    if isinstance(spec, list):
        return [(comparable(inner), layers) for inner, layers in spec]
    if "layers_by_spec" in spec:
        return [(comparable(part["spec"]), part["layers"]) for part in spec["layers_by_spec"]]
    return [(comparable(spec), None)]


@pytest.mark.parametrize("variant", variants(), ids=[f"{i}-{v['name']}" for i, v in enumerate(variants())])
def test_variant(variant):
    if "refused" in variant:
        with pytest.raises(DecodebenchError):
            prepare(variant["config"], **variant_options(variant))
        return
    grouped = prepare(variant["config"], **variant_options(variant))
    assert list(grouped.model.layer_names) == variant["layers"]
    assert dict(grouped.model.shared_layers) == variant["shared"]
    assert grouped.max_model_len == variant["max_model_len"]
    ours = json.loads(json.dumps(dump.case({}, grouped)))
    assert ours["resolved"] == variant["resolved"]
    assert ours["bytes_per_block"] == variant["bytes_per_block"]
    assert [group["layers"] for group in ours["groups"]] == [group["layers"] for group in variant["groups"]]
    for mine, theirs in zip(ours["groups"], variant["groups"]):
        assert specs_of(mine["spec"]) == specs_of(theirs["spec"])
        assert (mine["block_size"], mine["page_size_bytes"]) == (
            theirs["block_size"],
            theirs["page_size_bytes"],
        )
        assert mine["blocks_per_request"] == theirs["blocks"]
    for budget, memory in variant["memory"].items():
        if "refused" in memory:
            with pytest.raises(LayoutRefused) as refusal:
                layout_for(grouped, int(budget))
            assert refusal.value.max_model_len == memory["refused"]
        else:
            assert json.loads(json.dumps(dump.memory_dict(layout_for(grouped, int(budget))))) == memory
