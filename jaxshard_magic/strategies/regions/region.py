"""A region: equations that are emitted in another way than one by one, and what that way sends and holds."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from ...plan import Sent
from ...program.ir import Equation, Scope, Value
from ...program.phases import phases
from ..dealing import Dealing, find_dealing
from ..layout import Layout, Spec
from .deferred import Deferred, find_deferred


@dataclass(frozen=True, eq=False)
class Context:
    """A step in which regions are looked for.

    `labels`: scopes of equations, by index. `reduce` and `sum_dtype`: when, and in which type (None: each in its own),
    devices add up gradients. `handed_on`: values that another program reads, beside the outputs. `waiting`: gradients
    among the outputs that somebody else adds up, so that they may come in parts.
    """

    layout: Layout
    labels: Mapping[int, str]
    reduce: str
    sum_dtype: Any
    handed_on: Collection[Value]
    waiting: Collection[Value]

    @cached_property
    def readers(self) -> dict[Value, list[str]]:
        """The primitives that read each value; "out" for the end of a body and for another program."""
        readers: dict[Value, list[str]] = {v: ["out"] for v in self.handed_on}
        for scope in self.layout.program.scopes():
            for e in scope.equations:
                for v in e.ins:
                    if v is not None:
                        readers.setdefault(v, []).append(e.name)
            for v in scope.outs:
                if v is not None:
                    readers.setdefault(v, []).append("out")
        return readers

    @cached_property
    def phases(self) -> dict[int, str]:
        return phases(self.layout.program, self.layout.flow)

    @cached_property
    def dealing(self) -> Dealing:
        """Which positions are dealt out once for all rings; none where other programs read what this one makes."""
        if self.handed_on or self.waiting:
            return Dealing()
        return find_dealing(self.layout, self.deferred.values)

    @cached_property
    def deferred(self) -> Deferred:
        """The sums over the examples that wait: for the end of a loop unless each trip reduces its own, and for whoever
        takes the outputs that are `waiting`."""
        layout = self.layout
        if self.reduce != "each":
            return find_deferred(layout, self.waiting, self.handed_on)
        if not self.waiting:
            return Deferred()
        batch = {*layout.batch_axes}
        values = (v for v in range(len(layout.program.avals)) if not layout.batchy(v))
        shared = [v for v in values if any(batch.intersection(axes) for axes in layout.at_rest(v))]
        return find_deferred(layout, self.waiting, {*self.handed_on, *shared})


class Emission(Protocol):
    """What a region may use of the way in which `Hold` emits single equations."""

    def before(self, e: Equation, values: list) -> list:
        """The operands of `e` as it uses them: weights gathered."""
        ...

    def after(self, e: Equation, outs: list) -> list:
        """The results of `e` where they belong: activations and gradients pinned."""
        ...

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once in a body for a key."""
        ...

    def gather(self, x: Any, weight: Value) -> Any:
        """A weight at rest, brought to where it is used."""
        ...

    def body(self, scope: Scope, args: Any) -> list:
        """The results of a loop's body, its ends pinned."""
        ...

    def at(self, path: Iterable[Equation]) -> AbstractContextManager[None]:
        """Under the name and the line of the last equation of `path`, each inside a body of the one before."""
        ...


@dataclass(frozen=True, eq=False)
class Region:
    """Equations, `members` by index, that are not emitted one by one.

    An equation may be a member of several regions. The first in `regions.KINDS` is asked first and goes on with `rest`,
    what the others and at last the plain way make of the equation, or does without. A region says only what is
    different of it: whatever it does not define is as without the region.
    """

    members: Collection[int]

    def emit(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        """The results of the member `e`, from its operands as the program has them. A result that only members of this
        region read may be any object."""
        return rest(values)

    def sent(self, e: Equation, operands: Iterable[Sent], rest: Iterable[Sent]) -> Iterable[Sent]:
        """The collectives of the member `e` in one step. `operands`: those that bring what it reads to where it uses
        it; `rest`: these and all others, of its bodies too. Either may be read once, and not both."""
        return rest

    def held(self, e: Equation, rest: Callable[[], int]) -> int:
        """Bytes on a device that the member `e` takes while it runs, beside its operands and results."""
        return rest()

    def lies(self, value: Value) -> Spec | None:
        """How an array that stands for `value` lies at the ends of loops' and branches' bodies, where not as the layout
        says; None for a value that is not the region's."""
        return None

    def leave(self, outs: list) -> list:
        """The step's results, of which `outs` is what its equations made."""
        return outs

    def sent_leaving(self) -> Iterable[Sent]:
        """The collectives of `leave`."""
        return ()

    @property
    def gathered(self) -> Collection[Value]:
        """The weights that members' bodies read as they are used, already gathered."""
        return ()
