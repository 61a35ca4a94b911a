"""Layout of a part of a step, such as a pipeline stage, as decided by the plan of the whole step."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from jax.sharding import AbstractMesh, Mesh

from ..program.batching.batch import Batch, find_batch
from ..program.dimensions import Dimensions
from ..program.flow import Flow
from ..program.ir import Program, Value
from ..program.roles import BATCH, OTHER, PARAMS, InputRoles
from .attention_heads import AttentionBlocks
from .layout import Axes, Layout, Spec
from .positions import find_positions, key_dims
from .split_exchanges import plan_split_exchanges
from .unsharded_dims import gather_contested_operands, unshard_required_dims


@dataclass(frozen=True)
class StageInputs:
    """Inputs and outputs of a part of a step, by position.

    Attributes:
        parameters: Stored spec of each parameter.
        examples: Dimensions of other inputs that run along the examples.
        positions: Dimensions of other inputs that run along positions.
        gradients: Parameter of each output that is a gradient.
    """

    parameters: Mapping[int, Spec]
    examples: Mapping[int, tuple[int, ...]]
    positions: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    gradients: Mapping[int, int] = field(default_factory=dict)


def stage_layout(
    program: Program,
    mesh: Mesh | AbstractMesh,
    platform: str,
    axes: Mapping[str, Axes],
    batch_axes: Axes,
    inputs: StageInputs,
    attention: str | None = None,
    read_elsewhere: Collection[Value] = (),
) -> Layout:
    """Return the layout of a part of a step, with parameters stored as in the plan of the whole step.

    If the strategy shards positions and no input names any, they are searched for.

    Args:
        program: The part.
        mesh: The mesh.
        platform: Platform of the devices.
        axes: Mesh axes by part of the strategy, for example of `tp` and `sp`.
        batch_axes: Mesh axes of the batch.
        inputs: Roles of the inputs and outputs.
        attention: Form of attention in the plan of the whole step, for example `heads`.
        read_elsewhere: Inner values read by other programs.
    """
    dims, flow = Dimensions(program, tuple(mesh.shape.values())), Flow(program)
    data = frozenset(inputs.examples)
    roles = tuple(
        PARAMS if i in inputs.parameters else BATCH if i in data else OTHER for i in range(len(program.inputs))
    )
    by_position = InputRoles(roles, dict(inputs.gradients), data, tuple(sorted(inputs.parameters)))
    no_batch = Batch(frozenset(), {}, True, None)
    batch = find_batch(dims, by_position, inputs.examples) if inputs.examples else no_batch
    layout = Layout(
        program, dims, dims.storage_classes(batch.classes), flow, by_position, batch, mesh, platform, batch_axes
    )
    layout.external_reads = frozenset(read_elsewhere)
    _store_parameters(layout, inputs, axes.get("tp", ()))
    if over := axes.get("sp", ()):
        layout.user_position_dims = inputs.positions
        layout.position_classes, layout.position_axes = find_positions(layout), over
        layout.whole_position_dims = key_dims(layout, layout.position_classes)
    # In the order of `planner.plan`.
    unshard_required_dims(layout)
    plan_split_exchanges(layout)
    gather_contested_operands(layout)
    # The form is that of all attentions of the step; this part may have none.
    if layout.position_classes and attention == "heads":
        layout.spec_overrides = AttentionBlocks(layout).head_overrides()
    return layout


def _store_parameters(layout: Layout, inputs: StageInputs, tensor: Collection[str]) -> None:
    """Set the stored specs of parameters as given, and of gradients as their parameters."""
    program = layout.program
    # No optimizer update in this part relates a gradient's dimensions to those of its parameter.
    parameters = [(program.inputs[i], spec) for i, spec in inputs.parameters.items()]
    gradients = [
        (v, inputs.parameters[i])
        for o, i in inputs.gradients.items()
        if (v := program.outputs[o]) is not None and v not in program.inputs
    ]
    for value, spec in (*parameters, *gradients):
        for c, logical, axes in zip(layout.storage.classes_of(value), layout.dims.classes_of(value), spec, strict=True):
            layout.storage_class_axes[c] = axes if value in program.inputs else layout.storage_class_axes.get(c, axes)
            in_use = tuple(a for a in axes if a in tensor)
            if in_use:
                layout.tensor_class_axes[logical] = in_use
