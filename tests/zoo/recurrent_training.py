"""Networks over time as they are trained: characters with a state that is carried on, both ways, linear recurrences."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .parts import BATCH, Draw, adam, cross_entropy
from .registry import Call, step

VOCAB, WIDTH, HIDDEN, TIME = 64, 32, 64, 12


def lstm_params(d: Draw, n_in: int, n: int) -> dict[str, jax.Array]:
    return {"w": d.weight(n_in + n, 4 * n), "b": jnp.zeros(4 * n)}


def lstm(p: dict[str, jax.Array], carry: tuple[jax.Array, jax.Array], x: jax.Array):
    h, c = carry
    i, f, g, o = jnp.split(jnp.concatenate([x, h], axis=-1) @ p["w"] + p["b"], 4, axis=-1)
    c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def unrolled(params, state, inputs):
    """Two LSTM layers in one scan over time: logits (batch, time, vocabulary), and the last state."""

    def tick(state, x):
        first, h = lstm(params["lstm1"], state[0], x)
        second, h = lstm(params["lstm2"], state[1], h)
        return (first, second), h

    x = jnp.swapaxes(params["embed"][inputs], 0, 1)
    state, hs = jax.lax.scan(tick, state, x)
    return jnp.swapaxes(hs, 0, 1) @ params["out"], state


clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3, eps=1e-5))


@jax.jit
def character_step(params, opt_state, carried, tokens):
    def loss_fn(p):
        logits, state = unrolled(p, carried, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]), state

    (loss, carried), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = clipped.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, carried, loss


@step(
    "public rnn scan",
    batch={"tokens": 0, "carried.0.0": 0, "carried.0.1": 0, "carried.1.0": 0, "carried.1.1": 0},
    roles={"params": "params", "opt_state": "optimizer", "carried": None, "tokens": "batch"},
    feeds={"params": 0, "opt_state": 1, "carried": 2},
    notes="one array of tokens; the state of each example goes on to the next call",
)
def lstm_characters(seed: int = 0) -> Call:
    d = Draw(seed)
    params = {"embed": d.normal(VOCAB, WIDTH), "out": d.weight(HIDDEN, VOCAB)}
    params |= {"lstm1": lstm_params(d, WIDTH, HIDDEN), "lstm2": lstm_params(d, HIDDEN, HIDDEN)}
    zeros = jnp.zeros((BATCH, HIDDEN))
    carried = ((zeros, zeros), (zeros + 0, zeros + 0))
    return Call(character_step, (params, clipped.init(params), carried, d.ids(VOCAB, BATCH, TIME + 1)))


class BothWays(nnx.Module):
    """Reads a sentence from both ends; its mean says whether it is kind."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        forward, backward = (nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, HIDDEN, rngs=rngs)) for _ in range(2))
        self.rnn = nnx.Bidirectional(forward, backward)
        self.head = nnx.Linear(2 * HIDDEN, 1, rngs=rngs)

    def __call__(self, words, lengths):
        states = self.rnn(self.embed(words), seq_lengths=lengths)
        read = (jnp.arange(words.shape[1]) < lengths[:, None])[..., None]
        return self.head(jnp.sum(states * read, axis=1) / lengths[:, None])[:, 0]


@nnx.jit
def kindness_step(model, optimizer, batch):
    def loss_fn(model):
        logits = model(batch["words"], batch["lengths"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["kind"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@step(
    "public nnx rnn scan",
    batch={"batch.words": 0, "batch.lengths": 0, "batch.kind": 0},
    roles={"model": "params", "optimizer": "optimizer", "optimizer.step": None, "batch": "batch"}
    | {f"model.rnn.{way}_rnn.{inner}": "rng" for way in ("forward", "backward") for inner in ("rngs", "cell.rngs")}
    | {"model.rnn.rngs": "rng"},
    mutates=True,
    notes="sentences of different lengths, turned around each by its own",
)
def nnx_both_ways(seed: int = 0) -> Call:
    d, model = Draw(seed), BothWays(nnx.Rngs(seed))
    batch = {"words": d.ids(VOCAB, BATCH, TIME), "lengths": TIME - d.ids(6, BATCH)}
    batch["kind"] = d.ids(2, BATCH).astype(jnp.float32)
    return Call(kindness_step, (model, nnx.Optimizer(model, adam, wrt=nnx.Param), batch))


def recurrent_layer(p, x):
    """h = a h + b x for all times at once, gated, beside the input: (batch, time, width)."""
    decay = jnp.exp(-jax.nn.softplus(x @ p["decay"]))
    gain = jnp.sqrt(1 - decay**2 + 1e-6) * (x @ p["in"])

    def join(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    _, h = jax.lax.associative_scan(join, (decay, gain), axis=1)
    return x + (h * jax.nn.silu(x @ p["gate"])) @ p["out"]


@jax.jit
def recurrence_step(params, opt_state, tokens):
    def loss_fn(p):
        x = p["embed"][tokens[:, :-1]]
        x, _ = jax.lax.scan(lambda x, layer: (recurrent_layer(layer, x), None), x, p["layers"])
        return cross_entropy(x @ p["head"], tokens[:, 1:])

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@step(
    "public rnn scan",
    batch={"tokens": 0},
    roles={"params": "params", "opt_state": "optimizer", "tokens": "batch"},
    feeds={"params": 0, "opt_state": 1},
    notes="a scan over stacked layers, in each an associative scan over time",
)
def linear_recurrences(seed: int = 0) -> Call:
    d = Draw(seed)
    shapes = {
        "decay": (WIDTH, HIDDEN),
        "in": (WIDTH, HIDDEN),
        "gate": (WIDTH, HIDDEN),
        "out": (HIDDEN, WIDTH),
    }
    layers = {k: jnp.stack([d.weight(*shape) for _ in range(4)]) for k, shape in shapes.items()}
    params = {"embed": d.normal(VOCAB, WIDTH), "layers": layers, "head": d.weight(WIDTH, VOCAB)}
    return Call(recurrence_step, (params, adam.init(params), d.ids(VOCAB, BATCH, TIME + 1)))
