"""Loops that take an expert's matrices by the index of the trip (`jax.lax.fori_loop`, scans over `jnp.arange`)."""

from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np

from ..ir import Equation, Program, Value
from ..primitives import is_literal, scan_counts
from .array_parts import ArrayPart, ArrayParts


@dataclass(frozen=True)
class IndexedLoop:
    """Scan whose trips take consecutive parts of arrays.

    Attributes:
        counter_carry: Index of the carry that counts trips; None for a scan over the indices themselves.
        parts: Values of the body that are such parts, each with the first part. The source is an input of the body.
    """

    counter_carry: int | None
    parts: Mapping[Value, ArrayPart]


def find_indexed_loops(
    program: Program, weights: Set[Value], expert_counts: Set[int], parts: ArrayParts
) -> dict[int, IndexedLoop]:
    """Return the scans that take matrices of weights by the trip's index, by equation index.

    Args:
        program: The program.
        weights: Values that are weights, or other forms of weights.
        expert_counts: Possible numbers of experts; the length of the scan must be among them.
        parts: Parts of arrays in the program's bodies.
    """
    loops: dict[int, IndexedLoop] = {}
    for e in program.equations:
        if not e.is_scan or e.params["length"] not in expert_counts:
            continue
        scope, trips = e.bodies[0].sub_jaxpr, e.params["length"]
        n, k = scan_counts(e.params)
        # In a reverse scan a carry still counts up, while the indices that replace it would run down.
        counter_carry = None if e.params["reverse"] else _find_counter_carry(e, n, k)
        counters = [] if counter_carry is None else [scope.inputs[n + counter_carry]]
        counters += [
            v
            for v, elements in zip(scope.inputs[n + k :], e.operands[n + k :], strict=True)
            if _is_iota(program, elements)
        ]
        if not counters:
            continue
        outside = {b: a for a, b, _ in e.bodies[0].inputs[:n] if a is not None}
        loop_parts = {
            v: part
            for v, part in parts.in_loop(scope, counters, trips).items()
            if part.source in outside and program.shapes[part.source][part.dim] == trips * part.size
        }
        if any(outside[p.source] in weights and len(program.shapes[p.source]) > 2 for p in loop_parts.values()):
            loops[e.index] = IndexedLoop(counter_carry, loop_parts)
    return loops


def _find_counter_carry(e: Equation, n: int, k: int) -> int | None:
    """Return the index of the carry that is 0 at the first trip and grows by 1; None for no such carry."""
    scope = e.bodies[0].sub_jaxpr
    producers = {v: inner for inner in scope.equations for v in inner.results}
    for i in range(k):
        start, carry_input, carry_output = e.jaxpr_eqn.invars[n + i], scope.inputs[n + i], scope.outputs[i]
        inner = None if carry_output is None else producers.get(carry_output)
        if inner is None or inner.name != "add" or carry_input not in inner.operands or not _is_integer(start, 0):
            continue
        if any(_is_integer(v, 1) for v in inner.jaxpr_eqn.invars):
            return i
    return None


def _is_integer(var: object, number: int) -> bool:
    if not is_literal(var):
        return False
    value = np.asarray(var.val)  # pyright: ignore[reportAttributeAccessIssue]
    return value.dtype.kind in "iu" and value.size == 1 and value.item() == number


def _is_iota(program: Program, v: Value | None) -> bool:
    """Return whether a value is a vector 0, 1, 2, ..."""
    maker = None if v is None else program.producer.get(v)
    return maker is not None and maker.name == "iota" and len(maker.params["shape"]) == 1
