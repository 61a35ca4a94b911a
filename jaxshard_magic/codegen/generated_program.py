"""Source text of a generated program: the user's text, tables of specs and a few functions."""

import ast
import glob
import inspect
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from jax.sharding import PartitionSpec

from ..compilation.compiled_step import CompiledStep
from ..errors import ShardError
from ..program.flatten_call import FlatCall
from ..program.per_device import PerDeviceTrace
from ..program.trace import Traced, path_name
from ..strategies.layout import from_partition_spec
from . import step_functions, wrappers
from .cells import UserStatement, imported_names
from .constraints import spec_text
from .edits import Edit, statement_text

WIDTH = 100  # columns
_CALLING = (
    wrappers.donating,
    wrappers.where,
    wrappers.on_mesh,
    wrappers.arguments,
    wrappers.called,
    wrappers.apart,
    wrappers.together,
)
_OWN = (
    *("mesh", "EXAMPLES", "DONATED", "NUMBERS", "STATIC", "HOST_ROWS", "ARGUMENTS", "RESULTS"),
    *("microbatch", "shard", "sharded"),
    *(f.__name__ for f in (*step_functions.STEP_FUNCTIONS, *_CALLING)),
)
_MODULES = {
    "jax": "import jax",
    "functools": "import functools",
    "math": "import math",
    "jnp": "import jax.numpy as jnp",
    "inspect": "import inspect",
    "fnmatchcase": "from fnmatch import fnmatchcase",
    "np": "import numpy as np",
    "nnx": "from flax import nnx",
    "AxisType": "from jax.sharding import AxisType",
    "NamedSharding": "from jax.sharding import NamedSharding",
    "P": "from jax.sharding import PartitionSpec as P",
}
_COMPILED = "jax.jit(program, "  # call in the `sharded` functions of `wrappers`, replaced for donation
_PLACED = (  # calls in the same functions, and their replacements for several hosts
    (re.compile(r"jax\.device_put\((\w+), where\(\1, ARGUMENTS\)\)"), r"on_mesh(\1)"),
    (re.compile(r"jax\.device_put\((\w+), \[where\(s, ARGUMENTS\) for s in \1\]\)"), r"[on_mesh(s) for s in \1]"),
)
# Some functions have ordinary words as names (`called`, `where`): renaming a function must not change these words in
# comments and docstrings.
_PROSE_OR_NAME = re.compile(r'(?P<prose>""".*?"""|#[^\n]*)|(?<![\w."])(?P<name>[A-Za-z_]\w*)', re.DOTALL)
_NAMED = re.compile(r"(?<=`)\w+|\b[A-Z_]{2,}\b")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class GeneratedProgram:
    """Parts of a generated program.

    Attributes:
        statements: Statements of the user's cells.
        path: Expression naming the step.
        axes: Mesh axes with their sizes.
        arguments: Specs of the step's arguments, by path.
        results: Specs of the step's results, by path.
        functions: Functions of `wrappers` and `step_functions` to include.
        edits: Edits of the user's text, by file.
        notes: Paragraphs of the docstring.
        devices: Number of CPU devices per host to simulate; None for the machine's own devices.
        call_text: Last line, a call of the step, where no statement calls the step.
        batch_axes: Mesh axes that divide the examples.
        removes_pmap: Whether the step is under a `jax.pmap` of the user's, to be left out.
        numbers: Names of the number types to treat as arrays.
        static: Names of the arguments that are never arrays.
        donated: Arguments with memory to be reused by the results.
        hosts: Number of hosts to run the program together, with equally many devices each.
        per_host_arguments: Arguments with separate rows on each host.
    """

    statements: Sequence[UserStatement]
    path: str
    axes: Mapping[str, int]
    arguments: Mapping[str, PartitionSpec]
    results: Mapping[str, PartitionSpec]
    functions: tuple[Callable[..., Any], ...]
    edits: Mapping[str, list[Edit]]
    notes: Sequence[str] = ()
    devices: int | None = None
    call_text: str | None = None
    batch_axes: tuple[str, ...] = ()
    removes_pmap: bool = False
    numbers: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    donated: tuple[str, ...] = ()
    hosts: int = 1
    per_host_arguments: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the program, formatted by ruff."""
        return formatted(self.source())

    def source(self) -> str:
        """Return the program unformatted."""
        early = [p for p in self.statements if p.precedes_imports]
        imports = [p for p in self.statements if p.imports]
        rest = [p for p in self.statements if not (p.imports or p.precedes_imports)]
        own = "\n\n\n".join(self._generated_parts())
        made = [i for i, p in enumerate(rest) if p.binds_step]
        # The step is wrapped after its last definition, and before its first call where only an import defines it.
        at = made[-1] + 1 if made else next((i for i, p in enumerate(rest) if p.calls_step), len(rest))
        # `jax.pmap` has the user's function as `__wrapped__`.
        inner = f"{self.path}.__wrapped__" if self.removes_pmap else self.path
        sharded = f"{self.path} = {self.program_name('sharded')}({inner})"
        body = [*(self._piece(p) for p in rest[:at]), sharded, *(self._piece(p) for p in rest[at:])]
        head = [*self._imports(own), *(self._piece(p) for p in imports)]
        sections = [
            self._docstring(),
            "\n".join([*(["import os, sys"] if early else []), *(self._piece(p) for p in early)]),
            "\n".join(head),
            self._devices(),
            own,
            "\n\n".join(body),
            self.call_text or "",
        ]
        return "\n\n".join(filter(None, sections)) + "\n"

    def program_name(self, own: str) -> str:
        """Return a name of the generated code: `own`, or `sharding_{own}` where the user's text has the name."""
        # The user's import of the same module under the same name can be used.
        theirs = self._imported.get(own)
        if own in _MODULES and theirs == _full(_MODULES[own]):
            return own
        # Edits write `P` and functions into the user's functions, where even a local name would hide them.
        module = own in _MODULES and own != "P"
        taken = theirs is not None or own in self._bound if module else own in self._used
        return f"sharding_{own}" if taken else own

    @cached_property
    def _trees(self) -> list[ast.Module]:
        return [ast.parse(textwrap.dedent(self._piece(p))) for p in self.statements]

    @cached_property
    def _imported(self) -> dict[str, str]:
        return imported_names(*self._trees)

    @cached_property
    def _bound(self) -> set[str]:
        """Names bound at the top level of statements, imports excluded."""
        statements = [s for tree in self._trees for s in tree.body]
        defined = {s.name for s in statements if isinstance(s, _DEFINITIONS)}
        rest = (n for s in statements if not isinstance(s, _DEFINITIONS) for n in ast.walk(s))
        return defined | {n.id for n in rest if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}

    @cached_property
    def _used(self) -> set[str]:
        """Words of the user's text."""
        return set(re.findall(r"[A-Za-z_]\w*", "\n".join(piece.text for piece in self.statements)))

    def _generated_parts(self) -> list[str]:
        """Return the mesh, the constants, the tables and the functions of the program."""
        sizes, names = tuple(self.axes.values()), tuple(self.axes)
        types = f"axis_types=(AxisType.Auto,) * {len(names)}"
        constants = []
        if {step_functions.in_microbatches, step_functions.in_shards} & {*self.functions}:
            comment = "# The mesh axes that the examples are divided over."
            constants.append(f"{comment}\n{self.program_name('EXAMPLES')} = {self.batch_axes!r}")
        if wrappers.apart in self.functions:
            constants.append(
                f"# Numbers of these types are arrays to the step, but for these arguments.\n"
                f"{self.program_name('NUMBERS')} = ({''.join(f'{n}, ' for n in self.numbers)})\n"
                f"{self.program_name('STATIC')} = {self.static!r}"
            )
        if self.donated:
            comment = "# Arguments whose memory the step's results take."
            constants.append(f"{comment}\n{self.program_name('DONATED')} = {self.donated!r}")
        if self.hosts > 1:
            comment = "# Arguments of which each host has rows of its own."
            constants.append(f"{comment}\n{self.program_name('HOST_ROWS')} = {self.per_host_arguments!r}")
        tables = [*constants, self._table("ARGUMENTS", self.arguments), self._table("RESULTS", self.results)]
        functions = [self._resolve_names(self._function(f)) for f in self.functions]
        return [self._resolve_names(f"mesh = jax.make_mesh({sizes}, {names}, {types})"), *tables, *functions]

    def _function(self, f: Callable[..., Any]) -> str:
        """Return the source of a function, adapted to several hosts and to donation."""
        text = source_of(f)
        if self.hosts > 1 and text.startswith("def sharded("):
            for alone, on_hosts in _PLACED:
                text = alone.sub(on_hosts, text)
        donates = self.donated and text.startswith("def sharded(")
        return text.replace(_COMPILED, "donating(program, ") if donates else text

    def _table(self, name: str, specs: Mapping[str, PartitionSpec]) -> str:
        """Return the table of specs `ARGUMENTS` or `RESULTS`."""
        title = {"ARGUMENTS": "Where the step's arguments lie", "RESULTS": "Where its results lie"}[name]
        rows = [f"    {pattern!r}: {self._resolve_names(spec)}," for pattern, spec in spec_table(specs).items()]
        head = f"# {title}, by their paths; arrays that no pattern matches have a copy on every device."
        return "\n".join([head, f"{self.program_name(name)} = {{", *rows, "}"])

    def _piece(self, piece: UserStatement) -> str:
        return statement_text(piece, self.edits)

    def _imports(self, own: str) -> list[str]:
        """Return the import lines for the generated code."""
        # Edits in the user's text use `P` and `jax`.
        used = {name.removeprefix("sharding_") for name in re.findall(r"[A-Za-z_]\w*", own)} | {"P", "jax"}
        return [self._import(name) for name in _MODULES if name in used]

    def _import(self, name: str) -> str:
        line, own = _MODULES[name], self.program_name(name)
        return line if own == name else f"{line.removesuffix(f' as {name}')} as {own}"

    def _devices(self) -> str:
        """Return the lines that simulate devices and join hosts."""
        found = []
        if self.devices is not None:
            each = f" of each of {self.hosts} hosts" if self.hosts > 1 else ""
            found.append(
                f"# {self.devices} CPU devices{each} stand in for accelerators; take these two lines out where there "
                f'are some.\njax.config.update("jax_platforms", "cpu")\n'
                f'jax.config.update("jax_num_cpu_devices", {self.devices})'
            )
        if self.hosts > 1:
            found.append(
                "# It finds the others under Slurm, Open MPI and Kubernetes and on TPU pods; elsewhere it takes the "
                f"address of the first,\n# how many there are, {self.hosts}, and which of them this one is.\n"
                "if not jax.distributed.is_initialized():\n    jax.distributed.initialize()"
            )
        return self._resolve_names("\n\n".join(found))

    def _docstring(self) -> str:
        return '"""' + "\n\n".join(self.notes).replace('"""', "'''").replace("\\", "\\\\") + '\n"""'

    def _resolve_names(self, text: str) -> str:
        """Replace the names of the generated code in `text` by forms free in the user's text.

        In docstrings and comments only words in capitals and the first word between backticks count as names.
        """
        names = {own: self.program_name(own) for own in (*_OWN, *_MODULES)}

        def one(found: re.Match[str]) -> str:
            if found["prose"]:
                return _NAMED.sub(lambda name: names.get(name[0], name[0]), found["prose"])
            return names.get(found["name"], found["name"])

        return _PROSE_OR_NAME.sub(one, text)


def program_axes(entry: CompiledStep) -> dict[str, str]:
    """Return the program's names of the mesh axes. A step written for one device uses the names in its collectives."""
    names = {axis: axis for axis in entry.plan.mesh.axis_names}
    if isinstance(entry.traced, PerDeviceTrace):
        names |= {axis: str(name) for name, (axis, *_) in entry.traced.mapping.axes.items()}
    return names


def rename_axes(spec: PartitionSpec, names: Mapping[str, str]) -> PartitionSpec:
    """Return a spec with other names of the mesh axes."""
    return PartitionSpec(*(tuple(names[a] for a in e) if isinstance(e, tuple) else e and names[e] for e in spec))


def specs_of(entry: CompiledStep) -> tuple[dict[str, PartitionSpec], dict[str, PartitionSpec]]:
    """Return the specs of arguments and of results by path, under the program's names of the mesh axes.

    Arrays in the closure of the step are in neither.
    """
    traced, plan, names = entry.traced, entry.plan, program_axes(entry)
    inputs = [(p, rename_axes(s, names)) for p, s in zip(traced.in_paths, plan.in_specs, strict=True)][
        len(traced.consts) :
    ]
    outputs = [(path_name(p), rename_axes(s, names)) for p, s in zip(traced.out_paths, plan.out_specs, strict=True)]
    results = {name.partition(".")[2]: s for name, s in outputs if name.partition(".")[0] == "return"}
    return {path_name(p): s for p, s in inputs}, results


def donated_of(entry: CompiledStep) -> tuple[str, ...]:
    """Return the arguments with all arrays donated, scalars aside. Empty for a step written for one device."""
    n, found = len(entry.traced.consts), dict[str, bool]()
    if isinstance(entry.traced, PerDeviceTrace):
        return ()
    for i, (path, aval) in enumerate(zip(entry.traced.in_paths[n:], entry.traced.closed.in_avals[n:], strict=True)):
        if aval.shape:
            root = path_name(path[:1])
            found[root] = found.get(root, True) and i in entry.donated
    return tuple(root for root, whole in found.items() if whole)


def wrapper_of(
    call: FlatCall, traced: Traced, *, donates: bool = False, hosts: int = 1
) -> tuple[Callable[..., Any], ...]:
    """Return the functions of `wrappers` needed to call a step.

    Args:
        call: The step's last call.
        traced: Trace of the call.
        donates: Whether arguments are donated.
        hosts: Number of hosts.
    """
    across = [wrappers.on_mesh] if hosts > 1 else []
    donating = [wrappers.donating] if donates else []
    usual = (wrappers.where, *across, wrappers.arguments, wrappers.called, *donating)
    if isinstance(traced, PerDeviceTrace):
        return *usual, wrappers.sharded_places if traced.mapping.has_device_axis else wrappers.sharded_parts
    if call.nodes is not None:
        return *usual, wrappers.sharded_objects
    if call.python_values or call.statics:
        return *usual, wrappers.apart, wrappers.together, wrappers.sharded_arrays
    return *usual, wrappers.sharded


def _full(line: str) -> str:
    """Return the full name of the object bound by an import line."""
    (full,) = imported_names(ast.parse(line)).values()
    return full


def source_of(function: Callable[..., Any]) -> str:
    """Return the source of a function of `wrappers` or `step_functions` for a program; variants of `sharded` get its
    name."""
    return re.sub(r"\bdef sharded_\w+\(", "def sharded(", inspect.getsource(function)).rstrip()


def formatted(text: str) -> str:
    """Sort the imports of a program and format it with ruff.

    Raises:
        ShardError: The text is not valid Python.
    """
    sort = ["check", "--select=I001,F811", "--fix-only", "--quiet", "--config=lint.isort.combine-as-imports=true"]
    for how in (sort, ["format", f"--line-length={WIDTH}"]):
        # `--isolated`: the user's configuration of ruff must not change the program.
        command = [sys.executable, "-m", "ruff", *how, "--isolated", "-"]
        done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", errors="replace", check=False)
        if done.returncode:
            raise ShardError(f"ruff can't format the program: {done.stderr.strip().splitlines()[-1]}")
        text = done.stdout
    return text


def spec_table(specs: Mapping[str, PartitionSpec]) -> dict[str, str]:
    """Return specs as text by `fnmatch` patterns of paths; replicated arrays are left out.

    Paths that differ in numbers alone share a pattern where their specs are equal.

    >>> from jax.sharding import PartitionSpec as P
    >>> spec_table({"params.0.w": P("data"), "params.1.w": P("data"), "params.1.b": P()})
    {'params.*.w': 'P("data")'}
    """
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in specs:
        alike[tuple(_NUMBER.split(path))].append(path)
    rows: dict[str, str] = {}
    for paths in alike.values():
        pattern = _pattern(paths)
        texts = {_partition_spec_text(specs[path]) for path in paths}
        # A pattern for several paths must match no other path.
        others = [p for p in specs if p not in paths and fnmatchcase(p, pattern)]
        if len(paths) > 1 and len(texts) == 1 and not others:
            rows[pattern] = texts.pop()
        else:
            # A path may contain characters that are special in patterns.
            rows |= {glob.escape(path): _partition_spec_text(specs[path]) for path in paths}
    return {pattern: text for pattern, text in rows.items() if text != "P()"}


def _partition_spec_text(spec: PartitionSpec) -> str:
    """Return a spec as text, without trailing None."""
    return spec_text(from_partition_spec(spec))


def _pattern(paths: Sequence[str]) -> str:
    """Return the pattern of paths with different numbers, with a star for each different number."""
    numbers = list(zip(*(_NUMBER.findall(path) for path in paths), strict=True))
    texts = _NUMBER.split(glob.escape(paths[0]))
    same = [each[0] if len(set(each)) == 1 else "*" for each in numbers]
    return "".join(text + number for text, number in zip(texts, [*same, ""], strict=True))
