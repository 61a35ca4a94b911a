"""The table of primitives: a row each. Everybody who treats primitives in different ways asks it.

To add a primitive, add a row; `tests/test_primitives.py` says what it lacks, `tests/test_sharding_rules.py` whether its
dimensions do as the rule of its kind says. Of a primitive without a row dimensions of one size at the same position
are linked, and it follows no batch.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..batching import indexing, rules
from . import contractions, factors, sharding_rules
from .jaxprs import BODIES
from .primitive import Across, Control, Kind, Primitive, Runs

TABLE: dict[str, Primitive] = {}
UNKNOWN = Primitive(kind=Kind.UNKNOWN)
# The sharding rule of rows that name none; of other kinds dimensions of one size at the same position are one.
_RULE_OF_KIND = {
    Kind.PRODUCT: sharding_rules.product,
    Kind.ATTENTION: sharding_rules.attention,
    Kind.ELEMENTWISE: sharding_rules.elementwise,
    Kind.SHAPE: sharding_rules.shape,
    Kind.CUT: sharding_rules.cut,
    Kind.REDUCTION: sharding_rules.reduction,
    Kind.RUNNING: sharding_rules.running,
    Kind.ORDER: sharding_rules.beside,
    Kind.WINDOW: sharding_rules.window,
    Kind.MATRIX: sharding_rules.matrices,
    Kind.EACH: sharding_rules.each,
    Kind.SOURCE: sharding_rules.no_dimensions,
}
FIRST, TWO, ALL = slice(1), slice(2), slice(None)  # the operands that a primitive is linear in


def primitive_of(name: str) -> Primitive:
    """The row of a primitive; `UNKNOWN` for one that has none."""
    return TABLE.get(name, UNKNOWN)


def _add(names: str, kind: Kind, **facts: Any) -> None:
    """State facts of several primitives of one kind, beside what was stated of them before."""
    rule = _RULE_OF_KIND.get(kind, sharding_rules.same_positions)
    for name in names.split():
        row = TABLE.get(name) or Primitive(kind=kind, sharding_rule=rule)
        assert row.kind is kind, f"{name} is of two kinds, {row.kind} and {kind}"
        TABLE[name] = replace(row, **facts)


def zero(dtype: Any) -> Any:
    return jnp.zeros((), dtype)


def one(dtype: Any) -> Any:
    return jnp.ones((), dtype)


def least(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return jnp.asarray(True)  # of reduce_and
    return jnp.asarray(-jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min, dtype)


def most(dtype: Any) -> Any:
    return jnp.asarray(jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max, dtype)


# Products: matmuls and convolutions.
_PRODUCT = {
    "follow": rules.product,
    "in_each": True,
    "fill": zero,
    "mixes": True,
    "pinned": True,
    "kept": True,
}
_add("dot_general", Kind.PRODUCT, contraction=contractions.dot, runs=Runs.PRODUCT, **_PRODUCT)
_add("conv_general_dilated", Kind.PRODUCT, contraction=contractions.conv, **_PRODUCT)
_add("conv_general_dilated", Kind.PRODUCT, work=contractions.conv_work, runs=Runs.PRODUCT)
_add("ragged_dot_general", Kind.PRODUCT, contraction=contractions.ragged_dot, runs=Runs.PRODUCT, **_PRODUCT)
_add("scaled_dot", Kind.PRODUCT, contraction=contractions.dot, **_PRODUCT)
_add("scaled_matmul_wrapper", Kind.PRODUCT, contraction=contractions.scaled_matmul, **_PRODUCT)

# Attention as one primitive (`program/attention/fused.py`), and its gradient.
_ATTENTION = {"follow": rules.attention, "pinned": True, "kept": True, "mixes": True}
_add("attention", Kind.ATTENTION, counts=contractions.attention_work, **_ATTENTION)
_add("attention_gradient", Kind.ATTENTION, counts=contractions.attention_gradient_work, **_ATTENTION)

# Number by number.
_ELEMENTWISE = {"follow": rules.elementwise}
_add(
    "max min abs sign clamp floor ceil round tanh logistic",
    Kind.ELEMENTWISE,
    runs=Runs.FOLLOW,
    **_ELEMENTWISE,
)
_add("eq ne lt le gt ge is_finite", Kind.ELEMENTWISE, runs=Runs.FLOAT, compares=True, **_ELEMENTWISE)
for _names in (
    "exp exp2 expm1 log log1p pow integer_pow square sqrt rsqrt cbrt rem nextafter",
    "sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh erf erfc erf_inv lgamma digamma",
):
    _add(_names, Kind.ELEMENTWISE, runs=Runs.FLOAT, **_ELEMENTWISE)
for _names in (
    "log2 bessel_i0e bessel_i1e regularized_incomplete_beta igamma igammac polygamma zeta conj complex",
    "population_count clz eq_to lt_to le_to and or not xor mulhi one_minus_square polynomial",
    "shift_left shift_right_logical shift_right_arithmetic",
):
    _add(_names, Kind.ELEMENTWISE, **_ELEMENTWISE)
_add("add add_any", Kind.ELEMENTWISE, follow=rules.add, linear=TWO, adds=True, runs=Runs.FOLLOW)
_add("sub", Kind.ELEMENTWISE, follow=rules.add, linear=TWO, runs=Runs.FOLLOW)
_add("mul", Kind.ELEMENTWISE, follow=rules.mul, in_each=True, runs=Runs.FOLLOW)
_add("div", Kind.ELEMENTWISE, follow=rules.div, linear=FIRST, runs=Runs.FOLLOW)
_add("neg", Kind.ELEMENTWISE, follow=rules.passed_on, linear=FIRST, runs=Runs.FOLLOW)
_add("real imag", Kind.ELEMENTWISE, follow=rules.passed_on, linear=FIRST)
_add("select_n", Kind.ELEMENTWISE, follow=rules.select, linear=slice(1, None), runs=Runs.FOLLOW)
_add("bitcast_convert_type", Kind.ELEMENTWISE, follow=rules.first_exact)

# The same numbers, marked, rounded or laid elsewhere.
_ALIAS = {"follow": rules.passed_on, "alias": True}
_add(
    "convert_element_type",
    Kind.ELEMENTWISE,
    follow=rules.convert,
    alias=True,
    casts=True,
    relaid=True,
    runs=Runs.FOLLOW,
)
_add("reduce_precision device_put", Kind.ELEMENTWISE, **_ALIAS)
_add("sharding_constraint", Kind.ELEMENTWISE, runs=Runs.FOLLOW, **_ALIAS)
_add("copy copy_p name", Kind.ELEMENTWISE, moves=True, runs=Runs.FOLLOW, **_ALIAS)
_add("copy", Kind.ELEMENTWISE, relaid=True)
_add("name", Kind.ELEMENTWISE, names_value=True)
_add("convert_element_type reduce_precision copy copy_p name", Kind.ELEMENTWISE, linear=FIRST)
_add("stop_gradient", Kind.ELEMENTWISE, runs=Runs.FOLLOW, **_ALIAS)
_add("mesh_cast layout_constraint pvary pcast stage", Kind.ELEMENTWISE, follow=rules.passed_on)
_add("optimization_barrier", Kind.EACH, follow=rules.passed_on, runs=Runs.FOLLOW)

# Under other dimensions.
_SHAPE = {"follow": rules.shape, "linear": FIRST, "alias": True, "moves": True}
_SHAPE |= {"runs": Runs.FOLLOW}
_add("broadcast_in_dim", Kind.SHAPE, factors=factors.broadcast, **_SHAPE)
_add("transpose", Kind.SHAPE, factors=factors.transpose, relaid=True, **_SHAPE)
_add("reshape", Kind.SHAPE, factors=factors.reshape, relaid=True, **_SHAPE)
_add("squeeze", Kind.SHAPE, factors=factors.squeeze, relaid=True, **_SHAPE)
_add("expand_dims", Kind.SHAPE, factors=factors.expand_dims, **_SHAPE)

# Parts of arrays.
_BESIDE = {"sharding_rule": sharding_rules.beside, "along": True}
_CUT = {"moves": True, "runs": Runs.FOLLOW}
_add("slice", Kind.CUT, follow=indexing.cut, linear=FIRST, alias=True, part=True, cuts=True, **_CUT)
_add("dynamic_slice", Kind.CUT, follow=indexing.dynamic_slice, linear=FIRST, part=True, cuts=True, **_CUT)
_add("dynamic_update_slice", Kind.CUT, follow=indexing.update_slice, linear=TWO, cuts=True, kept=True)
_add("dynamic_update_slice", Kind.CUT, runs=Runs.FOLLOW)
_add("rev", Kind.CUT, follow=indexing.cut, linear=FIRST, part=True, **_BESIDE, **_CUT)
_add("split", Kind.CUT, follow=indexing.cut, linear=FIRST, cuts=True, **_BESIDE, **_CUT)
_add("concatenate", Kind.CUT, follow=indexing.concatenate, linear=ALL, cuts=True, **_BESIDE, **_CUT)
_add("concatenate", Kind.CUT, pinned=True, kept=True)
_add("pad", Kind.CUT, follow=indexing.pad, linear=TWO, cuts=True, pinned=True, **_CUT)
_add("tile", Kind.CUT, follow=indexing.tile, linear=FIRST, **_CUT)
_add(
    "stack",
    Kind.CUT,
    follow=indexing.stack,
    linear=ALL,
    sharding_rule=sharding_rules.stack,
    pinned=True,
    kept=True,
    **_CUT,
)
_add(
    "unstack",
    Kind.CUT,
    follow=indexing.unstack,
    linear=FIRST,
    sharding_rule=sharding_rules.unstack,
    alias=True,
    **_CUT,
)

# Elements of the blocks of a scan (`program/scans.py`), to all devices and back.
_add("gather_blocks divide_blocks", Kind.CUT, follow=indexing.cut, linear=FIRST, **_BESIDE, pinned=True)
_add("gather_blocks divide_blocks", Kind.CUT, **_CUT)

# At places that another operand names.
_add(
    "gather",
    Kind.LOOKUP,
    sharding_rule=sharding_rules.gather,
    follow=indexing.gather,
    mixes=True,
    pinned=True,
    kept=True,
    **_CUT,
)
_SCATTER = {"sharding_rule": sharding_rules.scatter, "follow": indexing.scatter, "kept": True}
_add("scatter scatter-mul scatter_mul scatter-min scatter_min", Kind.LOOKUP, **_SCATTER)
_add("scatter-max scatter_max scatter-apply", Kind.LOOKUP, **_SCATTER)
_add("scatter", Kind.LOOKUP, linear=slice(0, None, 2))
_add("scatter-sub scatter_sub", Kind.LOOKUP, linear=slice(0, None, 2), adds=True, fill=zero, **_SCATTER)
_add("scatter-add scatter_add", Kind.LOOKUP, linear=slice(0, None, 2), adds=True, **_SCATTER)
_add("scatter-add scatter_add", Kind.LOOKUP, fill=zero, rounds=True, runs=Runs.FLOAT)

# Dimensions left out.
_EXACT = {"follow": rules.reduce_exact}  # not linear
_add("reduce_sum", Kind.REDUCTION, follow=rules.reduce_sum, linear=FIRST, joins=lax.add)
_add("reduce_sum", Kind.REDUCTION, fill=zero, kept=True, rounds=True, runs=Runs.FLOAT)
_add("reduce_prod", Kind.REDUCTION, joins=lax.mul, fill=one, rounds=True, runs=Runs.FLOAT, **_EXACT)
_add("reduce_max", Kind.REDUCTION, joins=lax.max, fill=least, kept=True, runs=Runs.FOLLOW, **_EXACT)
_add("reduce_min", Kind.REDUCTION, joins=lax.min, fill=most, runs=Runs.FOLLOW, **_EXACT)
_add("reduce_and", Kind.REDUCTION, joins=lax.bitwise_and, fill=least, **_EXACT)
_add("reduce_or", Kind.REDUCTION, joins=lax.bitwise_or, fill=zero, **_EXACT)
_add("reduce_xor", Kind.REDUCTION, joins=lax.bitwise_xor, fill=zero, **_EXACT)
_add("argmax", Kind.REDUCTION, fill=least, kept=True, places=0, compares=True, runs=Runs.FLOAT, **_EXACT)
_add("argmin", Kind.REDUCTION, fill=most, kept=True, places=0, compares=True, runs=Runs.FLOAT, **_EXACT)
_add("reduce", Kind.REDUCTION, **_EXACT)

# Along a dimension.
_ALONG = {"follow": rules.along, "along": True}
_add("cumsum", Kind.RUNNING, follow=indexing.cut, linear=FIRST, fill=zero, along=True, mixes=True, kept=True)
_add("cumprod", Kind.RUNNING, fill=one, **_ALONG)
_add("cumlogsumexp", Kind.RUNNING, fill=least, kept=True, **_ALONG)
_add("cumsum cumprod cumlogsumexp", Kind.RUNNING, rounds=True, runs=Runs.FLOAT)
_add("cummax", Kind.RUNNING, fill=least, runs=Runs.FOLLOW, **_ALONG)
_add("cummin", Kind.RUNNING, fill=most, runs=Runs.FOLLOW, **_ALONG)
for _names, _combine in (
    ("cumsum", lax.add),
    ("cumprod", lax.mul),
    ("cummax", lax.max),
    ("cummin", lax.min),
    ("cumlogsumexp", jnp.logaddexp),
):
    _add(_names, Kind.RUNNING, running=_combine)
_add("sort", Kind.ORDER, cuts=True, mixes=True, kept=True, **_ALONG)
_add("top_k", Kind.ORDER, places=1, runs=Runs.FOLLOW, **_ALONG)
_add("approx_top_k", Kind.ORDER, places=1, **_ALONG)

# Under a window.
_WINDOW = {"follow": indexing.window}
_add("reduce_window", Kind.WINDOW, kept=True, **_WINDOW)
_add("reduce_window_sum", Kind.WINDOW, adds=True, kept=True, rounds=True, runs=Runs.FLOAT, **_WINDOW)
_add("reduce_window_max", Kind.WINDOW, kept=True, runs=Runs.FOLLOW, **_WINDOW)
_add("reduce_window_min", Kind.WINDOW, runs=Runs.FOLLOW, **_WINDOW)
_add("select_and_scatter_add", Kind.WINDOW, adds=True, **_WINDOW)
_add("select_and_gather_add", Kind.WINDOW, kept=True, **_WINDOW)
_add("select_and_scatter", Kind.WINDOW, follow=rules.lost)

# Matrices in the last dimensions.
_add("lu_pivots_to_permutation", Kind.MATRIX, follow=rules.matrices, inner=1)
_add("cholesky triangular_solve lu qr svd schur", Kind.MATRIX, follow=rules.matrices, inner=2, unseen=True)
_add("eig eigh geqrf householder_product", Kind.MATRIX, follow=rules.matrices, inner=2, unseen=True)
_add("cholesky_update", Kind.MATRIX, follow=rules.matrices, inner=2)
_add("fft", Kind.MATRIX, follow=rules.matrices, unseen=True)
for _names in ("geqp3 hessenberg ormqr symmetric_product tridiagonal tridiagonal_solve",):
    _add(_names, Kind.MATRIX, follow=rules.lost, unseen=True)

# Random numbers and their keys.
_add(
    "random_wrap random_unwrap",
    Kind.RANDOM,
    sharding_rule=sharding_rules.keyed,
    follow=rules.elementwise,
    alias=True,
)
_add("random_seed random_fold_in random_clone", Kind.RANDOM, follow=rules.elementwise)
_add("threefry2x32", Kind.RANDOM, sharding_rule=sharding_rules.no_dimensions, follow=rules.elementwise)
_add("random_bits random_split", Kind.RANDOM, sharding_rule=sharding_rules.keyed, follow=rules.draw)
_add("random_gamma", Kind.RANDOM, sharding_rule=sharding_rules.keyed, follow=rules.gamma)
_add("random_gamma_grad", Kind.RANDOM, sharding_rule=sharding_rules.no_dimensions, follow=rules.lost)
_add("random_wrap threefry2x32 random_bits random_split random_fold_in random_seed", Kind.RANDOM, keyed=True)
_add("random_bits random_gamma random_split threefry2x32", Kind.RANDOM, counted=True)
_add("random_bits threefry2x32", Kind.RANDOM, kept=True)

# Between the devices of a named axis.
_ALIKE, _PARTS = {"across": Across.ALIKE}, {"across": Across.PARTS}
_add("psum psum_invariant", Kind.COLLECTIVE, follow=rules.devices, **_ALIKE)
_add("pmax pmin", Kind.COLLECTIVE, follow=rules.extreme, **_ALIKE)
_add("all_gather all_gather_invariant", Kind.COLLECTIVE, follow=rules.gathered, **_ALIKE)
_add("ppermute", Kind.COLLECTIVE, follow=rules.devices, **_PARTS)
_add("reduce_scatter", Kind.COLLECTIVE, follow=rules.scattered, adds=True, **_PARTS)
_add("all_to_all", Kind.COLLECTIVE, follow=rules.exchanged, **_PARTS)
_add("axis_index ragged_all_to_all pgather", Kind.COLLECTIVE, follow=rules.lost, **_PARTS)

_add("iota", Kind.SOURCE, follow=rules.iota)

# What runs equations of its own, and what nothing is known of.
for _names, _control in (("scan", Control.SCAN), ("while", Control.WHILE), ("cond", Control.COND)):
    _add(_names, Kind.BODY, control=_control, kept=True)
_add(" ".join(BODIES), Kind.BODY)
_add("remat2 checkpoint", Kind.BODY, remat=True)
_add("custom_jvp_call custom_vjp_call", Kind.BODY, custom=True)
_add("pallas_call custom_call", Kind.OPAQUE, kept=True)
_add(
    "shard_map custom_partitioning pure_callback io_callback",
    Kind.OPAQUE,
    sharding_rule=sharding_rules.no_dimensions,
)
for _names in (
    "shard_map pallas_call custom_partitioning custom_linear_solve xla_pmap ffi_call pure_callback io_callback",
    "dot_product_attention_fwd dot_product_attention_fwd_wrapper dot_product_attention_fp8_fwd",
    "dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd",
    "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd_wrapper",
):
    _add(_names, Kind.OPAQUE, unseen=True)
