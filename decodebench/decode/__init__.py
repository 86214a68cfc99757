"""One decode step over a grouped cache, and what it costs next to what the memory allows.

A step, per layer: store the new token's keys and values at its slot (or advance the state) and
attend over the block table. Attention and state work only: weights, projections, norms and
sampling are not in it, and neither are building block tables and filling (``prepare_step`` is
outside the clock). Semantics: ``kernels/reference.py``; speed: the other backends.

Under decode context parallelism a step is that of the rank that holds the new token: it reads
``ceil(n / dcp)`` tokens of a sharded layer.
"""

from decodebench.decode.measure import DecodeMeasurement, holds_fill, limit_seconds, measure_decode
from decodebench.decode.step import (
    BACKENDS,
    DecodeStep,
    LayerStep,
    compare_with_reference,
    prepare_step,
    resolve_backend,
)
from decodebench.decode.study import first_layers, latency_table, small_cache
from decodebench.decode.work import DecodeError, LayerWork, decode_bytes, decode_work, layer_kind, visible

__all__ = [
    "BACKENDS",
    "DecodeError",
    "DecodeMeasurement",
    "DecodeStep",
    "LayerStep",
    "LayerWork",
    "compare_with_reference",
    "decode_bytes",
    "decode_work",
    "first_layers",
    "holds_fill",
    "latency_table",
    "layer_kind",
    "limit_seconds",
    "measure_decode",
    "prepare_step",
    "resolve_backend",
    "small_cache",
    "visible",
]
