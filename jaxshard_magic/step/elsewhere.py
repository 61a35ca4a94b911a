"""A lowered step compiled by the compiler of hardware that isn't attached."""

import io
import linecache
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jax._src.config import hlo_source_file_canonicalization_regex
from jax.sharding import Mesh
from jax.stages import Lowered

from ..cell_files import OF_ONE_SESSION
from ..errors import ShardError
from ..places import place
from ..program.lines import is_users
from ..program.thread_state import replaced
from ..targets import Built, Target, compiled

_OF_OPERATION = "JaxStackTraceBeforeTransformation"  # no public name
_CALLS = {
    "debug_print": "jax.debug.print",
    "debug_callback": "jax.debug.callback",
    "pure_callback": "jax.pure_callback",
    "io_callback": "jax.experimental.io_callback",
}


def elsewhere(lowering: Lowered, target: Target, mesh: Mesh, limit_s: float) -> Built:
    """The program as the target's compiler makes it, lowered under `canonical`, with Python's own names of files."""
    module: Any = lowering.compiler_ir("stablehlo")
    data = io.BytesIO()
    module.operation.write_bytecode(data)
    order = [device.id for device in mesh.devices.flat]
    built = compiled(
        target, data.getvalue(), order, tupled=_arguments(lowering)["tuple_args"], limit_s=limit_s
    )
    text = built.text
    for file in reversed(list(linecache.cache)):  # of several runs of one cell, the last has defined the step
        if (name := re.sub(OF_ONE_SESSION, "", file)) != file:
            text = text.replace(f'"{name}"', f'"{file}"')
    return replace(built, text=text)


@contextmanager
def canonical() -> Iterator[None]:
    """Steps that are lowered meanwhile name their cells' files without what is of one session; what jax can't lower
    without the hardware is a `ShardError`. jax has no public name for a setting of one thread."""
    try:
        with replaced(hlo_source_file_canonicalization_regex, OF_ONE_SESSION):
            yield
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> ShardError:
    """One line of why jax lowers a step for no hardware that isn't attached, with the call that is to blame."""
    line, call = _blamed(error)
    if call is not None:
        return ShardError(
            f"{line} calls Python while the step runs ({call}), which jax lowers for no GPU that is not attached: take "
            "it out, or compile for a TPU slice"
        )
    if "ordered effects are not supported" in str(error):
        return ShardError(
            "a call to Python with ordered=True runs on one device alone: leave ordered out, or take the call out"
        )
    said = " ".join(str(error).partition("\n")[0].split())
    return ShardError(
        f"{line} asks for what jax lowers for no hardware like this that is not attached: {said}"
    )


def _blamed(error: BaseException) -> tuple[str, str | None]:
    """The user's line and the callback it makes, from the traceback that jax keeps of an operation it can't lower."""
    cause: BaseException | None = error
    while cause is not None and type(cause).__name__ != _OF_OPERATION:
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return "the step", None
    frames = [(f.f_code, number) for f, number in traceback.walk_tb(cause.__traceback__)]
    lines = [(code.co_filename, number) for code, number in frames if is_users(code.co_filename)]
    called = (_CALLS[code.co_name] for code, _ in reversed(frames) if code.co_name in _CALLS)
    return place(*lines[-1]) if lines else "the step", next(called, None)


def reads(lowering: Lowered) -> tuple[bool, ...]:
    """Whether the program reads each of its arguments; jax has no public name for those it drops."""
    given = _arguments(lowering)
    kept = given["kept_var_idx"]
    return tuple(i in kept for i in range(lowering.in_tree.num_leaves))


def _arguments(lowering: Any) -> dict[str, Any]:
    return lowering._lowering.compile_args
