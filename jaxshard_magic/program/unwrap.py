"""Find the Python function under `jax.jit`, `jax.pmap`, `nnx.jit`, `eqx.filter_jit`, partials and methods."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax._src import api

from ..errors import ShardError, no_results_error
from ..introspect import is_a, static_attribute
from .memory_kinds import HOST_KINDS

NUMBERS = frozenset((bool, int, float, complex))
_UNNAMED_AXIS = "_internal_pmap_axis_name"  # JAX's axis name for a `jax.pmap` without one
# Not of `jax.jit`, which Equinox replaces by a plain function under EQX_ON_ERROR=breakpoint.
_JitFunction: Any = type(api.jit(lambda: 0))


@dataclass(frozen=True)
class PmapOptions:
    """Options of a step's own `jax.pmap`.

    Attributes:
        axis_name: Axis name; None without.
        in_axes: Device axis of each argument, as a prefix of the arguments' tree.
        out_axes: Device axis of each result, as a prefix of the result's tree.
    """

    axis_name: Any
    in_axes: Any
    out_axes: Any


@dataclass(frozen=True)
class UnwrappedStep:
    """Step without its wrappers: the function to trace is `inner(*bound, *args, **bound_kwargs, **kwargs)`.

    Attributes:
        inner: Innermost Python function.
        name: Name of the step.
        bound: Positional arguments supplied by wrappers.
        bound_kwargs: Keyword arguments supplied by wrappers.
        static: Static parameters of the user's own jit, by position and by name.
        donated: Donated parameters of the user's own jit, by position and by name.
        donated_from: First position from which all are donated; None for no such position.
        numbers: Types of Python numbers that are traced: all under jit, none in a plain function.
        graph: NNX objects are updated in place. Under `jax.jit` they are ordinary pytrees.
        pmap: Options of `jax.pmap`: the step is what a single device does. None otherwise.
        jitted: JAX freezes what the step reads besides its arguments.
        input_names: Without `jitted`: names of such values that become inputs.
        on_host: Prefix of the result's tree, true for results put in host memory by the user's own jit; None for none.
    """

    inner: Callable[..., Any]
    name: str
    bound: tuple[Any, ...] = ()
    bound_kwargs: Mapping[str, Any] = field(default_factory=dict)
    static: frozenset[int | str] = frozenset()
    donated: frozenset[int | str] = frozenset()
    donated_from: int | None = None
    numbers: frozenset[type] = frozenset()
    graph: bool = True
    pmap: PmapOptions | None = None
    jitted: bool = True
    input_names: frozenset[str] = frozenset()
    on_host: Any = None

    @property
    def hashes_leaves(self) -> bool:
        """True if JAX accepts any object as an argument and compiles a program for each, as `eqx.filter_jit` does."""
        return self.jitted and not self.numbers

    def donates(self, parameter: int | str) -> bool:
        """Return whether the user's own jit donates a parameter, given by position or name."""
        late = isinstance(parameter, int) and self.donated_from is not None and parameter >= self.donated_from
        return late or parameter in self.donated


def _cell_content(cell: types.CellType) -> Any:
    """Return the content of a closure cell; None for an empty cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def unwrap_step(fn: Callable[..., Any]) -> UnwrappedStep:
    """Remove the wrappers of a step.

    Raises:
        ShardError: `fn` is not callable, returns no result (async, generator), or is wrapped in a way that cannot be
            read (`nnx.pmap`, `eqx.filter_pmap`, `jax.pmap` twice, private places of another version of JAX or Flax).
    """
    if not callable(fn):
        raise ShardError(f"a step must be callable, got {type(fn).__name__}")
    if _is_from(fn, "equinox") and type(fn).__name__ == "_PmapWrapper":
        raise _unreadable_decorator("eqx.filter_pmap")
    function, bound, names = fn, (), {}
    while unwrapped := _unwrap_once(function):
        function, args, kwargs = unwrapped
        bound, names = (*args, *bound), {**kwargs, **names}
    name = static_attribute(function, "__name__") or type(function).__name__
    _check_returns_result(
        function if isinstance(function, types.FunctionType) else static_attribute(function, "__wrapped__", function),
        name,
    )
    if isinstance(function, _JitFunction):
        static, donated = _jit_options(function)
        options = {"numbers": NUMBERS, "graph": False, "on_host": _host_results(function)}
        return UnwrappedStep(function.__wrapped__, name, bound, names, static, donated, **options)
    if _is_pmap(function):
        if _is_pmap(function.__wrapped__):
            raise ShardError(
                f"{name} has jax.pmap twice, of which neither can be spread alone; take both off, and name the mesh's "
                "axes as the step does: %mesh i=4 j=2"
            )
        pmap, static, donated = _pmap_options(function)
        return UnwrappedStep(
            function.__wrapped__, name, bound, names, static, donated, numbers=NUMBERS, graph=False, pmap=pmap
        )
    if _is_nnx_jit(function):
        static, donated = _jit_options(function.jitted_fn)
        if partial_args := getattr(function, "partial_args", ()):
            bound = (list(partial_args), *bound)
        return UnwrappedStep(function.fun, name, bound, names, static, donated, numbers=NUMBERS)
    if _is_eqx_jit(function):
        inner = unwrap_step(function.__wrapped__)
        first = len(inner.bound)
        return UnwrappedStep(
            inner.inner,
            inner.name,
            (*inner.bound, *bound),
            {**inner.bound_kwargs, **names},
            donated=frozenset([first] if function.donate_first else []),
            donated_from=first + 1 if function.donate_rest else None,
            graph=False,
        )
    return UnwrappedStep(function, name, bound, names, jitted=False)


def _check_returns_result(function: Any, name: str) -> None:
    """Raise ShardError for functions that return no result when called: async functions and generators."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise no_results_error(name, "async")
    if inspect.isgeneratorfunction(function):
        raise no_results_error(name, "generator")


def _unwrap_once(f: Any) -> tuple[Any, tuple, dict] | None:
    """Remove a wrapper: return the function it calls and the arguments it adds; None for the innermost function."""
    if isinstance(f, functools.partial):
        return f.func, f.args, f.keywords
    if isinstance(f, types.FunctionType):
        return _cached_partial(f)
    if getattr(type(f), "is_sharded_step", False):
        return f.__wrapped__, (), {}
    if isinstance(f, types.MethodType):
        return f.__func__, (f.__self__,), {}
    if is_jitted(f):
        return None
    if _is_from(f, "equinox") and hasattr(f, "__func__"):
        return f.__func__, (f.__self__,), {}
    if _is_from(f, "equinox") and hasattr(f, "keywords"):
        return f.func, tuple(f.args), dict(f.keywords)
    # Any other callable object, such as a module of Flax or Equinox: a method of its class, bound to it.
    call = type(f).__call__
    return (call, (f,), {}) if isinstance(call, types.FunctionType) and not _is_from(f, "jax") else None


def _is_from(f: Any, package: str) -> bool:
    return f"{type(f).__module__}.".startswith(f"{package}.")


def _is_nnx_jit(f: Any) -> bool:
    return _is_from(f, "flax.nnx") and hasattr(f, "jitted_fn")


def _is_eqx_jit(f: Any) -> bool:
    return _is_from(f, "equinox") and hasattr(f, "donate_first")


def is_jitted(f: Any) -> bool:
    """Return whether `f` was made by `jax.jit`, `nnx.jit` or `eqx.filter_jit`."""
    return is_a(f, _JitFunction) or _is_nnx_jit(f) or _is_eqx_jit(f)


def _is_pmap(f: Any) -> bool:
    """Return whether `f` was made by `jax.pmap`."""
    if not isinstance(f, types.FunctionType) or not hasattr(f, "__wrapped__"):
        return False
    # `jax.pmap` and `nnx.pmap`, which calls it, return plain closures: neither has a type to test for.
    module_name = f.__globals__.get("__name__", "")
    if module_name.startswith("flax.nnx") and getattr(_cells(f).get("self"), "tag", None) == "pmap":
        raise _unreadable_decorator("nnx.pmap")
    return module_name == "jax._src.pmap" and f.__code__.co_name == "wrapped"


def _unreadable_decorator(decorator: str) -> ShardError:
    """Return the error for a decorator with unreadable axes."""
    return ShardError(
        f"the step is decorated with {decorator}, whose axes can't be read; take {decorator} off: %%shard pmap binds "
        "the axis name itself, and splits the batch"
    )


def _pmap_options(f: Any) -> tuple[PmapOptions, frozenset[int], frozenset[int]]:
    """Return the options of a `jax.pmap` function, its static positions and its donated positions."""
    try:
        options = _cells(_cells(f)["infer_params"])
        static, name = options["static_broadcasted_tuple"], options["axis_name"]
        # JAX keeps these options in closures only, and counts donated positions without the static ones.
        n_positions = max((*static, *options["donate_tuple"], 0)) + len(static) + 1
        dynamic = [i for i in range(n_positions) if i not in static]
        out_axes = options["out_axes_tree"].unflatten(options["out_axes_flat"])
        pmap = PmapOptions(None if name == _UNNAMED_AXIS else name, options["in_axes"], out_axes)
        return pmap, frozenset(static), frozenset(dynamic[i] for i in options["donate_tuple"])
    except (KeyError, AttributeError):
        raise ShardError(
            f"this jax ({jax.__version__}) keeps the options of jax.pmap where jaxshard_magic can't read them; shard "
            "the plain function, without jax.pmap"
        ) from None


def _cells(f: types.FunctionType) -> dict[str, Any]:
    """Return the variables of a closure, by name."""
    return {name: _cell_content(cell) for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)}


def _jit_options(f: Any) -> tuple[frozenset[int | str], frozenset[int | str]]:
    """Return static and donated parameters of a `jax.jit` function. JAX keeps them in a private attribute only."""
    try:
        info: Any = f._jit_info
        return (
            frozenset([*info.static_argnums, *info.static_argnames]),
            frozenset([*info.donate_argnums, *info.donate_argnames]),
        )
    except AttributeError:
        raise ShardError(
            f"this jax ({jax.__version__}) keeps a jitted function's static arguments where jaxshard_magic "
            "can't read them; shard the plain function, without jax.jit"
        ) from None


def _host_results(f: Any) -> Any:
    """Return results put in host memory by the `out_shardings` of a `jax.jit` function, as a prefix of their tree."""
    info: Any = f._jit_info
    kinds = [getattr(sharding, "memory_kind", None) in HOST_KINDS for sharding in info.out_shardings_leaves]
    return info.out_shardings_treedef.unflatten(kinds) if any(kinds) else None


def _cached_partial(f: types.FunctionType) -> tuple[Any, tuple, dict] | None:
    """Unwrap `nnx.cached_partial(step, model, ...)`: a closure, with the first arguments among its variables."""
    if not f.__globals__.get("__name__", "").startswith("flax.nnx") or f.__code__.co_name != "cache_args_wrapper":
        return None
    try:
        cells = _cells(f)
        return cells["f"], tuple(cells["cached_args"]), {}
    except KeyError:
        raise ShardError(
            "this flax keeps the arguments of nnx.cached_partial where jaxshard_magic can't read them; shard "
            "the nnx.jit step itself"
        ) from None
