"""`--remat` in the user's text."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ..config.options import is_number, remat_expression
from ..gradients.named import Names, frames
from ..gradients.regions import AllBut
from ..gradients.remat import POLICIES, Rematted
from ..program.flops import Totals, counted, totals
from ..program.flow import Flow
from ..program.hooks import anew
from ..program.ir import Equation, Program
from ..program.mapped import PerDevice, on_a_device
from ..program.peel import specs
from ..step.planned import own_mesh
from . import inside
from .cells import Cells, full_name, place_of
from .edits import Edit, OptionEdits, checkpoint_edits, edited_trees
from .last import last_call
from .sites import ARRAYS, METHOD, OBJECTS, OTHERS, Site, Sites
from .stretches import Stretch, stretch
from .swap import swapped

if TYPE_CHECKING:
    from ..step import ShardedStep

# What is done again at a call: nothing, the call itself, all that is differentiated, each trip of a loop by itself; a
# larger number: in so many segments the trips of a loop.
_NOTHING, _CALL, _LOSS, _TRIPS = -2, -1, 0, 1
_LOOPS = {
    "jax.lax.scan": 0,
    "jax.lax.map": 0,
    "jax.lax.fori_loop": 2,
}  # where they have the function of a trip
_FUNCTIONS = inside.recomputed, inside.recomputed_method, inside.recomputing, inside.scan_in_segments


def remat_edits(step: "ShardedStep", cells: Cells) -> OptionEdits:
    """`jax.checkpoint` around what is scanned over, what is called, or the loss, and loops in segments; none where the
    option has no such form."""
    try:
        if step.request.gradients.remat in POLICIES:
            edits = checkpoint_edits(cells, _policy(step) or None)
        else:
            edits = _by_blocks(step, cells)
    except Exception as error:  # of the user's own functions, with something around them
        said = str(error).partition(chr(10))[0]
        return OptionEdits(
            notes=(f"--remat at the lines of the cells is left out: {type(error).__name__}: {said}",)
        )
    return OptionEdits(tuple(edits), frozenset({"remat"} if edits else ()))


def _policy(step: "ShardedStep") -> str:
    """A policy of `--remat` as Python, empty for jax's own. Jax's for products doesn't know ragged ones."""
    how, entry = step.request.gradients.remat or "", last_call(step)[0]
    names = {"full": "", "nothing": "", "nothing_saveable": "", "dots": "dots_saveable"}
    names["offload"] = 'offload_dot_with_no_batch_dims("device", "pinned_host")'
    own, policies = names.get(how, how), "jax.checkpoint_policies"
    losses = entry.rewritten.rematted if entry.rewritten is not None else ()
    equations = (e for loss in losses for e in loss.program.equations)
    ragged = next((e.name for e in equations if (c := e.contraction) and c.ragged is not None), None)
    if how == "dots" and ragged is not None:
        kept = f'lambda primitive, *_, **params: primitive.name == "{ragged}"'
        return f"{policies}.save_from_both_policies({policies}.{own}, {kept})"
    return own and f"{policies}.{own}"


def _by_blocks(step: "ShardedStep", cells: Cells) -> list[Edit]:
    """The edits that do again what the plan does again: none unless the traced step then takes as many FLOPs."""
    entry, _ = last_call(step)
    rewritten = entry.rewritten
    if step.request.gradients.remat is None or rewritten is None:
        return []
    edits = _edits(step, cells, rewritten.rematted, step.request.gradients.remat.strip())
    planned = _work(Program(entry.traced.closed))
    return edits if edits and _work(_traced(step, cells, edits)) == planned else []


def _edits(step: "ShardedStep", cells: Cells, losses: Sequence[Rematted], how: str) -> list[Edit]:
    """None where what is done again is no call, loop or stretch of the text."""
    if all(map(_is_by_value, losses)):
        return _of_values(losses, cells)
    sites, again_at = Sites(cells), defaultdict[Site | None, set[int]](set)
    for loss in losses:
        for site, what in _done_again(loss, how, sites, cells.imports):
            again_at[site].add(what)
    wanted = {site: what for site, what in again_at.items() if what != {_NOTHING}}
    if any(len(what) > 1 for what in wanted.values()):
        return []
    return _at_sites(step, cells, sites, {site: min(what) for site, what in wanted.items()})


def _is_by_value(loss: Rematted) -> bool:
    """Is it values that `checkpoint_name` names which are computed again?"""
    return any(isinstance(b.policy, AllBut) for blocks in loss.again.ranges.values() for b in blocks)


def _done_again(
    loss: Rematted, how: str, sites: Sites, imports: Mapping[str, str]
) -> Iterator[tuple[Site | None, int]]:
    """What is done again at the calls that lead to the equations of a loss; None: at no one call of the text."""
    program, blocks = loss.program, loss.again
    own = dict(_own(loss, how, sites))
    if own == dict.fromkeys(range(len(program.equations))) and is_number(how):
        yield None, _LOSS
        return
    for e in (e for e in program.equations if e.is_scan):
        site, trips = _loop(sites.innermost(frames(e)), imports), e.params["length"]
        each = e.doors[0].scope in blocks.bodies
        count = trips if each else blocks.segments.get(e.index, (0, None))[0]
        if count:
            in_segments = site is not None and full_name(site.node, imports) == "jax.lax.scan"
            yield site if each or in_segments else None, _TRIPS if each else count
        elif site is not None and not any(own.get(i.index) is site for i in e.doors[0].scope.equations):
            yield site, _NOTHING
    for site in set(own.values()):
        yield site, _CALL if _loop(site, imports) is None else _TRIPS
    for e in program.equations:
        if not e.primitive.alias:
            through = sites.through(frames(e)) - {own.get(e.index)}
            yield from ((site, _NOTHING) for site in through if _loop(site, imports) is None)


def _own(loss: Rematted, how: str, sites: Sites) -> Iterator[tuple[int, Site | None]]:
    """The equations of blocks, with the call that is the block of each."""
    names, numbered = Names(loss.program), is_number(how)

    def inside(e: Equation, site: Site | None) -> Iterator[tuple[int, Site | None]]:
        yield e.index, site
        for door in e.doors:
            for within in door.scope.equations:
                yield from inside(within, site)

    for scope, blocks in loss.again.ranges.items():
        for e in (e for block in blocks for e in scope.equations[block.start : block.stop]):
            callers = None if numbered else names.callers(e, remat_expression(how))
            yield from inside(e, None if callers is None else sites.innermost(callers))


def _loop(site: Site | None, imports: Mapping[str, str]) -> Site | None:
    return site if site is not None and full_name(site.node, imports) in _LOOPS else None


def _of_values(losses: Sequence[Rematted], cells: Cells) -> list[Edit]:
    """The statements from what makes a value to what uses it last, as functions that are done again."""
    stretches: dict[Stretch | None, set[Any]] = defaultdict(set)
    for scope, block in (
        (s, b) for loss in losses for s, blocks in loss.again.ranges.items() for b in blocks
    ):
        equations = scope.equations[block.start : block.stop]
        stretches[stretch([frames(e) for e in equations], cells)].add(block.policy)
    edits = []
    for at, policies in stretches.items():
        (policy,) = policies if len(policies) == 1 else (None,)
        if at is None or not isinstance(policy, AllBut):
            return []
        what = f"{sorted(policy.names)}, {sorted(policy.primitives - {'name'})}"
        edits.append(at.edits(cells.name("segment"), f"{cells.name('recomputing')}({what})"))
    return [e for each in edits for e in each] if all(edits) else []


def _at_sites(
    step: "ShardedStep", cells: Cells, sites: Sites, wanted: Mapping[Site | None, int]
) -> list[Edit]:
    """None where one of the calls has no such form."""
    if wanted.get(None) == _LOSS and len(wanted) == 1:
        return checkpoint_edits(cells, None, loops=False)
    if None in wanted:
        return []
    calls = [site for site, what in wanted.items() if site is not None and what == _CALL]
    with sites.given(calls) as kinds:
        if calls:
            _traced(step)
    edits = []
    for site, what in wanted.items():
        assert site is not None
        edits.append(_call(site, kinds[site], cells) if what == _CALL else _trips(site, what, cells))
    return [] if None in edits else [e for e in edits if e is not None]


def _call(site: Site, kinds: set[str], cells: Cells) -> Edit | None:
    checkpoint, nnx = _named("jax", cells), _named("flax.nnx", cells)
    around = {
        ARRAYS: checkpoint and (f"{checkpoint}.checkpoint(", ")"),
        OTHERS: (f"{cells.name('recomputed')}(", ")"),
        METHOD: nnx and (f"{cells.name('recomputed_method')}(", f", {nnx}.remat)"),
        OBJECTS: nnx and (f"{nnx}.remat(", ")"),
    }
    kind = OTHERS if kinds == {ARRAYS, OTHERS} else "".join(kinds)
    text = around.get(kind)
    return Edit(place_of(site.node.func, site.file), *text) if text else None


def _trips(site: Site, what: int, cells: Cells) -> Edit | None:
    node, place = site.node, place_of(site.node.func, site.file)
    if what != _TRIPS:
        scan = f"{cells.name('scan_in_segments')}({what})"
        return Edit(place, scan, gone=True) if place.line == place.end_line else None
    at, checkpoint = _LOOPS[full_name(node, cells.imports)], _named("jax", cells)
    if len(node.args) <= at or any(isinstance(a, ast.Starred) for a in node.args) or checkpoint is None:
        return None
    return Edit(place_of(node.args[at], site.file), f"{checkpoint}.checkpoint(", ")")


def _named(module: str, cells: Cells) -> str | None:
    """What the cells call a module; `jax` may be the program's own."""
    return cells.module(module) or ("jax" if module == "jax" == cells.name("jax") else None)


def _traced(step: "ShardedStep", cells: Cells | None = None, edits: Sequence[Edit] = ()) -> Program:
    """The user's step, with edits in its text."""
    entry, call = last_call(step)
    mapped = entry.traced.mapped if isinstance(entry.traced, PerDevice) else None
    avals = specs(call.leaves) if mapped is None else mapped.parts(specs(call.leaves))
    both, given = {}, {}
    if cells is not None:
        both = edited_trees(cells, edits)
        given = {cells.name(f.__name__): f for f in _FUNCTIONS} | {"jax": jax}
    with swapped(both, given), own_mesh(step.mesh), on_a_device(mapped), anew():
        return Program(jax.make_jaxpr(lambda *leaves: call.fun(*leaves)[0])(*avals))


def _work(program: Program) -> tuple[int, int]:
    """FLOPs of the products of a step, and of those among them that are done again."""
    sums: Totals = totals(counted(program, Flow(program)))
    return sums.flops, sums.recomputed
