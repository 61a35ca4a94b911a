"""The traced step as data: values, links between dimensions, and re-emission."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.tree_util import GetAttrKey

from jaxshard_magic.program.dimensions import Dimensions
from jaxshard_magic.program.emit import Emitter
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.primitives.factors import reshape_groups
from jaxshard_magic.program.trace import DIFFERENTIATED, path_name, trace

X = jnp.linspace(-1.0, 1.0, 24).reshape(4, 6)


def program(f, *args):
    return Program(jax.make_jaxpr(f)(*args))


def emitted(f, *args):
    closed = jax.make_jaxpr(f)(*args)
    return Emitter(Program(closed))(*args), jax.tree.leaves(f(*args))


def scanned(x):
    return lax.scan(lambda c, row: (c + row.sum(), row * c), 0.5, x)


def nested(x):
    def outer(c, row):
        return lax.fori_loop(0, 3, lambda i, y: y + row[i] * c, c), c

    return lax.scan(outer, 1.0, x, reverse=True, unroll=2)


def branching(x):
    return lax.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, x), lax.switch(1, [jnp.sin, jnp.cos], x)


def until(x):
    return lax.while_loop(lambda c: c[0].sum() < 50, lambda c: (c[0] + c[1] ** 2 + 1, c[1]), (x, x))


@jax.custom_vjp
def clipped(x):
    return x * 3


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.clip(g * x, -0.1, 0.1),))


def custom(x):
    return (
        jax.grad(lambda y: clipped(y).sum())(x),
        jax.nn.relu(x),
        jax.grad(lambda y: jax.nn.silu(y).sum())(x),
    )


def remat(x):
    return jax.grad(lambda y: jax.checkpoint(lambda z: jnp.sin(z) * z)(y).sum())(x)


def random(x):
    key = jax.random.key(3)
    return x + jax.random.normal(key, x.shape), jax.random.fold_in(key, 1)


def empty_scan(x):
    return lax.scan(lambda c, row: (c * 2, row), x, x[:0])


def jitted(x):
    return jax.jit(lambda y: jax.jit(jnp.tanh)(y) + 1)(x), jax.vmap(lambda r: r @ r)(x)


@pytest.mark.parametrize(
    "f", [scanned, nested, branching, until, custom, remat, jitted, empty_scan], ids=lambda f: f.__name__
)
def test_a_reemitted_program_gives_the_same_numbers(f):
    got, want = emitted(f, X)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_random_draws_are_reemitted_to_the_bit():
    (x, key), (want, want_key) = emitted(random, X)
    assert (x == want).all()
    assert (jax.random.key_data(key) == jax.random.key_data(want_key)).all()


def test_reemission_keeps_the_line_of_the_users_code():
    def step(x):
        return jnp.tanh(x) @ x.T

    closed = jax.make_jaxpr(step)(X)
    again = jax.make_jaxpr(lambda x: Emitter(Program(closed))(x))(X)

    def frames(c):
        return [jax._src.source_info_util.summarize(e.source_info) for e in c.eqns]

    assert frames(again) == frames(closed)
    assert all("test_program.py" in f for f in frames(again))


def test_loop_trips_are_multiplied_in():
    def f(x):
        return lax.scan(
            lambda c, _: (lax.scan(lambda d, _: (jnp.sin(d), None), c, None, length=3)[0], None),
            x,
            None,
            length=5,
        )

    found = program(f, 1.0)
    assert [e.trip_count for e in found.equations if e.name == "sin"] == [15]


def test_the_same_function_called_twice_is_two_scopes():
    g = jax.jit(jnp.tanh)
    found = program(lambda x, y: (g(x), g(y)), X, X[:2])
    assert len({id(s) for s in found.sub_jaxprs()}) == 3


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_groups_of_a_reshape_have_equal_products_and_cover_all_dimensions(a, rnd):
    factors = [f for n in a for f in ([n] if rnd.random() < 0.5 else [n, 1])]
    b = []
    for f in factors:
        if b and rnd.random() < 0.4:
            b[-1] *= f
        else:
            b.append(f)
    groups = reshape_groups(a, b)
    assert [d for g, _ in groups for d in g] == list(range(len(a)))
    assert [d for _, g in groups for d in g] == list(range(len(b)))
    for left, right in groups:
        assert math.prod(a[d] for d in left) == math.prod(b[d] for d in right)


def test_a_reshape_of_an_empty_array_is_no_trouble():
    assert reshape_groups((0, 3), (3, 0)) is not None
    found = program(lambda x: x.reshape(3, 0), jnp.zeros((0, 3)))
    Dimensions(found, (2,))


def classes(f, *args):
    found = program(f, *args)
    dims = Dimensions(found, (2,))
    return [dims.classes_of(v) for v in found.inputs], [dims.classes_of(v) for v in found.outputs]


def test_a_matmul_joins_what_it_contracts_and_passes_on_the_rest():
    ((a, b), (c, d)), [(e, f)] = classes(jnp.matmul, jnp.ones((8, 4)), jnp.ones((4, 6)))
    assert (b, a, d) == (c, e, f)
    assert len({a, b, d}) == 3


def test_attention_joins_the_heads_of_its_projections():
    def attend(x, q, o):
        heads = (x @ q).reshape(8, 4, 16)
        return heads.reshape(8, 64) @ o

    (_, (_, out), (into, _)), _ = classes(attend, jnp.ones((8, 64)), jnp.ones((64, 64)), jnp.ones((64, 64)))
    assert out == into


def test_a_leading_size_that_no_axis_divides_blocks_the_link():
    (_, (_, out)), [(_, three, _)] = classes(
        lambda x, w: (x @ w).reshape(8, 3, 16), jnp.ones((8, 4)), jnp.ones((4, 48))
    )
    assert out != three


def test_arrays_that_are_stacked_keep_their_dimensions():
    def turned(x):
        return jnp.stack(jnp.unstack(x, axis=1), axis=0)

    [(rows, _, width)], [(_, out, last)] = classes(turned, jnp.ones((8, 2, 4)))
    assert (rows, width) == (out, last)


def test_a_scan_joins_what_is_carried_and_drops_the_loop_dimension():
    ((layer, width, _), (_, x)), [(_, y)] = classes(
        lambda w, x: lax.scan(lambda c, k: (c @ k, None), x, w)[0], jnp.ones((3, 4, 4)), jnp.ones((8, 4))
    )
    assert width == x == y != layer


def test_a_split_batch_goes_on_as_the_part_that_is_not_looped_over():
    def accumulate(w, x):
        def one(total, rows):
            return total + (rows @ w).sum(0), None

        return lax.scan(one, jnp.zeros(4), x.reshape(2, 8, 4))[0]

    found = program(accumulate, jnp.ones((4, 4)), jnp.ones((16, 4)))
    dims = Dimensions(found, (4,))
    batch = dims.classes_of(found.inputs[1])[0]
    product = next(e for e in found.equations if e.name == "dot_general")
    assert dims.classes_of(product.operands[0])[0] == batch


def test_tracing_marks_gradients_hoists_closed_over_arrays_and_patches_nothing():
    data, inner = jnp.ones((4, 4)), jax._src.api.vjp
    grad = jax.grad  # bound before, as `from jax import grad` does

    def step(w):
        return [w - grad(lambda w: (data @ w).sum())(w)], [(GetAttrKey("w"),)]

    traced = trace(step, [jnp.ones((4, 4))], [(GetAttrKey("w"),)])
    assert [path_name(p) for p in traced.in_paths] == ["closure.0", "w"]
    assert traced.consts[0] is data and not traced.closed.consts
    marks = [e.params["name"] for e in traced.closed.eqns if e.primitive.name == "name"]
    assert DIFFERENTIATED in marks
    assert jax._src.api.vjp is inner


def test_a_step_that_raises_while_traced_leaves_nothing_patched():
    inner = jax._src.api.vjp

    def step(w):
        raise KeyError("wte")

    with pytest.raises(KeyError, match="wte"):
        trace(step, [X], [(GetAttrKey("w"),)])
    assert jax._src.api.vjp is inner


def test_a_gradient_function_that_ran_before_is_seen():
    gradient = jax.jit(jax.grad(lambda w: (w**2).sum()))
    gradient(X)
    traced = trace(lambda w: ([gradient(w)], [()]), [X], [(GetAttrKey("w"),)])
    assert DIFFERENTIATED in str(traced.closed)
