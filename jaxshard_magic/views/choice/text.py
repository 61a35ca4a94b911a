"""What an automatic search chose, for a terminal: the choice, the usual decision path with this step's figures, what
was compiled, and what ruled the others out."""

import shutil
from collections.abc import Sequence
from itertools import islice

from jaxshard_magic.report.choice import Choice, Considered
from jaxshard_magic.views import words
from jaxshard_magic.views.choice import tree
from jaxshard_magic.views.comparison import text as comparison
from jaxshard_magic.views.format import count_text, printable
from jaxshard_magic.views.terminal import cells, clip, plain, printed, table, wrap
from jaxshard_magic.views.words import choice as said

MOST_LINES = 12  # candidates that were not compiled


def to_text(choice: Choice, width: int | None = None) -> str:
    """The choice in lines of at most `width` columns, the terminal's by default, held between 60 and 100; a line to
    paste is never broken."""
    room = max(60, min(100, shutil.get_terminal_size().columns if width is None else width))
    lead = "".join(span.text for span in said.choice_lead(choice))
    tried = choice.comparison
    parts = [
        [line for one in (lead, about(choice), said.choice_counts(choice)) for line in _wrapped(one, room)],
        tree.lines(choice.path, room),
        _wrapped(said.agreement(choice), room) if choice.path else [],
        *comparison.figures(tried, room),
        comparison.failures(tried, room),
        *_others(choice, room),
        _again(choice),
        [line for note in notes(choice) for line in _wrapped(note, room)],
    ]
    return "\n\n".join(printed(part) for part in parts if part)


def _wrapped(one: str, room: int, first: str = "", rest: str = "") -> list[str]:
    return wrap(plain(printable(one)), room, first, rest)


def about(choice: Choice) -> str:
    """What was chosen for: the step and the chip, in a sentence."""
    tried = choice.comparison
    return words.comparison_about(tried) if tried.trials else said.choice_about(choice)


def notes(choice: Choice) -> list[str]:
    """The sentences below everything: the search's own, and those on what was compiled and estimated."""
    tried = choice.comparison
    notes = [*words.comparison_notes(tried), *comparison.left_out(tried)]
    return [*choice.notes, *notes, *([said.estimates_note(choice)] if said.not_compiled(choice) else [])]


def shares(sizes: Sequence[int], most: int) -> list[int]:
    """How many rows of each group are shown, so that no group takes the room of a smaller one."""
    kept = [0] * len(sizes)
    for _ in range(min(most, sum(sizes))):
        kept[min((k, i) for i, k in enumerate(kept) if k < sizes[i])[1]] += 1
    return kept


def _others(choice: Choice, room: int) -> list[list[str]]:
    """Those that were not compiled, each with its figures, and below those of one reason the reason."""
    groups = said.not_compiled(choice)
    parts = []
    for (outcome, group), kept in zip(groups, shares([len(g) for _, g in groups], MOST_LINES), strict=True):
        alike = said.by_reason(group, kept)
        shown = [each for candidates, _ in alike for each in candidates]
        names, options = _named(shown, room)
        columns = {
            "strategy": names,
            "mesh": [clip(printable(said.mesh_of(c)), _columns_left(room) // 2) for c in shown],
            "at least": [said.bound_text(c) for c in shown],
            "needs about": [said.needs_text(c)[0] for c in shown],
        }
        head, *rows = table(
            {name: list(map(plain, told)) for name, told in columns.items()}, ("strategy", "mesh")
        )
        lines = [*_wrapped(f"{said.fate_text(choice, outcome, len(group))}:", room), head]
        told = zip(rows, options, strict=True)
        for candidates, why in alike:
            for line, option in islice(told, len(candidates)):
                lines += [line, *_below(option, room)]
            lines += _below(why, room)
        parts.append(lines + [f"  and {count_text(len(group) - kept)} more"] * (kept < len(group)))
    return parts


def _below(one: str, room: int) -> list[str]:
    return _wrapped(one, room, "      ", "      ") if one else []


def _columns_left(room: int) -> int:
    """Those that strategies and meshes have together, beside two figures."""
    return room - 30


def _named(shown: Sequence[Considered], room: int) -> tuple[list[str], list[str]]:
    """What stands in the column of strategies, and what below: the options, where there is no room beside them."""
    names = [printable(f"{c.strategy} {said.options_of(c)}".rstrip()) for c in shown]
    meshes = max(cells(printable(said.mesh_of(c))) for c in shown)
    width = _columns_left(room) - min(meshes, _columns_left(room) // 2)
    if all(cells(name) <= width for name in names):
        return names, [""] * len(names)
    return [clip(printable(c.strategy), width) for c in shown], [said.options_of(c) for c in shown]


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
