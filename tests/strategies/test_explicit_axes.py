"""Steps written for explicit mesh axes: they run under every strategy, and `spmd` leaves them as they are."""

import importlib
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.differing import furthest
from support.refusals import refusal

import jaxshard_magic

D, H, B = 64, 128, 32
WHOLE = P()
STRATEGIES = ["spmd", "dp", "fsdp", "fsdp+tp"]


def mesh_of(kind=AxisType.Explicit, **axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


@pytest.fixture
def mesh():
    return mesh_of(data=4, model=2)


def arguments(w1=WHOLE, w2=WHOLE, batch=WHOLE):
    """Parameters and a batch, placed if a mesh is set."""
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [0.1 * jax.random.normal(k, s) for k, s in zip(keys, [(D, H), (H, D), (B, D), (B, D)], strict=True)]
    if not jax.sharding.get_mesh().empty:
        arrays = [jax.device_put(x, spec) for x, spec in zip(arrays, (w1, w2, batch, batch), strict=True)]
    w1, w2, x, y = arrays
    return {"w1": w1, "w2": w2}, {"x": x, "y": y}


def step_of(predict):
    def step(params, batch):
        value, grads = jax.value_and_grad(lambda p: jnp.mean((predict(p, batch["x"]) - batch["y"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def written(p, x):
    """Layers whose results have a sharding that the user has written."""
    h = jax.nn.relu(jnp.einsum("bd,dh->bh", x, p["w1"], out_sharding=P("data", "model")))
    return jnp.einsum("bh,hd->bd", jax.nn.softmax(h), p["w2"], out_sharding=P("data", None))


def resharded(p, x):
    h = jax.reshard(jax.nn.silu(x @ p["w1"]), P("data", None))
    return h @ jax.reshard(p["w2"], P(None, None))


def looped(p, x):
    h = jnp.einsum("bd,dh->bh", x, p["w1"], out_sharding=P("data", "model"))
    h, _ = jax.lax.scan(lambda c, _: (jax.nn.gelu(c) + jnp.zeros_like(c), None), h, None, length=3)
    rows = jax.jit(lambda w: w.at[jnp.arange(H)].get(out_sharding=P(None, None)))(p["w2"])
    return jnp.einsum("bh,hd->bd", h, rows, out_sharding=P("data", None))


def by_type(p, x):
    """A `shard_map` that takes its specs from the types, and a part of which JAX decides on the layout."""
    h = jnp.einsum("bd,dh->bh", x, p["w1"], out_sharding=P("data", None))
    h = jax.sharding.auto_axes(lambda h, w: jnp.tanh(h @ w), out_sharding=P("data", None))(h, p["w2"])
    return jax.shard_map(lambda h: h - jnp.mean(h), out_specs=P("data", None))(h)


def three_calls(step, params, batch):
    losses = []
    for _ in range(3):
        params, loss = step(params, batch)
        losses.append(loss)
    return jax.tree.map(np.asarray, (params, losses))


LAYOUT = {"w1": P(None, "model"), "w2": P("model", None), "batch": P("data")}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("predict", [written, resharded, looped], ids=lambda f: f.__name__)
def test_three_calls_give_the_plain_step_s_numbers_and_arrays_of_the_caller_s_mesh(predict, strategy, mesh):
    with jax.set_mesh(mesh):
        args = arguments(**LAYOUT)
        plain = three_calls(jax.jit(step_of(predict)), *args)
        sharded = jaxshard_magic.shard(step_of(predict), strategy, mesh=mesh, check=True)
        assert furthest(three_calls(sharded, *args), plain) < 1e-4
        assert sharded.report().check.passed
        params, loss = sharded(*args)
        # The caller goes on with them in explicit mode.
        assert np.isfinite(jnp.mean(params["w1"]) + loss)
        if strategy == "spmd":
            typed = jax.jit(step_of(predict))(*args)
            assert jax.tree.map(jax.typeof, (params, loss)) == jax.tree.map(jax.typeof, typed)


def collectives(text):
    """Number of arrays that a compiled program sends, by kind of collective."""
    found = re.findall(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(([^)]*)\)", text)
    return sum((Counter({kind: operands.count("%")}) for kind, operands in found), Counter())


@pytest.mark.parametrize("predict", [written, resharded, looped], ids=lambda f: f.__name__)
def test_spmd_sends_what_the_plain_step_sends(predict, mesh):
    with jax.set_mesh(mesh):
        args = arguments(**LAYOUT)
        plain = jax.jit(step_of(predict)).lower(*args).compile().as_text()
        sharded = jaxshard_magic.shard(step_of(predict), "spmd", mesh=mesh)
        sharded(*args)
        told = Counter()
        for c in sharded.report().collectives:
            told[c.kind] += c.count
        assert told == collectives(plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mesh_set_nowhere_is_the_strategy_s_own(strategy):
    args = arguments()
    sharded = jaxshard_magic.shard(step_of(written), strategy, mesh="data=4 model=2", check=True)
    sharded(*args)
    assert sharded.report().check.passed


@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
def test_a_placement_along_an_axis_that_the_mesh_has_not_is_left_out_and_told(strategy, mesh):
    axis = "data" if strategy == "fsdp" else "model"
    with jax.set_mesh(mesh):
        args = arguments(**LAYOUT)
        plain = three_calls(jax.jit(step_of(written)), *args)
        sharded = jaxshard_magic.shard(step_of(written), strategy, mesh=f"{axis}=8")
        got, loss = sharded(*args)
        [finding] = [a for a in sharded.report().advice if a.code == "placements"]
        assert "test_explicit_axes.py, line" in finding.message
        assert furthest(loss, plain[1][0]) < 1e-4
        # Later calls get arrays that lie as the strategy has laid them.
        assert furthest(sharded(got, args[1])[1], plain[1][1]) < 1e-4


def test_arrays_that_come_back_from_a_file_lie_on_the_caller_s_mesh(mesh, tmp_path):
    with jax.set_mesh(mesh):
        params, batch = arguments(**LAYOUT)
        sharded = jaxshard_magic.shard(step_of(written), "fsdp+tp", mesh=mesh, donate=True)
        params, _ = sharded(params, batch)
        sharded.save(tmp_path / "state", params)
        again = sharded.restore(tmp_path / "state", params)
        assert jax.tree.map(jax.typeof, again) == jax.tree.map(jax.typeof, params)
        assert furthest(jax.tree.map(jnp.mean, again), jax.tree.map(jnp.mean, params)) == 0
        # The state goes into the call in place, as without explicit axes.
        assert sharded.entry is not None and len(sharded.entry.donated) == 2


def test_arrays_as_a_strategy_has_laid_them_go_into_the_next_step(mesh):
    with jax.set_mesh(mesh):
        params, batch = arguments(**LAYOUT)
        params, _ = jaxshard_magic.shard(step_of(resharded), "fsdp+tp", mesh=mesh)(params, batch)

        def predicted(params, x):
            return resharded(params, x)

        got = jaxshard_magic.shard(predicted, "fsdp+tp", mesh=mesh)(params, batch["x"])
        plain = resharded({k: jax.reshard(v, P(None, None)) for k, v in params.items()}, batch["x"])
        assert furthest(got, plain) < 1e-4


@jax.custom_vjp
def ruled(x):
    return jax.reshard(jnp.tanh(x), P("data", None))


def _forward(x):
    y = jnp.tanh(x)
    return jax.reshard(y, P("data", None)), y


def _backward(y, g):
    return (jax.reshard(g * (1 - y * y), P("data", None)),)


ruled.defvjp(_forward, _backward)


def with_rules(p, x):
    """Derivative rules that are traced where the gradient is taken, later than the loss."""
    h = jax.nn.relu(jnp.einsum("bd,dh->bh", x, p["w1"], out_sharding=P("data", None)))
    return ruled(h) @ p["w2"]


@pytest.mark.parametrize(
    ("strategy", "axes", "options"),
    [
        ("fsdp", "data=4 model=2", {"microbatches": 2}),
        ("spmd", "data=4 model=2", {"microbatches": 2}),
        ("dp", "data=8", {"remat": "full"}),
        ("pp", "stage=2", {"microbatches": 2}),
    ],
)
def test_gradients_taken_again_follow_the_rules_of_the_step(strategy, axes, options, mesh):
    with jax.set_mesh(mesh):
        args = arguments(**LAYOUT)
        sharded = jaxshard_magic.shard(step_of(with_rules), strategy, mesh=axes, check=True, **options)
        plain = jax.jit(step_of(with_rules))(*args)
        assert furthest(sharded(*args), jax.tree.map(np.asarray, plain)) < 1e-4
        assert sharded.report().check.passed


def partly_manual(p, x):
    """A `shard_map` over some of the axes."""
    h = jnp.einsum("bd,dh->bh", x, p["w1"], out_sharding=P("data", None))
    centred = jax.shard_map(
        lambda h: h - jax.lax.pmean(h.mean(0, keepdims=True), "data"), out_specs=P("data", None), axis_names={"data"}
    )
    return centred(h) @ p["w2"]


@pytest.mark.parametrize("predict", [by_type, partly_manual], ids=lambda f: f.__name__)
def test_specs_that_a_step_takes_from_types_are_found(predict, mesh):
    with jax.set_mesh(mesh):
        args = arguments(w1=P(None, None), w2=P(None, None), batch=P("data"))
        plain = jax.jit(step_of(predict))(*args)
        for strategy in ("spmd", "dp", "fsdp"):
            sharded = jaxshard_magic.shard(step_of(predict), strategy, mesh=mesh, check=True)
            assert furthest(sharded(*args), jax.tree.map(np.asarray, plain)) < 1e-4
            assert sharded.report().check.passed


def test_axes_of_both_kinds_in_one_mesh():
    both = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))

    def predict(p, x):
        h = jnp.einsum("bd,dh->bh", x, p["w1"], out_sharding=P("data", None))
        return jax.lax.with_sharding_constraint(jnp.tanh(h), P(None, "model")) @ p["w2"]

    with jax.set_mesh(both):
        args = arguments(batch=P("data"))
        plain = jax.tree.map(np.asarray, jax.jit(step_of(predict))(*args))
        for strategy in STRATEGIES:
            sharded = jaxshard_magic.shard(step_of(predict), strategy, mesh=both)
            assert furthest(sharded(*args), plain) < 1e-4


def test_an_array_with_a_type_that_the_step_closes_over(mesh):
    keys = jax.random.split(jax.random.key(1), 2)
    fixed = jax.device_put(jax.random.normal(keys[0], (D, D)), NamedSharding(mesh, P(None, "model")))
    params, batch = arguments()

    def predict(p, x):
        return jnp.tanh(x @ fixed) @ p["w1"] @ p["w2"]

    with jax.set_mesh(mesh):
        plain = np.asarray(step_of(predict)(params, batch)[1])
    for strategy in ("dp", "fsdp+tp"):
        sharded = jaxshard_magic.shard(step_of(predict), strategy, mesh="data=4 model=2", check=True)
        assert furthest(sharded(params, batch)[1], plain) < 1e-4
        assert sharded.report().check.passed


def test_an_error_of_the_step_itself_is_jax_s(mesh):
    def predict(p, x):
        return x @ p["w1"] @ p["w1"]

    with jax.set_mesh(mesh):
        args = arguments(**LAYOUT)
        with pytest.raises(TypeError, match="dot_general"):
            jaxshard_magic.shard(step_of(predict), "fsdp", mesh=mesh)(*args)


def test_an_axis_that_no_mesh_has_is_told_in_a_line():
    args = arguments()
    sharded = jaxshard_magic.shard(step_of(written), "dp", mesh="data=8")
    assert "along an axis that the strategy's mesh has not" in refusal(sharded, *args)


def changed_in_place(state, batch):
    """A step that returns no state: it writes into references, as JAX's training cookbook does."""

    def loss(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"] - batch["y"]) ** 2)

    params = jax.tree.map(jax.ref.get, state["params"])
    value, grads = jax.value_and_grad(loss)(params)

    def update(param, moment, grad):
        moment[...] = 0.9 * moment[...] + grad
        param[...] -= 0.1 * moment[...]

    jax.tree.map(update, state["params"], state["moments"], grads)
    state["steps"][...] += 1
    return value


def references(params):
    moments = jax.tree.map(jnp.zeros_like, params)
    return jax.tree.map(jax.new_ref, {"params": params, "moments": moments, "steps": jnp.zeros((), jnp.int32)})


def values(state):
    return jax.tree.map(lambda x: np.asarray(x[...]), state)


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_references_among_the_arguments_are_state(strategy, jitted):
    params, batch = arguments()
    plain, state = references(params), references(params)
    step = jax.jit(changed_in_place) if jitted else changed_in_place
    sharded = jaxshard_magic.shard(step, strategy, mesh="data=4 model=2", check=True)
    losses = [(jax.jit(changed_in_place)(plain, batch), sharded(state, batch)) for _ in range(3)]
    assert all(furthest(b, a) < 1e-4 for a, b in losses)
    assert furthest(values(state), values(plain)) < 1e-4
    roles = {leaf.path: leaf.role for leaf in sharded.report().leaves}
    assert (roles["state.params.w1"], roles["state.moments.w1"], roles["batch.x"]) == ("params", "optimizer", "batch")
    assert sharded.report().check.passed
    # The arrays stay as the strategy has laid them.
    spec = next(leaf.spec for leaf in sharded.report().leaves if leaf.path == "state.params.w1")
    assert tuple(state["params"]["w1"].sharding.spec) == tuple(spec)


def test_references_and_explicit_axes_together(mesh):
    with jax.set_mesh(mesh):
        params, batch = arguments(w2=P(None, "model"), batch=P("data"))
        plain, state = references(params), references(params)
        sharded = jaxshard_magic.shard(changed_in_place, "spmd", mesh=mesh)
        for _ in range(2):
            assert furthest(sharded(state, batch), changed_in_place(plain, batch)) < 1e-4
        assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, plain)


def test_a_reference_given_twice_is_refused():
    params, batch = arguments()
    state = references(params)
    state["moments"]["w1"] = state["params"]["w1"]
    assert "the same jax.Ref twice" in refusal(
        jaxshard_magic.shard(changed_in_place, "dp", mesh="data=8"), state, batch
    )


def test_an_array_in_the_place_of_a_reference_is_another_call():
    def scaled(x):
        return x[...] * 2

    sharded = jaxshard_magic.shard(scaled, "dp", mesh="data=8")
    x = jnp.arange(16.0)
    for given in (jax.new_ref(x), x, jax.new_ref(x), x):
        np.testing.assert_array_equal(sharded(given), x * 2)


def test_a_comparison_leaves_references_as_they_were():
    importlib.import_module("flax.nnx")  # it takes a reference for an object of its own
    params, batch = arguments()
    state = references(params)
    before = values(state)
    found = jaxshard_magic.compare(changed_in_place, "dp,fsdp", (state, batch), mesh="data=8", repeat=1)
    assert [t.why for t in found.trials] == [None, None]
    assert jax.tree.all(jax.tree.map(np.array_equal, values(state), before))


@pytest.mark.ci
def test_references_are_saved_and_restored(tmp_path):
    params, batch = arguments()
    plain, state, later = references(params), references(params), references(params)
    for _ in range(4):
        changed_in_place(plain, batch)
    for calls, given in ((2, state), (4, later)):
        sharded = jaxshard_magic.shard(changed_in_place, "fsdp", mesh="data=8")
        with sharded.checkpoint(tmp_path / "run", every=1, resume=calls == 4):
            for _ in range(calls):
                sharded(given, batch)
    assert furthest(values(later), values(plain)) < 1e-4
