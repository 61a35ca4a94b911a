"""How a pipeline takes a batch: in the microbatches asked for, in as many as keep its stages busy, or whole."""

from dataclasses import replace

from ..config.options import PipelineOptions
from ..config.pipeline_microbatches import default_microbatches, possible_microbatches
from ..config.request import Request
from ..errors import ShardError
from ..gradients.captures import has_one_example, needs, why_whole
from ..gradients.over_microbatches import coupled
from ..gradients.rewrite import Rewritten, in_microbatches, whole_batch
from ..plan import Finding
from ..program.facts import Facts
from ..program.peel import Peeled
from .tracing import TracedCall, capture


def microbatched(
    peeled: Peeled, call: TracedCall, facts: Facts, request: Request, on_rank: Request
) -> Rewritten:
    """The gradient calls of a pipeline over microbatches: the number that the request has, else up to four for each
    stage where that leaves the plain step's numbers, else the whole batch as one, which a finding tells.

    Args:
        call, facts: the step, and what is understood of it.
        request, on_rank: what is asked, and what is asked of one rank of the pipeline.

    Raises `ShardError` where the number asked for can't be had, and where the schedule takes no batch whole.
    """
    options, pipeline, stages = request.gradients, request.pipeline, request.mesh.shape[request.stage_axis]
    captured, shards = call.captured, on_rank.shards
    assert pipeline is not None
    assert captured is not None

    def taken(parts: int) -> Rewritten:
        asked = replace(options, microbatches=parts)
        wanted = needs(captured, facts, asked, shards, pipeline=True)
        return in_microbatches(facts, capture(peeled, call, wanted), asked, ring=request.rings)

    if options.microbatches > 1:
        pipeline.scheduled(stages, options.microbatches)  # refuses what it has no form for
        return taken(options.microbatches)
    why, told, fix = why_whole(captured, facts.batch), "", None
    for parts in _numbers(facts.batch.size, shards, stages, pipeline):
        try:
            rewritten = taken(parts)
        except ShardError as error:
            why = error.why
            continue
        found = next(filter(None, map(coupled, rewritten.calls.values())), None)
        if found is None:
            return rewritten
        why = found.why
        if found.same_loss:
            told, fix = (
                f" In {parts} parts it has the numbers of a loop over them.",
                f"--microbatches {parts}",
            )
        else:
            told = f" In {parts} microbatches it would train on another loss: the mean of those of the parts."
        break
    if has_one_example(captured, facts):
        why, told, fix = "the batch has one example", "", None
    usual = "--schedule 1f1b" + " --chunks 1" * (pipeline.chunks is not None)
    if (refused := pipeline.refused(stages, 1)) is not None:
        raise ShardError(
            f"--schedule {pipeline.schedule}: the batch is taken whole ({why}), and {refused.partition(';')[0]}; use "
            f"{usual}",
            fix=usual,
        )
    rewritten = whole_batch(facts, captured, options, on_rank.mesh, shards, ring=request.rings)
    if stages == 1:
        return rewritten
    message = f"The whole batch is one microbatch, so that one stage works at a time: {why}.{told}"
    finding = Finding("whole-batch", "warning", message, fix)
    return replace(rewritten, whole=why, findings=(finding, *rewritten.findings))


def _numbers(size: int | None, shards: int, stages: int, pipeline: PipelineOptions) -> list[int]:
    """How many microbatches to try: the most, and the most of several examples on each shard, since code may take an
    array of one for no array."""
    if size is None or size == 1:
        return []
    first = default_microbatches(size, shards, stages, pipeline)
    several = possible_microbatches(size, 2 * shards, stages, pipeline)
    return [m for m in dict.fromkeys([first, *several[:1]]) if m > 1]
