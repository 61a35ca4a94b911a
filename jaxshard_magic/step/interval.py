"""How often a loop is saved: after so many calls, or when so much time has passed."""

import re
from dataclasses import dataclass

from ..errors import ShardError, quoted

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Interval:
    """One of both is None.

    >>> Interval.of("10m"), Interval.of(100)
    (Interval(calls=None, seconds=600.0), Interval(calls=100, seconds=None))
    """

    calls: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, every: "int | str") -> "Interval":
        """As it is written: `100` calls, `90s`, `10m` or `2h`. Raises ShardError for anything else."""
        found = re.fullmatch(r"0*([1-9]\d{0,6})([smh]?)", str(every).strip())
        if found is None or isinstance(every, bool):
            raise ShardError(
                f"--every takes a number of steps, or a time such as 90s, 10m or 2h, not {quoted(str(every))}"
            )
        number, unit = int(found[1]), found[2]
        return cls(seconds=number * _SECONDS[unit]) if unit else cls(calls=number)
