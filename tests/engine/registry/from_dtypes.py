"""Every --kv-cache-dtype on small models of every kind: what the engine lays out on this CARD, or why it refuses.

CARD=h100 python from_dtypes.py OUT.jsonl
"""

from typing import get_args

from ask import *
from drafts import GEMMA, LLAMA, OSS, QWEN_35, QWEN_NEXT, V3, V32
from vllm.config.cache import CacheDType

MODELS = {
    "llama": LLAMA | {"num_hidden_layers": 6, "head_dim": 128},
    "llama 64": LLAMA,
    "gemma3": GEMMA,
    "gpt-oss": OSS,
    "qwen3.5": QWEN_35,
    "qwen3-next": QWEN_NEXT,
    "deepseek-v3": V3,
    "deepseek-v3.2": V32,
}

if __name__ == "__main__":
    out, only = sys.argv[1], sys.argv[2:]
    done = {json.loads(l)["name"] for l in open(out)} if os.path.exists(out) else set()
    for model, config in MODELS.items():
        for dtype in get_args(CacheDType):
            name = f"{model}, {dtype}, {CARD}"
            if name in done or (only and dtype not in only):
                continue
            entry = {"name": name, "config": config, "kv_cache_dtype": dtype, "card": CARD}
            entry |= apart(lambda: ask(json.loads(json.dumps(config)), kv_cache_dtype=dtype))
            with open(out, "a") as f:
                f.write(json.dumps(entry) + "\n")
            print(name, entry.get("error", "ok")[:200], flush=True)
