"""`ShardedStep`: called as the user's step, runs it under a plan."""

import functools
import threading
import types
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax._src.core import trace_state_clean  # jax.core has no public name for it
from jax.sharding import Mesh

from ..errors import ShardError
from ..program.garbage import interruptible
from ..program.mapped import PerDevice
from ..program.peel import Peeled, nnx_calls, peel
from ..program.unwrap import NUMBERS, strip
from ..request import GradientOptions, Request
from ..targets import LIMIT_S, target_of
from .calls import FlatCall, GraphCall, WholeCall
from .donation import Ours
from .entry import Entry, build_entry
from .gathered import gathered
from .loops import Loops
from .planned import Planned, planned
from .ran import Ran, ran
from .recompiled import Recompiled, recompiled
from .recorded import PROFILED, profiled
from .together import on_hosts
from .tracing import Traces
from .watch import Watch

if TYPE_CHECKING:
    from os import PathLike

    from ..analysis.profiled import Profile
    from ..live import Row
    from ..pipeline.outline import Outline
    from ..report import Alternative, Check, Ended, Measured, Report

RECENT = 4  # kinds of calls (shapes, modes) that take the short way side by side


class ShardedStep:
    """A train step that runs sharded over `mesh` under `strategy`, with the plain step's numbers; `shard` makes it.

    Call it as the step. A plain function's Python numbers stay Python and a jitted one's are traced, as
    without it; arrays that the step closes over are placed once, when it is traced, as `jax.jit` does.
    `__wrapped__` is the plain step.

    >>> import jaxshard_magic
    >>> import jax.numpy as jnp
    >>> halved = jaxshard_magic.shard(lambda weights: weights / 2, "fsdp", mesh="cpu:8 data=8")
    >>> half = halved(jnp.ones((64, 64)))
    >>> halved.calls, halved.report().leaves[0].spec
    (1, ('data', None))
    """

    is_sharded_step = True  # `strip` takes it for a wrapper like others

    def __init__(self, step: Callable[..., Any], request: Request):
        while isinstance(step, ShardedStep):
            step = step.__wrapped__
        self._step = strip(step)
        functools.update_wrapper(self, step, updated=())
        self.__wrapped__ = step
        self.request = request
        self.name = request.name or self._step.name
        self.compile_limit = LIMIT_S  # seconds, for hardware that is not attached
        self.beside: Callable[[], AbstractContextManager[None]] = nullcontext  # while a compiler works
        self.reference: Callable[[Peeled], Any] | None = None  # of a check; else the plain step
        self.traces: Traces | None = None  # that other steps of the same function share
        self.progress: Callable[[str], None] | None = None
        self.watch: Watch | None = None  # follows its calls
        self.watched: Watch | None = None  # followed them last
        self.traced_inside = False  # was it called while another function was traced, as plain JAX?
        self.before: Ran | None = None  # an earlier run of a step of this name
        self.read_ahead = False  # read each program before it first runs: a report follows its last call
        self.checked: Check | None = None
        self.alternatives: tuple[Alternative, ...] = ()  # other options, as compiled
        self._ended: tuple[int, Ended] | None = None
        self.tried: dict[str, int] = {}  # bytes on a device with a fix of the report, as compiled
        self.cell: tuple[str, str] | None = None  # the cell that was run: its file for Python, its text
        self.path: str | None = None  # what the cell calls the step
        self.number: int | None = None  # of its reports in a notebook
        self._entries: dict[Hashable, Entry] = {}
        self._fast: dict[Entry, Any] = {}
        self._current: Entry | None = None
        self.loops = Loops(self._entries)
        self.recompiled: deque[Recompiled] = deque(maxlen=100)  # in its loops, after their first calls
        self._kept: tuple[Entry, tuple[Any, ...]] | None = None
        self._profiled: tuple[Entry, Profile] | None = None
        self._recent: list[Any] = []
        self.check, self.keep_arguments = request.check, False
        self._loose: set[Hashable] = set()
        self._stay_python = False
        self._ours = Ours()
        self._hosts = on_hosts(request)
        self._lock = threading.RLock()

    @property
    def strategy(self) -> str:
        """The strategy as it was written, such as "fsdp+tp"."""
        return self.request.strategy

    @property
    def mesh(self) -> Mesh:
        """The mesh that it runs on."""
        return self.request.mesh

    def __repr__(self) -> str:
        axes = " ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        return f"<ShardedStep {self.name}: {self.strategy} on {axes}>"

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        return self if obj is None else types.MethodType(self, obj)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step: what it takes is placed where the plan has it, what it gives back lies there.

        Inside another function's trace it is the plain step. Raises `ShardError`, before anything runs, for what can't
        be sharded; and what the step raises.
        """
        if not trace_state_clean():
            self.traced_inside = True
            return self.__wrapped__(*args, **kwargs)
        watch = self.watch
        if watch is not None and watch.rows:
            watch.begin()
        self.meet()
        for fast in self._recent:
            try:
                inputs, objects = fast.gather(args, kwargs)
            except (TypeError, ValueError):
                continue  # what is wrong in itself is raised again below
            if fast.entry is not self._current:
                self.loops.breaks()
            try:
                outs = fast.entry.run(inputs)
            except (TypeError, ValueError):
                if fast.entry.takes(inputs):  # raised by the step; it must not run twice
                    raise
                continue
            self._current = fast.entry
            if watch is not None:
                watch.called(fast.entry, outs)
            return fast.finish(objects, inputs, outs)
        return self._call_anew(args, kwargs)

    @property
    def calls(self) -> int:
        """How often it was called, with all kinds of arguments together."""
        return sum(entry.calls for entry in list(self._entries.values()))

    @property
    def ended(self) -> "Ended | None":
        """How the cell ended that called it last, where that was before its end."""
        return self._ended[1] if self._ended is not None and self._ended[0] == self.calls else None

    @ended.setter
    def ended(self, value: "Ended") -> None:
        self._ended = self.calls, value

    @property
    def ran(self) -> Ran | None:
        """What the kind of call took that was made most often; None before the first."""
        entries = [entry for entry in self._entries.values() if entry.calls]
        return ran(max(entries, key=lambda entry: entry.calls).plan) if entries else None

    @property
    def check(self) -> bool:
        """Compare the next call against the plain step; the outcome is `checked`."""
        return self._check

    @check.setter
    def check(self, value: bool) -> None:
        self._check, self._recent = value, []
        if value:
            self.checked = None

    @property
    def keep_arguments(self) -> bool:
        """Keep the last call's arguments alive, for `repeat`."""
        return self._keep

    @keep_arguments.setter
    def keep_arguments(self, value: bool) -> None:
        self._keep, self._kept, self._recent = value, None, []

    def prepare(self, *args: Any, **kwargs: Any) -> Entry:
        """Trace, plan and compile for these arguments (arrays or `jax.ShapeDtypeStruct`) without running; `report()`
        then tells of that program. It takes a compile, and nothing of the arguments' size. Raises `ShardError` for
        what can't be sharded."""
        _, self._current = self._entry(args, kwargs)
        return self._current

    def prepare_for(self, call: Peeled) -> Entry:
        """As `prepare`, for the call of another program of the same function: its `call_of`."""
        with self._lock:
            self._current = self._entries[call.key] = self._build(call)
        return self._current

    def planned(self, *args: Any, **kwargs: Any) -> Planned:
        """Trace and plan for these arguments (arrays or `jax.ShapeDtypeStruct`), and compile nothing; of a pipeline the
        whole step on the mesh of one of its ranks. Raises `ShardError` for what can't be planned."""
        return self.planned_for(self._peeled(args, kwargs))

    def planned_for(self, call: Peeled, request: Request | None = None) -> Planned:
        """As `planned`, for the call of another program of the same function (its `call_of`), or another request."""
        request = request or self.request
        if request.pipeline is not None:
            from ..pipeline.homes import Ranks

            request = replace(request.on_rank(Ranks(self.mesh, request.stage_axis).each[0]), pipeline=None)
        return planned(call, request, say=self.say, traces=self.traces)

    def outlined(self, *args: Any, **kwargs: Any) -> "tuple[Planned, Outline]":
        """As `planned`, of a pipeline; and what its stages can be made of, none of which is made. Raises `ShardError`
        for a step that no pipeline can be made of."""
        from .pipelined import outline

        call = self._peeled(args, kwargs)
        found = self.planned_for(call)
        return found, outline(call, self.request, found.facts)

    def repeat(self, n: int) -> None:
        """Call the step on the last call's arguments until `n` more calls are timed; nothing is updated.

        Needs `keep_arguments` set before that call: arguments are not kept alive otherwise.
        """
        entry, inputs = self.inputs(None)
        consts, taken = list(entry.consts), entry.clock.copies
        entry.clock.settle()
        enough = len(taken) + n
        while len(taken) < enough:  # calls of a pipeline that are watched action by action don't count
            entry.timed(entry.copies(inputs), taken)
        entry.consts[:] = consts

    def profile(
        self,
        n: int = PROFILED,
        *,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        trace: "str | PathLike[str] | None" = None,
    ) -> "Measured":
        """Call the step `n` times more under jax's profiler, on copies; nothing is updated. Reports of it then tell
        where the time went.

        Args:
            n: so many calls are read; one more is made before them.
            args: the step's arguments. By default the last call's, which needs `keep_arguments` set before that call.
            kwargs: its arguments by name.
            trace: a folder in which to keep the files that xprof, TensorBoard and Perfetto read; of several hosts each
                has a folder in it, named by its number.

        On several hosts all of them call this. Each reads its own recording, and has what all have read.

        Raises ShardError where there are no arguments, where a trace is running already, where the
        folder can't be written, and where another host fails.
        """
        given = None if args is None and kwargs is None else (tuple(args or ()), dict(kwargs or {}))
        return profiled(self, n, given, trace)

    @property
    def last_profile(self) -> "Profile | None":
        """What was read of recorded calls of the last kind."""
        return self._profiled[1] if self._profiled and self._profiled[0] is self._current else None

    @property
    def has_inputs(self) -> bool:
        """Whether the arguments of the last call were kept."""
        return self._kept is not None

    def take_profile(self, entry: Entry, profile: "Profile") -> None:
        """Take what was recorded of a program, which is that of the last kind of call from now on."""
        self._profiled, self._current = (entry, profile), entry

    def meet(self) -> None:
        """Where the step runs on several hosts that meet before each call: meet, before another one that is made."""
        if self._hosts is not None:
            self._hosts.enter()

    def inputs(
        self, given: tuple[tuple[Any, ...], Mapping[str, Any]] | None
    ) -> tuple[Entry, tuple[Any, ...]]:
        """The program of a call, and its inputs as it takes them; None: those of the last call that were kept. Raises
        ShardError where none were."""
        if given is None and self._kept is not None:
            return self._kept
        if given is None:
            raise ShardError(
                f"the arguments of {self.name} were not kept: set keep_arguments before it is called, or give them, "
                "as in step.profile(args=(state, batch))"
            )
        peeled, entry = self._entry(*given)
        if self._hosts is not None:
            peeled = self._hosts.joined(entry, peeled)
        return entry, entry.arrange(entry.place(entry.with_rows(peeled.leaves), Ours()))

    def restart(self) -> None:
        """Forget the calls so far, and what served a trial: reports count from here. What is compiled stays."""
        self.check, self.reference, self.traces, self.keep_arguments = False, None, None, False
        self._profiled = None
        self.loops.restart()
        self.recompiled.clear()

    def gather(self, *state: Any, to: Any = None) -> Any:
        """What the step gave back with every array whole in one place, for evaluation or a checkpoint: on `to`, a
        device or a Sharding, else on the mesh's first device. NNX objects are changed in place.

        One tree comes back as it is, several as a tuple. Raises `ShardError` without any.
        """
        return gathered(state, self.mesh.devices.flat[0] if to is None else to)

    def report(self) -> "Report":
        """Everything known of the step's last kind of call, as a `Report`. The first time it reads the compiled
        program, which takes up to a second or so. Raises `ShardError` before the first call."""
        if self._current is None:
            raise ShardError(
                f"{self.name} has not run yet; call it, or prepare(...) it, before asking for its report"
            )
        from ..analysis.summary import summarize

        self.loops.settle()
        if self.watched is not None:
            self.watched.settle()
        return summarize(self)

    def on_metrics(self, write: "Callable[[Row], object] | None" = None) -> None:
        """Keep what the step returns and how its loop goes from here on, as `report().metrics`; a `%%shard` cell does
        so by itself.

        Args:
            write: called with a `Row` for each call whose numbers were read: its `step`, from 1 on, the `time` in
                seconds and the `values` by name. It is called by later calls of the step, in their thread, and what it
                raises they raise, before they run.

        >>> import jaxshard_magic
        >>> import jax.numpy as jnp
        >>> step = jaxshard_magic.shard(lambda w: (w / 2, {"norm": jnp.sum(w)}), "fsdp", mesh="cpu:8 data=8")
        >>> rows = []
        >>> step.on_metrics(rows.append)
        >>> half, norm = step(jnp.ones(64))
        >>> step.report().metrics["norm"].last, [(row.step, row.values) for row in rows]
        ((64.0,), [(1, {'norm': 64.0})])
        """
        if self.watch is None:
            Watch().follow(self)
        if write is not None and self.watch is not None:
            self.watch.writers.append(write)

    @property
    def entry(self) -> Entry | None:
        """The program of the last kind of call."""
        return self._current

    def otherwise(self, options: GradientOptions) -> Entry:
        """The program of the last kind of call, compiled with other options for its gradients; it is not run.

        Raises `ShardError` where those can't be had.
        """
        if self._current is None or self._current.call_of is None:
            raise ShardError(f"{self.name} has no call with options to compile otherwise")
        with self._lock:
            return self._built(self._current.call_of, replace(self.request, gradients=options))

    def _call_anew(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (target := target_of(self.mesh)) is not None:
            raise ShardError(
                f"{target.name} is not attached, so {self._step.name} can't run on it: .prepare(...) with the same "
                "arguments, or their shapes, compiles it, and .report() tells the rest"
            )
        peeled, entry = self._entry(args, kwargs)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in peeled.leaves):
            raise ShardError(
                f"{self._step.name} was given a shape where it takes an array: .prepare(...) takes shapes, and so does "
                "--dry-run"
            )
        if entry is not self._current:
            self.loops.breaks()
        if self._hosts is not None:
            peeled = self._hosts.joined(entry, peeled)
        plain = self._plain(peeled)
        placed = entry.place(entry.with_rows(peeled.leaves), self._ours)
        inputs = entry.arrange(placed)
        if entry.calls == 0:
            from ..analysis.memory import peaks

            entry.peaks = peaks(self.mesh)
            self.say("first run")
        if self.keep_arguments:
            self._kept = entry, entry.copies(inputs)
        outs = entry.run(inputs)
        if self._hosts is not None:
            self._hosts.called(entry, inputs, outs)
        self._current = entry
        if self.watch is not None:
            self.watch.called(entry, outs)
        outs = entry.real_rows(outs) if entry.added else outs
        result = self._finish(entry, peeled, placed, outs)
        if plain is not None:
            self.say("checking against the plain step")
            self.loops.breaks()
            by_hand = entry.rewritten.by_hand() if entry.rewritten is not None else None
            flat = jax.tree.leaves(outs) if entry.whole else outs
            if by_hand is not None and isinstance(entry.traced, PerDevice):
                by_hand = entry.traced.like(by_hand)
            self.checked = plain.against(
                entry.traced,
                flat,
                by_hand,
                None if entry.added else self.request.gradients.narrow,
                None if entry.added or self.request.pipeline is not None else entry.plan,
            )
        self.say("")  # nothing more to wait for
        self._remember(entry, peeled)
        return result

    def _plain(self, peeled: Peeled) -> Any:
        if not self.check or self.checked is not None:
            return None
        from ..analysis.check import Plain

        return (self.reference or Plain)(peeled)

    def _finish(self, entry: Entry, peeled: Peeled, placed: list[Any], outs: Any) -> Any:
        if entry.whole:
            return outs
        if entry.donated:
            self._ours.add(outs)
        update, nodes = entry.result.update, peeled.nodes
        if update is None:
            return entry.result.build(outs)
        if nodes is None:
            return entry.result.build(outs, nnx_calls().give_back(update, placed, outs))
        nnx_calls().settle(nodes, peeled.leaves, placed)
        return entry.result.build(outs, nnx_calls().write_back(nodes, update, placed, outs))

    def _remember(self, entry: Entry, peeled: Peeled) -> None:
        """The next call of this kind takes the short way."""
        fast = self._fast.get(entry)
        if fast is None:
            fast = _fast(entry, peeled, self._ours)
            if fast is not None and self._hosts is not None:
                fast = self._hosts.later(fast, self._ours)
            self._fast[entry] = fast
        if fast is not None and not fast.watch(peeled):
            fast = None
        if fast is not None and not self.keep_arguments and not entry.added:
            self._recent = [fast, *(f for f in self._recent if f is not fast)][:RECENT]

    def _entry(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Peeled, Entry]:
        with self._lock:
            peeled = peel(self._step, args, kwargs)
            if peeled.key not in self._entries and peeled.loose in self._loose and not self._stay_python:
                peeled = self._with_numbers_traced(peeled, args, kwargs)
            if peeled.key not in self._entries:
                build = (
                    self._build if self._hosts is None else partial(self._hosts.built, self._build, self.say)
                )
                before, looping = self._current, self.loops.running
                entry = self._entries[peeled.key] = build(peeled)
                self._loose.add(peeled.loose)
                if before is not None and looping:
                    self.recompiled.append(recompiled(before, entry, self.calls + 1))
            return peeled, self._entries[peeled.key]

    def _peeled(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Peeled:
        """One call as it is planned."""
        peeled = peel(self._step, args, kwargs)
        return peeled if self._hosts is None else self._hosts.of_all(peeled, self.say)

    def _with_numbers_traced(
        self, peeled: Peeled, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Peeled:
        """A plain function's numbers change from call to call (an epoch, a rate): make one program for all of
        them, unless the function needs them as Python numbers."""
        step = replace(self._step, numbers=NUMBERS - {bool})
        again = peel(step, args, kwargs)
        try:
            self._entries[again.key] = self._build(again)
        except (ShardError, TypeError, ValueError, LookupError, AttributeError, AssertionError):
            self._stay_python = True
            return peeled
        self._step = step
        return again

    def _build(self, peeled: Peeled) -> Entry:
        entry = self._built(peeled, self.request)
        if self.read_ahead:
            from ..analysis.summary import reading_of

            self.say("reading the compiled program")
            reading_of(entry)
        return entry

    def _built(self, peeled: Peeled, request: Request) -> Entry:
        how: dict[str, Any] = {"say": self.say, "compile_limit": self.compile_limit, "beside": self.beside}
        how["traces"] = self.traces
        with interruptible():
            if request.pipeline is not None:
                from .pipelined import build_pipelined

                return build_pipelined(peeled, request, **how)
            return build_entry(peeled, request, **how)

    def say(self, doing: str) -> None:
        """Tell `progress` what is being done; "" ends the wait."""
        if self.progress is not None:
            self.progress(doing)


def _fast(entry: Entry, peeled: Peeled, ours: Ours) -> Any:
    if entry.whole:
        return WholeCall(entry, peeled)
    if entry.result.update is None:
        return FlatCall(entry, peeled, ours)
    return GraphCall(entry, peeled, ours) if peeled.nodes is not None and GraphCall.possible(entry) else None
