"""Data of a choice for its widget: the payload of the compiled comparison, extended by the search."""

from collections.abc import Mapping
from typing import Any

from jaxshard_magic.report.choice import Choice
from jaxshard_magic.views.choice import decision_tree
from jaxshard_magic.views.choice.html import MOST_ROWS, axes_of
from jaxshard_magic.views.comparison import payload as comparison
from jaxshard_magic.views.document.parts import CandidateRow
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.payload_encoding import compressed, span_pairs
from jaxshard_magic.views.sections.choice import about, not_compiled_groups, notes, others_title, run_commands
from jaxshard_magic.views.words import choice as phrases


def packed_choice(choice: Choice) -> bytes:
    """Return the payload as compact JSON in UTF-8, compressed with zlib."""
    return compressed(payload(choice))


def payload(choice: Choice) -> dict[str, Any]:
    """Return the data of the choice's widget, ready for JSON.

    The keys are those of a comparison's payload, plus `choice`. Names are plain text, never markup.
    """
    compared = comparison.payload(choice.comparison)
    # The comparison's axes keep their numbers: its trials refer to them by index.
    axes = list(dict.fromkeys([*compared["axes"], *map(printable, axes_of(choice).axes)]))
    index = {axis: i for i, axis in enumerate(axes)}
    return compared | {
        "lead": span_pairs(phrases.choice_lead(choice)),
        "about": printable(f"{about(choice)} {phrases.choice_counts(choice)}"),
        "notes": [printable(note) for note in notes(choice)],
        "axes": axes,
        "choice": {
            "runs": [[name, printable(line)] for name, line in run_commands(choice)],
            "path": [_question(node) for node in decision_tree.nodes(choice.path)],
            "path_title": decision_tree.TITLE,
            "agreement": printable(phrases.agreement(choice)),
            "others": [
                [
                    printable(part.outcome),
                    [[[_row(one, index) for one in group], printable(why)] for group, why in part.by_reason],
                    part.omitted,
                ]
                for part in not_compiled_groups(choice, MOST_ROWS)
            ],
            "others_title": others_title(choice),
            "others_open": choice.source == "planned",
        },
    }


def _question(node: decision_tree.QuestionNode) -> dict[str, Any]:
    """Return a question of the decision path with both answers."""
    branches = [[b.answer, printable(b.leaf) or None, b.emphasis] for b in node.branches]
    return {
        "asks": printable(node.question.asks),
        "because": printable(phrases.figures_text(node.question)),
        "way": node.emphasis,
        "branches": branches,
    }


def _row(one: CandidateRow, index: Mapping[str, int]) -> dict[str, Any]:
    """Return the data of one candidate that was not compiled."""
    return {
        "name": printable(one.strategy),
        "more": printable(one.options),
        "mesh": [[index[printable(axis)], size] for axis, size in one.mesh.items()],
        "bound": one.bound,
        "needs": one.needs,
        "arrays": one.arrays,
    }
