"""Expert parallel: each device has some of the experts, and tokens are sent to the devices of their experts.

Examples are sharded over the expert axes as well, besides the data axes, so everything outside experts is as under data
parallelism. Parameters with a matrix for each expert are sharded by expert and never gathered. All-to-alls move the
tokens dispatched by a one-hot product between a token's device and the expert's (GShard, Lepikhin et al. 2020, section
3.2). Where all experts see all tokens, the tokens are gathered over the expert axes and the results are summed.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from ..errors import ShardError
from ..plan import Finding
from ..program.batching.followed_program import describe_equation
from ..program.experts import ExpertDims as Found
from ..program.experts import ExpertLoop, find_dependent_expert_loop, find_expert_loops, find_experts
from ..program.flow import follow_aliases
from ..program.ir import Equation, Value
from ..program.sort_states import UnknownOrder, has_order
from ..program.source_lines import user_line
from ..program.topk_sites import experts_per_token
from .expert_partition import partition_expert_region
from .layout import Axes, Layout, ShardedExperts


def expert_parallel(layout: Layout, axes: Axes) -> None:
    """Shard the experts over `axes`, with the activations of the equations that work expert by expert.

    Args:
        layout: The layout, filled in place.
        axes: Mesh axes of the strategy.

    Raises:
        ShardError: No dimension counts experts, or the experts do not divide over `axes`.
    """
    ragged = _unsorted_ragged_weights(layout)
    if [*layout.shard_local_sorts.group_weights()]:
        _shard_sorted(layout, axes)
    else:
        _shard_found(layout, axes, bool(ragged))
    _add_ragged_finding(layout, ragged, axes)
    for i in layout.roles.storage_order:
        value = layout.program.inputs[i]
        if layout.placement_source(value):
            continue
        d = next((d for d, has in enumerate(layout.compute_spec(value)) if has == axes), None)
        if d is None:
            layout.reasons[i].append(f"ep: a copy on every device of {'+'.join(axes)}")
        else:
            # Stored as they are used: weights of experts are never gathered.
            layout.storage_class_axes[layout.storage.classes_of(value)[d]] = axes
            layout.reasons[i].append(f"ep: experts, dim {d} over {'+'.join(axes)}")


def _shard_found(layout: Layout, axes: Axes, ragged: bool) -> None:
    experts = find_experts(layout.dims, layout.storage, layout.flow, layout.roles)
    loops = find_expert_loops(layout.dims, layout.flow, layout.roles)
    # Products with unsorted rows are reported in a finding instead (`_add_ragged_finding`).
    if not experts.classes and not ragged and not loops:
        raise ShardError(_describe_missing_experts(layout, axes))
    if experts.classes or loops:
        loop_classes = {layout.dims.classes_of(v)[0] for loop in loops for v in loop.stacked_values}
        trips = {loop.equation.params["length"] for loop in loops}
        experts = replace(experts, classes=experts.classes | loop_classes, counts=experts.counts | trips)
        _check_experts_divide(experts.counts, layout.device_count(axes), "+".join(axes))
        _shard_experts(layout, experts, loops, axes)
        _add_dense_finding(layout, experts)
        _add_shared_capacity_finding(layout, experts, axes)


def _shard_experts(layout: Layout, experts: Found, loops: list[ExpertLoop], axes: Axes) -> None:
    if experts.shared_slots:
        # Any token may take any slot of a capacity shared by all examples, so such a dimension is no batch dimension.
        layout.batch = replace(layout.batch, classes=layout.batch.classes - experts.shared_slots)
        layout.storage = layout.dims.storage_classes(layout.batch.classes | experts.shared_slots)
    weights = {layout.program.inputs[i] for i in experts.weights}
    weights |= {v for loop in loops for v in loop.stacked_values if not layout.is_activation(v)}
    stored = frozenset(sc for value in weights for sc in _expert_storage_classes(layout, value, experts.classes))
    inside = [e for loop in loops for e in loop.equation.nested()]
    loop_values = {v for e in inside for v in e.results} | {v for loop in loops for v in loop.sub_jaxpr.inputs}
    loop_values |= {v for e in inside for body in e.bodies for v in body.sub_jaxpr.inputs}
    sharded = ShardedExperts(
        axes,
        experts.classes,
        experts.counts,
        experts.group_slots,
        experts.shared_slots,
        stored,
        equations=frozenset(e.index for e in inside),
        activations=frozenset(filter(layout.is_activation, loop_values)),
        loops={loop.equation.index: loop for loop in loops},
        loop_equations=frozenset(e.index for e in inside),
    )
    layout.experts = partition_expert_region(layout, sharded)


def _expert_storage_classes(layout: Layout, value: Value, classes: frozenset[int]) -> Iterable[int]:
    """Return the storage classes of the dimensions of a parameter that count experts."""
    pairs = zip(layout.storage.classes_of(value), layout.dims.classes_of(value), strict=True)
    return (sc for sc, c in pairs if c in classes)


def _check_experts_divide(counts: Set[int], n: int, over: str) -> None:
    sizes = sorted(counts)
    odd = [z for z in sizes if z % n]
    if odd:
        fitting = [m for m in range(n - 1, 1, -1) if all(z % m == 0 for z in sizes)]
        near = [m for m in (odd[0] // n * n, odd[0] // n * n + n) if m]
        hint = f"{over}={fitting[0]} would divide" if fitting else "use dp or fsdp"
        hint += f"; with {over}={n}, {' or '.join(map(str, near))} experts would"
        raise ShardError(f"ep: {odd[0]} experts do not divide by {over}={n}; {hint}")


def _describe_missing_experts(layout: Layout, axes: Axes) -> str:
    if (name := _sliced_parameter(layout)) is not None:
        return (
            f"ep: {name} is taken apart expert by expert in Python ({name.rpartition('.')[2]}[0], ...), and what is "
            "made of its parts is not put together again by a sum, masks or jnp.stack, each with its own part of what "
            "was chosen (gates[..., 0], chosen == 0); go through the experts with lax.scan, lax.map or jax.vmap"
        )
    if (names := _separate_matrices(layout)) is not None:
        return (
            f"ep: {names[0]} to {names[-1]} are {len(names)} arrays, one for each expert, and ep divides arrays by "
            "their dimensions; stack them, jax.tree.map(lambda *each: jnp.stack(each), *experts), and take w[0], w[1], "
            "... of that in the step (in Flax: nn.vmap, nnx.vmap)"
        )
    if (name := _gathered_parameter(layout)) is not None:
        return (
            f"ep: {name} is looked up for each token ({name.rpartition('.')[2]}[chosen]), which makes each a matrix of "
            "its own, that not only products read; multiply with it (jnp.einsum, @), sort the tokens by expert for "
            "jax.lax.ragged_dot, or have all experts work on all tokens (jax.vmap, lax.scan) and take what is chosen "
            "of the results"
        )
    if (loop := find_dependent_expert_loop(layout.dims, layout.flow, layout.roles)) is not None:
        at = user_line(loop.jaxpr_eqn) or "in a library"
        return (
            f"ep: the loop over {loop.params['length']} experts ({at}) hands on from one to the next what is no sum of "
            "what they make; add that up, zero for tokens that did not choose an expert "
            "(out + jnp.where(mask, made, 0)), or stack it"
        )
    return (
        "ep found no experts in this step: no parameter has, beside the two dimensions of a matrix, one that top_k, "
        "argmax, a sort or a softmax chooses along; use dp or fsdp, with "
        f"{'+'.join(axes)}={layout.device_count(axes)} as a "
        "data axis"
    )


def _separate_matrices(layout: Layout) -> list[str] | None:
    """Return the names of separate matrices with one shape and names differing by a number, as many as a router chooses
    among."""
    names_by_pattern = defaultdict[tuple[str, tuple[int, ...]], dict[int, str]](dict)
    for i in layout.roles.storage_order:
        name, shape = layout.input_names[i], layout.program.shapes[layout.program.inputs[i]]
        if len(shape) == 2 and i in layout.roles.weights:
            # Names may have several numbers (`layers.0.experts.3.w`): any of them may be the expert's.
            for match in re.finditer(r"\d+", name):
                names_by_pattern[f"{name[: match.start()]}#{name[match.end() :]}", shape][int(match[0])] = name
    experts = [
        names_by_number
        for names_by_number in names_by_pattern.values()
        if {*names_by_number} == {*range(len(names_by_number))}
        and experts_per_token(layout.program, len(names_by_number))
    ]
    return [experts[-1][number] for number in sorted(experts[-1])] if experts else None


def _shard_sorted(layout: Layout, axes: Axes) -> None:
    """Shard experts with rows sorted by each batch shard: `ragged_dot` weights with a matrix for each expert."""
    weights = [*layout.shard_local_sorts.group_weights()]
    n, over = layout.device_count(axes), "+".join(axes)
    numbers = frozenset(layout.program.shapes[v][d] for v, d in weights)
    _check_experts_divide(numbers, n, over)
    stored = frozenset(layout.storage.classes_of(v)[d] for v, d in weights)
    # No dimension class: in sorted rows the experts follow one another along a single dimension.
    layout.experts = ShardedExperts(axes, frozenset(), numbers, weight_classes=stored)
    message = (
        f"ragged_dot: the rows of all {n} devices of {over} are gathered on each, which multiplies those of its own "
        "experts, and come back as a sum, so that none is dropped, however many one expert has."
    )
    layout.findings.append(Finding("experts-sorted", "info", message))
    _add_unsharded_finding(layout, axes)


def _add_unsharded_finding(layout: Layout, axes: Axes) -> None:
    """Warn of experts in another form than sorted rows: they stay whole."""
    loops = find_expert_loops(layout.dims, layout.flow, layout.roles)
    expert_inputs = layout.flow.input_ancestors([v for loop in loops for v in loop.stacked_values], follow_aliases)
    expert_inputs |= {*find_experts(layout.dims, layout.storage, layout.flow, layout.roles).weights}
    whole = [
        i
        for i in layout.roles.storage_order
        if i in expert_inputs and not any(layout.compute_spec(layout.program.inputs[i]))
    ]
    if whole:
        more = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
        message = (
            f"Beside experts of ragged_dot ep divides no others: {layout.input_names[whole[0]]}{more} are "
            "whole on every "
            f"device of {'+'.join(axes)}. Written alike, all of them would be divided."
        )
        layout.findings.append(Finding("experts-beside", "warning", message))


def _sliced_parameter(layout: Layout) -> str | None:
    """Return the name of a parameter sliced into single matrices, as many as a router chooses among; None without
    such."""
    program = layout.program
    slice_counts = Counter(
        e.operands[0] for e in program.equations if e.primitive.selects_elements and e.operands[0] is not None
    )
    for i in layout.roles.storage_order:
        shape = program.shapes[program.inputs[i]]
        if len(shape) < 3 or i not in layout.roles.weights or experts_per_token(program, shape[0]) is None:
            continue
        aliases = layout.flow.descendants([program.inputs[i]], lambda _v, _w, e: e is None or e.primitive.names_value)
        if sum(slice_counts[v] for v in aliases) == shape[0]:
            return layout.input_names[i]
    return None


def _gathered_parameter(layout: Layout) -> str | None:
    """Return the name of a parameter from which each token looks up the matrices it chose; None without such."""
    program, roles = layout.program, layout.roles
    gathers = (e for e in program.equations if e.primitive.is_gather and layout.is_activation(e.operands[1]))
    tables = [(v, e) for e in gathers if (v := e.operands[0]) is not None]
    for i in roles.storage_order:
        value = program.inputs[i]
        # A row looked up in a table of two dimensions, such as an embedding, is no matrix.
        aliases = (
            layout.flow.descendants([value], follow_aliases)
            if i in roles.weights and len(program.shapes[value]) > 2
            else ()
        )
        for v, e in ((v, e) for v, e in tables if v in aliases):
            sizes = (program.shapes[v][d] for d in e.params["dimension_numbers"].start_index_map)
            if any(experts_per_token(program, size) is not None for size in sizes):
                return layout.input_names[i]
    return None


def _unsorted_ragged_weights(layout: Layout) -> dict[int, Equation]:
    """Return the `ragged_dot` parameters with rows not sorted by each device, by input, each with its first product."""
    products, sorted_products = (dict[int, Equation](), {e.index for e in layout.shard_local_sorts.group_products()})
    for e in layout.program.equations:
        if e.contraction is None or e.contraction.ragged_dim is None or e.index in sorted_products:
            continue
        for v in e.operands[:2]:
            if v is not None and not layout.is_activation(v):
                weight_inputs = layout.flow.input_ancestors([v], follow_aliases)
                products |= {i: products.get(i, e) for i in sorted(weight_inputs) if i in layout.roles.storage_order}
    return products


def _add_ragged_finding(layout: Layout, weights: Mapping[int, Equation], axes: Axes) -> None:
    by_cause = defaultdict[str, list[int]](list)
    for i, e in weights.items():
        by_cause[_describe_unsorted_rows(layout, e)].append(i)
    for cause, inputs in by_cause.items():
        more = f" and {len(inputs) - 1} more" if len(inputs) > 1 else ""
        message = (
            f"ragged_dot is not divided over experts: its weights, {layout.input_names[inputs[0]]}{more}, "
            "are whole on every "
            f"device of {'+'.join(axes)} where they are used. {cause}"
        )
        layout.findings.append(Finding("experts-ragged", "warning", message))


def _describe_unsorted_rows(layout: Layout, e: Equation) -> str:
    """Describe why devices cannot sort the rows of the grouped product `e` by themselves."""
    orders, rows = layout.flow.sort_analysis, e.operands[0]
    state = None if rows is None else orders.states.get(rows)
    if rows is None or not has_order(state):
        return "Its rows would have to be sorted by their expert (jnp.argsort), and looked up in that order."
    order = orders.order_of(rows)
    if (
        order is not None
        and e.index not in orders.grouped_products
        and not orders.is_sorted_by_group(order, e.operands[2])
    ):
        return (
            f"The sizes of the groups of {describe_equation(layout.program, e.index)} would have to be "
            "counted (jnp.bincount) from "
            "what its rows are sorted by, and that be what top_k or argmax gave."
        )
    lost_at = None if order is None else orders.lost_at.get(order)
    outs = () if lost_at is None else layout.program.equations[lost_at].results
    if lost_at is not None and not any(isinstance(orders.states.get(v), UnknownOrder) for v in outs):
        whose = "makes sorted rows that the step returns" if outs else "shows sorted rows"
        return f"{describe_equation(layout.program, lost_at)} {whose}, in the order of all of them."
    mixed = _first_order_dependent(layout, [rows] if order is None else outs)
    if mixed is None:
        return "Rows, or the sizes of their groups, are not made example by example, so that no device has its own."
    cause = layout.program.equations[mixed]
    # Unsorted rows from an earlier grouped product: report the cause at that product.
    if cause is not e and cause.contraction is not None and cause.contraction.ragged_dim is not None:
        return _describe_unsorted_rows(layout, cause)
    return f"{describe_equation(layout.program, mixed)} makes of sorted rows what depends on the places of others'."


def _first_order_dependent(layout: Layout, values: Iterable[Value]) -> int | None:
    """Return the first equation behind `values`, by index, with rows that depend on the order of other rows."""
    maker, states = layout.program.producer, layout.flow.sort_analysis.states
    mixed = {v for v in layout.flow.ancestors(values) if isinstance(states.get(v), UnknownOrder)}
    producers = (maker[v] for v in mixed if v in maker)
    # Where the order is lost first, the operands still have a known one.
    return min((e.index for e in producers if mixed.isdisjoint(e.operands)), default=None)


def _add_dense_finding(layout: Layout, experts: Found) -> None:
    """Add a finding where nothing is dispatched: most products of experts with tokens are then discarded."""
    for number in sorted(experts.counts if not experts.group_slots | experts.shared_slots else ()):
        chosen_count = experts_per_token(layout.program, number)
        if chosen_count is None or chosen_count >= number:
            continue
        message = (
            f"All {number} experts work on all tokens, of which each chooses {chosen_count}: dispatch "
            "(one-hot products, as "
            f"GShard has them) would do {chosen_count / number:.0%} of their FLOPs, times what it leaves "
            "free of places."
        )
        layout.findings.append(Finding("experts-dense", "info", message))


def _add_shared_capacity_finding(layout: Layout, experts: Found, axes: Axes) -> None:
    if experts.shared_slots:
        message = (
            "Experts have places for the tokens of all examples together, so that every device takes all tokens, and "
            f"what experts make of them is added up over {'+'.join((*layout.batch_axes,))}. With places for each "
            f"example, or group, those that are dispatched move alone, by all-to-all over {'+'.join(axes)}."
        )
        layout.findings.append(Finding("experts-ungrouped", "info", message))
