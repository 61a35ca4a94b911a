"""Which dimensions of an equation's operands and results are one dimension: a sharding rule for each primitive.

In the way of Shardy's rules (`sdy.op_sharding_rule`), whose factors these are: a dimension that several operands and
results share, and what becomes of its places. The one place that knows it: links between dimensions (`links`) and
equations that commute with a permutation (`permuted`) are read off these rules. Dimensions that are merged or split are
`factors`'. `tests/test_sharding_rules.py` holds the rules against the primitives themselves and against Shardy.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

from .factors import Shape

if TYPE_CHECKING:
    from ..ir import Equation

Dims = Mapping[int, int]
"""Dimensions by slot: operand k is slot k, result k is slot k + the number of operands."""
At = tuple[int, int]
"""A dimension: its slot, and its position there."""


class Role(Enum):
    """What an equation does with a dimension that its operands and results share."""

    PASSED = auto()
    """Each place by itself: a permutation of the operands' places is the same one of the results'."""
    REDUCED = auto()
    """No result has it, and the order of its places makes no difference."""
    LINKED = auto()
    """Operands and results may be laid out alike along it. Its places may not be permuted: they depend on each other's
    order, or nothing is known of them."""


class SharedDimension(NamedTuple):
    """One dimension of several operands and results.

    Args:
        dims: where it is, by slot; the first is the one that layouts link the others to.
        role: what the equation does with it.
        stored_alike: whether what has it lies in memory alike, as a parameter and its gradient do, and a product's
            operands do not.
    """

    dims: Dims
    role: Role
    stored_alike: bool = True


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """The dimensions of one equation.

    Args:
        shared: dimensions that operands and results share.
        parts: pairs of dimensions of which one is a part of the other (slices, concatenations, pads).
        splits: (whole, parts): a dimension that is cut into others, or that these are merged into, major first.
        windows: dimensions that a convolution's window lies along.
        indexed: for each column of operand 1, an index, the dimension of operand 0 whose places it names.
    """

    shared: tuple[SharedDimension, ...] = ()
    parts: tuple[tuple[At, At], ...] = ()
    splits: tuple[tuple[At, tuple[At, ...]], ...] = ()
    windows: tuple[At, ...] = ()
    indexed: tuple[int, ...] = ()


def reduced(params: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the dimensions that a reduction leaves out."""
    return tuple(params["axes"] if "axes" in params else params["dimensions"])


def along(params: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    """Return the dimensions that a primitive works along (a sort, a running sum, a concatenation): the one that its
    parameters name, or the last."""
    named = next(
        (params[k] for k in ("dimension", "axis", "reduction_dimension", "dimensions") if k in params), -1
    )
    return tuple(d % rank for d in (named if isinstance(named, tuple) else (named,)))


def no_dimensions(_eqn: "Equation") -> ShardingRule:
    """No dimension of the results is one of the operands'."""
    return ShardingRule()


def elementwise(eqn: "Equation") -> ShardingRule:
    """Dimensions at the same position; an operand that is one number, or of size 1 there, meets all places."""
    result, shapes = eqn.shapes[len(eqn.ins)], {shape for shape in eqn.shapes if shape}
    ranks = {len(shape) for shape in shapes}

    def role(d: int) -> Role:
        known = len(ranks) == 1 and {shape[d] for shape in shapes} <= {1, result[d]}
        return Role.PASSED if known else Role.LINKED

    return _at_same_positions(eqn, role)


def each(eqn: "Equation") -> ShardingRule:
    """Each operand is handed on as the result of its position."""
    return ShardingRule(
        tuple(
            SharedDimension({len(eqn.ins) + k: d, k: d}, Role.PASSED)
            for k, shape in enumerate(eqn.shapes[: len(eqn.ins)])
            for d in range(len(shape))
        )
    )


def same_positions(eqn: "Equation") -> ShardingRule:
    """Dimensions of one size at the same position are one, for a primitive of which nothing more is known."""
    return _at_same_positions(eqn, lambda _d: Role.LINKED)


def beside(eqn: "Equation") -> ShardingRule:
    """What works along one dimension and may change its size (a sort, `top_k`, a concatenation): there operands and
    results share none, of whatever size. Each place of the others is worked on by itself."""
    rank = len(eqn.shapes[len(eqn.ins)])
    alike = all(len(shape) == rank for shape in eqn.shapes)
    unshared = along(eqn.params, rank)
    return _at_same_positions(eqn, lambda _d: Role.PASSED if alike else Role.LINKED, unshared)


def cut(eqn: "Equation") -> ShardingRule:
    """`slice`, `dynamic_slice`, `dynamic_update_slice`, `pad` and `tile` leave whole dimensions as they are."""
    result = eqn.shapes[len(eqn.ins)]
    edges = eqn.params.get("padding_config")

    def role(d: int) -> Role:
        whole = all(shape[d] == result[d] for shape in eqn.shapes if len(shape) == len(result))
        return Role.PASSED if whole and (edges is None or not any(edges[d])) else Role.LINKED

    return _at_same_positions(eqn, role)


def running(eqn: "Equation") -> ShardingRule:
    """A running sum or the like has all dimensions of its operand. Along the one that it runs over order matters; each
    place of the others is worked on by itself."""
    run_over = along(eqn.params, len(eqn.shapes[0]))
    return _at_same_positions(eqn, lambda d: Role.LINKED if d in run_over else Role.PASSED)


def matrices(eqn: "Equation") -> ShardingRule:
    """Each matrix by itself, in the last dimensions; the dimensions before them are those of all operands and results.

    What matrices have at the same position is one dimension to a layout.
    """
    inner = eqn.primitive.inner or len(eqn.params.get("fft_lengths", eqn.shapes[0]))
    before = range(len(eqn.shapes[0]) - inner)
    shared = [SharedDimension({k: d for k, _ in _result_first(eqn)}, Role.PASSED) for d in before]
    linked = (s for s in same_positions(eqn).shared if next(iter(s.dims.values())) not in before)
    return ShardingRule((*shared, *linked))


def stack(eqn: "Equation") -> ShardingRule:
    """The dimensions of every operand, with a new one between them."""
    axis, out = eqn.params["axis"], len(eqn.ins)
    return ShardingRule(
        tuple(
            SharedDimension({out: d + (d >= axis)} | _each_at(range(out), d), Role.PASSED)
            for d in range(len(eqn.shapes[0]))
        )
    )


def unstack(eqn: "Equation") -> ShardingRule:
    """The dimensions of the operand but one."""
    axis, results = eqn.params["axis"], range(1, len(eqn.shapes))
    return ShardingRule(
        tuple(
            SharedDimension({0: d} | _each_at(results, d - (d > axis)), Role.PASSED)
            for d in range(len(eqn.shapes[0]))
            if d != axis
        )
    )


def shape(eqn: "Equation") -> ShardingRule:
    """One to one, or one dimension split into several, or several merged into one, as its factors say."""
    factors = eqn.factors
    if factors is None:
        return ShardingRule()
    shared, splits = [], []
    for old, new in factors.groups:
        if len(old) == len(new) == 1:
            shared.append(SharedDimension({1: new[0], 0: old[0]}, Role.PASSED))
        elif len(old) == 1 < len(new):
            splits.append(((0, old[0]), tuple((1, d) for d in new)))
        elif len(new) == 1 < len(old):
            splits.append(((1, new[0]), tuple((0, d) for d in old)))
        elif old and new:
            split = _regrouped(eqn, old, new)
            splits += [] if split is None else [split]
            if split is None:
                shared.append(SharedDimension({1: new[0], 0: old[0]}, Role.LINKED))
    return ShardingRule(tuple(shared), splits=tuple(splits))


def _regrouped(eqn: "Equation", old: Sequence[int], new: Sequence[int]) -> tuple[At, tuple[At, ...]] | None:
    """Return how several dimensions become several others, as (32, 16) -> (4, 128) puts rows into chunks.

    A leading one that is a multiple of the other side's is split into that and, where it goes on there evenly, the
    next. None where sizes do not say it.
    """
    sides = [[((slot, d), eqn.shapes[slot][d]) for d in dims] for slot, dims in ((0, old), (1, new))]
    sides.sort(key=lambda side: -side[0][1])
    (whole, size), (first, major), (following, minor) = sides[0][0], *sides[1][:2]
    if not major or size % major:  # of an empty array sizes say nothing
        return None
    rest = size // major
    return whole, (first, following) if minor % rest == 0 or rest % minor == 0 else (first,)


def product(eqn: "Equation") -> ShardingRule:
    """As its contraction says. Groups of rows or channels depend on their order, and so does what a window lies along,
    which is no dimension of another array's."""
    c, shapes = eqn.contraction, eqn.shapes
    assert c is not None
    out = len(eqn.ins)
    plain = out == 2 and c.ragged is None and c.grouped is None
    summed, passed = (Role.REDUCED, Role.PASSED) if plain else (Role.LINKED, Role.LINKED)
    shared: list[tuple[Dims, Role]] = [
        *(({0: a, 1: b}, summed) for a, b in c.contracted),
        *(({out: o, 0: a, 1: b}, passed) for a, b, o in c.batch),
        *(({out: o, 0: a}, passed) for a, o in c.left),
        *(({out: o, 1: b}, passed) for b, o in c.right),
        *(({2: i, 0: d}, Role.LINKED) for i, d in c.sized),
    ]
    if c.by_group:
        shared.append(({out if k < 0 else k: d for k, d in c.by_group}, Role.LINKED))
    sides = [side for dims in c.windowed for side in zip((0, 1, out), dims, strict=True)]
    return ShardingRule(
        tuple(SharedDimension(dims, role, stored_alike=False) for dims, role in shared),
        windows=tuple((slot, d) for slot, d in sides if shapes[slot][d] > 1),
    )


def attention(eqn: "Equation") -> ShardingRule:
    """Queries and what is made for each of them have positions of their own, keys and values others; a mask has those
    of both. `permuted` says what becomes of positions."""
    form, gradient = eqn.params["form"], eqn.name == "attention_gradient"
    shapes, out = eqn.shapes, len(eqn.ins)
    query, key, value = range(3)
    given, masks = (range(3, 7), range(7, out)) if gradient else (range(0), range(3, out))
    results = (out,) if gradient else range(out, len(shapes))
    of_keys = (value, out + 1, out + 2) if gradient else (value,)
    rows = form.batch + form.groups + 1  # dimensions before the width
    linked: list[Dims] = [{query: d} | _each_at((*given, *results), d) for d in range(rows)]
    linked += [{query: d} | _each_at((key, *of_keys), d) for d in range(form.batch)]
    linked.append(_each_at((key, *of_keys), form.batch))
    wide = (query, key, *((out, out + 1) if gradient else ()))
    summed = (value, *((3, out + 2) if gradient else (out,)))
    linked += [{slot: len(shapes[slot]) - 1 for slot in slots} for slots in (wide, summed)]
    linked += [
        {query: d, mask: d} if d < rows else {key: form.batch, mask: d}
        for mask in masks
        for d, size in enumerate(shapes[mask])
        if size > 1
    ]
    return ShardingRule(tuple(SharedDimension(dims, Role.LINKED, stored_alike=False) for dims in linked))


def keyed(eqn: "Equation") -> ShardingRule:
    """Many keys at once: each draws numbers, or makes keys, of its own."""
    many, result = eqn.shapes[0], eqn.shapes[len(eqn.ins)]
    return ShardingRule(
        tuple(
            SharedDimension({len(eqn.ins): d, 0: d}, Role.LINKED, stored_alike=False)
            for d, size in enumerate(many)
            if result[d : d + 1] == (size,)
        )
    )


def reduction(eqn: "Equation") -> ShardingRule:
    """Dimensions that stay, and those that are left out, whose order is free where halves can be put together."""
    gone, out = reduced(eqn.params), len(eqn.ins)
    arrays = [k for k in range(out) if len(eqn.shapes[k]) == len(eqn.shapes[out]) + len(gone)]
    results = range(out, len(eqn.shapes))
    kept = [d for d in range(len(eqn.shapes[0])) if d not in gone]
    shared = [
        SharedDimension(_each_at(results, to) | _each_at(arrays, d), Role.PASSED) for to, d in enumerate(kept)
    ]
    if eqn.primitive.reduces and out == 1:
        shared += [SharedDimension({0: d}, Role.REDUCED) for d in gone]
    return ShardingRule(tuple(shared))


def window(eqn: "Equation") -> ShardingRule:
    """Pooling: dimensions that the window leaves alone."""
    size = eqn.params.get("window_dimensions")
    rule = same_positions(eqn)
    alone = (s for s in rule.shared if size is None or size[next(iter(s.dims.values()))] == 1)
    return ShardingRule(tuple(alone))


def gather(eqn: "Equation") -> ShardingRule:
    """Dimensions of the index go on as the result's; dimensions of which slices have all keep theirs. Where the
    operand has dimensions of the index's (a batch), each row is looked up in its own."""
    numbers, (operand, index, result) = eqn.params["dimension_numbers"], eqn.shapes
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    sliced = (d for d in range(len(operand)) if d not in gone)
    whole = [
        ({2: o, 0: d}, Role.PASSED)
        for d, o in zip(sliced, numbers.offset_dims, strict=True)
        if eqn.params["slice_sizes"][d] == operand[d]
    ]
    rest = [o for o in range(len(result)) if o not in numbers.offset_dims]
    own = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    role = Role.LINKED if eqn.params.get("indices_are_sorted") else Role.PASSED
    rows = [({1: i, 2: rest[i]} | ({0: own[i]} if i in own else {}), role) for i in range(len(index) - 1)]
    return ShardingRule(
        tuple(SharedDimension(dims, role, stored_alike=False) for dims, role in (*whole, *rows)),
        indexed=tuple(numbers.start_index_map),
    )


def scatter(eqn: "Equation") -> ShardingRule:
    """As a gather the other way round. Where updates are added, it makes no difference in which order."""
    numbers, (operand, index, updates) = eqn.params["dimension_numbers"], eqn.shapes[:3]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = (d for d in range(len(operand)) if d not in gone)
    window = {d: u for d, u in zip(kept, numbers.update_window_dims, strict=True) if updates[u] == operand[d]}
    own = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    rest = [u for u in range(len(updates)) if u not in numbers.update_window_dims]
    in_order = Role.LINKED if eqn.params.get("indices_are_sorted") else Role.PASSED
    shared = []
    for d in range(len(operand)):
        here = {3: d, 0: d}
        shared.append(SharedDimension(here, Role.LINKED))  # operand and result lie alike, whatever is set in
        if d in window:
            shared.append(SharedDimension(here | {2: window[d]}, Role.PASSED, stored_alike=False))
        elif d in own:
            rows = {1: own[d], 2: rest[own[d]]}
            shared.append(SharedDimension(rows | here, in_order, stored_alike=False))
    for i in range(len(index) - 1):
        if i not in own.values():
            adds = eqn.primitive.adds and in_order is Role.PASSED
            role = Role.REDUCED if adds else Role.LINKED
            shared.append(SharedDimension({1: i, 2: rest[i]}, role, stored_alike=False))
    return ShardingRule(tuple(shared), indexed=tuple(numbers.scatter_dims_to_operand_dims))


def _each_at(slots: Iterable[int], dim: int) -> dict[int, int]:
    """Return the dimension that each of some slots has at the same position."""
    return dict.fromkeys(slots, dim)


def _result_first(eqn: "Equation") -> Iterable[tuple[int, Shape]]:
    """Return slots with their shapes: the results', then the operands'."""
    numbered, out = list(enumerate(eqn.shapes)), len(eqn.ins)
    return *numbered[out:], *numbered[:out]


def _at_same_positions(
    eqn: "Equation", role: Callable[[int], Role], unshared: Sequence[int] = ()
) -> ShardingRule:
    """Return the rule of an equation of which dimensions of one size at the same position are one.

    Args:
        eqn: the equation.
        role: what becomes of a dimension.
        unshared: dimensions that are not one, whatever their size: what it works along.
    """
    slots, out = list(_result_first(eqn)), len(eqn.ins)
    shared, parts, told = [], [], set[At]()
    for slot, result in slots[: len(slots) - out]:
        others = [(k, shape) for k, shape in slots if k != slot and len(shape) == len(result)]
        for d, size in enumerate(result):
            same = [] if d in unshared else [k for k, shape in others if shape[d] == size]
            if d not in unshared and (slot, d) not in told:
                shared.append(SharedDimension({slot: d} | _each_at(same, d), role(d)))
                told.update((k, d) for k in same)
            if eqn.primitive.cuts:
                parts += [((k, d), (slot, d)) for k, _ in others if k < out and k not in same]
    return ShardingRule(tuple(shared), tuple(parts))
