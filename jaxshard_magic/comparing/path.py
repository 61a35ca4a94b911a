"""The usual decision path to a strategy, with the figures of one step: does it fit on each device, how fast are the
links, is it a chain of layers?"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..hardware import Chip
from ..report.choice import REFUSED, Question
from ..units import byte_text, limit_text, seconds_text
from .candidates import Candidate
from .space import is_pipeline

if TYPE_CHECKING:
    from .nodes import Node
    from .sketch import Sketch


def path(families: "Sequence[Node]", chip: Chip, limit: int | None) -> tuple[Question, ...]:
    """`families`: strategies on meshes as they were planned; `limit`: bytes of a device, None where unknown."""
    return (_fits(families, limit), _links(families, chip), _chain(_cut(families)))


def _fits(families: "Sequence[Node]", limit: int | None) -> Question:
    asks = "Does all of it fit on each device, with only the batch divided?"
    known = _best(families, "dp")
    if known is None or known.needs is None or known.holds is None:
        return Question(asks, None, "the batch does not divide over all devices", yes="dp")
    because = f"arrays {byte_text(known.holds)}, with all in between about {byte_text(known.needs)}"
    if limit is None:
        return Question(asks, None, f"{because}; how much a device has is not known", yes="dp")
    return Question(asks, known.needs <= limit, f"{because}, of {limit_text(limit)}", yes="dp")


def _links(families: "Sequence[Node]", chip: Chip) -> Question:
    asks = "Are the links fast enough to gather the weights as they are used?"
    known, leads = _best(families, "fsdp"), "fsdp"
    if known is None:
        known, leads = _best(families, "fsdp+tp"), "fsdp+tp"
    if known is None or known.own is None or known.sent is None:
        return Question(asks, None, f"no figures of {chip.name} tell", yes=leads)
    own, sent = seconds_text(known.own), seconds_text(known.sent)
    because = f"{sent} to send under {leads}, beside {own} of products and update"
    return Question(asks, known.sent <= known.own, because, yes=leads)


def _cut(families: "Sequence[Node]") -> int | str | None:
    """Into how many stages the most promising pipeline cuts the step, or why none does; None without one."""
    piped = [n for n in families if is_pipeline(n.candidate)]
    cut = [(n.least, n.sketch.stages) for n in piped if n.sketch is not None and n.sketch.stages]
    if cut:
        return min(cut)[1]
    return next((n.why for n in piped if n.outcome == REFUSED and isinstance(n.candidate, Candidate)), None)


def _chain(cut: int | str | None) -> Question:
    if cut is None:
        answer, because = None, "it was not tried to cut it into stages"
    elif isinstance(cut, str):
        answer, because = False, f"it can't be cut into stages: {cut.partition('. ')[0]}"
    else:
        answer, because = True, f"it can be cut into {cut} stages"
    return Question("Is it a chain of layers?", answer, because, yes="pp", no="tp")


def _best(families: "Sequence[Node]", strategy: str) -> "Sketch | None":
    """Of a strategy's meshes the one that takes least time as planned."""
    known = [n for n in families if n.candidate.strategy == strategy and n.sketch is not None]
    return min(known, key=lambda n: n.least).sketch if known else None
