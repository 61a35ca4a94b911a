"""Host callbacks that raise, in a program of several devices.

An exception in a callback ends the program of the device that ran the callback. The other devices wait in their next
collective: XLA for the CPU aborts the process after 60 s, GPUs hang (jax 0.10 to 0.12). Here no callback raises inside
the program. The first exception is stored, zeros stand in for the results, later callbacks are skipped, and the call of
the program raises the exception once all devices are done.
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
from .jaxpr_rewrite import all_equations, rewrite_equations
from .primitives import shape_of

_CALLS = ("pure_callback", "io_callback", "debug_callback")
_PRINTS = "debug_print"
_PACKAGE = str(Path(__file__).parents[1])
_STEP_CALLER_FILE = str(Path(__file__).with_name("flatten_call.py"))  # calls the step while it is traced


def is_host_call(eqn: JaxprEqn) -> bool:
    """Return whether an equation calls a Python function on the host."""
    return eqn.primitive.name in (*_CALLS, _PRINTS)


def has_raising_callbacks(closed: ClosedJaxpr) -> bool:
    """Return whether a program, bodies included, calls host functions that may raise."""
    return any(_is_raising(eqn) for eqn in all_equations(closed.jaxpr))


def _is_raising(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a callback that may raise.

    A print may only where a format is applied to an array: `jax.debug.print("{:.2f}", x)`.
    """
    if eqn.primitive.name != _PRINTS:
        return eqn.primitive.name in _CALLS
    formats = [spec for _, _, spec, _ in string.Formatter().parse(eqn.params["fmt"])]
    return any(formats) and any(map(shape_of, eqn.invars))


class Callbacks:
    """Callbacks of one compiled program, and the first exception raised by a callback during a call.

    Args:
        donation_note: Note added to the exception where the call consumed donated inputs; None for a program without
            donation.

    Attributes:
        may_raise: Whether the program has callbacks that may raise; known once the program is traced.
    """

    def __init__(self, donation_note: str | None = None):
        self.may_raise = False
        self._donation_note = donation_note
        self._first: BaseException | None = None
        self._lock = threading.Lock()

    def suppress_errors(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Return `program`, to be traced, with callbacks that store exceptions and never raise.

        Cost: the program is traced twice.
        """

        def traced(*args: Any) -> Any:
            leaves, tree = jax.tree.flatten(args)
            flat = lambda *xs: program(*tree.unflatten(xs))  # noqa: E731
            # Callbacks are parameters of equations, so they can be replaced in a jaxpr only.
            closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
            safe = ClosedJaxpr(rewrite_equations(closed.jaxpr, lambda eqn: (self._catch_errors(eqn),)), closed.consts)
            return jax.tree.structure(shapes).unflatten(jaxpr_as_fun(safe)(*leaves))

        return functools.update_wrapper(traced, program, updated=())

    def reraise_errors(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `call` of the compiled program: wait for completion, then raise a callback's exception."""

        @calls_users_code
        def called(*args: Any, **kwargs: Any) -> Any:
            self._first = None
            outs = jax.block_until_ready(call(*args, **kwargs))
            # Outputs may be ready before callbacks have run.
            jax.effects_barrier()
            first, self._first = self._first, None  # its traceback keeps arrays alive
            if first is None:
                return outs
            raised = _to_jax_error(first, jax.tree.leaves(outs))
            if self._donation_note is not None:
                raised.add_note(self._donation_note)
            raise raised

        return called

    def _catch_errors(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return the equation with a callback that raises nothing."""
        if not _is_raising(eqn):
            return eqn
        # A print has no callback among its parameters, so it is first turned into an equation that has one.
        if eqn.primitive.name == _PRINTS:
            return self._catch_errors(_print_to_callback(eqn))
        self.may_raise = True
        avals = eqn.params.get("result_avals")
        return eqn.replace(
            params={**eqn.params, "callback": partial(self._call_unless_failed, eqn.params["callback"], avals)}
        )

    def _call_unless_failed(
        self, callback: Callable[..., Any], avals: Sequence[Any] | None, *args: Any
    ) -> Sequence[Any]:
        """Run a callback unless an earlier one raised, and return arrays for its results.

        Args:
            callback: Function of the user's, or the print.
            avals: Declared results; None for a callback without results, whose return value is ignored.
            args: Arguments of the callback.

        Returns:
            The checked results, or zeros of the declared shapes after an exception.
        """
        with self._lock:
            raised = self._first
        if raised is None:
            try:
                results = callback(*args)
                return () if avals is None else _check_results(results, avals)
            # Raised here, the exception would end the program of this device alone, and the other devices would wait in
            # their next collective.
            except BaseException as error:
                with self._lock:
                    self._first = error if self._first is None else self._first
        return [np.zeros(aval.shape, aval.dtype) for aval in avals or ()]


def _to_jax_error(error: BaseException, outs: Sequence[jax.Array]) -> BaseException:
    """Return the exception that JAX raises for a callback in the program of a single device, with the same text."""
    frames = error.__traceback__
    frames = None if frames is None else frames.tb_next  # without the frame of `_call_unless_failed`
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    platform = next((device.platform for x in outs for device in x.devices()), "cpu").capitalize()
    return jax.errors.JaxRuntimeError(f"INTERNAL: {platform}Callback error calling callback: {text}")


def _print_to_callback(eqn: JaxprEqn) -> JaxprEqn:
    """Return the equation of a print as a `jax.debug.callback` that prints."""
    prints = partial(eqn.primitive.impl, **eqn.params)  # pyright: ignore[reportAttributeAccessIssue]
    options = {name: eqn.params[name] for name in ("ordered", "partitioned")}
    jaxpr = jax.make_jaxpr(lambda *xs: jax.debug.callback(prints, *xs, **options))(*(v.aval for v in eqn.invars))
    (callback,) = jaxpr.eqns
    return eqn.replace(primitive=callback.primitive, params=callback.params, effects=callback.effects)


def _check_results(results: Any, avals: Sequence[Any]) -> Sequence[Any]:
    """Return the results of a callback as arrays.

    Raises:
        RuntimeError: The number, a shape or a dtype of the results differs from the declared avals.
    """
    # JAX checks results only after this point, too late for the exception to be stored.
    arrays = [np.asarray(x) for x in results]
    if len(arrays) != len(avals):
        raise RuntimeError(f"Mismatched number of outputs from callback. Expected: {len(avals)}, Actual: {len(arrays)}")
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


def reraise_equinox_errors(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` of a program as a function that waits for completion and raises `equinox.error_if` errors.

    The exception is the one raised by `equinox.filter_jit`.
    """

    @calls_users_code
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return jax.block_until_ready(call(*args, **kwargs))
        except jax.errors.JaxRuntimeError as error:
            if "_EquinoxRuntimeError: " not in str(error):
                raise
            raised = _to_equinox_error(error)
        raise raised

    return called


def _to_equinox_error(error: BaseException) -> BaseException:
    """Return the exception that `equinox.filter_jit` makes of an error of a program."""
    import equinox

    notes = [*getattr(error, "__notes__", ())]  # read in advance: JAX adds a note of its own below

    def fail() -> None:
        raise error

    try:
        # filter_jit rewords only errors raised inside of it.
        equinox.filter_jit(fail)()
    except RuntimeError as reworded:
        if reworded is error:
            return error
        error_of_step = type(reworded)(_strip_frames(str(reworded)))
    for note in notes:
        error_of_step.add_note(note)
    return error_of_step


def _strip_frames(text: str) -> str:
    """Return Equinox's message without the frames up to the step, and without frames of this package below."""
    before, separator, rest = text.partition("stack inside of JIT:\n")
    stack, marker, after = rest.partition("\nequinox.EquinoxRuntimeError:")
    frames = re.split(r'(?m)^(?=  File ")', stack)
    first = max((n + 1 for n, frame in enumerate(frames) if _STEP_CALLER_FILE in frame.split("\n")[0]), default=0)
    step_frames = [frame for frame in frames[first:] if _PACKAGE not in frame.split("\n")[0]]
    return f"{before}{separator}{''.join(step_frames)}{marker}{after}"
