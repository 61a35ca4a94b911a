"""Gradient calls of a step over microbatches: which operands hold examples, and which outputs are state."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import NamedTuple

from ..errors import ShardError
from ..program.batching.batch_labels import Label, PerExample, growing_dim
from ..program.batching.followed_program import describe_difference, follow_batch
from ..program.flow import Flow, follow_aliases
from ..program.gradient_calls import GradientCall, gradient_equations
from ..program.ir import Equation, Program, Value
from ..program.primitives import shape_of
from ..program.roles import InputRoles
from ..program.trace import Traced
from .accumulate import AccumulatedGradient, MicrobatchSplit
from .captures import Captures
from .passes import Passes

Twice = Callable[[], tuple[Traced, Traced]]


def accumulated_gradients(captures: Captures, roles: InputRoles, passes: Passes) -> dict[int, AccumulatedGradient]:
    """Return the gradient calls of `captures.whole` over microbatches, by equation index.

    Args:
        captures: The step at its own shapes and at one microbatch.
        roles: Roles of the step's inputs and outputs.
        passes: Passes over the losses before differentiation.

    Raises:
        ShardError: A gradient call can't be taken in microbatches.
    """
    wanted = captures.needs
    assert captures.part is not None and wanted.cut is not None
    cut, twice = wanted.cut, captures.trace_at_two and cache(captures.trace_at_two)
    small, large = Program(captures.part.closed), Program(captures.whole.closed)
    batch = {i: d for i, (d,) in wanted.batch.input_dims.items()}
    labels, state, calls = _operand_labels(small, large, batch, twice), _state(large, roles), {}
    for n, (part, whole) in enumerate(zip(gradient_equations(small), gradient_equations(large), strict=True)):
        at_two = None if twice is None else partial(_calls, twice, n)
        mine = state.get(whole.index, {})
        calls[whole.index] = _accumulated(part, whole, labels[n], cut, passes, mine, at_two)
    return calls


class ExampleCoupling(NamedTuple):
    """Reason why microbatches give other numbers than the whole batch.

    Attributes:
        reason: The reason, in words.
        same_loss: Whether microbatches still train on the loss of the whole batch. Then only statistics differ, taken
            of each microbatch as in other training loops, or an output beside the loss.
    """

    reason: str
    same_loss: bool


def find_coupling(call: AccumulatedGradient) -> ExampleCoupling | None:
    """Return why microbatches of a call give other numbers than the whole batch; None for equal numbers."""
    outputs, where = call.outputs, f" ({call.cause})" if call.cause else ""
    if outputs.carried:
        return ExampleCoupling(f"the loss couples the examples of a batch{where}", True)
    if not outputs.exact:
        return ExampleCoupling(f"the loss is no sum over examples{where}", False)
    if n := len(outputs.averaged):
        one = f"{n} output{'s' * (n > 1)} beside the loss {'are' if n > 1 else 'is'}"
        return ExampleCoupling(f"{one} no sum over examples nor one for each", True)
    return None


def _calls(twice: Twice, n: int) -> tuple[GradientCall, GradientCall]:
    """Return the `n`th gradient call of the step at a microbatch and at the whole batch, with two examples in place
    of each."""
    small, large = (gradient_equations(Program(step.closed))[n].params["gradient"] for step in twice())
    return small, large


def _operand_labels(
    small: Program, large: Program, batch: Mapping[int, int], twice: Twice | None
) -> list[list[Label | None]]:
    """Return the batch labels of each gradient call's operands, None for a literal.

    Args:
        batch: Dimension of the examples, by input.

    Raises:
        ShardError: The step around its gradient calls is a different program for a microbatch.
    """
    first, second = small, large
    # JAX traces a single example into other operations (0.10 to 0.12), for which labels can't be proved.
    if twice is not None and describe_difference(small, large):
        first, second = (Program(step.closed) for step in twice())
        if len({tuple(len(e.operands) for e in gradient_equations(p)) for p in (small, large, first)}) > 1:
            first, second = small, large  # `follow_batch` raises, with the difference
    outer = follow_batch(first, second, batch)
    return [[None if v is None else outer.value_labels[v] for v in e.operands] for e in gradient_equations(first)]


def _accumulated(
    small: Equation,
    large: Equation,
    labels: Sequence[Label | None],
    cut: MicrobatchSplit,
    passes: Passes,
    state: Mapping[int, int],
    twice: Callable[[], tuple[GradientCall, GradientCall]] | None,
) -> AccumulatedGradient:
    call: GradientCall = large.params["gradient"]
    option, batch = f"--microbatches {cut.microbatches}", {}
    for k, label in enumerate(labels):
        if shape_of(small.jaxpr_eqn.invars[k]) == shape_of(large.jaxpr_eqn.invars[k]):
            continue
        shapes = shape_of(small.jaxpr_eqn.invars[k]), shape_of(large.jaxpr_eqn.invars[k])
        dim = label.dim if isinstance(label, PerExample) else growing_dim(*shapes, ratio=Fraction(cut.microbatches))
        if not isinstance(label, PerExample) and _in_a_loop(large):
            raise ShardError(
                "the step takes its gradient in a loop of its own, which takes the batch in parts already; leave "
                "--microbatches out, or the loop",
                option=option,
            )
        whole = large.jaxpr_eqn.invars[k].aval.str_short()
        if k >= call.num_closed_over:
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
        return AccumulatedGradient(call, call, batch, cut, passes, {})
    return AccumulatedGradient(small.params["gradient"], call, batch, cut, passes, state, trace_at_two=twice)


def _in_a_loop(e: Equation) -> bool:
    """Return whether an equation is in the body of a loop. Bodies of functions and conditions don't count."""
    while e.parent is not None:
        e = e.parent
        if e.is_loop:
            return True
    return False


def _state(program: Program, roles: InputRoles) -> dict[int, dict[int, int]]:
    """Return for each gradient call, by equation index: aux output to the operand of which it is the next value."""
    flow = Flow(program)
    found: dict[int, dict[int, int]] = {}
    for e in gradient_equations(program):
        call: GradientCall = e.params["gradient"]
        operands = {i: k for k, v in enumerate(e.operands) for i in flow.input_ancestors([v], follow_aliases)}
        outs = {v: j for j, v in enumerate(e.results[: call.num_outputs])}
        for o, i in roles.state.items():
            if i not in operands:
                continue
            for v in flow.ancestors([program.outputs[o]], partial(_by_mean, flow)):
                k = operands[i]
                if v in outs and program.avals[v].shape == program.avals[program.inputs[i]].shape:
                    found.setdefault(e.index, {})[outs[v]] = k
    return found


def _by_mean(flow: Flow, v: Value, w: Value, e: Equation | None) -> bool:
    """Return whether a value is the same array in another form, or its mean over devices."""
    # lax.pmean is traced as a psum, divided by the number of devices.
    mean = e is not None and e.name == "div" and any(f and f.name == "psum" for _, f in flow.predecessors[w])
    return follow_aliases(v, w, e) or mean or (e is not None and e.name == "psum")
