"""What brings an activation from one division to another, in which order, and in how many bytes.

What divides another dimension then is dealt out anew, what divides none any more is gathered. A TPU sends what it
multiplies as it multiplies it: float32 in bfloat16, at its default precision.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..plan import Sent
from ..program.ir import Equation, Value
from .layout import Axes, Layout, Spec


def changes(lies: Spec, wanted: Spec) -> list[Spec]:
    """The divisions that an activation has one after the other, from `lies` to `wanted`: what is dealt out anew is so
    before the rest is gathered, of which each device then has less.

    >>> changes([("data", "expert"), ()], [(), ("expert",)])
    [[('data', 'expert'), ()], [('data',), ('expert',)], [(), ('expert',)]]
    """
    kept = {a for axes in wanted for a in axes}
    between = [
        (*(a for a in was if a not in kept or a in then), *(a for a in then if a not in was))
        for was, then in zip(lies, wanted, strict=True)
    ]
    return [lies, *([between] if between not in (lies, wanted) else []), wanted]


def changes_sent(layout: Layout, v: Value, lies: Spec, wanted: Spec, trips: int) -> Iterator[Sent]:
    """The collectives that bring `v` from where it lies to where it is wanted."""
    dealt, gathered = _moved(lies, wanted)
    share = 2 if dealt + gathered and read_narrow(layout, v, wanted) else 1
    if dealt:
        yield Sent("all-to-all", dealt, layout.count(dealt), layout.moving(v, lies) // share, trips)
    if gathered:
        size = layout.moving(v, wanted) // share
        yield Sent("all-gather", gathered, layout.count(gathered), size, trips)


def bytes_sent(layout: Layout, v: Value, lies: Spec, wanted: Spec) -> int:
    """What a device sends for that, of each element all bytes."""
    dealt, gathered = (layout.count(axes) for axes in _moved(lies, wanted))
    own, then = layout.bytes_of(v, lies), layout.bytes_of(v, wanted)
    return own * (dealt - 1) // dealt + then * (gathered - 1) // gathered


def _moved(lies: Spec, wanted: Spec) -> tuple[Axes, Axes]:
    """The mesh axes that divide another dimension then, and those that divide none."""
    kept = {a for axes in wanted for a in axes}
    pairs = [(a, then) for was, then in zip(lies, wanted, strict=True) for a in was]
    dealt = tuple(a for a, then in pairs if a in kept and a not in then)
    return dealt, tuple(a for a, _ in pairs if a not in kept)


def multiplied_narrow(layout: Layout, e: Equation, v: Value) -> bool:
    """Whether `e` is a product that takes its operand `v`, of float32, in bfloat16: one of matrices. What contracts
    nothing, or has a vector for an operand, is multiplied and added up in float32, and so are ragged ones (v5e)."""
    if layout.platform != "tpu" or layout.program.avals[v].dtype != jnp.float32 or not e.primitive.product:
        return False
    if (c := e.contraction) is None or c.windowed:
        return at_default(e.params.get("precision"))
    matrices = c.ragged is None and bool(c.contracted and c.left and c.right)
    return matrices and at_default(e.params.get("precision"))


def read_narrow(layout: Layout, v: Value, spec: Spec | None = None) -> bool:
    """Whether nothing but products that take it in bfloat16 reads a value, or its numbers in another form or in parts,
    of an activation where it lies as `spec`. What a body gives, or hands to another, is kept as it is."""
    if layout.platform != "tpu" or layout.program.avals[v].dtype != jnp.float32:
        return False
    readers = [
        (w, e)
        for w, e in layout.flow.after[v]
        if w in layout.flow.used
        and (spec is None or (layout.active(v) if e is None else layout.at(e, v)) == spec)
    ]
    return bool(readers) and all(
        e is not None
        and (
            read_narrow(layout, w, None if spec is None else layout.active(w))
            if e.primitive.alias or e.primitive.moves
            else multiplied_narrow(layout, e, v)
        )
        for w, e in readers
    )


def at_default(*precisions: Any) -> bool:
    """Whether products leave it to the hardware in which precision they multiply; each says one for both operands, or
    one for each."""
    given = (p for each in precisions for p in (each if isinstance(each, tuple) else (each,)))
    return all(p in (None, lax.Precision.DEFAULT) for p in given)
