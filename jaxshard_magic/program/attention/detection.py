"""Recognition of attention in a program, however it is written.

The search begins at each product that may have the values as an operand, goes back over the softmax of the other
operand, over masks and scales, to the product of queries and keys. Dimensions are followed by label, so their order,
grouped queries, and dimensions of size 1 make no difference.

An obstacle to recognition is an operation between two products that makes something other than a softmax of the scores.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from ..dimensions import Dimensions
from ..ir import Equation, Program, Value
from ..primitives import shape_of
from ..primitives.primitive import Kind
from .attention import Attention, DetectionResults, Unrecognised
from .backward_walk import BackwardWalk, Label, Labels
from .dimension_roles import build_attention, match_dimension_roles
from .score_path import is_product, score_path_of
from .softmax import ExpSum, Softmax, SoftmaxSearch, rename_labels

_CONTRACTED = -2  # label of the dimension that the product sums over; dimension indices are never negative
_MAX_PATH_LENGTH = 32  # equations between the two products of an attention


def find_attentions(
    program: Program,
    constant_inputs: Mapping[Value, Any] | None = None,
    differentiated_inputs: Collection[Value] | None = None,
) -> DetectionResults:
    """Return the attentions of a program over its own positions, in the order of execution.

    Anything that is an attention except for one operation in between is `Unrecognised`. Cost: linear in the number of
    equations.

    Args:
        program: Loss, not differentiated yet.
        constant_inputs: Arrays of the inputs that are constants, such as masks that the step closes over.
        differentiated_inputs: Inputs with respect to which the loss is differentiated; None for all inputs that are not
            constant. Values that depend on them must be queries, factors of queries, keys or values: the fused
            attention has no gradient with respect to masks or biases.
    """
    constant_inputs = constant_inputs or {}
    differentiated = (
        [v for v in program.inputs if v not in constant_inputs]
        if differentiated_inputs is None
        else differentiated_inputs
    )
    search = _AttentionSearch(program, BackwardWalk(program, constant_inputs, differentiated))
    # Bodies of custom derivative rules are skipped: the rule replaces the gradient of any attention in there.
    in_custom_rules = {inner.index for e in program.equations if e.primitive.custom_derivative for inner in e.nested()}
    candidates = [e for e in program.equations if e.index not in in_custom_rules]
    matches = [search.match_at(e) for e in candidates if is_product(e) or e.name in ("div", "mul")]
    return [f for f in matches if f is not None]


class _AttentionSearch:
    """Recognition of attention at one equation after another."""

    def __init__(self, program: Program, walk: BackwardWalk):
        self._program, self._walk = program, walk
        self._softmaxes = SoftmaxSearch(walk)
        # Without exponentials there is no softmax, so the search for obstacles behind each product can be skipped.
        self._has_exponentials = any(
            e.name == "exp" and len(shape_of(e.jaxpr_eqn.outvars[0])) > 1 for e in program.equations
        )
        self._dims: Dimensions | None = None

    def match_at(self, e: Equation) -> Attention | Unrecognised | None:
        """Return the attention that ends in `e`: its product with the values, or the division of that product."""
        if not is_product(e):
            return self._match_late_division(e)
        for probs_index in (0, 1):
            v = e.operands[probs_index]
            if v is None or e.operands[1 - probs_index] is None:
                continue
            softmax = self._softmaxes.match(v, tuple(range(len(self._program.shapes[v]))))
            match = None if softmax is None else self._match_product(e, probs_index, softmax)
            if match is not None:
                return match
        return self._match_obstacle(e)

    def _match_obstacle(self, e: Equation) -> Unrecognised | None:
        """Return the obstacle between a product with values and a query-key product, given exponentials in between."""
        for v in e.operands:
            if v is None or not self._has_exponentials or len(self._program.shapes[v]) < 2:
                continue
            obstacle = _find_obstacle(self._walk, self.dims, v)
            if obstacle is not None:
                return self._unrecognised_at(obstacle)
        return None

    def _match_late_division(self, e: Equation) -> Attention | Unrecognised | None:
        """Match an attention that multiplies exponentials with the values before `e` divides by their sum."""
        # A multiplication by the reciprocal of the sum can have it on either side.
        for k in (0,) if e.name == "div" else (0, 1):
            numerator, denominator = e.operands[k], e.operands[1 - k]
            if numerator is None or denominator is None:
                continue
            product, labels = self._walk.skip_layout(numerator, _result_labels(e))
            value_product = self._walk.producer(product)
            if value_product is None or not is_product(value_product):
                continue
            exp_sum = self._softmaxes.match_divisor(e, 1 - k, _result_labels(e))
            if exp_sum is None:
                continue
            for probs_index in (0, 1):
                match = self._match_unnormalised(value_product, probs_index, labels, exp_sum)
                if isinstance(match, Attention):
                    order = {
                        d: position for d, position in zip(labels, match.result_order, strict=True) if d is not None
                    }
                    return replace(
                        match, equation_index=e.index, result_order=tuple(order.get(d) for d in _result_labels(e))
                    )
                if match is not None:
                    return match
        return None

    def _match_unnormalised(
        self, out: Equation, probs_index: int, labels: Labels, exp_sum: ExpSum
    ) -> Attention | Unrecognised | None:
        """Match the attention of a product `out` of unnormalised exponentials.

        Args:
            out: Product with the values.
            probs_index: Index of the operand that holds the exponentials.
            labels: Labels of the result of `out`.
            exp_sum: Sum of exponentials by which the result is divided later.
        """
        v, contraction = out.operands[probs_index], out.contraction
        if v is None or contraction is None:
            return None
        names: list[Label | None] = [None] * len(self._program.shapes[v])
        for dim, o in (
            *((t[probs_index], t[2]) for t in contraction.batch),
            *(contraction.left_free, contraction.right_free)[probs_index],
        ):
            names[dim] = labels[o]
        for pair in contraction.contracted:
            names[pair[probs_index]] = _CONTRACTED
        softmax = self._softmaxes.match(v, tuple(names), exp_sum)
        if softmax is None:
            return None
        dim_of_label = {x: d for d, x in enumerate(names) if isinstance(x, int)}
        return self._match_product(out, probs_index, rename_labels(softmax, dim_of_label))

    def _match_product(
        self, value_product: Equation, probs_index: int, softmax: Softmax
    ) -> Attention | Unrecognised | None:
        """Match the product `value_product` of values with `softmax`.

        None where no query-key product is behind the softmax.
        """
        path = score_path_of(self._walk, softmax)
        score_product = self._walk.producer(path.value)
        if score_product is None or not is_product(score_product):
            return None
        roles = match_dimension_roles(
            self._program, self.dims, value_product, probs_index, softmax, score_product, path.labels
        )
        if roles is None:
            return None
        match = softmax.obstacle or path.obstacle or build_attention(self._walk, roles, softmax, path)
        return self._unrecognised_at(match) if isinstance(match, Equation) else match

    def _unrecognised_at(self, e: Equation) -> Unrecognised:
        name = "checkpoint" if e.primitive.remat else e.name
        return Unrecognised(name, self._walk.source_line(e))

    @property
    def dims(self) -> Dimensions:
        """Dimensions of the program, computed at first use."""
        if self._dims is None:
            self._dims = Dimensions(self._program, (1,))
        return self._dims


def _result_labels(e: Equation) -> tuple[int, ...]:
    """Return one label for each dimension of the result: its own index."""
    return tuple(range(len(shape_of(e.jaxpr_eqn.outvars[0]))))


def _find_obstacle(walk: BackwardWalk, dims: Dimensions, v: Value) -> Equation | None:
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
