"""Shard JAX training steps: `%%shard fsdp` above a step runs it sharded, with the same numbers, and reports on it."""

import sys
import types
from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxshard_magic.display import register
from jaxshard_magic.views import RENDERERS

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from jaxshard_magic.api import choose, compare, doctor, layout, mesh, shard, show
    from jaxshard_magic.errors import ShardError
    from jaxshard_magic.feeding import feed
    from jaxshard_magic.pipeline.marker import cut
    from jaxshard_magic.report import Report
    from jaxshard_magic.report.choice import Choice
    from jaxshard_magic.report.comparison import Comparison
    from jaxshard_magic.step import ShardedStep

__all__ = [
    "Choice",
    "Comparison",
    "Report",
    "ShardError",
    "ShardedStep",
    "choose",
    "compare",
    "cut",
    "doctor",
    "feed",
    "layout",
    "load_ipython_extension",
    "mesh",
    "shard",
    "show",
]

_HOMES = {
    "Choice": "report.choice",
    "Comparison": "report.comparison",
    "choose": "api",
    "compare": "api",
    "cut": "pipeline.marker",
    "doctor": "api",
    "feed": "feeding",
    "layout": "api",
    "mesh": "api",
    "shard": "api",
    "show": "api",
    "Report": "report",
    "ShardError": "errors",
    "ShardedStep": "step",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    # Lazy, so that importing the package does not import jax.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    # Python calls `__getattr__` for missing names alone, so this caches the value.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    """Module type that keeps the function `doctor`."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing the submodule `doctor` would replace the function of that name.
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

# Here, so that whatever of the package is imported, its results can be shown. The table is names: it imports no view.
register(RENDERERS)


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """Add `%mesh`, `%shard` and `%%shard` to the shell, for `%load_ext jaxshard_magic`."""
    import_module(f"{__name__}.notebook.load").load(shell)


def unload_ipython_extension(shell: "InteractiveShell") -> None:
    """Remove the magics and their completions, for `%unload_ext jaxshard_magic`."""
    import_module(f"{__name__}.notebook.load").unload(shell)
