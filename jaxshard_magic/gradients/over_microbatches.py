"""The gradient calls of a step, each put over microbatches: which of its operands hold the examples, and its state."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import NamedTuple

from ..errors import ShardError
from ..program.batching.examples import Label, Rows, varying
from ..program.batching.follow import follow, other_form
from ..program.capture import Gradient, gradients_of
from ..program.flow import Flow, by_alias
from ..program.ir import Equation, Program, Value
from ..program.primitives import shape_of
from ..program.roles import Roles
from ..program.trace import Traced
from .accumulate import Accumulated, Cut
from .captures import Captures
from .passes import Passes

Twice = Callable[[], tuple[Traced, Traced]]


def accumulations(captures: Captures, roles: Roles, passes: Passes) -> dict[int, Accumulated]:
    """The gradient calls of `captures.whole` over microbatches, by the index of their equations.

    Raises `ShardError` where one can't be taken so.
    """
    wanted = captures.needs
    assert captures.part is not None and wanted.cut is not None
    cut, twice = wanted.cut, captures.twice and cache(captures.twice)
    small, large = Program(captures.part.closed), Program(captures.whole.closed)
    batch = {i: d for i, (d,) in wanted.batch.dims.items()}
    labels, state, calls = _operand_labels(small, large, batch, twice), _state(large, roles), {}
    for n, (part, whole) in enumerate(zip(gradients_of(small), gradients_of(large), strict=True)):
        at_two = None if twice is None else partial(_calls, twice, n)
        mine = state.get(whole.index, {})
        calls[whole.index] = _accumulated(part, whole, labels[n], cut, passes, mine, at_two)
    return calls


class Coupled(NamedTuple):
    """Why microbatches have other numbers than the whole batch. `same_loss`: they train on its loss all the same; what
    differs are statistics, taken of each microbatch as in other training loops, or an output beside the loss."""

    why: str
    same_loss: bool


def coupled(call: Accumulated) -> Coupled | None:
    """In what microbatches have other numbers than the whole batch; None where they have the same."""
    outputs, where = call.outputs, f" ({call.cause})" if call.cause else ""
    if outputs.carried:
        return Coupled(f"the loss couples the examples of a batch{where}", True)
    if not outputs.exact:
        return Coupled(f"the loss is no sum over examples{where}", False)
    if n := len(outputs.guessed):
        one = f"{n} output{'s' * (n > 1)} beside the loss {'are' if n > 1 else 'is'}"
        return Coupled(f"{one} no sum over examples nor one for each", True)
    return None


def _calls(twice: Twice, n: int) -> tuple[Gradient, Gradient]:
    """The `n`th gradient call of the step, as it was traced with two examples for each."""
    small, large = (gradients_of(Program(step.closed))[n].params["gradient"] for step in twice())
    return small, large


def _operand_labels(
    small: Program, large: Program, batch: Mapping[int, int], twice: Twice | None
) -> list[list[Label | None]]:
    """How the operands of each gradient call follow the batch, None for a literal; `batch`: its dimension, by input.

    Raises ShardError where the step around its gradient calls is another one for a microbatch.
    """
    first, second = small, large
    if twice is not None and other_form(small, large):
        first, second = (Program(step.closed) for step in twice())
        if len({tuple(len(e.ins) for e in gradients_of(p)) for p in (small, large, first)}) > 1:
            first, second = small, large  # refused, with the difference
    outer = follow(first, second, batch)
    return [[None if v is None else outer.of[v] for v in e.ins] for e in gradients_of(first)]


def _accumulated(
    small: Equation,
    large: Equation,
    labels: Sequence[Label | None],
    cut: Cut,
    passes: Passes,
    state: Mapping[int, int],
    twice: Callable[[], tuple[Gradient, Gradient]] | None,
) -> Accumulated:
    call: Gradient = large.params["gradient"]
    option, batch = f"--microbatches {cut.microbatches}", {}
    for k, label in enumerate(labels):
        if shape_of(small.eqn.invars[k]) == shape_of(large.eqn.invars[k]):
            continue
        shapes = shape_of(small.eqn.invars[k]), shape_of(large.eqn.invars[k])
        dim = label.dim if isinstance(label, Rows) else varying(*shapes, ratio=Fraction(cut.microbatches))
        if not isinstance(label, Rows) and _in_a_loop(large):
            raise ShardError(
                "the step takes its gradient in a loop of its own, which takes the batch in parts already; leave "
                "--microbatches out, or the loop",
                option=option,
            )
        whole = large.eqn.invars[k].aval.str_short()
        if k >= call.closed_over:
            raise ShardError(
                f"the step takes a gradient with respect to its examples, {whole}, which is no sum over them; leave "
                "--microbatches out",
                option=option,
            )
        if dim is None:
            raise ShardError(
                f"the loss reads {whole}, which can't be cut into microbatches by its examples; pass the batch itself "
                "into the loss",
                option=option,
            )
        batch[k] = dim
    if not batch:
        return Accumulated(call, call, batch, cut, passes, {})
    return Accumulated(small.params["gradient"], call, batch, cut, passes, state, twice=twice)


def _in_a_loop(e: Equation) -> bool:
    """Whether it runs in the body of a loop; what a function or a condition calls may not."""
    while e.outer is not None:
        e = e.outer
        if e.is_loop:
            return True
    return False


def _state(program: Program, roles: Roles) -> dict[int, dict[int, int]]:
    """For each gradient call, by its index: aux output -> the operand whose next value the step makes of it."""
    flow = Flow(program)
    found: dict[int, dict[int, int]] = {}
    for e in gradients_of(program):
        call: Gradient = e.params["gradient"]
        operands = {i: k for k, v in enumerate(e.ins) for i in flow.inputs_behind([v], by_alias)}
        outs = {v: j for j, v in enumerate(e.outs[: call.outs])}
        for o, i in roles.state.items():
            if i not in operands:
                continue
            for v in flow.back([program.outputs[o]], partial(_by_mean, flow)):
                k = operands[i]
                if v in outs and program.avals[v].shape == program.avals[program.inputs[i]].shape:
                    found.setdefault(e.index, {})[outs[v]] = k
    return found


def _by_mean(flow: Flow, v: Value, w: Value, e: Equation | None) -> bool:
    """Only what is the same array in another form, or its mean over devices."""
    mean = e is not None and e.name == "div" and any(f and f.name == "psum" for _, f in flow.before[w])
    return by_alias(v, w, e) or mean or (e is not None and e.name == "psum")
