"""A traced step and what is asked of it -> `Facts`."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ..config.request import Request
from ..errors import ShardError
from ..program.batching.batch import find_batch
from ..program.copies import gradients_of
from ..program.dimensions import Dimensions
from ..program.facts import Facts
from ..program.flow import Flow
from ..program.ir import Program
from ..program.mapped import PerDevice
from ..program.roles import BATCH, PARAMS, Roles, find_roles
from ..program.state import changed_state
from ..program.trace import Traced, path_name
from .placements import dims_over, placements


def understand(
    traced: Traced,
    request: Request,
    metadata: Sequence[Any] = (),
    batch: Mapping[int, tuple[int, ...]] | None = None,
) -> Facts:
    """Work out what a step is made of: its equations, dimensions, flow, roles and batch.

    Args:
        traced: the step, or what one device does of it.
        request: says on which mesh it is to run, and where the user wants its inputs.
        metadata: the Flax partitioning, or None, of each of its last inputs.
        batch: the dimensions of inputs that are known to hold examples.

    Raises `ShardError` for placements that don't fit, and where state comes back with another shape or dtype.
    """
    if isinstance(traced, PerDevice):
        _state_fits(traced, traced.roles)
        dims = Dimensions(traced.program, (1,))  # what a device has is divided no further
        examples = find_batch(dims, traced.roles, batch or _split_along(traced))
        return Facts(traced, traced.program, dims, traced.flow, traced.roles, examples, {})
    rows_follow = request.gradients.pad and request.pipeline is None and batch is None
    placed = placements(traced, request, metadata, request.batch_axes if rows_follow else ())
    sizes = tuple(request.mesh.shape.values())
    tensor_parallel = (
        prod(request.mesh.shape[axis] for axis in request.axes["tp"]) if "tp" in request.axes else 0
    )
    known = None if placed or batch else ("facts", frozenset(sizes), tensor_parallel)
    if known in traced.known:  # of another strategy on such a mesh
        return traced.known[known]
    program = Program(traced.closed)
    flow = Flow(program)
    roles = find_roles(traced, flow)
    copies = {program.inputs[i]: program.inputs[p] for i, p in roles.copies.items()}
    params = {i for i, role in enumerate(roles.of) if role == PARAMS}
    copies |= {gradient: program.inputs[i] for gradient, i in gradients_of(flow, params).items()}
    dims = Dimensions(program, sizes, copies, tensor_parallel, (program.inputs[i] for i in roles.data))
    _state_fits(traced, roles)
    named = dims_over(request.batch_axes, placed, roles.data)
    examples = find_batch(dims, roles, {**(batch or {}), **named})
    facts = Facts(traced, program, dims, flow, roles, examples, placed)
    if known is not None:
        traced.known[known] = facts
    return facts


def _state_fits(traced: Traced, roles: Roles) -> None:
    """Refuse a step whose parameters come back with another shape or dtype: it is none to call again."""
    for i, o in changed_state(traced):
        if roles.of[i] in (PARAMS, BATCH):  # unmatched, a parameter looks like data
            was, now = traced.closed.in_avals[i], traced.closed.out_avals[o]
            name = path_name(traced.in_paths[i])
            raise ShardError(
                f"{name} goes into the step as {was.str_short()} and comes back as {now.str_short()}; the next step "
                f"could not take it. Give it back as it came, with .astype or .reshape, or leave it out of the result"
            )


def _split_along(traced: PerDevice) -> dict[int, tuple[int, ...]]:
    """The dimensions that inputs without a device axis are split along."""
    return {i: (cut.dim,) for i, cut in enumerate(traced.cuts) if cut is not None and not cut.device_axis}
