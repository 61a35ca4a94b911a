"""Every zoo step under every strategy gives the plain step's numbers, or says in one line why not."""

import numpy as np
import pytest
import zoo

import jaxshard_magic
from jaxshard_magic.errors import ShardError

MESHES = {
    "dp": "data=8",
    "fsdp": "data=8",
    "tp": "data=4 model=2",
    "fsdp+tp": "data=2 fsdp=2 model=2",
    "spmd": "data=4 model=2",
}
REFUSED = {  # strategy -> steps without what it divides: factors that are looked up and multiplied elementwise
    "tp": {"matrix_factors"},
    "fsdp+tp": {"matrix_factors"},
}
FEW, LARGEST = 2e-3, 2e-2


def plain(step: zoo.Step):
    call = step.make()
    return call, call.run()


def assert_same(step, call, got, reference, want):
    names = zoo.names(reference, want)
    for name, a, b in zip(names, zoo.snapshot(call, got), zoo.snapshot(reference, want), strict=True):
        inside = name.removeprefix("result.")
        if any(inside.startswith(n) or f".{n}" in name for n in step.noise):
            continue  # only rounding moves it, in the plain step too
        assert a.shape == b.shape, name
        off = np.abs(a.astype(complex) - b.astype(complex)) / max(float(np.max(np.abs(b), initial=0)), 1e-6)
        # Adam's first step turns the sign of a gradient near zero into a whole step: of few elements, not of a leaf.
        assert np.mean(off > step.tolerance, dtype=float) <= FEW, name
        assert np.max(off, initial=0) <= LARGEST, name


def run_sharded(step: zoo.Step, strategy: str):
    call = step.make()
    mesh = jaxshard_magic.mesh(MESHES[strategy])
    sharded = jaxshard_magic.shard(call.fn, strategy, mesh=mesh)
    return call, sharded(*call.args, **call.kwargs)


@pytest.mark.parametrize("name", zoo.STEPS)
def test_fully_sharded_over_three_axes_gives_the_plain_numbers(name):
    check(name, "fsdp+tp")


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["dp", "fsdp", "tp", "spmd"])
@pytest.mark.parametrize("name", zoo.STEPS)
def test_every_strategy_gives_the_plain_numbers(name, strategy):
    check(name, strategy)


def check(name: str, strategy: str) -> None:
    step = zoo.STEPS[name]
    try:
        call, got = run_sharded(step, strategy)
    except ShardError as error:
        assert name in REFUSED.get(strategy, ()), str(error)
        assert "\n" not in str(error)
        return
    assert name not in REFUSED.get(strategy, ())
    assert_same(step, call, got, *plain(step))
