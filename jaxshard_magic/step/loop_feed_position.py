"""Track the position of a loop in the data of its feed, for checkpoints."""

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from ..coordination import gather_texts
from ..errors import ShardError


class ReachedPosition(Protocol):
    """Position in a feed's data."""

    @property
    def batches(self) -> int:
        """Number of batches before the position."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return JSON data to resume from. Raises ShardError for a loader without a position."""
        ...


class PositionedFeed(Protocol):
    """Feed with a position, as `feeding.Feed`, which stands above steps."""

    @property
    def reached(self) -> ReachedPosition:
        """Position after the last batch."""
        ...

    def skip_to(self, position: Mapping[str, Any]) -> None:
        """Skip loading up to a position."""
        ...


class LoopFeedPosition:
    """Position of a loop in its feed, updated call by call.

    A loop with several feeds has no single position. The position is then None, and a resumed loop loads all of its
    data again.

    Args:
        resume_positions: Positions to resume from, one for each host of the saved run; None at a loop's beginning, or
            if unknown.
        say: Shows a line to the user.
    """

    def __init__(self, resume_positions: Sequence[Mapping[str, Any]] | None, say: Callable[[str], None]):
        self._resume_position, self._say = (
            None if resume_positions is None else _position_of_host(resume_positions, say),
            say,
        )
        self._feed: weakref.ref[PositionedFeed] | None = None
        self._reached: ReachedPosition | None = None
        self._has_several_feeds = False
        self._goes_back = False

    def record_skipped(self, feed: PositionedFeed | None, last: bool) -> None:
        """Record a skipped call; at the first with a feed, let the feed skip loading up to the resumed position.

        Args:
            feed: Feed of the batch; None without one.
            last: Whether the call is the last skipped one.

        Raises:
            ShardError: After the last skipped call the feed is not at the resumed position.
        """
        if feed is None or self._resume_position is None:
            return
        if self._feed is None:
            self._feed = weakref.ref(feed)
            # A feed can skip loading only from its first batch on.
            self._goes_back = feed.reached.batches == 1
            if self._goes_back:
                feed.skip_to(self._resume_position)
        batches, saved_batches = feed.reached.batches, self._resume_position["batches"]
        if last and self._goes_back and batches != saved_batches:
            raise ShardError(
                f"--resume: the loop took {batches} batches for the calls that {saved_batches} were taken "
                "for in the run that was "
                "saved, as it looks at what is in them, and they are not loaded again: iterate without a feed"
            )

    def record_computed(self, feed: PositionedFeed | None) -> None:
        """Record a computed call, with its feed or None."""
        if feed is None:
            return
        known = None if self._feed is None else self._feed()
        self._has_several_feeds |= self._feed is not None and known is not feed
        self._feed, self._reached = weakref.ref(feed), feed.reached

    def positions(self) -> list[dict[str, Any]] | None:
        """Return the position after the last call on each host, as JSON data; None if unknown on any host.

        Every host must call this function.
        """
        positions = [json.loads(place) for place in gather_texts(json.dumps(self._local_position()))]
        return None if None in positions else positions

    def _local_position(self) -> dict[str, Any] | None:
        """Return this host's position as JSON data; None if unknown."""
        reached = self._reached
        if reached is None or self._has_several_feeds:
            return None
        try:
            return reached.to_json()
        except ShardError as error:
            self._say(f"the checkpoint has no place in the data: {error}")
            self._has_several_feeds = True  # so that the message is shown once
            return None


def _position_of_host(positions: Sequence[Mapping[str, Any]], say: Callable[[str], None]) -> Mapping[str, Any] | None:
    """Return the position for this host to resume from; None to load all data again."""
    hosts, first = jax.process_count(), positions[0]
    # With another number of hosts, a loader's state describes other rows than this host reads, so batches are counted.
    if len(positions) == hosts:
        return positions[jax.process_index()]
    were = f"the data was read by {len(positions)} host{'s' * (len(positions) > 1)}, and is by {hosts} now"
    if any(place["passes"] != first["passes"] for place in positions):
        say(f"--resume: {were}, of which each had read otherwise: all of it is loaded again")
        return None
    if first["state"] is not None:
        say(f"--resume: {were}: batches are counted, so that those of the pass under way are loaded again")
    return {**first, "kind": "count", "state": None}
