"""A model and its drafter, both built on the meta device in one engine: specs and groups of both together.

python from_drafts.py OUT.jsonl [name ...]
"""

from ask import *
from drafts import DRAFTS
from vllm.config import replace as overlaid


def folder_of(config):
    folder = tempfile.mkdtemp(prefix="draft-")
    with open(folder + "/config.json", "w") as f:
        json.dump(config, f)
    return folder


def both(config, speculative, draft, **options):
    """What ``card.specs`` gives, with the drafter's layers behind the model's."""
    speculative = dict(speculative)
    if speculative["method"] == "extract_hidden_states":
        speculative["draft_model_config"] = {"hf_config": draft}
    elif draft is not None:
        speculative["model"] = folder_of(draft)
    vc = engine_config(config, speculative_config=speculative, **options)
    spec = vc.speculative_config
    with set_current_vllm_config(vc):
        parallel(1)
        from vllm.v1.worker import workspace

        workspace._manager = MagicMock()
        with set_default_torch_dtype(vc.model_config.dtype), torch.device("meta"), Meta():
            model = initialize_model(vc)
            drafting = spec.apply_draft_overrides(vc) if hasattr(spec, "apply_draft_overrides") else vc
            if spec.method == "draft_model":
                drafting = overlaid(vc, model_config=spec.draft_model_config, quant_config=None)
                initialize_model(drafting, prefix="draft_model")
            else:
                initialize_model(drafting, model_config=spec.draft_model_config)
    Card.update_block_size_for_backend(vc)
    with set_current_vllm_config(vc):
        found = get_kv_cache_spec(vc)
        shared = get_shared_kv_cache_layers(vc)
    return vc, model, found, shared


if __name__ == "__main__":
    import ask as asking

    out, only = sys.argv[1], sys.argv[2:]
    done = {json.loads(l)["name"] for l in open(out)} if os.path.exists(out) else set()
    for name, (config, speculative, draft) in DRAFTS.items():
        if name in done or (only and name not in only):
            continue
        register(config["model_type"])

        def task():
            asking.specs = lambda c, **o: both(c, speculative, draft, **o)
            r = asking.ask(json.loads(json.dumps(config)))
            return r | {"tokens": speculative.get("num_speculative_tokens")}

        entry = {"name": name, "config": config, "speculative": speculative, "draft": draft} | apart(task)
        with open(out, "a") as f:
            f.write(json.dumps(entry) + "\n")
        told = entry.get("error", "")[:300] + str(entry.get("where", "")) if "error" in entry else "ok"
        print(name, told, len(entry.get("layers", ())), flush=True)
