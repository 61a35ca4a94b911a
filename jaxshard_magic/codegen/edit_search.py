"""Search for the edits with collectives closest to the plan. Each candidate is compiled and not run."""

import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..analysis.collectives import collectives
from ..compilation.compiled_step import CompiledStep
from ..compilation.planned_call import mesh_context
from ..compilation.target_compile import canonical_source_files, compile_lowered_for_target
from ..compiler_log import capture_messages
from ..program.compiling import jit
from ..program.flatten_call import FlatCall, shape_structs
from ..program.hooks import trace_afresh
from ..program.memory_kinds import aval_for_tracing, shapes_for_lowering
from ..program.per_device import PerDeviceTrace
from ..program.source_lines import full_source_locations
from ..report import Collective
from ..strategies.pmap import per_device_function
from ..strategies.sharded_lowering import ShardedLowering
from ..targets import target_of
from . import step_functions
from .casts import cast_edits
from .cells import Cells
from .constraints import Constraint, find_constraints
from .edits import Edit, OptionEdits, by_file, constraint_edits, edited_trees, regather_edits, vmap_edits
from .expression_marks import MARK_FUNCTION, ExpressionMarks
from .generated_program import program_axes, rename_axes
from .latest_call import last_call, plan_with_code, swap_code
from .microbatch_edits import drop_axes, microbatch_edits
from .remat import remat_edits

if TYPE_CHECKING:
    from ..step import ShardedStep

CollectiveCounts = Counter[tuple[str, tuple[str, ...] | None, int]]  # count by (kind, mesh axes, bytes)


@dataclass(frozen=True)
class CompiledEdits:
    """Edits of the user's text with the compiled result.

    Attributes:
        edits: Edits by file.
        collectives: Collectives of the compiled step; None where the compiler returns no HLO text.
        options: Options of the `%%shard` line implemented by the edits.
        notes: Sentences on omitted parts of the options.
        refused: Exceptions of the user's functions under other edits.
    """

    edits: Mapping[str, list[Edit]]
    collectives: tuple[Collective, ...] | None
    options: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def moves(self) -> CollectiveCounts:
        """Count of each collective."""
        return count_collectives(self.collectives or ())

    @property
    def bytes_sent(self) -> int:
        """Bytes that a device sends in a step."""
        return sum(c.wire_bytes for c in self.collectives or ())

    def distance(self, wanted: Sequence[Collective]) -> int:
        """Return the bytes per device and step of all collectives in excess on either side.

        Args:
            wanted: Collectives of the plan.
        """
        sent: Counter[tuple[Any, ...]] = Counter()
        for sign, moved in ((1, self.collectives or ()), (-1, wanted)):
            for c in moved:
                sent[c.kind, c.axes, c.bytes] += sign * c.wire_bytes
        return sum(map(abs, sent.values()))


def count_collectives(moved: Iterable[Collective]) -> CollectiveCounts:
    """Count collectives by kind, mesh axes and bytes."""
    moves: CollectiveCounts = Counter()
    for c in moved:
        moves[c.kind, c.axes, c.bytes] += c.count
    return moves


def best_edits(step: "ShardedStep", cells: Cells, wanted: Sequence[Collective]) -> CompiledEdits:
    """Return the edits with collectives closest to those of the plan; of equals the simplest.

    Candidates, in order: no constraint except on arguments and results; constraints on activations; also on lookup
    tables; also weights gathered again in the backward pass. Each has as many options of the line as the text allows,
    except options under which it sends more bytes.

    Args:
        step: A step with a recorded call.
        cells: The user's text.
        wanted: Collectives of the plan.
    """
    constraints = _constraints(step, cells)
    refused: list[str] = []

    def nearest(written: OptionEdits) -> CompiledEdits | None:
        best: CompiledEdits | None = None
        tried: list[list[Edit]] = []
        for more in ([], *constraints(written)):
            edits = [*written.edits, *more]
            if edits in tried:
                continue
            tried.append(edits)
            step.say(f"compiling its program, way {len(tried)} of at most 5")
            try:
                way = replace(_way(step, cells, edits), options=written.options, notes=written.notes)
            except Exception as error:  # raised by the user's functions under the edits
                # Without edits the user's text is at fault, not this search.
                if not edits:
                    raise
                refused.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
                continue
            best = way if best is None or way.distance(wanted) < best.distance(wanted) else best
            if count_collectives(wanted) == best.moves:
                break
        return best

    def chosen(written: OptionEdits) -> CompiledEdits | None:
        way = nearest(written)
        if way is None or written.fallback is None or count_collectives(wanted) == way.moves:
            return way
        less = nearest(written.fallback)
        if less is None or way.bytes_sent <= less.bytes_sent:
            return way
        extra = way.bytes_sent - less.bytes_sent
        more = f"With what it leaves out it would send {extra:,} bytes more per device and step."
        return replace(less, notes=(*less.notes, more))

    ways = (way for written in option_edits(step, cells) if (way := chosen(written)) is not None)
    return replace(next(ways), refused=tuple(dict.fromkeys(refused)))


def option_edits(step: "ShardedStep", cells: Cells) -> Iterator[OptionEdits]:
    """Yield the options written into the cells: all options with a form in the text, then fewer, at last none."""
    each = [write(step, cells) for write in (cast_edits, microbatch_edits, remat_edits)]
    written = [o for o in each if o.options]
    start = OptionEdits(notes=tuple(note for o in each if not o.options for note in o.notes))
    fewer = [o.fallback or o for o in written]
    yield sum(written, start)
    # Without fallbacks `fewer` equals `written`, which has been yielded.
    for n in range(len(fewer) - (fewer == written), -1, -1):
        yield sum(fewer[:n], start)


def _constraints(step: "ShardedStep", cells: Cells) -> Callable[[OptionEdits], list[list[Edit]]]:
    """Return a function from option edits to lists of constraint edits, from the fewest to the most."""
    hold, spec = cells.program_name("hold"), cells.program_name("P")
    pinned = _pins(step, cells)
    activations = [pin for pin in pinned if not pin.is_table]
    tables = constraint_edits((pin for pin in pinned if pin.is_table), hold, spec)
    in_vmap = []
    if any(pin.under_vmap for pin in pinned):
        in_vmap = vmap_edits(cells, last_call(step)[0].plan.batch_axes)
    twice = regather_edits(cells, cells.program_name("again"))

    def beside(written: OptionEdits) -> list[list[Edit]]:
        axes = written.per_device_axes
        holding = [*constraint_edits(drop_axes(activations, axes), hold, spec), *([] if axes else in_vmap)]
        more = [] if "remat" in written.options else twice
        return [holding, [*holding, *tables], [*holding, *more], [*holding, *tables, *more]]

    return beside


def _pins(step: "ShardedStep", cells: Cells) -> list[Constraint]:
    """Return the constraints of the plan; none for a step without constraints."""
    if not isinstance(last_call(step)[0].plan.run, ShardedLowering):
        return []
    marks = ExpressionMarks()
    run = plan_with_code(step, marks.marked_trees(cells), {MARK_FUNCTION: marks.mark_value}).plan.run
    return find_constraints(run, marks) if isinstance(run, ShardedLowering) else []


def _way(step: "ShardedStep", cells: Cells, edits: Sequence[Edit]) -> CompiledEdits:
    """Compile the step with some edits and read the collectives. Nothing runs."""
    given = {cells.program_name(f.__name__): f for f in _functions(step)}
    given |= {cells.program_name("P"): PartitionSpec, "jax": jax}
    with swap_code(edited_trees(cells, edits), given if edits else {}):
        compiled = _compiled(step)
    text = compiled.as_text()
    return CompiledEdits(by_file(edits), collectives(text, step.mesh.shape) if text else None)


def _functions(step: "ShardedStep") -> list[types.FunctionType]:
    """Return copies of the step functions, bound to the step's mesh and batch axes."""
    namespace = {**vars(step_functions), "mesh": step.mesh, "EXAMPLES": last_call(step)[0].plan.batch_axes}
    for f in (step_functions.where, *step_functions.STEP_FUNCTIONS):
        own = namespace[f.__name__] = types.FunctionType(f.__code__, namespace, f.__name__, f.__defaults__)
        # `types.FunctionType` does not take the defaults of keyword-only parameters.
        own.__kwdefaults__ = f.__kwdefaults__
    return [namespace[f.__name__] for f in step_functions.STEP_FUNCTIONS]


def _compiled(step: "ShardedStep") -> Any:
    """Compile the user's step as plain JAX, with the plan's shardings of arguments and results."""
    (entry, call), mesh = last_call(step), step.mesh
    ins = entry.plan.in_shardings[len(entry.traced.consts) :]
    run = _spread(step) if isinstance(entry.traced, PerDeviceTrace) else lambda *leaves: call.flat_function(*leaves)[0]
    target = target_of(mesh)
    with (
        mesh_context(mesh),
        full_source_locations(),
        # Without it JAX would use its trace of the same function with other code.
        trace_afresh(),
        nullcontext() if target is None else canonical_source_files(),
    ):
        outs = _out_shardings(entry, call)
        shapes = shapes_for_lowering(shape_structs(call.leaves), ins)
        lowered = jit(run, in_shardings=ins, out_shardings=outs).lower(*shapes)
        if target is not None:
            return compile_lowered_for_target(lowered, target, mesh, step.programs.compile_limit)
        with capture_messages():  # the step's own report has the compiler's messages already
            return lowered.compile()


def _out_shardings(entry: CompiledStep, call: FlatCall) -> list[NamedSharding]:
    """Return the shardings of the user's results.

    A step with a rewritten gradient returns all differentiated NNX objects, the user's own step only the changed
    objects. The paths are therefore traced again.
    """
    traced = entry.traced
    places = dict(zip(traced.out_paths, entry.plan.out_shardings, strict=True))
    carried = 0 if entry.rewritten is None else entry.rewritten.carried
    paths = list(traced.out_paths[: len(traced.out_paths) - carried])
    if call.nodes is not None and not isinstance(traced, PerDeviceTrace):

        def named(*leaves: Any) -> list[Any]:
            outs, paths[:], _ = call.flat_function(*leaves)
            return outs

        jax.eval_shape(named, *map(aval_for_tracing, shape_structs(call.leaves)))
    return [places[path] for path in paths]


def _spread(step: "ShardedStep") -> Callable[..., Any]:
    """Return a step written for one device as a function over the mesh, under the step's own axis names."""
    entry, call = last_call(step)
    traced, names = entry.traced, program_axes(entry)
    assert isinstance(traced, PerDeviceTrace)
    mesh = Mesh(step.mesh.devices, tuple(names[a] for a in step.mesh.axis_names))
    ins, outs = ([rename_axes(s, names) for s in specs] for specs in (entry.plan.in_specs, entry.plan.out_specs))
    out_cuts = traced.output_slices if traced.mapping.has_device_axis else [None] * len(outs)
    one = per_device_function(lambda *leaves: call.flat_function(*leaves)[0], traced.mapping.slices, out_cuts)
    ins = tuple(ins[len(traced.consts) :])
    return jax.shard_map(one, mesh=mesh, in_specs=ins, out_specs=list(outs), check_vma=False)
