"""`--attention auto`: of the forms of attention over divided positions that fit the one that sends least, by plans."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config.request import Request
from ..errors import ShardError
from ..gradients.rewrite import Rewritten
from ..placing import hosts_of
from ..plan import Finding, Plan, Sent
from ..program.facts import Facts
from ..strategies.attention import divides_heads
from ..strategies.footprint import footprint
from ..strategies.hold import Hold
from ..strategies.traffic import traffic
from ..targets import target_of
from .tracing import TracedCall

FORMS = ("gather", "heads", "ring")  # from the simplest on
LEAST = 2**20  # bytes a step: what saves less is not worth a hint
LONG = 2048  # positions on a device: from here on scores of all of them with each other outweigh what a ring sends more


@dataclass(frozen=True)
class Way:
    """A step as a request has it traced (`call`, in `trace_s` seconds), rewritten and planned; `facts` of the rewritten
    one."""

    call: TracedCall
    facts: Facts
    rewritten: Rewritten | None
    plan: Plan
    trace_s: float


@dataclass(frozen=True)
class Weighed:
    """What a device sends in a step, and the most that it holds, in bytes, and the positions that it has, as plans tell
    them."""

    sent: int
    held: int
    positions: int


def with_attention(request: Request, way_of: Callable[[Request], Way], forms: Sequence[str] = FORMS) -> Way:
    """The way that a request asks for; of one whose attention is "auto" the best, with a finding that says why.

    Args:
        request: of any strategy.
        way_of: plans the step with the form of attention that a request names.
        forms: those that "auto" has, gathered keys first.

    For "auto" every form is planned and none compiled. Raises what `way_of` raises; for "auto" what it raises for
    gathered keys, which any step can have.
    """
    if request.attention != "auto":
        return way_of(request)
    ways: dict[str, Way] = {}
    refused: dict[str, str] = {}
    for form in forms:
        try:
            way = way_of(replace(request, attention=form))
        except ShardError as error:
            if form == forms[0]:
                raise
            refused[form] = error.why
            continue
        if form == "ring" and way.plan.attention != form:
            refused[form] = "no attention over divided positions is one that it takes"
        else:
            ways[form] = way
    weighed = {form: _weighed(way.plan) for form, way in ways.items()}
    form = chosen(weighed, _room(request))
    why = Finding("attention-chosen", "info", reason(form, weighed, refused))
    best = ways[form]
    return replace(best, plan=replace(best.plan, findings=(*best.plan.findings, why)))


def hint(plan: Plan) -> Finding | None:
    """What dividing heads would save, by the plan, where attention gathers keys and values; None where that is little,
    or where some heads don't divide."""
    from ..units import byte_text

    if plan.attention != "gather" or not isinstance(plan.run, Hold):
        return None
    moves, axes = list(traffic(plan.run)), set(plan.run.layout.sequence_axes)
    if _bytes(move for move in moves if not axes.isdisjoint(move.axes)) < LEAST:
        return None
    layout = divides_heads(plan.run.layout)
    if layout is None:
        return None
    now, then = _bytes(moves), _bytes(traffic(Hold(layout)))
    if now - then < LEAST:
        return None
    message = (
        f"Attention gathers keys and values of all positions: a device sends {byte_text(now)} in a step, by the plan. "
        f"With its heads divided instead it would send {byte_text(then)}, {byte_text(now - then)} less."
    )
    return Finding("attention-gathers", "info", message, f"%%shard {plan.strategy} --attention heads")


def chosen(weighed: Mapping[str, Weighed], room: int | None) -> str:
    """The form that sends least of those that fit into `room`, the simplest of equals; where none fits, and where a
    device has `LONG` positions, the one that holds least. `room`: bytes of a device, None where that is not known.

    >>> forms = {"gather": Weighed(200, 5, 64), "heads": Weighed(100, 6, 64)}
    >>> chosen(forms, None), chosen(forms, 5), chosen(forms, 4)
    ('heads', 'gather', 'gather')
    """
    fitting = [form for form, each in weighed.items() if room is None or each.held <= room]
    if fitting and max(each.positions for each in weighed.values()) < LONG:
        return min(fitting, key=lambda form: weighed[form].sent)
    return min(weighed, key=lambda form: (weighed[form].held, weighed[form].sent))


def reason(form: str, weighed: Mapping[str, Weighed], refused: Mapping[str, str]) -> str:
    """Why a form was chosen, in a sentence for each of the others."""
    from ..units import byte_text

    own = weighed[form]
    said = [
        f"Attention over divided positions is --attention {form}: a device sends {byte_text(own.sent)} in a step and "
        f"holds up to {byte_text(own.held)}, by the plan."
    ]
    said += [
        f"With {other} it would send {byte_text(each.sent)} and hold {byte_text(each.held)}."
        for other, each in weighed.items()
        if other != form
    ]
    said += [f"Not {other}: {why.removeprefix(f'--attention {other}: ')}." for other, why in refused.items()]
    return " ".join(said)


def _room(request: Request) -> int | None:
    """Bytes that a device has room for. Several hosts know it of their own devices alone, and have to choose alike."""
    from ..analysis.memory import room_for

    several = target_of(request.mesh) is None and hosts_of(request.mesh) > 1
    return None if several else room_for(request.mesh, request.chip)


def _bytes(moves: Iterable[Sent]) -> int:
    """What a device sends of them."""
    from ..analysis.collectives import wire_bytes

    return sum(wire_bytes(move.kind, move.group_size, move.bytes * move.count) for move in moves)


def _weighed(plan: Plan) -> Weighed:
    assert isinstance(plan.run, Hold)
    sent = _bytes(traffic(plan.run))
    layout = plan.run.layout
    longest = max((layout.dims.largest[c] for c in layout.sequence), default=0)
    return Weighed(sent, footprint(plan.run).peak, longest // layout.count(layout.sequence_axes))
