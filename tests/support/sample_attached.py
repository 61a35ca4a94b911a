"""The report that most samples are made of: a small GPT on a TPU; and on simulated devices."""

from dataclasses import replace

from support.sample_collectives import GPT, GPT_COLLECTIVES, GPT_SOURCES, GPT_STEP, MIB, predicted_timing, untimed
from support.sample_leaves import gpt_leaves, mesh, of_role

from jaxshard_magic.report import Advice, Check, DeviceMemory, Leaf, Memory, Report, TimeSpread, Timing

GIB = 2**30


def memory(
    leaves: tuple[Leaf, ...],
    devices: int,
    temporaries: int | None,
    limit: int | None,
    extra: dict[int, int] | None = None,
) -> Memory:
    """Every device alike, but for `extra` bytes of other arrays on some."""
    params, optimizer, batch = (of_role(leaves, r) for r in ("params", "optimizer", "batch"))
    base = of_role(leaves, "rng") + of_role(leaves, "other")
    rows = []
    for d in range(devices):
        other = base + (extra or {}).get(d, 0)
        peak = None if temporaries is None else params + optimizer + batch + other + temporaries
        rows.append(DeviceMemory(d, params, optimizer, batch, other, temporaries, peak, limit))
    return Memory(tuple(rows), "compiled")


WTE = Advice(
    "indivisible",
    "warning",
    "wte is not cut over model: 50257 does not divide by 2. With its two Adam moments every device keeps"
    " 55.2 MiB more than planned.",
    """--rule "wte=P(None,('data','model'))\"""",
)


SAME = Check(True, 1.2e-6, 2e-6, 1e-4, "one device")


def attached() -> Report:
    """A TPU with a limit, one device fuller than the rest, twenty calls; its step predicted, line by line."""
    leaves = gpt_leaves()
    return Report(
        name="train_step",
        strategy="fsdp+tp",
        options={},
        mesh=mesh(GPT),
        leaves=leaves,
        memory=memory(leaves, 8, 4506 * MIB, 16128 * MIB, {0: 475 * MIB}),
        collectives=GPT_COLLECTIVES,
        sources=GPT_SOURCES,
        timing=predicted_timing(GPT_COLLECTIVES, GPT_STEP, 20),
        advice=(
            WTE,
            Advice("hold", "info", "475 MiB of params0 lie on device 0, which your notebook still holds."),
        ),
        check=SAME,
    )


def simulated() -> Report:
    """Simulated CPU devices: no limit, all alike, no time predicted."""
    leaves = gpt_leaves()
    return replace(
        attached(),
        mesh=mesh(GPT, "simulated"),
        memory=memory(leaves, 8, 4506 * MIB, None),
        collectives=untimed(GPT_COLLECTIVES),
        timing=Timing(6.8, 3, 2, TimeSpread(1.79, 1.84, 1.9)),
        advice=(WTE,),
        check=None,
    )
