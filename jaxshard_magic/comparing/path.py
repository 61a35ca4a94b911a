"""The usual decision path to a strategy, with the figures of one step: does it fit on each device, how fast are the
links, is it a chain of layers? Its figures are those that the search compares by, so that it turns down nothing that
the search chooses."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..analysis.roofline import ERROR
from ..hardware import Chip
from ..report.choice import REFUSED, Question
from ..units import byte_text, limit_text, seconds_text
from .candidates import Candidate
from .space import is_pipeline

if TYPE_CHECKING:
    from .nodes import Node


def path(
    nodes: "Sequence[Node]", chip: Chip, limit: int | None, compared: "Callable[[Node], float | None]"
) -> tuple[Question, ...]:
    """`nodes`: all that was planned; `limit`: bytes of a device, None where unknown; `compared`: the seconds of a step
    that a node is compared by, None of those that are not."""

    def seconds(node: "Node") -> float | None:
        taken = compared(node)
        return node.sketch.seconds if taken is None and node.sketch is not None else taken

    return (_fits(nodes, limit), _links(nodes, chip, limit, seconds), _chain(_cut(nodes)))


def _fits(nodes: "Sequence[Node]", limit: int | None) -> Question:
    asks = "Does all of it fit on each device, with only the batch divided?"
    known = [n for n in _of(nodes, "dp") if n.peak is not None]
    if not known:
        return Question(asks, None, "the batch does not divide over all devices", yes="dp")
    bare = min(known, key=lambda n: (len(n.candidate.options), n.least))
    holds = None if bare.sketch is None else bare.sketch.holds
    because = f"arrays {byte_text(holds)}, with all in between {_needs(bare)}"
    if limit is None:
        return Question(asks, None, f"{because}; how much a device has is not known", yes="dp")
    because += f", of {limit_text(limit)}"
    fitting = [n for n in known if _has_room(n, limit)]
    if fitting and bare not in fitting:
        least = min(fitting, key=lambda n: n.least)
        because += f"; {_needs(least)} as {_label(least)}"
    return Question(asks, bool(fitting), because, yes="dp")


def _links(
    nodes: "Sequence[Node]", chip: Chip, limit: int | None, seconds: "Callable[[Node], float | None]"
) -> Question:
    asks = "Are the links fast enough to gather the weights as they are used?"

    def best(*strategies: str) -> "tuple[float, Node] | None":
        fit = [n for name in strategies for n in _of(nodes, name) if _has_room(n, limit)]
        timed = [(taken, n) for n in fit if (taken := seconds(n)) is not None]
        return min(timed, key=lambda each: each[0], default=None)

    leads = "fsdp" if _of(nodes, "fsdp") else "fsdp+tp"
    if best(leads) is None and limit is not None and (large := [n for n in _of(nodes, leads) if n.peak]):
        smallest = min(large, key=lambda n: n.peak or 0)
        because = f"it needs {_needs(smallest)} under {leads}, of {limit_text(limit)}"
        return Question(asks, False, because, yes=leads)
    found, other = best(leads), best("pp", "tp")
    parts = None if found is None else _parts(found[1])
    if found is None or parts is None:
        return Question(asks, None, f"no figures of {chip.name} tell", yes=leads)
    own, waits = parts
    because = f"{seconds_text(waits)} of waiting for them under {leads}, beside {seconds_text(own)} of work"
    if waits <= own:
        return Question(asks, True, because, yes=leads)
    if other is None:
        return Question(asks, True, f"{because}; no other way is known to fit", yes=leads)
    enough = found[0] <= (1 + ERROR) * other[0]
    takes = f"{seconds_text(other[0])} a step under {other[1].candidate.strategy}"
    because += f"; no other way is clearly faster: {takes}" if enough else f"; {takes}"
    return Question(asks, enough, because, yes=leads)


def _parts(node: "Node") -> tuple[float, float] | None:
    """Of a step what it computes and what it waits for the links, as compiled, else as planned."""
    report = None if node.trial is None else node.trial.report
    timing = None if report is None else report.timing
    if timing is not None and timing.predicted_step_s is not None and timing.exposed_s is not None:
        return timing.predicted_step_s - timing.exposed_s, timing.exposed_s
    known = node.sketch
    if known is None or known.own is None or known.seconds is None:
        return None
    return known.own, max(0.0, known.seconds - known.own)


def _of(nodes: "Sequence[Node]", strategy: str) -> "list[Node]":
    return [n for n in nodes if n.candidate.strategy == strategy and n.sketch is not None]


def _has_room(node: "Node", limit: int | None) -> bool:
    """Whether it fits, as it was compiled, else as it is estimated."""
    if node.trial is not None and node.trial.fits is not None:
        return node.trial.fits
    return limit is None or node.peak is None or node.peak <= limit


def _needs(node: "Node") -> str:
    about = "" if node.trial is not None and node.trial.peak is not None else "about "
    return f"{about}{byte_text(node.peak)}"


def _label(node: "Node") -> str:
    return node.candidate.label if isinstance(node.candidate, Candidate) else node.candidate.strategy


def _cut(nodes: "Sequence[Node]") -> int | str | None:
    """Into how many stages the most promising pipeline cuts the step, or why none does; None without one."""
    piped = [n for n in nodes if is_pipeline(n.candidate)]
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
