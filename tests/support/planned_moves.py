"""The collectives that a plan has, as Shardy's moves are counted."""

from collections import Counter

from jaxshard_magic.plan import Plan
from jaxshard_magic.strategies.planned_collectives import planned_collectives

from .shardy_moves import SMALL, Moves


def planned_moves(plan: Plan) -> Moves:
    moves: Moves = Counter()
    for move in planned_collectives(plan.run):
        if move.bytes > SMALL:
            moves[move.kind, move.axes] += move.bytes * move.count
    return moves
