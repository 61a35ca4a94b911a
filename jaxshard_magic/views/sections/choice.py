"""Result of an automatic search as parts of a document: the choice, the usual decision path with figures of this step,
compiled trials, and the other candidates with the reasons against them."""

from collections.abc import Sequence

from jaxshard_magic.report.choice import Choice
from jaxshard_magic.views import words
from jaxshard_magic.views.document import parts as doc
from jaxshard_magic.views.format import count_text
from jaxshard_magic.views.sections.comparison import failures, omissions, trials
from jaxshard_magic.views.words import choice as phrases

LINES = 12  # candidates that were not compiled, at most


def choice(chosen: Choice) -> list[doc.Part | doc.ChoicePart]:
    """Return what the result of a search says."""
    tried, commands = chosen.comparison, run_commands(chosen)
    lead = (doc.Paragraph(phrases.choice_lead(chosen), leading=True), doc.Paragraph(about(chosen)))
    path = (doc.DecisionPath(chosen.path), doc.Paragraph(phrases.agreement(chosen)))
    again = f"Run {' and '.join(name for name, _ in commands)} as"
    return [
        doc.Section("", (*lead, doc.Paragraph(phrases.choice_counts(chosen)))),
        *(path if chosen.path else ()),
        *trials(tried),
        *failures(tried),
        *not_compiled_groups(chosen, LINES),
        *([doc.Commands(again, tuple(line for _, line in commands))] if commands else []),
        doc.Notes(tuple(notes(chosen)), below=False),
    ]


def about(chosen: Choice) -> str:
    """Return one sentence with the step and the chip."""
    tried = chosen.comparison
    return words.comparison_about(tried) if tried.trials else phrases.choice_about(chosen)


def notes(chosen: Choice) -> list[str]:
    """Return the sentences below everything else: notes of the search, of the compiled trials, and of the estimates."""
    tried = chosen.comparison
    sentences = [*chosen.notes, *words.comparison_notes(tried), *omissions(tried)]
    return [*sentences, phrases.estimates_note(chosen)] if phrases.not_compiled(chosen) else sentences


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


def not_compiled_groups(chosen: Choice, most: int) -> list[doc.Candidates]:
    """Return the candidates that were not compiled, by outcome.

    Args:
        chosen: Result of a search.
        most: Maximal number of candidates over all groups.
    """
    groups = phrases.not_compiled(chosen)
    parts = []
    for (outcome, group), kept in zip(groups, shares([len(g) for _, g in groups], most), strict=True):
        by_reason = tuple(
            (
                tuple(
                    doc.CandidateRow(c.strategy, phrases.candidate_options(c), c.mesh, phrases.bound_text(c), *needs)
                    for c in same
                    if (needs := phrases.needs_text(c))
                ),
                why,
            )
            for same, why in phrases.by_reason(group, kept)
        )
        parts.append(doc.Candidates(phrases.fate_text(chosen, outcome, len(group)), by_reason, len(group) - kept))
    return parts


def others_title(chosen: Choice) -> str:
    """Return the heading above the candidates that were not compiled."""
    if chosen.source == "planned":
        return "What is known without compiling"
    return f"Not compiled, and why: {count_text(sum(len(group) for _, group in phrases.not_compiled(chosen)))}"


def run_commands(chosen: Choice) -> list[tuple[str, str]]:
    """Return (description, line to run) of the choice and of the runner-up, as far as they exist."""
    named = ((chosen.chosen, "the choice"), (chosen.runner_up, "the runner-up"))
    return [(name, f"%%shard {each.line}") for each, name in named if each is not None]
