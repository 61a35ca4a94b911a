"""Trace any step once, whole: forward, backward and update in one jaxpr, gradient calls marked."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr
from jax.tree_util import GetAttrKey, KeyPath, SequenceKey, keystr

from .hooks import Vjp, gradients_by
from .memory_kinds import traced_as

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
        closed = jax.make_jaxpr(flat)(*map(traced_as, leaves))
    consts = tuple(closed.consts)
    names = [(GetAttrKey(_CLOSURE), SequenceKey(i)) for i in range(len(consts))]
    return Traced(hoisted(closed), (*names, *in_paths), paths, consts)


def hoisted(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` with its constants as its first inputs."""
    jaxpr = closed.jaxpr
    if not jaxpr.constvars:
        return closed
    debug = jaxpr.debug_info
    if hasattr(debug, "_replace"):
        debug = debug._replace(arg_names=None)
    return ClosedJaxpr(
        jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=debug), []
    )


def mark(tree: Any, name: str) -> Any:
    """The arrays of `tree` that have derivatives, named."""

    def one(x):
        inexact = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
        return checkpoint_name(x, name) if inexact else x

    return jax.tree.map(one, tree)


def marking(inner: Vjp) -> Vjp:
    """`jax.vjp` that names what it differentiates, its value, and what it gives back."""

    def vjp(fun, *primals, **options):
        out, back, *aux = inner(fun, *mark(primals, DIFFERENTIATED), **options)
        value = mark(out, VALUE) if getattr(out, "shape", None) == () else out
        return (value, lambda *cotangents: mark(back(*cotangents), GRADIENT), *aux)

    return vjp
