"""Obstacles to recognition: operations between two products that make something other than a softmax of the scores."""

from collections.abc import Iterator
from itertools import combinations

from ..dimensions import Dimensions
from ..ir import Equation, Value
from ..primitives.primitive import Kind
from .backward_walk import BackwardWalk
from .score_path import is_product

_MAX_PATH_LENGTH = 32  # equations between the two products of an attention


def find_obstacle(walk: BackwardWalk, dims: Dimensions, v: Value) -> Equation | None:
    """Return the equation that prevents the path to `v` from being an attention.

    None where `v` is no result of exponentials of a query-key product.

    Args:
        walk: Backward walk of the program.
        dims: Dimensions of the program.
        v: Operand of a product, with two dimensions of positions.
    """
    path = _ScoreProductSearch(walk, dims).path_to_product(v, _MAX_PATH_LENGTH)
    if path is None or not any(x.name == "exp" for e in path for x in (e, *e.nested())):
        return None
    *changes, scores = path
    for e in changes:
        if (
            e.name == "div"
            and e.operands[1] is not None
            and (divisor := _producer_unless_sum(walk, e.operands[1])) is not None
        ):
            return divisor
        if e.bodies or not (e.primitive.is_elementwise or e.primitive.alias):
            return e
    return next((e for v in scores.operands for e in _slices_behind(walk, v)), None)


def _slices_behind(walk: BackwardWalk, v: Value | None) -> Iterator[Equation]:
    """Yield slices and concatenations behind `v`, such as keys at positions without a query."""
    for _ in range(_MAX_PATH_LENGTH):
        e = None if v is None else walk.producer(v)
        if e is None or not e.operands or is_product(e):
            return
        if e.primitive.kind is Kind.SLICE:
            yield e
        v = e.operands[0]


class _ScoreProductSearch:
    """Search, back from a value, for the product that first has two dimensions of positions."""

    def __init__(self, walk: BackwardWalk, dims: Dimensions):
        self._walk, self._dims, self._seen = walk, dims, set[Value]()

    def path_to_product(self, v: Value | None, max_depth: int) -> list[Equation] | None:
        """Return the equations from `v` back to that product, included; None where no product makes `v` so."""
        if v is None or not self._has_position_pair(v) or max_depth == 0:
            return None
        v = self._walk.resolve(v)
        e = self._walk.program.producer.get(v)
        # Each value is tried once, or the paths through shared values would multiply.
        if e is None or v in self._seen:
            return None
        self._seen.add(v)
        if is_product(e) and not any(map(self._has_position_pair, e.operands)):
            return [e]
        for w in e.operands:
            path = self.path_to_product(w, max_depth - 1)
            if path is not None:
                return [e, *path]
        return None

    def _has_position_pair(self, v: Value | None) -> bool:
        """Return whether two dimensions of `v` are related as query and key positions are; False for booleans."""
        if v is None or self._walk.program.avals[v].dtype == bool:
            return False
        sized = zip(self._dims.classes_of(v), self._walk.program.shapes[v], strict=True)
        long_dims = [c for c, z in sized if z > 1]
        return any(b in self._dims.related_classes(a, lambda _: True) for a, b in combinations(long_dims, 2))


def _producer_unless_sum(walk: BackwardWalk, v: Value) -> Equation | None:
    """Return the equation that makes `v`, unless that is a sum over one array."""
    while (e := walk.producer(v)) is not None and e.operands and e.operands[0] is not None:
        if walk.operand_labels(e, (None,) * len(walk.program.shapes[v])) is None:
            break
        v = e.operands[0]
    return None if e is None or e.name == "reduce_sum" else e
