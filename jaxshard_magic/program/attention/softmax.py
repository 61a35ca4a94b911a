"""Recognition of softmax, however it is written: exponentials divided by their sum.

The search goes from a value back over masks to exponentials, and from the divisor back to the sum of the same
exponentials. A maximum, or the logarithm of the sum itself, subtracted before `exp` is equal for all keys and cancels.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp

from ..ir import Equation, Value
from .backward_walk import BackwardWalk, Label, Labels, involves, rename_label

MAX_STEPS = 8  # equations; limits of searches are multiples of it
_MAX_VALUES_TRIED = 256  # values examined in one search


@dataclass(frozen=True)
class ExpMask:
    """Booleans, or numbers 0 and 1, multiplied with exponentials.

    Attributes:
        equation: The multiplication or `select_n`.
        mask: The booleans or numbers.
        labels: Labels of the dimensions of `mask`.
        visible_if: Value of a boolean mask at which exponentials are kept.
    """

    equation: Equation
    mask: Value
    labels: Labels
    visible_if: bool = True


@dataclass(frozen=True)
class Softmax:
    """Softmax of a value.

    Attributes:
        scores: Operand of the softmax.
        labels: Labels of the dimensions of `scores`.
        axis_label: Label of the softmax dimension.
        exp_masks: Masks applied to the exponentials.
        obstacle: Equation that turns the softmax into something else; None for none.
    """

    scores: Value
    labels: Labels
    axis_label: int
    exp_masks: tuple[ExpMask, ...] = ()
    obstacle: Equation | None = None


@dataclass(frozen=True)
class ExpSum:
    """Sum of exponentials, repeated along the summed dimension.

    Attributes:
        exp: Equation of the exponentials.
        labels: Labels of their dimensions; -1 for the summed dimension.
        exp_masks: Masks applied to the exponentials before the sum.
        extra: Equation that adds a number to the sum or takes the maximum of both, and that number; None for none.
    """

    exp: Equation
    labels: Labels
    exp_masks: tuple[ExpMask, ...]
    extra: tuple[Equation, float] | None


@dataclass(frozen=True)
class _SearchPath:
    """Equations passed on the way back from a value.

    Attributes:
        exp_sum: Sum of exponentials by which the value is divided.
        exp_masks: Masks applied to exponentials.
        obstacle: Last equation of any other kind that was passed.
        scaled: Last multiplication or division by a number that was passed.
    """

    exp_sum: ExpSum | None = None
    exp_masks: tuple[ExpMask, ...] = ()
    obstacle: Equation | None = None
    scaled: Equation | None = None


class SoftmaxSearch:
    """Search for softmax in a program.

    Args:
        walk: Backward walk of the program.
    """

    def __init__(self, walk: BackwardWalk):
        self._walk, self._program = walk, walk.program
        self._leads_to_exp_cache = dict[Value, bool]()
        self._remaining = 0

    def match(self, v: Value, labels: Labels, exp_sum: ExpSum | None = None) -> Softmax | None:
        """Return the softmax whose result is `v`; None for no softmax.

        Args:
            v: Value.
            labels: Labels of its dimensions.
            exp_sum: Sum of exponentials by which `v` is divided later; None where the division comes before `v`.
        """
        self._remaining = _MAX_VALUES_TRIED
        return self._search(v, labels, _SearchPath(exp_sum), 2 * MAX_STEPS)

    def match_divisor(self, e: Equation, operand_index: int, labels: Labels) -> ExpSum | None:
        """Return the sum of exponentials by which `e` divides; None for no such sum.

        Args:
            e: Division, or multiplication by a reciprocal.
            operand_index: Index of the operand that is the sum, or the reciprocal of the sum.
            labels: Labels of the result of `e`.
        """
        v = e.operands[operand_index]
        if v is None:
            return None
        return self.match_sum(v, labels) if e.name == "div" else self._match_reciprocal(v, labels)

    def match_sum(self, v: Value, labels: Labels) -> ExpSum | None:
        """Return the sum of exponentials that is `v`, repeated along one dimension; None for no such sum.

        Args:
            v: Value.
            labels: Labels of its dimensions.
        """
        walk, extra = self._walk, None
        for _ in range(4 * MAX_STEPS):
            e = walk.producer(v)
            if e is None or e.operands[0] is None:
                return None
            # `abs` changes nothing: a sum of exponentials is positive.
            if e.name == "abs":
                v = e.operands[0]
            elif e.name in ("add", "max") and (exponentials := self._split_number(e)) is not None:
                extra, v = (e, exponentials[0]), exponentials[1]
            elif (source_labels := walk.operand_labels(e, labels, allow_split=True)) is not None:
                v, labels = e.operands[0], source_labels
            else:
                break
        if e is None or e.name != "reduce_sum" or len(e.params["axes"]) != 1 or e.operands[0] is None:
            return None
        axis = int(e.params["axes"][0])
        exponentials = self._match_exp(e.operands[0], (*labels[:axis], -1, *labels[axis:]))
        return None if exponentials is None else ExpSum(*exponentials, extra)

    def _split_number(self, e: Equation) -> tuple[float, Value] | None:
        for k in (1, 0):
            number, remaining_operand = self._walk.scalar(e, k), e.operands[1 - k]
            if number is not None and remaining_operand is not None:
                return number, remaining_operand
        return None

    def _match_exp(self, v: Value, labels: Labels) -> tuple[Equation, Labels, tuple[ExpMask, ...]] | None:
        exp_masks = []
        for _ in range(MAX_STEPS):
            v, labels = self._walk.skip_layout(v, labels, allow_split=True)
            e = self._walk.producer(v)
            if e is None or e.name == "exp":
                return None if e is None else (e, labels, tuple(exp_masks))
            readings = self._match_exp_mask(e, labels)
            readings = [(w, x) for w, x in readings if self._match_exp(x, labels) is not None]
            if not readings:
                return None
            exp_masks.append(readings[0][0])
            v = readings[0][1]
        return None

    def _match_exp_mask(self, e: Equation, labels: Labels) -> list[tuple[ExpMask, Value]]:
        """Return the ways to read `e` as a masked value: masks, each with the value that it masks."""
        if e.name == "select_n" and len(e.operands) == 3 and e.operands[0] is not None:
            zero = next((k for k in (1, 2) if self._walk.scalar(e, k) == 0), None)
            other = None if zero is None else e.operands[3 - zero]
            return [] if other is None else [(ExpMask(e, self._walk.resolve(e.operands[0]), labels, zero == 1), other)]
        if e.name != "mul" or e.operands[0] is None or e.operands[1] is None:
            return []
        pairs = ((e.operands[0], e.operands[1]), (e.operands[1], e.operands[0]))
        return [(ExpMask(e, self._walk.resolve(mask), labels), x) for x, mask in pairs if self._has_result_shape(x, e)]

    def _has_result_shape(self, v: Value, e: Equation) -> bool:
        return self._program.shapes[v] == self._program.shapes[e.results[0]]

    def _search(self, v: Value, labels: Labels, path: _SearchPath, max_depth: int) -> Softmax | None:
        v, labels = self._walk.skip_layout(v, labels, allow_split=True)
        e = self._walk.producer(v)
        # A chain of multiplications has exponentially many paths, so the number of values tried is bounded.
        self._remaining -= 1
        if e is None or max_depth == 0 or self._remaining < 0 or not self._leads_to_exp(v, 2 * MAX_STEPS):
            return None
        if e.name == "exp":
            return self._softmax_of_exp(e, labels, path)
        for w, longer_path in self._candidate_operands(e, labels, path):
            softmax = self._search(w, labels, longer_path, max_depth - 1)
            if softmax is not None:
                return softmax
        return None

    def _leads_to_exp(self, v: Value, max_depth: int) -> bool:
        """Return whether exponentials are behind a value, with only elementwise equations in between."""
        v, _ = self._walk.skip_layout(v, (None,) * len(self._program.shapes[v]), allow_split=True)
        if v not in self._leads_to_exp_cache:
            e = self._walk.producer(v)
            if e is None or max_depth == 0 or not e.primitive.is_elementwise:
                return False
            self._leads_to_exp_cache[v] = e.name == "exp" or any(
                self._leads_to_exp(w, max_depth - 1)
                for w in e.operands
                if w is not None and self._has_result_shape(w, e)
            )
        return self._leads_to_exp_cache[v]

    def _candidate_operands(self, e: Equation, labels: Labels, path: _SearchPath) -> list[tuple[Value, _SearchPath]]:
        """Return the operands from which `e` may make a softmax, each with the path extended by `e`."""
        candidates: list[tuple[Value, _SearchPath]] = []
        for k in (1,) if e.name == "div" else (0, 1) if e.name == "mul" else ():
            dividend = e.operands[1 - k]
            exp_sum = None if path.exp_sum is not None or dividend is None else self.match_divisor(e, k, labels)
            if exp_sum is not None and dividend is not None:
                candidates.append((dividend, replace(path, exp_sum=exp_sum)))
        for exp_mask, dividend in self._match_exp_mask(e, labels):
            candidates.append((dividend, replace(path, exp_masks=(*path.exp_masks, exp_mask))))
        for k, v in enumerate(e.operands):
            if v is None or not self._has_result_shape(v, e):
                continue
            scaled = e.name in ("mul", "div") and len(e.operands) == 2 and self._walk.scalar(e, 1 - k) is not None
            candidates.append((v, replace(path, scaled=e) if scaled else replace(path, obstacle=e)))
        return candidates

    def _match_reciprocal(self, v: Value, labels: Labels) -> ExpSum | None:
        walk = self._walk
        while (e := walk.producer(v)) is not None and (
            source_labels := walk.operand_labels(e, labels, allow_split=True)
        ) is not None:
            if e.operands[0] is None:
                return None
            v, labels = e.operands[0], source_labels
        if e is None:
            return None
        if e.name == "div" and e.operands[1] is not None and walk.scalar(e, 0) == 1:
            return self.match_sum(e.operands[1], labels)
        if e.name == "integer_pow" and e.params["y"] == -1 and e.operands[0] is not None:
            return self.match_sum(e.operands[0], labels)
        return None

    def _softmax_of_exp(self, exp: Equation, labels: Labels, path: _SearchPath) -> Softmax | None:
        """Return the softmax that has the exponentials `exp`; None for no softmax."""
        exp_sum = path.exp_sum
        sum_in_exponent = exp_sum is None
        # In `exp(x - logsumexp(x))` the sum is inside the exponential, under a logarithm.
        if exp_sum is None:
            exp_sum = self._match_subtracted_log_sum(exp, labels)
            if exp_sum is None:
                return None
        axis_label = _summed_label(labels, exp_sum.labels)
        if axis_label is None:
            return None
        scores, score_labels, constants, logs = self._strip_constants(exp, labels, axis_label)
        # Each logarithm in the exponent is one division by the sum; a softmax has exactly one division.
        if len(logs) != sum_in_exponent or (sum_in_exponent and self._walk.producer(logs[0]) is None):
            return None
        if exp is not exp_sum.exp:
            sum_operand = self._strip_constants(exp_sum.exp, labels, axis_label)
            if sum_operand[0] != scores or sum_operand[2] != constants or sum_operand[3]:
                return None
        # Masked exponentials over an unmasked sum, or the reverse, are no softmax.
        outer_masks = [(w.mask, w.visible_if) for w in path.exp_masks]
        summed_masks = [(w.mask, w.visible_if) for w in exp_sum.exp_masks]
        unmatched_mask = next(
            (w for w, key in zip(path.exp_masks, outer_masks, strict=True) if key not in summed_masks), None
        )
        if unmatched_mask is None and not set(summed_masks) <= set(outer_masks):
            unmatched_mask = next(
                w for w, key in zip(exp_sum.exp_masks, summed_masks, strict=True) if key not in outer_masks
            )
        extra_equation = (
            None if exp_sum.extra is None or self._is_negligible(exp_sum, labels, axis_label) else exp_sum.extra[0]
        )
        obstacle = (
            path.obstacle or (unmatched_mask.equation if unmatched_mask else None) or extra_equation or path.scaled
        )
        return Softmax(scores, score_labels, axis_label, () if unmatched_mask else path.exp_masks, obstacle)

    def _is_negligible(self, exp_sum: ExpSum, labels: Labels, axis_label: int) -> bool:
        """Return whether the number added to a sum is lost by rounding.

        The sum of exponentials relative to their maximum is at least 1.
        """
        assert exp_sum.extra is not None
        e, number = exp_sum.extra
        maxima = [v for v in self._strip_constants(exp_sum.exp, labels, axis_label)[2] if self._is_maximum(v)]
        # Rounded to nearest, 1 + x is 1 up to x = eps / 2. A maximum with 1 or less changes no sum of at least 1.
        lost_below = float(jnp.finfo(self._program.avals[e.results[0]].dtype).eps) / 4 if e.name == "add" else 1.0
        return bool(maxima) and not exp_sum.exp_masks and 0 <= number <= lost_below

    def _is_maximum(self, v: Value) -> bool:
        e = self._walk.producer(v)
        if (
            e is not None
            # `jax.nn.softmax` takes the maximum with an initial value of -inf.
            and e.name == "max"
            and self._walk.scalar(e, 0) == float("-inf")
            and e.operands[1] is not None
        ):
            e = self._walk.producer(e.operands[1])
        return e is not None and e.name == "reduce_max"

    def _match_subtracted_log_sum(self, exp: Equation, labels: Labels) -> ExpSum | None:
        v = exp.operands[0]
        for _ in range(MAX_STEPS):
            if v is None:
                return None
            v, labels = self._walk.skip_layout(v, labels, allow_split=True)
            e = self._walk.producer(v)
            if e is None or e.name != "sub" or e.operands[1] is None:
                return None
            for log, log_labels in self._split_terms(e.operands[1], labels)[1]:
                if (exp_sum := self._match_log_sum(log, log_labels)) is not None:
                    return exp_sum
            v = e.operands[0]
        return None

    def _match_log_sum(self, v: Value, labels: Labels) -> ExpSum | None:
        e = self._walk.producer(v)
        return (
            self.match_sum(e.operands[0], labels)
            if e is not None and e.name == "log" and e.operands[0] is not None
            else None
        )

    def _strip_constants(
        self, exp: Equation, labels: Labels, axis_label: int
    ) -> tuple[Value, Labels, Mapping[Value, int], list[Value]]:
        """Strip terms that are equal for all keys from the operand of `exp`.

        Returns the remaining value, the labels of its dimensions, the stripped terms with their counts, and those
        stripped terms that are logarithms of sums.
        """
        assert exp.operands[0] is not None
        v, constants, logs = exp.operands[0], Counter[Value](), list[Value]()
        while True:
            v, labels = self._walk.skip_layout(v, labels, allow_split=True)
            e = self._walk.producer(v)
            if e is None or e.name != "sub" or e.operands[0] is None or e.operands[1] is None:
                return v, labels, constants, logs
            if not self._is_constant_along(e.operands[1], labels, axis_label):
                return v, labels, constants, logs
            numbers, log_terms = self._split_terms(e.operands[1], labels)
            constants.update(numbers)
            logs += [log for log, _ in log_terms]
            v = e.operands[0]

    def _split_terms(self, v: Value, labels: Labels) -> tuple[list[Value], list[tuple[Value, Labels]]]:
        """Return the terms of a sum repeated along keys: plain terms, and logarithms of sums with their labels."""
        walk = self._walk
        while True:
            v = walk.resolve(v)
            e = walk.producer(v)
            if e is None or e.operands[0] is None:
                return [v], []
            # `jax.nn.softmax` stops the gradient of the maximum.
            source_labels = labels if e.name == "stop_gradient" else walk.operand_labels(e, labels, allow_split=True)
            if source_labels is None:
                break
            v, labels = e.operands[0], source_labels
        if e.name == "add" and e.operands[1] is not None:
            parts = [self._split_terms(w, labels) for w in (e.operands[0], e.operands[1])]
            return [x for p in parts for x in p[0]], [x for p in parts for x in p[1]]
        return ([], [(v, labels)]) if self._match_log_sum(v, labels) is not None else ([v], [])

    def _is_constant_along(self, v: Value, labels: Labels, axis_label: int) -> bool:
        """Return whether a value is equal at all positions of the dimension labelled `axis_label`."""
        walk, shapes = self._walk, self._program.shapes
        while True:
            v = walk.resolve(v)
            if all(not involves(x, axis_label) or z == 1 for x, z in zip(labels, shapes[v], strict=True)):
                return True
            e = walk.producer(v)
            if e is None or e.operands[0] is None:
                return False
            source_labels = labels if e.name == "stop_gradient" else walk.operand_labels(e, labels, allow_split=True)
            if source_labels is None:
                return False
            v, labels = e.operands[0], source_labels


def rename_labels(softmax: Softmax, names: Mapping[int, int]) -> Softmax:
    """Return a softmax with its labels renamed.

    Args:
        softmax: The softmax.
        names: New label for each old one.
    """

    def other(labels: Labels) -> Labels:
        return tuple(rename_label(x, names) for x in labels)

    weights = tuple(replace(w, labels=other(w.labels)) for w in softmax.exp_masks)
    return replace(softmax, labels=other(softmax.labels), axis_label=names[softmax.axis_label], exp_masks=weights)


def _summed_label(labels: Labels, summed: Labels) -> int | None:
    """Return the label at the dimension marked -1 in `summed`; None unless all other labels agree."""
    if len(labels) != len(summed):
        return None
    pairs: list[tuple[Label | None, Label | None]] = list(zip(labels, summed, strict=True))
    agree = all(y in (x, None) for x, y in pairs if y != -1)
    axis_label = next((x for x, y in pairs if y == -1), None)
    return axis_label if agree and isinstance(axis_label, int) else None
