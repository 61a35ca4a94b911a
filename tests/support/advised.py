"""A case for the rules of advice, and what they say of it."""

import math

from jaxshard_magic.analysis.advice import Case, advise
from jaxshard_magic.analysis.roofline import roofline, with_times
from jaxshard_magic.hardware import chip
from jaxshard_magic.plan import DeviceWork
from jaxshard_magic.report import Leaf, MeshInfo

MATMUL = DeviceWork(10**12, 10**6, "bfloat16")  # 5 ms on v5e, compute bound


def mesh(**axes: int) -> MeshInfo:
    return MeshInfo(axes, "cpu", "cpu", "simulated", tuple(range(math.prod(axes.values()))), 1)


def batch(axes: dict[str, int], examples: int = 64) -> Leaf:
    return Leaf("x", "batch", (examples, 4), "float32", ("data", None), 16 * examples, 16, "")


def case(axes: dict[str, int], on: str | None = None, shares=(MATMUL,), collectives=(), strategy="dp", **more) -> Case:
    roof = None
    if on is not None:
        roof = roofline(chip(on), axes, shares, (), collectives)
        collectives = with_times(collectives, roof)
    given = {"leaves": (batch(axes),), "jobs": {strategy: tuple(axes)[-1:]}, "examples": 64} | more
    return Case(mesh=mesh(**axes), strategy=strategy, roof=roof, shares=shares, collectives=collectives, **given)


def told(made: Case, code: str):
    found = [a for a in advise(made) if a.code == code]
    assert len(found) <= 1
    return found[0] if found else None
