"""Blocks of a loss wrapped in `jax.checkpoint`: ranges of equations, bodies of loops, loops cut into segments."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
from jax import lax
from jax._src.source_info_util import current_name_stack  # jax has no public form
from jax.ad_checkpoint import checkpoint_name

from ..program import control_flow
from ..program.ir import Equation, Program, Scope, Value
from ..program.lines import user_context
from ..program.primitives import scan_counts
from ..program.replay import Replay

KEPT = "jaxshard:kept"  # the name of values that a policy keeps whatever made them

Policy = Callable[..., Any]


@dataclass(frozen=True)
class Block:
    """The equations of a scope from `start` to `stop`, and what of theirs is kept for the backward pass."""

    start: int
    stop: int
    policy: Policy


@dataclass(frozen=True)
class Blocks:
    """What of a program the backward pass is to do again.

    `ranges`: blocks of a scope's equations, in order and apart. `bodies`: bodies of loops, each trip a block.
    `segments`: into how many blocks of trips the loop of an equation (by its index) is cut. `marked`: equations, by
    their index, whose results a policy is to keep.
    """

    ranges: Mapping[Scope, Sequence[Block]] = field(default_factory=dict)
    bodies: Mapping[Scope, Policy] = field(default_factory=dict)
    segments: Mapping[int, tuple[int, Policy]] = field(default_factory=dict)
    marked: Collection[int] = ()

    @property
    def count(self) -> int:
        """How many blocks there are; the body of a loop is one."""
        ranges = sum(len(found) for found in self.ranges.values())
        return ranges + len(self.bodies) + sum(n for n, _ in self.segments.values())


class Checkpointed(Replay):
    """A program with `blocks` in checkpoints; the rest of it, remat of the user's as well, stays as it is."""

    def __init__(self, program: Program, blocks: Blocks):
        super().__init__(program)
        self.blocks = blocks
        self._parts = {scope: _parts(scope, found) for scope, found in blocks.ranges.items()}
        self._short = {e.doors[0].scope for e in program.equations if e.is_scan and _unrolled(e)}

    def run(self, scope: Scope, args: Any) -> list:
        if scope not in self._parts:
            return super().run(scope, args)
        env = scope.env(args)
        for part, policy in self._parts[scope]:
            values = [env[v] for v in part.ins]
            made = super().run(part, values) if policy is None else self._again(scope, part, policy, values)
            env.update(zip(part.outs, made, strict=True))
        return scope.results(env)

    def body(self, scope: Scope, args: Any) -> list:
        policy = self.blocks.bodies.get(scope)
        if policy is None:
            return super().body(scope, args)
        outs = jax.checkpoint(
            lambda *xs: tuple(self.run(scope, xs)), policy=policy, prevent_cse=scope in self._short
        )(*args)
        return list(outs)

    def equation(self, e: Equation, values: list) -> list:
        if e.index in self.blocks.segments:
            return self._segmented(e, values, *self.blocks.segments[e.index])
        return super().equation(e, values)

    def after(self, e: Equation, outs: list) -> list:
        return [checkpoint_name(x, KEPT) for x in outs] if e.index in self.blocks.marked else outs

    def _again(self, scope: Scope, part: Scope, policy: Policy, values: list) -> list:
        # Outside of loops, whose two passes are apart, XLA would find the two computations alike.
        prevent_cse = part.equations[0].trips == 1 or scope in self._short
        line = part.equations[0].eqn.source_info.traceback
        with user_context(line, name_stack=current_name_stack()):
            run = jax.checkpoint(
                lambda *xs: tuple(self.run(part, xs)), policy=policy, prevent_cse=prevent_cse
            )
            return list(run(*values))

    def _segmented(self, e: Equation, values: list, count: int, policy: Policy) -> list:
        """A scan as a scan of `count` blocks, each a scan of its share of the trips."""
        consts, carried = scan_counts(e.params)
        fixed, start, xs = values[:consts], values[consts : consts + carried], values[consts + carried :]
        length = e.params["length"]
        scope = e.doors[0].scope

        def trip(carry, x):
            outs = self.body(scope, [*fixed, *carry, *x])
            return tuple(outs[:carried]), tuple(outs[carried:])

        def segment(carry, x):
            return control_flow.scan(e, trip, carry, x, length // count)

        cut = tuple(x.reshape(count, length // count, *x.shape[1:]) for x in xs)
        again = jax.checkpoint(segment, policy=policy, prevent_cse=False)
        carry, ys = lax.scan(again, tuple(start), cut, length=count, reverse=e.params["reverse"])
        return [*carry, *(y.reshape(length, *y.shape[2:]) for y in ys)]


def _unrolled(e: Equation) -> bool:
    """Is a scan no loop to XLA, which then finds what is computed twice?"""
    return e.params["length"] <= 1 or e.params["unroll"] >= e.params["length"]


def _parts(scope: Scope, blocks: Sequence[Block]) -> list[tuple[Scope, Policy | None]]:
    """The equations of a scope in parts, each a scope of its own, with the policies of those that are blocks."""
    runs: list[tuple[list[Equation], Policy | None]] = []
    at = 0
    for block in blocks:
        runs.append((scope.equations[at : block.start], None))
        runs.append((scope.equations[block.start : block.stop], block.policy))
        at = block.stop
    runs.append((scope.equations[at:], None))
    runs = [run for run in runs if run[0]]
    parts = parts_of(scope, [equations for equations, _ in runs])
    return [(part, policy) for part, (_, policy) in zip(parts, runs, strict=True)]


def parts_of(scope: Scope, runs: Sequence[list[Equation]]) -> list[Scope]:
    """The equations of a scope in `runs`, one after the other: each a scope of its own, from the values that it reads
    to those that are read later."""
    later, parts = {v for v in scope.outs if v is not None}, []
    for equations in reversed(runs):
        made = {v: None for e in equations for v in e.outs}
        read = {v: None for e in equations for v in e.ins if v is not None}
        outs: list[Value | None] = [v for v in made if v in later]
        jaxpr = SimpleNamespace(outvars=outs)  # asked only for literals among the results
        parts.append(Scope(jaxpr, (), [v for v in read if v not in made], outs, [], equations))
        later |= read.keys()
    return parts[::-1]
