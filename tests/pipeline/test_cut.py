"""Where a loss is cut into stages: by hand on rows of numbers, and on losses whose work can be counted."""

from itertools import combinations
from sys import modules
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxshard_magic.errors import ShardError
from jaxshard_magic.pipeline.balance import largest_part_cost, partition, stage_starts
from jaxshard_magic.pipeline.loss_units import LossUnits
from jaxshard_magic.pipeline.split_loss import split_loss
from jaxshard_magic.pipeline.stages import make_stages
from jaxshard_magic.program.ir import Program

WIDTH, ROWS = 8, 4


def program(fun, *args):
    return Program(jax.make_jaxpr(fun)(*args))


def units(fun, *args):
    """Of a loss of (parameters, examples), one array each."""
    loss = program(fun, *args)
    return LossUnits(loss, loss.inputs[:1], loss.inputs[1:])


def layers(n, *, before=0, after=0):
    """A loss of n scanned layers, with as many products of the same work before and after."""

    def loss(w, x):
        for _ in range(before):
            x = x @ w[0]
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, w)
        for _ in range(after):
            x = x @ w[0]
        return x.sum()

    return units(loss, jnp.ones((n, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH)))


def test_the_largest_part_is_as_small_as_can_be():
    assert partition([5, 1, 1, 1, 1, 1], [0] * 6, 2) == [1]
    assert partition([1, 2, 3, 4, 5], [0] * 5, 3) == [3, 4]


def test_among_parts_about_as_even_the_cut_is_where_few_bytes_cross():
    assert partition([50, 1, 1, 50], [0, 9, 9, 2], 2) == [3]
    assert partition([1, 1, 1, 1], [0, 9, 9, 2], 2) == [2], "a part of 3 is half as large again"


def test_alike_cuts_are_made_evenly():
    assert partition([1] * 9, [0] * 9, 4) in ([2, 4, 6], [2, 4, 7], [2, 5, 7], [3, 5, 7])


def test_a_part_starts_where_it_must_and_not_where_it_may_not():
    assert partition([1] * 4, [0] * 4, 2, {2: False, 1: False}) == [3]
    assert partition([1] * 4, [0] * 4, 3, {1: True}) in ([1, 2], [1, 3])
    assert partition([1] * 4, [0] * 4, 2, {1: True, 2: True}) is None


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 4), st.sampled_from([1, 20, 1000]))
def test_no_cut_is_better_by_more_than_the_slack(costs, parts, at_once):
    with patch.object(modules[partition.__module__], "_AT_ONCE", at_once):
        found = partition(costs, [1] * len(costs), parts)
    if len(costs) < parts:
        assert found is None
        return
    best = min(largest_part_cost(costs, starts) for starts in combinations(range(1, len(costs)), parts - 1))
    assert found is not None and len(found) == parts - 1 and largest_part_cost(costs, found) <= best * 1.08


def test_units_are_operations_on_parameters_and_examples_and_layers_of_scans():
    assert len(layers(6).units) == 7  # and the sum
    free = units(lambda w, x: ((x + 1) @ (2 * w)).sum(), jnp.ones((WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH)))
    assert [u.equation.name for u in free.units] == ["dot_general", "reduce_sum"]


def test_a_unit_costs_its_products_and_one_for_each_number_that_it_makes():
    found = layers(3)
    each = 2 * ROWS * WIDTH * WIDTH
    assert [u.cost for u in found.units] == [pytest.approx(each + ROWS * WIDTH / 3)] * 3 + [1]


def test_between_layers_stands_what_the_scan_carries():
    assert layers(4).crossing_bytes == [0, *[ROWS * WIDTH * 4] * 4]


def test_a_value_read_far_behind_crosses_all_boundaries_between():
    def loss(w, x):
        first = x @ w
        second = jnp.tanh(first)
        third = jnp.sin(second)
        return (third * first).sum()

    one = ROWS * WIDTH * 4
    found = units(loss, jnp.ones((WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH)))
    assert found.crossing_bytes == [0, one, 2 * one, 2 * one, one]


def parts_of(n, stages, before=0, after=0):
    """How many of n scanned layers each stage has that has any."""
    found = layers(n, before=before, after=after)
    starts = stage_starts(found, stages)
    ends = [*starts, len(found.units)]
    parts = [min(b, before + n) - max(a, before) for a, b in zip([0, *starts], ends, strict=True)]
    return [k for k in parts if k > 0]


@pytest.mark.parametrize(
    ("n", "stages", "around", "parts"),
    [
        (8, 4, (0, 0), [2, 2, 2, 2]),
        (7, 4, (0, 0), [2, 2, 2, 1]),  # no 4 equal parts
        (3, 4, (1, 0), [1, 1, 1]),
        (8, 4, (0, 1), [2, 2, 2, 2]),  # 3 with the product behind, as 2, 3, 2, 1 have it at best
        (6, 4, (2, 0), [2, 2, 2]),  # those before it by themselves
        (12, 4, (3, 3), [3, 3, 3, 3]),  # 6 with those around it, where 5 are possible: 20% more
        (8, 4, (0, 2), [2, 3, 3]),  # 4 with those behind it, where 3 are possible: 33% more
    ],
)
def test_layers_are_cut_in_equal_parts_where_that_costs_little(n, stages, around, parts):
    before, after = around
    assert parts_of(n, stages, before, after) == parts


def test_two_scans_are_each_cut_in_equal_parts():
    def loss(w, x):
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, w[:4])
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, w[4:])
        return x.sum()

    found = units(loss, jnp.ones((8, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH)))
    assert stage_starts(found, 4) == [2, 4, 6]


def test_more_stages_than_places_are_refused_with_the_most_that_there_are():
    with pytest.raises(ShardError, match=r"--stages 8: the loss has 4 places for a stage .*; use --stages 4 or fewer"):
        stage_starts(layers(3), 8)
    with pytest.raises(ShardError, match=r"--stages 3 of 2 chunks each: .* 6 are needed; use --stages 2 or fewer"):
        stage_starts(layers(3), 6, 2)
    with pytest.raises(ShardError, match=r"has 1 place for a stage .*, 2 are needed; use dp"):
        stage_starts(units(lambda w, x: w * x, jnp.ones(3), jnp.ones(3)), 2)


def test_a_loss_with_nothing_to_cut_is_refused():
    found = units(lambda w, x: w.sum(), jnp.ones(3), jnp.ones(3))
    with pytest.raises(ShardError, match="no operation that depends on parameters and on examples"):
        stage_starts(found, 2)


def cut_in(fun, stages, *args, weights=1):
    """`fun(weights..., others..., examples)` in stages."""
    loss = program(fun, *args)
    found = split_loss(loss, range(weights), [len(args) - 1], stages)
    trained = [i for i, p in enumerate(found.pieces) if p.operand < weights]
    return found, make_stages(found.program, trained, stages)


def same_numbers(fun, found, *args):
    pieces = [
        args[p.operand] if p.end_layer is None else args[p.operand][p.first_layer : p.end_layer] for p in found.pieces
    ]
    made = jax.core.eval_jaxpr(found.program.closed.jaxpr, found.program.closed.consts, *pieces)
    return jnp.allclose(made[0], fun(*args), rtol=1e-6)


W, X = jnp.linspace(-1, 1, 6 * WIDTH * WIDTH).reshape(6, WIDTH, WIDTH), jnp.ones((ROWS, WIDTH))


def test_a_stacked_array_comes_in_the_pieces_of_its_stages():
    def loss(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

    found, stages = cut_in(loss, 3, W, X)
    assert [(p.first_layer, p.end_layer) for p in found.pieces] == [(0, 2), (2, 4), (4, 6), (None, None)]
    assert [s.parameters for s in stages] == [(0,), (1,), (2,)]
    assert found.crossing_bytes == (ROWS * WIDTH * 4,) * 2
    assert same_numbers(loss, found, W, X)


def test_pieces_are_cast_by_piece():
    def loss(w, x):
        short = w.astype(jnp.bfloat16)
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.astype(jnp.float32)), None), x, short)[0].sum()

    found, _ = cut_in(loss, 2, W, X)
    assert [p.end_layer for p in found.pieces] == [3, 6, None]
    assert same_numbers(loss, found, W, X)


def test_a_stacked_array_that_something_needs_whole_stays_whole():
    def loss(w, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return (x @ jnp.linalg.norm(w, axis=0)).sum()

    found, stages = cut_in(loss, 2, W, X)
    assert [p.end_layer for p in found.pieces] == [None, None]
    assert [s.parameters for s in stages] == [(0,), (0,)]
    assert same_numbers(loss, found, W, X)


def test_what_a_scan_stacks_up_is_put_together_at_its_end():
    def loss(w, x):
        x, each = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, w)
        return x.sum() + (each * jnp.arange(6)).sum()

    found, _ = cut_in(loss, 4, W, X)
    assert same_numbers(loss, found, W, X)


def test_a_value_that_skips_stages_is_handed_on_by_each():
    def loss(w, x):
        first = jnp.tanh(x @ w[0])
        h = first
        for i in range(1, 5):
            h = jnp.tanh(h @ w[i]) + first
        return h.sum()

    _, stages = cut_in(loss, 4, W, X)
    assert [s.incoming for s in stages[1:]] == [s.outgoing for s in stages[:-1]]
    assert len({s.outgoing[0] for s in stages[:-1]}) == 1, "the first layer's result"
    assert [len(s.outgoing) for s in stages] == [1, 2, 2, 0]


def test_stages_are_told_apart_behind_vmap_and_inner_derivatives():
    def loss(w, x):
        def out(w, x):
            for i in range(4):
                x = jnp.tanh(w[i] @ x)
            return x.sum()

        return jax.vmap(jax.grad(out, argnums=1), (None, 0))(w, x).sum()

    found, stages = cut_in(loss, 2, W, X)
    assert stages[0].outgoing and stages[1].incoming
    assert same_numbers(loss, found, W, X)


def test_a_penalty_on_a_weight_is_made_beside_it_and_travels_as_a_number():
    def loss(first, last, strength, x):
        penalty = strength * jnp.sum(first**2)
        h = jnp.tanh(x @ first) @ last
        return h.sum() + penalty, penalty

    found, (one, two) = cut_in(loss, 2, W[0], W[1], jnp.float32(2), X, weights=2)
    shapes = [found.program.shapes[v] for v in one.outgoing]
    assert sorted(shapes) == [(), (ROWS, WIDTH)]
    assert (one.parameters, two.parameters) == ((0,), (1,))
    assert two.loss_outputs == (0, 1), "also where the penalty is told, which is a number that both stages could make"
