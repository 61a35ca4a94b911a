"""`Code`: a sharded step exported as a program of plain JAX."""

import ast
import builtins
import importlib
import inspect
import os
import symtable
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from ..analysis.program_reading import program_reading
from ..compilation.tracing import BATCHED_EXPERTS_CODE, SORTED_LOOKUPS_CODE
from ..config.options import FLAGS
from ..device_arrays import is_host_aligned
from ..errors import ShardError, list_names
from ..report import Collective
from ..report.parts import mesh_text
from ..report.records import Displayable, write_file
from ..strategies.sharded_lowering import ShardedLowering
from ..strategies.unsharded_dims import guarded_lines
from ..targets import target_of
from .cells import UserStatement, cells_of
from .edit_search import CollectiveCounts, CompiledEdits, best_edits, count_collectives
from .generated_program import GeneratedProgram, donated_of, program_axes, specs_of, wrapper_of
from .latest_call import last_call
from .step_functions import STEP_FUNCTIONS

if TYPE_CHECKING:
    from ..step import ShardedStep


# Python defines these names in each module.
_OF_MODULES = frozenset({"__name__", "__file__", "__doc__", "__builtins__", "__spec__", "__annotations__"})


@dataclass(frozen=True, repr=False)
class Code(Displayable):
    """A sharded step as a program independent of this package and of notebooks.

    Attributes:
        name: Name of the step.
        strategy: Strategy of the plan.
        mesh: Mesh axes with their sizes.
        text: Source text of the program.
        planned: Collectives of the sharded step as compiled; None where the compiler returns no HLO text.
        sent: Collectives of the program, compiled for the same devices; None likewise.
        notes: Paragraphs of the program's docstring.
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
        """Equality of the program's and the plan's collectives in kinds, mesh axes, bytes and counts. None where
        unknown."""
        if self.planned is None or self.sent is None:
            return None
        return count_collectives(self.planned) == count_collectives(self.sent)

    @property
    def moves(self) -> CollectiveCounts | None:
        """Count of each collective of the program, by kind, mesh axes and bytes. None where unknown."""
        return None if self.sent is None else count_collectives(self.sent)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the program to a file and return the path. Raises ShardError where the file can't be written."""
        return write_file(path, self.text)

    def __str__(self) -> str:
        return self.text

    def _summary_line(self) -> str:
        axes = mesh_text(self.mesh)
        return f"<Code of {self.name}: {self.strategy} on {axes}, {self.text.count(chr(10))} lines>"


def generate_code(
    step: "ShardedStep",
    statements: Sequence[UserStatement],
    path: str,
    *,
    missing: Iterable[str] = (),
    call: str | None = None,
    elsewhere: str | None = None,
) -> Code:
    """Export the last kind of call of `step` as a program of plain JAX, made of the user's own text.

    Args:
        step: A step with a recorded call.
        statements: Statements of the user's cells, in order.
        path: Expression naming the step in the text.
        missing: Names without a binding in the statements.
        call: Last line of the program, a call of the step, where no statement calls the step.
        elsewhere: Module to import the step from, where no source text is available.

    Raises:
        ShardError: The step has neither run nor been compiled; it is written for explicit mesh axes, or writes into
            references; the batch was padded; a Python loop over experts is
            batched by the plan; matrices looked up per token are sorted by the plan; a divided dimension is computed
            wrongly by XLA without the plan; the step has `*` or `**` parameters; a host has rows not divided over hosts
            by the plan; or the program would read an unbound name.
    """
    entry, last = last_call(step)
    if entry.padding:
        raise ShardError(
            f"--pad added rows to the batch of {step.name}, and plain JAX divides no batch that does not divide: run "
            "the step on a batch that does, without --pad, then write its code"
        )
    if entry.plan.explicit_axes:
        raise ShardError(
            f"{step.name} is written for explicit mesh axes, which say in its own text where arrays lie: under "
            "jax.set_mesh it is plain JAX as it is; without out_sharding and jax.reshard its code can be written"
        )
    if entry.result.references:
        raise ShardError(
            f"{step.name} writes into a jax.Ref, whose layout plain JAX takes from the reference: pass arrays and "
            "return the new ones, then write its code"
        )
    finding_codes = {finding.code for finding in entry.plan.findings}
    if BATCHED_EXPERTS_CODE in finding_codes:
        raise ShardError(
            f"{step.name} goes through its experts one by one, and the plan has them side by side, which no constraint "
            "in its text says: write the loop as jax.vmap over the experts, run the step, then write its code"
        )
    if SORTED_LOOKUPS_CODE in finding_codes:
        raise ShardError(
            f"{step.name} looks up a matrix for each token, and the plan sorts tokens by their matrices, which no "
            "constraint in its text says: write it with jax.lax.ragged_dot, run the step, then write its code"
        )
    run = entry.plan.run
    if isinstance(run, ShardedLowering) and (lines := guarded_lines(run.layout)):
        raise ShardError(
            f"{step.name} has at {list_names(lines)} what XLA gets wrong along a divided dimension, which "
            "the plan keeps "
            "whole there, inside of what jax makes of the line: run the step under a strategy that does not divide it, "
            "then write its code"
        )
    parameters = inspect.signature(step.__wrapped__).parameters
    names, kinds = list(parameters), {p.kind for p in parameters.values()}
    # The program finds specs by the names of arguments.
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise ShardError(
            f"{step.name} takes * or ** arguments, which have no names of their own to say where they lie: name its "
            "arguments, then write its code"
        )
    reading = program_reading(entry)
    axes = {program_axes(entry)[axis]: size for axis, size in step.mesh.shape.items()}
    # Edits need names that are free in the user's text before the program is put together.
    draft = GeneratedProgram(statements, path, axes, *specs_of(entry), (), {})
    best = best_edits(step, cells_of(statements, draft.program_name), reading.collectives or ())
    donated = donated_of(entry) if step.request.donate else ()
    best = replace(best, options=best.options | ({"donate"} if donated else set()))
    rows, hosts = _host_rows(step), reading.mesh.processes
    program = replace(
        draft,
        functions=(
            *_required_functions(best, draft.program_name),
            *wrapper_of(last, entry.traced, donates=bool(donated), hosts=hosts),
        ),
        edits=best.edits,
        devices=step.mesh.size // hosts if reading.mesh.source == "simulated" else None,
        hosts=hosts,
        per_host_arguments=rows,
        call_text=call,
        batch_axes=entry.plan.batch_axes,
        numbers=tuple(sorted(t.__name__ for t in last.step.numbers if t is not bool)),
        static=tuple(names[k] if isinstance(k, int) else k for k in last.statics),
        donated=donated,
        removes_pmap=last.step.pmap is not None,
    )
    lacking = _lacking(program, missing)
    notes = (*_notes(step, reading.collectives, best, lacking, elsewhere), *_on_hosts(hosts, rows))
    program = replace(program, notes=notes)
    sizes = dict(step.mesh.shape)
    return Code(step.name, step.strategy, sizes, program.text(), reading.collectives, best.collectives, notes)


def _lacking(program: GeneratedProgram, missing: Iterable[str]) -> set[str]:
    """Return the unbound names of the program, all of them in `missing`.

    Raises:
        ShardError: The program reads other unbound names.
    """
    try:
        found = unbound_names(program.source())
    except SyntaxError:  # ruff reports it when the program is formatted
        return {*missing}
    if more := sorted(found.difference(missing)):
        raise ShardError(
            f"the program that %shard code put together reads {', '.join(more)}, which nothing in it gives a value: "
            "please report it with the cells; a cell above the step's that gives it one helps"
        )
    return found


def _required_functions(way: CompiledEdits, name: Callable[[str], str]) -> list[Callable[..., Any]]:
    """Return the step functions called by the edits, directly or through other step functions."""
    texts = [e.before + e.after for edits in way.edits.values() for e in edits]
    called = {f for f in STEP_FUNCTIONS if any(f"{name(f.__name__)}(" in text for text in texts)}
    for f in reversed(STEP_FUNCTIONS):  # each calls functions before it alone
        called |= {g for g in STEP_FUNCTIONS if f in called and g.__name__ in _names(f.__code__)}
    return [f for f in STEP_FUNCTIONS if f in called]


def _names(code: CodeType) -> set[str]:
    """Return the global and attribute names used in a code object and all nested code objects."""
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return {*code.co_names}.union(*map(_names, inner))


def _notes(
    step: "ShardedStep",
    planned: Sequence[Collective] | None,
    way: CompiledEdits,
    lacking: Iterable[str],
    elsewhere: str | None,
) -> Iterator[str]:
    """Yield the paragraphs of the program's docstring.

    Args:
        step: The step.
        planned: Collectives of the sharded step; None where unknown.
        way: The chosen edits.
        lacking: Names without a binding in the statements.
        elsewhere: Module to import the step from, or None.
    """
    axes = mesh_text(step.mesh.shape)
    yield f"{step.name} under {step.strategy} on {axes}, in plain JAX."
    yield f"Written by jaxshard_magic {version('jaxshard_magic')}, without which it runs, and jax {version('jax')}."
    if planned is None or way.collectives is None:
        yield "What it moves between devices is not known: the compiler gave no text to read that from."
    else:
        yield "\n".join(_collective_lines(planned, way.collectives))
    yield from _omission_notes(step, way.options)
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
    """Yield paragraphs about the requirements of a program that several hosts run."""
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
    """Return the arguments with separate rows on each host.

    Raises:
        ShardError: The plan does not divide the rows over the hosts. Plain JAX can't join such rows.
    """
    entry, _ = last_call(step)
    paths, first = [], len(entry.consts)
    for i, dim in entry.per_host_dims.items():
        leaf = entry.plan.leaves[first + i]
        # `jax.make_array_from_process_local_data` puts the rows of a host on the devices of this host.
        if not is_host_aligned(entry.shardings[i], leaf.shape, dim):
            raise ShardError(
                f"{leaf.path} is divided otherwise than hosts have rows of it, and plain JAX puts no such rows "
                "together: give all hosts the whole batch, without --data per-host, then write the code"
            )
        paths.append(leaf.path)
    return tuple(paths)


def _omission_notes(step: "ShardedStep", written: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each option omitted from the program.

    Args:
        step: The step.
        written: Options in the program.
    """
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


def _collective_lines(planned: Sequence[Collective], sent: Sequence[Collective]) -> Iterator[str]:
    """Yield a table of the program's collectives, with the plan's count in brackets where it differs."""
    program_counts, plan_counts = count_collectives(sent), count_collectives(planned)
    same = program_counts == plan_counts
    if same:
        yield "In a step every device takes part in these collectives, the same as under %%shard:"
    else:
        yield "In a step every device takes part in these collectives; in brackets those under %%shard:"
    if not program_counts | plan_counts:
        yield "    none"
    for key in sorted(program_counts | plan_counts, key=lambda k: (-k[2] * (program_counts | plan_counts)[k], k[0])):
        kind, over, size = key
        line = f"    {program_counts[key]} x {kind} over {'+'.join(over or ('?',))} of {size:,} bytes"
        yield line if program_counts[key] == plan_counts[key] else f"{line} ({plan_counts[key]})"
    if same:
        return
    more = sum(c.wire_bytes for c in sent) - sum(c.wire_bytes for c in planned)
    how = f"{abs(more):,} bytes {'more' if more > 0 else 'less'}" if more else "as many bytes"
    yield f"It sends {how} per device and step. Constraints stand at the lines of these cells alone:"
    yield "what the plan holds inside of imported functions, and in what jax makes of these, is the compiler's choice."


def unbound_names(text: str) -> set[str]:
    """Return the global names of a program that nothing in it binds, at its top or through `global`.

    Raises SyntaxError for a text that is no program.
    """
    tree = ast.parse(text)
    table = symtable.symtable(text, "<program>", "exec")
    bound = {*dir(builtins), *_OF_MODULES, *_starred(tree)}
    bound |= {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    bound |= {s.get_name() for inner in _inner(table) for s in inner.get_symbols() if _gives_global(s)}
    bound |= set(_through_globals(tree))
    read = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    read |= {s.get_name() for inner in _inner(table) for s in inner.get_symbols() if _reads_global(s)}
    return read - bound


def _inner(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """Yield the nested symbol tables."""
    for child in table.get_children():
        yield child
        yield from _inner(child)


def _gives_global(symbol: symtable.Symbol) -> bool:
    """Return whether a function binds the symbol through `global`."""
    return symbol.is_declared_global() and (symbol.is_assigned() or symbol.is_imported())


def _reads_global(symbol: symtable.Symbol) -> bool:
    """Return whether a function reads the symbol as a global."""
    return symbol.is_global() and symbol.is_referenced()


def _through_globals(tree: ast.Module) -> Iterator[str]:
    """Yield the names bound as `globals()["w"] = 1`."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="globals")), slice=ast.Constant(value=str(name)), ctx=ast.Store()
            ):
                yield name


def _starred(tree: ast.Module) -> Iterator[str]:
    """Yield the names bound by `from ... import *`. The user's cells have imported these modules before."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and any(a.name == "*" for a in node.names):
            module = importlib.import_module(node.module)
            public = (name for name in vars(module) if not name.startswith("_"))
            yield from getattr(module, "__all__", public)
