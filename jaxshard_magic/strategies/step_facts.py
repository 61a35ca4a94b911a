"""Facts of a traced step: program, dimension classes, dataflow, roles of inputs, and batch."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ..config.request import Request
from ..errors import ShardError
from ..program.batching.batch import find_batch
from ..program.dimensions import Dimensions
from ..program.facts import Facts
from ..program.flow import Flow
from ..program.frozen_weights import find_frozen_weights, guess_weights
from ..program.ir import Program
from ..program.per_device import PerDeviceTrace
from ..program.roles import BATCH, PARAMS, InputRoles, find_roles, match_gradients
from ..program.state_matching import retyped_state
from ..program.trace import Traced, path_name
from .placements import find_placements, placed_dims


def find_facts(
    traced: Traced,
    request: Request,
    own_placements: Sequence[Any] = (),
    batch: Mapping[int, tuple[int, ...]] | None = None,
) -> Facts:
    """Analyse a traced step for a request.

    Args:
        traced: The step, or the program of one device.
        request: Source of the mesh, and of the placement by the user.
        own_placements: Flax partitioning, or the array's own sharding, or None, of each of the last inputs.
        batch: Dimensions of inputs known to hold examples, by input index.

    Raises:
        ShardError: Placements do not fit, or state comes back with another shape or dtype.
    """
    if isinstance(traced, PerDeviceTrace):
        _check_state(traced, traced.roles)
        # Mesh axes of size 1: the arrays of one device are not sharded further.
        dims = Dimensions(traced.program, (1,))
        examples = find_batch(dims, traced.roles, batch or _split_dims(traced))
        return Facts(traced, traced.program, dims, traced.flow, traced.roles, examples, {})
    rows_follow = request.gradients.pad and request.pipeline is None and batch is None
    # Rows that are padded later need not divide.
    placements_by_input = find_placements(traced, request, own_placements, request.batch_axes if rows_follow else ())
    sizes = tuple(request.mesh.shape.values())
    tensor_parallel = prod(request.mesh.shape[axis] for axis in request.axes["tp"]) if "tp" in request.axes else 0
    cache_key = None if placements_by_input or batch else ("facts", frozenset(sizes), tensor_parallel)
    # A search plans many strategies of one trace. Without placements facts depend only on the sizes of the mesh axes
    # and the number of devices under `tp`.
    if cache_key in traced.cache:
        return traced.cache[cache_key]
    program = Program(traced.closed)
    flow = Flow(program)
    roles = find_roles(traced, flow)
    copies = {program.inputs[i]: program.inputs[p] for i, p in roles.copies.items()}
    params = {i for i, role in enumerate(roles.by_input) if role == PARAMS}
    copies |= {gradient: program.inputs[i] for gradient, i in match_gradients(flow, params).items()}
    _check_state(traced, roles)
    named_batch_dims = {**(batch or {}), **placed_dims(request.batch_axes, placements_by_input, roles.data)}
    roles = roles.with_frozen(guess_weights(traced, flow, roles) - named_batch_dims.keys())
    dims = Dimensions(program, sizes, copies, tensor_parallel, (program.inputs[i] for i in roles.data))
    examples = find_batch(dims, roles, named_batch_dims)
    if frozen := find_frozen_weights(traced, dims, flow, roles, examples):
        # Their dimensions are features like those of parameters, and none of them may be the batch.
        roles = roles.with_frozen(frozen)
        dims = Dimensions(program, sizes, copies, tensor_parallel, (program.inputs[i] for i in roles.data))
        examples = find_batch(dims, roles, named_batch_dims)
    facts = Facts(traced, program, dims, flow, roles, examples, placements_by_input)
    if cache_key is not None:
        traced.cache[cache_key] = facts
    return facts


def _check_state(traced: Traced, roles: InputRoles) -> None:
    """Raise ShardError for parameters returned with another shape or dtype: the step could not be called again."""
    for i, o in retyped_state(traced):
        # A parameter whose output does not match it is taken for data.
        if roles.by_input[i] in (PARAMS, BATCH):
            was, now = traced.closed.in_avals[i], traced.closed.out_avals[o]
            name = path_name(traced.in_paths[i])
            raise ShardError(
                f"{name} goes into the step as {was.str_short()} and comes back as {now.str_short()}; the next step "
                f"could not take it. Give it back as it came, with .astype or .reshape, or leave it out of the result"
            )


def _split_dims(traced: PerDeviceTrace) -> dict[int, tuple[int, ...]]:
    """Return the split dimension of each input without a device axis."""
    return {i: (cut.dim,) for i, cut in enumerate(traced.slices) if cut is not None and not cut.is_device_axis}
