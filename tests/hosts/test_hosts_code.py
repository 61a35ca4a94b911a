"""`%shard code` on hosts: the program as it stands, on two processes under jax.distributed, has the hosts' numbers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import several_hosts
from support.cells import NNX_STEP
from support.hosts_notebook import STEP, Hosts, opened

pytestmark = pytest.mark.ci

KEYED = """
@jax.jit
def train_step(weights, batch, key):
    key, used = jax.random.split(key)
    def loss_fn(weights):
        kept = jax.random.bernoulli(used, 0.5, (16, 64))
        return jnp.mean(((batch @ weights["up"]) * kept @ weights["down"] - batch) ** 2)
    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), loss, key
key = jax.random.key(3)
for _ in range(3):
    state, loss, key = train_step(state, x, key)
"""
OBJECTS = """
from flax import nnx
import optax
class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.drop = nnx.Linear(32, 256, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)
        self.down = nnx.Linear(256, 32, rngs=rngs)
    def __call__(self, x):
        return self.down(self.drop(nnx.relu(self.up(x))))
model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
"""
OBJECTS += f"{NNX_STEP}for _ in range(3):\n    loss = train_step(model, optimizer, batch)\n"
OWN_ROWS = "batch = jax.tree.map(lambda rows: rows[8 * jax.process_index():][:8], batch)"
PLAIN = f"{STEP}for _ in range(2):\n    state, loss = train_step(state, batch)\n"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with opened(tmp_path_factory.mktemp("hosts")) as found:
        yield found


@pytest.mark.parametrize(
    ("line", "before", "cell"),
    [
        pytest.param("fsdp", "", PLAIN, marks=pytest.mark.full),
        ("fsdp --donate", "", PLAIN),
        ("fsdp --data per-host", OWN_ROWS, PLAIN),
        pytest.param("dp", "", KEYED, marks=pytest.mark.full),
        ("fsdp", "", OBJECTS),
    ],
    ids=["arrays", "donated", "per-host", "keys", "objects"],
)
def test_the_program_has_the_numbers_of_the_hosts(hosts: Hosts, tmp_path: Path, line: str, before: str, cell: str):
    data = "batch = {'x': x, 'y': x}\n" + before
    hosts.cell(f'state = {{"up": jnp.ones((32, 64)) / 8, "down": jnp.ones((64, 32)) / 8}}\n{data}')
    hosts.cell(f"%%shard {line}\n{cell}")
    loss = float(hosts.cell("print(float(loss))").stdout)
    file = tmp_path / "program.py"
    hosts.cell(f"%shard code --file {file}")
    text = file.read_text()
    assert "jax.distributed.initialize()" in text and "Each of 2 hosts runs this program" in text
    assert ("the batch is all of them together" in text) == bool(before)
    found = several_hosts.run("support.hosts_steps:program", str(file))
    assert found == [pytest.approx(loss, rel=1e-5)] * 2


def test_rows_that_no_host_has_alone_are_refused(hosts: Hosts):
    hosts.cell("%mesh model=8")
    hosts.cell("batch = {'x': x, 'y': x}\n" + OWN_ROWS)
    hosts.cell(f"%%shard tp --data per-host\n{STEP}")
    line, _ = hosts.fails("%shard code")
    assert "plain JAX puts no such rows together" in line
