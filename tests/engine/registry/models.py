"""The models known by name, each also under options that change what its layers keep."""

import json
from pathlib import Path

MODELS = Path(__file__).parents[3] / "data" / "models"
#: name → vLLM's arguments
UNDER: dict[str, dict] = {
    "": {},
    ", fp8": {"kv_cache_dtype": "fp8"},
    ", no prefix caching": {"enable_prefix_caching": False},
    ", two ranks": {"tensor_parallel_size": 2},
    ", two speculative tokens": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4}
    },
}
KNOWN = {
    file.parent.name: {"torch_dtype": "bfloat16"} | json.loads(file.read_text())
    for file in sorted(MODELS.glob("*/config.json"))
}
CONFIGS = {name + words: config for name, config in KNOWN.items() for words in UNDER}
OPTIONS = {name + words: options for name in KNOWN for words, options in UNDER.items()}
