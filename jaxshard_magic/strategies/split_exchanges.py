"""All-to-all exchanges around equations that split or concatenate a value along a sharded dimension.

Examples are a batch cut into microbatches, the output of a fused weight split into q, k and v, and concatenated skip
connections. The shards of the parts do not match the plan's specs. XLA alone shifts the overlaps, with a
collective-permute for each part and distance, or gathers everything. The exchange instead reshards the value over
another dimension (one all-to-all), splits locally, and reshards the parts back. Each of four loops over two arrays of
64 rows by 64 numbers in 4 pieces on 8 CPU devices moves 8 KiB; XLA alone moved 20 to 32 KiB.

Footguns:
- A small part (a roll by one row, a padded row) is cheaper in XLA's form, as XLA sends the part alone.
- Rows carried through a loop are sent in bfloat16 by a TPU; the plan counts the full dtype.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..plan import Finding
from ..program.batching.followed_program import describe_equation
from ..program.ir import Equation, Value
from .layout import Axes, Layout, Spec, without_axes

# Of the largest part to the smallest. XLA sends a small part alone, while an exchange moves the whole value: it pays
# only for parts of similar size.
MAX_SIZE_RATIO = 16


@dataclass(frozen=True)
class _Split:
    """Split or concatenation of values along dimensions sharded over mesh axes.

    Attributes:
        equation: The equation.
        axes: Mesh axes of the dimension that is split or concatenated.
        dims: Operands and results with such a dimension, the first operand first, each with the dimensions.
        part_sizes: Lengths of the parts; empty for the parts of a reshape.
        parts_undivided: Whether the axes divide none of the parts.
        is_batch: Whether the dimension holds examples, not features.
    """

    equation: Equation
    axes: Axes
    dims: Mapping[Value, frozenset[int]]
    part_sizes: Sequence[int]
    parts_undivided: bool
    is_batch: bool

    @property
    def has_dynamic_start(self) -> bool:
        """Return whether the position of the part is known only at run time."""
        # XLA gathers the whole operand of a slice at a run-time position.
        return self.equation.primitive.selects_elements and len(self.equation.operands) > 1


def plan_split_exchanges(layout: Layout) -> None:
    """Add the exchanges for splits and concatenations along sharded dimensions to a layout.

    Adds to `layout.spec_overrides`, and adds a finding where examples are cut into pieces that the axes do not divide,
    as every device then computes the whole piece. Call after all strategies have filled in the layout.
    """
    splits_by_value: dict[Value, list[_Split]] = defaultdict(list)
    for e in layout.program.equations:
        if (cut := _find_split(layout, e)) is not None:
            splits_by_value[next(iter(cut.dims))].append(cut)
    for value, splits in splits_by_value.items():
        if not all(cut.parts_undivided for cut in splits):
            # A value has one spec for all of its splits: if some of them exchange it, those of features that stay
            # unsharded are gathered from that spec too.
            splits_by_value[value] = [
                replace(cut, parts_undivided=cut.parts_undivided and cut.is_batch) for cut in splits
            ]
    exchanged = [
        cut for value, of_one in splits_by_value.items() if _is_worthwhile(layout, value, of_one) for cut in of_one
    ]
    if not exchanged:
        return
    body_input_specs: dict[Value, Spec] = {}
    read_specs: dict[tuple[int, Value], Spec] = {}
    result_specs: dict[Value, Spec] = {}
    program = layout.program
    for cut in exchanged:
        for value, spec in _exchange_specs(layout, cut):
            reader = cut.equation
            if value in reader.results:
                result_specs[value] = spec
                continue
            # Reshard before a loop, not in each of its trips.
            while (outside := program.outer_value(value)) is not None:
                body_input_specs[value] = spec
                reader, value = program.body_inputs[value].equation, outside
            read_specs[reader.index, value] = spec
    before = layout.spec_overrides
    layout.spec_overrides = replace(
        before,
        values={**before.values, **body_input_specs},
        operands={**before.operands, **read_specs},
        results={**before.results, **result_specs},
    )
    if undivided := [cut for cut in exchanged if cut.parts_undivided and cut.is_batch]:
        layout.findings.append(_pieces_finding(layout, undivided[0]))


def _find_split(layout: Layout, e: Equation) -> _Split | None:
    """Return the split or concatenation of `e` along a sharded dimension, or None."""
    v = e.operands[0] if e.primitive.resizes_dims or e.primitive.factors else None
    if v is None or not all(map(layout.is_activation, (v, *e.results))):
        return None
    classes = layout.dims.classes_of(v)
    for d, axes in enumerate(layout.spec_between_uses(v)):
        over = axes or _concatenation_axes(layout, e, d)
        if not over or classes[d] in layout.position_classes or not (changed_dims := _changed_dims(layout, e, d)):
            continue
        sizes, is_join = _part_sizes(layout, e, d)
        result_axes = {a for out in e.results for spec in layout.spec_between_uses(out) for a in spec}
        undivided = not axes or not result_axes.issuperset(axes)
        if axes and undivided and is_join:
            # Padding, or a concatenation, with an unsharded result needs no exchange.
            continue
        return _Split(e, over, changed_dims, sizes, undivided, classes[d] in layout.batch.classes)
    return None


def _concatenation_axes(layout: Layout, e: Equation, d: int) -> Axes:
    """Return the mesh axes of a dimension that only the concatenated result has sharded, and none of its parts.

    Empty for reshapes, for the batch, and where `e` concatenates nothing along dimension `d`.
    """
    shapes, v, out = layout.program.shapes, e.operands[0], e.results[0]
    assert v is not None
    if e.factors is not None or shapes[out][d] <= shapes[v][d] or layout.dims.classes_of(v)[d] in layout.batch.classes:
        return ()
    parts = (w for w in e.operands if w is not None and len(shapes[w]) == len(shapes[v]))
    return () if any(layout.spec_between_uses(w)[d] for w in parts) else layout.spec_between_uses(out)[d]


def _changed_dims(layout: Layout, e: Equation, d: int) -> dict[Value, frozenset[int]]:
    """Return the operands and results of `e` changed along dimension `d` of the first operand, each with the
    dimensions.

    Empty if `e` changes another dimension, or if each device already has the shard made by `e`.
    """
    shapes, v, out = layout.program.shapes, e.operands[0], e.results[0]
    assert v is not None
    if (factors := e.factors) is not None:
        leading = factors.leading_dim(d)
        stays = leading is not None and layout.spec_between_uses(out)[leading] == layout.spec_between_uses(v)[d]
        if stays or factors.unsplit_dim(d) is not None:
            return {}
        return {v: frozenset({d}), out: frozenset(next((new for old, new in factors.groups if d in old), ()))}
    if shapes[v][d] == shapes[out][d]:
        return {}
    arrays = [w for w in (*e.operands, *e.results) if w is not None and len(shapes[w]) == len(shapes[v])]
    usual = all(layout.is_activation(w) and layout.compute_spec_in(e, w) == layout.spec_between_uses(w) for w in arrays)
    return {w: frozenset({d}) for w in arrays} if usual else {}


def _part_sizes(layout: Layout, e: Equation, d: int) -> tuple[list[int], bool]:
    """Return the sizes of the parts along dimension `d`, and whether `e` concatenates them."""
    shapes, v = layout.program.shapes, e.operands[0]
    assert v is not None
    if e.factors is not None:
        return [], False
    if math.prod(shapes[e.results[0]]) < math.prod(shapes[v]):
        return [shapes[out][d] for out in e.results], False
    parts = [shapes[w][d] for w in e.operands if w is not None and len(shapes[w]) == len(shapes[v])]
    return [*parts, shapes[e.results[0]][d] - sum(parts)] if len(parts) == 1 else parts, True


def _is_worthwhile(layout: Layout, value: Value, splits: Sequence[_Split]) -> bool:
    """Return whether the exchange beats XLA: the parts cover the value and are of similar size, or have run-time
    positions, or a reshape makes some of them."""
    if all(cut.has_dynamic_start and not cut.parts_undivided for cut in splits) or not all(
        cut.part_sizes for cut in splits
    ):
        return True
    (d,) = splits[0].dims[value]
    sizes = [size for cut in splits for size in cut.part_sizes]
    covered = sum(size * cut.equation.trip_count for cut in splits for size in cut.part_sizes)
    even = (
        len({*sizes}) == 1
        if any(cut.parts_undivided and cut.is_batch for cut in splits)
        else max(sizes) <= MAX_SIZE_RATIO * min(sizes)
    )
    return even and covered >= layout.program.shapes[value][d]


def _exchange_specs(layout: Layout, split: _Split) -> Iterator[tuple[Value, Spec]]:
    """Yield the specs of operands and results during the split: unsharded along the dimension.

    The mesh axes go to the largest other dimension that they divide in all of the values, if there is one.
    """
    e, shapes, first = split.equation, layout.program.shapes, next(iter(split.dims))
    whole = {v: without_axes(layout.spec_between_uses(v), split.axes) for v in split.dims}

    def matching_dims(d: int) -> dict[Value, int] | None:
        """Return the dimension of each value that matches `d` of the first operand; None where the axes do not divide
        one."""
        found = {v: _matching_dim(e, d, v, first) for v in split.dims}
        if d in split.dims[first] or split.parts_undivided:
            return None
        if any(k is None or shapes[v][k] % layout.device_count((*whole[v][k], *split.axes)) for v, k in found.items()):
            return None
        return {v: k for v, k in found.items() if k is not None}

    room = [(shapes[first][d], found) for d in range(len(shapes[first])) if (found := matching_dims(d)) is not None]
    target = max(room, key=lambda each: each[0])[1] if room else {}
    for v, spec in whole.items():
        yield v, [(*axes, *split.axes) if target.get(v) == k else axes for k, axes in enumerate(spec)]


def _matching_dim(e: Equation, d: int, value: Value, first: Value) -> int | None:
    """Return the dimension of an operand or result that matches dimension `d` of the first operand, or None."""
    if value == first or e.factors is None:
        return d
    return e.factors.unsplit_dim(d)


def _pieces_finding(layout: Layout, split: _Split) -> Finding:
    """Return the warning about pieces of examples that the axes do not divide."""
    shapes, over, n = layout.program.shapes, "+".join(split.axes), layout.device_count(split.axes)
    (value, dims), out = next(iter(split.dims.items())), split.equation.results[0]
    (d,) = dims
    size = next(
        shapes[out][k] for k in sorted(split.dims[out]) if layout.dims.classes_of(out)[k] in layout.batch.classes
    )
    where = describe_equation(layout.program, split.equation.index)
    message = (
        f"{shapes[value][d]} examples are taken in pieces of {size} ({where}), which {over}={n} does not divide: every "
        f"device computes all of each piece. Pieces of {-(-size // n) * n} would be divided."
    )
    return Finding("pieces-not-divided", "warning", message)
