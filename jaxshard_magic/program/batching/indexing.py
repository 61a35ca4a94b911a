"""How what is cut from arrays, set into them, looked up or put side by side follows the batch."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..primitives.sharding_rules import along
from .examples import CONSTANT, Constant, Label, Places, Rows, Size, Sum
from .site import Lost, Site, factor, left_of, moved, number, scale_of


def cut(site: Site) -> list[Label]:
    """Linear, and takes the examples as they are: works along other dimensions, or on all of this one."""
    label = site.labels[0]
    if isinstance(label, Places) or (isinstance(label, Rows) and not _leaves(site, label.dim)):
        raise Lost
    return [label] * len(site.e.outs)


def _leaves(site: Site, dim: int) -> bool:
    """Does a cut, a repetition or a running sum leave this dimension as it is?"""
    if "padding_config" in site.params:
        return not any(site.params["padding_config"][dim])
    if site.e.primitive.along:
        return dim not in along(site.params, len(site.shape(0)))
    return site.out[dim] == site.shape(0)[dim]


def dynamic_slice(site: Site) -> list[Label]:
    if any(site.exact(i) != CONSTANT for i in range(1, len(site.labels))):
        raise Lost
    return cut(site)


def pad(site: Site) -> Label:
    """Padding is the same for all rows, whatever they are scaled by, and a part of each sum."""
    label = site.labels[0]
    if isinstance(label, Rows):
        if not _leaves(site, label.dim):
            raise Lost
        return label if site.zero(1) else site.all_exact((0, 1))
    return site.aligned((0, 1))


def tile(site: Site) -> list[Label]:
    """Repeats rows of examples, or one row for all of them."""
    dim, label = site.varying(), site.labels[0]
    if isinstance(label, (Constant, Size)) and dim is not None and site.shape(0)[dim] == 1:
        return [Rows(dim, number(label))]
    return cut(site)


def concatenate(site: Site) -> Label:
    along = site.params["dimension"]
    if any(isinstance(x, Places) for x in site.labels):
        return _beside_places(site, along)
    label = site.aligned(range(len(site.labels)))
    if isinstance(label, Rows) and label.dim == along:
        raise Lost
    return label


def _beside_places(site: Site, along: int) -> Label:
    """Indices of an array's own rows beside other indices, as one array of index vectors."""
    at, offset, dims = [], 0, set()
    for i, label in enumerate(site.labels):
        width = site.shape(i)[along]
        if isinstance(label, Places) and label.at is None:
            at += range(offset, offset + width)
            dims.add(label.dim)
        else:
            other = site.exact(i)
            dims |= {other.dim} if isinstance(other, Rows) else set()
        offset += width
    if len(dims) != 1 or along in dims or along != len(site.out) - 1:
        raise Lost
    return Places(dims.pop(), tuple(at))


def stack(site: Site) -> Label:
    axis = site.params["axis"]
    label = site.aligned(range(len(site.labels)))
    return Rows(label.dim + (label.dim >= axis), label.scale) if isinstance(label, Rows) else label


def unstack(site: Site) -> list[Label]:
    label, axis = site.labels[0], site.params["axis"]
    if isinstance(label, (Rows, Places)) and label.dim == axis:
        raise Lost
    return [moved(label, left_of(label, (axis,)))] * len(site.e.outs)


def gather(site: Site) -> Label:
    dn, (operand, index) = site.params["dimension_numbers"], site.labels[:2]
    spots = [d for d in range(len(site.out)) if d not in dn.offset_dims]  # of the index's dimensions
    if isinstance(index, Places):
        _check_own(site, dn.start_index_map, index, operand)
        return Rows(spots[index.dim], scale_of([operand], [1]))
    index = site.exact(1)
    if not isinstance(index, Rows):
        if isinstance(operand, Places):
            raise Lost
        if not isinstance(operand, Rows):
            return operand
        gone = (*dn.collapsed_slice_dims, *dn.operand_batching_dims)
        if site.params["slice_sizes"][operand.dim] != site.shape(0)[operand.dim]:
            raise Lost
        return moved(operand, _window_dim(site, operand, gone, dn.offset_dims))
    paired = zip(dn.operand_batching_dims, dn.start_indices_batching_dims, strict=True)
    if isinstance(operand, Sum) or (isinstance(operand, Rows) and (operand.dim, index.dim) not in paired):
        raise Lost
    return Rows(spots[index.dim], scale_of([operand], [1]))


def _check_own(site: Site, index_map: Sequence[int], index: Places, operand: Label) -> None:
    """Index vectors that name in each row that row of `operand`, and no other rows."""
    columns = [c for c, d in enumerate(index_map) if isinstance(operand, Rows) and d == operand.dim]
    at = range(site.shape(1)[-1]) if index.at is None else index.at
    if len(columns) != 1 or list(at) != columns:
        raise Lost


def _window_dim(site: Site, operand: Rows, gone: Collection[int], window: Sequence[int]) -> int:
    """Where the dimension of `operand` is in slices of it; `gone`: dimensions they lack."""
    kept = [d for d in range(len(site.shape(0))) if d not in gone]
    if operand.dim not in kept:
        raise Lost
    return window[kept.index(operand.dim)]


def scatter(site: Site) -> Label:
    """Sums over examples where those of the batch are added into one array; else rows into rows."""
    dn, (operand, index, updates) = site.params["dimension_numbers"], site.labels[:3]
    spots = [d for d in range(len(site.shape(2))) if d not in dn.update_window_dims]
    adds = site.e.primitive.adds
    if isinstance(index, Places):
        _check_own(site, dn.scatter_dims_to_operand_dims, index, operand)
        return _set_in(site, spots[index.dim])
    index = site.exact(1)
    if isinstance(index, Rows):
        paired = list(zip(dn.operand_batching_dims, dn.scatter_indices_batching_dims, strict=True))
        if isinstance(operand, Rows) and (operand.dim, index.dim) in paired:
            return _set_in(site, spots[index.dim])
        if not adds or not isinstance(updates, Rows) or updates.dim != spots[index.dim]:
            raise Lost
        lead = Sum(updates.scale)
        site.scale(0, factor(operand, lead, site.ratio))
        return lead
    if not isinstance(operand, Rows):
        return site.aligned((0, 2)) if site.e.primitive.linear is not None else site.all_exact()
    gone = (*dn.inserted_window_dims, *dn.operand_batching_dims)
    return _set_in(site, _window_dim(site, operand, gone, dn.update_window_dims))


def _set_in(site: Site, dim: int) -> Label:
    """Updates whose examples are along `dim` set into, or added to, those of the operand."""
    operand, updates = site.labels[0], site.labels[2]
    linear = site.e.primitive.linear is not None
    if not isinstance(operand, Rows):
        raise Lost
    if isinstance(updates, Rows):
        if updates.dim != dim or site.shape(2)[dim] != site.shape(0)[operand.dim]:
            raise Lost
        if linear:
            site.scale(2, updates.scale / operand.scale)
            return operand
    site.exact(2)
    return site.exact(0)


def update_slice(site: Site) -> Label:
    if any(site.exact(i) != CONSTANT for i in range(2, len(site.labels))):
        raise Lost
    label = site.aligned((0, 1))
    if isinstance(label, Rows) and site.shape(0)[label.dim] != site.shape(1)[label.dim]:
        raise Lost
    return label


def window(site: Site) -> list[Label]:
    """Pooling that leaves the dimension of the examples alone."""
    label = site.labels[0] if site.e.primitive.adds and len(site.labels) == 1 else site.all_exact()
    if isinstance(label, Rows) and label.dim in windowed(site.params, len(site.shape(0))):
        raise Lost
    return [label] * len(site.e.outs)


def windowed(params: Mapping[str, Any], rank: int) -> set[int]:
    """Return the dimensions that a window lies along, of an equation that reduces or scatters by windows."""
    moves = [params[k] for k in ("window_dimensions", "window_strides", "base_dilation") if k in params]
    return {d for d in range(rank) if any(each[d] != 1 for each in moves) or any(params["padding"][d])}
