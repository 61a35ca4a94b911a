"""Ways to write the plan's constraints into the user's text, each compiled, and what moves between devices under it."""

import ast
import linecache
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..analysis.collectives import collectives
from ..compiler_log import captured
from ..gradients.remat import POLICIES
from ..program.lines import lines_kept
from ..program.mapped import PerDevice
from ..program.peel import specs
from ..report import Collective
from ..step.elsewhere import canonical, elsewhere
from ..step.planned import own_mesh
from ..strategies.hold import Hold
from ..targets import target_of
from . import parts
from .batches import microbatched
from .edits import Edit, checkpointed, edited, held, imported, mapped, rematted
from .marks import SEEN, Marks
from .pieces import Piece
from .pins import Pin, pins
from .program import axes_of, renamed
from .swap import swapped

if TYPE_CHECKING:
    from ..step import ShardedStep

INSIDE = (parts.hold, parts.again, parts.in_microbatches)
Files = dict[str, list[str]]  # the lines of each
Moves = Counter[tuple[str, tuple[str, ...] | None, int]]  # how often, by kind, mesh axes and bytes


@dataclass(frozen=True)
class Way:
    """Edits by file, and the collectives of the program that they make; None where it has no text to read them from.
    `refused`: what the user's functions raised under other ways."""

    edits: Mapping[str, list[Edit]]
    collectives: tuple[Collective, ...] | None
    refused: tuple[str, ...] = ()

    @property
    def moves(self) -> Moves:
        return counted(self.collectives or ())

    def distance(self, wanted: Sequence[Collective]) -> int:
        """The bytes that a device sends in a step for collectives which only one of the two has."""
        sent: Counter[tuple[Any, ...]] = Counter()
        for sign, found in ((1, self.collectives or ()), (-1, wanted)):
            for c in found:
                sent[c.kind, c.axes, c.bytes] += sign * c.wire_bytes
        return sum(map(abs, sent.values()))


def policy_of(step: "ShardedStep") -> str | None:
    """The policy of the step's remat as Python, empty for jax's own; None where it has none, or another way."""
    names = {"full": "", "nothing": "", "nothing_saveable": "", "dots": "dots_saveable"}
    how = step.inside.remat
    if how not in POLICIES or how == "offload":
        return None
    own = names.get(how, how)
    return own and f"jax.checkpoint_policies.{own}"


def counted(found: Iterable[Collective]) -> Moves:
    moves: Moves = Counter()
    for c in found:
        moves[c.kind, c.axes, c.bytes] += c.count
    return moves


def best_way(
    step: "ShardedStep", pieces: Sequence[Piece], wanted: Sequence[Collective], name: Callable[[str], str]
) -> Way:
    """The way to write the plan's constraints into the pieces that moves most nearly what the plan moves: with no
    constraint but where arrays begin and end, with activations held, with tables as well that are looked up in, or with
    weights gathered again. Of equals the simplest. `name` gives what a program calls `hold` and `again`."""
    files = {piece.file: linecache.getlines(piece.file) for piece in pieces}
    trees = {file: ast.parse("".join(lines)) for file, lines in files.items() if lines}
    lines = {file: {n for p in pieces if p.file == file for n in p.lines} for file in trees}
    imports = imported(*trees.values(), *(ast.parse(p.text) for p in pieces if p.imports))
    pinned = _pins(step, trees, lines)
    found = held([pin for pin in pinned if not pin.table], name("hold"), name("P"))
    tables = held([pin for pin in pinned if pin.table], name("hold"), name("P"))
    if any(pin.mapped for pin in pinned):
        axes = step.entry.plan.batch_axes if step.entry is not None else ()
        found += [e for file, tree in trees.items() for e in mapped(tree, file, lines[file], axes, imports)]
    again = name("again")
    twice = [e for file, tree in trees.items() for e in checkpointed(tree, file, lines[file], again, imports)]
    base = microbatched(step, trees, lines, name, imports)
    if (policy := policy_of(step)) is not None:
        how = policy or None
        base += [e for file, tree in trees.items() for e in rematted(tree, file, lines[file], how, imports)]
        twice = []
    refused: list[str] = []

    def nearest(base: list[Edit]) -> Way | None:
        best: Way | None = None
        tried: list[list[Edit]] = []
        also = (), tables, twice, [*tables, *twice]
        for edits in (base, *([*base, *found, *more] for more in also)):
            if edits in tried:
                continue
            tried.append(edits)
            step.say(f"compiling its program, way {len(tried)} of at most 5")
            try:
                way = _way(step, files, trees, edits, name)
            except Exception as error:  # of the user's own functions, with something around them
                if not edits:
                    raise
                refused.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
                continue
            best = way if best is None or way.distance(wanted) < best.distance(wanted) else best
            if counted(wanted) == best.moves:
                break
        return best

    best = (nearest(base) if base else None) or nearest([])
    assert best is not None
    return replace(best, refused=tuple(dict.fromkeys(refused)))


def _pins(step: "ShardedStep", trees: Mapping[str, ast.Module], lines: Mapping[str, set[int]]) -> list[Pin]:
    """Of a program that holds no array in place there are none."""
    assert step.entry is not None
    run, call = step.entry.plan.run, step.entry.call_of
    if not isinstance(run, Hold) or call is None:
        return []
    marks = Marks()
    both = {
        file: (tree, marks.tree(ast.parse("".join(linecache.getlines(file))), file, lines[file]))
        for file, tree in trees.items()
    }
    with swapped(both, {SEEN: marks.seen}):
        planned = step.planned_for(call)
    return pins(planned.plan.run, marks) if isinstance(planned.plan.run, Hold) else []


def _way(
    step: "ShardedStep",
    files: Files,
    trees: Mapping[str, ast.Module],
    edits: Sequence[Edit],
    name: Callable[[str], str],
) -> Way:
    """What a program with these edits moves: compiled, not run."""
    by_file: dict[str, list[Edit]] = {}
    for e in edits:
        by_file.setdefault(e.place.file, []).append(e)
    both = {
        file: (trees[file], ast.parse("".join(edited(files[file], 1, its)))) for file, its in by_file.items()
    }
    given = {name(f.__name__): f for f in _functions(step)} | {name("P"): PartitionSpec, "jax": jax}
    with swapped(both, {k: v for k, v in given.items() if edits}):
        compiled = _compiled(step)
    text = compiled.as_text()
    return Way(by_file, collectives(text, step.mesh.shape) if text else None)


def _functions(step: "ShardedStep") -> list[types.FunctionType]:
    """Those of `parts` that stand inside of a step, on its mesh."""
    assert step.entry is not None
    namespace = {**vars(parts), "mesh": step.mesh, "EXAMPLES": step.entry.plan.batch_axes}
    found = []
    for f in INSIDE:
        found.append(types.FunctionType(f.__code__, namespace, f.__name__, f.__defaults__))
        found[-1].__kwdefaults__ = f.__kwdefaults__
    return found


def _compiled(step: "ShardedStep") -> Any:
    """The user's step as it is now, with arguments and results where the plan has them, as plain JAX compiles it."""
    entry, mesh = step.entry, step.mesh
    assert entry is not None and entry.call_of is not None
    call, plan, n = entry.call_of, entry.plan, len(entry.traced.consts)
    ins = [NamedSharding(mesh, spec) for spec in plan.in_specs[n:]]
    outs = [NamedSharding(mesh, spec) for spec in plan.out_specs]
    run = _spread(step) if isinstance(entry.traced, PerDevice) else lambda *leaves: call.fun(*leaves)[0]
    jitted = jax.jit(run, in_shardings=ins, out_shardings=outs)
    target = target_of(mesh)
    fresh = jax.make_user_context(None)  # jits inside the step are traced anew
    with own_mesh(mesh), lines_kept(), fresh(object()), nullcontext() if target is None else canonical():
        lowered = jitted.lower(*specs(call.leaves))
        if target is not None:
            return elsewhere(lowered, target, mesh, step.compile_limit)
        with captured():  # what the compiler complains of is in the step's own report
            return lowered.compile()


def _spread(step: "ShardedStep") -> Callable[..., Any]:
    """What each device does of a step written for one, on the mesh with the step's own names of its axes."""
    entry = step.entry
    assert entry is not None and entry.call_of is not None and isinstance(entry.traced, PerDevice)
    call, traced, names = entry.call_of, entry.traced, axes_of(entry)
    mesh = Mesh(step.mesh.devices, tuple(names[a] for a in step.mesh.axis_names))
    ins, outs = ([renamed(s, names) for s in specs] for specs in (entry.plan.in_specs, entry.plan.out_specs))
    cuts = [c.dim if c and c.device_axis else None for c in traced.mapped.cuts]
    places = [
        next((d for d, e in enumerate(s) if e), None) if traced.mapped.device_axis else None for s in outs
    ]

    def one(*parts: Any) -> list:
        mine = [x if d is None else lax.squeeze(x, [d]) for x, d in zip(parts, cuts, strict=True)]
        made = call.fun(*mine)[0]
        return [x if d is None else lax.expand_dims(x, [d]) for x, d in zip(made, places, strict=True)]

    ins = tuple(ins[len(traced.consts) :])
    return jax.shard_map(one, mesh=mesh, in_specs=ins, out_specs=list(outs), check_vma=False)
