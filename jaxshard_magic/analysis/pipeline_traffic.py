"""Communication of a pipeline: collectives inside its programs, with the lines of their own stage, and stage
transfers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..pipeline.executor import PipelineExecutor
from ..pipeline.jobs import ProgramKey
from ..plan import PlannedCollective
from ..program.ir import Equation, Value
from ..report import Collective, Leaf
from ..schedule.actions import KINDS
from .collectives import Cause, HloCollective, merge, module_collectives
from .instructions import Instructions, count_operations
from .origin import HloOrigins, Origin, host_calls, with_causes, with_origins
from .pipeline_memory import shard_bytes
from .program_texts import ParsedProgram, ProgramTexts
from .sources import Frame, SourceText, frames_of_traceback
from .stage_products import first_with_same_programs, runs_per_step

_BLANK = Leaf("a parameter", "params", (), "", (), 0, 0, "")


@dataclass(frozen=True)
class ProgramTraffic:
    """Communication of one program, from the compiled text or from the plan.

    Attributes:
        collectives: Collectives of one run of the program, with causes; None where the compiler gives no text.
        host_calls: Lines of calls to Python.
    """

    collectives: tuple[tuple[HloCollective | PlannedCollective, Cause], ...] | None
    host_calls: tuple[str | None, ...] = ()

    @property
    def hlo_collectives(self) -> list[tuple[HloCollective, Cause]]:
        """Collectives from the text of a compiled program; empty for a plan."""
        return [(move, cause) for move, cause in self.collectives or () if isinstance(move, HloCollective)]


def compiled_traffic(
    pipeline: PipelineExecutor, leaves: Sequence[Leaf], texts: ProgramTexts, text: SourceText
) -> dict[ProgramKey, ProgramTraffic]:
    """Return the communication of each compiled program of a pipeline.

    Programs of the update with equal text, also those of simulated devices, keep the lines of the first.

    Args:
        pipeline: The pipeline.
        leaves: All flat inputs of the step, by position.
        texts: The texts of its programs.
        text: The user's files, for the text of lines.
    """
    shared: dict[int, list[ProgramKey]] = {}
    for key, made in pipeline.programs.items():
        # Stages with equal programs share one compiled object.
        shared.setdefault(id(made), []).append(key)
    parsed = _parsed(pipeline, texts)
    lines, traffic = _StageLines(pipeline), {}
    for keys in shared.values():
        program = parsed[keys[0]]
        if program is None:
            traffic.update(dict.fromkeys(keys, ProgramTraffic(None)))
            continue
        module, origins = program
        from_text = with_origins(module, module_collectives(module, pipeline.ranks.sub_meshes[0].shape), origins)
        for key in keys:
            # Similar stages share the trace of the first, whose lines the text has. Each stage's own equations give its
            # lines; where one line of the first stage is several of another, the first of these is used.
            own = lines.mapper(key, origins)
            here = [(move, own(origin)) for move, origin in from_text]
            named = leaves_of(pipeline, key, leaves)
            traffic[key] = ProgramTraffic(with_causes(module, here, named, text), host_calls(module, origins, own))
    return {key: traffic[key] for key in pipeline.programs}


def instructions_of(
    pipeline: PipelineExecutor, said: Mapping[ProgramKey, ProgramTraffic], texts: ProgramTexts
) -> dict[ProgramKey, tuple[str, Instructions]]:
    """Return the module name and the instructions of each program, with the program's own lines; programs without text
    are left out.

    Args:
        pipeline: The pipeline.
        said: Traffic of each program.
        texts: The texts of its programs.
    """
    lines, found = _StageLines(pipeline), dict[ProgramKey, tuple[str, Instructions]]()
    for key, program in _parsed(pipeline, texts).items():
        if program is not None:
            module, origins = program
            own = lines.mapper_with_call(key, origins)
            found[key] = module.name, Instructions(module, origins, said[key].hlo_collectives, own)
    return found


def operations_of(pipeline: PipelineExecutor, texts: ProgramTexts) -> int:
    """Return the number of operations in a step, each rank's on one of its devices."""
    runs, known = runs_per_step(pipeline), dict[int, int]()
    parsed = _parsed(pipeline, texts)
    for key, made in pipeline.programs.items():
        if id(made) not in known:
            program = parsed[key]
            known[id(made)] = count_operations(program.module) if program else 0
    return sum(known[id(made)] * runs.get(key, 1) for key, made in pipeline.programs.items())


def _parsed(pipeline: PipelineExecutor, texts: ProgramTexts) -> dict[ProgramKey, ParsedProgram | None]:
    """Return the parsed text of each program; programs shared by stages have the parameters of the first."""
    return {key: texts.parsed(made.compiled, _places(pipeline, key)) for key, made in pipeline.programs.items()}


def leaves_of(pipeline: PipelineExecutor, key: ProgramKey, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
    """Return the leaves that the labels of a program may name, in the order of their numbers.

    Args:
        pipeline: The pipeline.
        key: Kind and number of the program.
        leaves: All flat inputs of the step, by position.
    """
    split, (kind, number) = pipeline.split, key
    values: Sequence[Value] = ()
    if kind == "settle":
        settled = pipeline.settle_jobs[number]
        values = [settled.loss.input_values[i] for i in settled.owned_inputs]
    elif kind in KINDS:
        loss = split.loss_of(number)
        values = [loss.input_values[i] for i in loss.stage_program(number).stage.parameters]
    at = [split.leaf_of.get(v) for v in values]
    return [_BLANK if i is None else leaves[i] for i in at]


def _places(pipeline: PipelineExecutor, key: ProgramKey) -> Sequence[int]:
    """Return, per parameter of a program, the index of its leaf or of the leaf of its gradient; other parameters have
    no leaf."""
    places = [i for i, is_read in enumerate(pipeline.programs[key].reads_argument) if is_read]
    kind, number = key
    if kind == "settle":
        settled = pipeline.settle_jobs[number]
        return [settled.owned_inputs.index(settled.sum_sources[p][0]) for p in places]
    if kind in KINDS:
        n = len(pipeline.split.programs[number].stage.parameters)
        # The parameters follow the number of the microbatch, and in a backward pass the sums of gradients.
        first = 1 + (n if kind in "BW" else 0)
        return [p - first if 0 <= p - first < n else n for p in places]
    return places


class _StageLines:
    """Source lines of stages with a shared program, by each stage's own equations."""

    def __init__(self, pipeline: PipelineExecutor):
        self._pipeline, self._first = pipeline, first_with_same_programs(pipeline)
        self._calls: dict[int, tuple[Frame, ...]] = {}  # many equations share a traceback

    def mapper(self, key: ProgramKey, origins: HloOrigins) -> Callable[[Origin], Origin]:
        """Return a function from origins in the text of a program to origins in the program of `key`."""
        kind, s = key
        if kind == "settle":
            return self._of_gradients(s, origins)
        # A group after a gradient call belongs to the update.
        if kind == "group" and self._pipeline.split.assignment.groups[s].phase:
            return lambda origin: replace(origin, phase=origin.phase and "update")
        if kind not in KINDS or self._first[s] == s:
            return lambda origin: origin
        theirs, mine = (self._pipeline.stages[n].program.joint_program.equations for n in (self._first[s], s))
        places: dict[Origin, Origin] = {}
        for a, b in zip(theirs, mine, strict=True):
            places.setdefault(self._place(a, origins), self._place(b, origins))

        def own(origin: Origin) -> Origin:
            return _at(origin, places.get(Origin(origin.frame, origin.call), origin))

        return own

    def mapper_with_call(self, key: ProgramKey, origins: HloOrigins) -> Callable[[Origin], Origin]:
        """Return the function of `mapper`, with a line for operations without one.

        Such operations (sums of gradients, copies) get the line of their gradient call. Copies around gradient calls
        get the line of an equation in the same program.
        """
        (kind, number), split, own = key, self._pipeline.split, self.mapper(key, origins)
        phase = "forward" if kind in ("F", "prepare", "finish") else "backward"
        place: Origin | None = None
        if kind == "group":
            group = split.assignment.groups[number]
            made = (e for e in split.outer.program.top.equations if not set(e.results).isdisjoint(group.outputs))
            place = next((at for e in made if (at := self._place(e, origins)).frame is not None), None)
            phase, which = "update" if group.phase else "forward", max(0, group.phase - 1)
        elif kind in KINDS:
            which = split.loss_of(number).number
        else:
            which = number if kind == "finish" else number // len(self._pipeline.ranks)
        place = place or origins.locate(frames_of_traceback(split.losses[which].traceback))

        def found(origin: Origin) -> Origin:
            mapped = own(origin)
            return mapped if mapped.frame is not None else replace(_at(mapped, place), phase=phase)

        return found

    def _of_gradients(self, rank: int, origins: HloOrigins) -> Callable[[Origin], Origin]:
        """Return a function that gives sums of gradients the line of an equation producing the gradient."""
        settled = self._pipeline.settle_jobs[rank]

        def own(origin: Origin) -> Origin:
            if origin.leaf is None:
                return origin
            makers = [self._maker(s, k) for i, s, k in settled.sum_sources if i == settled.owned_inputs[origin.leaf]]
            places = [self._place(e, origins) for e in makers if e is not None]
            stated = Origin(origin.frame, origin.call)
            place = stated if stated in places or not places else places[0]
            return replace(_at(origin, place), phase="backward", gradient=True)

        return own

    def _maker(self, s: int, k: int) -> Equation | None:
        """Return the equation that produces the gradient of parameter `k` of a stage, or None."""
        program = self._pipeline.stages[s].program
        return next((e for e in program.joint_program.top.equations if program.gradients[k] in e.results), None)

    def _place(self, e: Equation, origins: HloOrigins) -> Origin:
        traceback = e.jaxpr_eqn.source_info.traceback
        if id(traceback) not in self._calls:
            self._calls[id(traceback)] = frames_of_traceback(traceback)
        return origins.locate(self._calls[id(traceback)])


def _at(origin: Origin, place: Origin) -> Origin:
    return replace(origin, frame=place.frame, call=place.call)


def pipeline_collectives(
    pipeline: PipelineExecutor, said: Mapping[ProgramKey, ProgramTraffic]
) -> tuple[Collective, ...] | None:
    """Return the communication of a step as rows of a report; None where a program has no text.

    Counts are over all stages. Bytes are those sent by a device, the mean over stages, so that rows add up.
    """
    runs, ranks = runs_per_step(pipeline), len(pipeline.ranks)
    every: list[tuple[HloCollective | PlannedCollective, Cause]] = []
    for key, one in said.items():
        if one.collectives is None:
            return None
        every += [(replace(move, count=move.count * runs.get(key, 1)), cause) for move, cause in one.collectives]
    rows = (*_between(pipeline), *merge(every))
    mean = (replace(row, wire_bytes=row.wire_bytes // ranks) for row in rows)
    return tuple(sorted(mean, key=lambda c: -c.wire_bytes))


def sent_bytes(pipeline: PipelineExecutor, s: int) -> tuple[int, int]:
    """Return the bytes of one microbatch sent by one device of a stage to the next and to the previous stage.

    Args:
        pipeline: The pipeline.
        s: The stage.
    """
    stage, schedule = pipeline.stages[s], pipeline.split.schedule
    program, sent = stage.program, []
    for to, ends, at in (
        (s + 1, program.forward_outputs[: len(program.stage.outgoing)], stage.forward_output_shardings),
        (s - 1, program.input_cotangents, stage.input_cotangent_shardings),
    ):
        there = to in pipeline.split.loss_of(s).stages and schedule.rank_of[to] != schedule.rank_of[s]
        values = [(v, a) for v, a in zip(ends, at, strict=False) if there and isinstance(v, Value)]
        sent.append(sum(shard_bytes(program.joint_program.avals[v], a) for v, a in values))
    return sent[0], sent[1]


def _between(pipeline: PipelineExecutor) -> Iterator[Collective]:
    """Yield the transfers between stages, as one collective."""
    m = pipeline.split.schedule.microbatches
    each = [n for s in range(len(pipeline.stages)) for n in sent_bytes(pipeline, s) if n]
    if each:
        yield Collective(
            kind="collective-permute",
            axes=(pipeline.ranks.axis,),
            group_size=len(pipeline.ranks),
            count=len(each) * m,
            bytes=max(each),
            wire_bytes=sum(each) * m,
            what="activations to the next stage, their gradients to the one before",
        )
