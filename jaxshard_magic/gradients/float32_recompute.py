"""Recomputation of float32 arrays between two products of a loop in mixed precision.

A norm or a softmax saves float32 arrays of its input's size for its gradient. The input is half as large and saved in
any case, and the computation from there is elementwise. Outside of loops XLA makes the same choice by itself, and a
checkpoint only hinders it. In a loop XLA leaves the residuals of every trip unchanged.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from ..program.emit import Replay, run_replay
from ..program.ir import Equation, Program, SubJaxpr, Value
from ..program.primitives.primitive import AutocastPolicy, Kind
from ..program.primitives.table import primitive_of
from ..program.source_lines import user_context
from .autocast import NARROW, WIDE
from .blocks import split_sub_jaxpr

_CHEAP = (Kind.ELEMENTWISE, Kind.SHAPE, Kind.SLICE, Kind.PASS_THROUGH)


def recompute_float32(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Put the float32 equations between products of scan bodies into `jax.checkpoint`.

    Everything but wide elementwise results is saved: sums, masks and narrow arrays stay. Bodies already in
    `jax.checkpoint` stay unchanged.
    """
    return run_replay(closed, _Recomputed)


def narrow_saveable(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Return whether a result is saved for the backward pass: the checkpoint policy."""
    if not _is_cheap(primitive.name):
        return True
    if primitive.name == "convert_element_type":
        return params["new_dtype"] not in WIDE
    return all(getattr(aval, "dtype", None) not in WIDE for aval in avals)


def _is_cheap(name: str) -> bool:
    """Return whether results of a primitive cost less to recompute than to store.

    False for sums and masks, for updates of slices, and for values named by the user, which are saved.
    """
    known = primitive_of(name)
    again = known.kind in _CHEAP and known.autocast is not None and not known.returns_discrete
    return again and name not in ("name", "dynamic_update_slice")


class _Recomputed(Replay):
    """Replay of a program with the wide equations of its loops in `jax.checkpoint`."""

    def __init__(self, program: Program):
        super().__init__(program)
        self._parts: dict[SubJaxpr, list[tuple[SubJaxpr, bool]]] = {}
        self._around = ""  # primitive of the innermost scan or remat around the equation

    def run(self, scope: SubJaxpr, args: Any) -> list:
        # Outside of loops XLA recomputes by itself, and a checkpoint only hinders it.
        if self._around != "scan":
            return super().run(scope, args)
        if scope not in self._parts:
            self._parts[scope] = _parts(scope, self.program)
        env = scope.bind_inputs(args)
        for part, wide in self._parts[scope]:
            values = [env[v] for v in part.inputs]
            outs = self._again(part, values) if wide else super().run(part, values)
            env.update(zip(part.outputs, outs, strict=True))
        return scope.read_outputs(env)

    def _again(self, part: SubJaxpr, values: list) -> list:
        run = super().run
        # Forward and backward pass of a scan are two loops, and XLA merges nothing between loops.
        fresh = jax.checkpoint(lambda *xs: tuple(run(part, xs)), policy=narrow_saveable, prevent_cse=False)
        with user_context(part.equations[0].jaxpr_eqn.source_info.traceback):
            return list(fresh(*values))

    def run_equation(self, e: Equation, values: list) -> list:
        with self._inside(e.name):
            return super().run_equation(e, values)

    @contextmanager
    def _inside(self, name: str):
        around = self._around
        self._around = name if name == "scan" or primitive_of(name).remat else around
        try:
            yield
        finally:
            self._around = around


def _parts(scope: SubJaxpr, program: Program) -> list[tuple[SubJaxpr, bool]]:
    """Split a jaxpr before and after every product, loop, branch and effect, and after casts of its inputs.

    Each part comes with a flag: whether it has both narrow and float32 arrays.
    """
    given, runs = {*scope.inputs, *scope.const_values}, [list[Equation]()]
    for e in scope.equations:
        if _is_cut(e):
            runs += [[e], []]
        else:
            runs[-1].append(e)
    apart = [part for run in runs for part in _casts_apart(run, given) if part]
    return [(part, _is_wide(part.equations, program)) for part in split_sub_jaxpr(scope, apart)]


def _is_cut(e: Equation) -> bool:
    opaque = e.bodies and not e.primitive.custom_derivative
    return bool(opaque or e.jaxpr_eqn.effects or e.primitive.autocast is AutocastPolicy.COMPUTE_DTYPE)


def _casts_apart(run: list[Equation], given: set[Value]) -> tuple[list[Equation], list[Equation]]:
    """Split `run` into the casts of a jaxpr's inputs (weights, for the next product) and the other equations."""
    down = (e for e in run if e.primitive.changes_dtype and e.params["new_dtype"] in NARROW)
    casts = [e for e in down if e.operands[0] in given]
    return casts, [e for e in run if e not in casts]


def _is_wide(run: Sequence[Equation], program: Program) -> bool:
    if all(_is_cut(e) or e.primitive.changes_dtype for e in run):
        return False
    avals = [program.avals[v] for e in run for v in (*e.operands, *e.results) if v is not None]
    dtypes = {getattr(aval, "dtype", None) for aval in avals}
    return not dtypes.isdisjoint(NARROW) and not dtypes.isdisjoint(WIDE)
