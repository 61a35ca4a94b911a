"""Checks and findings of a plan: about the batch, and about lost results.

- The batch: divisibility, a guessed batch dimension, and data whole on every device.
- Lost results: a step returns nothing, or nothing made of the gradients.
"""

from collections.abc import Iterator, Sequence

from ..errors import ShardError
from ..plan import Finding
from ..program.batching.followed_program import describe_equation
from ..program.facts import Facts
from ..program.flow import Flow, follow_aliases
from ..program.roles import BATCH, PARAMS
from ..program.source_lines import user_line
from ..program.trace import Traced, path_name
from .layout import Layout, dim_spec_text


def check_examples_divide(traced: Traced, layout: Layout, *, can_pad: bool) -> None:
    """Refuse examples that do not divide over the batch axes.

    Args:
        traced: The step.
        layout: The layout, with its batch and batch axes.
        can_pad: Whether `--pad` could add rows to the batch.

    Raises:
        ShardError: The examples do not divide. The message names batch sizes that would.
    """
    if layout.batch.size is None or layout.batch.size % layout.device_count(layout.batch_axes) == 0:
        return
    for i, d, size in _indivisible_dims(layout):
        over, add = _describe_batch_axes(layout), "--pad, which adds rows, " * can_pad
        hint, option = _hint_of_earlier_dim(traced, layout, i, d)
        raise ShardError(
            f"{path_name(traced.in_paths[i])} has {size} examples (dim {d}), which do not divide by {over}; "
            f"use a batch of {' or '.join(map(str, _divisible_sizes(layout, size)))}, {add}or a mesh "
            f"whose {over.split('=')[0]} divides {size}{hint}",
            fix=option or ("--pad" if can_pad else None),
        )


def _hint_of_earlier_dim(traced: Traced, layout: Layout, i: int, dim: int) -> tuple[str, str | None]:
    """Return a hint about a divisible dimension of input `i` before `dim`, and the option that makes it the batch
    dimension.

    Where a step mixes the rows of the leading dimension, the analysis took another dimension for the examples. ("",
    None) without such a dimension.
    """
    shape, axes = traced.closed.in_avals[i].shape, layout.batch_axes
    fits = (d for d in range(dim) if shape[d] > 1 and shape[d] % layout.device_count(axes) == 0)
    if i < len(traced.consts) or (d := next(fits, None)) is None:
        return "", None
    option = f'--spec "{path_name(traced.in_paths[i])}={dim_spec_text(d, axes)}"'
    return f"; if dim {d} ({shape[d]}) are the examples, say {option}", option


def batch_findings(traced: Traced, layout: Layout) -> Iterator[Finding]:
    """Yield findings about how the batch was found and sharded."""
    batch, axis = layout.batch, layout.batch_axes[0]
    if not batch.classes:
        yield _no_batch_finding(traced, layout, axis)
        return
    if not batch.unambiguous and batch.input_dims:
        i = next((i for i in sorted(batch.input_dims) if i >= len(traced.consts)), min(batch.input_dims))
        name, dim, shape = (path_name(traced.in_paths[i]), batch.input_dims[i][0], traced.closed.in_avals[i].shape)
        message = (
            f"The batch is taken to be dim {dim} of {name} ({_size(layout, i, dim)}); another dimension would do "
            "nearly as well. The numbers are the same either way, what moves is not."
        )
        next_one = dim + 1 < len(shape) and shape[dim + 1] % layout.device_count(layout.batch_axes) == 0
        fix = f'--spec "{name}={dim_spec_text(dim + 1, [axis])}"' if next_one and i >= len(traced.consts) else None
        yield Finding("batch-guess", "info", message, fix)
    if batch.joining_equation is not None:
        yield from _joined_rows_findings(traced, layout, batch.joining_equation)
    yield from _whole_rows_finding(traced, layout)


def _no_batch_finding(traced: Traced, layout: Layout, axis: str) -> Finding:
    message = "No batch dimension was found, so every device works on all examples."
    first, shapes = len(traced.consts), [tuple(aval.shape) for aval in traced.closed.in_avals]
    data = [i for i, role in enumerate(layout.roles.by_input) if role == BATCH and shapes[i]]
    fitting = (i for i in data if i >= first and shapes[i][0] % layout.mesh.shape[axis] == 0)
    i = next(fitting, None)
    if i is not None:
        fix = f'--spec "{path_name(traced.in_paths[i])}={dim_spec_text(0, [axis])}"'
        return Finding("no-batch", "warning", message, fix)
    if data and data[0] < first:
        message += " The step closes over its data: what it is given as an argument can be divided."
    else:
        message += f" None of its arguments is data that divides by {axis}={layout.mesh.shape[axis]}."
    return Finding("no-batch", "warning", message)


def _joined_rows_findings(traced: Traced, layout: Layout, joined: int) -> Iterator[Finding]:
    """Yield findings about rows that are no independent examples, and about such rows that do not divide."""
    found = ((i, d) for i, ds in layout.batch.input_dims.items() for d in ds)
    for i, d in [next(found, (0, 0))] * bool(layout.batch.input_dims):
        message = (
            f"The {_size(layout, i, d)} rows of {path_name(traced.in_paths[i])} are no examples by themselves: they "
            f"are made of each other ({describe_equation(layout.program, joined)}). What is read of other "
            "devices' rows is gathered."
        )
        yield Finding("rows-joined", "info", message)
    for i, _, size in _indivisible_dims(layout):
        name = path_name(traced.in_paths[i])
        message = (
            f"{name} has {size} rows, which do not divide by {_describe_batch_axes(layout)}: they are "
            "whole on every device, and so "
            f"is the work on them. Of {_divisible_sizes(layout, size)[-1]} rows each device would have a part."
        )
        yield Finding("rows-odd", "warning", message)
        return


def _whole_rows_finding(traced: Traced, layout: Layout) -> Iterator[Finding]:
    """Yield a finding about arguments with as many rows as the batch and no evidence of being its rows.

    Features of a weight are left out: statistics of a batch norm have a number for each feature.
    """
    batch, roles = layout.batch, layout.roles
    inputs, shapes = layout.program.inputs, layout.program.shapes
    sizes = {_size(layout, i, d) for i, ds in batch.input_dims.items() for d in ds if d == 0}
    # The last dimension of a raw PRNG key (uint32[..., 2]) has the words of a key, not rows.
    rows = {
        i: shapes[inputs[i]][: -1 if roles.is_raw_key(layout.program, i) else None]
        for i in roles.data | roles.random_keys
    }
    whole = [i for i, shape in sorted(rows.items()) if shape and shape[0] in sizes and i not in batch.input_dims]
    # The size alone is weak evidence: the statistics of a batch norm, with a number for each feature, may have it by
    # chance.
    features = {c for i in roles.weights for c in layout.dims.classes_of(inputs[i])}
    whole = [i for i in whole if i >= len(traced.consts) and layout.dims.classes_of(inputs[i])[0] not in features]
    if not whole:
        return
    name, count = path_name(traced.in_paths[whole[0]]), rows[whole[0]][0]
    more, have = (f" and {len(whole) - 1} more", "have") if len(whole) > 1 else ("", "has")
    message = (
        f"{name}{more} {have} {count} rows, as the batch has, and nothing in the step shows that they are the same: a "
        "copy on every device."
    )
    yield Finding("rows-whole", "info", message, _spec_options(traced, layout, whole))


def _spec_options(traced: Traced, layout: Layout, more_inputs: Sequence[int]) -> str:
    """Return `--spec` options that shard `more_inputs` as well as the examples.

    All inputs with examples are listed, because options given replace the analysis.
    """
    # Options replace the analysis, so that what it has found must be named as well.
    dims_by_input = {i: ds[0] for i, ds in layout.batch.input_dims.items() if i >= len(traced.consts)} | dict.fromkeys(
        more_inputs, 0
    )
    roots: dict[str, set[int]] = {}
    for i, path in enumerate(traced.in_paths):
        roots.setdefault(path_name(path[:1]), set()).add(i)
    specs: dict[str, int] = {}
    for i, d in dims_by_input.items():
        path = traced.in_paths[i]
        leaves = roots[path_name(path[:1])]
        whole = all(dims_by_input.get(j) == d for j in leaves)
        specs[path_name(path[:1] if whole else path)] = d
    return " ".join(f'--spec "{name}={dim_spec_text(d, layout.batch_axes)}"' for name, d in specs.items())


def _indivisible_dims(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """Yield (input, dimension, size) for batch dimensions that do not divide over the batch axes."""
    n = layout.device_count(layout.batch_axes)
    sizes = ((i, d, _size(layout, i, d)) for i, ds in sorted(layout.batch.input_dims.items()) for d in ds)
    return ((i, d, size) for i, d, size in sizes if size % n)


def _size(layout: Layout, i: int, d: int) -> int:
    return layout.program.shapes[layout.program.inputs[i]][d]


def _describe_batch_axes(layout: Layout) -> str:
    return " ".join(f"{a}={layout.mesh.shape[a]}" for a in layout.batch_axes)


def _divisible_sizes(layout: Layout, size: int) -> list[int]:
    """Return the divisible sizes next to `size`."""
    n = layout.device_count(layout.batch_axes)
    return [m for m in dict.fromkeys((size // n * n, -(-size // n) * n)) if m]


def returns_nothing(flow: Flow) -> bool:
    """Return whether all outputs of a step are unchanged inputs and the step has no effect such as printing or a
    callback."""
    hops = (e for v in flow.ancestors(flow.program.outputs, follow_aliases) for _, e in flow.predecessors[v])
    computed = any(e is not None and not e.primitive.alias for e in hops)
    # JAX runs equations with effects even if nothing reads their results.
    return not computed and not any(e.jaxpr_eqn.effects for e in flow.program.equations)


def returns_nothing_message(traced: Traced, flow: Flow) -> str:
    """Return the message for a step that returns nothing it computes."""
    what = f"the loss and {_gradient_text(traced, flow)} are" if flow.gradients else "what it computes is"
    return (
        f"The step returns nothing that it computes, so that JAX leaves all of it out: {what} lost. Let it return what "
        "it makes, as in 'return new_params, loss'."
    )


def result_findings(facts: Facts) -> Iterator[Finding]:
    """Warn of a step that computes nothing it returns, and of gradients without a use."""
    flow, roles = facts.flow, facts.roles
    if returns_nothing(flow):
        yield Finding("returns-nothing", "warning", returns_nothing_message(facts.traced, flow))
    elif flow.gradients and flow.gradients.isdisjoint(flow.live_values):
        changes = ", and no parameter changes" if PARAMS in roles.by_input else ""
        message = (
            f"The step returns nothing that is made of {_gradient_text(facts.traced, flow)}: JAX leaves "
            f"that out{changes}. "
            "Let it return the new parameters, too."
        )
        yield Finding("gradients-unused", "warning", message)


def _gradient_text(traced: Traced, flow: Flow) -> str:
    """Return the gradient as text, such as `the gradient of params.w and 5 more (cell [3], line 4)`."""
    marked = flow.differentiation_marks
    inputs = sorted(flow.input_ancestors((v for e in marked for v in e.operands), follow_aliases))
    names = [path_name(traced.in_paths[i]) for i in inputs]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    of = f" of {names[0]}{more}" if names else ""
    line = next((line for e in marked if (line := user_line(e.jaxpr_eqn)) is not None), None)
    return f"the gradient{of}" + ("" if line is None else f" ({line})")
