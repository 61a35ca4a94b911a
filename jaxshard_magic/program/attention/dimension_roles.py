"""Assembly of an `Attention` from two products with a softmax in between: matching of their dimensions."""

from dataclasses import dataclass, replace

from ..dimensions import Dimensions
from ..ir import Equation, Program
from .attention import Attention, AttentionOperand
from .backward_walk import BackwardWalk, Label, Labels
from .score_path import ScorePath, read_score_transform
from .softmax import Softmax


@dataclass(frozen=True)
class DimensionRoles:
    """Products of an attention, and labels of their dimensions.

    Attributes:
        value_product: Product with the values.
        probs_index: Index of the operand of `value_product` that holds the probabilities. Labels are dimensions of this
            operand.
        score_product: Product of queries and keys.
        key_index: Index of the operand of `score_product` that holds the keys.
        labels: Label of each dimension of the scores; None for a dimension of size 1.
        batch: Labels of the batch dimensions, in the order of the scores.
        groups: Labels of the group dimensions, in the order of the scores.
        query_label: Label of the query positions.
        key_label: Label of the key positions.
    """

    value_product: Equation
    probs_index: int
    score_product: Equation
    key_index: int
    labels: tuple[int | None, ...]
    batch: tuple[int, ...]
    groups: tuple[int, ...]
    query_label: int
    key_label: int

    @property
    def label_positions(self) -> dict[int, int]:
        """Position of each label among (batch..., groups..., query, key)."""
        return {x: i for i, x in enumerate((*self.batch, *self.groups, self.query_label, self.key_label))}


def match_dimension_roles(
    program: Program,
    dims: Dimensions,
    value_product: Equation,
    probs_index: int,
    softmax: Softmax,
    score_product: Equation,
    score_labels: Labels,
) -> DimensionRoles | None:
    """Match the dimensions of both products; None where they are no attention over positions of one sequence.

    Args:
        program: Program of the products.
        dims: Dimensions of the program, to see that queries and keys have the same positions.
        value_product: Product with the values.
        probs_index: Index of its operand with the probabilities.
        softmax: Softmax that makes the probabilities.
        score_product: Product of queries and keys.
        score_labels: Labels of the result of `score_product`.
    """
    value_contraction, score_contraction, shapes = (
        value_product.contraction,
        score_product.contraction,
        program.shapes,
    )
    assert value_contraction is not None and score_contraction is not None
    probabilities = value_product.operands[probs_index]
    if probabilities is None or [pair[probs_index] for pair in value_contraction.contracted] != [softmax.axis_label]:
        return None
    sizes = dict(enumerate(shapes[probabilities]))
    # A split or merged dimension of the scores has no single role.
    if any(
        not isinstance(x, int) for x, z in zip(score_labels, shapes[score_product.results[0]], strict=True) if z > 1
    ):
        return None
    labels = tuple(x if isinstance(x, int) and sizes[x] > 1 else None for x in score_labels)
    free = [
        {x: d for d, o in pairs if (x := labels[o]) is not None}
        for pairs in (score_contraction.left_free, score_contraction.right_free)
    ]
    key_index = next((k for k in (0, 1) if list(free[k]) == [softmax.axis_label]), None)
    if key_index is None:
        return None
    batch = tuple(x for x in (labels[o] for *_, o in score_contraction.batch) if x is not None)
    shared = {triple[probs_index] for triple in value_contraction.batch if sizes[triple[probs_index]] > 1}
    others = {d for d, _ in (value_contraction.left_free, value_contraction.right_free)[probs_index] if sizes[d] > 1}
    if shared != set(batch) or others != set(free[1 - key_index]):
        return None
    query, keys = score_product.operands[1 - key_index], score_product.operands[key_index]
    position = dims.classes_of(keys)[free[key_index][softmax.axis_label]]
    # Only self-attention is matched: the positions of queries and keys must be one dimension of the program.
    query_labels = [
        x
        for x, d in free[1 - key_index].items()
        if sizes[x] == sizes[softmax.axis_label] and dims.classes_of(query)[d] == position
    ]
    if len(query_labels) != 1:
        return None
    groups = tuple(x for x in free[1 - key_index] if x != query_labels[0])
    return DimensionRoles(
        value_product, probs_index, score_product, key_index, labels, batch, groups, query_labels[0], softmax.axis_label
    )


def build_attention(
    walk: BackwardWalk, roles: DimensionRoles, softmax: Softmax, path: ScorePath
) -> Attention | Equation | None:
    """Return the attention, or the equation that prevents it; None for products that are no attention's.

    Args:
        walk: Backward walk of the program.
        roles: Matched dimensions.
        softmax: Softmax between the products.
        path: Path from the softmax to the query-key product.
    """
    program, label_positions, value_product, score_product = (
        walk.program,
        roles.label_positions,
        roles.value_product,
        roles.score_product,
    )
    operands = _ordered_operands(program, roles)
    if operands is None:
        return None
    transform = read_score_transform(walk, label_positions, softmax, path)
    if isinstance(transform, Equation):
        return transform
    value_contraction = value_product.contraction
    assert value_contraction is not None
    width = len(label_positions) - 1
    result_order: list[int | None] = [None] * len(program.shapes[value_product.results[0]])
    for triple in value_contraction.batch:
        result_order[triple[2]] = label_positions.get(triple[roles.probs_index])
    for d, o in (value_contraction.left_free, value_contraction.right_free)[roles.probs_index]:
        result_order[o] = label_positions.get(d)
    for d, o in (value_contraction.left_free, value_contraction.right_free)[1 - roles.probs_index]:
        # Free dimensions of the values other than the width have size 1.
        result_order[o] = width if d == operands[2].dims[-1] else None
    attention = Attention(
        equation_index=value_product.index,
        query=operands[0],
        key=operands[1],
        value=operands[2],
        batch=len(roles.batch),
        groups=len(roles.groups),
        scale=transform.scale,
        span=transform.span,
        conditions=transform.conditions,
        fill=transform.fill,
        result_order=tuple(result_order),
        precision=(score_product.params.get("precision"), value_product.params.get("precision")),
        score_mod=transform.score_mod,
        masks_in_score_mod=transform.masks_in_score_mod,
        query_factors=transform.query_factors,
    )
    return _undo_repeats(walk, attention)


def _ordered_operands(
    program: Program, roles: DimensionRoles
) -> tuple[AttentionOperand, AttentionOperand, AttentionOperand] | None:
    """Return queries, keys and values with their dimensions in order; None unless each product has one width."""
    score_contraction, value_contraction, labels, shapes = (
        roles.score_product.contraction,
        roles.value_product.contraction,
        roles.labels,
        program.shapes,
    )
    assert score_contraction is not None and value_contraction is not None
    key_index, probs_index = roles.key_index, roles.probs_index
    query, keys, values = (
        roles.score_product.operands[1 - key_index],
        roles.score_product.operands[key_index],
        roles.value_product.operands[1 - probs_index],
    )
    assert query is not None and keys is not None and values is not None
    dims_of_operand: tuple[dict[int, int], dict[int, int]] = {}, {}
    for left, right, o in score_contraction.batch:
        if (x := labels[o]) is not None:
            dims_of_operand[0][x], dims_of_operand[1][x] = left, right
    for k, pairs in enumerate((score_contraction.left_free, score_contraction.right_free)):
        dims_of_operand[k].update({x: d for d, o in pairs if (x := labels[o]) is not None})
    widths = [pair for pair in score_contraction.contracted if shapes[keys][pair[key_index]] > 1]
    free = [
        d
        for d, _ in (value_contraction.left_free, value_contraction.right_free)[1 - probs_index]
        if shapes[values][d] > 1
    ]
    if len(widths) != 1 or len(free) != 1:
        return None
    value_dims = {triple[probs_index]: triple[1 - probs_index] for triple in value_contraction.batch}
    value_dims |= {pair[probs_index]: pair[1 - probs_index] for pair in value_contraction.contracted}
    query_labels = (*roles.batch, *roles.groups, roles.query_label)
    return (
        AttentionOperand(query, (*(dims_of_operand[1 - key_index][x] for x in query_labels), widths[0][1 - key_index])),
        AttentionOperand(
            keys, (*(dims_of_operand[key_index][x] for x in (*roles.batch, roles.key_label)), widths[0][key_index])
        ),
        AttentionOperand(values, (*(value_dims[x] for x in (*roles.batch, roles.key_label)), free[0])),
    )


def _undo_repeats(walk: BackwardWalk, attention: Attention) -> Attention:
    """Replace keys and values repeated for groups of queries by the fewer heads before the repetition."""
    key, value = (_find_repeat(walk, operand) for operand in (attention.key, attention.value))
    if key is None or value is None or key[1:] != value[1:]:
        return attention
    return replace(attention, key=key[0], value=value[0], repeats=key[1:])


def _find_repeat(walk: BackwardWalk, operand: AttentionOperand) -> tuple[AttentionOperand, int, int] | None:
    """Return the operand that `operand` repeats, the batch dimension of the repetition, and its count.

    Each element of that dimension occurs `count` times in succession. None for no repetition.
    """
    program = walk.program
    positions: list[int | None] = [None] * len(program.shapes[operand.value])
    for i, d in enumerate(operand.dims):
        positions[d] = i
    v, labels = walk.skip_layout(operand.value, tuple(positions))
    merge = walk.producer(v)
    if merge is None or merge.factors is None or merge.operands[0] is None:
        return None
    # `jnp.repeat` and hand-written repeats broadcast along a new dimension, then merge it with the one before it.
    split_sizes = merge.factors.operand_shape
    split_labels: list[Label | None] = [None] * len(split_sizes)
    repeated_dim: Label | None = None
    for old, new in merge.factors.groups:
        if len(new) == 1 and len(old) == 2 and repeated_dim is None:
            repeated_dim, (split_labels[old[0]], minor) = labels[new[0]], (labels[new[0]], old[1])
        elif len(old) == len(new) == 1:
            split_labels[old[0]] = labels[new[0]]
        elif old and new:
            return None
    if not isinstance(repeated_dim, int) or repeated_dim >= len(operand.dims) - 2:
        return None
    v, count = merge.operands[0], split_sizes[minor]
    # -1 labels the dimension that counts repetitions. Going back, it disappears at the broadcast.
    marked: Labels = tuple(-1 if d == minor else x for d, x in enumerate(split_labels))
    while (e := walk.producer(v)) is not None and (source_labels := walk.operand_labels(e, marked)) is not None:
        v, marked = e.operands[0], source_labels
        assert v is not None
        if -1 not in marked:
            return AttentionOperand(v, _dims_in_order(marked, len(operand.dims))), repeated_dim, count
    return None


def _dims_in_order(labels: Labels, rank: int) -> tuple[int, ...]:
    return tuple(labels.index(i) for i in range(rank))
