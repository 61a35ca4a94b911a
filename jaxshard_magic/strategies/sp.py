"""Sequence parallelism: the positions of every example are sharded.

Over a separate axis (context parallelism) queries stay, keys and values are gathered, and no device has all scores;
other forms of attention are an option. Over the axis of tensor parallelism (Korthikanti et al. 2022, section 4.2)
positions are sharded outside of tensor-parallel products: an all-gather before the products and a reduce-scatter after
them replace the all-reduce. Both cases follow from a rule of the layout's activation specs: positions get the axes left
free by tensor dimensions.
"""

import math
from collections import Counter

from ..errors import ShardError, list_names
from ..plan import Finding
from ..program.flops import find_products
from ..program.ir import Equation, Value
from ..program.primitives.primitive import Kind
from ..program.source_lines import user_line
from ..program.trace import is_closed_over
from .layout import Axes, Layout, Spec, dim_spec_text, without_axes
from .positions import find_positions, key_dims


def sequence_parallel(layout: Layout, axes: Axes) -> None:
    """Find the positions and shard them over `axes`; for a lone example, over the batch axes as well.

    Raises:
        ShardError: No dimension holds positions, or none of their sizes divides.
    """
    positions = find_positions(layout)
    if not positions:
        raise ShardError(_no_positions_message(layout, axes))
    # For a lone example the batch search has taken the positions for the batch.
    batch_axes = layout.batch_axes if positions & layout.batch.classes else ()
    layout.position_classes, layout.position_axes = (
        positions,
        (*batch_axes, *(a for a in axes if a not in batch_axes)),
    )
    if not _can_divide(layout, layout.position_axes):
        layout.position_classes = frozenset()
        return
    layout.whole_position_dims = key_dims(layout, positions)
    _add_merged_finding(layout, axes)
    for i in layout.roles.storage_order:
        if layout.placement_source(layout.program.inputs[i]) is None and not set(axes) & _tensor_axes(layout):
            layout.reasons[i].append(f"sp: a copy on every device of {'+'.join(axes)}")


def scatter_dim(layout: Layout, value: Value, axes: Axes) -> int | None:
    """Return the dimension of `value` over which a sum is scattered; None where every device needs the whole sum.

    Args:
        layout: The layout.
        value: The sum.
        axes: Mesh axes to sum over.
    """
    if not layout.position_classes:
        return None
    # A scatter over `axes` makes them the minor axes of the dimension.
    return next((d for d, has in enumerate(layout.activation_spec(value)) if has[-len(axes) :] == axes), None)


def operand_specs(layout: Layout, product: Equation, out: Spec, axes: Axes) -> list[Spec]:
    """Return the specs of a `dot_general`'s operands, before the sum over `axes`.

    Args:
        layout: The layout.
        product: The `dot_general`.
        out: Spec of the result.
        axes: Mesh axes that shard the contracted dimensions.

    Raises:
        TypeError: An operand is a literal.
    """
    (contracted, batched) = product.params["dimension_numbers"]
    specs: list[Spec] = []
    # A `dot_general` has batch dimensions first in its result, then the free ones of the left and the right operand.
    next_dim = len(batched[0])
    for v, summed, shared in zip(product.operands, contracted, batched, strict=True):
        if v is None:
            raise TypeError(f"{product.name} of a number: its operands are arrays")
        spec: Spec = [()] * len(layout.program.shapes[v])
        for o, d in enumerate(shared):
            spec[d] = out[o]
        for d in range(len(spec)):
            if d not in summed and d not in shared:
                spec[d], next_dim = out[next_dim], next_dim + 1
        used = layout.spec_in_use(v)
        for d in summed:
            spec[d] = axes if tuple(a for a in used[d] if a in axes) == axes else ()
        specs.append(spec)
    return specs


def whole_operand_specs(layout: Layout, e: Equation) -> dict[int, Spec]:
    """Return the specs of operands for which a lookup in a sharded table, or its gradient, needs all positions.

    These are the indices and the updates, by position; every shard of the table needs all of them.
    """
    axes = _lookup_axes(layout, e)
    if not axes:
        return {}
    read = ((k, v) for k, v in enumerate(e.operands) if k and v is not None)
    return {k: without_axes(layout.activation_spec(v), axes) for k, v in read if layout.is_activation(v)}


def result_specs(layout: Layout, e: Equation, value: Value) -> list[Spec]:
    """Return the specs that a result of `e` takes, one after the other.

    A lookup in a sharded table is summed for all positions before these are sharded, and a value changes its sharding
    where attention begins or ends.

    Args:
        layout: The layout.
        e: The equation.
        value: The result.
    """
    made = layout.result_specs(e, value)
    axes = _lookup_axes(layout, e) if e.primitive.is_gather else ()
    return [without_axes(made[-1], axes), made[-1]] if axes else made


def _lookup_axes(layout: Layout, e: Equation) -> Axes:
    """Return the mesh axes that shard both positions and the dimension that `e` looks up along."""
    if not layout.position_classes or e.primitive.kind is not Kind.LOOKUP:
        return ()
    numbers = e.params["dimension_numbers"]
    gather = e.primitive.is_gather
    table = e.operands[0] if gather else e.results[0]
    along = numbers.start_index_map if gather else numbers.scatter_dims_to_operand_dims
    if table is None:
        return ()
    spec = layout.spec_in_use(table)
    return tuple(a for d in along for a in spec[d] if a in layout.position_axes)


def positions_reason(layout: Layout, i: int) -> str | None:
    """Return the reason given for the sharding of the positions of input `i`; None for an input without positions.

    Args:
        layout: The layout.
        i: Index of the input.
    """
    value = layout.program.inputs[i]
    shape, over = layout.program.shapes[value], "+".join(layout.position_axes)
    dims = [d for d, c in enumerate(layout.dims.classes_of(value)) if c in layout.position_classes and shape[d] > 1]
    spec = layout.activation_spec(value)
    divided = [d for d in dims if spec[d]]
    if divided:
        return f"positions: dim {', '.join(map(str, divided))} over {'+'.join(spec[divided[0]])}"
    if not dims or shape[dims[0]] % layout.device_count(layout.position_axes) == 0:
        return None
    return f"positions: {shape[dims[0]]} do not divide by {over}"


def _tensor_axes(layout: Layout) -> set[str]:
    return {a for axes in layout.tensor_class_axes.values() for a in axes}


def _flops_by_positions(layout: Layout) -> dict[int, int]:
    """Return the FLOPs of the products with weights, by the number of positions of their result."""
    flops: Counter[int] = Counter()
    for p in find_products(layout.dims, layout.storage):
        for c, z in zip(p.out, layout.program.shapes[p.equation.results[0]], strict=True):
            if p.weight_operands and c in layout.position_classes and z > 1:
                flops[z] += p.flops
    return flops


def _can_divide(layout: Layout, axes: Axes) -> bool:
    """Return whether activations can be sharded over `axes`.

    Where data divides but activations do not, as the model reads `tokens[:, :-1]`, a finding is added.

    Raises:
        ShardError: Neither divides.
    """
    sizes, n = _flops_by_positions(layout), layout.device_count(axes)
    if not sizes or any(z % n == 0 for z in sizes):
        return True
    seen = max(sizes, key=lambda z: sizes[z])
    i, d, size = _positions_input(layout, seen)
    name, over = layout.input_names[i], " ".join(f"{a}={layout.mesh.shape[a]}" for a in axes)
    # The model may read fewer positions than the data has, as in `tokens[:, :-1]`.
    near = [m + size - seen for m in (seen // n * n, -(-seen // n) * n) if m]
    good = " or ".join(map(str, dict.fromkeys(near)))
    if size % n:
        sees = f", of which the model sees {seen}" if seen != size else ""
        raise ShardError(
            f"{name} has {size} positions (dim {d}){sees}, which do not divide by {over}; use {good} positions, "
            f"or a mesh whose {over.split('=')[0]} divides {seen}"
        )
    message = (
        f"{name} has {size} positions, but the model sees {seen}, which do not divide by {over}: they are whole on "
        f"every device. Pass {good}, so that what the model sees divides, or pad what it sees."
    )
    layout.findings.append(Finding("sequence-odd", "warning", message))
    return False


def _add_merged_finding(layout: Layout, axes: Axes) -> None:
    """Add a finding for reshapes that merge examples and positions into one dimension."""
    program, dims = layout.program, layout.dims
    merged = [
        s
        for s in dims.links.splits
        if dims.class_of_dim(s.merged) in layout.batch.classes
        and any(dims.class_of_dim(n) in layout.position_classes for n in s.parts)
    ]
    if not merged or set(axes) <= _tensor_axes(layout):
        return
    # A merged dimension is contiguous by example: sharded by examples and by positions, no device would have its rows.
    found = max(merged, key=lambda s: program.sizes[s.merged])
    parts = " x ".join(str(program.sizes[n]) for n in found.parts)
    message = (
        f"A reshape makes one dimension of examples and positions ({parts}), which can't lie divided by both: "
        f"positions are gathered over {'+'.join(axes)} there. Keep the two apart."
    )
    layout.findings.append(Finding("sequence-merged", "info", message))


def _positions_input(layout: Layout, seen: int) -> tuple[int, int, int]:
    """Return (input, dimension, size) of the data dimension of positions nearest in size to `seen`."""
    inputs, shapes = layout.program.inputs, layout.program.shapes
    found = [
        (i, d, shapes[inputs[i]][d])
        for i in sorted(layout.roles.data)
        for d, c in enumerate(layout.dims.classes_of(inputs[i]))
        if c in layout.position_classes
    ]
    return min(found, key=lambda x: (abs(x[2] - seen), x), default=(min(layout.roles.data), 0, seen))


def _sorted_token_product(layout: Layout) -> Equation | None:
    """Return a product of sorted rows, with rows for each position of all examples; None without one."""
    program = layout.program
    tokens = {
        math.prod(program.shapes[program.inputs[i]][:2])
        for i in layout.batch.input_dims
        if len(program.shapes[program.inputs[i]]) > 1
    } - {0}
    for e in (program.equations[i] for i in sorted(layout.flow.sort_analysis.grouped_products)):
        rows = e.shapes[0][0]
        if any(rows % n == 0 for n in tokens):
            return e
    return None


def _no_positions_message(layout: Layout, axes: Axes) -> str:
    inputs, shapes = layout.program.inputs, layout.program.shapes
    data = sorted(layout.batch.input_dims) or [i for i in sorted(layout.roles.data) if shapes[inputs[i]]]
    if not data:
        return "sp found no dimension of positions: no input of this step is a batch; use dp, fsdp or tp"
    shown = list_names(f"{layout.input_names[i]} ({' x '.join(map(str, shapes[inputs[i]]))})" for i in data[:4])
    more = f" and {len(data) - 4} more" if len(data) > 4 else ""
    specs = (
        f"{layout.input_names[i]}={dim_spec_text(dim, axes[:1])}"
        for i in data
        for dim, size in enumerate(shapes[inputs[i]])
        if dim not in layout.batch.input_dims.get(i, (0,)) and size % layout.device_count(axes) == 0
        if not is_closed_over(layout.input_names[i])
    )
    spec = next(specs, None)
    say = f'say which it is, --spec "{spec}", or ' if spec else ""
    if (sort_product := _sorted_token_product(layout)) is not None:
        line = user_line(sort_product.jaxpr_eqn)
        return (
            f"sp found no dimension of positions in {shown}{more}: tokens are sorted by their expert"
            f"{f' at {line}' if line else ''}, all examples and positions as one dimension; use dp, fsdp or ep"
        )
    return (
        f"sp found no dimension of positions in {shown}{more}: besides the examples none goes through most products "
        f"with weights; {say}use dp, fsdp or tp"
    )
