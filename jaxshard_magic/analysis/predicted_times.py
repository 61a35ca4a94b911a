"""Predicted times of a profiled step, by source line and by collective, for comparison with the measured times."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..compilation.compiled_step import CompiledStep
from ..hardware import Chip
from ..links import AxisLink
from ..pipeline.executor import PipelineExecutor
from ..pipeline.jobs import ProgramKey as ProgramKey
from ..plan import DeviceWork
from ..program.flops import REMAT_SCOPE, Work
from ..program.ir import Program
from ..report import Collective
from .collectives import Cause, HloCollective, merge
from .host_totals import CollectiveKey
from .instructions import RECOMPUTED
from .lanes import Key
from .origin import Origin, locate_frames, op_name
from .pipeline_traffic import ProgramTraffic
from .program_texts import home_files
from .roofline import efficiency, link_seconds, matmul_seconds
from .sources import frames_of_traceback
from .stage_products import products_by_pass, runs_per_step
from .time_breakdown import StepPredictions

_Alike = tuple[object, ...]


class PredictionInputs(NamedTuple):
    """Inputs of the predictions.

    Attributes:
        collectives: The collectives of the step with predicted seconds; for a pipeline without, as the traffic of each
            program is given separately.
        chip: The chip; None where unknown.
        wires: The link used by each mesh axis on the chip.
        attached: Whether the step ran on the chip.
    """

    collectives: tuple[Collective, ...]
    chip: Chip | None
    wires: Mapping[str, AxisLink]
    attached: bool


def predict_step(
    entry: CompiledStep,
    moves: Sequence[tuple[HloCollective, Cause]],
    said: Mapping[ProgramKey, ProgramTraffic] | None,
    beside: PredictionInputs,
) -> StepPredictions:
    """Return the predicted times and bytes of a step.

    Args:
        entry: The program.
        moves: The collectives of the program, with the lines that cause them.
        said: The traffic of each program of a pipeline; else None.
        beside: Inputs of the predictions.
    """
    sent, takes = Counter[CollectiveKey](), defaultdict[CollectiveKey, float](float)
    for c in beside.collectives:
        sent[c.kind, c.axes] += c.wire_bytes
        if c.seconds is not None:
            takes[c.kind, c.axes] += c.seconds
    # Measured bandwidth is only compared with the links of the chip that ran the step.
    wires = beside.wires if beside.attached else {}
    links = {axis: wire.bandwidth for axis, wire in wires.items() if wire.bandwidth is not None}
    lines = defaultdict[Key, float](float)
    if isinstance(entry.compiled, PipelineExecutor):
        if beside.chip is not None:
            ranks = len(entry.compiled.ranks)
            # A device runs the stages of one rank: the mean over devices is the mean over ranks.
            for key, each in _of_stages(entry, entry.compiled, beside.chip):
                lines[key] += each / ranks
            for moved, key, each in _inside_stages(entry, entry.compiled, said or {}, beside.chip, beside.wires):
                takes[moved] += each / ranks
                lines[key] += each / ranks
    else:
        for key, each in _of_collectives(moves, beside.collectives):
            lines[key] += each
        if beside.chip is not None:
            for key, each in _of_products(entry, beside.chip):
                lines[key] += each
    return StepPredictions(dict(sent), dict(takes), links, dict(lines))


def _of_stages(entry: CompiledStep, pipeline: PipelineExecutor, chip: Chip) -> Iterable[tuple[Key, float]]:
    """Yield line, phase and predicted seconds of the products in a pipeline's stages.

    Seconds are for one device of each stage, and for all runs of a program in a step.
    """
    runs, home = runs_per_step(pipeline), home_files(entry)
    for s, stage in enumerate(pipeline.stages):
        equations = stage.program.with_halved_backward.joint_program.equations
        # Products without a user line count for the line of the gradient call.
        call = locate_frames(
            frames_of_traceback(pipeline.split.losses[pipeline.split.loss_of(s).number].traceback), home
        )
        for kind, works in products_by_pass(pipeline, s).items():
            # A whole backward pass (B) does the work of both halves (I and W).
            times = runs[kind, s] + (0 if kind == "F" else runs["B", s])
            for work, share in works:
                takes = _product(chip, share)
                if takes is not None:
                    place = locate_frames(
                        frames_of_traceback(equations[work.equation].jaxpr_eqn.source_info.traceback), home
                    )
                    yield _key(place if place.frame is not None else call, work), takes * times


def _inside_stages(
    entry: CompiledStep,
    pipeline: PipelineExecutor,
    said: Mapping[ProgramKey, ProgramTraffic],
    chip: Chip,
    wires: Mapping[str, AxisLink],
) -> Iterable[tuple[CollectiveKey, Key, float]]:
    """Yield kind and axes, line and phase, and predicted link seconds of the collectives inside a pipeline's programs.

    Seconds are for one device of each stage, and for all runs of a program in a step. Collectives of different programs
    are never combined.
    """
    runs = runs_per_step(pipeline)
    for key, one in said.items():
        moves = one.hlo_collectives
        rows = [row for each in moves for row in merge([each])]
        for (move, cause), takes in zip(moves, link_seconds(rows, chip, wires, entry.plan.batch_axes), strict=True):
            if takes is not None:
                line = cause.file, cause.line, _phase(move, cause)
                yield (move.kind, move.axes), line, takes * runs.get(key, 1)


def _of_products(entry: CompiledStep, chip: Chip) -> Iterable[tuple[Key, float]]:
    """Yield line, phase and predicted seconds of the products in a step of one program."""
    plan, home = entry.plan, home_files(entry)
    if plan.shares is None or len(plan.shares) != len(plan.work):
        return
    equations = Program((plan.traced or entry.traced).closed).equations
    for work, share in zip(plan.work, plan.shares, strict=True):
        takes = _product(chip, share)
        if takes is not None:
            frames = frames_of_traceback(equations[work.equation].jaxpr_eqn.source_info.traceback)
            yield _key(locate_frames(frames, home), work), takes


def _product(chip: Chip, share: DeviceWork) -> float | None:
    """Return the seconds of a product, the longer of multiplying and reading operands; None where unknown."""
    peak = matmul_seconds(chip, share)
    if peak is None or not share.exact:
        return None
    return max(peak / efficiency(chip, share), share.bytes / chip.hbm_bandwidth)


def _key(place: Origin, work: Work) -> Key:
    frame = place.frame
    return frame and frame.file, frame and frame.line, RECOMPUTED if work.recomputed else work.phase


def _of_collectives(
    moves: Sequence[tuple[HloCollective, Cause]], collectives: Sequence[Collective]
) -> Iterable[tuple[Key, float]]:
    """Yield line, phase and predicted exposed seconds of collectives."""
    # The rows of a report don't separate collectives of a recomputation, so that their seconds are divided by count.
    shares: dict[_Alike, Counter[str | None]] = defaultdict(Counter)
    for move, cause in moves:
        shares[_alike(move, cause)][_phase(move, cause)] += move.count
    for c in collectives:
        if c.waited is not None:
            phases = shares[_alike(c, c)] or {c.phase: 1}
            for phase, count in phases.items():
                yield (c.file, c.line, phase), c.waited * count / sum(phases.values())


def _phase(move: HloCollective, cause: Cause) -> str | None:
    return RECOMPUTED if REMAT_SCOPE in op_name(move.instruction) else cause.phase


def _alike(moved: HloCollective | Collective, cause: Cause | Collective) -> _Alike:
    return (
        *(moved.kind, moved.axes, moved.group_size, moved.bytes),
        *(cause.phase, cause.file, cause.line, cause.called),
    )
