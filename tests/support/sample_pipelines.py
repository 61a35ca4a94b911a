"""Pipelines for views and their tests: schedules in time, some of them with what a run would have measured. Each is
made once: what else it could cost takes a second."""

from dataclasses import replace
from functools import cache
from random import Random

from support.sample_reports import MIB, attached

from jaxshard_magic import schedule
from jaxshard_magic.errors import ShardError
from jaxshard_magic.report import Pipeline, PipelineEvent, PipelineRank, RefusedSchedule, Report
from jaxshard_magic.schedule import Costs, Schedule
from jaxshard_magic.schedule.timeline import timeline

MS = 1e-3
UNEVEN_16 = Costs([MS] * 15 + [1.1 * MS], [MS] * 15 + [1.1 * MS], [MS] * 15 + [1.1 * MS], transfer=0.05 * MS)
HOLDS = ("wte, blocks 0-3", "blocks 4-7", "blocks 8-11", "ln_f, logits, loss")
UNEVEN = Costs(
    [1.05 * MS] * 3 + [1.18 * MS],
    [1.10 * MS] * 3 + [1.24 * MS],
    [1.00 * MS] * 3 + [1.12 * MS],
    transfer=0.22 * MS,
)


def split(stages: int, microbatches: int) -> Schedule:
    """1F1B with its backward pass in halves, written by hand: rank r runs its weight gradients r microbatches late, so
    that each rank holds as much as the first. At unit costs the bubble is (p-1)/(3m+p-1)."""
    rows = []
    for rank in range(stages):
        row, ahead, late = [], min(stages - rank - 1, microbatches), 0
        row += [f"{rank}F{mb}" for mb in range(ahead)]
        for mb in range(microbatches):
            if ahead + mb < microbatches:
                row.append(f"{rank}F{ahead + mb}")
            row.append(f"{rank}I{mb}")
            if mb >= rank:
                row.append(f"{rank}W{late}")
                late += 1
        row += [f"{rank}W{mb}" for mb in range(late, microbatches)]
        rows.append(" ".join(row))
    return schedule.parse("\n".join(rows), "zb-h1")


@cache
def measured() -> Pipeline:
    """A run of four uneven stages, each two devices, with what it took beside what was predicted."""
    predicted = _with_refused(timeline(split(4, 8), UNEVEN, "s"))
    slowed = _jittered(split(4, 8), UNEVEN, 3)
    end = max(event.end for event in slowed)
    work = [sum(e.end - e.start for e in slowed if e.rank == rank) for rank in range(4)]
    ranks = tuple(
        replace(
            rank,
            devices=(2 * i, 2 * i + 1),
            holds=HOLDS[i],
            bubble=1 - work[i] / end,
            activation_bytes=(414, 414, 414, 393)[i] * 4 * MIB,
            work=work[i],
        )
        for i, rank in enumerate(predicted.ranks)
    )
    return replace(
        predicted,
        source="measured",
        bubble=replace(predicted.bubble, measured=1 - sum(work) / (4 * end)),
        makespan=(*predicted.makespan[:2], end),
        ranks=ranks,
        events=slowed,
    )


def _jittered(made: Schedule, costs: Costs, seed: int) -> tuple[PipelineEvent, ...]:
    """What a run might have measured: each action by some percent slower or faster, the first of each stage slowest.

    Ranks go on in their order, each action when what it waits for is there."""
    chance = Random(seed)
    own = costs.per_stage(made.stages * made.chunks)
    taken = {"F": own.forward, "B": own.backward, "I": own.input_grad, "W": own.weight_grad}
    done: dict[str, float] = {}
    events: dict[tuple[int, int], PipelineEvent] = {}
    now, place = [0.0] * made.stages, [0] * made.stages
    last = len(made.rank_of) - 1
    while any(place[r] < len(row) for r, row in enumerate(made.grid)):
        for rank, row in enumerate(made.grid):
            while place[rank] < len(row):
                action = row[place[rank]]
                assert isinstance(action, schedule.Action)
                stage, kind, mb = action
                need = {"F": f"{stage - 1}F{mb}" if stage else None, "W": None}.get(
                    kind, f"{stage + 1}{kind}{mb}" if stage < last else f"{stage}F{mb}"
                )
                if need is not None and need not in done:
                    break
                other = need is not None and not need.startswith(str(stage))
                start = max(now[rank], done[need] + own.transfer[stage] * other if need else 0.0)
                slower = 0.98 + 0.06 * chance.random() + 0.3 * (kind == "F" and mb == 0)
                now[rank] = start + taken[kind][stage] * slower
                done[str(action)] = now[rank]
                events[rank, place[rank]] = PipelineEvent(rank, str(action), start, now[rank])
                place[rank] += 1
    return tuple(events[at] for at in sorted(events))


def _with_refused(p: Pipeline) -> Pipeline:
    """`p` with the reasons for the sizes among its what-ifs that a schedule refuses."""
    there = {(w.schedule, w.stages, w.microbatches, w.chunks) for w in p.what_if}
    sizes = {(w.stages, w.microbatches) for w in p.what_if}
    found = []
    for name in sorted({w.schedule for w in p.what_if}):
        for stages, microbatches in sorted(sizes):
            for chunks in (1, 2, 3):
                if (name, stages, microbatches, chunks) not in there:
                    try:
                        schedule.make(name, stages=stages, microbatches=microbatches, chunks=chunks)
                    except ShardError as error:
                        found.append(RefusedSchedule(name, stages, microbatches, chunks, str(error)))
    return replace(p, refused=tuple(found))


@cache
def one_f_one_b() -> Pipeline:
    """1F1B at one unit each: what is predicted is the ideal."""
    return _with_refused(timeline(schedule.make("1f1b", stages=4, microbatches=8)))


@cache
def uneven() -> Pipeline:
    """GPipe with stages of unlike length and transfers, in units."""
    costs = Costs([1, 1, 1, 1.5], [1, 1, 1, 1.5], [1, 1, 1, 1.5], transfer=0.2)
    return timeline(schedule.make("gpipe", stages=4, microbatches=4), costs)


@cache
def interleaved() -> Pipeline:
    """Two chunks a rank."""
    return timeline(schedule.make("interleaved", stages=4, microbatches=8, chunks=2), Costs(transfer=0.1))


@cache
def two_losses() -> Pipeline:
    """A step that differentiates a large loss and then a smaller one, on four ranks."""
    costs = Costs([1.0] * 4 + [0.5] * 4, [1.0] * 4 + [0.5] * 4, [1.0] * 4 + [0.5] * 4, transfer=0.1)
    return timeline(schedule.make("1f1b", stages=4, microbatches=8).for_losses(2), costs)


@cache
def fused() -> Pipeline:
    """Forward and backward actions that run as one, two chunks a rank on two ranks."""
    text = """
    0F0 0F1 3F0 3B0 0F2+3F1 0B0+3B1 3F2 3B2 0B1 0B2
    1F0 2F0 1F1 2F1 1F2+2B0 2F2+1B0 2B1 1B1 2B2 1B2
    """
    return timeline(schedule.parse(text, "by hand"), Costs(0.4 * MS, 0.4 * MS, 0.4 * MS, 0.05 * MS), "s")


@cache
def large() -> Pipeline:
    """9,984 actions on 16 ranks."""
    return timeline(split(16, 208), UNEVEN_16, "s")


@cache
def wide() -> Pipeline:
    """64 ranks."""
    return timeline(schedule.make("1f1b", stages=64, microbatches=128), Costs(MS, MS, MS, 0.1 * MS), "s")


def hostile() -> Pipeline:
    """Names that break out of markup, an action that is none, one rank, no what-ifs."""
    made = timeline(schedule.make("1f1b", stages=1, microbatches=2))
    evil = "<script>alert('x')</script>&\"\x1b[2J\n"
    events = (*made.events, PipelineEvent(0, evil, 0.0, 1.0), PipelineEvent(7, "7F0", 0.0, 1.0))
    ranks = (PipelineRank((0,), (0,), evil * 3),)
    return replace(made, schedule=evil, ranks=ranks, events=events, what_if=(), refused=())


_MADE = (measured, one_f_one_b, uneven, interleaved, two_losses, fused, large, wide, hostile)
PIPELINES = {made.__name__: made for made in _MADE}


def reported() -> Report:
    """A report of a step that ran in a pipeline."""
    return replace(attached(), strategy="pp+dp", pipeline=measured())
