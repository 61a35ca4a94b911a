"""Explain steps that JAX cannot trace: the user's line, what it asks for, and what to write instead."""

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import jax

from ..code_locations import location_text
from ..errors import ShardError
from .source_lines import is_user_file

# Most specific first: the errors of indexing and branching are subclasses of ConcretizationTypeError.
_CAUSES = (
    (jax.errors.TracerArrayConversionError, "hands an array of the step to numpy or the host"),
    (jax.errors.TracerBoolConversionError, "branches on the value of an array"),
    (jax.errors.TracerIntegerConversionError, "uses the value of an array as an index or a size"),
    (jax.errors.NonConcreteBooleanIndexError, "picks elements by a mask, so that the shape depends on values"),
    (jax.errors.ConcretizationTypeError, "reads the value of an array"),
    (jax.errors.UnexpectedTracerError, "uses an array that an earlier call left behind, in a list or a global"),
)
_FIXES = {
    jax.errors.TracerBoolConversionError: "use jnp.where or jax.lax.cond, or move the branch out of the step",
    jax.errors.TracerIntegerConversionError: "pass that number as a static argument or close over it",
    jax.errors.NonConcreteBooleanIndexError: "use jnp.where(mask, x, 0) and keep the shape",
    jax.errors.UnexpectedTracerError: "return the array from the step and keep it outside",
}
_MESH_MESSAGES = (  # part of JAX's message, what the user's line does, fix
    (
        "`set_mesh` can only be used outside",
        "sets a mesh inside the step",
        "set it around the call, or leave it to the strategy",
    ),
    (
        "is not found in mesh: ",
        "places an array along an axis that the strategy's mesh has not",
        "add that axis to the mesh, with 1 device if need be, or take the placement out",
    ),
)
_TYPE_ERROR_MESSAGES = (
    (
        "unsupported format string passed to DynamicJaxprTracer",
        "writes the value of an array as text",
        "use jax.debug.print, or return the array and write it outside",
    ),
    ("do not support in-place item assignment", "changes elements of an array in place", "use x = x.at[i].set(value)"),
)
_UNBOUND_AXIS = "unbound axis name: "
_DEFAULT_FIX = "return the array from the step and read it outside"


@contextmanager
def explain_trace_errors(step: str) -> Iterator[None]:
    """Return a context that turns JAX's trace errors into a `ShardError` naming the user's line.

    Errors of the user's own code pass through.

    Args:
        step: Name of the step, for the message.
    """
    try:
        yield
    except Exception as error:
        doing, fix = _cause_and_fix(error)
        if doing is None:
            raise
        line = _user_line(error.__traceback__)
        raise ShardError(f"{step} can't be compiled: {line} {doing}; {fix}", fix=fix) from error


def unbound_axis_name(error: BaseException) -> str | None:
    """Return the unbound axis name of a trace error; None for other errors."""
    text = str(error)
    if isinstance(error, NameError) and _UNBOUND_AXIS in text:
        return text.split(_UNBOUND_AXIS, 1)[1].split(". ")[0].strip()
    return None


def _cause_and_fix(error: BaseException) -> tuple[str | None, str]:
    """Return what the user's line does, and a fix; None and "" for an error that is not JAX's."""
    for error_type, doing in _CAUSES:
        if isinstance(error, error_type):
            return doing, _FIXES.get(error_type, _DEFAULT_FIX)
    if (name := unbound_axis_name(error)) is not None:
        return (
            f"works along the axis '{name}' of many devices, each with its own part",
            "use %%shard pmap, which runs such a step, or take out the collectives",
        )
    for jax_message, doing, fix in _MESH_MESSAGES:
        if isinstance(error, ValueError) and jax_message in str(error):
            return doing, fix
    if "is not available on traced array" in str(error):
        return "asks an array of the step for what only finished arrays have", _DEFAULT_FIX
    for jax_message, doing, fix in _TYPE_ERROR_MESSAGES:
        if isinstance(error, TypeError) and jax_message in str(error):
            return doing, fix
    if type(error).__name__ == "TraceContextError" or "from different trace level" in str(error):  # Flax's
        return ("changes an NNX object that is not among the step's arguments", "pass the object as an argument")
    return None, ""


def _user_line(traceback: TracebackType | None) -> str:
    """Return the innermost line outside of libraries, as ``cell [3], line 4, `if loss > 3:`,``."""
    innermost = None
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if is_user_file(name):
            innermost = name, traceback.tb_lineno, traceback.tb_frame.f_globals
        traceback = traceback.tb_next
    if innermost is None:
        return "it"
    name, number, names = innermost
    text = linecache.getline(name, number, names).strip()
    return f"{location_text(name, number)}, `{text}`," if text else location_text(name, number)
