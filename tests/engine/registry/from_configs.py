import importlib.util

from ask import *

path, out = sys.argv[1], sys.argv[2]
spec = importlib.util.spec_from_file_location("manual", path)
manual = importlib.util.module_from_spec(spec)
spec.loader.exec_module(manual)


known = {}
only = sys.argv[3:]
old = [json.loads(l) for l in open(out)] if os.path.exists(out) else []
keep = {d["name"]: d for d in old if "error" not in d}
results = []
for name, config in manual.CONFIGS.items():
    options = dict(getattr(manual, "OPTIONS", {}).get(name, {}))
    if name in keep and (name not in only) and keep[name]["config"] == json.loads(json.dumps(config)):
        results.append(keep[name])
        continue
    register(config["model_type"])
    for k in ("text_config",):
        if isinstance(config.get(k), dict):
            register(config[k].get("model_type"))

    def task():
        try:
            r = ask(json.loads(json.dumps(config)), **options)
        except BaseException as e:
            tb = traceback.extract_tb(e.__traceback__)
            r = {
                "error": f"{type(e).__name__}: {e}"[:1500],
                "where": [f"{f.filename.split('site-packages/')[-1]}:{f.lineno}" for f in tb][-3:],
            }
        return r

    r = {"name": name, "config": config, "options": dict(options)} | apart(task)
    results.append(r)
    print(
        name,
        ("ERR " + r["error"][:250].replace("\n", " ") + str(r.get("where")))
        if "error" in r
        else f"ok {len(r['layers'])} {r['block_size']}",
        flush=True,
    )
with open(out, "w") as f:
    f.writelines(json.dumps(r) + "\n" for r in results)
