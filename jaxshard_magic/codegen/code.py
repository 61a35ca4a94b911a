"""`Code`: a step under its plan as a program of plain JAX."""

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from ..analysis.reading import reading_of
from ..config.options import FLAGS
from ..errors import ShardError, one_of
from ..placing import cuts_by_host
from ..report import Collective
from ..report.parts import mesh_text
from ..report.written import Shown, saved
from ..step.tracing import BY_SORTING, SIDE_BY_SIDE
from ..strategies.hold import Hold
from ..strategies.undivided import held_against_faults
from ..targets import target_of
from .cells import Piece, cells_of
from .inside import INSIDE
from .last import last_call
from .program import Program, axes_of, donated_of, specs_of, wrapper_of
from .trying import Moves, Way, best_way, counted
from .unbound import unbound

if TYPE_CHECKING:
    from ..step import ShardedStep


@dataclass(frozen=True, repr=False)
class Code(Shown):
    """A step under its plan as a program that needs neither this package nor a notebook.

    `text` is the program. `planned`: the collectives of the plan as compiled, `sent`: those of the program, as compiled
    on the same devices; None where the compiler gives no text to read them from. `notes`: what the program says of
    itself at its beginning.
    """

    name: str
    strategy: str
    mesh: Mapping[str, int]
    text: str
    planned: tuple[Collective, ...] | None
    sent: tuple[Collective, ...] | None
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool | None:
        """Does the program move what the plan moves: collectives of the same kinds over the same mesh axes, as many, of
        as many bytes? None where that is not known."""
        if self.planned is None or self.sent is None:
            return None
        return counted(self.planned) == counted(self.sent)

    @property
    def moves(self) -> Moves | None:
        """How often the program has each collective, by kind, mesh axes and bytes."""
        return None if self.sent is None else counted(self.sent)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """The program in a file of its own; its path. Raises ShardError where it can't be written."""
        return saved(path, self.text)

    def __str__(self) -> str:
        return self.text

    def _ways(self) -> tuple[Any, Any, Any]:
        from ..views import code

        return code.to_text, code.to_html, code.page

    def _short(self) -> str:
        axes = mesh_text(self.mesh)
        return f"<Code of {self.name}: {self.strategy} on {axes}, {self.text.count(chr(10))} lines>"


def code_of(
    step: "ShardedStep",
    pieces: Sequence[Piece],
    path: str,
    *,
    missing: Iterable[str] = (),
    call: str | None = None,
    elsewhere: str | None = None,
) -> Code:
    """The last kind of call of `step` as plain JAX, made of the user's own text.

    `path`: what the step goes by in it; `missing`: names that nothing in the text gives a value; `call`: how it is
    called, where nothing in the text does; `elsewhere`: the module that it is imported from, where its text can't be
    had.

    Raises ShardError before the step has run or was compiled, for one whose batch was padded, and for one that goes
    through experts one by one, which the plan has side by side, looks up a matrix for each token, which the plan
    sorts, or divides what XLA gets wrong without the plan.
    """
    entry, last = last_call(step)
    if entry.added:
        raise ShardError(
            f"--pad added rows to the batch of {step.name}, and plain JAX divides no batch that does not divide: run "
            "the step on a batch that does, without --pad, then write its code"
        )
    told = {finding.code for finding in entry.plan.findings}
    if SIDE_BY_SIDE in told:
        raise ShardError(
            f"{step.name} goes through its experts one by one, and the plan has them side by side, which no constraint "
            "in its text says: write the loop as jax.vmap over the experts, run the step, then write its code"
        )
    if BY_SORTING in told:
        raise ShardError(
            f"{step.name} looks up a matrix for each token, and the plan sorts tokens by their matrices, which no "
            "constraint in its text says: write it with jax.lax.ragged_dot, run the step, then write its code"
        )
    run = entry.plan.run
    if isinstance(run, Hold) and (lines := held_against_faults(run.layout)):
        raise ShardError(
            f"{step.name} has at {one_of(lines)} what XLA gets wrong along a divided dimension, which the plan keeps "
            "whole there, inside of what jax makes of the line: run the step under a strategy that does not divide it, "
            "then write its code"
        )
    parameters = inspect.signature(step.__wrapped__).parameters
    names, kinds = list(parameters), {p.kind for p in parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise ShardError(
            f"{step.name} takes * or ** arguments, which have no names of their own to say where they lie: name its "
            "arguments, then write its code"
        )
    reading = reading_of(entry)
    axes = {axes_of(entry)[axis]: size for axis, size in step.mesh.shape.items()}
    draft = Program(pieces, path, axes, *specs_of(entry), (), {})
    way = best_way(step, cells_of(pieces, draft.name), reading.collectives or ())
    donated = donated_of(entry) if step.request.donate else ()
    way = replace(way, options=way.options | ({"donate"} if donated else set()))
    rows, hosts = _host_rows(step), reading.mesh.processes
    program = replace(
        draft,
        functions=(
            *_inside(way, draft.name),
            *wrapper_of(last, entry.traced, donates=bool(donated), hosts=hosts),
        ),
        edits=way.edits,
        devices=step.mesh.size // hosts if reading.mesh.source == "simulated" else None,
        hosts=hosts,
        host_rows=rows,
        call=call,
        examples=entry.plan.batch_axes,
        numbers=tuple(sorted(t.__name__ for t in last.step.numbers if t is not bool)),
        static=tuple(names[k] if isinstance(k, int) else k for k in last.statics),
        donated=donated,
        unwrapped=last.step.pmap is not None,
    )
    lacking = _lacking(program, missing)
    notes = (*_notes(step, reading.collectives, way, lacking, elsewhere), *_on_hosts(hosts, rows))
    program = replace(program, notes=notes)
    sizes = dict(step.mesh.shape)
    return Code(step.name, step.strategy, sizes, program.text(), reading.collectives, way.collectives, notes)


def _lacking(program: Program, missing: Iterable[str]) -> set[str]:
    """The names of the user's that a program reads and no cell gives a value, of those `missing` from the cells. Raises
    ShardError where it reads others that nothing in it binds: that is no program to hand out."""
    try:
        found = unbound(program.source())
    except SyntaxError:  # which is told where it is formatted
        return {*missing}
    if more := sorted(found.difference(missing)):
        raise ShardError(
            f"the program that %shard code put together reads {', '.join(more)}, which nothing in it gives a value: "
            "please report it with the cells; a cell above the step's that gives it one helps"
        )
    return found


def _inside(way: Way, name: Callable[[str], str]) -> list[Callable[..., Any]]:
    """Those of INSIDE that a way's edits call, and those that these call."""
    texts = [e.before + e.after for edits in way.edits.values() for e in edits]
    called = {f for f in INSIDE if any(f"{name(f.__name__)}(" in text for text in texts)}
    for f in reversed(INSIDE):  # they call those before them
        called |= {g for g in INSIDE if f in called and g.__name__ in _names(f.__code__)}
    return [f for f in INSIDE if f in called]


def _names(code: CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return {*code.co_names}.union(*map(_names, inner))


def _notes(
    step: "ShardedStep",
    planned: Sequence[Collective] | None,
    way: Way,
    lacking: Iterable[str],
    elsewhere: str | None,
) -> Iterator[str]:
    axes = mesh_text(step.mesh.shape)
    yield f"{step.name} under {step.strategy} on {axes}, in plain JAX."
    yield f"Written by jaxshard_magic {version('jaxshard_magic')}, without which it runs, and jax {version('jax')}."
    if planned is None or way.collectives is None:
        yield "What it moves between devices is not known: the compiler gave no text to read that from."
    else:
        yield "\n".join(_moves(planned, way.collectives))
    yield from _left_out(step, way.options)
    yield from way.notes
    for raised in way.refused:
        yield f"A way to write more of the plan into these cells is left out: they raise under it\n    {raised}"
    if (target := target_of(step.mesh)) is not None:
        yield f"{target.name} was not attached where this was written: it was compiled for it, and has not run."
    if elsewhere is not None:
        yield (
            f"The text of {step.name} can't be had: no cell defines it. The program imports it from {elsewhere}, a\n"
            "module that you write; constraints inside of it stand nowhere."
        )
    if names := sorted(lacking):
        yield f"No cell gives {', '.join(names)} a value: give them one above where they are used."


def _on_hosts(hosts: int, rows: Sequence[str]) -> Iterator[str]:
    """What a program that several hosts run asks of them."""
    if hosts == 1:
        return
    yield (
        f"Each of {hosts} hosts runs this program at once, with as many devices each, joined by\n"
        "jax.distributed.initialize(). What it computes from is to be the same on all of them, as from the same seed\n"
        "or file; a print or a file that it writes comes from each."
    )
    if rows:
        yield f"Of {', '.join(rows)} each host has rows of its own; the batch is all of them together."


def _host_rows(step: "ShardedStep") -> tuple[str, ...]:
    """The arguments of which each host has rows of its own. Raises ShardError where the plan does not divide them over
    the hosts, as plain JAX puts none together."""
    entry, _ = last_call(step)
    found, first = [], len(entry.consts)
    for i, dim in entry.rows.items():
        leaf = entry.plan.leaves[first + i]
        if not cuts_by_host(entry.shardings[i], leaf.shape, dim):
            raise ShardError(
                f"{leaf.path} is divided otherwise than hosts have rows of it, and plain JAX puts no such rows "
                "together: give all hosts the whole batch, without --data per-host, then write the code"
            )
        found.append(leaf.path)
    return tuple(found)


def _left_out(step: "ShardedStep", written: Collection[str]) -> Iterator[str]:
    """One sentence for each option that the program has not; `written` are those that it has."""
    for option, value in step.request.gradients.given.items():
        if option in written:
            continue
        text = f"--{option.replace('_', '-')}" + ("" if value is True else f" {value}")
        yield f"Without {text}: {FLAGS[option].without}."
    if step.request.donate and "donate" not in written:
        yield "Without --donate: the old state stays until the new one is made."
    if n := sum(leaf.path.startswith("closure.") for leaf in last_call(step)[0].plan.leaves):
        yield f"{n} array{'s' * (n > 1)} that the step closes over: every device has the whole of each."
    if step.request.pipeline is not None:
        yield (
            "Without the pipeline: plain JAX runs no schedule of stages. Here every device along its axis holds the\n"
            "whole model and does the whole step; the numbers are the same."
        )


def _moves(planned: Sequence[Collective], sent: Sequence[Collective]) -> Iterator[str]:
    """The collectives of the program; where they are others than the plan's, both."""
    here, there = counted(sent), counted(planned)
    same = here == there
    if same:
        yield "In a step every device takes part in these collectives, the same as under %%shard:"
    else:
        yield "In a step every device takes part in these collectives; in brackets those under %%shard:"
    if not here | there:
        yield "    none"
    for key in sorted(here | there, key=lambda k: (-k[2] * (here | there)[k], k[0])):
        kind, over, size = key
        line = f"    {here[key]} x {kind} over {'+'.join(over or ('?',))} of {size:,} bytes"
        yield line if here[key] == there[key] else f"{line} ({there[key]})"
    if same:
        return
    more = sum(c.wire_bytes for c in sent) - sum(c.wire_bytes for c in planned)
    how = f"{abs(more):,} bytes {'more' if more > 0 else 'less'}" if more else "as many bytes"
    yield f"It sends {how} per device and step. Constraints stand at the lines of these cells alone:"
    yield "what the plan holds inside of imported functions, and in what jax makes of these, is the compiler's choice."
