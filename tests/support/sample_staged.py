"""The report of a pipeline, made by hand: leaves on their stages."""

from dataclasses import replace
from typing import Any

from support.sample_collectives import MIB
from support.sample_leaves import leaf, mesh, of_role

from jaxshard_magic.report import (
    Advice,
    Check,
    Collective,
    DeviceMemory,
    Leaf,
    Memory,
    MeshInfo,
    Report,
    Spec,
    TimeSpread,
    Timing,
)

GIB = 2**30
STAGES = {"pipe": 4, "data": 2}


def of_stage(stage: int, path: str, shape: tuple[int, ...], spec: Spec, *, stages: int = 1, **fields: Any) -> Leaf:
    """A leaf of one stage of `STAGES`, or of so many from that one on."""
    within = {"pipe": (stage, stage + stages)}
    return replace(leaf(path, shape, spec, STAGES | {"pipe": stages}, **fields), within=within)


def staged_leaves() -> tuple[Leaf, ...]:
    """Twelve layers, three on each of four stages; embedding first, head last, a stack of adapters on 1 and 2."""
    rows: list[tuple[int, str, tuple[int, ...], Spec, str]] = [
        (0, "wte", (50257, 768), (None, "data"), "fsdp: dim 1 over data"),
        (3, "head.kernel", (768, 50257), ("data", None), "fsdp: dim 0 over data"),
        (3, "ln_f.scale", (768,), (), "tiny"),
    ]
    for i in range(12):
        rows.append((i // 3, f"blocks.{i}.mlp.up", (768, 3072), (None, "data"), "fsdp: dim 1 over data"))
        rows.append((i // 3, f"blocks.{i}.mlp.down", (3072, 768), ("data", None), "fsdp: dim 0 over data"))
        rows.append((i // 3, f"blocks.{i}.ln.scale", (768,), (), "tiny"))
    odd, stack = "fsdp: 767 does not divide by data=2", (8, 768, 64)
    params = [of_stage(s, path, shape, spec, why=why) for s, path, shape, spec, why in rows]
    params.append(of_stage(2, "gate", (767, 767), (), why=odd, wanted=("data",)))
    params.append(of_stage(1, "adapters.kernel", stack, ("pipe", None, "data"), stages=2, why="scanned layers"))
    moments = [
        replace(x, path=f"opt.{m}.{x.path}", role="optimizer", why="follows its parameter")
        for m in ("mu", "nu")
        for x in params
    ]
    rest = [
        of_stage(3, "opt.count", (), (), role="optimizer", dtype="int32", why="scalar"),
        of_stage(0, "batch.tokens", (64, 1024), ("data",), role="batch", dtype="int32", why="batch"),
        of_stage(3, "batch.targets", (64, 1024), ("data",), role="batch", dtype="int32", why="batch"),
        leaf("rng", (), (), STAGES, "rng", "key<fry>", "key"),
    ]
    return (*params, *moments, *rest)


def staged_memory(leaves: tuple[Leaf, ...], info: MeshInfo, limit: int | None = 2 * GIB) -> Memory:
    """What each stage's devices hold; the activations of a 1F1B schedule are most on the first."""
    rows = []
    for device in info.devices:
        stage = device // info.axes["data"]
        here = tuple(x for x in leaves if stage in range(*x.within.get("pipe", (0, 4))))
        params, optimizer, batch = (of_role(here, r) for r in ("params", "optimizer", "batch"))
        temporaries = (4 - stage) * 96 * MIB
        peak = params + optimizer + batch + 8 + temporaries
        rows.append(DeviceMemory(device, params, optimizer, batch, 8, temporaries, peak, limit))
    return Memory(tuple(rows), "compiled")


def staged() -> Report:
    """A pipeline of four stages on two devices each: every leaf on its stage."""
    leaves, info = staged_leaves(), mesh(STAGES)
    advice = "gate is not cut over data: no dimension of 767 x 767 is left that divides by 2."
    return Report(
        name="train_step",
        strategy="pp+fsdp",
        options={"microbatches": 16},
        mesh=info,
        leaves=leaves,
        memory=staged_memory(leaves, info),
        collectives=(Collective("all-gather", ("data",), 2, 48, 9 * MIB, 216 * MIB),),
        timing=Timing(9.3, 20, 20, TimeSpread(0.21, 0.22, 0.23)),
        advice=(Advice("not-cut", "warning", advice),),
        check=Check(True, 1.2e-6, 2e-6, 1e-4, "one device"),
    )
