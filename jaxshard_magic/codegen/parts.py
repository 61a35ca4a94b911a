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
NUMBERS: tuple[type, ...] = ()  # that are arrays to the step
STATIC: tuple[str, ...] = ()  # its arguments that never are
EXAMPLES: tuple[str, ...] = ()  # the mesh axes that the batch is divided over


def hold(x, spec):
    """`x` in the middle of the step, divided over the mesh as `spec` says."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def again(f, checkpoint=jax.checkpoint):
    """`f`, whose backward pass gathers weights again where the forward pass did, and keeps all else."""
    return checkpoint(f, policy=lambda primitive, *_, **__: primitive.name != "sharding_constraint")


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


def in_microbatches(gradients, parts, *batch, mean=True):
    """`gradients(*batch)` from one part of the batch after the other: an equal share of what every device has of it.

    What comes for each example is put together again; all else is added up, and divided by `parts` if it is a mean.
    """
    shards = math.prod(mesh.shape[axis] for axis in EXAMPLES)

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
    found, rest = dict(zip(added, sums, strict=True)), iter(rows)
    return form.unflatten(
        [found[i].astype(x.dtype) if i in found else joined(next(rest)) for i, x in enumerate(whole)]
    )


INSIDE = (hold, again, in_microbatches)  # what stands inside of a step
