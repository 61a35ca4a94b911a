"""What moves in a pipeline: the collectives inside of its programs, each with its own stage's line, and what stages
send to each other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..pipeline.executed import Pipeline
from ..pipeline.jobs import Key
from ..plan import Sent
from ..program.ir import Equation, Value
from ..report import Collective, Leaf
from ..schedule.actions import KINDS
from .attribution import caused, host_calls, traced
from .collectives import Cause, Move, merge, moves
from .frames import Frame, called
from .instructions import Instructions, operations
from .origin import Origin, Origins
from .sources import SourceText
from .staged_memory import shard_bytes
from .staged_works import first_alike, runs_of
from .texts import Parsed, Texts

_BLANK = Leaf("a parameter", "params", (), "", (), 0, 0, "")


@dataclass(frozen=True)
class Said:
    """What one program's text says, or its plan: what moves when it runs once, None where the compiler gives no text;
    and the lines that call Python."""

    moves: tuple[tuple[Move | Sent, Cause], ...] | None
    calls: tuple[str | None, ...] = ()

    @property
    def in_text(self) -> list[tuple[Move, Cause]]:
        """What moves by the text of the compiled program; nothing of a plan."""
        return [(move, cause) for move, cause in self.moves or () if isinstance(move, Move)]


def said_by(pipeline: Pipeline, leaves: Sequence[Leaf], texts: Texts, text: SourceText) -> dict[Key, Said]:
    """What each program of a pipeline says, by its key.

    Alike stages share what jax traces of the first of them, whose lines the texts have: here they are told apart by
    their own equations. Where one line of the first is several of another, the first of these stands for all. Alike
    programs of the update, which simulated devices share too, keep the lines of the first.
    """
    shared: dict[int, list[Key]] = {}
    for key, made in pipeline.programs.items():
        shared.setdefault(id(made), []).append(key)
    parsed = _parsed(pipeline, texts)
    lines, found = _Lines(pipeline), {}
    for keys in shared.values():
        program = parsed[keys[0]]
        if program is None:
            found.update(dict.fromkeys(keys, Said(None)))
            continue
        module, origins = program
        from_text = traced(module, moves(module, pipeline.ranks.each[0].shape), origins)
        for key in keys:
            own = lines.of(key, origins)
            here = [(move, own(origin)) for move, origin in from_text]
            named = leaves_of(pipeline, key, leaves)
            found[key] = Said(caused(module, here, named, text), host_calls(module, origins, own))
    return {key: found[key] for key in pipeline.programs}


def instructions_of(
    pipeline: Pipeline, said: Mapping[Key, Said], texts: Texts
) -> dict[Key, tuple[str, Instructions]]:
    """The name of each program's module, and its instructions, on its own lines; no program without text."""
    lines, found = _Lines(pipeline), dict[Key, tuple[str, Instructions]]()
    for key, program in _parsed(pipeline, texts).items():
        if program is not None:
            module, origins = program
            own = lines.else_of_call(key, origins)
            found[key] = module.name, Instructions(module, origins, said[key].in_text, own)
    return found


def operations_of(pipeline: Pipeline, texts: Texts) -> int:
    """How many operations a step runs, each rank's counted on one of its devices; see `instructions.operations`."""
    runs, known = runs_of(pipeline), dict[int, int]()
    parsed = _parsed(pipeline, texts)
    for key, made in pipeline.programs.items():
        if id(made) not in known:
            program = parsed[key]
            known[id(made)] = operations(program.module) if program else 0
    return sum(known[id(made)] * runs.get(key, 1) for key, made in pipeline.programs.items())


def _parsed(pipeline: Pipeline, texts: Texts) -> dict[Key, Parsed | None]:
    """The text of each program; those that stages share have the parameters of the first of these."""
    return {key: texts.of(made.compiled, _places(pipeline, key)) for key, made in pipeline.programs.items()}


def leaves_of(pipeline: Pipeline, key: Key, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
    """Return the leaves that a program's labels may name, in the order of their numbers there."""
    split, (kind, number) = pipeline.split, key
    values: Sequence[Value] = ()
    if kind == "settle":
        settled = pipeline.settled[number]
        values = [settled.loss.input_of[i] for i in settled.owned]
    elif kind in KINDS:
        loss = split.loss_of(number)
        values = [loss.input_of[i] for i in loss.program(number).stage.parameters]
    at = [split.leaf_of.get(v) for v in values]
    return [_BLANK if i is None else leaves[i] for i in at]


def _places(pipeline: Pipeline, key: Key) -> Sequence[int]:
    """Which of those leaves each parameter of a program is, or the gradient of which; other parameters are none."""
    places = [i for i, is_read in enumerate(pipeline.programs[key].reads) if is_read]
    kind, number = key
    if kind == "settle":
        settled = pipeline.settled[number]
        return [settled.owned.index(settled.sums[p][0]) for p in places]
    if kind in KINDS:
        n = len(pipeline.split.programs[number].stage.parameters)
        first = 1 + (n if kind in "BW" else 0)  # the sums and the number of the microbatch
        return [p - first if 0 <= p - first < n else n for p in places]
    return places


class _Lines:
    """The lines of stages by their own equations, where the texts of their programs have those of a stage like them."""

    def __init__(self, pipeline: Pipeline):
        self._pipeline, self._first = pipeline, first_alike(pipeline)
        self._calls: dict[int, tuple[Frame, ...]] = {}  # many equations share a traceback

    def of(self, key: Key, origins: Origins) -> Callable[[Origin], Origin]:
        """From where a program's text says that something comes from to where it comes from in the program of `key`."""
        kind, s = key
        if kind == "settle":
            return self._of_gradients(s, origins)
        if kind == "group" and self._pipeline.split.placed.groups[s].phase:  # behind a gradient call
            return lambda origin: replace(origin, phase=origin.phase and "update")
        if kind not in KINDS or self._first[s] == s:
            return lambda origin: origin
        theirs, mine = (self._pipeline.stages[n].program.whole.equations for n in (self._first[s], s))
        places: dict[Origin, Origin] = {}
        for a, b in zip(theirs, mine, strict=True):
            places.setdefault(self._place(a, origins), self._place(b, origins))

        def own(origin: Origin) -> Origin:
            return _at(origin, places.get(Origin(origin.frame, origin.call), origin))

        return own

    def else_of_call(self, key: Key, origins: Origins) -> Callable[[Origin], Origin]:
        """As `of`; what has no line, as sums of gradients and copies, is of its gradient call, and what is copied
        around these of what is made beside it."""
        (kind, number), split, own = key, self._pipeline.split, self.of(key, origins)
        phase = "forward" if kind in ("F", "prepare", "finish") else "backward"
        place: Origin | None = None
        if kind == "group":
            group = split.placed.groups[number]
            made = (e for e in split.around.program.top.equations if not set(e.outs).isdisjoint(group.wanted))
            place = next((at for e in made if (at := self._place(e, origins)).frame is not None), None)
            phase, which = "update" if group.phase else "forward", max(0, group.phase - 1)
        elif kind in KINDS:
            which = split.loss_of(number).number
        else:
            which = number if kind == "finish" else number // len(self._pipeline.ranks)
        place = place or origins.place(called(split.losses[which].traceback))

        def found(origin: Origin) -> Origin:
            told = own(origin)
            return told if told.frame is not None else replace(_at(told, place), phase=phase)

        return found

    def _of_gradients(self, rank: int, origins: Origins) -> Callable[[Origin], Origin]:
        """A rank's gradients are summed for the equations that make them."""
        settled = self._pipeline.settled[rank]

        def own(origin: Origin) -> Origin:
            if origin.leaf is None:
                return origin
            makers = [self._maker(s, k) for i, s, k in settled.sums if i == settled.owned[origin.leaf]]
            places = [self._place(e, origins) for e in makers if e is not None]
            stated = Origin(origin.frame, origin.call)
            place = stated if stated in places or not places else places[0]
            return replace(_at(origin, place), phase="backward", gradient=True)

        return own

    def _maker(self, s: int, k: int) -> Equation | None:
        """The equation that makes the gradient of parameter k of a stage."""
        program = self._pipeline.stages[s].program
        return next((e for e in program.whole.top.equations if program.gradients[k] in e.outs), None)

    def _place(self, e: Equation, origins: Origins) -> Origin:
        traceback = e.eqn.source_info.traceback
        if id(traceback) not in self._calls:
            self._calls[id(traceback)] = called(traceback)
        return origins.place(self._calls[id(traceback)])


def _at(origin: Origin, place: Origin) -> Origin:
    return replace(origin, frame=place.frame, call=place.call)


def staged_collectives(pipeline: Pipeline, said: Mapping[Key, Said]) -> tuple[Collective, ...] | None:
    """What moves in a step: how often in all stages together, and what a device sends, the mean over the stages, so
    that rows add up. None where a program does not say."""
    runs, ranks = runs_of(pipeline), len(pipeline.ranks)
    every: list[tuple[Move | Sent, Cause]] = []
    for key, one in said.items():
        if one.moves is None:
            return None
        every += [(replace(move, count=move.count * runs.get(key, 1)), cause) for move, cause in one.moves]
    rows = (*_between(pipeline), *merge(every))
    mean = (replace(row, wire_bytes=row.wire_bytes // ranks) for row in rows)
    return tuple(sorted(mean, key=lambda c: -c.wire_bytes))


def sent_by(pipeline: Pipeline, s: int) -> tuple[int, int]:
    """Bytes that one device of a stage sends of one microbatch to the next stage, and to the one before."""
    stage, schedule = pipeline.stages[s], pipeline.split.schedule
    program, sent = stage.program, []
    for to, ends, at in (
        (s + 1, program.made[: len(program.stage.outs)], stage.made),
        (s - 1, program.given_back, stage.given_back),
    ):
        there = to in pipeline.split.loss_of(s).stages and schedule.rank_of[to] != schedule.rank_of[s]
        values = [(v, a) for v, a in zip(ends, at, strict=False) if there and isinstance(v, Value)]
        sent.append(sum(shard_bytes(program.whole.avals[v], a) for v, a in values))
    return sent[0], sent[1]


def _between(pipeline: Pipeline) -> Iterator[Collective]:
    """What the stages send to each other."""
    m = pipeline.split.schedule.microbatches
    each = [n for s in range(len(pipeline.stages)) for n in sent_by(pipeline, s) if n]
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
