"""Associative scans in blocks, so that each device scans a block of its own along a divided dimension.

`jax.lax.associative_scan` halves the dimension recursively and interleaves the halves, and each halving moves a divided
dimension between devices. In blocks the algorithm is reduce-then-scan (Merrill and Garland 2016, "Single-pass parallel
prefix scan with decoupled look-back", section 2.2): reduce each block to an element, scan these elements, fold the
prefix of a block into its first element, scan each block. All but the second step works inside of a block.

Two primitives without arithmetic mark where the elements of the blocks move between devices. Each is the transpose of
the other, so the backward pass moves as little as the forward pass.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

ScanFunction = Callable[..., Any]  # as jax.lax.associative_scan(fn, elems, reverse, axis)

gather_blocks_p = Primitive("gather_blocks")  # one element per block: divided -> replicated
divide_blocks_p = Primitive("divide_blocks")  # one element per block: replicated -> divided


def scan_in_blocks(
    scan: ScanFunction, blocks: int, fn: Callable[..., Any], elems: Any, reverse: bool = False, axis: int = 0
) -> Any:
    """Scan `elems` along `axis` in `blocks` equal blocks.

    Falls back to `scan` without equal blocks of two elements or more, and inside of a `shard_map`.

    Args:
        scan: `jax.lax.associative_scan`.
        blocks: Number of blocks, at least 2.
        fn: Associative function, as for `jax.lax.associative_scan`.
        elems: Pytree of arrays.
        reverse: Scan from the end.
        axis: Dimension to scan along.
    """
    leaves, tree = jax.tree.flatten(elems)
    # Inside of a shard_map the arrays are one device's shards already, so no dimension is divided.
    in_shard_map = bool(jax.sharding.get_abstract_mesh().manual_axes)
    if in_shard_map or not callable(fn) or not _divides_into_blocks(leaves, blocks, axis, reverse):
        return scan(fn, elems, reverse, axis)
    axis = axis % leaves[0].ndim

    def combine(a: list, b: list) -> list:
        return jax.tree.leaves(fn(jax.tree.unflatten(tree, a), jax.tree.unflatten(tree, b)))

    def each_block(fun: Callable[[list], list], xs: list) -> list:
        """Map `fun` over the blocks. Inside of `fun` the elements of a block are along `axis`, as in `elems`."""
        return jax.vmap(fun, axis, axis)(xs)

    def in_scan_order(xs: list, d: int) -> list:
        return [lax.rev(x, [d]) for x in xs] if reverse else xs

    leaves = [jnp.asarray(x) for x in leaves]
    # A reverse scan reverses the elements inside of each block, never the divided dimension itself: that would move
    # all blocks between devices.
    split = in_scan_order([_split(x, axis, blocks) for x in leaves], axis + 1)
    totals = each_block(lambda xs: _reduce(combine, xs, axis), split)
    gathered = in_scan_order([gather_blocks_p.bind(x, axis=axis) for x in totals], axis)
    scanned = in_scan_order(jax.tree.leaves(scan(combine, gathered, False, axis)), axis)
    prefixes = [divide_blocks_p.bind(_shift(x, axis, reverse=reverse), axis=axis) for x in scanned]

    first, second = ([lax.index_in_dim(x, i, axis + 1, keepdims=False) for x in split] for i in range(2))
    first_block = blocks - 1 if reverse else 0
    # The first block has no prefix. In its place the block's own first two elements are combined, as the scan combines
    # them too: any other operands could be outside of the domain of `fn`, and the gradient would be NaN.
    left, right = _select_at(first_block, axis, first, prefixes), _select_at(first_block, axis, second, first)
    first = _select_at(first_block, axis, first, combine(left, right))
    split = [
        lax.concatenate([jnp.expand_dims(a, axis + 1), lax.slice_in_dim(x, 1, None, axis=axis + 1)], axis + 1)
        for a, x in zip(first, split, strict=True)
    ]
    scanned = each_block(lambda xs: jax.tree.leaves(scan(combine, xs, False, axis)), split)
    return jax.tree.unflatten(
        tree, [y.reshape(x.shape) for x, y in zip(leaves, in_scan_order(scanned, axis + 1), strict=True)]
    )


def _divides_into_blocks(leaves: list, blocks: int, axis: int, reverse: bool) -> bool:
    """Return whether dimension `axis` of all leaves divides into blocks of two elements or more.

    False for arguments that JAX rejects, so that JAX raises its own error.
    """
    shapes = [jnp.shape(x) for x in leaves]
    if not shapes or (reverse and axis < 0) or not all(-len(s) <= axis < len(s) for s in shapes):
        return False
    sizes = {s[axis] for s in shapes}
    return len(sizes) == 1 and min(sizes) % blocks == 0 and min(sizes) >= 2 * blocks


def _split(x: Any, axis: int, blocks: int) -> Any:
    """Split dimension `axis` into `blocks` and the elements of a block."""
    return x.reshape(*x.shape[:axis], blocks, x.shape[axis] // blocks, *x.shape[axis + 1 :])


def _reduce(combine: Callable[[list, list], list], xs: list, axis: int) -> list:
    """Combine all elements along `axis`, in order, and drop the dimension."""
    while (size := xs[0].shape[axis]) > 1:
        even = [lax.slice_in_dim(x, 0, size - size % 2, 2, axis) for x in xs]
        odd = [lax.slice_in_dim(x, 1, None, 2, axis) for x in xs]
        last = [lax.slice_in_dim(x, size - size % 2, None, axis=axis) for x in xs]
        xs = combine(even, odd)
        if size % 2:
            xs = [lax.concatenate(pair, axis) for pair in zip(xs, last, strict=True)]
    return [lax.squeeze(x, [axis]) for x in xs]


def _shift(x: Any, axis: int, *, reverse: bool) -> Any:
    """Shift elements along `axis` by a position, backwards if `reverse`; the edge element is repeated."""
    if reverse:
        return lax.concatenate(_slices(x, axis, (1, None), (-1, None)), axis)
    return lax.concatenate(_slices(x, axis, (0, 1), (0, -1)), axis)


def _slices(x: Any, axis: int, *bounds: tuple[int, int | None]) -> list:
    """Return slices along `axis`, given as (start, end)."""
    return [lax.slice_in_dim(x, start, end, axis=axis) for start, end in bounds]


def _select_at(position: int, axis: int, selected: list, others: list) -> list:
    """Return `selected` at `position` along `axis`, and `others` at all other positions."""
    return [
        jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, axis) == position, x, y)
        for x, y in zip(selected, others, strict=True)
    ]


def _batch_blocks(primitive: Primitive, operands: Any, dims: Any, *, axis: int) -> tuple[Any, int]:
    """Batching rule: if the batch dimension comes first, the block dimension moves behind it."""
    (x,), (d,) = operands, dims
    return primitive.bind(x, axis=axis + (d <= axis)), d


def _define_identity(primitive: Primitive, transpose: Primitive) -> None:
    """Register an identity primitive with `transpose` as its transpose."""
    primitive.def_impl(lambda x, axis: x)
    primitive.def_abstract_eval(lambda x, axis: x)
    mlir.register_lowering(primitive, lambda _context, x, axis: [x])
    ad.deflinear2(primitive, lambda given, _x, axis: [transpose.bind(given, axis=axis)])
    batching.primitive_batchers[primitive] = lambda xs, dims, axis: _batch_blocks(primitive, xs, dims, axis=axis)


_define_identity(gather_blocks_p, divide_blocks_p)
_define_identity(divide_blocks_p, gather_blocks_p)
