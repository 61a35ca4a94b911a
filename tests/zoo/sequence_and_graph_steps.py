"""Recurrent networks over time, and a graph whose leaves have no batch dimension."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .parts import BATCH, Draw, adam, cross_entropy, descend
from .registry import Call, step

IN, HIDDEN, CLASSES, TIME = 64, 128, 32, 12


def gru_params(d: Draw) -> dict[str, jax.Array]:
    return {
        "input": d.weight(IN, 3 * HIDDEN),
        "hidden": d.weight(HIDDEN, 3 * HIDDEN),
        "bias": jnp.zeros(3 * HIDDEN),
        "out": d.weight(HIDDEN, CLASSES),
    }


def gru_cell(p: dict[str, jax.Array], h: jax.Array, x: jax.Array) -> jax.Array:
    """Gates fused into one product each for input and hidden state, (batch, 3 hidden)."""
    xr, xz, xn = jnp.split(x @ p["input"] + p["bias"], 3, axis=-1)
    hr, hz, hn = jnp.split(h @ p["hidden"], 3, axis=-1)
    z = jax.nn.sigmoid(xz + hz)
    return (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h


@jax.jit
def batch_major_step(params, opt_state, batch):
    def loss_fn(p):
        start = jnp.zeros((batch["x"].shape[0], HIDDEN))
        last, _ = jax.lax.scan(lambda h, x: (gru_cell(p, h, x), None), start, jnp.swapaxes(batch["x"], 0, 1))
        return cross_entropy(last @ p["out"], batch["y"])

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@step(
    "plain rnn",
    batch={"batch.x": 0, "batch.y": 0},
    roles={"params": "params", "opt_state": "optimizer", "batch": "batch"},
    feeds={"params": 0, "opt_state": 1},
)
def gru_batch_major(seed: int = 0) -> Call:
    """One label for each sequence; x is (batch, time, feature)."""
    d = Draw(seed)
    params, batch = gru_params(d), {"x": d.normal(BATCH, TIME, IN), "y": d.ids(CLASSES, BATCH)}
    return Call(batch_major_step, (params, adam.init(params), batch))


@jax.jit
def truncated_step(params, h, xs, ys):
    def loss_fn(p):
        def tick(h, x):
            h = jnp.tanh(x @ p["input"] + h @ p["hidden"])
            return h, h @ p["out"]

        last, logits = jax.lax.scan(tick, h, xs)
        return cross_entropy(logits, ys), last

    (loss, h), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return descend(params, grads), h, loss


@step(
    "plain rnn",
    batch={"h": 0, "xs": 1, "ys": 1},
    roles={"params": "params", "h": None, "xs": "batch", "ys": "batch"},
    feeds={"params": 0, "h": 1},
    notes="x is (time, batch, feature); the hidden state goes in and comes out, truncated backpropagation",
)
def rnn_time_major(seed: int = 0) -> Call:
    d = Draw(seed)
    params = {"input": d.weight(IN, HIDDEN), "hidden": d.weight(HIDDEN, HIDDEN)}
    params |= {"out": d.weight(HIDDEN, CLASSES)}
    xs, ys = d.normal(TIME, BATCH, IN), d.ids(CLASSES, TIME, BATCH)
    return Call(truncated_step, (params, d.normal(BATCH, HIDDEN), xs, ys))


@jax.jit
def epoch_step(params, opt_state, data):
    """All batches of an epoch in one scan."""

    def one(carry, batch):
        params, opt_state = carry
        x, y = batch
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2))(params)
        updates, opt_state = adam.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    (params, opt_state), losses = jax.lax.scan(one, (params, opt_state), data)
    return params, opt_state, losses


@step(
    "plain scan",
    batch={"data.0": 1, "data.1": 1},
    roles={"params": "params", "opt_state": "optimizer", "data": "batch"},
    feeds={"params": 0, "opt_state": 1},
    notes="data is (batches, batch, feature)",
)
def epoch_in_one_scan(seed: int = 0) -> Call:
    d = Draw(seed)
    params = {"a": d.weight(IN, 256), "b": d.weight(256, CLASSES)}
    data = d.normal(4, BATCH, IN), d.normal(4, BATCH, CLASSES)
    return Call(epoch_step, (params, adam.init(params), data))


def message_passing(params: dict[str, Any], graph: dict[str, Any]) -> jax.Array:
    """Two rounds along the edges, then a mean over each graph's nodes: logits (graphs, classes)."""
    nodes, number = graph["nodes"] @ params["embed"], graph["nodes"].shape[0]
    for p in params["rounds"]:
        sent = jnp.concatenate([nodes[graph["senders"]], graph["edges"]], axis=-1)
        messages = jax.nn.gelu(sent @ p["message"])
        received = jax.ops.segment_sum(messages, graph["receivers"], number)
        nodes = nodes + jnp.tanh(jnp.concatenate([nodes, received], axis=-1) @ p["update"])
    total = jax.ops.segment_sum(nodes, graph["graph_of_node"], graph["labels"].shape[0])
    return total / graph["nodes_of_graph"][:, None] @ params["head"]


@jax.jit
def graph_step(params, graph):
    def loss_fn(p):
        losses = optax.softmax_cross_entropy_with_integer_labels(message_passing(p, graph), graph["labels"])
        return jnp.mean(losses)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return descend(params, grads), loss


@step(
    "plain graph",
    batch={"graph.nodes": 0, "graph.edges": 0, "graph.senders": 0, "graph.receivers": 0}
    | {"graph.graph_of_node": 0, "graph.nodes_of_graph": 0, "graph.labels": 0},
    roles={"params": "params", "graph": "batch"},
    feeds={"params": 0},
    notes="16 graphs in one: 128 nodes, 256 edges; no leaf has the batch dimension of another",
)
def graph_network(seed: int = 0) -> Call:
    d, width = Draw(seed), 64
    owner = jnp.repeat(jnp.arange(BATCH), 8)
    edge_owner = jnp.repeat(jnp.arange(BATCH), 16)
    layer = {"message": (width + 16, 128), "update": (width + 128, width)}
    rounds = [{name: d.weight(*shape) for name, shape in layer.items()} for _ in range(2)]
    params = {"embed": d.weight(32, width), "rounds": rounds, "head": d.weight(width, CLASSES)}
    graph = {
        "nodes": d.normal(BATCH * 8, 32),
        "edges": d.normal(BATCH * 16, 16),
        "senders": edge_owner * 8 + d.ids(8, BATCH * 16),
        "receivers": edge_owner * 8 + d.ids(8, BATCH * 16),
        "graph_of_node": owner,
        "nodes_of_graph": jnp.full(BATCH, 8.0),
        "labels": d.ids(CLASSES, BATCH),
    }
    return Call(graph_step, (params, graph))
