"""Functions that call a written program's step: it takes their text as it stands here. They need nothing of ours."""

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

mesh: Any = None  # a program's own, as what follows is
ARGUMENTS: dict[str, P] = {}
RESULTS: dict[str, P] = {}
DONATED: tuple[str, ...] = ()  # arguments whose memory the results take
NUMBERS: tuple[type, ...] = ()  # that are arrays to the step
STATIC: tuple[str, ...] = ()  # its arguments that never are
HOST_ROWS: tuple[str, ...] = ()  # arguments of which each host has rows of its own


def where(tree, table):
    """Where each array of a tree lies: by the first pattern that its path matches, else a copy on every device."""

    def one(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        names = name, name.removesuffix(".value")  # an NNX Variable's
        found = (spec for n in names for pattern, spec in table.items() if fnmatchcase(n, pattern))
        return NamedSharding(mesh, next(found, P()))

    return jax.tree_util.tree_map_with_path(one, tree)


def on_mesh(tree):
    """The arrays of a tree where ARGUMENTS says: every host gives its devices their parts of what it holds.

    What HOST_ROWS names are a host's own rows, the others are the same on all hosts.
    """

    def one(path, x, place):
        name, kind = jax.tree_util.keystr(path, simple=True, separator="."), jax.typeof(x)
        if kind.weak_type or (isinstance(x, jax.Array) and not x.is_fully_addressable):
            return jax.device_put(x, place)
        if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                one(path, jax.random.key_data(x), place), impl=jax.random.key_impl(x)
            )
        values = np.asarray(x, kind.dtype)
        if name in HOST_ROWS:
            return jax.make_array_from_process_local_data(place, values)
        return jax.make_array_from_callback(values.shape, place, lambda part: values[part])

    return jax.tree_util.tree_map_with_path(one, tree, where(tree, ARGUMENTS))


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
