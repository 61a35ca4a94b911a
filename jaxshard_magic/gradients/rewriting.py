"""A captured step with its gradient calls rewritten as the options ask."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..errors import ShardError
from ..plan import Finding
from ..program.batch import Batch
from ..program.capture import Gradient, Taking, gradients_of, with_gradients
from ..program.examples import Rows, varying
from ..program.flow import Flow, by_alias
from ..program.follow import Followed, follow
from ..program.ir import Equation, Program, Value
from ..program.mapped import Mapped, Name, on_a_device
from ..program.padding import Padded
from ..program.primitives import shape_of
from ..program.replay import Replay, retraced
from ..program.roles import Roles
from ..program.trace import Traced, path_name
from .accumulate import Accumulated, Cut
from .by_hand import ByHand
from .options import Inside
from .padded import with_rows
from .passes import Passes
from .remat import Rematted
from .scaled import CARRIED, taken_scaled, with_scaled_gradients
from .scaling import all_finite

Again = Callable[[Sequence[Any]], Traced]  # the step captured for other shapes of its inputs


class Rewriting:
    """`Rewriting(captured, again, options)(batch, roles, shards)` is the step with its gradients as `options` ask.

    `captured`: the step with each gradient call as one equation; `again` captures it for other shapes. `mapped`: how it
    is spread where it is written for one device.
    """

    def __init__(self, captured: Traced, again: Again, options: Inside, mapped: Mapped | None = None):
        self.captured, self.options, self._mapped = captured, options, mapped
        self._again: Again | None = again
        self._program = Program(captured.closed)
        self._coupled: dict[int, Accumulated] = {}
        self.calls: dict[int, Accumulated] = {}  # the gradient calls over microbatches, by their equations
        self.carried = 0  # first constants of the rewritten step that come back as its last outputs
        self.needs_host_memory = False
        self.rematted: list[Rematted] = []  # what --remat makes of the losses
        self.findings: list[Finding] = []
        self.added: dict[
            int, tuple[int, int]
        ] = {}  # of inputs: the dimension that rows are added to, and how many
        if options.changes_gradients and not gradients_of(self._program):
            asked = " and ".join(f"--{name}" for name in options.asked)
            raise ShardError(
                f"{asked}: the step takes no gradient (jax.grad, jax.value_and_grad or a framework's) for it to work on"
            )

    @property
    def plain(self) -> Traced:
        """The step with its gradients taken as they are."""
        with on_a_device(self._mapped):
            return with_gradients(self.captured, Taking(self._program))

    def __call__(self, batch: Batch, roles: Roles, shards: int) -> Traced:
        if self.options.pad and batch.size is not None and batch.size % (shards * self.options.microbatches):
            return self._with_rows(batch, roles, shards)
        with on_a_device(self._mapped):
            return self._rewritten(batch, roles, shards)

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the step's outputs as it was captured."""
        return [aval.shape for aval in self.captured.closed.out_avals]

    def _with_rows(self, batch: Batch, roles: Roles, shards: int) -> Traced:
        """The step on a batch with as many rows more that it divides over `shards`, in each of its microbatches."""
        assert batch.size is not None
        parts = self.options.microbatches
        more, n = -batch.size % (shards * parts), len(self.captured.consts)
        avals = list(self.captured.closed.in_avals)
        for i, dims in batch.dims.items():
            if len(dims) != 1 or i < n:
                raise ShardError(
                    f"--pad: {path_name(self.captured.in_paths[i])} holds the examples where no rows can be added to it"
                    f"{', closed over by the step: pass it as an argument' if i < n else ''}"
                )
            shape = list(avals[i].shape)
            added = more * (shape[dims[0]] // batch.size)
            shape[dims[0]] += added
            self.added[i - n] = dims[0], added
            avals[i] = avals[i].update(shape=tuple(shape))
        captured = self._traced_at(avals[n:], "--pad", batch.size + more, batch.size)
        work = self._padded_first if parts > 1 else self._padded_last
        traced = work(captured, batch, replace(batch, size=batch.size + more), roles, shards)
        into = f" into {parts} microbatches" if parts > 1 else ""
        self.findings.append(
            Finding(
                "padded",
                "info",
                f"{more} row{'s' * (more > 1)} added to the {batch.size} examples, which do not divide{into} over "
                f"{shards} device{'s' * (shards > 1)}; all numbers are those of the examples.",
            )
        )
        return traced

    def _padded_last(
        self, captured: Traced, batch: Batch, larger: Batch, roles: Roles, shards: int
    ) -> Traced:
        """The step with its gradients taken, on the larger batch, with the numbers of the real one: that mixes examples
        as it likes."""
        assert self._again is not None
        traced = self._rewritten(batch, roles, shards)
        other = Rewriting(captured, self._again, replace(self.options, pad=False))(larger, roles, shards)
        return replace(traced, closed=retraced(Padded(Program(traced.closed), Program(other.closed))))

    def _padded_first(
        self, captured: Traced, batch: Batch, larger: Batch, roles: Roles, shards: int
    ) -> Traced:
        """The step with padded losses, which are then taken in microbatches."""
        again, large = self._again, Program(captured.closed)
        assert again is not None
        inner = _Exact(
            with_rows(self.captured, large, captured, batch),
            lambda avals: with_rows(self.captured, large, again(avals), batch),
            self.options,
        )
        traced = inner(larger, roles, shards)
        self.carried, self.needs_host_memory = inner.carried, inner.needs_host_memory
        self.findings += inner.findings
        return traced

    def forget(self) -> None:
        """Let go of the call that was captured: its arguments would stay alive with the step."""
        self._again = None

    def _traced_at(self, avals: Sequence[Any], option: str, examples: int, of: int) -> Traced:
        assert self._again is not None, "the step is rewritten once"
        try:
            return self._again(avals)
        except (TypeError, ValueError) as error:
            raise ShardError(
                f"{option}: the step can't be traced for {examples} examples in the place of {of}: "
                f"{str(error).splitlines()[0]}; take its sizes from the arrays' shapes"
            ) from error

    def _rewritten(self, batch: Batch, roles: Roles, shards: int) -> Traced:
        passes = Passes(self.options)
        if self.options.microbatches > 1:
            pads = self._mapped is None
            self.calls = self._accumulations(batch, roles, shards, passes, pads=pads)
            taking = _Accumulating(self._program, self.calls)
        else:
            taking = _Passing(self._program, passes)
        if self._mapped is not None:
            taking.axes = tuple(self._mapped.sizes)
        if self.options.precision == "fp16":
            traced, self.carried = with_scaled_gradients(self.captured, taking, roles), CARRIED
        else:
            traced = with_gradients(self.captured, taking)
        self._note(passes)
        return traced

    def _note(self, passes: Passes) -> None:
        self.needs_host_memory, self.rematted = passes.needs_host_memory, passes.rematted
        self.findings += [Finding("inside", "info", note) for note in passes.notes]

    def accumulated(self, batch: Batch, roles: Roles, shards: int) -> dict[int, Accumulated]:
        """The gradient calls over microbatches, by the index of their equations, for somebody else to run, who has no
        use for rows that are added."""
        passes = Passes(self.options)
        made = self._accumulations(batch, roles, shards, passes, pads=False)
        self._note(passes)
        return made

    def _accumulations(
        self, batch: Batch, roles: Roles, shards: int, passes: Passes, *, pads: bool
    ) -> dict[int, Accumulated]:
        each = "" if self._mapped is None else " of each device"
        cut = _cut(self.captured, batch, self.options.microbatches, shards, each, pads)
        small = self._at(batch, cut)
        outer = follow(small, self._program, {i: d for i, (d,) in batch.dims.items()})
        calls = zip(gradients_of(small), gradients_of(self._program), strict=True)
        state = _state(self._program, roles)
        made = {
            large.index: _accumulated(
                self._program, one, large, outer, cut, passes, state.get(large.index, {})
            )
            for one, large in calls
        }
        for call in made.values():
            self._say(call)
        if not all(call.outputs.exact for call in made.values()):
            self._coupled = made
        return made

    @property
    def reference(self) -> Traced | None:
        """The step with its microbatches as a loop written by hand, where that is what its numbers are to equal."""
        if not self._coupled:
            return None
        with on_a_device(self._mapped):
            return with_gradients(self.captured, ByHand(self._program, self._coupled))

    def _at(self, batch: Batch, cut: Cut) -> Program:
        """The step captured at one microbatch."""
        n, avals = len(self.captured.consts), list(self.captured.closed.in_avals)
        for i, (d,) in batch.dims.items():
            shape = list(avals[i].shape)
            shape[d] //= cut.microbatches
            avals[i] = avals[i].update(shape=tuple(shape))
        option = f"--microbatches {cut.microbatches}"
        return Program(self._traced_at(avals[n:], option, cut.each, cut.examples).closed)

    def _say(self, call: Accumulated) -> None:
        outputs, where = call.outputs, f" ({call.cause})" if call.cause else ""
        if outputs.carried:
            self._found(
                "info",
                f"The loss couples the examples of a batch{where}: statistics are those of each microbatch and go on "
                "from one to the next, as in a loop over microbatches written by hand, which --check compares with.",
            )
        elif not outputs.exact:
            self._found(
                "warning",
                f"The loss is no sum over examples{where}: the loss and gradients of the microbatches are averaged, as "
                "in a loop over microbatches written by hand, which --check compares with.",
            )
        elif outputs.guessed:
            n = len(outputs.guessed)
            self._found(
                "warning",
                f"{n} output{'s' * (n > 1)} beside the loss {'are' if n > 1 else 'is'} no sum over examples nor one "
                "for each: averaged over the microbatches.",
            )

    def _found(self, level: str, message: str) -> None:
        self.findings.append(Finding("microbatches", level, message))


class _Exact(Rewriting):
    """A step with rows added, whose microbatches give the numbers of the real rows or are refused."""

    def _say(self, call: Accumulated) -> None:
        outputs = call.outputs
        if outputs.exact and not outputs.guessed:
            return
        where = f" ({call.cause})" if call.cause else ""
        what = "an output beside the loss" if outputs.exact else "the loss"
        raise ShardError(
            f"--pad: {what} is no sum over examples{where}, so that no rows can be added to its "
            f"{self.options.microbatches} microbatches; take a batch that divides, or leave --microbatches out"
        )


class _Agreeing(Taking):
    """With a loss scale, the devices along `axes` leave a step out together: where the gradients of one overflow."""

    axes: tuple[Name, ...] = ()

    def __call__(self, *args: Any) -> list:
        outs = super().__call__(*args)
        if self.axes and self.scale is not None:
            off = jnp.where(all_finite(self.gradients), 0.0, jnp.inf)
            self.gradients = [lax.psum(off, self.axes)]
        return outs


class _Passing(_Agreeing):
    """Gradients of the whole batch, through the passes alone."""

    def __init__(self, program: Program, passes: Passes):
        super().__init__(program)
        self._losses = {e.index: Program(passes(e.params["gradient"].loss)) for e in gradients_of(program)}

    def take(self, e: Equation, operands: Sequence[Any]) -> list:
        return taken_scaled(e.params["gradient"], Replay(self._losses[e.index]), operands, 1.0, self.scale)


class _Accumulating(_Agreeing):
    def __init__(self, program: Program, calls: Mapping[int, Accumulated]):
        super().__init__(program)
        self._made = calls

    def take(self, e: Equation, operands: Sequence[Any]) -> list:
        return self._made[e.index](operands, self.scale)


def _accumulated(
    program: Program,
    small: Equation,
    large: Equation,
    outer: Followed,
    cut: Cut,
    passes: Passes,
    state: Mapping[int, int],
) -> Accumulated:
    call: Gradient = large.params["gradient"]
    batch = {}
    for k, v in enumerate(small.ins):
        if shape_of(small.eqn.invars[k]) == shape_of(large.eqn.invars[k]):
            continue
        label = outer.of[v] if v is not None else None
        shapes = shape_of(small.eqn.invars[k]), shape_of(large.eqn.invars[k])
        dim = label.dim if isinstance(label, Rows) else varying(*shapes, ratio=Fraction(cut.microbatches))
        if not isinstance(label, Rows) and large not in program.top.equations:
            raise ShardError(
                f"--microbatches {cut.microbatches}: the step takes its gradient in a loop of its own, which takes the "
                "batch in parts already; leave --microbatches out, or the loop"
            )
        whole = large.eqn.invars[k].aval.str_short()
        if k >= call.closed_over:
            raise ShardError(
                f"--microbatches {cut.microbatches}: the step takes a gradient with respect to its examples, {whole}, "
                "which is no sum over them; leave --microbatches out"
            )
        if dim is None:
            raise ShardError(
                f"--microbatches {cut.microbatches}: the loss reads {whole}, which can't be cut into "
                "microbatches by its examples; pass the batch itself into the loss"
            )
        batch[k] = dim
    return Accumulated(small.params["gradient"], call, batch, cut, passes, state)


def _cut(captured: Traced, batch: Batch, microbatches: int, shards: int, each: str, pads: bool) -> Cut:
    option = f"--microbatches {microbatches}"
    if batch.size is None:
        raise ShardError(
            f"{option}: no batch was found among the step's arguments; say where it is, as in "
            "--spec \"batch=P('data')\""
        )
    several = next((i for i, dims in batch.dims.items() if len(dims) != 1), None)
    if several is not None:
        raise ShardError(
            f"{option}: {path_name(captured.in_paths[several])} has the examples along {len(batch.dims[several])} "
            "dimensions; a microbatch of it can't be cut out"
        )
    held = next((i for i in batch.dims if i < len(captured.consts)), None)
    if held is not None:
        raise ShardError(
            f"{option}: {path_name(captured.in_paths[held])} holds the examples and is closed over by the step; "
            "pass it as an argument"
        )
    if batch.size % (microbatches * shards):
        per = shards if shards > 1 else 1
        fits = [n for n in range(1, batch.size // per + 1) if batch.size % (n * per) == 0]
        near = sorted(fits, key=lambda n: (abs(n - microbatches), n))[:1]
        ways = [f"--microbatches {n} does" for n in near] + ["--pad adds rows"] * pads
        over = f" on {shards} shards" if shards > 1 else ""
        raise ShardError(
            f"{option}: {batch.size} examples{each} do not divide into {microbatches} microbatches{over}; "
            f"{', '.join(ways)}"
        )
    return Cut(batch.size, microbatches, shards)


def _state(program: Program, roles: Roles) -> dict[int, dict[int, int]]:
    """For each gradient call, by its index: aux output -> the operand whose next value the step makes of it."""
    flow = Flow(program)
    place = {v: i for i, v in enumerate(program.inputs)}
    found: dict[int, dict[int, int]] = {}
    for e in gradients_of(program):
        call: Gradient = e.params["gradient"]
        operands = {
            place[w]: k
            for k, v in enumerate(e.ins)
            if v is not None
            for w in flow.back([v], by_alias)
            if w in place
        }
        outs = {v: j for j, v in enumerate(e.outs[: call.outs])}
        for o, i in roles.state.items():
            if i not in operands:
                continue
            for v in flow.back([program.outputs[o]], partial(_by_mean, flow)):
                k = operands[i]
                if v in outs and program.avals[v].shape == program.avals[program.inputs[i]].shape:
                    found.setdefault(e.index, {})[outs[v]] = k
    return found


def _by_mean(flow: Flow, v: Value, w: Value, name: str) -> bool:
    """Only what is the same array in another form, or its mean over devices."""
    mean = name == "div" and any(made == "psum" for _, made in flow.before[w])
    return by_alias(v, w, name) or name == "psum" or mean
