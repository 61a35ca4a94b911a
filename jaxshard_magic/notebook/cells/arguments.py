"""Arguments of a step: annotated specs, and values from the notebook's variables."""

import ast
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ...errors import ShardError
from ...introspect import is_iterator
from .names import plain_function


class MissingArguments(ShardError):
    """Error for step arguments absent from the notebook.

    Args:
        names: Names of the absent arguments and of iterators.
        message: Error text.
    """

    def __init__(self, names: list[str], message: str):
        super().__init__(message)
        self.names = names


class _Wanted(NamedTuple):
    """Argument of a call.

    Attributes:
        name: Variable of the notebook to read.
        default: Value in case the notebook has no such variable; `Parameter.empty` if there is no default.
        by_name: Whether the argument is passed by keyword.
    """

    name: str
    default: Any = inspect.Parameter.empty
    by_name: bool = False


def from_namespace(step: Callable[..., Any], namespace: Mapping[str, Any], path: str) -> tuple[tuple, dict]:
    """Return the positional and keyword arguments for a first call of `step`, read by parameter name.

    Absent parameters with a default are left out.

    Args:
        step: Function to call.
        namespace: Variables of the notebook.
        path: Name of the step in messages.

    Raises:
        MissingArguments: An argument is absent, or an iterator: reading an iterator would consume items.
    """
    wanted, left_out = list[_Wanted](), False
    for p in inspect.signature(step).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        if p.default is p.empty or p.kind is p.POSITIONAL_ONLY or _has(namespace, p.name):
            # Behind an omitted parameter positions no longer match, so later arguments go by keyword.
            by_name = p.kind is p.KEYWORD_ONLY or (left_out and p.kind is not p.POSITIONAL_ONLY)
            wanted.append(_Wanted(p.name, p.default, by_name))
        else:
            left_out = True
    return _taken(wanted, namespace, f"{path} has not run yet", "Call it, then %shard shows the report.")


def like_before(
    step: Callable[..., Any], namespace: Mapping[str, Any], path: str, positions: int, names: Collection[str]
) -> tuple[tuple, dict]:
    """Return the arguments for another call of `step` in the form of an earlier call, read by parameter name.

    An argument absent from the notebook takes the default.

    Args:
        step: Function to call.
        namespace: Variables of the notebook.
        path: Name of the step in messages.
        positions: Number of positional arguments of the earlier call.
        names: Keywords of the earlier call.

    Raises:
        MissingArguments: As for `from_namespace`.
    """
    parameters = inspect.signature(step).parameters
    by_position = [
        _Wanted(p.name, p.default)
        for p in parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    # The notebook has no variable for values of `*args`, so they are reported as absent.
    rest = [_Wanted(f"*{p.name}") for p in parameters.values() if p.kind is p.VAR_POSITIONAL]
    wanted = [*by_position[:positions], *(rest if positions > len(by_position) else ())]
    for name in names:
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        wanted.append(_Wanted(name, default, by_name=True))
    why = f"{path} has run, and its arguments were not kept"
    return _taken(wanted, namespace, why, "%%shard --profile above its cell keeps them.")


def _taken(wanted: Iterable[_Wanted], namespace: Mapping[str, Any], why: str, fix: str) -> tuple[tuple, dict[str, Any]]:
    """Read arguments from the notebook; raise MissingArguments beginning with `why` and ending with `fix`."""
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
        raise MissingArguments([*missing, *iterators], f"{why}: {'; '.join(lacks)}. {fix}")
    return tuple(args), kwargs


def _has(namespace: Mapping[str, Any], name: str) -> bool:
    """Return whether the notebook has a value to read; iterators don't count."""
    return name in namespace and not is_iterator(namespace[name])


def used_by_call(step: Any, path: str) -> set[str]:
    """Return the notebook's names read by a call of the step: the first name of `path`, and the parameters."""
    function = plain_function(step) if callable(step) else None
    parameters = () if function is None else inspect.signature(function).parameters
    return {path.partition(".")[0], *parameters}


def annotated_specs(step: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments annotated with a PartitionSpec: `def train_step(state, batch: P('data'))`."""
    function = plain_function(step)
    if function is None or "jax.sharding" not in sys.modules:
        return {}
    # Not imported here: an annotation can be a PartitionSpec only if the user has imported the module.
    spec = sys.modules["jax.sharding"].PartitionSpec
    notes = {name: _evaluated(note, function, spec) for name, note in function.__annotations__.items()}
    return {name: note for name, note in notes.items() if isinstance(note, spec) and name != "return"}


def _evaluated(note: Any, function: types.FunctionType, spec: type) -> Any:
    """Return an annotation; text with a call of `spec` is evaluated."""
    # With `from __future__ import annotations` annotations are text.
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
