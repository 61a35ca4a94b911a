"""Functions that a written program begins with, as they stand here: it takes their text. They need nothing of ours."""

import functools
import inspect
import math
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

if TYPE_CHECKING:
    from flax import nnx

mesh: Any = None  # a program's own, as what follows is
ARGUMENTS: dict[str, P] = {}
RESULTS: dict[str, P] = {}
DONATED: tuple[str, ...] = ()  # arguments whose memory the results take
NUMBERS: tuple[type, ...] = ()  # that are arrays to the step
STATIC: tuple[str, ...] = ()  # its arguments that never are
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


def where(tree, table):
    """Where each array of a tree lies: by the first pattern that its path matches, else a copy on every device."""

    def one(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        names = name, name.removesuffix(".value")  # an NNX Variable's
        found = (spec for n in names for pattern, spec in table.items() if fnmatchcase(n, pattern))
        return NamedSharding(mesh, next(found, P()))

    return jax.tree_util.tree_map_with_path(one, tree)


def arguments(signature, args, kwargs):
    """The arguments of a call by their names."""
    return dict(signature.bind(*args, **kwargs).arguments)


def called(step, signature, given):
    """What a step gives for arguments by their names."""
    bound = inspect.BoundArguments(signature, given)
    return step(*bound.args, **bound.kwargs)


def donating(whole, **how):
    """`whole` compiled so that its results take the memory of what it is given of the arguments in DONATED.

    Only what it has given back itself is taken over; other arrays are copied first, and stay.
    """
    own = {}

    def program(taken, kept, form):
        leaves = taken | kept
        return whole(*form.unflatten([leaves[i] for i in range(len(leaves))]))

    compiled = jax.jit(program, static_argnums=2, donate_argnums=0, **how)

    def run(*given):
        named, form = jax.tree_util.tree_flatten_with_path(given)
        roots = [jax.tree_util.keystr(p[1:], simple=True, separator=".").partition(".")[0] for p, _ in named]
        kept = {i: x for i, (_, x) in enumerate(named)}
        taken = {i: kept.pop(i) for i, root in enumerate(roots) if root in DONATED}
        taken = {i: x if id(x) in own else jnp.copy(x) for i, x in taken.items()}
        results = compiled(taken, kept, form)
        own.clear()
        own.update({id(x): x for x in jax.tree.leaves(results)})
        return results

    return run


def sharded(step):
    """`step` compiled for the mesh: its arguments and results lie where ARGUMENTS and RESULTS say."""
    signature, programs = inspect.signature(step), {}

    def program(given):
        return called(step, signature, given)

    @functools.wraps(step)
    def run(*args, **kwargs):
        given = arguments(signature, args, kwargs)
        given = jax.device_put(given, where(given, ARGUMENTS))
        form = jax.tree.structure(given)
        if form not in programs:
            results = jax.eval_shape(program, given)
            programs[form] = jax.jit(program, out_shardings=where(results, RESULTS))
        return programs[form](given)

    return run


def sharded_objects(step):
    """`step` compiled for the mesh: its arguments and results lie where ARGUMENTS and RESULTS say.

    NNX objects among the arguments are changed in place.
    """
    signature, programs = inspect.signature(step), {}

    @functools.wraps(step)
    def run(*args, **kwargs):
        given = arguments(signature, args, kwargs)
        graph, *state = nnx.split(given, nnx.Variable, ...)

        def program(variables, arrays):
            given = nnx.merge(graph, variables, arrays)
            results = called(step, signature, given)
            return nnx.split(given, nnx.Variable, ...)[1], results

        state = jax.device_put(state, [where(s, ARGUMENTS) for s in state])
        if graph not in programs:
            variables, results = jax.eval_shape(program, *state)
            placed = where(variables, ARGUMENTS), where(results, RESULTS)
            programs[graph] = jax.jit(program, out_shardings=placed)
        variables, results = programs[graph](*state)
        nnx.update(given, variables)
        return results

    return run


def sharded_arrays(step):
    """`step` compiled for the mesh: its arguments and results lie where ARGUMENTS and RESULTS say.

    What is no array among them stays what it is; with other such arguments the step is compiled anew.
    """
    signature, programs = (
        inspect.signature(step),
        [],
    )  # what is no array; the program; what is none in its results

    @functools.wraps(step)
    def run(*args, **kwargs):
        arrays, rest = apart(arguments(signature, args, kwargs))
        arrays = jax.device_put(arrays, where(arrays, ARGUMENTS))
        if not any(rest == known for known, *_ in programs):
            others = []

            def program(arrays):
                results, other = apart(called(step, signature, together(rest, arrays)))
                others[:] = [other]
                return results

            results = jax.eval_shape(program, arrays)
            programs.append((rest, jax.jit(program, out_shardings=where(results, RESULTS)), others))
        program, (other,) = next(made for known, *made in programs if rest == known)
        return together(other, program(arrays))

    return run


def sharded_parts(step):
    """`step`, written for one device, run by all of the mesh, on parts that ARGUMENTS and RESULTS cut."""
    signature = inspect.signature(step)

    @jax.jit
    def program(given):
        def spread(results):
            ins = jax.tree.map(lambda s: s.spec, where(given, ARGUMENTS))
            one = functools.partial(
                jax.shard_map, mesh=mesh, in_specs=(ins,), out_specs=results, check_vma=False
            )
            return one(lambda given: called(step, signature, given))

        results = where(jax.eval_shape(spread(P()), given), RESULTS)
        return spread(jax.tree.map(lambda s: s.spec, results))(given)

    @functools.wraps(step)
    def run(*args, **kwargs):
        given = arguments(signature, args, kwargs)
        return program(jax.device_put(given, where(given, ARGUMENTS)))

    return run


def sharded_places(step):
    """`step`, written for one device, run by all of the mesh.

    Each has its place along the dimension that ARGUMENTS and RESULTS cut, which the step does not see.
    """
    signature = inspect.signature(step)

    def along(x, sharding, change):
        dims = [d for d, axes in enumerate(sharding.spec) if axes is not None]
        return change(x, dims[:1])

    @jax.jit
    def program(given):
        places = where(given, ARGUMENTS)

        def spread(results, specs):
            def one(given):
                mine = jax.tree.map(lambda x, s: along(x, s, jax.lax.squeeze), given, places)
                made = called(step, signature, mine)
                return jax.tree.map(lambda x, s: along(x, s, jax.lax.expand_dims), made, results(made))

            ins = jax.tree.map(lambda s: s.spec, places)
            return jax.shard_map(one, mesh=mesh, in_specs=(ins,), out_specs=specs, check_vma=False)

        def whole(results):
            return jax.tree.map(lambda _: NamedSharding(mesh, P()), results)

        results = where(jax.eval_shape(spread(whole, P()), given), RESULTS)
        return spread(lambda _: results, jax.tree.map(lambda s: s.spec, results))(given)

    @functools.wraps(step)
    def run(*args, **kwargs):
        given = arguments(signature, args, kwargs)
        return program(jax.device_put(given, where(given, ARGUMENTS)))

    return run


def apart(tree):
    """The arrays of a tree by their paths, and all else."""
    leaves, form = jax.tree_util.tree_flatten_with_path(tree)
    named = [(jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in leaves]
    arrays = {name: x for name, x in named if type(x) in NUMBERS or isinstance(x, (jax.Array, np.ndarray))}
    arrays = {name: x for name, x in arrays.items() if name not in STATIC}
    return arrays, (form, tuple((name, None if name in arrays else x) for name, x in named))


def together(rest, arrays):
    """What `apart` was given."""
    form, named = rest
    return form.unflatten([arrays.get(name, x) for name, x in named])


def in_microbatches(gradients, parts, *batch, mean=True, own=False):
    """`gradients(*batch)` from one part of the batch after the other: an equal share of what every device has of it.

    What comes for each example is put together again; all else is added up, and divided by `parts` if it is a mean.
    `own`: the batch is one device's, and its sums stay in the type that they are added up in.
    """
    shards = 1 if own else math.prod(mesh.shape[axis] for axis in EXAMPLES)

    def cut(x):
        x = x.reshape(shards, parts, -1, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(parts, -1, *x.shape[3:])

    def joined(x):
        x = x.reshape(parts, shards, -1, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(-1, *x.shape[3:])

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
    batch = jax.tree.map(lambda x: hold(x.reshape(shards, -1, *x.shape[1:]), P(EXAMPLES)), batch)
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

        cut = jax.tree.map(lambda x: x.reshape(segments, -1, *x.shape[1:]), xs)
        carry, ys = jax.lax.scan(segment, init, cut, segments, reverse)
        return carry, jax.tree.map(lambda y: y.reshape(trips, *y.shape[2:]), ys)

    return scan


# What stands inside of a step.
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
