"""A program of plain JAX put together from the user's own text, tables of where arrays lie, and a few functions."""

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec

from ..errors import ShardError
from ..program.mapped import PerDevice
from ..program.trace import Traced, path_name
from . import inside, wrappers
from .cells import Piece, imported
from .edits import Edit, of_piece
from .tables import table

if TYPE_CHECKING:
    from ..program.peel import Peeled
    from ..step.entry import Entry

WIDTH = 100  # columns of a program
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
    *(f.__name__ for f in (*inside.INSIDE, *_CALLING)),
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
_COMPILED = "jax.jit(program, "  # in the functions that call a step
_PLACED = (  # in those as well, and what stands there on several hosts
    (re.compile(r"jax\.device_put\((\w+), where\(\1, ARGUMENTS\)\)"), r"on_mesh(\1)"),
    (
        re.compile(r"jax\.device_put\((\w+), \[where\(s, ARGUMENTS\) for s in \1\]\)"),
        r"[on_mesh(s) for s in \1]",
    ),
)
_PROSE_OR_NAME = re.compile(r'(?P<prose>""".*?"""|#[^\n]*)|(?<![\w."])(?P<name>[A-Za-z_]\w*)', re.DOTALL)
_NAMED = re.compile(r"(?<=`)\w+|\b[A-Z_]{2,}\b")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Program:
    """What a program is put together from.

    `path`: what its step goes by; `functions`: those of `wrappers` and `inside` that it has; `notes`: what its reader
    has to know, by paragraphs. `devices`: how many simulated ones it makes for itself, None for the machine's; `hosts`:
    how many run it at once, with as many devices each, and `host_rows` the arguments of which each has its own rows.
    `call`: how its last line calls the step, where no piece does. `examples`: the mesh axes that divide them.
    `unwrapped`: the step stands under a `jax.pmap` of its own, which is left out. `numbers`: the types of numbers
    that are arrays to it, `static`: its arguments that never are; `donated`: those whose memory the results take.
    """

    pieces: Sequence[Piece]
    path: str
    axes: Mapping[str, int]
    arguments: Mapping[str, PartitionSpec]
    results: Mapping[str, PartitionSpec]
    functions: tuple[Callable[..., Any], ...]
    edits: Mapping[str, list[Edit]]
    notes: Sequence[str] = ()
    devices: int | None = None
    call: str | None = None
    examples: tuple[str, ...] = ()
    unwrapped: bool = False
    numbers: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    donated: tuple[str, ...] = ()
    hosts: int = 1
    host_rows: tuple[str, ...] = ()

    def text(self) -> str:
        """The program, as ruff formats it."""
        return formatted(self.source())

    def source(self) -> str:
        """The program as it is put together."""
        early = [p for p in self.pieces if p.early]
        imports = [p for p in self.pieces if p.imports]
        rest = [p for p in self.pieces if not (p.imports or p.early)]
        own = "\n\n\n".join(self._own())
        made = [i for i, p in enumerate(rest) if p.makes]
        at = made[-1] + 1 if made else next((i for i, p in enumerate(rest) if p.calls), len(rest))
        inner = f"{self.path}.__wrapped__" if self.unwrapped else self.path
        sharded = f"{self.path} = {self.name('sharded')}({inner})"
        body = [*(self._piece(p) for p in rest[:at]), sharded, *(self._piece(p) for p in rest[at:])]
        head = [*self._imports(own), *(self._piece(p) for p in imports)]
        sections = [
            self._docstring(),
            "\n".join([*(["import os, sys"] if early else []), *(self._piece(p) for p in early)]),
            "\n".join(head),
            self._devices(),
            own,
            "\n\n".join(body),
            self.call or "",
        ]
        return "\n\n".join(filter(None, sections)) + "\n"

    def name(self, own: str) -> str:
        """What the program calls a thing of its own: no name of the user's."""
        theirs = self._imported.get(own)
        if own in _MODULES and theirs == _full(_MODULES[own]):
            return own
        module = (
            own in _MODULES and own != "P"
        )  # what stands in functions of the user's may not be hidden there either
        taken = theirs is not None or own in self._bound if module else own in self._used
        return f"sharding_{own}" if taken else own

    @cached_property
    def _trees(self) -> list[ast.Module]:
        return [ast.parse(textwrap.dedent(self._piece(p))) for p in self.pieces]

    @cached_property
    def _imported(self) -> dict[str, str]:
        return imported(*self._trees)

    @cached_property
    def _bound(self) -> set[str]:
        """The names that pieces give a value at their top, not by importing."""
        statements = [s for tree in self._trees for s in tree.body]
        defined = {s.name for s in statements if isinstance(s, _DEFINITIONS)}
        rest = (n for s in statements if not isinstance(s, _DEFINITIONS) for n in ast.walk(s))
        return defined | {n.id for n in rest if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}

    @cached_property
    def _used(self) -> set[str]:
        return set(re.findall(r"[A-Za-z_]\w*", "\n".join(piece.text for piece in self.pieces)))

    def _own(self) -> list[str]:
        sizes, names = tuple(self.axes.values()), tuple(self.axes)
        types = f"axis_types=(AxisType.Auto,) * {len(names)}"
        constants = []
        if {inside.in_microbatches, inside.in_shards} & {*self.functions}:
            comment = "# The mesh axes that the examples are divided over."
            constants.append(f"{comment}\n{self.name('EXAMPLES')} = {self.examples!r}")
        if wrappers.apart in self.functions:
            constants.append(
                f"# Numbers of these types are arrays to the step, but for these arguments.\n"
                f"{self.name('NUMBERS')} = ({''.join(f'{n}, ' for n in self.numbers)})\n"
                f"{self.name('STATIC')} = {self.static!r}"
            )
        if self.donated:
            comment = "# Arguments whose memory the step's results take."
            constants.append(f"{comment}\n{self.name('DONATED')} = {self.donated!r}")
        if self.hosts > 1:
            comment = "# Arguments of which each host has rows of its own."
            constants.append(f"{comment}\n{self.name('HOST_ROWS')} = {self.host_rows!r}")
        tables = [*constants, self._table("ARGUMENTS", self.arguments), self._table("RESULTS", self.results)]
        functions = [self._renamed(self._function(f)) for f in self.functions]
        return [self._renamed(f"mesh = jax.make_mesh({sizes}, {names}, {types})"), *tables, *functions]

    def _function(self, f: Callable[..., Any]) -> str:
        text = text_of(f)
        if self.hosts > 1 and text.startswith("def sharded("):
            for alone, on_hosts in _PLACED:
                text = alone.sub(on_hosts, text)
        donates = self.donated and text.startswith("def sharded(")
        return text.replace(_COMPILED, "donating(program, ") if donates else text

    def _table(self, name: str, specs: Mapping[str, PartitionSpec]) -> str:
        title = {"ARGUMENTS": "Where the step's arguments lie", "RESULTS": "Where its results lie"}[name]
        rows = [f"    {pattern!r}: {self._renamed(spec)}," for pattern, spec in table(specs).items()]
        head = f"# {title}, by their paths; arrays that no pattern matches have a copy on every device."
        return "\n".join([head, f"{self.name(name)} = {{", *rows, "}"])

    def _piece(self, piece: Piece) -> str:
        return of_piece(piece, self.edits)

    def _imports(self, own: str) -> list[str]:
        used = {name.removeprefix("sharding_") for name in re.findall(r"[A-Za-z_]\w*", own)} | {"P", "jax"}
        return [self._import(name) for name in _MODULES if name in used]

    def _import(self, name: str) -> str:
        line, own = _MODULES[name], self.name(name)
        return line if own == name else f"{line.removesuffix(f' as {name}')} as {own}"

    def _devices(self) -> str:
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
        return self._renamed("\n\n".join(found))

    def _docstring(self) -> str:
        return '"""' + "\n\n".join(self.notes).replace('"""', "'''").replace("\\", "\\\\") + '\n"""'

    def _renamed(self, text: str) -> str:
        """`text` with what the program calls its own things. In its prose these are the words that are in capitals or
        first between backticks."""
        names = {own: self.name(own) for own in (*_OWN, *_MODULES)}

        def one(found: re.Match[str]) -> str:
            if found["prose"]:
                return _NAMED.sub(lambda name: names.get(name[0], name[0]), found["prose"])
            return names.get(found["name"], found["name"])

        return _PROSE_OR_NAME.sub(one, text)


def axes_of(entry: "Entry") -> dict[str, str]:
    """What a program calls the mesh axes: as a step written for one device has them in its collectives."""
    names = {axis: axis for axis in entry.plan.mesh.axis_names}
    if isinstance(entry.traced, PerDevice):
        names |= {axis: str(name) for name, (axis, *_) in entry.traced.mapped.axes.items()}
    return names


def renamed(spec: PartitionSpec, names: Mapping[str, str]) -> PartitionSpec:
    """The spec with other names for the mesh axes."""
    return PartitionSpec(
        *(tuple(names[a] for a in e) if isinstance(e, tuple) else e and names[e] for e in spec)
    )


def specs_of(entry: "Entry") -> tuple[dict[str, PartitionSpec], dict[str, PartitionSpec]]:
    """Where arguments and results lie, by their paths, in the program's names of the mesh axes; arrays that the step
    closes over are neither."""
    traced, plan, names = entry.traced, entry.plan, axes_of(entry)
    inputs = [(p, renamed(s, names)) for p, s in zip(traced.in_paths, plan.in_specs, strict=True)][
        len(traced.consts) :
    ]
    outputs = [
        (path_name(p), renamed(s, names)) for p, s in zip(traced.out_paths, plan.out_specs, strict=True)
    ]
    results = {name.partition(".")[2]: s for name, s in outputs if name.partition(".")[0] == "return"}
    return {path_name(p): s for p, s in inputs}, results


def donated_of(entry: "Entry") -> tuple[str, ...]:
    """The arguments whose arrays the step takes over, all but single numbers."""
    n, found = len(entry.traced.consts), dict[str, bool]()
    if isinstance(entry.traced, PerDevice):
        return ()
    for i, (path, aval) in enumerate(
        zip(entry.traced.in_paths[n:], entry.traced.closed.in_avals[n:], strict=True)
    ):
        if aval.shape:
            root = path_name(path[:1])
            found[root] = found.get(root, True) and i in entry.donated
    return tuple(root for root, whole in found.items() if whole)


def wrapper_of(
    call: "Peeled", traced: Traced, *, donates: bool = False, hosts: int = 1
) -> tuple[Callable[..., Any], ...]:
    """The functions of `wrappers` that call a step of this kind."""
    across = [wrappers.on_mesh] if hosts > 1 else []
    donating = [wrappers.donating] if donates else []
    usual = (wrappers.where, *across, wrappers.arguments, wrappers.called, *donating)
    if isinstance(traced, PerDevice):
        return *usual, wrappers.sharded_places if traced.mapped.device_axis else wrappers.sharded_parts
    if call.nodes is not None:
        return *usual, wrappers.sharded_objects
    if call.held or call.statics:
        return *usual, wrappers.apart, wrappers.together, wrappers.sharded_arrays
    return *usual, wrappers.sharded


def _full(line: str) -> str:
    """What a name stands for that this line imports."""
    (full,) = imported(ast.parse(line)).values()
    return full


def text_of(function: Callable[..., Any]) -> str:
    """A function of `wrappers` or `inside` as a program has it."""
    return re.sub(r"\bdef sharded_\w+\(", "def sharded(", inspect.getsource(function)).rstrip()


def formatted(text: str) -> str:
    """The text with its imports in order and as ruff formats it. Raises ShardError where it is not Python."""
    sort = [
        "check",
        "--select=I001,F811",
        "--fix-only",
        "--quiet",
        "--config=lint.isort.combine-as-imports=true",
    ]
    for how in (sort, ["format", f"--line-length={WIDTH}"]):
        command = [sys.executable, "-m", "ruff", *how, "--isolated", "-"]
        done = subprocess.run(
            command, input=text, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
        if done.returncode:
            raise ShardError(f"ruff can't format the program: {done.stderr.strip().splitlines()[-1]}")
        text = done.stdout
    return text
