"""The cells before a `%shard code`: a model, its arguments, a step and a call."""

MODEL = """import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P

SIZE = 16


# squares, summed
def loss_of(w, x):
    return jnp.mean((x @ w) ** 2)
"""
ARGUMENTS = "w, x = jnp.ones((SIZE, SIZE)), jnp.ones((8, SIZE))"
STEP = """def train_step(w, x):
    loss, grad = jax.value_and_grad(loss_of)(w, x)
    return w - 0.1 * grad, loss
"""
CALL = "w, loss = train_step(w, x)"


def begun(notebook):
    """A notebook that has a mesh, the model and the arguments."""
    notebook.run("%mesh data=8;")
    notebook.run(MODEL)
    notebook.run(ARGUMENTS)
    return notebook
