"""Rematerialisation (`--remat`): choice of the parts of a loss that the backward pass recomputes instead of saving."""

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from ..config.options import REMAT, is_number, remat_expression
from ..errors import ShardError, did_you_mean, list_names
from ..program.emit import Replay, retrace
from ..program.ir import Equation, Program, SubJaxpr
from ..program.primitives import has_visible_effects
from ..program.primitives.table import primitive_of
from ..program.sizes import nbytes
from .blocks import Block, Blocks, Checkpointed, Policy, named_value_blocks
from .call_names import ProgramNames, jit_labels
from .segments import SegmentCosts, best_segmentations, costs, fewest

_SMALL = 0.1  # fraction of all residuals; straight-line code beside loops that saves less is left as it is
_MOST_BLOCKS = 64  # blocks of straight-line code under a policy
_NOTHING = jax.checkpoint_policies.nothing_saveable


def products_saveable(primitive: Any, *_: Any, **_params: Any) -> bool:
    """Return whether a primitive is a product: the policy "dots". JAX's `dots_saveable` doesn't know ragged
    products."""
    return primitive_of(primitive.name).is_product


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
class RematLoss:
    """Loss with `jax.checkpoint` in it.

    Attributes:
        closed: The loss.
        note: Summary of the recomputed parts, in words.
        program: The loss without checkpoints.
        recomputed: Parts of `program` to recompute.
        needs_host_memory: Whether residuals go to memory of kind `pinned_host`, missing on some backends.
    """

    closed: ClosedJaxpr
    note: str
    program: Program
    recomputed: Blocks
    needs_host_memory: bool = False

    @property
    def block_count(self) -> int:
        """Number of recomputed parts. All trips of a loop count once."""
        return self.recomputed.count


def remat(closed: ClosedJaxpr, how: str) -> RematLoss:
    """Wrap parts of a loss in `jax.checkpoint`: its gradient saves less and computes more.

    Values, gradients and random draws stay the same. The last of several segments is not recomputed: its backward pass
    starts where the forward pass ends, with the residuals in memory either way. A single segment is recomputed: it
    saves nothing but the inputs, at the cost of a further forward pass, and helps where other work lies between the two
    passes.

    Source of segments: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.

    Args:
        closed: The loss, a jaxpr of flat arrays without constants, not differentiated yet.
        how: One of three. A number of segments, cut where few bytes cross; a loop over layers is cut into this many
            blocks of trips. A policy of JAX, applied to each trip of the loops and to blocks of the other equations. A
            regular expression for functions, modules and scopes to recompute, or for values named by `checkpoint_name`.

    Raises:
        ShardError: The loss can't be cut into this number of segments, or the expression matches nothing.

    >>> import jax.numpy as jnp
    >>> from jax.extend.core import jaxpr_as_fun
    >>> def loss(w, x):
    ...     for _ in range(6):
    ...         x = jnp.sin(x @ w)
    ...     return [x.sum()]
    >>> found = remat(jax.make_jaxpr(loss)(jnp.ones((4, 4)), jnp.ones((8, 4))), "3")
    >>> print(found.block_count, found.note)
    2 3 segments, the last one not done again: 67 % of the forward pass's FLOPs once more
    >>> jaxpr_as_fun(found.closed)(jnp.eye(4), jnp.zeros((8, 4)))
    [Array(0., dtype=float32)]
    """
    how = how.strip()
    program = Program(closed)
    # Jits are inlined with their names as scopes, so that an expression can match them.
    program = Program(retrace(Replay(program, jit_labels(program))))
    if is_number(how):
        blocks, note = _by_number(program, int(how))
    elif how in POLICIES:
        blocks, note = _by_policy(program, how)
    else:
        blocks, note = _by_name(program, how)
    return RematLoss(retrace(Checkpointed(program, blocks)), note, program, blocks, how == "offload")


def _by_number(program: Program, count: int) -> tuple[Blocks, str]:
    if count < 1:
        raise ShardError(f"--remat {count}: a loss is cut into 1 segment or more; give a number from 1 on")
    top, found = program.top, costs(program, program.top)
    shares = _shares(top, found, count)
    fits = count <= len(top.equations)
    if not (fits or shares):
        most = max([len(top.equations), *_loops(top).values()])
        raise ShardError(f"--remat {count}: this loss can be cut into {most} segments at most")
    cut = best_segmentations(found, 0, len(found.own), count)[-1] if fits else None
    if shares and (cut is None or _loops_peak(program, found, shares) < cut.peak):
        return _in_loops(top, shares, count)
    assert cut is not None
    # The backward pass starts in the last segment, whose residuals are in memory either way.
    chosen = cut.segments if count == 1 else cut.segments[:-1]
    blocks = _repeatable(top, (Block(a, b, _NOTHING) for a, b in chosen))
    kept = "" if count == 1 else ", the last one not done again"
    return Blocks({top: blocks}), f"{_many(count, 'segment')}{kept}{_again(found, blocks)}"


def _shares(top: SubJaxpr, found: SegmentCosts, count: int) -> dict[int, int]:
    """Return the number of blocks for each loop with large residuals, by position.

    The number is `count`, or the divisor of the trips nearest to it.
    """
    own = {k: found.own[k] for k, n in _loops(top).items() if found.own[k] and n >= max(count, 2)}
    if count == 1 or not own:
        return {}
    lengths = {k: _loops(top)[k] for k in own if 2 * own[k] >= max(own.values())}
    return {
        k: min((d for d in range(2, n + 1) if n % d == 0), key=lambda d: abs(d - count)) for k, n in lengths.items()
    }


def _loops(top: SubJaxpr) -> dict[int, int]:
    """Return the trip counts of loops that may run twice, by position."""
    found = {k: e for k, e in enumerate(top.equations) if e.is_scan and not has_visible_effects(e.jaxpr_eqn)}
    return {k: e.params["length"] for k, e in found.items()}


def _loops_peak(program: Program, found: SegmentCosts, shares: dict[int, int]) -> float:
    """Return peak bytes with loops cut: residuals outside of loops, carries into each block, and residuals of one
    block."""
    outside = found.residual_bytes(0, len(found.own)) - sum(found.own[k] for k in shares)
    carried = sum(
        n * nbytes(program.avals[inside])
        for k, n in shares.items()
        for _, inside in program.top.equations[k].bodies[0].carries
    )
    return outside + carried + max(found.own[k] / n for k, n in shares.items())


def _in_loops(top: SubJaxpr, shares: dict[int, int], count: int) -> tuple[Blocks, str]:
    loops = {top.equations[k]: n for k, n in shares.items()}
    bodies = {e.bodies[0].sub_jaxpr: _NOTHING for e, n in loops.items() if n == e.params["length"]}
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
        e.bodies[0].sub_jaxpr: policy
        for e, own in zip(top.equations, found.own, strict=True)
        if e.is_scan and own and not has_visible_effects(e.jaxpr_eqn) and not _is_rematted(e.bodies[0].sub_jaxpr)
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


def _is_done(e: Equation, loops: Container[SubJaxpr]) -> bool:
    """Return whether an equation contains remat: by the user, or put into its body here."""
    return e.primitive.remat or any(d.sub_jaxpr in loops or _is_rematted(d.sub_jaxpr) for d in e.bodies)


def _is_rematted(scope: SubJaxpr) -> bool:
    """Return whether all products of a body are in remat by the user."""
    inside = [e.primitive.remat or _is_rematted(d.sub_jaxpr) for e in scope.equations for d in e.bodies]
    products = any(e.primitive.is_product for e in scope.equations)
    return any(inside) and not products


def _straight(found: SegmentCosts, start: int, stop: int, *, alone: bool) -> list[tuple[int, int]]:
    """Return blocks of equations without remat, as many as minimise peak bytes. The loss's last block is left out."""
    kept, whole = found.residual_bytes(start, stop), found.residual_bytes(0, len(found.own))
    if start == stop or (not alone and kept <= _SMALL * whole):
        return []
    cut = fewest(best_segmentations(found, start, stop, _MOST_BLOCKS), at_least=1 + alone)
    # The backward pass starts in the last block, whose residuals are in memory either way.
    last = stop == len(found.own) and (len(cut.segments) > 1 or not alone)
    return list(cut.segments[:-1] if last else cut.segments)


def _by_name(program: Program, how: str) -> tuple[Blocks, str]:
    pattern = remat_expression(how)
    names = ProgramNames(program)
    ranges, bodies = {}, {}
    _match(program.top, names, pattern, ranges, bodies)
    if ranges or bodies:
        count = len(bodies) + sum(map(len, ranges.values()))
        return Blocks(ranges, bodies), f"{_many(count, 'block')} of {how}"
    values, marked = {name for name in names.values.values() if pattern.search(name)}, set()
    for scope in names.scopes:
        blocks, equations = named_value_blocks(scope, values)
        marked |= equations
        if blocks:
            ranges[scope] = blocks
    if not ranges:
        there, hint = list_names(names.nearest(how)), did_you_mean(how, POLICIES)
        raise ShardError(f"--remat {how}: nothing in the loss has such a name, there are {there}; {REMAT}.{hint}")
    return Blocks(ranges, marked=marked), f"values named {list_names(sorted(values))}"


def _match(scope: SubJaxpr, names: ProgramNames, pattern: re.Pattern, ranges: dict, bodies: dict) -> None:
    """Fill in the blocks that match in a jaxpr, and in the bodies of equations that don't match themselves."""
    spans = names.spans(scope, pattern)
    blocks = []
    for a, b in spans:
        loop = _only_loop(scope.equations[a:b])
        if loop is None:
            blocks += _repeatable(scope, [Block(a, b, _NOTHING)])
        elif not has_visible_effects(loop.jaxpr_eqn) and not _is_rematted(loop.bodies[0].sub_jaxpr):
            bodies[loop.bodies[0].sub_jaxpr] = _NOTHING
    if blocks:
        ranges[scope] = blocks
    taken = {k for a, b in spans for k in range(a, b)}
    for k, e in enumerate(scope.equations):
        if k not in taken and not (e.primitive.remat or e.primitive.custom_derivative):
            for body in e.bodies:
                _match(body.sub_jaxpr, names, pattern, ranges, bodies)


def _only_loop(equations: Iterable[Equation]) -> Equation | None:
    """Return the loop that does all the work of some equations, None without one. Its trips become the blocks."""
    working = [e for e in equations if e.primitive.is_product or e.bodies]
    return working[0] if len(working) == 1 and working[0].name == "scan" else None


def _repeatable(scope: SubJaxpr, blocks: Iterable[Block]) -> list[Block]:
    """Return the blocks that may run twice and are more than remat by the user."""
    found = []
    for b in blocks:
        inside = scope.equations[b.start : b.stop]
        one = len(inside) == 1 and inside[0].primitive.remat
        # A print or a callback would be seen twice.
        if not one and not any(has_visible_effects(e.jaxpr_eqn) for e in inside):
            found.append(b)
    return found


def _again(found: SegmentCosts, blocks: Iterable[Block]) -> str:
    again, whole = sum(sum(found.flops[b.start : b.stop]) for b in blocks), sum(found.flops)
    return f": {100 * again / whole:.0f} % of the forward pass's FLOPs once more" if whole else ""


def _many(count: int, what: str) -> str:
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{count} {what if count == 1 else plural}"
