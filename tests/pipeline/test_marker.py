"""`jaxshard_magic.cut`: nothing anywhere but in a pipeline, whose stages begin there."""

from functools import partial
from itertools import pairwise

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import pipelined_steps as steps
from support.thinned import FULL, thinned

import jaxshard_magic
from jaxshard_magic import cut
from jaxshard_magic.errors import ShardError
from jaxshard_magic.pipeline.allowed_starts import allowed_starts, marked_starts
from jaxshard_magic.pipeline.balance import stage_starts
from jaxshard_magic.pipeline.loss_units import LossUnits
from jaxshard_magic.program.ir import Program

# An identity


def test_outside_of_a_trace_it_gives_back_what_it_was_given():
    x, key = np.ones(3), jax.random.key(0)
    given = {"x": x, "key": key, "n": 2, "none": None, "word": "mean"}
    got = cut(given)
    assert got.keys() == given.keys() and all(got[k] is x for k, x in given.items())


def loss(w, x, mark):
    def layer(h, w):
        return mark(jnp.tanh(h @ w)), h.sum()

    carried = mark({"h": x @ w[0], "rows": jnp.arange(len(x)), "key": jax.random.key(1), "n": 2, "none": None})
    h, sums = jax.lax.scan(layer, carried["h"], w)
    noise = jax.random.uniform(mark(carried["key"]), h.shape)
    return ((h * noise)[carried["rows"]] * carried["n"]).sum() + mark(sums).sum()


W, X = jnp.linspace(-1, 1, 48).reshape(3, 4, 4), jnp.linspace(0, 2, 20).reshape(5, 4)
WAYS = {
    "eager": lambda f: f(W, X),
    "jit": lambda f: jax.jit(f)(W, X),
    "grad": lambda f: jax.grad(f)(W, X),
    "forward derivative": lambda f: jax.jvp(f, (W, X), (W, X)),
    "second derivative": lambda f: jax.hessian(f)(W, X),
    "vmap": lambda f: jax.vmap(f, (None, 0))(W, jnp.stack([X, 2 * X])),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), (None, 0))(W, jnp.stack([X, 2 * X])),
    "remat": lambda f: jax.grad(jax.checkpoint(f))(W, X),
    "remat that keeps products": lambda f: jax.grad(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable))(
        W, X
    ),
    "scan": lambda f: jax.lax.scan(lambda w, x: (w - jax.grad(f)(w, x), f(w, x)), W, jnp.stack([X, 2 * X])),
}


SELDOM = {"vmap of grad", "remat that keeps products", "second derivative"}


@pytest.mark.parametrize("name", thinned(WAYS, WAYS.keys() - SELDOM))
def test_it_is_the_identity_under(name):
    way = WAYS[name]
    got, want = (way(partial(loss, mark=mark)) for mark in (cut, lambda x: x))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_it_costs_nothing():
    def lowered(mark):
        return jax.jit(jax.grad(partial(loss, mark=mark))).lower(W, X).compile().cost_analysis()

    assert lowered(cut) == lowered(lambda x: x)


# Where it lets a stage begin


def places(units):
    found = marked_starts(units)
    assert found is not None
    return found.starts


def units(fun, layers=6):
    w, x = jnp.ones((layers, 8, 8)), jnp.ones((4, 8))
    program = Program(jax.make_jaxpr(fun)(w, x))
    return LossUnits(program, program.inputs[:1], program.inputs[1:])


def products(h, w, n):
    for i in range(n):
        h = h @ w[i]
    return h


def scanned(body):
    return units(lambda w, x: jax.lax.scan(lambda h, w: (body(h, w), None), x @ w[0], w)[0].sum())


def test_what_follows_a_marker_begins_a_stage():
    def loss(w, x):
        h = cut(products(x, w, 2))
        h = cut(products(h, w, 3))
        return products(h, w, 1).sum()

    found = units(loss)
    names = [u.equation.name for u in found.units]
    assert names == ["dot_general"] * 2 + ["name"] + ["dot_general"] * 3 + [
        "name",
        "dot_general",
        "reduce_sum",
    ]
    assert places(found) == [2, 6]


def test_markers_without_work_before_or_after_or_between_them_are_no_places():
    def loss(w, x):
        h = cut(products(cut(x), cut(w), 2))
        h = products(cut(cut(h)), w, 1)
        return cut(h.sum())

    assert places(units(loss)) == [2]


def test_a_marker_of_several_arrays_is_one_place():
    def loss(w, x):
        first = x @ w[0]
        second = first @ w[1]
        w, x, first, second = cut((w, x, first, second))
        return (second @ w[2] + first + x).sum()

    assert places(units(loss)) == [2]


def test_a_marker_of_what_needs_no_parameters_counts_where_it_stands():
    def loss(w, x):
        h = products(x, w, 3)
        return (h @ w[0] + cut(2 * x)).sum() + (cut(x) @ w[0]).sum()

    assert places(units(loss)) == [4, 6]


@pytest.mark.parametrize(
    ("body", "starts"),
    [
        (lambda h, w: cut(h) @ w, [1, 2, 3, 4, 5, 6]),  # before each layer, the first too
        (lambda h, w: cut(h @ w), [2, 3, 4, 5, 6, 7]),  # behind each, the last too
        (lambda h, w: cut(cut(h) @ w), [1, 2, 3, 4, 5, 6, 7]),
        (lambda h, w: cut(h).T.T @ jnp.sin(w), [1, 2, 3, 4, 5, 6]),
        (jax.checkpoint(lambda h, w: cut(h) @ w), [1, 2, 3, 4, 5, 6]),
        (lambda h, w: jax.checkpoint(lambda h: cut(h @ w))(h), [2, 3, 4, 5, 6, 7]),
        (jax.jit(lambda h, w: cut(h) @ w), [1, 2, 3, 4, 5, 6]),
        (lambda h, w: cut(h @ w) @ w, []),
    ],
)
def test_at_the_start_or_the_end_of_a_scanned_layer_it_lets_stages_begin_at_each(body, starts):
    found = scanned(body)
    assert [u.layer for u in found.units] == [None, 0, 1, 2, 3, 4, 5, None]
    assert places(found) == starts


def test_in_a_loop_with_a_counter_it_lets_stages_begin_at_each_trip():
    def loss(w, x):
        return jax.lax.fori_loop(0, 6, lambda i, h: cut(h) @ w[i], x).sum()

    assert places(units(loss)) == [1, 2, 3, 4, 5]


def test_a_marker_at_an_end_of_what_stays_whole_counts_outside_of_it():
    def loss(w, x):
        h = products(x, w, 2)
        h = jax.checkpoint(lambda h: products(cut(h), w, 2))(h)
        h = jax.lax.cond(x[0, 0] > 0, lambda h: h @ w[0], lambda h: h @ w[1], h)
        h = jax.checkpoint(lambda h: cut(products(h, w, 2)))(h)
        return (h @ w[0]).sum()

    assert places(units(loss)) == [2, 5]


def test_without_markers_a_stage_may_begin_anywhere():
    assert allowed_starts(units(lambda w, x: products(x, w, 4).sum()), 2) is None


def test_of_more_markers_than_are_needed_those_of_most_even_stages_are_taken():
    def loss(w, x):
        h = x
        for n in (1, 3, 1, 4, 1):
            h = cut(products(h, w, n))
        return (h @ w[0]).sum()

    found = units(loss)
    assert places(found) == [1, 5, 7, 12, 14]
    # 11 products: 5 and 6 of them, 4 and 5 and 2, 4 and 1 and 4 and 2
    assert [stage_starts(found, n, allowed=allowed_starts(found, n)) for n in (2, 3, 4)] == [
        [7],
        [5, 12],
        [5, 7, 12],
    ]


def test_a_marked_loop_is_cut_in_equal_parts_where_that_costs_little():
    def loss(w, x):
        h, _ = jax.lax.scan(lambda h, w: (cut(h) @ w, None), x, w)
        return cut(h @ w[0]).sum()

    found = units(loss, layers=8)
    assert stage_starts(found, 4, allowed=allowed_starts(found, 4)) == [2, 4, 6]


@pytest.mark.parametrize(
    ("stages", "chunks", "says", "fix"),
    [
        (4, 1, "--stages 4: jaxshard_magic.cut marks 2 places for a stage to begin, 3 are needed; use --stages 3 or "
         "fewer, or mark more", "--stages 3"),
        (4, 2, "--stages 2 of 2 chunks each: jaxshard_magic.cut marks 2 places for a stage to begin, 3 are needed; "
         "mark more, or use a schedule with one chunk a rank", None),
    ],
)  # fmt: skip
def test_too_few_markers_are_counted_and_what_would_do_is_said(stages, chunks, says, fix):
    found = units(lambda w, x: products(cut(products(cut(x @ w[0]), w, 2)), w, 2).sum())
    with pytest.raises(ShardError) as raised:
        allowed_starts(found, stages, chunks)
    assert (str(raised.value), raised.value.fix) == (says, fix)


def test_markers_in_the_middle_of_a_layer_are_named_where_too_few_are_left():
    with pytest.raises(ShardError) as raised:
        allowed_starts(scanned(lambda h, w: cut(h @ w) @ w), 2)
    assert str(raised.value) == (
        "--stages 2: jaxshard_magic.cut marks 0 places for a stage to begin (1 more in the middle of a loop's body, a "
        "branch or remat, which stay whole), 1 is needed; move those to its start or end, or mark more"
    )


# In a pipeline


def marked(at=(), layers=8):
    """A step whose loss has markers before these of its layers."""

    def loss(params, x, y):
        h = params["embedding"][x]
        for i, w in enumerate(params["layers"]):
            h = steps.block(cut(h) if i in at else h, w)
        return steps.per_example(h @ params["head"], y).mean()

    return steps.trained(steps.language_model(layers), loss)


def marked_scan():
    def block(h, w):
        return steps.block(cut(h), w)

    def loss(params, x, y):
        return steps.per_example(steps.logits(params, x, block), y).mean()

    return steps.trained(steps.language_model(8, scanned=True), loss)


def piped(made, stages, **options):
    """The step as a pipeline, called and checked against the plain one."""
    step, args = made
    sharded = jaxshard_magic.shard(step, "pp", mesh=f"pipe={stages}", microbatches=4, check=True, **options)
    sharded(*args)
    assert sharded.checked is not None and sharded.checked.passed
    return sharded


def parameters(sharded):
    """How many parameters each stage reads."""
    parts = sharded.entry.compiled.split.losses[0].split_loss.units
    return [len({k for unit in units for k in unit.parameters}) for units in parts]


@pytest.mark.parametrize(
    ("made", "stages", "options", "read"),
    [
        # Two weights a layer; with the embedding in the first stage, and the head in the last.
        (marked({1, 3}), 3, {}, [1 + 2, 4, 10 + 1]),
        pytest.param(
            marked({1, 3, 4}), 2, {"schedule": "interleaved", "chunks": 2}, [1 + 2, 4, 2, 8 + 1], marks=FULL
        ),
        pytest.param(marked({1, 4, 7}), 2, {}, [1 + 8, 8 + 1], marks=FULL),
        pytest.param(marked({1}), 4, {"cut": "^block$"}, [1 + 4, 4, 4, 4 + 1], marks=FULL),
        (marked_scan(), 4, {}, [1 + 2, 2, 2, 2 + 1]),  # two stacks
    ],
    ids=["as many", "chunks", "more", "--cut", "scan"],
)  # fmt: skip
def test_stages_begin_at_markers_and_numbers_stay(made, stages, options, read):
    assert parameters(piped(made, stages, **options)) == read


def test_too_few_markers_end_a_cell_before_anything_runs():
    step, args = marked({4})
    sharded = jaxshard_magic.shard(step, "pp", mesh="pipe=4", microbatches=4)
    with pytest.raises(ShardError, match=r"cut marks 1 place for a stage to begin, 3 are needed; use --stages 2"):
        sharded.prepare(*args)


@pytest.mark.ci
@pytest.mark.parametrize("options", thinned([{}, {"microbatches": 4, "remat": "full", "precision": "bf16"}], [{}]))
def test_without_a_pipeline_a_marked_step_is_sharded_as_it_is(options):
    (step, args), (plain, _) = marked({1, 3}), marked()
    sharded, same = (jaxshard_magic.shard(f, "fsdp", mesh="data=4", **options)(*args) for f in (step, plain))
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(a, b)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, h, _):
        return cut(h) + nn.relu(nn.Dense(8)(h)), None


class Linen(nn.Module):
    """A layer by itself, four in a loop, and a head."""

    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(8, name="first")(x))
        h, _ = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)()(h, None)
        return nn.Dense(1)(cut(h))


def data():
    return steps.normal(1, 16, 8), steps.normal(2, 16, 1)


@pytest.mark.ci
def test_in_linen_modules():
    model, (x, y) = Linen(), data()

    def loss(params, x, y):
        return jnp.mean((model.apply({"params": params}, x) - y) ** 2)

    made = steps.trained(model.init(jax.random.key(0), x)["params"], loss, optax.sgd(0.1), (x, y))
    assert parameters(piped(made, 6)) == [2, 2, 2, 2, 2, 2]


class Net(nnx.Module):
    def __init__(self, rngs):
        sizes = (8, 32, 16, 8, 1)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(sizes)])

    def __call__(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(cut(nnx.relu(x)) if i in (1, 3) else x)
        return x


def test_in_nnx_modules():
    @nnx.jit
    def step(model, optimizer, x, y):
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return value

    model = Net(nnx.Rngs(0))
    made = step, (model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), *data())
    assert parameters(piped(made, 3)) == [2, 4, 2]
