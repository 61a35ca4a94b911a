"""Usual decision path to a strategy, answered for one step.

Three questions: does the step fit on each device, how fast are the links, is the step a chain of layers? The figures
are those compared by the search, so no answer turns down a strategy chosen by the search.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..analysis.roofline import PREDICTION_ERROR
from ..hardware import Chip
from ..report.choice import REFUSED, Question
from ..units import byte_text, limit_text, seconds_text
from .candidates import Candidate
from .search_space import is_pipeline

if TYPE_CHECKING:
    from .nodes import SearchNode


def decision_questions(
    nodes: "Sequence[SearchNode]", chip: Chip, limit: int | None, compared: "Callable[[SearchNode], float | None]"
) -> tuple[Question, ...]:
    """Return the questions with their answers.

    Args:
        nodes: All planned candidates.
        chip: Chip with the figures.
        limit: Usable bytes of a device; None if unknown.
        compared: Returns the step's seconds compared by the search; None for candidates not compared.
    """

    def seconds(node: "SearchNode") -> float | None:
        # The search compares these figures, so that the answers agree with its choice.
        taken = compared(node)
        return node.sketch.seconds if taken is None and node.sketch is not None else taken

    return (_fits(nodes, limit), _links(nodes, chip, limit, seconds), _chain(_cut(nodes)))


def _fits(nodes: "Sequence[SearchNode]", limit: int | None) -> Question:
    """Answer whether the whole step fits on each device if only the batch is sharded."""
    asks = "Does all of it fit on each device, with only the batch divided?"
    known = [n for n in _of(nodes, "dp") if n.peak is not None]
    if not known:
        return Question(asks, None, "the batch does not divide over all devices", yes="dp")
    bare = min(known, key=lambda n: (len(n.candidate.options), n.min_seconds))
    holds = None if bare.sketch is None else bare.sketch.array_bytes
    because = f"arrays {byte_text(holds)}, with all in between {_needs(bare)}"
    if limit is None:
        return Question(asks, None, f"{because}; how much a device has is not known", yes="dp")
    because += f", of {limit_text(limit)}"
    fitting = [n for n in known if _has_room(n, limit)]
    if fitting and bare not in fitting:
        least = min(fitting, key=lambda n: n.min_seconds)
        because += f"; {_needs(least)} as {_label(least)}"
    return Question(asks, bool(fitting), because, yes="dp")


def _links(
    nodes: "Sequence[SearchNode]", chip: Chip, limit: int | None, seconds: "Callable[[SearchNode], float | None]"
) -> Question:
    """Answer whether the links are fast enough to gather weights at each use."""
    asks = "Are the links fast enough to gather the weights as they are used?"

    def best(*strategies: str) -> "tuple[float, SearchNode] | None":
        fit = [n for name in strategies for n in _of(nodes, name) if _has_room(n, limit)]
        timed = [(taken, n) for n in fit if (taken := seconds(n)) is not None]
        return min(timed, key=lambda each: each[0], default=None)

    leads = "fsdp" if _of(nodes, "fsdp") else "fsdp+tp"
    if best(leads) is None and limit is not None and (large := [n for n in _of(nodes, leads) if n.peak]):
        smallest = min(large, key=lambda n: n.peak or 0)
        because = f"it needs {_needs(smallest)} under {leads}, of {limit_text(limit)}"
        return Question(asks, False, because, yes=leads)
    leading, other = best(leads), best("pp", "tp")
    parts = None if leading is None else _parts(leading[1])
    if leading is None or parts is None:
        return Question(asks, None, f"no figures of {chip.name} tell", yes=leads)
    own, waits = parts
    because = f"{seconds_text(waits)} of waiting for them under {leads}, beside {seconds_text(own)} of work"
    if waits <= own:
        return Question(asks, True, because, yes=leads)
    if other is None:
        return Question(asks, True, f"{because}; no other way is known to fit", yes=leads)
    # A difference within the error of predictions is no reason against the usual way.
    enough = leading[0] <= (1 + PREDICTION_ERROR) * other[0]
    takes = f"{seconds_text(other[0])} a step under {other[1].candidate.strategy}"
    because += f"; no other way is clearly faster: {takes}" if enough else f"; {takes}"
    return Question(asks, enough, because, yes=leads)


def _parts(node: "SearchNode") -> tuple[float, float] | None:
    """Return the seconds of computing and of exposed communication in a step, as compiled, else as planned."""
    report = None if node.trial is None else node.trial.report
    timing = None if report is None else report.timing
    if timing is not None and timing.predicted_step_s is not None and timing.exposed_s is not None:
        return timing.predicted_step_s - timing.exposed_s, timing.exposed_s
    known = node.sketch
    if known is None or known.compute_seconds is None or known.seconds is None:
        return None
    return known.compute_seconds, max(0.0, known.seconds - known.compute_seconds)


def _of(nodes: "Sequence[SearchNode]", strategy: str) -> "list[SearchNode]":
    return [n for n in nodes if n.candidate.strategy == strategy and n.sketch is not None]


def _has_room(node: "SearchNode", limit: int | None) -> bool:
    """Return whether a candidate fits, as compiled, else as estimated; True if unknown."""
    if node.trial is not None and node.trial.fits is not None:
        return node.trial.fits
    return limit is None or node.peak is None or node.peak <= limit


def _needs(node: "SearchNode") -> str:
    about = "" if node.trial is not None and node.trial.peak is not None else "about "
    return f"{about}{byte_text(node.peak)}"


def _label(node: "SearchNode") -> str:
    return node.candidate.label if isinstance(node.candidate, Candidate) else node.candidate.strategy


def _cut(nodes: "Sequence[SearchNode]") -> int | str | None:
    """Return the number of stages of the most promising pipeline, or the reason for none; None if none was tried."""
    piped = [n for n in nodes if is_pipeline(n.candidate)]
    cut = [(n.min_seconds, n.sketch.stages) for n in piped if n.sketch is not None and n.sketch.stages]
    if cut:
        return min(cut)[1]
    return next((n.why for n in piped if n.outcome == REFUSED and isinstance(n.candidate, Candidate)), None)


def _chain(cut: int | str | None) -> Question:
    """Answer whether the step is a chain of layers."""
    if cut is None:
        answer, because = None, "it was not tried to cut it into stages"
    elif isinstance(cut, str):
        answer, because = False, f"it can't be cut into stages: {cut.partition('. ')[0]}"
    else:
        answer, because = True, f"it can be cut into {cut} stages"
    return Question("Is it a chain of layers?", answer, because, yes="pp", no="tp")
