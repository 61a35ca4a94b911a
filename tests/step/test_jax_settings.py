"""Settings of JAX hold for a sharded step as for a plain one, or one line says why they can't."""

from collections.abc import Iterator

import jax
import pytest
from support.cells import GIVEN, LOOP, STEP, one_line

LINES = (
    "pp --mesh pipe=2 --microbatches 2",
    "dp --mesh data=4 --microbatches 2 --donate",
    "fsdp --mesh data=4 --check",
    "fsdp+tp --mesh 'data=2 model=2'",
)
FULL = pytest.mark.full
FIRST = [LINES[0], *(pytest.param(line, marks=FULL) for line in LINES[1:])]
DEEP = """
state = {"w": jnp.ones((16, 16)) / 16, "v": jnp.ones((16, 8))}
def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)
"""


@pytest.fixture
def deep(notebook) -> Iterator:
    """A notebook with a step of two layers, and JAX's settings put back behind it."""
    notebook.run(GIVEN + DEEP)
    notebook.run("%config ShardSession.options_limit = 0")
    before = {
        name: getattr(jax.config, name)
        for name in (
            *("jax_debug_nans", "jax_debug_infs", "jax_disable_jit"),
            *("jax_check_tracer_leaks", "jax_transfer_guard"),
        )
    }
    yield notebook
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("line", FIRST)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_check_tracer_leaks", True),
        ("jax_transfer_guard", "disallow"),
        pytest.param("jax_transfer_guard", "disallow_explicit", marks=FULL),
        pytest.param("jax_debug_nans", True, marks=FULL),
    ],
)
def test_a_step_runs_under_it(deep, name, value, line):
    jax.config.update(name, value)
    deep.run(f"%%shard {line};{STEP}{LOOP}")


@pytest.mark.parametrize("line", [LINES[1], *(pytest.param(line, marks=FULL) for line in LINES[::2])])
def test_a_nan_is_found_at_its_operation_and_the_state_stays(deep, line):
    deep.run("loss_of = loss_fn\ndef loss_fn(params, batch):\n    return jnp.log(loss_of(params, batch) - 1e9)")
    before = deep["state"]
    with jax.debug_nans(True):
        error = deep.fails(f"%%shard {line};{STEP}{LOOP}")
    assert type(error) is FloatingPointError
    assert "log" in str(error)
    assert deep["state"] is before and not before["w"].is_deleted()


@FULL
def test_what_a_stage_holds_and_the_step_does_not_give_is_no_nan(deep):
    masked = "h = jnp.where(batch['x'] > 9, jnp.inf, batch['x'])\n    h = jnp.where(jnp.isinf(h), 0, h)"
    deep.run(DEEP.replace("    return", f"    {masked}\n    return").replace('batch["x"] @', "h @"))
    jax.config.update("jax_debug_infs", True)
    deep.run(f"%%shard pp --mesh pipe=2 --microbatches 2;{STEP}{LOOP}")


@pytest.mark.parametrize("line", FIRST)
def test_an_array_on_the_host_is_one_line_where_jit_takes_none(deep, capsys, line):
    deep.run(f"import numpy as np\nbatch = jax.tree.map(np.asarray, batch){STEP}")
    with jax.transfer_guard("disallow"):
        said = one_line(deep, capsys, f"%%shard {line};{LOOP}")
    assert "batch.x is on the host: put it on a device first, batch = jax.device_put(batch)" in said


def test_without_jit_there_is_nothing_to_shard(deep, capsys):
    deep.run(STEP)
    jax.config.update("jax_disable_jit", True)
    for line in (*LINES, "auto --among dp --mesh data=4"):
        assert "jax_disable_jit is set" in one_line(deep, capsys, f"%%shard {line};{LOOP}")
