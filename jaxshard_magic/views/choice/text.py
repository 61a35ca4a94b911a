"""Result of an automatic search for a terminal.

Sections: the choice, the usual decision path with figures of this step, compiled trials, and the other candidates with
the reasons against them.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from jaxshard_magic.report.choice import Choice, SearchCandidate
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.views import words
from jaxshard_magic.views.choice import decision_tree
from jaxshard_magic.views.comparison import text as comparison
from jaxshard_magic.views.format import count_text, printable
from jaxshard_magic.views.terminal import clip, display_width, plain_signs, table, terminal_text, text_width, wrap_all
from jaxshard_magic.views.words import choice as phrases

MOST_LINES = 12  # candidates that were not compiled, at most


def to_text(choice: Choice, width: int | None = None) -> str:
    """Render the choice as lines for a terminal. A line to paste is never broken.

    Args:
        choice: Result of a search.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
    """
    room = text_width(width)
    lead = "".join(span.text for span in phrases.choice_lead(choice))
    tried = choice.comparison
    parts = [
        wrap_all((lead, about(choice), phrases.choice_counts(choice)), room),
        decision_tree.lines(choice.path, room),
        wrap_all([phrases.agreement(choice)], room) if choice.path else [],
        *comparison.figures(tried, room),
        comparison.failures(tried, room),
        *_others(choice, room),
        _again(choice),
        wrap_all(notes(choice), room),
    ]
    return "\n\n".join(terminal_text(part) for part in parts if part)


def about(choice: Choice) -> str:
    """Return one sentence with the step and the chip."""
    tried = choice.comparison
    return words.comparison_about(tried) if tried.trials else phrases.choice_about(choice)


def notes(choice: Choice) -> list[str]:
    """Return the sentences below everything else: notes of the search, of the compiled trials, and of the estimates."""
    tried = choice.comparison
    notes = [*choice.notes, *words.comparison_notes(tried), *comparison.omissions(tried)]
    return [*notes, phrases.estimates_note(choice)] if phrases.not_compiled(choice) else notes


def shares(sizes: Sequence[int], most: int) -> list[int]:
    """Return the number of rows to show of each group, so that large groups leave room for small ones.

    Args:
        sizes: Rows of each group.
        most: Maximal sum of the result.
    """
    kept = [0] * len(sizes)
    for _ in range(min(most, sum(sizes))):
        kept[min((k, i) for i, k in enumerate(kept) if k < sizes[i])[1]] += 1
    return kept


def not_compiled_groups(
    choice: Choice, most: int
) -> Iterator[tuple[str, list[tuple[list[SearchCandidate], str]], int]]:
    """Yield the candidates that were not compiled, by outcome.

    Args:
        choice: Result of a search.
        most: Maximal number of candidates over all groups.

    Yields:
        The outcome in words; the shown candidates, in groups with one reason; the number of omitted candidates.
    """
    groups = phrases.not_compiled(choice)
    for (outcome, group), kept in zip(groups, shares([len(g) for _, g in groups], most), strict=True):
        fate = phrases.fate_text(choice, outcome, len(group))
        yield fate, phrases.by_reason(group, kept), len(group) - kept


def others_title(choice: Choice) -> str:
    """Return the heading above the candidates that were not compiled."""
    if choice.source == "planned":
        return "What is known without compiling"
    return f"Not compiled, and why: {count_text(sum(len(group) for _, group in phrases.not_compiled(choice)))}"


def _others(choice: Choice, room: int) -> list[list[str]]:
    """Return a table for each outcome: candidates with figures, and each reason below its candidates."""
    parts = []
    for fate, by_reason, omitted in not_compiled_groups(choice, MOST_LINES):
        shown = [each for candidates, _ in by_reason for each in candidates]
        names, options = _named(shown, room)
        columns = {
            "strategy": names,
            "mesh": [clip(printable(mesh_text(c.mesh)), _columns_left(room) // 2) for c in shown],
            "at least": [phrases.bound_text(c) for c in shown],
            "needs about": [phrases.needs_text(c)[0] for c in shown],
        }
        head, *rows = table(
            {name: list(map(plain_signs, texts)) for name, texts in columns.items()}, ("strategy", "mesh")
        )
        lines = [*wrap_all([f"{fate}:"], room), head]
        # One iterator over all rows: each group takes its rows from where the previous group ended.
        row_iter = zip(rows, options, strict=True)
        for candidates, why in by_reason:
            for line, option in islice(row_iter, len(candidates)):
                lines += [line, *_below(option, room)]
            lines += _below(why, room)
        parts.append(lines + [f"  and {count_text(omitted)} more"] * (omitted > 0))
    return parts


def _below(reason: str, room: int) -> list[str]:
    return wrap_all([reason], room, "      ", "      ") if reason else []


def _columns_left(room: int) -> int:
    """Return the columns for strategies and meshes together, beside two columns of figures."""
    return room - 30


def _named(shown: Sequence[SearchCandidate], room: int) -> tuple[list[str], list[str]]:
    """Return the column of strategies, and the options to print below each row.

    Options stay in the column while all of them fit; otherwise all go below.
    """
    names = [printable(f"{c.strategy} {phrases.candidate_options(c)}".rstrip()) for c in shown]
    meshes = max(display_width(printable(mesh_text(c.mesh))) for c in shown)
    width = _columns_left(room) - min(meshes, _columns_left(room) // 2)
    if all(display_width(name) <= width for name in names):
        return names, [""] * len(names)
    return [clip(printable(c.strategy), width) for c in shown], [phrases.candidate_options(c) for c in shown]


def run_commands(choice: Choice) -> list[tuple[str, str]]:
    """Return (description, line to run) of the choice and of the runner-up, as far as they exist."""
    named = ((choice.chosen, "the choice"), (choice.runner_up, "the runner-up"))
    return [(name, f"%%shard {each.line}") for each, name in named if each is not None]


def _again(choice: Choice) -> list[str]:
    lines = run_commands(choice)
    if not lines:
        return []
    # Not wrapped: a broken line could not be pasted.
    return [f"Run {' and '.join(name for name, _ in lines)} as", *("    " + printable(line) for _, line in lines)]
