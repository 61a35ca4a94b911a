"""Facts about the stages of a pipeline: the model parts on each rank, and the leaves of a report on their stages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..pipeline.executor import PipelineExecutor
from ..pipeline.jobs import ProgramKey
from ..plan import REPLICATED, LeafPlan
from ..report import Leaf
from .leaves import leaf, with_memory_kind
from .paths import common_words, summarize_paths
from .pipeline_memory import peak_activation_bytes
from .pipeline_traffic import ProgramTraffic
from .stage_products import first_with_same_programs, input_share


@dataclass(frozen=True)
class PipelineFacts:
    """Facts about a pipeline for a report.

    Attributes:
        holds: Per rank, its part of the model.
        devices: Per rank, the ids of its devices.
        activation_bytes: Per rank, the bytes of activations on one device at their peak.
        split: Per stage, the share of a whole backward pass spent on the input gradient, in FLOPs.
        same_programs: Per stage, the first stage with the same programs.
        crossing: Per stage boundary, the forward bytes of one microbatch; 0 between the stages of two losses.
        shards: Number of parts over which the examples of a microbatch are divided.
        chosen: Whether the user specified where stages may begin.
        traffic: Traffic of each program.
        units: Per stage, name and FLOPs of each indivisible unit.
    """

    holds: tuple[str, ...]
    devices: tuple[tuple[int, ...], ...]
    activation_bytes: tuple[int, ...]
    split: tuple[float, ...]
    same_programs: tuple[int, ...]
    crossing: tuple[int, ...]
    shards: int
    chosen: bool
    traffic: Mapping[ProgramKey, ProgramTraffic]
    units: tuple[tuple[tuple[str, float], ...], ...]


def read_pipeline_facts(
    pipeline: PipelineExecutor, planned: Sequence[LeafPlan], said: Mapping[ProgramKey, ProgramTraffic]
) -> PipelineFacts:
    """Return the facts about `pipeline`.

    Args:
        pipeline: The pipeline.
        planned: Inputs of the step.
        said: Traffic of each program.
    """
    ranks, losses = range(len(pipeline.ranks)), pipeline.split.losses
    names = _names(pipeline, planned)
    common = common_words(path for paths in names for path in paths)
    return PipelineFacts(
        tuple(summarize_paths(names[rank], common) for rank in ranks),
        tuple(tuple(d.id for d in mesh.devices.flat) for mesh in pipeline.ranks.sub_meshes),
        tuple(max(peak_activation_bytes(pipeline, rank, loss) for loss in losses) for rank in ranks),
        tuple(input_share(pipeline, s) for s in range(len(pipeline.stages))),
        first_with_same_programs(pipeline),
        # The last stage of a loss sends nothing to the first of the next: a 0 between them.
        tuple(crossing for loss in losses for crossing in (*loss.split_loss.crossing_bytes, 0))[:-1],
        losses[0].call.cut.shards,
        any(loss.split_loss.has_chosen_starts for loss in losses),
        said,
        tuple(_units(pipeline, planned)),
    )


def pipeline_leaves(pipeline: PipelineExecutor, planned: Sequence[LeafPlan]) -> tuple[Leaf, ...]:
    """Return one `Leaf` per planned input, in the same order, on the stages that store it.

    Args:
        pipeline: The pipeline.
        planned: Inputs of the step.
    """
    rows = []
    for plan, place in zip(planned, pipeline.leaves, strict=True):
        first, size = min(place.reader_ranks, default=0), place.sharding.mesh.shape[pipeline.ranks.axis]
        row = leaf(replace(plan, spec=place.sharding.spec), pipeline.ranks.sub_mesh(first, first + size))
        whole = size == len(pipeline.ranks)
        within = {} if whole else {pipeline.ranks.axis: (first, first + size)}
        why = plan.reason
        if why == REPLICATED:
            cut = len(place.values) > 1
            why = "its layers over the stages" if cut else f"whole on the devices of its stage{'s' * (size > 1)}"
        if place.has_uneven_pieces:
            why = "stages have different numbers of its layers: put together here after each step"
        rows.append(replace(row, within=within, why=with_memory_kind(why, plan.memory)))
    return tuple(rows)


def _names(pipeline: PipelineExecutor, planned: Sequence[LeafPlan]) -> list[list[str]]:
    """Return the parameter paths of each rank; a part of a stacked parameter has its range of layers."""
    split = pipeline.split
    names: list[list[str]] = [[] for _ in range(len(pipeline.ranks))]
    for s, program in enumerate(split.programs):
        loss, rank = split.loss_of(s), split.schedule.rank_of[s]
        for i in program.stage.parameters:
            at = split.leaf_of.get(loss.input_values[i])
            if at is None:
                continue
            piece, path = loss.split_loss.pieces[i], planned[at].path
            if piece.first_layer is not None and piece.end_layer is not None:
                path = f"{path}[{piece.first_layer}:{piece.end_layer}]"
            if path not in names[rank]:  # two losses may train the same parameter
                names[rank].append(path)
    return names


def _units(pipeline: PipelineExecutor, planned: Sequence[LeafPlan]) -> Iterator[tuple[tuple[str, float], ...]]:
    """Yield, per stage, name and FLOPs of each indivisible unit."""
    leaf_of = pipeline.split.leaf_of
    for loss in pipeline.split.losses:
        paths = {
            loss.split_loss.pieces[i].operand: planned[leaf_of[v]].path
            for i, v in loss.input_values.items()
            if v in leaf_of
        }
        trained = [paths[k] for units in loss.split_loss.units for u in units for k in u.parameters if k in paths]
        common = common_words(trained)
        for units in loss.split_loss.units:
            named: list[tuple[str, float]] = []
            for unit in units:
                mine = [paths[k] for k in unit.parameters if k in paths]
                # A unit without parameters takes the name of the unit before.
                name = summarize_paths(mine, common) if mine else named[-1][0] if named else "operations"
                if unit.layer is not None:
                    name = f"layer {unit.layer}"
                named.append((name, unit.cost))
            yield tuple(named)
