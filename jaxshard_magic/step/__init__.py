"""Sharded train steps: `ShardedStep` runs a step under a plan, with one compiled program for each set of shapes.

A call costs as much as a call of a hand-written `jax.jit`.
"""

from .loop_monitor import LoopMonitor
from .sharded_step import ShardedStep

__all__ = ["LoopMonitor", "ShardedStep"]
