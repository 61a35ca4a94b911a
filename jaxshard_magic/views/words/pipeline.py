"""Pipeline in words: parts of the bubble, ranks, and times in the unit of the costs."""

from dataclasses import dataclass, replace
from statistics import fmean

from jaxshard_magic.report import Pipeline, PipelineRank
from jaxshard_magic.views.format import (
    byte_text,
    count_text,
    device_text,
    percent_text,
    round_to_sum,
    rounded,
    share_text,
    time_text,
    trimmed,
)
from jaxshard_magic.views.words.spans import Span, strong

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
SEEN = 0.0005  # share of all ranks' time that prints as 0.1%; smaller parts are left out
_NUMBER_OF = 10  # devices of a rank listed one by one, at most


@dataclass(frozen=True)
class BubblePart:
    """Part of the bubble.

    Attributes:
        what: Name.
        share: Share of the time of all ranks; negative for a part that reduces the bubble.
        more: Explanation, if any.
        rounded_share: `share` rounded to thousandths, so that all parts add up to the bubble as printed.
    """

    what: str
    share: float
    more: str | None = None
    rounded_share: float = 0.0


def size_text(p: Pipeline) -> str:
    """Return schedule and size: `zb-h1, 4 stages × 8 microbatches`."""
    size = f"{_counted(p.stages, 'stage')} \u00d7 {_counted(p.microbatches, 'microbatch', 'es')}"
    size += f", {count_text(p.chunks)} chunks a rank" if p.chunks > 1 else ""
    return f"{p.schedule}, {size}" + (f", {count_text(p.losses)} losses in turn" if p.losses > 1 else "")


def _counted(n: int, what: str, many: str = "s") -> str:
    return f"{count_text(n)} {what}{many if n != 1 else ''}"


def bubble_of(p: Pipeline) -> float:
    """Return the bubble of the run, else the predicted one."""
    return p.bubble.predicted if p.bubble.measured is None else p.bubble.measured


def source_of_times(p: Pipeline) -> str:
    """Return the source of the times of actions: `recorded`, `measured` or `predicted`."""
    return "recorded" if p.recorded else "measured" if p.source == "measured" else "predicted"


def pipeline_lead(p: Pipeline) -> list[Span]:
    """Return the bubble: `Bubble 24.4% measured, 21.3% predicted, 11.1% ideal.`"""
    known = {"measured": p.bubble.measured, "predicted": p.bubble.predicted, "ideal": p.bubble.ideal}
    first, *rest = (f"{percent_text(share)} {name}" for name, share in known.items() if share is not None)
    return [strong(f"Bubble {first}"), Span(f", {', '.join(rest)}.")]


def pipeline_about(p: Pipeline) -> str:
    """Return size and duration: `zb-h1, 4 stages × 8 microbatches; its actions alone 35.3 ms measured, 33.0 ms
    predicted.`

    Times from a profile are `35.3 ms recorded by the profiler`.
    """
    ideal, predicted, measured = p.makespan
    known = [(predicted, "predicted"), (ideal, "ideal")]
    if measured is not None:
        known = [(measured, "recorded by the profiler" if p.recorded else "measured"), *known]
    times = [f"{time_text(value, p.unit)} {name}" for value, name in known[:2]]
    alone = "its actions alone " if p.unit == "s" else ""  # a real step also does other work
    return f"{size_text(p)}; {alone}{', '.join(times)}."


def bubble_parts(p: Pipeline) -> list[BubblePart]:
    """Return the parts of the bubble: the schedule, then what the run adds to it; small parts are left out."""
    b = p.bubble
    parts = [
        BubblePart("uneven stages", b.uneven - b.ideal, _slowest(p)),
        BubblePart("transfers", b.predicted - b.uneven, _transfers(p)),
    ]
    if b.measured is not None:
        parts.append(BubblePart("not explained", b.measured - b.predicted))
    parts = [BubblePart("the schedule", b.ideal), *(part for part in parts if abs(part.share) >= SEEN)]
    # Rounded together: the printed parts add up to the printed bubble.
    told = round_to_sum([part.share for part in parts], bubble_of(p))
    return [replace(part, rounded_share=share) for part, share in zip(parts, told, strict=True)]


def work_text(p: Pipeline) -> str:
    """Return the share of time that is work: `75.6%`, one minus the bubble as printed."""
    (told,) = round_to_sum([bubble_of(p)], bubble_of(p))
    return percent_text(1 - told)


def part_text(part: BubblePart, first: bool) -> str:
    """Return the share of a part of the bubble: `+6.4%`.

    Args:
        part: Part of the bubble.
        first: Whether the part is the first one, and so has no sign.
    """
    return ("+" if part.share >= 0 and not first else "") + percent_text(part.rounded_share)


def _slowest(p: Pipeline) -> str | None:
    """Return the rank with the largest costs: `stage 3 is 9% above the mean`; None for even or incomplete costs."""
    if len(p.costs) != p.stages * p.chunks * p.losses:
        return None
    work = [sum(sum(p.costs[stage][:3]) for stage in rank.stages) for rank in p.ranks]
    most, mean = max(range(len(work)), key=work.__getitem__), fmean(work)
    if not mean or work[most] / mean - 1 < SEEN:
        return None
    return f"{rank_name(p, most)} is {share_text(work[most] / mean - 1)} above the mean"


def _transfers(p: Pipeline) -> str | None:
    """Return the time of a transfer: `0.22 ms each`; None without transfers."""
    each = sorted({transfer for *_, transfer in p.costs})
    if not each or not each[-1]:
        return None
    least, most = time_text(each[0], p.unit), time_text(each[-1], p.unit)
    return f"{most} each" if least == most else f"{least} to {most} each"


def rank_name(p: Pipeline, rank: int) -> str:
    """Return the name of a rank: `stage 0`, or `rank 0` for a rank with several stages."""
    alone = p.chunks == 1 and p.ranks[rank].stages == (rank,)
    return f"{'stage' if alone else 'rank'} {rank}"


def stages_text(p: Pipeline, rank: int) -> str | None:
    """Return the stages of a rank: `stages 0, 4`; None if its name has the stage."""
    if rank_name(p, rank).startswith("stage"):
        return None
    return f"stages {', '.join(map(str, p.ranks[rank].stages))}"


def devices_of(rank: PipelineRank) -> str | None:
    """Return the devices of a rank: `devices 0 1`, `devices 0 to 63`; None if unknown."""
    if not rank.devices:
        return None
    if 1 < len(rank.devices) <= _NUMBER_OF:
        return f"devices {' '.join(map(str, rank.devices))}"
    return device_text(rank.devices)


def held_text(rank: PipelineRank) -> str | None:
    """Return the most activations held at once: `holds 4`; None if unknown."""
    return None if rank.peak_activations is None else f"holds {number_text(rank.peak_activations)}"


def held_bytes(rank: PipelineRank) -> str | None:
    """Return the bytes of the most activations held at once: `1.2 GiB`; None if unknown."""
    # A first stage that stores nothing but its inputs holds examples of the batch, which are in memory anyway.
    if rank.activation_bytes == 0 and 0 in rank.stages:
        return "batch only"
    return None if rank.activation_bytes is None else byte_text(rank.activation_bytes)


def number_text(value: float) -> str:
    """Return a count that may have halves: `4`, `3.5`."""
    return trimmed(rounded(value, 2))


def lanes_text(p: Pipeline, ideal: bool, held: bool) -> str:
    """Return a legend of the lanes: `upper lane measured, lower lane ideal; line: activations held`.

    Args:
        p: Pipeline.
        ideal: Whether there are ideal lanes.
        held: Whether there is a curve of activations.
    """
    source = source_of_times(p)
    lanes = f"upper lane {source}, lower lane ideal" if ideal else source
    return f"{lanes}; line: activations held" if held else lanes
