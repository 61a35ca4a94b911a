"""Check pipeline options against the strategy, and choose the number of microbatches."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ShardError
from .options import FLAGS, GradientOptions, PipelineOptions

MICROBATCHES_A_STAGE = 4  # with more, the bubble shrinks only a little


def pipeline_options(
    names: Sequence[str], given: Mapping[str, Any], gradients: GradientOptions, microbatches: int | None = None
) -> PipelineOptions | None:
    """Return the pipeline of a request; None if the strategy has none.

    Args:
        names: Parts of the strategy, `("pp", "fsdp")`.
        given: Fields of `PipelineOptions` by name; None if not given.
        gradients: Gradient options of the request.
        microbatches: Number of microbatches; None if not given.

    Raises:
        ShardError: Pipeline options without a pipeline, or gradient options that a pipeline can't use.
    """
    options = {name: value for name, value in given.items() if value is not None}
    if "pp" in names:
        for name, value in gradients.given.items():
            flag = FLAGS[name]
            if why := flag.refused.get("pp"):
                raise ShardError(f"{flag.typed(value)}: {why}; leave {flag.name} out under pp")
        if microbatches == 1:
            raise ShardError(
                "--microbatches 1: one stage of the pipeline would work at a time; use 2 or more, or leave it out for "
                f"up to {MICROBATCHES_A_STAGE} for each stage"
            )
        return PipelineOptions(**options)
    if options:
        name, value = next(iter(options.items()))
        typed = FLAGS[name].typed(value)
        # The excluded strategies can't be combined with pp.
        strategy = "+".join(("pp", *(each for each in names if each not in ("pmap", "spmd", "ep"))))
        raise ShardError(
            f"{typed} is for pipelines, and {'+'.join(names)} is none; leave it out, or write %%shard "
            f"{strategy} {typed}",
            fix=f"%%shard {strategy} {typed}",
        )
    return None


def default_microbatches(batch_size: int, shards: int, stages: int, piped: PipelineOptions) -> int:
    """Return the default number of microbatches of a pipeline: the most possible, up to four per stage.

    For a single stage 1, if nothing above 1 is possible.

    Args:
        batch_size: Examples in the batch.
        shards: Number of shards of each microbatch's examples over devices.
        stages: Ranks of the pipeline.
        piped: Pipeline options.

    Raises:
        ShardError: No such number divides the batch and suits the schedule. The message names the nearest batch sizes
            that work.

    >>> default_microbatches(32, 2, 4, PipelineOptions())
    16
    """
    counts = possible_microbatches(batch_size, shards, stages, piped)
    if counts:
        return counts[0]
    # A pipeline of one stage has no bubble that more microbatches could shrink.
    if stages == 1 and batch_size % shards == 0 and piped.refused(1, 1) is None:
        return 1
    limit = MICROBATCHES_A_STAGE * stages
    usual = [m for m in range(2, limit + 1) if piped.refused(stages, m) is None]

    def fits(size: int) -> bool:
        return bool(possible_microbatches(size, shards, stages, piped))

    step = shards * min(usual)
    nearest = range(batch_size - 1, 0, -1), range(batch_size + 1, batch_size + step + 1)
    near = [str(size) for sizes in nearest if (size := next(filter(fits, sizes), None)) is not None]
    over = "" if shards == 1 else f" over {shards} shards"
    more = next(iter(possible_microbatches(batch_size, shards, stages, piped, 2 * limit)), None)
    raise ShardError(
        f"a batch of {batch_size}{over} does not divide into 2 to {limit} microbatches that --schedule "
        f"{piped.schedule} takes with {stages} stages; use a batch of {' or '.join(near)}"
        + (f", or --microbatches {more}" if more else "")
    )


def possible_microbatches(
    batch_size: int, shards: int, stages: int, piped: PipelineOptions, limit: int | None = None
) -> list[int]:
    """Return the numbers of microbatches above 1 that divide the batch and suit the schedule, largest first.

    Args:
        batch_size: Examples in the batch.
        shards: Number of shards of each microbatch's examples over devices.
        stages: Ranks of the pipeline.
        piped: Pipeline options.
        limit: Largest number; None for four per stage.

    >>> possible_microbatches(24, 2, 2, PipelineOptions())
    [6, 4, 3, 2]
    """
    most = MICROBATCHES_A_STAGE * stages if limit is None else limit
    counts = (m for m in range(most, 1, -1) if batch_size and batch_size % (shards * m) == 0)
    return [m for m in counts if piped.refused(stages, m) is None]
