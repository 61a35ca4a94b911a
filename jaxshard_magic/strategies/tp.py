"""Tensor parallel: matmuls divided inside, column then row parallel, found from how the step uses its weights.

Megatron's layout (Shoeybi et al. 2019, section 3) falls out of two aims: cover many matmul FLOPs, and sum few bytes
for them. A hidden dimension is an output of one weight (column) and contracted by the next (row); heads link
the attention's input and output projections; the vocabulary links embedding and head. Experts, which products have side
by side, are divided before their hidden dimension: what is summed then is a token's result, and not what each of its
experts makes of it.
"""

import math
from collections.abc import Mapping, Sequence, Set

from ..errors import ShardError
from ..plan import Finding
from ..program.flow import by_alias, by_no_product
from ..program.ir import Equation, Value
from ..program.phases import FORWARD, phases
from ..program.products import Product, products
from ..program.roles import PARAMS
from .fsdp import is_small
from .layout import Axes, Layout
from .tensor_choice import choose, weight_classes


def tensor_parallel(layout: Layout, axes: Axes) -> None:
    """Choose logical dimensions to divide over `axes`; every parameter that has one is stored divided.

    Raises `ShardError` where no weight has a dimension that divides.
    """
    found = products(layout.dims, layout.storage)
    given = {c for c, a in layout.tensor.items() if set(a) & set(axes)}
    chosen = choose(layout, found, layout.count(axes), given)
    if not chosen:
        raise ShardError(_nothing_divides(layout, found, axes))
    layout.tensor.update(dict.fromkeys(chosen, axes))
    layout.tensor.update(dict.fromkeys(_tables(layout, found, chosen, layout.count(axes)), axes))
    if not _say_heads(layout, axes):
        _say_split(layout, axes)
    uses = _first_uses(layout, found)
    for i in layout.roles.stored:
        value = layout.program.inputs[i]
        spec, classes = layout.tensor_axes(value), layout.storage.of(value)
        d = next((d for d, a in enumerate(spec) if set(a) & set(axes)), None)
        kept = [c for c in classes if set(layout.stored.get(c, ())) & set(axes)]
        if layout.fixed_by(value):
            continue
        if d is not None and not kept and classes[d] not in layout.storage.unshardable:
            layout.stored[classes[d]] = (*layout.stored.get(classes[d], ()), *axes)
        if any(set(a) & set(axes) for a in layout.at_rest(value)):
            layout.why[i].append(_reason(layout, i, axes, uses.get(i)))
        elif i in uses and len(classes) > 1:
            _say_uncovered(layout, i, axes)


def _tables(layout: Layout, found: list[Product], chosen: frozenset[int], n: int) -> set[int]:
    """The rows of tables that are only looked up (an embedding that is not tied to the head): each device has its part
    of the vocabulary, and the results are summed."""
    dims, program = layout.dims, layout.program
    stored = {program.inputs[i] for i in layout.roles.stored}
    beside = {c: t for p in found for t in p.tensors for c in t}
    rows = set()
    for e in program.equations:
        if not e.primitive.gathers or not layout.batchy(e.ins[1]) or len(e.params["slice_sizes"]) < 2:
            continue
        gone = e.params["dimension_numbers"].collapsed_slice_dims
        tables = stored & layout.flow.back(e.ins[:1], by_alias).keys()
        if len(gone) != 1 or not tables or any(is_small(math.prod(program.shapes[v])) for v in tables):
            continue
        classes = dims.of(e.ins[0])
        c = classes[gone[0]]
        if chosen & set(classes) or c in beside or any(z % n for z in dims.all_sizes[c] if z > 1):
            continue
        rows.add(c)
    return rows


def _first_uses(layout: Layout, found: list[Product]) -> dict[int, Product]:
    """The first product that reads each parameter as a weight."""
    uses: dict[int, Product] = {}
    for p in found:
        for k in p.weights:
            for i in layout.flow.inputs_behind([p.equation.ins[k]], by_alias):
                uses.setdefault(i, p)
    return uses


def _reason(layout: Layout, i: int, axes: Axes, use: Product | None) -> str:
    spec = layout.at_rest(layout.program.inputs[i])
    d = next(d for d, a in enumerate(spec) if set(a) & set(axes))
    if use is None:
        return f"tp: follows the weight it belongs to, dim {d} over {'+'.join(axes)}"
    c = layout.dims.of(layout.program.inputs[i])[d]
    row, beside = c in use.contracted, all(c in tensor for tensor in use.tensors)
    kind = "row parallel" if row else "products side by side" if beside else "column parallel"
    return f"tp: {kind}, dim {d} over {'+'.join(axes)}"


def _say_uncovered(layout: Layout, i: int, axes: Axes) -> None:
    value, n = layout.program.inputs[i], layout.count(axes)
    shape = layout.program.shapes[value]
    name = f"{'+'.join(axes)}={n}"
    whole = [z for z, c in zip(shape, layout.dims.of(value), strict=True) if c not in layout.dims.looped]
    if any(z % n == 0 for z in whole):
        layout.why[i].append(
            f"tp: whole; its products are divided by another dimension, or {name} does not fit one"
        )
        return
    layout.wanted[i] += axes
    sizes = " x ".join(map(str, shape))
    layout.why[i].append(f"tp: no dimension of {sizes} divides by {name}")


def _say_heads(layout: Layout, axes: Axes) -> bool:
    """Tell of heads that do not divide, and which size of the axis would divide them; return whether there are any."""
    n, name, made = layout.count(axes), "+".join(axes), _made_by_weights(layout)
    beside = {c for e in layout.program.equations for c in _side_by_side(layout, e, made)}
    # Of queries that share keys the class of heads has both numbers of heads.
    sizes = {z for c in beside - layout.tensor.keys() for z in layout.dims.all_sizes[c] if z > 1 and z % n}
    repeated = _heads_repeated(layout, beside & layout.tensor.keys())
    sizes |= {z for z in _heads_repeated(layout, beside - layout.tensor.keys()) if z % n}
    if not sizes | repeated.keys():
        return False
    heads = min(sizes | repeated.keys())
    fits = [m for m in range(2, heads + 1) if heads % m == 0]
    best = max((m for m in fits if n % m == 0), default=0) or max((m for m in fits if m < n), default=fits[0])
    if heads in sizes:
        message = (
            f"{heads} heads do not divide by {name}={n}: attention is not divided by heads; devices repeat it, or "
            f"send parts of heads. {name}={best} divides them."
        )
    else:
        message = (
            f"{heads} heads of keys do not divide by {name}={n}; the {repeated[heads]} heads of queries that they are "
            f"repeated for do: devices send parts of heads. {name}={best} divides both."
        )
    layout.findings.append(Finding("heads-not-divided", "info", message))
    return True


def _heads_repeated(layout: Layout, heads: Set[int]) -> dict[int, int]:
    """Return numbers of heads that are repeated to be as many as those of the dimension classes `heads`, and are not
    divided, each with how many it becomes."""
    dims, sizes = layout.dims, layout.program.sizes
    return {
        sizes[split.parts[0]]: sizes[split.whole]
        for split in dims.links.splits
        if dims.of_node(split.whole) in heads
        and sizes[split.parts[0]] > 1
        and dims.of_node(split.parts[0]) not in layout.tensor
    }


def _side_by_side(layout: Layout, e: Equation, made: set[Value]) -> list[int]:
    """Classes of dimensions that a product goes over side by side, examples apart, where weights make both of its
    operands, which are among the activations `made` by weights: heads."""
    if e.contraction is None or not made.issuperset(e.ins[:2]):
        return []
    shape, classes = layout.program.shapes[e.outs[0]], layout.dims.of(e.outs[0])
    beside = [d for _, _, d in e.contraction.batch]
    heads = [classes[d] for d in beside if classes[d] not in layout.batch.classes and shape[d] > 1]
    return heads if len(heads) < len(beside) else []


def _made_by_weights(layout: Layout) -> set[Value]:
    """Return the activations that are made of a product with a weight, by no other product."""
    with_weights = (
        v
        for e in layout.program.equations
        if e.primitive.product and not all(map(layout.batchy, e.ins[:2]))
        for v in e.outs
    )
    return {v for v in layout.flow.forward(with_weights, by_no_product) if layout.batchy(v)}


def _say_split(layout: Layout, axes: Axes) -> None:
    """Tell of weights whose product is divided, then split into parts, which do not lie where they are used: weights
    for several things at once (q, k and v in thirds; gate and up in halves), and heads whose halves are rotated."""
    program, over = layout.program, "+".join(axes)
    splits = [(e, apart) for e in program.equations if (apart := _split_along(layout, e))]
    if not splits:
        return
    phase = phases(program, layout.flow)
    joined, separate = set[int](), set[int]()
    parts: list[Value] = []
    for e, apart in splits:
        if phase[e.index] != FORWARD:
            continue
        if _joined_again(layout, e, phase):
            joined |= apart
        else:
            separate |= apart
            parts += e.outs
    weights = [i for i in layout.roles.stored if layout.roles.of[i] == PARAMS]

    def named(classes: set[int]) -> str:
        """The first weight that has one of these dimensions, and how many there are."""
        found = [i for i in weights if classes & set(layout.dims.of(program.inputs[i]))]
        sizes = " x ".join(map(str, program.shapes[program.inputs[found[0]]])) if found else ""
        return sizes + (f" and {len(found) - 1} more" if len(found) > 1 else "")

    if fused := named(separate):
        by_head = ", nor one laid out by head" if _meet_by_head(layout, parts) else ""
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


def _split_along(layout: Layout, e: Equation) -> set[int]:
    """Return the classes of divided dimensions along which `e` takes an activation apart."""
    operand = e.ins[0] if e.name in ("split", "slice") else None
    if operand is None or not layout.batchy(operand):
        return set()
    whole, part = layout.program.shapes[operand], layout.program.shapes[e.outs[0]]
    classes = layout.dims.of(operand)
    return {c for c, a, b in zip(classes, whole, part, strict=True) if a != b and layout.tensor.get(c)}


def _joined_again(layout: Layout, split: Equation, phase: Mapping[int, str]) -> bool:
    """Return whether the forward pass makes of the parts, by no product, an array as large as what was split."""
    shapes, whole = layout.program.shapes, split.ins[0]
    assert whole is not None
    made = layout.flow.forward(split.outs, by_no_product)
    return any(
        e.name == "concatenate"
        and phase[e.index] == FORWARD
        and made.issuperset(e.ins)
        and shapes[e.outs[0]] == shapes[whole]
        for e in layout.program.equations
    )


def _meet_by_head(layout: Layout, values: Sequence[Value]) -> bool:
    """Return whether activations made of `values`, before any weight meets them, are multiplied with each other in a
    product that goes over examples and heads side by side."""
    met = layout.flow.forward(values, lambda _w, _v, e: e is None or not e.primitive.product)
    return any(
        e.contraction is not None and len(e.contraction.batch) > 1 and met.issuperset(e.ins[:2])
        for e in layout.program.equations
    )


def _nothing_divides(layout: Layout, found: list[Product], axes: Axes) -> str:
    n, name = layout.count(axes), "+".join(axes)
    weights = weight_classes(layout.dims, found) - layout.dims.looped - layout.batch.classes
    sizes = sorted({layout.dims.largest[c] for c in weights} - {1})
    if not sizes:
        return "tp found no matmul or convolution with a weight in this step; use dp or fsdp"
    smaller = [m for m in range(n - 1, 1, -1) if any(z % m == 0 for z in sizes)]
    hint = f"{name}={smaller[0]} would divide" if smaller else "use dp or fsdp"
    return f"tp: no weight dimension ({', '.join(map(str, sizes))}) divides by {name}={n}; {hint}"
