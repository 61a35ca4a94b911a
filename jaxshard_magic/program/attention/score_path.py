"""Path from the operand of a softmax back to a product, with the effect of each equation on the scores."""

from dataclasses import dataclass, field

from ..ir import Equation, Value
from .backward_walk import BackwardWalk, Labels
from .masks import MASKED_SCORE
from .softmax import MAX_STEPS, Softmax


@dataclass(frozen=True)
class ScoreStep:
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
    steps: list[ScoreStep] = field(default_factory=list)
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
        path.steps.append(ScoreStep(e, path_operands[0], path.labels, later_scale))
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
    number = scale_factor(walk, e, operand_index)
    return None if number is None or number <= 0 else later_scale * number


def scale_factor(walk: BackwardWalk, e: Equation, operand_index: int) -> float | None:
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


def mask_fill(walk: BackwardWalk, step: ScoreStep) -> float | None:
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
