"""The Python function under `jax.jit`, `jax.pmap`, `nnx.jit`, `eqx.filter_jit`, partials and methods."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax._src import api

from ..errors import ShardError, no_step
from .memory_kinds import HOST_KINDS

NUMBERS = frozenset((bool, int, float, complex))
MAX_FUNCTIONS = 200  # helpers of helpers looked through for names
_NO_AXIS = "_internal_pmap_axis_name"  # what jax names the axis of a pmap that was given no name
_Pjit: Any = type(
    api.jit(lambda: 0)
)  # Equinox puts a function in the place of jax.jit under EQX_ON_ERROR=breakpoint


@dataclass(frozen=True)
class Pmap:
    """What a step's own `jax.pmap` says: its axis name, None where it has none, and which axes of the arguments and of
    the results are the device axis, as prefixes of their trees."""

    axis_name: Any
    in_axes: Any
    out_axes: Any


@dataclass(frozen=True)
class Step:
    """A step without its wrappers: `inner(*bound, *args, **bound_names, **kwargs)` is the function to trace.

    `static` and `donated` are the parameters, by position and by name, that the user's own jit holds or
    donates; `donated_from` donates all positions from there on. `numbers` are the types of Python numbers
    that are traced: all under jit, none in a plain function. `graph`: NNX objects are changed in place;
    under `jax.jit` they are pytrees like others. `pmap`: the step is what one device does. `on_host`:
    a prefix of the result's tree, true for what the user's own jit puts on the host; None for nothing.
    """

    inner: Callable[..., Any]
    name: str
    bound: tuple[Any, ...] = ()
    bound_names: Mapping[str, Any] = field(default_factory=dict)
    static: frozenset[int | str] = frozenset()
    donated: frozenset[int | str] = frozenset()
    donated_from: int | None = None
    numbers: frozenset[type] = frozenset()
    graph: bool = True
    pmap: Pmap | None = None
    on_host: Any = None

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The attribute and global names in the step's code, its helpers' and its object's methods."""
        owner = [type(self.bound[0])] if self.bound else []
        return frozenset(_names(getattr(self.inner, "__code__", None), self.inner, owner, set()))

    def donates(self, parameter: int | str) -> bool:
        late = isinstance(parameter, int) and self.donated_from is not None and parameter >= self.donated_from
        return late or parameter in self.donated


def _names(code: Any, function: Any, owners: list[type], seen: set[Any]) -> Iterator[str]:
    if code is None or code in seen or len(seen) > MAX_FUNCTIONS:
        return
    seen.add(code)
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner, function, owners, seen)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name in (*code.co_names, *cells):
        for place in (function.__globals__, *map(vars, owners), cells):
            other = place.get(name)
            if isinstance(other, types.CellType):
                other = _content(other)
            if isinstance(other, types.FunctionType):
                yield from _names(other.__code__, other, owners, seen)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is bound to the name yet
        return None


def strip(fn: Callable[..., Any]) -> Step:
    """Take the wrappers off a step. Raises `ShardError` for something that can't be called."""
    if not callable(fn):
        raise ShardError(f"a step must be callable, got {type(fn).__name__}")
    if _from(fn, "equinox") and type(fn).__name__ == "_PmapWrapper":
        raise _not_read("eqx.filter_pmap")
    f, bound, names = fn, (), {}
    while under := _unwrap(f):
        f, args, kwargs = under
        bound, names = (*args, *bound), {**kwargs, **names}
    name = getattr(f, "__name__", None) or type(f).__name__
    _gives_results(f if isinstance(f, types.FunctionType) else getattr(f, "__wrapped__", f), name)
    if isinstance(f, _Pjit):
        static, donated = _jit_options(f)
        how = {"numbers": NUMBERS, "graph": False, "on_host": _on_host(f)}
        return Step(f.__wrapped__, name, bound, names, static, donated, **how)
    if _is_pmap(f):
        if _is_pmap(f.__wrapped__):
            raise ShardError(
                f"{name} has jax.pmap twice, of which neither can be spread alone; take both off, and name the mesh's "
                "axes as the step does: %mesh i=4 j=2"
            )
        pmap, static, donated = _pmap_options(f)
        return Step(
            f.__wrapped__, name, bound, names, static, donated, numbers=NUMBERS, graph=False, pmap=pmap
        )
    if _is_nnx_jit(f):
        static, donated = _jit_options(f.jitted_fn)
        if partial_args := getattr(f, "partial_args", ()):
            bound = (list(partial_args), *bound)
        return Step(f.fun, name, bound, names, static, donated, numbers=NUMBERS)
    if _is_eqx_jit(f):
        inner = strip(f.__wrapped__)
        first = len(inner.bound)
        return Step(
            inner.inner,
            inner.name,
            (*inner.bound, *bound),
            {**inner.bound_names, **names},
            donated=frozenset([first] if f.donate_first else []),
            donated_from=first + 1 if f.donate_rest else None,
            graph=False,
        )
    return Step(f, name, bound, names)


def _gives_results(function: Any, name: str) -> None:
    """Refuse functions whose call gives no results: async ones and generators."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise no_step(name, "async")
    if inspect.isgeneratorfunction(function):
        raise no_step(name, "generator")


def _unwrap(f: Any) -> tuple[Any, tuple, dict] | None:
    """One wrapper off: what it calls and the arguments it brings; None at the bottom."""
    if isinstance(f, functools.partial):
        return f.func, f.args, f.keywords
    if isinstance(f, types.FunctionType):
        return _cached_partial(f)
    if getattr(type(f), "is_sharded_step", False):
        return f.__wrapped__, (), {}
    if isinstance(f, types.MethodType):
        return f.__func__, (f.__self__,), {}
    if isinstance(f, _Pjit) or _is_nnx_jit(f) or _is_eqx_jit(f):
        return None
    if _from(f, "equinox") and hasattr(f, "__func__"):
        return f.__func__, (f.__self__,), {}
    if _from(f, "equinox") and hasattr(f, "keywords"):
        return f.func, tuple(f.args), dict(f.keywords)
    call = type(f).__call__
    return (call, (f,), {}) if isinstance(call, types.FunctionType) and not _from(f, "jax") else None


def _from(f: Any, package: str) -> bool:
    return f"{type(f).__module__}.".startswith(f"{package}.")


def _is_nnx_jit(f: Any) -> bool:
    return _from(f, "flax.nnx") and hasattr(f, "jitted_fn")


def _is_eqx_jit(f: Any) -> bool:
    return _from(f, "equinox") and hasattr(f, "donate_first")


def _is_pmap(f: Any) -> bool:
    """`jax.pmap` gives a plain closure, and so does NNX's, which calls it."""
    if not isinstance(f, types.FunctionType) or not hasattr(f, "__wrapped__"):
        return False
    where = f.__globals__.get("__name__", "")
    if where.startswith("flax.nnx") and getattr(_cells(f).get("self"), "tag", None) == "pmap":
        raise _not_read("nnx.pmap")
    return where == "jax._src.pmap" and f.__code__.co_name == "wrapped"


def _not_read(decorator: str) -> ShardError:
    return ShardError(
        f"the step is decorated with {decorator}, whose axes can't be read; take {decorator} off: %%shard pmap binds "
        "the axis name itself, and splits the batch"
    )


def _pmap_options(f: Any) -> tuple[Pmap, frozenset[int], frozenset[int]]:
    """What `jax.pmap` was told, its static and its donated positions, which its closures hold. Donated ones are counted
    there without the static."""
    try:
        options = _cells(_cells(f)["infer_params"])
        static, name = options["static_broadcasted_tuple"], options["axis_name"]
        last = max((*static, *options["donate_tuple"], 0)) + len(static) + 1
        dynamic = [i for i in range(last) if i not in static]
        out_axes = options["out_axes_tree"].unflatten(options["out_axes_flat"])
        pmap = Pmap(None if name == _NO_AXIS else name, options["in_axes"], out_axes)
        return pmap, frozenset(static), frozenset(dynamic[i] for i in options["donate_tuple"])
    except (KeyError, AttributeError):
        raise ShardError(
            f"this jax ({jax.__version__}) keeps the options of jax.pmap where jaxshard_magic can't read them; shard "
            "the plain function, without jax.pmap"
        ) from None


def _cells(f: types.FunctionType) -> dict[str, Any]:
    """The names that a closure holds."""
    return {
        name: _content(cell) for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    }


def _jit_options(f: Any) -> tuple[frozenset[int | str], frozenset[int | str]]:
    """Static and donated parameters of a `jax.jit` function. jax keeps them in a private place only."""
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


def _on_host(f: Any) -> Any:
    """Which results the `out_shardings` of a `jax.jit` function put on the host, as a prefix of their tree."""
    info: Any = f._jit_info
    kinds = [getattr(sharding, "memory_kind", None) in HOST_KINDS for sharding in info.out_shardings_leaves]
    return info.out_shardings_treedef.unflatten(kinds) if any(kinds) else None


def _cached_partial(f: types.FunctionType) -> tuple[Any, tuple, dict] | None:
    """`nnx.cached_partial(step, model, ...)` is a closure: the objects in it are the first arguments."""
    if (
        not f.__globals__.get("__name__", "").startswith("flax.nnx")
        or f.__code__.co_name != "cache_args_wrapper"
    ):
        return None
    try:
        cells = _cells(f)
        return cells["f"], tuple(cells["cached_args"]), {}
    except KeyError:
        raise ShardError(
            "this flax keeps the arguments of nnx.cached_partial where jaxshard_magic can't read them; shard "
            "the nnx.jit step itself"
        ) from None
