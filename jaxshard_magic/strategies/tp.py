"""Tensor parallelism: matmuls sharded column then row parallel, found from how the step uses its weights.

Megatron's layout (Shoeybi et al. 2019, section 3) follows from two aims: cover many matmul FLOPs, and sum few bytes
for them. A hidden dimension is an output of one weight (column parallel) and contracted by the next (row parallel).
Heads link the attention's input and output projections; the vocabulary links embedding and head. Batched experts are
sharded before their hidden dimension: the sum is then over a token's result, not over the result of each of its
experts.
"""

import math
from collections.abc import Mapping, Sequence, Set

from ..errors import ShardError
from ..plan import Finding
from ..program.flops import Product, find_products
from ..program.flow import follow_aliases, stop_at_products
from ..program.ir import Equation, Value
from ..program.phases import FORWARD, equation_phases
from .fsdp import is_small
from .layout import Axes, Layout
from .tensor_choice import choose_classes, weight_classes


def tensor_parallel(layout: Layout, axes: Axes) -> None:
    """Choose dimension classes to shard over `axes`; every parameter with such a dimension is stored sharded.

    Raises:
        ShardError: No weight has a dimension that divides.
    """
    weight_products = find_products(layout.dims, layout.storage)
    given = {c for c, a in layout.tensor_class_axes.items() if set(a) & set(axes)}
    chosen = choose_classes(layout, weight_products, layout.device_count(axes), given)
    if not chosen:
        raise ShardError(_nothing_divides_message(layout, weight_products, axes))
    layout.tensor_class_axes.update(dict.fromkeys(chosen, axes))
    # Tables that are only looked up are in no product, so that the choice above does not see them.
    layout.tensor_class_axes.update(
        dict.fromkeys(_table_row_classes(layout, weight_products, chosen, layout.device_count(axes)), axes)
    )
    # Heads that do not divide are themselves a cause of splits: one finding is enough.
    if not _add_heads_finding(layout, axes):
        _add_split_findings(layout, axes)
    uses = _first_uses(layout, weight_products)
    for i in layout.roles.storage_order:
        value = layout.program.inputs[i]
        spec, classes = layout.tensor_axes(value), layout.storage.classes_of(value)
        d = next((d for d, a in enumerate(spec) if set(a) & set(axes)), None)
        already_stored = [c for c in classes if set(layout.storage_class_axes.get(c, ())) & set(axes)]
        if layout.placement_source(value):
            continue
        if d is not None and not already_stored and classes[d] not in layout.storage.unshardable:
            layout.storage_class_axes[classes[d]] = (*layout.storage_class_axes.get(classes[d], ()), *axes)
        if any(set(a) & set(axes) for a in layout.stored_spec(value)):
            layout.reasons[i].append(_reason(layout, i, axes, uses.get(i)))
        elif i in uses and len(classes) > 1:
            _explain_uncovered(layout, i, axes)


def _table_row_classes(layout: Layout, weight_products: list[Product], chosen: frozenset[int], n: int) -> set[int]:
    """Return the row classes of tables that are only looked up, such as an embedding not tied to the head.

    Each device has its part of the vocabulary, and the results are summed.
    """
    dims, program = layout.dims, layout.program
    stored = {program.inputs[i] for i in layout.roles.storage_order}
    product_classes = {c: t for p in weight_products for t in p.dim_classes for c in t}
    rows = set()
    for e in program.equations:
        if not e.primitive.is_gather or not layout.is_activation(e.operands[1]) or len(e.params["slice_sizes"]) < 2:
            continue
        gone = e.params["dimension_numbers"].collapsed_slice_dims
        tables = stored & layout.flow.ancestors(e.operands[:1], follow_aliases).keys()
        # A small table is cheaper whole on every device.
        if len(gone) != 1 or not tables or any(is_small(math.prod(program.shapes[v])) for v in tables):
            continue
        classes = dims.classes_of(e.operands[0])
        c = classes[gone[0]]
        if chosen & set(classes) or c in product_classes or any(z % n for z in dims.all_sizes[c] if z > 1):
            continue
        rows.add(c)
    return rows


def _first_uses(layout: Layout, weight_products: list[Product]) -> dict[int, Product]:
    """Return the first product that reads each parameter as a weight, by input index."""
    uses: dict[int, Product] = {}
    for p in weight_products:
        for k in p.weight_operands:
            for i in layout.flow.input_ancestors([p.equation.operands[k]], follow_aliases):
                uses.setdefault(i, p)
    return uses


def _reason(layout: Layout, i: int, axes: Axes, use: Product | None) -> str:
    spec = layout.stored_spec(layout.program.inputs[i])
    d = next(d for d, a in enumerate(spec) if set(a) & set(axes))
    if use is None:
        return f"tp: follows the weight it belongs to, dim {d} over {'+'.join(axes)}"
    c = layout.dims.classes_of(layout.program.inputs[i])[d]
    row, beside = c in use.contracted, all(c in tensor for tensor in use.dim_classes)
    kind = "row parallel" if row else "products side by side" if beside else "column parallel"
    return f"tp: {kind}, dim {d} over {'+'.join(axes)}"


def _explain_uncovered(layout: Layout, i: int, axes: Axes) -> None:
    """Add the reason for a weight that is not sharded over `axes`, and these as unsharded axes if no dimension
    divides."""
    value, n = layout.program.inputs[i], layout.device_count(axes)
    shape = layout.program.shapes[value]
    name = f"{'+'.join(axes)}={n}"
    whole = [z for z, c in zip(shape, layout.dims.classes_of(value), strict=True) if c not in layout.dims.scanned]
    if any(z % n == 0 for z in whole):
        layout.reasons[i].append(
            f"tp: whole; its products are divided by another dimension, or {name} does not fit one"
        )
        return
    layout.unsharded_axes[i] += axes
    sizes = " x ".join(map(str, shape))
    layout.reasons[i].append(f"tp: no dimension of {sizes} divides by {name}")


def _add_heads_finding(layout: Layout, axes: Axes) -> bool:
    """Add a finding about heads that do not divide, with an axis size that fits; return whether there are any."""
    n, name, made_by_weights = layout.device_count(axes), "+".join(axes), _values_made_by_weights(layout)
    head_classes = {c for e in layout.program.equations for c in _head_classes(layout, e, made_by_weights)}
    # In grouped-query attention the class of heads has two sizes, the number of heads of queries and that of keys.
    sizes = {
        z for c in head_classes - layout.tensor_class_axes.keys() for z in layout.dims.all_sizes[c] if z > 1 and z % n
    }
    repeated = _repeated_heads(layout, head_classes & layout.tensor_class_axes.keys())
    sizes |= {z for z in _repeated_heads(layout, head_classes - layout.tensor_class_axes.keys()) if z % n}
    if not sizes | repeated.keys():
        return False
    heads = min(sizes | repeated.keys())
    fits = [m for m in range(2, heads + 1) if heads % m == 0]
    suggested_size = max((m for m in fits if n % m == 0), default=0) or max((m for m in fits if m < n), default=fits[0])
    if heads in sizes:
        message = (
            f"{heads} heads do not divide by {name}={n}: attention is not divided by heads; devices repeat it, or "
            f"send parts of heads. {name}={suggested_size} divides them."
        )
    else:
        message = (
            f"{heads} heads of keys do not divide by {name}={n}; the {repeated[heads]} heads of queries that they are "
            f"repeated for do: devices send parts of heads. {name}={suggested_size} divides both."
        )
    layout.findings.append(Finding("heads-not-divided", "info", message))
    return True


def _repeated_heads(layout: Layout, heads: Set[int]) -> dict[int, int]:
    """Return the numbers of unsharded heads that are repeated to the number of heads of other classes.

    Args:
        layout: The layout.
        heads: The classes of the repeated heads.

    Returns:
        The number of heads after the repetition, by the number before.
    """
    dims, sizes = layout.dims, layout.program.sizes
    return {
        sizes[split.parts[0]]: sizes[split.merged]
        for split in dims.links.splits
        if dims.class_of_dim(split.merged) in heads
        and sizes[split.parts[0]] > 1
        and dims.class_of_dim(split.parts[0]) not in layout.tensor_class_axes
    }


def _head_classes(layout: Layout, e: Equation, made_by_weights: set[Value]) -> list[int]:
    """Return the classes of heads: batch dimensions, other than examples, of products between two results of
    weights."""
    if e.contraction is None or not made_by_weights.issuperset(e.operands[:2]):
        return []
    shape, classes = layout.program.shapes[e.results[0]], layout.dims.classes_of(e.results[0])
    batch_dims = [d for _, _, d in e.contraction.batch]
    heads = [classes[d] for d in batch_dims if classes[d] not in layout.batch.classes and shape[d] > 1]
    return heads if len(heads) < len(batch_dims) else []


def _values_made_by_weights(layout: Layout) -> set[Value]:
    """Return the activations made of a product with a weight and of no later product."""
    with_weights = (
        v
        for e in layout.program.equations
        if e.primitive.is_product and not all(map(layout.is_activation, e.operands[:2]))
        for v in e.results
    )
    return {v for v in layout.flow.descendants(with_weights, stop_at_products) if layout.is_activation(v)}


def _add_split_findings(layout: Layout, axes: Axes) -> None:
    """Add findings about weights whose sharded output is split, so that activations move.

    These are fused weights (q, k and v in thirds; gate and up in halves), and heads with rotated halves.
    """
    program, over = layout.program, "+".join(axes)
    splits = [(e, apart) for e in program.equations if (apart := _split_classes(layout, e))]
    if not splits:
        return
    phase = equation_phases(program, layout.flow)
    joined, separate = set[int](), set[int]()
    parts: list[Value] = []
    for e, apart in splits:
        if phase[e.index] != FORWARD:
            continue
        if _is_joined_again(layout, e, phase):
            joined |= apart
        else:
            separate |= apart
            parts += e.results
    weights = [i for i in layout.roles.storage_order if i in layout.roles.weights]

    def named(classes: set[int]) -> str:
        """Return the first weight with one of these classes, and how many there are, as text."""
        found = [i for i in weights if classes & set(layout.dims.classes_of(program.inputs[i]))]
        sizes = " x ".join(map(str, program.shapes[program.inputs[found[0]]])) if found else ""
        return sizes + (f" and {len(found) - 1} more" if len(found) > 1 else "")

    if fused := named(separate):
        by_head = ", nor one laid out by head" if _are_multiplied_by_head(layout, parts) else ""
        message = (
            f"What a weight of {fused} gives is divided over {over} and then split into parts, which do not "
            f"lie where they are used: activations move. Separate weights move nothing{by_head}."
        )
        layout.findings.append(Finding("fused-split", "info", message))
    if rotated := named(joined - separate):
        message = (
            f"What a weight of {rotated} gives is divided over {over} within what is split and put together again, "
            "such as halves of heads that positions rotate: activations move."
        )
        layout.findings.append(Finding("split-and-joined", "info", message))


def _split_classes(layout: Layout, e: Equation) -> set[int]:
    """Return the classes of sharded dimensions along which `e` splits an activation."""
    operand = e.operands[0] if e.name in ("split", "slice") else None
    if operand is None or not layout.is_activation(operand):
        return set()
    whole, part = layout.program.shapes[operand], layout.program.shapes[e.results[0]]
    classes = layout.dims.classes_of(operand)
    return {c for c, a, b in zip(classes, whole, part, strict=True) if a != b and layout.tensor_class_axes.get(c)}


def _is_joined_again(layout: Layout, split: Equation, phase: Mapping[int, str]) -> bool:
    """Return whether the forward pass concatenates the parts, without a product between, to the size of the split
    value."""
    shapes, whole = layout.program.shapes, split.operands[0]
    assert whole is not None
    made = layout.flow.descendants(split.results, stop_at_products)
    return any(
        e.name == "concatenate"
        and phase[e.index] == FORWARD
        and made.issuperset(e.operands)
        and shapes[e.results[0]] == shapes[whole]
        for e in layout.program.equations
    )


def _are_multiplied_by_head(layout: Layout, values: Sequence[Value]) -> bool:
    """Return whether activations made of `values` are multiplied with each other, batched over examples and heads.

    Only activations before the next weight count.
    """
    met = layout.flow.descendants(values, lambda _w, _v, e: e is None or not e.primitive.is_product)
    return any(
        e.contraction is not None and len(e.contraction.batch) > 1 and met.issuperset(e.operands[:2])
        for e in layout.program.equations
    )


def _nothing_divides_message(layout: Layout, weight_products: list[Product], axes: Axes) -> str:
    n, name = layout.device_count(axes), "+".join(axes)
    weights = weight_classes(layout.dims, weight_products) - layout.dims.scanned - layout.batch.classes
    sizes = sorted({layout.dims.largest[c] for c in weights} - {1})
    if not sizes:
        return "tp found no matmul or convolution with a weight in this step; use dp or fsdp"
    smaller = [m for m in range(n - 1, 1, -1) if any(z % m == 0 for z in sizes)]
    hint = f"{name}={smaller[0]} would divide" if smaller else "use dp or fsdp"
    return f"tp: no weight dimension ({', '.join(map(str, sizes))}) divides by {name}={n}; {hint}"
