"""Metrics of a running training loop: bounded series of numbers, and the run that they describe."""

from .queue import Call, PendingCalls
from .rates import CallSequence, CallWork, RateMeter, WorkDone
from .run import LiveRun, MetricsRow
from .series import Bucket, Series

__all__ = [
    "Bucket",
    "Call",
    "CallSequence",
    "CallWork",
    "LiveRun",
    "MetricsRow",
    "PendingCalls",
    "RateMeter",
    "Series",
    "WorkDone",
]
