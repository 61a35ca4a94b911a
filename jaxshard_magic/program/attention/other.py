"""What stands in the way where positions meet each other in another way than by a softmax of their scores."""

from collections.abc import Iterator
from itertools import combinations

from ..dimensions import Dimensions
from ..ir import Equation, Value
from ..primitives.primitive import Kind
from .chain import is_product
from .trail import Trail

_FAR = 32  # equations between the two products of an attention


def in_the_way(trail: Trail, dims: Dimensions, v: Value) -> Equation | None:
    """The equation that makes of `v`, which has positions twice, something else than a softmax of a product of queries
    and keys; None where it is made of no exponentials of one."""
    way = _Back(trail, dims).to_product(v, _FAR)
    if way is None or not any(x.name == "exp" for e in way for x in (e, *e.inside())):
        return None
    *between, scores = way
    for e in between:
        if (
            e.name == "div"
            and e.ins[1] is not None
            and (other := _none_of_a_sum(trail, e.ins[1])) is not None
        ):
            return other
        if e.doors or not (e.primitive.elementwise or e.primitive.alias):
            return e
    return next((e for v in scores.ins for e in _cuts(trail, v)), None)


def _cuts(trail: Trail, v: Value | None) -> Iterator[Equation]:
    """What cuts queries or keys, or puts them together, such as keys of positions that have no query."""
    for _ in range(_FAR):
        e = None if v is None else trail.maker(v)
        if e is None or not e.ins or is_product(e):
            return
        if e.primitive.kind is Kind.CUT:
            yield e
        v = e.ins[0]


class _Back:
    """The way back from a value over those that have positions twice, and the product that makes them first."""

    def __init__(self, trail: Trail, dims: Dimensions):
        self._trail, self._dims, self._seen = trail, dims, set[Value]()

    def to_product(self, v: Value | None, far: int) -> list[Equation] | None:
        """The equations up to a product that makes it of values without, and that; None where none does."""
        if v is None or not self._paired(v) or far == 0:
            return None
        v = self._trail.up(v)
        e = self._trail.program.maker.get(v)
        if e is None or v in self._seen:
            return None
        self._seen.add(v)
        if is_product(e) and not any(map(self._paired, e.ins)):
            return [e]
        for w in e.ins:
            way = self.to_product(w, far - 1)
            if way is not None:
                return [e, *way]
        return None

    def _paired(self, v: Value | None) -> bool:
        if v is None or self._trail.program.avals[v].dtype == bool:
            return False
        sized = zip(self._dims.of(v), self._trail.program.shapes[v], strict=True)
        big = [c for c, z in sized if z > 1]
        return any(b in self._dims.reach(a, lambda _: True) for a, b in combinations(big, 2))


def _none_of_a_sum(trail: Trail, v: Value) -> Equation | None:
    """What makes `v`, unless that is a sum of one array."""
    while (e := trail.maker(v)) is not None and e.ins and e.ins[0] is not None:
        if trail.moved(e, (None,) * len(trail.program.shapes[v])) is None:
            break
        v = e.ins[0]
    return None if e is None or e.name == "reduce_sum" else e
