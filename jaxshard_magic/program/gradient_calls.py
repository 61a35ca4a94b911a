"""Gradient calls of a step captured whole: one equation per call, holding the loss before differentiation."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching
from jax.tree_util import register_pytree_node_class

from ..errors import ShardError
from .batching.label_walk import GRADIENT_CALL
from .emit import Emitter, Replay, retrace
from .hooks import Vjp, hook_vjp
from .ir import Equation, Program
from .primitives import bind, has_unresolved_checks, hoist_constants, is_literal
from .references import discharge_references, has_reference_inputs, makes_references
from .source_lines import user_line
from .trace import Traced, marking_vjp
from .trace_errors import unbound_axis_name

gradient_p = Primitive(GRADIENT_CALL)
gradient_p.multiple_results = True


class _CaptureState(threading.local):
    """State of the calling thread.

    Attributes:
        differentiate_now: Whether gradient calls are differentiated immediately and none is captured.
    """

    differentiate_now: bool = False


_state = _CaptureState()


@dataclass(frozen=True, eq=False)
class GradientCall:
    """One gradient call: operands `(closed over..., differentiated...)` to results `(value, aux..., gradients...)`.

    Attributes:
        loss: Function of all operands that returns value and aux, all flat; a jaxpr without constants.
        num_closed_over: Number of leading operands that the loss reads besides the differentiated arguments.
        known_constants: Closed-over operands that are constants, by position.
    """

    loss: ClosedJaxpr
    num_closed_over: int
    known_constants: Mapping[int, Any] = field(default_factory=dict)

    @property
    def differentiated_positions(self) -> range:
        """Positions of the operands with respect to which the loss is differentiated."""
        return range(self.num_closed_over, len(self.loss.in_avals))

    @property
    def num_outputs(self) -> int:
        """Number of results in front of the gradients: the value and aux."""
        return len(self.loss.out_avals)


@gradient_p.def_abstract_eval
def _avals(*operands: Any, gradient: GradientCall) -> list:
    """Return the avals of value and aux, and for the gradients the avals of the differentiated operands."""
    return [*gradient.loss.out_avals, *operands[gradient.num_closed_over :]]


def _refuse_vmap(_operands: Any, _dims: Any, **_params: Any) -> Any:
    """Raise ShardError: a gradient inside `jax.vmap` can't be captured."""
    raise ShardError(
        "the step takes its gradient inside jax.vmap, one for each example or model; pp and options for the gradients "
        "(--microbatches, --remat, --precision) work on a call that is not inside one: use dp or fsdp alone"
    )


batching.primitive_batchers[gradient_p] = _refuse_vmap


def _jvp_rule(primals: Sequence[Any], tangents: Sequence[Any], *, gradient: GradientCall) -> tuple:
    """Differentiate a gradient call once more, as a Hessian-vector product does.

    The tangents are computed immediately, over all examples; the call itself stays captured.
    """
    dense_tangents = tuple(map(ad.instantiate_zeros, tangents))
    loss = Replay(Program(gradient.loss))
    # Otherwise the call of jax.vjp in `value_and_gradients` would be captured again.
    previous, _state.differentiate_now = _state.differentiate_now, True
    try:
        _, result_tangents = jax.jvp(
            lambda *xs: value_and_gradients(gradient, loss, xs), tuple(primals), dense_tangents
        )
    finally:
        _state.differentiate_now = previous
    return gradient_p.bind(*primals, gradient=gradient), result_tangents


ad.primitive_jvps[gradient_p] = _jvp_rule


def capture_vjp(inner: Vjp) -> Vjp:
    """Return a `jax.vjp` that binds each call as one `gradient_p` instead of differentiating.

    Only scalar functions of arrays are captured; `inner` runs all others, and gradients inside a loss.

    Args:
        inner: `jax.vjp`, or the function installed in front of JAX's.

    Raises:
        ShardError: The loss has a `checkify.check`, or hands a `jax.Ref` to a function with a derivative rule of its
            own.
    """
    busy = False

    def vjp(fun, *primals, has_aux: bool = False, **options):
        nonlocal busy
        if busy or _state.differentiate_now:  # a gradient inside the loss, or in `_jvp_rule`
            return inner(fun, *primals, has_aux=has_aux, **options)
        leaves, tree = jax.tree.flatten(primals)
        inexact = [i for i, x in enumerate(leaves) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
        aux_tree: Any = None

        def flat(*xs):
            nonlocal aux_tree
            full = list(leaves)
            for i, x in zip(inexact, xs, strict=True):
                full[i] = x
            out = fun(*jax.tree.unflatten(tree, full))
            value, aux = out if has_aux else (out, ())
            arrays, aux_tree = jax.tree.flatten(aux)
            return [*jax.tree.leaves(value), *arrays]

        busy = True
        try:
            closed = jax.make_jaxpr(flat)(*(leaves[i] for i in inexact))
        finally:
            busy = False
        naux = aux_tree.num_leaves
        if len(closed.out_avals) != naux + 1 or closed.out_avals[0].shape:
            return inner(fun, *primals, has_aux=has_aux, **options)
        if has_unresolved_checks(closed):
            raise ShardError(
                "the loss has a checkify.check and gives its error to a checkify outside of the gradient call, which "
                "pp and options for the gradients (--microbatches, --remat, --precision) take later: have the loss "
                "return it (err, loss = checkify.checkify(loss)(...), has_aux=True), or use dp, fsdp or tp alone"
            )
        # `discharge_references` drops the derivative rules of functions that contain references.
        closed = _discharge_inside_rules(closed)
        known = {k: x for k, x in enumerate(closed.consts) if _is_plain_constant(x)}
        # A program has no references, so each is read before the call and written after it, with its last value in the
        # loss.
        references = [x for x in closed.consts if isinstance(x, jax.Ref)]
        call = GradientCall(discharge_references(hoist_constants(closed)), len(closed.consts), known)
        values = [x[...] if isinstance(x, jax.Ref) else x for x in closed.consts]
        operands = [*values, *(leaves[i] for i in inexact)]
        outs = gradient_p.bind(*operands, gradient=call)
        for reference, x in zip(references, outs[1 + naux : call.num_outputs], strict=True):
            reference[...] = x
        # Aux that the loss passes through unchanged stays the caller's own array, not a result of the call.
        passed_through = dict(zip(call.loss.jaxpr.invars, operands, strict=True))

        gradients = iter(outs[call.num_outputs :])
        # jax.vjp gives zeros of dtype float0 for integer arguments.
        float0_zeros = (np.zeros(np.shape(x), jax.dtypes.float0) for x in leaves)
        pullback = _CapturedPullback(
            tree.unflatten([next(gradients) if i in inexact else x for i, x in enumerate(float0_zeros)])
        )
        pairs = zip(call.loss.jaxpr.outvars[1 : 1 + naux], outs[1 : 1 + naux], strict=True)
        aux = jax.tree.unflatten(aux_tree, [x if is_literal(v) else passed_through.get(v, x) for v, x in pairs])
        return (outs[0], pullback, aux) if has_aux else (outs[0], pullback)

    return vjp


@register_pytree_node_class
@dataclass(frozen=True, eq=False)
class _CapturedPullback:
    """Pullback returned for a captured call, whose gradients are computed already. A pytree, as JAX's own pullback is.

    Attributes:
        gradients: Gradients for a cotangent of 1, in the structure of the primals.
    """

    gradients: tuple[Any, ...]

    def __call__(self, cotangent: Any) -> tuple[Any, ...]:
        return (
            self.gradients if _is_one(cotangent) else jax.tree.map(partial(_scale_gradient, cotangent), self.gradients)
        )

    def with_refs(self, *_: Any) -> Any:
        raise ShardError(
            "the step has jax.vjp add gradients to references (with_refs), where pp and options for the gradients "
            "(--microbatches, --remat, --precision) have no place: add up what the function returns, or use dp, fsdp "
            "or tp alone"
        )

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.gradients,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> "_CapturedPullback":
        return cls(*children)


def _scale_gradient(cotangent: Any, gradient: Any) -> Any:
    """Return `gradient` times the scalar `cotangent`, in the gradient's dtype; float0 gradients stay."""
    exact = gradient.dtype == jax.dtypes.float0
    return gradient if exact else gradient * cotangent.astype(gradient.dtype)


class _DischargeInsideRules(Replay):
    """Emitter of a loss that discharges references inside functions with derivative rules, and keeps the rules."""

    def run_equation(self, e: Equation, values: list) -> list:
        if not _makes_references(e):
            return super().run_equation(e, values)
        eqn = e.jaxpr_eqn.replace(params={**e.params, "call_jaxpr": discharge_references(e.params["call_jaxpr"])})
        return self.after(e, bind(eqn, self.before(e, values)))


def _makes_references(e: Equation) -> bool:
    """Return whether a function with a derivative rule of its own creates references for internal use."""
    return e.primitive.custom_derivative and makes_references(e.jaxpr_eqn)


def _discharge_inside_rules(loss: ClosedJaxpr) -> ClosedJaxpr:
    """Return a loss of which `discharge_references` drops no derivative rule.

    Raises:
        ShardError: A function with such a rule receives a reference; the rule may write to the reference in the
            backward pass.
    """
    if not makes_references(loss) and not any(isinstance(x, jax.Ref) for x in loss.consts):
        return loss
    program = Program(loss)
    for e in program.equations:
        if e.primitive.custom_derivative and has_reference_inputs(e.jaxpr_eqn):
            line = user_line(e.jaxpr_eqn)
            where = "" if line is None else f" ({line})"
            raise ShardError(
                f"the loss hands a jax.Ref to a function with a derivative rule of its own{where}; pp and options for "
                "the gradients (--microbatches, --remat, --precision) don't know what the rule writes: use dp, fsdp or "
                "tp alone, or have the function return it"
            )
    return retrace(_DischargeInsideRules(program)) if any(map(_makes_references, program.equations)) else loss


def _is_plain_constant(x: Any) -> bool:
    """Return whether `x` is a concrete, addressable array of numbers or booleans, such as a mask."""
    dtype = getattr(x, "dtype", None)
    plain = dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.number))
    return plain and not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)


def _is_one(x: Any) -> bool:
    """Return whether `x` is a concrete 1."""
    return not isinstance(x, Tracer) and np.asarray(x) == 1


def gradient_equations(program: Program) -> list[Equation]:
    """Return the gradient calls of a captured step, in order."""
    return [e for e in program.equations if e.jaxpr_eqn.primitive is gradient_p]


class GradientEmitter(Emitter):
    """Emitter of a captured step that computes the gradient calls; subclasses override `take_gradient`.

    Attributes:
        scale: Factor on the losses while they are differentiated; None for no factor.
        gradients: All gradients computed so far.
    """

    scale: Any = None

    def __init__(self, program: Program):
        super().__init__(program)
        self.gradients: list = []

    def run_equation(self, e: Equation, values: list) -> list:
        if e.jaxpr_eqn.primitive is not gradient_p:
            return super().run_equation(e, values)
        outs = self.take_gradient(e, values)
        self.gradients += outs[e.params["gradient"].num_outputs :]
        return outs

    def take_gradient(self, e: Equation, operands: Sequence[Any]) -> list:
        """Return the results of one gradient call: value, aux, gradients."""
        call: GradientCall = e.params["gradient"]
        return value_and_gradients(call, Replay(Program(call.loss)), operands)


def value_and_gradients(call: GradientCall, loss: Any, operands: Sequence[Any], seed: Any = None) -> list:
    """Return value, aux and gradients of a loss, flat.

    Args:
        call: The captured call.
        loss: Function `loss(*operands) -> [value, *aux]`, normally an emitter of `call.loss`.
        operands: Operands of the call.
        seed: Cotangent of the value, by which all gradients are multiplied; None for 1.

    Raises:
        ShardError: The loss maps a function with a derivative rule of its own by `jax.vmap(axis_name=...)`. JAX can't
            trace the rule after the function.
    """
    n = call.num_closed_over

    def flat(*primals):
        value, *aux = loss(*operands[:n], *primals)
        return value, aux

    try:
        value, pullback, aux = jax.vjp(flat, *operands[n:], has_aux=True)
        return [value, *aux, *pullback(jnp.ones_like(value) if seed is None else jnp.asarray(seed, value.dtype))]
    except NameError as error:
        # JAX traces a derivative rule only here, when the axis name of the loss's `jax.vmap` is no longer bound.
        if (name := unbound_axis_name(error)) is None:
            raise
        raise ShardError(
            f"the loss maps a function with a derivative rule of its own by jax.vmap(axis_name={name!r}), whose rule "
            "JAX can't trace later than the function; pp and options for the gradients (--microbatches, --remat, "
            "--precision) do: use dp, fsdp or tp alone, or take the rule off the function"
        ) from error


def inline_gradients(captured: Traced, emitter: GradientEmitter) -> Traced:
    """Return the step of `captured` as a plain traced step, with gradients computed by `emitter`.

    Args:
        captured: A step traced with captured gradient calls.
        emitter: Emitter of the step that computes the gradient calls.
    """
    # The new gradient calls are marked, as an ordinary trace marks them.
    with hook_vjp(marking_vjp):
        closed = retrace(emitter)
    return Traced(closed, captured.in_paths, captured.out_paths, captured.consts)
