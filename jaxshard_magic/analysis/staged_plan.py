"""What the programs of a pipeline would send and hold, by its plan: nothing of them is compiled."""

from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from ..gradients.accumulate import summed_in
from ..pipeline.executed import Pipeline
from ..pipeline.jobs import Key
from ..pipeline.programs import Share
from ..pipeline.stage_jobs import StageJobs
from ..plan import Sent
from ..program.flow import needed
from ..program.ir import Value
from ..program.labels import GRADIENT
from ..program.phases import BACKWARD, beside_gradients
from ..program.sizes import array_bytes
from ..report import Leaf
from ..schedule.actions import KINDS
from ..strategies.footprint import footprint_of_part
from ..strategies.hold import Hold
from ..strategies.traffic import traffic
from .collectives import Cause
from .frames import called
from .planned import cause_of, caused_by_plan
from .sources import SourceText
from .staged_memory import shard_bytes
from .staged_moves import Said, leaves_of
from .texts import home_of

if TYPE_CHECKING:
    from ..step import Entry

BESIDE = "beside", 0  # stands for the programs beside the stages', of which the plan of the whole step tells


def said_by_plan(
    entry: "Entry", pipeline: Pipeline, leaves: Sequence[Leaf], text: SourceText
) -> dict[Key, Said]:
    """Return the collectives of each program of a pipeline, with the lines that cause them, and those of what stands
    around its gradient calls as one, as the plan of the whole step on one rank has them.

    What puts the results of microbatches together is left out: a loss is a few numbers.

    Args:
        entry: the step, with the plan of one rank's devices.
        pipeline: its stages, which need not be compiled.
        leaves: all flat inputs of the step, by position.
        text: the user's files, in which lines are looked up.
    """
    found, home = dict[Key, Said](), home_of(entry)
    for key in pipeline.jobs():
        kind, number = key
        named = leaves_of(pipeline, key, leaves)
        if kind == "settle":
            found[key] = Said(tuple(_sums(pipeline, number, named, text, home)))
        elif kind in KINDS and (hold := pipeline.stages[number].hold) is not None:
            program = pipeline.stages[number].program
            sent = traffic(hold, _equations(program.share(kind)))
            found[key] = Said(tuple(caused_by_plan(sent, program.whole, hold, named, text, home)))
    run = entry.plan.run
    if isinstance(run, Hold):
        beside = beside_gradients(run.program)
        sent = [each for each in traffic(run) if each.equation in beside]
        found[BESIDE] = Said(tuple(caused_by_plan(sent, run.program, run, leaves, text, home)))
    return found


def bytes_by_plan(pipeline: Pipeline) -> dict[Key, int | None]:
    """Return the bytes on one device that each program takes beside its arguments: those of stages as `footprint`
    estimates them, of all others their results, where these don't take the place of arguments."""
    # A rank that is one device holds its stages to no layout.
    holds = [
        stage.hold or Hold(pipeline.insides(s).layout(stage.program))
        for s, stage in enumerate(pipeline.stages)
    ]
    return {key: _bytes_of(pipeline, holds, *key) for key in pipeline.jobs()}


def _bytes_of(pipeline: Pipeline, holds: Sequence[Hold], kind: str, number: int) -> int:
    avals, homes = pipeline.split.around.program.avals, pipeline.homes
    taken: Sequence[Value] = ()
    if kind in KINDS:
        return _bytes_of_stage(pipeline.stages[number], holds[number], kind)
    if kind == "prepare":  # parts of the batch and sums of gradients, which are counted apart
        return 0
    if kind == "settle":
        settled = pipeline.settled[number]
        made = [settled.loss.gradient_of[i] for i in settled.owned]
    elif kind == "finish":
        made = pipeline.split.losses[number].made_by_hub
    else:
        made, taken = pipeline.split.placed.groups[number].wanted, pipeline.groups[number][2]
    rank = pipeline.rank_of((kind, number))
    size, freed = (sum(shard_bytes(avals[v], homes.sharding(v, rank)) for v in vs) for vs in (made, taken))
    return max(0, size - freed)


def _bytes_of_stage(stage: StageJobs, hold: Hold, kind: str) -> int:
    share = stage.program.share(kind)
    results = [v for v in share.wanted if isinstance(v, Value)]
    beside = 0
    if kind in "BW":  # gradients, which are added up one by one
        gradients = {v for v in stage.program.gradients if isinstance(v, Value)}
        results = [v for v in results if v not in gradients]
        beside = max(
            (shard_bytes(stage.program.whole.avals[v], stage.sharding(v)) for v in gradients), default=0
        )
    return beside + footprint_of_part(hold, _equations(share), share.known, results)


def _equations(share: Share) -> Collection[int]:
    wanted = {v for v in share.wanted if isinstance(v, Value)} - {*share.known}
    return needed(share.whole.top, wanted, {*share.known})


def _sums(
    pipeline: Pipeline, number: int, leaves: Sequence[Leaf], text: SourceText, home: Sequence[str]
) -> Iterator[tuple[Sent, Cause]]:
    """Yield the sums over devices of the gradients that a rank owns, each once a step. `leaves`: of these gradients."""
    settled = pipeline.settled[number]
    for i, s, k in settled.sums:
        stage = pipeline.stages[s]
        lies, value = stage.parts[k], stage.program.gradients[k]
        if lies is None or not isinstance(value, Value):
            continue
        whole, axes = stage.program.whole, lies[0]
        aval = whole.avals[value]
        size = array_bytes(stage.sharding(value).shard_shape(aval.shape), summed_in(aval.dtype))
        frames = called(whole.maker[value].eqn.source_info.traceback)
        cause = cause_of(frames, BACKWARD, (GRADIENT, settled.owned.index(i)), leaves, text, home)
        yield Sent("all-reduce", axes, prod(pipeline.ranks.mesh.shape[a] for a in axes), size, 1), cause
