"""How every value of a program follows its batch: the same function traced at two batch sizes, walked in lockstep."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import ShardError
from ..flow import Flow
from ..ir import Equation, Program, Value
from ..lines import users_line
from ..orders import Orders
from ..primitives import called
from ..sizes import nbytes
from .examples import CONSTANT, ONE, Label, Rows, Sum, Unknown, fits, times
from .site import differing, same_form
from .walk import OPAQUE, Walk

NORM_BYTES = 4096  # the most of a value that is computed once a step for all microbatches


@dataclass(frozen=True, eq=False)
class Followed:
    """How the values of `small` follow the batch when `large` is the same function of more examples.

    Values and equations have the same numbers in both programs. `ratio`: examples of the large one for each of the
    small one. `of[v]`: the label of value v; `outputs`: of the outputs. `causes`: the equations at which an unknown
    output became so, in order.

    Run again on microbatches, the small program needs: operands multiplied, `scales[equation, position]` (`rescaled`
    does it); the results of the equations in `draws` taken from the large program's draw along that dimension, at the
    rows of the microbatch; the values in `norms` (small: large) replaced by those of the whole batch, computed once.
    """

    small: Program
    large: Program
    ratio: Fraction
    of: tuple[Label, ...]
    outputs: tuple[Label, ...]
    causes: tuple[int, ...]
    scales: Mapping[tuple[int, int], Fraction]
    draws: Mapping[int, int]
    norms: Mapping[Value, Value]

    def rescaled(self, e: Equation, values: Sequence[Any]) -> list:
        """The operands of `e` in a microbatch, as they are to enter it."""
        return [times(x, self.scales.get((e.index, i), ONE)) for i, x in enumerate(values)]


def follow(
    small: Program,
    large: Program,
    batch: Mapping[int, int | Label],
    trained: Collection[int] | None = None,
) -> Followed:
    """How every value of `small` follows its batch, `large` being the same function of more examples.

    `batch[i]`: the dimension of input i that is the batch, or another label of that input; of the inputs that are not
    named, those of other shapes are unknown, the rest constant. `trained`: the inputs that are differentiated. With
    them, where the first output is unknown only for small numbers that depend on the batch alone (the mask count of a
    masked mean), those are taken for the whole batch: the result's `norms`.

    Raises ShardError where the two programs differ by more than the size of one batch.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> def trace(n):
    ...     return Program(jax.make_jaxpr(lambda w, x: (x @ w).mean())(jnp.ones(3), jnp.ones((n, 3))))
    >>> follow(trace(2), trace(8), {1: 0}).outputs
    (Sum(scale=Fraction(1, 4)),)
    """
    ratio = growth(small, large, batch)
    _refuse_other_form(small, large)
    orders = Orders(small), Orders(large)
    first = _followed(Walk(small, large, ratio, frozenset(), orders), batch)
    if trained is None or not first.outputs or not isinstance(first.outputs[0], Unknown):
        return first
    second = _followed(Walk(small, large, ratio, _norms(small, large, trained), orders), batch)
    return first if isinstance(second.outputs[0], Unknown) else second


def unfollowed(program: Program) -> Followed:
    """`program` with the whole batch as its one microbatch: what it makes of that is the whole batch's. Keys alone,
    which no sum holds, are left to be made again."""
    keys = (jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in program.avals)
    of = tuple(CONSTANT if key else Sum() for key in keys)
    outputs = tuple(CONSTANT if v is None else of[v] for v in program.outputs)
    return Followed(program, program, ONE, of, outputs, (), {}, {}, {})


def unvaried(program: Program, microbatches: int) -> Followed:
    """`program` where it reads no examples, such as a penalty on weights: each microbatch makes the same."""
    of, outputs = (CONSTANT,) * len(program.avals), (CONSTANT,) * len(program.outputs)
    return Followed(program, program, Fraction(microbatches), of, outputs, (), {}, {}, {})


def told(program: Program, cause: int) -> str:
    """An equation as a reader knows it: what it does, and the innermost line of theirs that it comes from.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> told(Program(jax.make_jaxpr(lambda x: x @ x)(jnp.ones((2, 2)))), 0).partition(" at ")[0]
    'dot_general'
    """
    e: Equation | None = program.equations[cause]
    name = e.name
    while e is not None:
        if (line := users_line(e.eqn)) is not None:
            return f"{name} at {line}"
        e = e.outer
    return name


def growth(small: Program, large: Program, batch: Mapping[int, int | Label]) -> Fraction:
    """By what factor the batch of `large` is that of `small`; `batch` as of `follow`."""
    ratios = {}
    for i, label in batch.items():
        dim = label.dim if isinstance(label, Rows) else label
        if isinstance(dim, int):
            a, b = (p.shapes[p.inputs[i]] for p in (small, large))
            if dim >= len(a) or not a[dim]:
                raise ShardError(f"input {i} has no examples in dimension {dim}; its shape is {a}")
            ratios[i] = Fraction(b[dim], a[dim])
    if len(set(ratios.values())) != 1 or 1 in ratios.values():
        sizes = ", ".join(f"input {i}: {float(r):g}" for i, r in ratios.items()) or "none"
        raise ShardError(
            "a program is followed from one batch size to another: all its batches have to grow alike, and by another "
            f"factor than 1; they grow by ({sizes})"
        )
    return next(iter(ratios.values()))


def other_form(small: Program, large: Program) -> str | None:
    """Where two programs are not the same but for sizes and numbers; None where they are."""
    if (pair := differing(small, large)) is not None:
        return " against ".join(told(p, e.index) for p, e in zip((small, large), pair, strict=True))
    if not same_form(small, large):
        return f"{len(small.equations)} operations against {len(large.equations)}"
    return None


def _refuse_other_form(small: Program, large: Program) -> None:
    """Raise ShardError unless both programs are the same but for sizes and numbers."""
    if (other := other_form(small, large)) is not None:
        raise ShardError(
            f"the function is another one for another batch size: {other}; it must not decide in Python by the size of "
            "the batch, nor loop over examples"
        )


def _followed(walk: Walk, batch: Mapping[int, int | Label]) -> Followed:
    small, ins = walk.small, []
    for i, (a, b) in enumerate(zip(small.inputs, walk.large.inputs, strict=True)):
        given = batch.get(i, CONSTANT)
        label = Rows(given) if isinstance(given, int) else given
        good = fits(label, small.shapes[a], walk.large.shapes[b], walk.ratio)
        ins.append(label if good else Unknown())
    outs = walk.outputs(ins)
    flow = Flow(small)
    used = _used(walk, flow, outs)
    return Followed(
        small=small,
        large=walk.large,
        ratio=walk.ratio,
        of=walk.labels(),
        outputs=tuple(outs),
        causes=_causes(walk, flow, outs),
        scales={
            (e.index, i): x
            for e in small.equations
            if not used.isdisjoint(e.outs)
            for i, x in walk.scales.get(e.index, {}).items()
        },
        draws=dict(walk.draws),
        norms=dict(walk.norms),
    )


def _used(walk: Walk, flow: Flow, outs: Sequence[Label]) -> set[Value]:
    """The values that known outputs are made of, and those that decide on branches and trips: what is averaged for want
    of better is averaged as it is."""
    start = [v for v, x in zip(walk.small.outputs, outs, strict=True) if not isinstance(x, Unknown)]
    for e in walk.small.equations:
        start += [e.ins[0]] if e.is_cond else e.doors[1].scope.outs if e.is_while else []
    return set(flow.back(start, lambda _v, w, _e: not isinstance(walk.of[w], Unknown)))


def _causes(walk: Walk, flow: Flow, outs: Sequence[Label]) -> tuple[int, ...]:
    """The equations at which unknown outputs became so."""
    lost = [v for v, x in zip(walk.small.outputs, outs, strict=True) if isinstance(x, Unknown)]
    met = flow.back(lost, lambda _v, w, _e: isinstance(walk.of[w], Unknown))
    begun = {walk.small.maker[v].index for v in met if v in walk.small.maker} & walk.begins
    return tuple(sorted(begun | {x.cause for x in outs if isinstance(x, Unknown) and x.cause is not None}))


def _norms(small: Program, large: Program, trained: Collection[int]) -> frozenset[Value]:
    """The small values that are computed once a step and depend on nothing that is differentiated."""
    reached = Flow(small).forward(small.inputs[i] for i in trained)
    return frozenset(
        v
        for e in small.top.walk(_runs_once)
        for v in e.outs
        if e.name != OPAQUE
        and v not in reached
        and small.shapes[v] == large.shapes[v]
        and nbytes(small.avals[v]) <= NORM_BYTES
    )


def _runs_once(e: Equation) -> bool:
    """Is what an equation holds run once a step, and can be taken apart? Not loops, branches, custom rules."""
    return called(e.eqn) is not None and not e.primitive.custom
