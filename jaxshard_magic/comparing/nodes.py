"""The candidates of a search, with what is known of them so far."""

import math
from dataclasses import dataclass

from ..report.choice import LEFT
from ..report.comparison import Trial
from .candidates import Candidate, Refused
from .sketch import Sketch


@dataclass(eq=False)
class Node:
    """One candidate of the search. `least`: seconds that it takes at least, its own or those of the candidate that it
    takes less memory than; `outcome` and `why` are said once they are known."""

    candidate: Candidate | Refused
    least: float = math.inf
    sketch: Sketch | None = None
    opened: bool = False
    outcome: str = LEFT
    why: str = ""
    position: int | None = None
    trial: Trial | None = None

    @property
    def peak(self) -> int | None:
        """Bytes of the fullest device at its peak, as compiled, else as estimated."""
        compiled = None if self.trial is None else self.trial.peak
        estimated = None if self.sketch is None else self.sketch.needs
        return estimated if compiled is None else compiled


@dataclass(eq=False)
class Ladder:
    """What takes less memory than `of`, in the order in which it is tried."""

    of: Node
    rungs: list[Candidate | Refused]
