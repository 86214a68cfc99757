"""The parameters that our formulas count are those of vLLM's own models, built here on the meta device."""

from math import prod

import pytest
import weights_witness as witness

from decodebench.forecast.weights import parameters

GOLDEN = {line["name"]: line for line in witness.read_golden()}
#: one of each kind of mixer and of feed-forward block; the golden holds all families
KINDS = [
    "mixtral",
    "llama",
    "qwen3",
    "gemma2",
    "gemma4_text+moe+shared",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "longcat_flash",
    "minicpm3",
    "jamba",
    "mamba",
    "mamba2",
    "nemotron_h+latent",
    "granitemoehybrid",
    "zamba2+adapters",
    "falcon_h1",
    "qwen3_next",
    "olmo_hybrid",
    "lfm2_moe",
    "whisper",
    "opt+350m",
    "falcon+new",
]


@pytest.fixture(scope="module", autouse=True)
def built_on_a_cpu():
    """Stand-ins for what only GPUs have, and the process groups that models ask for, for this file alone."""
    from vllm.distributed import cleanup_dist_env_and_memory

    with pytest.MonkeyPatch.context() as patch:
        witness.prepare_vllm(patch.setattr)
        yield
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize("name", KINDS)
def test_vllm_holds_what_we_count(name):
    line = GOLDEN[name]
    shapes = witness.vllm_shapes(line["config"])
    total, padded = sum(map(prod, shapes.values())), witness.padding(shapes, line["config"]["vocab_size"])
    assert (total, padded) == (line["parameters"], line["padding"]), "the golden is vLLM's"
    assert sum(parameters(line["config"]).values()) == total - padded
