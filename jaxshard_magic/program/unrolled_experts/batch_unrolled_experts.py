"""Emission of a step with one batched equation in place of the equal equations of each expert."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import control_flow
from ..emit import Emitter
from ..ir import Body, Equation, Program, SubJaxpr, Value
from ..loss_rewrites import LossByEquation, ReplaceLosses, retrace_with_losses
from ..primitives import scan_counts
from ..trace import Traced
from .array_parts import ArrayPart
from .detection import ExecutionUnit, ExpertElement, UnrolledExperts, find_unrolled_experts, result_equation
from .expert_groups import BatchedEquation, ExpertConcat, ExpertFamily, ExpertSelect, ExpertSum


@dataclass(frozen=True)
class ExpertLoopLines:
    """Loops over experts in a step, for messages.

    Attributes:
        batched_lines: Source lines of the loops that are batched.
        obstacles: Line of text for each other loop, with the reason.
        unrouted_obstacles: The same for loops not known to be over routed experts.
    """

    batched_lines: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()
    unrouted_obstacles: tuple[str, ...] = ()


NO_EXPERT_LOOPS = ExpertLoopLines()


def batch_unrolled_experts(captured: Traced) -> tuple[Traced | None, ExpertLoopLines]:
    """Return a captured step with its experts batched, and its loops over experts.

    The step is None where nothing is batched. Results differ from the original step's by the rounding of sums over
    experts.
    """
    batched, detected = retrace_with_losses(captured, find_unrolled_experts, _BatchedExperts)
    loops = ExpertLoopLines(
        tuple(dict.fromkeys(line for experts in detected for line in experts.batched_lines)),
        tuple(line for f in detected for line in f.obstacles),
        tuple(line for f in detected for line in f.unrouted_obstacles),
    )
    return batched, loops


class _BatchedExperts(ReplaceLosses):
    """Emitter of a program with its unrolled experts batched.

    Args:
        program: The program.
        experts: Unrolled experts of the program.
        losses: Replacements for the losses of gradient calls, by equation index.
    """

    def __init__(self, program: Program, experts: UnrolledExperts, losses: LossByEquation):
        super().__init__(program, losses)
        self._experts = experts
        # `Emitter` has private attributes (`_tracebacks`, `_scopes`): a field of the same name would hide them.
        self._trip_parts = dict[Value, Any]()  # slices in the current trip

    def run(self, scope: SubJaxpr, args: Any) -> list:
        order = self._experts.orders.get(scope)
        if order is None:
            return super().run(scope, args)
        return scope.read_outputs(_BodyRun(self, scope, args).run_units(order))

    def _scan(self, e: Equation, values: list, body: Body) -> list:
        indexed_loop = self._experts.indexed_loops.get(e.index)
        if indexed_loop is None:
            return super()._scan(e, values, body)
        (n, k), trips, counter = scan_counts(e.params), e.params["length"], indexed_loop.counter_carry
        shapes, body_inputs = self.program.shapes, dict(zip(body.sub_jaxpr.inputs, values, strict=True))
        indices = None if counter is None else lax.iota(self.program.avals[e.results[counter]].dtype, trips)
        parts = [
            stacked_parts(body_inputs[part.source], part, trips, shapes[v]) for v, part in indexed_loop.parts.items()
        ]

        def trip(carry: Any, x: Any) -> tuple:
            index, trip_parts, xs = x
            start = list(carry)
            if counter is not None:
                start.insert(counter, index)
            # Loops may be nested: the slices of the outer one stay valid inside.
            outer_parts = self._trip_parts
            self._trip_parts = outer_parts | dict(zip(indexed_loop.parts, trip_parts, strict=True))
            try:
                outs = self.enter_body(body.sub_jaxpr, [*values[:n], *start, *xs])
            finally:
                self._trip_parts = outer_parts
            new_carry = outs[:k]
            if counter is not None:
                del new_carry[counter]
            return tuple(new_carry), tuple(outs[k:])

        start = values[n : n + k]
        if counter is not None:
            del start[counter]
        carry, ys = control_flow.scan(e, trip, start, (indices, parts, values[n + k :]))
        carry = list(carry)
        if counter is not None:
            # After the loop the counter is at the number of trips.
            carry.insert(counter, jnp.asarray(trips).astype(self.program.avals[e.results[counter]].dtype))
        return [*carry, *ys]

    def run_equation(self, e: Equation, values: list) -> list:
        if len(e.results) == 1 and e.results[0] in self._trip_parts:
            return [self._trip_parts[e.results[0]]]
        return super().run_equation(e, values)


class _BodyRun:
    """One run of a body in the order of its units.

    Args:
        emitter: Emitter of the program.
        scope: The body.
        args: Arrays of the body's inputs.

    Attributes:
        env: Arrays by value. Arrays of families, stacked along a new first dimension, are separate.
    """

    def __init__(self, emitter: Emitter, scope: SubJaxpr, args: Any):
        self._emitter, self._scope = emitter, scope
        self.env = scope.bind_inputs(args)
        self._stacks = dict[ExpertFamily, Any]()
        self._producers = emitter.program.producer

    def run_units(self, order: Sequence[ExecutionUnit]) -> dict[Value | None, Any]:
        for unit in order:
            with self._emitter.source_context(self._source_equation(unit)):
                self._run_unit(unit)
        return self.env

    def _source_equation(self, unit: ExecutionUnit) -> Equation:
        """Return the equation whose source line and name stack a unit is emitted under."""
        if isinstance(unit, BatchedEquation):
            return unit.equations[0]
        if isinstance(unit, (ExpertSum, ExpertConcat, ExpertSelect)):
            return result_equation(unit)
        if isinstance(unit, ExpertElement):
            return self._producers[unit.value]
        if isinstance(unit, ExpertFamily):
            return unit.reads[0][0] if unit.reads else self._producers[unit.values[0]]  # pyright: ignore[reportArgumentType]
        return unit

    def _run_unit(self, unit: ExecutionUnit) -> None:
        if isinstance(unit, BatchedEquation):
            self._run_batched(unit)
        elif isinstance(unit, ExpertSum):
            self._run_sum(unit)
        elif isinstance(unit, ExpertConcat):
            e, stack = unit.equation, self._stacks[unit.family]
            dim = e.params["axis" if e.name == "stack" else "dimension"]
            out = jnp.moveaxis(stack, 0, dim)
            self.env[e.results[0]] = out.reshape(e.jaxpr_eqn.outvars[0].aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(unit, ExpertSelect):
            self._run_select(unit)
        elif isinstance(unit, ExpertElement):
            self.env[unit.value] = lax.index_in_dim(self._stacks[unit.family], unit.expert, keepdims=False)
        elif isinstance(unit, ExpertFamily):
            self._stacks[unit] = self._stack_parts(unit) if unit.part is not None else self._stack_reads(unit)
        else:
            values = [self._read_operand(unit, k) for k in range(len(unit.operands))]
            self.env.update(zip(unit.results, self._emitter.run_equation(unit, values), strict=True))

    def _read_operand(self, e: Equation, k: int) -> Any:
        v = e.operands[k]
        return e.jaxpr_eqn.invars[k].val if v is None else self.env[v]  # pyright: ignore[reportAttributeAccessIssue]

    def _run_batched(self, unit: BatchedEquation) -> None:
        first = unit.equations[0]
        values = [
            self._read_operand(first, k) if family is None else self._stacks[family]
            for k, family in enumerate(unit.operands)
        ]
        batched_operands = [k for k, family in enumerate(unit.operands) if family is not None]

        def run_one(*parts: Any) -> list:
            own_operands = dict(zip(batched_operands, parts, strict=True))
            return self._emitter.run_equation(first, [own_operands.get(k, x) for k, x in enumerate(values)])

        outs = jax.vmap(run_one)(*(values[k] for k in batched_operands))
        self._stacks.update(zip(unit.results, outs, strict=True))

    def _run_sum(self, unit: ExpertSum) -> None:
        dtype = self._emitter.program.avals[unit.root.results[0]].dtype
        # Not the step's order of additions: results may differ by rounding.
        terms = [jnp.sum(self._stacks[family], axis=0, dtype=dtype) for family in unit.families]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        for e, k in unit.others:
            total = self._read_operand(e, k) + total
        self.env[unit.root.results[0]] = total

    def _run_select(self, unit: ExpertSelect) -> None:
        """Emit a selection among experts as a masked sum over experts."""
        out, stack = unit.last.results[0], self._stacks[unit.family]
        aval: Any = self._emitter.program.avals[out]
        mask = self._stacks[unit.mask]
        mask = mask if unit.select_if else ~mask
        mask = mask.reshape(len(mask), *(1,) * (stack.ndim - mask.ndim), *mask.shape[1:])
        # Successive selections overwrite each other, so of several masks that hold for an element the last one counts.
        later = lax.cumsum(mask.astype(jnp.int32), axis=0, reverse=True) - mask.astype(jnp.int32)
        selected = mask & (later == 0)
        # At most one addend of each element is not 0, so the sum is exact.
        total = jnp.sum(jnp.where(selected, stack, jnp.zeros((), stack.dtype)), axis=0, dtype=aval.dtype)
        self.env[out] = jnp.where(mask.any(0), total, jnp.asarray(self._read_operand(*unit.other), aval.dtype))

    def _stack_parts(self, unit: ExpertFamily) -> Any:
        assert unit.part is not None and unit.values[0] is not None
        shape = self._emitter.program.shapes[unit.values[0]]
        return stacked_parts(self.env[unit.part.source], unit.part, len(unit.values), shape)

    def _stack_reads(self, unit: ExpertFamily) -> Any:
        e, k = unit.reads[0]
        aval: Any = e.jaxpr_eqn.invars[k].aval
        values = [self._read_operand(*read) for read in unit.reads]
        is_literal_family = not any(v is not None for v in unit.values)
        if is_literal_family and jnp.issubdtype(aval.dtype, jnp.integer) and values == list(range(len(values))):
            return lax.iota(aval.dtype, len(values))
        return jnp.stack([jnp.asarray(x, None if isinstance(x, jax.Array) else aval.dtype) for x in values])


def stacked_parts(x: Any, part: ArrayPart, count: int, shape: tuple[int, ...]) -> Any:
    """Return consecutive slices of an array, stacked along a new first dimension: `(count, *shape)`.

    Args:
        x: The array.
        part: First slice.
        count: Number of slices.
        shape: Shape of each slice in the result.
    """
    if count * part.size != x.shape[part.dim]:
        x = lax.slice_in_dim(x, part.start, part.start + count * part.size, axis=part.dim)
    x = x.reshape(*x.shape[: part.dim], count, part.size, *x.shape[part.dim + 1 :])
    return jnp.moveaxis(x, part.dim, 0).reshape(count, *shape)
