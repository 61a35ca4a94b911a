"""What a zoo step is: a function with fresh inputs, and what a person would say about its arguments."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_map_with_path

Role = str | None
Place = int | str | tuple[int | str, ...]
Library = Literal["numpy", "jnp"]
STEPS: dict[str, "Step"] = {}


@dataclass(frozen=True)
class Call:
    """A function with the arguments of one call."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Any:
        return self.fn(*self.args, **self.kwargs)

    def arguments(self) -> dict[str, Any]:
        """The arguments by parameter name, positional and keyword ones alike."""
        return dict(inspect.signature(self.fn).bind(*self.args, **self.kwargs).arguments)

    def replaced(self, values: Mapping[str, Any]) -> "Call":
        """The same call, written in the same way, with other values of these parameters."""
        parameters = list(inspect.signature(self.fn).parameters)
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in values.items():
            if name in kwargs:
                kwargs[name] = value
            else:
                args[parameters.index(name)] = value
        return Call(self.fn, tuple(args), kwargs)


@dataclass(frozen=True)
class Step:
    """One ordinary train step.

    `build(seed)` builds the same inputs each time it is called. Paths are as `path_name` gives them,
    the parameter's name first (`batch.image`, `state.params.Dense_0.kernel`); closed-over arrays are
    `closure.0`, `closure.1`.

    `expected_batch`: leaf path -> its batch dimension; None says that the leaf is data without one.
    `expected_roles`: path prefix -> params, optimizer, batch, rng or other; the longest prefix counts;
        None where two answers are right (a step counter). Averages of the parameters (EMA, target
        networks) are other: no gradient reaches them.
    `feeds`: parameter -> where its next value stands in the result (index, key, or several; () is all).
    `noise`: leaves that only rounding moves: parameters whose true gradient is zero, their moments, and
        what follows them.
    `tolerance`: largest difference that rounding explains, relative to the largest number of a leaf.
    """

    name: str
    families: frozenset[str]
    build: Callable[..., Call]
    expected_batch: Mapping[str, int | None]
    expected_roles: Mapping[str, Role]
    mutates: bool
    feeds: Mapping[str, Place]
    noise: tuple[str, ...]
    tolerance: float
    notes: str

    def make(self, seed: int = 0, *, batches: Library | None = None) -> Call:
        """Fresh inputs, the same each time.

        `batches`: what the leaves of `expected_batch` are made arrays of; None leaves them as they are written.
        """
        call = self.build(seed)
        if batches is None:
            return call
        convert = np.asarray if batches == "numpy" else jnp.asarray

        def converted(path: Any, x: Any) -> Any:
            fits = leaf_name(path) in self.expected_batch and isinstance(x, jax.Array | np.ndarray)
            return convert(x) if fits and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

        # Other arguments stay the objects that they are: NNX modules are known by identity.
        within = {path.partition(".")[0] for path in self.expected_batch}
        found = {name: value for name, value in call.arguments().items() if name in within}
        return call.replaced(tree_map_with_path(converted, found))

    def role_of(self, path: str) -> Role:
        """The role of a leaf, None where any answer is right; raises KeyError for a path nobody described."""
        return self.expected_roles[_longest_prefix(path, self.expected_roles)]

    def advance(self, call: Call, result: Any) -> Call:
        """The call of the next iteration: the same batch, with the state that `result` brought."""
        values = {}
        for name, place in self.feeds.items():
            value = result
            for key in place if isinstance(place, tuple) else (place,):
                value = value[key]
            values[name] = value
        return call.replaced(values)


def leaf_name(path: Any) -> str:
    """A leaf's path as people write it: `batch.image`, `state.params.Dense_0.kernel`."""
    return keystr(path, simple=True, separator=".").removesuffix(".value")


def _longest_prefix(path: str, prefixes: Mapping[str, Role]) -> str:
    fitting = [p for p in prefixes if path == p or path.startswith(p + ".")]
    if not fitting:
        raise KeyError(f"no role is given for {path!r}; there are roles for {', '.join(prefixes)}")
    return max(fitting, key=len)


def step(
    families: str,
    *,
    roles: Mapping[str, Role],
    batch: Mapping[str, int | None] | None = None,
    name: str | None = None,
    mutates: bool = False,
    feeds: Mapping[str, Place] | None = None,
    noise: tuple[str, ...] = (),
    tolerance: float = 5e-4,
    notes: str = "",
) -> Callable[[Callable[..., Call]], Step]:
    """Put the decorated `build(seed=0) -> Call` into STEPS under `name` (default: the function's own).

    `families` holds the tags, separated by blanks.
    """

    def register(build: Callable[..., Call]) -> Step:
        title = name or getattr(build, "__name__", "")
        if title in STEPS:
            raise ValueError(f"two zoo steps are named {title!r}")
        STEPS[title] = Step(
            name=title,
            families=frozenset(families.split()),
            build=build,
            expected_batch=dict(batch or {}),
            expected_roles=dict(roles),
            mutates=mutates,
            feeds=dict(feeds or {}),
            noise=noise,
            tolerance=tolerance,
            notes=notes,
        )
        return STEPS[title]

    return register
