"""Result of a search in words: the choice, reasons against other candidates, and agreement with the usual decision
path."""

import re
from collections.abc import Iterator, Sequence

from jaxshard_magic.report.choice import (
    BOUND,
    CHOSEN,
    ESTIMATE,
    LEFT,
    REFUSED,
    RUNNER_UP,
    SLOWER,
    TOO_LARGE,
    Choice,
    Question,
    SearchCandidate,
)
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.views.format import (
    SPACE,
    UNKNOWN,
    byte_text,
    count_text,
    rounded,
    seconds_text,
    share_text,
    significant,
    usage_text,
)
from jaxshard_magic.views.words.comparison import distinguishing_options
from jaxshard_magic.views.words.spans import Span, strong

_ORDER = (CHOSEN, RUNNER_UP, SLOWER, BOUND, TOO_LARGE, ESTIMATE, LEFT, REFUSED)


def candidate_options(candidate: SearchCandidate) -> str:
    """Return the options of a candidate as typed, without those given for all candidates."""
    return " ".join(f"--{name} {value}".rstrip() for name, value in distinguishing_options(candidate.line))


def mesh_and_options(candidate: SearchCandidate) -> str:
    """Return the text after a strategy's name: ` on data=64 model=4, --remat full`."""
    mesh, options = mesh_text(candidate.mesh), candidate_options(candidate)
    return (f" on {mesh}" if mesh else "") + (f", {options}" if options else "")


def choice_lead(choice: Choice) -> list[Span]:
    """Return the choice in one sentence, with the strategy in bold.

    `fsdp+tp on data=64 model=4: 212 ms a step predicted for TPU v5e, 12.1 of 15.75 GiB a device; 8% faster than the
    runner-up, fsdp on data=256 (229 ms).`
    """
    chosen = choice.chosen
    if chosen is None:
        return list(_nothing(choice))
    figures = f"{_time(choice, chosen)}, {_room(choice, chosen) or 'peak memory not known'}"
    bare = " Nothing was compiled." if choice.source == "planned" else ""
    return [strong(chosen.strategy), Span(f"{mesh_and_options(chosen)}: {figures}{_against(choice, chosen)}.{bare}")]


def _time(choice: Choice, candidate: SearchCandidate) -> str:
    seconds = choice.time_of(candidate)
    if seconds is None:
        return "step time not known"
    if choice.source == "planned":
        return f"about {seconds_text(seconds)} a step by its plan"
    if choice.source == "measured":
        return f"{seconds_text(seconds)} a step measured"
    return f"{seconds_text(seconds)} a step predicted" + (f" for {choice.on}" if choice.on else "")


def _room(choice: Choice, candidate: SearchCandidate) -> str:
    """Return the peak memory: `12.1 of 15.75 GiB a device`, with `about` before an estimate; empty if unknown."""
    peak, trial = choice.peak_of(candidate), choice.trial_of(candidate)
    if peak is None:
        return ""
    about = "about " if trial is None or trial.peak is None else ""
    room = choice.limit if trial is None or trial.limit is None else trial.limit
    if room is None:
        return f"{about}{byte_text(peak)} a device"
    return f"{about}{usage_text(peak, room)} a device"


def _against(choice: Choice, chosen: SearchCandidate) -> str:
    other = choice.runner_up
    if other is None:
        several = len(choice.candidates) > 1
        return "; no other that was tried fits" if several else "; there was no other candidate"
    name = f"{other.strategy}{mesh_and_options(other)}"
    ours, theirs = choice.time_of(chosen), choice.time_of(other)
    if ours is None or theirs is None:
        return f"; the runner-up is {name}"
    # Within the error of predictions the search takes the simpler strategy, even one predicted to be slower.
    if choice.error is not None and theirs < ours <= (1 + choice.error) * theirs:
        return (
            f"; too close to call: {name} is predicted {speed_text(theirs, ours).partition(' than')[0]} "
            f"({seconds_text(theirs)}), within the {share_text(choice.error)} or so by which predictions err, and "
            f"{chosen.strategy} is the simpler one"
        )
    if choice.source == "planned":
        return f"; the runner-up, {name}, takes about {seconds_text(theirs)}"
    return f"; {speed_text(ours, theirs)} the runner-up, {name} ({seconds_text(theirs)})"


def speed_text(ours: float, theirs: float) -> str:
    """Return the relative speed: `8% faster than`.

    The percentage counts steps in the same time: `theirs / ours - 1`.

    Args:
        ours: Step time in seconds.
        theirs: Other step time in seconds.
    """
    ratio = theirs / ours if ours else 1.0
    if ratio >= 2:
        return f"{significant(ratio, 2)} times as fast as"
    if ratio >= 1.005:
        return f"{rounded(100 * (ratio - 1), 0)}% faster than"
    return "as fast as" if ratio > 0.995 else f"{rounded(100 * (1 - ratio), 0)}% slower than"


def _nothing(choice: Choice) -> Iterator[Span]:
    """Yield the failure of a search: the candidate with the least memory if none fits, or the reason for having
    none."""
    candidates = choice.candidates
    if not candidates:
        yield strong("There was nothing to try.")
        return
    large = [c for c in candidates if c.outcome in (TOO_LARGE, ESTIMATE)]
    fits = "fits" if len(large) == len(candidates) else "is known to fit" if large else "could be run"
    yield strong(f"None of {_candidates(len(candidates))} {fits}.")
    known = [(peak, c) for c in large if (peak := choice.peak_of(c)) is not None]
    if known:
        _, nearest = min(known, key=lambda each: each[0])
        yield Span(" The least memory is needed by ")
        yield strong(nearest.strategy)
        yield Span(f"{mesh_and_options(nearest)}: {_room(choice, nearest)}.")
    elif refused := [c for c in choice.with_outcome(REFUSED) if c.why]:
        yield Span(f" {refused[0].strategy}{mesh_and_options(refused[0])}: {refused[0].why.rstrip('.')}.")


def choice_about(choice: Choice) -> str:
    """Return step and chip of a choice without compiled trials: `train_step, planned for TPU v5e.`"""
    return choice.name + (f", planned for {choice.on}" if choice.on else "") + "."


def choice_counts(choice: Choice) -> str:
    """Return the numbers of candidates and the time.

    `207 candidates considered, 3 compiled. 120 can't be faster: ...; 4 were left when the budget of 60 s ended. 61.2 s
    used of a budget of 60 s.`
    """
    compiled = sum(trial.report is not None for trial in choice.comparison.trials)
    large = len(choice.with_outcome(TOO_LARGE))
    tally = f"{_candidates(len(choice.candidates))} considered, {count_text(compiled) if compiled else 'none'} compiled"
    fewer = f"of which {count_text(large)} {'does' if large == 1 else 'do'} not fit"
    tally += f", {'none of which fits' if large == compiled else fewer}." if large else "."
    ruled = [
        fate_text(choice, outcome, len(group))
        for outcome in (BOUND, ESTIMATE, REFUSED, LEFT)
        if (group := choice.with_outcome(outcome))
    ]
    limit = "no limit was set" if choice.budget is None else f"of a budget of {choice.budget:g}{SPACE}s"
    used = f"{seconds_text(choice.seconds)} used{',' * (choice.budget is None)} {limit}."
    return " ".join(filter(None, (tally, "; ".join(ruled) + "." * bool(ruled), used * bool(choice.seconds))))


def _candidates(many: int) -> str:
    return f"{count_text(many)} candidate{'s' * (many != 1)}"


def fate_text(choice: Choice, outcome: str, many: int) -> str:
    """Return the outcome of several candidates: `120 can't be faster: ...`.

    Args:
        choice: Gives the budget, and the source of step times.
        outcome: Outcome of the candidates.
        many: Number of candidates.
    """
    one, n = many == 1, count_text(many)
    plans = " by its plan" if one else " by their plans"
    ended = "" if choice.budget is None else f" when the budget of {choice.budget:g}{SPACE}s ended"
    return {
        CHOSEN: "The choice",
        RUNNER_UP: "The runner-up",
        SLOWER: f"{n} take{'s' * one} longer" + plans * (choice.source == "planned"),
        BOUND: f"{n} can't be faster: what {'it multiplies' if one else 'they multiply'} and must send already takes "
        "longer",
        TOO_LARGE: f"{n} {'does' if one else 'do'} not fit",
        ESTIMATE: f"{n} need{'s' * one} more memory than there is",
        LEFT: f"{n} {'was' if one else 'were'} left{ended}",
        REFUSED: f"{n} can't be planned, compiled or run",
    }[outcome]


def not_compiled(choice: Choice) -> list[tuple[str, list[SearchCandidate]]]:
    """Return the candidates without a compiled trial by outcome, the potentially fastest first."""

    def order(candidate: SearchCandidate) -> tuple[bool, float, bool, int]:
        bound, needs = candidate.bound, choice.peak_of(candidate)
        return bound is None, bound or 0.0, needs is None, needs or 0

    groups = (
        (each, sorted((c for c in choice.with_outcome(each) if choice.trial_of(c) is None), key=order))
        for each in _ORDER
    )
    return [(outcome, group) for outcome, group in groups if group]


def by_reason(group: Sequence[SearchCandidate], most: int) -> list[tuple[list[SearchCandidate], str]]:
    """Group candidates by reason, at most `most` of them, in order.

    Reasons that differ in names of mesh axes alone are equal; the text then lists the other names.

    Args:
        group: Candidates with one outcome.
        most: Maximal number of candidates.
    """
    by_name: dict[str, list[SearchCandidate]] = {}
    for candidate in group:
        by_name.setdefault(_unnamed(candidate), []).append(candidate)
    groups = []
    for alike in by_name.values():
        if shown := alike[:most]:
            groups.append((shown, _reason(shown)))
        most -= len(shown)
    return groups


def _named_axes(candidate: SearchCandidate) -> list[str]:
    """Return the mesh axes of a candidate in the order in which its reason names them."""
    named = re.findall(r"\w+", candidate.why)
    return list(dict.fromkeys(name for name in named if name in candidate.mesh))


def _unnamed(candidate: SearchCandidate) -> str:
    """Return the reason of a candidate with numbers in place of mesh axes."""
    # A null byte keeps a number apart from all text of a reason.
    numbers = {name: f"\0{i}" for i, name in enumerate(_named_axes(candidate))}
    return re.sub(r"\w+", lambda word: numbers.get(word[0], word[0]), candidate.why)


def _reason(alike: Sequence[SearchCandidate]) -> str:
    """Return the common reason of several candidates, with their number and the names of other axes by strategy."""
    first = _named_axes(alike[0])
    others: dict[str, list[str]] = {}
    for candidate in alike:
        names = zip(first, _named_axes(candidate), strict=True)
        swaps = [f"{name} for {own}" for own, name in names if name != own]
        if swaps:
            others.setdefault(" and ".join(swaps), []).append(candidate.strategy)
    also = [f"{swaps} under {', '.join(dict.fromkeys(under))}" for swaps, under in others.items()]
    why, many = alike[0].why, len(alike)
    text = f"each of these {count_text(many)}: {why}" if why and many > 1 else why
    return text + (f" ({'; '.join(also)})" if also else "")


def bound_text(candidate: SearchCandidate) -> str:
    """Return the lower bound of a candidate's step time."""
    return seconds_text(candidate.bound)


def needs_text(candidate: SearchCandidate) -> tuple[str, str]:
    """Return the bytes needed on the fullest device, and those of its arrays alone; the second is empty if unknown."""
    needs, holds = byte_text(candidate.needs), byte_text(candidate.holds)
    return needs, "" if candidate.holds is None else f"arrays {holds}"


def estimates_note(choice: Choice) -> str:
    """Return an explanation of the figures of candidates that were not compiled."""
    at = f" on {choice.on}" if choice.on else ""
    return (
        f"at least: what a step's products and the bytes that it must send take{at}, by its plan and with all hidden "
        "that may be. "
        f"needs about: memory of the fullest device, estimated from the traced step. {UNKNOWN}: not known."
    )


def figures_text(question: Question) -> str:
    """Return the figures below a question, after `not known` if its answer is unknown."""
    if question.answer is not None:
        return question.because
    return f"not known: {question.because}" if question.because else "not known"


def path_steps(path: Sequence[Question]) -> Iterator[tuple[Question, bool | None]]:
    """Yield each question with whether the path reaches the question; None if an earlier answer is unknown."""
    reached: bool | None = True
    for question in path:
        yield question, reached
        ways = _ways(question)
        if ways != {""}:
            # "" stands for the next question. With a further possible result it is unknown whether the path goes on.
            reached = (reached and None) if "" in ways else False


def _ways(question: Question) -> set[str]:
    """Return the possible results of a question, given what is known of its answer."""
    if question.answer is None:
        return {question.yes, question.no}
    return {question.yes if question.answer else question.no}


def leaf_of(path: Sequence[Question]) -> str | None:
    """Return the result of the usual decision path; None if unknown, "" if there is none."""
    for question, reached in path_steps(path):
        ways = _ways(question)
        if reached is None or len(ways) > 1:
            return None
        if ways != {""}:
            return ways.pop()
    return ""


def agreement(choice: Choice) -> str:
    """Return whether the usual path and the search agree, and the difference in speed if they do not."""
    leaf, chosen = leaf_of(choice.path), choice.chosen
    if not choice.path:
        return ""
    if leaf is None:
        return "Where the usual path leads is not known here."
    if not leaf:
        return "The usual path has no answer for this step."
    if chosen is None:
        return f"The usual path leads to {leaf}; the search found nothing that fits."
    if _agrees(leaf, chosen.strategy):
        return f"The usual path leads to {leaf}, and so does the search."
    said = f"The usual path leads to {leaf}; the search found {chosen.strategy}"
    ours, theirs = choice.time_of(chosen), _best(choice, leaf)
    if ours is None or theirs is None:
        return f"{said}."
    return f"{said}, {speed_text(ours, theirs)} the best {leaf} that was compiled ({seconds_text(theirs)})."


def _agrees(leaf: str, strategy: str) -> bool:
    """Return whether a word of `leaf` names the same strategies as `strategy`, in any order."""
    return any(set(word.strip(",;").split("+")) == set(strategy.split("+")) for word in leaf.split())


def _best(choice: Choice, leaf: str) -> float | None:
    """Return the least step time of compiled candidates that fit and match `leaf`; None without one."""
    usable = {trial.line for trial in choice.comparison.usable}
    known = [
        seconds
        for c in choice.candidates
        if c.line in usable and _agrees(leaf, c.strategy) and (seconds := choice.time_of(c)) is not None
    ]
    return min(known, default=None)
