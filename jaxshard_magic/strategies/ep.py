"""Expert parallel: each device has some of the experts, and tokens go to the devices that have theirs.

Examples are divided over the expert axes as well, beside the data axes, so that what is no expert's is as under data
parallelism. Parameters with a matrix for each expert are divided by expert and never gathered: between the tokens of a
device and those of its experts all-to-alls move what a one-hot product dispatched (GShard, Lepikhin et al. 2020,
section 3.2). Where all experts see all tokens, these are gathered over the expert axes, and results added up.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from ..errors import ShardError
from ..plan import Finding
from ..program.batching.follow import told
from ..program.expert_loops import ExpertLoop, find_expert_loops
from ..program.experts import Experts as Found
from ..program.experts import best_of, find_experts
from ..program.flow import by_alias
from ..program.ir import Value
from ..program.roles import PARAMS
from .layout import Axes, Experts, Layout
from .sides import take_sides


def expert_parallel(layout: Layout, axes: Axes) -> None:
    """Divide the experts over `axes`, with what the step's equations that work expert by expert make.

    Raises `ShardError` where no dimension counts experts, or where they do not divide.
    """
    if [*layout.sorting.weights()]:
        _divide_sorted(layout, axes)
    else:
        _divide_found(layout, axes)
    for i in layout.roles.stored:
        value = layout.program.inputs[i]
        if layout.fixed_by(value):
            continue
        d = next((d for d, has in enumerate(layout.in_use(value)) if has == axes), None)
        if d is None:
            layout.why[i].append(f"ep: a copy on every device of {'+'.join(axes)}")
        else:
            layout.stored[layout.storage.of(value)[d]] = axes
            layout.why[i].append(f"ep: experts, dim {d} over {'+'.join(axes)}")


def _divide_found(layout: Layout, axes: Axes) -> None:
    found = find_experts(layout.dims, layout.storage, layout.flow, layout.roles)
    loops = find_expert_loops(layout.dims, layout.flow, layout.roles)
    ragged = _ragged_weights(layout)
    if not found.classes and not ragged and not loops:
        raise ShardError(_no_experts(layout, axes))
    _say_ragged(layout, ragged, axes)
    if found.classes or loops:
        stepped = {layout.dims.of(v)[0] for loop in loops for v in loop.stacks}
        found = replace(found, classes=found.classes | stepped)
        numbers = _numbers(layout, found, loops)
        _divide_evenly(numbers, layout.count(axes), "+".join(axes))
        _divide(layout, found, loops, axes)
        _say_all_tokens(layout, found, min(numbers))
        _say_shared_places(layout, found, axes)


def _divide(layout: Layout, found: Found, loops: list[ExpertLoop], axes: Axes) -> None:
    if found.shared:
        layout.batch = replace(layout.batch, classes=layout.batch.classes - found.shared)
        layout.storage = layout.dims.storage(layout.batch.classes | found.shared)
    weights = {layout.program.inputs[i] for i in found.weights}
    weights |= {v for loop in loops for v in loop.stacks if not layout.batchy(v)}
    stored = frozenset(sc for value in weights for sc in _counting(layout, value, found.classes))
    inside = [e for loop in loops for e in loop.equation.inside()]
    values = {v for e in inside for v in e.outs} | {v for loop in loops for v in loop.scope.ins}
    values |= {v for e in inside for door in e.doors for v in door.scope.ins}
    experts = Experts(
        axes,
        found.classes,
        found.places,
        found.shared,
        stored,
        equations=frozenset(e.index for e in inside),
        made=frozenset(filter(layout.batchy, values)),
        loops={loop.equation.index: loop for loop in loops},
        inside=frozenset(e.index for e in inside),
    )
    layout.experts = take_sides(layout, experts)


def _counting(layout: Layout, value: Value, classes: frozenset[int]) -> Iterable[int]:
    """The storage classes of the dimensions of a parameter that count experts."""
    pairs = zip(layout.storage.of(value), layout.dims.of(value), strict=True)
    return (sc for sc, c in pairs if c in classes)


def _numbers(layout: Layout, found: Found, loops: list[ExpertLoop]) -> set[int]:
    """How many experts there are: as many as there are matrices of them. A router may know groups of them, too."""
    shapes = layout.program.shapes
    matrices = [layout.program.inputs[i] for i in found.weights]
    counted = {
        z for v in matrices for z, c in zip(shapes[v], layout.dims.of(v), strict=True) if c in found.classes
    }
    return counted | {shapes[v][0] for loop in loops for v in loop.stacks}


def _divide_evenly(counts: set[int], n: int, over: str) -> None:
    sizes = sorted(counts)
    odd = [z for z in sizes if z % n]
    if odd:
        fitting = [m for m in range(n - 1, 1, -1) if all(z % m == 0 for z in sizes)]
        near = [m for m in (odd[0] // n * n, odd[0] // n * n + n) if m]
        hint = f"{over}={fitting[0]} would divide" if fitting else "use dp or fsdp"
        hint += f"; with {over}={n}, {' or '.join(map(str, near))} experts would"
        raise ShardError(f"ep: {odd[0]} experts do not divide by {over}={n}; {hint}")


def _no_experts(layout: Layout, axes: Axes) -> str:
    if (name := _taken_apart(layout)) is not None:
        return (
            f"ep: {name} is taken apart expert by expert in Python ({name.rpartition('.')[2]}[0], ...), and what is "
            "made of its parts is not put together again by a sum, masks or jnp.stack; go through the experts with "
            "lax.scan, lax.map or jax.vmap"
        )
    if (names := _one_array_each(layout)) is not None:
        return (
            f"ep: {names[0]} to {names[-1]} are {len(names)} arrays, one for each expert, and ep divides arrays by "
            "their dimensions; stack them, jax.tree.map(lambda *each: jnp.stack(each), *experts), and take w[0], w[1], "
            "... of that in the step (in Flax: nn.vmap, nnx.vmap)"
        )
    if (name := _looked_up(layout)) is not None:
        return (
            f"ep: {name} is looked up for each token ({name.rpartition('.')[2]}[chosen]), which makes each a matrix of "
            "its own, that not only products read; multiply with it (jnp.einsum, @), sort the tokens by expert for "
            "jax.lax.ragged_dot, or have all experts work on all tokens (jax.vmap, lax.scan) and take what is chosen "
            "of the results"
        )
    return (
        "ep found no experts in this step: no parameter has, beside the two dimensions of a matrix, one that top_k, "
        f"argmax, a sort or a softmax chooses along; use dp or fsdp, with {'+'.join(axes)}={layout.count(axes)} as a "
        "data axis"
    )


def _one_array_each(layout: Layout) -> list[str] | None:
    """The names of matrices of one shape that differ by a number, of as many as something is chosen among."""
    found = defaultdict[tuple[str, tuple[int, ...]], dict[int, str]](dict)
    for i in layout.roles.stored:
        name, shape = layout.names[i], layout.program.shapes[layout.program.inputs[i]]
        if len(shape) == 2 and layout.roles.of[i] == PARAMS:
            for at in re.finditer(r"\d+", name):
                found[f"{name[: at.start()]}#{name[at.end() :]}", shape][int(at[0])] = name
    experts = [
        one for one in found.values() if [*one] == [*range(len(one))] and best_of(layout.program, len(one))
    ]
    return [*experts[-1].values()] if experts else None


def _divide_sorted(layout: Layout, axes: Axes) -> None:
    """Experts whose rows each shard of the batch sorts by itself: a matrix of `ragged_dot` for each."""
    weights = [*layout.sorting.weights()]
    n, over = layout.count(axes), "+".join(axes)
    _divide_evenly({layout.program.shapes[v][d] for v, d in weights}, n, over)
    stored = frozenset(layout.storage.of(v)[d] for v, d in weights)
    layout.experts = Experts(axes, frozenset(), stored=stored)
    message = (
        f"ragged_dot: the rows of all {n} devices of {over} are gathered on each, which multiplies those of its own "
        "experts, and come back as a sum, so that none is dropped, however many one expert has."
    )
    layout.findings.append(Finding("experts-sorted", "info", message))


def _taken_apart(layout: Layout) -> str | None:
    """A parameter that the step takes each matrix out of by itself, of as many as something is chosen among."""
    program = layout.program
    parts = Counter(e.ins[0] for e in program.equations if e.primitive.part and e.ins[0] is not None)
    for i in layout.roles.stored:
        shape = program.shapes[program.inputs[i]]
        if len(shape) < 3 or layout.roles.of[i] != PARAMS or best_of(program, shape[0]) is None:
            continue
        same = layout.flow.forward([program.inputs[i]], lambda _v, _w, e: e is None or e.name == "name")
        if sum(parts[v] for v in same) == shape[0]:
            return layout.names[i]
    return None


def _looked_up(layout: Layout) -> str | None:
    """A parameter of which tokens look up the matrices that they choose."""
    program, roles = layout.program, layout.roles
    gathers = (e for e in program.equations if e.name == "gather" and layout.batchy(e.ins[1]))
    looked = [(v, e) for e in gathers if (v := e.ins[0]) is not None]
    for i in roles.stored:
        value = program.inputs[i]
        same = (
            layout.flow.forward([value], by_alias)
            if roles.of[i] == PARAMS and len(program.shapes[value]) > 2
            else ()
        )
        for v, e in ((v, e) for v, e in looked if v in same):
            sizes = (program.shapes[v][d] for d in e.params["dimension_numbers"].start_index_map)
            if any(best_of(program, size) is not None for size in sizes):
                return layout.names[i]
    return None


def _ragged_weights(layout: Layout) -> list[Value]:
    """The parameters of `ragged_dot`: matrices of which each takes the rows of its group."""
    ragged = (
        e for e in layout.program.equations if e.contraction is not None and e.contraction.ragged is not None
    )
    read = (v for e in ragged for v in e.ins[:2] if v is not None and not layout.batchy(v))
    inputs = {i for v in read for i in layout.flow.inputs_behind([v], by_alias)}
    return [layout.program.inputs[i] for i in sorted(inputs) if i in layout.roles.stored]


def _say_ragged(layout: Layout, weights: list[Value], axes: Axes) -> None:
    if weights:
        named = [i for i in layout.roles.stored if layout.program.inputs[i] in weights]
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        message = (
            f"ragged_dot is not divided over experts: its weights, {layout.names[named[0]]}{more}, are whole on every "
            f"device of {'+'.join(axes)} where they are used. {_not_sorted(layout)}"
        )
        layout.findings.append(Finding("experts-ragged", "warning", message))


def _not_sorted(layout: Layout) -> str:
    """Why no device can sort rows by itself."""
    orders = layout.flow.orders
    if not orders.sorts:
        return "Rows would have to be sorted by their expert (jnp.argsort), and looked up in that order."
    mixed = min(orders.lost.values(), default=None)
    if mixed is None:
        return "The sizes of its groups would have to be counted (jnp.bincount) from what rows are sorted by."
    return f"{told(layout.program, mixed)} makes of sorted rows what depends on the places of others'."


def _say_all_tokens(layout: Layout, found: Found, number: int) -> None:
    """Where nothing is dispatched, most of what experts multiply counts for nothing."""
    best = best_of(layout.program, number)
    if found.places or found.shared or best is None or best >= number:
        return
    message = (
        f"All {number} experts work on all tokens, of which each chooses {best}: dispatch (one-hot products, as "
        f"GShard has them) would do {best / number:.0%} of their FLOPs, times what it leaves free of places."
    )
    layout.findings.append(Finding("experts-dense", "info", message))


def _say_shared_places(layout: Layout, found: Found, axes: Axes) -> None:
    if found.shared:
        message = (
            "Experts have places for the tokens of all examples together, so that every device takes all tokens, and "
            f"what experts make of them is added up over {'+'.join((*layout.batch_axes,))}. With places for each "
            f"example, or group, those that are dispatched move alone, by all-to-all over {'+'.join(axes)}."
        )
        layout.findings.append(Finding("experts-ungrouped", "info", message))
