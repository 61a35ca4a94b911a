"""`ShardedStep`: a train step under a plan, compiled once per shapes, called at the cost of a hand-written
jit."""

from .entry import Entry
from .sharded import ShardedStep
from .watch import Watch

__all__ = ["Entry", "ShardedStep", "Watch"]
