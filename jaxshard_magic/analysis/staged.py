"""What the stages of a pipeline are: what of the model each rank holds, and leaves on their stages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..pipeline.executed import Pipeline
from ..pipeline.jobs import Key
from ..plan import WHOLE, LeafPlan
from ..report import Leaf
from .leaves import leaf, with_memory
from .paths import common_words, told_together
from .staged_memory import most_held
from .staged_moves import Said
from .staged_works import first_alike, input_share


@dataclass(frozen=True)
class Staged:
    """Of a pipeline's report, per rank: what of the model it holds, its devices, and the bytes of the activations that
    it holds at its fullest on one device. Of each stage, `split`: the share of a whole backward pass that is its input
    gradient, in FLOPs; `alike`: the first stage that runs the same programs; `units`: the name and the FLOPs of what is
    never cut. `crossing`: bytes that one microbatch takes over each boundary, none where a loss ends. `shards`: the
    parts that its examples are divided into. `chosen`: whether the user said where stages may begin. `said`: what each
    program's text says."""

    holds: tuple[str, ...]
    devices: tuple[tuple[int, ...], ...]
    activation_bytes: tuple[int, ...]
    split: tuple[float, ...]
    alike: tuple[int, ...]
    crossing: tuple[int, ...]
    shards: int
    chosen: bool
    said: Mapping[Key, Said]
    units: tuple[tuple[tuple[str, float], ...], ...]


def staged(pipeline: Pipeline, planned: Sequence[LeafPlan], said: Mapping[Key, Said]) -> Staged:
    """What `pipeline` is made of; `planned` are the inputs of its step."""
    ranks, losses = range(len(pipeline.ranks)), pipeline.split.losses
    names = _names(pipeline, planned)
    common = common_words(path for paths in names for path in paths)
    return Staged(
        tuple(told_together(names[rank], common) for rank in ranks),
        tuple(tuple(d.id for d in mesh.devices.flat) for mesh in pipeline.ranks.each),
        tuple(max(most_held(pipeline, rank, loss) for loss in losses) for rank in ranks),
        tuple(input_share(pipeline, s) for s in range(len(pipeline.stages))),
        first_alike(pipeline),
        tuple(crossing for loss in losses for crossing in (*loss.cut.crossing, 0))[:-1],
        losses[0].call.cut.shards,
        any(loss.cut.chosen for loss in losses),
        said,
        tuple(_units(pipeline, planned)),
    )


def staged_leaves(pipeline: Pipeline, planned: Sequence[LeafPlan]) -> tuple[Leaf, ...]:
    """One `Leaf` per planned input, in the same order, on the stages that have it."""
    rows = []
    for plan, place in zip(planned, pipeline.leaves, strict=True):
        first, size = min(place.readers, default=0), place.sharding.mesh.shape[pipeline.ranks.axis]
        row = leaf(replace(plan, spec=place.sharding.spec), pipeline.ranks.between(first, first + size))
        whole = size == len(pipeline.ranks)
        within = {} if whole else {pipeline.ranks.axis: (first, first + size)}
        why = plan.why
        if why == WHOLE:
            cut = len(place.values) > 1
            why = (
                "its layers over the stages"
                if cut
                else f"whole on the devices of its stage{'s' * (size > 1)}"
            )
        if place.put_together:
            why = "stages have different numbers of its layers: put together here after each step"
        rows.append(replace(row, within=within, why=with_memory(why, plan.memory)))
    return tuple(rows)


def _names(pipeline: Pipeline, planned: Sequence[LeafPlan]) -> list[list[str]]:
    """The parameters of each rank, those in pieces with their layers."""
    split = pipeline.split
    names: list[list[str]] = [[] for _ in range(len(pipeline.ranks))]
    for s, program in enumerate(split.programs):
        loss, rank = split.loss_of(s), split.schedule.rank_of[s]
        for i in program.stage.parameters:
            at = split.leaf_of.get(loss.input_of[i])
            if at is None:
                continue
            piece, path = loss.cut.pieces[i], planned[at].path
            if piece.first is not None and piece.end is not None:
                path = f"{path}[{piece.first}:{piece.end}]"
            if path not in names[rank]:  # of two losses both may train it
                names[rank].append(path)
    return names


def _units(pipeline: Pipeline, planned: Sequence[LeafPlan]) -> Iterator[tuple[tuple[str, float], ...]]:
    """What reads no parameter goes with what came before it."""
    leaf_of = pipeline.split.leaf_of
    for loss in pipeline.split.losses:
        paths = {
            loss.cut.pieces[i].operand: planned[leaf_of[v]].path
            for i, v in loss.input_of.items()
            if v in leaf_of
        }
        trained = [paths[k] for units in loss.cut.units for u in units for k in u.parameters if k in paths]
        common = common_words(trained)
        for units in loss.cut.units:
            named: list[tuple[str, float]] = []
            for unit in units:
                mine = [paths[k] for k in unit.parameters if k in paths]
                name = told_together(mine, common) if mine else named[-1][0] if named else "operations"
                if unit.layer is not None:
                    name = f"layer {unit.layer}"
                named.append((name, unit.cost))
            yield tuple(named)
