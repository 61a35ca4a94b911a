"""What must be the same on all devices after a step written for one of them, and how the rest of its results is put
together."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from jax.tree_util import DictKey, GetAttrKey, KeyPath

from ..errors import ShardError
from ..plan import Finding
from ..program.batching.batch import Batch
from ..program.dimensions import Dimensions
from ..program.ir import Value
from ..program.loss import find_loss
from ..program.mapped import Cut, PerDevice
from ..program.roles import BATCH, OPTIMIZER, PARAMS
from ..program.trace import path_name
from ..program.varying import SAME, Axes, varying

Cuts = tuple[Cut | None, ...]


def results(traced: PerDevice, dims: Dimensions, batch: Batch) -> tuple[Cuts, tuple[Finding, ...]]:
    """How each result is put together from what the devices give, and what to say of them.

    With a device axis every result has its place for each device, and only parameters and optimizer state must be the
    same in all of them. Without one, state must be, and what else differs needs a dimension of the examples.

    Raises `ShardError` for what must be the same and is not, with the line to add to the step.
    """
    return _with_device_axis(traced) if traced.mapped.device_axis else _without(traced, dims, batch)


def _with_device_axis(traced: PerDevice) -> tuple[Cuts, tuple[Finding, ...]]:
    data = [i for i, cut in enumerate(traced.cuts) if cut is not None and traced.roles.of[i] == BATCH]
    lacking = _settled(traced, data, own_parts=False)
    wrong = [
        o
        for o, i in sorted(traced.roles.state.items())
        if traced.roles.of[i] in (PARAMS, OPTIMIZER) and _of(traced, lacking, o)
    ]
    if wrong:
        _refuse_state(traced, wrong, lacking)
    found = _settled(traced, data, own_parts=True)
    differing = [i for o, i in sorted(traced.roles.state.items()) if _of(traced, found, o)]
    return traced.stacked, _differing(traced, differing)


def _settled(traced: PerDevice, data: Iterable[int], *, own_parts: bool) -> list[Axes]:
    """Where values differ after many steps: state that comes back different goes into the next step so. Parameters and
    optimizer state that lack a reduction are not let in: they are to be told of."""
    over = frozenset(traced.mapped.over)
    inputs, start = traced.program.inputs, set(data)
    while True:
        found = varying(traced.program, {inputs[i]: over for i in start}, own_parts=own_parts)
        late = {
            i
            for o, i in traced.roles.state.items()
            if _of(traced, found, o) and (own_parts or traced.roles.of[i] not in (PARAMS, OPTIMIZER))
        }
        if late <= start:
            return found
        start |= late


def _differing(traced: PerDevice, inputs: Sequence[int]) -> tuple[Finding, ...]:
    if not inputs:
        return ()
    name, axis = path_name(traced.in_paths[inputs[0]]), _axis(traced.mapped.over)
    more = f" and {len(inputs) - 1} more" if len(inputs) > 1 else ""
    variable = _variable(traced.in_paths[inputs[0]])
    message = f"{name}{more} differ from device to device after the step, as under jax.pmap."
    return (Finding("state-differs", "info", message, f"{variable} = jax.lax.pmean({variable}, {axis})"),)


def _without(traced: PerDevice, dims: Dimensions, batch: Batch) -> tuple[Cuts, tuple[Finding, ...]]:
    program, state, over = traced.program, traced.roles.state, frozenset(traced.mapped.over)
    start = {program.inputs[i]: over for i, cut in enumerate(traced.cuts) if cut is not None}
    found = varying(program, start)
    outputs = range(len(program.outputs))
    wrong = [o for o in outputs if o in state and traced.cuts[state[o]] is None and _of(traced, found, o)]
    if wrong:
        lacking = varying(program, start, own_parts=False)
        lack = [o for o in wrong if _of(traced, lacking, o)]
        _refuse_state(traced, lack, lacking) if lack else _refuse_parts(traced, wrong)
    cuts: list[Cut | None] = []
    for o in outputs:
        axes = _of(traced, found, o)
        if o in state:
            cuts.append(traced.cuts[state[o]])
            continue
        dim = _examples(dims, batch, program.outputs[o]) if axes else None
        if axes and (dim is None or axes - over):
            _refuse_result(traced, o, axes)
        cuts.append(None if dim is None else Cut(dim, False))
    return tuple(cuts), ()


def _examples(dims: Dimensions, batch: Batch, value: Value | None) -> int | None:
    """The dimension of a result that is the examples'."""
    if value is None:
        return None
    named = [d for d, c in enumerate(dims.of(value)) if c in batch.classes]
    shape = dims.program.shapes[value]
    return next(iter(named), 0 if shape and shape[0] == batch.size else None)


def _of(traced: PerDevice, found: Sequence[Axes], o: int) -> Axes:
    value = traced.program.outputs[o]
    return SAME if value is None else found[value]


def _refuse_state(traced: PerDevice, outputs: Sequence[int], lacking: Sequence[Axes]) -> NoReturn:
    """State of which a reduction is missing: of its gradient, where that is what differs."""
    o = outputs[0]
    path = traced.in_paths[traced.roles.state[o]]
    axis = _axis(_of(traced, lacking, o))
    gradients = _gradients(traced, o, lacking)
    variable = "grads" if gradients else _variable(path)
    line = f"{variable} = jax.lax.pmean({variable}, {axis})"
    more = f" (and {len(outputs) - 1} more)" if len(outputs) > 1 else ""
    what = "its gradient is not reduced" if gradients else "it is not reduced"
    raise ShardError(
        f"{path_name(path)}{more} would differ between devices: {what} over {axis}. Add the line {line}"
        f"{' after the gradients are taken' if gradients else ''}",
        fix=line,
    )


def _gradients(traced: PerDevice, o: int, lacking: Sequence[Axes]) -> set[Value]:
    """The gradients that differ between devices and that a result is made of."""
    flow = traced.flow
    met = flow.back([traced.program.outputs[o]], lambda _v, w, _e: bool(lacking[w]))
    return {v for v in met if v in flow.gradients and lacking[v]}


def _refuse_parts(traced: PerDevice, outputs: Sequence[int]) -> NoReturn:
    path = traced.in_paths[traced.roles.state[outputs[0]]]
    variable, axis = _variable(path), _axis(traced.mapped.over)
    raise ShardError(
        f"{path_name(path)} would be another part on every device (axis_index, psum_scatter, ppermute), which state "
        f"without a device axis can't hold. Keep the whole of it, jax.lax.all_gather({variable}, {axis}, tiled=True), "
        "from the first state on, or give state and batch a device axis"
    )


def _refuse_result(traced: PerDevice, o: int, axes: Axes) -> NoReturn:
    path = traced.out_paths[o]
    is_loss = o == find_loss(traced, traced.flow, traced.roles.state)
    variable = _name(path) or ("loss" if is_loss else "metrics")
    line = f"{variable} = jax.lax.pmean({variable}, {_axis(axes)})"
    raise ShardError(
        f"{path_name(path)}{' (the loss)' if is_loss and not _name(path) else ''} would differ between devices and has "
        f"no device axis. Add the line {line}",
        fix=line,
    )


def _axis(names: Iterable[Any]) -> str:
    """As it is written in a call: 'batch', or ('i', 'j')."""
    listed = sorted(names, key=str)
    return repr(listed[0]) if len(listed) == 1 else repr(tuple(listed))


def _variable(path: KeyPath) -> str:
    """What a step would call the state at `path`: the first name below the argument, else the argument's."""
    return next(filter(str.isidentifier, map(_key, path[1:2])), "") or _key(path[0]) or "state"


def _name(path: KeyPath) -> str:
    """The innermost name in the path of a result."""
    return next((k for k in map(_key, reversed(path[1:])) if k.isidentifier()), "")


def _key(key: Any) -> str:
    if isinstance(key, DictKey):
        return str(key.key)
    return key.name if isinstance(key, GetAttrKey) else ""
