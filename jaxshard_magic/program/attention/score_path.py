"""Path of attention scores, from the operand of a softmax back to a product, and its reading.

`ScorePath` has the effect of each equation on the scores. All that happens to scores before softmax is then read as a
scale, masks, and other changes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..ir import Equation, Value
from ..primitives.jaxprs import is_float
from .attention import Apply, DistanceSpan, Expression, ExpressionLeaf, MaskCondition, Scores, leaves
from .backward_walk import BackwardWalk, Labels, literal_array
from .masks import (
    MASKED_SCORE,
    KeyVisibility,
    key_visibility,
    read_additive_mask,
    read_expression,
    read_multiplicative_mask,
    score_bounds,
)
from .softmax import MAX_STEPS, ExpMask, Softmax


@dataclass(frozen=True)
class _ScoreStep:
    """One elementwise equation of a path.

    Attributes:
        equation: The equation.
        operand_index: Index of the operand on the way to the scores.
        labels: Labels of the result's dimensions.
        later_scale: Factor between the result and the softmax; None where anything other than positive factors,
            additions and masks follows.
    """

    equation: Equation
    operand_index: int
    labels: Labels
    later_scale: float | None


@dataclass
class ScorePath:
    """Path from a softmax back to `value`.

    Attributes:
        value: First value of the path, a product if the path is complete.
        labels: Labels of the dimensions of `value`.
        steps: Equations passed, from the softmax backwards.
        obstacle: First equation that prevents an attention; None for none.
    """

    value: Value
    labels: Labels
    steps: list[_ScoreStep] = field(default_factory=list)
    obstacle: Equation | None = None


def is_product(e: Equation) -> bool:
    """Return whether `e` is a plain product of two arrays: dimensions are batched, contracted or free, and no more."""
    c = e.contraction
    return c is not None and len(e.operands) == 2 and not c.windowed and c.grouped is None and c.ragged_dim is None


def score_path_of(walk: BackwardWalk, softmax: Softmax) -> ScorePath:
    """Return the path from `softmax` back to a product, as far as it is elementwise."""
    path, later_scale = ScorePath(softmax.scores, softmax.labels), 1.0
    for _ in range(4 * MAX_STEPS):
        path.value, path.labels = walk.skip_layout(path.value, path.labels, allow_split=True)
        e = walk.producer(path.value)
        if e is None or not e.primitive.is_elementwise:
            return path
        path_operands = _operands_from_products(walk, e)
        if not path_operands:
            return path
        # With several operands from products, `e` is no change of one array of scores.
        if len(path_operands) > 1:
            path.obstacle = path.obstacle or e
        path.steps.append(_ScoreStep(e, path_operands[0], path.labels, later_scale))
        later_scale = _scale_before(walk, e, path_operands[0], later_scale)
        v = e.operands[path_operands[0]]
        assert v is not None
        path.value = v
    return path


def _scale_before(walk: BackwardWalk, e: Equation, operand_index: int, later_scale: float | None) -> float | None:
    """Return the factor between operand `operand_index` of `e` and the softmax; None for an unknown or non-positive
    factor."""
    if later_scale is None or e.name in ("add", "add_any", "select_n") or (e.name == "sub" and operand_index == 0):
        return later_scale
    # A negative factor would turn very low fills into very high scores.
    number = _scale_factor(walk, e, operand_index)
    return None if number is None or number <= 0 else later_scale * number


def _scale_factor(walk: BackwardWalk, e: Equation, operand_index: int) -> float | None:
    """Return the number by which `e` multiplies its operand `operand_index`.

    None where `e` does something else, or where the number is unknown or 0.

    Args:
        walk: Backward walk of the program.
        e: Equation.
        operand_index: Index of the operand of interest.
    """
    if e.name == "neg":
        return -1.0
    if e.name not in ("mul", "div") or (e.name == "div" and operand_index != 0):
        return None
    number = walk.scalar(e, 1 - operand_index)
    return None if not number else number if e.name == "mul" else 1 / number


def _mask_fill(walk: BackwardWalk, step: _ScoreStep) -> float | None:
    """Return the number that a `where` puts in place of scores, as the softmax sees it.

    None for another equation, or for a number too large to hide keys (above `MASKED_SCORE`).
    """
    e = step.equation
    if (
        e.name != "select_n"
        or len(e.operands) != 3
        or step.operand_index == 0
        or e.operands[0] is None
        or step.later_scale is None
    ):
        return None
    number = walk.scalar(e, 3 - step.operand_index)
    return number * step.later_scale if number is not None and number * step.later_scale <= MASKED_SCORE else None


def _operands_from_products(walk: BackwardWalk, e: Equation) -> list[int]:
    """Return the operands of `e` with a product behind them and only elementwise equations in between."""
    shapes, shape = walk.program.shapes, walk.program.shapes[e.results[0]]
    floats = [k for k, v in enumerate(e.operands) if v is not None and shapes[v] == shape]
    # Operand 0 of `select_n` is its predicate.
    floats = [k for k in floats if not (e.name == "select_n" and k == 0)]
    return [k for k in floats if _leads_to_product(walk, e.operands[k], 2 * MAX_STEPS, {})]


def _leads_to_product(walk: BackwardWalk, v: Value | None, max_depth: int, known: dict[Value, bool]) -> bool:
    """Return whether a product is behind `v`, at most `max_depth` elementwise equations away."""
    assert v is not None
    v, _ = walk.skip_layout(v, (None,) * len(walk.program.shapes[v]), allow_split=True)
    if v not in known:
        # Shared by all paths, so each value is examined once; a value first met at the depth limit stays False.
        known[v] = False
        e = walk.producer(v)
        if e is None or max_depth == 0:
            return False
        shape = walk.program.shapes[e.results[0]] if e.results else ()
        same = [w for w in e.operands if w is not None and walk.program.shapes[w] == shape]
        known[v] = is_product(e) or (
            e.primitive.is_elementwise and any(_leads_to_product(walk, w, max_depth - 1, known) for w in same)
        )
    return known[v]


@dataclass(frozen=True)
class ScoreTransform:
    """Effect of the equations between scores and softmax; fields as in `Attention`.

    Attributes:
        scale: Factor of the scores.
        span: Distances at which keys are visible.
        conditions: Further conditions on visible keys.
        fill: Number that replaces hidden scores.
        score_mod: Other changes of scores; None for no change.
        masks_in_score_mod: Whether `score_mod` contains the masks as written.
        query_factors: Factors of the queries, each with True for a divisor.
    """

    scale: float
    span: DistanceSpan
    conditions: tuple[MaskCondition, ...]
    fill: float
    score_mod: Expression | None
    masks_in_score_mod: bool
    query_factors: tuple[tuple[Expression, bool], ...]


@dataclass(frozen=True)
class _ScoreMask:
    """One mask.

    Attributes:
        visibility: Visible keys.
        fill: Score of hidden keys, or the number added to their scores.
        is_additive: Whether `fill` is added.
    """

    visibility: KeyVisibility
    fill: float
    is_additive: bool = False


def read_score_transform(
    walk: BackwardWalk, label_positions: Mapping[int, int], softmax: Softmax, path: ScorePath
) -> ScoreTransform | Equation:
    """Return the effect of all equations between scores and softmax, or the first equation without a known effect.

    Args:
        walk: Backward walk of the program.
        label_positions: Position of each label of the softmax among (batch..., groups..., query, key).
        softmax: Softmax, whose exponentials may be masked as well.
        path: Path from softmax back to scores.
    """
    reader = _ScoreReader(walk, label_positions)
    # A path runs from the softmax backwards, so its steps are read in reverse.
    for step in reversed(path.steps):
        if not reader.read_step(step):
            return step.equation
    for mask in softmax.exp_masks:
        if not reader.read_exp_mask(mask):
            return mask.equation
    transform = reader.transform()
    # `score_mod` can't include masks that are applied after the exponential.
    return softmax.exp_masks[0].equation if transform.masks_in_score_mod and softmax.exp_masks else transform


class _ScoreReader:
    """Reader of equations in their order of execution, from the query-key product on.

    `_written` is the expression of all changes so far, `_bare` the same without masks.
    """

    def __init__(self, walk: BackwardWalk, label_positions: Mapping[int, int]):
        self._walk, self._label_positions, self._rank = walk, label_positions, len(label_positions)
        self._written = self._bare = Scores()
        self._scales = {"written": 1.0, "bare": 1.0}
        self._masks: list[_ScoreMask] = []
        self._changed_after_mask = False  # whether a bias or another elementwise change followed a mask
        self._factors: list[tuple[Expression, bool]] = []

    def read_step(self, step: _ScoreStep) -> bool:
        """Read one more equation; return False for an equation without a known effect."""
        return (
            # The most specific form first: the later ones would match most of these steps too.
            self._read_scale(step)
            or self._read_fill(step)
            or self._read_query_factor(step)
            or self._read_elementwise(step)
        )

    def read_exp_mask(self, mask: ExpMask) -> bool:
        """Read a factor of the exponentials as a mask; return False for any other factor."""
        expression = read_expression(
            self._walk, mask.mask, self._to_positions(mask.labels), self._rank, to_booleans=True
        )
        is_select = mask.equation.name == "select_n"
        if expression is None:
            return False
        conditions = [MaskCondition(expression, mask.visible_if)] if is_select else read_multiplicative_mask(expression)
        if conditions is None:
            return False
        self._masks.append(_ScoreMask(key_visibility(conditions, self._rank), float("-inf")))
        return True

    def transform(self) -> ScoreTransform:
        span, conditions = DistanceSpan(), list[MaskCondition]()
        for mask in self._masks:
            span &= mask.visibility.span
            conditions += mask.visibility.conditions
        masks_in_score_mod = self._needs_masks_in_score_mod(bool(conditions) or not span.has_zero)
        expression, scale = (self._written, "written") if masks_in_score_mod else (self._bare, "bare")
        score_mod = None if isinstance(expression, Scores) else expression
        fill = self._masks[-1].fill if self._masks else float("-inf")
        return ScoreTransform(
            self._scales[scale], span, tuple(conditions), fill, score_mod, masks_in_score_mod, tuple(self._factors)
        )

    def _needs_masks_in_score_mod(self, may_be_fully_masked: bool) -> bool:
        """Return whether hidden scores may influence the result, so that the masks must be applied as written.

        Args:
            may_be_fully_masked: Whether a query may have no visible key.
        """
        fills = [mask.fill for mask in self._masks]
        if not any(map(np.isfinite, fills)):
            return False
        # Bounds of the unmasked scores if all query-key products are 0: a fill has the effect of -inf only far below
        # them.
        low, high = (
            (0.0, 0.0) if isinstance(self._bare, Scores) else score_bounds(self._bare, self._rank) or (-np.inf, 0)
        )
        if max(fills) + max(high, 0.0) > low + MASKED_SCORE:
            return True
        # A query without a visible key has the mean of all values only where all its scores are one and the same fill.
        same_fills = len(set(fills)) == 1 and not any(mask.is_additive for mask in self._masks)
        return may_be_fully_masked and not (same_fills and not self._changed_after_mask)

    def _read_scale(self, step: _ScoreStep) -> bool:
        number = _scale_factor(self._walk, step.equation, step.operand_index)
        if number is None:
            return False
        if isinstance(self._bare, Scores):
            self._scales["bare"] *= number
        else:
            self._bare = self._apply(step, {}, self._bare)
        if isinstance(self._written, Scores):
            self._scales["written"] *= number
        else:
            self._written = self._apply(step, {}, self._written)
        return True

    def _read_fill(self, step: _ScoreStep) -> bool:
        """Read `where(mask, scores, very small number)`."""
        fill, mask = _mask_fill(self._walk, step), step.equation.operands[0]
        if fill is None or mask is None:
            return False
        expression = read_expression(self._walk, mask, self._to_positions(step.labels), self._rank, to_booleans=True)
        if expression is None:
            return False
        self._masks.append(
            # `select_n` takes operand 2 where the predicate is true.
            _ScoreMask(key_visibility([MaskCondition(expression, step.operand_index == 2)], self._rank), fill)
        )
        self._written = self._apply(step, {0: expression}, self._written)
        return True

    def _read_query_factor(self, step: _ScoreStep) -> bool:
        """Read a factor that is equal for all keys; queries can be multiplied by it instead."""
        e, other = step.equation, None
        if e.name == "mul" or (e.name == "div" and step.operand_index == 0):
            other = e.operands[1 - step.operand_index]
        if other is None or not (isinstance(self._bare, Scores) and isinstance(self._written, Scores)):
            return False
        expression = read_expression(self._walk, other, self._to_positions(step.labels), self._rank)
        if expression is None or any(self._rank - 1 in leaf.dims for leaf in leaves(expression)):
            return False
        self._factors.append((expression, e.name == "div"))
        return True

    def _read_elementwise(self, step: _ScoreStep) -> bool:
        """Read any elementwise change by positions and values without a gradient: biases, caps, added masks."""
        e, labels = step.equation, self._to_positions(step.labels)
        others = {k: v for k, v in enumerate(e.operands) if k != step.operand_index and v is not None}
        if (
            step.later_scale is not None
            and len(others) == 1
            and (e.name == "add" or (e.name == "sub" and step.operand_index == 0))
        ):
            ((k, v),) = others.items()
            if self._read_addition(step, k, v):
                return True
        expressions = {k: read_expression(self._walk, v, labels, self._rank) for k, v in others.items()}
        readable = {k: test for k, test in expressions.items() if test is not None}
        if len(readable) < len(expressions) or self._has_gradient(readable.values()):
            return False
        self._changed_after_mask |= bool(self._masks)
        self._bare, self._written = (self._apply(step, readable, tree) for tree in (self._bare, self._written))
        return True

    def _read_addition(self, step: _ScoreStep, k: int, v: Value) -> bool:
        """Read numbers added to scores: very small ones as masks, others besides as a bias; return False without a
        mask."""
        expression = read_expression(self._walk, v, self._to_positions(step.labels), self._rank, to_booleans=True)
        if expression is None or step.later_scale is None:
            return False
        factor_to_softmax = step.later_scale if step.equation.name == "add" else -step.later_scale
        terms = [(term, read_additive_mask(term, factor_to_softmax)) for term in _addends(expression)]
        bias_terms = [term for term, additive_mask in terms if additive_mask is None]
        if len(bias_terms) == len(terms) or self._has_gradient(bias_terms):
            return False
        self._written = self._apply(step, {k: expression}, self._written)
        if bias_terms:
            self._changed_after_mask |= bool(self._masks)
            for term in bias_terms:
                self._bare = self._apply(step, {k: term}, self._bare)
        for _, hiding in terms:
            if hiding is not None:
                self._masks.append(_ScoreMask(key_visibility(hiding[0], self._rank), hiding[1], is_additive=True))
        return True

    def _apply(self, step: _ScoreStep, others: Mapping[int, Expression], tree: Expression) -> Expression:
        """Return the equation of `step` as an expression on `tree`, with `others` as its remaining operands."""
        e, operands = step.equation, list[Expression]()
        for k, var in enumerate(e.jaxpr_eqn.invars):
            v = e.operands[k]
            if k == step.operand_index:
                operands.append(tree)
            elif k in others:
                operands.append(others[k])
            elif v is None:
                operands.append(ExpressionLeaf(literal_array(var), ()))
            else:  # a number, as `_scale_factor` or `_mask_fill` has checked
                operands.append(ExpressionLeaf(np.asarray(self._walk.scalar(e, k)), ()))
        return Apply(e.jaxpr_eqn, tuple(operands))

    def _to_positions(self, labels: Labels) -> Labels:
        return tuple(self._label_positions.get(x) if isinstance(x, int) else x for x in labels)

    def _has_gradient(self, expressions: Iterable[Expression]) -> bool:
        """Return whether a leaf of the expressions depends on a differentiated input."""
        sources: Sequence[object] = [leaf.source for test in expressions for leaf in leaves(test)]
        return any(not isinstance(v, np.ndarray) and v in self._walk.values_with_gradient for v in sources)


def _addends(expression: Expression) -> list[Expression]:
    """Return the addends of a sum, also through conversions between float dtypes."""
    if isinstance(expression, Apply) and expression.eqn.primitive.name == "add":
        return [term for operand in expression.operands for term in _addends(operand)]
    if isinstance(expression, Apply) and expression.eqn.primitive.name == "convert_element_type":
        terms = _addends(expression.operands[0])
        if is_float(getattr(expression.eqn.invars[0].aval, "dtype", None)) and len(terms) > 1:
            return terms
    return [expression]
