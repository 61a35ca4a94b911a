"""Save the state of a loop between calls of its step, and resume a loop from a checkpoint.

`CheckpointLoop` does both. `LoopFeedPosition` tracks the position of the loop in the data of its feed: a checkpoint has
it too. `Provenance` knows the call that returned an array, and `LoopEnd` lets all hosts agree on the last call.
"""

import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from ..checkpoints import CheckpointInfo, CheckpointStore
from ..checkpoints.folder import make_folder, run_on_first_host
from ..compilation.compiled_step import CompiledStep
from ..coordination import LONG_S, Agreement, gather_texts, is_multiprocess
from ..errors import ShardError
from ..report.parts import MAX_SAVES, Checkpoints, Save, mesh_text
from ..temporary import AcquiredLock, UndoUnlessFinished
from .multihost_calls import MultihostCalls
from .replayed_calls import (
    CARRIED_PREFIX,
    PREVIOUS_PREFIX,
    OutputRoles,
    ReplayedCalls,
    StepLog,
    describe_leaves,
    flat_outputs,
    output_roles,
    total_bytes,
)
from .save_schedule import SaveInterval, SaveSchedule

LAST_SAVE_S = 60.0  # seconds that the end of a loop waits for its last save
LATE_S = 3.0  # seconds after which hosts at their end release the others from the barrier before a call
EARLY_S = 2.0  # seconds for hosts to compare the calls of a stopped loop, and as many to write its last state
SETTLES_S = 1.0  # seconds for the previous save


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


class Provenance:
    """Source call and flat output of arrays, in weak references."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, int, int]] = {}
        self._prune_at = 1024

    def add(self, call: int, outs: Mapping[int, Any]) -> None:
        """Record the outputs of a call.

        Args:
            call: Number of the call.
            outs: Arrays by position among the flat outputs.
        """
        for o, x in outs.items():
            self._known[id(x)] = weakref.ref(x), call, o
        if len(self._known) > self._prune_at:
            self._known = {k: known for k, known in self._known.items() if known[0]() is not None}
            self._prune_at = max(1024, 2 * len(self._known))

    def source_of(self, x: Any) -> tuple[int, int] | None:
        """Return the number of the call and the position among its outputs; None for an array from no call."""
        # Python reuses the id of a dead object.
        known = self._known.get(id(x))
        return known[1:] if known is not None and known[0]() is x else None


class LoopEnd:
    """End of one loop. All hosts create an instance before the loop; a single process always agrees with itself."""

    def __init__(self) -> None:
        self._verdict = Agreement() if is_multiprocess() else None

    def hosts_agree(self, calls: int, settles: Callable[[float], bool], early: BaseException | None) -> bool:
        """Return whether all hosts end after the same number of calls.

        Args:
            calls: Number of calls made by this host.
            settles: Waits up to the given number of seconds for the previous save, and returns whether it is written.
            early: Exception that stopped the loop; None for a regular end.
        """
        if self._verdict is None:
            return True
        if early is None:
            # A host without more calls waits for the others, and they may wait for its next call: after LATE_S it
            # releases them.
            self._verdict.submit(str(calls))
            agreed = self._verdict.wait_for_result(str(calls), LATE_S)
            if agreed is None:
                _release_hosts(None)
                agreed = self._verdict.wait_for_result(str(calls), LONG_S)
            return bool(agreed)
        # Without barriers before calls, a stopped loop waits for no other host. A stopped cell has to end soon, so a
        # long save is not waited for, either.
        if not MultihostCalls.release_hooks:
            return False
        _release_hosts(early)
        outcome = str(calls) if settles(SETTLES_S) else "still saving"
        return self._verdict.agreed(outcome, EARLY_S) and outcome == str(calls)

    def limit_save(self, seconds: float) -> float:
        """Return the time limit in seconds for the last save of a stopped loop."""
        return seconds if self._verdict is None else min(seconds, EARLY_S)


def _release_hosts(error: BaseException | None) -> None:
    """Release the hosts waiting at a barrier before their next call; `error` is None at the end of the loop."""
    for leave in MultihostCalls.release_hooks:
        leave(error)


class _LastCall(NamedTuple):
    """The last call.

    Attributes:
        entry: Program of the call.
        outs: State and large outputs, by position among the flat outputs.
        state_inputs: Weak references to the state that went into the call, by flat input.
    """

    entry: CompiledStep
    outs: dict[int, Any]
    state_inputs: dict[int, weakref.ref]


class CheckpointLoop:
    """Checkpointing of one loop, over one step or several steps made of the same function.

    Calls are counted from the beginning of the loop. A resumed loop doesn't compute the calls up to the checkpoint; the
    checkpoint says what they return. A save takes the state that goes into the next call, so calls with dropped state
    (an evaluation, a warm-up) make no difference. As a context manager, saves once more at the end.

    Args:
        folder: Folder of checkpoints of one loop; created if missing.
        every: Interval between saves: number of calls, or a time such as "10m".
        keep: Number of checkpoints to keep, the newest; None for all.
        resume: Resume from the newest checkpoint in the folder.
        say: Shows a line to the user.

    Raises:
        ShardError: The folder has checkpoints, and `resume` is false.
    """

    def __init__(
        self,
        folder: "str | PathLike[str]",
        every: "int | str" = 100,
        keep: int | None = 3,
        resume: bool = False,
        say: Callable[[str], None] = print,
    ):
        self.every, self._written_every = SaveInterval.parse(every), str(every)
        self._store, self._say = CheckpointStore(fspath(folder), keep, loop=True), say
        self.calls = 0  # calls of the loop, including skipped ones
        self.computed_last = True  # False if the last call was skipped
        self.resumed: int | None = None  # checkpoint that the loop resumed from
        self._outputs: dict[CompiledStep, OutputRoles] = {}
        self._log, self._provenance = StepLog(), Provenance()
        with UndoUnlessFinished(self._store.revert) as work:
            self._replay = self._open(resume)
            work.mark_finished()
        self._feed_position = LoopFeedPosition(None if self._replay is None else self._replay.feed_positions, say)
        self._last: _LastCall | None = None
        self._saved_calls, self._schedule, self._ending = 0, SaveSchedule(self.every), LoopEnd()
        self._saves: deque[Save] = deque(maxlen=MAX_SAVES)
        self._count, self._seconds = 0, 0.0
        self._copy: int | None = None
        self._closed = False
        self._turn = threading.RLock()  # several threads may call the step
        self._has_warned = False  # about several threads with states of their own
        self._thread: int | None = None  # identifier of the thread that made the last call

    @property
    def skipping(self) -> bool:
        """Return whether the next call is skipped, as a previous run has computed it."""
        return self._replay is not None and self.calls < self._replay.step

    @property
    def summary(self) -> Checkpoints:
        """Checkpoints saved so far, for the report."""
        return Checkpoints(
            self._store.name,
            self._written_every,
            tuple(self._saves),
            self._count,
            self._seconds,
            self.resumed,
            self._copy,
        )

    def run(self, entry: CompiledStep, inputs: tuple[Any, ...], feed: PositionedFeed | None = None) -> Any:
        """Return the results of a call: computed, or replayed from the checkpoint.

        Args:
            entry: Program of the call.
            inputs: Arranged inputs.
            feed: Feed of the loop's batches; None without one.

        Raises:
            TypeError: The program doesn't accept the inputs; raised before anything is done.
            ShardError: A save failed.
        """
        with AcquiredLock(self._turn):
            return self._run(entry, inputs, feed)

    def _run(self, entry: CompiledStep, inputs: tuple[Any, ...], feed: PositionedFeed | None) -> Any:
        """Run one call under the lock: skip, resume, or save if due and compute."""
        if self._closed:
            return entry.run(inputs)
        if self.skipping:
            return self._skip(entry, inputs, feed)
        if self._replay is not None:
            if not entry.accepts(inputs):
                raise TypeError("not this program's inputs")
            inputs, self._replay = self._replay.first_inputs(entry, self._roles_of(entry), inputs), None
        # The schedule is asked first: every host must ask it, also a host whose inputs don't fit.
        elif self._schedule.is_due(self.calls) and entry.accepts(inputs):
            self._save_inputs(entry, inputs)
        outputs = self._roles_of(entry)
        leaves = entry.leaves(inputs)
        goes_on = self._continues_last_call(outputs, leaves)
        self._check_thread(goes_on)
        # Strong references would keep the previous state on the devices.
        state_inputs = {i: weakref.ref(leaves[i]) for i in outputs.state_names if isinstance(leaves[i], jax.Array)}
        del leaves
        # The loop may have dropped the last results: they must not take device memory during this call.
        if not goes_on:
            self._last = None
        outs = entry.run(inputs)
        flat = flat_outputs(entry, outs)
        self.calls, self.computed_last = self.calls + 1, True
        self._feed_position.record_computed(feed)
        self._log.add(outputs.small, [flat[small.output] for small in outputs.small])
        state_and_large = {o: flat[o] for o in (*outputs.state_inputs, *outputs.large_names)}
        self._provenance.add(self.calls, state_and_large)
        self._last = _LastCall(entry, state_and_large, state_inputs)
        return outs

    def save(self) -> bool:
        """Save the outputs of the last call; return False if there is nothing new, or the arrays no longer exist."""
        last = self._last
        if last is None or self.calls == self._saved_calls or _any_deleted(last.outs.values()):
            return False
        # Until it is written, the previous save keeps inputs of the last call alive that the loop has dropped.
        self._store.wait()
        outputs, tree, sources = self._roles_of(last.entry), dict[str, Any](), []
        for o, x in last.outs.items():
            name = outputs.state_names[outputs.state_inputs[o]] if o in outputs.state_inputs else outputs.large_names[o]
            tree[name] = x
            sources.append([name, self.calls, o])
        state_inputs = {i: ref() for i, ref in last.state_inputs.items()}
        # Arrays released on one host may still exist on another, and all hosts save the same arrays.
        if _is_true_on_all_hosts(
            not _any_deleted(state_inputs.values())
            and all(self._provenance.source_of(x) for x in state_inputs.values())
        ):
            # The loop still holds the inputs of the last call: it may have dropped the outputs and go on from these.
            for i, x in state_inputs.items():
                tree[PREVIOUS_PREFIX + outputs.state_names[i]] = x
                sources.append([PREVIOUS_PREFIX + outputs.state_names[i], *(self._provenance.source_of(x) or ())])
        self._write(last.entry, tree, sources, exact=False)
        return True

    def end(self, *, early: BaseException | None = None, limit_s: float = LAST_SAVE_S) -> str:
        """End the loop: save once more, wait for the save, and follow no later call.

        Several hosts save no more if they made different numbers of calls.

        Args:
            early: Exception that stopped the loop; None for a regular end.
            limit_s: Longest time in seconds to wait for the save.

        Returns:
            A line with the outcome; empty if the loop had ended before.

        Raises:
            ShardError: The save failed.
        """
        if self._closed:
            return ""
        self._closed = True
        try:
            return self._finish(early, limit_s)
        except BaseException:
            self.release()
            raise
        finally:
            self._last = self._replay = None  # both hold arrays

    def release(self) -> None:
        """Save no more, and release the folder for other runs once the current save is written."""
        self._closed = True
        self._store.revert()

    def _finish(self, early: BaseException | None, limit_s: float) -> str:
        """Save at the end of the loop and return a line with the outcome."""
        if self._replay is None and not self.calls:
            self._store.close()
            return "--checkpoint: no step was called, so that nothing was saved: it follows the loop of its own cell"
        if self.skipping and self._replay is not None:
            self._store.close()
            return (
                f"--resume: the loop ended after {self.calls} calls, before step {self._replay.step} of the checkpoint "
                f"in {self._store.name}: nothing was computed"
            )
        if self._replay is not None:
            self._store.close()
            return f"--resume: all {self.calls} steps were done before; the state is that of the checkpoint"
        agree = self._ending.hosts_agree(self.calls, self._store.is_idle_within, early)
        if agree:
            self.save()
        if not self._store.close_within(limit_s if early is None else self._ending.limit_save(limit_s)):
            return f"step {self._saved_calls} was not written within {limit_s:g} s to {self._store.name}"
        latest = self._store.latest()
        if latest is None:
            return f"nothing was saved in {self._store.name}"
        if not agree and early is None:
            return (
                f"hosts made different numbers of calls, so that their last state was not saved: the newest checkpoint "
                f"in {self._store.name} is {latest}"
            )
        return f"saved at step {latest} in {self._store.name}"

    def __enter__(self) -> "CheckpointLoop":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._say(self.end(early=error))

    def _open(self, resume: bool) -> ReplayedCalls | None:
        """Prepare the folder; return the calls to replay, or None to start from the beginning."""
        store = self._store
        # Before the first call: an unusable folder must not cost a run. Host 0 alone creates and locks the folder; an
        # error is raised on all hosts.
        run_on_first_host(lambda: str(_lock_folder(store, resume)))
        store.check_shared()
        if not resume:
            return None
        if torn := store.remove_interrupted():
            self._say(f"saves that were cut off were removed from {store.name}: {', '.join(torn)}")
        latest = store.step_on_all_hosts()
        if latest is None:
            start = f"no checkpoint in {store.name} yet: the loop starts from its beginning"
            self._say(f"--resume: {start}.{nearest}" if (nearest := store.name_suggestion) else f"--resume: {start}")
            return None
        return ReplayedCalls(store, latest)

    def _roles_of(self, entry: CompiledStep) -> OutputRoles:
        """Return the roles of a program's outputs, computed once."""
        if entry not in self._outputs:
            self._outputs[entry] = output_roles(entry)
        return self._outputs[entry]

    def _skip(self, entry: CompiledStep, inputs: tuple[Any, ...], feed: PositionedFeed | None) -> Any:
        """Return the replayed results of a skipped call."""
        back = self._replay
        assert back is not None
        if not entry.accepts(inputs):
            raise TypeError("not this program's inputs")
        outs, from_checkpoint = back.replay(self.calls + 1, entry, self._roles_of(entry), inputs)
        self._feed_position.record_skipped(feed, self.calls + 1 == back.step)
        self.calls, self.computed_last = self.calls + 1, False
        self._provenance.add(self.calls, from_checkpoint)
        if self.calls == back.step:
            self.resumed = self._saved_calls = back.step
            self._log = back.log
            self._schedule.restart(self.calls)
            if back.zeroed:
                self._say(
                    f"--resume: {', '.join(sorted(back.zeroed))}: too large to be kept for every step; the steps "
                    "before gave zeros for it"
                )
        return outs

    def _check_thread(self, goes_on: bool) -> None:
        """Warn once if another thread calls the step with a state that the last call did not return."""
        thread, before = threading.get_ident(), self._thread
        self._thread = thread
        if before not in (None, thread) and not goes_on and not self._has_warned:
            self._has_warned = True
            self._say(
                "--checkpoint: several threads call the step with states of their own, and a checkpoint has that of "
                "the call before which it is made: give each a step and a folder of its own"
            )

    def _continues_last_call(self, outputs: OutputRoles, leaves: Sequence[Any]) -> bool:
        """Return whether a call takes the state returned by the last call."""
        first = next(iter(outputs.state_names), None)
        origin = None if first is None else self._provenance.source_of(leaves[first])
        return origin is not None and origin[0] == self.calls

    def _save_inputs(self, entry: CompiledStep, inputs: tuple[Any, ...]) -> None:
        """Save the state that goes into a call, unless some of the arrays no longer exist."""
        outputs, leaves, sources, tree = self._roles_of(entry), entry.leaves(inputs), [], {}
        if _any_deleted(leaves[i] for i in outputs.state_names):
            return
        avals = entry.traced.closed.in_avals[len(entry.consts) :]
        # A Python number is saved in the dtype in which the program traced it.
        for i, name in outputs.state_names.items():
            x = leaves[i]
            tree[name] = x if isinstance(x, jax.Array) else np.asarray(x, avals[i].dtype)
            if (origin := self._provenance.source_of(x)) is not None:
                sources.append([name, *origin])
        last = self._last
        if last is not None and not _any_deleted(last.outs.values()):
            large = self._roles_of(last.entry).large_names
            for o, name in large.items():
                tree[name] = last.outs[o]
                sources.append([name, self.calls, o])
        self._write(entry, tree, sources, exact=True)

    def _write(self, entry: CompiledStep, tree: dict[str, Any], sources: list[Any], *, exact: bool) -> None:
        """Write a checkpoint and record its size and time.

        Args:
            entry: Program of the call.
            tree: Arrays by name.
            sources: Name, number of the call and output for each array with a known source.
            exact: Whether the arrays are the inputs of the next call, and not outputs of the last.
        """
        start = time.perf_counter()
        # Values that the program itself carries from call to call are state, too.
        carried = entry.rewritten.carried if entry.rewritten is not None else 0
        tree |= {f"{CARRIED_PREFIX}{k:03}": x for k, x in enumerate(entry.consts[:carried])}
        self._log.flush()
        kinds, arrays = self._log.to_data()
        positions = self._feed_position.positions()
        saved = CheckpointInfo(
            self.calls,
            entry.plan.strategy,
            mesh_text(entry.plan.mesh.shape),
            describe_leaves(tree),
            data=None if positions is None else positions[0]["kind"],
        )
        extra = {"kinds": kinds, "returned": arrays, "sources": sources, "exact": exact, "places": positions}
        # The time of a save is not step time.
        entry.clock.discard_interval()
        self._store.save(self.calls, tree, saved, extra)
        seconds = time.perf_counter() - start
        self._saved_calls = self.calls
        self._schedule.restart(self.calls)
        self._saves.append(Save(self.calls, seconds, total_bytes(list(tree.values()))))
        self._count, self._seconds = self._count + 1, self._seconds + seconds
        outputs = self._roles_of(entry)
        # Donated state can't be reused while it is written: the next call allocates a copy.
        donated_names = {outputs.state_names[i] for i in entry.donated if i in outputs.state_names}
        self._copy = _largest_device_bytes([tree[name] for name in donated_names if name in tree])


def _lock_folder(store: CheckpointStore, resume: bool) -> int:
    """Create and lock the folder; return the number of checkpoints in it.

    Raises ShardError if this is impossible, or if the folder has checkpoints of a previous run and `resume` is false.
    """
    make_folder(store.folder)
    steps = store.steps()
    if steps and not resume:
        those = f"checkpoint {steps[0]}" if len(steps) == 1 else f"checkpoints up to {steps[-1]}"
        raise ShardError(
            f"--checkpoint {store.name}: it has {those} of a run before: --resume goes on from there, "
            "another folder begins anew"
        )
    store.lock()
    return len(steps)


def _is_true_on_all_hosts(here: bool) -> bool:
    """Return whether `here` is true on all hosts: arrays released on one host may still exist on another."""
    return here if not is_multiprocess() else all(gather_texts("x" if here else ""))


def _any_deleted(arrays: Any) -> bool:
    """Return whether any array no longer exists, or was donated to a call."""
    return any(x is None or (isinstance(x, jax.Array) and x.is_deleted()) for x in arrays)


def _largest_device_bytes(arrays: Sequence[Any]) -> int:
    """Return the bytes of arrays on the device with the most."""
    bytes_by_device: dict[Any, int] = {}
    for x in arrays:
        for shard in x.addressable_shards if isinstance(x, jax.Array) else ():
            bytes_by_device[shard.device] = bytes_by_device.get(shard.device, 0) + int(shard.data.nbytes)
    return max(bytes_by_device.values(), default=0)
