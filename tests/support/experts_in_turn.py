"""Steps that go through their experts one by one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxshard_magic

EXPERTS, BEST, ROWS, TIME, WIDTH, HIDDEN, HEADS, WORDS = 8, 2, 16, 10, 32, 64, 8, 64

F32 = 4

Params = dict[str, Any]

Form = Callable[[Params, jax.Array], jax.Array]


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) * shape[-2] ** -0.5


def weights(seed: int = 0) -> Params:
    up, down = normal(seed + 1, EXPERTS, WIDTH, HIDDEN), normal(seed + 2, EXPERTS, HIDDEN, WIDTH)
    return {"router": normal(seed, WIDTH, EXPERTS), "up": up, "down": down}


def routed(p: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    best, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), BEST)
    return best / best.sum(-1, keepdims=True), chosen


def trained(loss: Callable[[Any, jax.Array], jax.Array]) -> Callable[..., Any]:
    def train_step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return train_step


def of_form(form: Form) -> Callable[..., Any]:
    return trained(lambda p, x: jnp.mean((form(p, x) - x) ** 2))


def entry_of(form: Form, strategy: str = "ep+dp", axes: str = "data=2 expert=4", params: Any = None) -> Any:
    p, x = weights() if params is None else params, normal(9, ROWS, TIME, WIDTH)
    return jaxshard_magic.shard(of_form(form), strategy, mesh=jaxshard_magic.mesh(axes)).planned(p, x)


def close(got: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


CELLS = (
    """import jax, jax.numpy as jnp

def moe(p, x):
    best, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    out = jnp.zeros_like(x)
    for e in range(8):
        share = jnp.where(chosen == e, best, 0).sum(-1, keepdims=True)
        out = out + share * (jax.nn.gelu(x @ p["up"][e]) @ p["down"][e])
    return out

shapes = {"router": (32, 8), "up": (8, 32, 64), "down": (8, 64, 32)}
p = {name: 0.1 * jax.random.normal(jax.random.key(i), shape) for i, (name, shape) in enumerate(shapes.items())}
x = jax.random.normal(jax.random.key(3), (16, 12, 32))
""",
    """%%shard ep
def train_step(p, x):
    loss, grad = jax.value_and_grad(lambda p: jnp.mean((moe(p, x) - x) ** 2))(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grad), loss
""",
    "p, loss = train_step(p, x)",
)
