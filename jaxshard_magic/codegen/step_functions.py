"""Functions called inside the step of a generated program.

The program contains the source text of the functions, docstrings and comments included. Docstrings and comments have at
most 100 columns: ruff formats the program to that width, code alone.
"""

import functools
import math
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .wrappers import where

# Placeholders: a generated program defines these two names itself.
mesh: Any = None
EXAMPLES: tuple[str, ...] = ()  # mesh axes that divide the batch


def hold(x, spec):
    """Constrain `x` in the middle of the step to the sharding `spec` on the mesh."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def again(f, checkpoint=jax.checkpoint):
    """Return `f` with a backward pass that gathers weights again and saves everything else."""
    # Sharding constraints gather the weights, so they alone are recomputed.
    return checkpoint(f, policy=lambda primitive, *_, **__: primitive.name != "sharding_constraint")


def in_type(tree, dtype):
    """Cast the floating-point arrays of a pytree or a module to `dtype`."""

    def one(x):
        return x.astype(dtype) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, tree)


def in_microbatches(gradients, parts, *batch, mean=True, own=False):
    """Call `gradients` on one microbatch after another and combine the results.

    A microbatch has an equal share of each device's examples. Results with a row per example are
    joined. All others are added up, in float32 or wider, and divided by `parts` if `mean`.

    Args:
        gradients: Function of the batch.
        parts: Number of microbatches.
        batch: Arrays with the examples along their first dimension.
        mean: Whether `gradients` returns means over examples, not sums.
        own: Whether the batch belongs to a single device. Sums then keep the dtype of the addition.
    """
    shards = 1 if own else math.prod(mesh.shape[axis] for axis in EXAMPLES)

    def cut(x):
        # A microbatch takes rows of every device, so that no row moves between devices.
        x = x.reshape(shards, parts, len(x) // (shards * parts), *x.shape[1:]).swapaxes(0, 1)
        return jax.lax.collapse(x, 1, 3)

    def joined(x):
        # Restore the order of the batch, which `cut` has changed.
        x = x.reshape(parts, shards, x.shape[1] // shards, *x.shape[2:]).swapaxes(0, 1)
        return jax.lax.collapse(x, 0, 3)

    def trip(sums, part):
        found = jax.tree.leaves(gradients(*part))
        rows = [x for i, x in enumerate(found) if i not in added]
        return [x + found[i] for i, x in zip(added, sums, strict=True)], rows

    whole, form = jax.tree.flatten(jax.eval_shape(gradients, *batch))
    batch = jax.tree.map(cut, batch)
    first = jax.eval_shape(gradients, *jax.tree.map(lambda x: x[0], batch))
    # Results with a row per example change their shape with the batch; the others are sums.
    added = [i for i, x in enumerate(jax.tree.leaves(first)) if x.shape == whole[i].shape]
    # Sums in bfloat16 would lose digits with each microbatch.
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
    """Return `f`, recomputed in the backward pass, for arguments of any type."""

    def run(*args, **kwargs):
        # `jax.checkpoint` takes arrays as arguments; a closure may have anything.
        return jax.checkpoint(lambda: f(*args, **kwargs))()

    return run


def recomputed_method(f, remat):
    """Return `f`, an NNX object or a method of an NNX object, recomputed in the backward pass.

    Args:
        f: The object or method.
        remat: `nnx.remat`.
    """
    node = getattr(f, "__self__", f)
    method = getattr(f, "__func__", type(f).__call__)

    def run(*args, **kwargs):
        # NNX follows changes to an object only if the object is an argument.
        return remat(lambda node: method(node, *args, **kwargs))(node)

    return run


def recomputing(names, primitives):
    """Return a `jax.checkpoint` that recomputes named values and the results of some primitives.

    All other values are saved.

    Args:
        names: Names given by `checkpoint_name`.
        primitives: Names of primitives.
    """

    def kept(primitive, *_, **params):
        # `checkpoint_name` makes equations of the primitive `name`.
        return params["name"] not in names if primitive.name == "name" else primitive.name not in primitives

    return functools.partial(jax.checkpoint, policy=kept)


def scan_in_segments(segments):
    """Return a `jax.lax.scan` in segments; the backward pass recomputes one segment after another.

    Args:
        segments: Number of segments, a divisor of the number of iterations.
    """

    def scan(f, init, xs=None, length=None, reverse=False, unroll=1):
        trips = length if length is not None else len(jax.tree.leaves(xs)[0])

        # `prevent_cse=False` is safe in a scan: XLA does not merge its body with the forward pass.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def segment(carry, xs):
            return jax.lax.scan(f, carry, xs, trips // segments, reverse, unroll)

        cut = jax.tree.map(lambda x: x.reshape(segments, trips // segments, *x.shape[1:]), xs)
        carry, ys = jax.lax.scan(segment, init, cut, segments, reverse)
        return carry, jax.tree.map(lambda y: y.reshape(trips, *y.shape[2:]), ys)

    return scan


def added_up(x, spec):
    """Sum `x` over the first dimension, divided over the devices along EXAMPLES.

    Args:
        x: Array of addends, one per device.
        spec: Sharding of the sum. Axes of EXAMPLES in `spec` make a reduce-scatter, other axes of
            EXAMPLES an all-reduce.
    """
    spec = [e if isinstance(e, tuple) else (e,) for e in (*spec, *[None] * (x.ndim - 1 - len(spec)))]
    scattered = [tuple(a for a in axes if a in EXAMPLES) for axes in spec]
    kept = [tuple(a for a in axes if a and a not in EXAMPLES) for axes in spec]
    rest = tuple(a for a in EXAMPLES if not any(a in axes for axes in scattered))

    def one(x):
        # Each device has one addend, with a first dimension of size 1.
        x = x[0]
        for dim, axes in enumerate(scattered):
            if axes:
                x = jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(x, rest) if rest else x

    outs = P(*(k + s for k, s in zip(kept, scattered, strict=True)))
    return jax.shard_map(one, mesh=mesh, in_specs=P(EXAMPLES, *kept), out_specs=outs, check_vma=False)(x)


def in_shards(gradients, parts, *batch, mean=True, lie=None, rounded=(), dtype=None):
    """Call `gradients` on every device for its own examples and add up the results once.

    Results with a row per example are joined.

    Args:
        gradients: Function of the batch.
        parts: Number of microbatches on each device.
        batch: Arrays with the examples along their first dimension.
        mean: Whether `gradients` returns means over examples, not sums.
        lie: Specs of the sums, by patterns of their paths.
        rounded: Patterns of the sums to be added up over devices in `dtype`.
        dtype: Dtype of the rounded sums between devices.
    """
    shards = math.prod(mesh.shape[axis] for axis in EXAMPLES)
    loop = functools.partial(in_microbatches, gradients, parts, mean=mean, own=True)
    one = loop if parts > 1 else gradients
    whole = jax.eval_shape(gradients, *batch)
    batch = jax.tree.map(lambda x: hold(x.reshape(shards, len(x) // shards, *x.shape[1:]), P(EXAMPLES)), batch)
    # `spmd_axis_name` divides the mapped dimension over the devices: each has a row of its own.
    found = jax.vmap(one, spmd_axis_name=EXAMPLES)(*batch)

    def finished(path, x, aval, place):
        if x.shape[1:] != aval.shape:
            return x.reshape(aval.shape)
        # Paths of NNX variables end in `.value`.
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        narrow = any(fnmatchcase(name, pattern) for pattern in rounded)
        # The mean over all examples is the mean of the devices' means.
        x = x / shards if mean else x
        return added_up(x.astype(dtype) if narrow else x, place.spec).astype(aval.dtype)

    return jax.tree_util.tree_map_with_path(finished, found, whole, where(whole, lie or {}))


def gathered(tree, lie):
    """Constrain the arrays of a pytree to shardings.

    Args:
        tree: A pytree.
        lie: Specs by patterns of the arrays' paths. Other arrays are replicated.
    """
    return jax.tree.map(
        lambda x, place: jax.lax.with_sharding_constraint(x, place) if isinstance(x, jax.Array) else x,
        tree,
        where(tree, lie),
    )


# Each function calls only functions before it.
STEP_FUNCTIONS = (
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
