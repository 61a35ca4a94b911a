"""What the kernel sends of its namespace to hosts: modules by name, definitions as text, everything else pickled."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Import:
    """A module to bind to `name`, after its `submodules`, by their full names, have been imported."""

    name: str
    module: str
    submodules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Define:
    """Statements of cells to run, which bind `name`: of each cell its file in the kernel and their places in it."""

    name: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Unpickle:
    """A value to bind to `name`: the next in `Transfer.pickled`."""

    name: str


Item = Import | Define | Unpickle


@dataclass(frozen=True)
class Transfer:
    """Names for the hosts, in an order in which each is made of those before it.

    Attributes:
        items: One for each name.
        pickled: The values, one after the other, by one pickler: what they share stays shared.
        texts: Of each cell that a definition or a function is from, by its file in the kernel: its number, None for a
            file that is no cell, and its text.
        path: The kernel's `sys.path`; hosts add what they lack of it.
    """

    items: tuple[Item, ...]
    pickled: bytes
    texts: dict[str, tuple[int | None, str]]
    path: tuple[str, ...]
