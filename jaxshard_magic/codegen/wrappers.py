"""Functions of a generated program that call the step.

The program contains the source text of the functions, docstrings and comments included. Nothing of this package is
used. Docstrings and comments have at most 100 columns: ruff formats the program to that width, code alone.
"""

import functools
import inspect
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

if TYPE_CHECKING:
    from flax import nnx

# Placeholders: a generated program defines the following names itself.
mesh: Any = None
ARGUMENTS: dict[str, P] = {}
RESULTS: dict[str, P] = {}
DONATED: tuple[str, ...] = ()  # arguments whose memory the results reuse
NUMBERS: tuple[type, ...] = ()  # number types that the step takes as arrays
STATIC: tuple[str, ...] = ()  # arguments that are never arrays
HOST_ROWS: tuple[str, ...] = ()  # arguments with separate rows on each host


def where(tree, table):
    """Return the sharding of each array of a pytree: the first match of the path, else replicated.

    Args:
        tree: A pytree of arrays.
        table: Specs by pattern.
    """

    def one(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        names = name, name.removesuffix(".value")  # paths of NNX variables end in `.value`
        found = (spec for n in names for pattern, spec in table.items() if fnmatchcase(n, pattern))
        return NamedSharding(mesh, next(found, P()))

    return jax.tree_util.tree_map_with_path(one, tree)


def on_mesh(tree):
    """Put the arrays of a pytree on the mesh as ARGUMENTS says, on several hosts.

    Every host fills its own devices. Arguments in HOST_ROWS are the host's own rows; all others are
    equal on all hosts.
    """

    def one(path, x, place):
        name, kind = jax.tree_util.keystr(path, simple=True, separator="."), jax.typeof(x)
        # NumPy would drop the weak type of a Python number, and can't read arrays of other hosts.
        if kind.weak_type or (isinstance(x, jax.Array) and not x.is_fully_addressable):
            return jax.device_put(x, place)
        if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
            # NumPy has no dtype for keys, so the numbers of a key are put on the mesh.
            return jax.random.wrap_key_data(one(path, jax.random.key_data(x), place), impl=jax.random.key_impl(x))
        values = np.asarray(x, kind.dtype)
        if name in HOST_ROWS:
            return jax.make_array_from_process_local_data(place, values)
        return jax.make_array_from_callback(values.shape, place, lambda part: values[part])

    return jax.tree_util.tree_map_with_path(one, tree, where(tree, ARGUMENTS))


def arguments(signature, args, kwargs):
    """Return the arguments of a call by name."""
    return dict(signature.bind(*args, **kwargs).arguments)


def called(step, signature, given):
    """Call a step with arguments by name."""
    bound = inspect.BoundArguments(signature, given)
    return step(*bound.args, **bound.kwargs)


def donating(whole, **how):
    """Compile `whole`; the results reuse the memory of the arguments in DONATED.

    Only arrays returned by an earlier call are donated. Others are copied first, and stay valid.
    """
    # Arrays by id. The references keep Python from using an id again.
    own = {}

    def program(taken, kept, form):
        leaves = taken | kept
        return whole(*form.unflatten([leaves[i] for i in range(len(leaves))]))

    # JAX donates whole arguments, so donated arrays are an argument of their own.
    compiled = jax.jit(program, static_argnums=2, donate_argnums=0, **how)

    def run(*given):
        named, form = jax.tree_util.tree_flatten_with_path(given)
        roots = [jax.tree_util.keystr(p[1:], simple=True, separator=".").partition(".")[0] for p, _ in named]
        kept = {i: x for i, (_, x) in enumerate(named)}
        taken = {i: kept.pop(i) for i, root in enumerate(roots) if root in DONATED}
        # Donated arrays are deleted: any others, which the caller may still read, are copied.
        taken = {i: x if id(x) in own else jnp.copy(x) for i, x in taken.items()}
        results = compiled(taken, kept, form)
        own.clear()
        own.update({id(x): x for x in jax.tree.leaves(results)})
        return results

    return run


def sharded(step):
    """Compile `step` with arguments and results sharded as ARGUMENTS and RESULTS say."""
    signature, programs = inspect.signature(step), {}

    def program(given):
        return called(step, signature, given)

    @functools.wraps(step)
    def run(*args, **kwargs):
        given = arguments(signature, args, kwargs)
        given = jax.device_put(given, where(given, ARGUMENTS))
        form = jax.tree.structure(given)
        if form not in programs:
            # `out_shardings` takes the structure of the results before the first call.
            results = jax.eval_shape(program, given)
            programs[form] = jax.jit(program, out_shardings=where(results, RESULTS))
        return programs[form](given)

    return run


def sharded_objects(step):
    """Compile `step` with arguments and results sharded as ARGUMENTS and RESULTS say.

    NNX objects among the arguments are changed in place.
    """
    signature, programs = inspect.signature(step), {}

    @functools.wraps(step)
    def run(*args, **kwargs):
        given = arguments(signature, args, kwargs)
        graph, *state = nnx.split(given, nnx.Variable, ...)

        # `jax.jit` can't change objects: their variables go in and come out as arrays.
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
    """Compile `step` with arguments and results sharded as ARGUMENTS and RESULTS say.

    Arguments other than arrays are static: the step is compiled again for other values.
    """
    # Entries of `programs`: (static values, program, static results).
    signature, programs = (inspect.signature(step), [])

    @functools.wraps(step)
    def run(*args, **kwargs):
        arrays, rest = apart(arguments(signature, args, kwargs))
        arrays = jax.device_put(arrays, where(arrays, ARGUMENTS))
        if not any(rest == known for known, *_ in programs):
            others = []

            def program(arrays):
                results, other = apart(called(step, signature, together(rest, arrays)))
                # `jax.jit` returns arrays alone; anything else is stored while JAX traces.
                others[:] = [other]
                return results

            results = jax.eval_shape(program, arrays)
            programs.append((rest, jax.jit(program, out_shardings=where(results, RESULTS)), others))
        program, (other,) = next(made for known, *made in programs if rest == known)
        return together(other, program(arrays))

    return run


def sharded_parts(step):
    """Run `step`, written for one device, on all devices of the mesh.

    Each device works on its shards of the arguments and results, by ARGUMENTS and RESULTS.
    """
    signature = inspect.signature(step)

    @jax.jit
    def program(given):
        def spread(results):
            ins = jax.tree.map(lambda s: s.spec, where(given, ARGUMENTS))
            one = functools.partial(jax.shard_map, mesh=mesh, in_specs=(ins,), out_specs=results, check_vma=False)
            return one(lambda given: called(step, signature, given))

        # `out_specs` takes the structure of the results, which a first trace finds.
        results = where(jax.eval_shape(spread(P()), given), RESULTS)
        return spread(jax.tree.map(lambda s: s.spec, results))(given)

    @functools.wraps(step)
    def run(*args, **kwargs):
        given = arguments(signature, args, kwargs)
        return program(jax.device_put(given, where(given, ARGUMENTS)))

    return run


def sharded_places(step):
    """Run `step`, written for one device, on all devices of the mesh.

    ARGUMENTS and RESULTS divide a dimension with a row per device. The step does not see this
    dimension.
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

        # `out_specs` takes the structure of the results, which a first trace finds.
        results = where(jax.eval_shape(spread(whole, P()), given), RESULTS)
        return spread(lambda _: results, jax.tree.map(lambda s: s.spec, results))(given)

    @functools.wraps(step)
    def run(*args, **kwargs):
        given = arguments(signature, args, kwargs)
        return program(jax.device_put(given, where(given, ARGUMENTS)))

    return run


def apart(tree):
    """Return the arrays of a pytree by path, and everything else in a form that can be compared."""
    leaves, form = jax.tree_util.tree_flatten_with_path(tree)
    named = [(jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in leaves]
    arrays = {name: x for name, x in named if type(x) in NUMBERS or isinstance(x, (jax.Array, np.ndarray))}
    arrays = {name: x for name, x in arrays.items() if name not in STATIC}
    return arrays, (form, tuple((name, None if name in arrays else x) for name, x in named))


def together(rest, arrays):
    """Return the pytree that `apart` has split."""
    form, named = rest
    return form.unflatten([arrays.get(name, x) for name, x in named])
