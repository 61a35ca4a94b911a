"""A step that jax can't trace: which line of the user's own asks for what, and what to write instead."""

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import jax

from ..errors import ShardError
from ..places import place
from .lines import is_users

# Most particular first: the errors of indexing and of branching are kinds of ConcretizationTypeError.
_ADVICE = (
    (jax.errors.TracerArrayConversionError, "hands an array of the step to numpy or the host"),
    (jax.errors.TracerBoolConversionError, "branches on the value of an array"),
    (jax.errors.TracerIntegerConversionError, "uses the value of an array as an index or a size"),
    (
        jax.errors.NonConcreteBooleanIndexError,
        "picks elements by a mask, so that the shape depends on values",
    ),
    (jax.errors.ConcretizationTypeError, "reads the value of an array"),
    (
        jax.errors.UnexpectedTracerError,
        "uses an array that an earlier call left behind, in a list or a global",
    ),
)
_FIXES = {
    jax.errors.TracerBoolConversionError: "use jnp.where or jax.lax.cond, or move the branch out of the step",
    jax.errors.TracerIntegerConversionError: "pass that number as a static argument or close over it",
    jax.errors.NonConcreteBooleanIndexError: "use jnp.where(mask, x, 0) and keep the shape",
    jax.errors.UnexpectedTracerError: "return the array from the step and keep it outside",
}
_PLACING = (  # what jax says of meshes, what the user's line does then, and what would do instead
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
    (
        "cannot contain axis names that are of type Auto",
        "places an array along an axis as of an explicit mesh, and the axes of a strategy's mesh are not explicit",
        "use jax.lax.with_sharding_constraint, or take the placement out",
    ),
)
_OF_TYPE = (
    (
        "unsupported format string passed to DynamicJaxprTracer",
        "writes the value of an array as text",
        "use jax.debug.print, or return the array and write it outside",
    ),
    (
        "do not support in-place item assignment",
        "changes elements of an array in place",
        "use x = x.at[i].set(value)",
    ),
)
_UNBOUND = "unbound axis name: "
_OUT = "return the array from the step and read it outside"


@contextmanager
def explained(step: str) -> Iterator[None]:
    """A context in which `step` is traced: what jax can't trace becomes a `ShardError` that names the line.

    Errors of the user's own code pass through.
    """
    try:
        yield
    except Exception as error:
        doing, fix = _kind(error)
        if doing is None:
            raise
        line = _line(error.__traceback__)
        raise ShardError(f"{step} can't be compiled: {line} {doing}; {fix}", fix=fix) from error


def unbound(error: BaseException) -> str | None:
    """The axis name that a trace has met and that nothing has bound; None for other errors."""
    text = str(error)
    if isinstance(error, NameError) and _UNBOUND in text:
        return text.split(_UNBOUND, 1)[1].split(". ")[0].strip()
    return None


def _kind(error: BaseException) -> tuple[str | None, str]:
    for kind, doing in _ADVICE:
        if isinstance(error, kind):
            return doing, _FIXES.get(kind, _OUT)
    if (name := unbound(error)) is not None:
        return (
            f"works along the axis '{name}' of many devices, each with its own part",
            "use %%shard pmap, which runs such a step, or take out the collectives",
        )
    for said, doing, fix in _PLACING:
        if isinstance(error, ValueError) and said in str(error):
            return doing, fix
    if "is not available on traced array" in str(error):
        return "asks an array of the step for what only finished arrays have", _OUT
    for said, doing, fix in _OF_TYPE:
        if isinstance(error, TypeError) and said in str(error):
            return doing, fix
    if type(error).__name__ == "TraceContextError" or "from different trace level" in str(error):  # flax's
        return (
            "changes an NNX object that is not among the step's arguments",
            "pass the object as an argument",
        )
    return None, ""


def _line(traceback: TracebackType | None) -> str:
    """`cell [3], line 4, `if loss > 3:`,` for the innermost line that is no library's."""
    innermost = None
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if is_users(name):
            innermost = name, traceback.tb_lineno, traceback.tb_frame.f_globals
        traceback = traceback.tb_next
    if innermost is None:
        return "it"
    name, number, names = innermost
    text = linecache.getline(name, number, names).strip()
    return f"{place(name, number)}, `{text}`," if text else place(name, number)
