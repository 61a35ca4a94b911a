"""Sharding rules: for each primitive, the dimensions shared by operands and results.

After Shardy's rules (`sdy.op_sharding_rule`): a dimension shared by several operands and results is a factor, with a
role that says what becomes of its positions. Links between dimensions (`dimensions`) and the equations that
commute with a permutation (`permutation_equivariance`) are read off these rules alone. Dimensions that are merged or
split are in `factors`. `tests/program/test_sharding_rules.py` compares the rules with the primitives and with Shardy.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

from .factors import Shape

if TYPE_CHECKING:
    from ..ir import Equation

DimsBySlot = Mapping[int, int]
"""Dimensions by slot: operand k is slot k, result k is slot k + the number of operands."""
SlotDim = tuple[int, int]
"""A dimension: its slot, and its position there."""


class Role(Enum):
    """Role of a shared dimension in an equation."""

    PASSED_THROUGH = auto()
    """Each place by itself: a permutation of the operands' places is the same one of the results'."""
    REDUCED = auto()
    """No result has it, and the order of its places makes no difference."""
    LINKED = auto()
    """Operands and results may be laid out alike along it. Its places may not be permuted: they depend on each other's
    order, or nothing is known of them."""


class SharedDimension(NamedTuple):
    """One dimension of several operands and results.

    Attributes:
        dims: Position of the dimension, by slot; the first entry is the one to which layouts link the others.
        role: Role of the dimension in the equation.
        same_layout: True if arrays with this dimension share a layout in memory, as a parameter and its gradient do,
            and a product's operands do not.
    """

    dims: DimsBySlot
    role: Role
    same_layout: bool = True


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """Dimensions of one equation.

    Attributes:
        shared: Dimensions shared by operands and results.
        parts: Pairs of dimensions of which one is a part of the other (slices, concatenations, pads).
        splits: (whole, parts): a dimension split into others, or made by merging these, major first.
        windows: Dimensions of a convolution's window.
        indexed: For each column of operand 1, an index, the dimension of operand 0 that it indexes.
    """

    shared: tuple[SharedDimension, ...] = ()
    parts: tuple[tuple[SlotDim, SlotDim], ...] = ()
    splits: tuple[tuple[SlotDim, tuple[SlotDim, ...]], ...] = ()
    windows: tuple[SlotDim, ...] = ()
    indexed: tuple[int, ...] = ()


def reduced_dims(params: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the dimensions that a reduction removes."""
    return tuple(params["axes"] if "axes" in params else params["dimensions"])


def axis_dims(params: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    """Return the dimensions along which a primitive works (a sort, a running sum, a concatenation).

    The parameters name them; without a name it is the last dimension.

    Args:
        params: Parameters of the primitive.
        rank: Rank of its operand.
    """
    named = next((params[k] for k in ("dimension", "axis", "reduction_dimension", "dimensions") if k in params), -1)
    return tuple(d % rank for d in (named if isinstance(named, tuple) else (named,)))


def no_shared_dimensions(_eqn: "Equation") -> ShardingRule:
    """Return the rule of a primitive whose results share no dimension with its operands."""
    return ShardingRule()


def elementwise(eqn: "Equation") -> ShardingRule:
    """Return the rule of an elementwise primitive: dimensions at the same position are one.

    An operand that is a scalar, or of size 1 there, meets all positions.
    """
    result, shapes = eqn.shapes[len(eqn.operands)], {shape for shape in eqn.shapes if shape}
    ranks = {len(shape) for shape in shapes}

    def role(d: int) -> Role:
        known = len(ranks) == 1 and {shape[d] for shape in shapes} <= {1, result[d]}
        return Role.PASSED_THROUGH if known else Role.LINKED

    return _at_same_positions(eqn, role)


def pass_through(eqn: "Equation") -> ShardingRule:
    """Return the rule of a primitive that passes each operand to the result of its position."""
    return ShardingRule(
        tuple(
            SharedDimension({len(eqn.operands) + k: d, k: d}, Role.PASSED_THROUGH)
            for k, shape in enumerate(eqn.shapes[: len(eqn.operands)])
            for d in range(len(shape))
        )
    )


def same_positions(eqn: "Equation") -> ShardingRule:
    """Return the rule of an otherwise unknown primitive: dimensions of one size at one position are linked."""
    return _at_same_positions(eqn, lambda _d: Role.LINKED)


def along_axis(eqn: "Equation") -> ShardingRule:
    """Return the rule of a primitive along one dimension (a sort, `top_k`, a concatenation).

    Operands and results share no dimension there, whatever the sizes. Positions of other dimensions are independent.
    """
    rank = len(eqn.shapes[len(eqn.operands)])
    same_rank = all(len(shape) == rank for shape in eqn.shapes)
    unshared = axis_dims(eqn.params, rank)
    return _at_same_positions(eqn, lambda _d: Role.PASSED_THROUGH if same_rank else Role.LINKED, unshared)


def slice_like(eqn: "Equation") -> ShardingRule:
    """Return the rule of slices, updates and pads: whole dimensions pass through.

    Applies to `slice`, `dynamic_slice`, `dynamic_update_slice`, `pad` and `tile`.
    """
    result = eqn.shapes[len(eqn.operands)]
    edges = eqn.params.get("padding_config")

    def role(d: int) -> Role:
        whole = all(shape[d] == result[d] for shape in eqn.shapes if len(shape) == len(result))
        return Role.PASSED_THROUGH if whole and (edges is None or not any(edges[d])) else Role.LINKED

    return _at_same_positions(eqn, role)


def cumulative(eqn: "Equation") -> ShardingRule:
    """Return the rule of a running reduction: order matters along its dimension; all others pass through."""
    run_over = axis_dims(eqn.params, len(eqn.shapes[0]))
    return _at_same_positions(eqn, lambda d: Role.LINKED if d in run_over else Role.PASSED_THROUGH)


def matrices(eqn: "Equation") -> ShardingRule:
    """Return the rule of operations on matrices in the last dimensions: leading dimensions pass through.

    Dimensions of matrices with one size at one position are linked, for layouts.
    """
    inner = eqn.primitive.matrix_dims or len(eqn.params.get("fft_lengths", eqn.shapes[0]))
    before = range(len(eqn.shapes[0]) - inner)
    shared = [SharedDimension({k: d for k, _ in _results_then_operands(eqn)}, Role.PASSED_THROUGH) for d in before]
    linked = (s for s in same_positions(eqn).shared if next(iter(s.dims.values())) not in before)
    return ShardingRule((*shared, *linked))


def stack(eqn: "Equation") -> ShardingRule:
    """Return the rule of `stack`: the operands' dimensions, with a new one between them."""
    axis, out = eqn.params["axis"], len(eqn.operands)
    return ShardingRule(
        tuple(
            SharedDimension({out: d + (d >= axis)} | _same_dim(range(out), d), Role.PASSED_THROUGH)
            for d in range(len(eqn.shapes[0]))
        )
    )


def unstack(eqn: "Equation") -> ShardingRule:
    """Return the rule of `unstack`: the operand's dimensions except the stacked one."""
    axis, results = eqn.params["axis"], range(1, len(eqn.shapes))
    return ShardingRule(
        tuple(
            SharedDimension({0: d} | _same_dim(results, d - (d > axis)), Role.PASSED_THROUGH)
            for d in range(len(eqn.shapes[0]))
            if d != axis
        )
    )


def shape_change(eqn: "Equation") -> ShardingRule:
    """Return the rule of a change of shape: dimensions pass through, split or merge as its factors say."""
    factors = eqn.factors
    if factors is None:
        return ShardingRule()
    shared, splits = [], []
    for old, new in factors.groups:
        if len(old) == len(new) == 1:
            shared.append(SharedDimension({1: new[0], 0: old[0]}, Role.PASSED_THROUGH))
        elif len(old) == 1 < len(new):
            splits.append(((0, old[0]), tuple((1, d) for d in new)))
        elif len(new) == 1 < len(old):
            splits.append(((1, new[0]), tuple((0, d) for d in old)))
        elif old and new:
            split = _regrouped_split(eqn, old, new)
            splits += [] if split is None else [split]
            if split is None:
                shared.append(SharedDimension({1: new[0], 0: old[0]}, Role.LINKED))
    return ShardingRule(tuple(shared), splits=tuple(splits))


def _regrouped_split(
    eqn: "Equation", old: Sequence[int], new: Sequence[int]
) -> tuple[SlotDim, tuple[SlotDim, ...]] | None:
    """Return how several dimensions are split into several others, as (32, 16) -> (4, 128) puts rows into chunks.

    The larger leading size is split by the smaller: into its leading dimension and, where sizes divide, the next. None
    if sizes do not tell.

    Args:
        eqn: The change of shape.
        old: Dimensions of the operand.
        new: Dimensions of the result.
    """
    sides = [[((slot, d), eqn.shapes[slot][d]) for d in dims] for slot, dims in ((0, old), (1, new))]
    sides.sort(key=lambda side: -side[0][1])
    (whole, size), (first, major), (next_dim, minor) = sides[0][0], *sides[1][:2]
    if not major or size % major:  # 0 in an empty array
        return None
    quotient = size // major
    return whole, (first, next_dim) if minor % quotient == 0 or quotient % minor == 0 else (first,)


def product(eqn: "Equation") -> ShardingRule:
    """Return the rule of a product, from its contraction.

    Groups of rows or channels depend on their order, and windows belong to no other array.
    """
    c, shapes = eqn.contraction, eqn.shapes
    assert c is not None
    out = len(eqn.operands)
    is_plain = out == 2 and c.ragged_dim is None and c.grouped is None
    summed, passed = (Role.REDUCED, Role.PASSED_THROUGH) if is_plain else (Role.LINKED, Role.LINKED)
    shared: list[tuple[DimsBySlot, Role]] = [
        *(({0: a, 1: b}, summed) for a, b in c.contracted),
        *(({out: o, 0: a, 1: b}, passed) for a, b, o in c.batch),
        *(({out: o, 0: a}, passed) for a, o in c.left_free),
        *(({out: o, 1: b}, passed) for b, o in c.right_free),
        *(({2: i, 0: d}, Role.LINKED) for i, d in c.group_size_dims),
    ]
    if c.group_dims:
        shared.append(({out if k < 0 else k: d for k, d in c.group_dims}, Role.LINKED))
    window_dims = [side for dims in c.windowed for side in zip((0, 1, out), dims, strict=True)]
    return ShardingRule(
        tuple(SharedDimension(dims, role, same_layout=False) for dims, role in shared),
        windows=tuple((slot, d) for slot, d in window_dims if shapes[slot][d] > 1),
    )


def attention(eqn: "Equation") -> ShardingRule:
    """Return the rule of fused attention.

    Queries and what is made for each of them have positions of their own, keys and values have others, and a mask has
    both. Permutations of positions are the subject of `permutation_equivariance`.
    """
    form, gradient = eqn.params["form"], eqn.name == "attention_gradient"
    shapes, out = eqn.shapes, len(eqn.operands)
    query, key, value = range(3)
    # The gradient reads four arrays per query: cotangent, maximum, sum of exponentials, and delta.
    gradient_inputs, masks = (range(3, 7), range(7, out)) if gradient else (range(0), range(3, out))
    results = (out,) if gradient else range(out, len(shapes))
    key_slots = (value, out + 1, out + 2) if gradient else (value,)
    query_rank = form.batch + form.groups + 1  # dimensions before the width
    linked: list[DimsBySlot] = [{query: d} | _same_dim((*gradient_inputs, *results), d) for d in range(query_rank)]
    linked += [{query: d} | _same_dim((key, *key_slots), d) for d in range(form.batch)]
    linked.append(_same_dim((key, *key_slots), form.batch))
    score_slots = (query, key, *((out, out + 1) if gradient else ()))
    value_slots = (value, *((3, out + 2) if gradient else (out,)))
    linked += [{slot: len(shapes[slot]) - 1 for slot in slots} for slots in (score_slots, value_slots)]
    linked += [
        {query: d, mask: d} if d < query_rank else {key: form.batch, mask: d}
        for mask in masks
        for d, size in enumerate(shapes[mask])
        if size > 1
    ]
    return ShardingRule(tuple(SharedDimension(dims, Role.LINKED, same_layout=False) for dims in linked))


def per_key(eqn: "Equation") -> ShardingRule:
    """Return the rule of primitives on many keys: each key draws numbers, or makes keys, of its own."""
    key_shape, result = eqn.shapes[0], eqn.shapes[len(eqn.operands)]
    return ShardingRule(
        tuple(
            SharedDimension({len(eqn.operands): d, 0: d}, Role.LINKED, same_layout=False)
            for d, size in enumerate(key_shape)
            if result[d : d + 1] == (size,)
        )
    )


def reduction(eqn: "Equation") -> ShardingRule:
    """Return the rule of a reduction.

    Remaining dimensions pass through. The order of removed ones is free if halves can be combined.
    """
    removed, out = reduced_dims(eqn.params), len(eqn.operands)
    arrays = [k for k in range(out) if len(eqn.shapes[k]) == len(eqn.shapes[out]) + len(removed)]
    results = range(out, len(eqn.shapes))
    kept = [d for d in range(len(eqn.shapes[0])) if d not in removed]
    shared = [
        SharedDimension(_same_dim(results, to) | _same_dim(arrays, d), Role.PASSED_THROUGH) for to, d in enumerate(kept)
    ]
    if eqn.primitive.is_combinable and out == 1:
        shared += [SharedDimension({0: d}, Role.REDUCED) for d in removed]
    return ShardingRule(tuple(shared))


def pooling(eqn: "Equation") -> ShardingRule:
    """Return the rule of pooling: dimensions outside of the window keep their position."""
    size = eqn.params.get("window_dimensions")
    rule = same_positions(eqn)
    alone = (s for s in rule.shared if size is None or size[next(iter(s.dims.values()))] == 1)
    return ShardingRule(tuple(alone))


def gather(eqn: "Equation") -> ShardingRule:
    """Return the rule of a lookup.

    Dimensions of the index go on in the result, and dimensions that slices take whole stay. Batch dimensions of operand
    and index mean that each row is looked up in its own part.
    """
    numbers, (operand, index, result) = eqn.params["dimension_numbers"], eqn.shapes
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    sliced = (d for d in range(len(operand)) if d not in removed)
    slice_dims = [
        ({2: o, 0: d}, Role.PASSED_THROUGH)
        for d, o in zip(sliced, numbers.offset_dims, strict=True)
        if eqn.params["slice_sizes"][d] == operand[d]
    ]
    index_dims = [o for o in range(len(result)) if o not in numbers.offset_dims]
    batch_dims = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    # Permuted rows would break the promise that indices are sorted.
    role = Role.LINKED if eqn.params.get("indices_are_sorted") else Role.PASSED_THROUGH
    rows = [
        ({1: i, 2: index_dims[i]} | ({0: batch_dims[i]} if i in batch_dims else {}), role)
        for i in range(len(index) - 1)
    ]
    return ShardingRule(
        tuple(SharedDimension(dims, role, same_layout=False) for dims, role in (*slice_dims, *rows)),
        indexed=tuple(numbers.start_index_map),
    )


def scatter(eqn: "Equation") -> ShardingRule:
    """Return the rule of a scatter, the reverse of a gather. Added updates may be in any order."""
    numbers, (operand, index, updates) = eqn.params["dimension_numbers"], eqn.shapes[:3]
    removed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = (d for d in range(len(operand)) if d not in removed)
    window = {d: u for d, u in zip(kept, numbers.update_window_dims, strict=True) if updates[u] == operand[d]}
    batch_dims = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    index_dims = [u for u in range(len(updates)) if u not in numbers.update_window_dims]
    # Permuted rows would break the promise that indices are sorted.
    index_role = Role.LINKED if eqn.params.get("indices_are_sorted") else Role.PASSED_THROUGH
    shared = []
    for d in range(len(operand)):
        operand_and_result = {3: d, 0: d}
        # Operand and result have one layout, whatever is set in.
        shared.append(SharedDimension(operand_and_result, Role.LINKED))
        if d in window:
            shared.append(SharedDimension(operand_and_result | {2: window[d]}, Role.PASSED_THROUGH, same_layout=False))
        elif d in batch_dims:
            rows = {1: batch_dims[d], 2: index_dims[batch_dims[d]]}
            shared.append(SharedDimension(rows | operand_and_result, index_role, same_layout=False))
    for i in range(len(index) - 1):
        if i not in batch_dims.values():
            adds = eqn.primitive.is_additive and index_role is Role.PASSED_THROUGH
            role = Role.REDUCED if adds else Role.LINKED
            shared.append(SharedDimension({1: i, 2: index_dims[i]}, role, same_layout=False))
    return ShardingRule(tuple(shared), indexed=tuple(numbers.scatter_dims_to_operand_dims))


def _same_dim(slots: Iterable[int], dim: int) -> dict[int, int]:
    """Return a mapping from each of `slots` to `dim`."""
    return dict.fromkeys(slots, dim)


def _results_then_operands(eqn: "Equation") -> Iterable[tuple[int, Shape]]:
    """Return (slot, shape) of all results, then of all operands."""
    numbered, out = list(enumerate(eqn.shapes)), len(eqn.operands)
    return *numbered[out:], *numbered[:out]


def _at_same_positions(eqn: "Equation", role: Callable[[int], Role], unshared: Sequence[int] = ()) -> ShardingRule:
    """Return a rule in which dimensions of one size at one position are shared.

    Args:
        eqn: The equation.
        role: Gives the role of a dimension.
        unshared: Dimensions not shared whatever their size: those along which the primitive works.
    """
    slots, out = list(_results_then_operands(eqn)), len(eqn.operands)
    shared, parts, covered = [], [], set[SlotDim]()
    for slot, result in slots[: len(slots) - out]:
        others = [(k, shape) for k, shape in slots if k != slot and len(shape) == len(result)]
        for d, size in enumerate(result):
            same = [] if d in unshared else [k for k, shape in others if shape[d] == size]
            if d not in unshared and (slot, d) not in covered:
                shared.append(SharedDimension({slot: d} | _same_dim(same, d), role(d)))
                covered.update((k, d) for k in same)
            if eqn.primitive.resizes_dims:
                parts += [((k, d), (slot, d)) for k, _ in others if k < out and k not in same]
    return ShardingRule(tuple(shared), tuple(parts))
