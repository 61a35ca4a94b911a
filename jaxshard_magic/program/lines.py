"""Whose line an equation comes from: the calls that led to it, also through the bodies that jax traces apart."""

import os
import site
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
from jax._src.config import compilation_cache_include_metadata_in_key, traceback_in_locations_limit
from jax._src.source_info_util import user_context  # keeps lines on re-emitted equations; no public form
from jax.extend.core import JaxprEqn

from ..errors import ShardError, without_our_frames
from ..places import place
from ..temporary import Joined
from .thread_state import replaced

_config: Any = jax.config
_OURS = str(Path(__file__).resolve().parents[1])
_STEP = str(Path(_OURS) / "step") + os.sep
_TRACING = {"jax", "jaxlib", "flax", "equinox"}
_BETWEEN = {*_TRACING, "optax", "contextlib", "functools", __name__.partition(".")[0]}
_DEMO = str(Path(_OURS) / "demo.py")  # its step is read as a user's
# What steps are made with: a library also where it is installed as an editable copy, as a user's own package may be.
_MODELS = (
    "flax",
    "haiku",
    "equinox",
    "keras",
    "penzai",
    "numpyro",
    "blackjax",
    "diffrax",
    "lineax",
    "optimistix",
)
_AROUND = ("optax", "jaxopt", "chex", "orbax", "distrax", "einops", "jaxtyping", "beartype", "IPython")
_LIBRARIES = ("jax", "jaxlib", *_MODELS, *_AROUND)
_WRITTEN = ("<frozen", "<@", "<attrs ", "<decorator-gen", "<makefun", "<__array_function__")  # by libraries

__all__ = [
    "Calls",
    "is_ours",
    "is_users",
    "is_users_class",
    "lines_kept",
    "runs_steps",
    "traced_within",
    "user_context",
    "users_frame",
    "users_line",
    "users_lines_alone",
    "users_place",
]


def lines_kept() -> Joined:
    """Programs that this thread lowers and compiles meanwhile tell the user's line of each operation: with all calls
    that led to it, where jax keeps ten, and never from jax's cache on disk, which would give the lines of an earlier
    text. jax has no public names for settings of one thread."""
    return Joined(
        replaced(traceback_in_locations_limit, -1), replaced(compilation_cache_include_metadata_in_key, True)
    )


class Calls:
    """Tracebacks of equations inside bodies, joined to that of the equation whose body it is.

    jax begins a traceback anew in each function that it traces by itself (jit, scan, custom rules) and shares it
    between all calls; inside a library's function it has none of the user's lines at all.
    """

    def __init__(self) -> None:
        self._joined: dict[tuple[int, int], tuple[Any, Any, Any]] = {}  # with what the ids are of

    def join(self, outer: Any, inner: Any) -> Any:
        """The traceback of an equation `inner` in the body of one with `outer`; each a jax traceback or None."""
        if outer is None or inner is None:
            return inner if outer is None else outer
        key = id(outer), id(inner)
        if key not in self._joined:
            self._joined[key] = _joined(outer, inner), outer, inner
        return self._joined[key][0]


def _joined(outer: Any, inner: Any) -> Any:
    code, around = inner.raw_frames()[0], outer.raw_frames()[0]
    whole = len(code) > len(around) and list(code[-len(around) :]) == list(around)
    return inner if whole else inner + outer


def is_ours(file: str) -> bool:
    """Is a file, by the name that Python knows it by, of this package?"""
    return file.startswith(_OURS) and file != _DEMO


def runs_steps(file: str) -> bool:
    """Is it a file of this package that stands between a step and whoever calls it?"""
    return file.startswith(_STEP)


@cache
def is_users(file: str) -> bool:
    """Is a file, by the name that Python knows it by, neither a library's nor ours?"""
    if file == _DEMO:
        return True
    if not file or file.startswith(_WRITTEN) or is_ours(file):
        return False
    parts = Path(file).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return False
    return not any(file.startswith(place) for place in _library_places())


def is_users_class(cls: type) -> bool:
    """Return whether a class is defined in a file of the user's, or in a notebook."""
    root = cls.__module__.partition(".")[0]
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return is_users(file) if file else root not in sys.stdlib_module_names or root == "__main__"


def users_line(eqn: JaxprEqn) -> str | None:
    """The innermost line of the user's own that an equation comes from; None where none is known."""
    found = users_place(eqn)
    return None if found is None else place(*found)


def users_place(eqn: JaxprEqn) -> tuple[str, int] | None:
    """The same as the file, as Python knows it, and the number of the line."""
    traceback = eqn.source_info.traceback
    frame = next((f for f in (traceback.frames if traceback else ()) if is_users(f.file_name)), None)
    return None if frame is None else (frame.file_name, frame.line_num)


def users_frame(frame: FrameType | None) -> tuple[bool, tuple[str, int] | None]:
    """Of a stack from its innermost frame: whether a call of ours lies inside of the user's innermost line, and that,
    its file as Python knows it and its number; None where there is none."""
    in_ours = False
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return in_ours, (file, frame.f_lineno)
        in_ours |= is_ours(file)
        frame = frame.f_back
    return in_ours, None


class Within(NamedTuple):
    """Where a step was called while JAX traced another function: the user's line, and that function by its name and,
    of a method, its object; None where it is not known."""

    file: str
    line: int
    function: str | None
    owner: Any


def traced_within(frame: FrameType | None) -> Within:
    """Tell of a stack from its innermost frame what JAX traces: the function of the user's, or of a library built on
    JAX, that JAX itself called first."""
    _, at = users_frame(frame)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    roots = [str(each.f_globals.get("__name__")).partition(".")[0] for each in reversed(frames)]
    first = next((n for n, root in enumerate(roots) if root in _TRACING), len(roots))
    inside = enumerate(zip(reversed(frames), roots, strict=True))
    traced = next((f for n, (f, root) in inside if n > first and root not in _BETWEEN), None)
    file, line = at or ("", 0)
    if traced is None:
        return Within(file, line, None, None)
    code = traced.f_code
    owner = traced.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return Within(file, line, code.co_name, owner)


def users_lines_alone(error: BaseException) -> None:
    """Take our frames out of the tracebacks of an error and of those behind it, as JAX does with its own; all stay
    where `jax_traceback_filtering` is off. Where we raised it ourselves, and not to tell the user something, those
    below the user's last line stay."""
    if _config.jax_traceback_filtering == "off":
        return
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = without_our_frames(
            error.__traceback__, is_ours, is_users, whole=isinstance(error, ShardError)
        )
        error = error.__cause__ or error.__context__  # pyright: ignore[reportAssignmentType]


def _library_places() -> tuple[str, ...]:
    """The folders of Python's own modules, and of the libraries that are imported, however installed."""
    paths = sysconfig.get_paths()
    places = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    if site.ENABLE_USER_SITE:
        places.add(site.getusersitepackages())
    for name in _LIBRARIES:
        places |= {str(folder) for folder in getattr(sys.modules.get(name), "__path__", ())}
    return tuple(place.rstrip("/\\") + ("\\" if "\\" in place else "/") for place in places)
