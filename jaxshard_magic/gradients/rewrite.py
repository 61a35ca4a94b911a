"""A step's gradient calls rewritten as the options ask: taken in microbatches, computed again, narrower, padded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from ..config.options import GradientOptions
from ..errors import ShardError
from ..plan import Finding
from ..program.batching.padding import Padded
from ..program.capture import Gradient, Taking, gradients_of, with_gradients
from ..program.dimensions import Dimensions
from ..program.facts import Facts
from ..program.flow import Flow
from ..program.ir import Equation, Program
from ..program.mapped import Mapped, Name, PerDevice, on_a_device
from ..program.replay import Replay, retraced
from ..program.roles import Roles
from ..program.trace import Traced
from .accumulate import Accumulated, Cut
from .by_hand import ByHand
from .captures import Captures
from .over_microbatches import accumulations, coupled
from .padded import with_rows
from .passes import Passes
from .remat import Rematted
from .rows import rows_of
from .scaled import CARRIED, taken_scaled, with_scaled_gradients
from .scaling import Scale, all_finite


@dataclass(frozen=True)
class Rewritten:
    """A step with its gradients as the options ask.

    Args:
        traced: the step; of one written for one device, what each does.
        captured: the step before, each gradient call one equation.
        calls: the gradient calls over microbatches, by their equations' index in `captured`.
        findings: what was done.
        rematted: the losses with remat in them.
        carried: the first constants of `traced` that come back as its last outputs.
        added: by argument, flat, the dimension that rows are added to and how many.
        real: of each microbatch which rows are examples, bool of each; None where none are added.
        mapped: how it is spread where it is written for one device.
        whole: why a pipeline takes the batch as one microbatch; None where it takes it apart, or was asked to.
    """

    traced: Traced
    captured: Traced
    calls: Mapping[int, Accumulated]
    findings: tuple[Finding, ...]
    rematted: tuple[Rematted, ...] = ()
    carried: int = 0
    added: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    real: np.ndarray | None = None
    mapped: Mapped | None = None
    whole: str | None = None

    @property
    def other_loss(self) -> str | None:
        """Why its microbatches train on another loss than the whole batch; None where they train on the same."""
        found = filter(None, map(coupled, self.calls.values()))
        return next((each.why for each in found if not each.same_loss), None)

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the step's outputs, without rows that are added."""
        return [aval.shape for aval in self.captured.closed.out_avals]

    @property
    def needs_host_memory(self) -> bool:
        """Whether some of what `rematted` keep goes to memory of the kind `pinned_host`."""
        return any(loss.needs_host_memory for loss in self.rematted)

    def by_hand(self) -> Traced | None:
        """The step with its microbatches as a loop written by hand, where that is what its numbers are to equal: where
        a loss couples its examples. Traces it."""
        if self.added or all(call.outputs.exact for call in self.calls.values()):
            return None
        with on_a_device(self.mapped):
            return with_gradients(self.captured, ByHand(Program(self.captured.closed), self.calls))


def has_gradients(captured: Traced, options: GradientOptions) -> None:
    """Refuse options for the gradients of a step that takes none."""
    if options.changes_gradients and not gradients_of(Program(captured.closed)):
        given = " and ".join(f"--{name}" for name in options.given)
        raise ShardError(
            f"{given}: the step takes no gradient (jax.grad, jax.value_and_grad or a framework's) for it to work on"
        )


def with_plain_gradients(captured: Traced, mapped: Mapped | None = None) -> Traced:
    """The step of `captured` with its gradients taken as they are."""
    with on_a_device(mapped):
        return with_gradients(captured, Taking(Program(captured.closed)))


def rewrite(
    facts: Facts, captures: Captures, options: GradientOptions, shards: int, *, ring: bool = False
) -> Rewritten:
    """Make of a step the one that `options` ask for, of the same inputs and outputs.

    Args:
        facts: of the step as it is.
        captures: the step captured at the shapes of its `needs`.
        shards: in how many parts devices have the batch.
        ring: attention is to be one primitive, which can be run as a ring.

    Raises `ShardError` for a step whose gradients can't be taken so.
    """
    passes = Passes(options, ring)
    if captures.padded is not None:
        return _with_rows(facts, captures, captures.padded, passes, shards)
    with on_a_device(captures.mapped):
        rewritten = _rewritten(captures, facts.roles, passes, _coupling)
    if isinstance(facts.traced, PerDevice):
        return replace(rewritten, traced=facts.traced.like(rewritten.traced), mapped=captures.mapped)
    return rewritten


def in_microbatches(
    facts: Facts, captures: Captures, options: GradientOptions, *, ring: bool = False
) -> Rewritten:
    """The gradient calls of a step over microbatches, for a pipeline to run; the step itself stays as it is. `ring` as
    of `rewrite`.

    Raises `ShardError` as `rewrite` does.
    """
    passes = Passes(options, ring)
    calls = accumulations(captures, facts.roles, passes)
    findings = _told(calls, _coupling)
    return _noted(Rewritten(facts.traced, captures.whole, calls, findings), passes)


def whole_batch(
    facts: Facts, captured: Traced, options: GradientOptions, mesh: Mesh, shards: int, *, ring: bool = False
) -> Rewritten:
    """The gradient calls of a step, each with the whole batch as its one microbatch, for a pipeline to run.

    Args:
        facts: of the step as it is.
        captured: the step with each gradient call as one equation.
        mesh: what a rank of the pipeline has, which divides the batch in `shards`.
        ring: as of `rewrite`.
    """
    passes, program, size = Passes(options, ring), Program(captured.closed), facts.batch.size
    dims = Dimensions(program, tuple(mesh.shape.values()))
    rows = {dims.of(program.inputs[i])[d] for i, along in facts.batch.dims.items() for d in along}
    cut, calls, flow = Cut(size or 1, 1, shards if size else 1), {}, Flow(program)
    state = {*facts.roles.stored, *facts.roles.state.values()}
    for e in gradients_of(program):
        call: Gradient = e.params["gradient"]
        batch, data = {}, []
        for k, v in enumerate(e.ins[: call.closed_over]):
            if v is None or state.issuperset(flow.inputs_behind([v])):
                continue  # weights may have a dimension that is one with the examples
            data.append(k)
            along = [d for d, c in enumerate(dims.big(v)) if c in rows]
            if len(along) == 1 and program.shapes[v][along[0]] % cut.shards == 0:
                batch[k] = along[0]
        calls[e.index] = Accumulated(call, call, batch, cut, passes, {}, data)
    return _noted(Rewritten(facts.traced, captured, calls, ()), passes)


def _with_rows(facts: Facts, captures: Captures, padded: Traced, passes: Passes, shards: int) -> Rewritten:
    """The step on a batch with rows added to it, with the numbers of the real ones."""
    whole, part, wanted, parts = captures.whole, captures.part, captures.needs, passes.options.microbatches
    if part is not None:  # padded losses, which are taken in microbatches like others
        large = Program(padded.closed)
        rows = [with_rows(whole, large, step, facts.batch) for step in (padded, part)]
        rewritten = _rewritten(Captures(rows[0], wanted, part=rows[1]), facts.roles, passes, _exact)
    else:  # the step with its gradients taken: it mixes examples as it likes
        rewritten = _rewritten(captures, facts.roles, passes, _coupling)
        larger = _rewritten(Captures(padded, wanted), facts.roles, passes, _coupling)
        programs = (Program(step.traced.closed) for step in (rewritten, larger))
        rewritten = replace(rewritten, traced=replace(rewritten.traced, closed=retraced(Padded(*programs))))
    size = facts.batch.size or 0
    more, into = (wanted.batch.size or 0) - size, f" into {parts} microbatches" if parts > 1 else ""
    message = (
        f"{more} row{'s' * (more > 1)} added to the {size} examples, which do not divide{into} over "
        f"{shards} device{'s' * (shards > 1)}; all numbers are those of the examples."
    )
    findings = (*rewritten.findings, Finding("padded", "info", message))
    real = np.asarray(rows_of(size + more, parts, shards) < size)
    return replace(rewritten, captured=whole, added=wanted.added, real=real, findings=findings)


Coupling = Callable[[Accumulated], Finding | None]  # of microbatches that are not the whole batch's sum
TakenBy = Callable[[Sequence[Any], Scale | None], list]


def _rewritten(captures: Captures, roles: Roles, passes: Passes, coupling: Coupling) -> Rewritten:
    step = captures.whole
    program, calls, findings, carried = Program(step.closed), {}, (), 0
    if captures.part is not None:
        calls = accumulations(captures, roles, passes)
        findings = _told(calls, coupling)
    whole = {} if calls else {e.index: _whole(e.params["gradient"], passes) for e in gradients_of(program)}
    axes = () if captures.mapped is None else tuple(captures.mapped.sizes)
    taking = _Rewriting(program, calls or whole, axes)
    if passes.options.precision == "fp16":
        traced, carried = with_scaled_gradients(step, taking, roles), CARRIED
    else:
        traced = with_gradients(step, taking)
    return _noted(Rewritten(traced, step, calls, findings, carried=carried), passes)


def _noted(rewritten: Rewritten, passes: Passes) -> Rewritten:
    """With what the passes did to the losses."""
    notes = (Finding("inside", "info", note) for note in passes.notes)
    findings = (*rewritten.findings, *notes)
    return replace(rewritten, findings=findings, rematted=tuple(passes.rematted))


def _told(calls: Mapping[int, Accumulated], coupling: Coupling) -> tuple[Finding, ...]:
    """What is to be said of gradient calls over microbatches."""
    said = (coupling(call) for call in calls.values())
    return tuple(finding for finding in said if finding is not None)


def _coupling(call: Accumulated) -> Finding | None:
    found, outputs = coupled(call), call.outputs
    by_hand = "as in a loop over microbatches written by hand, which --check"
    if found is None:
        return None
    why = found.why
    level, done = (
        "warning",
        f"the loss and gradients of the microbatches are averaged, {by_hand} compares with",
    )
    if outputs.carried:
        level = "info"
        done = (
            f"statistics are those of each microbatch and go on from one to the next, {by_hand} compares with"
        )
    elif outputs.exact:
        done = "averaged over the microbatches"
    return Finding("microbatches", level, f"{why[0].upper()}{why[1:]}: {done}.")


def _exact(call: Accumulated) -> None:
    """Refuse microbatches with rows added that don't give the numbers of the real rows."""
    outputs = call.outputs
    if outputs.exact and not outputs.guessed:
        return
    where = f" ({call.cause})" if call.cause else ""
    what = "an output beside the loss" if outputs.exact else "the loss"
    raise ShardError(
        f"--pad: {what} is no sum over examples{where}, so that no rows can be added to its "
        f"{call.cut.microbatches} microbatches; take a batch that divides, or leave --microbatches out"
    )


class _Rewriting(Taking):
    """Takes the gradients of a captured step by `calls`, which are given operands and the loss scale, by their index.

    With a loss scale, the devices along `axes` leave a step out together: where the gradients of one overflow.
    """

    def __init__(self, program: Program, calls: Mapping[int, TakenBy], axes: tuple[Name, ...]):
        super().__init__(program)
        self._taken_by, self._axes = calls, axes

    def __call__(self, *args: Any) -> list:
        outs = super().__call__(*args)
        if self._axes and self.scale is not None:
            off = jnp.where(all_finite(self.gradients), 0.0, jnp.inf)
            self.gradients = [lax.psum(off, self._axes)]
        return outs

    def take(self, e: Equation, operands: Sequence[Any]) -> list:
        return self._taken_by[e.index](operands, self.scale)


def _whole(call: Gradient, passes: Passes) -> TakenBy:
    """Takes a gradient of the whole batch, through the passes alone."""
    loss = Program(passes(call.loss, call.known, call.differentiated))
    return lambda operands, scale: taken_scaled(call, Replay(loss), operands, 1.0, scale)
