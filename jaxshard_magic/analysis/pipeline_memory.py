"""Memory of each rank of a pipeline: arrays of the step, activations of microbatches, and buffers of the programs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from ..pipeline.executor import PipelineExecutor
from ..pipeline.jobs import CompiledProgram, ProgramKey
from ..pipeline.split_step import LossStages
from ..pipeline.stage_jobs import StageJobs
from ..pipeline.step_arrays import StepInput as Place
from ..program.ir import Value
from ..program.memory_kinds import HOST_KINDS
from ..program.sizes import array_bytes
from ..report import DeviceMemory, Leaf, Memory
from ..schedule.actions import KINDS, entry_actions
from ..targets.device_memory import device_limit
from .memory import by_role, device_memory
from .roofline import all_known


def pipeline_memory(
    pipeline: PipelineExecutor, leaves: Sequence[Leaf], own: Mapping[ProgramKey, int | None], source: str
) -> Memory:
    """Return the peak bytes of each device.

    A peak is the step's own arrays plus temporaries, the larger of two: during actions (activations, sums of gradients,
    the batch in microbatches, a program's own bytes), and during the update.

    Args:
        pipeline: The pipeline.
        leaves: Arrays of the step, one per leaf of the pipeline.
        own: Bytes of each program on one device without its arguments. Where one is None, as for a silent compiler,
            temporaries and peak of its rank are None.
        source: Source of the figures, for the report.
    """
    rows: dict[int, DeviceMemory] = {}
    for rank, mesh in enumerate(pipeline.ranks.sub_meshes):
        arrays = by_role(_arrays(pipeline, leaves, rank))
        temporaries = None
        acting = (_while_acting(pipeline, rank, loss, own) for loss in pipeline.split.losses)
        if (peaks := all_known([*acting, _while_updating(pipeline, rank, own)])) is not None:
            temporaries = max(peaks)
        for device in mesh.devices.flat:
            rows[device.id] = device_memory(device.id, arrays, temporaries, device_limit(device))
    return Memory(tuple(rows[d.id] for d in pipeline.ranks.mesh.devices.flat), source)


def _arrays(pipeline: PipelineExecutor, leaves: Sequence[Leaf], rank: int) -> Iterator[tuple[str, int]]:
    """Yield role and bytes on one device of the step's own arrays on a rank."""
    for place, leaf in zip(pipeline.leaves, leaves, strict=True):
        yield leaf.role, piece_bytes(pipeline, place, rank)
        # Uneven pieces are also put together in one array, on the first rank that reads them.
        if place.has_uneven_pieces and rank == place.reader_ranks[0]:
            yield leaf.role, leaf.bytes_per_device


def piece_bytes(pipeline: PipelineExecutor, place: Place, rank: int) -> int:
    """Return the bytes on one device of a rank of one input of the step: all of it, the rank's pieces, or 0.

    Args:
        pipeline: The pipeline.
        place: A leaf of the pipeline.
        rank: The rank.
    """
    avals = pipeline.split.outer.program.avals
    values = place.values if len(place.values) > 1 else place.values * len(place.reader_ranks)
    pairs = zip(values, place.reader_ranks, strict=True)
    return sum(shard_bytes(avals[v], pipeline.shardings.sharding(v, r)) for v, r in pairs if r == rank)


def shard_bytes(aval: Any, sharding: NamedSharding) -> int:
    """Return the bytes of an array on one of its devices; 0 for an array in host memory."""
    if sharding.memory_kind in HOST_KINDS:
        return 0
    return array_bytes(sharding.shard_shape(aval.shape), aval.dtype)


def peak_activation_bytes(pipeline: PipelineExecutor, rank: int, loss: LossStages) -> int:
    """Return the peak bytes of a loss's activations on one device of a rank, over its actions in order."""
    kept_by = {s: _kept_bytes(pipeline.stages[s]) for s in loss.stages_by_rank[rank]}
    now = most = 0
    for step in pipeline.split.schedule.grid[rank]:
        for action in entry_actions(step):
            if action.stage in kept_by:
                kept, waiting = kept_by[action.stage]
                # A separate weight gradient (W) frees what the forward pass and the input gradient (I) have saved.
                now += {"F": kept, "B": -kept, "I": waiting, "W": -kept - waiting}[action.kind]
                most = max(most, now)
    return most


def _kept_bytes(stage: StageJobs) -> tuple[int, int]:
    """Return the bytes on one device saved for a microbatch after its forward pass, and after its input gradient."""
    program = stage.program
    cotangents = program.joint_program.inputs[program.input_counts.forward :]
    return _bytes(stage, program.residuals), _bytes(stage, [*program.weight_residuals, *cotangents])


def _bytes(stage: StageJobs, values: Iterable[Value]) -> int:
    avals = stage.program.joint_program.avals
    return sum(shard_bytes(avals[v], stage.sharding(v)) for v in values)


def _while_acting(
    pipeline: PipelineExecutor, rank: int, loss: LossStages, own: Mapping[ProgramKey, int | None]
) -> int | None:
    """Return the bytes besides the step's own arrays while a rank runs the actions of a loss; None where unknown."""
    stages = [pipeline.stages[s] for s in loss.stages_by_rank[rank]]
    sums = sum(shard_bytes(a, at) for s in stages for a, at in zip(s.sum_avals, s.sum_shardings, strict=True))
    batch = sum(shard_bytes(a, at) for s in stages for a, at in s.stacked_inputs)
    programs = all_known(
        size
        for (kind, s), size in own.items()
        if kind in KINDS and s in loss.stages and pipeline.rank_of((kind, s)) == rank
    )
    if programs is None:
        return None
    held = peak_activation_bytes(pipeline, rank, loss) + _made_before(pipeline, rank, loss)
    return sums + batch + held + max(programs, default=0)


def _made_before(pipeline: PipelineExecutor, rank: int, loss: LossStages) -> int:
    """Return the bytes on one device of a rank's results from the gradients of earlier losses, such as new
    parameters."""
    avals, homes = pipeline.split.outer.program.avals, pipeline.shardings
    made = (
        v
        for group in pipeline.split.assignment.groups
        if group.rank == rank and 0 < group.phase <= loss.number
        for v in group.outputs
    )
    return sum(shard_bytes(avals[v], homes.sharding(v, rank)) for v in made)


def _while_updating(pipeline: PipelineExecutor, rank: int, own: Mapping[ProgramKey, int | None]) -> int | None:
    """Return the bytes of the gradients, twice where the dtype of sums differs, and of the update's results; None if
    unknown."""
    keys = (key for key in own if key[0] != "prepare" and key[0] not in KINDS)
    programs = all_known(own[key] for key in keys if pipeline.rank_of(key) == rank)
    return None if programs is None else sum(programs)


def compiled_bytes(pipeline: PipelineExecutor) -> dict[ProgramKey, int | None]:
    """Return the bytes of each compiled program on one device without its arguments; None where the compiler reports
    none."""
    return {key: _own_bytes(program, pipeline) for key, program in pipeline.programs.items()}


def _own_bytes(program: CompiledProgram, pipeline: PipelineExecutor) -> int | None:
    stats = program.compiled.memory_analysis()
    if stats is None:
        return None
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    reported = getattr(stats, "peak_memory_in_bytes", 0)
    # TPU's own peak counts memory shared by successive values once; the CPU's leaves out the temporaries.
    if reported and pipeline.ranks.mesh.devices.flat[0].platform == "tpu":
        return max(reported - stats.argument_size_in_bytes, outputs)
    return stats.temp_size_in_bytes + outputs
