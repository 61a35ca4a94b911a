"""Pickle values of a notebook in the kernel, and load them into the namespace of a host.

cloudpickle handles most values of a notebook: closures, optax transformations, jitted functions. Three cases differ:
- A function of the notebook keeps the notebook's namespace as its globals, and so reads the host's values when called;
  cloudpickle would send a copy of each global.
- A value with a name on the hosts (a class of the notebook, an object sent before) is sent as that name.
- Code belongs to a cell: the host registers the file under the number and lines known to the kernel.
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
SPACE, NAME, FILE = "space", "name", "file"  # kinds of persistent ids


class _File:
    """Name of a cell's file, replaced by another name on a host."""

    def __init__(self, name: str):
        self.name = name


class Pickler(cloudpickle.Pickler):
    """Pickler for values of a notebook. Raises PicklingError, and any exception of a value that can't be pickled.

    Args:
        file: Binary file to write to.
        space: Namespace of the notebook.
        named: Returns the name of a value on the hosts, dotted for members of a class, or None.

    Attributes:
        files: Files of the code pickled so far.
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
            # By name, as pickle does for functions only: `jax.nn.relu` is none, and would be sent as a copy.
            return name
        return super().reducer_override(obj)

    def reduce_function(self, function: FunctionType) -> Any:
        """Reduce a function of the notebook to its code, attributes and closure."""
        code = function.__code__
        self.files.add(code.co_filename)
        attributes = {
            name: getattr(function, name)
            for name in ("__defaults__", "__kwdefaults__", "__qualname__", "__module__", "__doc__", "__dict__")
        }
        attributes["__annotations__"] = dict(function.__annotations__)
        contents = [_contents(cell) for cell in function.__closure__ or ()]
        args = (code, self._space, function.__name__, _File(code.co_filename))
        return _function, args, (attributes, contents), None, None, _fill


def _name_in_module(obj: Any) -> str | None:
    """Return the name of an object in its module; None where the module has another object there, or is the
    notebook."""
    module, name = getattr(obj, "__module__", None), getattr(obj, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    return name if getattr(sys.modules.get(module), name, None) is obj else None


def _contents(cell: CellType) -> tuple[Any, ...]:
    """Return a closure cell's value in a tuple, empty for an unbound cell."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _function(code: CodeType, space: dict[str, Any], name: str, file: str) -> FunctionType:
    """Make a function of pickled code, with empty closure cells. Runs on the host."""
    cells = tuple(CellType() for _ in code.co_freevars)
    return FunctionType(_with_filename(code, file), space, name, None, cells)


def _fill(function: FunctionType, state: tuple[dict[str, Any], list[tuple[Any, ...]]]) -> None:
    """Set attributes and closure of a function made by `_function`. Runs on the host."""
    held, contents = state
    for name, value in held.items():
        setattr(function, name, value)
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        if content:
            cell.cell_contents = content[0]


def _with_filename(code: CodeType, file: str) -> CodeType:
    """Return code with another file name, nested code included."""
    constants = (_with_filename(each, file) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=file, co_consts=tuple(constants))


class Scan(Pickler):
    """Dry run of pickling one value; the bytes are counted and dropped, arrays are counted without a copy.

    Args:
        value: Value to pickle.
        space: Namespace of the notebook.
        named: As of `Pickler`.
        others: Names of the notebook by `id` of their values.

    Attributes:
        size: Bytes; None for a value that can't be pickled.
        names: Names of host values used by the pickle.
        shared_names: Names among `others` with a value inside `value`.
        global_names: Globals read by functions inside `value`.
    """

    def __init__(
        self, value: Any, space: dict[str, Any], named: Callable[[Any], str | None], others: Mapping[int, str]
    ):
        self._bytes = 0
        super().__init__(self, space, named)  # writes to itself, to count bytes
        self._others = others
        self.names, self.shared_names, self.global_names = set[str](), set[str](), set[str]()
        self.size: int | None = None
        try:
            self.dump(value)
            self.size = self._bytes
        except Exception:  # user code runs here, and may raise anything
            return

    def write(self, data: Any) -> None:
        self._bytes += memoryview(data).nbytes

    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        found = super().persistent_id(obj)
        if found is not None and found[0] == NAME:
            self.names.add(found[1])
        elif (other := self._others.get(id(obj))) is not None:
            self.shared_names.add(other)
        return found

    def reducer_override(self, obj: Any) -> Any:
        if _is_plain_array(obj):
            self._bytes += obj.nbytes
            return int, ()  # stands for the array, whose bytes would be copied
        return super().reducer_override(obj)

    def reduce_function(self, function: FunctionType) -> Any:
        self.global_names |= _globals_of(function.__code__)
        return super().reduce_function(function)


def _is_plain_array(x: Any) -> bool:
    """Return whether `x` is an array of numbers that can be read here: not deleted, fully addressable, neither object
    nor key dtype."""
    if isinstance(x, jax.Array):
        return not x.is_deleted() and x.is_fully_addressable and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return type(x) is np.ndarray and not x.dtype.hasobject


def _globals_of(code: CodeType) -> set[str]:
    """Return the global names read by code and by functions nested in it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    own = {each.argval for each in dis.get_instructions(code) if each.opname in _READING}
    return own.union(*map(_globals_of, inner))


class Unpickler(pickle.Unpickler):
    """Load values written by `Pickler` into a host's namespace.

    Args:
        file: Binary file to read from.
        space: Namespace of the host.
        files: File names of cells on the host, by file name in the kernel.
    """

    def __init__(self, file: Any, space: dict[str, Any], files: Mapping[str, str]):
        super().__init__(file)
        self._space, self._files = space, files

    def persistent_load(self, pid: tuple[str, str]) -> Any:
        kind, name = pid
        if kind == SPACE:
            return self._space
        return self._files.get(name, name) if kind == FILE else _resolve(self._space, name)

    def find_class(self, module: str, name: str) -> Any:
        return _resolve(self._space, name) if module == "__main__" else super().find_class(module, name)


def _resolve(space: Mapping[str, Any], path: str) -> Any:
    root, *attributes = path.split(".")
    return reduce(getattr, attributes, space[root])


def resolve_path(space: Mapping[str, Any], path: str) -> Any:
    """Return the value of a dotted path in a namespace, or None."""
    try:
        return _resolve(space, path)
    except (KeyError, AttributeError):
        return None


def path_of(value: Any) -> str | None:
    """Return the dotted path of a function or class defined outside functions, else None."""
    try:
        path = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    except Exception:  # from a `__getattr__` of the object
        return None
    return path if isinstance(path, str) and "<locals>" not in path else None


def is_sharded_step(value: Any) -> bool:
    """Return whether a value is a step made by `%%shard`; its programs are tied to the devices of its process."""
    return getattr(type(value), "is_sharded_step", False)


def is_reloadable(value: Any) -> bool:
    """Return whether a callable object of the notebook survives pickling.

    False for an object pickled as a bare name, as `functools.cache` makes, for `custom_vjp` (jax 0.10.2 can't rebuild
    one), and for a class that refuses.
    """
    try:
        return not isinstance(value, jax.custom_vjp) and not isinstance(value.__reduce_ex__(4), str)
    except Exception:  # from a class that refuses
        return False


def bind_transfer(transfer: Transfer, shell: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Bind the names of a transfer in a host's shell.

    Args:
        transfer: Names and values from the kernel.
        shell: IPython shell of the host.

    Returns:
        Values by name; and the error text of the first name that could not be bound, by name. Names after that one stay
        unbound.
    """
    space = shell.user_ns
    sys.path += [each for each in transfer.sys_path if each not in sys.path and os.path.isdir(each)]
    files = {
        file: file if number is None else shell.compile.cache(text, number)
        for file, (number, text) in transfer.texts.items()
    }
    # One unpickler for all values, so that parts shared by several stay shared.
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
        except Exception as error:  # user code may raise anything
            return values, {item.name: f"{type(error).__name__}: {error}"}
    return values, {}
