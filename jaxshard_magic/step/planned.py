"""One call of a step traced, understood, rewritten and planned: all that is known before anything is compiled."""

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
from ..gradients.captures import needs
from ..gradients.rewrite import Rewritten, rewrite
from ..plan import Plan
from ..program.facts import Facts
from ..program.garbage import uncollected
from ..program.hooks import retracing
from ..program.loss import find_loss
from ..program.memory_kinds import memory_kind
from ..program.peel import Peeled, Result, specs
from ..program.thread_state import Entered
from ..program.trace import Traced
from ..strategies import plan, understand
from ..temporary import within
from .attention import Way, with_attention
from .donation import to_donate
from .tracing import TracedCall, Traces, apart, capture, experts_side_by_side, scans_in_blocks, trace_call


@dataclass(frozen=True)
class Planned:
    """`facts`: of the step as it is planned. `avals`: the flat inputs, with rows that are added to the batch.
    `donated`: those whose memory outputs take over. `trace_s`: seconds."""

    facts: Facts
    result: Result
    rewritten: Rewritten | None
    plan: Plan
    avals: Sequence[jax.ShapeDtypeStruct]
    donated: tuple[int, ...]
    trace_s: float

    @property
    def traced(self) -> Traced:
        """The step as it is planned."""
        return self.facts.traced


@within(uncollected)
@within(retracing)
def planned(
    peeled: Peeled,
    request: Request,
    *,
    say: Callable[[str], None] = lambda _: None,
    traces: Traces | None = None,
) -> Planned:
    """Trace one kind of call of a step, and plan it. `traces`: of the same step before; what is traced is put there.

    Raises `ShardError` for a step that jax can't trace and for what can't be planned; an exception of the user's own
    code passes through.
    """
    avals = specs(peeled.leaves)
    if traces is None and request.attention == "auto":
        traces = Traces(captures=True)  # one for all forms of attention
    with own_mesh(request.mesh):
        way = with_attention(request, partial(_way, peeled, say=say, traces=traces))
    call, facts, rewritten, decided = way.call, way.facts, way.rewritten, way.plan
    decided = with_memory_kinds(decided, facts.traced, peeled.leaves)
    decided = replace(decided, findings=(*decided.findings, *call.findings))
    if rewritten is not None:
        decided = replace(decided, findings=(*decided.findings, *rewritten.findings))
        for i, (dim, more) in rewritten.added.items():
            shape = list(avals[i].shape)
            shape[dim] += more
            avals[i] = avals[i].update(shape=tuple(shape))
    return Planned(
        facts,
        call.result,
        rewritten,
        decided,
        avals,
        to_donate(peeled, facts.traced, decided, request.donate),
        way.trace_s,
    )


def _way(peeled: Peeled, request: Request, *, say: Callable[[str], None], traces: Traces | None) -> Way:
    start = time.perf_counter()
    call, metadata = traced(peeled, request, say, traces), [noted for _, noted, _ in peeled.inputs]
    if not request.per_device:
        call = call.at_home(request.mesh, whole=True)
        call = scans_in_blocks(peeled, request, call, metadata, whole=True)
    trace_s = time.perf_counter() - start
    say(f"planning {request.strategy}")
    rewritten = None
    if "ep" in request.axes:
        call = experts_side_by_side(peeled, request, call)
    facts = understand(call.traced, request, metadata)
    in_the_way = (*call.loops.apart, *call.loops.unsure)
    if in_the_way and not facts.mixes_experts:
        raise ShardError(apart(in_the_way[0]))
    if call.captured is not None:
        shards, options = request.shards, request.gradients
        wanted = needs(call.captured, facts, options, shards, per_device=request.per_device)
        rewritten = rewrite(facts, capture(peeled, call, wanted), options, shards, ring=request.rings)
        more = len(rewritten.traced.consts) - len(call.traced.consts)  # constants of its own come first
        batch = {i + more: dims for i, dims in facts.batch.dims.items()}
        loss = find_loss(
            facts.traced, facts.flow, facts.roles.state
        )  # whose gradient calls are as the user has them
        facts = understand(rewritten.traced, request, metadata, batch)
        return Way(call, facts, rewritten, replace(plan(facts, request), loss=loss), trace_s)
    return Way(call, facts, rewritten, plan(facts, request), trace_s)


def traced(
    peeled: Peeled, request: Request, say: Callable[[str], None], traces: Traces | None = None
) -> TracedCall:
    """The call traced, or as it was traced before under another request that leaves it as it is."""
    say("tracing")
    if traces is None or request.per_device:
        return trace_call(peeled, request)
    return traces.of(peeled, request)


def with_memory_kinds(plan: Plan, traced: Traced, leaves: Sequence[Any]) -> Plan:
    """Return `plan` with the memory kinds of inputs, as the flat arguments `leaves` have them, and of outputs, as the
    step `traced` for them puts them."""
    inputs = tuple(map(memory_kind, (*traced.consts, *leaves)))
    outputs = tuple(map(memory_kind, traced.closed.out_avals))
    if not any((*inputs, *outputs)):
        return plan
    rows = tuple(replace(leaf, memory=kind) for leaf, kind in zip(plan.leaves, inputs, strict=True))
    return replace(plan, leaves=rows, in_memory=inputs, out_memory=outputs)


def own_mesh(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Another mesh that the user has set would be taken for the step's; None for none at all."""
    current = jax.sharding.get_mesh()
    return nullcontext() if current.empty or current == mesh else Entered(partial(jax.set_mesh, mesh))
