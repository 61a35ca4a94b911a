"""A jaxpr with its equations changed one by one, those of the bodies in it as well, wherever an equation holds them."""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from .capture import Gradient

Change = Callable[[JaxprEqn], Sequence[JaxprEqn]]  # the equations in the place of one


def changed(jaxpr: Any, change: Change) -> Any:
    """`jaxpr` with every equation replaced by those of `change`, before their bodies; itself where nothing changes."""
    eqns = [_inside(new, change) for eqn in jaxpr.eqns for new in change(eqn)]
    same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def every(jaxpr: Any) -> Iterator[JaxprEqn]:
    """The equations of `jaxpr` and of the bodies in it."""
    found: list[JaxprEqn] = []

    def note(eqn: JaxprEqn) -> tuple[JaxprEqn]:
        found.append(eqn)
        return (eqn,)

    changed(jaxpr, note)
    return iter(found)


def _inside(eqn: JaxprEqn, change: Change) -> JaxprEqn:
    params = {key: _param(value, change) for key, value in eqn.params.items()}
    if all(params[key] is value for key, value in eqn.params.items()):
        return eqn
    return eqn.replace(params=params)


def _param(value: Any, change: Change) -> Any:
    """A parameter with the bodies that it is, or holds, changed; itself where none is."""
    if isinstance(value, ClosedJaxpr):
        jaxpr = changed(value.jaxpr, change)
        return value if jaxpr is value.jaxpr else ClosedJaxpr(jaxpr, value.consts)
    if isinstance(value, Gradient):
        loss = _param(value.loss, change)
        return value if loss is value.loss else replace(value, loss=loss)
    if isinstance(value, tuple):
        each = tuple(_param(x, change) for x in value)
        return value if all(a is b for a, b in zip(each, value, strict=True)) else each
    return changed(value, change) if hasattr(value, "eqns") else value
