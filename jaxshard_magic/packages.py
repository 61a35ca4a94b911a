"""Which packages are installed, and what the installed jax asks of those that go with it."""

import re
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import zip_longest

NEEDED = ("jax", "jaxlib", "flax", "optax", "numpy", "ipython", "ipywidgets", "anywidget", "plotly")
TPU = ("libtpu",)
CUDA = ("jax-cuda12-plugin", "jax-cuda13-plugin")

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*([^;]*)(;.*)?")
_CLAUSE = re.compile(r"\s*(==|>=|<=|>|<)\s*(\d+(?:\.\d+)*)(\.\*)?\s*")


def installed() -> dict[str, str | None]:
    """The versions of the packages that matter, None for those that are missing."""
    return {name: _version(name) for name in (*NEEDED, *TPU, *CUDA)}


def companions() -> dict[str, str]:
    """What the installed jax asks of jaxlib and of its plugins: `{"libtpu": "==0.0.50.*"}`."""
    try:
        lines = requires("jax") or []
    except PackageNotFoundError:
        return {}
    required: dict[str, str] = {}
    for name, clauses, extra in (m.groups() for m in map(_REQUIREMENT.match, lines) if m):
        if clauses and (name in (*TPU, *CUDA) or (name == "jaxlib" and not extra)):
            required.setdefault(name, clauses.strip())
    return required


def fits(given: str, clauses: str) -> bool:
    """Is the version `given` one that a requirement allows? A clause of another kind than jax writes allows all.

    >>> fits("0.0.50.1", "==0.0.50.*"), fits("0.11.2", "<=0.12.0.1,>=0.11.2"), fits("0.10.2", ">=0.11.2")
    (True, True, False)
    """
    mine = numbers(given)
    for sign, wanted, star in (m.groups() for m in map(_CLAUSE.fullmatch, clauses.split(",")) if m):
        theirs = numbers(wanted)
        pairs = zip_longest(mine[: len(theirs)] if star else mine, theirs, fillvalue=0)
        order = next(((a > b) - (a < b) for a, b in pairs if a != b), 0)
        if order not in {"==": (0,), ">=": (0, 1), "<=": (0, -1), ">": (1,), "<": (-1,)}[sign]:
            return False
    return True


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> list[int]:
    """`0.10.2.dev7+cuda` as [0, 10, 2]."""
    version = re.match(r"\d+(\.\d+)*", text)
    return [int(n) for n in version[0].split(".")] if version else []
