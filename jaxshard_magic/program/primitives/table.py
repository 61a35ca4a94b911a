"""Table of primitives, a row each. Code that treats primitives differently reads the table.

To add a primitive, add a row: `tests/program/test_primitives.py` reports what it lacks,
`tests/program/test_sharding_rules.py` whether its dimensions do as the rule of its kind says. Without a row, dimensions
of one size at one position are linked, and the primitive follows no batch.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..batching import batch_rules
from . import contractions, factors, sharding_rules
from .jaxprs import BODY_PARAMS
from .primitive import AutocastPolicy, CollectiveOutput, Control, Kind, Primitive

TABLE: dict[str, Primitive] = {}
UNKNOWN = Primitive(kind=Kind.UNKNOWN)
# Sharding rule of rows that name none. Other kinds link dimensions of one size at the same position.
_RULE_BY_KIND = {
    Kind.PRODUCT: sharding_rules.product,
    Kind.ATTENTION: sharding_rules.attention,
    Kind.ELEMENTWISE: sharding_rules.elementwise,
    Kind.SHAPE: sharding_rules.shape_change,
    Kind.SLICE: sharding_rules.slice_like,
    Kind.REDUCTION: sharding_rules.reduction,
    Kind.CUMULATIVE: sharding_rules.cumulative,
    Kind.SORT: sharding_rules.along_axis,
    Kind.WINDOW: sharding_rules.pooling,
    Kind.MATRIX: sharding_rules.matrices,
    Kind.PASS_THROUGH: sharding_rules.pass_through,
    Kind.SOURCE: sharding_rules.no_shared_dimensions,
}
FIRST, FIRST_TWO, ALL = slice(1), slice(2), slice(None)  # values of `linear_operands`


def primitive_of(name: str) -> Primitive:
    """Return the row of a primitive, `UNKNOWN` without one."""
    return TABLE.get(name, UNKNOWN)


def _add(names: str, kind: Kind, **facts: Any) -> None:
    """Add facts of several primitives of one kind to the facts stated before.

    Args:
        names: Primitive names, separated by spaces.
        kind: Kind of all of them.
        facts: Fields of `Primitive`.
    """
    rule = _RULE_BY_KIND.get(kind, sharding_rules.same_positions)
    for name in names.split():
        row = TABLE.get(name) or Primitive(kind=kind, sharding_rule=rule)
        assert row.kind is kind, f"{name} is of two kinds, {row.kind} and {kind}"
        TABLE[name] = replace(row, **facts)


def zero(dtype: Any) -> Any:
    """Return 0 in `dtype`, the identity of sums."""
    return jnp.zeros((), dtype)


def one(dtype: Any) -> Any:
    """Return 1 in `dtype`, the identity of products."""
    return jnp.ones((), dtype)


def lowest(dtype: Any) -> Any:
    """Return the least number of `dtype`, the identity of a maximum; False for bool."""
    if dtype == jnp.bool_:
        return jnp.asarray(False)
    return jnp.asarray(-jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min, dtype)


def highest(dtype: Any) -> Any:
    """Return the greatest number of `dtype`, the identity of a minimum; True for bool."""
    if dtype == jnp.bool_:
        return jnp.asarray(True)
    return jnp.asarray(jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max, dtype)


def all_bits(dtype: Any) -> Any:
    """Return the number of `dtype` with all bits set, the identity of a bitwise and; True for bool."""
    return ~jnp.zeros((), dtype)


# Products: matmuls and convolutions.
_PRODUCT = {
    "batch_rule": batch_rules.product,
    "bilinear": True,
    "identity": zero,
    "mixes_positions": True,
    "constrain_output": True,
    "materialized": True,
}
_add("dot_general", Kind.PRODUCT, contraction=contractions.dot, autocast=AutocastPolicy.COMPUTE_DTYPE, **_PRODUCT)
_add("conv_general_dilated", Kind.PRODUCT, contraction=contractions.conv, **_PRODUCT)
_add(
    "conv_general_dilated",
    Kind.PRODUCT,
    multiply_adds=contractions.conv_multiply_adds,
    autocast=AutocastPolicy.COMPUTE_DTYPE,
)
_add(
    "ragged_dot_general",
    Kind.PRODUCT,
    contraction=contractions.ragged_dot,
    autocast=AutocastPolicy.COMPUTE_DTYPE,
    **_PRODUCT,
)
_add("scaled_dot", Kind.PRODUCT, contraction=contractions.dot, **_PRODUCT)
_add("scaled_matmul_wrapper", Kind.PRODUCT, contraction=contractions.scaled_matmul, **_PRODUCT)

# Attention as one primitive (`program/attention/fused_attention.py`), and its gradient.
_ATTENTION = {
    "batch_rule": batch_rules.attention,
    "constrain_output": True,
    "materialized": True,
    "mixes_positions": True,
}
_add("attention", Kind.ATTENTION, fused_multiply_adds=contractions.attention_multiply_adds, **_ATTENTION)
_add(
    "attention_gradient",
    Kind.ATTENTION,
    fused_multiply_adds=contractions.attention_gradient_multiply_adds,
    **_ATTENTION,
)

# Elementwise.
_ELEMENTWISE = {"batch_rule": batch_rules.elementwise}
_add(
    "max min abs sign clamp floor ceil round tanh logistic",
    Kind.ELEMENTWISE,
    autocast=AutocastPolicy.WIDEST_OPERAND,
    **_ELEMENTWISE,
)
_add(
    "eq ne lt le gt ge is_finite",
    Kind.ELEMENTWISE,
    autocast=AutocastPolicy.AS_WRITTEN,
    returns_discrete=True,
    **_ELEMENTWISE,
)
for _names in (
    "exp exp2 expm1 log log1p pow integer_pow square sqrt rsqrt cbrt rem nextafter",
    "sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh erf erfc erf_inv lgamma digamma",
):
    _add(_names, Kind.ELEMENTWISE, autocast=AutocastPolicy.AS_WRITTEN, **_ELEMENTWISE)
for _names in (
    "log2 bessel_i0e bessel_i1e regularized_incomplete_beta igamma igammac polygamma zeta conj complex",
    "population_count clz eq_to lt_to le_to and or not xor mulhi one_minus_square polynomial",
    "shift_left shift_right_logical shift_right_arithmetic",
):
    _add(_names, Kind.ELEMENTWISE, **_ELEMENTWISE)
_add(
    "add add_any",
    Kind.ELEMENTWISE,
    batch_rule=batch_rules.add,
    linear_operands=FIRST_TWO,
    is_additive=True,
    autocast=AutocastPolicy.WIDEST_OPERAND,
)
_add(
    "sub",
    Kind.ELEMENTWISE,
    batch_rule=batch_rules.add,
    linear_operands=FIRST_TWO,
    autocast=AutocastPolicy.WIDEST_OPERAND,
)
_add("mul", Kind.ELEMENTWISE, batch_rule=batch_rules.mul, bilinear=True, autocast=AutocastPolicy.WIDEST_OPERAND)
_add("div", Kind.ELEMENTWISE, batch_rule=batch_rules.div, linear_operands=FIRST, autocast=AutocastPolicy.WIDEST_OPERAND)
_add(
    "neg",
    Kind.ELEMENTWISE,
    batch_rule=batch_rules.pass_through,
    linear_operands=FIRST,
    autocast=AutocastPolicy.WIDEST_OPERAND,
)
_add("real imag", Kind.ELEMENTWISE, batch_rule=batch_rules.pass_through, linear_operands=FIRST)
_add(
    "select_n",
    Kind.ELEMENTWISE,
    batch_rule=batch_rules.select,
    linear_operands=slice(1, None),
    autocast=AutocastPolicy.WIDEST_OPERAND,
)
_add("bitcast_convert_type", Kind.ELEMENTWISE, batch_rule=batch_rules.first_exact)

# Copies, casts and markers: the operand's numbers.
_ALIAS = {"batch_rule": batch_rules.pass_through, "alias": True}
_add(
    "convert_element_type",
    Kind.ELEMENTWISE,
    batch_rule=batch_rules.convert,
    alias=True,
    changes_dtype=True,
    folds_layout=True,
    autocast=AutocastPolicy.WIDEST_OPERAND,
)
_add("reduce_precision device_put", Kind.ELEMENTWISE, **_ALIAS)
_add("sharding_constraint", Kind.ELEMENTWISE, autocast=AutocastPolicy.WIDEST_OPERAND, **_ALIAS)
_add("copy copy_p name", Kind.ELEMENTWISE, data_movement=True, autocast=AutocastPolicy.WIDEST_OPERAND, **_ALIAS)
_add("copy", Kind.ELEMENTWISE, folds_layout=True)
_add("name", Kind.ELEMENTWISE, names_value=True)
_add("convert_element_type reduce_precision copy copy_p name", Kind.ELEMENTWISE, linear_operands=FIRST)
_add("stop_gradient", Kind.ELEMENTWISE, autocast=AutocastPolicy.WIDEST_OPERAND, **_ALIAS)
_add("mesh_cast layout_constraint pvary pcast stage", Kind.ELEMENTWISE, batch_rule=batch_rules.pass_through)
_add(
    "optimization_barrier",
    Kind.PASS_THROUGH,
    batch_rule=batch_rules.pass_through,
    autocast=AutocastPolicy.WIDEST_OPERAND,
)

# Changes of shape.
_SHAPE = {"batch_rule": batch_rules.shape_change, "linear_operands": FIRST, "alias": True, "data_movement": True}
_SHAPE |= {"autocast": AutocastPolicy.WIDEST_OPERAND}
_add("broadcast_in_dim", Kind.SHAPE, factors=factors.broadcast, **_SHAPE)
_add("transpose", Kind.SHAPE, factors=factors.transpose, folds_layout=True, **_SHAPE)
_add("reshape", Kind.SHAPE, factors=factors.reshape, folds_layout=True, **_SHAPE)
_add("squeeze", Kind.SHAPE, factors=factors.squeeze, folds_layout=True, **_SHAPE)
_add("expand_dims", Kind.SHAPE, factors=factors.expand_dims, **_SHAPE)

# Slices, updates and concatenations.
_SHARDING_ALONG_AXIS = {"sharding_rule": sharding_rules.along_axis, "has_axis": True}
_SLICE = {"data_movement": True, "autocast": AutocastPolicy.WIDEST_OPERAND}
_add(
    "slice",
    Kind.SLICE,
    batch_rule=batch_rules.slice_like,
    linear_operands=FIRST,
    alias=True,
    selects_elements=True,
    resizes_dims=True,
    **_SLICE,
)
_add(
    "dynamic_slice",
    Kind.SLICE,
    batch_rule=batch_rules.dynamic_slice,
    linear_operands=FIRST,
    selects_elements=True,
    resizes_dims=True,
    **_SLICE,
)
_add(
    "dynamic_update_slice",
    Kind.SLICE,
    batch_rule=batch_rules.update_slice,
    linear_operands=FIRST_TWO,
    resizes_dims=True,
    materialized=True,
)
_add("dynamic_update_slice", Kind.SLICE, autocast=AutocastPolicy.WIDEST_OPERAND)
_add(
    "rev",
    Kind.SLICE,
    batch_rule=batch_rules.slice_like,
    linear_operands=FIRST,
    selects_elements=True,
    **_SHARDING_ALONG_AXIS,
    **_SLICE,
)
_add(
    "split",
    Kind.SLICE,
    batch_rule=batch_rules.slice_like,
    linear_operands=FIRST,
    resizes_dims=True,
    **_SHARDING_ALONG_AXIS,
    **_SLICE,
)
_add(
    "concatenate",
    Kind.SLICE,
    batch_rule=batch_rules.concatenate,
    linear_operands=ALL,
    resizes_dims=True,
    **_SHARDING_ALONG_AXIS,
    **_SLICE,
)
_add("concatenate", Kind.SLICE, constrain_output=True, materialized=True)
_add(
    "pad",
    Kind.SLICE,
    batch_rule=batch_rules.pad,
    linear_operands=FIRST_TWO,
    resizes_dims=True,
    constrain_output=True,
    **_SLICE,
)
_add("tile", Kind.SLICE, batch_rule=batch_rules.tile, linear_operands=FIRST, **_SLICE)
_add(
    "stack",
    Kind.SLICE,
    batch_rule=batch_rules.stack,
    linear_operands=ALL,
    sharding_rule=sharding_rules.stack,
    constrain_output=True,
    materialized=True,
    **_SLICE,
)
_add(
    "unstack",
    Kind.SLICE,
    batch_rule=batch_rules.unstack,
    linear_operands=FIRST,
    sharding_rule=sharding_rules.unstack,
    alias=True,
    **_SLICE,
)

# Blocks of a scan, gathered to all devices and divided again (`program/blocked_scan.py`).
_add(
    "gather_blocks divide_blocks",
    Kind.SLICE,
    batch_rule=batch_rules.slice_like,
    linear_operands=FIRST,
    **_SHARDING_ALONG_AXIS,
    constrain_output=True,
)
_add("gather_blocks divide_blocks", Kind.SLICE, **_SLICE)

# Gathers and scatters.
_add(
    "gather",
    Kind.LOOKUP,
    sharding_rule=sharding_rules.gather,
    batch_rule=batch_rules.gather,
    mixes_positions=True,
    constrain_output=True,
    materialized=True,
    **_SLICE,
)
_SCATTER = {"sharding_rule": sharding_rules.scatter, "batch_rule": batch_rules.scatter, "materialized": True}
_add("scatter scatter-mul scatter_mul scatter-min scatter_min", Kind.LOOKUP, **_SCATTER)
_add("scatter-max scatter_max scatter-apply", Kind.LOOKUP, **_SCATTER)
# Linear in operand 0 and the updates (operand 2), not in the indices.
_add("scatter", Kind.LOOKUP, linear_operands=slice(0, None, 2))
_add(
    "scatter-sub scatter_sub",
    Kind.LOOKUP,
    linear_operands=slice(0, None, 2),
    is_additive=True,
    identity=zero,
    **_SCATTER,
)
_add("scatter-add scatter_add", Kind.LOOKUP, linear_operands=slice(0, None, 2), is_additive=True, **_SCATTER)
_add("scatter-add scatter_add", Kind.LOOKUP, identity=zero, sums_many=True, autocast=AutocastPolicy.AS_WRITTEN)

# Reductions.
_NONLINEAR = {"batch_rule": batch_rules.nonlinear_reduction}
_add("reduce_sum", Kind.REDUCTION, batch_rule=batch_rules.reduce_sum, linear_operands=FIRST, combiner=lax.add)
_add("reduce_sum", Kind.REDUCTION, identity=zero, materialized=True, sums_many=True, autocast=AutocastPolicy.AS_WRITTEN)
_add(
    "reduce_prod",
    Kind.REDUCTION,
    combiner=lax.mul,
    identity=one,
    sums_many=True,
    autocast=AutocastPolicy.AS_WRITTEN,
    **_NONLINEAR,
)
_add(
    "reduce_max",
    Kind.REDUCTION,
    combiner=lax.max,
    identity=lowest,
    materialized=True,
    autocast=AutocastPolicy.WIDEST_OPERAND,
    **_NONLINEAR,
)
_add(
    "reduce_min",
    Kind.REDUCTION,
    combiner=lax.min,
    identity=highest,
    autocast=AutocastPolicy.WIDEST_OPERAND,
    **_NONLINEAR,
)
_add("reduce_and", Kind.REDUCTION, combiner=lax.bitwise_and, identity=all_bits, **_NONLINEAR)
_add("reduce_or", Kind.REDUCTION, combiner=lax.bitwise_or, identity=zero, **_NONLINEAR)
_add("reduce_xor", Kind.REDUCTION, combiner=lax.bitwise_xor, identity=zero, **_NONLINEAR)
_add(
    "argmax",
    Kind.REDUCTION,
    identity=lowest,
    materialized=True,
    index_result=0,
    returns_discrete=True,
    autocast=AutocastPolicy.AS_WRITTEN,
    **_NONLINEAR,
)
_add(
    "argmin",
    Kind.REDUCTION,
    identity=highest,
    materialized=True,
    index_result=0,
    returns_discrete=True,
    autocast=AutocastPolicy.AS_WRITTEN,
    **_NONLINEAR,
)
_add("reduce", Kind.REDUCTION, **_NONLINEAR)

# Running reductions and sorts.
_BATCH_ALONG_AXIS = {"batch_rule": batch_rules.along_axis, "has_axis": True}
_add(
    "cumsum",
    Kind.CUMULATIVE,
    batch_rule=batch_rules.slice_like,
    linear_operands=FIRST,
    identity=zero,
    has_axis=True,
    mixes_positions=True,
    materialized=True,
)
_add("cumprod", Kind.CUMULATIVE, identity=one, **_BATCH_ALONG_AXIS)
_add("cumlogsumexp", Kind.CUMULATIVE, identity=lowest, materialized=True, **_BATCH_ALONG_AXIS)
_add("cumsum cumprod cumlogsumexp", Kind.CUMULATIVE, sums_many=True, autocast=AutocastPolicy.AS_WRITTEN)
_add("cummax", Kind.CUMULATIVE, identity=lowest, autocast=AutocastPolicy.WIDEST_OPERAND, **_BATCH_ALONG_AXIS)
_add("cummin", Kind.CUMULATIVE, identity=highest, autocast=AutocastPolicy.WIDEST_OPERAND, **_BATCH_ALONG_AXIS)
for _names, _combine in (
    ("cumsum", lax.add),
    ("cumprod", lax.mul),
    ("cummax", lax.max),
    ("cummin", lax.min),
    ("cumlogsumexp", jnp.logaddexp),
):
    _add(_names, Kind.CUMULATIVE, block_combiner=_combine)
_add("sort", Kind.SORT, resizes_dims=True, mixes_positions=True, materialized=True, **_BATCH_ALONG_AXIS)
_add("top_k", Kind.SORT, index_result=1, autocast=AutocastPolicy.WIDEST_OPERAND, **_BATCH_ALONG_AXIS)
_add("approx_top_k", Kind.SORT, index_result=1, **_BATCH_ALONG_AXIS)

# Reductions of windows.
_WINDOW = {"batch_rule": batch_rules.pooling}
_add("reduce_window", Kind.WINDOW, materialized=True, **_WINDOW)
_add(
    "reduce_window_sum",
    Kind.WINDOW,
    is_additive=True,
    materialized=True,
    sums_many=True,
    autocast=AutocastPolicy.AS_WRITTEN,
    **_WINDOW,
)
_add("reduce_window_max", Kind.WINDOW, materialized=True, autocast=AutocastPolicy.WIDEST_OPERAND, **_WINDOW)
_add("reduce_window_min", Kind.WINDOW, autocast=AutocastPolicy.WIDEST_OPERAND, **_WINDOW)
_add("select_and_scatter_add", Kind.WINDOW, is_additive=True, **_WINDOW)
_add("select_and_gather_add", Kind.WINDOW, materialized=True, **_WINDOW)
_add("select_and_scatter", Kind.WINDOW, batch_rule=batch_rules.not_provable)

# Matrices in the last dimensions.
_add("lu_pivots_to_permutation", Kind.MATRIX, batch_rule=batch_rules.matrices, matrix_dims=1)
_add(
    "cholesky triangular_solve lu qr svd schur",
    Kind.MATRIX,
    batch_rule=batch_rules.matrices,
    matrix_dims=2,
    unknown_flops=True,
)
_add(
    "eig eigh geqrf householder_product",
    Kind.MATRIX,
    batch_rule=batch_rules.matrices,
    matrix_dims=2,
    unknown_flops=True,
)
_add("cholesky_update", Kind.MATRIX, batch_rule=batch_rules.matrices, matrix_dims=2)
_add("fft", Kind.MATRIX, batch_rule=batch_rules.matrices, unknown_flops=True)
for _names in ("geqp3 hessenberg ormqr symmetric_product tridiagonal tridiagonal_solve",):
    _add(_names, Kind.MATRIX, batch_rule=batch_rules.not_provable, unknown_flops=True)

# Random numbers and their keys.
_add(
    "random_wrap random_unwrap",
    Kind.RANDOM,
    sharding_rule=sharding_rules.per_key,
    batch_rule=batch_rules.elementwise,
    alias=True,
)
_add("random_seed random_fold_in random_clone", Kind.RANDOM, batch_rule=batch_rules.elementwise)
_add("threefry2x32", Kind.RANDOM, sharding_rule=sharding_rules.no_shared_dimensions, batch_rule=batch_rules.elementwise)
_add("random_bits random_split", Kind.RANDOM, sharding_rule=sharding_rules.per_key, batch_rule=batch_rules.random_draw)
_add("random_gamma", Kind.RANDOM, sharding_rule=sharding_rules.per_key, batch_rule=batch_rules.random_gamma)
_add(
    "random_gamma_grad",
    Kind.RANDOM,
    sharding_rule=sharding_rules.no_shared_dimensions,
    batch_rule=batch_rules.not_provable,
)
_add("random_wrap threefry2x32 random_bits random_split random_fold_in random_seed", Kind.RANDOM, uses_key=True)
_add("random_bits random_gamma random_split threefry2x32", Kind.RANDOM, size_dependent_draw=True)
_add("random_bits threefry2x32", Kind.RANDOM, materialized=True)

# Collectives along a named axis.
_REPLICATED, _PER_DEVICE = (
    {"collective_output": CollectiveOutput.REPLICATED},
    {"collective_output": CollectiveOutput.PER_DEVICE},
)
_add("psum psum_invariant", Kind.COLLECTIVE, batch_rule=batch_rules.linear_collective, **_REPLICATED)
_add("pmax pmin", Kind.COLLECTIVE, batch_rule=batch_rules.nonlinear_collective, **_REPLICATED)
_add("all_gather all_gather_invariant", Kind.COLLECTIVE, batch_rule=batch_rules.all_gather, **_REPLICATED)
_add("ppermute", Kind.COLLECTIVE, batch_rule=batch_rules.linear_collective, **_PER_DEVICE)
_add("reduce_scatter", Kind.COLLECTIVE, batch_rule=batch_rules.reduce_scatter, is_additive=True, **_PER_DEVICE)
_add("all_to_all", Kind.COLLECTIVE, batch_rule=batch_rules.all_to_all, **_PER_DEVICE)
_add("axis_index ragged_all_to_all pgather", Kind.COLLECTIVE, batch_rule=batch_rules.not_provable, **_PER_DEVICE)

_add("iota", Kind.SOURCE, batch_rule=batch_rules.iota)

# Primitives with bodies, and opaque ones.
for _names, _control in (("scan", Control.SCAN), ("while", Control.WHILE), ("cond", Control.COND)):
    _add(_names, Kind.BODY, control=_control, materialized=True)
_add(" ".join(BODY_PARAMS), Kind.BODY)
_add("remat2 checkpoint", Kind.BODY, remat=True)
_add("custom_jvp_call custom_vjp_call", Kind.BODY, custom_derivative=True)
_add("pallas_call custom_call", Kind.OPAQUE, materialized=True)
_add(
    "shard_map custom_partitioning pure_callback io_callback",
    Kind.OPAQUE,
    sharding_rule=sharding_rules.no_shared_dimensions,
)
for _names in (
    "shard_map pallas_call custom_partitioning custom_linear_solve xla_pmap ffi_call pure_callback io_callback",
    "dot_product_attention_fwd dot_product_attention_fwd_wrapper dot_product_attention_fp8_fwd",
    "dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd",
    "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd_wrapper",
):
    _add(_names, Kind.OPAQUE, unknown_flops=True)
