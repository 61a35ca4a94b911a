"""What Shardy tells of dividing a step's inputs, against what the step's arithmetic needs."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.shardy import ShardyCollective, ShardyDivision, ShardyPartitioner

X, W = jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((16, 4), "float32")


def partitioner_of(step, *args) -> ShardyPartitioner:
    found = ShardyPartitioner.for_program(Program(jax.make_jaxpr(step)(*args)))
    assert found is not None
    return found


def test_rows_of_a_product_send_nothing():
    division = partitioner_of(lambda x, w: jnp.tanh(x @ w), X, W).divide({0: 0}, 4)
    assert division == ShardyDivision(4, frozenset({0}), ())


def test_a_contracted_dimension_is_a_sum_and_its_other_side_is_divided_too():
    division = partitioner_of(lambda x, w: jnp.tanh(x @ w), X, W).divide({0: 1}, 4)
    assert division is not None
    assert division.divided_inputs == {0, 1}
    assert [(c.kind, c.nbytes) for c in division.collectives] == [("all_reduce", 8 * 4 * 4)]
    assert (division.bytes_without_sums, division.total_bytes) == (0, 8 * 4 * 4)


def test_a_collective_in_a_loop_counts_each_trip():
    def step(x, w):
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, None, 5)[0]

    square = jax.ShapeDtypeStruct((16, 16), "float32")
    division = partitioner_of(step, X, square).divide({1: 0}, 4)
    assert division is not None
    sums = [c for c in division.collectives if c.kind == "all_reduce"]
    assert [c.trips for c in sums] == [5]
    assert division.total_bytes - division.bytes_without_sums == 5 * 8 * 16 * 4


def test_pairs_of_one_dimension_gather_one_side():
    division = partitioner_of(lambda x: x @ x.T, X).divide({0: 0}, 4)
    assert division is not None
    assert [(c.kind, c.nbytes) for c in division.collectives] == [("all_gather", 8 * 16 * 4)]
    assert division.bytes_without_sums == 8 * 16 * 4


@pytest.mark.parametrize("dtype, nbytes", [("bool", 1), ("bfloat16", 2), ("complex64", 8), ("int4", 1)])
def test_bytes_are_those_of_the_dtype(dtype, nbytes):
    def step(x):
        start = jnp.zeros((), x.dtype)
        return jax.lax.reduce(x, start, jnp.bitwise_or if dtype == "bool" else jax.lax.add, (0,))

    division = partitioner_of(step, jax.ShapeDtypeStruct((8, 3), dtype)).divide({0: 0}, 4)
    assert division is not None
    assert [(c.kind, c.nbytes) for c in division.collectives] == [("all_reduce", 3 * nbytes)]


@pytest.mark.parametrize(
    "function", [jax.lax.erf, jax.lax.erf_inv, jax.lax.lgamma, jax.lax.asinh, lambda x: jax.lax.igamma(x, x)]
)
def test_functions_of_each_element_pass_a_division_on(function):
    division = partitioner_of(lambda x, y: function(x) + y, X, X).divide({0: 0}, 4)
    assert division == ShardyDivision(4, frozenset({0, 1}), ())


def test_the_largest_of_each_row_need_the_row_whole_and_no_others():
    asked = partitioner_of(lambda x: jax.lax.top_k(x, 2)[0], X)
    assert asked.divide({0: 0}, 4) == ShardyDivision(4, frozenset({0}), ())
    division = asked.divide({0: 1}, 4)
    assert division is not None
    assert division.bytes_without_sums > 0


def test_operands_of_a_call_without_a_rule_are_gathered():
    def step(x):
        return jax.pure_callback(lambda x: x, X, jnp.tanh(x)) + 1

    division = partitioner_of(step, X).divide({0: 0}, 4)
    assert division is not None
    assert [(c.kind, c.nbytes) for c in division.collectives] == [("all_gather", 8 * 16 * 4)]


def test_typed_keys_and_ordered_effects_keep_the_places_of_inputs():
    def step(keys, x):
        jax.debug.print("{}", x.sum(), ordered=True)
        return jax.vmap(jax.random.normal)(keys) + x

    keys = jax.random.split(jax.random.key(0), 8)
    division = partitioner_of(step, keys, jnp.ones(8)).divide({0: 0}, 4)
    assert division is not None
    assert division.divided_inputs == {0, 1}


def test_a_step_that_this_host_does_not_lower_has_no_partitioner():
    def step(x):
        return jax.lax.platform_dependent(x, tpu=jnp.sin) + x

    assert ShardyPartitioner.for_program(Program(jax.make_jaxpr(step)(jnp.ones(8)))) is None


def test_a_step_is_lowered_once_and_kept_no_longer_than_it_is():
    program = Program(jax.make_jaxpr(lambda x: x + 1)(X))
    asked = ShardyPartitioner.for_program(program)
    assert asked is not None
    assert ShardyPartitioner.for_program(program) is asked
    gone = weakref.ref(program)
    del program
    gc.collect()
    assert gone() is None


def test_a_question_leaves_the_next_one_as_it_was():
    asked = partitioner_of(lambda x, w: x @ w, X, W)
    first = asked.divide({0: 1}, 4)
    asked.divide({0: 0}, 2)
    assert asked.divide({0: 1}, 4) == first
    assert first is not None
    assert first.collectives == (ShardyCollective("all_reduce", 8 * 4 * 4, 0, 1),)
