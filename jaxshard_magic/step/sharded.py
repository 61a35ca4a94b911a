"""`ShardedStep`: called as the user's step, runs it under a plan."""

import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax._src.core import trace_state_clean  # jax.core has no public name for it

from ..config.request import Request
from ..errors import ShardError
from ..introspect import named_as
from ..program.in_place import write
from ..program.lines import Within, traced_within, users_lines_alone
from ..program.peel import Peeled, nnx_calls
from ..program.settings import refuse_disabled
from ..program.unwrap import strip
from ..targets import target_of
from .again import CalledAgain
from .building import plan_entry
from .calls import fast_call
from .checked import against_plain, plain_of
from .copies import Copied
from .donation import Ours, refuse_what_is_gone
from .entry import Entry
from .gathered import gathered
from .given import Waits, tell, waiting
from .load import counted
from .ran import Ran, ran
from .recorded import PROFILED, profiled

if TYPE_CHECKING:
    from os import PathLike

    from ..report import Alternative, Check, Ended, Measured, Report
    from .keeper import Keeper

RECENT = 4  # kinds of calls (shapes, modes) that take the short way side by side


class ShardedStep(CalledAgain, Copied):
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
        named_as(self, step)
        super().__init__(strip(step), request)
        self.__wrapped__ = step
        self.reference: Callable[[Peeled], Any] | None = None  # of a check; else the plain step
        self.keeper: Keeper | None = None  # saves what they give, and knows which of them were made before
        self.kept: Keeper | None = None  # was its keeper last
        self.counts_rows = False  # of experts, before the first call of each kind
        self.traced_within: Within | None = None  # where it was called last in another trace, plain
        self.rejit: Callable[[Any], Any] | None = None  # what is to be made of a jit of it
        self.waits: Waits | None = None  # for the batches of a feed
        self.fed: weakref.ref[Any] | None = None  # that feed
        self.before: Ran | None = None  # an earlier run of a step of this name
        self.checked: Check | None = None
        self.alternatives: tuple[Alternative, ...] = ()  # other options, as compiled
        self._ended: tuple[int, Ended] | None = None
        self.tried: dict[str, int] = {}  # bytes on a device with a fix of the report, as compiled
        self.cell: tuple[str, str] | None = None  # the cell that was run: its file for Python, its text
        self.path: str | None = None  # what the cell calls the step
        self.calls_before = 0  # of the run that its state was restored from
        self.number: int | None = None  # of its reports in a notebook
        self._fast: dict[Entry, Any] = {}
        self.check = request.check
        self._ours = Ours()

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
        try:
            try:
                return self._called(args, kwargs)
            except (RuntimeError, ValueError) as error:
                refuse_what_is_gone(self._step, args, kwargs, error, self._ours)
                raise
        except Exception as error:
            users_lines_alone(error)
            raise  # alone: with the error named, Python would add this line to its traceback

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not trace_state_clean():
            self.traced_within = traced_within(sys._getframe())
            return self.__wrapped__(*args, **kwargs)
        watch = self.watch
        if watch is not None and watch.rows:
            watch.begin()
        if self._hosts is not None:
            self._hosts.begin()
        for fast in () if waiting else self._recent:
            try:
                inputs, objects = fast.gather(args, kwargs)
            except (TypeError, ValueError):
                continue  # what is wrong in itself is raised again below
            if fast.entry is not self._current:
                self.loops.breaks()
            try:
                outs = self._run(fast.entry, inputs)
            except (TypeError, ValueError):
                if fast.entry.takes(inputs):  # raised by the step; it must not run twice
                    raise
                continue
            self._current = fast.entry
            if watch is not None:
                watch.called(fast.entry, outs, self.keeper is None or self.keeper.ran)
            return fast.finish(objects, inputs, outs)
        return self._call_anew(args, kwargs)

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
        return ran(max(entries, key=lambda entry: entry.calls)) if entries else None

    @property
    def check(self) -> bool:
        """Compare the next call against the plain step; the outcome is `checked`."""
        return self._check

    @check.setter
    def check(self, value: bool) -> None:
        self._check, self._recent = value, []
        if value:
            self.checked = None

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

    def meet(self) -> None:
        """Where the step runs on several hosts that meet before each call: meet, before another one that is made."""
        if self._hosts is not None:
            self._hosts.meet_again()

    def restart(self) -> None:
        """Forget the calls so far, and what served a trial: reports count from here. What is compiled stays."""
        self.check, self.reference, self.traces, self.keep_arguments = False, None, None, False
        self._profiled = self.waits = self.fed = None
        self.loops.restart()
        self.recompiled.clear()

    def gather(self, *state: Any, to: Any = None) -> Any:
        """What the step gave back with every array whole in one place, for evaluation or a checkpoint: on `to`, a
        device or a Sharding, else on the mesh's first device. Modules and optimizers of NNX are changed in place.

        One tree comes back as it is, several as a tuple. Raises `ShardError` without any.
        """
        return gathered(state, self.mesh.devices.flat[0] if to is None else to)

    def save(
        self,
        path: "str | PathLike[str]",
        state: Any,
        *,
        rename: "Mapping[str, str] | Iterable[str]" = (),
        force: bool = False,
    ) -> int:
        """Save a state into a folder of checkpoints; return its number, the steps that the state counts (`step` of a
        TrainState or an nnx.Optimizer, `count` of optax), or the calls of this step behind it. Trees, NNX objects and
        typed keys are saved as they are. A path in .safetensors or .npz is a file of weights, written by arrays.

        Args:
            path: the folder, or the file.
            state: best the parameters alone, for a file of weights; keys of random numbers are left out of it.
            rename: what the file calls arrays, as `restore` takes it.
            force: write over a file of weights.

        Raises `ShardError` for what can't be saved into, and a number that a folder has already.
        """
        from .kept import save

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
        """The state of a folder of checkpoints, or of a file of weights, laid out by this step's plan, whatever it was
        saved under: each device reads what it will hold. Arrays that the step doesn't take come whole to every device,
        and a warning names one.

        Args:
            path: the folder; a file of safetensors or of `numpy.savez`; an index or a folder of safetensors.
            like: a state of the same kind, or a part of it, such as its parameters: arrays or their shapes. Its types
                come back; NNX objects are changed in place.
            number: of the checkpoint; the newest by default.
            cast: convert to the dtypes of `like`.
            rename: for weights, `{"model.layers.*.up.weight": "layers.*.up:T"}`, from the file's names to yours; the
                first that has a name counts, and what follows it stays. `:T` swaps two dimensions; a `*` that your side
                lacks stacks arrays by number.
            part: which part of the checkpoint `like` is, where several have its names: "ema".

        The step has been called, or prepared: `step.prepare(state, batch)`. Raises `ShardError`, before anything is
        read, for a checkpoint of another state; the first leaf that differs is named.
        """
        from .kept import restore

        return restore(self, path, like, number, cast, rename, part)

    def report(self) -> "Report":
        """Everything known of the step's last kind of call, as a `Report`. The first time it reads the compiled
        program, which takes up to a second or so. Raises `ShardError` before the first call."""
        if self._current is None:
            raise ShardError(
                f"{self.name} has not run yet; call it, or prepare(...) it, before asking for its report"
            )
        from ..analysis.summary import summarize

        self.settle()
        return summarize(self, self._current)

    def plan(self, *args: Any, **kwargs: Any) -> "Report":
        """Predict the report of a call with these arguments (arrays or `jax.ShapeDtypeStruct`), compiling nothing.

        It has the layout, memory, communication with the lines that cause it, and on a chip whose figures are known a
        step's time, all of them the plan's. Costs a trace and a plan, and another plan for each hint that is checked.
        A pipeline is split into its stages for it; what lies between the operations of its update is not estimated, nor
        is what puts the results of microbatches together. Raises `ShardError` for what can't be planned.

        >>> import jax, jaxshard_magic
        >>> import jax.numpy as jnp
        >>> gradient = jax.grad(lambda w, x: jnp.sum((x @ w) ** 2))
        >>> step = jaxshard_magic.shard(gradient, "dp", mesh="cpu:8 data=8")
        >>> [(c.kind, c.bytes) for c in step.plan(jnp.ones((4, 4)), jnp.ones((8, 4))).collectives]
        [('all-reduce', 64)]
        """
        from ..analysis.summary import summarize

        call = self._peeled(args, kwargs)
        if self.request.pipeline is not None:
            from .pipelined import plan_pipelined

            return summarize(self, plan_pipelined(call, self.request, say=self.say, traces=self.traces))
        return summarize(self, plan_entry(call, self.request, self.planned_for(call)))

    def checkpoint(
        self,
        folder: "str | PathLike[str]",
        *,
        every: int | str = 100,
        keep: int | None = 3,
        resume: bool = False,
    ) -> "Keeper":
        """Save the state of the loop that follows, between its calls, as `%%shard --checkpoint` does; a context at
        whose end it is saved once more. A save takes the time of a copy to the host, and is written meanwhile.

        Args:
            folder: made where it is not there. It keeps the checkpoints of one loop.
            every: so many calls, or a time: "10m".
            keep: how many checkpoints stay, the newest; None for all.
            resume: go on from the newest checkpoint there. The loop runs from its beginning; the calls up to the
                checkpoint are not computed and return what they returned, and the last of them the state that was
                saved. `skipping` tells meanwhile. Without a checkpoint the loop begins.

        Raises ShardError for a folder that has checkpoints, without `resume`; and, in the loop, for a checkpoint of
        another state, and where a save fails.

        >>> import tempfile, jaxshard_magic
        >>> import jax.numpy as jnp
        >>> folder = tempfile.mkdtemp()
        >>> for calls, resume in ((2, False), (5, True)):
        ...     halve = jaxshard_magic.shard(lambda w: (w / 2, jnp.sum(w)), "fsdp", mesh="cpu:8 data=8")
        ...     w, sums = jnp.ones(64), []
        ...     keeper = halve.checkpoint(folder, resume=resume)
        ...     for _ in range(calls):
        ...         w, total = halve(w)
        ...         sums.append(float(total))
        ...     _ = keeper.end()
        ...     print(halve.calls, "computed:", sums)
        2 computed: [64.0, 32.0]
        3 computed: [64.0, 32.0, 16.0, 8.0, 4.0]
        """
        from .keeper import Keeper

        self.keeper = self.kept = Keeper(folder, every, keep, resume)
        return self.keeper

    @property
    def skipping(self) -> bool:
        """Is the next call one that a run before has made? It is not computed: what a loop makes of the state itself,
        such as an evaluation, can wait until this is False."""
        return self.keeper is not None and self.keeper.skipping

    def _run(self, entry: Entry, inputs: tuple[Any, ...]) -> Any:
        if self.keeper is None:
            return entry.run(inputs)
        return self.keeper.run(entry, inputs, None if self.fed is None else self.fed())

    def _call_anew(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (target := target_of(self.mesh)) is not None:
            raise ShardError(
                f"{target.name} is not attached, so {self._step.name} can't run on it: .prepare(...) with the same "
                "arguments, or their shapes, compiles it, and .report() tells the rest"
            )
        refuse_disabled(self._step.name)
        peeled, entry = self._entry(args, kwargs, self._hosts)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in peeled.leaves):
            raise ShardError(
                f"{self._step.name} was given a shape where it takes an array: .prepare(...) and --dry-run take shapes"
            )
        if waiting:
            tell(self, entry, peeled.leaves)
        if entry is not self._current:
            self.loops.breaks()
        if self._hosts is not None:
            peeled = self._hosts.joined(entry, peeled)
        plain = None if self.skipping else plain_of(self, peeled)
        placed = entry.place(entry.with_rows(peeled.leaves), self._ours)
        inputs = entry.arrange(placed)
        if self.counts_rows and entry.load is None and not self.skipping:
            entry.load = counted(entry, placed, self.say)
        if entry.calls == 0:
            from ..analysis.memory import peaks

            entry.peaks = peaks(self.mesh)
            self.say("first run")
        if self.keep_arguments:
            self._kept = entry, entry.copies(inputs)
        outs = self._run(entry, inputs)
        if self._hosts is not None:
            self._hosts.called(entry, inputs, outs)
        self._current = entry
        if self.watch is not None:
            self.watch.called(entry, outs, self.keeper is None or self.keeper.ran)
        outs = entry.real_rows(outs) if entry.added else outs
        result = self._finish(entry, peeled, placed, outs)
        if plain is not None:
            self.checked = against_plain(self, entry, plain, outs)
        self.say("")  # nothing more to wait for
        self._remember(entry, peeled)
        return result

    def _finish(self, entry: Entry, peeled: Peeled, placed: list[Any], outs: Any) -> Any:
        if entry.whole:
            return outs
        if entry.donated:
            self._ours.add(outs)
        write(entry.result.written, peeled.arguments, outs)
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
            fast = fast_call(entry, peeled, self._ours)
            if fast is not None and self._hosts is not None:
                fast = self._hosts.later(fast, self._ours)
            self._fast[entry] = fast
        if fast is not None and not fast.watch(peeled):
            fast = None
        if fast is not None and not self.keep_arguments and not entry.added:
            self._recent = [fast, *(f for f in self._recent if f is not fast)][:RECENT]
