"""Readers of models that only attend: full, windows, chunks, shared caches, encoder and decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from decodebench.models.fields import Fields
from decodebench.models.layers import AttentionLayer, Layer

FULL = {"full_attention", "attention", "global_attention"}
SLIDING = {"sliding_attention"}
CHUNKED = {"chunked_attention"}
KINDS = FULL | SLIDING | CHUNKED

#: says which layers have a window where the config has no ``layer_types``
Types = Callable[[Fields, int], list[str] | None]


#: spellings of the number of KV heads, in the order in which vLLM looks for them
KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)


def heads(f: Fields, *spellings: str) -> tuple[int, int, int]:
    """Query heads, KV heads and head size; ``spellings``: where the KV heads stand, if not in the usual field."""
    count = f.integer("num_attention_heads")
    names = spellings or ("num_key_value_heads",)
    kv_heads = f.integer(*names, default=count)
    if count % kv_heads:
        raise f.wrong(names, kv_heads, f"it does not divide num_attention_heads = {count}")
    size = f.optional("head_dim", least=0) or f.integer("hidden_size") // count
    if size < 1:
        raise f.wrong(("head_dim",), size, "a head has at least one value")
    return count, kv_heads, size


def window(f: Fields, gate: str | None = None) -> int | None:
    """The sliding window in tokens; 0, null and a gate that is off say there is none."""
    if gate is not None and not f.get(gate, default=False):
        f.get("sliding_window")
        return None
    return f.optional("sliding_window", least=0) or None


def every(period: int, *names: str) -> Callable[[Fields, int], list[str]]:
    """Every ``period``-th layer attends to everything, the others to a window; a field may give the period."""

    def types(f: Fields, length: int) -> list[str]:
        given = f.get(*names) if names else None
        n = (
            len(given)
            if isinstance(given, str)
            else f.integer(*names, default=period, least=0)
            if names
            else period
        )
        if n == 0 or window(f) is None:
            return ["full_attention"] * length
        return ["sliding_attention" if (i + 1) % n else "full_attention" for i in range(length)]

    return types


def first_of(period: int) -> Types:
    """The first of every ``period`` layers attends to everything."""
    return lambda f, length: ["sliding_attention" if i % period else "full_attention" for i in range(length)]


def dense_first(f: Fields, length: int) -> list[str]:
    """The first layers, which have no experts, have a pattern of their own (Cohere2 with experts)."""
    first = min(f.integer("first_k_dense_replace", default=0, least=0), length)
    early = f.integer("prefix_dense_sliding_window_pattern", default=1)
    late = f.integer("sliding_window_pattern", default=4)
    periods = [(i + 1) % early for i in range(first)] + [(i + 1) % late for i in range(length - first)]
    return ["sliding_attention" if rest else "full_attention" for rest in periods]


def alternating(f: Fields, length: int) -> list[str]:
    """Even layers have the window, whatever ``layer_types`` says (gpt-oss)."""
    return ["full_attention" if i % 2 else "sliding_attention" for i in range(length)]


def all_or_none(f: Fields, length: int) -> list[str]:
    """A window for all layers or for none: engines refuse Qwen2 and Qwen3 where only some have one."""
    if window(f, "use_sliding_window") is None:
        return ["full_attention"] * length
    given = f.listing("layer_types", length=length, choices=KINDS)
    first = f.integer("max_window_layers", default=length, least=0)
    types = given or ["sliding_attention" if i >= first else "full_attention" for i in range(length)]
    if len(set(types)) > 1 and first != length:
        raise f.wrong(
            ("max_window_layers",),
            first,
            "a window for some of the layers only is not served by vLLM: set use_sliding_window to false",
        )
    # a mix that is let through is not applied per layer: those layers attend to everything
    return types if len(set(types)) == 1 else ["full_attention"] * length


def everywhere(f: Fields, length: int) -> list[str]:
    """The window, where there is one, holds for every layer."""
    return ["sliding_attention" if window(f) else "full_attention"] * length


def as_a_whole(f: Fields, length: int) -> list[str]:
    """The window holds for every layer, or for none where layers are of
    several types: they are not told apart.
    """
    types = f.get("layer_types")
    if isinstance(types, list) and any(kind not in SLIDING for kind in types):
        return ["full_attention"] * length
    return everywhere(f, length)


def read_attention(
    f: Fields,
    root: str,
    path: str = "self_attn.attn",
    widen: int = 0,
    types: Types = everywhere,
    always: bool = False,
    gate: str | None = None,
) -> list[Layer]:
    """One attention layer per decoder layer; ``layer_types`` says which have the window or the chunks.

    ``types`` says it where ``layer_types`` does not, or ``always``. ``widen``: tokens that the window
    counts more than its field says. ``gate``: the field that switches the window on.
    """
    count, kv_heads, size = heads(f)
    length = f.layer_count()
    span, chunk = window(f, gate), f.optional("attention_chunk_size")
    given = None if always else f.listing("layer_types", length=length, choices=KINDS)
    kinds = given or types(f, length) or ["full_attention"] * length
    layers: list[Layer] = []
    for i, kind in enumerate(kinds):
        if kind in SLIDING and span is None and not f.declares("sliding_window"):
            raise f.missing("sliding_window")
        layers.append(
            AttentionLayer(
                f"{root}.{i}.{path}",
                count,
                kv_heads,
                size,
                sliding_window=span + widen if kind in SLIDING and span else None,
                attention_chunk_size=chunk if kind in CHUNKED else None,
            )
        )
    return layers


def halved_window(f: Fields, kinds: list[str]) -> int | None:
    """Windows to both sides count half on each."""
    span = window(f)
    both = f.get("use_bidirectional_attention")
    return span // 2 + 1 if span and both in (True, "all") else span


def read_gemma3(f: Fields, root: str) -> list[Layer]:
    """Five windows, then one layer that attends to everything."""
    length = f.layer_count()
    kinds: list[str] = f.listing("layer_types", length=length, choices=KINDS) or every(
        6, "sliding_window_pattern", "_sliding_window_pattern"
    )(f, length)
    span = halved_window(f, kinds)
    return [
        AttentionLayer(
            f"{root}.{i}.self_attn.attn", *heads(f), sliding_window=span if kind in SLIDING else None
        )
        for i, kind in enumerate(kinds)
    ]


def read_gemma3n(f: Fields, root: str) -> tuple[list[Layer], dict[str, str]]:
    """The last ``num_kv_shared_layers`` layers read the cache of the last layer of their kind before them."""
    length = f.layer_count()
    kinds: list[str] = f.listing("layer_types", length=length, choices=KINDS) or every(5)(f, length)
    return with_shared(f, root, kinds, lambda i: heads(f))


def read_gemma4(f: Fields, root: str) -> tuple[list[Layer], dict[str, str]]:
    """Windows with small heads, full attention with large ones; the last layer
    always attends to everything.
    """
    length = f.layer_count()
    kinds: list[str] = f.listing("layer_types", length=length, choices=KINDS) or every(6)(f, length)
    kinds[-1] = "full_attention"
    count, kv_heads, size = heads(f)
    per_layer = f.get("per_layer_config")
    if isinstance(per_layer, Mapping):
        own = {
            int(key): value
            for key, value in per_layer.items()
            if str(key).isdigit() and isinstance(value, Mapping)
        }
    else:
        wide = {"head_dim": f.integer("global_head_dim", default=512)}
        if f.get("attention_k_eq_v", default=False) and f.has("num_global_key_value_heads"):
            wide["num_key_value_heads"] = f.integer("num_global_key_value_heads")
        own = {i: wide for i, kind in enumerate(kinds) if kind in FULL}

    def shape(i: int) -> tuple[int, int, int]:
        layer = Fields(own.get(i, {}), f"{f.source}, per_layer_config of layer {i}")
        return (
            layer.integer("num_attention_heads", default=count),
            layer.integer("num_key_value_heads", default=kv_heads),
            layer.integer("head_dim", default=size),
        )

    return with_shared(f, root, kinds, shape)


def with_shared(
    f: Fields, root: str, kinds: list[str], shape: Callable[[int], tuple[int, int, int]]
) -> tuple[list[Layer], dict[str, str]]:
    """Layers with a cache of their own, and the others with the layer whose cache they read."""
    length, span = len(kinds), halved_window(f, kinds)
    first = length - f.integer("num_kv_shared_layers", default=0, least=0)
    if first < 0 or (first == 0 and length > 0):
        raise f.wrong(
            ("num_kv_shared_layers",), length - first, f"there are {length} layers, one must have a cache"
        )
    layers: list[Layer] = []
    shared: dict[str, str] = {}
    for i, kind in enumerate(kinds):
        name = f"{root}.{i}.self_attn.attn"
        if i < first:
            layers.append(AttentionLayer(name, *shape(i), sliding_window=span if kind in SLIDING else None))
            continue
        before = [j for j in range(first) if kinds[j] == kind]
        if not before:
            raise f.wrong(
                ("layer_types",),
                kind,
                f"layer {i} is to share a cache, and no layer before {first} is like it",
            )
        shared[name] = f"{root}.{before[-1]}.self_attn.attn"
    return layers, shared


def read_llama4(f: Fields, root: str) -> list[Layer]:
    """Chunks where a layer has rotary positions, full attention where it has none."""
    length, chunk = f.layer_count(), f.optional("attention_chunk_size")
    rope = f.listing("no_rope_layers", length=length) if f.get("no_rope_layers") else None
    interval = f.integer("no_rope_layer_interval", default=4)
    rope = rope or [int((i + 1) % interval != 0) for i in range(length)]
    return [
        AttentionLayer(
            f"{root}.{i}.self_attn.attn", *heads(f), attention_chunk_size=chunk if rope[i] else None
        )
        for i in range(length)
    ]


def read_mimo(f: Fields, root: str) -> list[Layer]:
    """Full attention, and windows with other heads; values are narrower than keys in both."""
    length = f.layer_count()
    pattern = f.listing("hybrid_layer_pattern", length=length, choices={0, 1})
    if pattern is None:
        kinds = f.listing("layer_types", length=length, choices=KINDS)
        if kinds is None:
            raise f.missing("hybrid_layer_pattern", "layer_types")
        pattern = [int(kind in SLIDING) for kind in kinds]
    full = heads(f)
    count = f.integer("swa_num_attention_heads", default=full[0])
    small = (
        count,
        f.integer("swa_num_key_value_heads", default=full[1]),
        f.integer("swa_head_dim", default=full[2]),
        f.optional("swa_v_head_dim"),
    )
    span = f.optional("sliding_window_size", "sliding_window")
    return [
        AttentionLayer(f"{root}.{i}.self_attn.attn", *small, sliding_window=span)
        if windowed
        else AttentionLayer(f"{root}.{i}.self_attn.attn", *full, f.optional("v_head_dim"))
        for i, windowed in enumerate(pattern)
    ]


def read_whisper(f: Fields, root: str) -> list[Layer]:
    """The decoder's own attention and its attention over the encoder's output; the encoder keeps nothing."""
    count = f.integer("decoder_attention_heads")
    width = f.integer("d_model")
    if width % count:
        raise f.wrong(("decoder_attention_heads",), count, f"it does not divide d_model = {width}")
    layers: list[Layer] = []
    for i in range(f.layer_count("decoder_layers")):
        layers.append(AttentionLayer(f"{root}.{i}.layers.self_attn.attn", count, count, width // count))
        layers.append(
            AttentionLayer(f"{root}.{i}.layers.encoder_attn.attn", count, count, width // count, cross=True)
        )
    return layers


def read_multi_head(
    f: Fields,
    root: str,
    path: str,
    count: str = "num_attention_heads",
    width: str = "hidden_size",
    depth: str = "num_hidden_layers",
) -> list[Layer]:
    """As many KV heads as query heads, under older names."""
    n = f.integer(count, "num_attention_heads")
    size = f.integer(width, "hidden_size") // n
    if size < 1:
        raise f.wrong((count,), n, "more heads than values")
    return [
        AttentionLayer(f"{root}.{i}.{path}", n, n, size)
        for i in range(f.layer_count(depth, "num_hidden_layers"))
    ]


def read_falcon(f: Fields, root: str) -> list[Layer]:
    """One KV head for all, unless the newer architecture says how many."""
    count = f.integer("num_attention_heads", "n_head")
    new, one = f.get("new_decoder_architecture", default=False), f.get("multi_query", default=True)
    kv_heads = f.integer("n_head_kv", "num_kv_heads", default=count) if new or not one else 1
    size = f.integer("hidden_size") // count
    length = f.layer_count("num_hidden_layers", "n_layer")
    return [AttentionLayer(f"{root}.{i}.self_attention.attn", count, kv_heads, size) for i in range(length)]


def read_spelled(
    f: Fields, root: str, spellings: tuple[str, ...] = (), path: str = "self_attn.attn", depth: str = ""
) -> list[Layer]:
    """Full attention throughout, the KV heads in one of the fields ``spellings``, the layers in ``depth``."""
    length = f.layer_count(*(depth, "num_hidden_layers") if depth else ())
    return [AttentionLayer(f"{root}.{i}.{path}", *heads(f, *spellings)) for i in range(length)]


def read_chatglm(f: Fields, root: str) -> list[Layer]:
    """KV heads in ``multi_query_group_num`` where ``multi_query_attention`` is on."""
    count, size = f.integer("num_attention_heads"), f.integer("kv_channels")
    shared = f.get("multi_query_attention", default=f.has("multi_query_group_num"))
    kv_heads = f.integer("multi_query_group_num") if shared else count
    length = f.layer_count("num_layers", "num_hidden_layers")
    return [AttentionLayer(f"{root}.{i}.self_attention.attn", count, kv_heads, size) for i in range(length)]


def read_nemotron_nas(f: Fields, root: str) -> list[Layer]:
    """``block_configs`` says for each layer how many query heads share a KV head, or that it has no attention."""
    count = f.integer("num_attention_heads")
    size = f.optional("head_dim") or f.integer("hidden_size") // count
    blocks = f.listing("block_configs", length=f.layer_count())
    if blocks is None:
        raise f.missing("block_configs")
    layers: list[Layer] = []
    for i, block in enumerate(blocks):
        inner = block.get("attention") if isinstance(block, Mapping) else None
        attention = Fields(
            inner if isinstance(inner, Mapping) else {}, f"{f.source}, block_configs[{i}].attention"
        )
        if attention.get("no_op", default=False) or attention.get("replace_with_linear", default=False):
            continue
        shared = attention.integer("n_heads_in_group")
        if count % shared:
            raise attention.wrong(("n_heads_in_group",), shared, f"it does not divide {count} query heads")
        layers.append(AttentionLayer(f"{root}.{i}.self_attn.attn", count, count // shared, size))
    return layers


def read_step3p5(f: Fields, root: str) -> list[Layer]:
    """Groups are KV heads; ``attention_other_setting`` gives one layer type heads of its own."""
    length = f.layer_count()
    count, kv_heads, size = heads(f, "num_attention_groups")
    types = f.listing("layer_types", length=length, choices=KINDS)
    span, other = window(f), f.get("attention_other_setting")
    setting = Fields(other if isinstance(other, Mapping) else {}, f"{f.source}, attention_other_setting")
    kind_of_other = setting.get("attention_type")
    layers: list[Layer] = []
    for i in range(length):
        kind = types[i] if types else "sliding_attention" if i % 2 == 0 else "full_attention"
        shape = (count, kv_heads, size)
        if types and kind == kind_of_other:
            shape = (
                setting.integer("num_attention_heads", default=count),
                setting.integer("num_attention_groups", default=kv_heads),
                setting.integer("head_dim", default=size),
            )
        layers.append(
            AttentionLayer(
                f"{root}.{i}.self_attn.attn", *shape, sliding_window=span if kind in SLIDING else None
            )
        )
    return layers


def read_step3(f: Fields, root: str) -> list[Layer]:
    """One KV head for all query heads."""
    count, size = f.integer("num_attention_heads"), f.integer("head_dim")
    return [AttentionLayer(f"{root}.{i}.self_attn.attn", count, 1, size) for i in range(f.layer_count())]


def read_looped(f: Fields, root: str) -> list[Layer]:
    """Layers run ``loop_num`` times: a full cache for the first time, a window for each further one."""
    length, loops = f.layer_count(), f.integer("loop_num", default=2)
    span = f.integer("loop_window_size", default=64)
    return [
        AttentionLayer(
            f"{root}.{i + length * loop}.self_attn.attn", *heads(f), sliding_window=span if loop else None
        )
        for i in range(length)
        for loop in range(loops)
    ]


def read_dbrx(f: Fields, root: str) -> list[Layer]:
    """Sizes under older names, the KV heads in ``attn_config``."""
    given = f.get("attn_config")
    config = Fields(given if isinstance(given, Mapping) else {}, f"{f.source}, attn_config")
    count = f.integer("n_heads", "num_attention_heads")
    kv_heads = config.integer("kv_n_heads", default=count)
    size = f.integer("d_model", "hidden_size") // count
    length = f.layer_count("n_layers", "num_hidden_layers")
    return [
        AttentionLayer(f"{root}.{i}.norm_attn_norm.attn.attn", count, kv_heads, size) for i in range(length)
    ]


def read_gpt_bigcode(f: Fields, root: str) -> list[Layer]:
    """One KV head for all where ``multi_query`` is on."""
    count = f.integer("n_head", "num_attention_heads")
    kv_heads = 1 if f.get("multi_query", default=True) else count
    size = f.integer("n_embd", "hidden_size") // count
    length = f.layer_count("n_layer", "num_hidden_layers")
    return [AttentionLayer(f"{root}.{i}.attn.attn", count, kv_heads, size) for i in range(length)]


def read_pangu_sink(f: Fields, root: str) -> list[Layer]:
    """Values wider than keys; learned sinks lie in blocks of the pool that no request owns."""
    count = f.integer("num_attention_heads")
    kv_heads = f.integer("num_key_value_heads", default=count)
    size = f.integer("qk_nope_dim") + f.integer("qk_rope_dim")
    values = f.integer("v_channels", default=size)
    return [
        AttentionLayer(f"{root}.{i}.self_attn.attn", count, kv_heads, size, values)
        for i in range(f.layer_count())
    ]


def read_telechat(f: Fields, root: str) -> list[Layer]:
    """Older names for layers and heads."""
    count = f.integer("n_head", "num_attention_heads")
    kv_heads = f.integer("num_key_value_heads", default=count)
    size = f.optional("head_dim") or f.integer("hidden_size") // count
    length = f.layer_count("n_layer", "num_hidden_layers")
    return [AttentionLayer(f"{root}.{i}.self_attn.attn", count, kv_heads, size) for i in range(length)]


def read_every_other(f: Fields, root: str) -> list[Layer]:
    """Attention and experts are counted as layers in turns: attention has the even numbers."""
    return [AttentionLayer(f"{root}.{2 * i}.mixer.attn", *heads(f)) for i in range(f.layer_count())]


def read_hrm_text(f: Fields, root: str) -> list[Layer]:
    """Two stacks that run in cycles; each step of a cycle has caches of its own.

    The low stack runs ``L_cycles`` times, then the high stack once, and all that ``H_cycles`` times.
    """
    high, low = f.integer("H_cycles"), f.integer("L_cycles")
    depth = f.layer_count("num_layers_per_stack")
    steps = {
        "L_module": [h * (low + 1) + i for h in range(high) for i in range(low)],
        "H_module": [h * (low + 1) + low for h in range(high)],
    }
    return [
        AttentionLayer(f"{root}.{stack}.layers.{step * depth + i}.self_attn.attn", *heads(f))
        for stack, turns in steps.items()
        for i in range(depth)
        for step in turns
    ]
