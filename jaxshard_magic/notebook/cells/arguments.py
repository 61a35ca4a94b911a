"""A step's arguments: what its annotations say of them, and what the notebook holds under their names."""

import ast
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ShardError
from .names import plain_function


class Missing(ShardError):
    """The notebook does not hold all of the step's arguments; `names` are those it lacks."""

    def __init__(self, names: list[str], message: str):
        super().__init__(message)
        self.names = names


def from_namespace(step: Callable[..., Any], namespace: Mapping[str, Any], path: str) -> tuple[tuple, dict]:
    """The positional and keyword arguments for one call of `step`, by its parameters' names.

    Parameters that the notebook has no name for keep their defaults. Raises Missing; an iterator counts as
    missing, because taking from it would consume it.
    """
    args, kwargs, missing, iterators = [], {}, [], []
    for parameter in inspect.signature(step).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        name = parameter.name
        if name in namespace and not hasattr(namespace[name], "__next__"):
            value = namespace[name]
        elif parameter.default is not parameter.empty:
            value = parameter.default
        else:
            (iterators if name in namespace else missing).append(name)
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[name] = value
        else:
            args.append(value)
    if missing or iterators:
        raise Missing([*missing, *iterators], _not_found(path, missing, iterators))
    return tuple(args), kwargs


def used_by_call(step: Any, path: str) -> set[str]:
    """The notebook's names that a call of the step takes: its own, of what has it, and those of its parameters."""
    function = plain_function(step) if callable(step) else None
    parameters = () if function is None else inspect.signature(function).parameters
    return {path.partition(".")[0], *parameters}


def _not_found(path: str, missing: list[str], iterators: list[str]) -> str:
    lacks = [f"the notebook has no {' and no '.join(missing)}"] if missing else []
    lacks += [f"{name} is an iterator, and taking from it would advance it" for name in iterators]
    return f"{path} has not run yet: {'; '.join(lacks)}. Call it, then %shard shows the report."


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
