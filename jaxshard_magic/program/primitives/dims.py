"""Which dimensions of an equation's operands and results are one dimension: the rules of the table.

A rule calls `links.link(equation, value, dim, value, dim)` for every pair of dimensions that are one logical dimension.
`alike` says that the values also lie in memory alike (a parameter and its gradient), which a matmul's operands do not.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..ir import Equation
    from ..links import Links


def reduced(params: Mapping[str, Any]) -> tuple[int, ...]:
    """The dimensions that a reduction leaves out."""
    return tuple(params["axes"] if "axes" in params else params["dimensions"])


def along(params: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    """The dimensions that a primitive works along (a sort, a running sum, a concatenation): the one that its parameters
    name, or the last."""
    named = next(
        (params[k] for k in ("dimension", "axis", "reduction_dimension", "dimensions") if k in params), -1
    )
    return tuple(d % rank for d in (named if isinstance(named, tuple) else (named,)))


def nothing(_links: "Links", _e: "Equation") -> None:
    """No dimension of the results is one of the operands'."""


def product(links: "Links", e: "Equation") -> None:
    """As its contraction says; what a window lies along is no dimension of another array's."""
    c = e.contraction
    assert c is not None
    ((left, right), out) = e.ins[:2], e.outs[0]
    for a, b in c.contracted:
        links.link(e, left, a, right, b, False)
    for a, b, o in c.batch:
        links.link(e, left, a, out, o, False)
        links.link(e, right, b, out, o, False)
    for value, free in ((left, c.left), (right, c.right)):
        for d, o in free:
            links.link(e, value, d, out, o, False)
    sides = [side for sides in c.windowed for side in zip((left, right, out), sides, strict=True)]
    links.windowed.update(
        links.program.node(v, d) for v, d in sides if v is not None and links.shape(v)[d] > 1
    )
    counted = [(out if k < 0 else e.ins[k], d) for k, d in c.by_group]
    for (a, i), (b, j) in itertools.pairwise(counted):
        links.link(e, a, i, b, j, False)
    for i, d in c.sized:
        links.link(e, left, d, e.ins[2], i, False)


def attention(links: "Links", e: "Equation") -> None:
    """Queries and what is made for each of them have positions of their own, keys and values others; a mask's are those
    of both."""
    form, gradient = e.params["form"], e.name == "attention_gradient"
    (query, key, value), others = e.ins[:3], e.ins[3:]
    given, masks = (others[:4], others[4:]) if gradient else ((), others)
    results = e.outs[:1] if gradient else e.outs
    of_keys = (key, value, *(e.outs[1:] if gradient else ()))
    rows = form.batch + form.groups + 1  # dimensions before the width
    for v in (*given, *results):
        for d in range(rows):
            links.link(e, query, d, v, d, False)
    for v in of_keys:
        for d in range(form.batch):
            links.link(e, query, d, v, d, False)
        links.link(e, key, form.batch, v, form.batch, False)
    wide = (query, key, *((e.outs[0], e.outs[1]) if gradient else ()))
    summed = (value, e.ins[3], e.outs[2]) if gradient else (value, e.outs[0])
    for v, *same in (wide, summed):
        for w in same:
            links.link(e, v, len(links.shape(v)) - 1, w, len(links.shape(w)) - 1, False)
    for mask in masks:
        for d, size in enumerate(links.shape(mask)):
            if size > 1:
                links.link(e, mask, d, *((query, d) if d < rows else (key, form.batch)), False)


def keyed(links: "Links", e: "Equation") -> None:
    """Many keys at once: each draws numbers, or makes keys, of its own."""
    many, out = e.ins[0], e.outs[0]
    for d, size in enumerate(links.shape(many)):
        if links.shape(out)[d : d + 1] == (size,):
            links.link(e, many, d, out, d, False)


def reduction(links: "Links", e: "Equation") -> None:
    gone = reduced(e.params)
    for operand, out in itertools.product(e.ins, e.outs):
        kept = [d for d in range(len(links.shape(operand))) if d not in gone]
        if len(kept) == len(links.shape(out)):
            for b, a in enumerate(kept):
                links.link(e, operand, a, out, b)


def gather(links: "Links", e: "Equation") -> None:
    """Index dimensions go on as the result's; whole slices keep the operand's dimension. Where each row is looked up
    by its own number, the operand's rows are the index's."""
    dn, (operand, index), out = e.params["dimension_numbers"], e.ins[:2], e.outs[0]
    gone = (*dn.collapsed_slice_dims, *dn.operand_batching_dims)
    sliced = (d for d in range(len(links.shape(operand))) if d not in gone)
    for b, a in zip(dn.offset_dims, sliced, strict=True):
        if e.params["slice_sizes"][a] == links.shape(operand)[a]:
            links.link(e, operand, a, out, b, False)
    if index is not None:
        rest = (d for d in range(len(links.shape(out))) if d not in dn.offset_dims)
        for a, b in enumerate(rest):
            links.link(e, index, a, out, b, False)
    for a, b in zip(dn.operand_batching_dims, dn.start_indices_batching_dims, strict=True):
        links.link(e, operand, a, index, b, False)
    _own_rows(links, e, operand, dn.start_index_map)


def scatter(links: "Links", e: "Equation") -> None:
    dn, (operand, index, updates) = e.params["dimension_numbers"], e.ins[:3]
    gone = (*dn.inserted_window_dims, *dn.operand_batching_dims)
    for d in range(len(links.shape(operand))):
        links.link(e, operand, d, e.outs[0], d)
    if updates is not None:
        kept = (d for d in range(len(links.shape(e.outs[0]))) if d not in gone)
        for b, a in zip(dn.update_window_dims, kept, strict=True):
            if links.shape(updates)[b] == links.shape(e.outs[0])[a]:
                links.link(e, e.outs[0], a, updates, b, False)
    if index is not None and updates is not None:
        rest = (d for d in range(len(links.shape(updates))) if d not in dn.update_window_dims)
        for a, b in enumerate(rest):
            links.link(e, index, a, updates, b, False)
    for a, b in zip(dn.operand_batching_dims, dn.scatter_indices_batching_dims, strict=True):
        links.link(e, e.outs[0], a, index, b, False)
    _own_rows(links, e, operand, dn.scatter_dims_to_operand_dims)


def _own_rows(links: "Links", e: "Equation", operand: int | None, indexed: Sequence[int]) -> None:
    """`indexed`: the dimension of `operand` that each column of the index names places of."""
    index = e.ins[1]
    for column, d in enumerate(indexed):
        own = links.indices.counted(index, column)
        if own is not None and links.shape(operand)[d : d + 1] == links.shape(index)[own : own + 1]:
            links.link(e, operand, d, index, own, False)


def window(links: "Links", e: "Equation") -> None:
    """Pooling: dimensions that the window leaves alone."""
    window = e.params.get("window_dimensions")
    for operand, out in itertools.product(e.ins, e.outs):
        a, b = links.shape(operand), links.shape(out)
        if len(a) == len(b):
            for d in range(len(a)):
                if a[d] == b[d] and (window is None or window[d] == 1):
                    links.link(e, operand, d, out, d)


def same_places(links: "Links", e: "Equation") -> None:
    """Equal sizes at the same place are the same dimension, unless the equation works along it."""
    fixed = along(e.params, len(links.shape(e.outs[0]))) if e.primitive.along else ()
    for out, operand in itertools.product(e.outs, e.ins):
        a, b = links.shape(operand), links.shape(out)
        if operand is None or len(a) != len(b):
            continue
        for d in range(len(a)):
            if a[d] == b[d] and d not in fixed:
                links.link(e, operand, d, out, d)
            elif e.primitive.cuts:
                links.cut.append((links.program.node(operand, d), links.program.node(out, d)))


def running(links: "Links", e: "Equation") -> None:
    """A number for each place of the operand, the dimension that it runs over included."""
    for d in range(len(links.shape(e.outs[0]))):
        links.link(e, e.ins[0], d, e.outs[0], d)


def stack(links: "Links", e: "Equation") -> None:
    """The dimensions of every operand, with a new one between them."""
    axis = e.params["axis"]
    for operand in e.ins:
        for d in range(len(links.shape(operand))):
            links.link(e, operand, d, e.outs[0], d + (d >= axis))


def unstack(links: "Links", e: "Equation") -> None:
    """The dimensions of the operand but one."""
    axis, shape = e.params["axis"], links.shape(e.ins[0])
    for out, d in itertools.product(e.outs, range(len(shape))):
        if d != axis:
            links.link(e, e.ins[0], d, out, d - (d > axis))


def shape(links: "Links", e: "Equation") -> None:
    """One to one, or one dimension cut into parts, or parts merged into one, as its factors say."""
    (a, out), node = (e.ins[0], e.outs[0]), links.program.node
    if a is None or e.factors is None:
        return
    for old, new in e.factors.groups:
        if len(old) == len(new) == 1:
            links.link(e, a, old[0], out, new[0])
        elif len(old) == 1 < len(new):
            links.split(e, node(a, old[0]), [node(out, d) for d in new])
        elif len(new) == 1 < len(old):
            links.split(e, node(out, new[0]), [node(a, d) for d in old])
        elif old and new:
            _regroup(links, e, (a, old), (out, new))


def _regroup(
    links: "Links", e: "Equation", old: tuple[int, Sequence[int]], new: tuple[int, Sequence[int]]
) -> None:
    """Several dimensions become several others, as (32, 16) -> (4, 128) puts rows into chunks: a leading one that is a
    multiple of the other side's is cut into that and, where it goes on there evenly, the next."""
    sides = [[(links.program.node(v, d), links.shape(v)[d]) for d in ds] for v, ds in (old, new)]
    sides.sort(key=lambda side: -side[0][1])
    (whole, size), (first, major), (following, minor) = sides[0][0], *sides[1][:2]
    if not major or size % major:  # of an empty array sizes say nothing
        links.link(e, old[0], old[1][0], new[0], new[1][0])
    else:
        rest = size // major
        links.split(e, whole, (first, following) if minor % rest == 0 or rest % minor == 0 else (first,))
