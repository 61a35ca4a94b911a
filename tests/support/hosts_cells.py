"""Notebooks of five makes, cell by cell. Each has a cell that prints a number, and one that `STEP` is the place of."""

NNX = [
    """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
""",
    """
class MLP(nnx.Module):
    def __init__(self, rngs, width=32):
        self.up, self.drop = nnx.Linear(16, width, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(width, 16, rngs=rngs)
    def __call__(self, x):
        return self.down(self.drop(nnx.relu(self.up(x))))
""",
    """
model = MLP(nnx.Rngs(0))
schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 100)
optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)), wrt=nnx.Param)
metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
x = np.random.default_rng(0).normal(size=(64, 16)).astype("f")
y = np.roll(x, 1, 1)
def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
""",
    """
%%shard fsdp
@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss
for i in range(3):
    loss = train_step(model, optimizer, {"x": x, "y": y})
    metrics.update(loss=loss)
print(float(loss))
""",
    """
for epoch in range(2):
    for i in range(0, 64, 32):
        loss = train_step(model, optimizer, {"x": x[i:i+32], "y": y[i:i+32]})
print(float(loss), metrics.compute())
""",
    """
@nnx.jit
def evaluate(model, x, y):
    return jnp.mean((model(x) - y) ** 2)
h = x @ np.ones((16, 4), "f")
print(float(evaluate(train_step.gather(model), x, y)), h.shape)
""",
]
LINEN = [
    """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import linen as nn
from flax.training import train_state
from functools import partial
class TrainState(train_state.TrainState):
    key: jax.Array
class CNN(nn.Module):
    features: int = 8
    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.relu(nn.Conv(self.features, (3, 3))(x))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(10)(x.reshape((x.shape[0], -1)))
""",
    """
def create_state(key, lr=1e-2):
    net = CNN()
    params = net.init({"params": key, "dropout": key}, jnp.ones((1, 8, 8, 1)))["params"]
    return TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(lr, momentum=0.9), key=key)
state = create_state(jax.random.key(0))
rng = np.random.default_rng(0)
images, labels = rng.normal(size=(32, 8, 8, 1)).astype("f"), rng.integers(0, 10, 32)
batches = [{"image": images[i:i+16], "label": labels[i:i+16]} for i in (0, 16)]
""",
    """
%%shard dp
@jax.jit
def train_step(state, batch):
    dropout = jax.random.fold_in(state.key, state.step)
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["image"], rngs={"dropout": dropout})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss
for batch in batches:
    state, loss = train_step(state, batch)
print(float(loss))
""",
    """
@partial(jax.jit, static_argnames=("train",))
def accuracy(state, batch, train=False):
    logits = state.apply_fn({"params": state.params}, batch["image"], train=train)
    return (logits.argmax(-1) == batch["label"]).mean()
whole = train_step.gather(state)
print(sum(float(accuracy(whole, b)) for b in batches) / len(batches))
""",
]
EQUINOX = [
    """
import jax, jax.numpy as jnp, numpy as np, optax, equinox as eqx
class Net(eqx.Module):
    layers: list
    scale: float = eqx.field(static=True)
    def __init__(self, key, scale=0.5):
        a, b = jax.random.split(key)
        self.layers, self.scale = [eqx.nn.Linear(16, 32, key=a), eqx.nn.Linear(32, 16, key=b)], scale
    def __call__(self, x):
        return self.layers[1](jax.nn.gelu(self.layers[0](x))) * self.scale
""",
    """
model = Net(jax.random.PRNGKey(0))
optim = optax.adam(1e-2)
opt_state = optim.init(eqx.filter(model, eqx.is_array))
x = np.random.default_rng(0).normal(size=(32, 16)).astype("f")
@eqx.filter_value_and_grad
def compute_loss(model, x):
    return jnp.mean((jax.vmap(model)(x) - x) ** 2)
""",
    """
%%shard fsdp
@eqx.filter_jit
def train_step(model, opt_state, x):
    loss, grads = compute_loss(model, x)
    updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss
for step in range(3):
    model, opt_state, loss = train_step(model, opt_state, x)
print(float(loss))
""",
    """
losses = [float(loss)]
while len(losses) < 3:
    model, opt_state, loss = train_step(model, opt_state, x)
    losses.append(float(loss))
whole = train_step.gather(model)
print(losses[-1], float(compute_loss(whole, x)[0]), [layer.weight.shape for layer in whole.layers])
""",
]
DICTS = [
    """
import jax
import jax.numpy as jnp
import numpy as np
import math
from collections import namedtuple
Hyper = namedtuple("Hyper", "width lr beta")
hp = Hyper(32, 1e-2, 0.9)
def init(key):
    one, two = jax.random.split(key)
    return {
        "w1": jax.random.normal(one, (16, hp.width)) / math.sqrt(16),
        "b1": jnp.zeros(hp.width),
        "w2": jax.random.normal(two, (hp.width, 1)) / math.sqrt(hp.width),
    }
""",
    """
params = init(jax.random.key(1))
velocity = jax.tree.map(jnp.zeros_like, params)
data = np.random.RandomState(0).randn(64, 16).astype(np.float32)
target = (data.sum(1, keepdims=True) > 0).astype(np.float32)
def forward(params, x):
    h = jnp.tanh(x @ params["w1"] + params["b1"])
    return h @ params["w2"]
@jax.custom_vjp
def clip_gradient(x): return x
clip_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))
@jax.checkpoint
def loss_fn(params, x, y):
    return jnp.mean((clip_gradient(forward(params, x)) - y) ** 2)
""",
    """
%%shard dp
def train_step(params, velocity, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    velocity = jax.tree.map(lambda v, g: hp.beta * v + g, velocity, grads)
    return jax.tree.map(lambda p, v: p - hp.lr * v, params, velocity), velocity, loss
for i in range(3):
    params, velocity, loss = train_step(params, velocity, data, target)
print(float(loss))
""",
    """
best = float("inf")
for i in range(3):
    params, velocity, loss = train_step(params, velocity, data, target)
    if (now := float(loss)) < best: best = now
h = forward(params, data) > 0.5
print(best, float((h == target).mean()))
""",
]
TRAINER = [
    """
import dataclasses, enum, functools
import jax, jax.numpy as jnp, numpy as np, optax
from typing import Callable
class Act(enum.Enum):
    RELU = "relu"
    TANH = "tanh"
@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 32
    lr: float = 1e-2
    act: Act = Act.TANH
    init: Callable = dataclasses.field(default_factory=lambda: functools.partial(jax.random.normal, dtype=jnp.float32))
    def optimizer(self): return optax.adam(self.lr)
""",
    """
class Loader:
    def __init__(self, n=64, batch=16, seed=0):
        self.x = np.random.default_rng(seed).normal(size=(n, 16)).astype("f")
        self.y, self.batch = self.x[:, ::-1].copy(), batch
    def __iter__(self):
        for i in range(0, len(self.x), self.batch):
            yield {"x": self.x[i:i+self.batch], "y": self.y[i:i+self.batch]}
class Trainer:
    def __init__(self, cfg, loader):
        self.cfg, self.loader, self.opt, self.history = cfg, loader, cfg.optimizer(), []
        one, two = jax.random.split(jax.random.key(0))
        self.params = {"a": cfg.init(one, (16, cfg.width)) / 4, "b": cfg.init(two, (cfg.width, 16)) / 8}
        self.state = self.opt.init(self.params)
    def loss(self, params, batch):
        act = jnp.tanh if self.cfg.act is Act.TANH else jax.nn.relu
        return jnp.mean((act(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2)
    def fit(self, step, epochs=1):
        for epoch in range(epochs):
            for batch in self.loader:
                self.params, self.state, loss = step(self.params, self.state, batch)
                self.history.append(float(loss))
        return self.history[-1]
cfg, loader = Config(width=64), Loader()
trainer = Trainer(cfg, loader)
""",
    """
%%shard fsdp
def train_step(params, state, batch):
    loss, grads = jax.value_and_grad(trainer.loss)(params, batch)
    updates, state = trainer.opt.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss
print(trainer.fit(train_step))
""",
    """
print(trainer.fit(train_step, epochs=2), len(trainer.history), trainer.cfg is cfg, trainer.loader is loader)
""",
]
NOTEBOOKS = {"nnx": NNX, "linen": LINEN, "equinox": EQUINOX, "dicts": DICTS, "trainer": TRAINER}


def step_of(cells: list[str]) -> int:
    """The place of the cell with the step."""
    return next(i for i, cell in enumerate(cells) if "%%shard" in cell)
