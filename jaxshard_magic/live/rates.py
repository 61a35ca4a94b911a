"""What a loop gets done a second, of looks at how many of its calls have finished."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

LOOK = 0.5  # seconds between two looks, at least: below it the clock of whoever looks is too coarse


@dataclass(frozen=True)
class Known:
    """What one call of a program does, None where it is not known.

    `examples` and `tokens` of its batch, with the arrays that tell (`examples_by`, `tokens_by`); `flops` of its
    products on all devices; `ideal_s`, the seconds that those not done twice would take at the devices' peak.
    """

    examples: int | None = None
    examples_by: str | None = None
    tokens: int | None = None
    tokens_by: str | None = None
    flops: float | None = None
    ideal_s: float | None = None

    @cached_property
    def amounts(self) -> tuple[float | None, ...]:
        """What adds up over calls, in the order of `Done.amounts`."""
        return self.examples, self.tokens, self.flops, self.ideal_s


NOTHING = (0.0,) * len(Known().amounts)


class Done(NamedTuple):
    """What all calls up to one did together: their number and, as `Known.amounts` has them, what they add up to; None
    once a call did an unknown amount."""

    calls: int = 0
    amounts: tuple[float | None, ...] = NOTHING

    def after(self, calls: int, each: Known) -> "Done":
        """With so many more calls that did each the same."""
        more = (None if amount is None else calls * amount for amount in each.amounts)
        return Done(self.calls + calls, tuple(map(_sum, self.amounts, more)))


@dataclass(frozen=True)
class Stretch:
    """Calls of one program, each after the other: what the calls before them did, what each of them does, and the names
    of the numbers that it returns."""

    before: Done = field(default_factory=Done)
    known: Known = field(default_factory=Known)
    names: tuple[str, ...] = ()

    def done(self, number: int) -> Done:
        """What all calls up to that `number` did, which is one of these."""
        return self.before.after(number - self.before.calls, self.known)


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


class Rates:
    """Turns looks, `seconds` on the clock and what was done by then, into rates over what passed since the last."""

    def __init__(self) -> None:
        self._at: tuple[float, Done] | None = None

    def breaks(self) -> None:
        """What passes now (a compile) is no time of the steps."""
        self._at = None

    def look(self, now: float, done: Done) -> dict[str, float]:
        """Rates since the look before, by name; none where too little passed, or nothing has finished."""
        if self._at is None:
            self._at = now, done
            return {}
        then, before = self._at
        calls = done.calls - before.calls
        if now - then < LOOK or calls <= 0:
            return {}
        self._at = now, done
        seconds = now - then
        return {"step_s": seconds / calls} | dict(_rates(seconds, before, done))


def _rates(seconds: float, before: Done, after: Done) -> Iterator[tuple[str, float]]:
    names = ("examples_per_s", "tokens_per_s", "flops_per_s", "mfu")
    for name, a, b in zip(names, before.amounts, after.amounts, strict=True):
        if a is not None and b is not None and b > a:
            yield name, (b - a) / seconds
