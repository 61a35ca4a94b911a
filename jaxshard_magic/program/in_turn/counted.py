"""Loops that take one expert's matrices by the number of the trip (`jax.lax.fori_loop`, a scan over `jnp.arange`)."""

from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np

from ..ir import Equation, Program, Value
from ..primitives import is_literal, scan_counts
from .parts import Part, Parts


@dataclass(frozen=True)
class Counted:
    """A scan whose trips take the next part each of arrays that it reads.

    `carried`: the position of the carry that counts the trips, None where it steps over their numbers. `parts`: what
    its body takes, with the first part, of a value of the body.
    """

    carried: int | None
    parts: Mapping[Value, Part]


def find_counted(
    program: Program, weights: Set[Value], numbers: Set[int], parts: Parts
) -> dict[int, Counted]:
    """The scans that take matrices of `weights` so, of one of so many experts, by the index of their equations."""
    found: dict[int, Counted] = {}
    for e in program.equations:
        if not e.is_scan or e.params["length"] not in numbers:
            continue
        scope, trips = e.doors[0].scope, e.params["length"]
        n, k = scan_counts(e.params)
        carried = None if e.params["reverse"] else _counter(e, n, k)
        counters = [] if carried is None else [scope.ins[n + carried]]
        counters += [
            v for v, given in zip(scope.ins[n + k :], e.ins[n + k :], strict=True) if _counts(program, given)
        ]
        if not counters:
            continue
        outside = {b: a for a, b, _ in e.doors[0].into[:n] if a is not None}
        taken = {
            v: part
            for v, part in parts.by_trip(scope, counters, trips).items()
            if part.source in outside and program.shapes[part.source][part.dim] == trips * part.size
        }
        if any(outside[p.source] in weights and len(program.shapes[p.source]) > 2 for p in taken.values()):
            found[e.index] = Counted(carried, taken)
    return found


def _counter(e: Equation, n: int, k: int) -> int | None:
    """The position of the carry that is 0 in the first trip and 1 more in each."""
    scope = e.doors[0].scope
    made = {v: inner for inner in scope.equations for v in inner.outs}
    for i in range(k):
        start, given, handed_on = e.eqn.invars[n + i], scope.ins[n + i], scope.outs[i]
        inner = None if handed_on is None else made.get(handed_on)
        if inner is None or inner.name != "add" or given not in inner.ins or not _is(start, 0):
            continue
        if any(_is(v, 1) for v in inner.eqn.invars):
            return i
    return None


def _is(var: object, number: int) -> bool:
    if not is_literal(var):
        return False
    value = np.asarray(var.val)  # pyright: ignore[reportAttributeAccessIssue]
    return value.dtype.kind in "iu" and value.size == 1 and value.item() == number


def _counts(program: Program, v: Value | None) -> bool:
    """Is it the numbers from 0 on?"""
    maker = None if v is None else program.maker.get(v)
    return maker is not None and maker.name == "iota" and len(maker.params["shape"]) == 1
