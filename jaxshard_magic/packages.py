"""Versions of installed packages, requirements of the installed jax, and commands that install more."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from itertools import zip_longest
from pathlib import Path
from platform import python_version
from shlex import quote
from typing import Any
from urllib.parse import urlparse

from .errors import ShardError

OURS = "jaxshard_magic"

ALIKE = (OURS, "jax", "jaxlib", "flax", "optax", "numpy")  # of equal versions on all hosts of a program
NEEDED = ("jax", "jaxlib", "flax", "optax", "numpy", "ipython", "ipywidgets", "anywidget", "plotly")
TPU = ("libtpu",)
CUDA = ("jax-cuda12-plugin", "jax-cuda13-plugin")

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*([^;]*)(;.*)?")
_CLAUSE = re.compile(r"\s*(==|>=|<=|>|<)\s*(\d+(?:\.\d+)*)(\.\*)?\s*")


def installed() -> dict[str, str | None]:
    """Return the versions of relevant packages, None for missing ones."""
    return {name: _version(name) for name in (*NEEDED, *TPU, *CUDA)}


def program_versions() -> dict[str, str]:
    """Return the versions of Python and of packages that all hosts of one program must share, without missing ones."""
    return {"python": python_version()} | versions(ALIKE)


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages, without missing ones."""
    found = {name: _version(name) for name in names}
    return {name: each for name, each in found.items() if each is not None}


def jax_requirements() -> dict[str, str]:
    """Return the installed jax's requirements on jaxlib and its plugins: `{"libtpu": "==0.0.50.*"}`."""
    try:
        lines = requires("jax") or []
    except PackageNotFoundError:
        return {}
    required: dict[str, str] = {}
    for name, clauses, extra in (m.groups() for m in map(_REQUIREMENT.match, lines) if m):
        if clauses and (name in (*TPU, *CUDA) or (name == "jaxlib" and not extra)):
            required.setdefault(name, clauses.strip())
    return required


def satisfies(given: str, clauses: str) -> bool:
    """Return whether a version meets a requirement. Clauses of a kind that jax doesn't write allow every version.

    Args:
        given: The version.
        clauses: The requirement's clauses, separated by commas.

    >>> satisfies("0.0.50.1", "==0.0.50.*"), satisfies("0.11.2", "<=0.12.0.1,>=0.11.2"), satisfies("0.10.2", ">=0.11.2")
    (True, True, False)
    """
    mine = numbers(given)
    for sign, wanted, star in (m.groups() for m in map(_CLAUSE.fullmatch, clauses.split(",")) if m):
        theirs = numbers(wanted)
        # Missing numbers are 0: 1.2 equals 1.2.0.
        pairs = zip_longest(mine[: len(theirs)] if star else mine, theirs, fillvalue=0)
        order = next(((a > b) - (a < b) for a, b in pairs if a != b), 0)
        if order not in {"==": (0,), ">=": (0, 1), "<=": (0, -1), ">": (1,), "<": (-1,)}[sign]:
            return False
    return True


def install_command(extra: str = "", *more: str) -> str:
    """Return the command that installs this package as it was installed here, with an extra and further requirements.

    A checkout is installed from its folder, a wheel or a repository from its address, else the package by its name: pip
    records the source in `direct_url.json` (PEP 610).

    Args:
        extra: Extra of the package: "tpu", "cuda-aot", "demo"; "" for none.
        more: Further requirements, such as "jax==0.10.2", which pip then resolves together with it.
    """
    return " ".join(["pip install", *_ours(f"[{extra}]" if extra else ""), *(f'"{each}"' for each in more)])


def upgrade_command() -> str:
    """Return the command that brings a newer version of this package, as it was installed here."""
    editable, folder = _checkout()
    if folder is None:
        return f"pip install --upgrade {' '.join(_ours(''))}"
    pull = f"git -C {quote(str(folder))} pull"
    return pull if editable else f"{pull} && {install_command()}"


def _ours(extra: str) -> list[str]:
    editable, folder = _checkout()
    if folder is not None:
        place = "." if folder == Path.cwd() else str(folder)
        return [*(["-e"] if editable else []), quote(f"{place}{extra}") if extra else quote(place)]
    origin = _origin()
    if "vcs_info" in origin:
        return [f'"{OURS}{extra} @ {origin["vcs_info"]["vcs"]}+{origin["url"]}"']
    if "archive_info" in origin:
        return [f'"{OURS}{extra} @ {origin["url"]}"']
    return [f'"{OURS}{extra}"' if extra else OURS]


def _checkout() -> tuple[bool, Path | None]:
    """Return whether the package is an editable checkout, and the checkout's folder; None without one, or if it is
    gone."""
    from urllib.request import url2pathname  # imported here: it loads all of Python's HTTP modules

    origin = _origin()
    if "dir_info" not in origin:
        return False, None
    folder = Path(url2pathname(urlparse(origin["url"]).path))
    found = folder if (folder / "pyproject.toml").is_file() else None
    return bool(origin["dir_info"].get("editable")), found


def _origin() -> dict[str, Any]:
    """Return pip's record of the package's source; empty for an index, or without a record."""
    try:
        text = distribution(OURS).read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    return json.loads(text) if text else {}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> list[int]:
    """Return a version's numbers: `0.10.2.dev7+cuda` as [0, 10, 2]."""
    version = re.match(r"\d+(\.\d+)*", text)
    return [int(n) for n in version[0].split(".")] if version else []


def data_frame(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Any:
    """Return rows as a pandas DataFrame.

    Args:
        rows: Values by column, for each row.
        columns: Columns of the frame, in order.

    Raises:
        ShardError: pandas is not installed.
    """
    try:
        pandas = import_module("pandas")
    except ImportError:
        line = "pip install pandas"
        raise ShardError(f"to_pandas needs pandas, which is not installed: {line}", fix=line) from None
    return pandas.DataFrame([*rows], columns=[*columns])
