"""Options that change a step, one row each: a dataclass field with its flag, help, choices and conflicts.

The command line, its help and completion, `Request`, `shard()`, comparisons, searches, the explorer and the program to
take home read these rows. A new option is a field of a class below, a parameter of `api.shard`, and the code that
carries it out; `tests/config/test_options.py` names what a row lacks.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ShardError, compile_pattern, list_names
from .flags import MOST, Flag, count, flags_of, option

if TYPE_CHECKING:
    from ..schedule import Schedule

REDUCE = ("each", "once", "once-gathered")
REMAT_WORDS = ("full", "dots", "nothing", "offload")
REMAT = f"allowed are a number of segments, {', '.join(REMAT_WORDS)}, or a regular expression"
DATA = ("whole", "per-host")  # what each of several hosts passes: the whole batch, or its own rows
PRECISION = ("bf16", "fp16", "f32")
_NARROW = {"bf16": "bfloat16", "fp16": "float16"}


def _schedule_names() -> tuple[str, ...]:
    # Schedules bring reports with them: imported here, they would double the time of `%load_ext`.
    from ..schedule import NAMES

    return tuple(NAMES)


class StepOptions:
    """Base of dataclasses whose fields are made by `option`. Values are checked as the rows say."""

    def __post_init__(self) -> None:
        for flag in flags_of(type(self)):
            if (value := getattr(self, flag.parameter)) is not None:
                flag.check(value)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the options."""
        return tuple(flag.parameter for flag in flags_of(cls))

    @property
    def given(self) -> dict[str, Any]:
        """Options different from their defaults, by name."""
        values = {name: getattr(self, name) for name in self.names()}
        return {name: value for name, value in values.items() if value != getattr(type(self), name)}


@dataclass(frozen=True)
class GradientOptions(StepOptions):
    """Options of a step's gradient calls.

    Attributes:
        microbatches: Number of parts that the batch is taken in.
        reduce: When gradients of microbatches are summed over devices.
        remat: What the backward pass computes again: a number of segments, a policy or a regular expression.
        precision: Type of products; parameters stay as they are.
        reduce_dtype: Type in which devices add gradients up; None for float32 where `precision` is narrower.
        pad: Add rows to a batch that does not divide over the devices, or into its microbatches.
    """

    microbatches: int = option(
        "--microbatches",
        "N",
        "take the batch in N parts; same gradients, less memory",
        1,
        count,
        varies=True,
        without="the batch is taken whole, which gives the numbers of one pass and holds more activations",
    )
    reduce: str = option(
        "--reduce",
        "WHEN",
        "sum microbatches' gradients over devices: each, once, once-gathered",
        "each",
        choices=REDUCE,
        varies=True,
        refused={
            "pp": "a pipeline sums gradients over devices once a step where each device stores them whole, else with "
            "each microbatch"
        },
        without="devices add gradients up where they are made, at every trip of a loop; the numbers are the same",
    )
    remat: str | None = option(
        "--remat",
        "WHAT",
        "compute again for the backward pass: N segments, full, dots, REGEX",
        choices=REMAT_WORDS,
        open=True,
        varies=True,
        without="the numbers are the same, and the backward pass keeps more: nothing around calls, loops or "
        "statements of these cells does it",
    )
    precision: str | None = option(
        "--precision",
        "TYPE",
        "products in bf16 or fp16; parameters stay float32",
        choices=PRECISION,
        varies=True,
        without="products run in the types that the cells give them, so that the numbers are others",
    )
    reduce_dtype: str | None = option(
        "--reduce-dtype",
        "TYPE",
        "add gradients up over devices in bf16, fp16 or f32",
        choices=PRECISION,
        varies=True,
        refused={"pp": "a pipeline adds gradients up in the type in which each is computed"},
        without="gradients are added up in the type that they are computed in",
    )
    pad: bool = option(
        "--pad",
        "",
        "add rows to an uneven batch; numbers stay those of the real ones",
        False,
        refused={"pp": "a pipeline takes batches that divide into its microbatches"},
        without="a batch that does not divide over the devices is refused",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.remat is not None and not is_number(str(self.remat)):
            remat_expression(str(self.remat))

    @property
    def changes_gradients(self) -> bool:
        """True if an option rewrites the gradient calls."""
        return self.microbatches > 1 or self.remat is not None or self.precision is not None

    @property
    def rewrites(self) -> bool:
        """True if an option changes the step's program."""
        return self.changes_gradients or self.pad

    @property
    def narrow(self) -> Any:
        """Dtype shorter than float32 for products or for sums over devices; None without one."""
        # Imported here: options must load without jax, see `flags`.
        from jax import numpy as jnp

        name = _NARROW.get(self.precision or "") or _NARROW.get(self.reduce_dtype or "")
        return None if name is None else getattr(jnp, name)

    @property
    def sum_dtype(self) -> Any:
        """Dtype in which devices sum gradients; None for the dtype of each gradient."""
        from jax import numpy as jnp

        name = self.reduce_dtype or (self.precision and "f32")
        return None if name is None else jnp.dtype(_NARROW.get(name, "float32"))


@dataclass(frozen=True)
class PipelineOptions(StepOptions):
    """Options of a pipeline.

    Attributes:
        stages: Number of ranks; None for the size of the mesh's pipeline axis.
        schedule: Order in which ranks work, a name of `schedule.NAMES`.
        chunks: Parts of the model on each rank; None for the number that the schedule has.
        balance: What is equal for all stages, their flops or their measured time.
        cut: Regular expression of the module and scope names at which stages begin.
    """

    stages: int | None = option(
        "--stages",
        "P",
        "of pp: stages of the pipeline; else those of the mesh's pipeline axis, or 4",
        None,
        count,
        strategy="pp",
        varies=True,
    )
    schedule: str = option(
        "--schedule",
        "NAME",
        "of pp: their order, 1f1b unless said; %shard schedule --help has all",
        "1f1b",
        choices=_schedule_names,
        strategy="pp",
        varies=True,
    )
    chunks: int | None = option(
        "--chunks",
        "V",
        "of pp: parts of the model for each stage's devices, as for %shard schedule",
        None,
        count,
        strategy="pp",
        varies=True,
    )
    balance: str = option(
        "--balance",
        "WHAT",
        "of pp: stages of the same flops, or of the same measured time",
        "flops",
        choices=("flops", "measured"),
        strategy="pp",
        varies=True,
    )
    cut: str | None = option(
        "--cut", "REGEX", "of pp: stages begin at these modules and scopes; else at jaxshard_magic.cut", strategy="pp"
    )

    def __post_init__(self) -> None:
        from ..schedule import NAMES

        super().__post_init__()
        fixed = NAMES[self.schedule].chunks
        if self.chunks is not None and fixed is not None and self.chunks != fixed:
            several = list_names(name for name, named in NAMES.items() if named.chunks is None)
            raise ShardError(
                f"--chunks {self.chunks}: the schedule {self.schedule} has {fixed} on each rank; leave --chunks out, "
                f"or use --schedule with one that takes any number: {several}"
            )
        if self.cut is not None:
            _check_expression("--cut", self.cut)

    def scheduled(self, stages: int, microbatches: int) -> "Schedule":
        """Return the schedule of so many stages (ranks) and microbatches.

        Raises `ShardError` for numbers that the schedule has no form for, with the nearest that it has.

        >>> PipelineOptions(schedule="interleaved", chunks=2).scheduled(2, 4).stages
        2
        """
        from ..schedule import make

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
        """Return why the schedule has no form for these numbers; None where it has one."""
        from ..schedule import NAMES, Costs
        from ..schedule.registry import ScheduleArgs

        named = NAMES[self.schedule]
        return named.size_error(ScheduleArgs(stages, microbatches, self.chunks or named.chunks or 1, Costs(), None))


@dataclass(frozen=True)
class PositionOptions(StepOptions):
    """Options of strategies that divide positions.

    Attributes:
        attention: How attention reads positions of other devices; None for gathered keys and values.
    """

    attention: str | None = option(
        "--attention",
        "HOW",
        "of sp: gather keys, divide heads, send keys in a ring; auto chooses",
        choices=("gather", "heads", "ring", "auto"),
        strategy="sp",
        varies=True,
    )


# The rows by parameter of `shard()`.
FLAGS: dict[str, Flag] = {
    flag.parameter: flag
    for options in (GradientOptions, PipelineOptions, PositionOptions)
    for flag in flags_of(options)
}


def is_number(text: str) -> bool:
    """Return whether `--remat` names a number of segments.

    Raises `ShardError` for a number of more digits than `MOST`; smaller ones are checked against the loss later.
    """
    digits = re.fullmatch(r"[+-]?(\d+)", text.strip())
    if digits is None:
        return False
    if len(digits[1]) > len(str(MOST)):
        raise ShardError(f"--remat takes {MOST:,} segments at most, not a number of {len(digits[1]):,} digits")
    return True


def remat_expression(text: str) -> "re.Pattern[str]":
    """Return the regular expression that `--remat` names, policies included. Raises `ShardError` for other text."""
    expression = compile_pattern(text.strip()) if text.strip() else "it is empty"
    if isinstance(expression, str):
        raise ShardError(f"--remat {text}: no regular expression ({expression}); {REMAT}")
    return expression


def _check_expression(name: str, pattern: Any) -> None:
    if not isinstance(pattern, str) or not pattern:
        raise ShardError(f"{name} takes a regular expression, such as 'block_[48]$', not {pattern!r}")
    expression = compile_pattern(pattern)
    if isinstance(expression, str):
        raise ShardError(f"{name} {pattern!r} is no regular expression: {expression}")
