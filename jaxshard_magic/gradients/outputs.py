"""What each microbatch gives of a loss, and what the loss of the whole batch gives is made of."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..program.batching.examples import Constant, Joined, Kept, Summed, Unknown, combine
from ..program.batching.follow import Followed
from ..program.ir import Value
from ..program.primitives import is_literal
from ..program.sizes import nbytes
from .part import Part

_ROOM = 2**16  # bytes that a metric may ask of the whole batch, where the batch itself is smaller


class Outputs:
    """The values that a scan over microbatches gives: `given`, the loss first, each put together as `how[v]` says.

    An output that is neither a sum over examples nor one for each of them, such as the largest loss of an example or a
    perplexity, is computed from those for the whole batch, where that takes no product. `carried`: the outputs that
    are state, handed from one microbatch to the next. `guessed`: those that are averaged for want of better.
    """

    def __init__(self, followed: Followed, carried: Mapping[int, int]):
        self.followed, self.carried = followed, dict(carried)
        self._small, self._large = followed.small, followed.large
        self._makers = self._small.maker
        self.exact = combine(followed.outputs[0], followed.ratio, *self._avals(self._small.outputs[0])).exact
        self.how: dict[Value, Joined | Summed] = {}
        self.guessed: list[int] = []
        for j, v in enumerate(self._small.outputs):
            if j not in self.carried:
                self._take(j, v)
        state = [self._small.outputs[j] for j in self.carried]
        self.state = [v for v in state if v is not None]
        self.given = tuple(self.how)

    def _avals(self, v: Value | None) -> tuple[Any, Any]:
        if v is None:
            return self._small.closed.out_avals[0], self._large.closed.out_avals[0]
        return self._small.avals[v], self._large.avals[v]

    def _take(self, j: int, v: Value | None) -> None:
        if v is None or (v in self._small.inputs and j):
            return
        label = self.followed.of[v]
        if isinstance(label, Unknown) and self.exact:
            behind = self._behind(v)
            if behind is not None:
                for w in behind:
                    self._give(w)
                return
        if j == 0 or not isinstance(label, Constant):
            self._give(v)
            if not self.how_of(v).exact:
                self.guessed.append(j)

    def how_of(self, v: Value) -> Kept | Joined | Summed:
        return combine(self.followed.of[v], self.followed.ratio, *self._avals(v))

    def _give(self, v: Value) -> None:
        how = self.how_of(v)
        self.how[v] = Summed(1 / self.followed.ratio, how.exact) if isinstance(how, Kept) else how

    def _behind(self, v: Value) -> list[Value] | None:
        """The known values that an unknown one is made of; None where that would be dear, or can't be told."""
        found, seen, todo = [], {v}, [v]
        while todo:
            e = self._makers.get(todo.pop())
            if e is None or any(i.primitive.product for i in (e, *e.inside())):
                return None
            for w in e.ins:
                if w is None or w in seen or isinstance(self.followed.of[w], Constant):
                    continue
                seen.add(w)
                if isinstance(self.followed.of[w], Unknown):
                    todo.append(w)
                elif w not in self._small.inputs:
                    found.append(w)
        size = sum(nbytes(self._large.avals[w]) for w in found)
        batch = sum(
            nbytes(self._large.avals[v])
            for v in self._large.inputs
            if not isinstance(self.followed.of[v], Constant)
        )
        return found if size <= max(_ROOM, batch) else None

    def whole(self, operands: Sequence[Any], values: Mapping[Value, Any], state: Sequence[Any]) -> list:
        """The outputs of the loss for the whole batch, from the values given and the last state."""
        outs = self._large.outputs
        wanted = [v for j, v in enumerate(outs) if v is not None and j not in self.carried]
        made = dict(zip(wanted, Part(self._large, wanted, values.keys())(operands, values), strict=True))
        last = dict(zip(self.carried, state, strict=True))
        literals = self._large.closed.jaxpr.outvars
        return [
            last[j] if j in last else made[v] if v is not None else _literal(literals[j])
            for j, v in enumerate(outs)
        ]


def _literal(v: Any) -> Any:
    assert is_literal(v)
    return v.val
