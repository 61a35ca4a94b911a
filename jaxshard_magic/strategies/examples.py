"""What is said of the batch: that it divides, or does not; where it was guessed; what of it every device has whole."""

from collections.abc import Iterator, Sequence

from ..errors import ShardError
from ..plan import Finding
from ..program.batching.follow import told
from ..program.roles import BATCH, PARAMS
from ..program.trace import Traced, path_name
from .layout import Layout


def examples_divide(traced: Traced, layout: Layout, *, pads: bool) -> None:
    """Refuse examples that don't divide over the batch axes, with the sizes that would. `pads`: whether rows could be
    added to them."""
    if layout.batch.size is None or layout.batch.size % layout.count(layout.batch_axes) == 0:
        return
    for i, d, size in _odd(layout):
        over, add = _over(layout), "--pad, which adds rows, " * pads
        told, named = _dimension_before(traced, layout, i, d)
        raise ShardError(
            f"{path_name(traced.in_paths[i])} has {size} examples (dim {d}), which do not divide by {over}; "
            f"use a batch of {' or '.join(map(str, _near(layout, size)))}, {add}or a mesh "
            f"whose {over.split('=')[0]} divides {size}{told}",
            fix=named or ("--pad" if pads else None),
        )


def _dimension_before(traced: Traced, layout: Layout, i: int, dim: int) -> tuple[str, str | None]:
    """Return what to say of a dimension of input i before `dim` that divides, and the option that takes it for the
    examples: where a step mixes its rows, those of another dimension were taken."""
    shape, axes = traced.closed.in_avals[i].shape, layout.batch_axes
    fits = (d for d in range(dim) if shape[d] > 1 and shape[d] % layout.count(axes) == 0)
    if i < len(traced.consts) or (d := next(fits, None)) is None:
        return "", None
    over = repr(axes[0]) if len(axes) == 1 else str(axes)
    option = f'--spec "{path_name(traced.in_paths[i])}=P({"None, " * d}{over})"'
    return f"; if dim {d} ({shape[d]}) are the examples, say {option}", option


def about_the_batch(traced: Traced, layout: Layout) -> Iterator[Finding]:
    """What the user should know of how the batch was found and divided."""
    batch, axis = layout.batch, layout.batch_axes[0]
    if not batch.classes:
        yield _no_batch(traced, layout, axis)
        return
    if not batch.clear and batch.dims:
        i = next((i for i in sorted(batch.dims) if i >= len(traced.consts)), min(batch.dims))
        name, dim, shape = path_name(traced.in_paths[i]), batch.dims[i][0], traced.closed.in_avals[i].shape
        message = (
            f"The batch is taken to be dim {dim} of {name} ({_size(layout, i, dim)}); another dimension would do "
            "nearly as well. The numbers are the same either way, what moves is not."
        )
        next_one = dim + 1 < len(shape) and shape[dim + 1] % layout.count(layout.batch_axes) == 0
        other = ", ".join(["None"] * (dim + 1)) + f", '{axis}'"
        fix = f'--spec "{name}=P({other})"' if next_one and i >= len(traced.consts) else None
        yield Finding("batch-guess", "info", message, fix)
    if batch.joined is not None:
        yield from _about_joined_rows(traced, layout, batch.joined)
    yield from _about_whole_rows(traced, layout)


def _no_batch(traced: Traced, layout: Layout, axis: str) -> Finding:
    message = "No batch dimension was found, so every device works on all examples."
    first, shapes = len(traced.consts), [tuple(aval.shape) for aval in traced.closed.in_avals]
    data = [i for i, role in enumerate(layout.roles.of) if role == BATCH and shapes[i]]
    fitting = (i for i in data if i >= first and shapes[i][0] % layout.mesh.shape[axis] == 0)
    i = next(fitting, None)
    if i is not None:
        fix = f"--spec \"{path_name(traced.in_paths[i])}=P('{axis}')\""
        return Finding("no-batch", "warning", message, fix)
    if data and data[0] < first:
        message += " The step closes over its data: what it is given as an argument can be divided."
    else:
        message += f" None of its arguments is data that divides by {axis}={layout.mesh.shape[axis]}."
    return Finding("no-batch", "warning", message)


def _about_joined_rows(traced: Traced, layout: Layout, joined: int) -> Iterator[Finding]:
    """Rows that are no examples, and those of them that do not divide."""
    found = ((i, d) for i, ds in layout.batch.dims.items() for d in ds)
    for i, d in [next(found, (0, 0))] * bool(layout.batch.dims):
        message = (
            f"The {_size(layout, i, d)} rows of {path_name(traced.in_paths[i])} are no examples by themselves: they "
            f"are made of each other ({told(layout.program, joined)}). What is read of other devices' rows is gathered."
        )
        yield Finding("rows-joined", "info", message)
    for i, _, size in _odd(layout):
        name = path_name(traced.in_paths[i])
        message = (
            f"{name} has {size} rows, which do not divide by {_over(layout)}: they are whole on every device, and so "
            f"is the work on them. Of {_near(layout, size)[-1]} rows each device would have a part."
        )
        yield Finding("rows-odd", "warning", message)
        return


def _about_whole_rows(traced: Traced, layout: Layout) -> Iterator[Finding]:
    """Arguments that have as many rows as the batch, of which nothing shows that they are its rows, nor that they are
    the features of a weight: a batch norm's statistics have a number for each."""
    batch, roles = layout.batch, layout.roles
    inputs, shapes = layout.program.inputs, layout.program.shapes
    sizes = {_size(layout, i, d) for i, ds in batch.dims.items() for d in ds if d == 0}
    rows = {
        i: shapes[inputs[i]][: -1 if roles.is_raw_key(layout.program, i) else None]
        for i in roles.data | roles.keys
    }
    whole = [i for i, shape in sorted(rows.items()) if shape and shape[0] in sizes and i not in batch.dims]
    features = {c for i, role in enumerate(roles.of) if role == PARAMS for c in layout.dims.of(inputs[i])}
    whole = [i for i in whole if i >= len(traced.consts) and layout.dims.of(inputs[i])[0] not in features]
    if not whole:
        return
    name, count = path_name(traced.in_paths[whole[0]]), rows[whole[0]][0]
    more, have = (f" and {len(whole) - 1} more", "have") if len(whole) > 1 else ("", "has")
    message = (
        f"{name}{more} {have} {count} rows, as the batch has, and nothing in the step shows that they are the same: a "
        "copy on every device."
    )
    yield Finding("rows-whole", "info", message, _divided_with(traced, layout, whole))


def _divided_with(traced: Traced, layout: Layout, also: Sequence[int]) -> str:
    """Options that divide more inputs beside those that hold examples: what is given is all that counts as such."""
    axes = ", ".join(map(repr, layout.batch_axes))
    over = f"({axes})" if len(layout.batch_axes) > 1 else axes
    found = {i: ds[0] for i, ds in layout.batch.dims.items() if i >= len(traced.consts)} | dict.fromkeys(
        also, 0
    )
    roots: dict[str, set[int]] = {}
    for i, path in enumerate(traced.in_paths):
        roots.setdefault(path_name(path[:1]), set()).add(i)
    specs: dict[str, int] = {}
    for i, d in found.items():
        path = traced.in_paths[i]
        inside = roots[path_name(path[:1])]
        whole = all(found.get(j) == d for j in inside)  # all that the argument holds
        specs[path_name(path[:1] if whole else path)] = d
    return " ".join(f'--spec "{name}=P({"None, " * d}{over})"' for name, d in specs.items())


def _odd(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """The inputs, dimensions and sizes of the batch that do not divide."""
    n = layout.count(layout.batch_axes)
    sizes = ((i, d, _size(layout, i, d)) for i, ds in sorted(layout.batch.dims.items()) for d in ds)
    return ((i, d, size) for i, d, size in sizes if size % n)


def _size(layout: Layout, i: int, d: int) -> int:
    return layout.program.shapes[layout.program.inputs[i]][d]


def _over(layout: Layout) -> str:
    return " ".join(f"{a}={layout.mesh.shape[a]}" for a in layout.batch_axes)


def _near(layout: Layout, size: int) -> list[int]:
    """The sizes next to one that do divide."""
    n = layout.count(layout.batch_axes)
    return [m for m in dict.fromkeys((size // n * n, -(-size // n) * n)) if m]
