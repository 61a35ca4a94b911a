"""What is known of a candidate before it is compiled: what it multiplies, must send and holds, from its plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..analysis.collectives import wire_bytes
from ..analysis.leaves import leaves
from ..analysis.roofline import roofline
from ..hardware import Chip
from ..pipeline.options import default_microbatches
from ..plan import Sent
from ..report import Collective
from ..schedule import simulate
from ..step import ShardedStep
from ..strategies import parse_strategy, part_axes
from ..strategies.footprint import footprint
from ..strategies.hold import Hold
from ..strategies.traffic import traffic
from ..targets import target_of
from .candidates import Candidate


@dataclass(frozen=True)
class Sketch:
    """`seconds`: of a step at least, of them `own` in products and the update and `sent` on the links; None where the
    chip's figures do not tell. `holds`: bytes of the arrays of the fullest device, `needs` with what lies in between.
    Both None for a strategy whose layout the compiler chooses."""

    seconds: float | None = None
    own: float | None = None
    sent: float | None = None
    holds: int | None = None
    needs: int | None = None


def sketch(
    step: ShardedStep, candidate: Candidate, args: Sequence[Any], kwargs: Mapping[str, Any], chip: Chip
) -> Sketch:
    """Plan `step`, made of `candidate`, and compile nothing. Raises `ShardError` for what can't be planned."""
    found = step.planned(*args, **kwargs)
    plan, mesh, hold = found.plan, candidate.mesh, found.plan.run
    if not isinstance(hold, Hold):
        return Sketch()
    moves = traffic(hold)
    given = [len(found.traced.consts) + i for i in found.donated]
    held = footprint(hold, given)
    piped, alone = step.piped, (1.0, 1.0, 1.0)
    if piped is not None:
        stages = mesh.shape[part_axes(parse_strategy(candidate.strategy), mesh)["pp"][0]]
        shards = prod(mesh.shape[axis] for axis in plan.batch_axes)
        parts = step.inside.microbatches
        if parts == 1:
            parts = default_microbatches(plan.examples or 0, shards, stages, piped)
        run = simulate(piped.scheduled(stages, parts))
        held_at_once = max(run.peak_activations) / parts / (stages * run.schedule.chunks)
        alone = 1 / stages / (1 - run.bubble), 1 / stages, held_at_once
        moves = [_each(move, parts, plan.batch_axes) for move in moves]
    busy, share, kept = alone
    roof = roofline(
        chip,
        mesh.shape,
        plan.shares,
        leaves(plan.leaves, plan.mesh),
        map(_collective, moves),
        target_of(mesh),
    )
    arrays = int(share * held.arrays)
    return Sketch(
        seconds=None if roof.step is None else busy * roof.step,
        own=None if roof.own is None else busy * roof.own,
        sent=None if roof.communication is None else busy * roof.communication,
        holds=arrays,
        needs=arrays + int(kept * held.between),
    )


def _each(move: Sent, parts: int, batch_axes: Sequence[str]) -> Sent:
    """In a pipeline weights that the batch's axes divide are gathered for each microbatch."""
    gathers = move.kind == "all-gather" and not set(move.axes).isdisjoint(batch_axes)
    return replace(move, count=move.count * parts) if gathers else move


def _collective(move: Sent) -> Collective:
    n = move.group_size
    sent = wire_bytes(move.kind, n, move.count * move.bytes)
    return Collective(move.kind, move.axes, n, move.count, move.bytes, sent)
