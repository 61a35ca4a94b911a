"""Sequence parallel: the positions of every example divided, and the weights as the other parts of a sum have them.

Over an axis of its own (context parallel) queries stay where they are, keys and values are gathered, and no device has
all scores; or as `attention` says. Over tensor parallelism's axis (Korthikanti et al. 2022, section 4.2) positions are
divided where tensor parallelism divides nothing: an all-gather leads into its products and a reduce-scatter out of
them, in place of the all-reduce. Both follow from one rule of `Layout.active`: positions take what tensor dimensions
leave of the axes.
"""

import math
from collections import Counter

from ..errors import ShardError, one_of
from ..plan import Finding
from ..program.ir import Equation, Value
from ..program.lines import users_line
from ..program.primitives.primitive import Kind
from ..program.products import products
from ..program.trace import is_closed_over
from .layout import Axes, Layout, Spec, without
from .positions import find_positions, keys_of


def sequence_parallel(layout: Layout, axes: Axes) -> None:
    """Find the positions and divide them over `axes`; of a lone example, over the batch axes as well.

    Raises `ShardError` where no dimension serves, or none of its sizes divides.
    """
    found = find_positions(layout)
    if not found:
        raise ShardError(_no_positions(layout, axes))
    alone = layout.batch_axes if found & layout.batch.classes else ()
    layout.sequence, layout.sequence_axes = found, (*alone, *(a for a in axes if a not in alone))
    if not _divides(layout, layout.sequence_axes):
        layout.sequence = frozenset()
        return
    layout.keys = keys_of(layout, found)
    _say_merged(layout, axes)
    for i in layout.roles.stored:
        if layout.fixed_by(layout.program.inputs[i]) is None and not set(axes) & _tensor_axes(layout):
            layout.why[i].append(f"sp: a copy on every device of {'+'.join(axes)}")


def scattered(layout: Layout, value: Value, axes: Axes) -> int | None:
    """The dimension of `value` that a sum over `axes` is scattered over, None where every device needs all of it."""
    if not layout.sequence:
        return None
    return next((d for d, has in enumerate(layout.active(value)) if has[-len(axes) :] == axes), None)


def operand_specs(layout: Layout, product: Equation, out: Spec, axes: Axes) -> list[Spec]:
    """How the operands of a `dot_general` lie where its result lies as `out`, before it is summed over `axes`, which
    divide what it contracts."""
    (contracted, together) = product.params["dimension_numbers"]
    specs: list[Spec] = []
    at = len(together[0])
    for v, gone, shared in zip(product.ins, contracted, together, strict=True):
        if v is None:
            raise TypeError(f"{product.name} of a number: its operands are arrays")
        spec: Spec = [()] * len(layout.program.shapes[v])
        for o, d in enumerate(shared):
            spec[d] = out[o]
        for d in range(len(spec)):
            if d not in gone and d not in shared:
                spec[d], at = out[at], at + 1
        used = layout.used(v)
        for d in gone:
            spec[d] = axes if tuple(a for a in used[d] if a in axes) == axes else ()
        specs.append(spec)
    return specs


def read_whole(layout: Layout, e: Equation) -> dict[int, Spec]:
    """Operands of a lookup in a divided table, or of its gradient, that every part of the table needs for all
    positions: the indices, and what is added at them."""
    axes = _looked_up(layout, e)
    if not axes:
        return {}
    read = ((k, v) for k, v in enumerate(e.ins) if k and v is not None)
    return {k: without(layout.active(v), axes) for k, v in read if layout.batchy(v)}


def made_as(layout: Layout, e: Equation, value: Value) -> list[Spec]:
    """The specs that a result of `e` takes one after the other: what a divided table gives is summed for all positions
    before these are divided, and where attention begins or ends a value changes its division."""
    made = layout.made_by(e, value)
    axes = _looked_up(layout, e) if e.primitive.gathers else ()
    return [without(made[-1], axes), made[-1]] if axes else made


def _looked_up(layout: Layout, e: Equation) -> Axes:
    """The mesh axes that divide both positions and the dimension that `e` looks up along."""
    if not layout.sequence or e.primitive.kind is not Kind.LOOKUP:
        return ()
    numbers = e.params["dimension_numbers"]
    gather = e.primitive.gathers
    table = e.ins[0] if gather else e.outs[0]
    along = numbers.start_index_map if gather else numbers.scatter_dims_to_operand_dims
    if table is None:
        return ()
    spec = layout.used(table)
    return tuple(a for d in along for a in spec[d] if a in layout.sequence_axes)


def why_positions(layout: Layout, i: int) -> str | None:
    """What becomes of the positions of input `i`, None where it has none."""
    value = layout.program.inputs[i]
    shape, over = layout.program.shapes[value], "+".join(layout.sequence_axes)
    dims = [d for d, c in enumerate(layout.dims.of(value)) if c in layout.sequence and shape[d] > 1]
    spec = layout.active(value)
    divided = [d for d in dims if spec[d]]
    if divided:
        return f"positions: dim {', '.join(map(str, divided))} over {'+'.join(spec[divided[0]])}"
    if not dims or shape[dims[0]] % layout.count(layout.sequence_axes) == 0:
        return None
    return f"positions: {shape[dims[0]]} do not divide by {over}"


def _tensor_axes(layout: Layout) -> set[str]:
    return {a for axes in layout.tensor.values() for a in axes}


def _sizes(layout: Layout) -> dict[int, int]:
    """How many positions activations have, with the FLOPs of the products with weights that are done on so many."""
    flops: Counter[int] = Counter()
    for p in products(layout.dims, layout.storage):
        for c, z in zip(p.out, layout.program.shapes[p.equation.outs[0]], strict=True):
            if p.weights and c in layout.sequence and z > 1:
                flops[z] += p.flops
    return flops


def _divides(layout: Layout, axes: Axes) -> bool:
    """Whether activations can be divided over `axes`. Where only data can, because the model sees `tokens[:, :-1]`, a
    finding says so; where nothing can, `ShardError` is raised."""
    sizes, n = _sizes(layout), layout.count(axes)
    if not sizes or any(z % n == 0 for z in sizes):
        return True
    seen = max(sizes, key=lambda z: sizes[z])
    i, d, size = _longest(layout, seen)
    name, over = layout.names[i], " ".join(f"{a}={layout.mesh.shape[a]}" for a in axes)
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


def _say_merged(layout: Layout, axes: Axes) -> None:
    """Rows that are examples times positions lie on no device as both divisions have them."""
    program, dims = layout.program, layout.dims
    merged = [
        s
        for s in dims.links.splits
        if dims.of_node(s.whole) in layout.batch.classes
        and any(dims.of_node(n) in layout.sequence for n in s.parts)
    ]
    if not merged or set(axes) <= _tensor_axes(layout):
        return
    found = max(merged, key=lambda s: program.sizes[s.whole])
    parts = " x ".join(str(program.sizes[n]) for n in found.parts)
    message = (
        f"A reshape makes one dimension of examples and positions ({parts}), which can't lie divided by both: "
        f"positions are gathered over {'+'.join(axes)} there. Keep the two apart."
    )
    layout.findings.append(Finding("sequence-merged", "info", message))


def _longest(layout: Layout, seen: int) -> tuple[int, int, int]:
    """The input and dimension that positions come from, and its size: of data the one nearest above what is seen."""
    inputs, shapes = layout.program.inputs, layout.program.shapes
    found = [
        (i, d, shapes[inputs[i]][d])
        for i in sorted(layout.roles.data)
        for d, c in enumerate(layout.dims.of(inputs[i]))
        if c in layout.sequence
    ]
    return min(found, key=lambda x: (abs(x[2] - seen), x), default=(min(layout.roles.data), 0, seen))


def _sorted_tokens(layout: Layout) -> Equation | None:
    """A product of rows that are sorted, of which each position of all examples has some."""
    program = layout.program
    tokens = {
        math.prod(program.shapes[program.inputs[i]][:2])
        for i in layout.batch.dims
        if len(program.shapes[program.inputs[i]]) > 1
    } - {0}
    for e in (program.equations[i] for i in sorted(layout.flow.orders.products)):
        rows = e.shapes[0][0]
        if any(rows % n == 0 for n in tokens):
            return e
    return None


def _no_positions(layout: Layout, axes: Axes) -> str:
    inputs, shapes = layout.program.inputs, layout.program.shapes
    data = sorted(layout.batch.dims) or [i for i in sorted(layout.roles.data) if shapes[inputs[i]]]
    if not data:
        return "sp found no dimension of positions: no input of this step is a batch; use dp, fsdp or tp"
    shown = one_of(f"{layout.names[i]} ({' x '.join(map(str, shapes[inputs[i]]))})" for i in data[:4])
    more = f" and {len(data) - 4} more" if len(data) > 4 else ""
    specs = (
        f"{layout.names[i]}=P({'None, ' * dim}'{axes[0]}')"
        for i in data
        for dim, size in enumerate(shapes[inputs[i]])
        if dim not in layout.batch.dims.get(i, (0,)) and size % layout.count(axes) == 0
        if not is_closed_over(layout.names[i])
    )
    spec = next(specs, None)
    say = f'say which it is, --spec "{spec}", or ' if spec else ""
    if (sorting := _sorted_tokens(layout)) is not None:
        line = users_line(sorting.eqn)
        return (
            f"sp found no dimension of positions in {shown}{more}: tokens are sorted by their expert"
            f"{f' at {line}' if line else ''}, all examples and positions as one dimension; use dp, fsdp or ep"
        )
    return (
        f"sp found no dimension of positions in {shown}{more}: besides the examples none goes through most products "
        f"with weights; {say}use dp, fsdp or tp"
    )
