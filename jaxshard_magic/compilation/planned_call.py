"""Trace, analyze, rewrite and plan one call of a step, before anything is compiled."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from ..config.request import Request
from ..errors import ShardError
from ..gradients.captures import needed_captures
from ..gradients.rewrite import Rewritten, rewrite
from ..plan import Plan
from ..program.explicit_axes import explicit_mesh_of
from ..program.facts import Facts
from ..program.flatten_call import FlatCall, ResultStructure, shape_structs
from ..program.gc_pause import gc_paused
from ..program.hooks import retrace_context
from ..program.loss import find_loss
from ..program.memory_kinds import memory_kind
from ..program.thread_state import JaxContexts
from ..program.trace import Traced
from ..strategies import find_facts, plan
from ..temporary import run_in_context
from .attention_choice import TracedPlan, choose_attention
from .donation import choose_donated
from .tracing import (
    TraceCache,
    TracedCall,
    capture_at_sizes,
    describe_sequential_loop,
    trace_call,
    with_batched_experts,
    with_blocked_scans,
)


@dataclass(frozen=True)
class PlannedCall:
    """One kind of call, planned.

    Attributes:
        facts: Analysis of the step as planned.
        result: Recipe for the step's result from flat outputs.
        rewritten: Rewritten gradient calls; None if nothing is rewritten.
        plan: Plan of the step.
        avals: Avals of the flat inputs, with padding rows of the batch.
        donated: Positions of donated flat inputs.
        trace_s: Seconds spent on tracing.
    """

    facts: Facts
    result: ResultStructure
    rewritten: Rewritten | None
    plan: Plan
    avals: Sequence[jax.ShapeDtypeStruct]
    donated: tuple[int, ...]
    trace_s: float

    @property
    def traced(self) -> Traced:
        """Traced step as planned."""
        return self.facts.traced


@run_in_context(gc_paused)
@run_in_context(retrace_context)
def plan_call(
    flat_call: FlatCall,
    request: Request,
    *,
    say: Callable[[str], None] = lambda _: None,
    traces: TraceCache | None = None,
) -> PlannedCall:
    """Trace and plan one kind of call.

    Args:
        flat_call: The call, with flat inputs.
        request: Strategy, mesh and options.
        say: Progress callback.
        traces: Shared traces of the same step; new traces are added.

    Raises:
        ShardError: JAX can't trace the step, or it can't be planned. Exceptions of the user's own code pass through.
    """
    avals = shape_structs(flat_call.leaves)
    if traces is None and request.attention == "auto":
        traces = TraceCache(captures=True)  # the forms of attention share one trace
    with mesh_context(request.mesh):
        way = choose_attention(request, partial(_plan_traced, flat_call, say=say, traces=traces))
    call, facts, rewritten, final_plan = way.call, way.facts, way.rewritten, way.plan
    final_plan = with_memory_kinds(final_plan, facts.traced, flat_call.leaves)
    final_plan = replace(
        final_plan,
        findings=(*final_plan.findings, *call.findings),
        explicit_axes=call.axes.mesh is not None,
        caller_mesh=explicit_mesh_of(request.mesh, flat_call.explicit_mesh),
    )
    if rewritten is not None:
        final_plan = replace(final_plan, findings=(*final_plan.findings, *rewritten.findings))
        for i, (dim, more) in rewritten.added.items():
            shape = list(avals[i].shape)
            shape[dim] += more
            avals[i] = avals[i].update(shape=tuple(shape))
    return PlannedCall(
        facts,
        call.result,
        rewritten,
        final_plan,
        avals,
        choose_donated(flat_call, facts.traced, final_plan, request.donate),
        way.trace_s,
    )


def _plan_traced(
    flat_call: FlatCall, request: Request, *, say: Callable[[str], None], traces: TraceCache | None
) -> TracedPlan:
    """Trace, rewrite and plan a call under a request with a definite form of attention."""
    start = time.perf_counter()
    call, own_placements = trace_or_reuse(flat_call, request, say, traces), flat_call.own_placements
    if not request.per_device:
        call = call.on_mesh(request.mesh, whole=True)
        call = with_blocked_scans(flat_call, request, call, own_placements, whole=True)
    trace_s = time.perf_counter() - start
    say(f"planning {request.strategy}")
    rewritten = None
    if "ep" in request.axes:
        call = with_batched_experts(flat_call, request, call)
    facts = find_facts(call.traced, request, own_placements)
    sequential_loops = (*call.loops.obstacles, *call.loops.unrouted_obstacles)
    if sequential_loops and not facts.mixes_experts:
        raise ShardError(describe_sequential_loop(sequential_loops[0]))
    if call.captured is not None:
        shards, options = request.shards, request.gradients
        needed = needed_captures(call.captured, facts, options, shards, per_device=request.per_device)
        rewritten = rewrite(facts, capture_at_sizes(flat_call, call, needed), options, shards, ring=request.rings)
        # The rewrite adds constants before the step's own.
        more = len(rewritten.traced.consts) - len(call.traced.consts)
        batch = {i + more: dims for i, dims in facts.batch.input_dims.items()}
        # Found in the step before the rewrite, as the rewritten gradient calls are no longer the user's own.
        loss = find_loss(facts.traced, facts.flow, facts.roles.state)
        facts = find_facts(rewritten.traced, request, own_placements, batch)
        return TracedPlan(call, facts, rewritten, replace(plan(facts, request), loss=loss), trace_s)
    return TracedPlan(call, facts, rewritten, plan(facts, request), trace_s)


def trace_or_reuse(
    flat_call: FlatCall, request: Request, say: Callable[[str], None], traces: TraceCache | None = None
) -> TracedCall:
    """Return the traced call, reused from `traces` if another request has left the trace unchanged."""
    say("tracing")
    if traces is None or request.per_device:
        return trace_call(flat_call, request)
    return traces.get_trace(flat_call, request)


def with_memory_kinds(plan: Plan, traced: Traced, leaves: Sequence[Any]) -> Plan:
    """Return `plan` with the memory kinds of inputs and outputs.

    Args:
        plan: Plan of the step.
        traced: Traced step; gives the memory kinds of outputs.
        leaves: Flat arguments; give the memory kinds of inputs.
    """
    inputs = tuple(map(memory_kind, (*traced.consts, *leaves)))
    outputs = tuple(map(memory_kind, traced.closed.out_avals))
    if not any((*inputs, *outputs)):
        return plan
    rows = tuple(replace(leaf, memory=kind) for leaf, kind in zip(plan.leaves, inputs, strict=True))
    return replace(plan, leaves=rows, in_memory=inputs, out_memory=outputs)


def mesh_context(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Return a context with `mesh` (None for no mesh) in place of a mesh set by the user."""
    current = jax.sharding.get_mesh()
    # JAX would take a mesh set by the user for the step's mesh.
    return nullcontext() if current.empty or current == mesh else JaxContexts(partial(jax.set_mesh, mesh))
