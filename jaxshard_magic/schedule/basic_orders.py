"""Orders without a search: GPipe, 1F1B, interleaved 1F1B, looped breadth-first."""

from collections.abc import Iterator

from jaxshard_magic.schedule.actions import Action, ScheduleEntry

RankRows = list[list[ScheduleEntry]]


def gpipe(ranks: int, microbatches: int) -> RankRows:
    """Return the GPipe order: all forward actions, then all backward actions. All microbatches are held.

    Huang et al. 2019, arXiv 1811.06965.
    """
    return [[Action(rank, kind, mb) for kind in "FB" for mb in range(microbatches)] for rank in range(ranks)]


def one_f_one_b(ranks: int, microbatches: int) -> RankRows:
    """Return the 1F1B order: forward until the first gradient arrives, then backward and forward in alternation.

    Rank s of p holds min(p - s, m) of m microbatches. PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503.
    """
    rows = []
    for rank in range(ranks):
        forward = [Action(rank, "F", mb) for mb in range(microbatches)]
        backward = [Action(rank, "B", mb) for mb in range(microbatches)]
        rows.append(_alternate(forward, backward, ranks - rank - 1))
    return rows


def interleaved(ranks: int, microbatches: int, chunks: int) -> RankRows:
    """Return the order of 1F1B over `chunks` passes through the ranks, in groups of p microbatches.

    Stage c p + s is on rank s. The bubble is 1/`chunks` of the bubble of 1F1B; more is held. Narayanan et al. 2021,
    arXiv 2104.04473, section 2.2.
    """
    rows = []
    for rank in range(ranks):
        forward, backward = (
            [
                Action(chunk * ranks + rank, kind, mb)
                for first in range(0, microbatches, ranks)
                for chunk in order
                for mb in range(first, first + ranks)
            ]
            for kind, order in (("F", range(chunks)), ("B", range(chunks - 1, -1, -1)))
        )
        rows.append(_alternate(forward, backward, 2 * (ranks - rank - 1) + (chunks - 1) * ranks))
    return rows


def looped_breadth_first(ranks: int, microbatches: int, chunks: int) -> RankRows:
    """Return the looped breadth-first order: every microbatch through a chunk before the next chunk, then backward
    likewise.

    Messages are few and long. All microbatches are held. Lamy-Poirier 2022, arXiv 2211.05953.
    """
    return [
        [
            Action(chunk * ranks + rank, kind, mb)
            for kind, order in (("F", range(chunks)), ("B", range(chunks - 1, -1, -1)))
            for chunk in order
            for mb in range(microbatches)
        ]
        for rank in range(ranks)
    ]


def _alternate(forward: list[Action], backward: list[Action], ahead: int) -> list[ScheduleEntry]:
    """Return the first `ahead` forward actions, then forward and backward in alternation, then the remaining backward
    actions."""
    ahead = min(ahead, len(forward))
    steps: list[ScheduleEntry] = [*forward[:ahead]]
    rest: Iterator[Action] = iter(backward)
    for action in forward[ahead:]:
        steps += [action, next(rest)]
    return [*steps, *rest]
