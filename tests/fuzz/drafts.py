"""Drafts of random operations on the values that are there; None where these don't suit.

A drawn template may be wrong for its operands' shapes: the generator asks `jax.eval_shape` and drops it then. Results
stay of order one whatever their size: products are divided by the root of what they sum over, sums by its length.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from .programs import Body, Input, Type


class Draft(NamedTuple):
    """An operation before its type is known. `distinct`: whether different elements stay different."""

    text: str
    operands: tuple[str, ...]
    distinct: bool = False
    body: Body | None = None


@dataclass
class Pool:
    """The values of a program that is being made; `param` makes one more parameter."""

    rng: Random
    types: dict[str, Type] = field(default_factory=dict)
    distinct: set[str] = field(default_factory=set)
    params: list[Input] = field(default_factory=list)
    keyed: bool = False

    def pick(self, suits: Callable[[Type], bool] = lambda t: t.floating, *, distinct: bool = False) -> str | None:
        """The name of a value that suits, a late one rather than an early one, a parameter seldom: what no example
        meets, no strategy divides."""
        names = [n for n, t in self.types.items() if suits(t) and (n in self.distinct or not distinct)]
        if not names:
            return None
        met = [n for n in names if n[0] != "p"]
        names = met if met and self.rng.random() < 0.85 else names
        return names[max(self.rng.randrange(len(names)), self.rng.randrange(len(names)))]

    def param(self, shape: tuple[int, ...]) -> str:
        """A parameter of that shape: a new one, or one that is used already."""
        old = [p.name for p in self.params if p.type.shape == shape]
        if old and self.rng.random() < 0.4:
            return self.rng.choice(old)
        made = Input(f"p{len(self.params)}", Type(shape, "float32"), 100 + len(self.params))
        self.params.append(made)
        self.types[made.name] = made.type
        self.distinct.add(made.name)
        return made.name

    def ints(self) -> str | None:
        return self.pick(lambda t: t.dtype == "int32")

    def axis(self, name: str) -> int:
        """A dimension of a value, the first one seldom: what mixes examples leaves a strategy less to divide."""
        rank = len(self.types[name].shape)
        return self.rng.randrange(1, rank) if rank > 1 and self.rng.random() < 0.8 else self.rng.randrange(rank)

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self.types[name].shape


OPERATIONS: dict[str, tuple[int, Callable[[Pool], Draft | None]]] = {}  # name -> how often, how it is drawn


def operation(weight: int) -> Callable[[Callable[[Pool], Draft | None]], Callable[[Pool], Draft | None]]:
    def add(draw: Callable[[Pool], Draft | None]) -> Callable[[Pool], Draft | None]:
        OPERATIONS[draw.__name__] = weight, draw
        return draw

    return add


def ranked(least: int, most: int = 4) -> Callable[[Type], bool]:
    return lambda t: t.floating and least <= len(t.shape) <= most
