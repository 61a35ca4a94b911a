"""A pipeline in words: its bubble and what that is made of, its ranks, and times in the unit of its costs."""

from dataclasses import dataclass, replace
from statistics import fmean

from jaxshard_magic.report import Pipeline, Rank
from jaxshard_magic.views.format import (
    adding_up,
    byte_text,
    count_text,
    device_text,
    percent_text,
    rounded,
    share_text,
    time_text,
    trimmed,
)
from jaxshard_magic.views.words.spans import Span, strong

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
SEEN = 0.0005  # of the time of all ranks: what is told as 0.1%
_NUMBER_OF = 10  # devices of a rank that are told one by one


@dataclass(frozen=True)
class BubblePart:
    """A part of the bubble: `share` of all ranks' time, below 0 where it makes the bubble smaller, and `told`, the same
    in whole thousandths that add up to the bubble as it is told."""

    what: str
    share: float
    more: str | None = None
    told: float = 0.0


def size_text(p: Pipeline) -> str:
    """`zb-h1, 4 stages × 8 microbatches`."""
    size = f"{_counted(p.stages, 'stage')} \u00d7 {_counted(p.microbatches, 'microbatch', 'es')}"
    size += f", {count_text(p.chunks)} chunks a rank" if p.chunks > 1 else ""
    return f"{p.schedule}, {size}" + (f", {count_text(p.losses)} losses in turn" if p.losses > 1 else "")


def _counted(n: int, what: str, many: str = "s") -> str:
    return f"{count_text(n)} {what}{many if n != 1 else ''}"


def bubble_of(p: Pipeline) -> float:
    """The bubble of the run, or the predicted one."""
    return p.bubble.predicted if p.bubble.measured is None else p.bubble.measured


def source_of_times(p: Pipeline) -> str:
    """What the times of its actions are: `recorded`, `measured` or `predicted`."""
    return "recorded" if p.recorded else "measured" if p.source == "measured" else "predicted"


def pipeline_lead(p: Pipeline) -> list[Span]:
    """`Bubble 24.4% measured, 21.3% predicted, 11.1% ideal.`"""
    known = {"measured": p.bubble.measured, "predicted": p.bubble.predicted, "ideal": p.bubble.ideal}
    first, *rest = (f"{percent_text(share)} {name}" for name, share in known.items() if share is not None)
    return [strong(f"Bubble {first}"), Span(f", {', '.join(rest)}.")]


def pipeline_about(p: Pipeline) -> str:
    """`zb-h1, 4 stages × 8 microbatches; its actions alone 35.3 ms measured, 33.0 ms predicted.` Where the profiler has
    recorded them, `35.3 ms recorded by the profiler`."""
    ideal, predicted, measured = p.makespan
    known = [(predicted, "predicted"), (ideal, "ideal")]
    if measured is not None:
        known = [(measured, "recorded by the profiler" if p.recorded else "measured"), *known]
    times = [f"{time_text(value, p.unit)} {name}" for value, name in known[:2]]
    alone = "its actions alone " if p.unit == "s" else ""  # a step has more to do than them
    return f"{size_text(p)}; {alone}{', '.join(times)}."


def bubble_parts(p: Pipeline) -> list[BubblePart]:
    """What the bubble is made of: the schedule itself, then what the run adds to it, as far as that is told at all."""
    b = p.bubble
    parts = [
        BubblePart("uneven stages", b.uneven - b.ideal, _slowest(p)),
        BubblePart("transfers", b.predicted - b.uneven, _transfers(p)),
    ]
    if b.measured is not None:
        parts.append(BubblePart("not explained", b.measured - b.predicted))
    parts = [BubblePart("the schedule", b.ideal), *(part for part in parts if abs(part.share) >= SEEN)]
    told = adding_up([part.share for part in parts], bubble_of(p))
    return [replace(part, told=share) for part, share in zip(parts, told, strict=True)]


def work_text(p: Pipeline) -> str:
    """`75.6%`: what is left of all ranks' time beside the bubble as it is told."""
    (told,) = adding_up([bubble_of(p)], bubble_of(p))
    return percent_text(1 - told)


def part_text(part: BubblePart, first: bool) -> str:
    """`+6.4%`; the first is a share itself."""
    return ("+" if part.share >= 0 and not first else "") + percent_text(part.told)


def _slowest(p: Pipeline) -> str | None:
    """`stage 3 is 9% above the mean`, by what the costs say."""
    if len(p.costs) != p.stages * p.chunks * p.losses:
        return None
    work = [sum(sum(p.costs[stage][:3]) for stage in rank.stages) for rank in p.ranks]
    most, mean = max(range(len(work)), key=work.__getitem__), fmean(work)
    if not mean or work[most] / mean - 1 < SEEN:
        return None
    return f"{rank_name(p, most)} is {share_text(work[most] / mean - 1)} above the mean"


def _transfers(p: Pipeline) -> str | None:
    """`0.22 ms each`."""
    each = sorted({transfer for *_, transfer in p.costs})
    if not each or not each[-1]:
        return None
    least, most = time_text(each[0], p.unit), time_text(each[-1], p.unit)
    return f"{most} each" if least == most else f"{least} to {most} each"


def rank_name(p: Pipeline, rank: int) -> str:
    """`stage 0`; of a rank that holds several stages `rank 0`."""
    alone = p.chunks == 1 and p.ranks[rank].stages == (rank,)
    return f"{'stage' if alone else 'rank'} {rank}"


def stages_text(p: Pipeline, rank: int) -> str | None:
    """`stages 0, 4`, None where the name says it."""
    if rank_name(p, rank).startswith("stage"):
        return None
    return f"stages {', '.join(map(str, p.ranks[rank].stages))}"


def devices_of(rank: Rank) -> str | None:
    """`devices 0 1`, `devices 0 to 63`; None where they are not known."""
    if not rank.devices:
        return None
    if 1 < len(rank.devices) <= _NUMBER_OF:
        return f"devices {' '.join(map(str, rank.devices))}"
    return device_text(rank.devices)


def held_text(rank: Rank) -> str | None:
    """`holds 4`: the most activations that it holds at once."""
    return None if rank.peak_activations is None else f"holds {number_text(rank.peak_activations)}"


def held_bytes(rank: Rank) -> str | None:
    """`1.2 GiB`: bytes of the most activations that a rank holds at once; None where they are not known. A first stage
    that keeps nothing but what it is given holds examples of its batch, which lie there anyway."""
    if rank.activation_bytes == 0 and 0 in rank.stages:
        return "batch only"
    return None if rank.activation_bytes is None else byte_text(rank.activation_bytes)


def number_text(value: float) -> str:
    """A count that may have halves: `4`, `3.5`."""
    return trimmed(rounded(value, 2))


def lanes_text(p: Pipeline, ideal: bool, held: bool) -> str:
    """What the lanes are: `upper lane measured, lower lane ideal; line: activations held`."""
    source = source_of_times(p)
    lanes = f"upper lane {source}, lower lane ideal" if ideal else source
    return f"{lanes}; line: activations held" if held else lanes
