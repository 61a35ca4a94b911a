"""The layout of a part of a step, such as a stage of a pipeline, where the plan of the whole step has decided."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from jax.sharding import AbstractMesh, Mesh

from ..program.batching.batch import Batch, find_batch
from ..program.dimensions import Dimensions
from ..program.flow import Flow
from ..program.ir import Program, Value
from ..program.roles import BATCH, OTHER, PARAMS, Roles
from .contested import gather_contested
from .heads import Attentions
from .layout import Axes, Layout, Spec
from .pieces import take_apart
from .positions import find_positions, keys_of
from .undivided import keep_whole


@dataclass(frozen=True)
class Inputs:
    """What a part of a step reads, by position among its inputs.

    `parameters`: where each lies at rest. `examples`, `positions`: the dimensions of others that these run along.
    `gradients`: outputs, and the parameter whose gradient each is.
    """

    parameters: Mapping[int, Spec]
    examples: Mapping[int, tuple[int, ...]]
    positions: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    gradients: Mapping[int, int] = field(default_factory=dict)


def layout_within(
    program: Program,
    mesh: Mesh | AbstractMesh,
    platform: str,
    axes: Mapping[str, Axes],
    batch_axes: Axes,
    inputs: Inputs,
    attention: str | None = None,
    read_elsewhere: Collection[Value] = (),
) -> Layout:
    """The layout of `program` on `mesh`, with parameters where they lie and what they are divided over in use.

    `axes`: the mesh axes of each part of the strategy. Positions that no input names are looked for where the strategy
    divides them. `attention`: how the plan of the whole step has attention get at them.
    `read_elsewhere`: as of `Layout`.
    """
    dims, flow = Dimensions(program, tuple(mesh.shape.values())), Flow(program)
    data = frozenset(inputs.examples)
    roles = tuple(
        PARAMS if i in inputs.parameters else BATCH if i in data else OTHER
        for i in range(len(program.inputs))
    )
    by_position = Roles(roles, dict(inputs.gradients), data, tuple(sorted(inputs.parameters)))
    none = Batch(frozenset(), {}, True, None)
    batch = find_batch(dims, by_position, inputs.examples) if inputs.examples else none
    layout = Layout(
        program, dims, dims.storage(batch.classes), flow, by_position, batch, mesh, platform, batch_axes
    )
    layout.read_elsewhere = frozenset(read_elsewhere)
    _at_rest(layout, inputs, axes.get("tp", ()))
    if over := axes.get("sp", ()):
        layout.positions = inputs.positions
        layout.sequence, layout.sequence_axes = find_positions(layout), over
        layout.keys = keys_of(layout, layout.sequence)
    keep_whole(layout)
    take_apart(layout)
    gather_contested(layout)
    if layout.sequence and attention == "heads":  # of all attentions, which are in some of the parts
        layout.exchanges = Attentions(layout).by_heads()
    return layout


def _at_rest(layout: Layout, inputs: Inputs, tensor: Collection[str]) -> None:
    """Parameters lie as given, and gradients as their parameters: no update joins the two here."""
    program = layout.program
    lying = [(program.inputs[i], spec) for i, spec in inputs.parameters.items()]
    gradients = [
        (v, inputs.parameters[i])
        for o, i in inputs.gradients.items()
        if (v := program.outputs[o]) is not None and v not in program.inputs
    ]
    for value, spec in (*lying, *gradients):
        for c, logical, axes in zip(layout.storage.of(value), layout.dims.of(value), spec, strict=True):
            layout.stored[c] = axes if value in program.inputs else layout.stored.get(c, axes)
            inside = tuple(a for a in axes if a in tensor)
            if inside:
                layout.tensor[logical] = inside
