"""Look into a user's objects without running their code.

A notebook holds lazy proxies, remote handles and objects that work inside of their own context alone: their
`__getattr__`, properties and comparisons may raise anything, import a package, or wait for a server. Plain JAX never
asks them for odd attributes, so neither does this package.
"""

import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

_ABSENT = object()
_IN_C = types.WrapperDescriptorType  # what the `__get__` of a class is that isn't written in Python


def static_attribute(obj: Any, name: str, default: Any = None) -> Any:
    """Return what `obj` has under a name, as `getattr` does, but for what its own code would give.

    `default` stands for what only `__getattr__`, `__getattribute__`, a property or another descriptor written in Python
    would tell.
    """
    try:
        found = inspect.getattr_static(obj, name)
    except AttributeError:
        return default
    getter = getattr(type(found), "__get__", None)
    if getter is None or (not isinstance(obj, type) and own_dict(obj).get(name, _ABSENT) is found):
        return found
    if type(getter) is not _IN_C or isinstance(found, property):
        return found if isinstance(obj, type) else default
    return _read(found, obj, default)


def own_dict(obj: Any) -> Mapping[str, Any]:
    """Return the `__dict__` of an object itself, empty where it has none."""
    try:
        return object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return {}


def own_attributes(obj: Any) -> dict[str, Any]:
    """Return the attributes that an object itself holds, in its `__dict__` and in slots that are set."""
    found = {name: value for name, slot in slots(obj) if (value := _read(slot, obj, _ABSENT)) is not _ABSENT}
    return {**found, **own_dict(obj)}


def slots(obj: Any) -> Iterator[tuple[str, Any]]:
    """The slots that an object's classes declare, each with its name and its descriptor."""
    for base in type(obj).__mro__:
        if "__slots__" in vars(base):
            yield from ((k, v) for k, v in vars(base).items() if isinstance(v, types.MemberDescriptorType))


def is_a(obj: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return whether an object is of one of these classes, told by its type alone: `isinstance` asks `__class__`, too,
    which proxies forward to what they stand for."""
    return issubclass(type(obj), kinds)


def named_as(obj: Any, function: Any) -> None:
    """Give an object the name, the documentation and the attributes of a function, of a jit of one, or of what a method
    calls. Objects with a `__call__` of their own keep theirs."""
    named = static_attribute(function, "__func__", function)
    if is_a(named, types.FunctionType) or static_attribute(named, "__wrapped__") is not None:
        vars(obj).update(own_dict(named))
    for name in functools.WRAPPER_ASSIGNMENTS:
        if (value := static_attribute(named, name)) is not None:
            setattr(obj, name, value)


def is_iterator(obj: Any) -> bool:
    """Return whether `next` takes something from an object; Python asks its class alone, too."""
    return hasattr(type(obj), "__next__")


def is_method(obj: Any) -> bool:
    """Return whether a callable, wrapped or not, brings the object that it is called on."""
    return static_attribute(obj, "__self__", _ABSENT) is not _ABSENT


def shown(obj: Any) -> str:
    """Return the `repr` of an object, or its type's name where that raises."""
    try:
        return repr(obj)
    except Exception:  # whatever a class of the user's does there
        return f"<{type(obj).__name__}>"


def _read(descriptor: Any, obj: Any, default: Any) -> Any:
    try:
        return descriptor.__get__(None, obj) if isinstance(obj, type) else descriptor.__get__(obj, type(obj))
    except (AttributeError, TypeError):  # a slot that is not set
        return default
