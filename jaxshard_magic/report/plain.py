"""Frozen dataclasses as plain data for JSON, and back from it with an error that names the field that is wrong."""

import dataclasses
import json
import math
import numbers
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from jaxshard_magic.errors import ShardError, none_of, one_of


def plain(value: Any) -> Any:
    """`value` as dicts, lists, strings and finite numbers; what is not plain data becomes its text."""
    if value is None or isinstance(value, (str, bool)) or type(value) is int:  # most of a report
        return value
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else json.dumps(number)
    return str(value)


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def build(wanted: Any, value: Any, where: str) -> Any:
    """`value` from JSON as the annotated type `wanted`; `where` names it in errors."""
    origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return _build_one_of(args, value, where)
    if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
        return _build_fields(wanted, value, where)
    if origin is tuple and isinstance(value, list):
        kinds = args if args[-1] is not Ellipsis else (args[0],) * len(value)
        if len(kinds) != len(value):
            raise ShardError(f"{where} must have {len(kinds)} items, not {len(value)}")
        return tuple(build(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if origin is dict and isinstance(value, Mapping):
        return {str(k): build(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if wanted is float and isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if wanted is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ShardError(f"{where} must be a number below 1.8e308") from None
    if wanted is types.NoneType and value is None:
        return None
    if isinstance(wanted, type) and type(value) is wanted:
        return value
    raise ShardError(f"{where} must be {_expected(wanted)}, not {kind(value)}")


def _build_one_of(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and types.NoneType in choices:
        return None
    rest = [choice for choice in choices if choice is not types.NoneType]
    for choice in rest[:-1]:
        if type(value) is choice:
            return value
    return build(rest[-1], value, where)


def _build_fields(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ShardError(f"{where} must be {_expected(cls)}, not {kind(value)}")
    fields, hints = _fields(cls)
    for name in value:
        if name not in fields:
            said = f"{where} has no field '{name}'"
            raise ShardError(none_of(said, name, fields, f"its fields are {one_of(fields)}"))
    for name, known in fields.items():
        needed = known.default is dataclasses.MISSING and known.default_factory is dataclasses.MISSING
        if name not in value and needed:
            raise ShardError(f"{where} lacks the field '{name}'")
    return cls(**{name: build(hints[name], v, f"{where}.{name}") for name, v in value.items()})


@cache
def _fields(cls: Any) -> tuple[dict[str, dataclasses.Field], dict[str, Any]]:
    return {f.name: f for f in dataclasses.fields(cls)}, typing.get_type_hints(cls)


_NAMES = {
    type(None): "null",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    tuple: "a list",
    dict: "an object",
}


def kind(value: Any) -> str:
    """What a value of JSON is, with its article: `an object`, `a number`."""
    return _NAMES.get(type(value), f"a {type(value).__name__}")


def _expected(wanted: Any) -> str:
    if dataclasses.is_dataclass(wanted):
        return "an object"
    return _NAMES.get(typing.get_origin(wanted) or wanted, str(wanted))
