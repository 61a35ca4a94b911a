"""Metrics of a running training loop: bounded series of numbers, and the run that they describe."""

from .calls import Call, CallSequence, CallWork, PendingCalls, RateMeter, WorkDone
from .run import Bucket, LiveRun, MetricsRow, Series

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
