"""Sharded train steps: `ShardedStep` runs a step under a plan and compiles one program for each set of shapes.

A call costs as much as a call of a hand-written `jax.jit`.
"""

from .compiled_step import CompiledStep
from .loop_monitor import LoopMonitor
from .sharded_step import ShardedStep

__all__ = ["CompiledStep", "LoopMonitor", "ShardedStep"]
