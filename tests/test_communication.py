"""What a sharded step moves is what theory says, to the byte: the table of tests/theory."""

from collections import Counter

import pytest
from theory.expected import MESHES, expected
from theory.steps import STEPS

import jaxshard_magic


def moved(step: str, strategy: str) -> Counter:
    call = STEPS[step]()
    axes = MESHES[strategy]
    mesh = jaxshard_magic.mesh(" ".join(f"{a}={n}" for a, n in axes.items()))
    sharded = jaxshard_magic.shard(call.step, strategy, mesh=mesh)
    sharded.prepare(call.state, call.batch)
    found: Counter = Counter()
    for c in sharded.report().collectives or ():
        found[c.kind, c.axes, c.bytes] += c.count
    return found


@pytest.mark.parametrize("strategy", MESHES)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_moves_what_theory_says(step, strategy):
    assert moved(step, strategy) == expected(step, strategy)
