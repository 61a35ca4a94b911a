"""Run a function on all hosts and raise the error of one host on every host.

With one process the function simply runs.
"""

from collections.abc import Callable
from typing import TypeVar

from ..coordination import ProcessFailed, SharedCalls, run_on_first
from ..errors import ShardError

T = TypeVar("T")


def run_on_first_host(make: Callable[[], str]) -> str:
    """Return `make()` of host 0 on all hosts.

    Args:
        make: Runs on host 0 alone.

    Raises:
        ShardError: On all hosts, if `make` raises one on host 0.
    """
    try:
        return run_on_first(make)
    except ProcessFailed as failed:
        raise ShardError(str(failed)) from None


def run_on_all_hosts(make: Callable[[], T]) -> T:
    """Return this host's `make()` once it has succeeded on all hosts.

    Args:
        make: Runs on each host.

    Raises:
        ShardError: On all hosts, if `make` raises one on some host. The text is the first failed host's, after its
            number unless all hosts failed with the same text.
    """
    results: list[T] = []
    errors: list[ShardError] = []

    def attempt() -> str:
        try:
            results.append(make())
        except ShardError as error:
            errors.append(error)
        return "".join(map(str, errors))

    with SharedCalls() as all_of:
        messages = all_of(attempt)
    # The original error keeps its cause and its `fix`; the gathered text has neither.
    if len(messages) == 1 and errors:
        raise errors[0]
    host = next((i for i, line in enumerate(messages) if line), None)
    if host is not None:
        raise ShardError(messages[host] if len(set(messages)) == 1 else f"host {host}: {messages[host]}")
    return results[0]
