"""The tensors that one layer of each kind holds, counted: attention, latent attention, states, MLPs, experts.

Every function returns counts of *parameters* (numbers, whatever their dtype) of the whole model, as a
list of ``Part``. What ``models`` knows of a layer (heads, sizes, states) is taken from there; only what
a cache does not need (projections' ranks, inner sizes, biases) is read from config.json here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from decodebench.models.fields import Fields
from decodebench.models.layers import AttentionLayer, IndexerLayer, LatentLayer, StateLayer

#: what a tensor does in a step; the order in which parts are shown
ROLES = (
    "embedding",
    "attention",
    "latent",
    "mixer",
    "mlp",
    "experts",
    "shared_experts",
    "router",
    "norm",
    "head",
    "encoder",
)


@dataclass(frozen=True)
class Part:
    """Tensors of one role: ``params`` numbers in all, in ``layers`` layers.

    ``experts``: how many alike the numbers are divided into, of which every token uses ``top_k``.
    ``shards``: the most ranks that tensor parallelism can divide the tensors between; None for any
    number, 1 where every rank holds all of them. ``rows``: of a table, of which a token reads one.
    ``uses``: how often a step multiplies with the same tensors.
    """

    role: str
    params: int
    layers: int = 1
    experts: int = 1
    top_k: int = 1
    shards: int | None = None
    rows: int | None = None
    uses: float = 1.0

    def per_rank(self, ranks: int) -> float:
        """Parameters on one of ``ranks`` tensor parallel ranks."""
        return self.params / (ranks if self.shards is None else min(ranks, self.shards))

    def times(self, layers: int) -> Part:
        """The same tensors in ``layers`` layers instead of one."""
        return replace(self, params=self.params * layers, layers=self.layers * layers)


def linear(inputs: int, outputs: int, bias: bool = False) -> int:
    """Parameters of a linear map."""
    return inputs * outputs + (outputs if bias else 0)


@dataclass(frozen=True)
class Attending:
    """What a family's attention has beside its four projections.

    ``query_key_norm``: a norm of queries and keys, over one ``head``, over all heads (``heads``) or over
    each head with weights of its own (``each``). ``gate``: an output gate as wide as the queries
    (``full``) or of one number a head (``head``). ``sinks``: one learned logit a head, for all layers or
    for those with a ``window``.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    query_key_norm: str | None = None
    norm_bias: bool = False
    gate: str | None = None
    sinks: str | None = None
    #: keys serve as values: no value projection
    shared_values: bool = False
    #: keys and values are those of an earlier layer
    queries_only: bool = False


def attention(layer: AttentionLayer, width: int, has: Attending) -> list[Part]:
    """Projections of queries, keys and values, and back to ``width``."""
    size, size_v = layer.head_size, layer.head_size if layer.head_size_v is None else layer.head_size_v
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    queries = linear(width, heads * size, has.qkv_bias) + linear(heads * size_v, width, has.out_bias)
    keys = linear(width, kv_heads * size, has.qkv_bias)
    values = 0 if has.shared_values else linear(width, kv_heads * size_v, has.qkv_bias)
    if has.gate is not None:
        queries += width * heads * (size if has.gate == "full" else 1)
    if has.sinks == "all" or (has.sinks == "window" and layer.sliding_window):
        queries += heads
    parts = [Part("attention", queries)]
    if not has.queries_only:
        parts.append(Part("attention", keys + values, shards=kv_heads))
    if has.query_key_norm == "head":
        norm = size if has.queries_only else 2 * size
    elif has.query_key_norm in ("heads", "each"):
        norm = (heads + kv_heads) * size
    else:
        norm = 0
    if norm:
        parts.append(Part("norm", norm * (2 if has.norm_bias else 1), shards=1))
    return parts


def latent(layer: LatentLayer, width: int, f: Fields) -> list[Part]:
    """Down and up projections of multi-head latent attention, its two norms and its way out.

    The projection down is on every rank, the others are divided by heads. Decode kernels use the key
    and value halves of ``kv_b_proj`` as they are, on the side of the queries and of the output.
    """
    nope, value = f.integer("qk_nope_head_dim"), f.integer("v_head_dim")
    heads, rank, rope = layer.num_heads, layer.kv_lora_rank, layer.qk_rope_head_dim
    query_rank = f.optional("q_lora_rank", least=0) or 0
    down = width * (query_rank + rank + rope)
    up = (query_rank or width) * heads * (nope + rope) + rank * heads * (nope + value)
    return [
        Part("latent", down, shards=1),
        Part("latent", up + heads * value * width),
        Part("norm", query_rank + rank, shards=1),
    ]


def indexer(layer: IndexerLayer, width: int, f: Fields) -> list[Part]:
    """The small attention that chooses which tokens sparse attention reads; whole on every rank."""
    queries = f.integer("q_lora_rank") * layer.num_heads * layer.head_dim
    keys = width * layer.head_dim
    return [
        Part("latent", queries + keys + width * layer.num_heads, shards=1),
        Part("norm", 2 * layer.head_dim, shards=1),
    ]


def mlp(width: int, inner: int, matrices: int = 3, bias: bool = False, role: str = "mlp") -> Part:
    """A feed-forward block: ``matrices`` = 3 with a gate, 2 without."""
    biases = (matrices - 1) * inner + width if bias else 0
    return Part(role, matrices * width * inner + biases)


def mamba1(layer: StateLayer, width: int, rank: int, conv_bias: bool, bias: bool, inner_norms: bool) -> Part:
    """Mamba-1: in, convolution, (dt, B, C), dt, A, D, out."""
    channels, state = layer.channels, layer.state_size
    count = linear(width, 2 * channels, bias) + linear(channels, width, bias)
    count += channels * (layer.conv_width + conv_bias) + channels * (rank + 2 * state)
    count += linear(rank, channels, True) + channels * state + channels
    return Part("mixer", count + (rank + 2 * state if inner_norms else 0))


def mamba2(layer: StateLayer, width: int, conv_bias: bool, bias: bool, norm: bool) -> list[Part]:
    """Mamba-2: in (gate, x, B, C, dt), convolution, A, D, dt's bias, norm, out."""
    inner, groups = layer.num_heads * layer.head_dim, 2 * layer.num_groups * layer.state_size
    taps = layer.conv_width + conv_bias
    count = linear(width, 2 * inner + layer.num_heads, bias) + linear(inner, width, bias)
    count += inner * taps + 3 * layer.num_heads + (inner if norm else 0)
    shared = linear(width, groups, bias) + groups * taps
    return [Part("mixer", count), Part("mixer", shared, shards=layer.num_groups)]


def delta_net(layer: StateLayer, width: int) -> Part:
    """Gated delta net: queries, keys, values, gate; two numbers a head; convolution, A, dt's bias, norm, out."""
    keys, values = layer.num_key_heads * layer.state_size, layer.num_heads * layer.head_dim
    count = width * (2 * keys + 2 * values + 2 * layer.num_heads) + values * width
    return Part(
        "mixer", count + (2 * keys + values) * layer.conv_width + 2 * layer.num_heads + layer.head_dim
    )


def kimi_delta(layer: StateLayer, width: int) -> list[Part]:
    """Kimi delta attention: three projections with a convolution each, two low-rank gates, beta, A, norm, out."""
    inner, size = layer.num_heads * layer.head_dim, layer.head_dim
    count = 4 * width * inner + 3 * inner * layer.conv_width + 2 * size * inner
    count += width * layer.num_heads + layer.num_heads + inner + size
    return [Part("mixer", count), Part("mixer", 2 * width * size, shards=1)]


def short_conv(layer: StateLayer, width: int, bias: bool) -> Part:
    """Gated short convolution: in (three times as wide), convolution, out."""
    channels = layer.channels
    count = linear(width, 3 * channels, bias) + linear(channels, width, bias)
    return Part("mixer", count + channels * (layer.conv_width + bias))
