"""Trace any step once, whole: forward, backward and update in one jaxpr, gradient calls marked."""

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
from .hooks import Vjp, gradients_by
from .memory_kinds import traced_as
from .primitives import hoisted
from .references import discharged

_CLOSURE = "closure"
DIFFERENTIATED, GRADIENT, VALUE = "jaxshard:differentiated", "jaxshard:gradient", "jaxshard:value"


@dataclass(frozen=True)
class Traced:
    """A step as one jaxpr of flat arrays.

    `closed` has no constants: arrays that the step closes over are its first inputs (`consts`).
    `in_paths` and `out_paths` name every input and output; an output that is written back in place
    (NNX) has the path of the input it replaces.
    """

    closed: ClosedJaxpr
    in_paths: tuple[KeyPath, ...]
    out_paths: tuple[KeyPath, ...]
    consts: tuple[Any, ...]

    @cached_property
    def known(self) -> dict[Hashable, Any]:
        """What has been worked out of it, for whoever asks again."""
        return {}


def path_name(path: KeyPath) -> str:
    """`state.params.Dense_0.kernel` for the key path of a leaf."""
    return keystr(path, simple=True, separator=".")


def is_closed_over(name: str) -> bool:
    """Is this the name of an array that the step closes over, which is none of its arguments?

    >>> is_closed_over("closure.0"), is_closed_over("closure.w"), is_closed_over("batch.0")
    (True, False, False)
    """
    first, _, rest = name.partition(".")
    return first == _CLOSURE and rest.isdecimal()


def trace(
    fun: Callable[..., tuple[list, Sequence[KeyPath]]],
    leaves: Sequence[Any],
    in_paths: Sequence[KeyPath],
    seen: Callable[[Vjp], Vjp] | None = None,
) -> Traced:
    """Trace `fun(*leaves) -> (array leaves, their paths)`; leaves are arrays, numbers or shapes.

    `seen`: what its gradient calls are made with in the place of `jax.vjp`, given that; None marks them.
    Raises whatever the step raises while it is traced.
    """
    paths: tuple[KeyPath, ...] = ()

    def flat(*xs):
        nonlocal paths
        outs, out_paths = fun(*xs)
        paths = tuple(out_paths)
        return outs

    with gradients_by(seen or marking):
        closed = discharged(jax.make_jaxpr(flat)(*map(traced_as, leaves)))
    consts = tuple(closed.consts)
    if any(isinstance(x, jax.Ref) for x in consts):
        raise ShardError(
            "the step reads or writes a jax.Ref that was made outside of it, which no strategy places: make it in the "
            "step (jax.new_ref), or pass its array and return the new one"
        )
    names = [(GetAttrKey(_CLOSURE), SequenceKey(i)) for i in range(len(consts))]
    return Traced(hoisted(closed), (*names, *in_paths), paths, consts)


def mark(tree: Any, name: str) -> Any:
    """The arrays of `tree` that have derivatives, named."""

    def one(x):
        array = hasattr(x, "dtype") and not isinstance(x, jax.Ref)
        return checkpoint_name(x, name) if array and jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(one, tree)


def marking(inner: Vjp) -> Vjp:
    """`jax.vjp` that names what it differentiates, its value, and what it gives back."""

    def vjp(fun, *primals, **options):
        out, back, *aux = inner(fun, *mark(primals, DIFFERENTIATED), **options)
        value = mark(out, VALUE) if getattr(out, "shape", None) == () else out
        return (value, _Marked(back), *aux)

    return vjp


@register_pytree_node_class
class _Marked:
    """What `jax.vjp` gives back, its gradients named. A pytree, as that is: a derivative rule may keep it."""

    def __init__(self, back: Any):
        self._back = back

    def __call__(self, *cotangents: Any) -> Any:
        return mark(self._back(*cotangents), GRADIENT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._back, name)

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self._back,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> "_Marked":
        return cls(*children)
