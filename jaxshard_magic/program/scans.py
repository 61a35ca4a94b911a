"""Associative scans in blocks: along a divided dimension each device then scans a block of its own.

`jax.lax.associative_scan` halves its dimension again and again and interleaves what comes back, which moves a divided
dimension between devices at every halving. In blocks it is reduce-then-scan (Merrill and Garland 2016, "Single-pass
parallel prefix scan with decoupled look-back", section 2.2): reduce each block to one element, scan these elements,
fold what comes before a block into its first element, scan each block. All but the second works inside a block.

Two primitives that compute nothing say where the elements of the blocks go between devices. They are each other's
transpose, so that the backward pass moves as little as the forward pass.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Scan = Callable[..., Any]  # as jax.lax.associative_scan(fn, elems, reverse, axis)

gather_blocks_p = Primitive("gather_blocks")  # one element a block, divided -> the same on every device
divide_blocks_p = Primitive("divide_blocks")  # one element a block, the same on every device -> divided


def scan_in_blocks(
    scan: Scan, blocks: int, fn: Callable[..., Any], elems: Any, reverse: bool = False, axis: int = 0
) -> Any:
    """Scan `elems` along `axis` in `blocks` equal blocks; by `scan` alone where there are none of two elements or more.

    Args:
        scan: `jax.lax.associative_scan`.
        blocks: how many of them, at least 2.
        fn, elems, reverse, axis: as of `jax.lax.associative_scan`.
    """
    leaves, tree = jax.tree.flatten(elems)
    manual = bool(
        jax.sharding.get_abstract_mesh().manual_axes
    )  # in a shard_map a device has its own part already
    if manual or not callable(fn) or not _has_blocks(leaves, blocks, axis, reverse):
        return scan(fn, elems, reverse, axis)
    axis = axis % leaves[0].ndim

    def combine(a: list, b: list) -> list:
        return jax.tree.leaves(fn(jax.tree.unflatten(tree, a), jax.tree.unflatten(tree, b)))

    def each_block(fun: Callable[[list], list], xs: list) -> list:
        """`fun` of every block, whose elements lie along `axis`, as those of `elems` do."""
        return jax.vmap(fun, axis, axis)(xs)

    def turned(xs: list, d: int) -> list:
        return [lax.rev(x, [d]) for x in xs] if reverse else xs

    leaves = [jnp.asarray(x) for x in leaves]
    split = turned([_split(x, axis, blocks) for x in leaves], axis + 1)
    totals = each_block(lambda xs: _reduced(combine, xs, axis), split)
    whole = turned([gather_blocks_p.bind(x, axis=axis) for x in totals], axis)
    scanned = turned(jax.tree.leaves(scan(combine, whole, False, axis)), axis)
    before = [divide_blocks_p.bind(_shifted(x, axis, reverse=reverse), axis=axis) for x in scanned]

    first, second = ([lax.index_in_dim(x, i, axis + 1, keepdims=False) for x in split] for i in range(2))
    begins = blocks - 1 if reverse else 0
    # Nothing comes before the first block. It combines its own two first elements, which the scan does as well: any
    # other operands could be out of reach of `fn`, whose gradient would be no number then.
    left, right = _chosen(begins, axis, first, before), _chosen(begins, axis, second, first)
    first = _chosen(begins, axis, first, combine(left, right))
    split = [
        lax.concatenate([jnp.expand_dims(a, axis + 1), lax.slice_in_dim(x, 1, None, axis=axis + 1)], axis + 1)
        for a, x in zip(first, split, strict=True)
    ]
    scanned = each_block(lambda xs: jax.tree.leaves(scan(combine, xs, False, axis)), split)
    return jax.tree.unflatten(
        tree, [y.reshape(x.shape) for x, y in zip(leaves, turned(scanned, axis + 1), strict=True)]
    )


def _has_blocks(leaves: list, blocks: int, axis: int, reverse: bool) -> bool:
    """Return whether the dimension `axis` of all leaves divides into blocks of two elements or more; False for what
    jax refuses, so that it does."""
    shapes = [jnp.shape(x) for x in leaves]
    if not shapes or (reverse and axis < 0) or not all(-len(s) <= axis < len(s) for s in shapes):
        return False
    sizes = {s[axis] for s in shapes}
    return len(sizes) == 1 and min(sizes) % blocks == 0 and min(sizes) >= 2 * blocks


def _split(x: Any, axis: int, blocks: int) -> Any:
    """`x` with the dimension `axis` as two: `blocks`, and the elements of one."""
    return x.reshape(*x.shape[:axis], blocks, x.shape[axis] // blocks, *x.shape[axis + 1 :])


def _reduced(combine: Callable[[list, list], list], xs: list, axis: int) -> list:
    """All elements of `xs` along `axis`, combined in their order to one, without that dimension."""
    while (size := xs[0].shape[axis]) > 1:
        even = [lax.slice_in_dim(x, 0, size - size % 2, 2, axis) for x in xs]
        odd = [lax.slice_in_dim(x, 1, None, 2, axis) for x in xs]
        last = [lax.slice_in_dim(x, size - size % 2, None, axis=axis) for x in xs]
        xs = combine(even, odd)
        if size % 2:
            xs = [lax.concatenate(pair, axis) for pair in zip(xs, last, strict=True)]
    return [lax.squeeze(x, [axis]) for x in xs]


def _shifted(x: Any, axis: int, *, reverse: bool) -> Any:
    """Each element along `axis` at the next place, if `reverse` at the one before; the one at the edge also stays."""
    if reverse:
        return lax.concatenate(_cut(x, axis, (1, None), (-1, None)), axis)
    return lax.concatenate(_cut(x, axis, (0, 1), (0, -1)), axis)


def _cut(x: Any, axis: int, *bounds: tuple[int, int | None]) -> list:
    return [lax.slice_in_dim(x, start, end, axis=axis) for start, end in bounds]


def _chosen(at: int, axis: int, there: list, elsewhere: list) -> list:
    """At the place `at` along `axis` the elements of `there`, at all others those of `elsewhere`."""
    return [
        jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, axis) == at, x, y)
        for x, y in zip(there, elsewhere, strict=True)
    ]


def _moved_by(primitive: Primitive, operands: Any, dims: Any, *, axis: int) -> tuple[Any, int]:
    """A batch of them: the dimension of the blocks moves behind that of the batch."""
    (x,), (d,) = operands, dims
    return primitive.bind(x, axis=axis + (d <= axis)), d


def _define(primitive: Primitive, transpose: Primitive) -> None:
    primitive.def_impl(lambda x, axis: x)
    primitive.def_abstract_eval(lambda x, axis: x)
    mlir.register_lowering(primitive, lambda _context, x, axis: [x])
    ad.deflinear2(primitive, lambda given, _x, axis: [transpose.bind(given, axis=axis)])
    batching.primitive_batchers[primitive] = lambda xs, dims, axis: _moved_by(primitive, xs, dims, axis=axis)


_define(gather_blocks_p, divide_blocks_p)
_define(divide_blocks_p, gather_blocks_p)
