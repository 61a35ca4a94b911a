"""Meshes and leaves made by hand, with their bytes worked out."""

from dataclasses import replace
from math import prod
from typing import Any

from support.sample_collectives import GPT

from jaxshard_magic.report import Leaf, MeshInfo, Spec

ITEM = {"float32": 4, "bfloat16": 2, "int32": 4, "uint8": 1, "key<fry>": 8, "bool": 1}


def mesh(axes: dict[str, int], source: str = "attached", **fields: Any) -> MeshInfo:
    """A mesh whose device ids count up from 0."""
    platform, kind = ("cpu", "cpu") if source == "simulated" else ("tpu", "TPU v5 lite")
    made = MeshInfo(axes, platform, kind, source, tuple(range(prod(axes.values()))), 1)
    return replace(made, **fields)


def leaf(
    path: str,
    shape: tuple[int, ...],
    spec: Spec,
    axes: dict[str, int],
    role: str = "params",
    dtype: str = "float32",
    why: str = "",
    wanted: tuple[str, ...] = (),
) -> Leaf:
    """A leaf with its bytes worked out; what it lost is what cutting over `wanted` would have saved."""
    size = prod(shape) * ITEM[dtype]
    names = [a for entry in spec for a in ((entry,) if isinstance(entry, str) else entry or ())]
    held = size // prod(axes[a] for a in names)
    lost = held - held // prod(axes[a] for a in wanted) if wanted else 0
    return Leaf(path, role, shape, dtype, spec, size, held, why, wanted, lost)


def gpt_leaves(axes: dict[str, int] = GPT) -> tuple[Leaf, ...]:
    """A GPT-2-sized step: stacked blocks, two Adam moments, tokens, a key, a step count."""
    wte = "dim 0 of 50257 does not divide by model=2; fsdp: dim 1 over data"
    rows: list[tuple[str, tuple[int, ...], Spec, str, tuple[str, ...]]] = [
        ("wte.embedding", (50257, 768), (None, "data"), wte, ("model",)),
        ("wpe.embedding", (1024, 768), (None, "data"), "fsdp: dim 1 over data", ()),
        ("blocks.ln_1.scale", (12, 768), (), "tiny", ()),
        ("blocks.ln_1.bias", (12, 768), (), "tiny", ()),
        ("blocks.attn.qkv.kernel", (12, 768, 3, 12, 64), (None, "data", None, "model", None),
         "tp: column kernel, dim 3 over model; fsdp: dim 1 over data", ()),
        ("blocks.attn.qkv.bias", (12, 3, 12, 64), (None, None, "model"),
         "tp: follows its kernel, dim 2 over model", ()),
        ("blocks.attn.out.kernel", (12, 12, 64, 768), (None, "model", None, "data"),
         "tp: row kernel, dim 1 over model; fsdp: dim 3 over data", ()),
        ("blocks.attn.out.bias", (12, 768), (), "tiny", ()),
        ("blocks.mlp.up.kernel", (12, 768, 3072), (None, "data", "model"),
         "tp: column kernel, dim 2 over model; fsdp: dim 1 over data", ()),
        ("blocks.mlp.up.bias", (12, 3072), (None, "model"), "tp: follows its kernel, dim 1 over model", ()),
        ("blocks.mlp.down.kernel", (12, 3072, 768), (None, "model", "data"),
         "tp: row kernel, dim 1 over model; fsdp: dim 2 over data", ()),
        ("blocks.mlp.down.bias", (12, 768), (), "tiny", ()),
        ("ln_f.scale", (768,), (), "tiny", ()),
        ("ln_f.bias", (768,), (), "tiny", ()),
    ]  # fmt: skip
    params = [leaf(p, s, spec, axes, "params", "float32", why, wanted) for p, s, spec, why, wanted in rows]
    moments = [
        leaf(f"opt.{m}.{p}", s, spec, axes, "optimizer", "float32", "follows its parameter", wanted)
        for m in ("mu", "nu")
        for p, s, spec, _, wanted in rows
    ]
    rest = [
        leaf("opt.count", (), (), axes, "optimizer", "int32", "scalar"),
        leaf("batch.tokens", (32, 1024), ("data",), axes, "batch", "int32", "batch: dim 0 over data"),
        leaf("rng", (), (), axes, "rng", "key<fry>", "key"),
    ]
    return tuple(params + moments + rest)


def of_role(leaves: tuple[Leaf, ...], role: str) -> int:
    return sum(x.bytes_per_device for x in leaves if x.role == role)
