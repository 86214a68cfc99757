"""Parameter → shape of vLLM's own model of each config of configs.py, and of the registry's golden.

    python count.py counts.jsonl [NAME ...]

The models are built on the meta device under the rules of a card, as ``ask.py`` does it. The lines of
``tests/goldens/weights.jsonl.gz`` whose families transformers has no class for, or that a CPU build cannot build,
hold the sums of these shapes; of multimodal models those of the language model alone.
"""

import gzip
import importlib.util
from pathlib import Path

import xgrammar  # noqa: F401 - it asks for packages that card.py lets stand in, so it comes first
from ask import *

HERE = Path(__file__).parent


def without_running(name):
    """configs.py, whose names alone are wanted."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Block(dict):
    __getattr__ = dict.get


def blocks(self, **fields):
    fields.setdefault("hidden_act", "silu")
    given = fields.pop("block_configs", [])
    self.block_configs = [Block({name: Block(part) for name, part in block.items()}) for block in given]
    PreTrainedConfig.__init__(self, **fields)


def register(kind):
    """A config class for a model_type that neither transformers nor vLLM has one for."""
    if not kind or kind in tc._CONFIG_REGISTRY or kind in configuration_auto.CONFIG_MAPPING:
        return
    renamed = {
        "exaone": {"num_hidden_layers": "num_layers"},
        "telechat": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    }
    facts = {"model_type": kind, "attribute_map": renamed.get(kind, {})}
    tc._CONFIG_REGISTRY[kind] = type("AnyConfig", (PreTrainedConfig,), facts)
    if kind == "nemotron-nas":
        tc._CONFIG_REGISTRY[kind].__init__ = blocks


def main(out, *names):
    manual = without_running("configs")
    golden = gzip.open(HERE.parents[1] / "goldens" / "registry.jsonl.gz", "rt")
    lines = [json.loads(line) for line in golden]
    configs = {line["name"]: line["config"] for line in lines if "config" in line} | manual.CONFIGS
    with open(out, "w") as file:
        for name in names or configs:
            config = configs[name]
            register(config["model_type"])
            register((config.get("text_config") or {}).get("model_type"))

            def shapes(name=name, config=config):
                options = getattr(manual, "OPTIONS", {}).get(name, {})
                _, model, *_ = specs(json.loads(json.dumps(config)), **options)
                return {"shapes": {n: list(p.shape) for n, p in model.named_parameters()}}

            found = {"name": name, "config": config} | apart(shapes)
            file.write(json.dumps(found) + "\n")
            print(name, found.get("error", "counted"), flush=True)


if __name__ == "__main__":
    import vllm.transformers_utils.config as tc
    from transformers import PreTrainedConfig

    main(*sys.argv[1:])
