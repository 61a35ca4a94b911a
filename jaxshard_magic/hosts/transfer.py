"""Names of the kernel's namespace sent to hosts: modules by name, definitions as source, other values pickled."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Import:
    """Module to import.

    Attributes:
        name: Name to bind.
        module: Full name of the module.
        submodules: Full names of submodules to import first.
    """

    name: str
    module: str
    submodules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Define:
    """Statements of cells to execute.

    Attributes:
        name: Name bound by the statements.
        parts: For each cell its file in the kernel, and the indices of the statements in the cell.
    """

    name: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Unpickle:
    """Value to load.

    Attributes:
        name: Name to bind, to the next value of `Transfer.pickled`.
    """

    name: str


Item = Import | Define | Unpickle


@dataclass(frozen=True)
class Transfer:
    """Names for the hosts, each after the names it depends on.

    Attributes:
        items: One item per name.
        pickled: Values, one after the other, by one pickler: shared parts stay shared.
        texts: For each source file of a definition or a function, by file name in the kernel: the cell number (None for
            a file that is no cell) and the text.
        sys_path: `sys.path` of the kernel; hosts add missing folders.
    """

    items: tuple[Item, ...]
    pickled: bytes
    texts: dict[str, tuple[int | None, str]]
    sys_path: tuple[str, ...]
