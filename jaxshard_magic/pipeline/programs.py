"""Programs of a stage: forward pass, backward pass, and its two halves, all cut out of one joint program.

Backward scans are split in two: first the input gradients for the stage before, then the weight gradients.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.source_info_util import current_name_stack  # jax has no public form
from jax.extend.core import ClosedJaxpr, Literal

from ..gradients.partial_replay import PartialEmitter, PartialReplay
from ..program import control_flow
from ..program.emit import Emitter, retrace
from ..program.flow import dependents, required_equations
from ..program.ir import Body, Equation, Program, Value
from ..program.op_labels import label_gradients
from ..program.primitives import scan_counts
from ..program.source_lines import user_context
from ..strategies.layout import Layout, Spec
from ..strategies.regions.deferred_reductions import DeferredReductions
from ..strategies.sharded_lowering import ShardedLowering
from .stages import Stage

ProgramOutput = Value | Literal  # a result of a stage's program


@dataclass(frozen=True)
class InputCounts:
    """Number of arrays of each kind among the inputs of a stage's joint program.

    Attributes:
        parameters: Parameters.
        other_inputs: Other inputs of the loss.
        incoming: Activations from the stage before.
        cotangents: Cotangents of outgoing activations, then of the loss.
    """

    parameters: int
    other_inputs: int
    incoming: int
    cotangents: int

    @property
    def forward(self) -> int:
        """Number of inputs of the forward pass."""
        return self.parameters + self.other_inputs + self.incoming


class StageProgram:
    """Forward and backward pass of one stage as one joint program, and the parts of it that a schedule runs.

    Signature: `(parameters, other inputs, incoming, cotangents)` -> `(outgoing, loss outputs, cotangents of incoming,
    gradients of parameters)`.

    Args:
        loss: The loss, with the equations of each stage in the name scope of the stage.
        stage: The stage.
        examples: Positions of the loss inputs that hold examples.
        halved_backward: Split backward scans in two, for a schedule with separate input and weight gradients. The
            results of the first scan for the second, over all layers, are held in memory between the two.
        opened: The joint program, if another object of the same stage has traced it.
    """

    def __init__(
        self,
        loss: Program,
        stage: Stage,
        examples: Collection[int],
        halved_backward: bool = True,
        opened: ClosedJaxpr | None = None,
    ):
        self.stage, self._loss, self.halved_backward = stage, loss, halved_backward
        self.differentiable_incoming = [k for k, v in enumerate(stage.incoming) if _is_differentiable(loss, v)]
        self.differentiable_outgoing = [k for k, v in enumerate(stage.outgoing) if _is_differentiable(loss, v)]
        self.makes_loss = 0 in stage.loss_outputs
        input_avals = loss.closed.in_avals
        self.avals = [
            *(input_avals[i] for i in stage.parameters),
            *(input_avals[i] for i in stage.other_inputs),
            *(loss.avals[v] for v in stage.incoming),
            *(loss.avals[stage.outgoing[k]] for k in self.differentiable_outgoing),
            *([loss.closed.out_avals[0]] if self.makes_loss else []),
        ]
        self.input_counts = InputCounts(
            len(stage.parameters),
            len(stage.other_inputs),
            len(stage.incoming),
            len(self.differentiable_outgoing) + self.makes_loss,
        )
        self.example_positions = [k for k, i in enumerate(stage.other_inputs) if i in examples]
        # Re-emitted, so that calls are inlined: subprograms are chosen by top-level equations.
        self._opened = retrace(Emitter(Program(self._trace_joint()))) if opened is None else opened
        first_cotangent = len(stage.outgoing) + len(stage.loss_outputs)
        urgent = range(first_cotangent, first_cotangent + len(self.differentiable_incoming))
        self.joint_program = Program(_halve_backward_scans(self._opened, urgent) if halved_backward else self._opened)
        ends = zip(self.joint_program.outputs, self.joint_program.closed.jaxpr.outvars, strict=True)
        self._ends: list[ProgramOutput] = [var if v is None else v for v, var in ends]

    @cached_property
    def with_halved_backward(self) -> "StageProgram":
        """The same stage with backward scans split in two."""
        if self.halved_backward:
            return self
        examples = {self.stage.other_inputs[k] for k in self.example_positions}
        return StageProgram(self._loss, self.stage, examples, opened=self._opened)

    def _trace_joint(self) -> ClosedJaxpr:
        """Trace the forward pass and its VJP as one jaxpr."""
        stage, loss = self.stage, self._loss
        forward_values = [*stage.outgoing, *(loss.outputs[j] for j in stage.loss_outputs)]
        forward = PartialReplay(loss, [v for v in forward_values if v is not None], stage.incoming)
        n, m, k = self.input_counts.parameters, self.input_counts.other_inputs, self.input_counts.incoming

        def run(*args: Any) -> list:
            parameters, others = args[:n], args[n : n + m]
            ins, cotangents = args[n + m : n + m + k], args[n + m + k :]

            def differentiable(parameters: Sequence[Any], moving: Sequence[Any]) -> tuple[list, list]:
                known = dict(zip(stage.incoming, ins, strict=True))
                known.update((stage.incoming[i], x) for i, x in zip(self.differentiable_incoming, moving, strict=True))
                inputs: list[Any] = [None] * len(loss.inputs)
                for i, x in zip((*stage.parameters, *stage.other_inputs), (*parameters, *others), strict=True):
                    inputs[i] = x
                made = forward(inputs, known)
                outs, gives = made[: len(stage.outgoing)], made[len(stage.outgoing) :]
                heads = [outs[i] for i in self.differentiable_outgoing] + gives[: int(self.makes_loss)]
                return heads, [*outs, *gives]

            # Only floating-point activations are differentiated: the cotangent of an integer is a float0 placeholder.
            moving = [ins[i] for i in self.differentiable_incoming]
            _, back, made = jax.vjp(differentiable, list(parameters), moving, has_aux=True)
            gradients, given_back = back(list(cotangents))
            return [*made, *given_back, *gradients]

        return jax.make_jaxpr(run)(*self.avals)

    @cached_property
    def forward(self) -> "Subprogram":
        """Subprogram `(parameters, other inputs, incoming)` -> `(outgoing, loss outputs, residuals)`."""
        return Subprogram(
            self.joint_program, range(self.input_counts.forward), (), [*self.forward_outputs, *self.residuals]
        )

    @cached_property
    def backward(self) -> "Subprogram":
        """Subprogram `(parameters, other inputs, cotangents, residuals)` -> `(cotangents of incoming, gradients)`."""
        return Subprogram(
            self.joint_program, self._backward_inputs, self.residuals, [*self.input_cotangents, *self.gradients]
        )

    @cached_property
    def input_gradient(self) -> "Subprogram":
        """Subprogram `(parameters, other inputs, cotangents, residuals)` -> `(cotangents of incoming, weight
        residuals)`."""
        return Subprogram(
            self.joint_program, self._backward_inputs, self.residuals, [*self.input_cotangents, *self.weight_residuals]
        )

    @cached_property
    def weight_gradient(self) -> "Subprogram":
        """Subprogram `(parameters, other inputs, cotangents, residuals, weight residuals)` -> `gradients`."""
        known = [*self.residuals, *self.weight_residuals]
        return Subprogram(self.joint_program, self._backward_inputs, known, self.gradients)

    def subprogram(self, kind: str) -> "Subprogram":
        """Return the subprogram of an action kind: F, B, I or W."""
        if kind == "F":
            return self.forward
        return {"B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}[kind]

    @property
    def _backward_inputs(self) -> list[int]:
        """Positions of backward inputs that exist without being stored for each microbatch."""
        s = self.input_counts
        return [*range(s.parameters + s.other_inputs), *range(s.forward, s.forward + s.cotangents)]

    @property
    def forward_outputs(self) -> list[ProgramOutput]:
        """Outgoing activations and loss outputs of the forward pass."""
        return self._ends[: len(self.stage.outgoing) + len(self.stage.loss_outputs)]

    @property
    def input_cotangents(self) -> list[ProgramOutput]:
        """Cotangents of the differentiable incoming activations."""
        first = len(self.forward_outputs)
        return self._ends[first : first + len(self.differentiable_incoming)]

    @property
    def gradients(self) -> list[ProgramOutput]:
        """Gradients, one per parameter."""
        return self._ends[len(self.forward_outputs) + len(self.differentiable_incoming) :]

    @cached_property
    def residuals(self) -> list[Value]:
        """Values of the forward pass, incoming activations included, that the backward pass reads."""
        # Values computed from parameters alone are recomputed: as residuals they would be stored once per microbatch.
        inputs, s = self.joint_program.inputs, self.input_counts
        n = s.parameters + s.other_inputs
        given = set(inputs[n : s.forward])
        after = dependents(self.joint_program.top, inputs[s.forward :])
        varying = dependents(self.joint_program.top, given | {inputs[s.parameters + k] for k in self.example_positions})
        ends = [*self.input_cotangents, *self.gradients]
        backward = [e for e in self.joint_program.top.equations if any(v in after for v in e.results)]
        read = dict.fromkeys(v for e in backward for v in e.operands if v is not None)
        read.update(dict.fromkeys(_without_literals(ends)))
        return [v for v in read if v not in after and (v in given or (v in varying and v not in inputs))]

    @cached_property
    def input_gradient_equations(self) -> set[int]:
        """Top-level equations that an input gradient runs."""
        return required_equations(self.joint_program.top, _without_literals(self.input_cotangents), set(self.residuals))

    @cached_property
    def backward_equations(self) -> set[int]:
        """Top-level equations that a full backward pass runs."""
        ends = [*self.input_cotangents, *self.gradients]
        return required_equations(self.joint_program.top, _without_literals(ends), set(self.residuals))

    @cached_property
    def weight_residuals(self) -> list[Value]:
        """Values computed by the input gradient and read by a separate weight gradient; empty without halved backward
        scans."""
        if not self.halved_backward:
            return []
        first, rest = self.input_gradient_equations, self.backward_equations - self.input_gradient_equations
        by_index = {e.index: e for e in self.joint_program.top.equations}
        made = {v for i in first for v in by_index[i].results}
        read = dict.fromkeys(v for i in sorted(rest) for v in by_index[i].operands if v in made)
        read.update(dict.fromkeys(v for v in _without_literals(self.gradients) if v in made))
        return list(read)


@dataclass(frozen=True)
class Subprogram:
    """A part of a stage's joint program.

    Attributes:
        joint_program: The joint program.
        input_positions: Positions of the program inputs read.
        known_values: Values read that another subprogram computed.
        results: Values to compute.
    """

    joint_program: Program
    input_positions: Sequence[int]
    known_values: Sequence[Value]
    results: Sequence[ProgramOutput]

    @property
    def avals(self) -> list[Any]:
        """Abstract values of the arguments."""
        inputs = self.joint_program.inputs
        return [self.joint_program.avals[v] for v in (*(inputs[i] for i in self.input_positions), *self.known_values)]


class SubprogramRunner:
    """Emit the subprograms of one stage, with or without the constraints of a layout.

    Args:
        program: The stage.
        layout: The layout of the joint program; None for a rank of one device.
    """

    def __init__(self, program: StageProgram, layout: Layout | None):
        self._program, self._gradients = program.joint_program, program.gradients
        kept = [*program.residuals, *program.weight_residuals]
        if layout is None:
            self._emitter: PlainSubprograms | ShardedSubprograms = PlainSubprograms(program.joint_program)
        else:
            of = {v: k for k, v in enumerate(program.gradients) if isinstance(v, Value)}
            named = label_gradients(program.joint_program, layout.flow, of)
            self._emitter = ShardedSubprograms(layout, named, external_reads=kept, accepts_partial=list(of))

    @property
    def lowering(self) -> ShardedLowering | None:
        """The emitter with the layout; None without a layout."""
        return self._emitter if isinstance(self._emitter, ShardedSubprograms) else None

    def partial_sum_spec(self, k: int) -> Spec | None:
        """Return the spec of the gradient of parameter k as partial sums; None for a complete gradient.

        Partial sums have a leading dimension with one entry per shard of the examples.
        """
        value = self._gradients[k]
        if not isinstance(self._emitter, ShardedSubprograms) or not isinstance(value, Value):
            return None
        return self._emitter.region(DeferredReductions).boundary_spec(value)

    def reduce_partial_sums(self, k: int, x: Any) -> Any:
        """Reduce the partial sums `x` to the gradient of parameter k."""
        value = self._gradients[k]
        assert isinstance(self._emitter, ShardedSubprograms)
        assert isinstance(value, Value)
        # The all-reduce gets the source line of the equation that makes the gradient, not the line of this call.
        made = next(e.jaxpr_eqn.source_info for e in self._program.top.equations if value in e.results)
        with user_context(made.traceback, name_stack=current_name_stack() + made.name_stack):
            return self._emitter.region(DeferredReductions).partial_sums.reduce(x, value, x.dtype)

    def __call__(self, share: Subprogram, args: Sequence[Any]) -> list:
        """Emit `share` on its inputs and known values, in this order."""
        inputs: list[Any] = [None] * len(self._program.inputs)
        for i, x in zip(share.input_positions, args, strict=False):
            inputs[i] = x
        known = dict(zip(share.known_values, args[len(share.input_positions) :], strict=True))
        self._emitter.choose([v for v in share.results if isinstance(v, Value)], share.known_values)
        made = iter(self._emitter.make(inputs, known))
        return [next(made) if isinstance(v, Value) else jnp.asarray(v.val) for v in share.results]


class PlainSubprograms(PartialEmitter, Emitter):
    """Emitter of subprograms without a layout."""


class ShardedSubprograms(PartialEmitter, ShardedLowering):
    """Emitter of subprograms with the constraints of a layout."""


def _is_differentiable(loss: Program, v: Value) -> bool:
    return bool(jnp.issubdtype(loss.avals[v].dtype, jnp.inexact))


def _without_literals(ends: Sequence[ProgramOutput]) -> list[Value]:
    return [v for v in ends if isinstance(v, Value)]


@dataclass(frozen=True)
class _ScanHalves:
    """Division of a scan's results between two scans.

    Attributes:
        carries: Positions of the carries of the first scan.
        stacked: Positions of the stacked results of the first scan.
        residuals: Body values computed by the first scan and read by the second.
    """

    carries: tuple[int, ...]
    stacked: tuple[int, ...]
    residuals: tuple[Value, ...]


def _halve_backward_scans(closed: ClosedJaxpr, urgent_outputs: Sequence[int]) -> ClosedJaxpr:
    """Run each scan with partly urgent results as two scans; nothing is computed twice.

    The first scan computes what the urgent outputs need, the second scan the rest.

    Args:
        closed: A forward and backward pass.
        urgent_outputs: Positions of the outputs needed first.
    """
    # The first half of a split scan reads fewer operands, so that scans before it may become divisible: split again.
    while True:
        program = Program(closed)
        outs = {v for i in urgent_outputs if (v := program.outputs[i]) is not None}
        first = required_equations(program.top, outs, ())
        read = outs | {v for e in program.top.equations if e.index in first for v in e.operands if v is not None}
        found = {
            e.index: halves
            for e in program.top.equations
            if e.index in first and e.is_scan and (halves := _find_halves(e, read)) is not None
        }
        if not found:
            return closed
        closed = retrace(_ScanHalver(program, found))


def _find_halves(e: Equation, read: Collection[Value]) -> _ScanHalves | None:
    """Return how to divide a scan of which others read some results first; None if one half would be empty."""
    consts, carried = scan_counts(e.params)
    scope = e.bodies[0].sub_jaxpr
    stacked = [j for j, v in enumerate(e.results[carried:]) if v in read]
    carries = {i for i, v in enumerate(e.results[:carried]) if v in read}
    # What the first scan reads of a carry, it must compute as well: repeat to a fixed point.
    while True:
        first_results = {scope.outputs[i] for i in carries} | {scope.outputs[carried + j] for j in stacked}
        first = required_equations(scope, {v for v in first_results if v is not None}, ())
        reads = first_results | {v for x in scope.equations if x.index in first for v in x.operands}
        needed_carries = {i for i in range(carried) if scope.inputs[consts + i] in reads} - carries
        if not needed_carries:
            break
        carries |= needed_carries
    if len(carries) == carried and len(stacked) == len(e.results) - carried:
        return None
    second_results = [v for j, v in enumerate(scope.outputs) if j not in carries and j - carried not in stacked]
    first_values = {v for x in scope.equations if x.index in first for v in x.results}
    first_values |= {scope.inputs[consts + i] for i in carries}
    second = required_equations(scope, {v for v in second_results if v is not None}, first_values)
    # The first scan already computes everything that the remaining results need.
    if not second - first:
        return None
    reads = {v for v in second_results if v is not None}
    reads |= {
        v for x in scope.equations if x.index in second and x.index not in first for v in x.operands if v is not None
    }
    return _ScanHalves(tuple(sorted(carries)), tuple(stacked), tuple(sorted(reads & first_values)))


class _ScanHalver(Emitter):
    """Emit a program with some scans as two scans each."""

    def __init__(self, program: Program, halves: Mapping[int, _ScanHalves]):
        super().__init__(program)
        self._halves = halves

    def _scan(self, e: Equation, values: list, body: Body) -> list:
        halves = self._halves.get(e.index)
        if halves is None:
            return super()._scan(e, values, body)
        _, carried = scan_counts(e.params)
        others = tuple(i for i in range(carried) if i not in halves.carries)
        ys = len(e.results) - carried
        other_stacked = tuple(j for j in range(ys) if j not in halves.stacked)
        first, residuals = self._run_half(e, values, halves.carries, halves.stacked, (), halves.residuals, [])
        second, _ = self._run_half(e, values, others, other_stacked, halves.residuals, (), residuals)
        outs: list[Any] = [None] * len(e.results)
        for half, results in (((halves.carries, halves.stacked), first), ((others, other_stacked), second)):
            positions = [*half[0], *(carried + j for j in half[1])]
            for i, x in zip(positions, results, strict=True):
                outs[i] = x
        return outs

    def _run_half(
        self,
        e: Equation,
        values: list,
        carries: tuple[int, ...],
        stacked: tuple[int, ...],
        known: tuple[Value, ...],
        residuals: tuple[Value, ...],
        known_stacks: list,
    ) -> tuple[list, list]:
        """Emit one half of a scan.

        Args:
            e: The scan.
            values: Operands of the scan.
            carries: Positions of the carries of this half.
            stacked: Positions of the stacked results of this half.
            known: Body values computed by the first half.
            residuals: Body values to return as well, stacked.
            known_stacks: The values of `known`, stacked.

        Returns:
            The final carries and stacked results, then the stacked residuals.
        """
        consts, carried = scan_counts(e.params)
        scope = e.bodies[0].sub_jaxpr
        ends = [*(scope.outputs[i] for i in carries), *(scope.outputs[carried + j] for j in stacked)]
        wanted = [v for v in ends if v is not None]
        part = PartialReplay(self.program, [*wanted, *residuals], known, scope)
        # An output that is a literal is no value of the program, but is in the jaxpr.
        literals = scope.jaxpr.outvars
        positions = [*carries, *(carried + j for j in stacked)]

        def trip(carry: Any, x: Any) -> tuple:
            own, stacks = x
            # Carries of the other half stay None: no equation of this half reads them.
            inside: list[Any] = [*values[:consts], *[None] * carried, *own]
            for i, now in zip(carries, carry, strict=True):
                inside[consts + i] = now
            made = part(inside, dict(zip(known, stacks, strict=True)))
            rest = iter(made)
            outs = [literals[k].val if v is None else next(rest) for k, v in zip(positions, ends, strict=True)]
            n = len(carries)
            return tuple(map(jnp.asarray, outs[:n])), (tuple(outs[n:]), tuple(rest))

        start = [values[consts + i] for i in carries]
        carry, (ys, extra) = control_flow.scan(e, trip, start, (tuple(values[consts + carried :]), tuple(known_stacks)))
        return [*carry, *ys], list(extra)
