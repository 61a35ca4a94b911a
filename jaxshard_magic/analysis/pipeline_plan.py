"""Communication and memory of a pipeline's programs, predicted from the plan without compiling."""

from collections.abc import Collection, Iterator, Sequence
from math import prod

from ..compilation.compiled_step import CompiledStep
from ..gradients.accumulate import accumulation_dtype
from ..pipeline.executor import PipelineExecutor
from ..pipeline.jobs import ProgramKey
from ..pipeline.programs import Subprogram
from ..pipeline.stage_jobs import StageJobs
from ..plan import PlannedCollective
from ..program.flow import required_equations
from ..program.ir import Value
from ..program.op_labels import GRADIENT
from ..program.phases import BACKWARD, outside_gradients
from ..program.sizes import array_bytes
from ..report import Leaf
from ..schedule.actions import KINDS
from ..strategies.footprint import footprint_of_part
from ..strategies.planned_collectives import planned_collectives
from ..strategies.sharded_lowering import ShardedLowering
from .collectives import Cause
from .frames import frames_of_traceback
from .pipeline_memory import shard_bytes
from .pipeline_traffic import ProgramTraffic, leaves_of
from .plan_prediction import cause_of, with_plan_causes
from .program_texts import home_files
from .sources import SourceText

# Key of all programs outside the stages: the plan of the whole step describes them together.
OUTSIDE_STAGES = ("beside", 0)


def planned_traffic(
    entry: CompiledStep, pipeline: PipelineExecutor, leaves: Sequence[Leaf], text: SourceText
) -> dict[ProgramKey, ProgramTraffic]:
    """Return the planned collectives of each program of a pipeline, with the lines that cause them.

    Programs outside the stages appear as one (`OUTSIDE_STAGES`), as in the plan of the whole step on one rank.
    Assembling the results of microbatches is left out: a loss is a few numbers.

    Args:
        entry: The step, with the plan of one rank's devices.
        pipeline: Stages, compiled or not.
        leaves: All flat inputs of the step, by position.
        text: The user's files, for the text of lines.
    """
    found, home = dict[ProgramKey, ProgramTraffic](), home_files(entry)
    for key in pipeline.jobs():
        kind, number = key
        named = leaves_of(pipeline, key, leaves)
        if kind == "settle":
            found[key] = ProgramTraffic(tuple(_sums(pipeline, number, named, text, home)))
        elif kind in KINDS and (hold := pipeline.stages[number].lowering) is not None:
            program = pipeline.stages[number].program
            sent = planned_collectives(hold, _equations(program.subprogram(kind)))
            found[key] = ProgramTraffic(tuple(with_plan_causes(sent, program.joint_program, hold, named, text, home)))
    run = entry.plan.run
    if isinstance(run, ShardedLowering):
        beside = outside_gradients(run.program)
        sent = [each for each in planned_collectives(run) if each.equation in beside]
        found[OUTSIDE_STAGES] = ProgramTraffic(tuple(with_plan_causes(sent, run.program, run, leaves, text, home)))
    return found


def planned_bytes(pipeline: PipelineExecutor) -> dict[ProgramKey, int | None]:
    """Return the bytes on one device of each program without its arguments.

    Stages take the planner's memory estimate. Other programs take the bytes of their results, less those of donated
    arguments.
    """
    # A stage on a single device was given no lowering: nothing is sharded there.
    lowerings = [
        stage.lowering or ShardedLowering(pipeline.stage_layouts(s).layout(stage.program))
        for s, stage in enumerate(pipeline.stages)
    ]
    return {key: _bytes_of(pipeline, lowerings, *key) for key in pipeline.jobs()}


def _bytes_of(pipeline: PipelineExecutor, holds: Sequence[ShardedLowering], kind: str, number: int) -> int:
    avals, homes = pipeline.split.outer.program.avals, pipeline.shardings
    taken: Sequence[Value] = ()
    if kind in KINDS:
        return _bytes_of_stage(pipeline.stages[number], holds[number], kind)
    if kind == "prepare":  # the batch and the sums of gradients are counted separately
        return 0
    if kind == "settle":
        settled = pipeline.settle_jobs[number]
        made = [settled.loss.gradient_values[i] for i in settled.owned_inputs]
    elif kind == "finish":
        made = pipeline.split.losses[number].combined_results
    else:
        made, taken = pipeline.split.assignment.groups[number].outputs, pipeline.group_jobs[number][2]
    rank = pipeline.rank_of((kind, number))
    size, freed = (sum(shard_bytes(avals[v], homes.sharding(v, rank)) for v in vs) for vs in (made, taken))
    return max(0, size - freed)


def _bytes_of_stage(stage: StageJobs, hold: ShardedLowering, kind: str) -> int:
    share = stage.program.subprogram(kind)
    results = [v for v in share.results if isinstance(v, Value)]
    beside = 0
    # Gradients are added to their sums one by one, so that only the largest counts.
    if kind in "BW":
        gradients = {v for v in stage.program.gradients if isinstance(v, Value)}
        results = [v for v in results if v not in gradients]
        beside = max(
            (shard_bytes(stage.program.joint_program.avals[v], stage.sharding(v)) for v in gradients), default=0
        )
    return beside + footprint_of_part(hold, _equations(share), share.known_values, results)


def _equations(share: Subprogram) -> Collection[int]:
    wanted = {v for v in share.results if isinstance(v, Value)} - {*share.known_values}
    return required_equations(share.joint_program.top, wanted, {*share.known_values})


def _sums(
    pipeline: PipelineExecutor, number: int, leaves: Sequence[Leaf], text: SourceText, home: Sequence[str]
) -> Iterator[tuple[PlannedCollective, Cause]]:
    """Yield the sums over devices of the gradients owned by a rank, each once per step.

    `leaves` are the leaves of these gradients.
    """
    settled = pipeline.settle_jobs[number]
    for i, s, k in settled.sum_sources:
        stage = pipeline.stages[s]
        partial, value = stage.partial_sum_specs[k], stage.program.gradients[k]
        if partial is None or not isinstance(value, Value):
            continue
        whole, axes = stage.program.joint_program, partial[0]
        aval = whole.avals[value]
        size = array_bytes(stage.sharding(value).shard_shape(aval.shape), accumulation_dtype(aval.dtype))
        frames = frames_of_traceback(whole.producer[value].jaxpr_eqn.source_info.traceback)
        cause = cause_of(frames, BACKWARD, (GRADIENT, settled.owned_inputs.index(i)), leaves, text, home)
        yield (PlannedCollective("all-reduce", axes, prod(pipeline.ranks.mesh.shape[a] for a in axes), size, 1), cause)
