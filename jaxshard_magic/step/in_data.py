"""`InData`: where a loop is in the data that a feed gives it, for its checkpoints."""

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ..coordination import gathered
from ..errors import ShardError

if TYPE_CHECKING:
    from ..feeding import Feed
    from ..feeding.position import Position


class InData:
    """Follows the feed that a loop's batches come from, call by call. `back`: the places that the loop goes back to,
    one for each host that saved; None where it begins, and where they were not known.

    A loop of several feeds has no one place: it is None then, and a loop that goes on loads all of its data again.
    """

    def __init__(self, back: Sequence[Mapping[str, Any]] | None, say: Callable[[str], None]):
        self._back, self._say = None if back is None else _here(back, say), say
        self._feed: weakref.ref[Feed] | None = None
        self._reached: Position | None = None
        self._several = False
        self._goes_back = False

    def skipped(self, feed: "Feed | None", last: bool) -> None:
        """A call is not computed, the `last` of these or one before: of the first with a feed on that loads nothing
        before the place. Raises ShardError where the feed is not there after the last one."""
        if feed is None or self._back is None:
            return
        if self._feed is None:
            self._feed = weakref.ref(feed)
            self._goes_back = feed.reached.batches == 1
            if self._goes_back:
                feed.skip_to(self._back)
        taken, then = feed.reached.batches, self._back["batches"]
        if last and self._goes_back and taken != then:
            raise ShardError(
                f"--resume: the loop took {taken} batches for the calls that {then} were taken for in the run that was "
                "saved, as it looks at what is in them, and they are not loaded again: iterate without a feed"
            )

    def called(self, feed: "Feed | None") -> None:
        """A call was computed."""
        if feed is None:
            return
        known = None if self._feed is None else self._feed()
        self._several |= self._feed is not None and known is not feed
        self._feed, self._reached = weakref.ref(feed), feed.reached

    def places(self) -> list[dict[str, Any]] | None:
        """Where the loop was after its last call, on each host, as JSON holds it; None where that is not known of one.
        Hosts come here together."""
        found = [json.loads(place) for place in gathered(json.dumps(self._place()))]
        return None if None in found else found

    def _place(self) -> dict[str, Any] | None:
        reached = self._reached
        if reached is None or self._several:
            return None
        try:
            return reached.data()
        except ShardError as error:
            self._say(f"the checkpoint has no place in the data: {error}")
            self._several = True  # is told once
            return None


def _here(places: Sequence[Mapping[str, Any]], say: Callable[[str], None]) -> Mapping[str, Any] | None:
    """The place that this host goes back to. Where so many hosts had read before as there are now, each goes to its
    own; else a loader's state is of other rows than this host reads, and the batches are counted."""
    hosts, first = jax.process_count(), places[0]
    if len(places) == hosts:
        return places[jax.process_index()]
    were = f"the data was read by {len(places)} host{'s' * (len(places) > 1)}, and is by {hosts} now"
    if any(place["passes"] != first["passes"] for place in places):
        say(f"--resume: {were}, of which each had read otherwise: all of it is loaded again")
        return None
    if first["state"] is not None:
        say(f"--resume: {were}: batches are counted, so that those of the pass under way are loaded again")
    return {**first, "kind": "count", "state": None}
