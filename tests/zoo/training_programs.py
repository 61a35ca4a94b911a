"""Steps as programs hold them: trainers that make or own them, steps nested in functions, packed states, own loops."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.example_libraries import optimizers, stax

from .parts import BATCH, Draw, adam, cross_entropy, linen_variables, mlp, mlp_params, state_roles
from .registry import Call, step

IMAGES: dict[str, int | None] = {"batch.0": 0, "batch.1": 0}


def pictures(seed: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    d = Draw(seed)
    return d.numpy(BATCH, *shape), d.rng.integers(0, 32, BATCH).astype(np.int32)


class Classifier(nn.Module):
    dropout: float = 0.1

    @nn.compact
    def __call__(self, x, train=False):
        x = x.reshape(x.shape[0], -1)
        for width in (128, 64):
            x = nn.Dropout(self.dropout, deterministic=not train)(nn.relu(nn.Dense(width)(x)))
        return nn.Dense(32)(x)


class KeyState(TrainState):
    rng: Any = None


class TrainerModule:
    """A trainer that makes its functions when it is made, as tutorials have it."""

    def __init__(self, model: nn.Module, seed: int, example: Any):
        self.model, self.seed = model, seed
        self.create_functions()
        params = model.init(jax.random.key(seed), example)["params"]
        rng = jax.random.PRNGKey(seed + 1)
        self.state = KeyState.create(apply_fn=model.apply, params=params, tx=adam, rng=rng)

    def create_functions(self) -> None:
        def calculate_loss(params, rng, batch, train):
            images, labels = batch
            logits = self.model.apply({"params": params}, images, train=train, rngs={"dropout": rng})
            return cross_entropy(logits, labels), (logits.argmax(axis=-1) == labels).mean()

        def train_step(state, batch):
            rng, own = jax.random.split(state.rng)
            (loss, accuracy), grads = jax.value_and_grad(calculate_loss, has_aux=True)(state.params, own, batch, True)
            return state.apply_gradients(grads=grads, rng=rng), loss, accuracy

        self.train_step = jax.jit(train_step)


@step(
    "public linen rng",
    batch=IMAGES,
    roles=state_roles("state", rng="rng") | {"batch": "batch"},
    feeds={"state": 0},
    notes="the step is an attribute that a method made; the model is the trainer's",
)
def trainer_makes_its_step(seed: int = 0) -> Call:
    batch = pictures(seed, 8, 8)
    trainer = TrainerModule(Classifier(), seed, batch[0])
    return Call(trainer.train_step, (trainer.state, batch))


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        sizes = (64, 128, 64, 32)
        self.layers = nnx.List([nnx.Linear(m, n, rngs=rngs) for m, n in itertools.pairwise(sizes)])

    def __call__(self, x):
        *hidden, last = self.layers
        for layer in hidden:
            x = nnx.relu(layer(x))
        return last(x)


@nnx.jit
def network_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(batch[0]), batch[1]))(model)
    optimizer.update(model, grads)
    return loss


class OwningTrainer:
    """Model and optimizer are the trainer's own; a step takes a batch and gives a loss."""

    def __init__(self, seed: int):
        self.model = Network(nnx.Rngs(seed))
        self.optimizer = nnx.Optimizer(self.model, adam, wrt=nnx.Param)

    def train_step(self, batch):
        return network_step(self.model, self.optimizer, batch)


@step(
    "public nnx owned",
    batch=IMAGES,
    roles={"batch": "batch"},
    mutates=True,
    notes="the batch is the only argument; what is trained is the trainer's and changes in place",
)
def trainer_owns_its_modules(seed: int = 0) -> Call:
    return Call(OwningTrainer(seed).train_step, (pictures(seed, 64),))


class Perceptron(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __init__(self, key: jax.Array):
        sizes = enumerate(itertools.pairwise((64, 128, 64, 1)))
        self.layers = [eqx.nn.Linear(m, n, key=jax.random.fold_in(key, i)) for i, (m, n) in sizes]

    def __call__(self, x):
        *hidden, last = self.layers
        for layer in hidden:
            x = jax.nn.softplus(layer(x))
        return last(x)[0]


def main(learning_rate: float = 3e-3, seed: int = 0) -> tuple[Any, ...]:
    """What an example's `main` makes before its loop: the nested step, the model, the optimizer's state."""
    optim = optax.adam(learning_rate, eps=1e-5)

    @eqx.filter_value_and_grad
    def compute_loss(model, x, y):
        return jnp.mean(optax.sigmoid_binary_cross_entropy(jax.vmap(model)(x), y))

    @eqx.filter_jit
    def make_step(model, x, y, opt_state):
        loss, grads = compute_loss(model, x, y)
        updates, opt_state = optim.update(grads, opt_state)
        return loss, eqx.apply_updates(model, updates), opt_state

    model = Perceptron(jax.random.PRNGKey(seed))
    return make_step, model, optim.init(eqx.filter(model, eqx.is_inexact_array))


@step(
    "public equinox",
    batch={"x": 0, "y": 0},
    roles={"model": "params", "x": "batch", "y": "batch", "opt_state": "optimizer"},
    feeds={"model": 1, "opt_state": 2},
    notes="loss, optimizer and step are nested in a function",
)
def nested_in_main(seed: int = 0) -> Call:
    d = Draw(seed)
    make_step, model, opt_state = main(seed=seed)
    return Call(make_step, (model, d.normal(BATCH, 64), d.ids(2, BATCH).astype(jnp.float32), opt_state))


init_network, apply_network = stax.serial(
    stax.Dense(128), stax.Relu, stax.Dense(64), stax.Relu, stax.Dense(32), stax.LogSoftmax
)
opt_init, opt_update, get_params = optimizers.momentum(1e-2, mass=0.9)


@jax.jit
def packed_update(i, opt_state, batch):
    """The parameters lie in the optimizer's state, whose tuples the library packs."""

    def loss(params):
        inputs, targets = batch
        return -jnp.mean(jnp.sum(apply_network(params, inputs) * targets, axis=1))

    return opt_update(i, jax.grad(loss)(get_params(opt_state)), opt_state)


@step(
    "public",
    batch=IMAGES,
    roles={"i": "other", "opt_state": None, "batch": "batch"},
    feeds={"opt_state": ()},
    notes="parameters and momentum in one packed state; a counter that the caller keeps; one-hot targets",
)
def packed_state(seed: int = 0) -> Call:
    x, y = pictures(seed, 64)
    _, params = init_network(jax.random.PRNGKey(seed), (-1, 64))
    return Call(packed_update, (0, opt_init(params), (x, np.eye(32, dtype=np.float32)[y])))


PIECES = 4


@jax.jit
def accumulated_step(state, batch):
    """Gradients of four slices of the batch, added in a Python loop."""
    size = batch["image"].shape[0] // PIECES
    total, loss = jax.tree.map(jnp.zeros_like, state.params), 0.0
    for k in range(PIECES):
        piece = {name: x[k * size : (k + 1) * size] for name, x in batch.items()}

        def loss_fn(params, piece=piece):
            return cross_entropy(state.apply_fn({"params": params}, piece["image"]), piece["label"])

        value, grads = jax.value_and_grad(loss_fn)(state.params)
        total, loss = jax.tree.map(jnp.add, total, grads), loss + value / PIECES
    return state.apply_gradients(grads=jax.tree.map(lambda g: g / PIECES, total)), loss


QUIET = Classifier(dropout=0.0)


@step(
    "public linen",
    batch={"batch.image": 0, "batch.label": 0},
    roles=state_roles("state") | {"batch": "batch"},
    feeds={"state": 0},
    notes="four gradient calls of one loss, unrolled",
)
def accumulated_in_a_loop(seed: int = 0) -> Call:
    image, label = pictures(seed, 64)
    params = linen_variables(QUIET, seed, image[:1])["params"]
    state = TrainState.create(apply_fn=QUIET.apply, params=params, tx=adam)
    return Call(accumulated_step, (state, {"image": image, "label": label}))


class ScaledState(TrainState):
    dynamic_scale: Any = None


class Half(nn.Module):
    """Float32 weights, products in float16."""

    @nn.compact
    def __call__(self, x):
        for width in (128, 64):
            x = nn.silu(nn.Dense(width, dtype=jnp.float16)(x))
        return nn.Dense(32, dtype=jnp.float16)(x).astype(jnp.float32)


HALF = Half()
momentum = optax.sgd(0.1, momentum=0.9)  # Adam would make whole steps of what float16 leaves of a small gradient


@jax.jit
def scaled_step(state, batch):
    """A scale of the loss that grows while all gradients are finite; a step with others is undone."""

    def loss_fn(params):
        return cross_entropy(state.apply_fn({"params": params}, batch["image"]), batch["label"])

    scale, finite, loss, grads = state.dynamic_scale.value_and_grad(loss_fn)(state.params)
    new = state.apply_gradients(grads=grads)
    params = optax.tree.where(finite, new.params, state.params)
    opt_state = optax.tree.where(finite, new.opt_state, state.opt_state)
    new = new.replace(params=params, opt_state=opt_state, dynamic_scale=scale)
    return new, {"loss": loss, "scale": scale.scale}


@step(
    "public linen",
    batch={"batch.image": 0, "batch.label": 0},
    roles=state_roles("state", dynamic_scale=None) | {"batch": "batch"},
    feeds={"state": 0},
    tolerance=2e-2,
    notes="the library takes the gradient; a condition over all leaves",
)
def linen_dynamic_scale(seed: int = 0) -> Call:
    image, label = pictures(seed, 64)
    params = linen_variables(HALF, seed, image[:1])["params"]
    state = ScaledState.create(
        apply_fn=HALF.apply, params=params, tx=momentum, dynamic_scale=DynamicScale(scale=1024.0)
    )
    return Call(scaled_step, (state, {"image": image, "label": label}))


@jax.jit
def best_kept_step(carry, batch):
    """One carry for everything, the best parameters so far in it, and a plateau's factor on the rate."""
    params, opt_state, best, plateau = carry
    x, y = batch
    loss, grads = jax.value_and_grad(lambda p: cross_entropy(mlp(p, x), y))(params)
    better = loss < best["loss"]
    best = {
        "loss": jnp.minimum(loss, best["loss"]),
        "params": optax.tree.where(better, params, best["params"]),
    }
    updates, opt_state = adam.update(grads, opt_state, params)
    updates, plateau = reducing.update(updates, plateau, value=loss)
    return (optax.apply_updates(params, updates), opt_state, best, plateau), loss


reducing = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=1)


@step(
    "public optax",
    batch=IMAGES,
    roles={
        "carry.0": "params",
        "carry.1": "optimizer",
        "carry.2": "other",
        "carry.3": None,
        "batch": "batch",
    },
    feeds={"carry": 0},
    notes="a copy of the parameters that is chosen by the loss",
)
def best_parameters_kept(seed: int = 0) -> Call:
    params = mlp_params(Draw(seed), 64, 128, 64, 32)
    best = {"loss": jnp.asarray(jnp.inf), "params": jax.tree.map(jnp.copy, params)}
    return Call(best_kept_step, ((params, adam.init(params), best, reducing.init(params)), pictures(seed, 64)))
