"""Which values of a step belong together: a parameter, its gradient and its moments, or arrays of as many rows."""

from collections.abc import Iterable
from itertools import pairwise

from ..program.ir import Equation, Program, Value
from ..program.unionfind import UnionFind


class Kinds:
    """Values that are of one shape and made of each other element by element, such as a parameter, its gradient and its
    moments: `of(v)` is the same for all of them. With `rows` also those that have as many rows, along their first
    dimension, and are made of each other row by row, such as the factors of a second moment."""

    def __init__(self, step: Program, *, rows: bool = False):
        self._sets = UnionFind(len(step.avals))
        shapes = step.shapes
        spread: set[Value] = set()  # one number everywhere: it makes nothing of a kind that reads it
        for e in step.top.equations:
            own = shapes[e.outs[0]] if e.outs else ()
            if rows and by_row(e, step):
                self._join(v for v in (*e.ins, *e.outs) if v is not None)
            elif e.name == "broadcast_in_dim":
                spread.update(e.outs)
            elif e.primitive.elementwise and own:
                same = (v for v in (*e.ins, *e.outs) if v is not None and shapes[v] == own)
                self._join(v for v in same if v not in spread)

    def join(self, v: Value, w: Value) -> None:
        """From here on the two are of one kind."""
        self._sets.union(v, w)

    def of(self, v: Value) -> Value:
        return self._sets.find(v)

    def _join(self, values: Iterable[Value]) -> None:
        for v, w in pairwise(values):
            self.join(v, w)


def by_row(e: Equation, program: Program) -> bool:
    """Whether an equation that is not by element makes each row of its result of that row of its operands."""
    if len(e.outs) != 1 or any(v is None for v in e.ins):
        return False
    rows = {program.shapes[v][:1] for v in (*e.ins, *e.outs) if v is not None}
    if len(rows) != 1 or () in rows:
        return False
    if (c := e.contraction) is not None:
        return (0, 0, 0) in c.batch
    if e.factors is not None:
        return e.factors.whole(0) == 0
    return e.primitive.reduces and 0 not in e.params["axes"]
