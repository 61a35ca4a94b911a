"""Trace a step once: forward, backward and update in a single jaxpr, with gradient calls marked."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr
from jax.tree_util import GetAttrKey, KeyPath, SequenceKey, keystr, register_pytree_node_class

from ..errors import ShardError
from .hooks import Vjp, hook_vjp
from .memory_kinds import aval_for_tracing
from .primitives import hoist_constants
from .references import discharge_references

_CLOSURE = "closure"
# Names for `checkpoint_name`: an identity that stays in the jaxpr and compiles to nothing.
DIFFERENTIATED, GRADIENT, VALUE = "jaxshard:differentiated", "jaxshard:gradient", "jaxshard:value"


@dataclass(frozen=True)
class Traced:
    """Step as a jaxpr over flat arrays.

    Attributes:
        closed: Jaxpr without constants: arrays that the step closes over are its first inputs.
        in_paths: Key path of every input.
        out_paths: Key path of every output. An output written back in place (NNX) has the path of the input it
            replaces.
        consts: Arrays that the step closes over.
    """

    closed: ClosedJaxpr
    in_paths: tuple[KeyPath, ...]
    out_paths: tuple[KeyPath, ...]
    consts: tuple[Any, ...]

    @cached_property
    def cache(self) -> dict[Hashable, Any]:
        """Cache for results derived from the trace."""
        return {}


def path_name(path: KeyPath) -> str:
    """Return a key path as text, such as `state.params.Dense_0.kernel`."""
    return keystr(path, simple=True, separator=".")


def is_closed_over(name: str) -> bool:
    """Return whether this is the name of an array that the step closes over rather than an argument.

    >>> is_closed_over("closure.0"), is_closed_over("closure.w"), is_closed_over("batch.0")
    (True, False, False)
    """
    first, _, rest = name.partition(".")
    return first == _CLOSURE and rest.isdecimal()


def trace(
    fun: Callable[..., tuple[list, Sequence[KeyPath]]],
    leaves: Sequence[Any],
    in_paths: Sequence[KeyPath],
    wrap_vjp: Callable[[Vjp], Vjp] | None = None,
) -> Traced:
    """Trace a function of flat arrays.

    Args:
        fun: `fun(*leaves)` returns flat arrays and their key paths.
        leaves: Arrays, numbers or shapes.
        in_paths: Key path of each leaf.
        wrap_vjp: Wrapper of `jax.vjp` for the step's gradient calls; None marks them.

    Raises:
        ShardError: The step uses a `jax.Ref` made outside of it.
        Exception: Anything that the step raises while traced.
    """
    paths: tuple[KeyPath, ...] = ()

    def flat(*xs):
        nonlocal paths
        outs, out_paths = fun(*xs)
        paths = tuple(out_paths)
        return outs

    with hook_vjp(wrap_vjp or marking_vjp):
        closed = discharge_references(jax.make_jaxpr(flat)(*map(aval_for_tracing, leaves)))
    consts = tuple(closed.consts)
    if any(isinstance(x, jax.Ref) for x in consts):
        raise ShardError(
            "the step closes over a jax.Ref, which no strategy places: pass it as an argument, or make it in the step "
            "(jax.new_ref)"
        )
    names = [(GetAttrKey(_CLOSURE), SequenceKey(i)) for i in range(len(consts))]
    return Traced(hoist_constants(closed), (*names, *in_paths), paths, consts)


def mark_arrays(tree: Any, name: str) -> Any:
    """Name all differentiable arrays of a tree with `checkpoint_name`."""

    def one(x):
        array = hasattr(x, "dtype") and not isinstance(x, jax.Ref)
        return checkpoint_name(x, name) if array and jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(one, tree)


def marking_vjp(inner: Vjp) -> Vjp:
    """Wrap `jax.vjp` to name its differentiated inputs, its value and its gradients."""

    def vjp(fun, *primals, **options):
        out, back, *aux = inner(fun, *mark_arrays(primals, DIFFERENTIATED), **options)
        # Only a scalar can be a loss.
        value = mark_arrays(out, VALUE) if getattr(out, "shape", None) == () else out
        return (value, _MarkedVjp(back), *aux)

    return vjp


@register_pytree_node_class
class _MarkedVjp:
    """Result of `jax.vjp` that names its gradients.

    A pytree, as the original is: a custom derivative rule may keep it among its residuals.
    """

    def __init__(self, back: Any):
        self._back = back

    def __call__(self, *cotangents: Any) -> Any:
        return mark_arrays(self._back(*cotangents), GRADIENT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._back, name)

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self._back,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> "_MarkedVjp":
        return cls(*children)
