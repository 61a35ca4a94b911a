"""Steps that take several gradients, as pipelines: the plain step's numbers, each loss in stages of its own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import steps_of_several_losses as steps
from support.differing import WITHIN, furthest
from support.fuses import Fuse, fused
from support.pipelined_steps import normal
from support.thinned import CI, thinned

import jaxshard_magic
from jaxshard_magic import schedule
from jaxshard_magic.report import Report

STEPS = {
    "adversarial": steps.adversarial,
    "adversarial, stacked": partial(steps.adversarial, steps.stack),
    "sharpness aware": steps.sharpness_aware,
    "actor and critic": steps.actor_and_critic,
    "actor and critic, stacked": partial(steps.actor_and_critic, steps.stack),
    "alone": steps.alone_each,
    "in a function and in a condition": steps.in_a_function_and_in_a_condition,
    "one without examples": steps.one_without_examples,
}
QUICK = [("adversarial, stacked", "pp+fsdp", "pipe=2 data=2", "zb-h1")]
OFTEN = [
    ("sharpness aware", "pp", "pipe=4", "gpipe"),
    ("adversarial", "pp", "pipe=2", "1f1b"),
    ("actor and critic", "pp+tp", "pipe=2 model=2", "zb-v"),
    ("actor and critic, stacked", "pp", "pipe=4 data=2", "1f1b"),
    ("alone", "pp", "pipe=2", "interleaved"),
    ("in a function and in a condition", "pp", "pipe=2", "1f1b"),
    ("one without examples", "pp", "pipe=2 data=2", "zb-h1"),
]
SELDOM = [
    (name, strategy, mesh, order)
    for name in STEPS
    for strategy, mesh in (("pp", "pipe=2"), ("pp", "pipe=4 data=2"), ("pp+fsdp+tp", "pipe=2 data=2 model=2"))
    for order in ("1f1b", "zb-h2", "dualpipev")
    if (mesh, order) != ("pipe=4 data=2", "dualpipev")  # which takes 8 microbatches there
]


def five_steps(step, args):
    """`args` ends with two arrays that hold the batch; what comes before, the step gives anew."""
    *state, x, y = args
    for _ in range(5):
        made = step(*state, x, y)
        state = made[: len(state)]
    return made


def piped(name, strategy="pp", mesh="pipe=2", **options):
    step, args = STEPS[name]()
    return step, args, jaxshard_magic.shard(step, strategy, mesh=mesh, microbatches=4, **options)


@pytest.mark.parametrize(
    ("name", "strategy", "mesh", "order"),
    [*QUICK, *thinned(OFTEN[2:4], (), CI), *thinned([*OFTEN[:2], *OFTEN[4:], *SELDOM], ())],
)
def test_five_steps_are_those_of_the_plain_step(name, strategy, mesh, order):
    options = {"chunks": 2} if order == "interleaved" else {}
    step, args, sharded = piped(name, strategy, mesh, schedule=order, **options)
    assert furthest(five_steps(sharded, args), five_steps(jax.jit(step), args)) < WITHIN


@pytest.mark.ci
def test_memory_of_the_inputs_is_taken_over_after_the_last_loss_alone():
    step, args, sharded = piped("adversarial, stacked", donate=True)
    want = five_steps(jax.jit(step), args)
    given = jax.tree.map(jnp.array, args)
    assert furthest(five_steps(sharded, given), want) < WITHIN
    first = sharded(*args)
    sharded(*first[:4], *args[4:])
    assert any(x.is_deleted() for x in jax.tree.leaves(first[:4]))


@pytest.mark.ci
@pytest.mark.parametrize("name", thinned(["adversarial", "actor and critic, stacked"], ["adversarial"]))
def test_the_report_has_both_losses_in_turn(name):
    _, args, sharded = piped(name)
    five_steps(sharded, args)
    report = sharded.report()
    told = report.pipeline
    assert (told.losses, told.stages, told.microbatches, told.source) == (2, 2, 4, "measured")
    assert [rank.stages for rank in told.ranks] == [(0, 2), (1, 3)]
    for row, one in zip(told.grid, schedule.make("1f1b", stages=2, microbatches=4).grid, strict=True):
        assert row == (*map(str, one), *(f"{a.stage + 2}{a.kind}{a.microbatch}" for a in one))
    assert len(told.events) == len(told.ideal_events) == 2 * 2 * 2 * 4
    for rank in range(2):
        own = [e for e in told.events if e.rank == rank]
        assert max(e.end for e in own if e.action[0] in "01") <= min(e.start for e in own if e.action[0] in "23")
    assert told.bubble.ideal == pytest.approx(1 / 5)  # of each loss, one of m + p - 1 slots
    assert len(told.costs) == 4 and all(forward > 0 for forward, *_ in told.costs)
    held = sum(d.params + d.optimizer + d.other for d in report.memory.per_device)
    assert held >= sum(x.nbytes for x in jax.tree.leaves(args[:-2]))
    assert "2 losses in turn" in report.to_text() and "2 losses in turn" in report.to_html()
    assert Report.from_json(report.to_json()) == report


@pytest.mark.ci
def test_a_loss_with_nothing_to_cut_runs_on_the_last_stage_and_the_report_says_so():
    _, args, sharded = piped("one without examples")
    sharded.prepare(*args)
    (said,) = (a for a in sharded.report().advice if a.code == "whole-loss")
    assert said.message.startswith("Loss 2 of the 2 that the step differentiates runs whole on the last stage")
    equations = [len(p.joint_program.equations) for p in sharded.entry.compiled.split.losses[1].programs]
    assert equations[0] == 0 < equations[1]


@pytest.mark.ci
def test_a_loss_that_stands_twice_shares_its_programs():
    _, args, sharded = piped("sharpness aware")
    sharded.prepare(*args)
    pipeline = sharded.entry.compiled
    assert pipeline.stages[0].job("F").run is pipeline.stages[2].job("F").run
    assert pipeline.stages[1].job("B").run is pipeline.stages[3].job("B").run


@pytest.mark.ci
def test_a_gradient_is_let_go_before_the_next_loss_begins():
    _, args, sharded = piped("adversarial")
    sharded.prepare(*args)
    split = sharded.entry.compiled.split
    critics = set(split.losses[0].gradient_values.values())
    readers = {group.phase for group in split.assignment.groups if critics & set(group.inputs)}
    assert readers == {1}


def with_fuse(fuse, where):
    """Two losses of two chains of layers: the second one's has a fuse, and reads what the first one's update made."""
    layer = fused(fuse, where)

    def run(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    def step(first, second, x):
        grads = jax.grad(lambda ws: (run(ws, x) ** 2).mean())(first)
        first = [w - 0.1 * g for w, g in zip(first, grads, strict=True)]
        grads = jax.grad(lambda ws: (run(ws[1:], layer(run(first, x) @ ws[0])) ** 2).mean())(second)
        return first, [w - 0.1 * g for w, g in zip(second, grads, strict=True)]

    return step


ERRORS = [("forward", True), ("backward", True), ("backward", False)]


@pytest.mark.ci
@pytest.mark.parametrize(("where", "donate"), thinned(ERRORS, ERRORS[1:2]))
def test_an_error_in_the_second_loss_leaves_all_of_the_state(where, donate):
    fuse, x = Fuse(), normal(1, 8, 4)
    ws = [normal(i, 4, 4, scale=1.0) for i in range(5)]
    step = jaxshard_magic.shard(with_fuse(fuse, where), "pp", mesh="pipe=2", microbatches=4, donate=donate)
    state = step(ws[:2], ws[2:], x)
    before = jax.tree.map(np.array, state)
    fuse.left = 2
    with pytest.raises(Exception, match="in the user's layer") as caught:
        jax.block_until_ready(step(*state, x))
    assert "of the pipeline" in " ".join(caught.value.__notes__)
    fuse.left = None
    assert furthest(state, before) == 0
    want = jax.jit(with_fuse(fuse, where))(*before, x)
    assert furthest(step(*state, x), want) < 1e-6
    first, second = state  # the first is whole until the second loss is well
    assert not any(w.is_deleted() for w in first)
    assert all(w.is_deleted() == donate for w in second)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "dualpipev"])
def test_several_losses_take_the_time_of_one_after_the_other(name):
    chunks = 2 if name == "interleaved" else None
    one = schedule.make(name, stages=4, microbatches=8, chunks=chunks)
    three = one.for_losses(3)
    assert (three.losses, three.actions, three.all_stages) == (3, 3 * one.actions, 3 * one.all_stages)
    assert three.rank_of == one.rank_of * 3
    ran, alone = schedule.simulate(three), schedule.simulate(one)
    assert 2 * alone.makespan < ran.makespan <= 3 * alone.makespan
    assert ran.peak_activations == alone.peak_activations
    assert schedule.parse(str(three)) == three
