"""What is understood of a step, and what is asked of it -> a `Plan`."""

from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from ..errors import ShardError
from ..plan import WHOLE, Finding, LeafPlan, Plan
from ..program.emit import Emitter
from ..program.facts import Facts
from ..program.flops import counted, unseen
from ..program.labels import labels
from ..program.loss import find_loss
from ..program.mapped import PerDevice
from ..program.phases import phases
from ..program.roles import BATCH, OTHER
from ..program.trace import Traced, path_name
from ..request import Request
from ..specs import Placement
from .dp import data_parallel
from .fsdp import fully_sharded
from .hold import Hold
from .layout import Axes, Layout, Strategy, partition_spec, spec_of
from .placements import apply_placements, dims_over
from .pmap import spread_plan
from .positions import one_example
from .shares import shares
from .sp import sequence_parallel, why_positions
from .tp import tensor_parallel

# In this order: data parallel needs nothing, tensor parallel takes its dimensions first, the others what is left.
STRATEGIES: dict[str, Strategy] = {
    "dp": data_parallel,
    "tp": tensor_parallel,
    "sp": sequence_parallel,
    "fsdp": fully_sharded,
}


def plan(facts: Facts, request: Request) -> Plan:
    """Decide where every array of a step goes.

    Raises `ShardError` for everything that cannot be done, before anything is moved.
    """
    if isinstance(facts.traced, PerDevice):
        return spread_plan(facts, request)
    traced, program, flow, roles, mesh = facts.traced, facts.program, facts.flow, facts.roles, request.mesh
    axes = request.axes
    layout = Layout(
        program,
        facts.dimensions,
        facts.dimensions.storage(facts.batch.classes),
        flow,
        roles,
        facts.batch,
        mesh,
        mesh.devices.flat[0].platform,
        request.batch_axes,
    )
    if not request.compiler_decides and not ("sp" in axes and one_example(layout)):
        _batch_divides(traced, layout)
    apply_placements(layout, facts.placed)
    layout.names = [path_name(p) for p in traced.in_paths]
    layout.positions = dims_over(axes.get("sp", ()), facts.placed, roles.data)
    for name, apply in STRATEGIES.items():
        if name in axes:
            apply(layout, axes[name])
    in_specs = [_input_spec(layout, i, facts.placed) for i in range(len(roles.of))]
    phase = phases(program, flow)
    named = labels(program, flow, roles, phase)
    gradients = request.gradients
    work = counted(program, flow)
    by_itself = request.compiler_decides
    return Plan(
        traced=traced,
        mesh=mesh,
        strategy=request.strategy,
        in_specs=tuple(in_specs),
        out_specs=tuple(_output_spec(layout, o, in_specs) for o in range(len(program.outputs))),
        leaves=tuple(_leaf(traced, layout, i, in_specs[i], facts.placed) for i in range(len(in_specs))),
        run=Emitter(program, named)
        if by_itself
        else Hold(layout, named, gradients.reduce, gradients.sum_dtype),
        state_pairs=roles.state,
        loss=find_loss(traced, flow, roles.state),
        batch_axes=request.batch_axes,
        idle_axes=_idle_axes(layout, axes, in_specs),
        findings=(*(_batch_findings(traced, layout) if request.batch_axes else ()), *layout.findings),
        jobs=axes,
        examples=facts.batch.size,
        work=work,
        shares=None if by_itself else shares(layout, work),
        unseen=unseen(program),
    )


def _input_spec(layout: Layout, i: int, given: Mapping[int, Placement]) -> PartitionSpec:
    value = layout.program.inputs[i]
    if i in given:
        return partition_spec(given[i].spec)
    if i in layout.roles.stored and i not in layout.batch.dims:
        return partition_spec(layout.at_rest(value))
    if i in layout.batch.dims and (layout.batch_axes or layout.sequence):
        return partition_spec(layout.active(value))
    return PartitionSpec()


def _output_spec(layout: Layout, o: int, in_specs: Sequence[PartitionSpec]) -> PartitionSpec:
    value = layout.program.outputs[o]
    if o in layout.roles.state:
        return in_specs[layout.roles.state[o]]
    if value is None:
        return PartitionSpec()
    return partition_spec(layout.active(value) if layout.batchy(value) else layout.at_rest(value))


def _leaf(
    traced: Traced, layout: Layout, i: int, spec: PartitionSpec, given: Mapping[int, Placement]
) -> LeafPlan:
    aval, roles = traced.closed.in_avals[i], layout.roles
    role = roles.of[i]
    if role == BATCH and i not in layout.batch.dims and i < len(traced.consts):
        role = OTHER
    return LeafPlan(
        path=path_name(traced.in_paths[i]),
        role=role,
        shape=tuple(aval.shape),
        dtype=aval.dtype,
        spec=spec,
        why=_why(layout, i, given),
        wanted=layout.wanted.get(i, ()),
        lost=layout.lost.get(i, 0),
    )


def _why(layout: Layout, i: int, given: Mapping[int, Placement]) -> str:
    if i in given:
        return given[i].source
    if i in layout.batch.dims and (layout.batch_axes or layout.sequence):
        said = _examples(layout, i), why_positions(layout, i)
        return "; ".join(filter(None, said)) or WHOLE
    if i in layout.roles.stored:
        fixed = layout.fixed_by(layout.program.inputs[i])
        return f"follows {fixed}" if fixed else "; ".join(layout.why.get(i, ())) or WHOLE
    if layout.roles.of[i] == BATCH and layout.batch_axes:
        return "no batch dimension in it: a copy on every device"
    return WHOLE


def _examples(layout: Layout, i: int) -> str | None:
    if not layout.batch_axes or layout.sequence & layout.batch.classes:
        return None
    dims = ", ".join(map(str, layout.batch.dims[i]))
    return f"examples: dim {dims} over {'+'.join(layout.batch_axes)}"


def _batch_divides(traced: Traced, layout: Layout) -> None:
    batch, n = layout.batch, layout.count(layout.batch_axes)
    if batch.size is None or batch.size % n == 0:
        return
    inputs, shapes = layout.program.inputs, layout.program.shapes
    sizes = ((i, d, shapes[inputs[i]][d]) for i, ds in sorted(batch.dims.items()) for d in ds)
    odd = next(((i, d, size) for i, d, size in sizes if size % n), None)
    if odd is None:
        return
    i, d, size = odd
    over = " ".join(f"{a}={layout.mesh.shape[a]}" for a in layout.batch_axes)
    near = [m for m in (size // n * n, -(-size // n) * n) if m]
    raise ShardError(
        f"{path_name(traced.in_paths[i])} has {size} examples (dim {d}), which do not divide by {over}; "
        f"use a batch of {' or '.join(map(str, dict.fromkeys(near)))}, or a mesh whose {over.split('=')[0]} divides "
        f"{size}"
    )


def _idle_axes(layout: Layout, axes: Mapping[str, Axes], in_specs: Sequence[PartitionSpec]) -> Axes:
    busy = {a for used in axes.values() for a in used} | set(layout.batch_axes)
    busy |= {a for spec in in_specs for axes in spec_of(spec) for a in axes}
    return tuple(a for a in layout.mesh.axis_names if a not in busy and layout.mesh.shape[a] > 1)


def _batch_findings(traced: Traced, layout: Layout) -> list[Finding]:
    """What is said of a batch that was not found, or that is not sure; what is to be typed names an argument."""
    batch, axis = layout.batch, layout.batch_axes[0]
    if batch.size is None:
        return [_no_batch(traced, layout, axis)]
    if batch.clear or not batch.dims:
        return []
    i = next((i for i in sorted(batch.dims) if i >= len(traced.consts)), min(batch.dims))
    name, dim, shape = path_name(traced.in_paths[i]), batch.dims[i][0], traced.closed.in_avals[i].shape
    message = (
        f"The batch is taken to be dim {dim} of {name} ({batch.size}); another dimension would do nearly as well. "
        "The numbers are the same either way, what moves is not."
    )
    next_one = dim + 1 < len(shape) and shape[dim + 1] % layout.count(layout.batch_axes) == 0
    other = ", ".join(["None"] * (dim + 1)) + f", '{axis}'"
    fix = f'--spec "{name}=P({other})"' if next_one and i >= len(traced.consts) else None
    return [Finding("batch-guess", "info", message, fix)]


def _no_batch(traced: Traced, layout: Layout, axis: str) -> Finding:
    message = "No batch dimension was found, so every device works on all examples."
    first, shapes = len(traced.consts), [tuple(aval.shape) for aval in traced.closed.in_avals]
    data = [i for i, role in enumerate(layout.roles.of) if role == BATCH and shapes[i]]
    fitting = (i for i in data if i >= first and shapes[i][0] % layout.mesh.shape[axis] == 0)
    i = next(fitting, None)
    if i is not None:
        return Finding(
            "no-batch", "warning", message, f"--spec \"{path_name(traced.in_paths[i])}=P('{axis}')\""
        )
    if data and data[0] < first:
        message += " The step closes over its data: what it is given as an argument can be divided."
    else:
        message += f" None of its arguments is data that divides by {axis}={layout.mesh.shape[axis]}."
    return Finding("no-batch", "warning", message)
