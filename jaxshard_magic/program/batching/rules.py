"""How the results of one equation follow the batch when its operands do: the rules of the table of primitives.

A rule sees a `Site` and gives a label, or one for each result; it raises `Lost` where the result is none of the known.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from ..primitives import sharding_rules
from .examples import Constant, Label, Places, Rows, Sum, sized
from .site import Lost, Site, common, left_of, moved, number, scale_of


def lost(_site: Site) -> Label:
    raise Lost


def elementwise(site: Site) -> Label:
    if not site.same_params():
        raise Lost
    return site.all_exact()


def first_exact(site: Site) -> Label:
    return site.exact(0)


def passed_on(site: Site) -> list[Label]:
    return list(site.labels)


def convert(site: Site) -> Label:
    """Rounding to whole numbers is not linear."""
    to = site.params["new_dtype"]
    linear = jnp.issubdtype(to, jnp.inexact) or (jnp.issubdtype(to, jnp.integer) and not site.inexact(0))
    return site.labels[0] if linear else site.exact(0)


def add(site: Site) -> Label:
    return site.aligned(range(len(site.labels)))


def select(site: Site) -> Label:
    which, cases = site.exact(0), site.aligned(range(1, len(site.labels)))
    dim = common([which, cases])
    if dim is None or isinstance(cases, Rows):
        return cases
    if isinstance(cases, Sum):
        raise Lost
    return site.all_exact()


def mul(site: Site) -> Label:
    return _product(site.labels, (1, 1))


def div(site: Site) -> Label:
    return _product(site.labels, (1, -1)) if site.inexact(0) else site.all_exact()


def _product(labels: Sequence[Label], powers: Sequence[int]) -> Label:
    scale = scale_of(labels, powers)
    dim, sums = common(labels), sum(isinstance(x, Sum) for x in labels)
    if sums + (dim is not None) > 1:
        raise Lost
    return Sum(scale) if sums else sized(scale) if dim is None else Rows(dim, scale)


def product(site: Site) -> Label:
    """Examples that are contracted are summed over; side by side, or free, they stay so. Rows that groups divide are of
    no known group in another batch."""
    c = site.e.contraction
    assert c is not None
    left, right = site.labels[:2]
    if any(isinstance(site.exact(i), Rows) and not _sized(site, c.sized) for i in range(2, len(site.labels))):
        raise Lost
    mine, theirs = ((x.dim if isinstance(x, Rows) else None) for x in (left, right))
    if c.ragged is not None and mine == c.ragged:
        raise Lost
    if mine is None and theirs is None:
        return _product((left, right), (1, 1))
    scale = scale_of((left, right), (1, 1))
    if mine is not None and theirs is not None:
        if (mine, theirs) in c.contracted:
            return Sum(scale)
        kept = [out for a, b, out in c.batch if (a, b) == (mine, theirs)]
    elif isinstance(left, Sum) or isinstance(right, Sum):
        raise Lost
    else:
        free, dim = (c.left, mine) if theirs is None else (c.right, theirs)
        kept = [out for d, out in free if d == dim]
    if not kept:
        raise Lost
    return Rows(kept[0], scale)


def attention(site: Site) -> list[Label]:
    """Each example by itself, where they are dimensions of the batch."""
    label = site.all_exact()
    if isinstance(label, Rows) and label.dim >= site.params["form"].batch:
        raise Lost
    return [label] * len(site.e.outs)


def _sized(site: Site, sized: Sequence[tuple[int, int]]) -> bool:
    """Do the sizes of the groups follow the rows that they are of?"""
    left, sizes = site.labels[0], site.labels[2]
    return isinstance(left, Rows) and isinstance(sizes, Rows) and (sizes.dim, left.dim) in sized


def reduce_sum(site: Site) -> Label:
    label = site.labels[0]
    if isinstance(label, Rows) and label.dim in site.params["axes"]:
        return Sum(label.scale)
    if isinstance(label, Places):
        raise Lost
    return moved(label, left_of(label, site.params["axes"]))


def reduce_exact(site: Site) -> Label | list[Label]:
    gone = sharding_rules.reduced(site.params)
    label = site.all_exact()
    if isinstance(label, Rows) and label.dim in gone:
        raise Lost
    return [moved(label, left_of(label, gone))] * len(site.e.outs)


def shape(site: Site) -> Label:
    """Examples stay in their order where a dimension of the result goes through theirs; repeated numbers are those of
    as many examples. Asked of the large program: a dimension of one example could be any of size 1."""
    label, dim, factors = site.labels[0], site.varying(), site.f.factors
    if not isinstance(label, (Rows, Places)):
        return label if dim is None or isinstance(label, Sum) else Rows(dim, number(label))
    found = None if factors is None else factors.leading(label.dim)
    if found is None or (isinstance(label, Places) and site.out[found] != site.shape(0)[label.dim]):
        raise Lost
    return moved(label, found)


def iota(site: Site) -> Label:
    dim = site.varying()
    if dim is None:
        raise Lost
    return Places(dim) if dim == site.params["dimension"] else Rows(dim)


def along(site: Site) -> list[Label]:
    """Works along one dimension, on each example by itself if that is another one than theirs."""
    label = site.all_exact()
    if isinstance(label, Rows) and label.dim in sharding_rules.along(site.params, len(site.shape(0))):
        raise Lost
    return [label] * len(site.e.outs)


def draw(site: Site) -> Label:
    """One key for all examples: the draw is made for all, and each takes its rows."""
    if not isinstance(site.labels[0], Constant):
        return site.exact(0)
    dim = site.varying()
    if dim is None or site.rigid:
        raise Lost
    site.draw = dim
    return Rows(dim)


def gamma(site: Site) -> Label:
    """With one key for all examples, the draws depend on how many there are."""
    label = site.all_exact()
    if isinstance(site.labels[0], Constant) and isinstance(label, Rows):
        raise Lost
    return label


def matrices(site: Site) -> list[Label]:
    """Matrices, or what is transformed, in the last dimensions; examples before them."""
    inner = site.e.primitive.inner or len(site.params["fft_lengths"])
    label = site.all_exact()
    if isinstance(label, Rows) and label.dim >= len(site.shape(0)) - inner:
        raise Lost
    return [label] * len(site.e.outs)


# What devices reduce and exchange along named axes, where each has as many examples in every microbatch.


def devices(site: Site) -> list[Label]:
    """Row by row: the devices' rows of a microbatch meet as they do in the whole batch."""
    if any(isinstance(x, Places) for x in site.labels):
        raise Lost
    return list(site.labels)


def extreme(site: Site) -> list[Label]:
    return [site.exact(i) for i in range(len(site.labels))]


def gathered(site: Site) -> list[Label]:
    return _along_devices(site, "all_gather_dimension", 1)


def scattered(site: Site) -> list[Label]:
    return _along_devices(site, "scatter_dimension", -1)


def _along_devices(site: Site, named: str, more: int) -> list[Label]:
    """Linear; `more` dimensions where the devices get one of their own, else they share the one that is named."""
    at, tiled = site.params[named], site.params["tiled"]
    return [_beside(label, at, 0 if tiled else more) for label in devices(site)]


def _beside(label: Label, at: int, more: int) -> Label:
    if not isinstance(label, Rows):
        return label
    if label.dim == at and more < 1:  # the devices' rows one after the other, or a part of them
        raise Lost
    return Rows(label.dim + more * (label.dim >= at), label.scale)


def exchanged(site: Site) -> list[Label]:
    p, label = site.params, devices(site)[0]
    if isinstance(label, Rows) and (not p["tiled"] or label.dim in (p["split_axis"], p["concat_axis"])):
        raise Lost
    return [label]
