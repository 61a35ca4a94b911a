"""Where the arrays of batches go: seen from the first batch that the loop hands to a step."""

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..placing import cuts_by_host, from_rows, is_part, put
from ..program import settings
from ..step import Entry, ShardedStep
from ..step.given import Waits, waiting
from ..step.sign import is_done
from . import batches
from .batches import is_array, kind, mapped, own

TRIES = 8  # batches that are looked for in the calls of steps, before it is left at taking them ahead


class Places:
    """What is known of the step that the batches of a feed go to. `step` is the only one that counts, where it is said.

    A batch is known in the step's call by its arrays being the same objects: one that the loop changes first stays on
    the host.
    """

    def __init__(self, step: ShardedStep | None, feed: "weakref.ref[Any]") -> None:
        self.feed = feed
        self.waits = Waits()
        self._only = None if step is None else weakref.ref(step)
        self._known: dict[tuple[Any, ...], dict[int, tuple[Any, int | None]]] = {}
        self._handed: list[Any] = []
        self._missed = 0

    def handed(self, batch: Any) -> None:
        """The loop is given `batch`: look for it in the next calls of steps, where nothing is known of its kind."""
        self.let_go()
        flat = batches.leaves(batch)
        if self._missed < TRIES and tuple(map(kind, flat)) not in self._known:
            self._missed += 1
            self._handed = flat
            waiting.append(self)

    def let_go(self) -> None:
        """Look for no batch."""
        self._handed = []
        if self in waiting:
            waiting.remove(self)

    def went(self, step: ShardedStep, entry: Entry, leaves: Sequence[Any]) -> Waits | None:
        """As of `Giver`."""
        if self._only is not None and self._only() is not step:
            return None
        at = {id(x): i for i, x in reversed(list(enumerate(self._handed))) if is_array(x)}
        found = {at[id(x)]: i for i, x in enumerate(leaves) if id(x) in at}
        if not found:
            return None
        targets = {
            j: (entry.shardings[i], entry.rows.get(i))
            for j, i in found.items()
            if i not in entry.added and not (i in entry.rows and step.keep_arguments)
        }
        self._known[tuple(map(kind, self._handed))] = targets
        self._missed = 0
        self.let_go()
        return self.waits

    def placed(self, batch: Any) -> Any:
        """The batch with its arrays on the devices, as far as it is known where, and all there when this returns.

        What lies on several hosts already stays, and so do rows of a host that others have to exchange: this thread
        must not wait for other hosts.
        """
        flat = batches.leaves(batch)
        targets = self._known.get(tuple(map(kind, flat)), {})
        flat = [own(x) for x in flat]
        whole = [j for j, (to, dim) in targets.items() if dim is None and _moves(flat[j], to)]
        with settings.own_moves():
            for j, x in zip(
                whole, put([flat[j] for j in whole], [targets[j][0] for j in whole]), strict=True
            ):
                flat[j] = x
            for j, (to, dim) in targets.items():
                if (
                    dim is not None
                    and is_part(flat[j])
                    and cuts_by_host(to, _together(flat[j], to, dim), dim)
                ):
                    flat[j] = from_rows(flat[j], to, dim)
            jax.block_until_ready([flat[j] for j in targets if isinstance(flat[j], jax.Array)])
        if targets:  # as they are now they are no news
            self._known.setdefault(tuple(map(kind, flat)), targets)
        rest = iter(flat)
        return mapped(lambda _: next(rest), batch)

    def busy(self) -> bool:
        """Have the devices of the step work to do?"""
        step = None if self.waits.step is None else self.waits.step()
        sign = None if step is None or step.entry is None else step.entry.clock.sign
        return sign is not None and not is_done(sign)


def _moves(x: Any, to: Any) -> bool:
    if isinstance(x, np.ndarray):
        return True
    return is_part(x) and not x.sharding.is_equivalent_to(to, x.ndim)


def _together(x: Any, to: Any, dim: int) -> tuple[int, ...]:
    """The shape of what hosts have together."""
    hosts = len({device.process_index for device in to.device_set})
    return tuple(n * hosts if d == dim else n for d, n in enumerate(x.shape))
