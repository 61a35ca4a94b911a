"""Blocks of a loss in `jax.checkpoint`: ranges of equations, bodies of loops, loops in segments.

Blocks of named values recompute the values that the user named, and nothing else.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
from jax import lax
from jax._src.source_info_util import current_name_stack  # jax has no public form
from jax.ad_checkpoint import checkpoint_name

from ..program import control_flow
from ..program.emit import Replay
from ..program.ir import Equation, Program, SubJaxpr, Value
from ..program.primitives import scan_counts
from ..program.source_lines import user_context

KEPT = "jaxshard:kept"  # name of values that checkpoint policies save, whichever primitive made them

Policy = Callable[..., Any]


@dataclass(frozen=True)
class Block:
    """Range of a jaxpr's equations to recompute in the backward pass.

    Attributes:
        start: Position of the first equation.
        stop: Position after the last equation.
        policy: Checkpoint policy: what of the range is saved for the backward pass.
    """

    start: int
    stop: int
    policy: Policy


@dataclass(frozen=True)
class Blocks:
    """Parts of a program to recompute in the backward pass.

    Attributes:
        ranges: Blocks of a jaxpr's equations, in order and disjoint.
        bodies: Bodies of loops with their policies. Each trip is a block.
        segments: Number of blocks that a loop's trips are divided into, and their policy, by equation index.
        marked: Indices of equations with results that a policy must save.
    """

    ranges: Mapping[SubJaxpr, Sequence[Block]] = field(default_factory=dict)
    bodies: Mapping[SubJaxpr, Policy] = field(default_factory=dict)
    segments: Mapping[int, tuple[int, Policy]] = field(default_factory=dict)
    marked: Collection[int] = ()

    @property
    def count(self) -> int:
        """Number of blocks. The body of a loop counts once."""
        ranges = sum(len(found) for found in self.ranges.values())
        return ranges + len(self.bodies) + sum(n for n, _ in self.segments.values())


class Checkpointed(Replay):
    """Program with `blocks` in checkpoints. Everything else stays unchanged, also remat by the user."""

    def __init__(self, program: Program, blocks: Blocks):
        super().__init__(program)
        self.blocks = blocks
        self._parts = {scope: _parts(scope, found) for scope, found in blocks.ranges.items()}
        self._short = {e.bodies[0].sub_jaxpr for e in program.equations if e.is_scan and _unrolled(e)}

    def run(self, scope: SubJaxpr, args: Any) -> list:
        if scope not in self._parts:
            return super().run(scope, args)
        env = scope.bind_inputs(args)
        for part, policy in self._parts[scope]:
            values = [env[v] for v in part.inputs]
            made = super().run(part, values) if policy is None else self._again(scope, part, policy, values)
            env.update(zip(part.outputs, made, strict=True))
        return scope.read_outputs(env)

    def enter_body(self, scope: SubJaxpr, args: Any) -> list:
        policy = self.blocks.bodies.get(scope)
        if policy is None:
            return super().enter_body(scope, args)
        # XLA merges nothing between the loops of the two passes. A scan that becomes no loop needs the barrier.
        outs = jax.checkpoint(lambda *xs: tuple(self.run(scope, xs)), policy=policy, prevent_cse=scope in self._short)(
            *args
        )
        return list(outs)

    def run_equation(self, e: Equation, values: list) -> list:
        if e.index in self.blocks.segments:
            return self._segmented(e, values, *self.blocks.segments[e.index])
        return super().run_equation(e, values)

    def after(self, e: Equation, outs: list) -> list:
        # A checkpoint policy sees only primitives and names, so a single equation can be saved only by a name.
        return [checkpoint_name(x, KEPT) for x in outs] if e.index in self.blocks.marked else outs

    def _again(self, scope: SubJaxpr, part: SubJaxpr, policy: Policy, values: list) -> list:
        # Outside of loops XLA would merge the recomputation with the forward pass. In a loop, the two passes are two
        # loops.
        prevent_cse = part.equations[0].trip_count == 1 or scope in self._short
        # XLA reports an equation on the innermost Python frame that binds it, which would be the call below.
        line = part.equations[0].jaxpr_eqn.source_info.traceback
        with user_context(line, name_stack=current_name_stack()):
            run = jax.checkpoint(lambda *xs: tuple(self.run(part, xs)), policy=policy, prevent_cse=prevent_cse)
            return list(run(*values))

    def _segmented(self, e: Equation, values: list, count: int, policy: Policy) -> list:
        """Run a scan as a scan over `count` blocks, each a scan of its share of the trips."""
        consts, carried = scan_counts(e.params)
        fixed, start, xs = values[:consts], values[consts : consts + carried], values[consts + carried :]
        length = e.params["length"]
        scope = e.bodies[0].sub_jaxpr

        def trip(carry, x):
            outs = self.enter_body(scope, [*fixed, *carry, *x])
            return tuple(outs[:carried]), tuple(outs[carried:])

        def segment(carry, x):
            return control_flow.scan(e, trip, carry, x, length // count)

        cut = tuple(x.reshape(count, length // count, *x.shape[1:]) for x in xs)
        # XLA merges nothing between the loops of the forward and the backward pass, so that no barrier is needed.
        again = jax.checkpoint(segment, policy=policy, prevent_cse=False)
        carry, ys = lax.scan(again, tuple(start), cut, length=count, reverse=e.params["reverse"])
        return [*carry, *(y.reshape(length, *y.shape[2:]) for y in ys)]


def _unrolled(e: Equation) -> bool:
    """Return whether a scan is no loop to XLA: XLA then merges the recomputation with the forward pass."""
    return e.params["length"] <= 1 or e.params["unroll"] >= e.params["length"]


def _parts(scope: SubJaxpr, blocks: Sequence[Block]) -> list[tuple[SubJaxpr, Policy | None]]:
    """Divide a jaxpr at its blocks into consecutive jaxprs, each with the policy of its block or None."""
    runs: list[tuple[list[Equation], Policy | None]] = []
    at = 0
    for block in blocks:
        runs.append((scope.equations[at : block.start], None))
        runs.append((scope.equations[block.start : block.stop], block.policy))
        at = block.stop
    runs.append((scope.equations[at:], None))
    runs = [run for run in runs if run[0]]
    parts = split_sub_jaxpr(scope, [equations for equations, _ in runs])
    return [(part, policy) for part, (_, policy) in zip(parts, runs, strict=True)]


def split_sub_jaxpr(scope: SubJaxpr, runs: Sequence[list[Equation]]) -> list[SubJaxpr]:
    """Divide the equations of a jaxpr into consecutive jaxprs, one for each of `runs`.

    Inputs of each part are the values that it reads; outputs are the values that later parts or the jaxpr's outputs
    read.
    """
    later, parts = {v for v in scope.outputs if v is not None}, []
    for equations in reversed(runs):
        made = {v: None for e in equations for v in e.results}
        read = {v: None for e in equations for v in e.operands if v is not None}
        outs: list[Value | None] = [v for v in made if v in later]
        jaxpr = SimpleNamespace(outvars=outs)  # read only for literals among the outputs
        parts.append(SubJaxpr(jaxpr, (), [v for v in read if v not in made], outs, [], equations))
        later |= read.keys()
    return parts[::-1]


@dataclass(frozen=True)
class SaveAllBut:
    """Checkpoint policy that saves everything but some values.

    Attributes:
        names: Values with one of these names are recomputed.
        primitives: Results of these primitives are recomputed.
    """

    names: frozenset[str]
    primitives: frozenset[str]

    def __call__(self, primitive: Any, *_: Any, **params: Any) -> bool:
        if primitive.name == "name":
            return params["name"] not in self.names
        return primitive.name not in self.primitives


def named_value_blocks(scope: SubJaxpr, names: Collection[str]) -> tuple[list[Block], set[int]]:
    """Return blocks that recompute named values, and the equations to mark as saved.

    A block reaches from the equation that makes a named value to its last use; overlapping blocks are joined. Inside of
    a block everything is saved but the named values and their free forms, such as reshapes.

    Args:
        scope: Jaxpr with the values.
        names: Names of the values to recompute.

    Returns:
        Blocks, and indices of equations with results to be saved. A policy sees nothing but primitives, so that an
        equation with the same primitive as a recomputed one has to be marked.
    """
    found: list[tuple[int, int, set[int]]] = []  # (start, stop, positions to recompute)
    for k, e in enumerate(scope.equations):
        if not e.primitive.names_value or e.params["name"] not in names:
            continue
        again = _made_by(scope, k)
        start, stop = min(again), _used_until(scope, k)
        if start < k and stop > k + 1:
            if found and start < found[-1][1]:
                first, end, others = found.pop()
                start, stop, again = min(start, first), max(stop, end), again | others
            found.append((start, stop, again))
    blocks, marked = [], set()
    for start, stop, again in found:
        inside = scope.equations[start:stop]
        primitives = {scope.equations[k].name for k in again}
        blocks.append(Block(start, stop, _policy(primitives, names, inside)))
        # A policy sees nothing but primitives, so it would recompute these equations too.
        chosen = {scope.equations[k].index for k in again}
        marked |= {e.index for e in inside if e.name in primitives and e.index not in chosen}
    return blocks, marked


def _policy(primitives: Collection[str], names: Collection[str], inside: list[Equation]) -> Any:
    if any(e.primitive.remat for e in inside):  # a policy that saves results would save those inside the remat as well
        return jax.checkpoint_policies.nothing_saveable
    return SaveAllBut(frozenset(names), frozenset(primitives))


def _made_by(scope: SubJaxpr, k: int) -> set[int]:
    """Return positions of the naming equation, of the forms that it names, and of the equation that makes them."""
    born = {v: i for i, e in enumerate(scope.equations) for v in e.results}
    found = {k}
    while (value := scope.equations[k].operands[0]) in born:
        k = born[value]
        found.add(k)
        if not scope.equations[k].primitive.alias:
            break
    return found


def _used_until(scope: SubJaxpr, k: int) -> int:
    """Return the position after the last equation that reads the named value or another form of it."""
    forms: set[Value | None] = set(scope.equations[k].results)
    stop = k + 1
    for i, e in enumerate(scope.equations[stop:], stop):
        if forms & set(e.operands):
            stop = i + 1
            if e.primitive.alias:
                forms.update(e.results)
    return stop
