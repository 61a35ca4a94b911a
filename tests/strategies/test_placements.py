"""Steps that say themselves where arrays lie: under a strategy they run, or one line says what does not go together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.differing import furthest
from support.pipelined_steps import EXAMPLES, WIDTH, blocks, normal, run_blocks
from support.refusals import refusal

import jaxshard_magic
from jaxshard_magic.errors import ShardError


def mesh_of(kind=AxisType.Auto, **axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def step_of(place):
    """A step whose activations go through `place` between two layers."""

    def loss(params, x, y):
        h = run_blocks(params[:2], x)
        return ((run_blocks(params[2:], place(h)) - y) ** 2).mean()

    @jax.jit
    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    stack = blocks(4)
    params = [jax.tree.map(lambda w, i=i: w[i], stack) for i in range(4)]
    return step, (params, normal(1, EXAMPLES, WIDTH), normal(2, EXAMPLES, WIDTH))


def constrained(mesh, spec):
    return lambda h: jax.lax.with_sharding_constraint(h, NamedSharding(mesh, spec))


def put(mesh, spec):
    return lambda h: jax.device_put(h, NamedSharding(mesh, spec))


def summed_over(mesh, axis):
    def place(h):
        parts = jax.shard_map(
            lambda h: jax.lax.psum(h.sum(-1, keepdims=True), axis),
            mesh=mesh,
            in_specs=P(None, axis),
            out_specs=P(),
        )
        return h + parts(h)

    return place


def placed(report):
    return [a for a in report.advice if a.code == "placements"]


def run(place, strategy, mesh, **options):
    step, args = step_of(place)
    sharded = jaxshard_magic.shard(step, strategy, mesh=mesh, **options)
    got = sharded(*args)
    assert furthest(got, step(*args)) < 1e-5
    return sharded.report()


def test_a_placement_on_the_strategys_devices_is_kept():
    other = mesh_of(rows=2, columns=4)
    plain = run(lambda h: h, "dp", "data=8")
    assert not placed(run(put(other, P(None, "columns")), "dp", "data=8"))
    report = run(constrained(other, P(None, "columns")), "dp", "data=8")
    assert not placed(report)
    assert len(report.collectives) > len(plain.collectives)  # the activations move there and back


@pytest.mark.parametrize(
    ("how", "strategy", "mesh"),
    [
        (constrained, "fsdp", "data=4"),
        (put, "pp", "pipe=2"),
        pytest.param(constrained, "pp+fsdp", "pipe=2 data=2", marks=pytest.mark.full),
        pytest.param(put, "fsdp", "data=4", marks=pytest.mark.full),
    ],
)
def test_a_placement_on_other_devices_is_left_out_and_its_line_told(how, strategy, mesh):
    report = run(how(mesh_of(data=8), P("data")), strategy, mesh)
    (said,) = placed(report)
    assert "(test_placements.py, line " in said.message and "left out" in said.message


def test_a_placement_inside_a_loop_and_in_microbatches_is_left_out():
    keep = constrained(mesh_of(data=8), P("data"))
    report = run(lambda h: jax.lax.fori_loop(0, 2, lambda _, h: keep(jnp.tanh(h)), h), "fsdp", "data=2", microbatches=4)
    assert len(placed(report)) == 1


def test_a_shard_map_over_the_strategys_devices_runs():
    report = run(summed_over(mesh_of(model=8), "model"), "fsdp", "data=8")
    assert any(c.kind == "all-reduce" for c in report.collectives)


@pytest.mark.parametrize(
    ("strategy", "mesh", "has"),
    [
        ("fsdp", "data=4", "this strategy has 4 devices (data=4)"),
        ("pp", "pipe=2", "a stage of the pipeline has 1 "),
    ],
)
def test_a_shard_map_over_other_devices_is_refused_in_a_line(strategy, mesh, has):
    step, args = step_of(summed_over(mesh_of(model=8), "model"))
    with pytest.raises(ShardError) as refused:
        jaxshard_magic.shard(step, strategy, mesh=mesh)(*args)
    said = str(refused.value)
    assert (
        has in said and "over 8 devices (model=8)" in said and "(test_placements.py, line " in said and "\n" not in said
    )


def test_axes_of_the_strategys_own_mesh_may_be_named_without_it():
    step, args = step_of(lambda h: jax.lax.with_sharding_constraint(h, P("data")))
    own = mesh_of(data=8)
    with jax.set_mesh(own):
        want = step(*args)
        for strategy, mesh in (("dp", "data=8"), ("pp", "pipe=2 data=2")):
            assert furthest(jaxshard_magic.shard(step, strategy, mesh=mesh)(*args), want) < 1e-5


def refused(step, args, mesh, **axes):
    with jax.set_mesh(mesh_of(**axes)):
        return refusal(jaxshard_magic.shard(step, "dp" if "data" in mesh else "tp", mesh=mesh), *args)


def test_what_names_axes_that_the_strategys_mesh_has_not_is_told_in_a_line():
    step, args = step_of(lambda h: jax.lax.with_sharding_constraint(h, P("data")))
    said = refused(step, args, "model=8", data=8)
    assert "along an axis that the strategy's mesh has not" in said and "with_sharding_constraint(h, P" in said


def test_spmd_keeps_arrays_as_they_lie():
    step, (params, x, y) = step_of(lambda h: h)
    mesh = mesh_of(data=4, model=2)
    lying = jax.tree.map(lambda w: jax.device_put(w, NamedSharding(mesh, P(None, "model"))), params)
    x, y = (jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, y))
    sharded = jaxshard_magic.shard(step, "spmd", mesh=mesh)
    got, value = sharded(lying, x, y)
    assert {leaf.spec for leaf in sharded.report().leaves if leaf.role == "params"} == {(None, "model")}
    assert jax.tree.all(jax.tree.map(lambda a: a.sharding.spec == P(None, "model"), got))
    # A rule comes before the layout, and a mesh of other axes knows nothing of it.
    for other in (
        jaxshard_magic.shard(step, "spmd", mesh=mesh, rules={"params": P()}),
        jaxshard_magic.shard(step, "spmd", mesh="data=8"),
    ):
        other.prepare(lying, x, y)
        assert {entry for leaf in other.report().leaves if leaf.role == "params" for entry in leaf.spec} <= {None}
    np.testing.assert_allclose(value, step(params, x, y)[1], rtol=1e-5)


def test_a_step_that_sets_a_mesh_is_told_to_leave_that_to_the_strategy():
    inner, args = step_of(lambda h: h)
    own = mesh_of(data=8)

    def step(*args):
        with jax.set_mesh(own):
            return inner(*args)

    with pytest.raises(ShardError, match="sets a mesh inside the step; set it around the call"):
        jaxshard_magic.shard(step, "dp", mesh="data=8")(*args)


@pytest.mark.ci
def test_arrays_of_an_explicit_mesh_are_taken_as_they_are():
    step, args = step_of(lambda h: h)
    own = mesh_of(kind=AxisType.Explicit, data=8)
    with jax.set_mesh(own):
        spread = [jax.device_put(args[0], NamedSharding(own, P()))]
        spread += [jax.device_put(x, NamedSharding(own, P("data"))) for x in args[1:]]
        for strategy, mesh in (("fsdp", "data=8"), ("pp", "pipe=2")):
            got = jaxshard_magic.shard(step, strategy, mesh=mesh)(*spread)
            assert furthest(got, jax.tree.map(np.asarray, step(*args))) < 1e-5
