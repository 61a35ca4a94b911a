"""Choose the form of attention over a sharded sequence dimension for `--attention auto`, by predicted bytes.

Each form is traced and planned; none is compiled.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config.request import Request
from ..device_arrays import count_hosts
from ..errors import ShardError
from ..gradients.rewrite import Rewritten
from ..plan import Finding, Plan, PlannedCollective, wire_bytes
from ..program.facts import Facts
from ..strategies.attention_form import with_sharded_heads
from ..strategies.footprint import footprint
from ..strategies.planned_collectives import planned_collectives
from ..strategies.sharded_lowering import ShardedLowering
from ..targets import target_of
from ..targets.device_memory import usable_bytes_for
from ..units import byte_text
from .tracing import TracedCall

FORMS = ("gather", "heads", "ring")  # simplest first: of equal costs `min` returns the first
MIN_SAVING_BYTES = 2**20  # bytes per step; a smaller saving is not worth a hint
# Sequence positions per device: from here on a full score matrix costs more than the additional bytes of a ring.
LONG_SEQUENCE = 2048


@dataclass(frozen=True)
class TracedPlan:
    """Step traced, rewritten and planned under a request.

    Attributes:
        call: Traced call.
        facts: Analysis of the rewritten step.
        rewritten: Rewritten gradient calls; None if the request rewrites nothing.
        plan: Plan of the rewritten step.
        trace_s: Seconds spent on tracing.
    """

    call: TracedCall
    facts: Facts
    rewritten: Rewritten | None
    plan: Plan
    trace_s: float


@dataclass(frozen=True)
class AttentionCost:
    """Predicted cost of a step per device.

    Attributes:
        sent_bytes: Bytes sent in a step.
        peak_bytes: Peak bytes of memory.
        positions: Sequence positions on a device.
    """

    sent_bytes: int
    peak_bytes: int
    positions: int


def choose_attention(
    request: Request, plan_with: Callable[[Request], TracedPlan], forms: Sequence[str] = FORMS
) -> TracedPlan:
    """Return the step as planned for a request; for `attention="auto"`, with the best form of attention.

    For "auto" every form is planned and none compiled, and a finding explains the choice.

    Args:
        request: Request with any strategy.
        plan_with: Plans the step with the form of attention named in a request.
        forms: Forms to try for "auto", gathered keys first.

    Raises:
        ShardError: Planning failed; for "auto", planning with gathered keys, a form open to any step.
    """
    if request.attention != "auto":
        return plan_with(request)
    ways: dict[str, TracedPlan] = {}
    refused: dict[str, str] = {}
    for form in forms:
        try:
            way = plan_with(replace(request, attention=form))
        except ShardError as error:
            # Keys can be gathered in any step: this error is not about the form of attention.
            if form == forms[0]:
                raise
            refused[form] = error.why
            continue
        # Attention that a ring can't compute is planned in another form, without an error.
        if form == "ring" and way.plan.attention != form:
            refused[form] = "no attention over divided positions is one that it takes"
        else:
            ways[form] = way
    costs = {form: _predicted_cost(way.plan) for form, way in ways.items()}
    form = cheapest_form(costs, _memory_limit(request))
    why = Finding("attention-chosen", "info", describe_choice(form, costs, refused))
    best = ways[form]
    return replace(best, plan=replace(best.plan, findings=(*best.plan.findings, why)))


def suggest_sharded_heads(plan: Plan) -> Finding | None:
    """Return a finding with the bytes saved by sharding attention heads in place of gathering keys and values.

    Returns:
        None if the plan gathers no keys and values, some heads don't divide, or fewer than `MIN_SAVING_BYTES` are
        saved.
    """
    if plan.attention != "gather" or not isinstance(plan.run, ShardedLowering):
        return None
    moves, axes = list(planned_collectives(plan.run)), set(plan.run.layout.position_axes)
    if _sent_bytes(move for move in moves if not axes.isdisjoint(move.axes)) < MIN_SAVING_BYTES:
        return None
    layout = with_sharded_heads(plan.run.layout)
    if layout is None:
        return None
    now, then = _sent_bytes(moves), _sent_bytes(planned_collectives(ShardedLowering(layout)))
    if now - then < MIN_SAVING_BYTES:
        return None
    message = (
        f"Attention gathers keys and values of all positions: a device sends {byte_text(now)} in a step, by the plan. "
        f"With its heads divided instead it would send {byte_text(then)}, {byte_text(now - then)} less."
    )
    return Finding("attention-gathers", "info", message, f"%%shard {plan.strategy} --attention heads")


def cheapest_form(costs: Mapping[str, AttentionCost], limit_bytes: int | None) -> str:
    """Return the form with the fewest bytes sent among the forms fitting into memory, the simplest among equals.

    If none fits, or if a device has `LONG_SEQUENCE` positions or more, return the form with the smallest peak memory.

    Args:
        costs: Predicted cost by form, simplest form first.
        limit_bytes: Usable memory of a device in bytes; None if unknown.

    >>> forms = {"gather": AttentionCost(200, 5, 64), "heads": AttentionCost(100, 6, 64)}
    >>> cheapest_form(forms, None), cheapest_form(forms, 5), cheapest_form(forms, 4)
    ('heads', 'gather', 'gather')
    """
    fitting = [form for form, each in costs.items() if limit_bytes is None or each.peak_bytes <= limit_bytes]
    if fitting and max(each.positions for each in costs.values()) < LONG_SEQUENCE:
        return min(fitting, key=lambda form: costs[form].sent_bytes)
    return min(costs, key=lambda form: (costs[form].peak_bytes, costs[form].sent_bytes))


def describe_choice(form: str, costs: Mapping[str, AttentionCost], refused: Mapping[str, str]) -> str:
    """Return the reason for choosing `form`, with a sentence for each other form.

    Args:
        form: Chosen form.
        costs: Predicted cost by form.
        refused: Reason for refusal, by refused form.
    """
    selected = costs[form]
    sentences = [
        f"Attention over divided positions is --attention {form}: a device sends "
        f"{byte_text(selected.sent_bytes)} in a step and "
        f"holds up to {byte_text(selected.peak_bytes)}, by the plan."
    ]
    sentences += [
        f"With {other} it would send {byte_text(each.sent_bytes)} and hold {byte_text(each.peak_bytes)}."
        for other, each in costs.items()
        if other != form
    ]
    sentences += [f"Not {other}: {why.removeprefix(f'--attention {other}: ')}." for other, why in refused.items()]
    return " ".join(sentences)


def _memory_limit(request: Request) -> int | None:
    """Return the usable memory of a device in bytes; None if unknown, or if hosts may differ."""
    # A host knows the memory of its own devices only, and all hosts must choose the same form.
    several = target_of(request.mesh) is None and count_hosts(request.mesh) > 1
    return None if several else usable_bytes_for(request.mesh, request.chip)


def _sent_bytes(moves: Iterable[PlannedCollective]) -> int:
    """Return the bytes sent by a device for `moves`."""
    return sum(wire_bytes(move.kind, move.group_size, move.bytes * move.count) for move in moves)


def _predicted_cost(plan: Plan) -> AttentionCost:
    """Return the predicted cost of a plan."""
    assert isinstance(plan.run, ShardedLowering)
    sent = _sent_bytes(planned_collectives(plan.run))
    layout = plan.run.layout
    longest = max((layout.dims.largest[c] for c in layout.position_classes), default=0)
    return AttentionCost(sent, footprint(plan.run).peak, longest // layout.device_count(layout.position_axes))
