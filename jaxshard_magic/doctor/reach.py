"""Whether the processes of `jax.distributed` reach each other, as each of them finds it: all call `reach`, together.

First through the coordination service: each tells, and reads what every other one told. Then pair by pair, as the
rounds of a tournament, an all-reduce of the first device of each; last one over all of them. A barrier stands after
each round, so that all stop where a pair fails, and no other is blamed for it. Every wait has an end.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..coordination import Late, barrier, heard, tell, told
from .connectivity import SMALL, all_reduce, within
from .findings import one_line

BIG = 2**22  # float32 a device: 16 MiB
SERVICE_S = 10.0  # for all to be heard
PAIR_S = 10.0  # for one pair
PAIRS_S = 30.0  # after which no round begins
REDUCE_S = 30.0
LIMIT_S = SERVICE_S + PAIRS_S + PAIR_S + 2 * SERVICE_S + REDUCE_S  # of `reach` as a whole
SILENT = ""  # of a pair: it has not answered


@dataclass(frozen=True)
class Reached:
    """What one process found.

    Attributes:
        heard: the processes whose message it read through the service, its own among them.
        pairs: another process, and the seconds of an all-reduce of 4 bytes with it, or why there are none: what was
            raised, `SILENT` where it did not end. Pairs that were not tried are not there.
        reduced: seconds of an all-reduce over all, of 4 bytes and of 16 MiB a device; why there are none; None where it
            was not tried.
    """

    heard: tuple[int, ...]
    pairs: tuple[tuple[int, float | str], ...] = ()
    reduced: tuple[float, float] | str | None = None


def reach(name: str) -> Reached:
    """What this process reaches. All come here, under a name that is used once; it ends within `LIMIT_S`."""
    me, count = jax.process_index(), jax.process_count()
    said = exchanged(name, "here", SERVICE_S)
    found = tuple(process for process, text in enumerate(said) if text is not None)
    if len(found) < count:
        return Reached(found)
    firsts = [_first(process) for process in range(count)]
    pairs: list[tuple[int, float | str]] = []
    end = time.monotonic() + PAIRS_S
    for number, peer in enumerate(rounds(me, count)):
        late = time.monotonic() > end
        if peer is not None and not late:
            pairs.append((peer, _summed([firsts[min(me, peer)], firsts[max(me, peer)]], (SMALL,), PAIR_S)[0]))
            late = isinstance(pairs[-1][1], str)
        if late:
            tell(f"{name}/stop", "")
        if not _met(f"{name}/round/{number}") or told(f"{name}/stop") is not None:
            return Reached(found, tuple(pairs))
    small, large = _summed(firsts, (SMALL, BIG), REDUCE_S)
    if isinstance(small, str) or isinstance(large, str):
        return Reached(found, tuple(pairs), str(small))
    return Reached(found, tuple(pairs), (small, large))


def exchanged(name: str, text: str, seconds: float) -> list[str | None]:
    """What each process tells, in their order, through the coordination service; None for one that was not heard."""
    tell(f"{name}/{jax.process_index()}", text)
    end = time.monotonic() + seconds
    return [heard(f"{name}/{process}", end - time.monotonic()) for process in range(jax.process_count())]


def rounds(me: int, count: int) -> Iterator[int | None]:
    """Whom `me` meets in each round of a tournament of so many, None where it sits out: all pairs, each once, and in
    each round everybody at most once (the circle method).

    >>> [list(rounds(me, 4)) for me in range(4)]
    [[1, 2, 3], [0, 3, 2], [3, 0, 1], [2, 1, 0]]
    """
    seats = count + count % 2
    for number in range(1, seats):
        # All but the last go round: i and j meet where i + j = number, and who is left meets the last.
        last, turn = seats - 1, seats - 1
        if me == last:
            peer = next(i for i in range(last) if 2 * i % turn == number % turn)
        elif 2 * me % turn == number % turn:
            peer = last
        else:
            peer = (number - me) % turn
        yield peer if peer < count else None


def _summed(devices: Sequence[Any], sizes: Sequence[int], limit_s: float) -> list[float | str]:
    """Seconds of an all-reduce over these devices for each size, or for each the same reason why there are none."""
    mesh = Mesh(np.array(devices), ("hosts",))
    outcome = within(limit_s, lambda: [all_reduce(mesh, "hosts", size) for size in sizes])
    if outcome is None:
        return [SILENT] * len(sizes)
    if isinstance(outcome, Exception):
        return [one_line(outcome)] * len(sizes)
    if not all(right for _, right in outcome):
        return ["a wrong sum"] * len(sizes)
    return [seconds for seconds, _ in outcome]


def _met(name: str) -> bool:
    try:
        barrier(name, PAIR_S + SERVICE_S)
    except Late:
        return False
    return True


def _first(process: int) -> Any:
    own = [device for device in jax.devices() if device.process_index == process]
    return min(own, key=lambda device: device.id)
