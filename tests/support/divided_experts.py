"""Steps of experts under `ep`: planned, run beside the plain step, and what they move."""

from collections import Counter

import pytest
import zoo
from zoo.mixtures import EXPERTS, TIME
from zoo.parts import BATCH

import jaxshard_magic
from jaxshard_magic.report import Report
from jaxshard_magic.strategies.planned_collectives import planned_collectives
from jaxshard_magic.strategies.sharded_lowering import ShardedLowering

F32 = 4

MOVES = Counter[tuple[str, tuple[str, ...] | None, int]]


@pytest.fixture(scope="module")
def ran():
    """A form's sharded step after five calls that gave the plain step's numbers."""
    known, plain = {}, {}

    def get(form, strategy, axes, calls=5):
        step = zoo.STEPS[form]
        if form not in plain:
            call = step.make()
            plain[form] = list(zoo.numbers_of_calls(step, call, call.fn, calls=calls))
        if (form, strategy, axes) not in known:
            call = step.make()
            sharded = jaxshard_magic.shard(call.fn, strategy, mesh=jaxshard_magic.mesh(f"cpu:8 {axes}"))
            for got, want in zip(zoo.numbers_of_calls(step, call, sharded, calls=calls), plain[form], strict=True):
                for difference in zoo.differences(step, got, want):
                    assert difference.rounding, difference
            known[form, strategy, axes] = sharded
        return known[form, strategy, axes]

    return get


def planned(form: str, strategy: str, axes: str, **options):
    call = zoo.STEPS[form].make()
    mesh = jaxshard_magic.mesh(axes)
    return jaxshard_magic.shard(call.fn, strategy, mesh=mesh, **options).planned(*call.args).plan


def told(plan) -> MOVES:
    """What the plan says that is sent, without single numbers."""
    assert isinstance(plan.run, ShardedLowering)
    moves = MOVES()
    for m in planned_collectives(plan.run):
        if m.bytes > F32:
            moves[m.kind, m.axes, m.bytes] += m.count
    return moves


def sent(report: Report, microbatches: int = 1) -> MOVES:
    """What the compiled program sends, but for single numbers and the gates of all tokens, which are gathered because
    XLA's `top_k` for the CPU takes all rows at once."""
    moves, gates = MOVES(), BATCH * TIME * EXPERTS * F32 // microbatches
    for c in report.collectives or ():
        if c.bytes > F32 and not (c.kind == AG and c.bytes == gates):
            moves[c.kind, c.axes, c.bytes] += round(c.count)
    return moves


AR, AG, A2A, RS = "all-reduce", "all-gather", "all-to-all", "reduce-scatter"


def finding(plan, code: str) -> str:
    return next(f.message for f in plan.findings if f.code == code)


def leaves(plan) -> dict[str, tuple]:
    return {leaf.path.removeprefix("params.mixture."): tuple(leaf.spec) for leaf in plan.leaves}
