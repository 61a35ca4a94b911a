"""What the compiled programs of a pipeline say: leaves on their stages, memory of each rank, what moves."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import NamedSharding

from ..pipeline.executed import Pipeline
from ..pipeline.jobs import Made
from ..pipeline.stage_jobs import StageJobs
from ..plan import WHOLE, LeafPlan
from ..program.flops import counted
from ..program.flow import Flow
from ..program.ir import Equation, Value
from ..program.sizes import array_bytes
from ..report import Collective, DeviceMemory, Leaf, Memory
from ..schedule.actions import parts
from .attribution import attributed, host_calls
from .collectives import moves
from .hlo import read
from .leaves import leaf
from .memory import device_limit
from .origin import Origins
from .paths import common_words, told_together
from .sources import SourceText

_ROLES = ("params", "optimizer", "batch")


@dataclass(frozen=True)
class Staged:
    """Of a pipeline's report, per rank: what of the model it holds, its devices, and the bytes of the activations that
    it holds at its fullest on one device. `split`: of each stage the share of a whole backward pass that is its input
    gradient, in FLOPs. `crossing`: bytes that one microbatch takes over each boundary. `shards`: the parts that its
    examples are divided into. `said`: what each program's text says. `units`: of each stage, the name
    and the FLOPs of what is never cut."""

    holds: tuple[str, ...]
    devices: tuple[tuple[int, ...], ...]
    activation_bytes: tuple[int, ...]
    split: tuple[float, ...]
    crossing: tuple[int, ...]
    shards: int
    said: "Mapping[Any, Said]"
    units: tuple[tuple[tuple[str, float], ...], ...]


def staged(pipeline: Pipeline, planned: Sequence[LeafPlan], said: "Mapping[Any, Said]") -> Staged:
    """What `pipeline` is made of; `planned` are the inputs of its step."""
    ranks = range(len(pipeline.ranks))
    names = _names(pipeline, planned)
    common = common_words(path for paths in names for path in paths)
    return Staged(
        tuple(told_together(names[rank], common) for rank in ranks),
        tuple(tuple(d.id for d in mesh.devices.flat) for mesh in pipeline.ranks.each),
        tuple(_most_held(pipeline, rank) for rank in ranks),
        tuple(_input_share(stage) for stage in pipeline.stages),
        tuple(pipeline.split.loss.crossing),
        pipeline.split.call.cut.shards,
        said,
        tuple(_units(pipeline, planned)),
    )


def staged_leaves(pipeline: Pipeline, planned: Sequence[LeafPlan]) -> tuple[Leaf, ...]:
    """One `Leaf` per planned input, in the same order, on the stages that have it."""
    found = []
    for plan, place in zip(planned, pipeline.leaves, strict=True):
        first, size = min(place.readers, default=0), place.sharding.mesh.shape[pipeline.ranks.axis]
        row = leaf(replace(plan, spec=place.sharding.spec), pipeline.ranks.between(first, first + size))
        whole = size == len(pipeline.ranks)
        within = {} if whole else {pipeline.ranks.axis: (first, first + size)}
        why = row.why
        if why == WHOLE:
            cut = len(place.values) > 1
            why = (
                "its layers over the stages"
                if cut
                else f"whole on the devices of its stage{'s' * (size > 1)}"
            )
        if place.put_together:
            why = "stages have different numbers of its layers: put together here after each step"
        found.append(replace(row, within=within, why=why))
    return tuple(found)


def _names(pipeline: Pipeline, planned: Sequence[LeafPlan]) -> list[list[str]]:
    """The parameters of each rank, those in pieces with their layers."""
    leaf_of = {v: (i, k) for i, part in enumerate(pipeline.split.leaves) for k, v in enumerate(part.values)}
    found: list[list[str]] = [[] for _ in range(len(pipeline.ranks))]
    split = pipeline.split
    for s, program in enumerate(split.programs):
        for i in program.stage.parameters:
            at = leaf_of.get(split.input_of[i])
            if at is None:
                continue
            piece, path = split.loss.pieces[i], planned[at[0]].path
            if piece.first is not None and piece.end is not None:
                path = f"{path}[{piece.first}:{piece.end}]"
            found[split.schedule.rank_of[s]].append(path)
    return found


def _units(pipeline: Pipeline, planned: Sequence[LeafPlan]) -> Iterator[tuple[tuple[str, float], ...]]:
    """What reads no parameter goes with what came before it."""
    split = pipeline.split
    leaf_of = {v: i for i, part in enumerate(split.leaves) for v in part.values}
    paths = {
        split.loss.pieces[i].operand: planned[leaf_of[v]].path
        for i, v in split.input_of.items()
        if v in leaf_of
    }
    trained = [paths[k] for units in split.loss.units for u in units for k in u.parameters if k in paths]
    common = common_words(trained)
    for units in split.loss.units:
        found: list[tuple[str, float]] = []
        for unit in units:
            mine = [paths[k] for k in unit.parameters if k in paths]
            name = told_together(mine, common) if mine else found[-1][0] if found else "operations"
            if unit.layer is not None:
                name = f"layer {unit.layer}"
            found.append((name, unit.cost))
        yield tuple(found)


def _input_share(stage: StageJobs) -> float:
    program = stage.program
    whole = program.whole
    if not program.moving_ins:
        return 0.0
    cost: Counter[int] = Counter()
    top = {inner: e.index for e in whole.top.equations for inner in inside_of(e)}
    for work in counted(whole, Flow(whole)):
        cost[top[work.equation]] += work.flops
    backward = sum(cost[i] for i in program.backward_equations)
    return sum(cost[i] for i in program.input_equations) / backward if backward else 0.5


def inside_of(e: Equation) -> Iterator[int]:
    """The numbers of an equation and of all those inside of it."""
    yield e.index
    for door in e.doors:
        for inner in door.scope.equations:
            yield from inside_of(inner)


def _most_held(pipeline: Pipeline, rank: int) -> int:
    """The most bytes of activations that a rank holds on one device, going through its actions in order."""
    held = most = 0
    for step in pipeline.split.schedule.grid[rank]:
        for action in parts(step):
            kept, waiting = _held_by(pipeline.stages[action.stage])
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
    return sum(_shard_bytes(avals[v], stage.sharding(v)) for v in values)


def _shard_bytes(aval: Any, sharding: NamedSharding) -> int:
    return array_bytes(sharding.shard_shape(aval.shape), aval.dtype)


def staged_memory(pipeline: Pipeline, leaves: Sequence[Leaf]) -> Memory:
    """Bytes on each device at its peak: the step's own arrays there and, as temporaries, the larger of what the actions
    hold (activations, sums of gradients, the batch in microbatches, a program's own) and of what the update makes."""
    rows: dict[int, DeviceMemory] = {}
    for rank, mesh in enumerate(pipeline.ranks.each):
        roles = Counter[str]()
        for place, row in zip(pipeline.leaves, leaves, strict=True):
            if rank in place.readers:
                role = row.role if row.role in _ROLES else "other"
                roles[role] += sum(_piece_bytes(pipeline, place, rank))
            if place.put_together and rank == place.readers[0]:
                roles[row.role if row.role in _ROLES else "other"] += row.bytes_per_device
        temporaries = max(_while_acting(pipeline, rank), _while_updating(pipeline, rank))
        for device in mesh.devices.flat:
            rows[device.id] = DeviceMemory(
                device=device.id,
                params=roles["params"],
                optimizer=roles["optimizer"],
                batch=roles["batch"],
                other=roles["other"],
                temporaries=temporaries,
                peak=sum(roles.values()) + temporaries,
                limit=device_limit(device),
            )
    return Memory(tuple(rows[d.id] for d in pipeline.ranks.mesh.devices.flat), "compiled")


def _piece_bytes(pipeline: Pipeline, place: Any, rank: int) -> Iterator[int]:
    avals = pipeline.split.around.program.avals
    values = place.values if len(place.values) > 1 else place.values * len(place.readers)
    for v, r in zip(values, place.readers, strict=True):
        if r == rank:
            yield _shard_bytes(avals[v], pipeline.homes.sharding(v, r))


def _programs_of(pipeline: Pipeline, rank: int, *, acting: bool) -> Iterator[tuple[tuple[str, int], Made]]:
    schedule = pipeline.split.schedule
    for key, made in pipeline.programs.items():
        kind, number = key
        if kind in "FBIW":
            if acting and schedule.rank_of[number] == rank:
                yield key, made
        elif not acting and _rank_of(pipeline, kind, number) == rank:
            yield key, made


def _rank_of(pipeline: Pipeline, kind: str, number: int) -> int:
    """Where a program runs that is none of a stage's."""
    split = pipeline.split
    if kind == "group":
        return split.placed.groups[number].place
    return split.hub if kind == "finish" else number


def _while_acting(pipeline: Pipeline, rank: int) -> int:
    stages = [pipeline.stages[s] for s in pipeline.split.schedule.stages_of[rank]]
    sums = sum(_shard_bytes(a, at) for s in stages for a, at in zip(s.sums, s.sums_at, strict=True))
    taken = sum(_shard_bytes(a, at) for s in stages for a, at in s.stacked)
    own = (_own_bytes(made, _on_tpu(pipeline)) for _, made in _programs_of(pipeline, rank, acting=True))
    return sums + taken + _most_held(pipeline, rank) + max(own, default=0)


def _while_updating(pipeline: Pipeline, rank: int) -> int:
    """The gradients, twice where their sums are of another type, and what the programs of the update make."""
    found = 0
    for (kind, _), made in _programs_of(pipeline, rank, acting=False):
        if kind != "prepare":
            found += _own_bytes(made, _on_tpu(pipeline))
    return found


def _on_tpu(pipeline: Pipeline) -> bool:
    return pipeline.ranks.mesh.devices.flat[0].platform == "tpu"


def _own_bytes(made: Made, on_tpu: bool) -> int:
    """Bytes of a program beside its arguments."""
    stats = made.compiled.memory_analysis()
    if stats is None:
        return 0
    if on_tpu and (
        told := getattr(stats, "peak_memory_in_bytes", 0)
    ):  # what lies in one place one after the other
        return max(
            told - stats.argument_size_in_bytes, stats.output_size_in_bytes - stats.alias_size_in_bytes
        )
    return stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes


@dataclass(frozen=True)
class Said:
    """What one program's text says: what moves when it runs once, and the lines that call Python."""

    collectives: tuple[Collective, ...]
    calls: tuple[str | None, ...]


def said_by(
    pipeline: Pipeline, leaves: Sequence[Leaf], home: Sequence[str], text: SourceText
) -> dict[Any, Said]:
    """What each program of a pipeline says, by its key."""
    texts: dict[int, Said] = {}  # alike stages may share a program
    found = {}
    for key, made in pipeline.programs.items():
        if id(made) not in texts:
            texts[id(made)] = _of_program(pipeline, key, made, leaves, home, text)
        found[key] = texts[id(made)]
    return found


def staged_collectives(pipeline: Pipeline, said: Mapping[Any, Said]) -> tuple[Collective, ...]:
    """What moves in a step: how often in all stages together, and what a device sends, the mean over the stages, so
    that rows add up."""
    found: dict[Any, Collective] = {}
    m, ranks = pipeline.split.schedule.microbatches, len(pipeline.ranks)
    for rank in range(ranks):
        for acting, times in ((True, m), (False, 1)):
            for key, _ in _programs_of(pipeline, rank, acting=acting):
                for row in said[key].collectives:
                    _add(found, replace(row, count=row.count * times, wire_bytes=row.wire_bytes * times))
    rows = (
        replace(row, wire_bytes=row.wire_bytes // ranks) for row in (*_between(pipeline), *found.values())
    )
    return tuple(sorted(rows, key=lambda c: -c.wire_bytes))


def _add(found: dict[Any, Collective], row: Collective) -> None:
    alike = replace(row, count=0, wire_bytes=0, what=None)
    before = found.get(alike)
    if before is not None:
        row = replace(row, count=row.count + before.count, wire_bytes=row.wire_bytes + before.wire_bytes)
    found[alike] = row


def _of_program(
    pipeline: Pipeline, key: Any, made: Made, leaves: Sequence[Leaf], home: Sequence[str], text: SourceText
) -> Said:
    hlo = made.compiled.as_text()
    if not hlo:
        return Said((), ())
    module = read(hlo)
    places = [i for i, is_read in enumerate(made.reads) if is_read]
    kind, number = key
    named: Sequence[Leaf] = ()
    if kind == "settle":
        named = _leaves_of(pipeline, pipeline.owned(number), leaves)
    if kind in "FBIW":
        named = _leaves_of(pipeline, pipeline.split.programs[number].stage.parameters, leaves)
        first = 1 + (len(named) if kind in "BW" else 0)  # the sums and the number of the microbatch
        places = [i - first if 0 <= i - first < len(named) else len(named) for i in places]
    origins = Origins(module, home, places)
    found = moves(module, pipeline.ranks.each[0].shape)
    return Said(attributed(module, found, origins, named, text), host_calls(module, origins))


def _leaves_of(pipeline: Pipeline, inputs: Iterable[int], leaves: Sequence[Leaf]) -> list[Leaf]:
    """The leaf that each of these inputs of the loss is, or is made of."""
    split = pipeline.split
    place = {v: i for i, part in enumerate(split.leaves) for v in part.values}
    blank = Leaf("a parameter", "params", (), "", (), 0, 0, "")
    return [leaves[place[v]] if (v := split.input_of[i]) in place else blank for i in inputs]


def sent_by(pipeline: Pipeline, s: int) -> tuple[int, int]:
    """Bytes that one device of a stage sends of one microbatch to the next stage, and to the one before."""
    stage, schedule = pipeline.stages[s], pipeline.split.schedule
    program, found = stage.program, []
    for to, ends, at in (
        (s + 1, program.made[: len(program.stage.outs)], stage.made),
        (s - 1, program.given_back, stage.given_back),
    ):
        there = 0 <= to < len(pipeline.stages) and schedule.rank_of[to] != schedule.rank_of[s]
        values = [(v, a) for v, a in zip(ends, at, strict=False) if there and isinstance(v, Value)]
        found.append(sum(_shard_bytes(program.whole.avals[v], a) for v, a in values))
    return found[0], found[1]


def _between(pipeline: Pipeline) -> Iterator[Collective]:
    """What the stages send to each other."""
    m = pipeline.split.schedule.microbatches
    each = [n for s in range(len(pipeline.stages)) for n in sent_by(pipeline, s) if n]
    if each:
        yield Collective(
            kind="collective-permute",
            axes=(pipeline.ranks.axis,),
            group_size=len(pipeline.ranks),
            count=len(each) * m,
            bytes=max(each),
            wire_bytes=sum(each) * m,
            what="activations to the next stage, their gradients to the one before",
        )
