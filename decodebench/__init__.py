"""decodebench: is the KV cache that a decode benchmark reads the one it believes it filled?

    import decodebench as db
    layout = db.plan("jamba-v0.1", memory="8GiB")

Names are imported on first use, so that planning a layout loads neither torch nor pandas.
"""

from importlib import import_module

__version__ = "0.1.0"

#: public name → the room it lives in
_ROOM_OF = {
    "DecodebenchError": "specs",
    "load_model": "models",
    "list_models": "models",
    "plan": "layout",
    "compare": "layout",
    "Request": "blocks",
    "KVCacheManager": "blocks",
    "admit": "blocks",
    "allocate": "cache",
    "Constant": "fill",
    "Normal": "fill",
    "Zeros": "fill",
    "fill_cache": "connector",
    "FAULTS": "faults",
    "audit": "coverage",
    "measure_decode": "decode",
    "sweep": "sweep",
    "plots": "plots",
    "report": "report",
}

__all__ = sorted(_ROOM_OF)


def __getattr__(name: str):
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module 'decodebench' has no attribute {name!r}")
    module = import_module(f"decodebench.{room}")
    return module if name == room else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
