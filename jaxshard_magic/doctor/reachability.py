"""Test connections between the processes of `jax.distributed`; all processes call `reach`.

1. Through the coordination service each process sends a message to all others.
2. Pair by pair, in the rounds of a tournament, the first devices of two processes make an all-reduce.
3. The first devices of all processes make an all-reduce.

A barrier follows each round, so that all processes stop at a failing pair, and no other pair is blamed for the failure.
Every wait has a time limit.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..coordination import BarrierTimeout, barrier, get_key, set_key, wait_for_key
from .connectivity import SMALL, run_within, time_all_reduce
from .findings import one_line

BIG = 2**22  # float32 elements per device: 16 MiB
SERVICE_S = 10.0  # to hear from all processes
PAIR_S = 10.0  # for one pair
PAIRS_S = 30.0  # after which no new round begins
REDUCE_S = 30.0
LIMIT_S = SERVICE_S + PAIRS_S + PAIR_S + 2 * SERVICE_S + REDUCE_S  # of `reach` as a whole
SILENT = ""  # outcome of an all-reduce that has not ended


@dataclass(frozen=True)
class Reachability:
    """Result of one process; sent to the others as JSON.

    Attributes:
        heard: Processes whose message arrived through the service, including this one.
        pairs: For each pair tried the other process, and the seconds of an all-reduce of 4 bytes or the failure;
            `SILENT` for one that did not end.
        reduced: Seconds of an all-reduce over all processes, of 4 bytes and of 16 MiB per device; the failure; None if
            not tried.
    """

    heard: tuple[int, ...]
    pairs: tuple[tuple[int, float | str], ...] = ()
    reduced: tuple[float, float] | str | None = None


def reach(name: str) -> Reachability:
    """Test the connections of this process, with all other processes.

    Args:
        name: Prefix of the keys and barriers, equal on all processes and used once.

    Returns:
        The result of this process, within `LIMIT_S` seconds.
    """
    me, count = jax.process_index(), jax.process_count()
    said = exchange(name, "here", SERVICE_S)
    found = tuple(process for process, text in enumerate(said) if text is not None)
    if len(found) < count:
        return Reachability(found)
    firsts = [_first(process) for process in range(count)]
    pairs: list[tuple[int, float | str]] = []
    end = time.monotonic() + PAIRS_S
    for number, peer in enumerate(rounds(me, count)):
        late = time.monotonic() > end
        if peer is not None and not late:
            pairs.append((peer, _time_all_reduces([firsts[min(me, peer)], firsts[max(me, peer)]], (SMALL,), PAIR_S)[0]))
            late = isinstance(pairs[-1][1], str)
        # The key is set before the barrier and read behind it, so that all processes stop after the same round.
        if late:
            set_key(f"{name}/stop", "")
        if not _pass_barrier(f"{name}/round/{number}") or get_key(f"{name}/stop") is not None:
            return Reachability(found, tuple(pairs))
    small, large = _time_all_reduces(firsts, (SMALL, BIG), REDUCE_S)
    if isinstance(small, str) or isinstance(large, str):
        return Reachability(found, tuple(pairs), str(small))
    return Reachability(found, tuple(pairs), (small, large))


def exchange(name: str, text: str, seconds: float) -> list[str | None]:
    """Send a text to all processes and return theirs, in order of processes; None for a process not heard in time.

    Args:
        name: Prefix of the keys, equal on all processes and used once.
        text: Text of this process.
        seconds: Time limit for all of them.
    """
    set_key(f"{name}/{jax.process_index()}", text)
    end = time.monotonic() + seconds
    return [wait_for_key(f"{name}/{process}", end - time.monotonic()) for process in range(jax.process_count())]


def rounds(me: int, count: int) -> Iterator[int | None]:
    """Yield the partner of `me` in each round of a tournament of `count` processes; None in a round without a partner.

    Each pair meets once, and each process is in at most one pair a round (circle method).

    >>> [list(rounds(me, 4)) for me in range(4)]
    [[1, 2, 3], [0, 3, 2], [3, 0, 1], [2, 1, 0]]
    """
    seats = count + count % 2
    for number in range(1, seats):
        # The last process stays in its seat. Of the others i and j meet in round i + j, modulo their number; the one
        # with i = j meets the last.
        last, turn = seats - 1, seats - 1
        if me == last:
            peer = next(i for i in range(last) if 2 * i % turn == number % turn)
        elif 2 * me % turn == number % turn:
            peer = last
        else:
            peer = (number - me) % turn
        yield peer if peer < count else None


def _time_all_reduces(devices: Sequence[Any], sizes: Sequence[int], limit_s: float) -> list[float | str]:
    """Return the seconds of an all-reduce over `devices` for each size, or the same failure for each."""
    mesh = Mesh(np.array(devices), ("hosts",))
    outcome = run_within(limit_s, lambda: [time_all_reduce(mesh, "hosts", size) for size in sizes])
    if outcome is None:
        return [SILENT] * len(sizes)
    if isinstance(outcome, Exception):
        return [one_line(outcome)] * len(sizes)
    if not all(right for _, right in outcome):
        return ["a wrong sum"] * len(sizes)
    return [seconds for seconds, _ in outcome]


def _pass_barrier(name: str) -> bool:
    try:
        # Another pair may take all of its time in this round.
        barrier(name, PAIR_S + SERVICE_S)
    except BarrierTimeout:
        return False
    return True


def _first(process: int) -> Any:
    own = [device for device in jax.devices() if device.process_index == process]
    return min(own, key=lambda device: device.id)
