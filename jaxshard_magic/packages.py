"""Which packages are installed, what the installed jax asks of those that go with it, and what installs more."""

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

ALIKE = (
    OURS,
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "numpy",
)  # what processes that run one program together share
NEEDED = ("jax", "jaxlib", "flax", "optax", "numpy", "ipython", "ipywidgets", "anywidget", "plotly")
TPU = ("libtpu",)
CUDA = ("jax-cuda12-plugin", "jax-cuda13-plugin")

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*([^;]*)(;.*)?")
_CLAUSE = re.compile(r"\s*(==|>=|<=|>|<)\s*(\d+(?:\.\d+)*)(\.\*)?\s*")


def installed() -> dict[str, str | None]:
    """The versions of the packages that matter, None for those that are missing."""
    return {name: _version(name) for name in (*NEEDED, *TPU, *CUDA)}


def running() -> dict[str, str]:
    """The versions of Python and of those packages that all hosts of one program should have alike, without those that
    are missing."""
    return {"python": python_version()} | versions(ALIKE)


def versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of packages, without those that are missing."""
    found = {name: _version(name) for name in names}
    return {name: each for name, each in found.items() if each is not None}


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


def install(extra: str = "", *more: str) -> str:
    """The line that installs this package as it was installed here, with an extra, and what is to go with it.

    Of a checkout that is its folder, of a wheel or a repository its address, else the package's name alone: pip wrote
    down which (`direct_url.json`, PEP 610).

    Args:
        extra: one of the package's own: "tpu", "cuda-aot", "demo"; "" for none.
        more: other requirements, such as "jax==0.10.2", which pip then takes together with it.
    """
    return " ".join(["pip install", *_ours(f"[{extra}]" if extra else ""), *(f'"{each}"' for each in more)])


def upgrade() -> str:
    """What brings a newer version of this package, as it was installed here."""
    editable, folder = _checkout()
    if folder is None:
        return f"pip install --upgrade {' '.join(_ours(''))}"
    pull = f"git -C {quote(str(folder))} pull"
    return pull if editable else f"{pull} && {install()}"


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
    """Whether the checkout's changes count at once, and its folder; None where there is none, or no longer."""
    from urllib.request import url2pathname  # it brings in all of Python's HTTP

    origin = _origin()
    if "dir_info" not in origin:
        return False, None
    folder = Path(url2pathname(urlparse(origin["url"]).path))
    found = folder if (folder / "pyproject.toml").is_file() else None
    return bool(origin["dir_info"].get("editable")), found


def _origin() -> dict[str, Any]:
    """Where pip had the package from; empty where that was an index, or nobody wrote it down."""
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
    """`0.10.2.dev7+cuda` as [0, 10, 2]."""
    version = re.match(r"\d+(\.\d+)*", text)
    return [int(n) for n in version[0].split(".")] if version else []


def data_frame(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Any:
    """The rows as a pandas DataFrame of these columns. Raises ShardError where pandas is not installed."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        line = "pip install pandas"
        raise ShardError(f"to_pandas needs pandas, which is not installed: {line}", fix=line) from None
    return pandas.DataFrame([*rows], columns=[*columns])
