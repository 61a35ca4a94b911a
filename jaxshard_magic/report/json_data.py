"""Conversion of frozen dataclasses to JSON data and back; errors have the path of the invalid field."""

import dataclasses
import json
import math
import numbers
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from jaxshard_magic.errors import ShardError, list_names, unknown_name


def to_plain(value: Any) -> Any:
    """Return `value` as dicts, lists, strings and finite numbers.

    Numbers that are not finite become the strings `NaN`, `Infinity` and `-Infinity`. Values that are not plain data
    become their text.
    """
    if value is None or isinstance(value, (str, bool)) or type(value) is int:  # most values, so tested first
        return value
    if isinstance(value, (tuple, list)):
        return [to_plain(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        # JSON has neither NaN nor infinity; `json.dumps` gives their usual names.
        return number if math.isfinite(number) else json.dumps(number)
    return str(value)


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def from_plain(type_hint: Any, value: Any, where: str) -> Any:
    """Build a value of a type from JSON data.

    Args:
        type_hint: Type hint of the value: a dataclass, tuple, dict, union or plain type.
        value: JSON data.
        where: Path of the value, for error messages.

    Raises:
        ShardError: The data doesn't match the type; the message has the path.
    """
    origin, args = typing.get_origin(type_hint), typing.get_args(type_hint)
    if type_hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return _build_one_of(args, value, where)
    if isinstance(type_hint, type) and dataclasses.is_dataclass(type_hint):
        return _build_fields(type_hint, value, where)
    if origin is tuple and isinstance(value, list):
        kinds = args if args[-1] is not Ellipsis else (args[0],) * len(value)
        if len(kinds) != len(value):
            raise ShardError(f"{where} must have {len(kinds)} items, not {len(value)}")
        return tuple(from_plain(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if origin is dict and isinstance(value, Mapping):
        return {str(k): from_plain(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if type_hint is float and isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if type_hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        # An integer in JSON may exceed the range of a float.
        except OverflowError:
            raise ShardError(f"{where} must be a number below 1.8e308") from None
    if type_hint is types.NoneType and value is None:
        return None
    # The exact type: a bool is an instance of int, but no number of a report.
    if isinstance(type_hint, type) and type(value) is type_hint:
        return value
    raise ShardError(f"{where} must be {_expected(type_hint)}, not {json_kind(value)}")


def _build_one_of(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    """Build a value of a union: None, an exact match, or the last alternative."""
    if value is None and types.NoneType in choices:
        return None
    rest = [choice for choice in choices if choice is not types.NoneType]
    for choice in rest[:-1]:
        if type(value) is choice:
            return value
    return from_plain(rest[-1], value, where)


def _build_fields(cls: Any, value: Any, where: str) -> Any:
    """Build a dataclass; unknown fields and missing fields without a default are errors."""
    if not isinstance(value, Mapping):
        raise ShardError(f"{where} must be {_expected(cls)}, not {json_kind(value)}")
    fields, hints = _fields(cls)
    for name in value:
        if name not in fields:
            problem = f"{where} has no field '{name}'"
            raise ShardError(unknown_name(problem, name, fields, f"its fields are {list_names(fields)}"))
    for name, known in fields.items():
        needed = known.default is dataclasses.MISSING and known.default_factory is dataclasses.MISSING
        if name not in value and needed:
            raise ShardError(f"{where} lacks the field '{name}'")
    return cls(**{name: from_plain(hints[name], v, f"{where}.{name}") for name, v in value.items()})


@cache
def _fields(cls: Any) -> tuple[dict[str, dataclasses.Field], dict[str, Any]]:
    """Return the fields and the type hints of a dataclass, cached by class."""
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


def json_kind(value: Any) -> str:
    """Return the kind of a JSON value with its article: `an object`, `a number`."""
    return _NAMES.get(type(value), f"a {type(value).__name__}")


def _expected(wanted: Any) -> str:
    """Return the kind of JSON value expected for a type."""
    if dataclasses.is_dataclass(wanted):
        return "an object"
    return _NAMES.get(typing.get_origin(wanted) or wanted, str(wanted))
