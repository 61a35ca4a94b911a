"""Host callbacks that raise, in a program of several devices.

An exception in a callback ends the program of the one device that ran it. The others wait for it in their next
collective: XLA for the CPU aborts the process after 60 s, GPUs hang (jax 0.10 to 0.12). So no callback raises here.
What one raises is kept, zeros go on in the place of its results, no other callback runs any more, and the call of the
program raises it once all devices are done.
"""

import functools
import re
import string
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from ..errors import calls_users_code
from .each_equation import changed, every
from .primitives import shape_of

_CALLS = ("pure_callback", "io_callback", "debug_callback")
_PRINTS = "debug_print"
_PACKAGE = str(Path(__file__).parents[1])
_CALLER = str(Path(__file__).with_name("peel.py"))  # calls the step where it is traced


def calls_host(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a call of a function of the host."""
    return eqn.primitive.name in (*_CALLS, _PRINTS)


def may_raise(closed: ClosedJaxpr) -> bool:
    """Return whether a program calls functions of the host that may raise."""
    return any(_may_raise(eqn) for eqn in every(closed.jaxpr))


def _may_raise(eqn: JaxprEqn) -> bool:
    """Of prints those that format an array as if it were a number: `jax.debug.print("{:.2f}", x)`."""
    if eqn.primitive.name != _PRINTS:
        return eqn.primitive.name in _CALLS
    formats = [spec for _, _, spec, _ in string.Formatter().parse(eqn.params["fmt"])]
    return any(formats) and any(map(shape_of, eqn.invars))


class Callbacks:
    """The callbacks of one compiled program, and what the first of them raised that raised in a call.

    `any`: whether the program has some that may raise, once it is traced. `lost`: a line for a call that raised after
    the program took over some of its inputs; None where it takes none.
    """

    def __init__(self, lost: str | None = None):
        self.any = False
        self._lost = lost
        self._first: BaseException | None = None
        self._lock = threading.Lock()

    def caught(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """`program`, to be traced, with callbacks that raise nothing. It is traced twice."""

        def traced(*args: Any) -> Any:
            leaves, tree = jax.tree.flatten(args)
            flat = lambda *xs: program(*tree.unflatten(xs))  # noqa: E731
            closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
            safe = ClosedJaxpr(changed(closed.jaxpr, lambda eqn: (self._safe(eqn),)), closed.consts)
            return jax.tree.structure(shapes).unflatten(jaxpr_as_fun(safe)(*leaves))

        return functools.update_wrapper(traced, program, updated=())

    def raising(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` of the compiled program, which waits for its end and raises what a callback raised meanwhile."""

        @calls_users_code
        def called(*args: Any, **kwargs: Any) -> Any:
            self._first = None
            outs = jax.block_until_ready(call(*args, **kwargs))
            jax.effects_barrier()
            first, self._first = self._first, None  # its frames hold arrays
            if first is None:
                return outs
            raised = _as_jax_has_it(first, jax.tree.leaves(outs))
            if self._lost is not None:
                raised.add_note(self._lost)
            raise raised

        return called

    def _safe(self, eqn: JaxprEqn) -> JaxprEqn:
        if not _may_raise(eqn):
            return eqn
        if eqn.primitive.name == _PRINTS:
            return self._safe(_as_callback(eqn))
        self.any = True
        avals = eqn.params.get("result_avals")
        return eqn.replace(
            params={**eqn.params, "callback": partial(self._run, eqn.params["callback"], avals)}
        )

    def _run(self, callback: Callable[..., Any], avals: Sequence[Any] | None, *args: Any) -> Sequence[Any]:
        """The results of a callback; None for `avals` where it has none and what it returns is left."""
        with self._lock:
            raised = self._first
        if raised is None:
            try:
                results = callback(*args)
                return () if avals is None else _checked(results, avals)
            except BaseException as error:
                with self._lock:
                    self._first = error if self._first is None else self._first
        return [np.zeros(aval.shape, aval.dtype) for aval in avals or ()]


def _as_jax_has_it(error: BaseException, outs: Sequence[jax.Array]) -> BaseException:
    """The error that the program of one device raises, in its words."""
    frames = error.__traceback__
    frames = None if frames is None else frames.tb_next  # without `_run`
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    platform = next((device.platform for x in outs for device in x.devices()), "cpu").capitalize()
    return jax.errors.JaxRuntimeError(f"INTERNAL: {platform}Callback error calling callback: {text}")


def _as_callback(eqn: JaxprEqn) -> JaxprEqn:
    """A print as a callback that prints."""
    prints = partial(eqn.primitive.impl, **eqn.params)  # pyright: ignore[reportAttributeAccessIssue]
    how = {name: eqn.params[name] for name in ("ordered", "partitioned")}
    made = jax.make_jaxpr(lambda *xs: jax.debug.callback(prints, *xs, **how))(*(v.aval for v in eqn.invars))
    (callback,) = made.eqns
    return eqn.replace(primitive=callback.primitive, params=callback.params, effects=callback.effects)


def _checked(results: Any, avals: Sequence[Any]) -> Sequence[Any]:
    """The results of a callback as arrays, of the shapes and dtypes that it was said to have; jax looks at them where
    it is too late to catch what is wrong."""
    arrays = [np.asarray(x) for x in results]
    if len(arrays) != len(avals):
        raise RuntimeError(
            f"Mismatched number of outputs from callback. Expected: {len(avals)}, Actual: {len(arrays)}"
        )
    for i, (array, aval) in enumerate(zip(arrays, avals, strict=True)):
        if array.shape != aval.shape:
            raise RuntimeError(
                f"Incorrect output shape for return value #{i}: Expected: {aval.shape}, Actual: {array.shape}"
            )
        if jax.dtypes.canonicalize_dtype(array.dtype) != aval.dtype:
            raise RuntimeError(
                f"Incorrect output dtype for return value #{i}: Expected: {aval.dtype}, Actual: {array.dtype}"
            )
    return arrays


def with_errors_of_equinox(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` of a program, which waits for its end and raises what `equinox.error_if` raised in it as
    `equinox.filter_jit` does."""

    @calls_users_code
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return jax.block_until_ready(call(*args, **kwargs))
        except jax.errors.JaxRuntimeError as error:
            if "_EquinoxRuntimeError: " not in str(error):
                raise
            raised = _as_equinox_has_it(error)
        raise raised

    return called


def _as_equinox_has_it(error: BaseException) -> BaseException:
    """What `equinox.filter_jit` makes of an error of a program's."""
    import equinox

    notes = [*getattr(error, "__notes__", ())]  # jax adds one

    def fail() -> None:
        raise error

    try:
        equinox.filter_jit(fail)()
    except RuntimeError as reworded:
        if reworded is error:
            return error
        made = type(reworded)(_of_the_step(str(reworded)))
    for note in notes:
        made.add_note(note)
    return made


def _of_the_step(text: str) -> str:
    """Equinox's message without the frames that lead to the step, and without ours in it."""
    before, inside, rest = text.partition("stack inside of JIT:\n")
    stack, named, after = rest.partition("\nequinox.EquinoxRuntimeError:")
    frames = re.split(r'(?m)^(?=  File ")', stack)
    first = max((n + 1 for n, frame in enumerate(frames) if _CALLER in frame.split("\n")[0]), default=0)
    own = [frame for frame in frames[first:] if _PACKAGE not in frame.split("\n")[0]]
    return f"{before}{inside}{''.join(own)}{named}{after}"
