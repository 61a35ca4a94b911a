"""Who may import whom, read from the source; and what loading the package may bring in.

`errors`, `introspect`, `temporary` and `display` are open to every room. What stands inside a function or a method is
imported late: there the rooms of `LATE` are allowed as well. What stands under `if TYPE_CHECKING:` never runs, and is
not counted.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "jaxshard_magic"
ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / PACKAGE).rglob("*.py"))

CONFIG = "config config.flags config.options config.strategies"
DOING = (
    f"{CONFIG} simulate specs program strategies plan compilation step gradients schedule pipeline device_arrays "
    "coordination"
)
BELOW_API = f"doctor {DOING} live analysis report hardware links packages targets compiler_log"

# room: what of ours, then what of others.
MAY_IMPORT = {
    "__init__": ("views", ""),
    "notebook": (
        f"notebook.cells notebook.options notebook.progress api search explorer codegen feeding history views "
        f"code_locations hosts units files {BELOW_API}",
        "IPython jax numpy traitlets",
    ),
    "hosts": ("coordination doctor packages hosts.spec report", "psutil"),
    "hosts.spec": ("", ""),
    "device_arrays": ("", "jax numpy"),
    "coordination": ("", "jax"),
    "notebook.cells": ("code_reads code_locations units", "IPython psutil"),
    "notebook.options": ("config.flags config.options config.strategies", ""),
    "notebook.progress": ("units", "IPython"),
    "api": (f"views search hosts {BELOW_API}", "jax numpy"),
    "explorer": (f"search report targets {DOING}", "jax numpy"),
    "search": (f"analysis report targets hardware units {DOING}", "jax"),
    "codegen": (
        f"{CONFIG} compilation device_arrays program gradients strategies analysis report targets compiler_log",
        "jax numpy",
    ),
    "simulate": ("", "jax numpy"),
    "specs": ("", "jax"),
    "program": ("code_reads compile_wait code_locations device_arrays", "jax jaxlib numpy"),
    "config": (
        "config.flags config.options config.strategies simulate specs schedule hardware targets compiler_log "
        "hosts.spec",
        "jax numpy",
    ),
    "config.flags": ("", ""),
    "config.options": ("config.flags", ""),  # jax late: dtypes
    "config.strategies": ("", ""),
    "strategies": (f"{CONFIG} specs program plan targets units", "jax numpy"),
    "plan": ("", "jax"),
    "compilation": (
        f"{CONFIG} code_locations device_arrays plan program gradients strategies pipeline targets "
        "compiler_log compile_wait units",
        "jax numpy",
    ),
    "step": (
        f"{CONFIG} analysis compilation device_arrays coordination plan program strategies pipeline targets live "
        "compiler_log checkpoints packages report",
        "jax numpy",
    ),
    "feeding": ("compilation device_arrays program step", "jax numpy"),
    "live": ("report", "numpy"),
    "checkpoints": ("coordination files device_arrays packages program", "jax numpy"),
    "gradients": (f"{CONFIG} program plan", "jax numpy"),
    "schedule": ("report", ""),
    "pipeline": (f"{CONFIG} compile_wait schedule program gradients strategies plan", "jax numpy"),
    "analysis": (
        f"{CONFIG} code_locations compilation device_arrays program gradients strategies plan live report "
        "hardware links targets "
        "schedule pipeline units",
        "jax numpy",
    ),
    "report": ("files packages", ""),
    "history": ("files packages report", "platformdirs psutil"),
    "views": ("config.strategies report code_locations units", "pygments"),
    "doctor": ("coordination packages targets units", "jax numpy"),
    "targets": ("files hardware packages compiler_log compile_wait units", "jax numpy platformdirs"),
    "files": ("", ""),
    "packages": ("", ""),
    "compiler_log": ("", ""),
    "compile_wait": ("", ""),
    "hardware": ("", ""),
    "links": ("hardware units", ""),
    "code_locations": ("", ""),
    "units": ("", ""),
    "code_reads": ("", ""),
    "errors": ("", ""),
    "temporary": ("", ""),
    "introspect": ("", ""),
    "display": ("", ""),
    "console": ("errors", ""),
    "demo": ("api report", "jax numpy flax optax"),
}

# Modules and packages that are imported late as a whole, each by name inside a function.
LATE_MODULES = {
    "hosts.pickling",
    "hosts.plain_values",
    "program.nnx_objects",
    "step.checkpoint_loop",
    "step.save_restore",
    "views.comparison.widget",
    "views.explorer_widget",
    "views.figures",
    "views.live_view",
    "views.show",
    "views.widget",
}

LATE = {
    # What runs on an engine, and what starts engines.
    "hosts": (
        "step program analysis device_arrays",
        "ipyparallel jax numpy IPython zmq cloudpickle traitlets",
    ),
    "checkpoints": ("", "orbax tensorstore"),
    "views": (
        "",
        "IPython plotly anywidget ipywidgets traitlets resvg_py",
    ),  # PNG; the modules that are late as a whole
    "targets": ("", "jaxlib"),
    "config.options": ("schedule", "jax"),  # the names of schedules, and the dtypes of its values
    "program": ("", "flax equinox"),  # a step of theirs brings them along
    "notebook": ("checkpoints", ""),  # %shard save, %shard load
    "console": ("demo", ""),  # its help needs nothing of it
    "demo": ("", "sklearn"),  # says what to install where it is missing
}


@dataclass(frozen=True)
class Import:
    """`name` is what stands in the source, in full: `jaxshard_magic.plan`, `jax.sharding`."""

    name: str
    late: bool
    line: int

    @property
    def ours(self) -> bool:
        return self.name.partition(".")[0] == PACKAGE

    @property
    def target(self) -> str:
        """A room of ours, or the top-level package of somebody else's."""
        return room_of(self.name.split(".")) if self.ours else self.name.partition(".")[0]


def imports(source: str, module: tuple[str, ...]) -> list[Import]:
    """What the module `("jaxshard_magic", "views", "html")` imports, the standard library left out."""
    found = []
    for node, late in _nodes(ast.parse(source), late=False):
        for name in _names(node, module):
            if name.partition(".")[0] not in sys.stdlib_module_names:
                found.append(Import(name, late, node.lineno))
    return found


def _nodes(parent: ast.AST, *, late: bool) -> Iterator[tuple[ast.stmt, bool]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, late
        yield from _nodes(node, late=late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _names(node: ast.stmt, module: tuple[str, ...]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert isinstance(node, ast.ImportFrom)
    start = ".".join(module[: len(module) - node.level]) + "." if node.level else ""
    base = (start + (node.module or "")).rstrip(".")
    return [f"{base}.{alias.name}" for alias in node.names] if base.startswith(PACKAGE) else [base]


def dotted(path: Path) -> tuple[str, ...]:
    """`("jaxshard_magic", "views", "html")`; a package's own file ends in `__init__`."""
    return path.relative_to(ROOT).with_suffix("").parts


def test_one_module_knows_the_private_parts_of_jaxlib():
    """The worker of `targets` is a program of its own."""
    knowing = {".".join(dotted(m)[1:]) for m in MODULES if any(i.name.startswith("jaxlib") for i in read(m))}
    assert knowing == {"program.shardy", "targets.worker"}


def room(path: Path) -> str:
    return room_of(dotted(path))


def room_of(parts: Sequence[str]) -> str:
    """`notebook.cells` of `("jaxshard_magic", "notebook", "cells", "find")`: an inner room with a row of its own."""
    inner = ".".join(parts[1:3])
    return inner if inner in MAY_IMPORT else (*parts, "__init__")[1]


@cache
def read(path: Path) -> list[Import]:
    name = ".".join(dotted(path)[1:])
    whole = any(f"{name}.".startswith(f"{late}.") for late in LATE_MODULES)
    found = imports(path.read_text(), dotted(path))
    return [replace(i, late=True) for i in found] if whole else found


def allowed(name: str, *, ours: bool, late: bool) -> set[str]:
    rows = [MAY_IMPORT[name], LATE.get(name, ("", ""))] if late else [MAY_IMPORT[name]]
    words = {word for row in rows for word in row[0 if ours else 1].split()}
    return words | {name, "errors", "introspect", "temporary", "display"} if ours else words


def test_every_room_has_a_row():
    missing = sorted({room(path) for path in MODULES} - MAY_IMPORT.keys())
    assert not missing, "say in this test's table what they may import"


def test_modules_import_only_what_their_rooms_may():
    wrong = [
        f"{path.relative_to(ROOT)}:{found.line}: {name} may not import {found.target}"
        for path in MODULES
        if (name := room(path)) in MAY_IMPORT
        for found in read(path)
        if found.target not in allowed(name, ours=found.ours, late=found.late)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rooms_import_in_one_direction():
    graph = {}
    for path in MODULES:
        here = {i.target for i in read(path) if i.ours and not i.late}
        graph.setdefault(room(path), set()).update(here - {room(path)})
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the rooms of the cycle


def test_late_modules_are_imported_nowhere_at_the_top():
    late = tuple(f"{PACKAGE}.{name}." for name in LATE_MODULES)
    eager = [
        f"{path.relative_to(ROOT)}:{i.line}: {i.name}"
        for path in MODULES
        for i in read(path)
        if not i.late and f"{i.name}.".startswith(late)
    ]
    assert not eager, "\n".join(eager)


def test_only_program_walks_a_jaxpr():
    walkers = {
        room(path)
        for path in MODULES
        if ".eqns" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "eqns"
    }
    assert walkers <= {"program"}


def test_the_reader_sees_every_form_of_import():
    source = """
import json, plotly.graph_objects
from . import svg
from .. import report
from ..plan import Plan
from jaxshard_magic.views import words
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import flax
class Page:
    def show(self):
        if self:
            from jaxshard_magic import api
"""
    found = imports(source, (PACKAGE, "views", "html"))
    assert [(i.target, i.ours, i.late) for i in found] == [
        ("plotly", False, False),
        ("views", True, False),
        ("report", True, False),
        ("plan", True, False),
        ("views", True, False),
        ("api", True, True),
    ]


def test_a_forbidden_import_is_not_allowed_at_the_top_nor_inside_a_function():
    assert "checkpoints" not in allowed("notebook", ours=True, late=False)
    assert "checkpoints" in allowed("notebook", ours=True, late=True)
    assert "views" not in allowed("report", ours=True, late=True)
    assert "jax" not in allowed("views", ours=False, late=True)


def loaded_after(code: str) -> set[str]:
    """The top-level packages that a fresh process has imported once it ran `code`."""
    code += "\nprint(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", f"import sys\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


HEAVY = {"plotly", "ipywidgets", "anywidget", "flax", "optax", "equinox", "sklearn", "orbax"}


def test_importing_the_package_imports_nothing_heavy():
    assert not loaded_after(f"import {PACKAGE}") & HEAVY


def test_loading_the_extension_imports_nothing_heavy_and_starts_no_backend(monkeypatch, tmp_path):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    loaded = loaded_after(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        f"shell.run_line_magic('load_ext', '{PACKAGE}')\n"
        "assert 'shard' in shell.magics_manager.magics['cell'], 'the magics are not there'\n"
        "bridge = sys.modules.get('jax._src.xla_bridge')\n"
        "assert not (bridge and bridge.backends_are_initialized()), 'a backend was started'"
    )
    assert not loaded & HEAVY


@pytest.mark.parametrize("name", ["report", "units", "views.text", "views.html", "errors"])
def test_a_report_is_read_without_jax(name):
    assert not loaded_after(f"import {PACKAGE}.{name}") & (HEAVY | {"jax", "numpy"})
