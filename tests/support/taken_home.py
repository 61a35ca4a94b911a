"""Steps of the zoo as the cells of a notebook, and what `%shard code` makes of them run without the package."""

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import zoo
from conftest import Notebook
from support.forked import printed
from zoo import equinox_steps, linen_steps, nnx_transformers, parts, plain_steps, transformers

from jaxshard_magic.analysis.collectives import collectives
from jaxshard_magic.codegen import Code
from jaxshard_magic.codegen.edit_search import CollectiveCounts, count_collectives

CALL = """from typing import Any, NamedTuple

class Call(NamedTuple):
    fn: Any
    args: tuple
"""
SAVED = """
import sys
import jax, numpy as np
named = {"result": result, **changed}
leaves = [(jax.tree_util.keystr(p, simple=True, separator=".").removesuffix(".value"), x)
          for p, x in jax.tree_util.tree_flatten_with_path(named)[0] if isinstance(x, (jax.Array, np.ndarray))]
plain = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
np.savez(sys.argv[1], **{n: np.asarray(plain(x)) for n, x in leaves})
assert "jaxshard_magic" not in sys.modules
"""


@dataclass(frozen=True)
class Home:
    """A step of the zoo, and the module that its text is of; `changes`: the arguments that it changes in place;
    `positions`: can they be divided?"""

    name: str
    module: ModuleType
    changes: tuple[str, ...] = ()
    positions: bool = False

    @property
    def step(self) -> zoo.Step:
        return zoo.STEPS[self.name]

    @property
    def parameters(self) -> list[str]:
        return list(self.step.make().arguments())

    def cells(self, line: str) -> list[str]:
        """Definitions, arguments, and the step's own cell."""
        names = ", ".join(self.parameters)
        made = f"call = {self.name}()\n{names}, = call.args\ntrain_step = call.fn\n"
        changed = ", ".join(f'"{name}": {name}' for name in self.changes)
        run = f"%%shard {line}\nresult = train_step({names})\nchanged = {{{changed}}}\n"
        return [CALL + _text(parts) + _text(self.module), made, run]


FIVE = (
    Home("dict_of_arrays", plain_steps),
    Home("transformer_scanned", transformers, positions=True),
    Home("linen_train_state", linen_steps),
    Home("nnx_transformer", nnx_transformers, ("model", "optimizer"), positions=True),
    Home("equinox_filter_jit", equinox_steps),
)
MESHES = (  # every strategy, on meshes of one, two and three axes
    ("dp", "data=8"),
    ("fsdp", "data=8"),
    ("tp", "model=8"),
    ("dp+fsdp", "data=4 fsdp=2"),
    ("dp+tp", "data=2 model=4"),
    ("fsdp+tp", "data=4 model=2"),
    ("dp+fsdp+tp", "data=2 fsdp=2 model=2"),
)
POSITIONS = (("sp", "seq=4"), ("dp+tp+sp", "data=2 model=2 seq=2"), ("fsdp+tp+sp", "data=4 model=2"))


def code(notebook: Notebook, home: Home, line: str, mesh: str) -> Code:
    """What `%shard code` gives after the cells ran."""
    notebook.run(f"%mesh {mesh};")
    definitions, made, run = home.cells(line)
    for cell in (definitions, made, run):
        notebook.run(cell)
    return notebook.run("%shard code")


@dataclass(frozen=True)
class Run:
    """What a program gave in a bare process: its numbers by name, and the collectives that it was compiled to."""

    numbers: Mapping[str, np.ndarray]
    moves: CollectiveCounts


def bare(program: Code, folder: Path) -> Run:
    """Run a program in a process that has not the package."""
    saved, dumped = folder / "numbers.npz", folder / "hlo"
    dump = [f"--xla_dump_to={dumped}", "--xla_dump_hlo_as_text", "--xla_dump_hlo_module_re=jit_program"]
    printed(program.text + SAVED, saved, flags=dump)
    (text,) = dumped.glob("*jit_program*after_optimizations.txt")
    return Run(dict(np.load(saved)), count_collectives(collectives(text.read_text(), program.mesh)))


def plain(home: Home) -> dict[str, np.ndarray]:
    """The numbers of the step as it is."""
    call = home.step.make()
    result = call.run()
    return zoo.numbers(call, result)


def proved(notebook: Notebook, folder: Path, home: Home, line: str, mesh: str) -> Code:
    """What `%shard code` gives, once it has run alone with the plain step's numbers and moved what it says it moves."""
    program = code(notebook, home, line, mesh)
    run = bare(program, folder)
    assert_the_same_numbers(run.numbers, home)
    assert run.moves == program.moves
    return program


def assert_the_same_numbers(numbers: Mapping[str, np.ndarray], home: Home) -> None:
    """As the plain step has them, to the rounding that the zoo allows."""
    expected = plain(home)
    assert numbers.keys() == expected.keys()
    for name, x in expected.items():
        if name not in home.step.noise and x.size:
            atol = home.step.tolerance * np.abs(x.astype(np.float64)).max()
            np.testing.assert_allclose(numbers[name], x, rtol=0, atol=atol, err_msg=name)


def _text(module: ModuleType) -> str:
    """A module of the zoo without what registers its steps, and without imports from its neighbours."""
    text = inspect.getsource(module)
    lines: list[Any] = text.splitlines()
    for node in ast.parse(text).body:
        gone = [d for d in getattr(node, "decorator_list", []) if ast.unparse(d).startswith("step(")]
        if isinstance(node, ast.ImportFrom) and node.level:
            gone = [node]
        for each in gone:
            lines[each.lineno - 1 : each.end_lineno] = [None] * ((each.end_lineno or 0) - each.lineno + 1)
    return "\n".join(line for line in lines if line is not None) + "\n"
