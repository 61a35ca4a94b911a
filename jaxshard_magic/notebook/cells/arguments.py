"""A step's arguments: what its annotations say of them, and what the notebook holds under their names."""

import ast
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ...errors import ShardError
from ...introspect import is_iterator
from .names import plain_function


class Missing(ShardError):
    """The notebook does not hold all of the step's arguments; `names` are those it lacks."""

    def __init__(self, names: list[str], message: str):
        super().__init__(message)
        self.names = names


class _Wanted(NamedTuple):
    """An argument of a call: the name that the notebook may have for it, what it is without, and how it is given."""

    name: str
    default: Any = inspect.Parameter.empty
    by_name: bool = False


def from_namespace(step: Callable[..., Any], namespace: Mapping[str, Any], path: str) -> tuple[tuple, dict]:
    """The positional and keyword arguments for a first call of `step`, by its parameters' names.

    Parameters that the notebook has no name for are left out where they have a default. Raises Missing; an iterator
    counts as missing, because taking from it would consume it.
    """
    wanted, left_out = list[_Wanted](), False
    for p in inspect.signature(step).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        if p.default is p.empty or p.kind is p.POSITIONAL_ONLY or _has(namespace, p.name):
            by_name = p.kind is p.KEYWORD_ONLY or (left_out and p.kind is not p.POSITIONAL_ONLY)
            wanted.append(_Wanted(p.name, p.default, by_name))
        else:
            left_out = True
    return _taken(wanted, namespace, f"{path} has not run yet", "Call it, then %shard shows the report.")


def like_before(
    step: Callable[..., Any], namespace: Mapping[str, Any], path: str, positions: int, names: Collection[str]
) -> tuple[tuple, dict]:
    """The arguments for another call of `step` like one that was made: so many by position, and those by name, each by
    its parameter's name. One that the notebook has no name for is its default. Raises Missing, as `from_namespace`."""
    parameters = inspect.signature(step).parameters
    by_position = [
        _Wanted(p.name, p.default)
        for p in parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    rest = [_Wanted(f"*{p.name}") for p in parameters.values() if p.kind is p.VAR_POSITIONAL]
    wanted = [*by_position[:positions], *(rest if positions > len(by_position) else ())]
    for name in names:
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        wanted.append(_Wanted(name, default, by_name=True))
    why = f"{path} has run, and its arguments were not kept"
    return _taken(wanted, namespace, why, "%%shard --profile above its cell keeps them.")


def _taken(
    wanted: Iterable[_Wanted], namespace: Mapping[str, Any], why: str, fix: str
) -> tuple[tuple, dict[str, Any]]:
    args, kwargs, missing, iterators = [], {}, [], []
    for name, default, by_name in wanted:
        if not _has(namespace, name) and default is inspect.Parameter.empty:
            (iterators if name in namespace else missing).append(name)
            continue
        value = namespace[name] if _has(namespace, name) else default
        if by_name:
            kwargs[name] = value
        else:
            args.append(value)
    if missing or iterators:
        lacks = [f"the notebook has no {' and no '.join(missing)}"] if missing else []
        lacks += [f"{name} is an iterator, and taking from it would advance it" for name in iterators]
        raise Missing([*missing, *iterators], f"{why}: {'; '.join(lacks)}. {fix}")
    return tuple(args), kwargs


def _has(namespace: Mapping[str, Any], name: str) -> bool:
    return name in namespace and not is_iterator(namespace[name])


def used_by_call(step: Any, path: str) -> set[str]:
    """The notebook's names that a call of the step takes: its own, of what has it, and those of its parameters."""
    function = plain_function(step) if callable(step) else None
    parameters = () if function is None else inspect.signature(function).parameters
    return {path.partition(".")[0], *parameters}


def annotated_specs(step: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that are annotated with a PartitionSpec: `def train_step(state, batch: P('data'))`.

    Annotations kept as text (`from __future__ import annotations`) are evaluated where they call P.
    """
    function = plain_function(step)
    if function is None or "jax.sharding" not in sys.modules:
        return {}
    spec = sys.modules["jax.sharding"].PartitionSpec  # imported by whoever wrote one
    notes = {name: _evaluated(note, function, spec) for name, note in function.__annotations__.items()}
    return {name: note for name, note in notes.items() if isinstance(note, spec) and name != "return"}


def _evaluated(note: Any, function: types.FunctionType, spec: type) -> Any:
    if not isinstance(note, str):
        return note
    call = ast.parse(note, mode="eval").body
    if not isinstance(call, ast.Call):
        return note
    name, *attributes = ast.unparse(call.func).split(".")
    maker = function.__globals__.get(name)
    for attribute in attributes:
        maker = getattr(maker, attribute, None)
    return eval(note, function.__globals__) if maker is spec else note
