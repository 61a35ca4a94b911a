"""Where every strategy puts what, and that several sharded steps give the plain steps' state."""

from functools import cache
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.refusals import refusal
from support.thinned import thinned
from theory import steps

import jaxshard_magic
from jaxshard_magic import ShardError

ON = [
    ("dp", "data=8"),
    ("dp", "data=4 model=2"),
    ("dp", "data=2 fsdp=2 model=2"),
    ("fsdp", "data=8"),
    ("fsdp", "fsdp=8"),
    ("fsdp", "data=2 fsdp=4"),
    ("fsdp", "data=2 fsdp=2 model=2"),
    ("tp", "model=4"),
    ("tp", "data=4 model=2"),
    ("tp", "data=2 fsdp=2 model=2"),
    ("fsdp+tp", "data=4 model=2"),
    ("fsdp+tp", "data=2 fsdp=2 model=2"),
    ("dp+fsdp", "data=2 fsdp=4"),
    ("dp+fsdp+tp", "data=2 fsdp=2 model=2"),
    ("spmd", "data=8"),
]
PAIRS = {  # every strategy, and every mesh
    ("dp", "data=4 model=2"),
    ("fsdp", "fsdp=8"),
    ("tp", "model=4"),
    ("fsdp+tp", "data=2 fsdp=2 model=2"),
    ("dp+fsdp", "data=2 fsdp=4"),
    ("dp+fsdp+tp", "data=2 fsdp=2 model=2"),
    ("spmd", "data=8"),
}
NAMES = ("gated mlp", "cnn", "transformer, scanned")
QUICK = [
    *(("gated mlp", *on) for on in PAIRS),
    ("cnn", "tp", "model=4"),
]
TRAINED = thinned([(name, *on) for name in NAMES for on in ON], QUICK)


def three_steps(step, call):
    state, losses = call.state, []
    for _ in range(3):
        state, loss = step(state, call.batch)
        losses.append(loss)
    return state, losses


@cache
def reference(name):
    call = steps.STEPS[name]()
    return call, three_steps(jax.jit(call.step), call)


@pytest.mark.parametrize(("name", "strategy", "axes"), TRAINED)
def test_three_sharded_steps_give_the_plain_state(name, strategy, axes):
    call, want = reference(name)
    step = jaxshard_magic.shard(call.step, strategy, mesh=jaxshard_magic.mesh(axes))
    got = three_steps(step, call)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * float(jnp.max(jnp.abs(b))))


def planned(call, strategy, axes, **options):
    step = jaxshard_magic.shard(call.step, strategy, mesh=jaxshard_magic.mesh(axes), **options)
    return step.planned(call.state, call.batch).plan


@cache
def transformer_under_tp():
    return planned(steps.transformer(), "tp", "data=4 model=2")


def leaf(plan, path):
    return next(x for x in plan.leaves if x.path == path)


def test_attention_and_mlp_are_column_then_row_parallel():
    plan = transformer_under_tp()
    block = "state.params.blocks.block0."
    assert [leaf(plan, block + n).spec for n in ("q", "k", "v", "up")] == [P(None, "model")] * 4
    assert [leaf(plan, block + n).spec for n in ("out", "down")] == [P("model", None)] * 2
    assert "column parallel" in leaf(plan, block + "q").reason
    assert "row parallel" in leaf(plan, block + "out").reason


def test_the_embedding_and_the_head_are_cut_along_the_vocabulary():
    plan = transformer_under_tp()
    assert leaf(plan, "state.params.embed").spec == P("model", None)
    assert leaf(plan, "state.params.head").spec == P(None, "model")


@pytest.mark.parametrize("tied", thinned([False, True], [False]))
def test_a_vocabulary_that_does_not_divide_leaves_the_blocks_as_they_are(tied):
    plan = planned(steps.transformer(tied=tied, vocabulary=257), "tp", "data=4 model=2")
    block = "state.params.blocks.block0."
    assert [leaf(plan, block + n).spec for n in ("q", "k", "v", "up")] == [P(None, "model")] * 4
    assert [leaf(plan, block + n).spec for n in ("out", "down")] == [P("model", None)] * 2
    assert not any(leaf(plan, "state.params.embed").spec)


def test_convolutions_are_cut_by_channel():
    plan = planned(steps.cnn(), "tp", "data=4 model=2")
    assert leaf(plan, "state.params.conv0").spec == P(None, None, None, "model")
    assert leaf(plan, "state.params.conv1").spec == P(None, None, "model", None)


def test_fsdp_takes_the_largest_dimension_that_tensor_parallelism_left():
    plan = planned(steps.mlp(), "fsdp+tp", "data=4 model=2")
    assert leaf(plan, "state.params.block0.up").spec == P("data", "model")
    assert leaf(plan, "state.params.block0.down").spec == P("model", "data")


def test_moments_lie_where_their_parameter_lies():
    plan = planned(steps.transformer(scan=True), "fsdp+tp", "data=4 model=2")
    params = {x.path: x.spec for x in plan.leaves if x.role == "params"}
    moments = {x.path: x.spec for x in plan.leaves if x.role == "optimizer"}
    assert {k.replace("params", "momentum"): v for k, v in params.items()} == moments


def test_a_scan_never_cuts_its_layers():
    plan = planned(steps.transformer(scan=True), "fsdp", "data=2")
    assert all(x.spec == P() or x.spec[0] is None for x in plan.leaves if ".blocks." in x.path)


def test_tiny_leaves_stay_whole_and_say_so():
    plan = planned(steps.transformer(), "fsdp", "data=8")
    norm = leaf(plan, "state.params.blocks.block0.norm0")
    assert not any(norm.spec)
    assert "small" in norm.reason


def test_what_is_small_is_judged_by_the_layer_that_a_loop_gathers():
    def step(params, batch):
        def loss(params):
            def layer(x, w):
                return jnp.tanh(x * w["scale"]) @ w["square"], None

            return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    layers, width = 28, 1024  # 28,672 numbers of scales, of which a trip gathers 1,024
    shapes = {"scale": (layers, width), "square": (layers, width, width)}
    args = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    sharded = jaxshard_magic.shard(step, "fsdp", mesh=jaxshard_magic.mesh("cpu:8 data=8"))
    plan = sharded.planned(args, jax.ShapeDtypeStruct((16, width), jnp.float32)).plan
    assert not any(leaf(plan, "params.scale").spec) and "small" in leaf(plan, "params.scale").reason
    assert leaf(plan, "params.square").spec == P(None, "data", None)


def test_a_rule_beats_inference_and_moments_follow_it():
    plan = planned(steps.mlp(), "fsdp", "data=8", rules={"params.*up": "P(None, 'data')"})
    assert leaf(plan, "state.params.block0.up").spec == P(None, "data")
    assert leaf(plan, "state.momentum.block0.up").spec == P(None, "data")
    assert "rule" in leaf(plan, "state.params.block0.up").reason


@pytest.mark.ci
@pytest.mark.parametrize(
    ("strategy", "mesh", "rule", "moment"),
    [
        ("dp", "data=8", "momentum.block0.up=P(None, 'data')", P(None, "data")),
        ("fsdp+tp", "data=4 model=2", "momentum.*up=P(None, 'data')", P(None, "data")),
        ("tp", "data=4 model=2", "momentum=P('model')", P("model", None)),
    ],
)
def test_a_moment_that_a_rule_places_does_not_move_its_parameter(strategy, mesh, rule, moment):
    plain = planned(steps.mlp(), strategy, mesh)
    plan = planned(steps.mlp(), strategy, mesh, rules=dict([rule.split("=")]))
    assert leaf(plan, "state.momentum.block0.up").spec == moment
    for name in ("block0.up", "block0.down", "block1.up"):
        assert leaf(plan, f"state.params.{name}").spec == leaf(plain, f"state.params.{name}").spec


@pytest.mark.ci
def test_moments_placed_by_themselves_keep_the_numbers_in_pipelines_too():
    call = steps.mlp()
    want = call.step(*call.step(call.state, call.batch)[:1], call.batch)[0]
    for strategy, mesh in (("fsdp", "data=4"), ("pp+dp", "pipe=2 data=2")):
        step = jaxshard_magic.shard(call.step, strategy, mesh=mesh, rules={"momentum.*up": "P(None, 'data')"})
        state, _ = step(call.state, call.batch)
        state, _ = step(state, call.batch)
        up = state["momentum"]["block0"]["up"].sharding.spec
        assert up == P(None, "data")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state, want)


@pytest.mark.parametrize(
    ("strategy", "mesh", "over"),
    [
        ("fsdp", "replica=2 data=4", "data"),
        ("fsdp+dp", "replica=2 data=4", "data"),
        ("dp+fsdp", "data=4 replica=2", "data"),
        ("fsdp+tp", "replica=2 data=2 model=2", "data"),
        ("fsdp", "replica=2 fsdp=4", "fsdp"),
        ("fsdp@replica", "replica=2 data=4", "replica"),
    ],
)
def test_fsdp_divides_nothing_over_replicas(strategy, mesh, over):
    plan = planned(steps.mlp(), strategy, mesh)
    up = leaf(plan, "state.params.block0.up")
    axes = {a for entry in up.spec if entry for a in ([entry] if isinstance(entry, str) else entry)}
    assert axes - {"model"} == {over}
    assert {"replica", "data"} & axes == {over} & {"replica", "data"}
    if "dp" in strategy.split("+"):
        assert "dp: a copy on every device of replica; fsdp" in up.reason
    assert "replica" in plan.batch_axes


def test_replicas_alone_are_no_axis_for_fsdp():
    says = refusal(planned, steps.mlp(), "fsdp", "replica=8")
    assert says.startswith("fsdp needs a mesh axis for it (fsdp); the mesh has replica=8")


def test_a_rule_decides_which_dimension_tensor_parallelism_cuts():
    rules = {"block0.up": "P('model', None)"}
    plan = planned(steps.mlp(), "tp", "data=4 model=2", rules=rules)
    assert leaf(plan, "state.params.block0.up").spec == P("model", None)


def test_an_annotated_batch_dimension_is_taken():
    plan = planned(steps.mlp(), "dp", "data=8", specs={"batch": P("data")})
    assert leaf(plan, "batch.x").spec == P("data", None)


def test_spmd_cuts_what_it_is_told_and_nothing_else():
    call = steps.mlp()
    plan = planned(call, "spmd", "data=8", specs={"batch": P("data")}, rules={"up": "P(None, 'data')"})
    cut = {x.path for x in plan.leaves if any(x.spec)}
    assert {"batch.x", "batch.y", "state.params.block0.up", "state.momentum.block1.up"} <= cut
    assert not any(".down" in path for path in cut)


def test_the_strategy_names_its_axis_with_an_at():
    plan = planned(steps.mlp(), "fsdp@model", "data=4 model=2")
    assert leaf(plan, "state.params.block0.up").spec == P(None, "model")


def test_an_axis_that_nothing_uses_is_named():
    assert planned(steps.mlp(), "fsdp", "data=4 model=2").idle_axes == ("model",)


def test_a_leaf_that_cannot_be_cut_says_what_that_costs():
    shape = (33, 513)
    state = {"params": {"w": jnp.ones(shape)}, "momentum": {"w": jnp.zeros(shape)}}
    call = steps._call(lambda p, b: jnp.mean((b @ p["w"]) ** 2), state["params"], jnp.ones((16, 33)))
    w = leaf(planned(call, "fsdp", "data=8"), "state.params.w")
    held = 33 * 513 * 4
    assert (w.unsharded_axes, w.replicated_bytes) == (("data",), held - held // 8)


@pytest.mark.parametrize(
    ("strategy", "shape", "wanted", "cut"),
    [
        ("fsdp+tp", (127, 509), ("model", "data"), 1),
        ("fsdp+tp", (127, 514), ("data",), 2),
        ("fsdp+tp", (127, 512), (), 8),
        ("dp+tp", (127, 509), ("model",), 1),
    ],
)
def test_what_several_parts_cannot_cut_is_counted_once(strategy, shape, wanted, cut):
    """A product into and out of the hidden dimension, whose size the axes divide or do not."""
    params = {"mid": jnp.ones(shape), "out": jnp.ones((shape[1], 64))}
    call = steps._call(
        lambda p, b: jnp.mean((jnp.tanh(b @ p["mid"]) @ p["out"]) ** 2), params, jnp.ones((64, shape[0]))
    )
    mid = leaf(planned(call, strategy, "data=4 model=2"), "state.params.mid")
    held, size = 127 * shape[1] * 4 // cut, prod({"data": 4, "model": 2}[axis] for axis in wanted)
    assert ({*mid.unsharded_axes}, mid.replicated_bytes) == ({*wanted}, held - held // size)


@pytest.mark.parametrize(
    ("strategy", "axes", "options", "says"),
    [
        ("fsdq", "data=8", {}, "'fsdq' is no strategy. Did you mean 'fsdp'? %%shard --help lists them"),
        ("fsdp+fsdp", "data=8", {}, "twice"),
        ("spmd+tp", "data=8", {}, "alone"),
        ("auto", "data=8", {}, "stands alone"),
        ("tp", "data=8", {}, "tp needs a mesh axis for it (model); the mesh has data=8"),
        ("fsdp@dta", "data=8", {}, "Did you mean 'data'?"),
        ("dp", "data=8", {"specs": {"bath": "P('data')"}}, "Did you mean 'batch'?"),
        ("dp", "data=8", {"specs": {"batch": "P('dta')"}}, "Did you mean 'data'?"),
        ("dp", "data=8", {"specs": {"batch": "P('data', 'data')"}}, "data"),
        ("dp", "data=8", {"specs": {"batch": "P('data', None, None)"}}, "dimensions"),
        ("dp", "data=8", {"rules": {"kernel": "P('data')"}}, "matches no leaf"),
        ("dp", "data=8", {"rules": {"params.(": "P('data')"}}, "params.("),
        ("tp", "model=7", {}, "divides by model=7"),
    ],
)
def test_bad_input_is_one_line(strategy, axes, options, says):
    assert says in refusal(planned, steps.mlp(), strategy, axes, **options)


def test_a_batch_that_does_not_divide_is_one_line_with_what_would():
    call = steps.mlp()
    call = call._replace(batch=jax.tree.map(lambda x: x[:30], call.batch))
    says = refusal(planned, call, "dp", "data=8")
    assert "batch.x has 30 examples (dim 0), which do not divide by data=8" in says
    assert "24 or 32" in says


def test_mixed_rows_can_be_named_where_no_other_dimension_divides():
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * gradient, value, jnp.cumsum(x, 0)

    given = jnp.ones((8, 8)), jnp.ones((16, 4, 8))
    with pytest.raises(ShardError, match="x has 4 examples") as refused:
        jaxshard_magic.shard(step, "dp", mesh="cpu:8 data=8").plan(*given)
    assert str(refused.value).endswith("""if dim 0 (16) are the examples, say --spec "x=P('data')\"""")
    named = jaxshard_magic.shard(step, "dp", mesh="cpu:8 data=8", specs={"x": "P('data')"})
    np.testing.assert_allclose(named(*given)[2], step(*given)[2], rtol=1e-6)


def test_a_step_without_a_batch_says_so():
    def step(w):
        return w - 0.1 * jax.grad(lambda w: (w**2).sum())(w)

    sharded = jaxshard_magic.shard(step, "dp", mesh=jaxshard_magic.mesh("data=8"))
    sharded.prepare(jnp.ones((8, 8)))
    assert [a.code for a in sharded.report().advice if a.code == "no-batch"] == ["no-batch"]


@pytest.mark.parametrize("given", [(), ("x",)])
def test_what_is_said_without_a_batch_names_arguments_that_there_are(given):
    data = jnp.ones((64, 8))

    def step(w, key, *x):
        drawn = jnp.take(data, jax.random.permutation(key, 64)[:16], axis=0)
        loss = lambda w: ((drawn @ w) ** 2).mean() + sum(each.sum() for each in x)  # noqa: E731
        return w - 0.1 * jax.grad(loss)(w)

    sharded = jaxshard_magic.shard(step, "dp", mesh=jaxshard_magic.mesh("data=8"))
    sharded.prepare(jnp.ones((8, 8)), jax.random.key(0), *(jnp.ones(3) for _ in given))
    for advice in sharded.report().advice:
        assert "closure" not in (advice.fix or "")


def test_parameters_that_come_back_changed_are_refused_by_name():
    call = steps.mlp()

    def step(state, batch):
        new, loss = call.step(state, batch)
        new["params"]["block0"]["up"] = new["params"]["block0"]["up"].astype(jnp.bfloat16)
        return new, loss

    says = refusal(planned, call._replace(step=step), "fsdp", "data=8")
    assert "state.params.block0.up goes into the step as float32[128,512] and comes back as bfloat16[128,512]" in says


def test_a_fused_weight_whose_product_is_split_is_told_to_move_activations():
    def loss(params, x):
        gate, up = jnp.split(x @ params["fused"], 2, -1)
        return jnp.mean(((jax.nn.silu(gate) * up) @ params["down"]) ** 2)

    params = {"fused": jnp.ones((64, 512)), "down": jnp.ones((256, 64))}
    call = steps._call(loss, params, jnp.ones((16, 64)))
    (found,) = planned(call, "tp", "data=4 model=2").findings
    assert found.code == "fused-split" and "head" not in found.message
    assert not planned(steps.mlp(gated=True), "tp", "data=4 model=2").findings


def test_a_fused_weight_is_told_of_heads_where_its_parts_meet_by_head():
    def loss(params, x):
        q, k, v = (each.reshape(16, 6, 4, 16) for each in jnp.split(x @ params["fused"], 3, -1))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.mean((jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(16, 6, 64) @ params["out"]) ** 2)

    params = {"fused": jnp.ones((64, 192)), "out": jnp.ones((64, 64))}
    (found,) = planned(steps._call(loss, params, jnp.ones((16, 6, 64))), "tp", "data=4 model=2").findings
    assert found.code == "fused-split" and "laid out by head" in found.message


def test_a_mesh_with_explicit_axes_is_taken_as_well():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    call = steps.mlp()
    state, _ = jaxshard_magic.shard(call.step, "fsdp+tp", mesh=mesh)(call.state, call.batch)
    assert state["params"]["block0"]["up"].sharding.spec == P("data", "model")
