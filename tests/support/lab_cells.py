"""The cells of a notebook in JupyterLab."""

START, SHARD, READ, AGAIN, COMPARE, LOOP, LOOPED, STRATEGY, PRECISION, CHIP = range(10)

CELLS = [
    """\
%load_ext jaxshard_magic
import jax, jax.numpy as jnp
weights = {"up": jnp.full((64, 256), 0.01), "down": jnp.full((256, 64), 0.01)}
batch = jnp.ones((16, 64))
%mesh data=4 model=2;""",
    """\
%%shard fsdp -o report
@jax.jit
def train_step(weights, batch):
    def loss_fn(weights):
        return jnp.mean((jax.nn.relu(batch @ weights["up"]) @ weights["down"]) ** 2)
    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, grads), loss""",
    "print(report.view.tab, report.view.leaf, report.view.device)",
    "%shard",
    """\
%%shard dp,fsdp,tp,fsdp+tp --mesh data=8 --vary remat=none,full,dots --repeat 30000
weights, loss = train_step(weights, batch)""",
    "for _ in range(7):\n    weights, loss = train_step(weights, batch)",
    "%shard",
    "%%shard fs",
    "%%shard fsdp --precision ",
    "%mesh v5",
]
