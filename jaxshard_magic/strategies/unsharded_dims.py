"""Equations that need a whole dimension which the layout shards.

`unshard_required_dims` gathers what faults of XLA and blocks of associative scans require.

`gather_contested_operands` gathers for products in which one mesh axis would shard two dimensions, such as rows and
columns of a square weight. A residual stream `x + f(x @ w)` has features that are rows of `w` and columns of `w`. An
axis shards only one dimension of an array, so it shards the rows of `w` alone. The product with the transposed `w` in
the backward pass would then contract columns sharded in the gradient and whole in `w`. Rows of one matrix that meet
rows of another (`a @ b.T` in a contrastive loss) are the same case. The axis stays where most operands and the result
have it, weights before activations. An activation sharded elsewhere by that axis is gathered for the product.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..plan import Finding
from ..program.ir import Equation, Value
from ..program.primitives.contractions import Contraction
from ..program.source_lines import user_line
from ..program.xla_faults import (
    CROSSED_PRODUCT,
    DIVIDED_CONVOLUTION,
    DimsBySlot,
    XlaFault,
    convolution_windows,
    find_replicated_dims,
    needs_explicit_sharding,
)
from ..units import byte_text
from .layout import Axes, Layout, Spec, without_axes
from .reductions import summed_axes

_MAX_LINES = 3  # lines of user code that a finding names for a fault
_OperandDim = tuple[int, int]  # (operand of a product, or 2 for its result; its dimension)


def unshard_required_dims(layout: Layout) -> None:
    """Reshard operands and results of equations that need a whole dimension, and report the faults of XLA among the
    reasons.

    Adds to `layout.spec_overrides` and `layout.findings`. Call after all strategies have filled in the layout.
    """
    read_specs: dict[tuple[int, Value], Spec] = {}
    result_specs: dict[Value, Spec] = {}
    changes_by_fault: dict[XlaFault | None, list[_EquationSpecs]] = {}
    for e in layout.program.equations:
        if e.name == "divide_blocks" and (v := e.operands[0]) is not None:
            # Constrained where it is made: otherwise XLA would make it sharded, perhaps with blocks in another order.
            result_specs[v] = layout.spec_between_uses(v)
        if e.name == "gather_blocks":
            fault, changed = (None, _unsharded_specs(layout, e, {0: frozenset({e.params["axis"]})}, frozenset()))
            result_specs[e.results[0]] = layout.spec_between_uses(e.results[0])
        elif (requirement := _required_whole(layout, e)) is not None:
            fault, changed = (
                requirement[0],
                _unsharded_specs(layout, e, requirement[1], requirement[0].independent_dims(e)),
            )
        else:
            continue
        read_specs |= {(e.index, v): spec for k, v, spec in changed.specs if k < len(e.operands)}
        result_specs |= {v: spec for k, v, spec in changed.specs if k >= len(e.operands)}
        if changed.specs:
            changes_by_fault.setdefault(fault, []).append(changed)
    exchanges = layout.spec_overrides
    layout.spec_overrides = replace(
        exchanges, operands={**exchanges.operands, **read_specs}, results={**exchanges.results, **result_specs}
    )
    for fault, changes in changes_by_fault.items():
        layout.findings.append(
            _scan_finding(layout, changes) if fault is None else _fault_finding(layout, fault, changes)
        )


def _required_whole(layout: Layout, e: Equation) -> tuple[XlaFault, DimsBySlot] | None:
    """Return the dimensions of `e` that must be whole, and the fault of XLA behind them; None where all may be sharded.

    Of several faults, the first with a sharded dimension is returned.
    """
    requirements = [*filter(None, [find_replicated_dims(e, cpu=layout.is_cpu)])]
    # Dimensions that another fault makes whole are not sharded any more when the convolution runs.
    image = requirements[0][1].get(0, frozenset[int]()) if requirements else frozenset[int]()
    in_layout = ((CROSSED_PRODUCT, _crossed_dims(layout, e)), (DIVIDED_CONVOLUTION, _windowed_dims(layout, e, image)))
    requirements += [(fault, slots) for fault, slots in in_layout if slots]
    if not requirements:
        return None
    specs = [[] if v is None else layout.spec_between_uses(v) for v in (*e.operands, *e.results)]
    divided = (
        fault
        for fault, slots in requirements
        if any(specs[k][d] for k, dims in slots.items() for d in dims if specs[k])
    )
    # The report names one fault, but all of them need their dimensions whole.
    whole_dims = {
        k: frozenset[int]().union(*(slots.get(k, ()) for _, slots in requirements))
        for k in {k for _, slots in requirements for k in slots}
    }
    return next(divided, requirements[0][0]), whole_dims


def must_choose_sharding(layout: Layout, e: Equation) -> bool:
    """Return whether XLA must not choose by itself how to shard `e`."""
    return needs_explicit_sharding(e, cpu=layout.is_cpu) or (has_several_axes(layout) and bool(convolution_windows(e)))


def has_several_axes(layout: Layout) -> bool:
    """Return whether the mesh has more than one axis of several devices; on others XLA does not have the fault
    `DIVIDED_CONVOLUTION`."""
    return sum(n > 1 for n in layout.mesh.shape.values()) > 1


def _windowed_dims(layout: Layout, e: Equation, whole_dims: frozenset[int]) -> DimsBySlot:
    """Return the dimensions under a window that a convolution must have whole; see `DIVIDED_CONVOLUTION`.

    XLA is right in two cases. Either only the image is sharded along them and no axis shards the output channels. Or
    the window is sharded as well, as XLA shards a long one in the gradient of a kernel, and each axis of the mesh
    shards the image.

    Args:
        layout: The layout.
        e: The convolution.
        whole_dims: Dimensions of the image that are whole for another reason, and so are not sharded.
    """
    c, (v, w) = e.contraction, (*e.operands[:2], None, None)[:2]
    if c is None or v is None or w is None or not (windows := convolution_windows(e)):
        return {}
    image, window = (layout.spec_between_uses(x) if layout.is_activation(x) else layout.spec_in(e, x) for x in (v, w))
    image = [() if d in whole_dims else axes for d, axes in enumerate(image)]
    length, output_sizes = layout.program.shapes[w], layout.program.shapes[e.results[0]]
    divided = [(i, j, k) for i, j, k in windows if image[i] or window[j]]
    if any(window[j] or length[j] > output_sizes[k] for _, j, k in divided):
        axes = {a for along in image for a in along}
        is_correct = all(a in axes or n == 1 for a, n in layout.mesh.shape.items())
    else:
        is_correct = not any(window[j] for j, _ in c.right_free)
    return {} if is_correct else {k: frozenset(dims[k] for dims in divided) for k in range(3) if divided}


def _crossed_dims(layout: Layout, e: Equation) -> DimsBySlot:
    """Return the dimensions of the second operand that a product must have whole; see `CROSSED_PRODUCT`.

    The dimensions are contracted, and their mesh axis shards another contracted dimension of the first operand, while a
    further dimension is sharded equally in both operands.
    """
    c, (v, w) = e.contraction, (*e.operands[:2], None, None)[:2]
    if (
        c is None
        or len(c.contracted) < 2
        or v is None
        or w is None
        or not (layout.is_activation(v) and layout.is_activation(w))
    ):
        return {}
    left, right = layout.spec_between_uses(v), layout.spec_between_uses(w)
    alike = {(i, j) for i, j in c.contracted if left[i] and left[i] == right[j]}
    apart = {*c.contracted} - alike
    axes = {a for i, _ in apart for a in left[i]}
    crossed = frozenset(j for i, j in apart if axes.intersection(right[j]) - {*left[i]})
    return {1: crossed} if alike and crossed else {}


def is_summed_before_scatter(layout: Layout, e: Equation) -> bool:
    """Return whether a gradient made by the product `e` must be reduced whole and sharded afterwards; see
    `FURTHER_DIVIDED_SUM` in `program/xla_faults.py`."""
    c = e.contraction
    if c is None or not c.batch or layout.is_activation(out := e.results[0]):
        return False
    left, rest = layout.compute_spec_in(e, e.operands[0]), layout.stored_spec(out)
    summed = {a for axes in summed_axes(layout, e) for a in axes if layout.mesh.shape[a] > 1}
    divided = ({*rest[o]} & summed for i, _, o in c.batch if layout.device_count(left[i]) > 1)
    return len(summed) > 1 and any(further and further != summed for further in divided)


def guarded_lines(layout: Layout) -> tuple[str, ...]:
    """Return the user's lines at which sharding constraints alone would make XLA go wrong.

    These are equations with unsharded dimensions, dilated padding with another sharding of result and operand, and
    gradients reduced before they are sharded.
    """
    found = (
        e
        for e in layout.program.equations
        if _is_unsharded(layout, e) or _is_dilated_across_shards(layout, e) or is_summed_before_scatter(layout, e)
    )
    return tuple(dict.fromkeys(_user_line(e) or "a library's line" for e in found))


def _is_unsharded(layout: Layout, e: Equation) -> bool:
    read_otherwise = any((e.index, v) in layout.spec_overrides.operands for v in e.operands if v is not None)
    return read_otherwise and _required_whole(layout, e) is not None


def _is_dilated_across_shards(layout: Layout, e: Equation) -> bool:
    if e.name != "pad" or e.operands[0] is None:
        return False
    before, after = layout.spec_in(e, e.operands[0]), layout.spec_in(e, e.results[0])
    return any(
        there and there != here and (inner > 0 or min(low, high) < 0)
        for (low, high, inner), here, there in zip(e.params["padding_config"], before, after, strict=True)
    )


@dataclass(frozen=True)
class _EquationSpecs:
    """Specs of an equation's operands and results that differ from their specs elsewhere.

    Attributes:
        equation: The equation.
        specs: Position among operands, then results; the value; and its spec at the equation.
    """

    equation: Equation
    specs: list[tuple[int, Value, Spec]]


def _unsharded_specs(layout: Layout, e: Equation, slots: DimsBySlot, across: frozenset[int]) -> _EquationSpecs:
    """Return the specs of `e` with the dimensions in `slots` whole.

    Their mesh axes shard a dimension of `across` instead, if there is room. Weights read with activations are
    gathered as for other equations and are left out.
    """
    ends = [
        (k, v, layout.spec_between_uses(v))
        for k, v in enumerate((*e.operands, *e.results))
        if v is not None and k in slots and (layout.is_activation(v) or not layout.storage.touches_batch(e))
    ]
    gone = tuple(dict.fromkeys(a for k, _, spec in ends for d in sorted(slots[k]) for a in spec[d : d + 1][0]))
    if not gone:
        return _EquationSpecs(e, [])
    target = _dim_with_room(layout, ends, slots, across, gone)
    specs = []
    for k, v, spec in ends:
        unsharded: Spec = [() if d in slots[k] else axes for d, axes in enumerate(spec)]
        if target is not None:
            unsharded[target] = (*unsharded[target], *gone)
        if unsharded != spec:
            specs.append((k, v, unsharded))
    return _EquationSpecs(e, specs)


def _dim_with_room(
    layout: Layout, ends: list[tuple[int, Value, Spec]], slots: DimsBySlot, across: frozenset[int], gone: Axes
) -> int | None:
    """Return the largest of the dimensions `across` that divides over its own axes and `gone`; None without one."""
    shapes = layout.program.shapes

    used_axes = {a for k, _, spec in ends for d, axes in enumerate(spec) if d not in slots[k] for a in axes}
    # A mesh axis may shard only one dimension of an array.
    if not used_axes.isdisjoint(gone):
        return None

    def fits(d: int) -> bool:
        return all(shapes[v][d] % layout.device_count((*spec[d], *gone)) == 0 for _, v, spec in ends)

    candidates = across.difference(*slots.values())
    return max((d for d in candidates if fits(d)), key=lambda d: shapes[ends[0][1]][d], default=None)


def _scan_finding(layout: Layout, changes: list[_EquationSpecs]) -> Finding:
    """Return the finding about associative scans in blocks, with the bytes gathered of all blocks."""
    size = sum(layout.shard_bytes(v, spec) * c.equation.trip_count for c in changes for _, v, spec in c.specs)
    v, e = changes[0].specs[0][1], changes[0].equation
    blocks = layout.program.shapes[v][e.params["axis"]]
    message = (
        f"Associative scans along a divided dimension{_lines(changes)} run in {blocks} blocks, each on the device that "
        f"has it: one element of each block is gathered, {byte_text(size)} a step, and no other. The numbers are the "
        "step's, but for the order in which elements are combined."
    )
    return Finding("scans-in-blocks", "info", message)


def _fault_finding(layout: Layout, fault: XlaFault, changes: list[_EquationSpecs]) -> Finding:
    """Return the finding about dimensions whole because of a fault of XLA, with the bytes of the largest array."""
    held = max(layout.shard_bytes(v, spec) for c in changes for _, v, spec in c.specs)
    message = (
        f"{fault.name[0].upper()}{fault.name[1:]}{_lines(changes)} takes whole dimensions that are divided elsewhere, "
        f"because XLA {fault.symptom} where they are divided. A device has {byte_text(held)} of the "
        "largest array there."
    )
    return Finding("kept-whole", "info", message)


def _lines(changes: list[_EquationSpecs]) -> str:
    lines = list(dict.fromkeys(line for c in changes if (line := _user_line(c.equation))))
    more = f" and {len(lines) - _MAX_LINES} more" if len(lines) > _MAX_LINES else ""
    return f" ({', '.join(lines[:_MAX_LINES])}{more})" if lines else ""


def _user_line(e: Equation | None) -> str | None:
    """Return the user's line of an equation, or of the call around it for an equation of a library; None without
    one."""
    while e is not None and (line := user_line(e.jaxpr_eqn)) is None:
        e = e.parent
    return None if e is None else line


def gather_contested_operands(layout: Layout) -> None:
    """Make products read gathered operands where one axis would shard two of their dimensions.

    Add to `layout.spec_overrides`. Run after all strategies have filled in the layout. Sharded positions and experts
    are left to the code that shards them.
    """
    reads: dict[tuple[int, Value], Spec] = {}
    for e in layout.program.equations:
        if (c := e.contraction) is None or c.ragged_dim is not None or not layout.storage.touches_batch(e):
            continue
        for v, axes in _axes_to_gather(layout, e, c).items():
            if (e.index, v) not in layout.spec_overrides.operands:
                reads[e.index, v] = without_axes(layout.activation_spec(v), axes)
    # Without a constraint XLA moves the activation in one place and the weight in another, and no plan predicts which:
    # for four layers `x + gelu(x @ w)` under tp it sent four all-gathers of activations more than planned.
    layout.spec_overrides = replace(layout.spec_overrides, operands={**layout.spec_overrides.operands, **reads})


def _axes_to_gather(layout: Layout, e: Equation, c: Contraction) -> dict[Value, set[str]]:
    """Return the activations read by `e`, with the axes over which each is gathered for `e`."""
    values = (*e.operands[:2], e.results[0])
    specs = [layout.compute_spec_in(e, v) for v in values]
    # Attention and the expert region reshard their operands over these axes themselves.
    axes_of_features = {*layout.position_axes, *(layout.experts.axes if layout.experts is not None else ())}
    axes_to_gather = defaultdict[Value, set[str]](set)
    for axis in {a for spec in specs for axes in spec for a in axes} - axes_of_features:
        divided = [
            found
            for together in _linked_dims(c)
            if (found := [(k, d) for k, d in together if specs[k] and axis in specs[k][d]])
        ]
        if len(divided) < 2:
            continue
        retained = max(
            divided, key=lambda places: (any(not layout.is_activation(values[k]) for k, _ in places), len(places))
        )
        for k, _ in (place for places in divided if places is not retained for place in places):
            if k < 2 and (v := values[k]) is not None and layout.is_activation(v):
                axes_to_gather[v].add(axis)
    return axes_to_gather


def _linked_dims(c: Contraction) -> Iterator[tuple[_OperandDim, ...]]:
    """Yield the groups of operand and result dimensions that are the same logical dimension, so that one axis may shard
    them."""
    yield from (((0, i), (1, j)) for i, j in c.contracted)
    yield from (((0, i), (1, j), (2, k)) for i, j, k in c.batch)
    yield from (((0, i), (2, k)) for i, k in c.left_free)
    yield from (((1, j), (2, k)) for j, k in c.right_free)
