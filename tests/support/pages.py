"""Layouts of a few small pages, and tensors as engines make them."""

import torch

from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.layout import Layout
from decodebench.layout.placement import KVCacheTensor
from decodebench.models.specs import FullAttentionSpec, MambaSpec


def attention(block_size=4, heads=2, head_size=8, dtype="bfloat16", **more):
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype=dtype, **more
    )


def mamba(padded=None, **more):
    return MambaSpec(
        block_size=16,
        shapes=((3, 8), (2, 4, 8)),
        dtypes=("bfloat16", "float32"),
        page_size_padded=padded,
        **more,
    )


def make_layout(groups, num_blocks=8, order="LBNHC"):
    """Groups (lists of specs, one a layer) of equal pages that alias the same slots."""
    slots = max(len(specs) for specs in groups)
    page = groups[0][0].page_size_bytes
    strides = (num_blocks * page, page) if order == "LBNHC" else (page, slots * page)
    size, named, tensors = slots * num_blocks * page, [], []
    for g, specs in enumerate(groups):
        names = tuple(f"group{g}.layer{i}" for i in range(len(specs)))
        named.append(KVCacheGroupSpec(names, tuple(specs), specs[0]))
        tensors.append(KVCacheTensor(names, 0, *strides, size))
    return Layout(
        groups=tuple(named),
        tensors=tuple(tensors),
        pool_num_blocks=(num_blocks,),
        size=size,
        memory_order=order,
    )


ORDERS = ("LBNHC", "BLHNC")


def engine_tensor(spec, num_blocks=8, order="NHC", ratio=1, gap=0):
    """A [B, H, N, C] view as vLLM makes it: typed, strided, optionally with gaps between blocks."""
    entries, heads, width = spec.parts()[0].shape
    entries //= ratio
    elements = entries * heads * width
    dtype = torch.uint8 if "float8" in spec.dtype else getattr(torch, spec.dtype)
    raw = torch.zeros(num_blocks * ratio * (elements + gap), dtype=dtype)
    inner = (width, heads * width, 1) if order == "NHC" else (entries * width, width, 1)
    return raw.as_strided((num_blocks * ratio, heads, entries, width), (elements + gap, *inner))
