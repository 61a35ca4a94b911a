"""A choice as the widget reads it: the comparison of what was compiled, and around it what led to the choice."""

from collections.abc import Mapping
from typing import Any

from jaxshard_magic.report.choice import Choice, Considered
from jaxshard_magic.views.choice import tree
from jaxshard_magic.views.choice.html import MOST_ROWS, axes_of
from jaxshard_magic.views.choice.text import about, notes, others, others_title, runs
from jaxshard_magic.views.comparison import payload as comparison
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.packing import compressed, span_pairs
from jaxshard_magic.views.words import choice as phrases


def packed_choice(choice: Choice) -> bytes:
    """The payload as compact JSON in UTF-8, compressed with zlib."""
    return compressed(payload(choice))


def payload(choice: Choice) -> dict[str, Any]:
    """What the choice's widget shows, as data that JSON can hold: a comparison's with `choice` beside it."""
    compared = comparison.payload(choice.comparison)
    axes = list(dict.fromkeys([*compared["axes"], *map(printable, axes_of(choice).axes)]))
    index = {axis: i for i, axis in enumerate(axes)}
    return compared | {
        "lead": span_pairs(phrases.choice_lead(choice)),
        "about": printable(f"{about(choice)} {phrases.choice_counts(choice)}"),
        "notes": [printable(note) for note in notes(choice)],
        "axes": axes,
        "choice": {
            "runs": [[name, printable(line)] for name, line in runs(choice)],
            "path": [_question(node) for node in tree.nodes(choice.path)],
            "path_title": tree.TITLE,
            "agreement": printable(phrases.agreement(choice)),
            "others": [
                [
                    printable(fate),
                    [[[_row(c, index) for c in group], printable(why)] for group, why in alike],
                    left,
                ]
                for fate, alike, left in others(choice, MOST_ROWS)
            ],
            "others_title": others_title(choice),
            "others_open": choice.source == "planned",
        },
    }


def _question(node: tree.Node) -> dict[str, Any]:
    branches = [[b.answer, printable(b.leaf) or None, b.way] for b in node.branches]
    return {
        "asks": printable(node.question.asks),
        "because": printable(phrases.because(node.question)),
        "way": node.way,
        "branches": branches,
    }


def _row(candidate: Considered, index: Mapping[str, int]) -> dict[str, Any]:
    needs, arrays = phrases.needs_text(candidate)
    return {
        "name": printable(candidate.strategy),
        "more": printable(phrases.options_of(candidate)),
        "mesh": [[index[printable(axis)], size] for axis, size in candidate.mesh.items()],
        "bound": phrases.bound_text(candidate),
        "needs": needs,
        "arrays": arrays,
    }
