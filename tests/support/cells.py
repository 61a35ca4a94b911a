"""Cells that the tests of the magics run, and what they say of their outcome."""

import textwrap
from typing import Any

import numpy as np
from IPython.core.error import UsageError

GIVEN = """
import functools
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
state = {"w": jnp.ones((16, 8)), "b": jnp.zeros(8)}
batch = {"x": jnp.arange(8 * 16.0).reshape(8, 16) / 100, "y": jnp.ones((8, 8))}
def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)
"""
STEP = """
def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss
"""
LOOP = """
for _ in range(3):
    state, loss = train_step(state, batch)
"""
NNX_STEP = """
@nnx.jit
def train_step(model, optimizer, batch):
    def loss_fn(model):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss
"""
FAST = STEP.replace("def ", "@jax.jit\ndef ")


def close(state, expected) -> bool:
    return all(np.allclose(state[name], expected[name], rtol=1e-5, atol=1e-6) for name in expected)


def one_line(notebook, capsys, cell: str) -> str:
    """The cell fails with one printed line, and leaves every name of the notebook as it was."""
    hidden = {"_", "__", "___", "In", "Out", "_ih", "_oh", "_i", "_ii", "_iii", "_exit_code"}
    before = {k: v for k, v in notebook.shell.user_ns.items() if k not in hidden}
    capsys.readouterr()
    error = notebook.fails(cell)
    assert type(error) is UsageError, repr(error)
    assert capsys.readouterr().err == f"UsageError: {error}\n"
    assert "\n" not in str(error)
    after = notebook.shell.user_ns
    assert all(after[name] is value for name, value in before.items())
    assert [name for name in after.keys() - before.keys() - hidden if name[0] != "_"] == []
    return str(error)


def made(source: str, **globals_: Any) -> dict[str, Any]:
    """The namespace after running `source`, whose functions then count as the user's."""
    namespace = {"__name__": "__main__", **globals_}
    exec(textwrap.dedent(source), namespace)
    return namespace
