"""Equivalence classes of a step's values: a parameter with its gradient and moments, or arrays with the same rows."""

from collections.abc import Iterable
from itertools import pairwise

from ..program.ir import Equation, Program, Value
from ..program.union_find import UnionFind


class ValueClasses:
    """Classes of values with one shape that are computed from each other element by element.

    A parameter, its gradient and its optimizer moments form one class.

    Args:
        step: The program to classify, at its top level.
        rows: Also merge values with the same number of rows (first dimension) that are computed from each other row by
            row, such as the factors of a factored second moment.
    """

    def __init__(self, step: Program, *, rows: bool = False):
        self._sets = UnionFind(len(step.avals))
        shapes = step.shapes
        spread: set[Value] = set()
        for e in step.top.equations:
            own = shapes[e.results[0]] if e.results else ()
            if rows and is_rowwise(e, step):
                self._merge_all(v for v in (*e.operands, *e.results) if v is not None)
            # Equations of unrelated classes may read the result of one broadcast, such as zeros: their classes are not
            # merged through it.
            elif e.name == "broadcast_in_dim":
                spread.update(e.results)
            elif e.primitive.is_elementwise and own:
                same = (v for v in (*e.operands, *e.results) if v is not None and shapes[v] == own)
                self._merge_all(v for v in same if v not in spread)

    def merge(self, v: Value, w: Value) -> None:
        """Merge the classes of two values."""
        self._sets.union(v, w)

    def class_of(self, v: Value) -> Value:
        """Return the representative of the class that contains `v`."""
        return self._sets.find(v)

    def _merge_all(self, values: Iterable[Value]) -> None:
        for v, w in pairwise(values):
            self.merge(v, w)


def is_rowwise(e: Equation, program: Program) -> bool:
    """Return whether a non-elementwise equation computes each row of its result from the same row of its operands."""
    if len(e.results) != 1 or any(v is None for v in e.operands):
        return False
    rows = {program.shapes[v][:1] for v in (*e.operands, *e.results) if v is not None}
    if len(rows) != 1 or () in rows:
        return False
    if (c := e.contraction) is not None:
        return (0, 0, 0) in c.batch
    if e.factors is not None:
        return e.factors.unsplit_dim(0) == 0
    return e.primitive.is_combinable and 0 not in e.params["axes"]
