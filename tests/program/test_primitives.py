"""The table of primitives: every row says what its kind has to, and nothing else names products."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.thinned import thinned

import jaxshard_magic
from jaxshard_magic.program.batching.batch_labels import ExampleSum, PerExample
from jaxshard_magic.program.batching.followed_program import follow_batch
from jaxshard_magic.program.dimensions import Dimensions
from jaxshard_magic.program.flops import multiply_adds
from jaxshard_magic.program.ir import Equation, Program
from jaxshard_magic.program.primitives.contractions import Contraction
from jaxshard_magic.program.primitives.primitive import Kind, Primitive
from jaxshard_magic.program.primitives.table import TABLE, primitive_of

REQUIRED: Mapping[Kind, tuple[str, ...]] = {
    Kind.PRODUCT: ("contraction", "batch_rule", "bilinear", "identity"),
    Kind.ATTENTION: ("batch_rule", "fused_multiply_adds"),
    Kind.ELEMENTWISE: ("batch_rule",),
    Kind.SHAPE: ("batch_rule", "linear_operands", "autocast", "factors"),
    Kind.SLICE: ("batch_rule", "linear_operands"),
    Kind.LOOKUP: ("batch_rule",),
    Kind.REDUCTION: ("batch_rule",),
    Kind.CUMULATIVE: ("batch_rule", "identity", "has_axis", "autocast"),
    Kind.SORT: ("batch_rule", "has_axis"),
    Kind.WINDOW: ("batch_rule",),
    Kind.MATRIX: ("batch_rule",),
    Kind.RANDOM: ("batch_rule",),
    Kind.COLLECTIVE: ("batch_rule", "collective_output"),
    Kind.PASS_THROUGH: ("batch_rule",),
    Kind.SOURCE: ("batch_rule",),
    Kind.BODY: (),
    Kind.OPAQUE: (),
}


def lacking(row: Primitive) -> list[str]:
    """What a row does not say and its kind has to; what joins halves of a reduction needs what fills them up."""
    missing = [name for name in REQUIRED[row.kind] if getattr(row, name) in (None, False)]
    return missing + ["identity"] * (row.combiner is not None and row.identity is None)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_row_is_filled(name):
    assert not lacking(TABLE[name])


@pytest.mark.parametrize("name", ["dot_general", "reduce_sum", "psum", "cumsum", "transpose"])
def test_a_row_that_lacks_a_fact_is_seen(name):
    whole = TABLE[name]
    for fact in REQUIRED[whole.kind]:
        assert fact in lacking(replace(whole, **{fact: None}))


@dataclass(frozen=True)
class Example:
    """One product: called on arrays of these shapes, its multiply-adds, and what corresponds in it."""

    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    work: int
    contraction: Contraction


SIZES = jnp.array([3, 1, 4], jnp.int32)  # of three groups of eight rows


def ragged(contract: Any, batch: Any, rows: int, groups: list[int], sizes: Any = SIZES) -> Callable[..., Any]:
    numbers = lax.RaggedDotDimensionNumbers((contract, batch), [rows], groups)
    return lambda x, w: lax.ragged_dot_general(x, w, sizes, numbers)


EXAMPLES = {
    "dot_general": Example(
        lambda x, w: lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,)))),
        ((2, 5, 4), (2, 4, 3)),
        2 * 5 * 4 * 3,
        Contraction(contracted=((2, 1),), batch=((0, 0, 0),), left_free=((1, 1),), right_free=((2, 2),), summed=(2,)),
    ),
    "conv_general_dilated": Example(
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "VALID"),
        ((2, 3, 8, 8), (5, 3, 3, 3)),
        2 * 5 * 6 * 6 * 3 * 9,
        Contraction(
            contracted=((1, 1),),
            left_free=((0, 0),),
            right_free=((0, 1),),
            summed=(1,),
            windowed=((2, 2, 2), (3, 3, 3)),
        ),
    ),
    "ragged_dot_general": Example(
        ragged(((1,), (1,)), ((), ()), 0, [0]),
        ((8, 4), (3, 4, 5)),
        8 * 4 * 5,
        Contraction(
            contracted=((1, 1),),
            left_free=((0, 0),),
            right_free=((2, 1),),
            summed=(1,),
            ragged_dim=0,
            group_dims=((2, 0), (1, 0)),
        ),
    ),
    "ragged_dot_general of a gradient": Example(
        ragged(((0,), (0,)), ((), ()), 0, []),
        ((8, 4), (8, 5)),
        8 * 4 * 5,
        Contraction(
            contracted=((0, 0),),
            left_free=((1, 1),),
            right_free=((1, 2),),
            summed=(0,),
            ragged_dim=0,
            group_dims=((2, 0), (-1, 0)),
        ),
    ),
    "ragged_dot_general of each example": Example(
        ragged(((2,), (1,)), ((), ()), 1, [0], jnp.tile(SIZES, (2, 1))),
        ((2, 8, 4), (3, 4, 5)),
        2 * 8 * 4 * 5,
        Contraction(
            contracted=((2, 1),),
            left_free=((0, 0), (1, 1)),
            right_free=((2, 2),),
            summed=(2,),
            ragged_dim=1,
            group_dims=((2, 1), (1, 0)),
            group_size_dims=((0, 0),),
        ),
    ),
}
OTHERS = {"scaled_dot", "scaled_matmul_wrapper"}  # traced on a GPU alone: of two matmuls, told as such


def equation(example: Example) -> Equation:
    arrays = [jnp.ones(shape) for shape in example.shapes]
    (found,) = (e for e in Program(jax.make_jaxpr(example.call)(*arrays)).equations if e.primitive.is_product)
    return found


def test_every_product_has_an_example():
    products = {name for name, row in TABLE.items() if row.is_product}
    assert products == {name.partition(" ")[0] for name in EXAMPLES} | OTHERS


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_product_says_what_corresponds_and_what_it_costs(name):
    e = equation(EXAMPLES[name])
    assert e.name == name.partition(" ")[0]
    assert e.contraction == EXAMPLES[name].contraction
    assert multiply_adds(e) == EXAMPLES[name].work


def test_scaled_matmuls_cost_what_matmuls_do():
    shapes = [(2, 5, 4), (2, 3, 4), (2, 5, 1), (2, 3, 1)]
    params = {"dimension_numbers": (((2,), (2,)), ((0,), (0,)))}
    for name in OTHERS:
        row = primitive_of(name)
        assert row.contraction is not None
        found = row.contraction(params, shapes)
        assert row.multiply_adds(found, params, shapes, (2, 5, 3)) == 2 * 5 * 4 * 3


ROOMS = ("program", "strategies", "gradients", "pipeline", "codegen")
PACKAGE = Path(jaxshard_magic.__file__).parent


def test_only_the_table_lists_products():
    products = {name for name, row in TABLE.items() if row.is_product}
    for path in sorted(p for room in ROOMS for p in (PACKAGE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if path.parent.name != "primitives" and isinstance(node, ast.Set | ast.Tuple | ast.List | ast.Dict):
                parts = node.keys if isinstance(node, ast.Dict) else node.elts
                named = {part.value for part in parts if isinstance(part, ast.Constant)}
                assert not named & products, f"{path}:{node.lineno} lists products: ask for `primitive.is_product`"


# Experts: rows sorted by the expert that each goes to, and a matrix for every expert.

E, D, H = 4, 16, 32


def parameters() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"route": (D, E), "up": (E, D, H), "down": (E, H, D)}
    return {name: 0.3 * jax.random.normal(k, s) for k, (name, s) in zip(keys, shapes.items(), strict=True)}


def of_all(p, x):
    """All rows of the batch sorted together: x is (rows, D)."""
    where = jnp.argmax(x @ p["route"], -1)
    order, sizes = jnp.argsort(where), jnp.bincount(where, length=E)
    made = lax.ragged_dot(jax.nn.relu(lax.ragged_dot(x[order], p["up"], sizes)), p["down"], sizes)
    return jnp.zeros_like(x).at[order].set(made)


def of_each(p, x):
    """The rows of each example sorted: x is (examples, rows, D)."""
    where = jnp.argmax(x @ p["route"], -1)
    order, sizes = jnp.argsort(where, -1), jnp.sum(where[..., None] == jnp.arange(E), 1)
    product = ragged(((2,), (1,)), ((), ()), 1, [0], sizes)
    made = product(jax.nn.relu(product(jnp.take_along_axis(x, order[..., None], 1), p["up"])), p["down"])
    return jnp.take_along_axis(made, jnp.argsort(order, -1)[..., None], 1)


MODELS = {of_all: (64, D), of_each: (8, 12, D)}


def step_of(model):
    def step(params, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((model(p, batch) - batch) ** 2))(params)
        return jax.tree.map(lambda a, b: a - 0.1 * b, params, grads), loss

    return step


def run(model, strategy, mesh, **options):
    x = jax.random.normal(jax.random.key(1), MODELS[model])
    step = jaxshard_magic.shard(step_of(model), strategy, mesh=mesh, **options)
    got, want = step(parameters(), x), jax.jit(step_of(model))(parameters(), x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
    return step.entry.plan


@pytest.mark.parametrize("model", thinned(MODELS, [*MODELS][:1]))
def test_tp_divides_the_weights_of_experts_by_their_features(model):
    specs = {leaf.path: tuple(leaf.spec) for leaf in run(model, "tp", "data=4 model=2").leaves}
    assert specs["params.up"] == (None, None, "model")  # column, then row parallel
    assert specs["params.down"] == (None, "model", None)


def test_microbatches_follow_the_rows_of_each_example_through_a_ragged_product():
    plan = run(of_each, "dp", "data=4", microbatches=2)
    assert not [f for f in plan.findings if "no sum over examples" in f.message]


def test_microbatches_sort_their_own_rows_by_expert():
    plan = run(of_all, "dp", "data=4", microbatches=2)
    assert not [f for f in plan.findings if "no sum over examples" in f.message]


def test_labels_of_a_ragged_product():
    def programs(f, *shapes):
        return (
            Program(jax.make_jaxpr(f)(*(jnp.ones([n if s < 0 else s for s in shape]) for shape in shapes)))
            for n in (2, 6)
        )

    def gradient(x, y):  # of the weight of each example's experts: contracts examples and rows
        sizes = jnp.ones((x.shape[0], E), jnp.int32) * 2
        numbers = lax.RaggedDotDimensionNumbers((((0, 1), (0, 1)), ((), ())), [1], [])
        return lax.ragged_dot_general(x, y, sizes, numbers)

    def forward(x, w):
        sizes = jnp.ones((x.shape[0], E), jnp.int32) * 2
        return ragged(((2,), (1,)), ((), ()), 1, [0], sizes)(x, w)

    assert follow_batch(*programs(gradient, (-1, 8, D), (-1, 8, H)), {0: 0, 1: 0}).output_labels == (ExampleSum(),)
    assert follow_batch(*programs(forward, (-1, 8, D), (E, D, H)), {0: 0}).output_labels == (PerExample(0),)


def test_dimensions_of_a_ragged_product():
    program = Program(jax.make_jaxpr(lax.ragged_dot)(jnp.ones((8, D)), jnp.ones((3, D, H)), SIZES))
    dims = Dimensions(program, (2,))
    x, w, sizes = map(dims.classes_of, program.inputs)
    assert dims.classes_of(program.outputs[0]) == [x[0], w[2]]
    assert x[1] == w[1] and sizes == [w[0]]
    assert len({x[0], x[1], w[0], w[2]}) == 4
