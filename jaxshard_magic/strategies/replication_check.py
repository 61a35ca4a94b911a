"""Replication check for a step written for a single device (as for `jax.pmap`), and the assembly of the step's
results."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from jax.tree_util import DictKey, GetAttrKey, KeyPath

from ..errors import ShardError
from ..plan import Finding
from ..program.batching.batch import Batch
from ..program.dimensions import Dimensions
from ..program.ir import Value
from ..program.loss import find_loss
from ..program.per_device import DeviceSlice, PerDeviceTrace
from ..program.roles import BATCH, OPTIMIZER, PARAMS
from ..program.trace import path_name
from ..program.varying_axes import SAME, AxisNames, varying_axes

Cuts = tuple[DeviceSlice | None, ...]


def check_results(traced: PerDeviceTrace, dims: Dimensions, batch: Batch) -> tuple[Cuts, tuple[Finding, ...]]:
    """Return how each result is assembled from the devices' parts, and the findings about the results.

    With a device axis every result has an entry for each device, and only parameters and optimizer state must be equal
    in all entries. Without a device axis all state must be equal, and any other differing result needs a dimension of
    examples.

    Args:
        traced: The step, traced as one device runs a call.
        dims: Dimension classes of the traced program.
        batch: The batch dimensions of the program.

    Returns:
        A cut for each output, None for an output equal on all devices; and findings.

    Raises:
        ShardError: An output must be equal on all devices and may differ. The message names the line to add to the
            step.
    """
    return _check_stacked(traced) if traced.mapping.has_device_axis else _check_unstacked(traced, dims, batch)


def _check_stacked(traced: PerDeviceTrace) -> tuple[Cuts, tuple[Finding, ...]]:
    data = [i for i, cut in enumerate(traced.slices) if cut is not None and traced.roles.by_input[i] == BATCH]
    # Only a missing reduction is an error. State that differs on purpose (axis_index, psum_scatter) is a finding.
    unreduced_axes = _varying_after_many_steps(traced, data, own_parts=False)
    unreduced_outputs = [
        o
        for o, i in sorted(traced.roles.state.items())
        if traced.roles.by_input[i] in (PARAMS, OPTIMIZER) and _axes_of_output(traced, unreduced_axes, o)
    ]
    if unreduced_outputs:
        _raise_unreduced_state(traced, unreduced_outputs, unreduced_axes)
    varying_axes = _varying_after_many_steps(traced, data, own_parts=True)
    differing = [i for o, i in sorted(traced.roles.state.items()) if _axes_of_output(traced, varying_axes, o)]
    return traced.output_slices, _state_differs_findings(traced, differing)


def _varying_after_many_steps(traced: PerDeviceTrace, data: Iterable[int], *, own_parts: bool) -> list[AxisNames]:
    """Return the axes over which each value differs between devices, after many steps.

    State returned different enters the next step different, so the analysis repeats until no input is added. Parameters
    and optimizer state without a reduction are not added unless `own_parts`, because the caller reports them.
    """
    mapped_axes = frozenset(traced.mapping.split_names)
    inputs, start = traced.program.inputs, set(data)
    while True:
        axes_by_value = varying_axes(traced.program, {inputs[i]: mapped_axes for i in start}, own_parts=own_parts)
        differing_inputs = {
            i
            for o, i in traced.roles.state.items()
            if _axes_of_output(traced, axes_by_value, o)
            and (own_parts or traced.roles.by_input[i] not in (PARAMS, OPTIMIZER))
        }
        if differing_inputs <= start:
            return axes_by_value
        start |= differing_inputs


def _state_differs_findings(traced: PerDeviceTrace, state_inputs: Sequence[int]) -> tuple[Finding, ...]:
    if not state_inputs:
        return ()
    name, axis = path_name(traced.in_paths[state_inputs[0]]), _axis_source(traced.mapping.split_names)
    more = f" and {len(state_inputs) - 1} more" if len(state_inputs) > 1 else ""
    variable = _variable_name(traced.in_paths[state_inputs[0]])
    message = f"{name}{more} differ from device to device after the step, as under jax.pmap."
    return (Finding("state-differs", "info", message, f"{variable} = jax.lax.pmean({variable}, {axis})"),)


def _check_unstacked(traced: PerDeviceTrace, dims: Dimensions, batch: Batch) -> tuple[Cuts, tuple[Finding, ...]]:
    program, state, mapped_axes = traced.program, traced.roles.state, frozenset(traced.mapping.split_names)
    start = {program.inputs[i]: mapped_axes for i, cut in enumerate(traced.slices) if cut is not None}
    axes_by_value = varying_axes(program, start)
    outputs = range(len(program.outputs))
    differing_outputs = [
        o
        for o in outputs
        if o in state and traced.slices[state[o]] is None and _axes_of_output(traced, axes_by_value, o)
    ]
    if differing_outputs:
        unreduced_axes = varying_axes(program, start, own_parts=False)
        unreduced_outputs = [o for o in differing_outputs if _axes_of_output(traced, unreduced_axes, o)]
        _raise_unreduced_state(
            traced, unreduced_outputs, unreduced_axes
        ) if unreduced_outputs else _raise_partial_state(traced, differing_outputs)
    cuts: list[DeviceSlice | None] = []
    for o in outputs:
        axes = _axes_of_output(traced, axes_by_value, o)
        if o in state:
            # State is passed to the next call, so that it must be split as it came.
            cuts.append(traced.slices[state[o]])
            continue
        dim = _example_dim(dims, batch, program.outputs[o]) if axes else None
        # A result is put together only along the axes that split the inputs.
        if axes and (dim is None or axes - mapped_axes):
            _raise_differing_result(traced, o, axes)
        cuts.append(None if dim is None else DeviceSlice(dim, False))
    return tuple(cuts), ()


def _example_dim(dims: Dimensions, batch: Batch, value: Value | None) -> int | None:
    """Return the dimension of a result that counts examples, or None."""
    if value is None:
        return None
    named = [d for d, c in enumerate(dims.classes_of(value)) if c in batch.classes]
    shape = dims.program.shapes[value]
    return next(iter(named), 0 if shape and shape[0] == batch.size else None)


def _axes_of_output(traced: PerDeviceTrace, axes_by_value: Sequence[AxisNames], o: int) -> AxisNames:
    value = traced.program.outputs[o]
    return SAME if value is None else axes_by_value[value]


def _raise_unreduced_state(
    traced: PerDeviceTrace, outputs: Sequence[int], unreduced_axes: Sequence[AxisNames]
) -> NoReturn:
    """Raise `ShardError` for state without a reduction, and name the gradient where the gradient differs."""
    o = outputs[0]
    path = traced.in_paths[traced.roles.state[o]]
    axis = _axis_source(_axes_of_output(traced, unreduced_axes, o))
    # A reduction of the gradients makes the optimizer state equal as well.
    gradients = _differing_gradients(traced, o, unreduced_axes)
    variable = "grads" if gradients else _variable_name(path)
    line = f"{variable} = jax.lax.pmean({variable}, {axis})"
    more = f" (and {len(outputs) - 1} more)" if len(outputs) > 1 else ""
    what = "its gradient is not reduced" if gradients else "it is not reduced"
    raise ShardError(
        f"{path_name(path)}{more} would differ between devices: {what} over {axis}. Add the line {line}"
        f"{' after the gradients are taken' if gradients else ''}",
        fix=line,
    )


def _differing_gradients(traced: PerDeviceTrace, o: int, unreduced_axes: Sequence[AxisNames]) -> set[Value]:
    """Return the gradients that differ between devices and contribute to output `o`."""
    flow = traced.flow
    met = flow.ancestors([traced.program.outputs[o]], lambda _v, w, _e: bool(unreduced_axes[w]))
    return {v for v in met if v in flow.gradients and unreduced_axes[v]}


def _raise_partial_state(traced: PerDeviceTrace, outputs: Sequence[int]) -> NoReturn:
    path = traced.in_paths[traced.roles.state[outputs[0]]]
    variable, axis = _variable_name(path), _axis_source(traced.mapping.split_names)
    raise ShardError(
        f"{path_name(path)} would be another part on every device (axis_index, psum_scatter, ppermute), which state "
        f"without a device axis can't hold. Keep the whole of it, jax.lax.all_gather({variable}, {axis}, tiled=True), "
        "from the first state on, or give state and batch a device axis"
    )


def _raise_differing_result(traced: PerDeviceTrace, o: int, axes: AxisNames) -> NoReturn:
    path = traced.out_paths[o]
    is_loss = o == find_loss(traced, traced.flow, traced.roles.state)
    variable = _innermost_name(path) or ("loss" if is_loss else "metrics")
    line = f"{variable} = jax.lax.pmean({variable}, {_axis_source(axes)})"
    raise ShardError(
        f"{path_name(path)}{' (the loss)' if is_loss and not _innermost_name(path) else ''} would differ "
        "between devices and has "
        f"no device axis. Add the line {line}",
        fix=line,
    )


def _axis_source(names: Iterable[Any]) -> str:
    """Return axis names as written in a call: 'batch', or ('i', 'j')."""
    listed = sorted(names, key=str)
    return repr(listed[0]) if len(listed) == 1 else repr(tuple(listed))


def _variable_name(path: KeyPath) -> str:
    """Return a variable name for the state at `path`: the first identifier below the argument, else the argument's
    name."""
    return next(filter(str.isidentifier, map(_key_name, path[1:2])), "") or _key_name(path[0]) or "state"


def _innermost_name(path: KeyPath) -> str:
    """Return the innermost identifier in the path of a result, or ""."""
    return next((k for k in map(_key_name, reversed(path[1:])) if k.isidentifier()), "")


def _key_name(key: Any) -> str:
    if isinstance(key, DictKey):
        return str(key.key)
    return key.name if isinstance(key, GetAttrKey) else ""
