"""Compiled programs of a step, one for each kind of call.

`StepLoops` has the loops over the step: each loop has a clock for every program called. `StepSignature` tells whether
two programs run the same step.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from ..analysis.program_reading import program_reading
from ..compilation.compiled_step import CompiledStep
from ..compilation.loop_clock import LoopClock
from ..compilation.pipelined_step import compile_pipelined, outline_call
from ..compilation.planned_call import PlannedCall, plan_call
from ..compilation.recompilation import Recompilation, describe_recompilation
from ..compilation.single_program import compile_step
from ..compilation.tracing import TraceCache
from ..config.options import GradientOptions
from ..config.request import Request
from ..errors import ShardError
from ..pipeline.outline import Outline
from ..pipeline.shardings import RankMeshes
from ..program.flatten_call import FlatCall, flatten_call
from ..program.gc_pause import interruptible
from ..program.roles import OPTIMIZER, PARAMS
from ..program.unwrap import NUMBERS, UnwrappedStep
from ..targets import LIMIT_S
from .multihost_calls import MultihostCalls, multihost_calls_of

MAX_VARIANTS = 16  # programs kept that differ only in Python values


class LoopTiming(NamedTuple):
    """Timing of a loop for one program.

    Attributes:
        clock: Clock of the program.
        calls: Calls of all programs in the loop.
    """

    clock: LoopClock
    calls: int


class StepLoops:
    """The current and the last loop over a step's programs. A single call after a loop is no loop.

    Args:
        entries: Programs of the step; the mapping is read, and may grow.
    """

    def __init__(self, entries: Mapping[Hashable, CompiledStep]):
        self._entries = entries
        self._last: dict[CompiledStep, LoopClock] = {}

    def start_loop(self) -> None:
        """Start another loop, with new clocks."""
        now = self._now()
        if self._is_loop(now):
            self._last = now
        # A copy of the values, as another thread may add a program meanwhile.
        for entry in list(self._entries.values()):
            # The very first run of a program is not measured.
            entry.clock = LoopClock(first_waited=1 if entry.calls else 2)

    @property
    def has_calls(self) -> bool:
        """Return whether the current loop has called the step."""
        return bool(self._now())

    def settle(self) -> None:
        """Wait for the last call, to measure the loop so far to its end."""
        for entry in list(self._entries.values()):
            entry.clock.settle()

    def discard_intervals(self) -> None:
        """Discard the open intervals of all clocks, as other work begins."""
        for entry in list(self._entries.values()):
            entry.clock.discard_interval()

    def restart(self) -> None:
        """Forget all calls so far."""
        self._last = {}
        for entry in self._entries.values():
            entry.calls, entry.clock = 0, LoopClock(first_waited=2)

    def timing_of(self, entry: CompiledStep) -> LoopTiming:
        """Return the timing for a report of `entry`: of the current loop, or of the last if there is none yet."""
        now = self._now()
        shown = now if self._is_loop(now) or entry not in self._last else self._last
        return LoopTiming(shown.get(entry, entry.clock), _calls(shown))

    def _now(self) -> dict[CompiledStep, LoopClock]:
        """Return the clocks of the current loop, for programs called in it."""
        return {entry: entry.clock for entry in list(self._entries.values()) if entry.clock.calls}

    def _is_loop(self, now: dict[CompiledStep, LoopClock]) -> bool:
        """Return whether the current loop counts as a loop: two calls, or as many as the last loop had if fewer."""
        return bool(now) and _calls(now) >= min(2, _calls(self._last))


def _calls(loop: dict[CompiledStep, LoopClock]) -> int:
    """Return the calls of all programs in a loop."""
    return sum(clock.calls for clock in loop.values())


class StepPrograms:
    """Programs of one step under one request, and how they are compiled.

    Each program is traced, planned and compiled at the first call of its kind (types, shapes, modes).

    Args:
        step: Unwrapped train step.
        request: Strategy, mesh and options.
    """

    def __init__(self, step: UnwrappedStep, request: Request):
        self.step = step
        self.request = request
        self.name = request.name or step.name
        self.compile_limit = LIMIT_S  # seconds, for a target's own compiler
        self.compiling_context: Callable[[], AbstractContextManager[None]] = nullcontext  # around the compiler
        self.traces: TraceCache | None = None  # shared with other steps of the same function
        self.progress: Callable[[str], None] | None = None
        self.on_planned: Callable[[CompiledStep], None] | None = None  # called during a long compile
        self.allow_plan_only = False  # report the plan alone if a target's compiler fails
        self.read_on_compile = False  # read each program's text before it first runs, as a report will follow
        self.entries: dict[Hashable, CompiledStep] = {}
        self.current: CompiledStep | None = None  # of the last kind of call
        self.loops = StepLoops(self.entries)
        self.recompilations: deque[Recompilation] = deque(maxlen=100)  # in the middle of loops
        self._keys_by_loose_key: dict[Hashable, list[Hashable]] = {}  # programs that differ only in Python values
        self._last_key: Any = None  # of the last call on the slow path
        self._forgotten = 0  # calls of programs that were dropped
        self._stay_python = False  # whether the step needs its numbers as Python values
        self._never_inputs = frozenset[str]()  # names of values that the step reads and needs as Python values
        self.hosts = multihost_calls_of(request)
        self._lock = threading.RLock()

    @property
    def calls(self) -> int:
        """Number of calls so far, with all kinds of arguments together."""
        return self._forgotten + sum(entry.calls for entry in list(self.entries.values()))

    def restart(self) -> None:
        """Forget the calls so far and the shared traces. Compiled programs stay."""
        self.traces = None
        self.loops.restart()
        self.recompilations.clear()

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CompiledStep:
        """Trace, plan and compile for these arguments without running, and make the program the current one."""
        _, self.current = self.find(args, kwargs)
        return self.current

    def prepare_for(self, call: FlatCall) -> CompiledStep:
        """Compile for the call of another program of the same function, given as its `call_shapes`."""
        with self._lock:
            self.current = self.entries[call.key] = self._compile_own(call)
        return self.current

    def planned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlannedCall:
        """Trace and plan for these arguments, and compile nothing.

        For a pipeline, the whole step is planned on the mesh of one rank.

        Args:
            args: Arrays or `jax.ShapeDtypeStruct`, as for a call.
            kwargs: The same, by name.

        Raises:
            ShardError: The step can't be planned.
        """
        return self.planned_for(self.flatten_for_plan(args, kwargs))

    def planned_for(self, call: FlatCall, request: Request | None = None) -> PlannedCall:
        """Plan the call of another program of the same function.

        Args:
            call: The other program's `call_shapes`.
            request: Another request; None for the step's own.

        Raises:
            ShardError: The step can't be planned.
        """
        request = request or self.request
        if request.pipeline is not None:
            request = replace(
                request.on_rank(RankMeshes(self.request.mesh, request.stage_axis).sub_meshes[0]), pipeline=None
            )
        return plan_call(call, request, say=self.say, traces=self.traces)

    def outlined(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[PlannedCall, Outline]:
        """Return the plan for these arguments, and the possible pieces for stages of a pipeline; make no stage.

        Raises:
            ShardError: The step can't be made into a pipeline.
        """
        call = self.flatten_for_plan(args, kwargs)
        planned = self.planned_for(call)
        return planned, outline_call(call, self.request, planned.facts)

    def otherwise(self, options: GradientOptions) -> CompiledStep:
        """Compile the program of the last kind of call with other gradient options, without running it.

        Args:
            options: The other options.

        Raises:
            ShardError: The options are impossible for the step, or there was no call.
        """
        if self.current is None or self.current.call_shapes is None:
            raise ShardError(f"{self.name} has no call with options to compile otherwise")
        with self._lock:
            return self._compile(
                self.current.call_shapes, replace(self.request, gradients=options), allow_plan_only=False
            )

    def find(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], hosts: MultihostCalls | None = None
    ) -> tuple[FlatCall, CompiledStep]:
        """Return a call, flattened, and its program, compiled if new.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            hosts: Hosts that make the call; they meet before the program is made.
        """
        with self._lock:
            flat_call = self._flatten(self.step, args, kwargs)
            # Hosts compare the call before they compile: different programs would wait for each other's collectives.
            if hosts is not None:
                known = self.entries.get(flat_call.key)
                hosts.meet_for_call(self.name, known, partial(hosts.describe_new_call, flat_call))
            read = self._changed_reads(flat_call) if flat_call.key not in self.entries else frozenset[str]()
            if flat_call.key not in self.entries and flat_call.loose_key in self._keys_by_loose_key:
                flat_call = self._with_traced_values(flat_call, read, args, kwargs)
            if flat_call.key not in self.entries:
                before, looping = self.current, self.loops.has_calls
                entry = self.entries[flat_call.key] = self._compile_on_hosts(flat_call)
                known = flat_call if self.hosts is None else self.hosts.with_program_key(flat_call)
                self._keys_by_loose_key.setdefault(known.loose_key, []).append(known.key)
                self._evict_oldest(known.loose_key)
                if before is not None and looping:
                    read = read or flat_call.changed_reads(self._last_key)
                    self.recompilations.append(describe_recompilation(before, entry, self.calls + 1, read))
            self._last_key = flat_call.key
            return flat_call, self.entries[flat_call.key]

    def _changed_reads(self, flat_call: FlatCall) -> frozenset[str]:
        """Return the names of values read besides the arguments that have changed since the last call of this loose
        key."""
        before = self._keys_by_loose_key.get(flat_call.loose_key)
        return flat_call.changed_reads(before[-1]) if before else frozenset()

    def _evict_oldest(self, loose: Hashable) -> None:
        """Drop the oldest programs of a loose key, as a step may have other Python values in each call."""
        keys = self._keys_by_loose_key[loose]
        while len(keys) > MAX_VARIANTS:
            entry = self.entries.pop(keys.pop(0), None)
            self._forgotten += 0 if entry is None else entry.calls

    def _flatten(self, step: UnwrappedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlatCall:
        """Return a call flattened as made on this host, under the key of its program."""
        flat_call = flatten_call(step, args, kwargs)
        return flat_call if self.hosts is None else self.hosts.with_program_key(flat_call)

    def flatten_for_plan(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], step: UnwrappedStep | None = None
    ) -> FlatCall:
        """Return a call flattened for planning, with global shapes on several hosts.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            step: The step with other traced numbers; None for the step as called.
        """
        flat_call = flatten_call(step or self.step, args, kwargs)
        return flat_call if self.hosts is None else self.hosts.with_global_shapes(flat_call, self.say)

    def _with_traced_values(
        self, flat_call: FlatCall, read: frozenset[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> FlatCall:
        """Compile one program for all calls that differ in numbers (an epoch, a rate) or in values read besides the
        arguments.

        Numbers of a plain function, and values read besides the arguments, become traced inputs. If the function needs
        them as Python values, tracing fails; the call then stays as it is, and so do these numbers or names in later
        calls.
        """
        numbers = self.step.numbers
        if not self._stay_python and not read:
            numbers = NUMBERS - {bool}
        traced_names = self.step.input_names | (read - self._never_inputs if self._can_trace_reads else frozenset())
        if (numbers, traced_names) == (self.step.numbers, self.step.input_names):
            return flat_call
        step = replace(self.step, numbers=numbers, input_names=traced_names)
        retried = self._flatten(step, args, kwargs)
        try:
            if retried.key not in self.entries:
                self.entries[retried.key] = self._compile_on_hosts(retried)
        # What a function does with a tracer in place of a Python value may fail in any of these ways.
        except (ShardError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError):
            self._stay_python |= not read
            self._never_inputs |= read
            return flat_call
        self.step = step
        return retried

    @property
    def _can_trace_reads(self) -> bool:
        """Return whether programs can have inputs besides the arguments: on one host, for a whole-array step without a
        pipeline."""
        return self.hosts is None and not self.request.per_device and self.request.pipeline is None

    def _compile_on_hosts(self, flat_call: FlatCall) -> CompiledStep:
        """Return the program of a call as made on this host."""
        if self.hosts is None:
            return self._compile_own(flat_call)
        return self.hosts.compile_call(self._compile_own, self.say, flat_call)

    def _compile_own(self, flat_call: FlatCall) -> CompiledStep:
        """Compile under the step's own request, and read the program's text at once if asked to."""
        entry = self._compile(flat_call, self.request, allow_plan_only=self.allow_plan_only, on_planned=self.on_planned)
        if self.read_on_compile:
            self.say("reading the compiled program")
            program_reading(entry)
        return entry

    def _compile(
        self,
        flat_call: FlatCall,
        request: Request,
        *,
        allow_plan_only: bool,
        on_planned: Callable[[CompiledStep], None] | None = None,
    ) -> CompiledStep:
        """Compile a call, as a pipeline or as one program."""
        pipelined = request.pipeline is not None
        compile_call = compile_pipelined if pipelined else partial(compile_step, allow_plan_only=allow_plan_only)
        # Python drops an interrupt that comes while JAX's function for garbage collections runs.
        with interruptible():
            return compile_call(
                flat_call,
                request,
                say=self.say,
                compile_limit=self.compile_limit,
                beside=self.compiling_context,
                traces=self.traces,
                on_planned=on_planned,
            )

    def say(self, doing: str) -> None:
        """Report current work to `progress`; "" ends the wait."""
        if self.progress is not None:
            self.progress(doing)


@dataclass(frozen=True)
class StepSignature:
    """Signature of a step.

    Attributes:
        state: Path, shape and dtype of each parameter and optimizer array.
        examples: Batch size; None without a batch.
    """

    state: frozenset[tuple[str, tuple[int, ...], Any]]
    examples: int | None

    def batch_size_of(self, later: CompiledStep) -> int | None:
        """Return the batch size if `later` runs the same step, with a model of the same parameters; else None."""
        return self.examples if self.state and self.state == step_signature(later).state else None


def step_signature(entry: CompiledStep) -> StepSignature:
    """Return the signature of a program's calls."""
    state = ((x.path, x.shape, x.dtype) for x in entry.plan.leaves if x.role in (PARAMS, OPTIMIZER))
    return StepSignature(frozenset(state), entry.examples)
