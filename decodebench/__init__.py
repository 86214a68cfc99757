"""decodebench: is the KV cache that a decode benchmark reads the one it believes it filled?

    import decodebench as db
    layout = db.plan("jamba-v0.1", memory="8GiB")

Names are imported on first use, so that planning a layout loads neither torch nor pandas.
"""

from importlib import import_module

from decodebench._version import __version__ as __version__
from decodebench.errors import MissingExtra

#: public name → the file it lives in, under this package; for a module: its room
_HOME = {
    "DecodebenchError": "errors",
    "load_model": "models.load",
    "list_models": "models.load",
    "CacheOptions": "models.options",
    "plan": "layout.plan",
    "compare": "layout.compare",
    "machine": "forecast.machines",
    "list_machines": "forecast.machines",
    "bound": "forecast.bound",
    "judge": "forecast.judge",
    "judge_all": "forecast.judge",
    "predict": "forecast.predict",
    "Request": "layout.pool",
    "KVCacheManager": "layout.pool",
    "admit": "layout.pool",
    "allocate": "cache.tensors",
    "Constant": "cache.values",
    "Normal": "cache.values",
    "Zeros": "cache.values",
    "fill_cache": "cache.run",
    "FAULTS": "cache.faults",
    "audit": "coverage.from_bytes",
    "measure_decode": "measure.latency",
    "read_traffic": "forecast.traces",
    "list_traces": "forecast.traces",
    "synthetic_traffic": "forecast.traffic",
    "simulate": "forecast.simulate",
    "compare_simulations": "forecast.simulate",
    "step_floor": "forecast.step_costs",
    "recommend": "forecast.recommend",
    "plot": "show.plot",
    "sweep": "study",
    "report": "show",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str):
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'decodebench' has no attribute {name!r}")
    try:
        if home in ("study", "show"):
            return import_module(f"decodebench.{home}.{name}")
        return getattr(import_module(f"decodebench.{home}"), name)
    except ModuleNotFoundError as error:
        raise MissingExtra.of(error, f"decodebench.{name}") or error from None


def __dir__() -> list[str]:
    return __all__
