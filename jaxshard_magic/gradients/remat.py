"""`--remat`: which part of a loss the backward pass computes again instead of keeping it."""

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from ..config.options import REMAT, is_number, remat_expression
from ..errors import ShardError, did_you_mean, one_of
from ..program.ir import Equation, Program, Scope
from ..program.primitives import shows
from ..program.primitives.table import primitive_of
from ..program.replay import Replay, retraced
from ..program.sizes import nbytes
from .blocks import Block, Blocks, Checkpointed, Policy
from .named import Names, jit_labels
from .regions import regions
from .segments import Costs, best_cuts, costs, fewest

_SMALL = 0.1  # of what is kept: straight-line code beside loops that keeps less is left as it is
_MOST_BLOCKS = 64  # that a policy cuts straight-line code into
_NOTHING = jax.checkpoint_policies.nothing_saveable


def products_saveable(primitive: Any, *_: Any, **_params: Any) -> bool:
    """Keep every product: jax's `dots_saveable`, which doesn't know ragged ones."""
    return primitive_of(primitive.name).product


POLICIES: dict[str, Policy] = {
    "full": _NOTHING,
    "nothing": _NOTHING,
    "dots": products_saveable,
    "offload": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
    "nothing_saveable": _NOTHING,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclass(frozen=True)
class Rematted:
    """A loss with `jax.checkpoint` in it.

    `note`: what is done again, in words. `program`: the loss without, and `again`: what of it is done again.
    `needs_host_memory`: what is kept goes to memory of the kind `pinned_host`, which not every backend has.
    """

    closed: ClosedJaxpr
    note: str
    program: Program
    again: Blocks
    needs_host_memory: bool = False

    @property
    def blocks(self) -> int:
        """In how many parts it is done again; all trips of a loop are one."""
        return self.again.count


def remat(closed: ClosedJaxpr, how: str) -> Rematted:
    """Wrap parts of a loss in `jax.checkpoint`, so that its gradient keeps less and computes more; values, gradients
    and random draws stay the same.

    Args:
        closed: the loss as a jaxpr of flat arrays without constants, not differentiated yet.
        how: a number of segments, cut where few bytes cross (a loop over layers is cut in that many blocks of trips);
            one of jax's policies, for each trip of the loops and for blocks of the rest; or a regular expression for
            functions, modules and scopes to do again, or for values named with `checkpoint_name`.

    The last segment is not done again: its backward pass starts where its forward pass ends, so that what it keeps is
    held at that moment either way. A single segment is: it keeps nothing but the inputs, at one more forward pass,
    which helps where other work lies between the two passes.

    Segments as in Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.

    Raises `ShardError` for a number that the loss cannot be cut into, and an expression that matches nothing.

    >>> import jax.numpy as jnp
    >>> from jax.extend.core import jaxpr_as_fun
    >>> def loss(w, x):
    ...     for _ in range(6):
    ...         x = jnp.sin(x @ w)
    ...     return [x.sum()]
    >>> found = remat(jax.make_jaxpr(loss)(jnp.ones((4, 4)), jnp.ones((8, 4))), "3")
    >>> print(found.blocks, found.note)
    2 3 segments, the last one not done again: 67 % of the forward pass's FLOPs once more
    >>> jaxpr_as_fun(found.closed)(jnp.eye(4), jnp.zeros((8, 4)))
    [Array(0., dtype=float32)]
    """
    how = how.strip()
    program = Program(closed)
    program = Program(retraced(Replay(program, jit_labels(program))))
    if is_number(how):
        blocks, note = _by_number(program, int(how))
    elif how in POLICIES:
        blocks, note = _by_policy(program, how)
    else:
        blocks, note = _by_name(program, how)
    return Rematted(retraced(Checkpointed(program, blocks)), note, program, blocks, how == "offload")


def _by_number(program: Program, count: int) -> tuple[Blocks, str]:
    if count < 1:
        raise ShardError(f"--remat {count}: a loss is cut into 1 segment or more; give a number from 1 on")
    top, found = program.top, costs(program, program.top)
    shares = _shares(top, found, count)
    fits = count <= len(top.equations)
    if not (fits or shares):
        most = max([len(top.equations), *_loops(top).values()])
        raise ShardError(f"--remat {count}: this loss can be cut into {most} segments at most")
    cut = best_cuts(found, 0, len(found.own), count)[-1] if fits else None
    if shares and (cut is None or _loops_peak(program, found, shares) < cut.peak):
        return _in_loops(top, shares, count)
    assert cut is not None
    chosen = cut.segments if count == 1 else cut.segments[:-1]
    blocks = _repeatable(top, (Block(a, b, _NOTHING) for a, b in chosen))
    kept = "" if count == 1 else ", the last one not done again"
    return Blocks({top: blocks}), f"{_many(count, 'segment')}{kept}{_again(found, blocks)}"


def _shares(top: Scope, found: Costs, count: int) -> dict[int, int]:
    """Into how many blocks of trips the loops that keep most are cut, by their position: `count`, or what comes next
    to it and divides the trips."""
    own = {k: found.own[k] for k, n in _loops(top).items() if found.own[k] and n >= max(count, 2)}
    if count == 1 or not own:
        return {}
    lengths = {k: _loops(top)[k] for k in own if 2 * own[k] >= max(own.values())}
    return {
        k: min((d for d in range(2, n + 1) if n % d == 0), key=lambda d: abs(d - count))
        for k, n in lengths.items()
    }


def _loops(top: Scope) -> dict[int, int]:
    """The trips of the loops that may run twice, by their position."""
    found = {k: e for k, e in enumerate(top.equations) if e.is_scan and not shows(e.eqn)}
    return {k: e.params["length"] for k, e in found.items()}


def _loops_peak(program: Program, found: Costs, shares: dict[int, int]) -> float:
    """What is held at most when loops are cut: all that is kept outside of them, what is carried into each of their
    blocks, and what one block keeps."""
    outside = found.inside(0, len(found.own)) - sum(found.own[k] for k in shares)
    carried = sum(
        n * nbytes(program.avals[inside])
        for k, n in shares.items()
        for _, inside in program.top.equations[k].doors[0].loop
    )
    return outside + carried + max(found.own[k] / n for k, n in shares.items())


def _in_loops(top: Scope, shares: dict[int, int], count: int) -> tuple[Blocks, str]:
    loops = {top.equations[k]: n for k, n in shares.items()}
    bodies = {e.doors[0].scope: _NOTHING for e, n in loops.items() if n == e.params["length"]}
    segments = {e.index: (n, _NOTHING) for e, n in loops.items() if n < e.params["length"]}
    parts = []
    for e, n in loops.items():
        why = "" if n == count else f" ({count} does not divide {e.params['length']})"
        parts.append(f"the loop of {e.params['length']} trips in {n} segments{why}")
    return Blocks(bodies=bodies, segments=segments), ", ".join(parts)


def _by_policy(program: Program, how: str) -> tuple[Blocks, str]:
    top, policy = program.top, POLICIES[how]
    found = costs(program, top)
    loops = {
        e.doors[0].scope: policy
        for e, own in zip(top.equations, found.own, strict=True)
        if e.is_scan and own and not shows(e.eqn) and not _is_rematted(e.doors[0].scope)
    }
    done = [k for k, e in enumerate(top.equations) if _is_done(e, loops)]
    ranges = []
    for a, b in pairwise([-1, *done, len(top.equations)]):
        ranges += _straight(found, a + 1, b, alone=not done)
    blocks = _repeatable(top, (Block(a, b, policy) for a, b in ranges))
    parts = [_many(len(loops), "loop body")] * bool(loops) + [_many(len(blocks), "block")] * bool(blocks)
    if not parts:
        return Blocks(), f"{how}: all is computed again already, nothing changed"
    note = f"{how}: {' and '.join(parts)}"
    return Blocks({top: blocks} if blocks else {}, loops), note


def _is_done(e: Equation, loops: Container[Scope]) -> bool:
    """Does an equation hold remat: the user's, or what is put into its body?"""
    return e.primitive.remat or any(d.scope in loops or _is_rematted(d.scope) for d in e.doors)


def _is_rematted(scope: Scope) -> bool:
    """Are all products of a body in remat of the user's?"""
    inside = [e.primitive.remat or _is_rematted(d.scope) for e in scope.equations for d in e.doors]
    products = any(e.primitive.product for e in scope.equations)
    return any(inside) and not products


def _straight(found: Costs, start: int, stop: int, *, alone: bool) -> list[tuple[int, int]]:
    """The blocks of equations without remat in them: as many as keep least. The last of the loss is none of them."""
    kept, whole = found.inside(start, stop), found.inside(0, len(found.own))
    if start == stop or (not alone and kept <= _SMALL * whole):
        return []
    cut = fewest(best_cuts(found, start, stop, _MOST_BLOCKS), at_least=1 + alone)
    last = stop == len(found.own) and (len(cut.segments) > 1 or not alone)
    return list(cut.segments[:-1] if last else cut.segments)


def _by_name(program: Program, how: str) -> tuple[Blocks, str]:
    pattern = remat_expression(how)
    names = Names(program)
    ranges, bodies = {}, {}
    _match(program.top, names, pattern, ranges, bodies)
    if ranges or bodies:
        count = len(bodies) + sum(map(len, ranges.values()))
        return Blocks(ranges, bodies), f"{_many(count, 'block')} of {how}"
    values, marked = {name for name in names.values.values() if pattern.search(name)}, set()
    for scope in names.scopes:
        blocks, equations = regions(scope, values)
        marked |= equations
        if blocks:
            ranges[scope] = blocks
    if not ranges:
        there, hint = one_of(names.nearest(how)), did_you_mean(how, POLICIES)
        raise ShardError(
            f"--remat {how}: nothing in the loss has such a name, there are {there}; {REMAT}.{hint}"
        )
    return Blocks(ranges, marked=marked), f"values named {one_of(sorted(values))}"


def _match(scope: Scope, names: Names, pattern: re.Pattern, ranges: dict, bodies: dict) -> None:
    """Fill in the blocks that match in a scope and in the bodies of what does not match itself."""
    spans = names.spans(scope, pattern)
    blocks = []
    for a, b in spans:
        loop = _only_loop(scope.equations[a:b])
        if loop is None:
            blocks += _repeatable(scope, [Block(a, b, _NOTHING)])
        elif not shows(loop.eqn) and not _is_rematted(loop.doors[0].scope):
            bodies[loop.doors[0].scope] = _NOTHING
    if blocks:
        ranges[scope] = blocks
    taken = {k for a, b in spans for k in range(a, b)}
    for k, e in enumerate(scope.equations):
        if k not in taken and not (e.primitive.remat or e.primitive.custom):
            for door in e.doors:
                _match(door.scope, names, pattern, ranges, bodies)


def _only_loop(equations: Iterable[Equation]) -> Equation | None:
    """The loop that does all the work of some equations: its trips are the blocks then."""
    working = [e for e in equations if e.primitive.product or e.doors]
    return working[0] if len(working) == 1 and working[0].name == "scan" else None


def _repeatable(scope: Scope, blocks: Iterable[Block]) -> list[Block]:
    """Those blocks that may run twice, and that are more than remat of the user's; a print or a callback would be seen
    twice."""
    found = []
    for b in blocks:
        inside = scope.equations[b.start : b.stop]
        one = len(inside) == 1 and inside[0].primitive.remat
        if not one and not any(shows(e.eqn) for e in inside):
            found.append(b)
    return found


def _again(found: Costs, blocks: Iterable[Block]) -> str:
    again, whole = sum(sum(found.flops[b.start : b.stop]) for b in blocks), sum(found.flops)
    return f": {100 * again / whole:.0f} % of the forward pass's FLOPs once more" if whole else ""


def _many(count: int, what: str) -> str:
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{count} {what if count == 1 else plural}"
