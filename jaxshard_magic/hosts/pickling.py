"""Values of a notebook pickled in the kernel, and loaded into the namespace of a host.

cloudpickle takes most of what a notebook holds: closures, transformations of optax, jitted functions. Three things are
done in another way:
- A function of the notebook keeps the namespace as its globals, so that it reads the host's names when it is called;
  cloudpickle would send a copy of each.
- What has a name on the hosts (a class of the notebook, an object that was sent before) is sent as that name.
- Code is that of a cell: the host knows it by the number and the lines that it has in the kernel.
"""

import ast
import dis
import importlib
import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from types import CellType, CodeType, FunctionType
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np

from .transfer import Define, Import, Transfer

_READING = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
SPACE, NAME, FILE = "space", "name", "file"  # what a persistent id of a pickle means


class _File:
    """Stands for the name of a cell's file, which is another one on a host."""

    def __init__(self, name: str):
        self.name = name


class Pickler(cloudpickle.Pickler):
    """Pickles values of the namespace `space`. `named(value)` is the name that a value goes by on the hosts, dotted for
    what is inside of a class, or None; `files` are those that code is from, as it comes.

    Raises PicklingError, and whatever a value raises that can't be pickled.
    """

    def __init__(self, file: Any, space: dict[str, Any], named: Callable[[Any], str | None]):
        super().__init__(file)
        self._space, self._named = space, named
        self.files: set[str] = set()

    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        if obj is self._space:
            return SPACE, ""
        if type(obj) is _File:
            return FILE, obj.name
        name = self._named(obj)
        return None if name is None else (NAME, name)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType) and obj.__globals__ is self._space:
            return self.reduce_function(obj)
        if is_sharded_step(obj):
            raise pickle.PicklingError("a sharded step is of its own process")
        if callable(obj) and not isinstance(obj, type) and (name := _name_in_module(obj)) is not None:
            return name  # `jax.nn.relu`: no function, so that it would go as a copy
        return super().reducer_override(obj)

    def reduce_function(self, function: FunctionType) -> Any:
        """Reduce a function of the notebook to its code, and what it holds besides."""
        code = function.__code__
        self.files.add(code.co_filename)
        held = {
            name: getattr(function, name)
            for name in (
                "__defaults__",
                "__kwdefaults__",
                "__qualname__",
                "__module__",
                "__doc__",
                "__dict__",
            )
        }
        held["__annotations__"] = dict(function.__annotations__)
        contents = [_contents(cell) for cell in function.__closure__ or ()]
        made = (code, self._space, function.__name__, _File(code.co_filename))
        return _function, made, (held, contents), None, None, _fill


def _name_in_module(obj: Any) -> str | None:
    """The name under which a module that is no notebook has exactly this object."""
    module, name = getattr(obj, "__module__", None), getattr(obj, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    return name if getattr(sys.modules.get(module), name, None) is obj else None


def _contents(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing was bound to it
        return ()


def _function(code: CodeType, space: dict[str, Any], name: str, file: str) -> FunctionType:
    cells = tuple(CellType() for _ in code.co_freevars)
    return FunctionType(_moved(code, file), space, name, None, cells)


def _fill(function: FunctionType, state: tuple[dict[str, Any], list[tuple[Any, ...]]]) -> None:
    held, contents = state
    for name, value in held.items():
        setattr(function, name, value)
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        if content:
            cell.cell_contents = content[0]


def _moved(code: CodeType, file: str) -> CodeType:
    """Code as that of another file, with what is defined in it."""
    constants = (_moved(each, file) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=file, co_consts=tuple(constants))


class Scan(Pickler):
    """What becomes of a value that is pickled, which is not kept; arrays are counted and not read.

    Attributes:
        size: Bytes; None for what can't be pickled.
        names: By which it names what is on the hosts.
        along: Those of `others`, names of the notebook by the ids of their values, that have a part of it.
        globals: Names that functions in it read when they are called.
    """

    def __init__(
        self, value: Any, space: dict[str, Any], named: Callable[[Any], str | None], others: Mapping[int, str]
    ):
        self._bytes = 0
        super().__init__(self, space, named)
        self._others = others
        self.names, self.along, self.globals = set[str](), set[str](), set[str]()
        self.size: int | None = None
        try:
            self.dump(value)
            self.size = self._bytes
        except Exception:  # whatever a class of the user's raises when it is taken apart
            return

    def write(self, data: Any) -> None:
        self._bytes += memoryview(data).nbytes

    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        found = super().persistent_id(obj)
        if found is not None and found[0] == NAME:
            self.names.add(found[1])
        elif (other := self._others.get(id(obj))) is not None:
            self.along.add(other)
        return found

    def reducer_override(self, obj: Any) -> Any:
        if _is_plain_array(obj):
            self._bytes += obj.nbytes
            return int, ()
        return super().reducer_override(obj)

    def reduce_function(self, function: FunctionType) -> Any:
        self.globals |= _globals_of(function.__code__)
        return super().reduce_function(function)


def _is_plain_array(x: Any) -> bool:
    """Whether `x` is an array of numbers that is still there: others are taken apart, or raise."""
    if isinstance(x, jax.Array):
        return (
            not x.is_deleted() and x.is_fully_addressable and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
        )
    return type(x) is np.ndarray and not x.dtype.hasobject


def _globals_of(code: CodeType) -> set[str]:
    """The global names that code reads, and functions in it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    own = {each.argval for each in dis.get_instructions(code) if each.opname in _READING}
    return own.union(*map(_globals_of, inner))


class Unpickler(pickle.Unpickler):
    """Loads what `Pickler` wrote into the namespace `space`. `files` are the cells' names here by those in the
    kernel."""

    def __init__(self, file: Any, space: dict[str, Any], files: Mapping[str, str]):
        super().__init__(file)
        self._space, self._files = space, files

    def persistent_load(self, pid: tuple[str, str]) -> Any:
        kind, name = pid
        if kind == SPACE:
            return self._space
        return self._files.get(name, name) if kind == FILE else _named(self._space, name)

    def find_class(self, module: str, name: str) -> Any:
        return _named(self._space, name) if module == "__main__" else super().find_class(module, name)


def _named(space: Mapping[str, Any], path: str) -> Any:
    root, *attributes = path.split(".")
    return reduce(getattr, attributes, space[root])


def stands_for(space: Mapping[str, Any], path: str) -> Any:
    """What a dotted path stands for in a namespace, None for nothing."""
    try:
        return _named(space, path)
    except (KeyError, AttributeError):
        return None


def path_of(value: Any) -> str | None:
    """The dotted path under which a function or a class was defined, where that is outside of functions."""
    try:
        path = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    except Exception:  # of an object that answers to names in its own way
        return None
    return path if isinstance(path, str) and "<locals>" not in path else None


def is_sharded_step(value: Any) -> bool:
    """Whether a value is a step that `%%shard` has made: programs on the devices of its own process."""
    return getattr(type(value), "is_sharded_step", False)


def is_loaded_again(value: Any) -> bool:
    """Whether a callable of the notebook that is no function can be made of what is pickled of it: `functools.cache`
    pickles a name, and jax 0.10.2 can't make a `custom_vjp` so."""
    try:
        return not isinstance(value, jax.custom_vjp) and not isinstance(value.__reduce_ex__(4), str)
    except Exception:  # of a class that refuses
        return False


def received(transfer: Transfer, shell: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Bind the names of a transfer in a host's shell.

    Returns:
        What the names stand for; and why one could not be bound. After that one nothing is bound.
    """
    space = shell.user_ns
    sys.path += [each for each in transfer.path if each not in sys.path and os.path.isdir(each)]
    files = {
        file: file if number is None else shell.compile.cache(text, number)
        for file, (number, text) in transfer.texts.items()
    }
    unpickler = Unpickler(io.BytesIO(transfer.pickled), space, files)
    values: dict[str, Any] = {}
    for item in transfer.items:
        try:
            if isinstance(item, Import):
                for module in item.submodules:
                    importlib.import_module(module)
                space[item.name] = importlib.import_module(item.module)
            elif isinstance(item, Define):
                for file, places in item.parts:
                    body = ast.parse(transfer.texts[file][1]).body
                    module = ast.Module([body[i] for i in places], [])
                    exec(shell.compile(module, files[file], "exec"), space)
            else:
                space[item.name] = unpickler.load()
            values[item.name] = space[item.name]
        except Exception as error:  # whatever user code raises
            return values, {item.name: f"{type(error).__name__}: {error}"}
    return values, {}
