"""`ShardedStep`: a callable with the signature of the user's step, run under a plan."""

import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax._src.core import trace_state_clean  # jax.core has no public name for it

from ..config.request import Request
from ..errors import ShardError
from ..introspect import copy_metadata
from ..program.container_writes import apply_writes
from ..program.flatten_call import FlatCall, nnx_objects
from ..program.jax_settings import check_jit_enabled
from ..program.source_lines import EnclosingTrace, enclosing_trace, strip_package_frames
from ..program.unwrap import unwrap_step
from ..targets import target_of
from .compilation import uncompiled_step
from .compiled_step import CompiledStep
from .copies import CopiedAsFunction
from .donation import OwnOutputs, raise_if_deleted
from .expert_rows import count_expert_rows
from .fast_calls import fast_call
from .feed_waits import FeedWaits, notify_matchers, waiting_matchers
from .gather_state import gather_state
from .plain_check import compare_with_plain, run_plain_step
from .profiler_recording import DEFAULT_CALLS, profile_step
from .repeated_calls import RepeatedCalls
from .step_signature import StepSignature, step_signature

if TYPE_CHECKING:
    from os import PathLike

    from ..report import Alternative, Check, EarlyEnd, Measured, Report
    from .checkpoint_loop import CheckpointLoop

RECENT = 4  # kinds of calls (shapes, modes) with a fast path at the same time


class ShardedStep(RepeatedCalls, CopiedAsFunction):
    """Train step sharded over `mesh` under `strategy`, with the numbers of the plain step; made by `shard`.

    Call it like the step. Python numbers of a plain function stay Python numbers, and those of a jitted function are
    traced, as without sharding. Arrays in the step's closure are placed once, at tracing, as by `jax.jit`.
    `__wrapped__` is the plain step.

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
        super().__init__(unwrap_step(step), request)
        self.__wrapped__ = step
        self.reference: Callable[[FlatCall], Any] | None = None  # checked against; None for the plain step
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
        self._fast_by_program: dict[CompiledStep, Any] = {}
        self.check = request.check
        self._own_outputs = OwnOutputs()

    def __repr__(self) -> str:
        axes = " ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        return f"<ShardedStep {self.name}: {self.strategy} on {axes}>"

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
                raise_if_deleted(self._step, args, kwargs, error, self._own_outputs)
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
            if fast.entry is not self._current:
                self.loops.discard_intervals()
            try:
                outs = self._run(fast.entry, inputs)
            except (TypeError, ValueError):
                # A compiled program raises these for inputs of another kind. For inputs that it accepts, the error is
                # the step's own, and the step must not run twice.
                if fast.entry.accepts(inputs):
                    raise
                continue
            self._current = fast.entry
            if watch is not None:
                watch.record_call(fast.entry, outs, self.checkpoint_loop is None or self.checkpoint_loop.computed_last)
            return fast.finish(objects, inputs, outs)
        return self._slow_call(args, kwargs)

    @property
    def ended(self) -> "EarlyEnd | None":
        """Early end of the cell that made the last call; None after a regular end, or a later call of the step."""
        return self._ended[1] if self._ended is not None and self._ended[0] == self.calls else None

    @ended.setter
    def ended(self, value: "EarlyEnd") -> None:
        self._ended = self.calls, value

    @property
    def ran(self) -> StepSignature | None:
        """Signature of the kind of call made most often; None before the first call."""
        entries = [entry for entry in self._entries.values() if entry.calls]
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

    def profile(
        self,
        n: int = DEFAULT_CALLS,
        *,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        trace: "str | PathLike[str] | None" = None,
    ) -> "Measured":
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
        self.check, self.reference, self.traces, self.keep_arguments = False, None, None, False
        self._profiled = self.feed_waits = self.feed_ref = None
        self.loops.restart()
        self.recompilations.clear()

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
        path: "str | PathLike[str]",
        state: Any,
        *,
        rename: "Mapping[str, str] | Iterable[str]" = (),
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
        from .save_restore import save

        return save(self, path, state, rename, force)

    def restore(
        self,
        path: "str | PathLike[str]",
        like: Any,
        *,
        number: int | None = None,
        cast: bool = False,
        rename: "Mapping[str, str] | Iterable[str]" = (),
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

    def report(self) -> "Report":
        """Return everything known of the step's last kind of call, as a `Report`.

        The first report of a program reads the compiled text, up to a second or so.

        Raises:
            ShardError: The step was neither called nor prepared.
        """
        if self._current is None:
            raise ShardError(f"{self.name} has not run yet; call it, or prepare(...) it, before asking for its report")
        from ..analysis.summary import summarize

        self.settle()
        return summarize(self, self._current)

    def plan(self, *args: Any, **kwargs: Any) -> "Report":
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
        from ..analysis.summary import summarize

        call = self._flatten_for_plan(args, kwargs)
        if self.request.pipeline is not None:
            from .pipelined_step import uncompiled_pipelined

            return summarize(self, uncompiled_pipelined(call, self.request, say=self.say, traces=self.traces))
        return summarize(self, uncompiled_step(call, self.request, self.planned_for(call)))

    def checkpoint(
        self, folder: "str | PathLike[str]", *, every: int | str = 100, keep: int | None = 3, resume: bool = False
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
        """Run a call on the slow path: find or compile the program, place the inputs, and enable the fast path for
        later calls."""
        if (target := target_of(self.mesh)) is not None:
            raise ShardError(
                f"{target.name} is not attached, so {self._step.name} can't run on it: .prepare(...) with the same "
                "arguments, or their shapes, compiles it, and .report() tells the rest"
            )
        check_jit_enabled(self._step.name)
        flat_call, entry = self._program_for(args, kwargs, self._hosts)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in flat_call.leaves):
            raise ShardError(
                f"{self._step.name} was given a shape where it takes an array: .prepare(...) and --dry-run take shapes"
            )
        if waiting_matchers:
            notify_matchers(self, entry, flat_call.leaves)
        if entry is not self._current:
            self.loops.discard_intervals()
        if self._hosts is not None:
            flat_call = self._hosts.join_parts(entry, flat_call)
        # The plain step runs first, as the sharded step may donate its inputs.
        plain = None if self.skipping else run_plain_step(self, flat_call)
        placed = entry.place_inputs(entry.pad_batch(flat_call.leaves), self._own_outputs)
        inputs = entry.arrange(placed)
        if self.count_expert_rows and entry.expert_rows is None and not self.skipping:
            entry.expert_rows = count_expert_rows(entry, placed, self.say)
        if entry.calls == 0:
            from ..analysis.memory import peak_bytes

            # A device's peak is of the whole process: only a rise above this one is due to the step.
            entry.initial_peak_bytes = peak_bytes(self.mesh)
            self.say("first run")
        if self.keep_arguments:
            self._last_call = entry, entry.copy_donated(inputs)
        outs = self._run(entry, inputs)
        if self._hosts is not None:
            self._hosts.record_call(entry, inputs, outs)
        self._current = entry
        if self.watch is not None:
            self.watch.record_call(entry, outs, self.checkpoint_loop is None or self.checkpoint_loop.computed_last)
        outs = entry.strip_padding(outs) if entry.padding else outs
        result = self._finish(entry, flat_call, placed, outs)
        if plain is not None:
            self.checked = compare_with_plain(self, entry, plain, outs)
        self.say("")  # ends the message of progress
        self._enable_fast_call(entry, flat_call)
        return result

    def _finish(self, entry: CompiledStep, flat_call: FlatCall, placed: list[Any], outs: Any) -> Any:
        """Write results into changed arguments and NNX objects, and return the step's result."""
        if entry.takes_pytrees:
            return outs
        if entry.donated:
            self._own_outputs.add(outs)
        apply_writes(entry.result.written, flat_call.arguments, outs)
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
