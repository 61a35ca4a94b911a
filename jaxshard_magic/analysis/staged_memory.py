"""What each rank of a pipeline holds: its arrays, the activations of microbatches on their way, and its programs'."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from ..pipeline.executed import Pipeline
from ..pipeline.jobs import Key, Made
from ..pipeline.leaves import Leaf as Place
from ..pipeline.loss_stages import LossStages
from ..pipeline.stage_jobs import StageJobs
from ..program.ir import Value
from ..program.memory_kinds import HOST_KINDS
from ..program.sizes import array_bytes
from ..report import DeviceMemory, Leaf, Memory
from ..schedule.actions import KINDS, parts
from .memory import by_role, device_limit, device_memory
from .roofline import known


def staged_memory(
    pipeline: Pipeline, leaves: Sequence[Leaf], own: Mapping[Key, int | None], source: str
) -> Memory:
    """Bytes on each device at its peak: the step's own arrays there and, as temporaries, the larger of what the actions
    hold (activations, sums of gradients, the batch in microbatches, a program's own) and of what the update makes.

    `own`: the bytes of each program on one device, beside its arguments. Temporaries and peak are None on a rank that
    has a program for which that is None, as where the compiler does not tell.
    """
    rows: dict[int, DeviceMemory] = {}
    for rank, mesh in enumerate(pipeline.ranks.each):
        arrays = by_role(_arrays(pipeline, leaves, rank))
        temporaries = None
        acting = (_while_acting(pipeline, rank, loss, own) for loss in pipeline.split.losses)
        if (peaks := known([*acting, _while_updating(pipeline, rank, own)])) is not None:
            temporaries = max(peaks)
        for device in mesh.devices.flat:
            rows[device.id] = device_memory(device.id, arrays, temporaries, device_limit(device))
    return Memory(tuple(rows[d.id] for d in pipeline.ranks.mesh.devices.flat), source)


def _arrays(pipeline: Pipeline, leaves: Sequence[Leaf], rank: int) -> Iterator[tuple[str, int]]:
    """Role and bytes on one device of the step's own arrays on a rank."""
    for place, leaf in zip(pipeline.leaves, leaves, strict=True):
        yield leaf.role, piece_bytes(pipeline, place, rank)
        if place.put_together and rank == place.readers[0]:
            yield leaf.role, leaf.bytes_per_device


def piece_bytes(pipeline: Pipeline, place: Place, rank: int) -> int:
    """Bytes on one device of a rank of what its programs read of an input of the step: all of it, the pieces that are
    there, or nothing."""
    avals = pipeline.split.around.program.avals
    values = place.values if len(place.values) > 1 else place.values * len(place.readers)
    pairs = zip(values, place.readers, strict=True)
    return sum(shard_bytes(avals[v], pipeline.homes.sharding(v, r)) for v, r in pairs if r == rank)


def shard_bytes(aval: Any, sharding: NamedSharding) -> int:
    """Bytes of an array on one of its devices; 0 where it lies on the host."""
    if sharding.memory_kind in HOST_KINDS:
        return 0
    return array_bytes(sharding.shard_shape(aval.shape), aval.dtype)


def most_held(pipeline: Pipeline, rank: int, loss: LossStages) -> int:
    """The most bytes of activations of a loss that a rank holds on one device, going through its actions in order."""
    kept_by = {s: _kept_bytes(pipeline.stages[s]) for s in loss.stages_of[rank]}
    now = most = 0
    for step in pipeline.split.schedule.grid[rank]:
        for action in parts(step):
            if action.stage in kept_by:
                kept, waiting = kept_by[action.stage]
                now += {"F": kept, "B": -kept, "I": waiting, "W": -kept - waiting}[action.kind]
                most = max(most, now)
    return most


def _kept_bytes(stage: StageJobs) -> tuple[int, int]:
    """Bytes on one device of what a microbatch keeps from its forward pass on, and from its input gradient on."""
    program = stage.program
    cotangents = program.whole.inputs[program.slots.given :]
    return _bytes(stage, program.kept), _bytes(stage, [*program.kept_for_weights, *cotangents])


def _bytes(stage: StageJobs, values: Iterable[Value]) -> int:
    avals = stage.program.whole.avals
    return sum(shard_bytes(avals[v], stage.sharding(v)) for v in values)


def _while_acting(
    pipeline: Pipeline, rank: int, loss: LossStages, own: Mapping[Key, int | None]
) -> int | None:
    """Bytes beside the step's own arrays while a rank runs the actions of a loss."""
    stages = [pipeline.stages[s] for s in loss.stages_of[rank]]
    sums = sum(shard_bytes(a, at) for s in stages for a, at in zip(s.sums, s.sums_at, strict=True))
    batch = sum(shard_bytes(a, at) for s in stages for a, at in s.stacked)
    programs = known(
        size
        for (kind, s), size in own.items()
        if kind in KINDS and s in loss.stages and pipeline.rank_of((kind, s)) == rank
    )
    if programs is None:
        return None
    held = most_held(pipeline, rank, loss) + _made_before(pipeline, rank, loss)
    return sums + batch + held + max(programs, default=0)


def _made_before(pipeline: Pipeline, rank: int, loss: LossStages) -> int:
    """Bytes on one device of what a rank has made of the gradients of earlier losses, such as new parameters."""
    avals, homes = pipeline.split.around.program.avals, pipeline.homes
    made = (
        v
        for group in pipeline.split.placed.groups
        if group.place == rank and 0 < group.phase <= loss.number
        for v in group.wanted
    )
    return sum(shard_bytes(avals[v], homes.sharding(v, rank)) for v in made)


def _while_updating(pipeline: Pipeline, rank: int, own: Mapping[Key, int | None]) -> int | None:
    """The gradients, twice where their sums are of another type, and what the programs of the update make."""
    keys = (key for key in own if key[0] != "prepare" and key[0] not in KINDS)
    programs = known(own[key] for key in keys if pipeline.rank_of(key) == rank)
    return None if programs is None else sum(programs)


def compiled_bytes(pipeline: Pipeline) -> dict[Key, int | None]:
    """Return the bytes of each compiled program on one device, beside its arguments; None where the compiler does not
    tell."""
    return {key: _own_bytes(program, pipeline) for key, program in pipeline.programs.items()}


def _own_bytes(program: Made, pipeline: Pipeline) -> int | None:
    stats = program.compiled.memory_analysis()
    if stats is None:
        return None
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    reported = getattr(stats, "peak_memory_in_bytes", 0)
    # TPU's peak counts once what lies in one place one after the other; CPU's leaves the temporaries out
    if reported and pipeline.ranks.mesh.devices.flat[0].platform == "tpu":
        return max(reported - stats.argument_size_in_bytes, outputs)
    return stats.temp_size_in_bytes + outputs
