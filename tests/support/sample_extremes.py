"""Reports of arrays and names at an extreme: very small, very many, of odd shapes, in hostile words."""

from dataclasses import replace

from support.sample_attached import GIB, attached, memory, simulated
from support.sample_collectives import GPT_STEP, KIB, MIB, predicted_timing, source
from support.sample_leaves import gpt_leaves, leaf, mesh

from jaxshard_magic.report import (
    Advice,
    Check,
    Collective,
    Leaf,
    Report,
    SourceExcerpt,
    Spec,
    TimeSpread,
    Timing,
)

_UNTOLD = SourceExcerpt("\u91cd\u307f", (), (), False, "this file has changed since the step was traced")


def one_device() -> Report:
    """A mesh of one device."""
    leaves = gpt_leaves({"data": 1, "model": 1})
    return replace(
        attached(),
        strategy="fsdp",
        mesh=mesh({"data": 1}),
        leaves=tuple(replace(x, wanted=(), lost=0) for x in leaves),
        memory=memory(leaves, 1, 7000 * MIB, 16128 * MIB),
        collectives=(),
        timing=Timing(5.0, 1, 1, TimeSpread(0.2, 0.2, 0.2)),
        advice=(),
    )


def shapes() -> Report:
    """Leaves of 0 to 5 dimensions on three axes, cut over none, one, two at once, and three dimensions."""
    axes = {"data": 2, "fsdp": 4, "model": 3}
    leaves = (
        leaf("scalar", (), (), axes, why="scalar"),
        leaf("vector", (24,), ("fsdp",), axes, why="fsdp: dim 0 over fsdp"),
        leaf("whole", (7, 5), (), axes, why="nothing divides", wanted=("fsdp",)),
        leaf("pair", (48, 24), (("fsdp", "model"), None), axes, dtype="bfloat16", why="rule"),
        leaf("cube", (8, 12, 9), ("data", "fsdp", "model"), axes, why="rule"),
        leaf("conv", (3, 3, 64, 96), (None, None, "fsdp", "model"), axes, why="tp by channel"),
        leaf("video", (4, 8, 16, 16, 3), ("data", None, None, None, "model"), axes, "batch", "uint8", "batch"),
        leaf("empty", (0, 4), (), axes, why="empty"),
    )
    return replace(
        simulated(),
        strategy="dp+fsdp+tp",
        mesh=mesh(axes, "simulated"),
        leaves=leaves,
        memory=None,
        advice=(),
    )


def large() -> Report:
    """512 devices and 2,001 leaves in repeated layers, many of them not cut as wanted."""
    axes = {"data": 64, "model": 8}
    leaves: list[Leaf] = [leaf("wte.embedding", (128256, 8192), ("model", "data"), axes, dtype="bfloat16")]
    kinds: list[tuple[str, tuple[int, ...], Spec, tuple[str, ...]]] = [
        ("attn.qkv.kernel", (8192, 3, 64, 128), ("data", None, "model", None), ()),
        ("attn.out.kernel", (64, 128, 8192), ("model", None, "data"), ()),
        ("mlp.up.kernel", (8192, 28672), ("data", "model"), ()),
        ("ln_1.scale", (8192,), (), ()),
        ("gate.kernel", (8190, 8), (None, "model"), ("data",)),
    ]
    for i in range(400):
        for name, shape, spec, wanted in kinds:
            why = "8190 does not divide by data=64" if wanted else "fsdp and tp"
            leaves.append(leaf(f"blocks.{i}.{name}", shape, spec, axes, "params", "bfloat16", why, wanted))
    extra = dict.fromkeys(range(64), 1400 * MIB) | {17: 2300 * MIB}
    return replace(
        attached(),
        mesh=mesh(axes),
        leaves=tuple(leaves),
        memory=memory(tuple(leaves), 512, 8000 * MIB, 16128 * MIB, extra),
        collectives=tuple(
            Collective("all-gather", ("data",), 64, 400, n * MIB, 300 * n * MIB, line=n, source=f"x = block{n}(x)")
            for n in range(1, 31)
        ),
        sources=(),
        timing=Timing(6.8, 20, 20, GPT_STEP),
        advice=(),
    )


def hostile() -> Report:
    """Names that break out of markup or move a cursor, wide characters, a newline in a path."""
    axes = {"d\u00e4ta": 2, "<b>": 2}
    evil = "<script>alert('x')</script>&\"'\x1b[2J\nq"
    leaves = (
        leaf(f"{evil}.kernel", (64, 64), ("d\u00e4ta", "<b>"), axes, why=evil),
        leaf("\u91cd\u307f.\u5c64_0.kernel", (64, 63), ("d\u00e4ta", None), axes, why="63 % 2", wanted=("<b>",)),
        leaf("a_very_long_module_name." * 8 + "kernel", (8, 8, 8, 8, 8), ("d\u00e4ta",), axes),
    )
    kind = "TPU <i>v5</i>"
    collectives = (
        Collective(
            *(evil, None, 4, 1, 64, 48, 1e-6, evil, 2, evil, evil),
            what=evil, exposed=1e-6, called=f"{evil}:7",
        ),
        Collective(
            *("all-reduce", ("<b>",), 2, 1, 64, 64, 1e-6, "forward", 3, evil, "\u91cd\u307f"),
            what=evil, exposed=1e-6, called=f"{evil}:7",
        ),
    )  # fmt: skip
    return replace(
        attached(),
        name=evil,
        strategy="fsdp",
        options={"rule": {evil: "P()"}},
        mesh=mesh(axes, device_kind=kind),
        leaves=leaves,
        memory=memory(leaves, 4, 5 * KIB, 16 * GIB),
        collectives=collectives,
        timing=predicted_timing(collectives, None, 0),
        sources=(source(evil, [evil, f'"""{evil}', "x = 'a' # " + "\u91cd\u307f" * 60]), _UNTOLD),
        advice=(Advice("x", "warning", f"{evil}: y. z", evil),),
        check=Check(False, float("inf"), float("nan"), 1e-4, evil, (evil,), (evil,)),
    )


def toy() -> Report:
    """Some MiB on chips of 16 GiB, one device fuller than the rest; three blocks with two norms each."""
    axes = {"fsdp": 4, "tp": 2}
    leaves = tuple(
        leaf(f"blocks.{i}.{name}", shape, spec, axes)
        for i in range(3)
        for name, shape, spec in (
            ("attn.qkv.kernel", (128, 384), ("fsdp", "tp")),
            ("norm1.scale", (128,), ()),
            ("norm2.scale", (128,), ()),
        )
    )
    leaves += tuple(replace(x, path=f"opt.mu.{x.path}", role="optimizer") for x in leaves)
    return replace(
        attached(),
        mesh=mesh(axes),
        leaves=leaves,
        memory=memory(leaves, 8, 1300 * KIB, 16128 * MIB, {0: 700 * KIB}),
        collectives=(Collective("all-gather", ("fsdp",), 4, 6, 96 * KIB, 432 * KIB),),
        sources=(),
        timing=Timing(1.2, 20, 20, TimeSpread(0.00021, 0.00022, 0.0003)),
        advice=(),
    )
