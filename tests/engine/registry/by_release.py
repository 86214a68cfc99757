"""Where other releases lay models out otherwise than 0.32: their own entries, for goldens/registry-releases.

python by_release.py OUT FOLDER: every KIND-RELEASE.jsonl of a folder (models-33.jsonl), against KIND-32.jsonl.
"""

import gzip
import json
import sys
from pathlib import Path

from pack import DROP, KEEP, runs


def packed(line):
    """What is compared of one answer; None where the release could not be asked."""
    d = json.loads(line)
    if "error" in d:
        return None
    options = dict(d.get("options") or {})
    drafted = options.pop("speculative_config", None)
    if drafted:
        options["num_speculative_tokens"] = drafted["num_speculative_tokens"]
    return {
        "name": d.get("architecture") or d["name"],
        "config": {k: v for k, v in d["config"].items() if k not in DROP},
        "options": options | {"max_num_batched_tokens": d["batched"]},
        "layers": d["layers"],
        "specs": [[{k: s[k] for k in KEEP if k in s}, runs(n, d["layers"])] for s, n in d["specs"]],
        "groups": [[runs(g[0], d["layers"]), g[1], g[2]] for g in d.get("groups", [])],
    }


def answers(path):
    found = [packed(line) for line in path.read_text().splitlines()]
    return {entry["name"]: entry for entry in found if entry}


if __name__ == "__main__":
    out, folder = Path(sys.argv[1]), Path(sys.argv[2])
    lines, asked = [], {}
    for path in sorted(folder.glob("*-*.jsonl")):
        kind, release = path.stem.split("-")
        base = folder / f"{kind}-32.jsonl"
        if release == "32" or not base.exists():
            continue
        before, after = answers(base), answers(path)
        shared = [name for name in after if name in before]
        asked[release] = asked.get(release, 0) + len(shared)
        lines += [
            after[name] | {"release": f"vllm-0.{release}"} for name in shared if after[name] != before[name]
        ]
    print(asked, len(lines))
    out.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode(), 9, mtime=0))
