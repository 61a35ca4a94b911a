"""Values computed by each microbatch, and outputs of the whole batch computed from the values."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..program.batching.batch_labels import Concatenated, Constant, Identical, Summed, UnknownLabel, output_combination
from ..program.batching.followed_program import FollowedProgram
from ..program.ir import Value
from ..program.primitives import is_literal
from ..program.sizes import nbytes
from .partial_replay import PartialReplay

_ROOM = 2**16  # bytes that a metric's values of the whole batch may take even if the batch is smaller


class MicrobatchOutputs:
    """Values computed by a scan over microbatches.

    An output that is neither a sum over examples nor has a row for each example, such as the largest loss or a
    perplexity, is computed for the whole batch from values that are, where this takes no product.

    Args:
        followed: Loss of a microbatch with a batch label for each value.
        carried: Operand that holds the next value, by position of the aux output, for state handed from one microbatch
            to the next.

    Attributes:
        computed: Values of each microbatch, the loss first.
        combinations: Rule that combines each of `computed` over the microbatches.
        exact: Whether the rule of the loss is exact: a sum over examples, a value for each, or no examples in it.
        averaged: Positions of outputs without an exact rule, averaged or concatenated by a guess.
        state: Values of the carried outputs.
    """

    def __init__(self, followed: FollowedProgram, carried: Mapping[int, int]):
        self.followed, self.carried = followed, dict(carried)
        self._small, self._large = followed.small, followed.large
        self._makers = self._small.producer
        self.exact = output_combination(
            followed.output_labels[0], followed.ratio, *self._avals(self._small.outputs[0])
        ).exact
        self.combinations: dict[Value, Concatenated | Summed] = {}
        self.averaged: list[int] = []
        for j, v in enumerate(self._small.outputs):
            if j not in self.carried:
                self._take(j, v)
        state = [self._small.outputs[j] for j in self.carried]
        self.state = [v for v in state if v is not None]
        self.computed = tuple(self.combinations)

    def _avals(self, v: Value | None) -> tuple[Any, Any]:
        if v is None:
            return self._small.closed.out_avals[0], self._large.closed.out_avals[0]
        return self._small.avals[v], self._large.avals[v]

    def _take(self, j: int, v: Value | None) -> None:
        if v is None or (v in self._small.inputs and j):
            return
        label = self.followed.value_labels[v]
        if isinstance(label, UnknownLabel) and self.exact:
            behind = self._behind(v)
            if behind is not None:
                for w in behind:
                    self._give(w)
                return
        if j == 0 or not isinstance(label, Constant):
            self._give(v)
            if not self.how_of(v).exact:
                self.averaged.append(j)

    def how_of(self, v: Value) -> Identical | Concatenated | Summed:
        return output_combination(self.followed.value_labels[v], self.followed.ratio, *self._avals(v))

    def _give(self, v: Value) -> None:
        how = self.how_of(v)
        self.combinations[v] = Summed(1 / self.followed.ratio, how.exact) if isinstance(how, Identical) else how

    def _behind(self, v: Value) -> list[Value] | None:
        """Return the values with a known label from which an unknown one is computed.

        None where they can't be determined, where the computation has a product, or where the values take more bytes
        than both the batch and `_ROOM`.
        """
        found, seen, todo = [], {v}, [v]
        while todo:
            e = self._makers.get(todo.pop())
            if e is None or any(i.primitive.is_product for i in (e, *e.nested())):
                return None
            for w in e.operands:
                if w is None or w in seen or isinstance(self.followed.value_labels[w], Constant):
                    continue
                seen.add(w)
                if isinstance(self.followed.value_labels[w], UnknownLabel):
                    todo.append(w)
                elif w not in self._small.inputs:
                    found.append(w)
        size = sum(nbytes(self._large.avals[w]) for w in found)
        batch = sum(
            nbytes(self._large.avals[v])
            for v in self._large.inputs
            if not isinstance(self.followed.value_labels[v], Constant)
        )
        return found if size <= max(_ROOM, batch) else None

    def whole(self, operands: Sequence[Any], values: Mapping[Value, Any], state: Sequence[Any]) -> list:
        """Return the loss's outputs for the whole batch.

        Args:
            operands: Operands of the whole batch.
            values: Combined values of the microbatches.
            state: State after the last microbatch.
        """
        outs = self._large.outputs
        wanted = [v for j, v in enumerate(outs) if v is not None and j not in self.carried]
        made = dict(zip(wanted, PartialReplay(self._large, wanted, values.keys())(operands, values), strict=True))
        last = dict(zip(self.carried, state, strict=True))
        literals = self._large.closed.jaxpr.outvars
        return [
            last[j] if j in last else made[v] if v is not None else _literal(literals[j]) for j, v in enumerate(outs)
        ]


def _literal(v: Any) -> Any:
    assert is_literal(v)
    return v.val
