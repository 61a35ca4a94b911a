"""Strategy text, mesh and a traced step -> a `Plan`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from ..errors import ShardError
from ..plan import WHOLE, Finding, LeafPlan, Plan
from ..program.batch import Batch, find_batch
from ..program.dimensions import Dimensions
from ..program.emit import Emitter
from ..program.flops import counted, unseen
from ..program.flow import Flow
from ..program.ir import Program
from ..program.labels import labels
from ..program.loss import find_loss
from ..program.mapped import PerDevice
from ..program.phases import phases
from ..program.roles import BATCH, OTHER, PARAMS, RNG, Roles, find_roles
from ..program.state import changed_state
from ..program.trace import Traced, path_name
from .dp import data_parallel
from .fsdp import fully_sharded
from .given import Given, apply_given, given_batch, given_specs
from .hold import Hold
from .layout import Axes, Layout, Strategy, partition_spec
from .names import batch_axes, parse_strategy, part_axes
from .pmap import spread_plan
from .positions import one_example
from .shares import shares
from .sp import sequence_parallel, why_positions
from .sum_types import sum_types
from .tp import tensor_parallel

Rewrite = Callable[[Batch, Roles, int], Traced]  # the batch, the roles, over how many devices it is divided

# In this order: data parallel needs nothing, tensor parallel takes its dimensions first, the others what is left.
STRATEGIES: dict[str, Strategy] = {
    "dp": data_parallel,
    "tp": tensor_parallel,
    "sp": sequence_parallel,
    "fsdp": fully_sharded,
}


def plan(
    traced: Traced,
    mesh: Mesh,
    strategy: str,
    *,
    specs: Mapping[str, PartitionSpec] | None = None,
    rules: Sequence[tuple[str, PartitionSpec]] = (),
    metadata: Sequence[Any] | None = None,
    rewrite: Rewrite | None = None,
    batch: Mapping[int, tuple[int, ...]] | None = None,
    reduce: str = "each",
    sum_dtype: Any = None,
) -> Plan:
    """Decide where every array of `traced` goes on `mesh` under `strategy`.

    `specs` by argument name, `rules` as (regular expression, spec) by leaf path, `metadata` one Flax partitioning
    (or None) per input. `rewrite` makes another step of it, of the same inputs and outputs, once its batch is known;
    `batch` says where that is. `reduce`: when loops' gradients are reduced (see `Hold`), `sum_dtype`: the type in which
    devices add gradients up, None for that in which each is computed. Raises `ShardError` for
    everything that cannot be done, before anything is moved.
    """
    if isinstance(traced, PerDevice):
        _state_fits(traced, traced.roles)
        return spread_plan(traced, mesh, strategy, rewrite and _on_a_part(rewrite))
    parts = parse_strategy(strategy)
    by_itself = parts[0].name == "spmd"
    axes = part_axes(parts, mesh)
    examples_over = () if by_itself else batch_axes(axes, mesh)
    given = given_specs(traced, mesh, specs or {}, rules, metadata if by_itself else None)
    program = Program(traced.closed)
    dims, flow = Dimensions(program, tuple(mesh.shape.values())), Flow(program)
    roles = find_roles(traced, flow)
    _state_fits(traced, roles)
    found = find_batch(dims, roles, {**(batch or {}), **given_batch(given, roles.data, examples_over)})
    platform = mesh.devices.flat[0].platform
    layout = Layout(
        program, dims, dims.storage(found.classes), flow, roles, found, mesh, platform, examples_over
    )
    if rewrite is not None:
        other = rewrite(_with_keys(found, roles, dims), roles, layout.count(examples_over))
        more = len(other.consts) - len(traced.consts)  # constants of its own come first
        return plan(
            other,
            mesh,
            strategy,
            specs=specs,
            rules=rules,
            metadata=None if metadata is None else (*[None] * more, *metadata),
            batch={i + more: ds for i, ds in found.dims.items()},
            reduce=reduce,
            sum_dtype=sum_dtype,
        )
    if not by_itself and not ("sp" in axes and one_example(layout)):
        _batch_divides(traced, layout)
    apply_given(layout, given)
    layout.names = [path_name(p) for p in traced.in_paths]
    layout.positions = given_batch(given, roles.data, axes.get("sp", ()))
    for name, apply in STRATEGIES.items():
        if name in axes:
            apply(layout, axes[name])
    in_specs = [_input_spec(layout, i, given) for i in range(len(roles.of))]
    phase = phases(program, flow)
    named = labels(program, flow, roles, phase)
    sums = sum_types(layout, sum_dtype, phase)
    work = counted(program, flow)
    return Plan(
        traced=traced,
        mesh=mesh,
        strategy=strategy,
        in_specs=tuple(in_specs),
        out_specs=tuple(_output_spec(layout, o, in_specs) for o in range(len(program.outputs))),
        leaves=tuple(_leaf(traced, layout, i, in_specs[i], given) for i in range(len(in_specs))),
        run=Emitter(program, named) if by_itself else Hold(layout, named, reduce, sums),
        state_pairs=roles.state,
        loss=find_loss(traced, flow, roles.state),
        batch_axes=examples_over,
        idle_axes=_idle_axes(layout, axes, in_specs),
        findings=(*(_batch_findings(traced, layout) if examples_over else ()), *layout.findings),
        jobs=axes,
        examples=found.size,
        work=work,
        shares=None if by_itself else shares(layout, work),
        unseen=unseen(program),
    )


def _on_a_part(rewrite: Rewrite) -> Callable[[Batch, Roles, Dimensions], Traced]:
    """`rewrite` for what one device does: it has all of its part."""
    return lambda batch, roles, dims: rewrite(_with_keys(batch, roles, dims), roles, 1)


def _with_keys(batch: Batch, roles: Roles, dims: Dimensions) -> Batch:
    """The batch with the random keys that come one for each example."""
    inputs = dims.program.inputs
    keys = {
        i: tuple(d for d, c in enumerate(dims.of(inputs[i])) if c in batch.classes)
        for i, role in enumerate(roles.of)
        if role == RNG
    }
    return replace(batch, dims={**batch.dims, **{i: ds for i, ds in keys.items() if ds}})


def _state_fits(traced: Traced, roles: Roles) -> None:
    """A step whose parameters come back with another shape or dtype is not one to call again."""
    for i, o in changed_state(traced):
        if roles.of[i] in (PARAMS, BATCH):  # unmatched, a parameter looks like data
            was, now = traced.closed.in_avals[i], traced.closed.out_avals[o]
            name = path_name(traced.in_paths[i])
            raise ShardError(
                f"{name} goes into the step as {was.str_short()} and comes back as {now.str_short()}; the next step "
                f"could not take it. Give it back as it came, with .astype or .reshape, or leave it out of the result"
            )


def _input_spec(layout: Layout, i: int, given: Mapping[int, Given]) -> PartitionSpec:
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
    traced: Traced, layout: Layout, i: int, spec: PartitionSpec, given: Mapping[int, Given]
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


def _why(layout: Layout, i: int, given: Mapping[int, Given]) -> str:
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
    for spec in in_specs:
        for entry in spec:
            busy |= {entry} if isinstance(entry, str) else set(entry or ())
    return tuple(a for a in layout.mesh.axis_names if a not in busy and layout.mesh.shape[a] > 1)


def _batch_findings(traced: Traced, layout: Layout) -> list[Finding]:
    batch, roles = layout.batch, layout.roles
    axis = layout.batch_axes[0]
    if batch.size is None:
        shaped = [i for i in roles.data if traced.closed.in_avals[i].shape]
        example = path_name(traced.in_paths[shaped[0]]) if shaped else "x"
        message = "No batch dimension was found, so every device works on all examples."
        return [Finding("no-batch", "warning", message, f"--spec \"{example}=P('{axis}')\"")]
    if batch.clear or not batch.dims:
        return []
    i, ds = min(batch.dims.items())
    name = path_name(traced.in_paths[i])
    message = (
        f"The batch is taken to be dim {ds[0]} of {name} ({batch.size}); another dimension would do nearly as well. "
        "The numbers are the same either way, what moves is not."
    )
    other = ", ".join(["None"] * (ds[0] + 1)) + f", '{axis}'"
    return [Finding("batch-guess", "info", message, f'--spec "{name}=P({other})"')]
