"""Which packages are there, whether those of jax fit each other, and for what they can compile."""

import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import zip_longest

from .findings import Finding

Versions = Mapping[str, str | None]

NEEDED = ("jax", "jaxlib", "flax", "optax", "numpy", "ipython", "ipywidgets", "anywidget", "plotly")
TPU = ("libtpu",)
CUDA = ("jax-cuda12-plugin", "jax-cuda13-plugin")
NEWEST_PYTHON = (3, 12)  # what the newest jax asks for
INSTALL_TPU = 'pip install --upgrade "jax[tpu]"'
INSTALL_CUDA = 'pip install --upgrade "jax[cuda12]"'

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*([^;]*)(;.*)?")
_CLAUSE = re.compile(r"\s*(==|>=|<=|>|<)\s*(\d+(?:\.\d+)*)(\.\*)?\s*")


def installed() -> dict[str, str | None]:
    """The versions of the packages that matter, None for those that are missing."""
    return {name: _version(name) for name in (*NEEDED, *TPU, *CUDA)}


def loaded() -> dict[str, str]:
    """The versions of those that this process has imported."""
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in NEEDED}
    return {name: str(running) for name, running in found.items() if running}


def companions() -> dict[str, str]:
    """What the installed jax asks of jaxlib and of its plugins: `{"libtpu": "==0.0.50.*"}`."""
    try:
        lines = requires("jax") or []
    except PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for name, clauses, extra in (m.groups() for m in map(_REQUIREMENT.match, lines) if m):
        if clauses and (name in (*TPU, *CUDA) or (name == "jaxlib" and not extra)):
            found.setdefault(name, clauses.strip())
    return found


def fits(given: str, clauses: str) -> bool:
    """Is the version `given` one that a requirement allows? A clause of another kind than jax writes allows all.

    >>> fits("0.0.50.1", "==0.0.50.*"), fits("0.11.2", "<=0.12.0.1,>=0.11.2"), fits("0.10.2", ">=0.11.2")
    (True, True, False)
    """
    mine = _numbers(given)
    for sign, wanted, star in (m.groups() for m in map(_CLAUSE.fullmatch, clauses.split(",")) if m):
        theirs = _numbers(wanted)
        pairs = zip_longest(mine[: len(theirs)] if star else mine, theirs, fillvalue=0)
        order = next(((a > b) - (a < b) for a, b in pairs if a != b), 0)
        if order not in {"==": (0,), ">=": (0, 1), "<=": (0, -1), ">": (1,), "<": (-1,)}[sign]:
            return False
    return True


def versions(
    known: Versions, asked: Mapping[str, str], running: Mapping[str, str], python: tuple[int, int]
) -> Iterator[Finding]:
    """Python and the packages: missing ones, a jaxlib that does not fit, and those replaced under this process.

    Args:
        known, running: the versions that are installed, and those that are imported.
        asked: what jax asks of its companions, as `companions` tells it.
    """
    area, text = "versions", ".".join(map(str, python))
    if python < NEWEST_PYTHON:
        newer = ".".join(map(str, NEWEST_PYTHON))
        yield Finding(area, "python", f"{text}; the newest jax needs {newer}", "info")
    else:
        yield Finding(area, "python", text)
    for name in NEEDED:
        found = known.get(name)
        if found is None:
            yield Finding(area, name, "not installed", "error", f"pip install {name}")
        elif not fits(found, asked.get(name, "")):
            mixed = f"{found}, but jax {known.get('jax')} needs {name}{asked[name]}"
            yield Finding(area, name, mixed, "error", "pip install --upgrade jax jaxlib")
        elif _numbers(running.get(name, found)) != _numbers(found):
            stale = f"{found} is installed, {running[name]} still runs in this process"
            yield Finding(area, name, stale, "warning", "restart the kernel")
        else:
            yield Finding(area, name, found)


def targets(known: Versions, asked: Mapping[str, str]) -> Iterator[Finding]:
    """The kinds of hardware for which a compiler is installed, attached or not; nothing is loaded."""
    area = "compilers"
    yield Finding(area, "cpu", "with jax")
    for platform, names, install in (("tpu", TPU, INSTALL_TPU), ("cuda", CUDA, INSTALL_CUDA)):
        there = [name for name in names if known.get(name)]
        for name in there:
            found = known[name] or ""
            if fits(found, asked.get(name, "")):
                yield Finding(area, platform, f"{name} {found}")
            else:
                mixed = f"{name} {found}, but jax {known.get('jax')} needs {name}{asked[name]}"
                fix = install.replace("cuda12", "cuda13") if "cuda13" in name else install
                yield Finding(area, platform, mixed, "warning", fix)
        if not there:
            yield Finding(area, platform, "not installed", "info", install)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> list[int]:
    """`0.10.2.dev7+cuda` as [0, 10, 2]."""
    found = re.match(r"\d+(\.\d+)*", text)
    return [int(n) for n in found[0].split(".")] if found else []
