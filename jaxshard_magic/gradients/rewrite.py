"""Rewriting of a step's gradient calls as the options ask: microbatches, remat, precision, padding."""

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
from ..program.batching.padding import PaddedEmitter
from ..program.dimensions import Dimensions
from ..program.emit import Replay, retrace
from ..program.facts import Facts
from ..program.flow import Flow
from ..program.gradient_calls import GradientCall, GradientEmitter, gradient_equations, inline_gradients
from ..program.ir import Equation, Program
from ..program.per_device import AxisName, DeviceMapping, PerDeviceTrace, device_trace_context
from ..program.roles import InputRoles
from ..program.trace import Traced
from .accumulate import AccumulatedGradient, MicrobatchLoop, MicrobatchSplit
from .captures import Captures
from .loss_scaling import NUM_SCALE_VALUES, LossScale, all_finite, scaled_value_and_gradients, with_scaled_gradients
from .microbatch_calls import accumulated_gradients, find_coupling
from .padded import pad_step
from .passes import Passes
from .remat import RematLoss
from .rows import microbatch_rows


@dataclass(frozen=True)
class Rewritten:
    """Step with rewritten gradients.

    Attributes:
        traced: The step; for a step written for one device (`jax.pmap`, named axes), the work of each device.
        captured: The step before, with each gradient call as an equation.
        calls: Gradient calls over microbatches, by equation index in `captured`.
        findings: Messages about what was done.
        rematted: Losses with remat.
        carried: Number of first constants of `traced` that return as its last outputs.
        added: Dimension that rows are added to and their number, by flat argument.
        real_rows: Rows of each microbatch that are examples, bool[microbatches, rows]; None where none are added.
        mapped: Mapping onto devices of a step written for one device; None for other steps.
        undivided_reason: Reason why a pipeline takes the batch as one microbatch; None where the batch is divided, or
            one microbatch was asked for.
    """

    traced: Traced
    captured: Traced
    calls: Mapping[int, AccumulatedGradient]
    findings: tuple[Finding, ...]
    rematted: tuple[RematLoss, ...] = ()
    carried: int = 0
    added: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    real_rows: np.ndarray | None = None
    mapped: DeviceMapping | None = None
    undivided_reason: str | None = None

    @property
    def other_loss(self) -> str | None:
        """Reason why microbatches train on another loss than the whole batch; None for the same loss."""
        found = filter(None, map(find_coupling, self.calls.values()))
        return next((each.reason for each in found if not each.same_loss), None)

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the step's outputs, without added rows."""
        return [aval.shape for aval in self.captured.closed.out_avals]

    @property
    def needs_host_memory(self) -> bool:
        """Need for memory of kind `pinned_host`: some of `rematted` save residuals there."""
        return any(loss.needs_host_memory for loss in self.rematted)

    def reference_step(self) -> Traced | None:
        """Return the step with its microbatches as a plain Python loop; None where every loss is a sum over its
        examples, and with added rows.

        The loop is the reference for the step's numbers where a loss couples its examples. Cost: a trace of the step.
        """
        if self.added or all(call.outputs.exact for call in self.calls.values()):
            return None
        with device_trace_context(self.mapped):
            return inline_gradients(self.captured, MicrobatchLoop(Program(self.captured.closed), self.calls))


def require_gradients(captured: Traced, options: GradientOptions) -> None:
    """Raise ShardError for options of the gradients given to a step without gradient calls."""
    if options.changes_gradients and not gradient_equations(Program(captured.closed)):
        given = " and ".join(f"--{name.replace('_', '-')}" for name in options.given)
        raise ShardError(
            f"{given}: the step takes no gradient (jax.grad, jax.value_and_grad or a framework's) for it to work on"
        )


def with_plain_gradients(captured: Traced, mapped: DeviceMapping | None = None) -> Traced:
    """Return the step of `captured` with its gradients taken unchanged.

    Args:
        captured: The step with each gradient call as an equation.
        mapped: Mapping onto devices of a step written for one device; None for other steps.
    """
    with device_trace_context(mapped):
        return inline_gradients(captured, GradientEmitter(Program(captured.closed)))


def rewrite(
    facts: Facts, captures: Captures, options: GradientOptions, shards: int, *, ring: bool = False
) -> Rewritten:
    """Return the step that `options` ask for, with the same inputs and outputs.

    Args:
        facts: Facts of the step as it is.
        captures: The step captured at the shapes of its `needs`.
        options: Options of the gradients.
        shards: Number of shards of the batch over devices.
        ring: Whether attention becomes a primitive that can run as a ring.

    Raises:
        ShardError: The step's gradients can't be taken this way.
    """
    passes = Passes(options, ring)
    if captures.padded is not None:
        return _with_rows(facts, captures, captures.padded, passes, shards)
    with device_trace_context(captures.mapped):
        rewritten = _rewritten(captures, facts.roles, passes, _coupling)
    if isinstance(facts.traced, PerDeviceTrace):
        return replace(rewritten, traced=facts.traced.with_trace(rewritten.traced), mapped=captures.mapped)
    return rewritten


def in_microbatches(facts: Facts, captures: Captures, options: GradientOptions, *, ring: bool = False) -> Rewritten:
    """Return the gradient calls of a step over microbatches, for a pipeline to run. The step itself stays as it is.

    Args:
        facts: Facts of the step as it is.
        captures: The step captured at the shapes of its `needs`.
        options: Options of the gradients.
        ring: Whether attention becomes a primitive that can run as a ring.

    Raises:
        ShardError: The step's gradients can't be taken this way.
    """
    passes = Passes(options, ring)
    calls = accumulated_gradients(captures, facts.roles, passes)
    findings = _coupling_findings(calls, _coupling)
    return _noted(Rewritten(facts.traced, captures.whole, calls, findings), passes)


def as_one_microbatch(
    facts: Facts, captured: Traced, options: GradientOptions, mesh: Mesh, shards: int, *, ring: bool = False
) -> Rewritten:
    """Return the gradient calls of a step with the whole batch as one microbatch, for a pipeline to run.

    Args:
        facts: Facts of the step as it is.
        captured: The step with each gradient call as an equation.
        options: Options of the gradients.
        mesh: Mesh of one pipeline rank.
        shards: Number of shards of the batch on `mesh`.
        ring: Whether attention becomes a primitive that can run as a ring.
    """
    passes, program, size = Passes(options, ring), Program(captured.closed), facts.batch.size
    dims = Dimensions(program, tuple(mesh.shape.values()))
    rows = {dims.classes_of(program.inputs[i])[d] for i, along in facts.batch.input_dims.items() for d in along}
    cut, calls, flow = MicrobatchSplit(size or 1, 1, shards if size else 1), {}, Flow(program)
    state = {*facts.roles.storage_order, *facts.roles.state.values()}
    for e in gradient_equations(program):
        call: GradientCall = e.params["gradient"]
        batch, data = {}, []
        for k, v in enumerate(e.operands[: call.num_closed_over]):
            # Weights and state are no data, even with a dimension in the same class as the batch.
            if v is None or state.issuperset(flow.input_ancestors([v])):
                continue
            data.append(k)
            along = [d for d, c in enumerate(dims.nontrivial_classes(v)) if c in rows]
            if len(along) == 1 and program.shapes[v][along[0]] % cut.shards == 0:
                batch[k] = along[0]
        calls[e.index] = AccumulatedGradient(call, call, batch, cut, passes, {}, data)
    return _noted(Rewritten(facts.traced, captured, calls, ()), passes)


def _with_rows(facts: Facts, captures: Captures, padded: Traced, passes: Passes, shards: int) -> Rewritten:
    """Return the step on a padded batch, with the numbers of the real rows."""
    whole, part, wanted, parts = captures.whole, captures.part, captures.needs, passes.options.microbatches
    if part is not None:  # the losses are padded, and taken in microbatches like any other
        large = Program(padded.closed)
        rows = [pad_step(whole, large, step, facts.batch) for step in (padded, part)]
        rewritten = _rewritten(Captures(rows[0], wanted, part=rows[1]), facts.roles, passes, _exact)
    else:  # the differentiated step is padded as a whole, with all that it does to examples
        rewritten = _rewritten(captures, facts.roles, passes, _coupling)
        larger = _rewritten(Captures(padded, wanted), facts.roles, passes, _coupling)
        programs = (Program(step.traced.closed) for step in (rewritten, larger))
        rewritten = replace(rewritten, traced=replace(rewritten.traced, closed=retrace(PaddedEmitter(*programs))))
    size = facts.batch.size or 0
    more, into = (wanted.batch.size or 0) - size, f" into {parts} microbatches" if parts > 1 else ""
    message = (
        f"{more} row{'s' * (more > 1)} added to the {size} examples, which do not divide{into} over "
        f"{shards} device{'s' * (shards > 1)}; all numbers are those of the examples."
    )
    findings = (*rewritten.findings, Finding("padded", "info", message))
    real = np.asarray(microbatch_rows(size + more, parts, shards) < size)
    return replace(rewritten, captured=whole, added=wanted.added, real_rows=real, findings=findings)


Coupling = Callable[[AccumulatedGradient], Finding | None]  # message on microbatches that don't sum to the whole batch
TakenBy = Callable[[Sequence[Any], LossScale | None], list]


def _rewritten(captures: Captures, roles: InputRoles, passes: Passes, coupling: Coupling) -> Rewritten:
    step = captures.whole
    program, calls, findings, carried = Program(step.closed), {}, (), 0
    if captures.part is not None:
        calls = accumulated_gradients(captures, roles, passes)
        findings = _coupling_findings(calls, coupling)
    whole = {} if calls else {e.index: _whole(e.params["gradient"], passes) for e in gradient_equations(program)}
    axes = () if captures.mapped is None else tuple(captures.mapped.sizes)
    taking = _Rewriting(program, calls or whole, axes)
    if passes.options.precision == "fp16":
        traced, carried = with_scaled_gradients(step, taking, roles), NUM_SCALE_VALUES
    else:
        traced = inline_gradients(step, taking)
    return _noted(Rewritten(traced, step, calls, findings, carried=carried), passes)


def _noted(rewritten: Rewritten, passes: Passes) -> Rewritten:
    """Add messages about the passes over the losses."""
    notes = (Finding("inside", "info", note) for note in passes.notes)
    findings = (*rewritten.findings, *notes)
    return replace(rewritten, findings=findings, rematted=tuple(passes.rematted))


def _coupling_findings(calls: Mapping[int, AccumulatedGradient], coupling: Coupling) -> tuple[Finding, ...]:
    """Return messages about gradient calls over microbatches."""
    said = (coupling(call) for call in calls.values())
    return tuple(finding for finding in said if finding is not None)


def _coupling(call: AccumulatedGradient) -> Finding | None:
    found, outputs = find_coupling(call), call.outputs
    by_hand = "as in a loop over microbatches written by hand, which --check"
    if found is None:
        return None
    why = found.reason
    level, done = ("warning", f"the loss and gradients of the microbatches are averaged, {by_hand} compares with")
    if outputs.carried:
        level = "info"
        done = f"statistics are those of each microbatch and go on from one to the next, {by_hand} compares with"
    elif outputs.exact:
        done = "averaged over the microbatches"
    return Finding("microbatches", level, f"{why[0].upper()}{why[1:]}: {done}.")


def _exact(call: AccumulatedGradient) -> None:
    """Raise ShardError where a padded loss in microbatches doesn't give the numbers of the real rows."""
    outputs = call.outputs
    if outputs.exact and not outputs.averaged:
        return
    where = f" ({call.cause})" if call.cause else ""
    what = "an output beside the loss" if outputs.exact else "the loss"
    raise ShardError(
        f"--pad: {what} is no sum over examples{where}, so that no rows can be added to its "
        f"{call.cut.microbatches} microbatches; take a batch that divides, or leave --microbatches out"
    )


class _Rewriting(GradientEmitter):
    """Emitter of a captured step that takes its gradients by `calls`.

    Args:
        program: The captured step.
        calls: Functions of operands and loss scale, by equation index.
        axes: Names of the axes along which devices skip a step together: one device with overflow is enough. Read only
            with a loss scale.
    """

    def __init__(self, program: Program, calls: Mapping[int, TakenBy], axes: tuple[AxisName, ...]):
        super().__init__(program)
        self._taken_by, self._axes = calls, axes

    def __call__(self, *args: Any) -> list:
        outs = super().__call__(*args)
        if self._axes and self.scale is not None:
            # Devices must skip a step together, or their parameters diverge: one infinity makes the sum infinite for
            # all.
            off = jnp.where(all_finite(self.gradients), 0.0, jnp.inf)
            self.gradients = [lax.psum(off, self._axes)]
        return outs

    def take_gradient(self, e: Equation, operands: Sequence[Any]) -> list:
        return self._taken_by[e.index](operands, self.scale)


def _whole(call: GradientCall, passes: Passes) -> TakenBy:
    """Return a function that takes a gradient of the whole batch, after the passes."""
    loss = Program(passes(call.loss, call.known_constants, call.differentiated_positions))
    return lambda operands, scale: scaled_value_and_gradients(call, Replay(loss), operands, 1.0, scale)
