"""Registry of schedules by name, with the sizes accepted by each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxshard_magic.errors import ShardError, list_names, unknown_name
from jaxshard_magic.schedule import fixed_orders, search, vshape
from jaxshard_magic.schedule.costs import Costs
from jaxshard_magic.schedule.grid import Schedule


@dataclass(frozen=True)
class ScheduleArgs:
    """Arguments of a schedule's generator.

    Attributes:
        stages: Number of ranks.
        microbatches: Number of microbatches.
        chunks: Chunks per rank.
        costs: Costs of each stage.
        memory_limit: Most microbatches a rank may hold; None for the default.
    """

    stages: int
    microbatches: int
    chunks: int
    costs: Costs
    memory_limit: float | None


@dataclass(frozen=True)
class ScheduleType:
    """A schedule with a name.

    Attributes:
        make: Generator of the entries of each rank.
        about: Description in a line.
        source: Publication.
        chunks: Required chunks per rank; None if any number from 1 is possible.
        splits_backward: The backward pass runs in two halves.
        uses_search: The order depends on costs, and a memory limit is accepted.
        size_error: Returns the reason for which some sizes are impossible, with sizes to use instead; None for valid
            sizes.
    """

    make: Callable[[ScheduleArgs], fixed_orders.RankRows]
    about: str
    source: str
    chunks: int | None = 1
    splits_backward: bool = False
    uses_search: bool = False
    size_error: Callable[[ScheduleArgs], str | None] = lambda sizes: None


def _whole_groups(sizes: ScheduleArgs) -> str | None:
    """Return an error for microbatches that don't divide by the stages, with the nearest valid numbers."""
    p, m = sizes.stages, sizes.microbatches
    if m % p == 0:
        return None
    near = " or ".join(str(each) for each in (m // p * p, -(-m // p) * p) if each)
    return f"{m} microbatches don't divide by {p} stages; use {near}"


def _too_few_microbatches(sizes: ScheduleArgs) -> str | None:
    """Return an error for fewer than two microbatches per rank."""
    p, m = sizes.stages, sizes.microbatches
    if m >= 2 * p:
        return None
    return f"{m} microbatches don't fill {p} ranks on the way down and up; use {2 * p} or more"


NAMES: Mapping[str, ScheduleType] = MappingProxyType(
    {
        "gpipe": ScheduleType(
            lambda s: fixed_orders.gpipe(s.stages, s.microbatches), "all forward, then all backward", "arXiv 1811.06965"
        ),
        "1f1b": ScheduleType(
            lambda s: fixed_orders.one_f_one_b(s.stages, s.microbatches),
            "one backward for one forward: the bubble of gpipe, the memory of the stages",
            "arXiv 2006.09503",
        ),
        "interleaved": ScheduleType(
            lambda s: fixed_orders.interleaved(s.stages, s.microbatches, s.chunks),
            "1f1b over several chunks of layers a rank: a smaller bubble for more memory and messages",
            "arXiv 2104.04473",
            chunks=None,
            size_error=_whole_groups,
        ),
        "looped-bfs": ScheduleType(
            lambda s: fixed_orders.looped_breadth_first(s.stages, s.microbatches, s.chunks),
            "every microbatch through one chunk before the next: a smaller bubble, everything held",
            "arXiv 2211.05953",
            chunks=None,
        ),
        "zb-h1": ScheduleType(
            lambda s: fixed_orders.zb_h1(s.stages, s.microbatches),
            "1f1b with the backward pass in halves: a third of its bubble, the memory of its first rank on every rank",
            "arXiv 2401.10241",
            splits_backward=True,
        ),
        "zb-h2": ScheduleType(
            lambda s: fixed_orders.zb_h2(s.stages, s.microbatches),
            "zb-h1 with more forward ahead: no steady bubble, twice the memory",
            "arXiv 2401.10241",
            splits_backward=True,
        ),
        "zero-bubble": ScheduleType(
            lambda s: search.zero_bubble(s.stages, s.microbatches, s.costs, s.memory_limit),
            "the smallest steady bubble that a search finds for the costs, within a limit of memory",
            "arXiv 2401.10241",
            splits_backward=True,
            uses_search=True,
            size_error=lambda s: search.memory_limit_error(s.memory_limit),
        ),
        "zb-v": ScheduleType(
            lambda s: vshape.zb_v(s.stages, s.microbatches, s.costs, s.memory_limit),
            "the first and the last chunk on one rank, weight gradients in the gaps: no steady bubble, 1f1b's memory",
            "arXiv 2405.15362",
            chunks=2,
            splits_backward=True,
            uses_search=True,
            size_error=lambda s: search.memory_limit_error(s.memory_limit),
        ),
        "v-half": ScheduleType(
            lambda s: vshape.v_half(s.stages, s.microbatches),
            "zb-v with half the memory, and about half of the bubble of 1f1b",
            "arXiv 2405.15362",
            chunks=2,
            splits_backward=True,
        ),
        "v-min": ScheduleType(
            lambda s: vshape.v_min(s.stages, s.microbatches),
            "zb-v with a third of the memory, and about two thirds of the bubble of 1f1b",
            "arXiv 2405.15362",
            chunks=2,
            splits_backward=True,
        ),
        "dualpipev": ScheduleType(
            lambda s: fixed_orders.dualpipe_v(s.stages, s.microbatches),
            "forward of one microbatch and backward of another as one, each hiding the other's messages",
            "arXiv 2412.19437",
            chunks=2,
            splits_backward=True,
            size_error=_too_few_microbatches,
        ),
    }
)


_HELP = "%shard schedule --help has all"


def schedule_type(name: str) -> ScheduleType:
    """Return the schedule called `name`.

    Raises:
        ShardError: An unknown name.
    """
    if name not in NAMES:
        raise ShardError(unknown_name(f"no schedule '{name}'", name, NAMES, f"there are {list_names(NAMES)}", _HELP))
    return NAMES[name]


def make(
    name: str,
    *,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """Make the schedule called `name`, a key of `NAMES`.

    Args:
        stages: Ranks of the pipeline, each a device or a group of devices.
        microbatches: Microbatches per batch.
        chunks: Parts of the model on each rank; by default 1, or the number required by the schedule.
        costs: Costs for schedules found by search; one unit each by default.
        memory_limit: Most microbatches of activations a rank may hold, for schedules found by search.

    Raises:
        ShardError: An unknown name, or sizes without a schedule of this form.

    >>> print(make("1f1b", stages=2, microbatches=2), end="")
    # 1f1b: 2 stages, 2 microbatches, 1 chunks
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """
    named = schedule_type(name)
    fixed_chunks = named.chunks
    chunks = chunks or fixed_chunks or 1
    for what, number in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        # A bool is an int, but not a valid size.
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ShardError(f"{what} is {number!r}; it must be a whole number from 1")
    if fixed_chunks is not None and chunks != fixed_chunks:
        several = list_names(each for each, other in NAMES.items() if other.chunks is None)
        raise ShardError(f"{name} has {fixed_chunks} chunks a rank, not {chunks}; any number of chunks have {several}")
    if memory_limit is not None and not named.uses_search:
        searching = list_names(each for each, other in NAMES.items() if other.uses_search)
        raise ShardError(f"{name} takes no memory limit; {searching} do")
    sizes = ScheduleArgs(stages, microbatches, chunks, costs or Costs(), memory_limit)
    if why := named.size_error(sizes):
        raise ShardError(f"{name}: {why}")
    rows = named.make(sizes)
    return Schedule(name, stages, microbatches, chunks, tuple(map(tuple, rows)), costs)
