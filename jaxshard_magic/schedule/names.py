"""`make`: a schedule by its name, with the limits that each name has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxshard_magic.errors import ShardError, none_of, one_of
from jaxshard_magic.schedule import dualpipe, orders, search, vshape, zero_bubble
from jaxshard_magic.schedule.costs import Costs
from jaxshard_magic.schedule.grid import Schedule


@dataclass(frozen=True)
class Sizes:
    """What a schedule is made for: ranks, microbatches, chunks a rank, costs, and microbatches that a rank may hold."""

    stages: int
    microbatches: int
    chunks: int
    costs: Costs
    memory_limit: float | None


@dataclass(frozen=True)
class Named:
    """A schedule that has a name.

    `chunks`: the chunks a rank that it is made for; None where any number from 1 goes.
    `splits`: whether the backward pass runs in its two halves. `searches`: whether it depends on costs and takes a
    limit of memory. `refuses`: why it cannot be made for some sizes, and what would do; None where it can.
    """

    make: Callable[[Sizes], orders.Rows]
    about: str
    source: str
    chunks: int | None = 1
    splits: bool = False
    searches: bool = False
    refuses: Callable[[Sizes], str | None] = lambda sizes: None


def _whole_groups(sizes: Sizes) -> str | None:
    p, m = sizes.stages, sizes.microbatches
    if m % p == 0:
        return None
    near = " or ".join(str(each) for each in (m // p * p, -(-m // p) * p) if each)
    return f"{m} microbatches don't divide by {p} stages; use {near}"


def _fills_both_ways(sizes: Sizes) -> str | None:
    p, m = sizes.stages, sizes.microbatches
    if m >= 2 * p:
        return None
    return f"{m} microbatches don't fill {p} ranks on the way down and up; use {2 * p} or more"


NAMES: Mapping[str, Named] = MappingProxyType(
    {
        "gpipe": Named(
            lambda s: orders.gpipe(s.stages, s.microbatches),
            "all forward, then all backward",
            "arXiv 1811.06965",
        ),
        "1f1b": Named(
            lambda s: orders.one_f_one_b(s.stages, s.microbatches),
            "one backward for one forward: the bubble of gpipe, the memory of the stages",
            "arXiv 2006.09503",
        ),
        "interleaved": Named(
            lambda s: orders.interleaved(s.stages, s.microbatches, s.chunks),
            "1f1b over several chunks of layers a rank: a smaller bubble for more memory and messages",
            "arXiv 2104.04473",
            chunks=None,
            refuses=_whole_groups,
        ),
        "looped-bfs": Named(
            lambda s: orders.looped_breadth_first(s.stages, s.microbatches, s.chunks),
            "every microbatch through one chunk before the next: a smaller bubble, everything held",
            "arXiv 2211.05953",
            chunks=None,
        ),
        "zb-h1": Named(
            lambda s: zero_bubble.zb_h1(s.stages, s.microbatches),
            "1f1b with the backward pass in halves: a third of its bubble, the memory of its first rank on every rank",
            "arXiv 2401.10241",
            splits=True,
        ),
        "zb-h2": Named(
            lambda s: zero_bubble.zb_h2(s.stages, s.microbatches),
            "zb-h1 with more forward ahead: no steady bubble, twice the memory",
            "arXiv 2401.10241",
            splits=True,
        ),
        "zero-bubble": Named(
            lambda s: search.zero_bubble(s.stages, s.microbatches, s.costs, s.memory_limit),
            "the smallest steady bubble that a search finds for the costs, within a limit of memory",
            "arXiv 2401.10241",
            splits=True,
            searches=True,
            refuses=lambda s: search.refused(s.memory_limit),
        ),
        "zb-v": Named(
            lambda s: vshape.zb_v(s.stages, s.microbatches, s.costs, s.memory_limit),
            "the first and the last chunk on one rank, weight gradients in the gaps: no steady bubble, 1f1b's memory",
            "arXiv 2405.15362",
            chunks=2,
            splits=True,
            searches=True,
            refuses=lambda s: search.refused(s.memory_limit),
        ),
        "v-half": Named(
            lambda s: vshape.v_half(s.stages, s.microbatches),
            "zb-v with half the memory, and about half of the bubble of 1f1b",
            "arXiv 2405.15362",
            chunks=2,
            splits=True,
        ),
        "v-min": Named(
            lambda s: vshape.v_min(s.stages, s.microbatches),
            "zb-v with a third of the memory, and about two thirds of the bubble of 1f1b",
            "arXiv 2405.15362",
            chunks=2,
            splits=True,
        ),
        "dualpipev": Named(
            lambda s: dualpipe.dualpipe_v(s.stages, s.microbatches),
            "forward of one microbatch and backward of another as one, each hiding the other's messages",
            "arXiv 2412.19437",
            chunks=2,
            splits=True,
            refuses=_fills_both_ways,
        ),
    }
)


_HELP = "%shard schedule --help has all"


def known(name: str) -> Named:
    """What is known of the schedule called `name`. Raises ShardError for an unknown name."""
    if name not in NAMES:
        raise ShardError(none_of(f"no schedule '{name}'", name, NAMES, f"there are {one_of(NAMES)}", _HELP))
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
    """The schedule called `name`, one of `NAMES`.

    Args:
        stages: ranks of the pipeline, each a device or a group of them.
        microbatches: parts of the batch.
        chunks: parts of the model that each rank holds; by default 1, or as many as the schedule is made for.
        costs: what the schedules that search work with; one unit each by default.
        memory_limit: for those, the most microbatches that a rank may hold the activations of.

    >>> print(make("1f1b", stages=2, microbatches=2), end="")
    # 1f1b: 2 stages, 2 microbatches, 1 chunks
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1

    Raises ShardError for an unknown name, and for sizes that the schedule has no form for.
    """
    named = known(name)
    fixed = named.chunks
    chunks = chunks or fixed or 1
    for what, number in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ShardError(f"{what} is {number!r}; it must be a whole number from 1")
    if fixed is not None and chunks != fixed:
        several = one_of(each for each, other in NAMES.items() if other.chunks is None)
        raise ShardError(
            f"{name} has {fixed} chunks a rank, not {chunks}; any number of chunks have {several}"
        )
    if memory_limit is not None and not named.searches:
        searching = one_of(each for each, other in NAMES.items() if other.searches)
        raise ShardError(f"{name} takes no memory limit; {searching} do")
    sizes = Sizes(stages, microbatches, chunks, costs or Costs(), memory_limit)
    if why := named.refuses(sizes):
        raise ShardError(f"{name}: {why}")
    rows = named.make(sizes)
    return Schedule(name, stages, microbatches, chunks, tuple(map(tuple, rows)), costs)
