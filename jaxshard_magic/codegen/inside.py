"""Functions that stand inside of a step of a written program, as they stand here: it takes their text."""

import functools
import math
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .wrappers import where

mesh: Any = None  # a program's own, as what follows is
EXAMPLES: tuple[str, ...] = ()  # the mesh axes that the batch is divided over


def hold(x, spec):
    """`x` in the middle of the step, divided over the mesh as `spec` says."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def again(f, checkpoint=jax.checkpoint):
    """`f`, whose backward pass gathers weights again where the forward pass did, and keeps all else."""
    return checkpoint(f, policy=lambda primitive, *_, **__: primitive.name != "sharding_constraint")


def in_type(tree, dtype):
    """A tree of arrays, or a module, with its floats in another type."""

    def one(x):
        return x.astype(dtype) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, tree)


def in_microbatches(gradients, parts, *batch, mean=True, own=False):
    """`gradients(*batch)` from one part of the batch after the other: an equal share of what every device has of it.

    What comes for each example is put together again; all else is added up, and divided by `parts` if it is a mean.
    `own`: the batch is one device's, and its sums stay in the type that they are added up in.
    """
    shards = 1 if own else math.prod(mesh.shape[axis] for axis in EXAMPLES)

    def cut(x):
        x = x.reshape(shards, parts, len(x) // (shards * parts), *x.shape[1:]).swapaxes(0, 1)
        return jax.lax.collapse(x, 1, 3)

    def joined(x):
        x = x.reshape(parts, shards, x.shape[1] // shards, *x.shape[2:]).swapaxes(0, 1)
        return jax.lax.collapse(x, 0, 3)

    def trip(sums, part):
        found = jax.tree.leaves(gradients(*part))
        rows = [x for i, x in enumerate(found) if i not in added]
        return [x + found[i] for i, x in zip(added, sums, strict=True)], rows

    whole, form = jax.tree.flatten(jax.eval_shape(gradients, *batch))
    batch = jax.tree.map(cut, batch)
    first = jax.eval_shape(gradients, *jax.tree.map(lambda x: x[0], batch))
    added = [i for i, x in enumerate(jax.tree.leaves(first)) if x.shape == whole[i].shape]
    wide = [jnp.promote_types(whole[i].dtype, jnp.float32) for i in added]
    zeros = [jnp.zeros(whole[i].shape, dtype) for i, dtype in zip(added, wide, strict=True)]
    sums, rows = jax.lax.scan(trip, zeros, batch)
    if mean:
        sums = [x / parts for x in sums]
    if not own:
        sums = [x.astype(whole[i].dtype) for i, x in zip(added, sums, strict=True)]
    found, rest = dict(zip(added, sums, strict=True)), iter(rows)
    return form.unflatten([found[i] if i in found else joined(next(rest)) for i in range(len(whole))])


def recomputed(f):
    """`f`, called with whatever, whose backward pass computes it again."""

    def run(*args, **kwargs):
        return jax.checkpoint(lambda: f(*args, **kwargs))()

    return run


def recomputed_method(f, remat):
    """`f`, an NNX object or a method of one, whose backward pass computes it again by `remat`."""
    node = getattr(f, "__self__", f)
    method = getattr(f, "__func__", type(f).__call__)

    def run(*args, **kwargs):
        return remat(lambda node: method(node, *args, **kwargs))(node)

    return run


def recomputing(names, primitives):
    """`jax.checkpoint` of a function whose backward pass computes again what goes by these names for
    `checkpoint_name`, and what these primitives make; it keeps all else."""

    def kept(primitive, *_, **params):
        return params["name"] not in names if primitive.name == "name" else primitive.name not in primitives

    return functools.partial(jax.checkpoint, policy=kept)


def scan_in_segments(segments):
    """`jax.lax.scan` in as many segments of its trips, whose backward pass computes one after the other again."""

    def scan(f, init, xs=None, length=None, reverse=False, unroll=1):
        trips = length if length is not None else len(jax.tree.leaves(xs)[0])

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def segment(carry, xs):
            return jax.lax.scan(f, carry, xs, trips // segments, reverse, unroll)

        cut = jax.tree.map(lambda x: x.reshape(segments, trips // segments, *x.shape[1:]), xs)
        carry, ys = jax.lax.scan(segment, init, cut, segments, reverse)
        return carry, jax.tree.map(lambda y: y.reshape(trips, *y.shape[2:]), ys)

    return scan


def added_up(x, spec):
    """The sum of `x` over its first dimension, which the devices along EXAMPLES divide; it lies as `spec` says."""
    spec = [e if isinstance(e, tuple) else (e,) for e in (*spec, *[None] * (x.ndim - 1 - len(spec)))]
    scattered = [tuple(a for a in axes if a in EXAMPLES) for axes in spec]
    kept = [tuple(a for a in axes if a and a not in EXAMPLES) for axes in spec]
    rest = tuple(a for a in EXAMPLES if not any(a in axes for axes in scattered))

    def one(x):
        x = x[0]
        for dim, axes in enumerate(scattered):
            if axes:
                x = jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(x, rest) if rest else x

    outs = P(*(k + s for k, s in zip(kept, scattered, strict=True)))
    return jax.shard_map(one, mesh=mesh, in_specs=P(EXAMPLES, *kept), out_specs=outs, check_vma=False)(x)


def in_shards(gradients, parts, *batch, mean=True, lie=None, rounded=(), dtype=None):
    """`gradients(*batch)`: every device takes its own examples in `parts`, then all add up what they have, once.

    What comes for each example is put together again. `mean`: all else is one. `lie`: where sums lie, by patterns of
    their paths; devices add up those that match a pattern of `rounded` in `dtype`.
    """
    shards = math.prod(mesh.shape[axis] for axis in EXAMPLES)
    loop = functools.partial(in_microbatches, gradients, parts, mean=mean, own=True)
    one = loop if parts > 1 else gradients
    whole = jax.eval_shape(gradients, *batch)
    batch = jax.tree.map(
        lambda x: hold(x.reshape(shards, len(x) // shards, *x.shape[1:]), P(EXAMPLES)), batch
    )
    found = jax.vmap(one, spmd_axis_name=EXAMPLES)(*batch)  # each on its device, along a first dimension

    def finished(path, x, aval, place):
        if x.shape[1:] != aval.shape:
            return x.reshape(aval.shape)
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        narrow = any(fnmatchcase(name, pattern) for pattern in rounded)
        x = x / shards if mean else x
        return added_up(x.astype(dtype) if narrow else x, place.spec).astype(aval.dtype)

    return jax.tree_util.tree_map_with_path(finished, found, whole, where(whole, lie or {}))


def gathered(tree, lie):
    """`tree` with its arrays where `lie` says by their paths, the others whole on every device."""
    return jax.tree.map(
        lambda x, place: jax.lax.with_sharding_constraint(x, place) if isinstance(x, jax.Array) else x,
        tree,
        where(tree, lie),
    )


# All of them.
INSIDE = (
    hold,
    again,
    in_type,
    in_microbatches,
    recomputed,
    recomputed_method,
    recomputing,
    scan_in_segments,
    added_up,
    in_shards,
    gathered,
)
