"""`pp` through the front door: the plain step's numbers, state on its stages, and what the report says."""

import time
from contextlib import nullcontext
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support import pipelined_steps as steps
from support.differing import WITHIN, furthest
from support.thinned import CI, thinned

import jaxshard_magic
from jaxshard_magic import schedule
from jaxshard_magic.errors import ShardError
from jaxshard_magic.step.alternatives import compile_alternatives


def five_steps(step, args):
    params, state, *batch = args
    for _ in range(5):
        params, state, loss = step(params, state, *batch)
    return params, state, loss


@cache
def plain(make, *how):
    """Five steps of what `make(*how)` gives, as it is."""
    step, args = make(*how)
    return five_steps(jax.jit(step), args)


@pytest.fixture(scope="module")
def on_four():
    """`on_four(*layers)`: a scanned step on four stages, compiled, and its arguments. Tests share it, called or not."""

    @cache
    def compiled(*layers):
        step, args = steps.scanned(*layers)
        sharded = jaxshard_magic.shard(step, "pp", mesh="pipe=4", microbatches=4)
        sharded.prepare(*args)
        return sharded, args

    return compiled


INSIDE = [
    (steps.tied, "pp", "pipe=4", "1f1b"),
    (steps.scanned, "pp", "pipe=2 data=2", "1f1b"),
    (steps.tied, "pp+fsdp", "pipe=2 data=2", "zb-h1"),
    (steps.tied, "pp+tp", "pipe=2 model=2", "1f1b"),
    (steps.scanned, "pp+fsdp+tp", "pipe=2 data=2 model=2", "zb-v"),
]


@pytest.mark.parametrize(("make", "strategy", "mesh", "name"), thinned(INSIDE, INSIDE[1:2]))
def test_five_steps_are_those_of_the_plain_step(make, strategy, mesh, name):
    step, args = make()
    sharded = jaxshard_magic.shard(step, strategy, mesh=mesh, microbatches=4, schedule=name)
    assert furthest(five_steps(sharded, args), plain(make)) < WITHIN


def test_state_lives_on_its_stage_and_a_stack_of_layers_is_one_array(on_four):
    sharded, args = on_four()
    *state, _ = sharded(*args)
    arrays = [x for x in jax.tree.leaves(state) if x.ndim == 3]
    assert arrays
    for x in arrays:
        assert x.sharding.spec[0] == "pipe"
        assert {shard.data.shape[0] for shard in x.addressable_shards} == {x.shape[0] // 4}
    others = [x for x in jax.tree.leaves(state) if x.ndim == 2]
    assert all(len(x.sharding.device_set) == 1 for x in others)
    whole = sharded.gather(*state)
    assert {d for x in jax.tree.leaves(whole) for d in x.devices()} == {jax.devices()[0]}
    assert furthest(whole, tuple(state)) == 0


@pytest.mark.ci
def test_a_stack_that_stages_share_unevenly_is_put_together_on_the_first(on_four):
    assert furthest(five_steps(*on_four(7)), plain(steps.scanned, 7)) < WITHIN


@pytest.mark.ci
def test_gradients_that_devices_store_whole_are_summed_once_a_step():
    step, args = steps.unrolled()
    sharded = jaxshard_magic.shard(step, "pp", mesh="pipe=2 data=2", microbatches=8)
    sharded.prepare(*args)
    sums = [c for c in sharded.report().collectives if c.kind == "all-reduce" and c.bytes > 64]
    stages = sharded.entry.compiled.split.programs
    assert sum(c.count for c in sums) <= sum(len(p.stage.parameters) for p in stages)
    assert all(c.line is not None for c in sums)


@pytest.mark.parametrize("name", thinned(["gpipe", "1f1b", "zb-h1"], ["zb-h1"]))
def test_the_report_has_the_pipeline_as_it_ran(name):
    step, args = steps.unrolled()
    sharded = jaxshard_magic.shard(step, "pp", mesh="pipe=2", microbatches=4, schedule=name)
    assert five_steps(sharded, args)
    piped = sharded.report().pipeline
    made = schedule.make(name, stages=2, microbatches=4)
    assert (piped.schedule, piped.stages, piped.microbatches, piped.source, piped.unit) == (
        name,
        2,
        4,
        "measured",
        "s",
    )
    assert piped.bubble.ideal == pytest.approx(
        schedule.simulate(made, sharded.entry.compiled.last_run.costs().even(2)).bubble, abs=0.2
    )
    assert 0 <= piped.bubble.measured < 1
    assert len(piped.events) == sum(map(len, made.grid))
    assert tuple(r.peak_activations for r in piped.ranks) == schedule.simulate(made).peak_activations
    assert all(r.activation_bytes for r in piped.ranks)
    assert "embedding" in piped.ranks[0].holds


@pytest.mark.ci
def test_a_dry_run_predicts_by_flops_alone():
    step, args = steps.unrolled()
    sharded = jaxshard_magic.shard(step, "pp", mesh="pipe=2", microbatches=4)
    sharded.prepare(*args)
    report = sharded.report()
    assert (report.pipeline.source, report.pipeline.unit) == ("predicted", "")
    assert report.pipeline.bubble.measured is None
    sharded = jaxshard_magic.shard(step, "pp", mesh="pipe=2", microbatches=4, on="v5e")
    sharded.prepare(*args)
    report = sharded.report()
    assert report.pipeline.unit == "s"
    assert report.timing.predicted_step_s >= report.pipeline.makespan[1]
    sharded(*args)
    ran = sharded.report()
    assert ran.pipeline == report.pipeline and ran.advice == report.advice  # a CPU's times are none of the chip's


def test_memory_is_that_of_each_stage(on_four):
    sharded, args = on_four()
    report = sharded.report()
    held = sum(d.params + d.optimizer + d.other for d in report.memory.per_device)
    assert held == sum(x.nbytes for x in jax.tree.leaves(args[:2]))
    stacked = next(leaf for leaf in report.leaves if leaf.spec and leaf.spec[0] == "pipe")
    assert stacked.bytes_per_device * 4 == stacked.bytes
    assert {tuple(leaf.within) for leaf in report.leaves if leaf.spec[:1] != ("pipe",)} == {("pipe",)}


@pytest.mark.ci
def test_options_of_the_gradients_work_inside_stages():
    step, args = steps.unrolled()
    want = plain(steps.unrolled)
    for options in ({"remat": "full"}, {"remat": 2}):
        sharded = jaxshard_magic.shard(step, "pp", mesh="pipe=2", microbatches=4, schedule="zb-h1", **options)
        assert furthest(five_steps(sharded, args), want) < WITHIN
    sharded = jaxshard_magic.shard(step, "pp", mesh="pipe=2", microbatches=4, precision="bf16", check=True)
    sharded(*args)
    assert sharded.checked.passed


def test_what_a_pipeline_cannot_do_is_said_before_anything_runs():
    def refusal(made, **options):
        step, args = made
        with pytest.raises(ShardError) as raised:
            jaxshard_magic.shard(step, "pp", mesh="pipe=2", **options).prepare(*args)
        return str(raised.value)

    assert "takes gradients in a loop of its own" in refusal(steps.gradient_in_a_loop(), microbatches=4)
    said = refusal(steps.unrolled(), microbatches=5)
    assert "--microbatches 4 does" in said
    assert "--pad" not in said
    assert "--precision bf16" in refusal(steps.unrolled(), microbatches=4, precision="fp16")
    assert "stages" in refusal(steps.nothing_to_cut(), microbatches=4)


@pytest.mark.ci
def test_frozen_and_optimizer_state_keep_their_own_specs_inside_stages():
    step, args = steps.optimised(optax.adamw(1e-2))
    rules = {r"layers\.a$": P(None, None, "data")}
    sharded = jaxshard_magic.shard(step, "pp", mesh="pipe=2 data=2", microbatches=4, rules=rules, check=True)
    made = sharded(*args)
    assert sharded.checked.passed
    assert any(x.sharding.spec == P("pipe", None, "data") for x in jax.tree.leaves(made))


def stages_of(sharded):
    """The embedding, layers or head that each stage begins with, by the shapes of its parameters."""
    pipeline = sharded.entry.compiled
    return [len({k for unit in units for k in unit.parameters}) for units in pipeline.split.losses[0].split_loss.units]


@pytest.mark.ci
def test_stages_begin_at_the_names_that_are_asked_for():
    step, args = steps.unrolled()
    sharded = jaxshard_magic.shard(step, "pp", mesh="pipe=4", microbatches=4, cut="^block$", check=True)
    sharded(*args)
    assert sharded.checked.passed
    assert stages_of(sharded) == [3, 2, 2, 3]  # the embedding and two weights; two; two; two and the head
    for pattern, words in (("blok", "there are block"), ("^block$", "there are 5 places")):
        with pytest.raises(ShardError, match=words):
            jaxshard_magic.shard(step, "pp", mesh="pipe=8", microbatches=4, cut=pattern).prepare(*args)


@pytest.mark.ci
def test_a_pipeline_is_balanced_by_what_its_stages_take():
    @jax.custom_vjp
    def slow(h):
        return h

    def wait(h):
        def sleep(x):
            time.sleep(0.02)
            return np.asarray(x)

        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(h.shape, h.dtype), h)

    slow.defvjp(lambda h: (wait(h), None), lambda _, g: (g,))

    def loss(params, x, y):
        h = x
        for i, w in enumerate(params):
            h = jnp.tanh(slow(h @ w) if i == 0 else h @ w)
        return jnp.mean((h - y) ** 2)

    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    args = [steps.normal(i, 8, 8) for i in range(4)], steps.normal(5, 8, 8), steps.normal(6, 8, 8)
    by_flops, measured = (
        jaxshard_magic.shard(step, "pp", mesh="pipe=2", microbatches=2, balance=balance)
        for balance in ("flops", "measured")
    )
    by_flops.prepare(*args)
    assert stages_of(by_flops) == [2, 2]
    assert furthest(measured(*args), jax.jit(step)(*args)) < WITHIN
    assert stages_of(measured) == [1, 3]


@pytest.mark.ci
def test_an_option_is_compared_with_the_pipeline_without_it():
    step, args = steps.unrolled()
    sharded = jaxshard_magic.shard(step, "pp", mesh="pipe=2", microbatches=4, remat="full")
    sharded(*args)
    found = compile_alternatives(sharded, 600)
    assert [a.change for a in found] == ["", "without --remat full"]
    assert found[0].peak < found[1].peak


@pytest.mark.ci
def test_calls_that_nothing_depends_on_are_left_out_and_named():
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        jax.debug.print("mean {}", x.mean())
        return jnp.mean(x**2)

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    args = [steps.normal(i, 8, 8) for i in range(4)], steps.normal(5, 8, 8)
    sharded = jaxshard_magic.shard(step, "pp", mesh="pipe=2", microbatches=2)
    assert furthest(sharded(*args), jax.jit(step)(*args)) < WITHIN
    (said,) = (a.message for a in sharded.report().advice if a.code == "left-out")
    assert "debug" in said
    assert "test_pipeline_step.py" in said


@pytest.mark.ci
def test_a_stack_built_on_a_stage_counts_whole_beside_its_pieces(on_four):
    sharded, args = on_four(7)
    report = sharded.report()
    stacks = [leaf for leaf in report.leaves if leaf.shape[:1] == (7,)]
    assert len({leaf.within["pipe"] for leaf in stacks}) == 1
    assert all("put together" in leaf.why for leaf in stacks)
    held = sum(d.params + d.optimizer + d.other for d in report.memory.per_device)
    assert held == sum(x.nbytes for x in jax.tree.leaves(args[:2])) + sum(leaf.bytes for leaf in stacks)


@pytest.mark.parametrize("how", [*thinned(["for good"], (), CI), *thinned(["around the call", "the older way"], ())])
def test_another_mesh_that_the_user_has_set_is_none_of_the_pipelines(how):
    step, args = steps.mlp()
    other = jax.make_mesh((2, 4), ("data", "other"))
    want = jax.jit(step)(*args)
    piped = jaxshard_magic.shard(step, "pp", mesh="pipe=2", microbatches=4)
    if how == "for good":
        jax.set_mesh(other)
    try:
        with jax.set_mesh(other) if how == "around the call" else other if how == "the older way" else nullcontext():
            first, second = piped(*args), piped(*args)
    finally:
        jax.set_mesh(None)
    assert furthest(first, want) < WITHIN
    assert furthest(second, want) < WITHIN
