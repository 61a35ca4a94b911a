"""Ways to write the plan's constraints into the user's text, each compiled, and what moves between devices under it."""

import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..analysis.collectives import collectives
from ..compiler_log import captured
from ..program.compiling import jit
from ..program.hooks import anew
from ..program.lines import lines_kept
from ..program.mapped import PerDevice
from ..program.memory_kinds import lowered_as, traced_as
from ..program.peel import Peeled, specs
from ..report import Collective
from ..step.elsewhere import canonical, elsewhere
from ..step.planned import own_mesh
from ..strategies.hold import Hold
from ..strategies.pmap import one_device
from ..targets import target_of
from . import inside
from .batches import microbatch_edits
from .casts import cast_edits
from .cells import Cells
from .edits import Edit, OptionEdits, by_file, edited_trees, hold_edits, regather_edits, vmap_edits
from .last import last_call, planned_with
from .marks import SEEN, Marks
from .pins import Pin, pins
from .program import axes_of, renamed
from .remat import remat_edits
from .shards import undivided
from .swap import swapped

if TYPE_CHECKING:
    from ..step import ShardedStep
    from ..step.entry import Entry

Moves = Counter[tuple[str, tuple[str, ...] | None, int]]  # how often, by kind, mesh axes and bytes


@dataclass(frozen=True)
class Way:
    """Edits by file, and the collectives of the program that they make; None where it has no text to read them from.
    `options`: those of the line that the edits bring, `notes`: what of these they do not. `refused`: what the user's
    functions raised under other ways."""

    edits: Mapping[str, list[Edit]]
    collectives: tuple[Collective, ...] | None
    options: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def moves(self) -> Moves:
        return counted(self.collectives or ())

    @property
    def sent(self) -> int:
        """The bytes that a device sends in a step."""
        return sum(c.wire_bytes for c in self.collectives or ())

    def distance(self, wanted: Sequence[Collective]) -> int:
        """The bytes that a device sends in a step for collectives which only one of the two has."""
        sent: Counter[tuple[Any, ...]] = Counter()
        for sign, moved in ((1, self.collectives or ()), (-1, wanted)):
            for c in moved:
                sent[c.kind, c.axes, c.bytes] += sign * c.wire_bytes
        return sum(map(abs, sent.values()))


def counted(moved: Iterable[Collective]) -> Moves:
    moves: Moves = Counter()
    for c in moved:
        moves[c.kind, c.axes, c.bytes] += c.count
    return moves


def best_way(step: "ShardedStep", cells: Cells, wanted: Sequence[Collective]) -> Way:
    """The way to write the plan's constraints into the cells that moves most nearly what the plan moves: with no
    constraint but where arrays begin and end, with activations held, with tables as well that are looked up in, or with
    weights gathered again; each with as many options of the line as the cells bear, but those with which it sends more.
    Of equals the simplest."""
    constraints = _constraints(step, cells)
    refused: list[str] = []

    def nearest(written: OptionEdits) -> Way | None:
        best: Way | None = None
        tried: list[list[Edit]] = []
        for more in ([], *constraints(written)):
            edits = [*written.edits, *more]
            if edits in tried:
                continue
            tried.append(edits)
            step.say(f"compiling its program, way {len(tried)} of at most 5")
            try:
                way = replace(_way(step, cells, edits), options=written.options, notes=written.notes)
            except Exception as error:  # of the user's own functions, with something around them
                if not edits:
                    raise
                refused.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
                continue
            best = way if best is None or way.distance(wanted) < best.distance(wanted) else best
            if counted(wanted) == best.moves:
                break
        return best

    def chosen(written: OptionEdits) -> Way | None:
        way = nearest(written)
        if way is None or written.fallback is None or counted(wanted) == way.moves:
            return way
        less = nearest(written.fallback)
        if less is None or way.sent <= less.sent:
            return way
        extra = way.sent - less.sent
        more = f"With what it leaves out it would send {extra:,} bytes more per device and step."
        return replace(less, notes=(*less.notes, more))

    ways = (way for written in option_edits(step, cells) if (way := chosen(written)) is not None)
    return replace(next(ways), refused=tuple(dict.fromkeys(refused)))


def option_edits(step: "ShardedStep", cells: Cells) -> Iterator[OptionEdits]:
    """The options of the line written into the cells: all that have a form in them, then fewer, none at last."""
    each = [write(step, cells) for write in (cast_edits, microbatch_edits, remat_edits)]
    written = [o for o in each if o.options]
    start = OptionEdits(notes=tuple(note for o in each if not o.options for note in o.notes))
    fewer = [o.fallback or o for o in written]
    yield sum(written, start)
    for n in range(len(fewer) - (fewer == written), -1, -1):
        yield sum(fewer[:n], start)


def _constraints(step: "ShardedStep", cells: Cells) -> Callable[[OptionEdits], list[list[Edit]]]:
    """The edits that hold arrays as the plan does, from the fewest to the most, beside those of options."""
    hold, spec = cells.name("hold"), cells.name("P")
    pinned = _pins(step, cells)
    activations = [pin for pin in pinned if not pin.table]
    tables = hold_edits((pin for pin in pinned if pin.table), hold, spec)
    in_vmap = []
    if any(pin.mapped for pin in pinned):
        in_vmap = vmap_edits(cells, last_call(step)[0].plan.batch_axes)
    twice = regather_edits(cells, cells.name("again"))

    def beside(written: OptionEdits) -> list[list[Edit]]:
        axes = written.per_device
        holding = [*hold_edits(undivided(activations, axes), hold, spec), *([] if axes else in_vmap)]
        more = [] if "remat" in written.options else twice
        return [holding, [*holding, *tables], [*holding, *more], [*holding, *tables, *more]]

    return beside


def _pins(step: "ShardedStep", cells: Cells) -> list[Pin]:
    """Of a program that holds no array in place there are none."""
    if not isinstance(last_call(step)[0].plan.run, Hold):
        return []
    marks = Marks()
    run = planned_with(step, marks.both(cells), {SEEN: marks.seen}).plan.run
    return pins(run, marks) if isinstance(run, Hold) else []


def _way(step: "ShardedStep", cells: Cells, edits: Sequence[Edit]) -> Way:
    """What a program with these edits moves: compiled, not run."""
    given = {cells.name(f.__name__): f for f in _functions(step)}
    given |= {cells.name("P"): PartitionSpec, "jax": jax}
    with swapped(edited_trees(cells, edits), given if edits else {}):
        compiled = _compiled(step)
    text = compiled.as_text()
    return Way(by_file(edits), collectives(text, step.mesh.shape) if text else None)


def _functions(step: "ShardedStep") -> list[types.FunctionType]:
    """Those that stand inside of a step, on its mesh."""
    namespace = {**vars(inside), "mesh": step.mesh, "EXAMPLES": last_call(step)[0].plan.batch_axes}
    for f in (inside.where, *inside.INSIDE):
        own = namespace[f.__name__] = types.FunctionType(f.__code__, namespace, f.__name__, f.__defaults__)
        own.__kwdefaults__ = f.__kwdefaults__
    return [namespace[f.__name__] for f in inside.INSIDE]


def _compiled(step: "ShardedStep") -> Any:
    """The user's step as it is now, with arguments and results where the plan has them, as plain JAX compiles it."""
    (entry, call), mesh = last_call(step), step.mesh
    ins = entry.plan.in_shardings[len(entry.traced.consts) :]
    run = _spread(step) if isinstance(entry.traced, PerDevice) else lambda *leaves: call.fun(*leaves)[0]
    target = target_of(mesh)
    with own_mesh(mesh), lines_kept(), anew(), nullcontext() if target is None else canonical():
        outs = _out_shardings(entry, call)
        shapes = lowered_as(specs(call.leaves), ins)
        lowered = jit(run, in_shardings=ins, out_shardings=outs).lower(*shapes)
        if target is not None:
            return elsewhere(lowered, target, mesh, step.compile_limit)
        with captured():  # what the compiler complains of is in the step's own report
            return lowered.compile()


def _out_shardings(entry: "Entry", call: Peeled) -> list[NamedSharding]:
    """Where the user's step is to have its results. Of NNX objects it gives back what it changes: a step whose gradient
    the plan looks into changes all that it differentiates."""
    traced = entry.traced
    places = dict(zip(traced.out_paths, entry.plan.out_shardings, strict=True))
    carried = 0 if entry.rewritten is None else entry.rewritten.carried
    paths = list(traced.out_paths[: len(traced.out_paths) - carried])
    if call.nodes is not None and not isinstance(traced, PerDevice):

        def named(*leaves: Any) -> list[Any]:
            outs, paths[:], _ = call.fun(*leaves)
            return outs

        jax.eval_shape(named, *map(traced_as, specs(call.leaves)))
    return [places[path] for path in paths]


def _spread(step: "ShardedStep") -> Callable[..., Any]:
    """What each device does of a step written for one, on the mesh with the step's own names of its axes."""
    entry, call = last_call(step)
    traced, names = entry.traced, axes_of(entry)
    assert isinstance(traced, PerDevice)
    mesh = Mesh(step.mesh.devices, tuple(names[a] for a in step.mesh.axis_names))
    ins, outs = ([renamed(s, names) for s in specs] for specs in (entry.plan.in_specs, entry.plan.out_specs))
    out_cuts = traced.stacked if traced.mapped.device_axis else [None] * len(outs)
    one = one_device(lambda *leaves: call.fun(*leaves)[0], traced.mapped.cuts, out_cuts)
    ins = tuple(ins[len(traced.consts) :])
    return jax.shard_map(one, mesh=mesh, in_specs=ins, out_specs=list(outs), check_vma=False)
