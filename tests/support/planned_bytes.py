"""The bytes that a plan says devices send."""

from collections import Counter

from jaxshard_magic.strategies.planned_collectives import planned_collectives
from jaxshard_magic.strategies.sharded_lowering import ShardedLowering

F32, WIDTH, HIDDEN, EXAMPLES = 4, 64, 256, 32


def sent(plan: ShardedLowering) -> Counter:
    """Without sums of a single number, which compilers merge."""
    moves = Counter()
    for move in planned_collectives(plan):
        if move.bytes > F32:
            moves[move.kind, move.axes, move.bytes] += move.count
    return moves
