import time

from ask import *
from vllm.model_executor.models.registry import _VLLM_MODELS

out = sys.argv[1]
only = sys.argv[2:]
done = set()
if os.path.exists(out):
    done = {json.loads(l)["architecture"] for l in open(out)}
known = architectures()
archs = [a for a in _VLLM_MODELS if a in known]
print(len(_VLLM_MODELS), "in registry,", len(archs), "with transformers config")
print("without:", [a for a in _VLLM_MODELS if a not in known])
for a in archs:
    if a in done or (only and a not in only):
        continue
    t = time.time()

    def task():
        config = default_config(known[a], a)
        for k in ("torch_dtype", "dtype"):
            config.pop(k, None)
        config["torch_dtype"] = "bfloat16"
        try:
            res = ask(config)
        except BaseException as e:
            tb = traceback.extract_tb(e.__traceback__)
            res = {
                "error": f"{type(e).__name__}: {e}"[:1500],
                "where": [f"{f.filename.split('site-packages/')[-1]}:{f.lineno}" for f in tb][-3:],
            }
        return {"config": config} | res

    res = {"architecture": a, "model_type": known[a]} | apart(task)
    with open(out, "a") as f:
        f.write(json.dumps(res) + "\n")
    print(
        a,
        known[a],
        "ERR " + res["error"][:160] if "error" in res else f"ok {len(res['layers'])}",
        round(time.time() - t, 1),
        flush=True,
    )
