"""The grouped decode-bench connector inside a running vLLM engine, and its audit.

Start an engine, or a server, whose prompts are never computed: their KV cache and states are
filled with values before the first decode step.

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "GroupedDecodeBenchConnector", "kv_connector_module_path": "decodebench.vllm",
      "kv_role": "kv_both", "kv_connector_extra_config": {"mean": 0.015, "audit": "plan"}}'

The same dictionary goes to ``LLM(kv_transfer_config=…)``; ``kv_transfer_config(name, **options)``
writes it. Options (``Options``): ``mean``, ``std``, ``seed``, ``startup_fill``, ``audit``,
``audit_file``, ``strict``.

**Audit.** ``audit="plan"`` compares block ids: pages the first decode step of each request reads
with blocks the fill was given. ``audit="bytes"`` poisons the cache when it is registered, and reads
every required page back after the fill, before the model runs. Both write one JSON line a group and
filling step to ``audit_file``, report totals through vLLM's connector stats (its log lines and
metrics), and are read by

    import decodebench.vllm as dbv
    dbv.audit(llm)                      # a table per group and a verdict; dbv.read_audit(path) for a server

Bytes need values that can be told from each other: an audit with a constant (``std`` 0) cannot see
a value that belongs to another layer. ``AuditedBuiltinConnector`` is vLLM's own connector under the
same audit, to see what it misses.

**Several GPUs.** Tensor, pipeline, data and context parallelism are vLLM's own. Every worker fills
and audits its own shard; the audit's lines carry the rank.

**Versions.** ``compat.TESTED``: 0.30.0 to 0.33.0, on CPUs. Others start with a self-test of the
protocol and a warning, or not at all with ``strict``; unknown options are refused with the list of
known ones.
"""

from importlib import import_module

#: public name → module of this package; vLLM is imported with the first name that needs it
_MODULE_OF = {
    "GroupedDecodeBenchConnector": "connector",
    "AuditedBuiltinConnector": "builtin",
    "Options": "options",
    "TESTED": "compat",
    "audit": "audit_files",
    "read_audit": "audit_files",
    "audit_steps": "audit_files",
    "audit_file_of": "audit_files",
    "engine": "launch",
    "TINY": "launch",
    "kernel_blocks": "launch",
    "kv_transfer_config": "launch",
    "generate": "launch",
    "prompts": "launch",
    "layout_of": "translate",
    "layout_of_engine": "translate",
    "measure_decode": "measure",
    "summary": "measure",
    "read_study": "real_engine",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'decodebench.vllm' has no attribute {name!r}")
    return getattr(import_module(f"decodebench.vllm.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
