"""`ShardedStep`: a callable with the signature of the user's step, run under a plan."""

import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import jax
from jax._src.core import trace_state_clean  # jax.core has no public name for it
from jax.sharding import Mesh

from ..analysis.check import PlainStep, compare_call
from ..analysis.profile_analysis import Profile
from ..analysis.summary import StepRun, summarize
from ..compilation.compiled_step import CompiledStep
from ..compilation.donation import OwnOutputs, raise_if_deleted
from ..compilation.expert_rows import count_expert_rows
from ..compilation.pipelined_step import uncompiled_pipelined
from ..compilation.planned_call import PlannedCall
from ..compilation.single_program import uncompiled_step
from ..config.request import Request
from ..errors import ShardError
from ..introspect import copy_metadata
from ..live import MetricsRow
from ..program.explicit_axes import without_explicit_mesh
from ..program.flatten_call import FlatCall, nnx_objects, node_predicate
from ..program.jax_settings import check_jit_enabled
from ..program.source_lines import EnclosingTrace, enclosing_trace, strip_package_frames
from ..program.unwrap import unwrap_step
from ..report import Alternative, Check, EarlyEnd, Measured, Report
from ..targets import target_of
from ..targets.device_memory import peak_bytes
from ..temporary import Restored, list_elements
from .copies import deepcopy_step, gather_state, reduce_step
from .fast_calls import fast_call
from .feed_waits import FeedWaits, match_feed, waiting_matchers
from .jax_stages import JaxStages
from .loop_monitor import LoopMonitor
from .profiler_recording import DEFAULT_CALLS, profile_step
from .step_programs import StepPrograms, StepSignature, step_signature

if TYPE_CHECKING:
    from .checkpoint_loop import CheckpointLoop

RECENT = 4  # kinds of calls (shapes, modes) with a fast path at the same time


class ShardedStep:
    """Train step sharded over `mesh` under `strategy`, with the numbers of the plain step; made by `shard`.

    Call it like the step. Python numbers of a plain function stay Python numbers, and those of a jitted function are
    traced, as without sharding. Arrays in the step's closure are placed once, at tracing, as by `jax.jit`.
    `__wrapped__` is the plain step.

    `programs` finds the program of a call, or compiles one; each kind of call has its own. `loops` measures the calls.

    Args:
        step: The plain step: a function, a jitted function or a method.
        request: Strategy, mesh and options.

    >>> import jaxshard_magic
    >>> import jax.numpy as jnp
    >>> halved = jaxshard_magic.shard(lambda weights: weights / 2, "fsdp", mesh="cpu:8 data=8")
    >>> half = halved(jnp.ones((64, 64)))
    >>> halved.calls, halved.report().leaves[0].spec
    (1, ('data', None))
    """

    is_sharded_step = True  # marks the class for modules that must not import it

    def __init__(self, step: Callable[..., Any], request: Request):
        while isinstance(step, ShardedStep):
            step = step.__wrapped__
        copy_metadata(self, step)
        self.__wrapped__ = step
        self.programs = StepPrograms(unwrap_step(step), request)
        self.name = self.programs.name
        self.loops = self.programs.loops
        self._hosts = self.programs.hosts  # None on a single host
        self.watch: LoopMonitor | None = None  # monitor of the next call; None without one
        self._last_watch: LoopMonitor | None = None  # the newest monitor
        self._loop_watch: LoopMonitor | None = None  # monitor of the loop before the newest
        self._profiled: tuple[CompiledStep, Profile] | None = None
        self.reference: Callable[[FlatCall, Mesh], Any] | None = None  # checked against; None for the plain step
        self.checkpoint_loop: CheckpointLoop | None = None  # saves the state between calls, and skips calls
        self.last_checkpoint_loop: CheckpointLoop | None = None  # the newest one, also after its end
        self.count_expert_rows = False  # before the first call of each kind
        self.traced_within: EnclosingTrace | None = None  # last trace of other code that called the step
        self.rejit: Callable[[Any], Any] | None = None  # makes a sharded step of a jit of this step
        self.feed_waits: FeedWaits | None = None  # waiting times for the batches of a feed
        self.feed_ref: weakref.ref[Any] | None = None  # the feed
        self.previous_run: StepSignature | None = None  # of an earlier step with this name
        self.checked: Check | None = None
        self.alternatives: tuple[Alternative, ...] = ()  # other options, as compiled
        self._ended: tuple[int, EarlyEnd] | None = None
        self.bytes_with_fix: dict[str, int] = {}  # bytes on a device by suggested fix, as compiled
        self.cell: tuple[str, str] | None = None  # notebook cell of the step: its file name for Python, its text
        self.path: str | None = None  # name of the step in its cell
        self.calls_before = 0  # calls of the run that the state was restored from
        self.report_number: int | None = None  # of the reports in a notebook
        self._check, self._keep = request.check, False
        self._last_call: tuple[CompiledStep, tuple[Any, ...]] | None = None  # with copies of its donated inputs
        self._fast_calls: list[Any] = []  # of the newest kinds of calls; they keep no arguments
        self._fast_by_program: dict[CompiledStep, Any] = {}
        self._own_outputs = OwnOutputs()

    def __repr__(self) -> str:
        axes = " ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        return f"<ShardedStep {self.name}: {self.strategy} on {axes}>"

    def __copy__(self) -> "ShardedStep":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedStep":
        return deepcopy_step(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_step(self)

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        return self if obj is None else types.MethodType(self, obj)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step: arguments are placed according to the plan, and results stay there.

        Inside another function's trace the plain step runs.

        Raises:
            ShardError: The step can't be sharded; raised before anything runs. Exceptions of the step pass through.
        """
        try:
            try:
                return self._call(args, kwargs)
            except (RuntimeError, ValueError) as error:
                raise_if_deleted(self.programs.step, args, kwargs, error, self._own_outputs)
                raise
        except Exception as error:
            strip_package_frames(error)
            raise  # `raise error` would add this line to the traceback

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call on the fast path, or on the slow path if no recent kind of call matches."""
        if not trace_state_clean():
            self.traced_within = enclosing_trace(sys._getframe())
            return self.__wrapped__(*args, **kwargs)
        watch = self.watch
        if watch is not None and watch.pending_rows:
            watch.write_rows()
        if self._hosts is not None:
            self._hosts.begin_call()
        # Feeds that look for their arrays see the flat inputs on the slow path only.
        for fast in () if waiting_matchers else self._fast_calls:
            try:
                inputs, objects = fast.gather(args, kwargs)
            except (TypeError, ValueError):
                continue  # another kind of call; the slow path raises any other error again
            if fast.entry is not self.programs.current:
                self.loops.discard_intervals()
            try:
                outs = self._run(fast.entry, inputs)
            except (TypeError, ValueError):
                # A compiled program raises these for inputs of another kind. For inputs that it accepts, the error is
                # the step's own, and the step must not run twice.
                if fast.entry.accepts(inputs):
                    raise
                continue
            self.programs.current = fast.entry
            if watch is not None:
                watch.record_call(fast.entry, outs, self.checkpoint_loop is None or self.checkpoint_loop.computed_last)
            return fast.finish(objects, inputs, outs)
        return self._slow_call(args, kwargs)

    @property
    def request(self) -> Request:
        """Strategy, mesh and options."""
        return self.programs.request

    @property
    def strategy(self) -> str:
        """Strategy as written, such as "fsdp+tp"."""
        return self.request.strategy

    @property
    def mesh(self) -> Mesh:
        """Mesh of the step."""
        return self.request.mesh

    @property
    def calls(self) -> int:
        """Number of calls so far, with all kinds of arguments together."""
        return self.programs.calls

    @property
    def entry(self) -> CompiledStep | None:
        """Program of the last kind of call; None before the first."""
        return self.programs.current

    def say(self, doing: str) -> None:
        """Report current work to `programs.progress`; "" ends the wait."""
        self.programs.say(doing)

    def prepare(self, *args: Any, **kwargs: Any) -> CompiledStep:
        """Trace, plan and compile for these arguments without running; `report()` then describes the compiled program.

        Takes as long as a compile, and no memory of the arguments' size.

        Args:
            *args: Arrays or `jax.ShapeDtypeStruct`, as for a call.
            **kwargs: The same, by name.

        Raises:
            ShardError: The step can't be sharded.
        """
        return self.programs.prepare(args, kwargs)

    def planned(self, *args: Any, **kwargs: Any) -> PlannedCall:
        """Trace and plan for these arguments, and compile nothing; see `StepPrograms.planned`."""
        return self.programs.planned(args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Return `jax.stages.Traced` of the sharded step, as `jax.jit(f).trace` does; `jax.export` reads this.

        Args:
            *args: Arrays or `jax.ShapeDtypeStruct`, as for a call.
            **kwargs: The same, by name.

        Raises:
            ShardError: The step can't be planned, or is no function of arrays alone: a pipeline, NNX objects,
                references.
        """
        return JaxStages.of(self.programs, args, kwargs).trace()

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Return `jax.stages.Lowered` of the sharded step, for `compile()`, `as_text()` and `cost_analysis()`.

        Arguments and errors as for `trace`.

        >>> import jaxshard_magic
        >>> import jax.numpy as jnp
        >>> halve = jaxshard_magic.shard(lambda w: w / 2, "dp", mesh="cpu:8 data=8")
        >>> compiled = halve.lower(jnp.ones(64)).compile()
        >>> compiled.memory_analysis().argument_size_in_bytes
        32
        """
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result's shapes with their shardings, and compile nothing; arguments and errors as for `trace`."""
        return JaxStages.of(self.programs, args, kwargs).eval_shape()

    @property
    def ended(self) -> EarlyEnd | None:
        """Early end of the cell that made the last call; None after a regular end, or a later call of the step."""
        return self._ended[1] if self._ended is not None and self._ended[0] == self.calls else None

    @ended.setter
    def ended(self, value: EarlyEnd) -> None:
        self._ended = self.calls, value

    @property
    def ran(self) -> StepSignature | None:
        """Signature of the kind of call made most often; None before the first call."""
        entries = [entry for entry in self.programs.entries.values() if entry.calls]
        return step_signature(max(entries, key=lambda entry: entry.calls)) if entries else None

    @property
    def check(self) -> bool:
        """Compare the next call with the plain step; the outcome is `checked`."""
        return self._check

    @check.setter
    def check(self, value: bool) -> None:
        self._check, self._fast_calls = value, []
        if value:
            self.checked = None

    def request_check(self) -> None:
        """Check the next call, as if the step had been made with `--check`."""
        self.programs.request = replace(self.request, check=True)
        self.check = True

    def settle(self) -> None:
        """Wait for running calls and read their metrics, so that later time is not counted as step time.

        Raises the exceptions of functions passed to `on_metrics`.
        """
        self.loops.settle()
        for watch in filter(None, (self._loop_watch, self._last_watch)):
            watch.settle()

    def followed(self, watch: LoopMonitor) -> None:
        """Use `watch` as the monitor from the next call on."""
        if watch is not self._last_watch:
            self._loop_watch = self.watched
        self.watch = self._last_watch = watch

    @property
    def watched(self) -> LoopMonitor | None:
        """Monitor of the last loop; a single call after a loop doesn't count as a loop. None before the first."""
        newest, before = self._last_watch, self._loop_watch
        if newest is None or before is None:
            return newest
        return newest if newest.calls >= min(2, before.calls) else before

    def on_metrics(self, write: Callable[[MetricsRow], object] | None = None) -> None:
        """Record returned scalars and step times of later calls as `report().metrics`; a `%%shard` cell does so by
        default.

        Args:
            write: Called with a `MetricsRow` for each call with known results: `step` (from 1 on), `time` in seconds
                and `values` by name. Later calls of the step call it, in their own thread, and raise its exceptions
                before they run.

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
            LoopMonitor().follow(self)
        if write is not None and self.watch is not None:
            self.watch.writers.append(write)

    @property
    def keep_arguments(self) -> bool:
        """Keep the last call's arguments alive, for `repeat`."""
        return self._keep

    @keep_arguments.setter
    def keep_arguments(self, value: bool) -> None:
        # Fast calls keep no arguments, so the next call has to take the slow path.
        self._keep, self._last_call, self._fast_calls = value, None, []

    def repeat(self, n: int) -> None:
        """Call the step on the last call's arguments until `n` more calls are timed; nothing is updated.

        Args:
            n: Number of timed calls to add.

        Raises:
            ShardError: The arguments of the last call were not kept: set `keep_arguments` before the call.
        """
        entry, inputs = self.inputs(None)
        timings = entry.clock.repeated_s
        self.settle()
        enough = len(timings) + n
        # Calls replace the constants that the program carries.
        with Restored(list_elements(entry.consts)):
            while len(timings) < enough:  # calls of a pipeline that record their actions are not timed
                entry.run_timed(entry.copy_donated(inputs), timings)

    @property
    def last_profile(self) -> Profile | None:
        """Profile of recorded calls of the last kind; None without a recording."""
        return self._profile_of(self.programs.current)

    def _profile_of(self, entry: CompiledStep | None) -> Profile | None:
        return self._profiled[1] if self._profiled and self._profiled[0] is entry else None

    @property
    def has_inputs(self) -> bool:
        """Return whether the arguments of the last call were kept."""
        return self._last_call is not None

    def take_profile(self, entry: CompiledStep, profile: Profile) -> None:
        """Store a profile of `entry`, and make `entry` the program of the last kind of call."""
        self._profiled, self.programs.current = (entry, profile), entry

    def inputs(
        self, arguments: tuple[tuple[Any, ...], Mapping[str, Any]] | None
    ) -> tuple[CompiledStep, tuple[Any, ...]]:
        """Return the program of a call, and the call's inputs arranged for the program.

        Args:
            arguments: `(args, kwargs)` of the call; None for the kept arguments of the last call.

        Raises:
            ShardError: `arguments` is None and no arguments were kept.
        """
        if arguments is None and self._last_call is not None:
            return self._last_call
        if arguments is None:
            raise ShardError(
                f"the arguments of {self.name} were not kept: set keep_arguments before it is called, or give them, "
                "as in step.profile(args=(state, batch))"
            )
        flat_call, entry = self.programs.find(*arguments)
        if self._hosts is not None:
            flat_call = self._hosts.join_parts(entry, flat_call)
        return entry, entry.arrange(entry.place_inputs(entry.pad_batch(flat_call.leaves), OwnOutputs()))

    def profile(
        self,
        n: int = DEFAULT_CALLS,
        *,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        trace: str | PathLike[str] | None = None,
    ) -> Measured:
        """Call the step `n` more times under JAX's profiler, on copies; nothing is updated. Later reports show where
        the time went.

        On several hosts, every host must call this method. Each host reads its own recording, and receives the figures
        of all.

        Args:
            n: Number of calls to read; one more is made before.
            args: Arguments of the step. By default the last call's; set `keep_arguments` before that call.
            kwargs: Arguments by name.
            trace: Folder for the files of xprof, TensorBoard and Perfetto; each of several hosts has a subfolder, named
                by its number.

        Raises:
            ShardError: There are no arguments, a trace is running already, the folder can't be written, or another host
                fails.
        """
        arguments = None if args is None and kwargs is None else (tuple(args or ()), dict(kwargs or {}))
        return profile_step(self, n, arguments, trace)

    def meet(self) -> None:
        """Meet the other hosts before an additional call, for a step on hosts that meet before each call."""
        if self._hosts is not None:
            self._hosts.meet_for_extra_call()

    def restart(self) -> None:
        """Forget the calls so far and the settings of a trial; reports count from here. Compiled programs stay."""
        self.check, self.reference, self.keep_arguments = False, None, False
        self._profiled = self.feed_waits = self.feed_ref = None
        self.programs.restart()

    def gather(self, *state: Any, to: Any = None) -> Any:
        """Return state with every array whole in one place, for evaluation or a checkpoint.

        Modules and optimizers of NNX are changed in place.

        Args:
            *state: Pytrees as returned by the step.
            to: Device or Sharding; by default the mesh's first device.

        Returns:
            The tree itself for one tree, a tuple for several.

        Raises:
            ShardError: There is no state.
        """
        return gather_state(state, self.mesh.devices.flat[0] if to is None else to)

    def save(
        self,
        path: str | PathLike[str],
        state: Any,
        *,
        rename: Mapping[str, str] | Iterable[str] = (),
        force: bool = False,
    ) -> int:
        """Save a state into a folder of checkpoints, or its arrays into a file of weights.

        Pytrees, NNX objects and typed keys are saved as they are. A path ending in .safetensors or .npz is a file of
        weights.

        Args:
            path: Folder or file.
            state: State to save; for a file of weights preferably the parameters alone. Keys of random numbers are left
                out of a file of weights.
            rename: Names of arrays in the file, as for `restore`.
            force: Overwrite a file of weights.

        Returns:
            Checkpoint number, equal to the steps counted by the state (`step` of a TrainState or an nnx.Optimizer,
            `count` of optax), or the calls of this step behind the state.

        Raises:
            ShardError: The path can't be written, or the folder has a checkpoint of this number already.
        """
        # Imported late, here and below: the room of checkpoints takes 40 ms, which most steps never need.
        from .save_restore import save

        return save(self, path, state, rename, force)

    def restore(
        self,
        path: str | PathLike[str],
        like: Any,
        *,
        number: int | None = None,
        cast: bool = False,
        rename: Mapping[str, str] | Iterable[str] = (),
        part: str | None = None,
    ) -> Any:
        """Return the state of a folder of checkpoints, or of a file of weights, in the layout of this step's plan.

        The state may have been saved under any other plan: each device reads only its own shards. Arrays that the step
        doesn't take are replicated, and a warning names one. Call or prepare the step before: `step.prepare(state,
        batch)`.

        Args:
            path: Folder of checkpoints; file of safetensors or of `numpy.savez`; index or folder of safetensors.
            like: State of the same kind, or a part such as its parameters: arrays or shapes. The result has the same
                types; NNX objects are changed in place.
            number: Number of the checkpoint; by default the newest.
            cast: Convert to the dtypes of `like`.
            rename: For weights, `{"model.layers.*.up.weight": "layers.*.up:T"}`, from the file's names to yours. The
                first matching rule counts, and the rest of a name after the match stays. `:T` swaps two dimensions; a
                `*` missing on your side stacks arrays by number.
            part: Part of the checkpoint to restore if several parts have the names of `like`: "ema".

        Raises:
            ShardError: The checkpoint has another state; raised before reading, and naming the first differing leaf.
        """
        from .save_restore import restore

        return restore(self, path, like, number, cast, rename, part)

    def report(self) -> Report:
        """Return everything known of the step's last kind of call, as a `Report`.

        The first report of a program reads the compiled text, up to a second or so.

        Raises:
            ShardError: The step was neither called nor prepared.
        """
        if self.programs.current is None:
            raise ShardError(f"{self.name} has not run yet; call it, or prepare(...) it, before asking for its report")
        self.settle()
        return self.report_of(self.programs.current)

    def report_of(self, entry: CompiledStep) -> "Report":
        """Return the report of one program of the step, compiled or only planned."""
        return summarize(self._run_until_now(entry), entry)

    def _run_until_now(self, entry: CompiledStep) -> StepRun:
        """Return what a report of `entry` tells of the step and its calls."""
        monitor, loop = self.watched, self.loops.timing_of(entry)
        saves, earlier = self.last_checkpoint_loop, self.previous_run
        return StepRun(
            name=self.name,
            request=self.request,
            plan_call=self.programs.planned_for,
            clock=loop.clock,
            calls=loop.calls,
            profile=self._profile_of(entry),
            metrics=None if monitor is None else monitor.run.metrics(),
            loss=None if monitor is None else monitor.loss_name or None,
            idle_samples={} if monitor is None else dict(monitor.idle_lines),
            recompilations=tuple(self.programs.recompilations),
            data_share=None if self.feed_waits is None else self.feed_waits.share,
            previous_examples=None if earlier is None else earlier.batch_size_of(entry),
            checkpoints=None if saves is None else saves.summary,
            checked=self.checked,
            alternatives=self.alternatives,
            bytes_with_fix=dict(self.bytes_with_fix),
            ended=self.ended,
            report_number=self.report_number,
            cell=self.cell,
        )

    def plan(self, *args: Any, **kwargs: Any) -> Report:
        """Predict the report of a call with these arguments (arrays or `jax.ShapeDtypeStruct`), compiling nothing.

        The report has the layout, the memory, the communication with its lines, and on a chip with known figures the
        time of a step, all predicted by the plan. Costs a trace and a plan, and one more plan for each checked hint. A
        pipeline is split into stages for this; the time between the operations of its update is not estimated, nor is
        combining the results of microbatches.

        Raises:
            ShardError: The step can't be planned.

        >>> import jax, jaxshard_magic
        >>> import jax.numpy as jnp
        >>> gradient = jax.grad(lambda w, x: jnp.sum((x @ w) ** 2))
        >>> step = jaxshard_magic.shard(gradient, "dp", mesh="cpu:8 data=8")
        >>> [(c.kind, c.bytes) for c in step.plan(jnp.ones((4, 4)), jnp.ones((8, 4))).collectives]
        [('all-reduce', 64)]
        """
        call = self.programs.flatten_for_plan(args, kwargs)
        if self.request.pipeline is not None:
            return self.report_of(uncompiled_pipelined(call, self.request, say=self.say, traces=self.programs.traces))
        return self.report_of(uncompiled_step(call, self.request, self.programs.planned_for(call)))

    def checkpoint(
        self, folder: str | PathLike[str], *, every: int | str = 100, keep: int | None = 3, resume: bool = False
    ) -> "CheckpointLoop":
        """Save the state of the following loop between its calls, as `%%shard --checkpoint` does.

        The returned object is a context manager that saves once more at its end. A save takes the time of a copy to the
        host; the file is written during later calls.

        Args:
            folder: Folder for the checkpoints of one loop; created if missing.
            every: Interval between saves: a number of calls, or a time such as "10m".
            keep: Number of checkpoints to keep, the newest; None for all.
            resume: Resume from the newest checkpoint in the folder, if any. The loop runs from its beginning; calls up
                to the checkpoint are not computed and return the results of the saved run, and the last of them the
                saved state. Meanwhile `skipping` is true.

        Raises:
            ShardError: The folder has checkpoints, and `resume` is false; later, in the loop: the checkpoint has
                another state, or a save fails.

        >>> import tempfile, jaxshard_magic
        >>> import jax.numpy as jnp
        >>> folder = tempfile.mkdtemp()
        >>> for calls, resume in ((2, False), (5, True)):
        ...     halve = jaxshard_magic.shard(lambda w: (w / 2, jnp.sum(w)), "fsdp", mesh="cpu:8 data=8")
        ...     w, sums = jnp.ones(64), []
        ...     loop = halve.checkpoint(folder, resume=resume)
        ...     for _ in range(calls):
        ...         w, total = halve(w)
        ...         sums.append(float(total))
        ...     _ = loop.end()
        ...     print(halve.calls, "computed:", sums)
        2 computed: [64.0, 32.0]
        3 computed: [64.0, 32.0, 16.0, 8.0, 4.0]
        """
        from .checkpoint_loop import CheckpointLoop

        self.checkpoint_loop = self.last_checkpoint_loop = CheckpointLoop(folder, every, keep, resume)
        return self.checkpoint_loop

    @property
    def skipping(self) -> bool:
        """Return whether the next call is skipped, as a previous run has made the call.

        Skipped calls are not computed. Work of the loop on the state, such as an evaluation, can wait until this is
        False.
        """
        return self.checkpoint_loop is not None and self.checkpoint_loop.skipping

    def _run(self, entry: CompiledStep, inputs: tuple[Any, ...]) -> Any:
        """Run a program, through the checkpoint loop if there is one."""
        if self.checkpoint_loop is None:
            return entry.run(inputs)
        return self.checkpoint_loop.run(entry, inputs, None if self.feed_ref is None else self.feed_ref())

    def _slow_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call on the slow path: find or compile the program first."""
        name = self.programs.step.name
        if (target := target_of(self.mesh)) is not None:
            raise ShardError(
                f"{target.name} is not attached, so {name} can't run on it: .prepare(...) with the same "
                "arguments, or their shapes, compiles it, and .report() tells the rest"
            )
        check_jit_enabled(name)
        flat_call, entry = self.programs.find(args, kwargs, self._hosts)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in flat_call.leaves):
            raise ShardError(
                f"{name} was given a shape where it takes an array: .prepare(...) and --dry-run take shapes"
            )
        with without_explicit_mesh():
            return self._first_call(entry, flat_call)

    def _first_call(self, entry: CompiledStep, flat_call: FlatCall) -> Any:
        """Place the inputs of a call, run its program, and enable the fast path for later calls."""
        if waiting_matchers:
            matched = match_feed(self, entry, flat_call.leaves)
            if matched is not None:
                self.feed_ref, self.feed_waits = matched
        if entry is not self.programs.current:
            self.loops.discard_intervals()
        if self._hosts is not None:
            flat_call = self._hosts.join_parts(entry, flat_call)
        # The plain step runs first, as the sharded step may donate its inputs.
        checks = self.check and self.checked is None and not self.skipping
        plain = (self.reference or PlainStep)(flat_call, self.request.mesh) if checks else None
        placed = entry.place_inputs(entry.pad_batch(flat_call.leaves), self._own_outputs)
        inputs = entry.arrange(placed)
        if self.count_expert_rows and entry.expert_rows is None and not self.skipping:
            entry.expert_rows = count_expert_rows(entry, placed, self.say)
        if entry.calls == 0:
            # A device's peak is of the whole process: only a rise above this one is due to the step.
            entry.initial_peak_bytes = peak_bytes(self.mesh)
            self.say("first run")
        if self.keep_arguments:
            self._last_call = entry, entry.copy_donated(inputs)
        outs = self._run(entry, inputs)
        if self._hosts is not None:
            self._hosts.record_call(entry, inputs, outs)
        self.programs.current = entry
        if self.watch is not None:
            self.watch.record_call(entry, outs, self.checkpoint_loop is None or self.checkpoint_loop.computed_last)
        outs = entry.strip_padding(outs) if entry.padding else outs
        result = self._finish(entry, flat_call, placed, outs)
        if plain is not None:
            self.say("checking against the plain step")
            # The comparison takes time between two calls that is not step time.
            self.loops.discard_intervals()
            self.checked = compare_call(plain, entry, outs, self.request)
        self.say("")  # ends the message of progress
        self._enable_fast_call(entry, flat_call)
        return result

    def _finish(self, entry: CompiledStep, flat_call: FlatCall, placed: list[Any], outs: Any) -> Any:
        """Write results into changed arguments and NNX objects, and return the step's result."""
        if entry.takes_pytrees:
            return outs
        if entry.donated:
            self._own_outputs.add(outs)
        entry.result.write_back(flat_call.arguments, outs, node_predicate(flat_call.step))
        update, nodes = entry.result.update, flat_call.nodes
        if update is None:
            return entry.result.build(outs)
        if nodes is None:
            return entry.result.build(outs, nnx_objects().build_returned(update, placed, outs))
        nnx_objects().store_placed_arrays(nodes, flat_call.leaves, placed)
        return entry.result.build(outs, nnx_objects().write_back(nodes, update, placed, outs))

    def _enable_fast_call(self, entry: CompiledStep, flat_call: FlatCall) -> None:
        """Enable the fast path for the next call of this kind."""
        fast = self._fast_by_program.get(entry)
        if fast is None:
            fast = fast_call(entry, flat_call, self._own_outputs)
            if fast is not None and self._hosts is not None:
                fast = self._hosts.fast_call(fast, self._own_outputs)
            self._fast_by_program[entry] = fast
        if fast is not None and not fast.watch(flat_call):
            fast = None
        # The fast path keeps no arguments and pads no batch.
        if fast is not None and not self.keep_arguments and not entry.padding:
            self._fast_calls = [fast, *(f for f in self._fast_calls if f is not fast)][:RECENT]
