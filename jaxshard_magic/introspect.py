"""Access to a user's objects without running their code.

Notebooks contain lazy proxies, remote handles and objects that only work inside of their own context. Their
`__getattr__`, properties and comparisons may raise anything, import a package, or wait for a server. Plain JAX never
asks them for unusual attributes, so neither does this package.
"""

import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

_ABSENT = object()
_IN_C = types.WrapperDescriptorType  # type of `__get__` in descriptor classes written in C


def static_attribute(obj: Any, name: str, default: Any = None) -> Any:
    """Return an attribute as `getattr` does, without running the object's own code.

    Args:
        obj: The object.
        name: Name of the attribute.
        default: Returned for a missing attribute, or one that only `__getattr__`, `__getattribute__`, a property or
            another descriptor written in Python would give.
    """
    try:
        found = inspect.getattr_static(obj, name)
    except AttributeError:
        return default
    getter = getattr(type(found), "__get__", None)
    # Python calls `__get__` on attributes of the class only, not on those of the object itself.
    if getter is None or (not isinstance(obj, type) and own_dict(obj).get(name, _ABSENT) is found):
        return found
    # A property is written in C, but calls a function of the user.
    if type(getter) is not _IN_C or isinstance(found, property):
        return found if isinstance(obj, type) else default
    return _read(found, obj, default)


def own_dict(obj: Any) -> Mapping[str, Any]:
    """Return the `__dict__` of an object itself, empty without one."""
    try:
        return object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return {}


def own_attributes(obj: Any) -> dict[str, Any]:
    """Return the attributes stored in an object itself: those of its `__dict__` and of slots that are set."""
    found = {name: value for name, slot in slots(obj) if (value := _read(slot, obj, _ABSENT)) is not _ABSENT}
    return {**found, **own_dict(obj)}


def slots(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the slots declared by an object's classes, as name and descriptor."""
    for base in type(obj).__mro__:
        if "__slots__" in vars(base):
            yield from ((k, v) for k, v in vars(base).items() if isinstance(v, types.MemberDescriptorType))


def is_a(obj: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return whether an object's type is a subclass of `kinds`."""
    # `isinstance` also asks `__class__`, which proxies forward to the object that they stand for.
    return issubclass(type(obj), kinds)


def copy_metadata(obj: Any, function: Any) -> None:
    """Copy name, documentation and attributes of a function to an object.

    Args:
        obj: The object.
        function: A function, a jit of one, or a method. Of objects with a `__call__` of their own the attributes are
            not copied.
    """
    named = static_attribute(function, "__func__", function)
    if is_a(named, types.FunctionType) or static_attribute(named, "__wrapped__") is not None:
        vars(obj).update(own_dict(named))
    for name in functools.WRAPPER_ASSIGNMENTS:
        if (value := static_attribute(named, name)) is not None:
            setattr(obj, name, value)


def is_iterator(obj: Any) -> bool:
    """Return whether `next` works on an object. Like Python, this asks only the class."""
    return hasattr(type(obj), "__next__")


def is_method(obj: Any) -> bool:
    """Return whether a callable, wrapped or not, is bound to an object."""
    return static_attribute(obj, "__self__", _ABSENT) is not _ABSENT


def safe_repr(obj: Any) -> str:
    """Return the `repr` of an object, or the name of its type where `repr` raises."""
    try:
        return repr(obj)
    except Exception:  # the user's `__repr__` may raise anything
        return f"<{type(obj).__name__}>"


def _read(descriptor: Any, obj: Any, default: Any) -> Any:
    try:
        return descriptor.__get__(None, obj) if isinstance(obj, type) else descriptor.__get__(obj, type(obj))
    except (AttributeError, TypeError):  # a slot that is not set
        return default
