"""What an automatic search chose, for a terminal: the choice, the usual decision path with this step's figures, what
was compiled, and what ruled the others out."""

from collections.abc import Iterator, Sequence
from itertools import islice

from jaxshard_magic.report.choice import Choice, Considered
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.views import words
from jaxshard_magic.views.choice import tree
from jaxshard_magic.views.comparison import text as comparison
from jaxshard_magic.views.format import count_text, printable
from jaxshard_magic.views.terminal import cells, clip, fitted, plain, printed, table, wrapped
from jaxshard_magic.views.words import choice as phrases

MOST_LINES = 12  # candidates that were not compiled


def to_text(choice: Choice, width: int | None = None) -> str:
    """The choice in lines of at most `width` columns, the terminal's by default, held between 60 and 100; a line to
    paste is never broken."""
    room = fitted(width)
    lead = "".join(span.text for span in phrases.choice_lead(choice))
    tried = choice.comparison
    parts = [
        wrapped((lead, about(choice), phrases.choice_counts(choice)), room),
        tree.lines(choice.path, room),
        wrapped([phrases.agreement(choice)], room) if choice.path else [],
        *comparison.figures(tried, room),
        comparison.failures(tried, room),
        *_others(choice, room),
        _again(choice),
        wrapped(notes(choice), room),
    ]
    return "\n\n".join(printed(part) for part in parts if part)


def about(choice: Choice) -> str:
    """What was chosen for: the step and the chip, in a sentence."""
    tried = choice.comparison
    return words.comparison_about(tried) if tried.trials else phrases.choice_about(choice)


def notes(choice: Choice) -> list[str]:
    """The sentences below everything: the search's own, and those on what was compiled and estimated."""
    tried = choice.comparison
    notes = [*choice.notes, *words.comparison_notes(tried), *comparison.left_out(tried)]
    return [*notes, phrases.estimates_note(choice)] if phrases.not_compiled(choice) else notes


def shares(sizes: Sequence[int], most: int) -> list[int]:
    """How many rows of each group are shown, so that no group takes the room of a smaller one."""
    kept = [0] * len(sizes)
    for _ in range(min(most, sum(sizes))):
        kept[min((k, i) for i, k in enumerate(kept) if k < sizes[i])[1]] += 1
    return kept


def others(choice: Choice, most: int) -> Iterator[tuple[str, list[tuple[list[Considered], str]], int]]:
    """What was not compiled, at most so many: for each fate its words, the candidates shown, those of one reason
    together with it, and how many more there are."""
    groups = phrases.not_compiled(choice)
    for (outcome, group), kept in zip(groups, shares([len(g) for _, g in groups], most), strict=True):
        fate = phrases.fate_text(choice, outcome, len(group))
        yield fate, phrases.by_reason(group, kept), len(group) - kept


def others_title(choice: Choice) -> str:
    """What stands above them."""
    if choice.source == "planned":
        return "What is known without compiling"
    return (
        f"Not compiled, and why: {count_text(sum(len(group) for _, group in phrases.not_compiled(choice)))}"
    )


def _others(choice: Choice, room: int) -> list[list[str]]:
    """Those that were not compiled, each with its figures, and below those of one reason the reason."""
    parts = []
    for fate, alike, left in others(choice, MOST_LINES):
        shown = [each for candidates, _ in alike for each in candidates]
        names, options = _named(shown, room)
        columns = {
            "strategy": names,
            "mesh": [clip(printable(mesh_text(c.mesh)), _columns_left(room) // 2) for c in shown],
            "at least": [phrases.bound_text(c) for c in shown],
            "needs about": [phrases.needs_text(c)[0] for c in shown],
        }
        head, *rows = table(
            {name: list(map(plain, texts)) for name, texts in columns.items()}, ("strategy", "mesh")
        )
        lines = [*wrapped([f"{fate}:"], room), head]
        rest = zip(rows, options, strict=True)
        for candidates, why in alike:
            for line, option in islice(rest, len(candidates)):
                lines += [line, *_below(option, room)]
            lines += _below(why, room)
        parts.append(lines + [f"  and {count_text(left)} more"] * (left > 0))
    return parts


def _below(reason: str, room: int) -> list[str]:
    return wrapped([reason], room, "      ", "      ") if reason else []


def _columns_left(room: int) -> int:
    """Those that strategies and meshes have together, beside two figures."""
    return room - 30


def _named(shown: Sequence[Considered], room: int) -> tuple[list[str], list[str]]:
    """What stands in the column of strategies, and what below: the options, where there is no room beside them."""
    names = [printable(f"{c.strategy} {phrases.options_of(c)}".rstrip()) for c in shown]
    meshes = max(cells(printable(mesh_text(c.mesh))) for c in shown)
    width = _columns_left(room) - min(meshes, _columns_left(room) // 2)
    if all(cells(name) <= width for name in names):
        return names, [""] * len(names)
    return [clip(printable(c.strategy), width) for c in shown], [phrases.options_of(c) for c in shown]


def runs(choice: Choice) -> list[tuple[str, str]]:
    """What runs the choice and the runner-up, each with what it is."""
    named = ((choice.chosen, "the choice"), (choice.runner_up, "the runner-up"))
    return [(name, f"%%shard {each.line}") for each, name in named if each is not None]


def _again(choice: Choice) -> list[str]:
    lines = runs(choice)
    if not lines:
        return []
    return [
        f"Run {' and '.join(name for name, _ in lines)} as",
        *("    " + printable(line) for _, line in lines),
    ]
