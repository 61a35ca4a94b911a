"""How the results of one equation follow the batch when its operands do: one small rule per primitive, in a table.

A rule sees a `Site` and gives a label, or one for each result; it raises `Lost` where the result is none of the known.
"""

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from ..primitives import rules_in
from .examples import Constant, Label, Places, Rows, Size, Sum, sized
from .indexing import INDEXING
from .site import Lost, Site, common, left_of, moved, number, scale_of

Rule = Callable[[Site], Label | list[Label]]
RULES: dict[str, Rule] = {**INDEXING}
rule = rules_in(RULES)

# What makes each number of its results of those at its place in its operands, and is exact: beside sums and products.
ELEMENTWISE = frozenset(
    {
        *(
            "max",
            "min",
            "pow",
            "integer_pow",
            "square",
            "sqrt",
            "rsqrt",
            "cbrt",
            "abs",
            "sign",
            "clamp",
            "rem",
        ),
        *(
            "exp",
            "exp2",
            "log",
            "log2",
            "log1p",
            "expm1",
            "logistic",
            "erf",
            "erfc",
            "erf_inv",
            "lgamma",
            "digamma",
        ),
        *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh"),
        *("asinh", "acosh", "atanh", "bessel_i0e", "bessel_i1e", "regularized_incomplete_beta"),
        *("igamma", "igammac", "polygamma", "zeta", "conj", "complex", "population_count", "clz"),
        *("gt", "lt", "ge", "le", "eq", "ne", "eq_to", "lt_to", "le_to", "and", "or", "not", "xor"),
        *("is_finite", "round", "floor", "ceil", "nextafter", "mulhi", "one_minus_square", "polynomial"),
        *("shift_left", "shift_right_logical", "shift_right_arithmetic", "threefry2x32"),
        *("random_wrap", "random_unwrap", "random_fold_in", "random_seed", "random_clone"),
    }
)
_EXACT = ("max", "min", "prod", "and", "or", "xor")  # reductions that are not linear


def rule_for(name: str) -> Rule:
    """The rule of a primitive; of one that nothing is known about, that its results are lost."""
    return RULES.get(name, _lost)


def _lost(_site: Site) -> Label:
    raise Lost


@rule(*ELEMENTWISE)
def _elementwise(site: Site) -> Label:
    if not site.same_params():
        raise Lost
    return site.all_exact()


@rule("bitcast_convert_type")
def _bitcast(site: Site) -> Label:
    return site.exact(0)


@rule("neg", "real", "imag", "reduce_precision", "stop_gradient", "copy", "copy_p", "name", "device_put")
@rule(
    "sharding_constraint", "mesh_cast", "layout_constraint", "optimization_barrier", "pvary", "pcast", "stage"
)
def _passed(site: Site) -> list[Label]:
    return list(site.labels)


@rule("convert_element_type")
def _convert(site: Site) -> Label:
    """Rounding to whole numbers is not linear."""
    to = site.params["new_dtype"]
    linear = jnp.issubdtype(to, jnp.inexact) or (jnp.issubdtype(to, jnp.integer) and not site.inexact(0))
    return site.labels[0] if linear else site.exact(0)


@rule("add", "sub", "add_any")
def _add(site: Site) -> Label:
    return site.aligned(range(len(site.labels)))


@rule("select_n")
def _select(site: Site) -> Label:
    which, cases = site.exact(0), site.aligned(range(1, len(site.labels)))
    dim = common([which, cases])
    if dim is None or isinstance(cases, Rows):
        return cases
    if isinstance(cases, Sum):
        raise Lost
    return site.all_exact()


@rule("mul")
def _mul(site: Site) -> Label:
    return _product(site.labels, (1, 1))


@rule("div")
def _div(site: Site) -> Label:
    return _product(site.labels, (1, -1)) if site.inexact(0) else site.all_exact()


def _product(labels: Sequence[Label], powers: Sequence[int]) -> Label:
    scale = scale_of(labels, powers)
    dim, sums = common(labels), sum(isinstance(x, Sum) for x in labels)
    if sums + (dim is not None) > 1:
        raise Lost
    return Sum(scale) if sums else sized(scale) if dim is None else Rows(dim, scale)


@rule("dot_general")
def _dot(site: Site) -> Label:
    (lc, rc), (lb, rb) = site.params["dimension_numbers"]
    left, right = site.labels
    scale = scale_of(site.labels, (1, 1))
    if isinstance(left, Rows) and isinstance(right, Rows):
        if (left.dim, right.dim) in zip(lc, rc, strict=True):
            return Sum(scale)
        if (left.dim, right.dim) in zip(lb, rb, strict=True):
            return Rows(lb.index(left.dim), scale)
        raise Lost
    if not isinstance(left, Rows) and not isinstance(right, Rows):
        return _product(site.labels, (1, 1))
    if isinstance(left, Sum) or isinstance(right, Sum):
        raise Lost
    order = [(0, d) for d in range(len(site.shape(0))) if d not in (*lc, *lb)]
    order += [(1, d) for d in range(len(site.shape(1))) if d not in (*rc, *rb)]
    mine = next((i, x.dim) for i, x in enumerate((left, right)) if isinstance(x, Rows))
    if mine not in order:
        raise Lost
    return Rows(len(lb) + order.index(mine), scale)


@rule("conv_general_dilated")
def _conv(site: Site) -> Label:
    dn, (left, right) = site.params["dimension_numbers"], site.labels
    one, single = (site.params[k] == 1 for k in ("batch_group_count", "feature_group_count"))
    scale = scale_of(site.labels, (1, 1))
    match left, right:
        case (Rows(d), Rows(c)) if one and single and (d, c) == (dn.lhs_spec[1], dn.rhs_spec[1]):
            return Sum(scale)
        case (Rows(d), Constant() | Size()) if one and d == dn.lhs_spec[0]:
            return Rows(dn.out_spec[0], scale)
        case (Constant() | Size(), Rows(c)) if one and single and c == dn.rhs_spec[0]:
            return Rows(dn.out_spec[1], scale)
        case (Rows(), _) | (_, Rows()):
            raise Lost
    return _product(site.labels, (1, 1))


@rule("reduce_sum")
def _reduce_sum(site: Site) -> Label:
    label = site.labels[0]
    if isinstance(label, Rows) and label.dim in site.params["axes"]:
        return Sum(label.scale)
    if isinstance(label, Places):
        raise Lost
    return moved(label, left_of(label, site.params["axes"]))


@rule("argmax", "argmin", "reduce", *(f"reduce_{name}" for name in _EXACT))
def _reduce(site: Site) -> Label | list[Label]:
    gone = site.params["axes"] if "axes" in site.params else site.params["dimensions"]
    label = site.all_exact()
    if isinstance(label, Rows) and label.dim in gone:
        raise Lost
    return [moved(label, left_of(label, gone))] * len(site.e.outs)


@rule("broadcast_in_dim")
def _broadcast(site: Site) -> Label:
    label, dim = site.labels[0], site.varying()
    if isinstance(label, (Rows, Places)):
        return moved(label, site.params["broadcast_dimensions"][label.dim])
    if dim is None or isinstance(label, Sum):
        return label
    return Rows(dim, number(label))


@rule("transpose")
def _transpose(site: Site) -> Label:
    label, order = site.labels[0], site.params["permutation"]
    return moved(label, order.index(label.dim) if isinstance(label, (Rows, Places)) else 0)


@rule("squeeze")
def _squeeze(site: Site) -> Label:
    return moved(site.labels[0], left_of(site.labels[0], site.params["dimensions"]))


@rule("reshape")
def _reshape(site: Site) -> Label:
    """The examples stay in their order where as many elements are major to them as before."""
    label, dim = site.labels[0], site.varying()
    if not isinstance(label, (Rows, Places)):
        return label
    if dim is None or math.prod(site.shape(0)[: label.dim]) != math.prod(site.out[:dim]):
        raise Lost
    if isinstance(label, Places) and site.out[dim] != site.shape(0)[label.dim]:
        raise Lost
    return moved(label, dim)


@rule("iota")
def _iota(site: Site) -> Label:
    dim = site.varying()
    if dim is None:
        raise Lost
    return Places(dim) if dim == site.params["dimension"] else Rows(dim)


@rule("sort", "top_k", "approx_top_k", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _along(site: Site) -> list[Label]:
    """Works along one dimension, on each example by itself if that is another one than theirs."""
    p, label = site.params, site.all_exact()
    last = len(site.shape(0)) - 1
    along = next((p[k] for k in ("axis", "dimension", "reduction_dimension") if k in p), last)
    if isinstance(label, Rows) and label.dim == along % (last + 1):
        raise Lost
    return [label] * len(site.e.outs)


@rule("random_bits", "random_split")
def _draw(site: Site) -> Label:
    """One key for all examples: the draw is made for all, and each takes its rows."""
    if not isinstance(site.labels[0], Constant):
        return site.exact(0)
    dim = site.varying()
    if dim is None or site.rigid:
        raise Lost
    site.draw = dim
    return Rows(dim)


@rule("random_gamma")
def _gamma(site: Site) -> Label:
    """With one key for all examples, the draws depend on how many there are."""
    label = site.all_exact()
    if isinstance(site.labels[0], Constant) and isinstance(label, Rows):
        raise Lost
    return label


_INNER = {  # how many dimensions a matrix, or what stands for one, has
    "lu_pivots_to_permutation": 1,
    **dict.fromkeys(("cholesky", "cholesky_update", "triangular_solve", "lu", "qr", "svd", "schur"), 2),
    **dict.fromkeys(("eig", "eigh", "geqrf", "householder_product"), 2),
}


@rule(*_INNER, "fft")
def _matrices(site: Site) -> list[Label]:
    """Matrices, or what is transformed, in the last dimensions; examples before them."""
    inner = _INNER.get(site.e.name) or len(site.params["fft_lengths"])
    label = site.all_exact()
    if isinstance(label, Rows) and label.dim >= len(site.shape(0)) - inner:
        raise Lost
    return [label] * len(site.e.outs)


# What devices reduce and exchange along named axes, where each has as many examples in every microbatch.


def _devices(site: Site) -> list[Label]:
    """Row by row: the devices' rows of a microbatch meet as they do in the whole batch."""
    if any(isinstance(x, Places) for x in site.labels):
        raise Lost
    return list(site.labels)


def _extreme(site: Site) -> list[Label]:
    return [site.exact(i) for i in range(len(site.labels))]


def _gathered(site: Site) -> list[Label]:
    return _along_devices(site, "all_gather_dimension", 1)


def _scattered(site: Site) -> list[Label]:
    return _along_devices(site, "scatter_dimension", -1)


def _along_devices(site: Site, named: str, more: int) -> list[Label]:
    """Linear; `more` dimensions where the devices get one of their own, else they share the one that is named."""
    at, tiled = site.params[named], site.params["tiled"]
    return [_beside(label, at, 0 if tiled else more) for label in _devices(site)]


def _beside(label: Label, at: int, more: int) -> Label:
    if not isinstance(label, Rows):
        return label
    if label.dim == at and more < 1:  # the devices' rows one after the other, or a part of them
        raise Lost
    return Rows(label.dim + more * (label.dim >= at), label.scale)


def _exchanged(site: Site) -> list[Label]:
    p, label = site.params, _devices(site)[0]
    if isinstance(label, Rows) and (not p["tiled"] or label.dim in (p["split_axis"], p["concat_axis"])):
        raise Lost
    return [label]


RULES |= {
    **dict.fromkeys(("psum", "psum_invariant", "ppermute"), _devices),
    **dict.fromkeys(("pmax", "pmin"), _extreme),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), _gathered),
    "reduce_scatter": _scattered,
    "all_to_all": _exchanged,
}
