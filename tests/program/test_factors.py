"""Which dimension of an operand is which of a result: the primitives themselves and Shardy are the judges."""

import re
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxlib.mlir import passmanager

from jaxshard_magic.program.batching.batch_labels import PerExample, UnknownLabel
from jaxshard_magic.program.batching.followed_program import follow_batch
from jaxshard_magic.program.histograms import Histograms
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.permutation_equivariance import follow_permutation as follow_places
from jaxshard_magic.program.primitives.factors import SubDimension
from jaxshard_magic.program.primitives.primitive import Kind
from jaxshard_magic.program.primitives.table import TABLE
from jaxshard_magic.program.shardy import has_passes
from jaxshard_magic.program.sort_analysis import SortAnalysis
from jaxshard_magic.program.sort_states import UnknownOrder

RANDOM = np.random.default_rng(0)
SIZES = (1, 2, 3, 4, 6)


def random_shape(rank: int) -> tuple[int, ...]:
    return tuple(int(n) for n in RANDOM.choice(SIZES, rank))


def random_shape_of(numbers: int) -> tuple[int, ...]:
    """A shape of so many numbers, its dimensions cut anywhere."""
    sizes = []
    while numbers > 1:
        size = int(RANDOM.choice([n for n in range(2, numbers + 1) if numbers % n == 0]))
        sizes += [size] + [1] * int(RANDOM.random() < 0.2)
        numbers //= size
    return tuple(sizes)


def broadcast_in_dim(x):
    into = sorted(RANDOM.choice(x.ndim + 2, x.ndim, replace=False))
    shape = list(random_shape(x.ndim + 2))
    for size, d in zip(x.shape, into, strict=True):
        shape[d] = size if size > 1 else shape[d]
    return lambda y: lax.broadcast_in_dim_p.bind(
        y, shape=tuple(shape), broadcast_dimensions=tuple(map(int, into)), sharding=None
    )


def transpose(x):
    order = tuple(map(int, RANDOM.permutation(x.ndim)))
    return lambda y: lax.transpose_p.bind(y, permutation=order)


def reshape(x):
    order = [None, tuple(map(int, RANDOM.permutation(x.ndim)))][int(RANDOM.integers(2))]
    sizes = random_shape_of(x.size)
    return lambda y: lax.reshape_p.bind(y, new_sizes=sizes, dimensions=order, sharding=None)


def squeeze(x):
    gone = tuple(d for d, size in enumerate(x.shape) if size == 1)
    return lambda y: lax.squeeze_p.bind(y, dimensions=gone)


MAKERS = {f.__name__: f for f in (broadcast_in_dim, transpose, reshape, squeeze)}
UNTRACED = {"expand_dims"}  # jax traces it as a broadcast or a reshape


def instances(name: str, count: int):
    for _ in range(count):
        x = jnp.arange(prod(shape := random_shape(int(RANDOM.integers(1, 5)))), dtype=jnp.float32).reshape(shape)
        run = MAKERS[name](x)
        (e,) = Program(jax.make_jaxpr(run)(x)).equations
        assert e.name == name and e.factors is not None
        yield run, x, e


def places(shape):
    """All places of a shape's dimensions, whole and cut into factors."""
    for d, size in enumerate(shape):
        for inner in (n for n in range(1, size + 1) if size % n == 0):
            yield from (SubDimension(d, n, inner) for n in range(2, size // inner + 1) if size // inner % n == 0)


def turned(x, place: SubDimension):
    """`x` with the numbers of its places turned round by one."""
    d = place.dim
    apart = np.asarray(x).reshape(*x.shape[:d], -1, place.size, place.stride, *x.shape[d + 1 :])
    return np.roll(apart, 1, d + 1).reshape(x.shape)


def test_every_primitive_that_changes_dimensions_says_how():
    shapes = {name for name, row in TABLE.items() if row.kind is Kind.SHAPE}
    assert shapes == {name for name, row in TABLE.items() if row.factors is not None}
    assert shapes == MAKERS.keys() | UNTRACED


@pytest.mark.parametrize("name", MAKERS)
def test_the_primitive_moves_places_as_its_factors_say(name):
    known = 0
    for run, x, e in instances(name, 60):
        factors = e.factors
        for place in places(x.shape):
            moved = factors.map_to_result(place)
            if moved is not None:
                known += 1
                np.testing.assert_array_equal(run(jnp.asarray(turned(x, place))), turned(run(x), moved))
                assert factors.inverse.map_to_result(moved) == place
        for d, size in enumerate(x.shape):
            whole = factors.unsplit_dim(d)
            assert whole is None or (
                factors.map_to_result(SubDimension(d, size)) or SubDimension(whole, size)
            ) == SubDimension(whole, size)
        for d in factors.repeated_dims:
            out = np.asarray(run(x))
            np.testing.assert_array_equal(out, np.roll(out, 1, d))
        assert factors.has_repeats == (run(x).size != x.size)
    assert known > 30 or name == "squeeze"


def test_a_shape_primitive_without_factors_is_unknown_and_no_reshape(monkeypatch):
    monkeypatch.setitem(TABLE, "reshape", replace(TABLE["reshape"], factors=None))

    def rows(x):
        order = jnp.argsort(jnp.argmax(x, -1))
        return x[order].reshape(8, 2, 3)

    program = Program(jax.make_jaxpr(rows)(jnp.ones((8, 6))))
    e = next(e for e in program.equations if e.name == "reshape")
    assert follow_places(e, 0, SubDimension(0, 8)) is None
    assert isinstance(SortAnalysis(program).states[e.results[0]], UnknownOrder)
    halves = [Program(jax.make_jaxpr(lambda x: x.reshape(-1, 6))(jnp.ones((n, 2, 3)))) for n in (4, 8)]
    assert isinstance(follow_batch(*halves, {0: 0}).output_labels[0], UnknownLabel)


def test_examples_do_not_lead_where_a_reshape_goes_through_other_dimensions_first():
    def relaid(order):
        traced = (jax.make_jaxpr(lambda x: lax.reshape(x, (x.size,), order))(jnp.ones((n, 3))) for n in (4, 8))
        return follow_batch(*map(Program, traced), {0: 0}).output_labels[0]

    assert relaid((0, 1)) == PerExample(0)
    assert isinstance(relaid((1, 0)), UnknownLabel)


def test_what_is_counted_along_another_dimension_is_no_count_of_keys():
    def counted(x):
        keys = jnp.argmax(x, -1)
        across = lax.broadcasted_iota(keys.dtype, (6, 6), 0).T  # the number along the other dimension
        return (lax.broadcast_in_dim(keys, (6, 6), (1,)) == across).sum(1)

    program = Program(jax.make_jaxpr(counted)(jnp.ones((6, 6))))
    assert Histograms(program).counted_keys(program.outputs[0]) is None


def test_keys_of_their_own_for_each_number_are_no_keys_of_all():
    def counted(x):
        keys = jnp.argmax(x, -1)
        return (keys == lax.broadcasted_iota(keys.dtype, keys.shape, 1)).sum(0)

    program = Program(jax.make_jaxpr(counted)(jnp.ones((6, 4, 5))))
    assert Histograms(program).counted_keys(program.outputs[0]) is None


@pytest.mark.parametrize("name", ["transpose", "reshape"])
def test_a_part_of_the_leading_dimension_is_a_part_of_the_operand(name):
    found = 0
    for run, x, e in instances(name, 60):
        for d, size in enumerate(x.shape):
            to, out = e.factors.leading_dim(d), np.asarray(run(x))
            if to is None or size == 1 or (out.shape[to] % size and size % out.shape[to]):
                continue
            found += 1
            first = lax.slice_in_dim(x, 0, max(1, size // out.shape[to]), axis=d)
            assert set(np.ravel(out.take(range(max(1, out.shape[to] // size)), to))) <= set(np.ravel(first))
    assert found > 30


@pytest.mark.skipif(not has_passes(), reason="jaxlib has no passes of Shardy")
@pytest.mark.parametrize("name", MAKERS)
def test_shardy_has_the_same_factors(name):
    for run, x, e in instances(name, 12):
        lowered = jax.jit(run).lower(jax.ShapeDtypeStruct(x.shape, x.dtype)).compiler_ir("stablehlo")
        passes = "builtin.module(inline,symbol-dce,func.func(sdy-populate-op-sharding-rules))"
        with lowered.context:
            passmanager.PassManager.parse(passes).run(lowered.operation)
        rules = re.findall(r"op_sharding_rule<\(\[(.*?)\]\)->\(\[(.*?)\]\) \{(.*?)\}", str(lowered))
        if len(rules) != 1:  # a broadcast of ones, or a reshape in another order, is several operations
            continue
        old, new, sizes = rules[0]
        count = {k: int(n) for k, n in (pair.split("=") for pair in sizes.split(", "))}
        before, after = (by_factor(text, count) for text in (old, new))
        for letter in before.keys() & after.keys():
            if count[letter] > 1:
                assert e.factors.map_to_result(before[letter]) == after[letter], (e.jaxpr_eqn, rules)
        for d, size in enumerate(x.shape):  # and what is one dimension here is one there
            whole = e.factors.unsplit_dim(d)
            if whole is not None and size > 1:
                assert old.split(", ")[d] == new.split(", ")[whole], (e.jaxpr_eqn, rules)


def by_factor(text: str, count: dict[str, int]) -> dict[str, SubDimension]:
    """The place of each factor of a side of Shardy's rule."""
    found = {}
    for d, letters in enumerate(text.split(", ")):
        for k, letter in enumerate(letters):
            found[letter] = SubDimension(d, count[letter], prod(count[x] for x in letters[k + 1 :]))
    return found
