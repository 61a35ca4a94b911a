"""`Programs`: what was compiled of a step, one program for each kind of call."""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from ..config.options import GradientOptions
from ..config.request import Request
from ..errors import ShardError
from ..program.garbage import interruptible
from ..program.peel import Peeled, peel
from ..program.unwrap import NUMBERS, Step
from ..targets import LIMIT_S
from .building import build_entry
from .entry import Entry
from .loops import Loops
from .planned import Planned, planned
from .recompiled import Recompiled, recompiled
from .together import OnHosts, on_hosts
from .tracing import Traces

if TYPE_CHECKING:
    from ..pipeline.outline import Outline


MOST_ALIKE = 16  # programs that are kept of those that differ in Python values alone


class Programs:
    """The programs of one step under one request. Each is traced, planned and compiled at the first call of its kind
    (types, shapes, modes)."""

    def __init__(self, step: Step, request: Request):
        self._step = step
        self.request = request
        self.name = request.name or self._step.name
        self.compile_limit = LIMIT_S  # seconds, for hardware that is not attached
        self.beside: Callable[[], AbstractContextManager[None]] = nullcontext  # while a compiler works
        self.traces: Traces | None = None  # that other steps of the same function share
        self.progress: Callable[[str], None] | None = None
        self.early: Callable[[Entry], None] | None = (
            None  # is given the plan of a step that compiles for long
        )
        self.plan_stands = False  # where a compiler fails, reports tell of the plan
        self.read_ahead = False  # read each program before it first runs: a report follows its last call
        self._entries: dict[Hashable, Entry] = {}
        self._current: Entry | None = None
        self.loops = Loops(self._entries)
        self.recompiled: deque[Recompiled] = deque(maxlen=100)  # in its loops, after their first calls
        self._loose: dict[
            Hashable, list[Hashable]
        ] = {}  # the keys of programs that differ in Python values alone
        self._last_key: Any = None  # of the last call that was taken apart
        self._forgotten = 0  # calls of programs that are not kept
        self._stay_python = False  # the step's numbers
        self._never_inputs = frozenset[str]()  # names of what the step reads and needs as Python values
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

    @property
    def calls(self) -> int:
        """How often it was called, with all kinds of arguments together."""
        return self._forgotten + sum(entry.calls for entry in list(self._entries.values()))

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
            return self._built(
                self._current.call_of, replace(self.request, gradients=options), plan_stands=False
            )

    def _entry(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], meeting: OnHosts | None = None
    ) -> tuple[Peeled, Entry]:
        """A call taken apart, and its program. `meeting`: the hosts that make the call, before the program is made."""
        with self._lock:
            peeled = self._taken_apart(self._step, args, kwargs)
            if meeting is not None:
                known = self._entries.get(peeled.key)
                meeting.enter(self.name, known, partial(meeting.described_anew, peeled))
            read = self._read_otherwise(peeled) if peeled.key not in self._entries else frozenset[str]()
            if peeled.key not in self._entries and peeled.loose in self._loose:
                peeled = self._with_more_traced(peeled, read, args, kwargs)
            if peeled.key not in self._entries:
                before, looping = self._current, self.loops.running
                entry = self._entries[peeled.key] = self._new(peeled)
                known = peeled if self._hosts is None else self._hosts.known(peeled)
                self._loose.setdefault(known.loose, []).append(known.key)
                self._forget_old(known.loose)
                if before is not None and looping:
                    read = read or peeled.read_otherwise(self._last_key)
                    self.recompiled.append(recompiled(before, entry, self.calls + 1, read))
            self._last_key = peeled.key
            return peeled, self._entries[peeled.key]

    def _read_otherwise(self, peeled: Peeled) -> frozenset[str]:
        """The names of what the step reads beside its arguments and was something else in the last call like this."""
        before = self._loose.get(peeled.loose)
        return peeled.read_otherwise(before[-1]) if before else frozenset()

    def _forget_old(self, loose: Hashable) -> None:
        """Of programs that differ in Python values alone keep the newest: a step may have other ones in each call."""
        keys = self._loose[loose]
        while len(keys) > MOST_ALIKE:
            entry = self._entries.pop(keys.pop(0), None)
            self._forgotten += 0 if entry is None else entry.calls

    def _taken_apart(self, step: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Peeled:
        """One call as it is made here, under the key of its program."""
        peeled = peel(step, args, kwargs)
        return peeled if self._hosts is None else self._hosts.known(peeled)

    def _peeled(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Peeled:
        """One call as it is planned."""
        peeled = peel(self._step, args, kwargs)
        return peeled if self._hosts is None else self._hosts.of_all(peeled, self.say)

    def _with_more_traced(
        self, peeled: Peeled, read: frozenset[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Peeled:
        """A plain function's numbers change from call to call (an epoch, a rate), and so do numbers and arrays that it
        reads beside its arguments: make one program for all, unless the function needs them as Python values."""
        numbers = self._step.numbers
        if not self._stay_python and not read:
            numbers = NUMBERS - {bool}
        taken = self._step.taken | (read - self._never_inputs if self._takes_what_is_read else frozenset())
        if (numbers, taken) == (self._step.numbers, self._step.taken):
            return peeled
        step = replace(self._step, numbers=numbers, taken=taken)
        again = self._taken_apart(step, args, kwargs)
        try:
            if again.key not in self._entries:
                self._entries[again.key] = self._new(again)
        except (
            ShardError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            AssertionError,
            ArithmeticError,
        ):
            self._stay_python |= not read
            self._never_inputs |= read
            return peeled
        self._step = step
        return again

    @property
    def _takes_what_is_read(self) -> bool:
        """Whether its programs can have inputs beside the step's arguments: those of one host, of the whole step."""
        return self._hosts is None and not self.request.per_device and self.request.pipeline is None

    def _new(self, peeled: Peeled) -> Entry:
        """The program of a call as it is made here."""
        if self._hosts is None:
            return self._build(peeled)
        return self._hosts.built(self._build, self.say, peeled)

    def _build(self, peeled: Peeled) -> Entry:
        entry = self._built(peeled, self.request, plan_stands=self.plan_stands, early=self.early)
        if self.read_ahead:
            from ..analysis.reading import reading_of

            self.say("reading the compiled program")
            reading_of(entry)
        return entry

    def _built(
        self,
        peeled: Peeled,
        request: Request,
        *,
        plan_stands: bool,
        early: Callable[[Entry], None] | None = None,
    ) -> Entry:
        how: dict[str, Any] = {"say": self.say, "compile_limit": self.compile_limit, "beside": self.beside}
        how["traces"] = self.traces
        with interruptible():
            if request.pipeline is not None:
                from .pipelined import build_pipelined

                return build_pipelined(peeled, request, early=early, **how)
            return build_entry(peeled, request, plan_stands=plan_stands, early=early, **how)

    def say(self, doing: str) -> None:
        """Tell `progress` what is being done; "" ends the wait."""
        if self.progress is not None:
            self.progress(doing)
