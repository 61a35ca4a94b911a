"""Expert parallel: each device has some of the experts, and tokens go to the devices that have theirs.

Examples are divided over the expert axes as well, beside the data axes, so that what is no expert's is as under data
parallelism. Parameters with a matrix for each expert are divided by expert and never gathered: between the tokens of a
device and those of its experts all-to-alls move what a one-hot product dispatched (GShard, Lepikhin et al. 2020,
section 3.2). Where all experts see all tokens, these are gathered over the expert axes, and results added up.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from ..errors import ShardError
from ..plan import Finding
from ..program.batching.follow import told
from ..program.expert_loops import ExpertLoop, find_expert_loops, find_handed_on
from ..program.experts import Experts as Found
from ..program.experts import find_experts
from ..program.flow import by_alias
from ..program.ir import Equation, Value
from ..program.lines import users_line
from ..program.order_states import Mixed, ordered
from ..program.rankings import best_of
from ..program.roles import PARAMS
from .layout import Axes, Experts, Layout
from .sides import take_sides


def expert_parallel(layout: Layout, axes: Axes) -> None:
    """Divide the experts over `axes`, with what the step's equations that work expert by expert make.

    Raises `ShardError` where no dimension counts experts, or where they do not divide.
    """
    ragged = _ragged_weights(layout)
    if [*layout.sorting.weights()]:
        _divide_sorted(layout, axes)
    else:
        _divide_found(layout, axes, bool(ragged))
    _say_ragged(layout, ragged, axes)
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


def _divide_found(layout: Layout, axes: Axes, ragged: bool) -> None:
    found = find_experts(layout.dims, layout.storage, layout.flow, layout.roles)
    loops = find_expert_loops(layout.dims, layout.flow, layout.roles)
    if not found.classes and not ragged and not loops:
        raise ShardError(_no_experts(layout, axes))
    if found.classes or loops:
        stepped = {layout.dims.of(v)[0] for loop in loops for v in loop.stacks}
        trips = {loop.equation.params["length"] for loop in loops}
        found = replace(found, classes=found.classes | stepped, numbers=found.numbers | trips)
        _divide_evenly(found.numbers, layout.count(axes), "+".join(axes))
        _divide(layout, found, loops, axes)
        _say_all_tokens(layout, found)
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
        found.numbers,
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


def _divide_evenly(counts: Set[int], n: int, over: str) -> None:
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
            "made of its parts is not put together again by a sum, masks or jnp.stack, each with its own part of what "
            "was chosen (gates[..., 0], chosen == 0); go through the experts with lax.scan, lax.map or jax.vmap"
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
    if (loop := find_handed_on(layout.dims, layout.flow, layout.roles)) is not None:
        at = users_line(loop.eqn) or "in a library"
        return (
            f"ep: the loop over {loop.params['length']} experts ({at}) hands on from one to the next what is no sum of "
            "what they make; add that up, zero for tokens that did not choose an expert "
            "(out + jnp.where(mask, made, 0)), or stack it"
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
        one for one in found.values() if {*one} == {*range(len(one))} and best_of(layout.program, len(one))
    ]
    return [experts[-1][number] for number in sorted(experts[-1])] if experts else None


def _divide_sorted(layout: Layout, axes: Axes) -> None:
    """Experts whose rows each shard of the batch sorts by itself: a matrix of `ragged_dot` for each."""
    weights = [*layout.sorting.weights()]
    n, over = layout.count(axes), "+".join(axes)
    numbers = frozenset(layout.program.shapes[v][d] for v, d in weights)
    _divide_evenly(numbers, n, over)
    stored = frozenset(layout.storage.of(v)[d] for v, d in weights)
    layout.experts = Experts(axes, frozenset(), numbers, stored=stored)
    message = (
        f"ragged_dot: the rows of all {n} devices of {over} are gathered on each, which multiplies those of its own "
        "experts, and come back as a sum, so that none is dropped, however many one expert has."
    )
    layout.findings.append(Finding("experts-sorted", "info", message))
    _say_beside(layout, axes)


def _say_beside(layout: Layout, axes: Axes) -> None:
    """Experts in another form than those whose rows are sorted stay whole."""
    loops = find_expert_loops(layout.dims, layout.flow, layout.roles)
    behind = layout.flow.inputs_behind([v for loop in loops for v in loop.stacks], by_alias)
    behind |= {*find_experts(layout.dims, layout.storage, layout.flow, layout.roles).weights}
    whole = [
        i for i in layout.roles.stored if i in behind and not any(layout.in_use(layout.program.inputs[i]))
    ]
    if whole:
        more = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
        message = (
            f"Beside experts of ragged_dot ep divides no others: {layout.names[whole[0]]}{more} are whole on every "
            f"device of {'+'.join(axes)}. Written alike, all of them would be divided."
        )
        layout.findings.append(Finding("experts-beside", "warning", message))


def _taken_apart(layout: Layout) -> str | None:
    """A parameter that the step takes each matrix out of by itself, of as many as something is chosen among."""
    program = layout.program
    parts = Counter(e.ins[0] for e in program.equations if e.primitive.part and e.ins[0] is not None)
    for i in layout.roles.stored:
        shape = program.shapes[program.inputs[i]]
        if len(shape) < 3 or layout.roles.of[i] != PARAMS or best_of(program, shape[0]) is None:
            continue
        same = layout.flow.forward(
            [program.inputs[i]], lambda _v, _w, e: e is None or e.primitive.names_value
        )
        if sum(parts[v] for v in same) == shape[0]:
            return layout.names[i]
    return None


def _looked_up(layout: Layout) -> str | None:
    """A parameter of which tokens look up the matrices that they choose."""
    program, roles = layout.program, layout.roles
    gathers = (e for e in program.equations if e.primitive.gathers and layout.batchy(e.ins[1]))
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


def _ragged_weights(layout: Layout) -> dict[int, Equation]:
    """The parameters of `ragged_dot` whose rows no device sorts by itself, by input, each with the first such product:
    matrices of which each takes the rows of its group."""
    found, divided = dict[int, Equation](), {e.index for e in layout.sorting.products()}
    for e in layout.program.equations:
        if e.contraction is None or e.contraction.ragged is None or e.index in divided:
            continue
        for v in e.ins[:2]:
            if v is not None and not layout.batchy(v):
                behind = layout.flow.inputs_behind([v], by_alias)
                found |= {i: found.get(i, e) for i in sorted(behind) if i in layout.roles.stored}
    return found


def _say_ragged(layout: Layout, weights: Mapping[int, Equation], axes: Axes) -> None:
    by_cause = defaultdict[str, list[int]](list)
    for i, e in weights.items():
        by_cause[_not_sorted(layout, e)].append(i)
    for cause, inputs in by_cause.items():
        more = f" and {len(inputs) - 1} more" if len(inputs) > 1 else ""
        message = (
            f"ragged_dot is not divided over experts: its weights, {layout.names[inputs[0]]}{more}, are whole on every "
            f"device of {'+'.join(axes)} where they are used. {cause}"
        )
        layout.findings.append(Finding("experts-ragged", "warning", message))


def _not_sorted(layout: Layout, e: Equation) -> str:
    """Why no device can sort the rows of a product of groups by itself."""
    orders, rows = layout.flow.orders, e.ins[0]
    state = None if rows is None else orders.of.get(rows)
    if rows is None or not ordered(state):
        return "Its rows would have to be sorted by their expert (jnp.argsort), and looked up in that order."
    order = orders.sorted_by(rows)
    if order is not None and e.index not in orders.products and not orders.by_group(order, e.ins[2]):
        return (
            f"The sizes of the groups of {told(layout.program, e.index)} would have to be counted (jnp.bincount) from "
            "what its rows are sorted by, and that be what top_k or argmax gave."
        )
    lost = None if order is None else orders.lost.get(order)
    outs = () if lost is None else layout.program.equations[lost].outs
    if lost is not None and not any(isinstance(orders.of.get(v), Mixed) for v in outs):
        whose = "makes sorted rows that the step returns" if outs else "shows sorted rows"
        return f"{told(layout.program, lost)} {whose}, in the order of all of them."
    mixed = _first_mixed(layout, [rows] if order is None else outs)
    if mixed is None:
        return "Rows, or the sizes of their groups, are not made example by example, so that no device has its own."
    by = layout.program.equations[mixed]
    if by is not e and by.contraction is not None and by.contraction.ragged is not None:
        return _not_sorted(layout, by)
    return f"{told(layout.program, mixed)} makes of sorted rows what depends on the places of others'."


def _first_mixed(layout: Layout, values: Iterable[Value]) -> int | None:
    """The first equation, of those that certain values are made by, whose rows depend on the order of others."""
    maker, states = layout.program.maker, layout.flow.orders.of
    mixed = {v for v in layout.flow.back(values) if isinstance(states.get(v), Mixed)}
    made = (maker[v] for v in mixed if v in maker)
    return min((e.index for e in made if mixed.isdisjoint(e.ins)), default=None)


def _say_all_tokens(layout: Layout, found: Found) -> None:
    """Where nothing is dispatched, most of what experts multiply counts for nothing."""
    for number in sorted(found.numbers if not found.places | found.shared else ()):
        best = best_of(layout.program, number)
        if best is None or best >= number:
            continue
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
