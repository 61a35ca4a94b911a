"""Steps with a ring of attention, and what they move."""

from collections import Counter

import jaxshard_magic
from jaxshard_magic.strategies.planned_collectives import planned_collectives
from jaxshard_magic.strategies.sharded_lowering import ShardedLowering

CP = "collective-permute"


def sharded(step, strategy="sp", axes="cpu:8 seq=8", **options):
    return jaxshard_magic.shard(step, strategy, mesh=jaxshard_magic.mesh(axes), attention="ring", **options)


def moves(ring, *args):
    """The collectives of a step, as the plan tells them."""
    run = ring.planned(*args).plan.run
    assert isinstance(run, ShardedLowering)
    return planned_collectives(run)


def permuted(ring, *args):
    """What goes round, by bytes: as compiled, and as the plan tells it."""
    ring.prepare(*args)
    found, told = Counter(), Counter()
    for c in ring.report().collectives or ():
        if c.kind == CP:
            found[c.bytes] += c.count
    for move in moves(ring, *args):
        if move.kind == CP:
            told[move.bytes] += move.count
    return found, told
