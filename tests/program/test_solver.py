"""Facts of values, carried through loops, branches and calls."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxshard_magic
from jaxshard_magic.program.flow import Flow
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.solver import fact_origin, solve

README = Path(jaxshard_magic.__file__).parent / "program" / "README.md"


@pytest.fixture(scope="module")
def domain():
    """The example of the package's own text."""
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    return names["NonNegative"]()


def solved(domain, function, *inputs, known=()):
    """The program of a function of arrays, and the facts of its values; `known` inputs are at least 0."""
    program = Program(jax.make_jaxpr(function)(*inputs))
    return program, solve(program, domain, [k in known for k in range(len(program.inputs))])


def results(domain, function, *inputs, known=()):
    program, facts = solved(domain, function, *inputs, known=known)
    return [facts[v] for v in program.outputs]


X = jnp.ones(3)


def test_the_example_is_one_domain_of_few_lines(domain):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 60
    assert results(domain, lambda x, y: (x * x, jnp.exp(y), x - y, x + y), X, X) == [True, True, False, False]
    assert results(domain, lambda x, y: (x + y, x - y, x / y), X, X, known={0, 1}) == [True, False, True]


def test_a_carry_is_what_all_trips_leave_in_it(domain):
    def falling(x):
        return jax.lax.scan(lambda carry, _: (carry - x, carry), x, None, length=3)

    def growing(x):
        return jax.lax.scan(lambda carry, _: (carry + x, carry), x, None, length=3)

    assert results(domain, falling, X, known={0}) == [False, False], "from the second trip on"
    assert results(domain, growing, X, known={0}) == [True, True]


def test_what_one_carry_brings_into_another_takes_a_trip_each(domain):
    def shifted(a, b, c, d):
        return jax.lax.fori_loop(0, 9, lambda _, carry: (carry[1], carry[2], carry[3], carry[3]), (a, b, c, d))

    assert results(domain, shifted, X, X, X, X, known={0, 1, 2}) == [False] * 4
    assert results(domain, shifted, X, X, X, X, known={0, 1, 2, 3}) == [True] * 4


def test_a_while_may_make_no_trip_and_its_carry_may_be_a_literal(domain):
    def squared(x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * c[1]), (0, x))

    assert results(domain, squared, X) == [True, False]
    assert results(domain, squared, X, known={0}) == [True, True]

    def from_minus_one(x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1]), (-1, x))

    assert results(domain, from_minus_one, X, known={0}) == [False, True]


def test_a_branch_gives_what_any_of_its_bodies_may_give(domain):
    def chosen(k, x):
        return jax.lax.switch(k, [jnp.exp, jnp.abs, lambda x: x], x)

    assert results(domain, chosen, 1, X) == [False]
    assert results(domain, chosen, 1, X, known={1}) == [True]


def test_calls_and_rules_of_derivatives_are_opened_each_with_facts_of_its_own(domain):
    twice = jax.jit(lambda x: x + x)
    assert results(domain, lambda x, y: (twice(x), twice(y)), X, X, known={0}) == [True, False]
    assert results(domain, lambda x: jax.nn.relu(x) + jax.nn.sigmoid(x), X) == [True]


def test_arrays_that_a_body_closes_over_count_with_their_numbers(domain):
    below = jnp.array([-1.0, 1.0, 1.0])
    closed = jax.make_jaxpr(lambda x: jax.jit(lambda x: (x * below, x * jnp.abs(below)))(x))(X)
    program = Program(closed)
    facts = solve(program, domain, [True] * len(program.inputs))
    assert [facts[v] for v in program.outputs] == [False, True]


def test_what_stands_in_the_way_is_the_equation_that_lost_it(domain):
    def step(x):
        def trip(carry, _):
            return jnp.maximum(carry, 0) * 2, jnp.exp(carry) - 1

        return jax.lax.scan(trip, x * x, None, length=2)[1]

    program, facts = solved(domain, step, X)
    (output,) = program.outputs
    assert facts[output] is False
    found = fact_origin(Flow(program), facts, output)
    assert found is not None and found.name == "sub"
    assert fact_origin(Flow(program), facts, program.inputs[0]) is None
