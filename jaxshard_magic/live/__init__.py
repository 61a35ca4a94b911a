"""What a training says of itself while it runs: bounded series of its numbers, and the run that they are of."""

from .queue import Call, Queue
from .rates import Done, Known, Rates, Stretch
from .run import Row, Run
from .series import Bucket, Series

__all__ = ["Bucket", "Call", "Done", "Known", "Queue", "Rates", "Row", "Run", "Series", "Stretch"]
