"""Checkpoints of a training's state, and weight files of other programs.

A checkpoint is saved while training goes on, and restored under any plan. Only this package imports Orbax, and only
when a checkpoint is opened.
"""

from .checkpoint_info import CheckpointInfo as CheckpointInfo
from .checkpoint_info import SavedLeaf as SavedLeaf
from .store import CheckpointStore as CheckpointStore
