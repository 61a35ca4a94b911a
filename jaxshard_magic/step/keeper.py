"""`Keeper`: saves the state of a loop between the calls of its step, and lets a loop go on where it was."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from ..checkpoints import Saved, Store
from ..checkpoints.agreed import on_first
from ..checkpoints.folder import made
from ..coordination import gathered, is_there
from ..errors import ShardError
from ..report.checkpoints import MOST, Checkpoints, Save
from ..report.parts import mesh_text
from ..temporary import Held, Unfinished
from .ending import Ending
from .in_data import InData
from .interval import Due, Interval
from .journal import Journal
from .origins import Origins
from .outputs import BEFORE, CARRIED, Outputs, flat_outs, outputs_of
from .resumed import Resumed, leaves_of, nbytes

if TYPE_CHECKING:
    from ..feeding import Feed
    from .entry import Entry

LAST_S = 60.0  # seconds that the save of a loop that was stopped may take before its cell ends


class _Last(NamedTuple):
    """The last call: its program, what it gave that is no small number, and the state that went into it."""

    entry: "Entry"
    outs: dict[int, Any]
    took: dict[int, weakref.ref]


class Keeper:
    """Follows the calls of one loop, of one step or of several that are made of the same function.

    The calls are counted from the loop's beginning. Where a checkpoint is gone on from, the calls up to its own are not
    computed: `Resumed` says what they give. A save takes the state that goes into the call before which it is made, so
    that calls whose state the loop drops (an evaluation, one to warm up) make no difference.

    As a context it saves once more at its end. Raises ShardError for a folder that has checkpoints, without `resume`.
    """

    def __init__(
        self,
        folder: "str | PathLike[str]",
        every: "int | str" = 100,
        keep: int | None = 3,
        resume: bool = False,
        say: Callable[[str], None] = print,
    ):
        self.every, self._written_every = Interval.of(every), str(every)
        self._store, self._say = Store(fspath(folder), keep, loop=True), say
        self.calls = 0  # of the loop, those that were not computed with them
        self.ran = True  # was the last call computed?
        self.resumed: int | None = None  # the step that the loop went on from
        self._outputs: dict[Entry, Outputs] = {}
        self._journal, self._origins = Journal(), Origins()
        with Unfinished(self._store.end) as work:
            self._back = self._found(resume)
            work.finished()
        self._in_data = InData(None if self._back is None else self._back.places, say)
        self._last: _Last | None = None
        self._saved_at, self._due, self._ending = 0, Due(self.every), Ending()
        self._saves: deque[Save] = deque(maxlen=MOST)
        self._count, self._seconds = 0, 0.0
        self._copy: int | None = None
        self._closed = False
        self._turn = threading.RLock()  # of the threads that call the step
        self._several = False  # are there several, with states of their own?
        self._thread: int | None = None  # that called it last

    @property
    def skipping(self) -> bool:
        """Is the next call one that is not computed?"""
        return self._back is not None and self.calls < self._back.step

    @property
    def told(self) -> Checkpoints:
        """What there is to report."""
        return Checkpoints(
            self._store.name,
            self._written_every,
            tuple(self._saves),
            self._count,
            self._seconds,
            self.resumed,
            self._copy,
        )

    def run(self, entry: "Entry", inputs: tuple[Any, ...], feed: "Feed | None" = None) -> Any:
        """A call's results: computed, or those of the run that is gone on with. `feed`: what gives the loop its
        batches. Raises TypeError for inputs that the
        program does not take, before anything is done; ShardError for a save that fails."""
        with Held(self._turn):
            return self._run(entry, inputs, feed)

    def _run(self, entry: "Entry", inputs: tuple[Any, ...], feed: "Feed | None") -> Any:
        if self._closed:
            return entry.run(inputs)
        if self.skipping:
            return self._skip(entry, inputs, feed)
        if self._back is not None:
            if not entry.takes(inputs):
                raise TypeError("not this program's inputs")
            inputs, self._back = self._back.go_on(entry, self._of(entry), inputs), None
        elif self._due.now(self.calls) and entry.takes(inputs):
            self._save_before(entry, inputs)
        outputs = self._of(entry)
        leaves = entry.leaves(inputs)
        goes_on = self._goes_on(outputs, leaves)
        self._look_at_thread(goes_on)
        took = {i: weakref.ref(leaves[i]) for i in outputs.names if isinstance(leaves[i], jax.Array)}
        del leaves
        if not goes_on:
            self._last = None  # keeps nothing alive that the loop dropped
        outs = entry.run(inputs)
        flat = flat_outs(entry, outs)
        self.calls, self.ran = self.calls + 1, True
        self._in_data.called(feed)
        self._journal.add(outputs.small, [flat[small.output] for small in outputs.small])
        given = {o: flat[o] for o in (*outputs.state, *outputs.large)}
        self._origins.add(self.calls, given)
        self._last = _Last(entry, given, took)
        return outs

    def save(self) -> bool:
        """Save what the last call gave; False where there is nothing new, or it is there no more."""
        last = self._last
        if last is None or self.calls == self._saved_at or _gone(last.outs.values()):
            return False
        self._store.wait()  # a save that is written holds what went into the last call
        outputs, tree, sources = self._of(last.entry), dict[str, Any](), []
        for o, x in last.outs.items():
            name = outputs.names[outputs.state[o]] if o in outputs.state else outputs.large[o]
            tree[name] = x
            sources.append([name, self.calls, o])
        took = {i: ref() for i, ref in last.took.items()}
        if _on_all(not _gone(took.values()) and all(self._origins.of(x) for x in took.values())):
            # the loop still holds what went into the call: it may have dropped what came out of it
            for i, x in took.items():
                tree[BEFORE + outputs.names[i]] = x
                sources.append([BEFORE + outputs.names[i], *(self._origins.of(x) or ())])
        self._write(last.entry, tree, sources, exact=False)
        return True

    def end(self, *, early: BaseException | None = None, limit_s: float = LAST_S) -> str:
        """The loop is over: save once more, wait until that is written, `limit_s` seconds at most, and follow no call
        any more. What came of it as a line. `early`: what stopped it. Several hosts save no more where they made
        different numbers of calls. Raises ShardError where the save fails."""
        if self._closed:
            return ""
        self._closed = True
        try:
            return self._ended(early, limit_s)
        except BaseException:
            self.let_go()
            raise
        finally:
            self._last = self._back = None  # which hold arrays

    def let_go(self) -> None:
        """Save no more, and let others save into the folder once what is being written is."""
        self._closed = True
        self._store.end()

    def _ended(self, early: BaseException | None, limit_s: float) -> str:
        if self._back is None and not self.calls:
            self._store.close()
            return "--checkpoint: no step was called, so that nothing was saved: it follows the loop of its own cell"
        if self.skipping and self._back is not None:
            self._store.close()
            return (
                f"--resume: the loop ended after {self.calls} calls, before step {self._back.step} of the checkpoint "
                f"in {self._store.name}: nothing was computed"
            )
        if self._back is not None:
            self._store.close()
            return f"--resume: all {self.calls} steps were done before; the state is that of the checkpoint"
        alike = self._ending.is_alike(self.calls, self._store.settles, early)
        if alike:
            self.save()
        if not self._store.closes(limit_s if early is None else self._ending.limited(limit_s)):
            return f"step {self._saved_at} was not written within {limit_s:g} s to {self._store.name}"
        latest = self._store.latest()
        if latest is None:
            return f"nothing was saved in {self._store.name}"
        if not alike and early is None:
            return (
                f"hosts made different numbers of calls, so that their last state was not saved: the newest checkpoint "
                f"in {self._store.name} is {latest}"
            )
        return f"saved at step {latest} in {self._store.name}"

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._say(self.end(early=error))

    def _found(self, resume: bool) -> Resumed | None:
        store = self._store
        on_first(lambda: str(_ready(store, resume)))  # what can't be saved into is told before anything runs
        store.check_shared()
        if not resume:
            return None
        if torn := store.torn():
            self._say(f"saves that were cut off were removed from {store.name}: {', '.join(torn)}")
        latest = store.agreed()
        if latest is None:
            start = f"no checkpoint in {store.name} yet: the loop starts from its beginning"
            self._say(f"--resume: {start}.{near}" if (near := store.nearest) else f"--resume: {start}")
            return None
        return Resumed(store, latest)

    def _of(self, entry: "Entry") -> Outputs:
        if entry not in self._outputs:
            self._outputs[entry] = outputs_of(entry)
        return self._outputs[entry]

    def _skip(self, entry: "Entry", inputs: tuple[Any, ...], feed: "Feed | None") -> Any:
        back = self._back
        assert back is not None
        if not entry.takes(inputs):
            raise TypeError("not this program's inputs")
        outs, given = back.skip(self.calls + 1, entry, self._of(entry), inputs)
        self._in_data.skipped(feed, self.calls + 1 == back.step)
        self.calls, self.ran = self.calls + 1, False
        self._origins.add(self.calls, given)
        if self.calls == back.step:
            self.resumed = self._saved_at = back.step
            self._journal = back.journal
            self._due.begin(self.calls)
            if back.left_out:
                self._say(
                    f"--resume: {', '.join(sorted(back.left_out))}: too large to be kept for every step; the steps "
                    "before gave zeros for it"
                )
        return outs

    def _look_at_thread(self, goes_on: bool) -> None:
        """Say so, once, where another thread calls the step than before, with a state that this call did not give."""
        thread, before = threading.get_ident(), self._thread
        self._thread = thread
        if before not in (None, thread) and not goes_on and not self._several:
            self._several = True
            self._say(
                "--checkpoint: several threads call the step with states of their own, and a checkpoint has that of "
                "the call before which it is made: give each a step and a folder of its own"
            )

    def _goes_on(self, outputs: Outputs, leaves: Sequence[Any]) -> bool:
        """Does a call take what the one before it gave?"""
        first = next(iter(outputs.names), None)
        origin = None if first is None else self._origins.of(leaves[first])
        return origin is not None and origin[0] == self.calls

    def _save_before(self, entry: "Entry", inputs: tuple[Any, ...]) -> None:
        outputs, leaves, sources, tree = self._of(entry), entry.leaves(inputs), [], {}
        if _gone(leaves[i] for i in outputs.names):
            return
        avals = entry.traced.closed.in_avals[len(entry.consts) :]
        for i, name in outputs.names.items():
            x = leaves[i]
            tree[name] = x if isinstance(x, jax.Array) else np.asarray(x, avals[i].dtype)
            if (origin := self._origins.of(x)) is not None:
                sources.append([name, *origin])
        last = self._last
        if last is not None and not _gone(last.outs.values()):
            large = self._of(last.entry).large
            for o, name in large.items():
                tree[name] = last.outs[o]
                sources.append([name, self.calls, o])
        self._write(entry, tree, sources, exact=True)

    def _write(self, entry: "Entry", tree: dict[str, Any], sources: list[Any], *, exact: bool) -> None:
        start = time.perf_counter()
        carried = entry.rewritten.carried if entry.rewritten is not None else 0
        tree |= {f"{CARRIED}{k:03}": x for k, x in enumerate(entry.consts[:carried])}
        self._journal.read()
        kinds, arrays = self._journal.data()
        places = self._in_data.places()
        saved = Saved(
            self.calls,
            entry.plan.strategy,
            mesh_text(entry.plan.mesh.shape),
            leaves_of(tree),
            data=None if places is None else places[0]["kind"],
        )
        extra = {"kinds": kinds, "returned": arrays, "sources": sources, "exact": exact, "places": places}
        entry.clock.breaks()
        self._store.save(self.calls, tree, saved, extra)
        seconds = time.perf_counter() - start
        self._saved_at = self.calls
        self._due.begin(self.calls)
        self._saves.append(Save(self.calls, seconds, nbytes(list(tree.values()))))
        self._count, self._seconds = self._count + 1, self._seconds + seconds
        outputs = self._of(entry)
        taken = {outputs.names[i] for i in entry.donated if i in outputs.names}
        self._copy = _on_fullest([tree[name] for name in taken if name in tree])


def _ready(store: Store, resume: bool) -> int:
    """The folder made, and held. Raises ShardError for one that can't be, and where a run before has saved, without
    `resume`."""
    made(store.folder)
    steps = store.steps()
    if steps and not resume:
        those = f"checkpoint {steps[0]}" if len(steps) == 1 else f"checkpoints up to {steps[-1]}"
        raise ShardError(
            f"--checkpoint {store.name}: it has {those} of a run before: --resume goes on from there, "
            "another folder begins anew"
        )
    store.hold()
    return len(steps)


def _on_all(here: bool) -> bool:
    """Whether it is so on all hosts, as far as there are some: arrays that one has let go of another may still have."""
    return here if not is_there() else all(gathered("x" if here else ""))


def _gone(arrays: Any) -> bool:
    """Is one of these not there any more, or taken over by a call?"""
    return any(x is None or (isinstance(x, jax.Array) and x.is_deleted()) for x in arrays)


def _on_fullest(arrays: Sequence[Any]) -> int:
    """Bytes that arrays take on the device that has most of them."""
    held: dict[Any, int] = {}
    for x in arrays:
        for shard in x.addressable_shards if isinstance(x, jax.Array) else ():
            held[shard.device] = held.get(shard.device, 0) + int(shard.data.nbytes)
    return max(held.values(), default=0)
