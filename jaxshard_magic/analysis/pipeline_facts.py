"""Facts about the stages of a pipeline: the model parts on each rank, and the leaves of a report on their stages.

The arrays of a model part have many pytree paths; `summarize_paths` shortens them: `emb, layers 0-3`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..pipeline.executor import PipelineExecutor
from ..pipeline.jobs import ProgramKey
from ..plan import REPLICATED, LeafPlan
from ..report import Leaf
from .leaves import leaf, with_memory_kind
from .pipeline_memory import peak_activation_bytes
from .pipeline_traffic import ProgramTraffic
from .stage_products import first_with_same_programs, input_share

_WORD = re.compile(r"\w+(?::\w+)?")
_NUMBER = re.compile(r"[0-9]{1,9}(?::[0-9]{1,9})?")  # number of a layer, or a slice of layers
_MOST = 4  # names listed; further ones are counted


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


def common_words(paths: Iterable[str]) -> int:
    """Return the number of leading words shared by all paths; at least one word of each path is left over."""
    words = [_words(path) for path in dict.fromkeys(paths)]
    common = 0
    while words and all(len(w) > common + 1 for w in words) and len({w[common] for w in words}) == 1:
        common += 1
    return common


def summarize_paths(paths: Sequence[str], common: int | None = None) -> str:
    """Return the parts of a model that leaves belong to, named by the first word in which their paths differ.

    Layer numbers become ranges. At most four names are listed, and the others counted.

    Args:
        paths: Paths of leaves; duplicates are ignored.
        common: Number of leading words to leave out, where other paths count as well; by default the words shared by
            `paths`.

    >>> summarize_paths(["p.emb", "p.layers[0].a", "p.layers[0].b", "p.layers[1].a", "p.layers[2].a"])
    'emb, layers 0-2'
    >>> summarize_paths(["p.emb", "p.layers.down[0:2]", "p.layers.up[0:2]"])
    'emb, layers 0-1'
    """
    words = [_words(path) for path in dict.fromkeys(paths)]
    if not words:
        return ""
    common = common_words(paths) if common is None else common
    numbers_of: dict[str, list[str]] = {}
    for w in words:
        rest = w[common:]
        # A number names no part by itself: the word before it does.
        if _NUMBER.fullmatch(rest[0]) and common:
            rest = [w[common - 1], *rest]
        numbers = numbers_of.setdefault(rest[0], [])
        numbers += [word for word in rest[1:] if _NUMBER.fullmatch(word)][:1]
    parts = [f"{name} {_ranges(numbers)}" if numbers else name for name, numbers in numbers_of.items()]
    more = [f"{len(parts) - _MOST} more"] if len(parts) > _MOST else []
    return ", ".join([*parts[:_MOST], *more])


def _words(path: str) -> list[str]:
    """Return the words of a path; a path without word characters is one word."""
    return _WORD.findall(path) or [path]


def _ranges(numbers: Iterable[str]) -> str:
    """Return numbers as ranges, `0-3, 7`; a slice `0:3` stands for the layers 0 to 2."""
    runs: list[tuple[int, int]] = []
    for first, last in sorted(map(_run, numbers)):
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = runs[-1][0], max(last, runs[-1][1])
        else:
            runs.append((first, last))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _run(number: str) -> tuple[int, int]:
    """Return the first and the last layer of a number or a slice."""
    first, _, end = number.partition(":")
    return int(first), max(int(first), int(end) - 1) if end else int(first)
