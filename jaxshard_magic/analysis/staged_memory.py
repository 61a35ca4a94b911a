"""What each rank of a pipeline holds: its arrays, the activations of microbatches on their way, and its programs'."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.sharding import NamedSharding

from ..pipeline.executed import Pipeline
from ..pipeline.jobs import Made
from ..pipeline.leaves import Leaf as Place
from ..pipeline.stage_jobs import StageJobs
from ..program.ir import Value
from ..program.sizes import array_bytes
from ..report import DeviceMemory, Leaf, Memory
from ..schedule.actions import KINDS, parts
from .memory import device_limit

_ROLES = ("params", "optimizer", "batch")


def staged_memory(pipeline: Pipeline, leaves: Sequence[Leaf]) -> Memory:
    """Bytes on each device at its peak: the step's own arrays there and, as temporaries, the larger of what the actions
    hold (activations, sums of gradients, the batch in microbatches, a program's own) and of what the update makes.

    Temporaries and peak are None on a rank that has a program of which the compiler does not tell.
    """
    rows: dict[int, DeviceMemory] = {}
    for rank, mesh in enumerate(pipeline.ranks.each):
        roles = Counter[str]()
        for place, row in zip(pipeline.leaves, leaves, strict=True):
            role = row.role if row.role in _ROLES else "other"
            roles[role] += piece_bytes(pipeline, place, rank)
            if place.put_together and rank == place.readers[0]:
                roles[role] += row.bytes_per_device
        acting, updating = _while_acting(pipeline, rank), _while_updating(pipeline, rank)
        temporaries = None if acting is None or updating is None else max(acting, updating)
        for device in mesh.devices.flat:
            rows[device.id] = DeviceMemory(
                device=device.id,
                params=roles["params"],
                optimizer=roles["optimizer"],
                batch=roles["batch"],
                other=roles["other"],
                temporaries=temporaries,
                peak=None if temporaries is None else sum(roles.values()) + temporaries,
                limit=device_limit(device),
            )
    return Memory(tuple(rows[d.id] for d in pipeline.ranks.mesh.devices.flat), "compiled")


def piece_bytes(pipeline: Pipeline, place: Place, rank: int) -> int:
    """Bytes on one device of a rank of what its programs read of an input of the step: all of it, the pieces that are
    there, or nothing."""
    avals = pipeline.split.around.program.avals
    values = place.values if len(place.values) > 1 else place.values * len(place.readers)
    pairs = zip(values, place.readers, strict=True)
    return sum(shard_bytes(avals[v], pipeline.homes.sharding(v, r)) for v, r in pairs if r == rank)


def shard_bytes(aval: Any, sharding: NamedSharding) -> int:
    """Bytes of an array on one of its devices."""
    return array_bytes(sharding.shard_shape(aval.shape), aval.dtype)


def most_held(pipeline: Pipeline, rank: int) -> int:
    """The most bytes of activations that a rank holds on one device, going through its actions in order."""
    schedule = pipeline.split.schedule
    each = {s: _held_by(pipeline.stages[s]) for s in schedule.stages_of[rank]}
    held = most = 0
    for step in schedule.grid[rank]:
        for action in parts(step):
            kept, waiting = each[action.stage]
            held += {"F": kept, "B": -kept, "I": waiting, "W": -kept - waiting}[action.kind]
            most = max(most, held)
    return most


def _held_by(stage: StageJobs) -> tuple[int, int]:
    """Bytes on one device of what a microbatch keeps from its forward pass on, and from its input gradient on."""
    program = stage.program
    cotangents = program.whole.inputs[program.slots.given :]
    return _bytes(stage, program.kept), _bytes(stage, [*program.kept_for_weights, *cotangents])


def _bytes(stage: StageJobs, values: Iterable[Value]) -> int:
    avals = stage.program.whole.avals
    return sum(shard_bytes(avals[v], stage.sharding(v)) for v in values)


def _while_acting(pipeline: Pipeline, rank: int) -> int | None:
    stages = [pipeline.stages[s] for s in pipeline.split.schedule.stages_of[rank]]
    sums = sum(shard_bytes(a, at) for s in stages for a, at in zip(s.sums, s.sums_at, strict=True))
    taken = sum(shard_bytes(a, at) for s in stages for a, at in s.stacked)
    own = _known(_own_bytes(made, pipeline) for made in _programs(pipeline, rank, acting=True))
    return None if own is None else sums + taken + most_held(pipeline, rank) + max(own, default=0)


def _while_updating(pipeline: Pipeline, rank: int) -> int | None:
    """The gradients, twice where their sums are of another type, and what the programs of the update make."""
    own = _known(_own_bytes(made, pipeline) for made in _programs(pipeline, rank, acting=False))
    return None if own is None else sum(own)


def _programs(pipeline: Pipeline, rank: int, *, acting: bool) -> Iterator[Made]:
    """Those of a rank's actions, or those that it runs after them."""
    for key, made in pipeline.programs.items():
        if pipeline.rank_of(key) == rank and key[0] != "prepare" and (key[0] in KINDS) == acting:
            yield made


def _known(sizes: Iterable[int | None]) -> list[int] | None:
    """All of them; None where one is not known."""
    found = list(sizes)
    return None if None in found else [n for n in found if n is not None]


def _own_bytes(made: Made, pipeline: Pipeline) -> int | None:
    """Bytes of a program beside its arguments; None where the compiler does not tell."""
    stats = made.compiled.memory_analysis()
    if stats is None:
        return None
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    told = getattr(stats, "peak_memory_in_bytes", 0)
    # TPU's peak counts once what lies in one place one after the other; CPU's leaves the temporaries out
    if told and pipeline.ranks.mesh.devices.flat[0].platform == "tpu":
        return max(told - stats.argument_size_in_bytes, outputs)
    return stats.temp_size_in_bytes + outputs
