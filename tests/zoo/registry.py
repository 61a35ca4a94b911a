"""What a zoo step is: a function with fresh inputs, and what a person would say about its arguments."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Role = str | None
Place = int | str | tuple[int | str, ...]
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


@dataclass(frozen=True)
class Step:
    """One ordinary train step.

    `make(seed)` builds the same inputs each time it is called. Paths are as `path_name` gives them,
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
    make: Callable[..., Call]
    expected_batch: Mapping[str, int | None]
    expected_roles: Mapping[str, Role]
    mutates: bool
    feeds: Mapping[str, Place]
    noise: tuple[str, ...]
    tolerance: float
    notes: str

    def role_of(self, path: str) -> Role:
        """The role of a leaf, None where any answer is right; raises KeyError for a path nobody described."""
        return self.expected_roles[_longest_prefix(path, self.expected_roles)]

    def advance(self, call: Call, result: Any) -> Call:
        """The call of the next iteration: the same batch, with the state that `result` brought."""
        parameters = list(inspect.signature(call.fn).parameters)
        args, kwargs = list(call.args), dict(call.kwargs)
        for name, place in self.feeds.items():
            value = result
            for key in place if isinstance(place, tuple) else (place,):
                value = value[key]
            if name in kwargs:
                kwargs[name] = value
            else:
                args[parameters.index(name)] = value
        return Call(call.fn, tuple(args), kwargs)


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
    """Put the decorated `make(seed=0) -> Call` into STEPS under `name` (default: the function's own).

    `families` holds the tags, separated by blanks.
    """

    def register(make: Callable[..., Call]) -> Step:
        title = name or getattr(make, "__name__", "")
        if title in STEPS:
            raise ValueError(f"two zoo steps are named {title!r}")
        STEPS[title] = Step(
            name=title,
            families=frozenset(families.split()),
            make=make,
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
