import gzip
import json
import sys

KEEP = (
    "class",
    "block_size",
    "page_size_bytes",
    "page_size_padded",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "sliding_window",
    "attention_chunk_size",
    "tokens_per_state",
    "state_content_bytes",
    "shapes",
    "dtypes",
    "mamba_type",
    "mamba_cache_mode",
    "num_speculative_blocks",
    "num_prefill_checkpoint_blocks",
    "dcp_sharded",
)
DROP = (
    "vision_config",
    "audio_config",
    "encoder_config",
    "id2label",
    "label2id",
    "task_specific_params",
    "generation_config",
)


def runs(names, order):
    return [order.index(n) for n in names]


def main():
    out = []
    for path in sys.argv[2:]:
        for l in open(path):
            d = json.loads(l)
            name = d.get("architecture") or d["name"]
            if "error" in d:
                out.append(
                    {
                        "name": name,
                        "model_type": d.get("model_type") or d["config"]["model_type"],
                        "engine": d["error"].split("\n")[0][:160],
                    }
                )
                continue
            cfg = {k: v for k, v in d["config"].items() if k not in DROP}
            e = {
                "name": name,
                "model_type": d.get("model_type") or d["config"]["model_type"],
                "config": cfg,
                "layers": d["layers"],
                "shared": d["shared"],
                "max_model_len": d["max_model_len"],
                "block_size": d["block_size"],
                "specs": [[{k: s[k] for k in KEEP if k in s}, runs(n, d["layers"])] for s, n in d["specs"]],
            }
            if d.get("groups") and d.get("layout"):
                e |= {
                    "layout": d["layout"],
                    "groups": [[runs(g[0], d["layers"]), g[1], g[2]] for g in d["groups"]],
                }
            out.append(e)
    text = "\n".join(json.dumps(e, separators=(",", ":")) for e in out).encode()
    open(sys.argv[1], "wb").write(gzip.compress(text, 9, mtime=0))
    print(len(out), len(text))


if __name__ == "__main__":
    main()
