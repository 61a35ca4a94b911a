"""Where a dimension goes through an equation that treats its places alike: the equation itself is the judge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.permutation_equivariance import SubDimension, follow_permutation
from jaxshard_magic.program.primitives import bind

N, M = 6, 4  # places, and what stands beside them
ORDER = np.asarray([3, 0, 5, 1, 4, 2])
ROWS, FLAT = jnp.arange(N * M, dtype=jnp.float32).reshape(N, M) % 7, jnp.arange(M * N * 2.0) % 5
TABLE, AT = jnp.arange(5.0 * M).reshape(5, M), jnp.asarray([[4], [0], [3], [3], [1], [2]])
LAST = jnp.asarray([3, 0, 1, 1, 2, 0])[:, None]

# What an equation does, its operands, and by operand the dimension of the places, None where it has none.
ALIKE = {
    "add": (lambda a, b: a + b, (ROWS, ROWS * 2), (0, 0)),
    "add to what is one row": (lambda a, b: lax.add_p.bind(a, b), (ROWS, ROWS[:, :1]), (0, 0)),
    "transpose": (lambda a: a.T, (ROWS,), (0,)),
    "broadcast": (lambda a: lax.broadcast_in_dim(a, (2, N, M), (1, 2)), (ROWS,), (0,)),
    "reshape beside": (lambda a: a.reshape(N, 2, 2), (ROWS,), (0,)),
    "product of rows": (lambda a, b: a @ b, (ROWS, TABLE[:4]), (0, None)),
    "product over rows": (
        lambda a, b: lax.dot_general(a, b, (((0,), (0,)), ((), ()))),
        (ROWS, ROWS + 1),
        (0, 0),
    ),
    "sum over rows": (lambda a: lax.reduce_sum_p.bind(a, axes=(0,), out_sharding=None), (ROWS,), (0,)),
    "largest of each": (lambda a: lax.reduce_max_p.bind(a, axes=(1,), out_sharding=None), (ROWS,), (0,)),
    "running sum beside": (lambda a: lax.cumsum(a, 1), (ROWS,), (0,)),
    "slice beside": (lambda a: a[:, 1:3], (ROWS,), (0,)),
    "set in beside": (lambda a, b: lax.dynamic_update_slice(a, b, (0, 1)), (ROWS, ROWS[:, :2]), (0, 0)),
    "side by side": (lambda a, b: lax.concatenate([a, b], 1), (ROWS, ROWS), (0, 0)),
    "looked up": (lambda t, i: _gather(t, i, (1,), (0,), (0,), (1, M)), (TABLE, AT), (None, 0)),
    "looked up in each": (
        lambda a, i: lax.gather(a, i, lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,)), (1, 1), mode="clip"),
        (ROWS, LAST),
        (0, 0),
    ),
    "added where looked up": (
        lambda t, i, u: lax.scatter_add(t, i, u, lax.ScatterDimensionNumbers((1,), (0,), (0,))),
        (TABLE, AT, ROWS),
        (None, 0, 0),
    ),
}
# The same of what depends on the order.
NOT_ALIKE = {
    "running sum": (lambda a: lax.cumsum(a, 0), (ROWS,), 0),
    "shift": (lambda a: a[1:], (ROWS,), 0),
    "padded": (lambda a: lax.pad(a, 0.0, ((1, 0, 0), (0, 0, 0))), (ROWS,), 0),
    "set beside": (lambda a: lax.concatenate([a, a], 0), (ROWS,), 0),
    "reversed": (lambda a: lax.rev(a, (0,)), (ROWS,), 0),
    "sorted": (lambda a: lax.sort(a, dimension=0), (ROWS,), 0),
    "largest, by its place": (lambda a: lax.argmax(a, 0, jnp.int32), (ROWS,), 0),
    "torn": (lambda a: a.reshape(4, 6), (ROWS,), 0),
    "convolved": (
        lambda a: lax.conv(a[None].transpose(0, 2, 1), jnp.ones((2, M, 3)), (1,), "SAME"),
        (ROWS,),
        0,
    ),
    "looked up there": (
        lambda a: _gather(a, AT, (1,), (0,), (0,), (1, M)),
        (ROWS,),
        0,
    ),
}


def _gather(table, at, offset, gone, along, sizes):
    return lax.gather(table, at, lax.GatherDimensionNumbers(offset, gone, along), sizes, mode="clip")


def equation(run, operands):
    """The last equation of a function, and what its operands are."""
    program = Program(jax.make_jaxpr(run)(*operands))
    return program.equations[-1], program


@pytest.mark.parametrize("name", ALIKE)
def test_what_treats_places_alike_gives_the_same_in_another_order(name):
    run, operands, dims = ALIKE[name]
    e, _ = equation(run, operands)
    given = {k: SubDimension(d, N) for k, d in enumerate(dims) if d is not None}
    for slot in given:
        places = follow_permutation(e, slot, given[slot])
        assert places is not None
        assert {k: place for k, place in places.items() if k < len(e.operands)} == given
        for k in places:  # whichever end one comes from
            assert follow_permutation(e, k, places[k]) == places
        plain = _run(e, operands)
        moved = _run(e, [_moved(x, places.get(k)) for k, x in enumerate(operands)])
        for j, (x, y) in enumerate(zip(plain, moved, strict=True)):
            np.testing.assert_allclose(_moved(x, places.get(len(e.operands) + j)), y, rtol=1e-6)


def test_places_merged_with_others_are_found_again():
    x = FLAT.reshape(M, N, 2)
    for shape in ((M * N, 2), (M, 2 * N), (M * N * 2,), (2, 2, N * 2)):
        e, _ = equation(lambda a, shape=shape: a.reshape(shape), (x,))
        places = follow_permutation(e, 0, SubDimension(1, N))
        assert places is not None
        (moved,) = _run(e, [_moved(x, places[0])])
        np.testing.assert_array_equal(moved, _moved(x.reshape(shape), places[1]))
        assert follow_permutation(e, 1, places[1]) == places


@pytest.mark.parametrize("name", NOT_ALIKE)
def test_what_depends_on_the_order_is_not_taken_for_alike(name):
    run, operands, dim = NOT_ALIKE[name]
    program = Program(jax.make_jaxpr(run)(*operands))
    v, place = program.inputs[0], SubDimension(dim, N)
    for e in program.equations:
        if v in e.operands:
            found = follow_permutation(e, e.operands.index(v), place)
            if found is None:
                return
            (v,) = e.results
            place = found.get(len(e.operands))
            assert place is not None
    pytest.fail("every equation treats places alike")


def _run(e, operands):
    literals = (x.val if hasattr(x, "val") else None for x in e.jaxpr_eqn.invars)
    given = [x if v is not None else y for x, y, v in zip(operands, literals, e.operands, strict=False)]
    rest = [x.val for x in e.jaxpr_eqn.invars[len(operands) :]]
    return bind(e.jaxpr_eqn, [*given, *rest])


def _moved(x, place):
    """The array with its places in `ORDER`."""
    if place is None:
        return x
    x, d = jnp.asarray(x), place.dim
    apart = x.reshape(*x.shape[:d], -1, place.size, place.stride, *x.shape[d + 1 :])
    return jnp.take(apart, ORDER, d + 1).reshape(x.shape)
