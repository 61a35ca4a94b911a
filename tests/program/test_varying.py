"""Which values of a program written for one device differ between the devices."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.varying_axes import varying_axes


def differs(fun, *args, split=(0,), names=("i",), **options):
    """Along which axes the results of `fun` differ, where the arguments `split` do."""
    closed = jax.make_jaxpr(fun, axis_env=[(n, 8) for n in names])(*args)
    program = Program(closed)
    found = varying_axes(program, {program.inputs[k]: frozenset(names) for k in split}, **options)
    return ["".join(sorted(found[v])) if v is not None else "" for v in program.outputs]


def test_reductions_make_values_the_same_and_parts_make_them_differ():
    def f(x, w):
        everywhere = lax.psum(x, "i"), lax.pmean(x, "i"), lax.pmax(x, "i"), lax.all_gather(x, "i")
        moved = lax.ppermute(w, "i", [(0, 1)]), lax.all_to_all(lax.all_gather(x, "i"), "i", 0, 0)
        return *everywhere, *moved, lax.psum_scatter(w, "i"), w, x, lax.axis_index("i")

    args = jnp.ones(8), jnp.ones(8)
    assert differs(f, *args) == [""] * 4 + ["i", "i", "i", "", "i", "i"]
    assert differs(f, *args, own_parts=False) == [""] * 4 + ["", "", "", "", "i", ""]


def test_a_sum_within_groups_differs_from_group_to_group():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert differs(lambda x: lax.psum(x, "i", axis_index_groups=groups), 1.0) == ["i"]


def test_each_axis_is_followed_by_itself():
    def f(x):
        return lax.psum(x, "i"), lax.psum(x, "j"), lax.psum(x, ("i", "j")), lax.axis_index("j") + 1

    assert differs(f, 1.0, names=("i", "j")) == ["j", "i", "", "j"]


def test_what_differs_goes_round_loops_and_through_branches():
    def f(x, w):
        def trip(carry, _):
            _, b, c = carry
            return (b, c, c + x), lax.psum(c, "i")  # x reaches a after three trips

        (a, b, c), sums = lax.scan(trip, (w, w, w), None, length=2)
        inner = lax.scan(lambda s, _: (lax.scan(lambda t, _: (t + s, None), s, None, 2)[0], None), x, None, 2)[0]
        branch = lax.cond(x > 0, lambda: w, lambda: 2 * w)
        same = lax.cond(w > 0, lambda: w, lambda: 2 * w)
        trips = lax.while_loop(lambda s: s < x, lambda s: s + w, w)
        fixed = lax.while_loop(lambda s: s < w, lambda s: s + w, w)
        return a, b, c, sums, inner, branch, same, trips, fixed

    assert differs(f, 1.0, 1.0) == ["i", "i", "i", "", "i", "i", "", "i", ""]
