"""What a long session keeps of the cells that ran in it: what it compiled itself stays, what we compile goes."""

import gc
import weakref

import IPython
import jax
import pytest
from conftest import Notebook, shell
from support.cells import GIVEN, STEP

CELL = f"%%shard fsdp;\n{STEP}\nafter, loss = train_step(state, batch)\n"
TRACED = """
traces = []

@jax.jit
def doubled(x):
    traces.append(x)
    return 2 * x

doubled(1.0)
"""


def alive() -> int:
    """The programs that are compiled and loaded."""
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


@pytest.mark.parametrize(
    "cell", ["%shard code;", "%shard explore state;", CELL, CELL.replace("fsdp;", "dp,fsdp --dry-run;")]
)
def test_a_jit_that_the_session_ran_before_is_not_traced_again(given, cell):
    given.run(TRACED)
    given.run(CELL)
    given.run(cell)
    given.run("doubled(2.0)")
    assert len(given["traces"]) == 1


@pytest.mark.ci
def test_programs_of_a_cell_that_runs_again_do_not_pile_up(given):
    counts = []
    for _ in range(4):
        given.run(GIVEN)
        given.run(CELL)
        given.run("home = get_ipython().run_line_magic('shard', 'code')")
        counts.append(alive())
    assert counts[1] == counts[-1]


def step_of_a_notebook() -> weakref.ref:
    with shell() as opened:
        opened.run_line_magic("load_ext", "jaxshard_magic")
        notebook = Notebook(opened)
        notebook.run(GIVEN)
        notebook.run("%mesh data=8;")
        notebook.run(CELL)
        return weakref.ref(notebook["train_step"])


@pytest.mark.skipif(IPython.version_info[0] < 8, reason="IPython 7 keeps every shell of a process itself")
def test_a_notebook_of_the_tests_is_gone_after_its_test():
    """Thousands of them in one process would slow it down, and the memory mappings of their programs abort it."""
    step_of_a_notebook()  # IPython keeps something of the first that a process has
    step = step_of_a_notebook()
    gc.collect()
    assert step() is None
