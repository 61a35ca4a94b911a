"""The options of a pipeline, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ShardError, one_of, regular
from ..schedule import NAMES, Costs, Schedule, make
from ..schedule.names import Sizes
from .gradient_options import GradientOptions, Options, check_choice, check_count

BALANCE = ("flops", "measured")
MICROBATCHES_A_STAGE = 4  # from here on another microbatch makes the bubble little smaller
_NOT_WITH = {
    "reduce": "a pipeline sums gradients over devices once a step where each device stores them whole, else with each "
    "microbatch",
    "reduce_dtype": "a pipeline adds gradients up in the type in which each is computed",
    "pad": "a pipeline takes batches that divide into its microbatches",
}


@dataclass(frozen=True)
class PipelineOptions(Options):
    """`stages`: how many ranks the pipeline has; None for those of the mesh. `schedule`: the order in which they work.
    `chunks`: parts of the model that a rank holds, None for the number that the schedule is made for. `balance`: what
    is the same for all stages, their flops or their measured time. `cut`: a regular expression for the names that
    stages begin at."""

    stages: int | None = None
    schedule: str = "1f1b"
    chunks: int | None = None
    balance: str = "flops"
    cut: str | None = None

    def __post_init__(self) -> None:
        for option, count in (("--stages", self.stages), ("--chunks", self.chunks)):
            if count is not None:
                check_count(option, count)
        check_choice("--schedule", self.schedule, NAMES)
        check_choice("--balance", self.balance, BALANCE)
        fixed = NAMES[self.schedule].chunks
        if self.chunks is not None and fixed is not None and self.chunks != fixed:
            several = one_of(name for name, named in NAMES.items() if named.chunks is None)
            raise ShardError(
                f"--chunks {self.chunks}: the schedule {self.schedule} has {fixed} on each rank; leave --chunks out, "
                f"or use --schedule with one that takes any number: {several}"
            )
        if self.cut is not None:
            _check_expression("--cut", self.cut)

    def scheduled(self, stages: int, microbatches: int) -> Schedule:
        """The schedule of so many stages (ranks) and microbatches.

        Raises `ShardError` for numbers that the schedule has no form for, with those next to them that it has.

        >>> PipelineOptions(schedule="interleaved", chunks=2).scheduled(2, 4).stages
        2
        """
        why = self.refused(stages, microbatches)
        if why is None:
            return make(self.schedule, stages=stages, microbatches=microbatches, chunks=self.chunks)
        nearest = range(microbatches - 1, 1, -1), range(microbatches + 1, microbatches + 2 * stages + 1)
        nearby = (next((m for m in each if self.refused(stages, m) is None), None) for each in nearest)
        near = [f"--microbatches {m}" for m in nearby if m is not None]
        raise ShardError(
            f"--schedule {self.schedule} --stages {stages} --microbatches {microbatches}: {why.partition(';')[0]}; use "
            f"{' or '.join(near)}",
            fix=near[-1],
        )

    def refused(self, stages: int, microbatches: int) -> str | None:
        """Why the schedule has no form for these numbers; None where it has one."""
        named = NAMES[self.schedule]
        return named.refuses(Sizes(stages, microbatches, self.chunks or named.chunks or 1, Costs(), None))


def pipeline_options(
    names: Sequence[str],
    given: Mapping[str, Any],
    gradients: GradientOptions,
    microbatches: int | None = None,
) -> PipelineOptions | None:
    """The pipeline that a line asks for, None where its strategy has none.

    Args:
        names: the parts of the strategy, `("pp", "fsdp")`.
        given: the fields of `PipelineOptions` by name, None where the line does not say.
        gradients: the options of the gradients beside it.
        microbatches: as the line has them; None where it does not say.

    Raises `ShardError` for options of a pipeline without one, and for those of `gradients` that a pipeline has no use
    for.
    """
    options = {name: value for name, value in given.items() if value is not None}
    if "pp" in names:
        for name, why in _NOT_WITH.items():
            if name in gradients.given:
                option, value = f"--{name.replace('_', '-')}", gradients.given[name]
                raise ShardError(
                    f"{option}{'' if value is True else f' {value}'}: {why}; leave {option} out under pp"
                )
        if microbatches == 1:
            raise ShardError(
                "--microbatches 1: one stage of the pipeline would work at a time; use 2 or more, or leave it out for "
                f"up to {MICROBATCHES_A_STAGE} for each stage"
            )
        return PipelineOptions(**options)
    if options:
        name, value = next(iter(options.items()))
        strategy = "+".join(("pp", *(each for each in names if each not in ("pmap", "spmd", "ep"))))
        raise ShardError(
            f"--{name} {value} is for pipelines, and {'+'.join(names)} is none; leave it out, or write %%shard "
            f"{strategy} --{name} {value}",
            fix=f"%%shard {strategy} --{name} {value}",
        )
    return None


def default_microbatches(batch_size: int, shards: int, stages: int, piped: PipelineOptions) -> int:
    """How many microbatches a pipeline takes where the line does not say: the most, up to four for each stage.

    Args:
        batch_size: examples in the batch.
        shards: the parts that each microbatch's examples are divided into over devices.
        stages: ranks of the pipeline.

    >>> default_microbatches(32, 2, 4, PipelineOptions())
    16

    Raises `ShardError` where no number above 1 divides the batch and suits the schedule, with the batches next to this
    one for which there is one.
    """
    counts = possible_microbatches(batch_size, shards, stages, piped)
    if counts:
        return counts[0]
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
    """The numbers of microbatches above 1 that divide the batch and suit the schedule, the largest first; at most
    `limit`, by default four for each stage. Arguments as of `default_microbatches`.

    >>> possible_microbatches(24, 2, 2, PipelineOptions())
    [6, 4, 3, 2]
    """
    most = MICROBATCHES_A_STAGE * stages if limit is None else limit
    counts = (m for m in range(most, 1, -1) if batch_size and batch_size % (shards * m) == 0)
    return [m for m in counts if piped.refused(stages, m) is None]


def _check_expression(option: str, pattern: Any) -> None:
    if not isinstance(pattern, str) or not pattern:
        raise ShardError(f"{option} takes a regular expression, such as 'block_[48]$', not {pattern!r}")
    found = regular(pattern)
    if isinstance(found, str):
        raise ShardError(f"{option} {pattern!r} is no regular expression: {found}")
