"""A step's gradient calls seen whole: each one equation, which holds the loss before it is differentiated."""

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
from .batching.walk import OPAQUE
from .emit import Emitter
from .hooks import Vjp, gradients_by
from .ir import Equation, Program
from .lines import users_line
from .primitives import bind, has_checks, hoisted, is_literal
from .references import discharged, makes_references, reads_references
from .replay import Replay, retraced
from .trace import Traced, marking
from .untraceable import unbound

gradient_p = Primitive(OPAQUE)
gradient_p.multiple_results = True


class _Here(threading.local):
    """Of the calling thread: whether gradient calls are made `at_once`, and none of them later."""

    at_once: bool = False


_here = _Here()


@dataclass(frozen=True, eq=False)
class Gradient:
    """One gradient call: operands `(closed over..., differentiated...)` -> `(value, aux..., gradients...)`.

    `loss` takes the operands and gives value and aux, all flat; it has no constants. The first `closed_over` operands
    are what the loss reads beside its differentiated arguments; `known`: those of them that are constants, by position.
    """

    loss: ClosedJaxpr
    closed_over: int
    known: Mapping[int, Any] = field(default_factory=dict)

    @property
    def differentiated(self) -> range:
        """The positions of the operands that the loss is differentiated with respect to."""
        return range(self.closed_over, len(self.loss.in_avals))

    @property
    def outs(self) -> int:
        """How many results come before the gradients: the value, and aux."""
        return len(self.loss.out_avals)


@gradient_p.def_abstract_eval
def _avals(*operands: Any, gradient: Gradient) -> list:
    return [*gradient.loss.out_avals, *operands[gradient.closed_over :]]


def _in_vmap(_operands: Any, _dims: Any, **_params: Any) -> Any:
    raise ShardError(
        "the step takes its gradient inside jax.vmap, one for each example or model; pp and options for the gradients "
        "(--microbatches, --remat, --precision) work on a call that is not inside one: use dp or fsdp alone"
    )


batching.primitive_batchers[gradient_p] = _in_vmap


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any], *, gradient: Gradient) -> tuple:
    """Differentiate a gradient call once more, as a product with a Hessian does: that is taken at once, of all
    examples, and the call itself later."""
    moved = tuple(map(ad.instantiate_zeros, tangents))
    loss = Replay(Program(gradient.loss))
    before, _here.at_once = _here.at_once, True
    try:
        _, changes = jax.jvp(lambda *xs: taken(gradient, loss, xs), tuple(primals), moved)
    finally:
        _here.at_once = before
    return gradient_p.bind(*primals, gradient=gradient), changes


ad.primitive_jvps[gradient_p] = _differentiated


def capturing(inner: Vjp) -> Vjp:
    """`jax.vjp` that leaves the calls of scalar functions of arrays to be made later, each as one `gradient_p`."""
    busy = False

    def vjp(fun, *primals, has_aux: bool = False, **options):
        nonlocal busy
        if busy or _here.at_once:  # a gradient inside the loss, or one that is differentiated
            return inner(fun, *primals, has_aux=has_aux, **options)
        leaves, tree = jax.tree.flatten(primals)
        moving = [i for i, x in enumerate(leaves) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
        aux_tree: Any = None

        def flat(*xs):
            nonlocal aux_tree
            full = list(leaves)
            for i, x in zip(moving, xs, strict=True):
                full[i] = x
            out = fun(*jax.tree.unflatten(tree, full))
            value, aux = out if has_aux else (out, ())
            arrays, aux_tree = jax.tree.flatten(aux)
            return [*jax.tree.leaves(value), *arrays]

        busy = True
        try:
            closed = jax.make_jaxpr(flat)(*(leaves[i] for i in moving))
        finally:
            busy = False
        naux = aux_tree.num_leaves
        if len(closed.out_avals) != naux + 1 or closed.out_avals[0].shape:
            return inner(fun, *primals, has_aux=has_aux, **options)
        if has_checks(closed):
            raise ShardError(
                "the loss has a checkify.check and gives its error to a checkify outside of the gradient call, which "
                "pp and options for the gradients (--microbatches, --remat, --precision) take later: have the loss "
                "return it (err, loss = checkify.checkify(loss)(...), has_aux=True), or use dp, fsdp or tp alone"
            )
        closed = _with_rules(closed)
        known = {k: x for k, x in enumerate(closed.consts) if _is_known(x)}
        references = [x for x in closed.consts if isinstance(x, jax.Ref)]
        call = Gradient(discharged(hoisted(closed)), len(closed.consts), known)
        values = [x[...] if isinstance(x, jax.Ref) else x for x in closed.consts]
        operands = [*values, *(leaves[i] for i in moving)]
        outs = gradient_p.bind(*operands, gradient=call)
        for reference, x in zip(references, outs[1 + naux : call.outs], strict=True):
            reference[...] = x
        handed_on = dict(zip(call.loss.jaxpr.invars, operands, strict=True))

        moved = iter(outs[call.outs :])
        nothing = (np.zeros(np.shape(x), jax.dtypes.float0) for x in leaves)
        back = _Back(tree.unflatten([next(moved) if i in moving else x for i, x in enumerate(nothing)]))
        pairs = zip(call.loss.jaxpr.outvars[1 : 1 + naux], outs[1 : 1 + naux], strict=True)
        aux = jax.tree.unflatten(aux_tree, [x if is_literal(v) else handed_on.get(v, x) for v, x in pairs])
        return (outs[0], back, aux) if has_aux else (outs[0], back)

    return vjp


@register_pytree_node_class
@dataclass(frozen=True, eq=False)
class _Back:
    """What `jax.vjp` gives back of a captured call, whose `gradients` are there. A pytree, as that is."""

    gradients: tuple[Any, ...]

    def __call__(self, cotangent: Any) -> tuple[Any, ...]:
        return (
            self.gradients if _is_one(cotangent) else jax.tree.map(partial(_times, cotangent), self.gradients)
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
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> "_Back":
        return cls(*children)


def _times(cotangent: Any, gradient: Any) -> Any:
    exact = gradient.dtype == jax.dtypes.float0
    return gradient if exact else gradient * cotangent.astype(gradient.dtype)


class _KeepingRules(Replay):
    """Runs a loss whose functions with derivative rules of their own turn their references into arrays themselves."""

    def equation(self, e: Equation, values: list) -> list:
        if not _has_references(e):
            return super().equation(e, values)
        eqn = e.eqn.replace(params={**e.params, "call_jaxpr": discharged(e.params["call_jaxpr"])})
        return self.after(e, bind(eqn, self.before(e, values)))


def _has_references(e: Equation) -> bool:
    """Return whether a function with a derivative rule of its own makes references that it alone uses."""
    return e.primitive.custom and makes_references(e.eqn)


def _with_rules(loss: ClosedJaxpr) -> ClosedJaxpr:
    """Return a loss of which `discharged` drops no derivative rule.

    Raises ShardError for a function with such a rule that is called with a reference: the rule may write it in the
    backward pass.
    """
    if not makes_references(loss) and not any(isinstance(x, jax.Ref) for x in loss.consts):
        return loss
    program = Program(loss)
    for e in program.equations:
        if e.primitive.custom and reads_references(e.eqn):
            line = users_line(e.eqn)
            where = "" if line is None else f" ({line})"
            raise ShardError(
                f"the loss hands a jax.Ref to a function with a derivative rule of its own{where}; pp and options for "
                "the gradients (--microbatches, --remat, --precision) don't know what the rule writes: use dp, fsdp or "
                "tp alone, or have the function return it"
            )
    return retraced(_KeepingRules(program)) if any(map(_has_references, program.equations)) else loss


def _is_known(x: Any) -> bool:
    """Is it an array of numbers or truth values, such as a mask, that the step was written with?"""
    dtype = getattr(x, "dtype", None)
    plain = dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.number))
    return plain and not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)


def _is_one(x: Any) -> bool:
    return not isinstance(x, Tracer) and np.asarray(x) == 1


def gradients_of(program: Program) -> list[Equation]:
    """The gradient calls of a captured step, in order."""
    return [e for e in program.equations if e.eqn.primitive is gradient_p]


class Taking(Emitter):
    """Runs a captured step with its gradients taken; a subclass says how in `take`.

    `scale`: what their losses are multiplied by meanwhile, None for nothing. `gradients`: all that were taken.
    """

    scale: Any = None

    def __init__(self, program: Program):
        super().__init__(program)
        self.gradients: list = []

    def equation(self, e: Equation, values: list) -> list:
        if e.eqn.primitive is not gradient_p:
            return super().equation(e, values)
        outs = self.take(e, values)
        self.gradients += outs[e.params["gradient"].outs :]
        return outs

    def take(self, e: Equation, operands: Sequence[Any]) -> list:
        """The results of one gradient call."""
        call: Gradient = e.params["gradient"]
        return taken(call, Replay(Program(call.loss)), operands)


def taken(call: Gradient, loss: Any, operands: Sequence[Any], seed: Any = None) -> list:
    """Value, aux and gradients of `loss(*operands) -> [value, *aux]`; the gradients are multiplied by `seed`."""
    n = call.closed_over

    def flat(*primals):
        value, *aux = loss(*operands[:n], *primals)
        return value, aux

    try:
        value, back, aux = jax.vjp(flat, *operands[n:], has_aux=True)
        return [value, *aux, *back(jnp.ones_like(value) if seed is None else jnp.asarray(seed, value.dtype))]
    except NameError as error:
        if (name := unbound(error)) is None:
            raise
        raise ShardError(
            f"the loss maps a function with a derivative rule of its own by jax.vmap(axis_name={name!r}), whose rule "
            "JAX can't trace later than the function; pp and options for the gradients (--microbatches, --remat, "
            "--precision) do: use dp, fsdp or tp alone, or take the rule off the function"
        ) from error


def with_gradients(captured: Traced, taking: Taking) -> Traced:
    """The step of `captured` with its gradients as `taking` takes them: a step as `trace` gives it."""
    with gradients_by(marking):
        closed = retraced(taking)
    return Traced(closed, captured.in_paths, captured.out_paths, captured.consts)
