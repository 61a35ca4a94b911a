"""Choose the number of microbatches of a pipeline: the requested number, enough to keep stages busy, or one."""

from dataclasses import replace

from ..config.options import PipelineOptions
from ..config.pipeline_microbatches import default_microbatches, possible_microbatches
from ..config.request import Request
from ..errors import ShardError
from ..gradients.captures import has_one_example, indivisible_reason, needed_captures
from ..gradients.microbatch_calls import find_coupling
from ..gradients.rewrite import Rewritten, as_one_microbatch, in_microbatches
from ..plan import Finding
from ..program.facts import Facts
from ..program.flatten_call import FlatCall
from .tracing import TracedCall, capture_at_sizes


def rewrite_in_microbatches(
    flat_call: FlatCall, call: TracedCall, facts: Facts, request: Request, on_rank: Request
) -> Rewritten:
    """Rewrite the gradient calls of a pipeline to run over microbatches.

    Without a requested number, up to four microbatches for each stage are taken if the numbers of the plain step stay
    the same; otherwise the whole batch is one microbatch, with a finding.

    Args:
        flat_call: The call, with flat inputs.
        call: Traced call.
        facts: Analysis of the step.
        request: Request for the whole pipeline.
        on_rank: Request for one rank of the pipeline.

    Raises:
        ShardError: The requested number is impossible, or the schedule has no form for a single microbatch.
    """
    options, pipeline, stages = request.gradients, request.pipeline, request.mesh.shape[request.stage_axis]
    captured, shards = call.captured, on_rank.shards
    assert pipeline is not None
    assert captured is not None

    def rewrite_for(parts: int) -> Rewritten:
        gradient_options = replace(options, microbatches=parts)
        needed = needed_captures(captured, facts, gradient_options, shards, pipeline=True)
        return in_microbatches(facts, capture_at_sizes(flat_call, call, needed), gradient_options, ring=request.rings)

    if options.microbatches > 1:
        pipeline.scheduled(stages, options.microbatches)  # raises for a number without a schedule
        return rewrite_for(options.microbatches)
    why, consequence, fix = indivisible_reason(captured, facts.batch), "", None
    for parts in _candidate_counts(facts.batch.size, shards, stages, pipeline):
        try:
            rewritten = rewrite_for(parts)
        except ShardError as error:
            why = error.why
            continue
        coupling = next(filter(None, map(find_coupling, rewritten.calls.values())), None)
        if coupling is None:
            return rewritten
        why = coupling.reason
        if coupling.same_loss:
            consequence, fix = (f" In {parts} parts it has the numbers of a loop over them.", f"--microbatches {parts}")
        else:
            consequence = f" In {parts} microbatches it would train on another loss: the mean of those of the parts."
        break
    if has_one_example(captured, facts):
        why, consequence, fix = "the batch has one example", "", None
    usual = "--schedule 1f1b" + " --chunks 1" * (pipeline.chunks is not None)
    if (refused := pipeline.refused(stages, 1)) is not None:
        raise ShardError(
            f"--schedule {pipeline.schedule}: the batch is taken whole ({why}), and {refused.partition(';')[0]}; use "
            f"{usual}",
            fix=usual,
        )
    rewritten = as_one_microbatch(facts, captured, options, on_rank.mesh, shards, ring=request.rings)
    # A single stage waits for no other, so there is nothing to warn of.
    if stages == 1:
        return rewritten
    message = f"The whole batch is one microbatch, so that one stage works at a time: {why}.{consequence}"
    finding = Finding("whole-batch", "warning", message, fix)
    return replace(rewritten, undivided_reason=why, findings=(finding, *rewritten.findings))


def _candidate_counts(size: int | None, shards: int, stages: int, pipeline: PipelineOptions) -> list[int]:
    """Return the numbers of microbatches to try: the largest, then the largest with several examples on each shard."""
    if size is None or size == 1:
        return []
    first = default_microbatches(size, shards, stages, pipeline)
    # User code may take a batch of one example for a single example.
    several = possible_microbatches(size, 2 * shards, stages, pipeline)
    return [m for m in dict.fromkeys([first, *several[:1]]) if m > 1]
