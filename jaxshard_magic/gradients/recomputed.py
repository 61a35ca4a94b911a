"""What a loop in mixed precision holds in float32 between two products, computed again in its backward pass.

A norm or a softmax keeps float32 arrays of the size of its input for its gradient. Its input is half as large and kept
anyway, and the way back from there is elementwise. Outside of loops the compiler finds that by itself, and is only
hindered; what a loop keeps of every trip it takes as it is.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from ..program.ir import Equation, Program, Scope, Value
from ..program.lines import user_context
from ..program.primitives.primitive import Kind, Runs
from ..program.primitives.table import primitive_of
from ..program.replay import Replay, replayed
from .autocast import NARROW, WIDE
from .blocks import parts_of

_CHEAP = (Kind.ELEMENTWISE, Kind.SHAPE, Kind.CUT, Kind.EACH)


def recomputed(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A loss with the float32 stretches between products of its scanned bodies in `jax.checkpoint`.

    What is kept of a stretch is all but wide elementwise results: sums, masks and what is narrow stay. A body that is
    in `jax.checkpoint` already is left alone.
    """
    return replayed(closed, _Recomputed)


def keeps(primitive: Any, *avals: Any, **params: Any) -> bool:
    """The policy: is the result of an equation kept for the backward pass?"""
    if not _is_cheap(primitive.name):
        return True
    if primitive.name == "convert_element_type":
        return params["new_dtype"] not in WIDE
    return all(getattr(aval, "dtype", None) not in WIDE for aval in avals)


def _is_cheap(name: str) -> bool:
    """Are the results of a primitive made again for less than they take? Not of sums, masks and what is cut out anew;
    and what the user names is kept."""
    known = primitive_of(name)
    again = known.kind in _CHEAP and known.runs is not None and not known.compares
    return again and name not in ("name", "dynamic_update_slice")


class _Recomputed(Replay):
    """Re-emits a program with the wide stretches of its loops in `jax.checkpoint`."""

    def __init__(self, program: Program):
        super().__init__(program)
        self._parts: dict[Scope, list[tuple[Scope, bool]]] = {}
        self._around = ""  # the innermost loop or remat that the equation stands in

    def run(self, scope: Scope, args: Any) -> list:
        if self._around != "scan":
            return super().run(scope, args)
        if scope not in self._parts:
            self._parts[scope] = _parts(scope, self.program)
        env = scope.env(args)
        for part, wide in self._parts[scope]:
            values = [env[v] for v in part.ins]
            outs = self._again(part, values) if wide else super().run(part, values)
            env.update(zip(part.outs, outs, strict=True))
        return scope.results(env)

    def _again(self, part: Scope, values: list) -> list:
        run = super().run
        # A loop's two passes are two loops, between which nothing is merged.
        fresh = jax.checkpoint(lambda *xs: tuple(run(part, xs)), policy=keeps, prevent_cse=False)
        with user_context(part.equations[0].eqn.source_info.traceback):
            return list(fresh(*values))

    def equation(self, e: Equation, values: list) -> list:
        with self._inside(e.name):
            return super().equation(e, values)

    @contextmanager
    def _inside(self, name: str):
        around = self._around
        self._around = name if name == "scan" or primitive_of(name).remat else around
        try:
            yield
        finally:
            self._around = around


def _parts(scope: Scope, program: Program) -> list[tuple[Scope, bool]]:
    """A scope cut before and after every product, loop, branch and effect, and after casts of what it is given; each
    part with whether it holds narrow and float32 arrays."""
    given, runs = {*scope.ins, *scope.const_values}, [list[Equation]()]
    for e in scope.equations:
        if _is_cut(e):
            runs += [[e], []]
        else:
            runs[-1].append(e)
    apart = [part for run in runs for part in _casts_apart(run, given) if part]
    return [(part, _is_wide(part.equations, program)) for part in parts_of(scope, apart)]


def _is_cut(e: Equation) -> bool:
    opaque = e.doors and not e.primitive.custom
    return bool(opaque or e.eqn.effects or e.primitive.runs is Runs.PRODUCT)


def _casts_apart(run: list[Equation], given: set[Value]) -> tuple[list[Equation], list[Equation]]:
    """The casts of a scope's inputs (weights, for the next product), and the rest of a run."""
    down = (e for e in run if e.primitive.casts and e.params["new_dtype"] in NARROW)
    casts = [e for e in down if e.ins[0] in given]
    return casts, [e for e in run if e not in casts]


def _is_wide(run: Sequence[Equation], program: Program) -> bool:
    if all(_is_cut(e) or e.primitive.casts for e in run):
        return False
    avals = [program.avals[v] for e in run for v in (*e.ins, *e.outs) if v is not None]
    dtypes = {getattr(aval, "dtype", None) for aval in avals}
    return not dtypes.isdisjoint(NARROW) and not dtypes.isdisjoint(WIDE)
