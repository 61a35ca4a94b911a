"""Which dimensions of operands and results are one: the primitives themselves and Shardy are the judges."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives
from jaxlib.mlir import passmanager

from jaxshard_magic.program.blocked_scan import divide_blocks_p, gather_blocks_p
from jaxshard_magic.program.ir import Equation, Program
from jaxshard_magic.program.primitives import bind, sharding_rules
from jaxshard_magic.program.primitives.primitive import Kind
from jaxshard_magic.program.primitives.sharding_rules import Role
from jaxshard_magic.program.primitives.table import TABLE
from jaxshard_magic.program.shardy import has_passes

RANDOM = np.random.default_rng(0)
Instance = tuple[Callable, tuple]  # a function of one equation, and its operands


def numbers(*shape: int, dtype=np.float32) -> jax.Array:
    """Numbers of which no two are equal, so that an order shows, between 0 and 1 if they are floats."""
    found = RANDOM.permutation(prod(shape)).reshape(shape)
    return jnp.asarray((found + 0.5) / found.size if np.issubdtype(dtype, np.inexact) else found, dtype)


def sizes(count: int) -> tuple[int, ...]:
    return tuple(int(n) for n in RANDOM.choice((2, 3, 4, 5), count))


def rows(count: int, below: int) -> jax.Array:
    return jnp.asarray(RANDOM.integers(0, below, (count, 1)), jnp.int32)


# One function for each way in which a primitive is used, which makes an instance of random sizes.

GATHERED = lax.GatherDimensionNumbers((1,), (0,), (0,))
OF_EACH = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
SCATTERED = lax.ScatterDimensionNumbers((1,), (0,), (0,))
TO_EACH = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))


def dot_general() -> Instance:
    b, i, j, k = sizes(4)
    dims = (((2,), (1,)), ((0,), (0,)))
    return lambda x, y: lax.dot_general(x, y, dims), (numbers(b, i, j), numbers(b, j, k))


def convolution() -> Instance:
    n, c, o, size = sizes(4)
    run = lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME")  # noqa: E731
    return run, (numbers(n, c, size), numbers(o, c, 3))


def slice_of() -> Instance:
    a, b = sizes(2)
    return lambda x: lax.slice(x, (0, 1), (a, b)), (numbers(a, b),)


def dynamic_slice() -> Instance:
    a, b = sizes(2)
    return lambda x, i: lax.dynamic_slice(x, (0, i), (a, 2)), (numbers(a, b), jnp.int32(1))


def dynamic_update_slice() -> Instance:
    a, b = sizes(2)
    run = lambda x, y, i: lax.dynamic_update_slice(x, y, (0, i))  # noqa: E731
    return run, (numbers(a, b + 1), numbers(a, b), jnp.int32(1))


def update_of_one_row() -> Instance:
    a, b = sizes(2)
    run = lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0))  # noqa: E731
    return run, (numbers(a, b), numbers(1, b), jnp.int32(1))


def pad() -> Instance:
    run = lambda x: lax.pad(x, 0.5, ((0, 0, 0), (1, 0, 0), (1, -1, 0)))  # noqa: E731
    return run, (numbers(*sizes(3)),)


def looked_up() -> Instance:
    a, b, n = sizes(3)
    run = lambda x, i: lax.gather(x, i, GATHERED, (1, b), mode="clip")  # noqa: E731
    return run, (numbers(a, b), rows(n, a))


def looked_up_in_order() -> Instance:
    a, b, n = sizes(3)
    at = jnp.sort(rows(n, a), 0)
    run = lambda x, i: lax.gather(x, i, GATHERED, (1, b), mode="clip", indices_are_sorted=True)  # noqa: E731
    return run, (numbers(a, b), at)


def looked_up_in_each() -> Instance:
    n, b = sizes(2)
    return lambda x, i: lax.gather(x, i, OF_EACH, (1, 1), mode="clip"), (numbers(n, b), rows(n, b))


def scattered(scatter: Callable, numbers_of: lax.ScatterDimensionNumbers) -> Callable[[], Instance]:
    def instance() -> Instance:
        a, b, n = sizes(3)
        each = numbers_of is TO_EACH
        updates = numbers(a) if each else numbers(n, b)
        run = lambda x, i, u: scatter(x, i, u, numbers_of)  # noqa: E731
        return run, (numbers(a, b), rows(a, b) if each else rows(n, a), updates)

    return instance


def along_axis(call: Callable) -> Callable[[], Instance]:
    return lambda: (lambda x: call(x, 1), (numbers(*sizes(3)),))


def reduce_of(name: str) -> Callable[[], Instance]:
    p = getattr(primitives, f"{name}_p")
    logical = name.endswith(("and", "or", "xor"))
    params = {"axes": (1,)} if logical else {"axes": (1,), "out_sharding": None}
    dtype = np.int32 if logical else np.float32
    return lambda: (lambda x: p.bind(x, **params), (numbers(*sizes(3), dtype=dtype),))


def place_of(p) -> Callable[[], Instance]:
    run = lambda x: p.bind(x, axes=(1,), index_dtype=np.dtype("int32"))  # noqa: E731
    return lambda: (run, (numbers(*sizes(3)),))


def two_reduced() -> Instance:
    shape = sizes(3)

    def run(x, y):
        return lax.reduce((x, y), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,))

    return run, (numbers(*shape), numbers(*shape))


def matrix(call: Callable, *shapes: tuple[int, ...], positive: bool = False) -> Callable[[], Instance]:
    """Three matrices, or what the shapes say, of which each is worked on by itself."""

    def instance() -> Instance:
        arrays = [numbers(3, *shape) for shape in shapes]
        if positive:
            arrays[0] = arrays[0] @ arrays[0].mT + jnp.eye(shapes[0][-1])
        return call, tuple(arrays)

    return instance


def two_sorted() -> Instance:
    shape = sizes(3)
    return lambda x, y: lax.sort((x, y), dimension=1), (numbers(*shape), numbers(*shape))


def beside_each_other() -> Instance:
    a, b, c = sizes(3)
    return lambda x, y: lax.concatenate([x, y], 1), (numbers(a, b), numbers(a, c))


def handed_on() -> Instance:
    shape = sizes(2)
    return lambda x, y: lax.optimization_barrier((x, y)), (numbers(*shape), numbers(*shape))


INSTANCES: dict[str, Callable[[], Instance]] = {
    "dot_general": dot_general,
    "conv_general_dilated": convolution,
    "broadcast_in_dim": lambda: (lambda x: lax.broadcast_in_dim(x, (6, *x.shape), (1, 2)), (numbers(3, 4),)),
    "transpose": lambda: (lambda x: x.T, (numbers(*sizes(2)),)),
    "reshape": lambda: (lambda x: x.reshape(x.shape[0], -1), (numbers(*sizes(3)),)),
    "squeeze": lambda: (lambda x: lax.squeeze(x, (1,)), (numbers(3, 1, 4),)),
    "slice": slice_of,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "dynamic_update_slice of a row": update_of_one_row,
    "pad": pad,
    "rev": lambda: (lambda x: lax.rev(x, (1,)), (numbers(*sizes(3)),)),
    "split": lambda: (lambda x: lax.split(x, (1, 3), 1), (numbers(5, 4),)),
    "concatenate": beside_each_other,
    "gather_blocks": along_axis(lambda x, d: gather_blocks_p.bind(x, axis=d)),
    "divide_blocks": along_axis(lambda x, d: divide_blocks_p.bind(x, axis=d)),
    "gather": looked_up,
    "gather in order": looked_up_in_order,
    "gather in each": looked_up_in_each,
    "scatter": scattered(lax.scatter, SCATTERED),
    "scatter-add": scattered(lax.scatter_add, SCATTERED),
    "scatter-add to each": scattered(lax.scatter_add, TO_EACH),
    "scatter-sub": scattered(lax.scatter_sub, SCATTERED),
    "scatter-mul": scattered(lax.scatter_mul, SCATTERED),
    "scatter-min": scattered(lax.scatter_min, SCATTERED),
    "scatter-max": scattered(lax.scatter_max, SCATTERED),
    **{name: reduce_of(name) for name in TABLE if name.startswith("reduce_") and TABLE[name].is_combinable},
    "argmax": place_of(primitives.argmax_p),
    "argmin": place_of(primitives.argmin_p),
    "reduce": two_reduced,
    "cumsum": along_axis(lax.cumsum),
    "cumprod": along_axis(lax.cumprod),
    "cummax": along_axis(lax.cummax),
    "cummin": along_axis(lax.cummin),
    "cumlogsumexp": along_axis(lax.cumlogsumexp),
    "sort": two_sorted,
    "top_k": along_axis(lambda x, d: lax.top_k(x, 2, axis=d)),
    "approx_top_k": along_axis(lambda x, d: lax.approx_max_k(x, 2, reduction_dimension=d)),
    "cholesky": matrix(lambda x: primitives.cholesky_p.bind(x), (4, 4), positive=True),
    "triangular_solve": matrix(
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), (4, 4), (4, 2), positive=True
    ),
    "lu": matrix(lambda x: primitives.lu_p.bind(x), (4, 4)),
    "qr": matrix(lambda x: lax.linalg.qr(x, full_matrices=False), (4, 4)),
    "svd": matrix(lambda x: lax.linalg.svd(x, compute_uv=False), (4, 2)),
    "schur": matrix(lambda x: primitives.schur_p.bind(
        x, compute_schur_vectors=True, sort_eig_vals=False, select_callable=None), (4, 4), positive=True),
    "eigh": matrix(lambda x: lax.linalg.eigh(x, symmetrize_input=False), (4, 4), positive=True),
    "eig": matrix(lambda x: lax.linalg.eig(x, compute_left_eigenvectors=False), (4, 4), positive=True),
    "householder_product": matrix(lambda a, t: lax.linalg.householder_product(a, t), (4, 4), (4,)),
    "fft": matrix(lambda x: lax.fft(x.astype(jnp.complex64), "fft", (4,)), (2, 4)),
    "lu_pivots_to_permutation": lambda: (
        lambda p: lax.linalg.lu_pivots_to_permutation(p, 4), (jnp.asarray([[1, 1, 2, 3], [3, 2, 2, 3]]),)),
    "optimization_barrier": handed_on,
}  # fmt: skip
# What other shapes of an instance cannot show: not traced by the jax at hand, on another platform, or for a mesh alone.
UNTRACED = {
    "expand_dims", "tile", "stack", "unstack", "scatter_add", "scatter_sub", "scatter_mul", "scatter_min",
    "scatter_max", "scatter-apply", "cholesky_update", "geqrf", "device_put", "sharding_constraint",
    "layout_constraint", "mesh_cast", "pvary", "pcast", "stage", "copy_p", "mulhi", "log2", "one_minus_square",
    "polynomial", "scaled_dot", "scaled_matmul_wrapper", "ragged_dot_general", "geqp3", "hessenberg", "ormqr",
    "symmetric_product", "tridiagonal", "tridiagonal_solve",
}  # fmt: skip
KNOWING = {
    sharding_rules.elementwise, sharding_rules.pass_through, sharding_rules.along_axis, sharding_rules.slice_like,
    sharding_rules.cumulative,
    sharding_rules.matrices, sharding_rules.stack, sharding_rules.unstack, sharding_rules.shape_change,
    sharding_rules.product,
    sharding_rules.reduction, sharding_rules.gather, sharding_rules.scatter,
}  # fmt: skip
PARAMS = {
    "integer_pow": {"y": 3},
    "convert_element_type": {"new_dtype": np.dtype("int32"), "weak_type": False, "sharding": None},
    "reduce_precision": {"exponent_bits": 5, "mantissa_bits": 3},
    "name": {"name": "x"},
    "bitcast_convert_type": {"new_dtype": np.dtype("int32")},
    "round": {"rounding_method": lax.RoundingMethod.TO_NEAREST_EVEN},
}
OF_JAX = {p.name: p for p in vars(primitives).values() if hasattr(p, "bind")}
ELEMENTWISE = sorted(
    name for name in OF_JAX.keys() - UNTRACED if name in TABLE and TABLE[name].kind is Kind.ELEMENTWISE
)


def elementwise(name: str) -> Instance:
    """The primitive of as many arrays, of the first type, as it takes."""
    p, shape = OF_JAX[name], sizes(2)
    for dtype in (np.float32, np.int32, np.complex64):
        for count in (1, 2, 3):
            operands = tuple(numbers(*shape, dtype=dtype) for _ in range(count))
            if name == "select_n":
                operands = numbers(*shape) > 0.5, *operands
            for more in ({"accuracy": None}, {}):
                run = lambda *xs, more=more: p.bind(*xs, **PARAMS.get(name, {}), **more)  # noqa: E731
                try:  # in any of these ways jax says that it takes other operands
                    run(*operands)
                except (TypeError, ValueError, AssertionError, NotImplementedError):
                    continue
                return run, operands
    raise AssertionError(f"no operands for {name}")


def equation(name: str, instance: Instance) -> Equation:
    run, operands = instance
    return next(e for e in Program(jax.make_jaxpr(run)(*operands)).equations if e.name == name)


def operands_of(e: Equation, given: Sequence) -> list:
    """The operands of an equation: those given, as far as they have its shapes, and its literals."""
    given = list(given)
    return [x.val if hasattr(x, "val") else given.pop(0).astype(x.aval.dtype) for x in e.jaxpr_eqn.invars]


def wrong(e: Equation, operands: list) -> str | None:
    """The first shared dimension, of which it is said that its places may be permuted, that makes other results so."""
    plain = bind(e.jaxpr_eqn, operands)
    for shared in e.sharding_rule.shared:
        if shared.role is Role.LINKED:
            continue
        size = e.shapes[next(iter(shared.dims))][next(iter(shared.dims.values()))]
        order = RANDOM.permutation(size)

        def moved(slot: int, x, shared=shared, order=order):
            return np.take(np.asarray(x), order, shared.dims[slot]) if slot in shared.dims else x

        results = bind(e.jaxpr_eqn, [jnp.asarray(moved(k, x)) for k, x in enumerate(operands)])
        for k, (x, y) in enumerate(zip(plain, results, strict=True)):
            if not np.allclose(moved(len(operands) + k, np.asarray(x)), y, rtol=1e-4, atol=1e-5, equal_nan=True):
                return f"{e.name}: {shared}"
    return None


def test_every_rule_that_knows_more_than_links_is_held_against_its_primitive():
    held = {name.partition(" ")[0] for name in INSTANCES} | {*ELEMENTWISE}
    assert held == {name for name, row in TABLE.items() if row.sharding_rule in KNOWING} - UNTRACED


@pytest.mark.parametrize("name", INSTANCES)
def test_places_may_be_permuted_where_the_rule_says_so(name):
    known = 0
    for _ in range(8):
        run, given = INSTANCES[name]()
        e = equation(name.partition(" ")[0], (run, given))
        assert wrong(e, operands_of(e, given)) is None
        known += sum(s.role is not Role.LINKED for s in e.sharding_rule.shared)
    assert known


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_primitives_work_number_by_number(name):
    run, given = elementwise(name)
    e = equation(name, (run, given))
    assert wrong(e, operands_of(e, given)) is None
    assert any(s.role is Role.PASSED_THROUGH for s in e.sharding_rule.shared)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("cumsum", "elementwise"),
        ("sort", "elementwise"),
        ("rev", "elementwise"),
        ("cholesky", "elementwise"),
        ("top_k", "elementwise"),
    ],
)
def test_a_rule_that_says_too_much_is_found_out(name, rule, monkeypatch):
    row = replace(TABLE[name], sharding_rule=getattr(sharding_rules, rule), matrix_dims=0)
    monkeypatch.setitem(TABLE, name, row)
    found = []
    for _ in range(8):
        run, given = INSTANCES[name]()
        e = equation(name, (run, given))
        found.append(wrong(e, operands_of(e, given)))
    assert any(found)


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.block_combiner is not None])
def test_blocks_of_a_running_reduction_go_on_from_the_last_result_before(name):
    combine, x = TABLE[name].block_combiner, numbers(3, 8, 2)
    run = lambda x: OF_JAX[name].bind(x, axis=1, reverse=False)  # noqa: E731
    first, second = run(x[:, :5]), run(x[:, 5:])
    assert combine is not None
    np.testing.assert_allclose(run(x)[:, 5:], combine(second, first[:, -1:]), rtol=1e-5)


# Shardy's rules: ([i, j], [j, k])->([i, k]) {i=4, j=2, k=3} reduction={j}.
RULE = re.compile(r"op_sharding_rule<\((.*?)\)->\((.*?)\) \{.*?\}(.*?)>")


# Lowered to several operations, to one without a rule, or to one that has other operands.
NOT_ONE_OPERATION = {
    "dynamic_slice", "dynamic_update_slice", "dynamic_update_slice of a row", "split", "gather_blocks",
    "divide_blocks", "argmax", "argmin", "reduce", "top_k", "approx_top_k", "cholesky", "lu", "qr", "svd", "schur",
    "eigh", "eig", "fft", "lu_pivots_to_permutation", "optimization_barrier",
}  # fmt: skip


@pytest.mark.skipif(not has_passes(), reason="jaxlib has no passes of Shardy")
@pytest.mark.parametrize("name", [name for name in INSTANCES if name not in NOT_ONE_OPERATION])
def test_shardy_shares_the_same_dimensions(name):
    run, given = INSTANCES[name]()
    e = equation(name.partition(" ")[0], (run, given))
    lowered = jax.jit(run).lower(*given).compiler_ir("stablehlo")
    passes = "builtin.module(inline,symbol-dce,func.func(sdy-populate-op-sharding-rules))"
    with lowered.context:
        passmanager.PassManager.parse(passes).run(lowered.operation)
    ((operands, results, roles),) = RULE.findall(str(lowered))
    letters = [dims.split(", ") for half in (operands, results) for dims in re.findall(r"\[(.+?)\]", half)]
    slots = [slot for slot, shape in enumerate(e.shapes) if shape]  # numbers have no dimensions
    letter_of = dict(zip(slots, letters, strict=True))
    reduced = {x for group in re.findall(r"reduction=\{(.*?)\}", roles) for x in group.split(", ")}
    for shared in e.sharding_rule.shared:
        if shared.role is Role.LINKED and e.primitive.kind is Kind.MATRIX:
            continue  # we lay a solution as the matrix that it solves; Shardy says nothing of what matrices have
        at = {letter_of[slot][d] for slot, d in shared.dims.items() if e.shapes[slot][d] > 1}
        assert len(at) <= 1, (shared, letters)
        if shared.role is Role.REDUCED and at and name != "scatter-sub":  # differences, too, are any order's
            assert at <= reduced, (shared, roles)
