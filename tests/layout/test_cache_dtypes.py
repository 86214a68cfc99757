"""Every --kv-cache-dtype of vLLM 0.32: laid out as its own code does on two cards, or refused where it refuses.

Left out of the goldens: models so small that TurboQuant keeps all their layers plain, and kernels that the
machine that made them lacked (NVFP4 on a B200, sparse fp8 of FlashInfer).
"""

import gzip
import json
from pathlib import Path

import pytest

from decodebench.errors import DecodebenchError
from decodebench.layout.plan import layout_for, plan, prepare
from decodebench.models.options import KV_CACHE_DTYPES

FILE = Path(__file__).parents[1] / "goldens" / "cache-dtypes.jsonl.gz"
ENTRIES = [json.loads(line) for line in gzip.decompress(FILE.read_bytes()).decode().splitlines()]
DENSE = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
DENSE |= {"hidden_size": 4096, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry["name"] for entry in ENTRIES])
def test_equal_to_vllm(entry):
    asked = {"kv_cache_dtype": entry["kv_cache_dtype"], "device": entry["card"], "engine": "vllm-0.32"}
    if "refused" in entry:
        with pytest.raises(DecodebenchError) as refused:
            prepare(entry["config"], **asked)
        assert "\n" not in str(refused.value) and entry["kv_cache_dtype"] in str(refused.value)
        return
    grouped = prepare(entry["config"], **asked, max_num_batched_tokens=entry["batched"])
    names = entry["layers"]
    assert [
        [list(g.layer_names), g.block_size, g.bytes_per_block if g.mixed else g.kv_cache_spec.page_size_bytes]
        for g in grouped.groups
    ] == [[[names[i] for i in ids], block, page] for ids, block, page in entry["groups"]]
    if "num_blocks" in entry["memory"]:
        assert layout_for(grouped, 2**30).num_blocks == entry["memory"]["num_blocks"]


@pytest.mark.parametrize(
    ("dtype", "slot"),
    [
        ("turboquant_k8v4", 128 + 64 + 4),
        ("turboquant_4bit_nc", 64 + 2 + 64 + 4),
        ("turboquant_k3v4_nc", 48 + 2 + 64 + 4),
        ("turboquant_3bit_nc", 48 + 2 + 48 + 4),
    ],
)
def test_two_layers_at_each_end_stay_plain(dtype, slot):
    (group,) = prepare(DENSE, kv_cache_dtype=dtype).groups
    pages = [spec.page_size_bytes // group.block_size // 8 for spec in group.layer_specs]
    assert pages == [512] * 2 + [slot] * 28 + [512] * 2


def test_bytes_that_no_golden_holds():
    """From vLLM's source: UltraQuant runs on AMD cards alone, NVFP4's second search of scales on a B200."""
    (group,) = prepare(DENSE, kv_cache_dtype="ultraquant_4bit", device="mi300").groups
    assert group.block_size == 64 and group.layer_specs[2].entry_bytes == 136
    two = [plan(DENSE, "1GiB", kv_cache_dtype=d, device="b200").num_blocks for d in ("nvfp4", "nvfp4_4over6")]
    assert two[0] == two[1]


def test_every_dtype_of_the_release_is_known():
    for_all = {entry["kv_cache_dtype"] for entry in ENTRIES}
    assert for_all <= set(KV_CACHE_DTYPES) and len(KV_CACHE_DTYPES) == 19
