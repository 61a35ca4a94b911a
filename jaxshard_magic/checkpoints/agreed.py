"""What hosts do together with a folder: where one can't, all raise the same line. On one process it is done alone."""

from collections.abc import Callable
from typing import TypeVar

from ..coordination import OtherFailed, Together, from_first
from ..errors import ShardError

T = TypeVar("T")


def on_first(make: Callable[[], str]) -> str:
    """What `make()` gives on host 0, on all of them. Raises the ShardError that it raises there on all."""
    try:
        return from_first(make)
    except OtherFailed as failed:
        raise ShardError(str(failed)) from None


def on_all(make: Callable[[], T]) -> T:
    """What `make()` gives on each host. Raises ShardError on all where it raises one on some, with the first of their
    lines: behind the number of its host, where the others have another."""
    found: list[T] = []
    failed: list[ShardError] = []

    def tried() -> str:
        try:
            found.append(make())
        except ShardError as error:
            failed.append(error)
        return "".join(map(str, failed))

    with Together() as all_of:
        said = all_of(tried)
    if len(said) == 1 and failed:
        raise failed[0]
    host = next((i for i, line in enumerate(said) if line), None)
    if host is not None:
        raise ShardError(said[host] if len(set(said)) == 1 else f"host {host}: {said[host]}")
    return found[0]
