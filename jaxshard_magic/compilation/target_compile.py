"""Compile a lowered step with the compiler of hardware that isn't attached."""

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

from ..code_locations import OF_ONE_SESSION, location_text
from ..errors import ShardError
from ..program.source_lines import is_user_file
from ..program.thread_state import override_setting
from ..targets import CompileResult, Target, compile_for_target

# Name of JAX's exception with the traceback of an operation; the class is not public.
_OF_OPERATION = "JaxStackTraceBeforeTransformation"
_CALLS = {
    "debug_print": "jax.debug.print",
    "debug_callback": "jax.debug.callback",
    "pure_callback": "jax.pure_callback",
    "io_callback": "jax.experimental.io_callback",
}


def compile_lowered_for_target(lowering: Lowered, target: Target, mesh: Mesh, limit_s: float) -> CompileResult:
    """Compile a program with the target's own compiler.

    Args:
        lowering: Lowered step, made under `canonical_source_files`.
        target: Target hardware.
        mesh: Mesh of target devices.
        limit_s: Time limit in seconds.

    Returns:
        The compiled program, with Python's own file names in its text.
    """
    module: Any = lowering.compiler_ir("stablehlo")
    data = io.BytesIO()
    module.operation.write_bytecode(data)
    order = [device.id for device in mesh.devices.flat]
    built = compile_for_target(
        target, data.getvalue(), order, tupled=_arguments(lowering)["tuple_args"], limit_s=limit_s
    )
    text = built.text
    # Several runs of a cell have the same name; the last one, which has defined the step, comes first here.
    for file in reversed(list(linecache.cache)):
        if (name := re.sub(OF_ONE_SESSION, "", file)) != file:
            text = text.replace(f'"{name}"', f'"{file}"')
    return replace(built, text=text)


@contextmanager
def canonical_source_files() -> Iterator[None]:
    """Lower steps of this thread with file names of cells that don't change from session to session.

    Raises ShardError for operations that JAX can't lower without the hardware.
    """
    try:
        # JAX has no public name for a setting of one thread.
        with override_setting(hlo_source_file_canonicalization_regex, OF_ONE_SESSION):
            yield
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> ShardError:
    """Return an error with the reason why JAX can't lower a step for hardware that isn't attached, and the call to
    blame."""
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
    return ShardError(f"{line} asks for what jax lowers for no hardware like this that is not attached: {said}")


def _blamed(error: BaseException) -> tuple[str, str | None]:
    """Return the user's line and the callback made there, from JAX's traceback of an operation not lowered."""
    cause: BaseException | None = error
    while cause is not None and type(cause).__name__ != _OF_OPERATION:
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return "the step", None
    frames = [(f.f_code, number) for f, number in traceback.walk_tb(cause.__traceback__)]
    lines = [(code.co_filename, number) for code, number in frames if is_user_file(code.co_filename)]
    called = (_CALLS[code.co_name] for code, _ in reversed(frames) if code.co_name in _CALLS)
    return location_text(*lines[-1]) if lines else "the step", next(called, None)


def read_argument_mask(lowering: Lowered) -> tuple[bool, ...]:
    """Return for each argument whether the program reads it."""
    # JAX has no public name for the arguments that it drops.
    arguments = _arguments(lowering)
    read_positions = arguments["kept_var_idx"]
    return tuple(i in read_positions for i in range(lowering.in_tree.num_leaves))


def _arguments(lowering: Any) -> dict[str, Any]:
    """Return JAX's private compile arguments of a lowering."""
    return lowering._lowering.compile_args
