"""Display of results: renderers registered by class, and text that a stream can encode.

Classes of results import no view. A class asks `renderer` for its text, page or widget, and the table in
`views/__init__.py` says which function of `views/` that is. The function is imported at its first use: a kernel without
widgets, or without plotly, shows everything else.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TextIO

_locations: dict[tuple[str, str], str] = {}


def register(renderers: Mapping[str, Mapping[str, str]]) -> None:
    """Register renderers of classes; they hold for subclasses as well.

    Args:
        renderers: Location of a renderer, `package.module:function`, by full name of the class and by kind. Names,
            because registering imports nothing.
    """
    _locations.update({(cls, kind): where for cls, kinds in renderers.items() for kind, where in kinds.items()})


def renderer(shown: object, kind: str) -> Callable[..., Any]:
    """Return the renderer of an object, as registered for its class or the nearest base class.

    Args:
        shown: The object.
        kind: Kind of the renderer, such as `text`, `html` or `widget`.

    Raises:
        LookupError: None is registered.
    """
    for cls in type(shown).__mro__:
        location = _locations.get((f"{cls.__module__}.{cls.__qualname__}", kind))
        if location is not None:
            module, _, name = location.partition(":")
            return getattr(import_module(module), name)
    raise LookupError(f"no renderer of kind {kind!r} is registered for {type(shown).__name__}")


# Substitutes for signs that a terminal can't encode, one column each.
_ALIKE = dict(
    zip("\u00a0\u202f–−─│·×’…ℹ↑≥✓✔✖✗⚠█▉▊▋▌▍▎▏░▒▓▚▁▂▃▄▅▆▇", "  ---|.x'~i^>++xx!#####:::.=%/_.,-=+*", strict=True)
)


def writable(text: str, stream: TextIO | None = None) -> str:
    """Replace signs that a stream can't encode by similar signs.

    Args:
        text: Text to write.
        stream: Stream with an encoding; standard output by default.
    """
    encoding = getattr(sys.stdout if stream is None else stream, "encoding", None) or "utf-8"
    if _encodes(text, encoding):
        return text
    alike = {ord(c): sign for c, sign in _ALIKE.items() if not _encodes(c, encoding)}
    # Signs without a substitute become question marks.
    return text.translate(alike).encode(encoding, "replace").decode(encoding)


def _encodes(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
