"""What from_drafts.py and from_stages.py found, packed: ``python pack_plans.py IN.jsonl OUT.jsonl.gz``."""

import gzip
import json
import sys


def packed(entry):
    """Without what no test compares: names as numbers, memory as plain figures."""
    names = entry.get("layers") or [name for stage in entry["stages"] for name in stage]
    (memory,) = entry["memory"].values() if "groups" in entry else [entry["memory"]]
    memory = dict(memory)
    ranks = memory.pop("ranks", [])
    found = {
        name: entry[name]
        for name in ("name", "config", "speculative", "draft", "size", "budgets", "batched", "in_flight")
        if name in entry
    }
    found |= {"layers": names, "memory": memory}
    if "groups" in entry:
        found["groups"] = [[[names.index(n) for n in g[0]], g[1], g[2]] for g in entry["groups"]]
    else:
        found["ranks"] = [[[names.index(n) for n in group] for group in rank] for rank in ranks]
    return found


entries = [json.loads(line) for line in open(sys.argv[1])]
lines = [json.dumps(packed(e), separators=(",", ":")) for e in entries if "error" not in e]
with open(sys.argv[2], "wb") as out:
    out.write(gzip.compress("\n".join(lines).encode(), 9, mtime=0))
print(len(lines), "packed;", [(e["name"], e["error"][:80]) for e in entries if "error" in e])
