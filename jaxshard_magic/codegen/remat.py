"""Write `--remat` into the user's text."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ..compilation.planned_call import mesh_context
from ..config.options import is_number, remat_expression
from ..gradients.call_names import ProgramNames, call_stack
from ..gradients.named_blocks import SaveAllBut
from ..gradients.remat import POLICIES, RematLoss
from ..program.flatten_call import shape_structs
from ..program.flops import WorkTotals, count_work, total_work
from ..program.flow import Flow
from ..program.hooks import trace_afresh
from ..program.ir import Equation, Program
from ..program.per_device import PerDeviceTrace, device_trace_context
from . import step_functions
from .call_sites import ARRAYS, METHOD, OBJECTS, OTHERS, CallSite, CallSites
from .cells import Cells, full_name, span_of
from .edits import Edit, OptionEdits, checkpoint_edits, edited_trees
from .latest_call import last_call
from .statement_ranges import StatementRange, common_range
from .swap import swap_code

if TYPE_CHECKING:
    from ..step import ShardedStep

# Recomputation at a call: none, the call itself, the whole loss, each iteration of a loop. A number above 1 is the
# number of segments of a loop.
_NOTHING, _CALL, _LOSS, _TRIPS = -2, -1, 0, 1
_LOOPS = {"jax.lax.scan": 0, "jax.lax.map": 0, "jax.lax.fori_loop": 2}  # position of the body among the arguments
_FUNCTIONS = (
    step_functions.recomputed,
    step_functions.recomputed_method,
    step_functions.recomputing,
    step_functions.scan_in_segments,
)


def remat_edits(step: "ShardedStep", cells: Cells) -> OptionEdits:
    """Return `jax.checkpoint` around bodies of scans, calls or the loss, or loops in segments.

    Args:
        step: A step with a recorded call.
        cells: The user's text.

    Returns:
        Edits for the option `remat`. Empty where the text allows none; with a note where the user's functions raise.
    """
    try:
        if step.request.gradients.remat in POLICIES:
            edits = checkpoint_edits(cells, _policy(step) or None)
        else:
            edits = _by_blocks(step, cells)
    except Exception as error:  # raised by the user's functions under the edits
        said = str(error).partition(chr(10))[0]
        return OptionEdits(notes=(f"--remat at the lines of the cells is left out: {type(error).__name__}: {said}",))
    return OptionEdits(tuple(edits), frozenset({"remat"} if edits else ()))


def _policy(step: "ShardedStep") -> str:
    """Return the policy of `--remat` as an expression, empty for JAX's own policy."""
    how, entry = step.request.gradients.remat or "", last_call(step)[0]
    names = {"full": "", "nothing": "", "nothing_saveable": "", "dots": "dots_saveable"}
    names["offload"] = 'offload_dot_with_no_batch_dims("device", "pinned_host")'
    own, policies = names.get(how, how), "jax.checkpoint_policies"
    losses = entry.rewritten.rematted if entry.rewritten is not None else ()
    equations = (e for loss in losses for e in loss.program.equations)
    ragged = next((e.name for e in equations if (c := e.contraction) and c.ragged_dim is not None), None)
    # JAX's policy for matrix products ignores ragged products.
    if how == "dots" and ragged is not None:
        kept = f'lambda primitive, *_, **params: primitive.name == "{ragged}"'
        return f"{policies}.save_from_both_policies({policies}.{own}, {kept})"
    return own and f"{policies}.{own}"


def _by_blocks(step: "ShardedStep", cells: Cells) -> list[Edit]:
    """Return the edits that recompute the plan's blocks; none unless the edited step has the plan's FLOPs."""
    entry, _ = last_call(step)
    rewritten = entry.rewritten
    if step.request.gradients.remat is None or rewritten is None:
        return []
    edits = _edits(step, cells, rewritten.rematted, step.request.gradients.remat.strip())
    # Edits are used only if the text then recomputes as much as the plan.
    planned = _flop_counts(Program(entry.traced.closed))
    return edits if edits and _flop_counts(_traced(step, cells, edits)) == planned else []


def _edits(step: "ShardedStep", cells: Cells, losses: Sequence[RematLoss], how: str) -> list[Edit]:
    """Return the edits for some losses; none where a block is no call, loop or range of statements in the text."""
    if all(map(_is_by_value, losses)):
        return _of_values(losses, cells)
    sites, again_at = CallSites(cells), defaultdict[CallSite | None, set[int]](set)
    for loss in losses:
        for site, what in _done_again(loss, how, sites, cells.imports):
            again_at[site].add(what)
    wanted = {site: what for site, what in again_at.items() if what != {_NOTHING}}
    if any(len(what) > 1 for what in wanted.values()):
        return []
    return _at_sites(step, cells, sites, {site: min(what) for site, what in wanted.items()})


def _is_by_value(loss: RematLoss) -> bool:
    """Return whether the blocks recompute values named by `checkpoint_name`."""
    return any(isinstance(b.policy, SaveAllBut) for blocks in loss.recomputed.ranges.values() for b in blocks)


def _done_again(
    loss: RematLoss, how: str, sites: CallSites, imports: Mapping[str, str]
) -> Iterator[tuple[CallSite | None, int]]:
    """Yield the recomputation at each call that leads to equations of a loss.

    None as the call: no single call of the text leads to a block.
    """
    program, blocks = loss.program, loss.recomputed
    own = dict(_block_equations(loss, how, sites))
    if own == dict.fromkeys(range(len(program.equations))) and is_number(how):
        yield None, _LOSS
        return
    for e in (e for e in program.equations if e.is_scan):
        site, trips = _loop(sites.innermost(call_stack(e)), imports), e.params["length"]
        each = e.bodies[0].sub_jaxpr in blocks.bodies
        count = trips if each else blocks.segments.get(e.index, (0, None))[0]
        if count:
            in_segments = site is not None and full_name(site.node, imports) == "jax.lax.scan"
            yield site if each or in_segments else None, _TRIPS if each else count
        elif site is not None and not any(own.get(i.index) is site for i in e.bodies[0].sub_jaxpr.equations):
            yield site, _NOTHING
    for site in set(own.values()):
        yield site, _CALL if _loop(site, imports) is None else _TRIPS
    for e in program.equations:
        if not e.primitive.alias:
            through = sites.all_in_frames(call_stack(e)) - {own.get(e.index)}
            yield from ((site, _NOTHING) for site in through if _loop(site, imports) is None)


def _block_equations(loss: RematLoss, how: str, sites: CallSites) -> Iterator[tuple[int, CallSite | None]]:
    """Yield the index of each equation in a block, with the call that makes up the block."""
    names, numbered = ProgramNames(loss.program), is_number(how)

    def with_nested(e: Equation, site: CallSite | None) -> Iterator[tuple[int, CallSite | None]]:
        yield e.index, site
        for body in e.bodies:
            for within in body.sub_jaxpr.equations:
                yield from with_nested(within, site)

    for scope, blocks in loss.recomputed.ranges.items():
        for e in (e for block in blocks for e in scope.equations[block.start : block.stop]):
            callers = None if numbered else names.callers(e, remat_expression(how))
            yield from with_nested(e, None if callers is None else sites.innermost(callers))


def _loop(site: CallSite | None, imports: Mapping[str, str]) -> CallSite | None:
    """Return the call if it is a loop of `jax.lax`, else None."""
    return site if site is not None and full_name(site.node, imports) in _LOOPS else None


def _of_values(losses: Sequence[RematLoss], cells: Cells) -> list[Edit]:
    """Return edits that turn statements into recomputed functions, from the production of a named value to the last
    use."""
    stretches: dict[StatementRange | None, set[Any]] = defaultdict(set)
    for scope, block in ((s, b) for loss in losses for s, blocks in loss.recomputed.ranges.items() for b in blocks):
        equations = scope.equations[block.start : block.stop]
        stretches[common_range([call_stack(e) for e in equations], cells)].add(block.policy)
    edits = []
    for at, policies in stretches.items():
        (policy,) = policies if len(policies) == 1 else (None,)
        if at is None or not isinstance(policy, SaveAllBut):
            return []
        what = f"{sorted(policy.names)}, {sorted(policy.primitives - {'name'})}"
        edits.append(at.edits(cells.program_name("segment"), f"{cells.program_name('recomputing')}({what})"))
    return [e for each in edits for e in each] if all(edits) else []


def _at_sites(step: "ShardedStep", cells: Cells, sites: CallSites, wanted: Mapping[CallSite | None, int]) -> list[Edit]:
    """Return the edits of all calls; none where a call can't be edited."""
    if wanted.get(None) == _LOSS and len(wanted) == 1:
        return checkpoint_edits(cells, None, loops=False)
    if None in wanted:
        return []
    calls = [site for site, what in wanted.items() if site is not None and what == _CALL]
    with sites.record_kinds(calls) as kinds:
        if calls:
            _traced(step)
    edits = []
    for site, what in wanted.items():
        assert site is not None
        edits.append(_call(site, kinds[site], cells) if what == _CALL else _trips(site, what, cells))
    return [] if None in edits else [e for e in edits if e is not None]


def _call(site: CallSite, kinds: set[str], cells: Cells) -> Edit | None:
    """Return the edit that recomputes a call; None where its arguments allow none."""
    checkpoint, nnx = _named("jax", cells), _named("flax.nnx", cells)
    around = {
        ARRAYS: checkpoint and (f"{checkpoint}.checkpoint(", ")"),
        OTHERS: (f"{cells.program_name('recomputed')}(", ")"),
        METHOD: nnx and (f"{cells.program_name('recomputed_method')}(", f", {nnx}.remat)"),
        OBJECTS: nnx and (f"{nnx}.remat(", ")"),
    }
    # `recomputed` takes arrays as well.
    kind = OTHERS if kinds == {ARRAYS, OTHERS} else "".join(kinds)
    text = around.get(kind)
    return Edit(span_of(site.node.func, site.file), *text) if text else None


def _trips(site: CallSite, what: int, cells: Cells) -> Edit | None:
    """Return the edit that recomputes a loop by iterations or segments; None where the call allows none."""
    node, place = site.node, span_of(site.node.func, site.file)
    if what != _TRIPS:
        scan = f"{cells.program_name('scan_in_segments')}({what})"
        # A replaced span has to be on one line.
        return Edit(place, scan, replaces=True) if place.line == place.end_line else None
    at, checkpoint = _LOOPS[full_name(node, cells.imports)], _named("jax", cells)
    if len(node.args) <= at or any(isinstance(a, ast.Starred) for a in node.args) or checkpoint is None:
        return None
    return Edit(span_of(node.args[at], site.file), f"{checkpoint}.checkpoint(", ")")


def _named(module: str, cells: Cells) -> str | None:
    """Return the cells' name for a module; for `jax` also the import of the generated code."""
    return cells.module(module) or ("jax" if module == "jax" == cells.program_name("jax") else None)


def _traced(step: "ShardedStep", cells: Cells | None = None, edits: Sequence[Edit] = ()) -> Program:
    """Trace the user's step, with edits in its text."""
    entry, call = last_call(step)
    mapped = entry.traced.mapping if isinstance(entry.traced, PerDeviceTrace) else None
    avals = shape_structs(call.leaves) if mapped is None else mapped.local_avals(shape_structs(call.leaves))
    both, given = {}, {}
    if cells is not None:
        both = edited_trees(cells, edits)
        given = {cells.program_name(f.__name__): f for f in _FUNCTIONS} | {"jax": jax}
    # Without it JAX would use its trace of the same function with other code.
    with swap_code(both, given), mesh_context(step.mesh), device_trace_context(mapped), trace_afresh():
        return Program(jax.make_jaxpr(lambda *leaves: call.flat_function(*leaves)[0])(*avals))


def _flop_counts(program: Program) -> tuple[int, int]:
    """Return the FLOPs of the matrix products of a step, and the FLOPs of those that are recomputed."""
    sums: WorkTotals = total_work(count_work(program, Flow(program)))
    return sums.flops, sums.recomputed
