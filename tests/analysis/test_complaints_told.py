"""What the compiler complains of while a step compiles is told in its report, and is no noise under the cell."""

import random

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard_magic


def test_a_full_rematerialization_is_a_finding_and_not_text_on_stderr(capfd):
    mesh = jaxshard_magic.mesh("x=4 y=2")

    once = random.random()  # else a later run has the program from jax's cache, and the compiler says nothing

    def train_step(w, batch):
        def loss(w):
            held = jax.lax.with_sharding_constraint(batch * w, NamedSharding(mesh, P("y", None, "x")))
            moved = jax.lax.with_sharding_constraint(jnp.sin(held), NamedSharding(mesh, P(None, ("x", "y"), None)))
            return jnp.sum(moved**2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - once * grad, value

    first = train_step.__code__.co_firstlineno
    step = jaxshard_magic.shard(train_step, "spmd", mesh=mesh)
    step.prepare(jnp.ones(()), jnp.ones((16, 32, 64)))
    told = [a for a in step.report().advice if a.code == "full-remat"]
    assert told and all(a.level == "warning" for a in told)
    lines = [f"line {first + n}" for n in range(1, 6)]
    assert any(line in a.message for a in told for line in lines)
    assert "rematerialization" not in capfd.readouterr().err


def test_a_step_that_the_compiler_does_not_complain_of_has_no_such_finding():
    step = jaxshard_magic.shard(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.sum(x @ w))(w), "dp", mesh="data=8")
    step.prepare(jnp.ones((4, 4)), jnp.ones((8, 4)))
    assert [a for a in step.report().advice if a.code in ("full-remat", "compiler")] == []
